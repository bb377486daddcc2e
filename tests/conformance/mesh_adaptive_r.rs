//! Adaptive parallelism: at any degree ranks compute the results of one process, and gradients land
//! where the weights are.

use super::case::{Case, floats, host, longs};
use super::layers::engine as cpu;
use super::mesh::{
    Grid, Results, compare, evaluated, layer_on, mesh, on_ranks, part, sharded, shares, spec,
    trained,
};
use super::random::seeds;
use super::simulated::open;
use super::trained::{RNG_KEY, near};
use moesaic::engine::joined;
use moesaic::mesh::ProcessGroup;
use moesaic::plan::{AdaptiveMesh, RankCoords};
use moesaic::train::mesh::{MeshOptimizer, Scaling, update_mesh};
use moesaic::train::{AdamW, masters};
use moesaic::{Layer, Mesh, Parallel, Recompute, Strategy, Tensor, Tensors, Training};
use std::collections::BTreeMap;

fn strategy(adaptive_r: usize) -> Strategy {
    Strategy {
        adaptive_r: Some(adaptive_r),
        ..Strategy::default()
    }
}

pub fn at_r(parallel: Parallel, adaptive_r: usize) -> Grid {
    Grid {
        parallel,
        strategy: strategy(adaptive_r),
    }
}

/// Returns every adaptive parallelism degree of a mesh but its number of shards, which other tests
/// cover.
fn others(parallel: Parallel) -> Vec<usize> {
    let mut all = AdaptiveMesh::all(parallel);
    all.retain(|adaptive_r| *adaptive_r != parallel.expert_tp);
    all
}

/// Layers with all that experts can have, whose hidden widths 2, 3 and 4 divide.
const LAYERS: [&str; 5] = [
    "shape = { model_dim = 17, hidden_dim = 24, experts = 5, top_k = 2 }",
    // A weighted last bias, which the first slice has.
    "shape = { model_dim = 24, hidden_dim = 12, experts = 6, top_k = 2 }
     router = { weight_on = 'activation', renormalize = 'sum' }
     experts = { bias = true }
     shared = [{ hidden_dim = 12, gate = 'sigmoid' }]",
    "shape = { model_dim = 16, hidden_dim = 24, experts = 7, top_k = 3, output_dim = 9 }
     experts = { bias = true, form = 'plain', activation = 'gelu' }
     precision = { weights = 'bf16', activations = 'bf16' }",
    "shape = { model_dim = 20, hidden_dim = 12, experts = 8, top_k = 3 }
     latent = { dim = 10, norm_eps = 0.05 }
     router = { weight_on = 'input', score = 'sigmoid' }
     precision = { weights = 'f16', activations = 'f16', expert_gradients = 'f16' }",
    // Outputs that are normalised once shards are summed.
    "shape = { model_dim = 20, hidden_dim = 12, experts = 6, top_k = 2 }
     experts = { output_norm_eps = 0.05, bias = true }
     latent = { dim = 9, input_norm_eps = 0.1 }",
];

/// More ranks than experts, as many, more experts, several groups that hold all.
const MESHES: [Parallel; 6] = [
    mesh(2, 4, 1),
    mesh(1, 6, 1),
    mesh(2, 6, 1),
    mesh(3, 1, 1),
    mesh(2, 2, 2),
    mesh(3, 2, 1),
];

#[test]
fn rows_that_meet_whole_experts_have_the_bytes_of_one_process() {
    let engine = cpu();
    for (seed, text) in LAYERS.iter().enumerate() {
        let case = Case::random(&spec(text), 41, seed as u64);
        let whole = case.layer(&engine).forward(&case.input()).unwrap();
        let parallel = MESHES[seed];
        for adaptive_r in others(parallel) {
            let found = evaluated(&engine, at_r(parallel, adaptive_r), &case);
            let what = format!(
                "{adaptive_r} adaptive_r on {parallel:?} of {}",
                case.describe()
            );
            if adaptive_r <= 1 {
                assert!(found == *whole.y().data, "{what}");
            }
            let numbers = |data: &[u8]| {
                let y = whole.y();
                let (dtype, shape) = (y.dtype, y.shape.clone());
                let data = data.to_vec().into();
                let y = Tensor { dtype, shape, data };
                y.to_f32().into_iter().map(f64::from).collect::<Vec<_>>()
            };
            let (found, want) = (numbers(&found), numbers(&whole.y().data));
            let largest = want.iter().fold(0.0, |most: f64, v| most.max(v.abs()));
            near(&what, &case.spec, &found, &want, largest);
        }
    }
}

