//! Optimizer steps over ranks: every grid learns what one process learns.

use super::case::{Case, host};
use super::layers::engine as cpu;
use super::mesh::{layer_on, mesh, on_ranks, part, sharded, shares, spec};
use super::trained::RNG_KEY;
use moesaic::engine::joined;
use moesaic::mesh::ProcessGroup;
use moesaic::plan::RankCoords;
use moesaic::train::mesh::{MeshOptimizer, Scaling, broadcast, update_mesh};
use moesaic::train::{AdamW, Optimizer, Sgd, masters};
use moesaic::{Layer, Mesh, Parallel, Tensors, Training};

pub const TOKENS: usize = 29;
const STEPS: u64 = 3;

/// Shared experts, biases of experts and of the router, and sizes that every grid of up
/// to 8 ranks can share but those of 5 and 7 slices.
pub fn layer_of(hidden: usize) -> Case {
    let text = format!(
        "shape = {{ model_dim = 8, hidden_dim = {hidden}, experts = 8, top_k = 2 }}
         router = {{ bias = true }}
         experts = {{ bias = true, form = 'plain', activation = 'gelu' }}
         shared = [{{ hidden_dim = 8, gate = 'sigmoid' }}, {{ hidden_dim = 16 }}]"
    );
    Case::random(&spec(&text), TOKENS, 11)
}

fn grids() -> Vec<Parallel> {
    let sizes = || 1..=8usize;
    let all =
        sizes().flat_map(|ep| sizes().flat_map(move |s| sizes().map(move |dp| mesh(ep, s, dp))));
    all.filter(|grid| (2..=8).contains(&grid.ranks())).collect()
}

