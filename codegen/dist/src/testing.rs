//! Meshes for the tests of this and other crates.
//!
//! Not part of the public promise.

use crate::Parallel;

/// Returns meshes with and without shards, groups and replicas, of sizes that are no powers of two
/// among them.
pub fn meshes() -> impl Iterator<Item = Parallel> {
    let sizes = [
        (2, 4, 1),
        (1, 8, 1),
        (2, 6, 1),
        (3, 4, 2),
        (5, 1, 1),
        (5, 2, 3),
        (1, 1, 1),
    ];
    sizes.into_iter().map(|(ep, expert_tp, dp)| Parallel {
        ep,
        expert_tp,
        dp,
        ..Parallel::default()
    })
}
