//! Communication dtypes: threads that give themselves hosts, compared with the same ranks without
//! casts.

use super::case::{Case, floats, host, ints, longs};
use super::layers::engine as cpu;
use super::mesh::{layer_on, mesh, part, shares, spec};
use super::simulated::open;
use super::trained::RNG_KEY;
use moesaic::collectives::{Call, Collectives, threads};
use moesaic::mesh::{Both, CommDtype};
use moesaic::plan::SATURATED;
use moesaic::{DType, Engine, Layer, Mesh, Parallel, Strategy, Training};
use std::collections::BTreeMap;

/// Ranks of which so many are on a node, one node's after the other's.
struct Nodes<'e> {
    engine: &'e Engine,
    parallel: Parallel,
    per_node: usize,
}

/// Values of all ranks, one after the other.
type Values = BTreeMap<String, Vec<f64>>;

impl Nodes<'_> {
    fn each<T: Send>(&self, body: impl Fn(&Mesh) -> T + Sync) -> Vec<T> {
        let device = |_| Ok(self.engine.device().clone());
        let ranks = threads::run(self.parallel.ranks(), device, |mut world| {
            let host = format!("node {}", world.rank() / self.per_node);
            let mesh = Mesh::on_host(&mut world, self.parallel, &host).unwrap();
            let result = body(&mesh);
            world.finish(&Call::new("end")).unwrap();
            result
        });
        let unwound = |rank: std::thread::Result<T>| match rank {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        };
        ranks.unwrap().into_iter().map(unwound).collect()
    }

    /// A training step of every rank; gradients of weights are each rank's own.
    fn trained(&self, case: &Case, strategy: &str) -> Values {
        let shares = shares(case.input.tokens, self.parallel.ranks());
        let width = case.spec.output_dim();
        let dy = case.dy(3);
        let ranks = self.each(|mesh| {
            let layer = self.layer(mesh, case, strategy);
            let tokens = &shares[mesh.rank()];
            let input = part(case, tokens);
            let names = ["y", SATURATED];
            let call = layer.forward_train(input.input().reading(&names), RNG_KEY);
            let (output, saved) = call.unwrap_or_else(|e| panic!("{strategy}: {e}"));
            let dy = &dy[tokens.start * width..tokens.end * width];
            let dy = host(case.spec.precision.activations, &[tokens.len(), width], dy);
            let back = layer.backward(&saved, &dy, false);
            let back = back.unwrap_or_else(|e| panic!("{strategy}: {e}"));
            let mut values = Values::new();
            values.insert("y".to_string(), floats(&output, "y"));
            values.insert("dx".to_string(), floats(&back, "dx"));
            assert_eq!(longs(&output, SATURATED), [0], "{strategy}");
            let gradients = layer.gradients().unwrap();
            for (name, gradient) in gradients {
                let gradient = gradient.to_f32().into_iter().map(f64::from);
                values.insert(name, gradient.collect());
            }
            values
        });
        let mut all = Values::new();
        for (name, values) in ranks.into_iter().flatten() {
            all.entry(name).or_default().extend(values);
        }
        all
    }

    fn layer(&self, mesh: &Mesh, case: &Case, strategy: &str) -> Layer {
        let layer = layer_on(self.engine, mesh, case, Some(Training::default()));
        let strategy: Strategy = strategy.parse().unwrap();
        layer.set_strategy(strategy).unwrap();
        assert_eq!(layer.strategy(), strategy);
        layer
    }
}

/// The relative L2 error.
fn error(found: &[f64], want: &[f64]) -> f64 {
    assert_eq!(found.len(), want.len());
    let square = |sum: f64, value: f64| sum + value * value;
    let pairs = found.iter().zip(want);
    let errors = pairs.map(|(a, b)| a - b).fold(0.0, square);
    (errors / want.iter().copied().fold(0.0, square)).sqrt()
}

const LAYER: &str = "shape = { model_dim = 150, hidden_dim = 24, experts = 8, top_k = 2 }";

/// The relative error of a row in each format (docs/kernels/comm_cast.md), and how many times as
/// large that of a result may be.
const ERRORS: [(&str, f64, f64); 4] = [
    ("f16", 2.1e-4, 2.0),
    ("bf16", 1.7e-3, 2.0),
    ("fp8", 2.6e-2, 2.0),
    // Values that saturate are not rounded to nearest, so their errors do not average out.
    ("mxfp8", 2.9e-2, 3.0),
];

