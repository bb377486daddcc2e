//! NUMA nodes of a CPU: the same bytes on any number of them.

use super::Case;
use super::case::floats;
use super::trained::Results;
use moesaic::cpu::{CpuDevice, Nodes};
use moesaic::spec::LayerSpec;
use moesaic::{DType, Engine, EngineOptions, Recompute};
use moesaic_harness::thorough::one_in;
use std::sync::Arc;

/// More blocks than lanes, and odd numbers of them.
const SPEC: &str = "shape = { model_dim = 131, hidden_dim = 301, experts = 5, top_k = 2 }\n\
                    experts = { bias = true }\n";

/// Processors in turns on so many nodes, whatever this machine has: the last
/// nodes may have none of its own.
fn nodes(count: usize) -> Nodes {
    Nodes::new((0..count).map(|node| (node..64).step_by(count).collect()))
}

fn engine(threads: usize, count: usize, pinned: bool) -> Engine {
    let device = CpuDevice::with_nodes(threads, nodes(count)).unwrap();
    let device = if pinned {
        device.pinned().unwrap()
    } else {
        device
    };
    let options = EngineOptions {
        tuned: false,
        ..EngineOptions::default()
    };
    Engine::on_device(Arc::new(device.poisoned()), options).unwrap()
}

/// Returns the results of both passes, and `y` of inference, whose weights are
/// packed.
fn results(case: &Case, engine: &Engine) -> (Results, Vec<f64>) {
    let layer = case.training_layer(engine, Recompute::None);
    let (trained, _) = case.train(&layer, &case.dy(7), &[false]);
    let output = case.layer(engine).forward(&case.input()).unwrap();
    (trained, floats(&output, "y"))
}

#[test]
fn no_number_of_nodes_changes_a_byte() {
    for dtype in [DType::F32, DType::Bf16] {
        let mut spec = LayerSpec::from_toml(SPEC).unwrap();
        spec.precision.weights = dtype;
        spec.precision.activations = dtype;
        let case = Case::random(&spec, 150, 1);
        case.check(&engine(3, 3, false));
        let expected = results(&case, &engine(1, 1, false));
        for count in 1..=3 {
            for threads in one_in(2, count, 1..=4) {
                let pinned = threads > 2 && cfg!(target_os = "linux");
                let same = results(&case, &engine(threads, count, pinned)) == expected;
                assert!(same, "{threads} threads, {count} nodes, {dtype}");
            }
        }
    }
}
