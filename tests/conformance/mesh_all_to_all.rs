//! All-to-all algorithms: what arrives is the same.

use super::arranged::Arranged;
use super::case::{Case, host, ints};
use super::layers::engine as cpu;
use super::mesh::{compare_on, evaluated, layer_on, mesh, part, shares, specs, trained};
use super::mesh_adaptive_r::at_r;
use super::simulated::open;
use super::trained::{RNG_KEY, near};
use moesaic::collectives::{Call, Collectives, threads};
use moesaic::spec::WeightSite;
use moesaic::trace::{Lane, Trace};
use moesaic::{DType, Engine, Mesh, Parallel, Recompute, Strategy, Training};
use std::sync::Arc;

const ROUTES: [&str; 6] = [
    "all_to_all=2dh",
    "all_to_all=2dh-inter-first",
    "all_to_all=2dh-concurrent",
    "all_to_all=dedup",
    "all_to_all=ring",
    "all_to_all=dedup-ranks",
];

/// Whether ranks return sums of outputs that `combine` would weight.
fn sums_outputs(route: &str) -> bool {
    route == "all_to_all=dedup-ranks"
}

/// Ranks as threads that give themselves hosts.
fn by<'a>(engine: &'a Engine, per_node: usize, strategy: &str) -> Arranged<'a> {
    Arranged {
        engine,
        per_node,
        placement: None,
        strategy: strategy.parse().unwrap(),
    }
}

/// Returns everything that ranks compute in training and evaluation, as bits.
fn compare(engine: &Engine, parallel: Parallel, per_node: usize, case: &Case) {
    let (dy, training) = (
        case.dy(7),
        Training {
            recompute: Recompute::None,
        },
    );
    let results = |strategy: &str| {
        let ranks = by(engine, per_node, strategy);
        let trained = trained(&ranks, parallel, case, training, &["y"], &dy);
        (evaluated(&ranks, parallel, case), trained)
    };
    let linear = results("default");
    let largest = linear
        .1
        .values()
        .flatten()
        .fold(0.0, |most: f64, v| most.max(v.abs()));
    for route in ROUTES {
        let found = results(route);
        let what = format!(
            "{route} on {parallel:?}, {per_node} a node: {}",
            case.describe()
        );
        // Sums on the way are rounded: of gradients, and of outputs that are weighted before. Ranks
        // that sum weight outputs themselves.
        let sums = route.starts_with("all_to_all=dedup");
        let late = case.spec.router.weight_on == WeightSite::Output && !sums_outputs(route);
        if sums && !late {
            near(&what, &case.spec, &found.1["y"], &linear.1["y"], largest);
        } else {
            assert!(found.0 == linear.0, "{what}: y");
            assert!(found.1["y"] == linear.1["y"], "{what}: y in training");
        }
        for (name, values) in &linear.1 {
            let what = format!("{what}: {name}");
            if sums {
                near(&what, &case.spec, &found.1[name], values, largest)
            } else {
                assert!(found.1[name] == *values, "{what}")
            }
        }
        if sums {
            assert!(results(route) == found, "{what}: another run");
        }
    }
}

/// `MOESAIC_ALL_ROUTES`: more layers and grids.
fn all() -> bool {
    std::env::var_os("MOESAIC_ALL_ROUTES").is_some()
}

#[test]
fn every_all_to_all_gives_the_bits_of_linear() {
    let engine = cpu();
    let specs = specs();
    let few = [1, 3, 5];
    for (seed, spec) in specs.iter().enumerate() {
        if all() || few.contains(&seed) {
            let case = Case::random(spec, 41, seed as u64);
            compare(&engine, mesh(4, 1, 1), 2, &case);
        }
    }
    let case = Case::random(&specs[2], 33, 9);
    let grids = [
        (mesh(3, 2, 1), 3),
        (mesh(2, 2, 2), 2),
        (mesh(2, 2, 1), 2),
        (mesh(2, 1, 2), 1),
        (mesh(1, 1, 1), 1),
    ];
    let most = if all() { grids.len() } else { 1 };
    for (parallel, per_node) in &grids[..most] {
        compare(&engine, *parallel, *per_node, &case);
    }
}

