//! A loss over tokens of several ranks: routing alone gives the counts, and
//! the ranks' parts add up to the loss of the whole.

use super::case::{Case, floats, host, ints, longs};
use super::cases::small;
use super::compare::close;
use super::layers::engine as cpu;
use super::simulated::{SIMULATORS, open};
use super::trained::{RNG_KEY, draw};
use moesaic::reference;
use moesaic::spec::{LayerSpec, Loss, LossKind, NoiseKind, Score};
use moesaic::{DType, Layer, Recompute, RngKey, Tensor};
use std::collections::BTreeMap;
use std::ops::Range;

const TOKENS: usize = 45;

/// Where the second rank's tokens begin.
const SPLIT: usize = 17;

fn specs() -> [LayerSpec; 2] {
    let global = Loss {
        kind: LossKind::Global,
        coefficient: 0.3,
        sequence_length: None,
    };
    let mut noisy = small(25, 13, 9, 2);
    (noisy.router.noise, noisy.router.noise_kind) = (2.0, NoiseKind::Gaussian);
    noisy.losses = vec![global.clone()];
    let mut masked = small(25, 13, 9, 3);
    (masked.router.token_mask, masked.router.jitter) = (true, 0.1);
    masked.router.score = Score::Sigmoid;
    masked.losses = vec![global];
    [noisy, masked]
}

/// One rank's tokens of a case, numbered as in the whole.
fn rank(case: &Case, tokens: Range<usize>) -> (Case, RngKey) {
    let first_token = RNG_KEY.first_token + tokens.start as u64;
    let rng_key = RngKey {
        first_token,
        ..RNG_KEY
    };
    let d = case.spec.shape.model_dim;
    let mask = case.input.token_mask.as_ref();
    let part = Case {
        spec: case.spec.clone(),
        weights: case.weights.clone(),
        input: reference::Input {
            tokens: tokens.len(),
            x: case.input.x[tokens.start * d..tokens.end * d].to_vec(),
            token_mask: mask.map(|mask| mask[tokens].to_vec()),
            draw: Some(draw(rng_key)),
            ..reference::Input::default()
        },
    };
    (part, rng_key)
}

/// Assignments of each expert and tokens with an expert, by routing alone.
fn counted(case: &Case, layer: &Layer, rng_key: RngKey) -> (Vec<i64>, i64) {
    let names = ["counts", "topk_ids"];
    let routed = layer.route(case.input().reading(&names).in_training(rng_key));
    let routed = routed.unwrap_or_else(|e| panic!("{}: {e}", case.what("routing")));
    let ids = ints(&routed, "topk_ids");
    let choices = ids.chunks(case.spec.shape.top_k);
    let live = choices.filter(|ids| ids.iter().any(|id| *id >= 0));
    (longs(&routed, "counts"), live.count() as i64)
}

/// Loss, dx and gradients of a call, on a layer that adds to its gradients.
fn trained(
    case: &Case,
    layer: &Layer,
    rng_key: RngKey,
    group: &(Vec<i64>, i64),
    dy: &[f64],
) -> BTreeMap<String, Vec<f64>> {
    let mut input = case.input();
    let (counts, tokens) = group;
    let counts = Tensor::owned(&[counts.len()], counts.clone());
    input.insert("global_counts", counts);
    input.insert("global_tokens", Tensor::owned(&[1], vec![*tokens]));
    let (output, saved) = layer
        .forward_train(input.reading(&["y", "loss.global"]), rng_key)
        .unwrap_or_else(|e| panic!("{}: {e}", case.what("forward")));
    let shape = [case.input.tokens, case.spec.output_dim()];
    let dy = host(DType::F32, &shape, dy);
    let back = layer.backward(&saved, &dy, true).unwrap();
    let mut found = BTreeMap::new();
    for (output, name) in [(&output, "loss.global"), (&output, "y"), (&back, "dx")] {
        found.insert(name.to_string(), floats(output, name));
    }
    found
}

/// Two ranks' losses, outputs and gradients are those of the concatenation.
fn ranks_make_the_whole(target: &str, spec: &LayerSpec) {
    let whole = Case::random(spec, TOKENS, 5);
    let (whole, _) = rank(&whole, 0..TOKENS);
    let layer = whole.training_layer(&open(target), Recompute::None);
    let ranks = [0..SPLIT, SPLIT..TOKENS].map(|tokens| rank(&whole, tokens));
    let counts = ranks
        .iter()
        .map(|(case, rng_key)| counted(case, &layer, *rng_key));
    let group =
        counts.reduce(|(a, s), (b, t)| (a.iter().zip(b).map(|(a, b)| a + b).collect(), s + t));
    let group = group.expect("two ranks");
    assert_eq!(group, counted(&whole, &layer, RNG_KEY), "{target}");
    let dy = whole.dy(9);
    let mut sums: BTreeMap<String, Vec<f64>> = BTreeMap::new();
    let mut rest = &dy[..];
    for (case, rng_key) in &ranks {
        let (own, others) = rest.split_at(case.input.tokens * spec.output_dim());
        rest = others;
        for (name, values) in trained(case, &layer, *rng_key, &group, own) {
            sums.entry(name).or_default().extend(values);
        }
    }
    let what = |name: &str| format!("{name} on {target} of {}", spec.to_toml());
    let losses = reference::losses(spec, &whole.weights, &whole.input);
    let loss: f64 = sums["loss.global"].iter().sum();
    close(&what("loss"), &[loss], &[losses["loss.global"]], 2e-5);
    let y = reference::forward(spec, &whole.weights, &whole.input).y;
    close(&what("y"), &sums["y"], &y, 2e-5);
    let back = reference::backward(spec, &whole.weights, &whole.input, &dy);
    close(&what("dx"), &sums["dx"], &back.x, 2e-5);
    for (name, tensor) in &back.weights {
        let found = layer.gradient(name).expect("it has one").to_f32();
        let found: Vec<f64> = found.into_iter().map(f64::from).collect();
        close(&what(name), &found, &tensor.data, 2e-5);
    }
}

#[test]
fn two_ranks_have_the_loss_of_the_whole() {
    let host = cpu().target().to_string();
    for target in [&*host, "cpu:portable"].into_iter().chain(SIMULATORS) {
        for spec in specs() {
            ranks_make_the_whole(target, &spec);
        }
    }
}

/// The reference's own ranks: with the counts of the whole their losses and
/// gradients add up, with each rank's own they do not.
#[test]
fn the_references_ranks_have_the_loss_of_the_whole() {
    for spec in specs() {
        let (whole, _) = rank(&Case::random(&spec, TOKENS, 5), 0..TOKENS);
        let of = |case: &Case| reference::losses(&spec, &case.weights, &case.input)["loss.global"];
        let decision = reference::gate(&spec, &whole.weights, &whole.input).decision;
        let live = decision
            .ids
            .chunks(spec.shape.top_k)
            .filter(|ids| ids.iter().any(|e| *e >= 0));
        let group = (
            reference::demanded(&spec, &decision.ids),
            live.count() as u64,
        );
        let (mut alone, mut together) = (0.0, 0.0);
        for tokens in [0..SPLIT, SPLIT..TOKENS] {
            let (mut case, _) = rank(&whole, tokens);
            alone += of(&case);
            case.input.global = Some(group.clone());
            together += of(&case);
        }
        close("loss.global", &[together], &[of(&whole)], 1e-12);
        assert!(
            (alone - together).abs() > 0.1 * together,
            "{alone} {together}"
        );
    }
}
