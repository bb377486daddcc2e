//! Weights that several ranks hold: a rank with other values is noticed, by name.

use super::case::Case;
use super::layers::engine as cpu;
use super::mesh::{layer_on, mesh, on_ranks, sharded, spec};
use super::user::{external, heterogeneous, others};
use moesaic::engine::DifferentWeight;
use moesaic::plan::{Placement, Split};
use moesaic::{EngineError, Layer, LayerOptions, Mesh, Parallel, Tensor, Tensors, Training};

fn case() -> Case {
    let text = "shape = { model_dim = 12, hidden_dim = 8, experts = 6, top_k = 2 }
        router = { bias = true }
        experts = { bias = true }
        shared = [{ hidden_dim = 8 }]";
    Case::random(&spec(text), 4, 0)
}

/// Returns the tensor with one bit of its last element changed.
fn changed(tensor: &Tensor<'_>) -> Tensor<'static> {
    let mut other = tensor.clone().into_static();
    let last = other.data.len() - 1;
    other.data.to_mut()[last] ^= 1;
    other
}

fn with_changed(weights: &Tensors<'_>, name: &str) -> Tensors<'static> {
    let one = |(key, tensor): (&String, &Tensor<'_>)| {
        let tensor = if key == name {
            changed(tensor)
        } else {
            tensor.clone().into_static()
        };
        (key.clone(), tensor)
    };
    weights.iter().map(one).collect()
}

/// Returns the weights that a rank learns to differ.
fn different<T>(result: Result<T, EngineError>) -> Vec<DifferentWeight> {
    match result {
        Err(EngineError::DifferentWeights(weights)) => weights,
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("nothing was noticed"),
    }
}

/// Makes a layer with another value of `name` on rank 1; checks that all ranks learn of it. Returns
/// the text of the error.
pub fn refused(mesh: &Mesh, name: &str) -> String {
    let case = case();
    let mut weights = case.host_weights();
    if mesh.rank() == 1 {
        weights = with_changed(&weights, name);
    }
    let made = cpu().layer_with(&case.spec, &weights, LayerOptions::over(mesh));
    let error = made.map(drop).expect_err("they differ");
    let text = error.to_string();
    let found = different(Err::<(), _>(error));
    assert_eq!(found.len(), 1, "{text}");
    assert_eq!((&*found[0].name, found[0].expert), (name, None));
    assert_eq!(found[0].ranks[1], [1], "{text}");
    text
}

#[test]
fn a_layer_is_refused_where_ranks_bring_other_weights() {
    for name in ["router.weight", "router.bias", "shared.0.down.weight"] {
        let texts = on_ranks(&cpu(), mesh(3, 1, 1), |mesh| refused(mesh, name));
        for text in texts {
            let part = format!("`{name}`: one on ranks 0, 2, another on rank 1\n");
            assert!(text.contains(&part), "{text}");
        }
    }
}

/// A rank may read anything into weights that it alone holds.
#[test]
fn weights_of_one_rank_are_not_compared() {
    let case = case();
    on_ranks(&cpu(), mesh(2, 1, 1), |mesh| {
        let mut weights = case.host_weights();
        if mesh.rank() == 1 {
            weights = with_changed(&weights, "experts.up.weight");
        }
        let layer = cpu().layer_with(&case.spec, &weights, LayerOptions::over(mesh));
        layer.unwrap().check_weights().unwrap();
    });
}

/// Sets other values of a weight on one rank, and returns what all learn.
fn after_setting(layer: &Layer, on: usize, name: &str, case: &Case) -> Vec<DifferentWeight> {
    layer.check_weights().unwrap();
    let own = layer.weights_of(&case.host_weights()).unwrap();
    if layer.mesh().unwrap().rank() == on {
        layer.set_weight(name, &changed(&own[name])).unwrap();
    }
    let found = different(layer.check_weights());
    layer.set_weight(name, &own[name]).unwrap();
    layer.check_weights().unwrap();
    found
}

#[test]
fn weights_that_are_set_are_compared_when_asked_for() {
    let case = case();
    // Ranks that hold the same: by the mesh, and by the name.
    let cases: [(Parallel, &str, Option<usize>, [usize; 2]); 6] = [
        (mesh(2, 1, 1), "router.weight", None, [0, 1]),
        (mesh(2, 1, 1), "shared.0.up.weight", None, [0, 1]),
        (sharded(2, 2, 1), "shared.0.up.weight", None, [1, 3]),
        (sharded(2, 2, 1), "shared.0.down.weight", None, [1, 3]),
        (mesh(1, 1, 2), "experts.up.weight", Some(5), [0, 1]),
        (mesh(3, 1, 2), "experts.down.bias", Some(3), [1, 4]),
    ];
    for (parallel, name, expert, [one, other]) in cases {
        for training in [None, Some(Training::default())] {
            let found = on_ranks(&cpu(), parallel, |mesh| {
                let layer = layer_on(&cpu(), mesh, &case, training);
                after_setting(&layer, other, name, &case)
            });
            for found in found {
                // A layer for inference may have gate and up in one packed tensor.
                let most = if training.is_some() { 1 } else { 2 };
                assert!(found.len() <= most, "{parallel:?}: {found:?}");
                let mut named = found.iter().filter(|weight| weight.name == name);
                let weight = named.next().expect("the weight is named");
                assert_eq!(weight.expert, expert, "{parallel:?}");
                assert!(weight.ranks[0].contains(&one), "{parallel:?}: {found:?}");
                assert_eq!(weight.ranks[1..], [[other]], "{parallel:?}: {found:?}");
            }
        }
    }
}

#[test]
fn replicas_of_an_expert_are_compared() {
    let case = case();
    let groups = vec![vec![0, 1, 2, 3], vec![4, 5, 2]];
    let placement = Placement::new(6, groups, None, Split::default()).unwrap();
    on_ranks(&cpu(), mesh(2, 1, 1), |mesh| {
        let mesh = mesh.placed(&placement).unwrap();
        let layer = layer_on(&cpu(), &mesh, &case, None);
        // The last slot of rank 1 is its copy of expert 2.
        let found = after_setting(&layer, 1, "experts.down.weight", &case);
        assert_eq!((found.len(), found[0].expert), (1, Some(2)), "{found:?}");
    });
}

#[test]
fn further_routers_are_compared() {
    let case = case();
    on_ranks(&cpu(), mesh(2, 1, 1), |mesh| {
        let weights = case.host_weights();
        let others = with_changed(&weights, "router.weight");
        let routers = [weights.clone(), [&weights, &others][mesh.rank()].clone()];
        let made = cpu().multi_gate(&case.spec, &weights, &routers, LayerOptions::over(mesh));
        assert_eq!(different(made)[0].name, "router.weight");
    });
}

#[test]
fn layers_around_experts_in_rust_are_compared() {
    let text = external("").replace("external", "linear");
    on_ranks(&cpu(), mesh(2, 1, 1), |mesh| {
        let (case, experts, _) = heterogeneous(&text, 4);
        let placement = mesh.placement_of(experts.len()).unwrap();
        let own = placement.of(mesh.rank()).into_owned();
        let experts = experts.into_iter().enumerate();
        let experts = experts.filter(|(expert, _)| own.contains(expert));
        let experts = experts.map(|(_, expert)| expert).collect::<Vec<_>>();
        let mut weights = others(&case);
        if mesh.rank() == 1 {
            weights = with_changed(&weights, "router.weight");
        }
        let made = cpu().user_layer(&case.spec, &weights, experts, LayerOptions::over(mesh));
        assert_eq!(different(made)[0].name, "router.weight");
    });
}
