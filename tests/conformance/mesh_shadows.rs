//! Shadows: ranks compute the results of one process, whichever experts have shadows.

use super::arranged::{added_gradients, grid, near_everywhere, ranks};
use super::case::{Case, host};
use super::layers::engine as cpu;
use super::mesh::{compare_on, evaluated, layer_on, mesh, on_ranks, part, spec, specs};
use super::mesh_placed::{hot, scattered};
use super::simulated::open;
use super::trained::RNG_KEY;
use moesaic::mesh::Split;
use moesaic::plan::{Placement, ShadowModel};
use moesaic::{DType, Engine, Layer, Mesh, Parallel, Recompute, Training};

/// A training layer on a mesh with some strategy.
fn layer(engine: &Engine, mesh: &Mesh, case: &Case, strategy: &str) -> Layer {
    let layer = layer_on(engine, mesh, case, Some(Training::default()));
    layer.set_strategy(strategy.parse().unwrap()).unwrap();
    layer
}

/// Wants a shadow of every expert.
fn eager(layer: &mut Layer) {
    let model = ShadowModel::of(layer.spec());
    let elements = f64::INFINITY;
    layer
        .set_shadow_model(ShadowModel { elements, ..model })
        .unwrap();
}

#[test]
fn dropless_outputs_are_the_same_bytes_with_shadows() {
    let engine = cpu();
    for (seed, spec) in specs().iter().enumerate() {
        let case = Case::random(spec, 41, seed as u64);
        let whole = case.layer(&engine).forward(&case.input()).unwrap();
        for (at, (parallel, strategy)) in [
            (mesh(4, 1, 1), "shadows=2"),
            (mesh(3, 1, 1), "overlap_degree=2,shadows=9"),
            (mesh(4, 1, 1), "all_to_all=2dh-inter-first,shadows=1"),
            (mesh(2, 1, 2), "overlap_degree=3,overlap_by=peers,shadows=3"),
            (mesh(1, 1, 2), "shadows=1"),
        ]
        .into_iter()
        .enumerate()
        {
            let split = [Split::Even, Split::Near][(seed + at) % 2];
            let placement = scattered(parallel.ep, spec.shape.experts, seed as u64, split);
            let placement = (at % 2 == 0).then_some(&placement);
            let found = evaluated(&ranks(&engine, placement), grid(parallel, strategy), &case);
            assert!(found == *whole.y().data, "{strategy}: {}", case.describe());
        }
    }
}

#[test]
fn training_with_shadows_gives_what_one_process_gives() {
    let engine = cpu();
    for (seed, spec) in specs().iter().enumerate() {
        let case = Case::random(spec, 41, seed as u64);
        for (at, (parallel, strategy)) in [
            (mesh(4, 1, 1), "shadows=2"),
            (mesh(2, 1, 1), "overlap_degree=3/2,shadows=3"),
            (mesh(4, 1, 1), "overlap_degree=2,all_to_all=dedup,shadows=1"),
            (
                mesh(2, 1, 2),
                "overlap_degree=2/3,overlap_by=peers,shadows=2",
            ),
        ]
        .into_iter()
        .enumerate()
        {
            let placement = scattered(parallel.ep, spec.shape.experts, seed as u64, Split::Even);
            let placement = (at % 2 == 1).then_some(&placement);
            let ranks = ranks(&engine, placement);
            let recompute = [Recompute::None, Recompute::Hidden, Recompute::All][seed % 3];
            compare_on(&engine, &ranks, grid(parallel, strategy), &case, recompute);
        }
    }
}

/// Gradients add up over passes, whichever of them has shadows.
#[test]
fn gradients_of_shadows_add_up() {
    let text = "shape = { model_dim = 24, hidden_dim = 24, experts = 6, top_k = 3 }
         experts = { bias = true }";
    let case = Case::random(&spec(text), 41, 2);
    let (parallel, engine) = (mesh(3, 1, 1), cpu());
    let placement: Placement = "+4,0,2,+3 | 3,5,+0 | 1,+5,4".parse().unwrap();
    let added = |strategies: [&str; 3]| {
        let ranks = ranks(&engine, Some(&placement));
        added_gradients(&ranks, parallel, &case, &strategies, eager)
    };
    let want = added(["default"; 3]);
    for strategies in [
        ["shadows=2"; 3],
        ["shadows=5", "default", "shadows=1"],
        ["default", "overlap_degree=2,shadows=3", "r=0"],
    ] {
        let found = added(strategies);
        assert!(added(strategies) == found, "another run");
        near_everywhere(&format!("{strategies:?}"), &case, &found, &want);
    }
}

/// A step has the weights of its shadows until its backward pass, whatever comes between; where
/// backward computes again what forward had they are sent again.
#[test]
fn weights_of_shadows_are_those_of_the_step() {
    let text = "shape = { model_dim = 24, hidden_dim = 24, experts = 6, top_k = 2 }";
    let [case, other] = [2, 3].map(|seed| Case::random(&spec(text), 40, seed));
    let gradients = |recompute, between: bool| {
        on_ranks(&cpu(), mesh(2, 1, 1), |mesh| {
            let mut layer = layer_on(&cpu(), mesh, &case, Some(Training { recompute }));
            layer.set_strategy("shadows=2".parse().unwrap()).unwrap();
            eager(&mut layer);
            let own = 20 * mesh.rank()..20 * (mesh.rank() + 1);
            let step = |case: &Case| {
                let part = part(case, &own);
                let call = layer.forward_train(&part.input(), RNG_KEY);
                call.unwrap().1
            };
            let saved = step(&case);
            let later = between.then(|| [step(&other), step(&other)]);
            for later in later.iter().flatten() {
                assert_ne!(later.shadowed(), saved.shadowed());
            }
            let dy = host(
                DType::F32,
                &[20, 24],
                &case.dy(1)[own.start * 24..own.end * 24],
            );
            let passes = if between { 2 } else { 1 };
            for _ in 0..passes {
                layer.backward(&saved, &dy, false).unwrap();
            }
            layer.gradients().unwrap()
        })
    };
    let sent_again = gradients(Recompute::All, false);
    assert!(gradients(Recompute::None, false) == sent_again);
    assert!(gradients(Recompute::None, true) == sent_again);
}

