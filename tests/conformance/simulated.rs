//! The kernels of GPUs, run here by simulators: whole layers against the
//! reference, and routing to the bit as on the CPU.

use super::Case;
use super::case::{ints, longs};
use super::layers::engine as cpu;
use moesaic::spec::{CapacityMode, CapacityOrder, LayerSpec, testing};
use moesaic::toolchain::testing::{Tool, needed};
use moesaic::{DType, Engine, EngineOptions, Output, resolve_target};

/// One of each family of kernels: `mma`, `wgmma`, matrix cores.
pub const SIMULATORS: [&str; 3] = ["sim:sm_80", "sim:sm_90a", "sim:gfx942"];

pub fn open(target: &str) -> Engine {
    let options = EngineOptions {
        poison: true,
        ..EngineOptions::default()
    };
    let tool = Tool::of(resolve_target(target).expect("a target"));
    needed(tool, Engine::open(target, options))
}

pub fn small(model_dim: usize, hidden_dim: usize, experts: usize, top_k: usize) -> LayerSpec {
    let shape = format!(
        "shape = {{ model_dim = {model_dim}, hidden_dim = {hidden_dim}, experts = {experts}, top_k = {top_k} }}"
    );
    LayerSpec::from_toml(&shape).unwrap_or_else(|e| panic!("{}", e.render("spec", false)))
}

pub fn of_type(dtype: DType, mut spec: LayerSpec) -> LayerSpec {
    spec.precision.weights = dtype;
    spec.precision.activations = dtype;
    spec
}

/// Random layers of every kind, the same on each simulator.
pub fn random_specs(target: &str) {
    let engine = open(target);
    for seed in 200..212 {
        let tokens = [1, 7, 33, 65][seed as usize % 4];
        Case::random(&testing::sample(seed), tokens, seed).check(&engine);
    }
}

/// Sizes that fit no tile, and sizes that matrix units take.
pub fn shapes(target: &str) {
    let engine = open(target);
    let shapes = [
        (1, 1, 1, 1),
        (37, 21, 5, 5),
        (64, 64, 8, 2),
        (72, 136, 7, 3),
        (128, 40, 60, 8),
    ];
    let dtypes = [DType::F32, DType::Bf16, DType::F16];
    for (i, (d, h, e, k)) in shapes.into_iter().enumerate() {
        let first = if i < 2 { i } else { 0 };
        let last = if i < 2 { i + 1 } else { 3 };
        for dtype in &dtypes[first..last] {
            let spec = of_type(*dtype, small(d, h, e, k));
            for tokens in [0, 1, 33] {
                Case::random(&spec, tokens, (d * h + e) as u64).check(&engine);
            }
        }
    }
}

/// One expert gets everything, and more than one tile of it.
pub fn crowded(target: &str) {
    let engine = open(target);
    for dtype in [DType::Bf16, DType::F32] {
        let mut spec = of_type(dtype, small(64, 72, 5, 1));
        spec.router.bias = true;
        let mut case = Case::random(&spec, 200, 5);
        let bias = case.weights.0.get_mut("router.bias");
        bias.expect("it has one").data = vec![0.0, 0.0, 99.0, 0.0, 0.0];
        case.check(&engine);
    }
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

/// Integer tokens and weights make logits exact, so that every backend has
/// the same to decide on.
pub fn exact(spec: &LayerSpec, tokens: usize, seed: u64) -> Case {
    let mut case = Case::random(spec, tokens, seed);
    let integer = |v: &mut f64| *v = (*v * 4.0).round().clamp(-8.0, 8.0);
    case.input.x.iter_mut().for_each(integer);
    let router = case.weights.0.get_mut("router.weight");
    router
        .expect("it has one")
        .data
        .iter_mut()
        .for_each(integer);
    case
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
    let output = case.layer(engine).forward_with(&case.input(), &MAPS);
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
    let orders = [
        CapacityOrder::SlotMajor,
        CapacityOrder::TokenMajor,
        CapacityOrder::BatchPrioritized,
        CapacityOrder::Probability,
        CapacityOrder::Random,
    ];
    let shapes = [(5, 2), (64, 8), (160, 6), (3, 3), (1024, 4)];
    for (i, ((experts, top_k), order)) in shapes.into_iter().zip(orders).enumerate() {
        let mut spec = small(16, 8, experts, top_k);
        spec.capacity.order = order;
        if i > 0 {
            spec.capacity.mode = CapacityMode::Factor;
        }
        for tokens in [1, 300] {
            let case = exact(&spec, tokens, i as u64);
            let (expected, found) = (routed(&case, &cpu), routed(&case, &engine));
            for name in MAPS {
                let what = format!("{name} of {experts} experts by {order:?} on {target}");
                assert_eq!(map(&found, name), map(&expected, name), "{what}");
            }
        }
    }
}

macro_rules! on_each {
    ($($module:ident: $target:literal),* $(,)?) => {$(
        mod $module {
            #[test]
            fn random_specs_agree_with_the_reference() {
                super::random_specs($target);
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
    sm_80: "sim:sm_80",
    sm_90a: "sim:sm_90a",
    gfx942: "sim:gfx942",
}
