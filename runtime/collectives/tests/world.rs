//! Nodes, agreement, and devices whose memory the host cannot see.

mod support;
mod thousands;

use moesaic_collectives::{
    Algorithm, Collectives, CommElement, Communicator, NodeShape, Reduction, Topology, agree,
    threads,
};
use moesaic_cpu::CpuDevice;
use moesaic_kernel::Entry;
use moesaic_target::{Artifact, Buffer, Device, DeviceError, DeviceInfo, Module, Ptr};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use support::{call, every_operation, part, read, slice, unset};

fn cpu(_rank: usize) -> Result<Arc<dyn Device>, DeviceError> {
    Ok(Arc::new(CpuDevice::with_threads(1)?))
}

/// Returns the results of all ranks, none of which panics.
fn run<T: Send>(ranks: usize, body: impl Fn(Communicator) -> T + Sync) -> Vec<T> {
    let results = threads::run(ranks, cpu, body).unwrap();
    results.into_iter().map(|result| result.unwrap()).collect()
}

#[test]
fn the_shape_of_nodes_follows_from_host_names() {
    let shapes = |hosts: &'static [&'static str]| {
        let topologies = run(hosts.len(), |mut world| {
            let host = hosts[world.rank()];
            Topology::of(&mut world, host, &call("hosts")).unwrap()
        });
        assert!(topologies.iter().all(|topology| topology.hosts == hosts));
        topologies[0].shape
    };
    let even = NodeShape {
        nodes: 2,
        per_node: 2,
    };
    assert_eq!(shapes(&["a", "a", "b", "b"]), Some(even));
    assert_eq!(shapes(&["a", "a", "b"]), None);
    assert_eq!(shapes(&["a", "b", "a", "b"]), None);
    let here = run(2, |mut world| {
        Topology::gather(&mut world, &call("hosts")).unwrap()
    });
    assert_eq!(here[0].shape.unwrap().per_node, 2);
}

#[test]
fn thirty_two_ranks_on_four_nodes_exchange_in_two_steps() {
    let outputs = run(32, |mut world| {
        let device = Arc::clone(world.device());
        let (rank, ranks) = (world.rank(), world.size());
        let host = format!("node{}", rank / 8);
        let shape = Topology::of(&mut world, &host, &call("hosts"))
            .unwrap()
            .shape;
        let algorithm = Algorithm::Hierarchical(shape.unwrap());
        let input: Vec<u8> = (0..ranks).flat_map(|q| part(rank, q, 24)).collect();
        let from = slice(&device, CommElement::U8, &input);
        let to = unset(&device, CommElement::U8, 24 * ranks);
        let handle = world.all_to_all(&from, &to, algorithm, &call("dispatch"));
        handle.unwrap().wait().unwrap();
        read(&device, &to)
    });
    for (rank, output) in outputs.iter().enumerate() {
        let expected: Vec<u8> = (0..32).flat_map(|p| part(p, rank, 24)).collect();
        assert!(*output == expected, "rank {rank}");
    }
}

#[test]
fn ranks_that_do_not_run_the_same_are_named_with_what_differs() {
    let errors = run(3, |mut world| {
        let spec = format!("experts = {}", if world.rank() == 2 { 16 } else { 8 });
        let mut values = vec![("spec", spec.as_str()), ("dtype", "bf16")];
        if world.rank() == 1 {
            values.push(("library", "0.2"));
        }
        let error = agree(&mut world, &values, &call("agree")).unwrap_err();
        // A disagreement does not fail the group: all ranks can continue.
        world.barrier(&call("after")).unwrap().wait().unwrap();
        error.to_string()
    });
    let expected = "the ranks do not agree: `library` is not given on rank 0 and `0.2` on rank 1; \
                    `spec` is `experts = 8` on rank 0 and `experts = 16` on rank 2";
    assert_eq!(errors, vec![expected; 3]);
}

#[test]
fn ranks_that_run_the_same_agree() {
    let results = run(4, |mut world| {
        agree(&mut world, &[("spec", "a"), ("plan", "")], &call("agree"))
    });
    assert!(results.iter().all(Result::is_ok));
}

/// A device whose addresses mean nothing to the host, and that runs work only when somebody
/// waits: an upload takes effect with the next download or wait.
struct Far {
    info: DeviceInfo,
    memory: Arc<Mutex<Memory>>,
}

#[derive(Default)]
struct Memory {
    bytes: BTreeMap<u64, Vec<u8>>,
    late: Vec<(u64, usize, Vec<u8>)>,
}

