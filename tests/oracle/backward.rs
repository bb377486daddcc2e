//! Gradients as other projects' autograd gives them, from our kernels.

use super::{engine, entries, gradients, hurried, open};
use crate::conformance::SIMULATORS;
use moesaic::Engine;
use moesaic_harness::thorough::{in_turns, one_in};
use std::path::PathBuf;

fn hugging_face(engine: &Engine, dirs: impl Iterator<Item = PathBuf>) {
    dirs.for_each(|dir| gradients::hugging_face(engine, &dir));
}

fn families(engine: &Engine, wanted: impl Fn(&str) -> bool) -> usize {
    let mut dirs = [entries("families"), entries("families_limits")].concat();
    dirs.retain(|dir| wanted(&dir.to_string_lossy()));
    dirs.iter().for_each(|dir| gradients::family(engine, dir));
    dirs.len()
}

fn tutel(engine: &Engine, files: impl Iterator<Item = PathBuf>) {
    files.for_each(|file| gradients::tutel(engine, &file));
}

/// Compiled in a hurry: kernels of the same layers forward, and gradients of the others here, are
/// compiled as people get them.
#[test]
fn gradients_of_every_family() {
    let count = families(&hurried(), |_| true);
    assert!(count >= 47, "{count} cases");
}

/// Those that combine options as no other fixture does.
#[test]
fn gradients_of_families_on_simulated_gpus() {
    let wanted = [
        "jetmoe",
        "axk2",
        "cohere2_moe_sigmoid",
        "openai_privacy",
        "step3p7_limits",
        "inkling2_loop",
    ];
    for (n, target) in SIMULATORS.into_iter().enumerate() {
        let wanted: Vec<&str> = one_in(6, n, wanted).collect();
        let is = |dir: &str| wanted.iter().any(|name| dir.contains(name));
        assert_eq!(families(&open(target), is), wanted.len());
    }
}

#[test]
fn hugging_face_gradients_of_kernels() {
    hugging_face(&engine(), one_in(8, 0, entries("hf")));
    hugging_face(&hurried(), in_turns(1, entries("hf")));
}

#[test]
fn hugging_face_gradients_on_simulated_gpus() {
    for (n, target) in SIMULATORS.into_iter().enumerate() {
        hugging_face(&open(target), one_in(6, n, entries("hf")));
    }
}

#[test]
fn tutel_gradients_of_kernels() {
    tutel(&engine(), one_in(8, 0, entries("tutel")));
    tutel(&hurried(), in_turns(1, entries("tutel")));
}

#[test]
fn tutel_gradients_on_simulated_gpus() {
    for (n, target) in SIMULATORS.into_iter().enumerate() {
        tutel(&open(target), one_in(6, n, entries("tutel")));
    }
}
