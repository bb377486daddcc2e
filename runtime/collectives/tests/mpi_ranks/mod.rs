//! The ranks' side of the tests under MPI.

use crate::nccl_fake::Lab;
use crate::support::{call, every_operation, part, read, slice, unset};
use moesaic_collectives::{
    Algorithm, Call, CollectiveError, Collectives, CommElement, Communicator, Slice, Topology,
    agree, mpi,
};
use moesaic_cpu::CpuDevice;
use std::sync::Arc;
use std::time::Duration;

#[test]
#[ignore = "started by the other tests, under mpiexec"]
fn a_rank() {
    let case = std::env::var("MOESAIC_RANK_CASE").expect("it is started under mpiexec");
    if case == "nccl" {
        return nccl_over_mpi();
    }
    let device = Arc::new(CpuDevice::with_threads(1).unwrap());
    let world = match mpi::start(&mpi::MpiOptions::default(), device) {
        Ok(world) => world,
        Err(error) => {
            eprintln!("{error}");
            std::process::exit(1);
        }
    };
    if case == "operations" {
        return operations(world);
    }
    if case == "large" {
        return large(world);
    }
    let rank = world.rank();
    // The world is dropped while a panic unwinds, as in a program without `catch_unwind`.
    let body = std::panic::AssertUnwindSafe(move || failing(&case, &mut { world }));
    match std::panic::catch_unwind(body) {
        Ok(Err(error)) => println!("survivor {rank}: {error}"),
        Ok(Ok(())) => println!("rank {rank} has seen no error"),
        Err(_) => println!("rank {rank} has panicked"),
    }
    // Wait until every rank has printed its line, before the launcher ends the job.
    std::thread::sleep(Duration::from_secs(3));
    std::process::exit(1);
}

fn operations(mut world: Communicator) {
    let device = Arc::clone(world.device());
    every_operation(&mut world, &device);
    let topology = Topology::gather(&mut world, &call("hosts")).unwrap();
    let shape = topology.shape.unwrap();
    assert_eq!((shape.nodes, shape.per_node), (1, world.size()));
    agree(&mut world, &[("spec", "s"), ("plan", "p")], &call("agree")).unwrap();
    let found = mpi::probe(&mpi::MpiOptions::default()).unwrap();
    println!(
        "{} did every operation by {}",
        world.transport(),
        found.interface
    );
    world.finish(&call("finish")).unwrap();
}

fn short(label: &str) -> Call {
    Call::new(label).within(Duration::from_secs(2))
}

fn dispatch(world: &mut Communicator, call: &Call) -> Result<(), CollectiveError> {
    let device = Arc::clone(world.device());
    let (from, to) = (
        unset(&device, CommElement::U8, 120_000),
        unset(&device, CommElement::U8, 120_000),
    );
    world
        .all_to_all(&from, &to, Algorithm::Direct, call)?
        .wait()
}

fn failing(case: &str, world: &mut Communicator) -> Result<(), CollectiveError> {
    let (rank, last) = (world.rank(), world.size() - 1);
    world.barrier(&call("first"))?.wait()?;
    match case {
        "late" if rank == last => {
            std::thread::sleep(Duration::from_secs(4));
            dispatch(world, &short("dispatch"))
        }
        "stopped" if rank == last => signal("STOP", world),
        "killed" if rank == last => {
            println!("rank {rank} ends itself");
            std::thread::sleep(Duration::from_secs(1));
            signal("KILL", world)
        }
        // Only the launcher can end the others in time.
        "killed" => dispatch(world, &Call::new("").within(Duration::from_secs(600))),
        "panicked" if rank == 1 => panic!("an accident"),
        "counts" => wrong_counts(world),
        "skipped" => skipped(world),
        "disagreement" => {
            let plan = ["a", "b"][rank % 2];
            agree(world, &[("spec", "s"), ("plan", plan)], &short("agree"))
        }
        _ => dispatch(world, &short("dispatch")),
    }
}

fn signal(name: &str, world: &mut Communicator) -> Result<(), CollectiveError> {
    let own = std::process::id().to_string();
    let sent = std::process::Command::new("kill")
        .args([&format!("-{name}"), &own])
        .status();
    assert!(sent.unwrap().success());
    // Another thread of this process may receive the signal; nothing may be sent until it has.
    std::thread::sleep(Duration::from_secs(4));
    dispatch(world, &short("dispatch"))
}

/// Rank 1 expects one element more than rank 0 sends. Rank 0 may have done its part by then, and
/// learns of the failure in the next operation.
fn wrong_counts(world: &mut Communicator) -> Result<(), CollectiveError> {
    let device = Arc::clone(world.device());
    let counts = [100_000, 100_000];
    let receives = [100_000 + world.rank(), 100_000];
    let (from, to) = (
        unset(&device, CommElement::F32, 200_000),
        unset(&device, CommElement::F32, 200_001),
    );
    let direct = Algorithm::Direct;
    world
        .all_to_all_v(&from, &counts, &to, &receives, direct, &short("combine"))?
        .wait()?;
    world.barrier(&short("after"))?.wait()
}

fn skipped(world: &mut Communicator) -> Result<(), CollectiveError> {
    for step in 0..4 {
        if world.rank() == 1 && step == 2 {
            continue;
        }
        let device = Arc::clone(world.device());
        let own = slice(&device, CommElement::U8, &part(world.rank(), 0, 10));
        let to = unset(&device, CommElement::U8, 20);
        world
            .all_gather(&own, &to, &short(&format!("step {step}")))?
            .wait()?;
    }
    Ok(())
}

/// One message whose size does not fit in 31 bits.
fn large(mut world: Communicator) {
    let device = Arc::clone(world.device());
    let bytes = 2_200_000_000;
    let buffer: Arc<moesaic_target::Buffer> = Arc::new(device.alloc(bytes).unwrap());
    let ends = |at| Slice::new(&buffer, CommElement::U8, at, 1000).unwrap();
    let places = [0, 1 << 30, (1 << 31) - 500, bytes - 1000];
    if world.rank() == 0 {
        for place in places {
            device
                .upload(&part(0, place % 97, 1000), &buffer, place)
                .unwrap();
        }
    }
    let data = Slice::whole(&buffer, CommElement::U8);
    let patient = Call::new("large").within(Duration::from_secs(45));
    world.broadcast(&data, 0, &patient).unwrap().wait().unwrap();
    for place in places {
        assert!(
            read(&device, &ends(place)) == part(0, place % 97, 1000),
            "at {place}"
        );
    }
    println!("{bytes} bytes arrived");
    world.finish(&call("finish")).unwrap();
}

/// The ranks' introductions go over MPI. The stand-in for NCCL joins threads, not processes, so
/// only a rank alone gets further.
fn nccl_over_mpi() {
    let lab = Lab::new();
    let device = lab.device_at(0, "0000:17:00");
    let options = moesaic_collectives::nccl::NcclOptions {
        meeting: Some(moesaic_collectives::nccl::Meeting::Mpi),
        ..lab.options()
    };
    match moesaic_collectives::nccl::start(Arc::clone(&device) as _, &options) {
        Err(error) => {
            println!("refused: {error}");
            // As in `a_rank`: a launcher ends the job when one rank of it is gone.
            std::thread::sleep(Duration::from_secs(3));
        }
        Ok(mut world) => {
            let device: Arc<dyn moesaic_target::Device> = device;
            every_operation(&mut world, &device);
            world.finish(&call("finish")).unwrap();
            lab.legal();
            println!("did every operation by NCCL over MPI");
        }
    }
}
