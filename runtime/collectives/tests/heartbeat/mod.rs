//! Work between operations that takes one rank longer than the others' deadline.

use super::{call, errors, run, says};
use moesaic_collectives::{CollectiveError, Collectives, Communicator, SetupError, with_heartbeat};
use moesaic_target::SharedError;
use std::time::Duration;

/// Runs `work` with a deadline much shorter than the longest work.
fn working(
    world: Communicator,
    work: impl FnOnce(usize) -> Result<usize, CollectiveError>,
) -> Result<usize, CollectiveError> {
    let mut world = world.with_deadline(Duration::from_millis(800));
    let rank = world.rank();
    let done = with_heartbeat(&mut world, &call("kernels"), || work(rank));
    // Only failed ranks leave without the others.
    done.and_then(|done| world.finish(&call("end")).map(|()| done))
}

#[test]
fn a_deadline_limits_how_long_a_rank_is_silent_and_not_how_long_it_works() {
    let results = run(3, |world| {
        working(world, |rank| {
            std::thread::sleep(Duration::from_millis(600 * rank as u64));
            Ok(rank)
        })
    });
    let done: Vec<usize> = results
        .into_iter()
        .map(|rank| rank.unwrap().unwrap())
        .collect();
    assert_eq!(done, [0, 1, 2]);
    assert_eq!(
        run(1, |world| working(world, |_| Ok(7)))[0]
            .as_ref()
            .unwrap(),
        &Ok(7)
    );
}

#[test]
fn work_that_fails_on_one_rank_is_known_to_all() {
    let reason = "no space left on device".to_string();
    let errors = errors(3, |world| {
        working(world, |rank| match rank {
            1 => Err(CollectiveError::setup(SetupError::Other(SharedError::new(
                std::io::Error::other(reason.clone()),
            )))),
            _ => Ok(rank),
        })
        .map(drop)
    });
    says(
        &errors[0],
        &["rank 1 failed: ", &reason, "kernels", "`heartbeat`"],
    );
    says(&errors[1], &["cannot set up the ranks", &reason]);
    says(&errors[2], &["rank 1 failed: ", &reason]);
}

#[test]
fn a_rank_that_is_silent_while_others_work_is_late() {
    let errors = errors(3, |world| match world.rank() {
        2 => {
            std::thread::sleep(Duration::from_millis(1200));
            working(world, Ok).map(drop)
        }
        // A panic is reported even though no rank is left to answer.
        1 => working(world, |_| panic!("a bug in a compiler")).map(drop),
        _ => working(world, Ok).map(drop),
    });
    assert!(errors[1].is_none());
    says(&errors[0], &["agree"]);
    says(&errors[2], &["rank"]);
}
