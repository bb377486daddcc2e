//! Routing and the copy into expert order at awkward sizes, thread by thread
//! on this CPU, against the reference. The experts' GEMMs are left out.

use moesaic_harness::pass::Tensors;
use moesaic_harness::plans::{only, planned, routes};
use moesaic_harness::thorough::{in_turns, turn_of};
use moesaic_harness::{Harness, check, specs};
use moesaic_plan::PlanOptions;
use moesaic_reference::Input;
use moesaic_spec::*;

/// A target with warps of 32 and one with waves of 64.
const TARGETS: [&str; 2] = ["cuda:sm_80", "rocm:gfx942"];

fn spec(d: usize, e: usize, k: usize) -> LayerSpec {
    specs::spec(d, 4, e, k)
}

fn external(e: usize, k: usize, order: CapacityOrder) -> LayerSpec {
    let mut spec = spec(4, e, k);
    spec.router.kind = RouterKind::External;
    spec.capacity.order = order;
    spec
}

/// The routing steps of a layer.
struct Routing {
    harness: Harness,
    target: &'static str,
}

impl Routing {
    fn new(spec: &LayerSpec, target: &'static str) -> Routing {
        let plan = planned(spec, target.parse().unwrap(), &PlanOptions::default());
        let harness = Harness::of(only(plan, routes));
        Routing { harness, target }
    }

    fn run(&self, input: &Input) -> Tensors {
        let tensors = self.harness.run(input);
        let spec = &self.harness.plan.spec;
        let what = format!("{}, {} tokens, {spec:?}", self.target, input.tokens);
        check::routing(&self.harness, &tensors, &what);
        tensors
    }

    fn check(&self, tokens: usize) {
        let input = self.harness.random_input(tokens, tokens as u64);
        self.run(&input);
    }
}

fn run(spec: &LayerSpec, tokens: &[usize]) {
    for target in in_turns(turn_of(spec), TARGETS) {
        let routing = Routing::new(spec, target);
        tokens.iter().for_each(|&t| routing.check(t));
    }
}

#[test]
fn few_experts() {
    for (e, k) in [(1, 1), (3, 2), (7, 7), (60, 3), (64, 64), (128, 8)] {
        run(&spec(5, e, k), &[0, 1, 33, 257]);
    }
}

#[test]
fn many_experts() {
    for (e, k) in [(160, 1), (256, 8), (384, 2), (512, 3), (1000, 8), (1024, 8)] {
        run(&spec(5, e, k), &[1, 33]);
    }
    run(&spec(5, 1024, 1024), &[3]);
}

/// Several runs of tiles with and without a partial last tile, and two rounds of runs.
#[test]
fn many_tokens() {
    run(&spec(4, 8, 2), &[2048]);
    run(&spec(4, 60, 3), &[2048 + 33]);
    let mut by_token = spec(4, 12, 8);
    by_token.capacity.order = CapacityOrder::TokenMajor;
    run(&by_token, &[4099]);
    run(&external(65, 64, CapacityOrder::SlotMajor), &[33 * 64 + 1]);
}

/// Ids from outside, some masked: the scan counts for itself.
#[test]
fn external_routing() {
    use CapacityOrder::{SlotMajor, TokenMajor};
    for (e, k, order) in [
        (256, 8, SlotMajor),
        (40, 5, TokenMajor),
        (1024, 2, SlotMajor),
    ] {
        run(&external(e, k, order), &[0, 1, 33, 2100]);
    }
    run(&external(1024, 1024, TokenMajor), &[1, 9]);
}

/// All tokens to one expert, the last; all masked but one assignment.
#[test]
fn one_expert_takes_all() {
    for order in [CapacityOrder::SlotMajor, CapacityOrder::TokenMajor] {
        for target in TARGETS {
            let routing = Routing::new(&external(33, 2, order), target);
            let mut input = routing.harness.random_input(4100, 1);
            let ids = &mut input.routing.as_mut().unwrap().0;
            ids.fill(32);
            let tensors = routing.run(&input);
            assert_eq!(tensors.ints("counts")[32], 8200);
            let ids = &mut input.routing.as_mut().unwrap().0;
            ids.fill(-1);
            ids[4097] = 31;
            let tensors = routing.run(&input);
            assert_eq!(tensors.ints("row_slots")[0], 4097);
        }
    }
}

/// Every choice of a layer that counts in the selection gets the place that it
/// gets when the same ids come from outside.
#[test]
fn who_counts_does_not_show() {
    for order in [CapacityOrder::SlotMajor, CapacityOrder::TokenMajor] {
        let mut inside = spec(6, 24, 4);
        inside.capacity.order = order;
        inside.capacity.mode = CapacityMode::Factor;
        for target in TARGETS {
            let routing = Routing::new(&inside, target);
            let input = routing.harness.random_input(500, 3);
            let first = routing.run(&input);
            let mut spec = inside.clone();
            spec.router.kind = RouterKind::External;
            let routing = Routing::new(&spec, target);
            let mut input = routing.harness.random_input(500, 3);
            input.routing = Some((first.ids(), first.get("topk_weights").to_vec()));
            let second = routing.run(&input);
            for name in ["counts", "capacity", "offsets", "locations", "slot_rows"] {
                assert_eq!(first.ints(name), second.ints(name), "{target}: {name}");
            }
        }
    }
}

/// Orders that sort: several runs of keys, experts across their edges, ties.
#[test]
fn orders_that_sort() {
    use CapacityOrder::{BatchPrioritized, Probability, Random};
    for (order, score) in [
        (BatchPrioritized, Score::Softmax),
        (Probability, Score::Sigmoid),
        (Probability, Score::One),
        (Random, Score::Softmax),
    ] {
        let mut spec = spec(4, 5, 2);
        spec.router.score = score;
        spec.capacity.mode = CapacityMode::Factor;
        spec.capacity.factor = 0.7;
        spec.capacity.order = order;
        run(&spec, &[0, 1, 33, 2100]);
    }
    let mut spec = spec(4, 300, 3);
    spec.experts.identity = 20;
    spec.capacity.mode = CapacityMode::Factor;
    spec.capacity.order = Probability;
    run(&spec, &[700]);
}
