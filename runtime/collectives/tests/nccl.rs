//! Ranks with a GPU each, against a stand-in for NCCL. No test here has run on a real GPU.

mod nccl_fake;
mod support;

use moesaic_collectives::nccl::{Checks, Nccl, NcclOptions, Sums};
use moesaic_collectives::{
    Algorithm, Call, CollectiveError, Collectives, CommElement, NodeShape, Reduction,
};
use moesaic_target::Device;
use nccl_fake::{Gpu, Lab, OnStream};
use std::sync::Arc;
use std::time::Duration;
use support::{call, every_operation, part, read, slice, unset};

fn by_default(lab: &Lab) -> impl Fn(usize, &Arc<Gpu>) -> NcclOptions + Sync {
    move |_, _| lab.options()
}

/// Sums on the device's stream.
fn on_stream(lab: &Lab) -> impl Fn(usize, &Arc<Gpu>) -> NcclOptions + Sync {
    move |_, gpu| NcclOptions {
        fold: Some(Arc::new(OnStream(Arc::clone(gpu)))),
        ..lab.options()
    }
}

fn short(label: &str) -> Call {
    Call::new(label).within(Duration::from_millis(500))
}

/// Returns each rank's error.
fn errors(
    lab: &Lab,
    ranks: usize,
    body: impl Fn(&mut Nccl) -> Result<(), CollectiveError> + Sync,
) -> Vec<Option<String>> {
    let results = lab.run(ranks, by_default(lab), |world| body(&mut world.unwrap()));
    let text = |result: Option<Result<(), CollectiveError>>| match result {
        Some(Err(error)) => Some(error.to_string()),
        Some(Ok(())) => panic!("a rank has seen no error"),
        None => None,
    };
    let errors = results.into_iter().map(text).collect();
    lab.legal();
    errors
}

#[track_caller]
fn says(error: &Option<String>, words: &[&str]) {
    let text = error.as_deref().expect("this rank has an error");
    for word in words {
        assert!(text.contains(word), "`{word}` is not in: {text}");
    }
}

fn gather(world: &mut Nccl, call: &Call) -> Result<(), CollectiveError> {
    let device = Arc::clone(world.device());
    let own = slice(&device, CommElement::U8, &part(world.rank(), 0, 600));
    let all = unset(&device, CommElement::U8, 600 * world.size());
    world.all_gather(&own, &all, call)?.wait()
}

#[test]
fn every_operation_on_one_to_four_ranks() {
    for (ranks, without, host) in [
        (1, false, false),
        (2, false, true),
        (3, true, false),
        (4, false, false),
        (4, true, true),
    ] {
        let lab = Lab::with(without);
        let body = |world: Result<Nccl, CollectiveError>| {
            let mut world = world.unwrap();
            assert_eq!(world.transport(), "NCCL 2.28.3");
            let device = Arc::clone(world.device());
            every_operation(&mut world, &device);
            world.finish(&call("finish")).unwrap();
        };
        let results = if host {
            lab.run(ranks, by_default(&lab), body)
        } else {
            lab.run(ranks, on_stream(&lab), body)
        };
        assert!(results.iter().all(Option::is_some), "{ranks} ranks");
        lab.legal();
        assert_eq!(lab.live(), 0, "communicators were left");
    }
}