/// All ranks choose the same experts, those with the most rows, as many as the model wants and
/// no more than may be; their rows stay.
#[test]
fn the_hottest_experts_have_shadows() {
    let (experts, parallel) = (16, mesh(8, 1, 1));
    let case = hot(2000, experts);
    let chosen = |strategy: &str, model: fn(&mut Layer)| {
        on_ranks(&cpu(), parallel, |mesh| {
            let mut layer = layer(&cpu(), mesh, &case, strategy);
            model(&mut layer);
            let own = part(&case, &(mesh.rank() * 250..(mesh.rank() + 1) * 250));
            let call = layer.forward_train(&own.input(), RNG_KEY);
            let saved = call.unwrap().1;
            (saved.shadowed().to_vec(), saved.rows().unwrap())
        })
    };
    let shadowed = |ranks: &[(Vec<usize>, usize)]| {
        assert!(ranks.iter().all(|(shadowed, _)| *shadowed == ranks[0].0));
        ranks[0].0.clone()
    };
    let rows = |ranks: &[(Vec<usize>, usize)]| ranks.iter().map(|(_, rows)| *rows).sum::<usize>();
    let most = chosen("shadows=3", eager);
    assert_eq!(shadowed(&most), [0, 1, 2]);
    let none = chosen("default", eager);
    assert_eq!((shadowed(&none), rows(&none)), (vec![], 2000));
    assert!(rows(&most) < 800, "{most:?}");
    // There are no others on the rank that has the most rows then.
    assert_eq!(shadowed(&chosen("shadows=99", eager)), [0, 1, 2]);
    assert_eq!(shadowed(&chosen("shadows=1", eager)), [0]);
    // Weights take longer than rows.
    let dear = chosen("shadows=3", |layer| {
        let model = ShadowModel::of(layer.spec());
        let wide = ShadowModel {
            ratio: 1e4,
            operations: f64::INFINITY,
            ..model
        };
        layer.set_shadow_model(wide).unwrap();
    });
    assert_eq!((shadowed(&dear), rows(&dear)), (vec![], 2000));
}

#[test]
fn capacities_do_not_see_shadows() {
    let engine = cpu();
    let text = "shape = { model_dim = 12, hidden_dim = 8, experts = 6, top_k = 2 }
         capacity = { mode = 'factor', factor = 0.6, order = 'batch-prioritized' }";
    let case = Case::random(&spec(text), 40, 4);
    let whole = evaluated(&ranks(&engine, None), mesh(4, 1, 1), &case);
    for strategy in ["shadows=2", "overlap_degree=3,all_to_all=dedup,shadows=1"] {
        let found = evaluated(&ranks(&engine, None), grid(mesh(4, 1, 1), strategy), &case);
        assert!(found == whole, "{strategy}");
    }
}

#[test]
fn shadows_that_cannot_be_are_refused() {
    let text = "shape = { model_dim = 24, hidden_dim = 24, experts = 6, top_k = 3 }";
    let case = Case::random(&spec(text), 5, 2);
    let refused = |parallel: Parallel, strategy: &'static str| {
        let errors = on_ranks(&cpu(), parallel, |mesh| {
            let layer = layer_on(&cpu(), mesh, &case, None);
            let error = layer.set_strategy(strategy.parse().unwrap()).unwrap_err();
            error.to_string()
        });
        errors[0].clone()
    };
    let sharded = refused(mesh(1, 2, 1), "shadows=2");
    assert!(
        sharded.contains("shadows=2 needs whole experts"),
        "{sharded}"
    );
    let stays = refused(mesh(2, 1, 1), "r=0,shadows=2");
    assert!(stays.contains("rows to 0 of them"), "{stays}");
    let packed = refused(mesh(2, 1, 1), "shadows=2");
    assert!(packed.contains("Mesh::for_any_r"), "{packed}");
    on_ranks(&cpu(), mesh(2, 1, 1), |mesh| {
        let layer = layer_on(&cpu(), mesh, &case, None);
        let mut model = ShadowModel::of(&case.spec);
        model.operations += mesh.rank() as f64;
        let error = layer.set_shadow_model(model).unwrap_err().to_string();
        assert!(error.contains("model"), "{error}");
    });
}

#[test]
fn simulated_gpus_have_shadows() {
    let text = "shape = { model_dim = 24, hidden_dim = 16, experts = 3, top_k = 2 }
         experts = { bias = true }";
    let case = Case::random(&spec(text), 13, 6);
    for target in ["sim:sm_90a", "sim:gfx942"] {
        let engine = open(target);
        let ranks = ranks(&engine, None);
        let grid = grid(mesh(2, 1, 1), "overlap_degree=2/1,shadows=1");
        compare_on(&engine, &ranks, grid, &case, Recompute::None);
    }
}
