//! Tunings: the same bytes whatever the sizes, and engines that find and use
//! what was kept.

use super::Case;
use super::case::{floats, host};
use super::layers::{engine, engines};
use super::trained::Results;
use moesaic::aot::{PrecompileJob, precompile};
use moesaic::cache::Store;
use moesaic::engine::{TunedTimes, Untuned};
use moesaic::plan::{KnobCandidates, Tuning};
use moesaic::spec::{LayerSpec, LossKind, testing};
use moesaic::{
    Compilers, DType, Engine, EngineOptions, Layer, Output, PlanOptions, RngKey, Target, Training,
};
use moesaic_harness::thorough::in_turns;
use std::path::Path;
use std::sync::Arc;

/// More rows and columns than a tile has, and odd.
const SPEC: &str = "shape = { model_dim = 331, hidden_dim = 301, experts = 3, top_k = 2 }\n\
                    experts = { bias = true }\n";

const SMALL: &str = "shape = { model_dim = 40, hidden_dim = 24, experts = 4, top_k = 2 }";

fn cpus() -> impl Iterator<Item = Engine> {
    let all = engines().into_iter();
    all.filter(|engine| matches!(engine.target(), Target::Cpu(_)))
}

/// The tunings with the least and with the largest of all candidates.
fn extremes(plan: &moesaic::plan::LayerPlan) -> [Tuning; 2] {
    let choices = Tuning::choices(plan);
    assert!(!choices.is_empty());
    let all = |pick: fn(&KnobCandidates) -> usize| {
        let each = choices.iter();
        each.fold(Tuning::default(), |t, c| t.with(c.knob, pick(c)))
    };
    [all(|c| c.others[0]), all(|c| c.others[c.others.len() - 1])]
}

/// Everything that a layer gives back.
fn results(case: &Case, layer: &Layer) -> (Results, Vec<u64>) {
    let output = layer
        .forward(case.input().reading(&case.outputs()))
        .unwrap();
    let y = floats(&output, "y").iter().map(|v| v.to_bits()).collect();
    let gradients = match layer.plan().training {
        Some(_) => case.train(layer, &case.dy(7), &[false]).0,
        None => Results::new(),
    };
    (gradients, y)
}

/// Returns the results for one token, which has blocks of other widths.
fn of_one_token(case: &Case, layer: &Layer) -> Vec<u64> {
    let one = Case::random(&case.spec, 1, 3);
    let y = floats(&layer.forward(&one.input()).unwrap(), "y");
    y.iter().map(|v| v.to_bits()).collect()
}

/// Every compile costs, so that a case takes one of the two.
fn sizes_change_no_byte(case: &Case, engine: &Engine, largest: bool) {
    let weights = case.host_weights();
    for training in [None, Some(Training::default())] {
        let variants = engine.variants(&case.spec, &weights, training).unwrap();
        let default = variants.layer(&Tuning::default()).unwrap();
        let expected = results(case, &default);
        let [least, most] = extremes(&variants.untuned().plan);
        let tuning = if largest { most } else { least };
        let tuned = variants.layer(&tuning).unwrap();
        assert_ne!(tuned.plan().kernels, default.plan().kernels);
        let same = results(case, &tuned) == expected
            && of_one_token(case, &tuned) == of_one_token(case, &default);
        let what = case.describe();
        assert!(same, "{tuning:?} on {} of {what}", engine.target());
    }
}

#[test]
fn sizes_change_no_byte_on_any_instruction_set() {
    for (n, engine) in cpus().enumerate() {
        for (dtype, largest) in in_turns(n, [(DType::F32, false), (DType::Bf16, true)]) {
            let mut spec = LayerSpec::from_toml(SPEC).unwrap();
            spec.precision.weights = dtype;
            spec.precision.activations = dtype;
            sizes_change_no_byte(&Case::random(&spec, 500, 1), &engine, largest);
        }
    }
}

#[test]
fn sizes_change_no_byte_of_any_option() {
    let largest = [true, false, false, true];
    for (seed, largest) in in_turns(0, (0..).zip(largest)) {
        let mut spec = testing::sample(seed);
        // It takes sums over a group of devices.
        spec.losses.retain(|loss| loss.kind != LossKind::Global);
        let case = Case::random(&spec, 150, seed);
        sizes_change_no_byte(&case, &engine(), largest);
    }
}

/// An engine whose cache is `dir`.
fn engine_of(dir: &Path, strict: bool, tuned: bool) -> Engine {
    let options = EngineOptions {
        store: Some(Arc::new(Store::open(dir))),
        strict,
        tuned,
        threads: Some(2),
        ..EngineOptions::default()
    };
    Engine::open("cpu", options).unwrap()
}

fn measured(tokens: usize, tuning: Tuning) -> TunedTimes {
    TunedTimes {
        tokens,
        tuning,
        gain: 1.25,
    }
}

fn untuned(spec: &LayerSpec, training: Option<Training>, engine: &Engine) -> Untuned {
    let tilings = engine.tilings(spec, training).unwrap();
    Untuned::new(tilings.first().clone())
}

