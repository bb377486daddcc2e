//! Tunings: the same bytes whatever the sizes, and engines that find and use
//! what was kept.

use super::Case;
use super::case::floats;
use super::layers::{engine, engines};
use super::trained::Results;
use moesaic::cache::Store;
use moesaic::plan::{Choice, Tuning};
use moesaic::spec::{LayerSpec, LossKind, testing};
use moesaic::{
    Compilers, DType, Engine, EngineOptions, Job, Layer, Target, Training, Untuned, precompile,
};
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
fn extremes(plan: &moesaic::LayerPlan) -> [Tuning; 2] {
    let choices = Tuning::choices(plan);
    assert!(!choices.is_empty());
    let all = |pick: fn(&Choice) -> usize| {
        let each = choices.iter();
        each.fold(Tuning::default(), |t, c| t.with(c.knob, pick(c)))
    };
    [all(|c| c.others[0]), all(|c| c.others[c.others.len() - 1])]
}

/// Everything that a layer gives back.
fn results(case: &Case, layer: &Layer) -> (Results, Vec<u64>) {
    let output = layer.forward_with(&case.input(), &case.outputs()).unwrap();
    let y = floats(&output, "y").iter().map(|v| v.to_bits()).collect();
    let gradients = match layer.plan().training {
        Some(_) => case.train(layer, &case.dy(7), &[false]).0,
        None => Results::new(),
    };
    (gradients, y)
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
        let same = results(case, &tuned) == expected;
        let what = case.describe();
        assert!(same, "{tuning:?} on {} of {what}", engine.target());
    }
}

#[test]
fn sizes_change_no_byte_on_any_instruction_set() {
    for engine in cpus() {
        for (dtype, largest) in [(DType::F32, false), (DType::Bf16, true)] {
            let mut spec = LayerSpec::from_toml(SPEC).unwrap();
            spec.precision.weights = dtype;
            spec.precision.activations = dtype;
            sizes_change_no_byte(&Case::random(&spec, 500, 1), &engine, largest);
        }
    }
}

#[test]
fn sizes_change_no_byte_of_any_option() {
    for seed in 0..6 {
        let mut spec = testing::sample(seed);
        // It takes sums over a group of devices.
        spec.losses.retain(|loss| loss.kind != LossKind::Global);
        let case = Case::random(&spec, 150, seed);
        sizes_change_no_byte(&case, &engine(), seed % 2 == 0);
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

/// Keeps the largest sizes of a layer for an engine's machine; the tuning.
fn keep(spec: &LayerSpec, engine: &Engine, dir: &Path) -> Tuning {
    let untuned = Untuned::new(spec, engine.target(), None).unwrap();
    let [_, tuning] = extremes(&untuned.plan);
    let tuned = untuned.tuned(&tuning, engine.machine(), &[1, 64], 1.25);
    Store::open(dir).keep_tuned(&tuned.unwrap()).unwrap();
    tuning
}

#[test]
fn engines_use_the_tuning_of_their_machine() {
    let dir = tempfile::tempdir().unwrap();
    let spec = LayerSpec::from_toml(SMALL).unwrap();
    let engine = engine_of(dir.path(), false, true);
    assert!(engine.plan(&spec).unwrap().tuning.is_empty());
    let tuning = keep(&spec, &engine, dir.path());
    assert_eq!(engine.plan(&spec).unwrap().tuning, tuning);
    let case = Case::random(&spec, 9, 3);
    assert_eq!(case.layer(&engine).plan().tuning, tuning);
    case.check(&engine);
    // Another layer, training, another number of threads, and an engine that
    // does not ask for it.
    let other = LayerSpec::from_toml(&SMALL.replace("24", "32")).unwrap();
    assert!(engine.plan(&other).unwrap().tuning.is_empty());
    let training = engine.training_plan(&spec, Training::default()).unwrap();
    assert!(training.tuning.is_empty());
    let without = engine_of(dir.path(), false, false);
    assert!(without.plan(&spec).unwrap().tuning.is_empty());
    let one = EngineOptions {
        store: Some(Arc::new(Store::open(dir.path()))),
        threads: Some(1),
        ..EngineOptions::default()
    };
    let one = Engine::open("cpu", one).unwrap();
    assert!(one.plan(&spec).unwrap().tuning.is_empty());
    // The name of a layer is not part of it.
    let renamed = LayerSpec::from_toml(&format!("name = \"other\"\n{SMALL}")).unwrap();
    assert_eq!(engine.plan(&renamed).unwrap().tuning, tuning);
}

#[test]
fn damaged_and_foreign_tunings_are_passed_over() {
    let dir = tempfile::tempdir().unwrap();
    let spec = LayerSpec::from_toml(SMALL).unwrap();
    let engine = engine_of(dir.path(), false, true);
    let tuning = keep(&spec, &engine, dir.path());
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
        changed("\"kernels\": [\n    \"", "\"kernels\": [\n    \"0"),
        "x".repeat(1 << 20),
    ];
    for bad in bad {
        std::fs::write(&path, &bad).unwrap();
        let plan = engine.plan(&spec).unwrap();
        assert!(plan.tuning.is_empty(), "{bad}");
    }
    std::fs::write(&path, &text).unwrap();
    assert_eq!(engine.plan(&spec).unwrap().tuning, tuning);
}

/// Compiles a layer into a store, with these sizes.
fn compile(spec: &LayerSpec, tuning: Tuning, store: &Arc<Store>, target: Target) {
    let compiler = Compilers::new(None).get(target).unwrap();
    let job = Job {
        spec: spec.clone(),
        target,
        training: None,
        tuning,
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
    let tuning = keep(&spec, &engine, dir.path());
    let case = Case::random(&spec, 9, 4);
    compile(&spec, Tuning::default(), &store, engine.target());
    assert!(case.layer(&engine).plan().tuning.is_empty());
    compile(&spec, tuning.clone(), &store, engine.target());
    assert_eq!(case.layer(&engine).plan().tuning, tuning);
    assert_eq!(engine.stats().compiled, 0);
}

#[test]
fn a_pack_brings_a_tuning_where_all_its_kernels_are() {
    let dir = tempfile::tempdir().unwrap();
    let [from, to, pack] = ["from", "to", "pack.tar.gz"].map(|name| dir.path().join(name));
    let spec = LayerSpec::from_toml(SMALL).unwrap();
    let engine = engine_of(&from, false, true);
    let store = Arc::new(Store::open(&from));
    let tuning = keep(&spec, &engine, &from);
    compile(&spec, Tuning::default(), &store, engine.target());
    assert_eq!(store.export(&pack, |_| true).unwrap().tunings, 0);
    compile(&spec, tuning.clone(), &store, engine.target());
    assert_eq!(store.export(&pack, |_| true).unwrap().tunings, 1);
    let other = Store::open(&to);
    assert_eq!(other.import(&pack).unwrap().tunings, 1);
    assert_eq!(other.import(&pack).unwrap().tunings, 0);
    let strict = engine_of(&to, true, true);
    assert_eq!(
        Case::random(&spec, 9, 5).layer(&strict).plan().tuning,
        tuning
    );
    let known = Untuned::new(&spec, engine.target(), None).unwrap();
    assert_eq!(known.everywhere(&other).len(), 1);
}
