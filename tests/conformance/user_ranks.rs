//! Experts that are the caller's code, over ranks.

use super::Case;
use super::case::{floats, host};
use super::compare::close;
use super::layers::engine;
use super::mesh::{mesh, on_nodes, on_ranks, part};
use super::trained::RNG_KEY;
use super::user::{external, heterogeneous, others, user_layer};
use moesaic::experts::{ExpertBackward, UserExpert, UserLayer};
use moesaic::mesh::TokenScope;
use moesaic::spec::LayerSpec;
use moesaic::{DType, LayerOptions, Mesh, Training};
use std::ops::Range;
use std::sync::{Arc, Mutex};

/// An expert whose gradients ranks sum, as one that owns them would.
struct Owning {
    expert: Box<dyn UserExpert>,
    shared: Arc<Mutex<[Vec<f32>; 2]>>,
    own: [Vec<f32>; 2],
}

impl UserExpert for Owning {
    fn forward(&self, rows: &[f32], out: &mut [f32], saved: Option<&mut Vec<f32>>) {
        self.expert.forward(rows, out, saved);
    }

    fn backward(&mut self, call: &ExpertBackward<'_>, drows: &mut [f32]) {
        self.expert.backward(call, drows);
        self.own
            .clone_from(&self.shared.lock().expect("one thread"));
    }

    fn gradients(&mut self) -> Vec<&mut [f32]> {
        self.own.iter_mut().map(|own| &mut own[..]).collect()
    }
}

/// The gradients that each of some experts has.
type Gradients = Vec<[Vec<f32>; 2]>;

/// Runs a step of the case's tokens in one process, or of a rank's share of them with its own
/// experts: `y`, `dx`, the gradient of the router, and those of the experts.
fn step<E: UserExpert>(
    case: &Case,
    layer: &mut UserLayer<E>,
    share: &Range<usize>,
    dy: &[f64],
) -> [Vec<f64>; 3] {
    let (own, width) = (part(case, share), case.spec.output_dim());
    let evaluated = layer.forward(&own.input()).unwrap();
    let (output, saved) = layer.forward_train(&own.input(), RNG_KEY).unwrap();
    assert_eq!(evaluated.y(), output.y());
    let dy = &dy[share.start * width..share.end * width];
    let dy = host(DType::F32, &[share.len(), width], dy);
    let back = layer.backward(&saved, &dy, false).unwrap();
    layer.reduce_gradients().unwrap();
    let router = layer.layer().gradient("router.weight").unwrap();
    let router = router.to_f32().iter().map(|g| f64::from(*g)).collect();
    [floats(&output, "y"), floats(&back, "dx"), router]
}

fn of_experts(seen: &[Arc<Mutex<[Vec<f32>; 2]>>]) -> Gradients {
    seen.iter().map(|own| own.lock().unwrap().clone()).collect()
}

/// Experts of other sizes on each rank, some ranks without tokens: `y` and `dx` are the bytes of
/// one process, gradients of experts and of the router are near its own.
#[test]
fn user_experts_run_over_ranks() {
    let linear = external("").replace("external", "linear");
    for (parallel, shares) in [
        (mesh(2, 1, 1), vec![0..14, 14..23]),
        (mesh(3, 1, 1), vec![0..9, 9..9, 9..23]),
    ] {
        let text = linear.clone() + "renormalize = \"sum\"\n[[shared]]\nhidden_dim = 5\n";
        let (case, experts, seen) = heterogeneous(&text, 23);
        let dy = case.dy(4);
        let mut whole = user_layer(&engine(), &case, experts, true);
        let expected = step(&case, &mut whole, &(0..23), &dy);
        let gradients = of_experts(&seen);
        let ranks = on_ranks(&engine(), parallel, |mesh| {
            let (case, experts, seen) = heterogeneous(&text, 23);
            let (owned, own) = of_rank(mesh, &case.spec, experts);
            let options = LayerOptions::over(mesh).training(Training::default());
            let layer = engine().user_layer(&case.spec, &others(&case), own, options);
            let found = step(&case, &mut layer.unwrap(), &shares[mesh.rank()], &dy);
            let seen: Vec<_> = owned.iter().map(|&e| Arc::clone(&seen[e])).collect();
            (found, owned, of_experts(&seen))
        });
        for at in [0, 1] {
            let all: Vec<f64> = ranks.iter().flat_map(|rank| rank.0[at].clone()).collect();
            assert!(all == expected[at], "result {at} on {parallel:?}");
        }
        for (found, owned, own) in &ranks {
            close("router", &found[2], &expected[2], 1e-5);
            near_one_process(owned, own, &gradients);
        }
    }
}

/// Rows over nodes and around a ring arrive as those that are sent directly: the bytes of one
/// process.
#[test]
fn user_experts_exchange_rows_by_any_algorithm() {
    let text = external("").replace("external", "linear");
    let shares = [0..5, 5..9, 9..9, 9..23];
    let (case, experts, _) = heterogeneous(&text, 23);
    let dy = case.dy(4);
    let mut whole = user_layer(&engine(), &case, experts, true);
    let expected = step(&case, &mut whole, &(0..23), &dy);
    for algorithm in ["2dh", "2dh-inter-first", "2dh-concurrent", "ring"] {
        let ranks = on_nodes(&engine(), mesh(4, 1, 1), 2, |mesh| {
            let (case, experts, _) = heterogeneous(&text, 23);
            let (_, own) = of_rank(mesh, &case.spec, experts);
            let options = LayerOptions {
                strategy: Some(format!("all_to_all={algorithm}").parse().unwrap()),
                ..LayerOptions::over(mesh).training(Training::default())
            };
            let layer = engine().user_layer(&case.spec, &others(&case), own, options);
            step(&case, &mut layer.unwrap(), &shares[mesh.rank()], &dy)
        });
        for at in [0, 1] {
            let all: Vec<f64> = ranks.iter().flat_map(|rank| rank[at].clone()).collect();
            assert!(all == expected[at], "result {at} by {algorithm}");
        }
    }
}