#[test]
fn errors_are_those_of_the_format() {
    let engine = cpu();
    let case = Case::random(&spec(LAYER), 61, 3);
    for (parallel, per_node) in [
        (mesh(4, 1, 1), 2),
        (mesh(4, 1, 1), 1),
        (mesh(2, 2, 1), 2),
        (mesh(2, 2, 1), 1),
        (mesh(2, 1, 2), 1),
    ] {
        let nodes = Nodes {
            engine: &engine,
            parallel,
            per_node,
        };
        let exact = nodes.trained(&case, "default");
        for (comm_dtype, format, most) in ERRORS {
            let packed = nodes.trained(&case, &format!("comm_dtype={comm_dtype}"));
            assert_eq!(packed.len(), exact.len());
            for (name, want) in &exact {
                let error = error(&packed[name], want);
                let what = format!("{name} of {comm_dtype} on {parallel:?}, {per_node} a node");
                println!("{what}: {error:.1e}");
                // Twice rounded on the way, and carried on by three products.
                assert!(error < most * format, "{what}: {error:e}");
                assert!(error > 0.5 * format, "{what}: {error:e}");
            }
        }
        // Forward alone, and backward alone.
        let forward = nodes.trained(&case, "comm_dtype=fp8/none");
        assert!(error(&forward["y"], &exact["y"]) > 2e-3);
        let backward = nodes.trained(&case, "comm_dtype=none/fp8");
        assert_eq!(backward["y"], exact["y"]);
        assert!(error(&backward["dx"], &exact["dx"]) > 2e-3);
    }
}

/// The kernels of GPUs, between the same exchanges.
#[test]
fn simulated_gpus_pack_rows() {
    let layer = "shape = { model_dim = 24, hidden_dim = 16, experts = 3, top_k = 2 }";
    let case = Case::random(&spec(layer), 19, 6);
    for target in ["sim:sm_90a", "sim:gfx942"] {
        let engine = open(target);
        let nodes = Nodes {
            engine: &engine,
            parallel: mesh(2, 1, 1),
            per_node: 1,
        };
        let exact = nodes.trained(&case, "default");
        for (comm_dtype, format) in [("fp8/f16", 2.6e-2), ("mxfp8/f16", 3.3e-2)] {
            let packed = nodes.trained(&case, &format!("comm_dtype={comm_dtype}"));
            for name in ["y", "dx"] {
                let error = error(&packed[name], &exact[name]);
                let found = error > 0.3 * format && error < 2.0 * format;
                assert!(found, "{name} by {comm_dtype} on {target}: {error:e}");
            }
        }
    }
}

/// Every route rounds the same rows, once.
#[test]
fn all_to_all_algorithms_change_nothing() {
    let engine = cpu();
    let case = Case::random(&spec(LAYER), 43, 8);
    for (parallel, per_node) in [(mesh(4, 1, 1), 2), (mesh(3, 2, 1), 2), (mesh(2, 2, 2), 2)] {
        let nodes = Nodes {
            engine: &engine,
            parallel,
            per_node,
        };
        let straight = nodes.trained(&case, "comm_dtype=fp8/f16");
        for all_to_all in ["2dh", "2dh-inter-first", "2dh-concurrent", "ring"] {
            let same = nodes.trained(
                &case,
                &format!("all_to_all={all_to_all},comm_dtype=fp8/f16"),
            ) == straight;
            assert!(same, "{all_to_all} on {parallel:?}");
        }
    }
}

#[test]
fn rows_of_one_node_stay_as_they_are() {
    let engine = cpu();
    let mut layer = spec(LAYER);
    layer.precision.activations = DType::Bf16;
    let case = Case::random(&layer, 33, 5);
    for (per_node, comm_dtype) in [(4, "fp8"), (1, "bf16"), (2, "none")] {
        let nodes = Nodes {
            engine: &engine,
            parallel: mesh(4, 1, 1),
            per_node,
        };
        let exact = nodes.trained(&case, "default");
        assert_eq!(
            nodes.trained(&case, &format!("comm_dtype={comm_dtype}")),
            exact,
            "{comm_dtype}"
        );
    }
    // No tokens at all, and none of some ranks.
    for tokens in [0, 1] {
        let case = Case::random(&layer, tokens, 5);
        let nodes = Nodes {
            engine: &engine,
            parallel: mesh(4, 1, 1),
            per_node: 2,
        };
        let (exact, packed) = (
            nodes.trained(&case, "default"),
            nodes.trained(&case, "comm_dtype=fp8"),
        );
        assert_eq!(exact["y"].len(), packed["y"].len());
    }
}

