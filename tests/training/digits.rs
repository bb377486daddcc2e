//! The classifier of `examples/digits`, which learns from its images in one epoch.

#[path = "../../examples/digits/images.rs"]
mod images;
#[path = "../../examples/digits/model.rs"]
mod model;

use super::common;
use common::experts::{Experts, spec};
use common::optimizer;
use images::Images;
use model::Classifier;
use moesaic::Engine;
use moesaic::reference::Random;

const WIDTH: usize = 64;

#[test]
fn experts_learn_to_read_digits() {
    let engine = Engine::cpu().expect("a C compiler");
    let (train, test) = Images::load();
    let mut random = Random::new(4);
    let layers = (0..2).map(|_| {
        let spec = spec(WIDTH, 32, 8, 2);
        Experts::new(&engine, &spec, 0.5, &mut random).expect("the kernels compile")
    });
    let mut model = Classifier::new(WIDTH, layers.collect(), 1);
    let before = model.accuracy(&test).expect("it runs");
    let (mut state, mut order) = (optimizer::adamw(0.05), Random::new(9));
    let mut losses = Vec::new();
    for batch in train.shuffled(64, &mut order) {
        losses.push(model.gradients(&batch).expect("it runs"));
        optimizer::step(&mut state, &mut model, 3e-3).expect("a step");
    }
    let (first, last) = (losses[0], losses[losses.len() - 1]);
    let after = model.accuracy(&test).expect("it runs");
    assert!(
        before < 0.3 && after > 0.6,
        "accuracy {before:.3} to {after:.3}"
    );
    assert!(last < 0.75 * first, "loss {first:.3} to {last:.3}");
}