/// Keeps sizes of a layer for an engine's machine: the least for few tokens, the
/// largest for many; both.
fn keep(spec: &LayerSpec, training: Option<Training>, engine: &Engine, dir: &Path) -> [Tuning; 2] {
    let untuned = untuned(spec, training, engine);
    let [least, most] = extremes(&untuned.plan);
    let found = [
        measured(128, most.clone()),
        measured(2, least.clone()),
        measured(16, Tuning::default()),
    ];
    let tuned = untuned.tuned(&found, engine.machine()).unwrap();
    Store::open(dir).keep_tuned(&tuned).unwrap();
    [least, most]
}

/// The sizes that a call of so many tokens has.
fn sizes(engine: &Engine, spec: &LayerSpec, tokens: usize) -> Tuning {
    let tilings = engine.tilings(spec, None).unwrap();
    tilings.at(tokens).tuning.clone()
}

#[test]
fn engines_use_the_tuning_of_their_machine() {
    let dir = tempfile::tempdir().unwrap();
    let spec = LayerSpec::from_toml(SMALL).unwrap();
    let engine = engine_of(dir.path(), false, true);
    assert!(sizes(&engine, &spec, 2).is_empty());
    let [least, most] = keep(&spec, None, &engine, dir.path());
    // Boundaries are at the geometric means, 5.6 and 45.2.
    for (tokens, expected) in [
        (0, &least),
        (5, &least),
        (6, &Tuning::default()),
        (45, &Tuning::default()),
        (46, &most),
        (100_000, &most),
    ] {
        assert_eq!(&sizes(&engine, &spec, tokens), expected, "{tokens}");
    }
    for tokens in [3, 9, 50] {
        Case::random(&spec, tokens, 3).check(&engine);
    }
    // Another layer, training, another number of threads, and an engine that
    // does not ask for it.
    let other = LayerSpec::from_toml(&SMALL.replace("24", "32")).unwrap();
    assert!(sizes(&engine, &other, 2).is_empty());
    let training = engine.tilings(&spec, Some(Training::default())).unwrap();
    assert_eq!(training.plans().len(), 1);
    let without = engine_of(dir.path(), false, false);
    assert!(sizes(&without, &spec, 2).is_empty());
    let one = EngineOptions {
        store: Some(Arc::new(Store::open(dir.path()))),
        threads: Some(1),
        ..EngineOptions::default()
    };
    let one = Engine::open("cpu", one).unwrap();
    assert!(sizes(&one, &spec, 2).is_empty());
    // The name of a layer is not part of it.
    let renamed = LayerSpec::from_toml(&format!("name = \"other\"\n{SMALL}")).unwrap();
    assert_eq!(sizes(&engine, &renamed, 2), least);
}

/// Token counts in every bucket, the largest first and last.
const CALLS: [usize; 7] = [500, 1, 46, 5, 6, 45, 500];

/// Returns the results of forward calls and, if the layer trains, those of
/// backward calls in another order, after all forward calls.
fn calls(layer: &Layer, cases: &[Case]) -> Vec<Vec<u64>> {
    let bits = |output: &Output, name| floats(output, name).iter().map(|v| v.to_bits()).collect();
    if layer.plan().training.is_none() {
        let forward = |case: &Case| bits(&layer.forward(&case.input()).unwrap(), "y");
        return cases.iter().map(forward).collect();
    }
    let forward = |case: &Case| {
        let (output, saved) = layer
            .forward_train(&case.input(), RngKey::default())
            .unwrap();
        (bits(&output, "y"), saved)
    };
    let (mut all, saved): (Vec<_>, Vec<_>) = cases.iter().map(forward).unzip();
    for (case, saved) in cases.iter().zip(&saved).rev() {
        let shape = [case.input.tokens, case.spec.output_dim()];
        let dy = host(case.spec.precision.activations, &shape, &case.dy(7));
        let back = layer.backward(saved, &dy, true).unwrap();
        all.extend(["dx", "grad.topk_weights"].map(|name| bits(&back, name)));
    }
    for gradient in layer.gradients().unwrap().values() {
        all.push(
            gradient
                .to_f32()
                .iter()
                .map(|v| u64::from(v.to_bits()))
                .collect(),
        );
    }
    all
}

/// Every compile costs, so that training is tried with one type.
#[test]
fn calls_of_every_bucket_share_memory_and_give_the_same_bytes() {
    for (dtype, training) in [(DType::F32, None), (DType::Bf16, Some(Training::default()))] {
        let mut spec = LayerSpec::from_toml(SPEC).unwrap();
        spec.precision.weights = dtype;
        spec.precision.activations = dtype;
        let cases = CALLS.map(|tokens| Case::random(&spec, tokens, 11));
        let weights = cases[0].host_weights();
        let dir = tempfile::tempdir().unwrap();
        let engine = engine_of(dir.path(), false, true);
        let layer = || match training {
            Some(training) => engine.training_layer(&spec, &weights, training),
            None => engine.layer(&spec, &weights),
        };
        let plain = layer().unwrap();
        assert_eq!(plain.tilings().plans().len(), 1);
        keep(&spec, training, &engine, dir.path());
        let tuned = layer().unwrap();
        assert_eq!(tuned.tilings().plans().len(), 3);
        tuned.forward(&cases[0].input()).unwrap();
        let bytes = tuned.workspace_bytes();
        assert!(calls(&tuned, &cases) == calls(&plain, &cases), "{dtype}");
        assert_eq!(tuned.workspace_bytes(), bytes);
    }
}

