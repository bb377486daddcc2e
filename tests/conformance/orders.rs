//! Orders of placement by a key, against the rule: the place of an assignment
//! is the number of those of its expert that come before it.

use super::Case;
use super::case::ints;
use super::layers::engines;
use moesaic::Engine;
use moesaic::reference::{self, Random};
use moesaic::spec::{CapacityMode, CapacityOrder, LayerSpec, RouterKind};
use std::cmp::Ordering;

const EXPERTS: usize = 5;
const TOP_K: usize = 2;

fn spec(order: CapacityOrder, mode: CapacityMode) -> LayerSpec {
    let shape = format!(
        "shape = {{ model_dim = 7, hidden_dim = 3, experts = {EXPERTS}, top_k = {TOP_K} }}"
    );
    let mut spec = LayerSpec::from_toml(&shape).expect("it is valid");
    (spec.capacity.order, spec.capacity.mode) = (order, mode);
    if mode == CapacityMode::Factor {
        spec.capacity.factor = 0.75;
    }
    match order {
        CapacityOrder::BatchPrioritized => spec.router.token_mask = true,
        _ => spec.router.kind = RouterKind::External,
    }
    spec
}

/// Counts, for each assignment, those before it.
fn by_counting(ids: &[i32], room: i64, before: impl Fn(usize, usize) -> Ordering) -> Vec<i32> {
    let place = |slot: usize| {
        if ids[slot] < 0 {
            return -1;
        }
        let same = (0..ids.len()).filter(|&other| ids[other] == ids[slot]);
        let ahead = same.filter(|&other| before(other, slot).is_lt()).count();
        if (ahead as i64) < room {
            ahead as i32
        } else {
            -1
        }
    };
    (0..ids.len()).map(place).collect()
}

/// Slot after slot, tokens ascending: what decides between equal keys.
fn slot_major(slot: usize) -> (usize, usize) {
    (slot % TOP_K, slot / TOP_K)
}

fn check(engine: &Engine, case: &Case) {
    let output = case
        .layer(engine)
        .forward(case.input().reading(&["topk_ids", "locations"]))
        .unwrap_or_else(|e| panic!("{}: {e}", case.describe()));
    let ids = ints(&output, "topk_ids");
    let (spec, tokens) = (&case.spec, case.input.tokens);
    let decision = reference::gate(spec, &case.weights, &case.input).decision;
    assert_eq!(ids, decision.ids, "{}", case.describe());
    let counts = reference::demanded(spec, &ids);
    let room = reference::capacity_rows(spec, &case.input, &counts).unwrap_or(i64::MAX);
    let draws: Vec<u64> = (0..tokens * TOP_K)
        .map(|slot| reference::random_key(None, slot / TOP_K, slot % TOP_K))
        .collect();
    let (weights, best) = (&decision.weights, &decision.importance);
    let expected = by_counting(&ids, room, |a, b| {
        let ((k, s), (l, t)) = (slot_major(a), slot_major(b));
        let by_key = match spec.capacity.order {
            CapacityOrder::Probability => reference::descending(weights[a], weights[b]),
            CapacityOrder::Random => draws[b].cmp(&draws[a]),
            _ => k.cmp(&l).then(reference::descending(best[s], best[t])),
        };
        by_key.then((k, s).cmp(&(l, t)))
    });
    let found = ints(&output, "locations");
    let what = format!("{}: {}", engine.target(), case.describe());
    super::compare::equal(&what, &found, &expected);
}

/// Tokens of a few kinds, so that scores and weights tie; some weights are
/// zeros of either sign and NaN.
fn with_ties(spec: &LayerSpec, tokens: usize, seed: u64) -> Case {
    let mut case = Case::random(spec, tokens, seed);
    let mut random = Random::new(seed);
    let d = spec.shape.model_dim;
    let kinds = case.input.x.clone();
    for token in 0..tokens {
        let kind = random.bits() as usize % tokens.min(11);
        let row = &kinds[kind * d..(kind + 1) * d];
        case.input.x[token * d..(token + 1) * d].copy_from_slice(row);
    }
    if let Some((_, weights)) = &mut case.input.routing {
        let levels = [0.0, -0.0, f64::NAN, 0.25, 0.5, -0.5, 1e-30, f64::INFINITY];
        for weight in weights {
            *weight = levels[random.bits() as usize % levels.len()];
        }
    }
    case
}

/// As [`with_ties`], with all assignments at one expert, or at none.
fn crowded(spec: &LayerSpec, tokens: usize, expert: i32) -> Case {
    let mut case = with_ties(spec, tokens, 9);
    match &mut case.input.routing {
        Some((ids, _)) => {
            // A token has an expert once.
            for (slot, id) in ids.iter_mut().enumerate() {
                *id = if slot % TOP_K == 1 { expert } else { -1 };
            }
        }
        None if expert < 0 => case.input.token_mask = Some(vec![0; tokens]),
        None => {}
    }
    case
}

fn places_by(order: CapacityOrder) {
    for engine in engines() {
        for mode in [CapacityMode::MaxCount, CapacityMode::Factor] {
            let spec = spec(order, mode);
            // On both sides of where a list is sorted by its digits.
            for tokens in [0, 1, 47, 49, 130, 1500] {
                check(&engine, &with_ties(&spec, tokens, tokens as u64));
                check(&engine, &Case::random(&spec, tokens, tokens as u64));
            }
            for expert in [-1, 3] {
                check(&engine, &crowded(&spec, 700, expert));
            }
        }
    }
}

#[test]
fn batch_prioritized_places_are_those_of_counting() {
    places_by(CapacityOrder::BatchPrioritized);
}

#[test]
fn places_by_probability_are_those_of_counting() {
    places_by(CapacityOrder::Probability);
}

#[test]
fn random_places_are_those_of_counting() {
    places_by(CapacityOrder::Random);
}
