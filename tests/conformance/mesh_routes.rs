//! Rows that go over other ranks: what arrives is the same.

use super::arranged::Arranged;
use super::case::Case;
use super::layers::engine as cpu;
use super::mesh::{compare_on, evaluated, layer_on, mesh, specs, trained};
use super::mesh_ways::at_ways;
use super::simulated::open;
use super::trained::near;
use moesaic::collectives::{Call, Collectives, threads};
use moesaic::spec::WeightSite;
use moesaic::{Engine, Mesh, Parallel, Recompute, Strategy, Training};

const ROUTES: [&str; 4] = [
    "route=intra-first",
    "route=inter-first",
    "route=concurrent",
    "route=once",
];

/// Threads that say that they are on several nodes.
fn by<'a>(engine: &'a Engine, per_node: usize, strategy: &str) -> Arranged<'a> {
    Arranged {
        engine,
        per_node,
        placement: None,
        strategy: strategy.parse().unwrap(),
    }
}

/// Everything that ranks give in training and evaluation, to the bit.
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
        // Sums inside nodes are rounded: of gradients, and of outputs that are weighted before.
        let sums = route == "route=once";
        let late = case.spec.router.weight_on == WeightSite::Output;
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
fn every_route_gives_the_bits_of_the_direct_one() {
    let engine = cpu();
    let specs = specs();
    let few = [1, 3];
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
fn routes_run_on_simulated_gpus() {
    let case = Case::random(&specs()[0], 9, 1);
    for target in ["sim:sm_80", "sim:gfx942"] {
        let engine = open(target);
        let of = |strategy| evaluated(&by(&engine, 2, strategy), mesh(4, 1, 1), &case);
        let linear = of("default");
        for route in &ROUTES[2..] {
            assert!(of(route) == linear, "{route} on {target}");
        }
    }
}

#[test]
fn nodes_that_a_route_cannot_have_are_said() {
    let engine = cpu();
    let case = Case::random(&specs()[0], 4, 1);
    let device = |_| Ok(engine.device().clone());
    let errors = threads::run(4, device, |mut world| {
        let host = ["a", "a", "a", "b"][world.rank()];
        let mesh = Mesh::on_host(&mut world, mesh(4, 1, 1), host).unwrap();
        let mut layer = layer_on(&engine, &mesh, &case, None);
        let mut error = |text: &str| layer.set_strategy(text.parse().unwrap()).unwrap_err();
        let errors = [
            error("route=inter-first").to_string(),
            error("route=once").to_string(),
        ];
        // It was no failure of the group, and the strategy is what it was.
        assert_eq!(layer.strategy(), Strategy::default());
        layer.forward(&case.input()).unwrap();
        world.finish(&Call::new("end")).unwrap();
        errors
    });
    for errors in errors.unwrap() {
        let [nodes, once] = errors.unwrap();
        assert!(once.contains("route=once needs nodes"), "{once}");
        let said = "route=inter-first needs nodes with equally many ranks, one node's after the \
                    other's, but ranks lie on a (3), b (1)";
        assert!(nodes.contains(said), "{nodes}");
    }
}

/// Rows of each half of an expert's owners travel by themselves, over two nodes.
#[test]
fn rows_go_by_routes_at_other_ways() {
    let engine = cpu();
    let case = Case::random(&specs()[0], 31, 3);
    let grid = at_ways(mesh(2, 4, 1), 2);
    let straight = evaluated(&engine, grid, &case);
    for route in ROUTES {
        let ranks = by(&engine, 4, route);
        assert!(evaluated(&ranks, grid, &case) == straight, "{route}");
    }
    let once = by(&engine, 4, "route=once");
    compare_on(&engine, &once, grid, &case, Recompute::None);
}
