//! Experts behind several routers over ranks: the results of one process that has all tokens.

use super::Case;
use super::case::floats;
use super::compare::close;
use super::gates::{SMALL, multi_gate, random_dy_of, three_gates, weights_of};
use super::layers::engine;
use super::mesh::{mesh, on_ranks, part, sharded, shares};
use super::trained::RNG_KEY;
use moesaic::engine::joined_placed;
use moesaic::experts::MultiGate;
use moesaic::mesh::ProcessGroup;
use moesaic::plan::{RankCoords, stacked};
use moesaic::{Input, LayerOptions, Mesh, Parallel, Strategy, Tensor, Tensors, Training};
use std::ops::Range;

const TOKENS: usize = 23;

/// The results of one rank, or of one process.
pub struct Rank {
    place: RankCoords,
    /// The bytes of `y` of each gate, evaluated and trained.
    y: [[Vec<u8>; 2]; 3],
    dx: [Vec<f64>; 3],
    /// The sums of gradients of each gate's layer.
    gradients: [Tensors<'static>; 3],
}

impl Rank {
    /// Returns whether all bytes are equal.
    pub fn equals(&self, other: &Rank) -> bool {
        let gradients = self.gradients.iter().zip(&other.gradients);
        let mut tensors = gradients.flat_map(|(one, other)| one.iter().map(move |at| (at, other)));
        self.y == other.y
            && self.dx == other.dx
            && tensors.all(|((name, one), other)| one.data == other[name].data)
    }
}

fn gradients(gates: &MultiGate, gate: usize) -> Tensors<'static> {
    let gradients = gates.layers()[gate].gradients().unwrap();
    gradients.into_iter().collect()
}

/// Evaluates, and goes forward and backward over some tokens, with gradients that are then summed.
fn step(gates: &MultiGate, place: RankCoords, cases: &[Case; 3], share: &Range<usize>) -> Rank {
    let own = part(&cases[0], share);
    let input = own.input();
    let input = input.reading(&["y"]);
    let bytes = |outputs: &[moesaic::Output], gate: usize| outputs[gate].y().data.to_vec();
    let evaluated = gates.forward(input).unwrap();
    let dy = [8, 9, 10].map(|seed| {
        let all = random_dy_of(&cases[0], seed);
        all.rows(share.clone()).unwrap().into_static()
    });
    // Gradients that were added to and summed are overwritten.
    for accumulate in [false, true] {
        let (_, saved) = gates.forward_train(input, RNG_KEY).unwrap();
        gates.backward(&saved, &dy, accumulate).unwrap();
    }
    gates.average_gradients().unwrap();
    let averages = [0, 1, 2].map(|gate| gradients(gates, gate));
    let (mut trained, mut back) = (Vec::new(), Vec::new());
    for accumulate in [false, true] {
        let (outputs, saved) = gates.forward_train(input, RNG_KEY).unwrap();
        back = gates.backward(&saved, &dy, accumulate).unwrap();
        trained = outputs;
    }
    gates.reduce_gradients().unwrap();
    let sums = [0, 1, 2].map(|gate| gradients(gates, gate));
    let ranks = gates.layers()[0]
        .mesh()
        .map_or(1, |mesh| mesh.parallel().ranks());
    for (averages, sums) in averages.iter().zip(&sums) {
        for (name, sum) in sums {
            let average: Vec<f64> = averages[name]
                .to_f64()
                .iter()
                .map(|g| g * ranks as f64)
                .collect();
            close(name, &average, &sum.to_f64(), 1e-6);
        }
    }
    Rank {
        place,
        y: [0, 1, 2].map(|gate| [bytes(&evaluated, gate), bytes(&trained, gate)]),
        dx: [0, 1, 2].map(|gate| floats(&back[gate], "dx")),
        gradients: sums,
    }
}

/// Options of layers that train.
fn options() -> LayerOptions<'static> {
    LayerOptions::default().training(Training::default())
}

/// Returns the results of three gates on one rank.
pub fn of_rank(mesh: &Mesh, toml: &str, strategy: &str) -> Rank {
    let cases = three_gates(toml, TOKENS);
    let strategy = (!strategy.is_empty()).then(|| strategy.parse::<Strategy>().unwrap());
    let adaptive = mesh.for_any_r();
    let mesh = if strategy.is_some() { &adaptive } else { mesh };
    let options = LayerOptions {
        strategy,
        mesh: Some(mesh),
        ..options()
    };
    let gates = multi_gate(&engine(), &cases, options);
    assert!(!gates.in_one_pass());
    let shares = shares(TOKENS, mesh.parallel().ranks());
    step(&gates, mesh.place(), &cases, &shares[mesh.rank()])
}

