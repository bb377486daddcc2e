//! Layers over ranks with sharded shared experts: results equal those of one process, up to the
//! rounding of partial sums.

use super::case::{Case, floats, longs};
use super::layers::engine as cpu;
use super::mesh::{
    compare, evaluated, layer_on, mesh, of_tokens_alone, on_ranks, part, sharded, shares, spec,
    trained,
};
use super::random::seeds;
use super::simulated::open;
use super::trained::near;
use moesaic::spec::LayerSpec;
use moesaic::{EngineError, LayerOptions, Parallel, Recompute, Training};
use moesaic_harness::thorough::{self, in_turns};

/// Layers with every kind of shared expert. Widths can be cut by 2, 3 and 4.
fn specs() -> Vec<LayerSpec> {
    [
        "shape = { model_dim = 37, hidden_dim = 24, experts = 5, top_k = 2 }
         shared = [{ hidden_dim = 12 }]",
        // Weighted biases: of the last one only the first slice has a part.
        "shape = { model_dim = 24, hidden_dim = 12, experts = 6, top_k = 2 }
         router = { weight_on = 'activation', renormalize = 'sum' }
         experts = { bias = true }
         shared = [{ hidden_dim = 24, gate = 'sigmoid' }]",
        // Several, in 16 bits, of another output width.
        "shape = { model_dim = 16, hidden_dim = 12, experts = 7, top_k = 3, output_dim = 9 }
         experts = { bias = true, form = 'plain', activation = 'gelu' }
         precision = { weights = 'bf16', activations = 'bf16' }
         shared = [{ hidden_dim = 12 }, { hidden_dim = 24, gate = 'sigmoid', bias = false }]",
        // Projections around the routed experts alone.
        "shape = { model_dim = 24, hidden_dim = 12, experts = 8, top_k = 3 }
         experts = { identity = 2 }
         latent = { dim = 10, norm_eps = 0.05, input_norm_eps = 0.1 }
         shared = [{ hidden_dim = 12, gate = 'sigmoid' }, { hidden_dim = 24, bias = true }]",
        // A gate that weighs the routed experts, too.
        "shape = { model_dim = 20, hidden_dim = 12, experts = 4, top_k = 1 }
         router = { score = 'sigmoid' }
         shared = [{ hidden_dim = 12, gate = 'residual', bias = true }]",
    ]
    .map(spec)
    .into()
}

const MESHES: [Parallel; 5] = [
    sharded(1, 2, 1),
    sharded(2, 2, 1),
    sharded(1, 3, 1),
    sharded(1, 4, 1),
    sharded(2, 2, 2),
];

#[test]
fn shards_of_shared_experts_give_what_one_process_gives() {
    let engine = cpu();
    for (seed, spec) in specs().iter().enumerate() {
        let case = Case::random(spec, 41, seed as u64);
        for parallel in in_turns(0, [MESHES[seed % 5], MESHES[4]]) {
            compare(&engine, parallel, &case, Recompute::None);
        }
    }
}

/// Two tokens on four ranks, and none.
#[test]
fn ranks_without_tokens_have_shards_of_shared_experts() {
    let engine = cpu();
    for tokens in [2, 0] {
        let case = Case::random(&specs()[1], tokens, 4);
        for parallel in [sharded(1, 4, 1), sharded(2, 2, 1)] {
            compare(&engine, parallel, &case, Recompute::None);
        }
    }
}

#[test]
fn shards_compute_the_same_again() {
    let engine = cpu();
    let case = Case::random(&specs()[1], 23, 5);
    let dy = case.dy(3);
    let all = [Recompute::None, Recompute::Hidden, Recompute::All].map(|recompute| {
        let training = Training { recompute };
        trained(&engine, sharded(2, 2, 1), &case, training, &["y"], &dy)
    });
    assert!(all[0] == all[1] && all[0] == all[2]);
}

#[test]
fn shards_give_the_same_bytes_in_every_run() {
    let engine = cpu();
    let case = Case::random(&specs()[2], 37, 8);
    for parallel in [sharded(2, 2, 1), sharded(1, 3, 1)] {
        let [one, two] = [0; 2].map(|_| evaluated(&engine, parallel, &case));
        assert!(one == two, "{parallel:?}");
    }
}

/// Checks that one shard is the whole expert.
#[test]
fn one_shard_of_shared_experts_is_the_whole() {
    let engine = cpu();
    let case = Case::random(&specs()[1], 17, 2);
    let whole = evaluated(&engine, mesh(2, 1, 1), &case);
    assert!(whole == evaluated(&engine, sharded(2, 1, 1), &case));
    on_ranks(&engine, sharded(2, 1, 1), |mesh| {
        let layer = layer_on(&engine, mesh, &case, None);
        assert!(layer.rank_plan().unwrap().shared.is_none());
    });
}

#[test]
fn shards_that_are_not_equal_are_refused() {
    let engine = cpu();
    let text = "shape = { model_dim = 8, hidden_dim = 12, experts = 4, top_k = 2 }
         shared = [{ hidden_dim = 12 }, { hidden_dim = 10 }]";
    let case = Case::random(&spec(text), 4, 0);
    let errors = on_ranks(&engine, sharded(1, 4, 1), |mesh| {
        let made = engine.layer_with(&case.spec, &case.host_weights(), LayerOptions::over(mesh));
        made.expect_err("10 has no 4 equal parts")
    });
    for error in errors {
        assert!(matches!(error, EngineError::Plan(_)), "{error}");
        let text = error.to_string();
        let says = "4 shards of hidden_dim = 10 of shared expert 1 are not equal";
        assert!(text.contains(says), "{text}");
    }
}

