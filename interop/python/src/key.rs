//! The key of a training call's random numbers, as Python gives it.

use moesaic::RngKey;

/// Reads (seed, step, layer, first token).
pub fn read_key((seed, step, layer, first_token): (u64, u64, u64, u64)) -> RngKey {
    RngKey {
        seed,
        step,
        layer,
        first_token,
    }
}