/// Compares three gates over ranks with those of one process.
fn check(toml: &str, parallel: Parallel, strategy: &str) {
    let what = format!("{parallel:?} {strategy} {toml}");
    let cases = three_gates(toml, TOKENS);
    let whole = multi_gate(&engine(), &cases, options());
    let alone = RankCoords {
        dp: 0,
        ep: 0,
        tp: 0,
    };
    let whole = step(&whole, alone, &cases, &(0..TOKENS));
    let ranks = on_ranks(&engine(), parallel, |mesh| of_rank(mesh, toml, strategy));
    for gate in 0..3 {
        let what = format!("gate {gate} of {what}");
        if parallel.expert_tp == 1 {
            for pass in [0, 1] {
                let y = ranks.iter().flat_map(|rank| rank.y[gate][pass].clone());
                assert!(
                    y.eq(whole.y[gate][pass].iter().copied()),
                    "{what}: y {pass}"
                );
            }
        }
        let dx: Vec<f64> = ranks
            .iter()
            .flat_map(|rank| rank.dx[gate].clone())
            .collect();
        close(&format!("dx, {what}"), &dx, &whole.dx[gate], 1e-5);
        for (name, want) in &whole.gradients[gate] {
            let found = joined(&ranks, gate, parallel, name);
            let [found, want] = [&found, want].map(|tensor| tensor.to_f64());
            close(&format!("{name}, {what}"), &found, &want, 1e-5);
        }
    }
}

/// A gradient of the whole layer, from the parts of ranks.
fn joined(ranks: &[Rank], gate: usize, parallel: Parallel, name: &str) -> Tensor<'static> {
    let part = |place: RankCoords| {
        let rank = ranks.iter().find(|rank| rank.place == place).unwrap();
        rank.gradients[gate][name].lend()
    };
    match ProcessGroup::of(parallel, name) {
        ProcessGroup::World => part(ranks[0].place).into_static(),
        _ => joined_placed(name, (parallel, None), part),
    }
}

#[test]
fn gates_over_ranks_are_those_of_one_process() {
    let specs = [
        "router = { noise = 2.0, renormalize = \"sum\" }\n\
         [[shared]]\nhidden_dim = 6\ngate = \"sigmoid\"",
        "experts = { bias = true, identity = 1 }\nrouter.bias = true",
        "router = { weight_on = \"input\", score = \"sigmoid\" }",
    ]
    .map(|rest| format!("{SMALL}{rest}\n"));
    check(&specs[0], mesh(2, 1, 1), "");
    check(&specs[1], mesh(3, 1, 1), "");
    check(&specs[2], mesh(2, 1, 2), "");
    check(&specs[0], sharded(1, 2, 1), "");
    check(&specs[0], mesh(2, 1, 1), "overlap_degree=2");
    check(&specs[2], mesh(2, 2, 1), "r=1");
    check(&specs[1], mesh(2, 1, 1), "shadows=2");
}

/// A rank may bring its part of the experts alone, with a router that is none of the gates'.
#[test]
fn gates_take_the_part_of_a_rank() {
    on_ranks(&engine(), mesh(2, 1, 1), |mesh| {
        let cases = three_gates(SMALL, 5);
        let (whole, input) = (weights_of(&cases[0], false), cases[0].input());
        let all = Case::random(&cases[0].spec, 5, 9).host_weights();
        let parts = all.keys().map(|name| {
            let of = if name.starts_with("router.") {
                &all
            } else {
                &whole
            };
            (name.to_string(), mesh.part(of, name).unwrap())
        });
        let parts: Tensors<'static> = parts.collect();
        let routers = cases.each_ref().map(|case| weights_of(case, true));
        let of = |weights: &Tensors<'_>, part: bool| {
            let options = LayerOptions {
                part,
                ..LayerOptions::over(mesh)
            };
            let gates = engine().multi_gate(&cases[0].spec, weights, &routers, options);
            let outputs = gates.unwrap().forward(&input).unwrap();
            outputs
                .iter()
                .map(|output| floats(output, "y"))
                .collect::<Vec<_>>()
        };
        assert!(of(&parts, true) == of(&whole, false));
    });
}

/// The way that docs/internals/ranks.md names: one exchange for the tokens of all gates.
#[test]
fn one_layer_takes_the_decisions_of_all_gates() {
    let (engine, cases) = (engine(), three_gates(SMALL, TOKENS));
    on_ranks(&engine, mesh(2, 1, 1), |mesh| {
        let gates = multi_gate(&engine, &cases, LayerOptions::over(mesh));
        let own = part(&cases[0], &shares(TOKENS, 2)[mesh.rank()]).input();
        let (x, top_k) = (own.tensors["x"].to_f32(), cases[0].spec.shape.top_k);
        let (mut all, mut ids) = (Vec::new(), Vec::new());
        let (mut weights, mut apart) = (Vec::new(), Vec::new());
        for layer in gates.layers() {
            let routed = layer.route(own.reading(&["topk_ids", "topk_weights"]));
            let routed = routed.unwrap();
            all.extend_from_slice(&x);
            ids.extend(routed["topk_ids"].to_vec::<i32>().unwrap());
            weights.extend(routed["topk_weights"].to_f32());
            apart.extend(layer.forward(&own).unwrap().y().to_f32());
        }
        let external = stacked(&cases[0].spec).unwrap();
        let bank = &gates.layers()[0];
        let layer = engine.layer_over_experts_of(bank, &external, &Tensors::new());
        let input = Input::new(3 * own.tokens, &all).with_routing(top_k, &ids, &weights);
        let together = layer.unwrap().forward(&input).unwrap();
        assert!(together.y().to_f32() == apart, "the same bytes");
    });
}
