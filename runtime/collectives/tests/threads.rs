//! Ranks that are threads.

mod heartbeat;
mod support;

use moesaic_collectives::{
    Algorithm, Call, CollectiveError, Collectives, CommElement, Communicator, NodeShape, Reduction,
    Topology, Transfer, threads,
};
use moesaic_cpu::CpuDevice;
use moesaic_target::{Device, DeviceError};
use std::sync::Arc;
use std::time::{Duration, Instant};
use support::{call, every_operation, part, read, slice, unset};

fn device(_rank: usize) -> Result<Arc<dyn Device>, DeviceError> {
    Ok(Arc::new(CpuDevice::with_threads(1)?.poisoned()))
}

/// Returns the result of every rank; `None` for ranks that panicked.
fn run<T: Send>(ranks: usize, body: impl Fn(Communicator) -> T + Sync) -> Vec<Option<T>> {
    let results = threads::run(ranks, device, body).unwrap();
    results.into_iter().map(Result::ok).collect()
}

/// Returns each rank's error, which must come long before a person would look for it.
fn errors(
    ranks: usize,
    body: impl Fn(Communicator) -> Result<(), CollectiveError> + Sync,
) -> Vec<Option<String>> {
    let start = Instant::now();
    let results = run(ranks, body);
    assert!(
        start.elapsed() < Duration::from_secs(60),
        "it took {:?}",
        start.elapsed()
    );
    let text = |result: Option<Result<(), CollectiveError>>| match result {
        Some(Err(error)) => Some(error.to_string()),
        Some(Ok(())) => panic!("a rank has seen no error"),
        None => None,
    };
    results.into_iter().map(text).collect()
}

#[track_caller]
fn says(error: &Option<String>, words: &[&str]) {
    let text = error.as_deref().expect("this rank has an error");
    for word in words {
        assert!(text.contains(word), "`{word}` is not in: {text}");
    }
}

fn short(label: &str) -> Call {
    Call::new(label).within(Duration::from_millis(400))
}

#[test]
fn every_operation_on_one_to_eight_ranks() {
    for ranks in [1, 2, 3, 4, 8] {
        let results = run(ranks, |mut world| {
            let device = Arc::clone(world.device());
            every_operation(&mut world, &device);
            world.finish(&call("finish")).unwrap();
        });
        assert!(results.iter().all(Option::is_some), "{ranks} ranks");
    }
}

#[test]
fn results_are_the_same_bytes_whoever_is_late() {
    let once = |seed: u64| {
        run(4, move |mut world| {
            let device = Arc::clone(world.device());
            let rank = world.rank() as u64;
            let values =
                (0..3000).map(|i| ((i * 37 + rank * 11) % 101) as f32 * 0.1f32.powi(rank as i32));
            let bytes: Vec<u8> = values.flat_map(f32::to_ne_bytes).collect();
            let data = slice(&device, CommElement::F32, &bytes);
            std::thread::sleep(Duration::from_millis((rank * seed * 7) % 13));
            let handle = world.all_reduce(&data, &data, Reduction::Sum, &call("sum"));
            handle.unwrap().wait().unwrap();
            read(&device, &data)
        })
    };
    let first = once(0);
    assert!(first.iter().all(|bytes| *bytes == first[0]));
    for seed in 1..5 {
        assert!(once(seed) == first, "seed {seed}");
    }
}

#[test]
fn a_late_rank_is_named_with_operation_phase_and_what_it_did_last() {
    let errors = errors(3, |mut world| {
        world.barrier(&call("first"))?.wait()?;
        if world.rank() == 2 {
            std::thread::sleep(Duration::from_millis(3000));
        }
        let device = Arc::clone(world.device());
        let data = slice(&device, CommElement::F32, &part(1, 1, 16));
        let handle = world.all_reduce(&data, &data, Reduction::Sum, &short("layer 3"))?;
        handle.wait()
    });
    let first = if errors[0].as_ref().unwrap().contains("not finished") {
        0
    } else {
        1
    };
    says(
        &errors[first],
        &[
            "operation 1 `all_reduce` (layer 3), phase `gather`",
            "not finished after",
            "waiting for rank 2 (last heard of in operation 0 `barrier`)",
        ],
    );
    // The others learn of the failure at once, not at their own deadlines.
    says(&errors[1 - first], &["operation 1 `all_reduce`"]);
    says(
        &errors[2],
        &["all_reduce", "gave up", "rank 2 (last heard of"],
    );
}

