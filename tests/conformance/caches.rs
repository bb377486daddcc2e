//! Caches of a CPU: the same bytes for every class, and kernels that are made for
//! a class are those that an engine with it asks for.

use super::Case;
use super::case::floats;
use super::quick;
use super::trained::Results;
use moesaic::aot::{PrecompileJob, precompile};
use moesaic::cache::Store;
use moesaic::kernel::CpuCaches;
use moesaic::plan::CacheClass;
use moesaic::spec::LayerSpec;
use moesaic::{
    Compilers, DType, Engine, EngineOptions, OpenError, PlanOptions, Recompute, Training,
};
use moesaic_harness::thorough::{self, in_turns};
use std::sync::Arc;

/// More rows, columns and depth than a block has of any class, and odd.
const SPEC: &str = "shape = { model_dim = 331, hidden_dim = 301, experts = 3, top_k = 2 }\n\
                    experts = { bias = true }\n";

fn sizes(class: CacheClass) -> CpuCaches {
    CpuCaches {
        l1_bytes: Some(class.l1_bytes() as u64),
        l2_bytes: Some(class.l2_bytes() as u64),
    }
}

fn sized(caches: CpuCaches, options: EngineOptions) -> EngineOptions {
    EngineOptions {
        caches: Some(caches),
        tuned: false,
        ..options
    }
}

/// Returns the results of both passes, and `y` of inference.
fn results(case: &Case, engine: &Engine) -> (Results, Vec<f64>) {
    let layer = case.training_layer(engine, Recompute::None);
    let (trained, _) = case.train(&layer, &case.dy(7), &[false]);
    let output = case.layer(engine).forward(&case.input()).unwrap();
    (trained, floats(&output, "y"))
}

/// The classes that differ most from what is assumed, and one between.
fn classes() -> [CacheClass; 3] {
    let class = |l1: u64, l2: u64| {
        CacheClass::of(CpuCaches {
            l1_bytes: Some(l1 << 10),
            l2_bytes: Some(l2 << 10),
        })
    };
    [class(32, 256), class(48, 512), class(32, 1024)]
}

type Open = fn(&str, EngineOptions) -> Result<Engine, OpenError>;

/// On engines that `open` opens, one of each of these classes.
fn check(target: &str, dtype: DType, open: Open, classes: &[CacheClass]) {
    let mut spec = LayerSpec::from_toml(SPEC).unwrap();
    spec.precision.weights = dtype;
    spec.precision.activations = dtype;
    let cases = [500, 9, 1].map(|tokens| Case::random(&spec, tokens, 1));
    let options = || EngineOptions {
        poison: true,
        ..EngineOptions::default()
    };
    let of = |class| open(target, sized(sizes(class), options())).ok();
    let Some(assumed) = of(CacheClass::default()) else {
        return; // this machine does not run it
    };
    let all = |engine: &Engine| cases.each_ref().map(|case| results(case, engine));
    let expected = all(&assumed);
    for &class in classes {
        let other = of(class).unwrap();
        assert_eq!(other.caches(), class);
        let same = all(&other) == expected;
        assert!(same, "{class:?} on {target} in {dtype}");
    }
}

#[test]
fn no_size_of_a_cache_changes_a_byte() {
    // Kernels of the first are compiled as people get them, the others in a hurry.
    let classes = classes();
    check("cpu", DType::F32, Engine::open, &classes[..1]);
    check("cpu", DType::F32, quick::open, &classes[1..]);
    let hurried = [
        ("cpu", DType::Bf16),
        ("cpu:avx2", DType::F16),
        ("cpu:avx512", DType::F32),
        ("cpu:amx", DType::Bf16),
        ("sim:amx", DType::Bf16),
    ];
    for (n, (target, dtype)) in in_turns(0, hurried.into_iter().enumerate()) {
        let class = n % classes.len();
        let some = if thorough::is_on() {
            0..3
        } else {
            class..class + 1
        };
        check(target, dtype, quick::open, &classes[some]);
    }
}

#[test]
fn kernels_that_were_made_for_a_class_are_found() {
    let dir = tempfile::tempdir().unwrap();
    let store = Arc::new(Store::open(dir.path()));
    let spec = LayerSpec::from_toml(SPEC).unwrap();
    let strict = |caches| {
        let options = EngineOptions {
            store: Some(Arc::clone(&store)),
            strict: true,
            ..EngineOptions::default()
        };
        Engine::open("cpu", sized(caches, options)).unwrap()
    };
    let [class, other, _] = classes();
    let target = strict(sizes(class)).target();
    let job = PrecompileJob {
        spec: spec.clone(),
        target,
        options: PlanOptions {
            training: Some(Training::default()),
            caches: class,
            ..PlanOptions::default()
        },
        mesh: None,
        compiler: Compilers::new(None).get(target).unwrap(),
    };
    precompile(&[job], &store, &Default::default(), &|_| {}).unwrap();
    let case = Case::random(&spec, 9, 4);
    let train =
        |engine: &Engine| engine.training_layer(&spec, &case.host_weights(), Training::default());
    // A class stands for all CPUs with such caches.
    let somewhat_more = CpuCaches {
        l1_bytes: Some(40 << 10),
        l2_bytes: Some(300 << 10),
    };
    for caches in [sizes(class), somewhat_more] {
        let engine = strict(caches);
        train(&engine).unwrap();
        assert_eq!(engine.stats().compiled, 0);
    }
    let missing = train(&strict(sizes(other))).err().unwrap().to_string();
    assert!(missing.contains("--l1 48KiB --l2 512KiB"), "{missing}");
}
