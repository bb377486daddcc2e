//! The time of the host for a launch and for a call of a layer: on a device
//! that does nothing, and through the CUDA device with a driver that does
//! nothing.
//!
//! ```sh
//! cargo bench -p moesaic-benches --bench launch
//! ```

#[path = "launch/specs.rs"]
mod specs;

use moesaic::kernel::KernelSource;
use moesaic::plan::{LayerPlan, TensorRole};
use moesaic::target::{
    Artifact, ArtifactReport, CompileError, CompileOptions, Compiler, KernelReport, Ptr,
};
use moesaic::{Layer, LayerSpec, RawBackward, RawCall, RngKey, Target, Tensor, Tensors, Training};
use moesaic_engine::{Engine, EngineParts};
use moesaic_probe::idle::Idle;
use moesaic_probe::idle_driver;
use specs::{QWEN3, SPECS};
use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

/// Samples of each number; the least is reported, since other work on the
/// machine only adds.
const SAMPLES: usize = 40;
const CALLS: u32 = 500;

const TARGETS: [&str; 2] = ["cpu:avx512", "cuda:sm_90a"];

fn main() {
    if std::env::args().any(|arg| arg == "--list") {
        return;
    }
    if idle_driver::is_here() {
        return on_driver();
    }
    println!("host's time on a device that does nothing, the least of {SAMPLES} samples");
    println!("target       tokens  pass                launches  ns a call  ns a launch");
    for (name, text) in SPECS {
        println!("# {name}");
        let spec = LayerSpec::from_toml(text).expect("a valid spec");
        for target in TARGETS {
            let target: Target = target.parse().expect("a target");
            for tokens in [1, 4096] {
                bench(&spec, target, tokens);
            }
        }
    }
    with_driver();
}

/// Starts this program again with the driver that does nothing.
fn with_driver() {
    let folder = tempfile::tempdir().expect("a directory");
    let mut again = idle_driver::again(folder.path()).expect("a C compiler");
    let status = again.status().expect("this program runs");
    assert!(status.success(), "{status}");
}

/// The layer of Qwen3-30B on the CUDA device.
fn on_driver() {
    println!("host's time through the CUDA device, whose driver does nothing");
    println!("tokens  pass                launches  ns a call: least  median");
    let spec = LayerSpec::from_toml(QWEN3).expect("a valid spec");
    let engine = moesaic::Engine::cuda(0).expect("NVRTC");
    let weights = weights(engine.tilings(&spec, None).expect("a plan").first());
    let layer = engine.layer(&spec, &weights).expect("a layer");
    for tokens in [8, 512, 4096] {
        let plan = layer.tilings().at(tokens);
        let launches = plan.launched(plan.evaluation_steps(), tokens as u64);
        let [least, median] = forward(&layer, tokens);
        println!(
            "{tokens:6}  {:<18} {launches:9} {least:17.0} {median:7.0}",
            "forward"
        );
    }
    drop(layer);
    let layer = engine.training_layer(&spec, &weights, Training::default());
    let layer = layer.expect("a layer");
    for tokens in [8, 512, 4096] {
        let plan = layer.tilings().at(tokens);
        let launches = plan.launched(plan.all_steps(), tokens as u64);
        let [least, median] = training(&layer, tokens);
        println!(
            "{tokens:6}  {:<18} {launches:9} {least:17.0} {median:7.0}",
            "forward + backward"
        );
    }
}

fn bench(spec: &LayerSpec, target: Target, tokens: usize) {
    let engine = engine(target);
    let weights = weights(engine.tilings(spec, None).expect("a plan").first());
    let report = |pass: &str, launches: usize, ns: f64| {
        let each = ns / launches as f64;
        println!("{target:<12} {tokens:6}  {pass:<18} {launches:9} {ns:10.0} {each:12.0}");
    };

    let layer = engine.layer(spec, &weights).expect("a layer");
    let plan = layer.tilings().at(tokens);
    let launches = plan.launched(plan.evaluation_steps(), tokens as u64);
    report("forward", launches, forward(&layer, tokens)[0]);

    let layer = training_layer(&engine, spec, &weights);
    let plan = layer.tilings().at(tokens);
    let launches = plan.launched(plan.all_steps(), tokens as u64);
    report("forward + backward", launches, training(&layer, tokens)[0]);
}