#[test]
fn a_rank_that_panics_ends_the_others_at_once() {
    let errors = errors(4, |mut world| {
        if world.rank() == 1 {
            panic!("an accident");
        }
        let device = Arc::clone(world.device());
        let (from, to) = (
            unset(&device, CommElement::U8, 40_000),
            unset(&device, CommElement::U8, 40_000),
        );
        world
            .all_to_all(&from, &to, Algorithm::Direct, &call("dispatch"))?
            .wait()
    });
    assert_eq!(errors[1], None);
    for rank in [0, 2, 3] {
        says(&errors[rank], &["all_to_all", "rank 1 has panicked"]);
    }
}

#[test]
fn a_rank_that_ends_early_is_named() {
    let results = run(2, |mut world| match world.rank() {
        0 => world.barrier(&call("end")).and_then(|handle| handle.wait()),
        _ => Ok(()),
    });
    let error = results[0].clone().unwrap().unwrap_err().to_string();
    assert!(
        error.contains("rank 1 has ended without doing its part"),
        "{error}"
    );
}

#[test]
fn what_was_sent_before_a_rank_ended_arrives() {
    let results = run(2, |mut world| {
        let device = Arc::clone(world.device());
        let data = slice(&device, CommElement::U8, &part(world.rank(), 0, 500));
        if world.rank() == 1 {
            std::thread::sleep(Duration::from_millis(100));
        }
        let handle = world.broadcast(&data, 0, &call("last")).unwrap();
        handle.wait().unwrap();
        read(&device, &data)
    });
    assert_eq!(results[1].as_ref().unwrap(), &part(0, 0, 500));
}

#[test]
fn another_operation_on_a_rank_is_named() {
    let errors = errors(3, |mut world| {
        let device = Arc::clone(world.device());
        let data = unset(&device, CommElement::F32, 6);
        let call = call("step");
        let handle = match world.rank() {
            1 => world.barrier(&call)?,
            _ => world.all_reduce(&data, &data, Reduction::Sum, &call)?,
        };
        handle.wait()
    });
    let all = errors.iter().flatten().cloned().collect::<String>();
    assert!(all.contains("the operation differs: "), "{all}");
    assert!(
        all.contains("`barrier`") && all.contains("`all_reduce`"),
        "{all}"
    );
}

#[test]
fn a_skipped_step_is_found_by_its_label() {
    let errors = errors(2, |mut world| {
        for step in 0..4 {
            if world.rank() == 1 && step == 2 {
                continue;
            }
            let device = Arc::clone(world.device());
            let data = unset(&device, CommElement::I32, 10);
            let call = call(&format!("step {step}"));
            world
                .all_reduce(&data, &data, Reduction::Max, &call)?
                .wait()?;
        }
        Ok(())
    });
    let all = errors.iter().flatten().cloned().collect::<String>();
    assert!(all.contains("operation 2 `all_reduce`"), "{all}");
    assert!(
        all.contains("the label differs: `step 2` here, `step 3` on rank 1")
            || all.contains("the label differs: `step 3` here, `step 2` on rank 0"),
        "{all}"
    );
}

#[test]
fn other_sizes_types_and_reductions_are_named() {
    let wrong = |elements: [usize; 2], element: [CommElement; 2], reduction: [Reduction; 2]| {
        let errors = errors(2, move |mut world| {
            let device = Arc::clone(world.device());
            let own = world.rank();
            let data = unset(&device, element[own], elements[own]);
            world
                .all_reduce(&data, &data, reduction[own], &call(""))?
                .wait()
        });
        errors.iter().flatten().cloned().collect::<String>()
    };
    let (f32s, sums) = ([CommElement::F32; 2], [Reduction::Sum; 2]);
    let text = wrong([4, 5], f32s, sums);
    assert!(text.contains("the number of elements differs: "), "{text}");
    let text = wrong([9000, 9001], f32s, sums);
    assert!(text.contains("the number of elements differs: "), "{text}");
    let text = wrong([4, 4], [CommElement::F32, CommElement::I32], sums);
    assert!(text.contains("the element type differs: "), "{text}");
    let text = wrong([4, 4], f32s, [Reduction::Sum, Reduction::Max]);
    assert!(text.contains("the reduction differs: "), "{text}");
    let numbers = errors(2, |mut world| {
        let own = vec![7; 2 + world.rank()];
        world.gather_numbers(&own, &call("loads")).map(drop)
    });
    let text: String = numbers.into_iter().flatten().collect();
    // Either rank may notice first.
    let either = ["24 here, 16 on rank 0", "16 here, 24 on rank 1"];
    let named = either.map(|who| text.contains(&format!("differs: {who}")));
    assert!(named.contains(&true), "{text}");
}