#[test]
fn what_is_too_large_is_counted_on_the_rank_that_sends_it() {
    let engine = cpu();
    let mut case = Case::random(&spec(LAYER), 40, 9);
    // Experts that give zeros send none back that are too large.
    let down = case.weights.0.get_mut("experts.down.weight").unwrap();
    down.data.fill(0.0);
    let over = |value: f64| value.abs() >= 65_520.0;
    for (i, x) in case.input.x.iter_mut().enumerate() {
        if i % 7 == 0 {
            *x *= 3e5;
        }
    }
    let nodes = Nodes {
        engine: &engine,
        parallel: mesh(4, 1, 1),
        per_node: 2,
    };
    let shares = shares(case.input.tokens, 4);
    let counts = nodes.each(|mesh| {
        let layer = nodes.layer(mesh, &case, "comm_dtype=f16");
        let input = part(&case, &shares[mesh.rank()]);
        let names = ["y", "topk_ids", SATURATED];
        let output = layer.forward(input.input().reading(&names)).unwrap();
        // Two experts a rank, two ranks a node.
        let other = |id: &i32| *id as usize / 4 != mesh.rank() / 2;
        let ids = ints(&output, "topk_ids");
        let rows = ids.iter().enumerate().filter(|(_, id)| other(id));
        let row = |slot: usize| &input.input.x[slot / 2 * 150..(slot / 2 + 1) * 150];
        let large = rows.map(|(slot, _)| row(slot).iter().filter(|x| over(**x)).count());
        let expected: usize = large.sum();
        assert_eq!(
            longs(&output, SATURATED),
            [expected as i64],
            "rank {}",
            mesh.rank()
        );
        // The next call counts for itself, and other formats count nothing.
        let again = layer.forward(input.input().reading(&[SATURATED])).unwrap();
        assert_eq!(longs(&again, SATURATED), [expected as i64]);
        for comm_dtype in [
            CommDtype::Fp8,
            CommDtype::Mxfp8,
            CommDtype::Bf16,
            CommDtype::Unchanged,
        ] {
            let strategy = Strategy {
                comm_dtype: Both::same(comm_dtype),
                ..Strategy::default()
            };
            layer.set_strategy(strategy).unwrap();
            let output = layer.forward(input.input().reading(&[SATURATED])).unwrap();
            assert_eq!(longs(&output, SATURATED), [0], "{comm_dtype}");
        }
        expected
    });
    assert!(counts.iter().sum::<usize>() > 0);
}

#[test]
fn backward_goes_as_forward_did_and_counts_its_own() {
    let engine = cpu();
    let case = Case::random(&spec(LAYER), 24, 2);
    let nodes = Nodes {
        engine: &engine,
        parallel: mesh(2, 1, 1),
        per_node: 1,
    };
    nodes.each(|mesh| {
        let tokens = &shares(24, 2)[mesh.rank()];
        let input = part(&case, tokens);
        let layer = nodes.layer(mesh, &case, "comm_dtype=none/f16");
        let (_, saved) = layer.forward_train(&input.input(), RNG_KEY).unwrap();
        layer.set_strategy(Strategy::default()).unwrap();
        let dy = |scale: f64| {
            let dy = vec![scale; tokens.len() * 150];
            host(DType::F32, &[tokens.len(), 150], &dy)
        };
        let small = layer.backward(&saved, &dy(1.0), false).unwrap();
        assert_eq!(longs(&small, SATURATED), [0]);
        let large = layer.backward(&saved, &dy(1e9), false).unwrap();
        assert!(longs(&large, SATURATED)[0] > 0);
        let (_, saved) = layer.forward_train(&input.input(), RNG_KEY).unwrap();
        let exact = layer.backward(&saved, &dy(1.0), false).unwrap();
        assert!(exact.get(SATURATED).is_none());
    });
}