#[test]
fn gradients_do_not_depend_on_degree() {
    let engine = cpu();
    for (seed, text) in LAYERS.iter().enumerate() {
        let case = Case::random(&spec(text), 41, seed as u64);
        let parallel = MESHES[(seed + 2) % MESHES.len()];
        let adaptive_r = others(parallel);
        let adaptive_r = adaptive_r[(seed + 1) % adaptive_r.len()];
        compare(&engine, at_r(parallel, adaptive_r), &case, Recompute::None);
    }
}

/// Two tokens on eight ranks, one, and none.
#[test]
fn ranks_without_tokens_gather_weights() {
    let engine = cpu();
    for tokens in [2, 1, 0] {
        let case = Case::random(&spec(LAYERS[1]), tokens, 4);
        for adaptive_r in others(MESHES[0]) {
            compare(&engine, at_r(MESHES[0], adaptive_r), &case, Recompute::All);
        }
    }
}

/// Checks that sharded shared experts do not depend on the degree.
#[test]
fn shards_of_shared_experts_do_not_follow_degree() {
    let engine = cpu();
    let case = Case::random(&spec(LAYERS[1]), 29, 8);
    for (parallel, adaptive_r) in [
        (sharded(2, 2, 2), 1),
        (sharded(1, 4, 1), 2),
        (sharded(2, 2, 1), 0),
    ] {
        compare(&engine, at_r(parallel, adaptive_r), &case, Recompute::None);
    }
}

#[test]
fn random_layers_do_not_depend_on_degree() {
    let engine = cpu();
    for seed in seeds(910..912) {
        let spec = super::mesh::of_tokens_alone(seed);
        let tokens = [29, 2, 11, 0][seed as usize % 4];
        let case = Case::random(&spec, tokens, seed);
        let meshes = [mesh(2, 2, 1), mesh(1, 2, 2), mesh(2, 1, 1)];
        let Some(parallel) = meshes.into_iter().find(|mesh| mesh.check(&spec).is_ok()) else {
            continue; // one expert that cannot be cut
        };
        let adaptive_r = others(parallel);
        let adaptive_r = adaptive_r[seed as usize % adaptive_r.len()];
        compare(&engine, at_r(parallel, adaptive_r), &case, Recompute::None);
    }
}

#[test]
fn capacities_do_not_depend_on_degree() {
    let engine = cpu();
    let parallel = mesh(2, 2, 1);
    let base = "shape = { model_dim = 12, hidden_dim = 8, experts = 4, top_k = 2 }";
    for mode in [
        "mode = 'factor', factor = 0.75, order = 'batch-prioritized'",
        "mode = 'bounded', factor = 0.5",
        "mode = 'fixed', rows = 3, order = 'probability'",
        "mode = 'max-count'",
    ] {
        let case = Case::random(&spec(&format!("{base}\ncapacity = {{ {mode} }}")), 40, 4);
        let shares = shares(40, parallel.ranks());
        let each = on_ranks(&engine, parallel, |mesh| {
            let layer = layer_on(&engine, &mesh.for_any_r(), &case, None);
            let own = part(&case, &shares[mesh.rank()]);
            [2, 1, 0].map(|adaptive_r| {
                layer.set_strategy(strategy(adaptive_r)).unwrap();
                let output = layer.forward(own.input().reading(&["y", "capacity", "counts"]));
                let output = output.unwrap_or_else(|e| panic!("{mode}: {e}"));
                let counts = [longs(&output, "capacity"), longs(&output, "counts")];
                (floats(&output, "y"), counts)
            })
        });
        for [slices, one, none] in each {
            assert_eq!([&slices.1, &one.1], [&one.1, &none.1], "{mode}");
            assert!(one.0 == none.0, "{mode}");
            near(mode, &case.spec, &one.0, &slices.0, 1.0);
        }
    }
}

#[test]
fn weights_are_gathered_on_simulated_gpus() {
    let text = "shape = { model_dim = 24, hidden_dim = 16, experts = 3, top_k = 2 }
         experts = { bias = true }";
    let case = Case::random(&spec(text), 13, 6);
    for target in ["sim:sm_90a", "sim:gfx942"] {
        let engine = open(target);
        for (parallel, adaptive_r) in [(mesh(1, 2, 1), 1), (mesh(2, 1, 1), 0)] {
            compare(&engine, at_r(parallel, adaptive_r), &case, Recompute::None);
        }
    }
}

