//! The kernels of GPUs, run here by simulators: whole layers against the
//! reference, and routing to the bit as on the CPU.

use super::Case;
use super::case::{ints, longs};
use super::cases::{self, small};
use super::layers::{engine as cpu, poisoned};
use super::quick;
use moesaic::toolchain::testing::{ExternalTool, needed};
use moesaic::{Engine, EngineOptions, OpenError, Output, resolve_target};
use moesaic_harness::thorough::in_turns;

/// One of each family of kernels: `mma`, `wgmma`, matrix cores.
pub const SIMULATORS: [&str; 3] = ["sim:sm_80", "sim:sm_90a", "sim:gfx942"];

/// Kernels of CPUs are compiled in a hurry.
pub fn open(target: &str) -> Engine {
    opened(target, quick::open)
}

type Open = fn(&str, EngineOptions) -> Result<Engine, OpenError>;

fn opened(target: &str, open: Open) -> Engine {
    let tool = ExternalTool::of(resolve_target(target).expect("a target"));
    needed(tool, open(target, poisoned()))
}

/// Random layers of every kind, which simulators, numbered, take in turns; kernels as people get
/// them.
pub fn random_specs(target: &str, turn: usize) {
    let cases = in_turns(turn, cases::random()).collect();
    check_on(cases, &opened(target, Engine::open));
}

/// Sizes that fit no tile, and sizes that tensor cores and matrix cores take.
pub fn shapes(target: &str) {
    check(cases::shapes(), target);
}

/// One expert gets everything, and more than one tile of it.
pub fn crowded(target: &str) {
    check(cases::crowded(), target);
}

fn check(cases: Vec<Case>, target: &str) {
    check_on(cases, &open(target));
}

fn check_on(cases: Vec<Case>, engine: &Engine) {
    cases.iter().for_each(|case| case.check(engine));
}

/// Rounded factors only where they are asked for.
#[test]
fn tf32_is_for_layers_that_ask() {
    let engine = open("sim:sm_80");
    let mut spec = small(64, 72, 5, 2);
    let case = Case::random(&spec, 33, 7);
    case.check(&engine);
    spec.precision.tf32 = true;
    let rounded = Case::random(&spec, 33, 7);
    rounded.check(&engine);
    let y = |case: &Case| {
        let output = case.layer(&engine).forward(&case.input());
        output.expect("it runs").y().to_f32()
    };
    assert_ne!(y(&case), y(&rounded), "the factors were not rounded");
}

const MAPS: [&str; 6] = [
    "topk_ids",
    "counts",
    "offsets",
    "locations",
    "slot_rows",
    "row_slots",
];

fn routed(case: &Case, engine: &Engine) -> Output {
    let output = case.layer(engine).forward(case.input().reading(&MAPS));
    output.unwrap_or_else(|e| panic!("{} on {}: {e}", case.spec.name, engine.target()))
}

/// Rows of the map that are in use; the rest is never written.
fn map(output: &Output, name: &str) -> Vec<i64> {
    if matches!(name, "counts" | "offsets") {
        return longs(output, name);
    }
    let kept = *longs(output, "offsets").last().expect("an edge") as usize;
    let mut values = ints(output, name);
    if name == "row_slots" {
        values.truncate(kept);
    }
    values.into_iter().map(i64::from).collect()
}

/// Every map of routing, as the CPU writes it.
pub fn same_maps(target: &str) {
    let (cpu, engine) = (cpu(), open(target));
    for case in cases::routed() {
        let (expected, found) = (routed(&case, &cpu), routed(&case, &engine));
        for name in MAPS {
            let what = case.what(&format!("{name} on {target}"));
            assert_eq!(map(&found, name), map(&expected, name), "{what}");
        }
    }
}

macro_rules! on_each {
    ($($module:ident: $target:literal, $turn:literal);* $(;)?) => {$(
        mod $module {
            #[test]
            fn random_specs_agree_with_the_reference() {
                super::random_specs($target, $turn);
            }

            #[test]
            fn shapes_agree_in_every_dtype() {
                super::shapes($target);
            }

            #[test]
            fn all_tokens_may_choose_one_expert() {
                super::crowded($target);
            }

            #[test]
            fn routing_is_the_cpus_to_the_bit() {
                super::same_maps($target);
            }
        }
    )*};
}

on_each! {
    sm_80: "sim:sm_80", 0;
    sm_90a: "sim:sm_90a", 1;
    gfx942: "sim:gfx942", 0;
}
