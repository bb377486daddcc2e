//! Tutel's example, step by step, by the reference and by compiled layers.

use super::helloworld::{PUBLISHED, Run, assert_printed, recorded, runs};
use crate::conformance::quick;
use moesaic::spec::canonical_tensors;
use moesaic::{Engine, EngineOptions};
use moesaic_harness::thorough::takes;

/// The first steps of each run by the f64 reference: that weights, tokens and
/// loss are those of Tutel, whatever our kernels do.
#[test]
fn reference_starts_as_tutel_does() {
    use moesaic::reference;
    for (options, mut run) in recorded() {
        if !run.spec.losses.is_empty() {
            continue; // the printed loss has another term
        }
        let input = reference::Input {
            tokens: run.tokens(),
            x: run.x.iter().map(|v| f64::from(*v)).collect(),
            ..reference::Input::default()
        };
        for step in 0..2 {
            let weights = as_reference(&run);
            let y = reference::forward(&run.spec, &weights, &input).y;
            let y: Vec<f32> = y.iter().map(|v| *v as f32).collect();
            let (loss, dy) = run.loss(&y);
            assert_printed(loss, run.losses[step], 5, options, step);
            let dy: Vec<f64> = dy.iter().map(|v| f64::from(*v)).collect();
            let gradients = reference::backward(&run.spec, &weights, &input, &dy).weights;
            run.descend(|name| gradients[name].data.iter().map(|v| *v as f32).collect());
        }
    }
}

fn as_reference(run: &Run) -> moesaic::reference::Weights {
    let tensor = |t: moesaic::spec::TensorSpec| {
        let data = run.weights[&t.name].iter().map(|v| f64::from(*v)).collect();
        let shape = t.shape;
        (t.name, moesaic::reference::Tensor { shape, data })
    };
    let list = canonical_tensors(&run.spec);
    moesaic::reference::Weights(list.into_iter().map(tensor).collect())
}

/// A hundred steps of the recorded runs by the compiled layer, or twenty of every other one.
#[test]
fn layer_prints_what_tutel_prints() {
    let engine = quick::open("cpu", EngineOptions::default()).expect("a C compiler");
    for (n, (options, run)) in recorded().enumerate() {
        let steps = if takes(n, 4) { 100 } else { 20 };
        run.train(&engine, steps, 5, options);
    }
}

/// The runs that Tutel's own tests compare with, four digits each.
#[test]
#[ignore = "trillions of operations a step: seconds on a large machine, minutes on two cores"]
fn layer_prints_what_tutel_publishes() {
    let engine = Engine::cpu().expect("a C compiler");
    let steps = std::env::var("MOESAIC_TUTEL_STEPS").ok();
    let steps = steps.map_or(6, |n| n.parse().expect("a number of steps"));
    for (options, run) in runs(include_str!("tutel_published.txt"), PUBLISHED) {
        run.train(&engine, steps, 4, options);
    }
}