/// The library sums in another order, which makes no difference for whole numbers.
#[test]
fn sums_may_be_the_librarys() {
    let lab = Lab::new();
    let options = |_: usize, _: &Arc<Gpu>| NcclOptions {
        sums: Sums::Library,
        ..lab.options()
    };
    let values = [1e8f32, 1.0, -1e8];
    let results = lab.run(3, options, |world| {
        let mut world = world.unwrap();
        let device = Arc::clone(world.device());
        let rank = world.rank();
        let data = slice(&device, CommElement::F32, &values[rank].to_ne_bytes());
        let sum = world.all_reduce(&data, &data, Reduction::Sum, &call("sum"));
        sum.unwrap().wait().unwrap();
        let numbers: Vec<u8> = (0..3).flat_map(|i: i32| (i * 10).to_ne_bytes()).collect();
        let all = slice(&device, CommElement::I32, &numbers);
        let own = unset(&device, CommElement::I32, 1);
        let sum = world.reduce_scatter(&all, &own, Reduction::Sum, &call("scatter"));
        sum.unwrap().wait().unwrap();
        let parts = [[0, 1, 2].as_slice(), &[], &[3, 4]];
        let counts = parts.map(<[i32]>::len);
        let all: Vec<u8> = parts
            .concat()
            .iter()
            .flat_map(|i| i.to_ne_bytes())
            .collect();
        let all = slice(&device, CommElement::I32, &all);
        let part = unset(&device, CommElement::I32, counts[rank]);
        let (reduction, call) = (Reduction::Sum, call("scatter unequally"));
        let sum = world.reduce_scatter_v(&all, &counts, &part, reduction, &call);
        sum.unwrap().wait().unwrap();
        let unequal = parts[rank].iter().flat_map(|i| (3 * i).to_ne_bytes());
        assert_eq!(read(&device, &part), unequal.collect::<Vec<u8>>());
        let results = (read(&device, &data), read(&device, &own));
        world.finish(&support::call("finish")).unwrap();
        results
    });
    let backwards = (values[2] + values[1]) + values[0];
    for (rank, result) in results.into_iter().enumerate() {
        let (sum, own) = result.unwrap();
        assert_eq!(sum, backwards.to_ne_bytes());
        assert_eq!(own, (rank as i32 * 30).to_ne_bytes());
    }
    lab.legal();
}

#[test]
fn a_late_rank_is_named_with_what_it_did_last() {
    let lab = Lab::new();
    let errors = errors(&lab, 3, |world| {
        world.barrier(&call("first"))?.wait()?;
        if world.rank() == 2 {
            std::thread::sleep(Duration::from_millis(3000));
        }
        gather(world, &short("layer 3"))
    });
    let first = usize::from(!errors[0].as_ref().unwrap().contains("not finished"));
    says(
        &errors[first],
        &[
            "operation 1 `all_gather` (layer 3), phase `agreement`: not finished after",
            "waiting for rank 2 (last heard of in operation 0 `barrier`)",
        ],
    );
    says(&errors[2], &["rank 2", "gave up"]);
    assert_eq!(lab.live(), 0, "kernels were left waiting");
}

/// Every rank calls the operation, and on one device it never ends.
#[test]
fn a_transfer_that_hangs_ends_at_its_deadline() {
    let lab = Lab::new();
    lab.set("hang_rank", 1);
    lab.set("hang_at", 1);
    let errors = errors(&lab, 3, |world| {
        world.barrier(&call("first"))?.wait()?;
        gather(world, &short("stuck"))
    });
    let all = errors.iter().flatten().cloned().collect::<String>();
    let words = "operation 1 `all_gather` (stuck), phase `transfer`: not finished after";
    assert!(all.contains(words), "{all}");
    for error in &errors {
        says(error, &["`all_gather` (stuck)"]);
    }
    assert_eq!(lab.live(), 0, "kernels were left waiting");
}

/// A wait inside the driver knows no deadline: only an abort from another thread ends it.
#[test]
fn a_wait_for_the_device_ends_with_the_operation_in_it() {
    let lab = Lab::new();
    lab.set("hang_rank", 1);
    let errors = errors(&lab, 2, |world| {
        let device = Arc::clone(world.device());
        let own = slice(&device, CommElement::U8, &part(world.rank(), 0, 600));
        let all = unset(&device, CommElement::U8, 1200);
        drop(world.all_gather(&own, &all, &short("dropped"))?);
        device.synchronize().unwrap();
        world.barrier(&call("after"))?.wait()
    });
    for error in &errors {
        says(
            error,
            &["barrier", "`all_gather` (dropped)", "not finished after"],
        );
    }
}

#[test]
fn what_the_library_finds_later_is_an_error_in_its_words() {
    let lab = Lab::new();
    lab.set("fail_rank", 0);
    lab.set("fail_at", 1);
    let errors = errors(&lab, 2, |world| {
        world.barrier(&call("first"))?.wait()?;
        gather(world, &call("lost"))
    });
    says(
        &errors[0],
        &[
            "operation 1 `all_gather` (lost), phase `transfer`: NCCL 2.28.3 failed",
            "a remote error (code 6): the last words",
        ],
    );
    says(&errors[1], &["rank 0 gave up"]);
}

