//! The language model of `examples/char_lm`, its gradients held against
//! differences of its loss.

#[path = "../../../examples/char_lm/attention.rs"]
mod attention;
#[path = "../../../examples/char_lm/dense.rs"]
mod dense;
#[path = "../../../examples/char_lm/model.rs"]
mod model;
mod plain;
mod processes;
#[allow(dead_code)] // reports are for the terminal
#[path = "../../../examples/char_lm/ranks.rs"]
mod ranks;
#[allow(dead_code)] // pace and reports are for the terminal
#[path = "../../../examples/char_lm/run.rs"]
mod run;
mod spread;
#[path = "../../../examples/char_lm/text.rs"]
mod text;

use super::common;
use attention::Shape;
use common::experts::{self, Experts};
use common::feed_forward::FeedForward;
use common::ops::{Module, Param};
use dense::Dense;
use model::Model;
use moesaic::Engine;
use moesaic::reference::Random;
use plain::Plain;
use run::{Learner, Pace};
use std::collections::BTreeMap;
use text::{Batch, Text};

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
        all: 4 * SHAPE.context,
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

/// The compiled layer against the same layer in plain loops.
#[test]
fn experts_compute_what_plain_loops_do() {
    let (d, h, e, k, tokens) = (24, 40, 6, 2, 50);
    let mut spec = experts::spec(d, h, e, k);
    spec.losses.clear(); // the plain layer has none
    let mut random = Random::new(6);
    let engine = Engine::cpu().expect("a C compiler");
    let mut layer = Experts::new(&engine, &spec, 1.0, &mut random).expect("it compiles");
    let mut plain = Plain::new([d, h, e, k], 1.0, &mut random);
    let mut values = named(&mut layer, |param| param.value.clone());
    // Biases start at zero: no test of them.
    let biases = values.iter_mut().filter(|(name, _)| name.ends_with("bias"));
    biases.for_each(|(_, v)| v.iter_mut().for_each(|v| *v = random.signed() as f32));
    layer.params("", &mut |name, param| {
        param.value.clone_from(&values[&name])
    });
    plain.params("", &mut |name, param| {
        param.value = part(&values, &name, e);
    });
    let mut draw = || random.vec(tokens * d).iter().map(|v| *v as f32).collect();
    let (x, dy): (Vec<f32>, Vec<f32>) = (draw(), draw());
    let y = layer.forward(x.clone()).expect("it runs");
    assert_close("y", &y, &plain.forward(x).expect("it runs"));
    let dx = layer.backward(&dy).expect("it runs");
    assert_close("dx", &dx, &plain.backward(&dy).expect("it runs"));
    let gradients = named(&mut layer, |param| param.grad.clone());
    for (name, expected) in named(&mut plain, |param| param.grad.clone()) {
        assert_close(&name, &part(&gradients, &name, e), &expected);
    }
}

#[test]
fn expert_model_has_the_gradients_of_its_loss() {
    let mut spec = experts::spec(SHAPE.width, 8, 4, 2);
    spec.losses.clear(); // the model's loss is cross entropy alone
    let engine = Engine::cpu().expect("a C compiler");
    let mut random = Random::new(3);
    let layer = |_| Experts::new(&engine, &spec, 1.0, &mut random).expect("it compiles");
    check(Model::new(
        VOCABULARY,
        SHAPE,
        (0..2).map(layer).collect(),
        3,
    ));
}

/// The example in small: from guessing, 4.4 nats, most of the way to the
/// letters' frequencies, 3.1.
#[test]
fn expert_model_learns() {
    let text = Text::book();
    let engine = Engine::cpu().expect("a C compiler");
    let mut random = Random::new(8);
    let spec = experts::spec(SHAPE.width, 16, 8, 2);
    let layer = |_| Experts::new(&engine, &spec, 1.0, &mut random).expect("it compiles");
    let model = Model::new(text.vocabulary, SHAPE, (0..2).map(layer).collect(), 4);
    let mut learner = Learner::new(model, &Pace::quick().with_steps(200));
    let held_out = text.held_out(64, SHAPE.context);
    let mut batches = Random::new(9);
    for _ in 0..200 {
        let batch = text.batch(16, SHAPE.context, &mut batches);
        learner.step(&batch).expect("it runs");
    }
    let point = learner.report(&held_out).expect("it runs");
    assert_eq!(point.step, 200);
    let seen = point.training.min(point.held_out);
    assert!(
        point.held_out < 3.4,
        "held out {}, seen {seen}",
        point.held_out
    );
}

fn named(module: &mut impl Module, take: fn(&Param) -> Vec<f32>) -> BTreeMap<String, Vec<f32>> {
    let mut values = BTreeMap::new();
    module.params("", &mut |name, param| {
        values.insert(name, take(param));
    });
    values
}

/// The part of a tensor over all experts that the plain layer calls `name`,
/// such as `.up3.weight`.
fn part(all: &BTreeMap<String, Vec<f32>>, name: &str, experts: usize) -> Vec<f32> {
    if name == ".router" {
        return all[".router.weight"].clone();
    }
    let (map, kind) = name[1..].split_once('.').expect("map and kind");
    let digits = map.trim_start_matches(char::is_alphabetic);
    let map = map.trim_end_matches(char::is_numeric);
    let tensor = &all[&format!(".experts.{map}.{kind}")];
    let size = tensor.len() / experts;
    let expert: usize = digits.parse().expect("an expert's number");
    tensor[expert * size..][..size].to_vec()
}

fn assert_close(name: &str, got: &[f32], expected: &[f32]) {
    assert_eq!(got.len(), expected.len(), "{name}");
    let largest = expected.iter().fold(0f32, |m, v| m.max(v.abs()));
    for (i, (g, e)) in got.iter().zip(expected).enumerate() {
        assert!(
            (g - e).abs() <= 1e-5 * largest,
            "{name}[{i}]: {g} instead of {e}"
        );
    }
}
