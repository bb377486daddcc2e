//! Combinations that a test run takes in turns.
//!
//! Many tests go over formats, shapes and targets, and each combination compiles a layer. A run
//! takes every value with some others; `cargo xtask test --thorough` takes all combinations.

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