/// Nobody may wait for an abort that does not return.
#[test]
fn an_error_does_not_wait_for_the_abort() {
    let lab = Lab::new();
    lab.set("hang_rank", 1);
    lab.set("stuck_abort_ms", 3_600_000);
    let errors = errors(&lab, 2, |world| {
        let error = gather(world, &short("stuck")).unwrap_err();
        assert_eq!(lab.live(), 2, "it has not come back");
        Err(error)
    });
    assert!(
        errors
            .iter()
            .any(|error| error.as_ref().unwrap().contains("not finished"))
    );
}

/// Only the abort ends a call that is stuck inside the library.
#[test]
fn a_stuck_call_does_not_keep_the_abort_away() {
    let lab = Lab::new();
    lab.set("stuck_call_rank", 0);
    let errors = errors(&lab, 2, |world| gather(world, &short("stuck")));
    says(
        &errors[0],
        &["operation 0 `all_gather` (stuck)", "not finished"],
    );
    assert_eq!(lab.live(), 0);
}

#[test]
fn ranks_that_call_different_things_are_named_with_what_differs() {
    let lab = Lab::new();
    let label = errors(&lab, 2, |world| {
        gather(world, &call(["step 1", "step 2"][world.rank()]))?;
        world.barrier(&call("after"))?.wait()
    });
    let all = label.iter().flatten().cloned().collect::<String>();
    assert!(all.contains("the label differs: `step "), "{all}");
    let sizes = errors(&lab, 2, |world| {
        let device = Arc::clone(world.device());
        let own = unset(&device, CommElement::F32, 100 + world.rank());
        let all = unset(&device, CommElement::F32, 2 * own.elements());
        world.all_gather(&own, &all, &call(""))?.wait()?;
        world.barrier(&call("after"))?.wait()
    });
    let all = sizes.iter().flatten().cloned().collect::<String>();
    assert!(all.contains("the number of elements differs: 10"), "{all}");
    for shape in [None, Some((2, 1))] {
        let counts = errors(&lab, 2, |world| wrong_counts(world, shape));
        let all = counts.iter().flatten().cloned().collect::<String>();
        assert!(
            all.contains("the number of bytes from there to here differs: 44 here, 40 on rank 0"),
            "{all}"
        );
    }
    assert_eq!(lab.live(), 0);
}

/// Rank 1 expects one element more than rank 0 sends.
fn wrong_counts(world: &mut Nccl, shape: Option<(usize, usize)>) -> Result<(), CollectiveError> {
    let device = Arc::clone(world.device());
    let algorithm = match shape {
        None => Algorithm::Direct,
        Some((nodes, per_node)) => Algorithm::Hierarchical(NodeShape { nodes, per_node }),
    };
    let receives = [10 + world.rank(), 10];
    let (from, to) = (
        unset(&device, CommElement::F32, 20),
        unset(&device, CommElement::F32, 21),
    );
    world
        .all_to_all_v(
            &from,
            &[10, 10],
            &to,
            &receives,
            algorithm,
            &call("combine"),
        )?
        .wait()?;
    world.barrier(&call("after"))?.wait()
}

#[test]
fn a_rank_that_panics_ends_the_others() {
    let lab = Lab::new();
    let errors = errors(&lab, 3, |world| {
        if world.rank() == 1 {
            panic!("an accident");
        }
        gather(world, &call("dispatch"))
    });
    assert_eq!(errors[1], None);
    for rank in [0, 2] {
        says(
            &errors[rank],
            &["`all_gather` (dispatch)", "rank 1", "has panicked"],
        );
    }
    assert_eq!(lab.live(), 0, "kernels were left waiting");
}

/// Without eager messages the late rank is unknown, so all others are named.
#[test]
fn unchecked_ranks_have_deadlines_all_the_same() {
    let lab = Lab::new();
    let options = |_: usize, _: &Arc<Gpu>| NcclOptions {
        checks: Checks::Off,
        ..lab.options()
    };
    let results = lab.run(2, options, |world| {
        let mut world = world.unwrap();
        // Labels are not compared.
        let label = ["a", "b"][world.rank()];
        gather(&mut world, &call(label)).unwrap();
        if world.rank() == 1 {
            return None;
        }
        let call = short("alone");
        Some(gather(&mut world, &call).unwrap_err().to_string())
    });
    let error = results[0].clone().unwrap();
    says(&error, &["operation 1 `all_gather` (alone)"]);
    lab.legal();
}