/// Returns gradients of the rank's own weights after two passes that accumulate, each at another
/// degree.
fn added(parallel: Parallel, case: &Case, adaptive_r: [usize; 2]) -> Vec<Tensors<'static>> {
    let engine = cpu();
    let shares = shares(case.input.tokens, parallel.ranks());
    let width = case.spec.output_dim();
    on_ranks(&engine, parallel, |mesh| {
        let layer = layer_on(&engine, mesh, case, Some(Training::default()));
        let tokens = &shares[mesh.rank()];
        let own = part(case, tokens);
        let mut saved = Vec::new();
        for adaptive_r in adaptive_r {
            layer.set_strategy(strategy(adaptive_r)).unwrap();
            let call = layer.forward_train(&own.input(), RNG_KEY);
            saved.push(call.unwrap().1);
        }
        // Backward uses forward's strategy, whatever is set by then.
        for (pass, saved) in saved.iter().enumerate() {
            let dy = &case.dy(pass as u64)[tokens.start * width..tokens.end * width];
            let dy = host(case.spec.precision.activations, &[tokens.len(), width], dy);
            layer.backward(saved, &dy, pass > 0).unwrap();
        }
        layer.reduce_gradients().unwrap();
        layer.gradients().unwrap()
    })
}

#[test]
fn gradients_add_up_whatever_the_degree_of_each_pass() {
    let case = Case::random(&spec(LAYERS[1]), 37, 3);
    for parallel in [mesh(2, 2, 1), mesh(1, 4, 2)] {
        let want = added(parallel, &case, [parallel.expert_tp; 2]);
        for adaptive_r in [
            [1, 1],
            [0, 1],
            [parallel.expert_tp, 0],
            [1, parallel.expert_tp],
        ] {
            let found = added(parallel, &case, adaptive_r);
            for (rank, (found, want)) in found.iter().zip(&want).enumerate() {
                assert!(found.keys().eq(want.keys()), "{:?}", found.keys());
                let numbers = |tensor: &Tensor<'_>| -> Vec<f64> {
                    tensor.to_f32().into_iter().map(f64::from).collect()
                };
                let all = want.values().flat_map(numbers);
                let largest = all.fold(0.0, |most: f64, v| most.max(v.abs()));
                for (name, want) in want {
                    let what =
                        format!("{adaptive_r:?} adaptive_r, {parallel:?}, rank {rank}, {name}");
                    let (found, want) = (numbers(&found[name]), numbers(want));
                    near(&what, &case.spec, &found, &want, largest);
                }
            }
        }
    }
}

const TOKENS: usize = 29;
const STEPS: u64 = 3;

fn learning() -> Case {
    let text = "shape = { model_dim = 8, hidden_dim = 24, experts = 4, top_k = 2 }
         router = { bias = true }
         experts = { bias = true, form = 'plain', activation = 'gelu' }
         shared = [{ hidden_dim = 8, gate = 'sigmoid' }]";
    Case::random(&spec(text), TOKENS, 11)
}

/// Returns parameters after three steps, each at another degree.
fn learned(mesh: &Mesh, case: &Case, adaptive_r: &[usize]) -> (Tensors<'static>, Vec<f64>) {
    let engine = cpu();
    let layer = layer_on(&engine, mesh, case, Some(Training::default()));
    let tokens = &shares(TOKENS, mesh.parallel().ranks())[mesh.rank()];
    let own = part(case, tokens);
    let adam = AdamW {
        epsilon: 1e-2,
        ..AdamW::new(2e-2)
    };
    let mut optimizer = MeshOptimizer::new(&layer.ranks().unwrap(), adam);
    let mut parameters = masters(&layer.weights_of(&case.host_weights()).unwrap());
    for (name, tensor) in &parameters {
        layer.set_weight(name, tensor).unwrap();
    }
    let (width, mut norms) = (case.spec.output_dim(), Vec::new());
    for step in 0..STEPS {
        layer
            .set_strategy(strategy(adaptive_r[step as usize % adaptive_r.len()]))
            .unwrap();
        let dy = &case.dy(step)[tokens.start * width..tokens.end * width];
        let dy = host(case.spec.precision.activations, &[tokens.len(), width], dy);
        let (_, saved) = layer.forward_train(&own.input(), RNG_KEY).unwrap();
        layer.backward(&saved, &dy, false).unwrap();
        let scaling = Scaling {
            most: Some(0.5),
            ..Scaling::default()
        };
        norms.push(update_mesh(&layer, &mut optimizer, &mut parameters, scaling).unwrap());
    }
    (parameters, norms)
}

