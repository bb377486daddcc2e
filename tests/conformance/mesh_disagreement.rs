//! Ranks that do not do the same: each learns which of them, and what.

use super::Case;
use super::layers::engine as cpu;
use super::mesh::{layer_on, mesh, on_ranks, part, specs};
use moesaic::collectives::threads;
use moesaic::{LayerOptions, Mesh, Tensor};

#[test]
fn a_rank_that_cannot_take_part_ends_the_others() {
    let engine = cpu();
    let case = Case::random(&specs()[0], 12, 0);
    let device = |_| Ok(engine.device().clone());
    // A rank that still made its layer would say that it was in that.
    let made = std::sync::Barrier::new(3);
    let ranks = threads::run(3, device, |mut world| {
        let mesh = Mesh::new(&mut world, mesh(3, 1, 1)).unwrap();
        let layer = layer_on(&engine, &mesh, &case, None);
        made.wait();
        let mut input = part(&case, &(0..4)).input();
        if mesh.rank() == 1 {
            input.insert("x", Tensor::owned(&[4, 3], vec![0f32; 12]));
        }
        layer.forward(&input).map(drop).map_err(|e| e.to_string())
    });
    let errors: Vec<String> = ranks
        .unwrap()
        .into_iter()
        .map(|rank| rank.unwrap().unwrap_err())
        .collect();
    assert!(errors[1].contains("input `x`"), "{}", errors[1]);
    for rank in [0, 2] {
        // Which operation, for which layer, and who is missing.
        let error = &errors[rank];
        for part in ["counts of layer", "rank 1"] {
            assert!(error.contains(part), "rank {rank}: {error}");
        }
    }
}

/// Layers of one spec, whose rows would fit each other.
#[test]
fn ranks_that_call_layers_in_different_orders_notice_it() {
    let engine = cpu();
    let case = Case::random(&specs()[0], 8, 0);
    let device = |_| Ok(engine.device().clone());
    let ranks = threads::run(2, device, |mut world| {
        let mesh = Mesh::new(&mut world, mesh(2, 1, 1)).unwrap();
        let layers = [(); 2].map(|()| layer_on(&engine, &mesh, &case, None));
        let rank = mesh.rank();
        let own = part(&case, &(4 * rank..4 * (rank + 1)));
        let called = layers[rank].forward(&own.input());
        called.map(drop).map_err(|error| error.to_string())
    });
    for rank in ranks.unwrap() {
        let error = rank.unwrap().unwrap_err();
        for name in ["`counts of layer`", "`counts of layer #2`"] {
            assert!(error.contains(name), "{error}");
        }
    }
}

#[test]
fn ranks_that_make_other_layers_learn_which_differ() {
    let engine = cpu();
    let [one, other] = [&specs()[0], &specs()[3]].map(|spec| Case::random(spec, 4, 0));
    let errors = on_ranks(&engine, mesh(2, 1, 1), |mesh| {
        let case = [&one, &other][mesh.rank()];
        let made = engine.layer_with(&case.spec, &case.host_weights(), LayerOptions::over(mesh));
        made.expect_err("they differ").to_string()
    });
    for error in errors {
        assert!(
            error.contains("`spec`") && error.contains("rank 1"),
            "{error}"
        );
    }
}