/// The host waits once, at the end.
#[test]
fn operations_follow_each_other_without_the_host() {
    let lab = Lab::new();
    lab.set("late_rank", 1);
    lab.set("late_ms", 50);
    let results = lab.run(2, on_stream(&lab), |world| {
        let mut world = world.unwrap();
        let device = Arc::clone(world.device());
        let data = slice(&device, CommElement::I64, &1i64.to_ne_bytes());
        for step in 0..5 {
            let label = format!("step {step}");
            let sum = world.all_reduce(&data, &data, Reduction::Sum, &call(&label));
            sum.unwrap().in_stream().unwrap();
        }
        let sums = read(&device, &data);
        world.finish(&call("finish")).unwrap();
        sums
    });
    for sums in results {
        assert_eq!(sums.unwrap(), 32i64.to_ne_bytes());
    }
    lab.legal();
}

#[test]
fn operations_are_captured_into_graphs() {
    let lab = Lab::new();
    let results = lab.run(2, on_stream(&lab), |world| {
        let mut world = world.unwrap();
        let device = Arc::clone(world.device());
        let gpu = device.streams().unwrap();
        let rank = world.rank();
        let number = |n: f32| n.to_ne_bytes().to_vec();
        let data = slice(&device, CommElement::F32, &number(1.0 + rank as f32));
        let large = unset(&device, CommElement::I64, 1000);
        // Run once before: no memory for sums can be allocated while a graph is captured.
        let warm = world.all_reduce(&large, &large, Reduction::Sum, &call("warm"));
        warm.unwrap().wait().unwrap();
        gpu.begin_capture("a layer").unwrap();
        for step in ["one", "two"] {
            let sum = world.all_reduce(&data, &data, Reduction::Sum, &call(step));
            sum.unwrap().wait().unwrap();
        }
        let refused = world.split(Some(0), 0, &call("split"));
        let refused = refused.err().unwrap().to_string();
        assert!(
            refused.contains("cannot be a part of graph `a layer`"),
            "{refused}"
        );
        let graph = gpu.end_capture().unwrap();
        assert_eq!(read(&device, &data), number(1.0 + rank as f32));
        for _ in 0..2 {
            // SAFETY: the buffers live until the graph has run, below.
            unsafe { graph.launch() }.unwrap();
        }
        world.watch(&call("replay")).unwrap().wait().unwrap();
        let sums = read(&device, &data);
        world.finish(&call("finish")).unwrap();
        sums
    });
    for sums in results {
        assert_eq!(sums.unwrap(), 24f32.to_ne_bytes());
    }
    lab.legal();
}

#[test]
fn what_needs_the_host_is_refused_while_a_graph_is_captured() {
    let lab = Lab::new();
    let results = lab.run(2, by_default(&lab), |world| {
        let mut world = world.unwrap();
        let device = Arc::clone(world.device());
        let data = unset(&device, CommElement::F32, 4);
        device.streams().unwrap().begin_capture("a layer").unwrap();
        let sum = world.all_reduce(&data, &data, Reduction::Sum, &call("sum"));
        let text = sum.unwrap_err().to_string();
        device.streams().unwrap().end_capture().unwrap();
        // The refusal has not harmed the group.
        world.finish(&call("finish")).unwrap();
        text
    });
    for text in results {
        let text = text.unwrap();
        assert!(
            text.contains("it cannot be a part of graph `a layer`"),
            "{text}"
        );
        assert!(text.contains("folded on the host"), "{text}");
    }
    lab.legal();
}

/// NCCL reads and writes the operands of ranks in one process without a copy of its own.
#[test]
fn ranks_of_one_process_admit_each_others_gpus() {
    let lab = Lab::new();
    let gpus: Vec<Arc<Gpu>> = (0..3).map(|rank| lab.device(rank)).collect();
    let worlds = lab.run_on(&gpus, |control, gpu| {
        let device = Arc::clone(control.device());
        let world = moesaic_collectives::nccl::over(control, device, &lab.options())?;
        let admitted = gpu.admitted.lock().unwrap().clone();
        world.finish(&call("the end"))?;
        Ok::<_, CollectiveError>(admitted)
    });
    let admitted = worlds.into_iter().map(|world| world.unwrap().unwrap());
    assert_eq!(
        admitted.collect::<Vec<_>>(),
        [[1_usize, 2], [0, 2], [0, 1]].map(Vec::from)
    );
    lab.legal();
}

