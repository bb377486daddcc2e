//! Combinations that a test run takes in turns.
//!
//! Many tests go over formats, shapes and targets, and each combination compiles a layer. A run
//! takes every value with some others; `cargo xtask test --thorough` takes all combinations.

use std::fmt::Debug;

/// The variable by which `cargo xtask test --thorough` asks for all combinations.
pub const VARIABLE: &str = "MOESAIC_THOROUGH";

/// Returns whether this run takes all combinations.
pub fn is_on() -> bool {
    std::env::var_os(VARIABLE).is_some()
}

/// Returns whether this run takes combination `n`: every one in `of`, or all.
pub fn takes(n: usize, of: usize) -> bool {
    n.is_multiple_of(of) || is_on()
}

/// Iterates over the quarter of `all` that this run takes with value `n` of something else: with the
/// next value it takes another quarter. See [`one_in`].
pub fn in_turns<T>(n: usize, all: impl IntoIterator<Item = T>) -> impl Iterator<Item = T> {
    one_in(4, n, all)
}

/// Iterates over one in `of` of `all`, and over one where there are fewer than that, so that no
/// value of something else goes without. Over all of them if this run takes all combinations.
pub fn one_in<T>(of: usize, n: usize, all: impl IntoIterator<Item = T>) -> impl Iterator<Item = T> {
    let all: Vec<T> = all.into_iter().collect();
    let of = of.min(all.len()).max(1);
    let numbered = all.into_iter().enumerate();
    numbered.filter_map(move |(i, one)| takes(n + i, of).then_some(one))
}

/// Returns a number that follows from `case` alone, for tests whose cases have no number of their
/// own to take turns by.
pub fn turn_of(case: &impl Debug) -> usize {
    let text = format!("{case:?}");
    let mixed = text.bytes().fold(7u32, |hash, byte| {
        (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193)
    });
    (mixed >> 16) as usize
}
