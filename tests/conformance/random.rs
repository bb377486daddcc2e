//! Random layers on simulated GPUs, forward and trained, against the reference.
//!
//! `MOESAIC_SEEDS=100..300` runs others than the few of every test run.

use super::sampled::{drawn, forward, trained};
use super::simulated::open;
use std::ops::Range;

/// The seeds of this run; those of a test run if none are given.
pub fn seeds(usual: Range<u64>) -> Range<u64> {
    let Ok(text) = std::env::var("MOESAIC_SEEDS") else {
        return usual;
    };
    let ends = text.split_once("..");
    let ends = ends.and_then(|(from, to)| Some(from.parse().ok()?..to.parse().ok()?));
    ends.unwrap_or_else(|| panic!("MOESAIC_SEEDS={text} is not FROM..TO"))
}

fn agree(target: &str) {
    let engine = open(target);
    let (mut compared, mut passed_over) = (0, Vec::new());
    for seed in seeds(500..503) {
        let held = match seed % 3 {
            0 => {
                forward(seed, &engine);
                continue;
            }
            1 => trained(seed, &engine),
            _ => drawn(seed, &engine),
        };
        if held {
            compared += 1
        } else {
            passed_over.push(seed)
        }
    }
    println!("{compared} compared; others chosen in {passed_over:?}");
    let few = passed_over.len() * 4 <= compared;
    assert!(
        compared > 0 && few,
        "{compared} compared, not {passed_over:?}"
    );
}

macro_rules! on_each {
    ($($name:ident: $target:literal),* $(,)?) => {$(
        #[test]
        fn $name() {
            agree($target);
        }
    )*};
}

on_each! {
    cpu_agrees_on_random_layers: "cpu",
    sm_80_agrees_on_random_layers: "sim:sm_80",
    sm_90a_agrees_on_random_layers: "sim:sm_90a",
    gfx942_agrees_on_random_layers: "sim:gfx942",
    gfx1100_agrees_on_random_layers: "sim:gfx1100",
}