/// Compares what ranks have learned with one rank.
fn check(
    parallel: Parallel,
    case: &Case,
    adaptive_r: &[usize],
    want: &(Tensors<'static>, Vec<f64>),
) {
    let run = || on_ranks(&cpu(), parallel, |mesh| learned(mesh, case, adaptive_r));
    let ranks = run();
    let what = format!("{adaptive_r:?} adaptive_r on {parallel:?}");
    for (found, want) in ranks[0].1.iter().zip(&want.1) {
        assert!(
            (found - want).abs() / want < 1e-5,
            "{what}: {found}, not {want}"
        );
    }
    let of = |place: RankCoords| &ranks[parallel.rank(place)].0;
    for (name, want) in &want.0 {
        let found = match ProcessGroup::of(parallel, name) {
            ProcessGroup::World => ranks[0].0[name].lend(),
            _ => joined(name, parallel, |place| of(place)[name].lend()),
        };
        for (found, want) in found.to_f32().iter().zip(want.to_f32()) {
            let close = (found - want).abs() < 4e-6;
            assert!(close, "{what}: `{name}` is {found}, not {want}");
        }
    }
    assert!(ranks == run(), "{what}: not the same bits again");
}

#[test]
fn ranks_learn_the_same_whatever_the_degree() {
    let case = learning();
    let want = on_ranks(&cpu(), mesh(1, 1, 1), |mesh| learned(mesh, &case, &[1])).remove(0);
    let start = masters(&case.host_weights());
    for (name, tensor) in &want.0 {
        assert!(tensor != &start[name], "`{name}` does not move");
    }
    for parallel in [mesh(2, 4, 1), mesh(2, 2, 2), mesh(4, 1, 1)] {
        for adaptive_r in AdaptiveMesh::all(parallel) {
            check(parallel, &case, &[adaptive_r], &want);
        }
    }
    // Another number at each step.
    check(mesh(2, 4, 1), &case, &[2, 0, 4], &want);
    check(mesh(1, 6, 1), &case, &[3, 1, 2], &want);
    check(mesh(1, 2, 2), &case, &[1, 2, 0], &want);
}

#[test]
fn a_switch_leaves_nothing_of_the_other_degree() {
    let engine = cpu();
    let case = Case::random(&spec(LAYERS[0]), 23, 1);
    let parallel = mesh(1, 4, 1);
    let shares = shares(23, 4);
    let all = on_ranks(&engine, parallel, |mesh| {
        let layer = layer_on(&engine, &mesh.for_any_r(), &case, None);
        let own = part(&case, &shares[mesh.rank()]);
        let mut seen: BTreeMap<usize, Vec<u8>> = BTreeMap::new();
        for adaptive_r in [4, 1, 2, 0, 1, 4, 0, 2] {
            layer.set_strategy(strategy(adaptive_r)).unwrap();
            let y = layer.forward(&own.input()).unwrap().y().data.to_vec();
            let before = seen.entry(adaptive_r).or_insert_with(|| y.clone());
            assert!(*before == y, "{adaptive_r} adaptive_r");
        }
        seen
    });
    let bytes = |adaptive_r| {
        all.iter()
            .flat_map(|seen| seen[&adaptive_r].clone())
            .collect::<Vec<u8>>()
    };
    for adaptive_r in [0, 1, 2, 4] {
        let alone = evaluated(&engine, at_r(parallel, adaptive_r), &case);
        assert!(bytes(adaptive_r) == alone, "{adaptive_r} adaptive_r");
    }
}

#[test]
fn wrong_choices_say_what_is_possible() {
    let engine = cpu();
    let case = Case::random(&spec(LAYERS[0]), 4, 0);
    let refused = |mesh: &Mesh, adaptive_r: usize| -> String {
        let layer: Layer = layer_on(&engine, mesh, &case, None);
        layer
            .set_strategy(strategy(adaptive_r))
            .unwrap_err()
            .to_string()
    };
    let errors = on_ranks(&engine, mesh(1, 4, 1), |mesh| {
        let packed = refused(mesh, 2);
        let other = refused(&mesh.for_any_r(), 3);
        [packed, other, refused(mesh, mesh.rank())]
    });
    for [packed, other, differ] in errors {
        assert!(packed.contains("Mesh::for_any_r"), "{packed}");
        assert!(other.contains("a divisor of 4"), "{other}");
        assert!(
            differ.contains("`strategy`") && differ.contains("rank"),
            "{differ}"
        );
    }
}

#[test]
fn recomputation_is_the_same_at_any_degree() {
    let engine = cpu();
    let case = Case::random(&spec(LAYERS[2]), 23, 5);
    let dy = case.dy(3);
    let all: [Results; 3] = [Recompute::None, Recompute::Hidden, Recompute::All].map(|recompute| {
        let training = Training { recompute };
        trained(
            &engine,
            at_r(mesh(2, 2, 1), 1),
            &case,
            training,
            &["y"],
            &dy,
        )
    });
    assert!(all[0] == all[1] && all[0] == all[2]);
}
