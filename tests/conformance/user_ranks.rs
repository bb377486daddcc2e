//! Experts that are the caller's code, over ranks.

use super::Case;
use super::case::{floats, host, longs};
use super::compare::close;
use super::layers::engine;
use super::mesh::{mesh, on_nodes, on_ranks, part};
use super::trained::RNG_KEY;
use super::user::{external, heterogeneous, others, user_layer};
use moesaic::experts::{ExpertBackward, UserExpert, UserLayer};
use moesaic::mesh::TokenScope;
use moesaic::plan::SATURATED;
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

/// The results of a step on four ranks, two on each node: `y`, `dx` and the router's gradient of
/// all ranks, then the gradients of all experts.
fn on_two_nodes(
    text: &str,
    shares: &[Range<usize>; 4],
    strategy: &str,
) -> ([Vec<f64>; 3], Gradients) {
    let tokens = shares[3].end;
    let dy = heterogeneous(text, tokens).0.dy(4);
    let ranks = on_nodes(&engine(), mesh(4, 1, 1), 2, |mesh| {
        let (case, experts, seen) = heterogeneous(text, tokens);
        let (owned, own) = of_rank(mesh, &case.spec, experts);
        let options = LayerOptions {
            strategy: Some(strategy.parse().unwrap()),
            ..LayerOptions::over(mesh).training(Training::default())
        };
        let layer = engine().user_layer(&case.spec, &others(&case), own, options);
        let mut layer = layer.unwrap_or_else(|e| panic!("{strategy}: {e}"));
        let found = step(&case, &mut layer, &shares[mesh.rank()], &dy);
        let seen = owned.iter().map(|&e| Arc::clone(&seen[e]));
        (found, of_experts(&seen.collect::<Vec<_>>()))
    });
    let result = |at: usize| ranks.iter().flat_map(|rank| rank.0[at].clone()).collect();
    // The mesh places experts in their order.
    let gradients = ranks.iter().flat_map(|rank| rank.1.clone());
    (
        [result(0), result(1), ranks[0].0[2].clone()],
        gradients.collect(),
    )
}

/// Rows over nodes, around a ring, and in chunks of experts arrive as those that are sent directly
/// and at once: the bytes of one process. Some ranks have no tokens, some chunks no experts, some
/// experts no rows.
#[test]
fn user_experts_exchange_rows_by_any_algorithm_in_any_chunks() {
    let text = external("").replace("external", "linear");
    for shares in [
        [0..5, 5..9, 9..9, 9..23],
        [0..0, 0..0, 0..1, 1..1],
        [0..0, 0..0, 0..0, 0..0],
    ] {
        let (case, experts, seen) = heterogeneous(&text, shares[3].end);
        let dy = case.dy(4);
        let mut whole = user_layer(&engine(), &case, experts, true);
        let expected = step(&case, &mut whole, &(0..shares[3].end), &dy);
        let all: Vec<usize> = (0..5).collect();
        for strategy in [
            "all_to_all=2dh",
            "all_to_all=2dh-inter-first",
            "all_to_all=2dh-concurrent",
            "all_to_all=ring",
            "overlap_degree=2",
            "overlap_degree=1/3",
            "overlap_degree=2,all_to_all=2dh",
            "overlap_degree=2,all_to_all=ring,comm_dtype=none",
        ] {
            let (found, gradients) = on_two_nodes(&text, &shares, strategy);
            for at in [0, 1] {
                assert!(found[at] == expected[at], "result {at} by {strategy}");
            }
            close("router", &found[2], &expected[2], 1e-5);
            near_one_process(&all, &gradients, &of_experts(&seen));
        }
    }
}

/// The relative L2 error.
fn error(found: &[f64], want: &[f64]) -> f64 {
    assert_eq!(found.len(), want.len());
    let square = |sum: f64, value: f64| sum + value * value;
    let errors = found.iter().zip(want).map(|(a, b)| a - b);
    (errors.fold(0.0, square) / want.iter().copied().fold(0.0, square)).sqrt()
}