#[test]
fn tokens_may_be_none_or_one() {
    let engine = cpu();
    for tokens in 0..=usize::from(all()) {
        let case = Case::random(&specs()[0], tokens, 3);
        compare(&engine, mesh(4, 1, 1), 2, &case);
    }
}

#[test]
fn all_to_all_algorithms_run_on_simulated_gpus() {
    let case = Case::random(&specs()[0], 9, 1);
    for target in ["sim:sm_80", "sim:gfx942"] {
        let engine = open(target);
        let of = |strategy| evaluated(&by(&engine, 2, strategy), mesh(4, 1, 1), &case);
        let linear = of("default");
        for route in ROUTES[2..].iter().filter(|route| !sums_outputs(route)) {
            assert!(of(route) == linear, "{route} on {target}");
        }
        let sums = by(&engine, 2, "all_to_all=dedup-ranks");
        compare_on(&engine, &sums, mesh(4, 1, 1), &case, Recompute::None);
    }
}

#[test]
fn nodes_that_an_algorithm_cannot_use_are_refused() {
    let engine = cpu();
    let case = Case::random(&specs()[0], 4, 1);
    let device = |_| Ok(engine.device().clone());
    let errors = threads::run(4, device, |mut world| {
        let host = ["a", "a", "a", "b"][world.rank()];
        let mesh = Mesh::on_host(&mut world, mesh(4, 1, 1), host).unwrap();
        let layer = layer_on(&engine, &mesh, &case, None);
        // Neither of these needs nodes.
        for text in ["all_to_all=ring", "all_to_all=dedup-ranks", "default"] {
            layer.set_strategy(text.parse().unwrap()).unwrap();
            layer.forward(&case.input()).unwrap();
        }
        let error = |text: &str| layer.set_strategy(text.parse().unwrap()).unwrap_err();
        let errors = [
            error("all_to_all=2dh-inter-first").to_string(),
            error("all_to_all=dedup").to_string(),
        ];
        // It was no failure of the group, and the strategy is what it was.
        assert_eq!(layer.strategy(), Strategy::default());
        layer.forward(&case.input()).unwrap();
        world.finish(&Call::new("end")).unwrap();
        errors
    });
    for errors in errors.unwrap() {
        let [nodes, dedup] = errors.unwrap();
        assert!(
            dedup.contains("all_to_all=dedup needs the same number"),
            "{dedup}"
        );
        let said = "all_to_all=2dh-inter-first needs the same number of consecutive ranks on each \
                    node, but ranks lie on a (3), b (1)";
        assert!(nodes.contains(said), "{nodes}");
    }
}

/// Each half of an expert's owners exchanges its rows by itself, over two nodes.
#[test]
fn all_to_all_algorithms_run_at_other_degrees() {
    let engine = cpu();
    let case = Case::random(&specs()[0], 31, 3);
    let grid = at_r(mesh(2, 4, 1), 2);
    let straight = evaluated(&engine, grid, &case);
    for route in ROUTES.into_iter().filter(|route| !sums_outputs(route)) {
        let ranks = by(&engine, 4, route);
        assert!(evaluated(&ranks, grid, &case) == straight, "{route}");
    }
    for route in ["all_to_all=dedup", "all_to_all=dedup-ranks"] {
        let once = by(&engine, 4, route);
        compare_on(&engine, &once, grid, &case, Recompute::None);
    }
}