impl Far {
    fn new() -> Far {
        let info = CpuDevice::with_threads(1).unwrap().info().clone();
        Far {
            info: DeviceInfo {
                target: "cuda:sm_90a".parse().unwrap(),
                ..info
            },
            memory: Arc::default(),
        }
    }
}

impl Device for Far {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn load(&self, _: &Artifact, _: &[Entry]) -> Result<Arc<dyn Module>, DeviceError> {
        unreachable!("nothing is launched")
    }

    fn alloc(&self, bytes: usize) -> Result<Buffer, DeviceError> {
        let mut memory = self.memory.lock().unwrap();
        let address = memory.bytes.len() as u64 + 1;
        memory.bytes.insert(address << 32, vec![0; bytes]);
        Ok(Buffer::new(Ptr(address << 32), bytes, Box::new(())))
    }

    fn upload(&self, bytes: &[u8], buffer: &Buffer, offset: usize) -> Result<(), DeviceError> {
        buffer.range("upload", offset, bytes.len())?;
        let late = (buffer.ptr().0, offset, bytes.to_vec());
        self.memory.lock().unwrap().late.push(late);
        Ok(())
    }

    fn download(&self, buffer: &Buffer, offset: usize, to: &mut [u8]) -> Result<(), DeviceError> {
        buffer.range("download", offset, to.len())?;
        self.synchronize()?;
        let memory = self.memory.lock().unwrap();
        to.copy_from_slice(&memory.bytes[&buffer.ptr().0][offset..offset + to.len()]);
        Ok(())
    }

    fn synchronize(&self) -> Result<(), DeviceError> {
        let mut memory = self.memory.lock().unwrap();
        for (address, offset, bytes) in std::mem::take(&mut memory.late) {
            let buffer = memory.bytes.get_mut(&address).unwrap();
            buffer[offset..offset + bytes.len()].copy_from_slice(&bytes);
        }
        Ok(())
    }
}

#[test]
fn buffers_that_the_host_does_not_see_go_through_copies() {
    let device = |_| Ok(Arc::new(Far::new()) as Arc<dyn Device>);
    let results = threads::run(3, device, |mut world| {
        let device = Arc::clone(world.device());
        every_operation(&mut world, &device);
        world.finish(&call("finish")).unwrap();
    });
    assert!(results.unwrap().iter().all(Result::is_ok));
}

#[test]
fn what_lies_behind_the_counts_is_left_alone() {
    let device = |_| Ok(Arc::new(Far::new()) as Arc<dyn Device>);
    let results = threads::run(2, device, |mut world| {
        let device = Arc::clone(world.device());
        let from = slice(&device, CommElement::U8, &[1, 2, 3, 4]);
        let to = slice(&device, CommElement::U8, &[9; 6]);
        let (counts, direct) = ([1, 1], Algorithm::Direct);
        let handle = world.all_to_all_v(&from, &counts, &to, &counts, direct, &call(""));
        handle.unwrap().wait().unwrap();
        (world.rank(), read(&device, &to))
    });
    for result in results.unwrap() {
        let (rank, bytes) = result.unwrap();
        let part = rank as u8 + 1;
        assert_eq!(bytes, [part, part, 9, 9, 9, 9]);
    }
}

#[test]
fn every_type_is_reduced_by_every_rule() {
    for element in CommElement::ALL {
        for reduction in Reduction::ALL {
            let outputs = run(3, move |mut world| {
                let device = Arc::clone(world.device());
                let small = |value: u8| -> Vec<u8> {
                    match element {
                        CommElement::U8 => vec![value],
                        CommElement::I32 => i32::from(value).to_ne_bytes().to_vec(),
                        CommElement::I64 => i64::from(value).to_ne_bytes().to_vec(),
                        CommElement::F32 => f32::from(value).to_ne_bytes().to_vec(),
                        CommElement::Bf16 => half::bf16::from(value).to_ne_bytes().to_vec(),
                        CommElement::F16 => half::f16::from(value).to_ne_bytes().to_vec(),
                    }
                };
                let values = [4u8, 9, 6];
                let rank = world.rank();
                let data = slice(&device, element, &small(values[rank]));
                let handle = world.all_reduce(&data, &data, reduction, &call("all"));
                handle.unwrap().wait().unwrap();
                let expected = match reduction {
                    Reduction::Sum => 19,
                    Reduction::Max => 9,
                    Reduction::Min => 4,
                };
                (read(&device, &data), small(expected))
            });
            for (got, expected) in outputs {
                assert_eq!(got, expected, "{reduction} of {element}");
            }
        }
    }
}
