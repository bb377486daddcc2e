//! Router replay: what one engine chose, another takes from a file, on other ranks and on another
//! target.

use super::Case;
use super::case::{floats, ints};
use super::cases::of_type;
use super::layers::{engine as cpu, poisoned};
use super::mesh::{evaluated, mesh};
use super::quick;
use moesaic::reference;
use moesaic::spec::LayerSpec;
use moesaic::train::replay::{IdType, RoutedExperts, TABLE};
use moesaic::{DType, Engine, Output, Recompute};
use moesaic_harness::thorough::in_turns;

const TOKENS: usize = 33;

/// Layers of one model: every selection that a record stands in for.
fn layers() -> Vec<Case> {
    let routers = [
        "router = { renormalize = \"sum\" }",
        "router = { score = \"sigmoid\", select_bias = true, renormalize = \"sum\", scale = 2.5, \
         groups = { count = 4, keep = 2, stat = \"top2-sum\" } }\n\
         shared = [{ hidden_dim = 8 }]",
        "router = { score = \"softmax-selected\", bias = true, weight_on = \"activation\" }",
        "router = { select = { per-group = 2 } }",
    ];
    let layer = |(seed, router): (usize, &str)| {
        let shape = "shape = { model_dim = 24, hidden_dim = 20, experts = 8, top_k = 2 }";
        let spec = LayerSpec::from_toml(&format!("{shape}\n{router}")).unwrap();
        let dtype = [DType::F32, DType::Bf16][seed % 2];
        Case::random(&of_type(dtype, spec), TOKENS, seed as u64)
    };
    routers.into_iter().enumerate().map(layer).collect()
}

/// Returns the layer that takes its choices from a record.
fn replayed(case: &Case, record: &RoutedExperts, layer: usize) -> Case {
    let replay = record.replay(&case.spec, layer).unwrap();
    let mut case = case.clone();
    case.spec = replay.spec;
    case.weights.0.remove("router.select_bias");
    let table = reference::Tensor::from(&replay.table);
    case.weights.0.insert(TABLE.to_string(), table);
    case.input.token_ids = Some((0..TOKENS as i32).collect());
    case
}

fn run(engine: &Engine, case: &Case) -> Output {
    let names = ["y", "topk_ids", "topk_weights"];
    let layer = case.layer(engine);
    layer.forward(case.input().reading(&names)).unwrap()
}

/// One file for all layers; y and the choices are the same bytes alone and over ranks, and so are
/// the gradients of router and experts.
#[test]
fn a_record_gives_the_same_bytes_on_another_mesh() {
    let (engine, cases) = (cpu(), layers());
    let forward = |case: &Case| run(&engine, case);
    let chosen: Vec<Vec<i32>> = cases
        .iter()
        .map(|case| ints(&forward(case), "topk_ids"))
        .collect();
    let record = RoutedExperts::of_layers(TOKENS, 2, &chosen).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("routed_experts.npy");
    record.write(&file, IdType::for_experts(8)).unwrap();
    let record = RoutedExperts::read(&file).unwrap();
    for (layer, case) in cases.iter().enumerate() {
        let (once, again) = (forward(case), replayed(case, &record, layer));
        let replay = forward(&again);
        assert_eq!(ints(&replay, "topk_ids"), chosen[layer]);
        for name in ["topk_weights", "y"] {
            assert_eq!(
                floats(&replay, name),
                floats(&once, name),
                "{name} of {layer}"
            );
        }
        let over_ranks = evaluated(&engine, mesh(2, 1, 1), &again);
        let same = over_ranks == once.y().data.to_vec();
        assert!(same, "y of {layer} over ranks");
        let gradients = |case: &Case| {
            let layer = case.training_layer(&engine, Recompute::None);
            case.train(&layer, &case.dy(7), &[false]).0
        };
        let (want, found) = (gradients(case), gradients(&again));
        for (name, found) in found.iter().filter(|(name, _)| *name != TABLE) {
            assert_eq!(found, &want[name], "{name} of {layer}");
        }
    }
}

/// Another target computes other logits. It takes the same experts, and everything after them
/// agrees with the reference.
#[test]
fn a_record_is_replayed_on_another_target() {
    for (n, target) in ["sim:sm_80", "sim:gfx942", "cpu:portable"]
        .into_iter()
        .enumerate()
    {
        let Ok(engine) = quick::open(target, poisoned()) else {
            continue; // a CPU without it
        };
        for case in in_turns(n, &layers()) {
            // Ids that this router would not choose: the CPU's, reversed.
            let output = run(&cpu(), case);
            let ids = ints(&output, "topk_ids").into_iter().map(|id| 7 - id);
            let record = RoutedExperts::of_layers(TOKENS, 2, &[ids.collect()]).unwrap();
            let again = replayed(case, &record, 0);
            again.check(&engine);
            again.check_training(&engine, Recompute::Hidden);
        }
    }
}