/// The state of a rank after its steps: its parameters, and the norms of
/// gradients on the way.
pub type Learned = (Tensors<'static>, Vec<f64>);

/// Three steps of an optimizer from a case's weights. The loss is `Σ y·dy` over the
/// tokens of all ranks, times the divisor.
fn learn<O: Optimizer>(
    layer: &Layer,
    case: &Case,
    mut optimizer: MeshOptimizer<O>,
    scaling: Scaling,
) -> Learned {
    let tokens =
        &shares(TOKENS, layer.mesh().unwrap().parallel().ranks())[layer.mesh().unwrap().rank()];
    let own = part(case, tokens);
    let mut parameters = masters(&layer.weights_of(&case.host_weights()).unwrap());
    for (name, tensor) in &parameters {
        layer.set_weight(name, tensor).unwrap();
    }
    let width = case.spec.output_dim();
    let mut norms = Vec::new();
    for step in 0..STEPS {
        let (_, saved) = layer.forward_train(&own.input(), RNG_KEY).unwrap();
        let dy = &case.dy(step)[tokens.start * width..tokens.end * width];
        let scaled: Vec<f64> = dy.iter().map(|d| d * f64::from(scaling.divisor)).collect();
        let dy = host(
            case.spec.precision.activations,
            &[tokens.len(), width],
            &scaled,
        );
        layer.backward(&saved, &dy, false).unwrap();
        norms.push(update_mesh(layer, &mut optimizer, &mut parameters, scaling).unwrap());
    }
    (parameters, norms)
}

/// AdamW with whole state and in parts, and descent whose gradients are clipped.
pub fn learned(mesh: &Mesh, case: &Case) -> [Learned; 3] {
    let engine = cpu();
    let layer = layer_on(&engine, mesh, case, Some(Training::default()));
    let ranks = layer.ranks().unwrap();
    // ε is far above the noise of a sum in another order: without it the step of a
    // gradient near zero is a coin toss.
    let adam = AdamW {
        epsilon: 1e-2,
        ..AdamW::new(2e-2)
    };
    let by_ranks = Scaling {
        divisor: mesh.parallel().ranks() as f32,
        most: None,
    };
    let clipped = Scaling {
        most: Some(0.5),
        ..Scaling::default()
    };
    let sgd = Sgd::with_momentum(0.1, 0.9);
    [
        learn(
            &layer,
            case,
            MeshOptimizer::new(&ranks, adam.clone()),
            by_ranks,
        ),
        learn(
            &layer,
            case,
            MeshOptimizer::partitioned(&ranks, adam),
            by_ranks,
        ),
        learn(&layer, case, MeshOptimizer::new(&ranks, sgd), clipped),
    ]
}

/// Runs a grid and holds it against one rank: parameters, norms, replicas.
fn check(parallel: Parallel, case: &Case, want: &[Learned; 3]) -> Vec<[Learned; 3]> {
    let ranks = on_ranks(&cpu(), parallel, |mesh| learned(mesh, case));
    for (run, (whole, norms)) in want.iter().enumerate() {
        let of = |place| &ranks[parallel.rank(place)][run];
        for (rank, all) in ranks.iter().enumerate() {
            let (own, found) = &all[run];
            assert!(
                found == &ranks[0][run].1,
                "{parallel:?}: norms of rank {rank}"
            );
            let place = parallel.place(rank).unwrap();
            let first = RankCoords { dp: 0, ..place };
            for (name, tensor) in own {
                let other = match ProcessGroup::of(parallel, name) {
                    ProcessGroup::World => &ranks[0][run].0[name],
                    ProcessGroup::EpDp => &of(RankCoords { ep: 0, ..first }).0[name],
                    _ => &of(first).0[name],
                };
                assert!(tensor == other, "{parallel:?}: `{name}` of rank {rank}");
                let added_once = ProcessGroup::of(parallel, name) != ProcessGroup::World
                    && name.ends_with(".down.bias");
                let silent = added_once && place.tp > 0;
                let zero = tensor.to_f32().iter().all(|v| *v == 0.0);
                assert!(
                    !silent || zero,
                    "{parallel:?}: `{name}` of rank {rank} has moved"
                );
            }
        }
        for (found, want) in ranks[0][run].1.iter().zip(norms) {
            let off = (found - want).abs() / want;
            assert!(
                off < 1e-5,
                "{parallel:?}, run {run}: a norm is {found}, not {want}"
            );
        }
        for (name, want) in whole {
            let found = match ProcessGroup::of(parallel, name) {
                ProcessGroup::World => ranks[0][run].0[name].lend(),
                _ => joined(name, parallel, |place| of(place).0[name].lend()),
            };
            assert_eq!(found.shape, want.shape, "{parallel:?}: {name}");
            for (found, want) in found.to_f32().iter().zip(want.to_f32()) {
                let what = format!("{parallel:?}, run {run}: `{name}` is {found}, not {want}");
                assert!((found - want).abs() < 4e-6, "{what}");
            }
        }
        assert!(
            run != 1 || ranks.iter().all(|all| all[0] == all[1]),
            "{parallel:?}: parts"
        );
    }
    ranks
}

pub fn alone(case: &Case) -> [Learned; 3] {
    let ranks = on_ranks(&cpu(), mesh(1, 1, 1), |mesh| learned(mesh, case));
    let [one] = ranks.try_into().unwrap_or_else(|_| panic!("one rank"));
    one
}

/// The matrix of gradient scales: a wrong factor or group shows in some grid.
#[test]
fn every_grid_learns_what_one_rank_learns() {
    for (hidden, fits) in [(24, [1, 2, 3, 4, 6, 8].as_slice()), (35, &[5, 7])] {
        let case = layer_of(hidden);
        let want = alone(&case);
        assert!(
            want[2].1.iter().all(|norm| *norm > 1.0),
            "nothing is clipped"
        );
        let start = masters(&case.host_weights());
        for (name, tensor) in &want[2].0 {
            assert!(tensor != &start[name], "`{name}` does not move");
        }
        for parallel in grids()
            .into_iter()
            .filter(|grid| fits.contains(&grid.expert_tp))
        {
            check(parallel, &case, &want);
        }
    }
}

/// Checks grids with sharded shared experts: their gradients cover the tokens of adjacent ranks,
/// and their parts of the norm are counted once.
#[test]
fn every_grid_with_shards_of_shared_experts_learns_what_one_rank_learns() {
    let case = layer_of(24);
    let want = alone(&case);
    let slices = [2, 4, 8];
    let grids = grids().into_iter();
    for Parallel {
        ep,
        expert_tp: shards,
        dp,
        ..
    } in grids.filter(|grid| slices.contains(&grid.expert_tp))
    {
        check(sharded(ep, shards, dp), &case, &want);
    }
}

#[test]
fn ranks_learn_the_same_bits_again() {
    let case = layer_of(24);
    let want = alone(&case);
    for grid in [mesh(2, 2, 2), sharded(2, 2, 2)] {
        let first = check(grid, &case, &want);
        assert!(first == check(grid, &case, &want));
    }
}

#[test]
fn ranks_start_with_the_values_of_the_first() {
    let case = layer_of(24);
    let whole = case.host_weights();
    let grid = mesh(2, 1, 2);
    let engine = cpu();
    let ranks = on_ranks(&engine, grid, |mesh| {
        let names = whole.keys().map(String::as_str);
        let own = moesaic::train::mesh::parts(mesh, &whole, names).unwrap();
        let mut changed = masters(&own);
        let factor = 1.0 + mesh.rank() as f32;
        for tensor in changed.values_mut() {
            let values = tensor.values_mut::<f32>().unwrap();
            values.iter_mut().for_each(|v| *v *= factor);
        }
        broadcast(&engine.ranks(mesh), &mut changed).unwrap();
        (masters(&own), changed)
    });
    for (rank, (own, found)) in ranks.iter().enumerate() {
        for (name, tensor) in found {
            // The first of those with the same experts is the rank of the first group.
            let from = match ProcessGroup::of(grid, name) {
                ProcessGroup::World => 0,
                _ => rank % 2,
            };
            let factor = 1.0 + from as f32;
            let want = own[name].to_f32().into_iter().map(|v| v * factor);
            assert!(want.eq(tensor.to_f32()), "`{name}` of rank {rank}");
        }
    }
}

/// Rank r has `r + q` numbers for rank q: none for some.
#[test]
fn ranks_hand_out_parts_of_any_sizes() {
    let engine = &cpu();
    let number = |from: usize, to: usize, at: usize| (100 * from + 10 * to + at) as f32;
    let part = |from: usize, to: usize| -> Vec<f32> {
        (0..from + to).map(|at| number(from, to, at)).collect()
    };
    let found = on_ranks(engine, mesh(2, 1, 2), |mesh| {
        let (ranks, own) = (engine.ranks(mesh), mesh.rank());
        let parts: Vec<Vec<f32>> = (0..4).map(|to| part(own, to)).collect();
        let few = ranks
            .all_to_all(&parts[..3], ProcessGroup::ExpertDp, "parts")
            .err();
        (few, own)
    });
    for (few, _) in found {
        assert!(few.is_some(), "three parts for two ranks");
    }
    let found = on_ranks(engine, mesh(2, 1, 2), |mesh| {
        let (ranks, own) = (engine.ranks(mesh), mesh.rank());
        let parts: Vec<Vec<f32>> = (0..4).map(|to| part(own, to)).collect();
        let got = ranks
            .all_to_all(&parts, ProcessGroup::World, "parts")
            .unwrap();
        let all: Vec<f32> = (0..8).map(|at| number(own, 0, at)).collect();
        let sum = ranks
            .sum_scattered(&all, ProcessGroup::World, "sum")
            .unwrap();
        (got, sum)
    });
    for (rank, (got, sum)) in found.iter().enumerate() {
        let wanted: Vec<Vec<f32>> = (0..4).map(|from| part(from, rank)).collect();
        assert_eq!(*got, wanted);
        let of = |at: usize| (0..4).map(|from| number(from, 0, at)).sum::<f32>();
        assert_eq!(*sum, [of(2 * rank), of(2 * rank + 1)]);
    }
}

/// Compared in the message that says how many tokens each rank has.
#[test]
fn ranks_that_call_with_other_settings_learn_which_differ() {
    let engine = cpu();
    let text = "shape = { model_dim = 12, hidden_dim = 8, experts = 4, top_k = 2 }\n\
                router = { noise = 1.0 }\n\
                capacity = { mode = 'factor', factor = 1.5 }";
    let case = Case::random(&spec(text), 8, 4);
    let shares = shares(8, 2);
    for (at, words) in [
        (0, "`seed` is `1` on rank 0 and `2` on rank 1"),
        (1, "`step` is `1` on rank 0 and `2` on rank 1"),
        (
            2,
            "`capacity_factor` is `the spec's` on rank 0 and `2` on rank 1",
        ),
    ] {
        let errors = on_ranks(&engine, mesh(2, 1, 1), |mesh| {
            let layer = layer_on(&engine, mesh, &case, Some(Training::default()));
            let own = part(&case, &shares[mesh.rank()]);
            let (mut input, mut rng_key) = (own.input(), RNG_KEY);
            let number = 1 + mesh.rank() as u64;
            match at {
                0 => rng_key.seed = number,
                1 => rng_key.step = number,
                _ => input.capacity_factor = (number > 1).then_some(2.0),
            }
            let called = layer.forward_train(input.reading(&["y"]), rng_key);
            called.expect_err("they differ").to_string()
        });
        for error in errors {
            assert!(error.contains(words), "{error}");
        }
    }
}