fn engine(target: Target) -> Engine {
    Engine::new(EngineParts {
        device: Arc::new(Idle::new(target)),
        compiler: Some(Arc::new(Nothing)),
        store: None,
        strict: false,
        tuned: false,
        caches: None,
        options: CompileOptions::default(),
    })
}

/// Zeros.
fn weights(plan: &LayerPlan) -> Tensors<'static> {
    let mut weights = Tensors::new();
    for tensor in plan.tensors.iter().filter(|t| t.role == TensorRole::Weight) {
        let shape = tensor.shape.iter().map(|size| size.eval(0) as usize);
        let zeros = Tensor {
            dtype: tensor.dtype,
            shape: shape.collect(),
            data: vec![0; tensor.bytes(0) as usize].into(),
        };
        weights.insert(&tensor.name, zeros);
    }
    weights
}

fn training_layer(engine: &Engine, spec: &LayerSpec, weights: &Tensors<'_>) -> Layer {
    let layer = engine.training_layer(spec, weights, Training::default());
    layer.expect("a layer")
}

/// Nanoseconds of an evaluation: the least and the median.
fn forward(layer: &Layer, tokens: usize) -> [f64; 2] {
    let tensors = addresses(&["x", "y"]);
    // SAFETY: nothing reads or writes at the addresses.
    let call = unsafe { RawCall::new(tokens, &tensors) };
    sampled(|| drop(layer.forward(black_box(call)).expect("it runs")))
}

/// Nanoseconds of a training call and its backward pass: the least and the median.
fn training(layer: &Layer, tokens: usize) -> [f64; 2] {
    let (forward, backward) = (addresses(&["x", "y"]), addresses(&["dy", "dx"]));
    // SAFETY: nothing reads or writes at the addresses.
    let call = unsafe { RawCall::new(tokens, &forward) };
    // SAFETY: as above.
    let back = unsafe { RawBackward::new(&backward) };
    sampled(|| {
        let rng_key = RngKey::default();
        let saved = layer.forward_train(black_box(call), rng_key);
        let (_, saved) = saved.expect("it runs");
        layer.backward(&saved, back, true).expect("it runs");
    })
}

fn addresses<'a>(names: &[&'a str]) -> Vec<(&'a str, Ptr)> {
    let numbered = names.iter().zip(1..);
    numbered.map(|(name, i)| (*name, Ptr(i << 40))).collect()
}

/// Nanoseconds of a call: the least and the median of all samples.
fn sampled(mut call: impl FnMut()) -> [f64; 2] {
    let mut sample = || {
        let start = Instant::now();
        (0..CALLS).for_each(|_| call());
        start.elapsed().as_secs_f64() * 1e9 / f64::from(CALLS)
    };
    let mut all: Vec<f64> = (0..SAMPLES).map(|_| sample()).collect();
    all.sort_by(f64::total_cmp);
    [all[0], all[SAMPLES / 2]]
}

/// Compiles any source to no bytes, with a report that names its entries.
struct Nothing;

impl Compiler for Nothing {
    fn backend(&self) -> &'static str {
        "any"
    }

    fn name(&self) -> String {
        "nothing".to_string()
    }

    fn fingerprint(&self, _: Target) -> String {
        self.name()
    }

    fn targets(&self) -> Vec<Target> {
        Vec::new()
    }

    fn compile(&self, source: &KernelSource, _: &CompileOptions) -> Result<Artifact, CompileError> {
        let named = source.entries.iter().map(|entry| KernelReport {
            symbol: entry.symbol.clone(),
            ..KernelReport::default()
        });
        let report = ArtifactReport {
            kernels: named.collect(),
            ..ArtifactReport::default()
        };
        let binary = Vec::new();
        Ok(Artifact { binary, report })
    }
}