/// Rank 2 expects one element more from rank 0 than rank 0 sends. Ranks that have done their part
/// by then learn of the failure in the next operation.
fn wrong_count(algorithm: Algorithm, scale: usize) -> Vec<Option<String>> {
    errors(4, move |mut world| {
        let device = Arc::clone(world.device());
        let rank = world.rank();
        let sends = vec![scale; 4];
        let mut receives = sends.clone();
        if rank == 2 {
            receives[0] += 1;
            // The sum is right; only the individual parts are wrong.
            receives[1] -= 1;
        }
        let (from, to) = (
            unset(&device, CommElement::U8, 4 * scale),
            unset(&device, CommElement::U8, 4 * scale),
        );
        let combine = call("combine");
        world
            .all_to_all_v(&from, &sends, &to, &receives, algorithm, &combine)?
            .wait()?;
        world.barrier(&call("after"))?.wait()
    })
}

#[test]
fn counts_that_do_not_match_are_named_with_the_rank() {
    let shape = |nodes, per_node| Algorithm::Hierarchical(NodeShape { nodes, per_node });
    for algorithm in [Algorithm::Direct, shape(2, 2), shape(1, 4), shape(4, 1)] {
        for scale in [5, 20_000] {
            let errors = wrong_count(algorithm, scale);
            let text = errors[2].as_deref().unwrap();
            let named = text.contains("on rank 0") || text.contains("on rank 1");
            assert!(
                text.contains("the number of bytes") && named,
                "{algorithm:?}: {text}"
            );
            for rank in [0, 1, 3] {
                says(
                    &errors[rank],
                    &["all_to_all_v` (combine)", "gave up", "rank 2"],
                );
            }
        }
    }
}

#[test]
fn another_algorithm_is_named() {
    let errors = errors(4, |mut world| {
        let device = Arc::clone(world.device());
        let (from, to) = (
            unset(&device, CommElement::U8, 4),
            unset(&device, CommElement::U8, 4),
        );
        let shape = NodeShape {
            nodes: 2,
            per_node: 2,
        };
        let algorithm = match world.rank() {
            3 => Algorithm::Direct,
            _ => Algorithm::Hierarchical(shape),
        };
        world.all_to_all(&from, &to, algorithm, &call(""))?.wait()?;
        world.barrier(&call("after"))?.wait()
    });
    let all = errors.iter().flatten().cloned().collect::<String>();
    assert!(all.contains("the algorithm differs: "), "{all}");
    assert!(all.contains("hierarchical with 2 ranks per node"), "{all}");
}

#[test]
fn a_message_that_nobody_receives_is_an_error() {
    for bytes in [10, 100_000] {
        let errors = errors(2, move |mut world| {
            let device = Arc::clone(world.device());
            let peer = 1 - world.rank();
            let transfer = |n| Transfer {
                peer,
                slice: unset(&device, CommElement::U8, n),
            };
            let (sends, receives) = match world.rank() {
                0 => (vec![transfer(bytes), transfer(bytes)], vec![]),
                _ => (vec![], vec![transfer(bytes)]),
            };
            world
                .exchange(&sends, &receives, &call("messages"))?
                .wait()?;
            world.barrier(&call("after"))?.wait()
        });
        let all = errors.iter().flatten().cloned().collect::<String>();
        assert!(
            all.contains("the number of messages differs: 1 here, 2 on rank 0"),
            "{all}"
        );
    }
}