/// Two groups of ranks have a copy of each expert; its gradient is the sum of both.
#[test]
fn user_experts_have_copies_in_groups() {
    let text = external("").replace("external", "linear");
    let shares = [0..5, 5..9, 9..14, 14..23];
    let (case, experts, seen) = heterogeneous(&text, 23);
    let dy = case.dy(4);
    let mut whole = user_layer(&engine(), &case, experts, true);
    let expected = step(&case, &mut whole, &(0..23), &dy);
    let gradients = of_experts(&seen);
    let ranks = on_ranks(&engine(), mesh(2, 1, 2), |mesh| {
        let (case, experts, seen) = heterogeneous(&text, 23);
        let owning = experts
            .into_iter()
            .zip(seen)
            .map(|(expert, shared)| Owning {
                expert,
                shared,
                own: Default::default(),
            });
        let (owned, own) = of_rank(mesh, &case.spec, owning.collect());
        let options = LayerOptions::over(mesh).training(Training::default());
        let layer = engine().user_layer(&case.spec, &others(&case), own, options);
        let mut layer = layer.unwrap();
        let found = step(&case, &mut layer, &shares[mesh.rank()], &dy);
        let sums: Gradients = layer.experts().iter().map(|e| e.own.clone()).collect();
        (found, owned, sums)
    });
    for at in [0, 1] {
        let all: Vec<f64> = ranks.iter().flat_map(|rank| rank.0[at].clone()).collect();
        assert!(all == expected[at], "result {at}");
    }
    for (found, owned, own) in &ranks {
        close("router", &found[2], &expected[2], 1e-5);
        near_one_process(owned, own, &gradients);
    }
}

/// A gradient sums over rows, which come rank by rank on ranks and slot by slot in one process.
fn near_one_process(owned: &[usize], own: &Gradients, of_all: &Gradients) {
    for (&expert, own) in owned.iter().zip(own) {
        for (own, expected) in own.iter().zip(&of_all[expert]) {
            let wide = |all: &[f32]| all.iter().map(|g| f64::from(*g)).collect::<Vec<_>>();
            close(
                &format!("expert {expert}"),
                &wide(own),
                &wide(expected),
                1e-5,
            );
        }
    }
}

/// Returns the experts that the mesh places on this rank, with their ids.
fn of_rank<E>(mesh: &Mesh, spec: &LayerSpec, experts: Vec<E>) -> (Vec<usize>, Vec<E>) {
    let placed = mesh.placement_of(spec.shape.experts).unwrap();
    let mut all: Vec<Option<E>> = experts.into_iter().map(Some).collect();
    let owned = placed.of(mesh.place().ep).to_vec();
    let own = owned.iter().map(|&expert| all[expert].take().unwrap());
    (owned.clone(), own.collect())
}

#[test]
fn user_experts_over_ranks_refuse_what_they_do_not_follow() {
    let refused = on_ranks(&engine(), mesh(2, 1, 1), |mesh| {
        let make = |rest: &str, keep: usize, options: LayerOptions<'_>| {
            let (case, mut experts, _) = heterogeneous(&(external("") + rest), 1);
            experts.truncate(keep);
            let made = engine().user_layer(&case.spec, &others(&case), experts, options);
            made.err().map(|e| e.to_string()).unwrap_or_default()
        };
        let world = mesh.over(TokenScope::World);
        let strategy = Some("overlap_degree=2".parse().unwrap());
        let own = mesh.placement_of(5).unwrap().count(mesh.place().ep);
        // Rules that look at one token need no other ranks'.
        assert_eq!(make("", own, LayerOptions::over(&world)), "");
        let capacity = "\n[capacity]\nmode = 'fixed'\nrows = 4\n";
        [
            make("", 1, LayerOptions::over(mesh)),
            make(capacity, own, LayerOptions::over(&world)),
            make(
                "",
                5,
                LayerOptions {
                    strategy,
                    ..LayerOptions::over(mesh)
                },
            ),
        ]
    });
    // Two ranks on one node, one on another.
    let uneven = on_nodes(&engine(), mesh(3, 1, 1), 2, |mesh| {
        let (case, experts, _) = heterogeneous(&external(""), 1);
        let (_, own) = of_rank(mesh, &case.spec, experts);
        let options = LayerOptions {
            strategy: Some("all_to_all=2dh".parse().unwrap()),
            ..LayerOptions::over(mesh)
        };
        let made = engine().user_layer(&case.spec, &others(&case), own, options);
        made.err().map(|e| e.to_string()).unwrap_or_default()
    });
    for error in uneven {
        assert!(
            error.contains("ranks lie on node0 (2), node1 (1)"),
            "{error}"
        );
    }
    for [count, scope, strategy] in refused {
        assert!(count.contains("1 experts were given"), "{count}");
        assert!(scope.contains("TokenScope::Rank"), "{scope}");
        assert!(strategy.contains("no `overlap_degree`"), "{strategy}");
    }
}