/// Exchanges of a training step of all ranks, with the bytes that each sends to others.
fn exchanged(parallel: Parallel, strategy: &str, case: &Case) -> Vec<(String, u64)> {
    let engine = cpu();
    let dy = case.dy(1);
    let ranks = super::mesh::on_ranks(&engine, parallel, |mesh| {
        let mut layer = layer_on(&engine, mesh, case, Some(Training::default()));
        layer.set_strategy(strategy.parse().unwrap()).unwrap();
        let trace = Arc::new(Trace::default());
        layer.record(Some(trace.clone()));
        let tokens = &shares(case.input.tokens, parallel.ranks())[mesh.rank()];
        let own = part(case, tokens);
        let (_, saved) = layer.forward_train(&own.input(), RNG_KEY).unwrap();
        let width = case.spec.output_dim();
        let dy = &dy[tokens.start * width..tokens.end * width];
        let dy = host(DType::F32, &[tokens.len(), width], dy);
        layer.backward(&saved, &dy, false).unwrap();
        let recorded = trace.recorded().into_iter();
        let exchanges = recorded.filter(|it| it.activity.lane == Lane::Exchange);
        let sent = exchanges.map(|it| (it.activity.name, it.activity.bytes));
        sent.collect::<Vec<_>>()
    });
    ranks.concat()
}

/// The number of exchanges of a name, and the bytes of all.
fn sent(exchanged: &[(String, u64)], name: &str) -> (usize, u64) {
    let named = exchanged.iter().filter(|it| it.0 == name);
    (named.clone().count(), named.map(|it| it.1).sum())
}

/// The rows of a case's tokens for experts of other ranks, and the least rows that could cross: one
/// for each token and other rank.
fn crossing(case: &Case, ranks: usize) -> [u64; 2] {
    let shape = &case.spec.shape;
    let layer = case.layer(&cpu());
    let output = layer.forward(case.input().reading(&["topk_ids"])).unwrap();
    let ids = ints(&output, "topk_ids");
    let shares = shares(case.input.tokens, ranks);
    let (mut rows, mut least) = (0, 0);
    for (token, ids) in ids.chunks(shape.top_k).enumerate() {
        let home = shares.iter().position(|share| share.contains(&token));
        let owner = |id: &i32| *id as usize / (shape.experts / ranks);
        let away = ids.iter().map(owner).filter(|owner| Some(*owner) != home);
        let mut away: Vec<usize> = away.collect();
        rows += away.len() as u64;
        away.sort_unstable();
        away.dedup();
        least += away.len() as u64;
    }
    [rows, least]
}

/// Where `combine` weights outputs by the spec, too, ranks weight and add up what their experts
/// computed: no fewer rows could cross.
#[test]
fn a_token_goes_to_a_rank_once_and_one_row_returns() {
    let text = "shape = { model_dim = 8, hidden_dim = 16, experts = 8, top_k = 4 }";
    let case = Case::random(&super::mesh::spec(text), 32, 5);
    let [rows, least] = crossing(&case, 4);
    assert!(least < rows, "{least} of {rows}");
    let bytes = |strategy: &str, names: [&str; 4]| {
        let all = exchanged(mesh(4, 1, 1), strategy, &case);
        names.map(|name| sent(&all, name).1)
    };
    let once = bytes("all_to_all=dedup-ranks", ["rows", "out", "dout", "drows"]);
    assert_eq!(once, [least * 4 * 8; 4]);
    let each = bytes("default", ["out", "dout", "row_weights", "dweight_parts"]);
    assert_eq!(each, [rows * 4 * 8, rows * 4 * 8, 0, 0]);
}

/// Weights of rows go with the rows, and their gradients with those of the rows: a rank sends
/// another both in one message, in chunks, too.
#[test]
fn what_goes_the_same_way_goes_together() {
    let text = "shape = { model_dim = 8, hidden_dim = 16, experts = 4, top_k = 2 }";
    let case = Case::random(&super::mesh::spec(text), 32, 5);
    let [rows, _] = crossing(&case, 2);
    for (strategy, chunks) in [("default", 1), ("overlap_degree=2", 2)] {
        let all = exchanged(mesh(2, 1, 1), strategy, &case);
        let of = |name: &str| sent(&all, name);
        assert_eq!(of("rows"), (2 * chunks, rows * (4 * 8 + 4)), "{strategy}");
        assert_eq!(of("drows").0, 2 * chunks, "{strategy}");
        assert!(of("drows").1 > rows * 4 * 8, "{strategy}");
        for gone in ["row_weights", "dweight_parts"] {
            assert_eq!(of(gone), (0, 0), "{strategy}: {gone}");
        }
    }
}