/// Rows between nodes have the strategy's dtype, whatever the algorithm and the chunks; those
/// inside a node stay as they are.
#[test]
fn user_experts_cast_rows_between_nodes() {
    let text = external("").replace("external", "linear");
    let shares = [0..31, 31..60, 60..60, 60..97];
    let (exact, gradients) = on_two_nodes(&text, &shares, "default");
    let flat = |all: &Gradients| {
        let numbers = all.iter().flatten().flatten();
        numbers.map(|g| f64::from(*g)).collect::<Vec<_>>()
    };
    // The errors of one rounding (docs/adaptive/comm_dtype.md); most rows go to the other node.
    for (comm_dtype, format) in [
        ("f16", 2.1e-4),
        ("bf16", 1.7e-3),
        ("fp8", 2.6e-2),
        ("mxfp8", 2.9e-2),
    ] {
        let near = |what: &str, found: &[f64], exact: &[f64]| {
            let error = error(found, exact);
            let fits = error > 0.3 * format && error < 3.0 * format;
            assert!(fits, "{what} by {comm_dtype}: {error:e}");
        };
        // One pass at a time: behind a rounded row ReLU may have another slope.
        let forward = format!("comm_dtype={comm_dtype}/none");
        near("y", &on_two_nodes(&text, &shares, &forward).0[0], &exact[0]);
        let backward = format!("comm_dtype=none/{comm_dtype}");
        let (found, of_experts) = on_two_nodes(&text, &shares, &backward);
        assert!(found[0] == exact[0], "forward by {backward}");
        near("dx", &found[1], &exact[1]);
        near("gradients", &flat(&of_experts), &flat(&gradients));
        let both = on_two_nodes(&text, &shares, &format!("comm_dtype={comm_dtype}"));
        for rest in ["overlap_degree=2", "all_to_all=2dh", "all_to_all=ring"] {
            let strategy = format!("{rest},comm_dtype={comm_dtype}");
            let same = on_two_nodes(&text, &shares, &strategy) == both;
            assert!(same, "{strategy}");
        }
    }
    let nobody = [0..0, 0..0, 0..0, 0..0];
    let (found, _) = on_two_nodes(&text, &nobody, "comm_dtype=fp8");
    assert!(found[0].is_empty());
}

/// Values that are too large for f16 are counted, those of this rank's tokens and experts.
#[test]
fn user_experts_count_what_is_too_large_for_f16() {
    let text = external("").replace("external", "linear");
    let each = on_nodes(&engine(), mesh(2, 1, 1), 1, |mesh| {
        ["f16/none", "none"].map(|comm_dtype| {
            let (mut case, experts, _) = heterogeneous(&text, 8);
            case.input.x.iter_mut().for_each(|value| *value *= 1e6);
            let (_, own) = of_rank(mesh, &case.spec, experts);
            let options = LayerOptions {
                strategy: Some(format!("comm_dtype={comm_dtype}").parse().unwrap()),
                ..LayerOptions::over(mesh)
            };
            let layer = engine().user_layer(&case.spec, &others(&case), own, options);
            let layer = layer.unwrap();
            assert!(layer.layer().tensor(SATURATED).is_some(), "it is listed");
            let twice = [(); 2].map(|()| {
                let output = layer.forward(case.input().reading(&["y", SATURATED]));
                longs(&output.unwrap(), SATURATED)[0]
            });
            assert_eq!(twice[0], twice[1], "a call counts its own");
            twice[0]
        })
    });
    for [f16, none] in each {
        assert!(f16 > 0 && none == 0, "{f16} and {none}");
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
    let mut all: Vec<Option<E>> = experts.into_iter().map(Some).collect();
    let owned = mesh.experts(spec.shape.experts);
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
        let refuse = |strategy: &str| {
            let strategy = Some(strategy.parse().unwrap());
            let options = LayerOptions {
                strategy,
                ..LayerOptions::over(mesh)
            };
            make("", 5, options)
        };
        let own = mesh.placement_of(5).unwrap().count(mesh.place().ep);
        // Rules that look at one token need no other ranks'.
        assert_eq!(make("", own, LayerOptions::over(&world)), "");
        let capacity = "\n[capacity]\nmode = 'fixed'\nrows = 4\n";
        [
            make("", 1, LayerOptions::over(mesh)),
            make(capacity, own, LayerOptions::over(&world)),
            refuse("r=1"),
            refuse("shadows=1"),
            refuse("overlap_degree=2,overlap_by=peers"),
            refuse("all_to_all=dedup-ranks"),
            refuse("overlap_degree=65"),
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
    let expected = [
        "1 experts were given",
        "TokenScope::Rank",
        "no `r`: nobody but the expert itself knows its weights",
        "no `shadows`: nobody but the expert itself knows its weights",
        "no `overlap_by=peers`: an expert gets its rows of all ranks in one call",
        "no `all_to_all=dedup`: each row belongs to one expert",
        "take 1 to 64",
    ];
    for errors in refused {
        for (error, expected) in errors.iter().zip(expected) {
            assert!(error.contains(expected), "{error}");
        }
    }
}
