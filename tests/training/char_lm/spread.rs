//! The language model on many ranks: the losses of one process, on any mesh, also when a
//! run goes on elsewhere.

use super::common::experts::{self, Experts};
use super::common::mesh_experts::MeshExperts;
use super::model::Model;
use super::ranks::RankLearner;
use super::run::{Learner, Pace};
use super::text::Text;
use super::{SHAPE, VOCABULARY};
use crate::conformance::mesh::{mesh, on_ranks};
use moesaic::reference::Random;
use moesaic::{Engine, LayerSpec, Mesh, Parallel, Tensors};
use std::path::Path;

pub(super) const STEPS: usize = 6;
const SEQUENCES: usize = 5;

fn spec() -> LayerSpec {
    experts::spec(SHAPE.width, 8, 4, 2)
}

fn pace() -> Pace {
    Pace::quick().with_steps(STEPS)
}

pub(super) fn batch(text: &Text, step: usize) -> super::text::Batch {
    text.batch(SEQUENCES, SHAPE.context, &mut Random::new(70 + step as u64))
}

/// Losses of one process, and its loss on held-out text.
pub(super) fn alone(engine: &Engine, text: &Text) -> Vec<f64> {
    let mut random = Random::new(8);
    let layer = |_| Experts::new(engine, &spec(), 1.0, &mut random).expect("it compiles");
    let model = Model::new(text.vocabulary, SHAPE, (0..2).map(layer).collect(), 4);
    let mut learner = Learner::new(model, &pace());
    let held_out = text.held_out(3, SHAPE.context);
    let losses = (1..=STEPS).map(|step| {
        learner.step(&batch(text, step)).expect("it runs");
        learner.report(&held_out).expect("it runs")
    });
    let losses: Vec<_> = losses.collect();
    let last = losses[STEPS - 1].held_out;
    losses
        .iter()
        .map(|point| point.training)
        .chain([last])
        .collect()
}

pub(super) fn learner(engine: &Engine, mesh: &Mesh, text: &Text) -> RankLearner {
    let mut random = Random::new(8);
    let layer = |_| MeshExperts::new(engine, mesh, &spec(), 1.0, &mut random).expect("it compiles");
    let model = Model::new(text.vocabulary, SHAPE, (0..2).map(layer).collect(), 4);
    RankLearner::new(model, &engine.ranks(mesh), &pace(), SHAPE.context)
}

/// A run of a rank: from a checkpoint, and to another after `until` steps.
fn run(
    engine: &Engine,
    mesh: &Mesh,
    text: &Text,
    from: Option<&Path>,
    (until, to): (usize, Option<&Path>),
) -> (Vec<f64>, Tensors<'static>) {
    let mut learner = learner(engine, mesh, text);
    if let Some(file) = from {
        learner.resume(file).expect("it was saved");
    }
    let mut losses = Vec::new();
    while learner.steps() < until {
        let batch = batch(text, learner.steps() + 1);
        losses.push(learner.step(&batch).expect("it runs"));
    }
    if let Some(file) = to {
        learner.save(file).expect("there is room");
    }
    losses.push(
        learner
            .held_out(&text.held_out(3, SHAPE.context))
            .expect("it runs"),
    );
    (losses, learner.values())
}

pub(super) fn near(what: Parallel, found: &[f64], want: &[f64]) {
    assert_eq!(found.len(), want.len());
    for (step, (found, want)) in found.iter().zip(want).enumerate() {
        assert!(
            (found - want).abs() < 1e-5,
            "{what:?}, {step}: {found}, not {want}"
        );
    }
}

#[test]
fn ranks_learn_what_one_process_learns_and_go_on_elsewhere() {
    let text = Text::book();
    assert!(text.vocabulary > VOCABULARY);
    let engine = Engine::cpu().expect("a C compiler");
    let want = alone(&engine, &text);
    let folder = tempfile::tempdir().expect("a folder");
    let half = folder.path().join("half.safetensors");
    // The first mesh saves on its way; the others go on from there. One has a rank
    // without sequences in some batches of five.
    let first = mesh(2, 1, 2);
    let on = |parallel, from: Option<&Path>, until, to: Option<&Path>| {
        on_ranks(&engine, parallel, |mesh| {
            run(&engine, mesh, &text, from, (until, to))
        })
    };
    near(first, &on(first, None, STEPS, None)[0].0, &want);
    let saved = on(first, None, STEPS / 2, Some(&half));
    near(first, &saved[0].0[..STEPS / 2], &want[..STEPS / 2]);
    for parallel in [first, mesh(1, 1, 1), mesh(3, 2, 1)] {
        let ranks = on(parallel, Some(&half), STEPS, None);
        near(parallel, &ranks[0].0, &want[STEPS / 2..]);
    }
    // On the same mesh it ends with the same bits.
    let straight = on(first, None, STEPS, None);
    let resumed = on(first, Some(&half), STEPS, None);
    for (straight, resumed) in straight.iter().zip(&resumed) {
        assert!(straight.1 == resumed.1);
    }
}