/// Rank 1 expects one message less, no message, as many bytes in one message, or other sizes.
#[test]
fn messages_sent_together_are_compared_one_by_one() {
    let cases: [(&[usize], &[usize], &str); 4] = [
        (
            &[10, 20],
            &[30],
            "the number of messages differs: 1 here, 2",
        ),
        (
            &[10, 20],
            &[],
            "the number of messages differs: no more are received",
        ),
        (&[10, 20], &[20, 10], "the sizes of messages differs"),
        (
            &[9000, 20],
            &[9000, 21],
            "the number of bytes from there to here differs: 9021",
        ),
    ];
    for (sent, received, words) in cases {
        // Rank 0 may have finished before rank 1 has found the extra message.
        let results = run(2, move |mut world| {
            let device = Arc::clone(world.device());
            let transfer = |(peer, n): (usize, &usize)| Transfer {
                peer,
                slice: unset(&device, CommElement::U8, *n),
            };
            let list = |sizes: &[usize], peer| -> Vec<Transfer> {
                sizes.iter().map(|n| transfer((peer, n))).collect()
            };
            let (sends, receives) = match world.rank() {
                0 => (list(sent, 1), vec![]),
                _ => (vec![], list(received, 0)),
            };
            let rows = call("rows");
            world.exchange(&sends, &receives, &rows)?.wait()?;
            world.barrier(&call("after"))?.wait()
        });
        let errors = results.into_iter().flatten().filter_map(Result::err);
        let all: String = errors.map(|error| error.to_string()).collect();
        assert!(all.contains(words), "{words}: {all}");
    }
}

#[test]
fn after_a_failure_every_call_says_why() {
    let errors = errors(2, |mut world| {
        if world.rank() == 0 {
            let error = world.barrier(&short("alone"))?.wait().unwrap_err();
            assert!(matches!(error, CollectiveError::Deadline { .. }), "{error}");
        } else {
            std::thread::sleep(Duration::from_millis(3000));
        }
        let again = world.barrier(&call("again"));
        again.and_then(|handle| handle.wait())
    });
    says(
        &errors[0],
        &["barrier is not possible", "(alone)", "not finished after"],
    );
    says(&errors[1], &["barrier is not possible", "rank 0 gave up"]);
}

#[test]
fn bad_arguments_are_errors_before_anything_is_sent() {
    let results = run(2, |mut world| {
        let device = Arc::clone(world.device());
        let r = |element, n| unset(&device, element, n);
        let (f4, f5, i4) = (
            r(CommElement::F32, 4),
            r(CommElement::F32, 5),
            r(CommElement::I32, 4),
        );
        let call = call("");
        let shape = NodeShape {
            nodes: 3,
            per_node: 1,
        };
        let all_to_all = |world: &mut Communicator, a, b, algorithm| {
            world
                .all_to_all(a, b, algorithm, &call)
                .unwrap_err()
                .to_string()
        };
        let texts = [
            all_to_all(&mut world, &f4, &f5, Algorithm::Direct),
            all_to_all(&mut world, &f4, &i4, Algorithm::Direct),
            all_to_all(&mut world, &f5, &r(CommElement::F32, 5), Algorithm::Direct),
            all_to_all(&mut world, &f4, &f4, Algorithm::Direct),
            all_to_all(
                &mut world,
                &f4,
                &r(CommElement::F32, 4),
                Algorithm::Hierarchical(shape),
            ),
            world.all_gather(&f4, &f5, &call).unwrap_err().to_string(),
            world.broadcast(&f4, 2, &call).unwrap_err().to_string(),
            world
                .all_to_all_v(&f4, &[1], &f5, &[1, 1], Algorithm::Direct, &call)
                .unwrap_err()
                .to_string(),
            world
                .all_to_all_v(&f4, &[4, 1], &f5, &[1, 1], Algorithm::Direct, &call)
                .unwrap_err()
                .to_string(),
            world
                .all_to_all_v(&f4, &[2, 2], &f5, &[1, 1], Algorithm::Direct, &call)
                .unwrap_err()
                .to_string(),
        ];
        // The errors have neither harmed the group nor used up a number.
        assert_eq!(world.sequence(), 0);
        world.barrier(&call).unwrap().wait().unwrap();
        texts
    });
    let expected = [
        "all_to_all: the input has 4 elements, the output 5; both must have as many",
        "all_to_all: the input is f32, the output i32; both must be of one type",
        "all_to_all: 5 elements cannot be split into 2 equal parts, one for each rank",
        "all_to_all: the input and the output overlap; they must be apart",
        "all_to_all: 3 nodes of 1 ranks are not the 2 ranks of this group",
        "all_gather: the output has 5 elements; with 4 in the input and 2 ranks it must have 8",
        "broadcast: the root is rank 2; ranks go from 0 to 1",
        "all_to_all_v: sends has 1 numbers; it must have one for each of the 2 ranks",
        "all_to_all_v: sends adds up to more than the 4 elements of its slice",
        "all_to_all_v: this rank sends 8 bytes to itself and expects 4",
    ];
    assert_eq!(results[0].as_ref().unwrap(), &expected);
    assert_eq!(results[1].as_ref().unwrap(), &expected);
    assert!(threads::run(0, device, |_| ()).is_err());
}

