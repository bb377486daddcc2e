//! The language model of `examples/char_lm`, its gradients held against
//! differences of its loss.

#[path = "../../../examples/char_lm/attention.rs"]
mod attention;
#[path = "../../../examples/common/mod.rs"]
mod common;
#[path = "../../../examples/char_lm/dense.rs"]
mod dense;
#[path = "../../../examples/char_lm/model.rs"]
mod model;
mod plain;
#[allow(dead_code)] // the corpus is not needed here
#[path = "../../../examples/char_lm/text.rs"]
mod text;

use attention::Shape;
use common::feed_forward::FeedForward;
use common::ops::{Module, Param};
use dense::Dense;
use model::Model;
use moesaic::reference::Random;
use plain::Plain;
use text::Batch;

const SHAPE: Shape = Shape {
    context: 6,
    width: 8,
    heads: 2,
};
const VOCABULARY: usize = 11;

fn batch() -> Batch {
    let mut random = Random::new(5);
    let mut draw = || {
        (0..4 * SHAPE.context)
            .map(|_| random.bits() as usize % VOCABULARY)
            .collect()
    };
    Batch {
        tokens: draw(),
        targets: draw(),
    }
}

/// Moves every parameter whose name has `part` along `direction`.
fn shift<F: FeedForward>(model: &mut Model<F>, name: &str, direction: &[f32], factor: f64) {
    model.params("", &mut |n, param| {
        if n == name {
            for (v, d) in param.value.iter_mut().zip(direction) {
                *v += (factor * f64::from(*d)) as f32;
            }
        }
    });
}

/// The slope of the loss along each parameter's gradient must be its length.
fn check<F: FeedForward>(mut model: Model<F>) {
    let batch = batch();
    model.gradients(&batch).expect("the layers run");
    let mut gradients: Vec<(String, Vec<f32>)> = Vec::new();
    model.params("", &mut |name, param: &mut Param| {
        gradients.push((name, param.grad.clone()));
    });
    let mut seen = 0;
    for (name, gradient) in gradients {
        let square: f64 = gradient.iter().map(|g| f64::from(*g).powi(2)).sum();
        let length = square.sqrt();
        if length < 1e-3 {
            continue; // too flat for differences in f32
        }
        seen += 1;
        let step = 4e-4;
        shift(&mut model, &name, &gradient, step / length);
        let above = model.loss(&batch).expect("the layers run");
        shift(&mut model, &name, &gradient, -2.0 * step / length);
        let below = model.loss(&batch).expect("the layers run");
        shift(&mut model, &name, &gradient, step / length);
        let slope = (above - below) / (2.0 * step);
        assert!(
            (slope - length).abs() < 5e-3 * length + 3e-4,
            "{name}: slope {slope}, gradient {length}"
        );
    }
    assert!(seen > 20, "only {seen} parameters were checked");
}

#[test]
fn dense_model_has_the_gradients_of_its_loss() {
    let mut random = Random::new(1);
    let layer = |_| Dense::new(SHAPE.width, 16, 1.0, &mut random);
    check(Model::new(
        VOCABULARY,
        SHAPE,
        (0..2).map(layer).collect(),
        1,
    ));
}

#[test]
fn plain_experts_have_the_gradients_of_their_loss() {
    let mut random = Random::new(2);
    let layer = |_| Plain::new([SHAPE.width, 8, 4, 2], 1.0, &mut random);
    check(Model::new(
        VOCABULARY,
        SHAPE,
        (0..2).map(layer).collect(),
        2,
    ));
}