#[test]
fn damaged_and_foreign_tunings_are_passed_over() {
    let dir = tempfile::tempdir().unwrap();
    let spec = LayerSpec::from_toml(SMALL).unwrap();
    let engine = engine_of(dir.path(), false, true);
    let [tuning, _] = keep(&spec, None, &engine, dir.path());
    let entry = std::fs::read_dir(dir.path().join("v1/tuned"))
        .unwrap()
        .next();
    let path = entry.unwrap().unwrap().path();
    let text = std::fs::read_to_string(&path).unwrap();
    let (knob, size) = tuning.sizes().next().unwrap();
    let size_of = |size: usize| format!("\"{}\": {size}", knob.name());
    let changed = |from: &str, to: &str| {
        assert!(text.contains(from), "{from} is not in {text}");
        text.replacen(from, to, 1)
    };
    let bad = [
        String::new(),
        text[..text.len() / 2].to_string(),
        "[]".to_string(),
        changed(&size_of(size), &size_of(0)),
        changed(&size_of(size), &size_of(1 << 40)),
        changed(&size_of(size), &size_of(size + 1)),
        changed(knob.name(), "elephants"),
        changed("\"threads\": 2", "\"threads\": 3"),
        changed("\"buckets\"", "\"sizes\": {}, \"buckets\""),
        former(&text),
        "x".repeat(1 << 20),
    ];
    for bad in bad {
        std::fs::write(&path, &bad).unwrap();
        let plans = engine.tilings(&spec, None).unwrap();
        assert_eq!(plans.plans().len(), 1, "{bad}");
    }
    std::fs::write(&path, &text).unwrap();
    assert_eq!(sizes(&engine, &spec, 2), tuning);
}

/// The same file of a version that had one set of sizes.
fn former(text: &str) -> String {
    let mut file: serde_json::Value = serde_json::from_str(text).unwrap();
    let fields = file.as_object_mut().unwrap();
    let buckets = fields.remove("buckets").unwrap();
    let bucket = buckets[0].as_object().unwrap().clone();
    fields.extend(bucket);
    fields["tokens"] = serde_json::json!([2]);
    file.to_string()
}

/// Compiles a layer into a store, with these sizes.
fn compile(spec: &LayerSpec, tuning: Tuning, store: &Arc<Store>, engine: &Engine) {
    let compiler = Compilers::new(None).get(engine.target()).unwrap();
    let job = PrecompileJob {
        spec: spec.clone(),
        target: engine.target(),
        options: PlanOptions {
            tuning,
            caches: engine.caches(),
            ..PlanOptions::default()
        },
        mesh: None,
        compiler,
    };
    precompile(&[job], store, &Default::default(), &|_| {}).unwrap();
}

#[test]
fn strict_engines_use_a_tuning_only_with_its_kernels() {
    let dir = tempfile::tempdir().unwrap();
    let spec = LayerSpec::from_toml(SMALL).unwrap();
    let engine = engine_of(dir.path(), true, true);
    let store = Arc::new(Store::open(dir.path()));
    let tunings = keep(&spec, None, &engine, dir.path());
    let case = Case::random(&spec, 9, 4);
    compile(&spec, Tuning::default(), &store, &engine);
    for tuning in tunings {
        assert_eq!(case.layer(&engine).tilings().plans().len(), 1);
        compile(&spec, tuning, &store, &engine);
    }
    assert_eq!(case.layer(&engine).tilings().plans().len(), 3);
    assert_eq!(engine.stats().compiled, 0);
}

#[test]
fn a_pack_brings_a_tuning_where_all_its_kernels_are() {
    let dir = tempfile::tempdir().unwrap();
    let [from, to, pack] = ["from", "to", "pack.tar.gz"].map(|name| dir.path().join(name));
    let spec = LayerSpec::from_toml(SMALL).unwrap();
    let engine = engine_of(&from, false, true);
    let store = Arc::new(Store::open(&from));
    let tunings = keep(&spec, None, &engine, &from);
    compile(&spec, Tuning::default(), &store, &engine);
    for tuning in tunings {
        assert_eq!(store.export(&pack, |_| true).unwrap().tunings, 0);
        compile(&spec, tuning, &store, &engine);
    }
    assert_eq!(store.export(&pack, |_| true).unwrap().tunings, 1);
    let other = Store::open(&to);
    assert_eq!(other.import(&pack).unwrap().tunings, 1);
    assert_eq!(other.import(&pack).unwrap().tunings, 0);
    let strict = engine_of(&to, true, true);
    let layer = Case::random(&spec, 9, 5).layer(&strict);
    assert_eq!(layer.tilings().plans().len(), 3);
    let known = untuned(&spec, None, &engine);
    assert_eq!(known.everywhere(&other).len(), 1);
}
