//! Whole layers forward and backward on simulated GPUs, against the gradients
//! of the reference.

use super::cases::{trained_options, trained_shapes};
use super::simulated::{SIMULATORS, open};
use moesaic::Recompute;
use moesaic_harness::thorough::{in_turns, one_in};

/// Sizes that fit no tile, and sizes that tensor cores and matrix cores take,
/// in every type; simulators, numbered, take turns.
pub fn shapes(target: &str, turn: usize) {
    let engine = open(target);
    let cases = trained_shapes();
    let calls = one_in(2, turn, cases.chunks(2)).flatten();
    calls.for_each(|case| case.check_training(&engine, Recompute::None));
}

/// Everything that changes what flows back, in every recompute mode; simulators, numbered, take
/// turns.
pub fn options(target: &str, turn: usize) {
    let engine = open(target);
    let each = in_turns(turn, trained_options());
    each.for_each(|(case, recompute)| case.check_training(&engine, recompute));
}

#[test]
fn sm_80_trains_shapes() {
    shapes(SIMULATORS[0], 0);
}

#[test]
fn sm_90a_trains_shapes() {
    shapes(SIMULATORS[1], 1);
}

#[test]
fn gfx942_trains_shapes() {
    shapes(SIMULATORS[2], 1);
}

#[test]
fn sm_80_trains_options() {
    options(SIMULATORS[0], 0);
}

#[test]
fn sm_90a_trains_options() {
    options(SIMULATORS[1], 1);
}

#[test]
fn gfx942_trains_options() {
    options(SIMULATORS[2], 2);
}