#[test]
fn a_world_is_not_ended_while_an_operation_is_in_flight_on_any_rank() {
    let results = run(2, |mut world| {
        let mut group = world.split(Some(0), 0, &call("split")).unwrap().unwrap();
        // Rank 1 does not call it, so it cannot end on rank 0.
        let pending = (world.rank() == 0).then(|| group.barrier(&call("alone")).unwrap());
        let ended = world.finish(&call("finish")).unwrap_err().to_string();
        drop(pending);
        ended
    });
    let words = "finish: rank 0, operation 0 `barrier` (alone), phase `round` is still in flight; \
                 wait for it first";
    assert_eq!(results, vec![Some(words.to_string()); 2]);
}

#[test]
fn groups_of_a_world_that_has_ended_say_so() {
    let results = run(2, |mut world| {
        let mut group = world.split(Some(0), 0, &call("split")).unwrap().unwrap();
        world.finish(&call("finish")).unwrap();
        group.barrier(&call("after")).unwrap_err().to_string()
    });
    for error in results {
        let error = error.unwrap();
        assert!(error.contains("the world was ended by `finish`"), "{error}");
    }
}

#[test]
fn a_dropped_handle_ends_nothing() {
    let results = run(2, |mut world| {
        let device = Arc::clone(world.device());
        let to = unset(&device, CommElement::U8, 40_000);
        let from = slice(&device, CommElement::U8, &part(world.rank(), 0, 20_000));
        drop(world.all_gather(&from, &to, &call("dropped")).unwrap());
        drop(from);
        world.barrier(&call("after")).unwrap().wait().unwrap();
        world.barrier(&call("and again")).unwrap().wait().unwrap();
        let next = slice(&device, CommElement::U8, &part(world.rank(), 0, 20_000));
        drop(world.all_gather(&next, &to, &call("dropped")).unwrap());
        world.finish(&call("finish")).unwrap();
        read(&device, &to)
    });
    for bytes in results {
        assert_eq!(
            bytes.unwrap(),
            [part(0, 0, 20_000), part(1, 0, 20_000)].concat()
        );
    }
}

#[test]
fn links_are_measured_alike_on_every_rank() {
    use moesaic_collectives::measure::{MeasureOptions, measure};
    let options = MeasureOptions {
        large: 10_001,
        rounds: 2,
        pairs: 3,
    };
    let results = run(4, |mut world| {
        let device = Arc::clone(world.device());
        let host = ["a", "b"][world.rank() / 2];
        let topology = Topology::of(&mut world, host, &call("hosts")).unwrap();
        measure(&mut world, &device, &topology, &options).unwrap()
    });
    let results: Vec<_> = results.into_iter().map(Option::unwrap).collect();
    for measured in &results {
        assert_eq!(*measured, results[0]);
    }
    let pairs = results[0].links.iter().map(|l| (l.from, l.to, l.same_node));
    let expected = [
        (0, 1, true),
        (2, 3, true),
        (0, 2, false),
        (0, 3, false),
        (1, 2, false),
    ];
    assert_eq!(pairs.collect::<Vec<_>>(), expected);
    for link in &results[0].links {
        assert!(
            link.latency > Duration::ZERO && link.bytes_per_second > 0.0,
            "{link:?}"
        );
    }
    let sizes = results[0].all_to_all.iter().map(|all| all.bytes_per_pair);
    assert_eq!(sizes.collect::<Vec<_>>(), [8, 2501]);
}