#[test]
fn two_ranks_of_one_device_are_refused_before_anything_begins() {
    let lab = Lab::new();
    let run = |share: bool| {
        let gpus = [
            lab.device_at(0, "0000:17:00"),
            lab.device_at(1, "0000:17:00"),
        ];
        let device = |rank: usize| Ok(Arc::clone(&gpus[rank]) as Arc<dyn Device>);
        let results = moesaic_collectives::threads::run(2, device, |control| {
            let device = Arc::clone(control.device());
            let options = NcclOptions {
                share_device: share,
                ..lab.options()
            };
            let world = moesaic_collectives::nccl::over(control, device, &options)?;
            world.finish(&call("finish"))
        });
        results.unwrap().into_iter().map(|result| result.unwrap())
    };
    for result in run(false) {
        let error = result.unwrap_err();
        assert!(
            matches!(&error, CollectiveError::SharedDevice { ranks: [0, 1], .. }),
            "{error}"
        );
    }
    assert_eq!(lab.live(), 0);
    run(true).for_each(|result| result.unwrap());
    lab.legal();
}

#[test]
fn libraries_that_do_not_fit_are_named() {
    let (lab, other) = (Lab::new(), Lab::new());
    other.set("version", 22907);
    let mixed = |rank: usize, _: &Arc<Gpu>| [&lab, &other][rank].options();
    let texts = lab.run(2, mixed, |world| world.err().unwrap().to_string());
    for text in texts {
        let words = "the library is NCCL 2.28.3 on rank 0 and NCCL 2.29.7 on rank 1";
        assert!(text.as_ref().unwrap().contains(words), "{text:?}");
    }
    lab.set("version", 21704);
    let old = lab.run(1, by_default(&lab), |world| {
        world.err().unwrap().to_string()
    });
    let old = old[0].as_ref().unwrap();
    assert!(
        old.contains("is NCCL 2.17.4; 2.18.0 or later is needed"),
        "{old}"
    );
    lab.set("version", 22803);
    lab.set("refuse_init", 1);
    let refused = lab.run(1, by_default(&lab), |world| {
        world.err().unwrap().to_string()
    });
    let refused = refused[0].as_ref().unwrap();
    assert!(
        refused.contains("ncclCommInitRankConfig: an error (code 3)"),
        "{refused}"
    );
}

#[test]
fn a_world_that_was_not_finished_leaves_no_kernel_waiting() {
    let lab = Lab::new();
    let results = lab.run(2, by_default(&lab), |world| {
        let mut world = world.unwrap();
        let group = world.split(Some(0), 0, &call("split")).unwrap();
        if world.rank() == 0 {
            let device = Arc::clone(world.device());
            let (own, all) = (
                unset(&device, CommElement::U8, 8),
                unset(&device, CommElement::U8, 16),
            );
            drop(world.all_gather(&own, &all, &call("alone")).unwrap());
        }
        drop((group, world));
    });
    assert!(results.iter().all(Option::is_some));
    assert_eq!(lab.live(), 0);
    lab.legal();
}

/// The library opens without a GPU; later errors without one are the library's own.
#[test]
#[ignore = "needs the library, of 470 MB: pip install nvidia-nccl-cu12, and MOESAIC_NCCL"]
fn the_real_library_opens_without_a_gpu() {
    let lab = Lab::new();
    let options = NcclOptions {
        deadline: Some(Duration::from_secs(20)),
        ..NcclOptions::default()
    };
    let found = moesaic_collectives::nccl::probe("cuda:sm_90a".parse().unwrap(), &options);
    println!("{found:?}");
    assert!(found.unwrap().version.starts_with("NCCL 2."));
    let error = moesaic_collectives::nccl::start(lab.device(0), &options)
        .err()
        .unwrap()
        .to_string();
    println!("{error}");
    assert!(
        error.contains("NCCL 2.") || error.contains("ncclCommInitRankConfig"),
        "{error}"
    );
}