/// Shared experts do not change what is drawn, dropped and counted.
#[test]
fn routing_is_the_same_with_shards_of_shared_experts() {
    let engine = cpu();
    for text in [
        "shape = { model_dim = 17, hidden_dim = 8, experts = 6, top_k = 2 }
         router = { noise = 1.5, noise_kind = 'gaussian', jitter = 0.1 }
         losses = [{ kind = 'global', coefficient = 0.3 }]
         shared = [{ hidden_dim = 6, gate = 'sigmoid' }]",
        "shape = { model_dim = 17, hidden_dim = 8, experts = 6, top_k = 2 }
         router = { token_mask = true, score = 'sigmoid', input_dropout = 0.2 }
         shared = [{ hidden_dim = 6 }]",
    ] {
        let case = Case::random(&spec(text), 45, 9);
        compare(&engine, sharded(2, 2, 1), &case, Recompute::None);
    }
    let text = "shape = { model_dim = 12, hidden_dim = 8, experts = 4, top_k = 2 }
         capacity = { mode = 'factor', factor = 0.75 }
         shared = [{ hidden_dim = 10, gate = 'sigmoid' }]";
    let case = Case::random(&spec(text), 40, 4);
    let shares = shares(40, 4);
    let names = ["y", "capacity", "counts"];
    let [whole, parts] = [mesh(2, 2, 1), sharded(2, 2, 1)].map(|parallel| {
        on_ranks(&engine, parallel, |mesh| {
            let layer = layer_on(&engine, mesh, &case, None);
            let own = part(&case, &shares[mesh.rank()]);
            layer.forward(own.input().reading(&names)).unwrap()
        })
    });
    for (whole, parts) in whole.iter().zip(&parts) {
        for name in ["capacity", "counts"] {
            assert_eq!(longs(whole, name), longs(parts, name));
        }
        let [found, want] = [parts, whole].map(|output| floats(output, "y"));
        let largest = want.iter().fold(0.0, |most: f64, v| most.max(v.abs()));
        near("y", &case.spec, &found, &want, largest);
    }
}

/// Widths of experts and shared ones of a random layer, doubled.
#[test]
fn random_layers_have_shards_of_shared_experts() {
    let engine = cpu();
    let most = if thorough::is_on() { 6 } else { 2 };
    let mut done = 0;
    for seed in seeds(800..830) {
        let mut spec = of_tokens_alone(seed);
        if spec.shared.is_empty() || done == most {
            continue;
        }
        spec.shape.hidden_dim *= 2;
        for shared in &mut spec.shared {
            shared.hidden_dim *= 2;
        }
        let case = Case::random(&spec, [29, 2, 11, 0][done % 4], seed);
        let ep = 1 + done % spec.shape.experts.min(2);
        compare(&engine, sharded(ep, 2, 1), &case, Recompute::None);
        done += 1;
    }
    assert!(done > 1, "{done} layers");
}

#[test]
fn shards_of_shared_experts_run_on_simulated_gpus() {
    let text = "shape = { model_dim = 24, hidden_dim = 16, experts = 3, top_k = 2 }
         shared = [{ hidden_dim = 16, gate = 'sigmoid', bias = true }]";
    let case = Case::random(&spec(text), 19, 6);
    for target in ["sim:sm_90a", "sim:gfx942"] {
        compare(&open(target), sharded(1, 2, 1), &case, Recompute::None);
    }
}

/// Checks that parts of weights that were split beforehand make the same layer.
#[test]
fn a_layer_is_made_of_a_ranks_shards() {
    let engine = cpu();
    let case = Case::random(&specs()[1], 21, 12);
    let shares = shares(21, 4);
    let whole = case.host_weights();
    on_ranks(&engine, sharded(2, 2, 1), |mesh| {
        let training = Some(Training::default());
        let layer = layer_on(&engine, mesh, &case, training);
        let own = layer.weights_of(&whole).unwrap();
        let of_part = engine.layer_with(
            &case.spec,
            &own,
            LayerOptions {
                part: true,
                ..LayerOptions::over(mesh).training(training)
            },
        );
        let of_part = of_part.unwrap_or_else(|e| panic!("{e}"));
        let tokens = part(&case, &shares[mesh.rank()]);
        let dy = case.dy(5);
        let width = case.spec.output_dim();
        let share = &shares[mesh.rank()];
        let dy = &dy[share.start * width..share.end * width];
        let dy: Vec<f32> = dy.iter().map(|d| *d as f32).collect();
        let dy = moesaic::Tensor::owned(&[share.len(), width], dy);
        let results = [&layer, &of_part].map(|layer| {
            let rng_key = moesaic::RngKey::default();
            let (output, saved) = layer.forward_train(&tokens.input(), rng_key).unwrap();
            let back = layer.backward(&saved, &dy, false).unwrap();
            layer.reduce_gradients().unwrap();
            let back = back.into_tensors();
            (output.into_tensors(), back, layer.gradients().unwrap())
        });
        assert!(results[0] == results[1], "rank {}", mesh.rank());
    });
}
