//! The emitted kernels of whole layers, in the machine, against the reference.

use moesaic_emit::emit_layer;
use moesaic_harness::{Harness, check};
use moesaic_kernel::{CudaArch, DType, KernelSource, SimArch, Target};
use moesaic_plan::{PlanOptions, plan};
use moesaic_ptx::{PtxCompiler, PtxDevice, PtxOptions};
use moesaic_spec::*;
use moesaic_target::{CompileOptions, Compiler, Device};
use moesaic_toolchain::testing;
use std::sync::{Arc, OnceLock};

fn compiler() -> &'static PtxCompiler {
    static COMPILER: OnceLock<PtxCompiler> = OnceLock::new();
    COMPILER.get_or_init(|| PtxCompiler::new(testing::nvrtc()))
}

fn arch(name: &str) -> CudaArch {
    match format!("sim:{name}").parse() {
        Ok(Target::Sim(SimArch::Cuda(arch))) => arch,
        other => panic!("{other:?}"),
    }
}

fn spec(d: usize, h: usize, e: usize, k: usize) -> LayerSpec {
    let text =
        format!(r#"{{"shape":{{"model_dim":{d},"hidden_dim":{h},"experts":{e},"top_k":{k}}}}}"#);
    serde_json::from_str(&text).unwrap()
}

fn typed(mut spec: LayerSpec, dtype: DType) -> LayerSpec {
    spec.precision.weights = dtype;
    spec.precision.activations = dtype;
    spec
}

fn rig_of(spec: &LayerSpec, name: &str, options: PtxOptions) -> Harness {
    spec.validate().unwrap();
    let arch = arch(name);
    let device = PtxDevice::new(arch, options);
    let plan = plan(
        spec,
        Target::Sim(SimArch::Cuda(arch)),
        &PlanOptions::default(),
    )
    .unwrap();
    let load = |source: &KernelSource| {
        let artifact = compiler().compile(source, &CompileOptions::default());
        let artifact = artifact.unwrap_or_else(|error| panic!("{error}"));
        device.load(&artifact, &source.entries).unwrap()
    };
    let modules = emit_layer(&plan).unwrap().iter().map(load).collect();
    Harness::on((Arc::new(device), modules), plan)
}

fn run(spec: &LayerSpec, name: &str, tokens: &[usize]) {
    let harness = rig_of(spec, name, PtxOptions::default());
    for &tokens in tokens {
        let tensors = harness.run(&harness.random_input(tokens, tokens as u64));
        check::all(
            &harness,
            &tensors,
            &format!("{name}, {tokens} tokens, {spec:?}"),
        );
    }
}

#[test]
fn a_layer_of_bf16() {
    run(
        &typed(spec(64, 48, 8, 2), DType::Bf16),
        "sm_80",
        &[0, 1, 37],
    );
}

#[test]
fn a_layer_of_f16() {
    run(&typed(spec(72, 40, 5, 3), DType::F16), "sm_86", &[33]);
}

#[test]
fn a_layer_of_f32_with_odd_sizes() {
    run(&spec(31, 23, 7, 2), "sm_75", &[19]);
}

/// The simulator refuses the kernel as the assembler would.
#[test]
fn more_shared_memory_than_may_be_declared_is_refused() {
    let target = Target::Sim(SimArch::Cuda(arch("sm_80")));
    let plan = plan(&spec(8, 8, 2, 1), target, &PlanOptions::default()).unwrap();
    let mut sources = emit_layer(&plan).unwrap().into_iter();
    let mut source = sources.find(|source| source.name == "combine").unwrap();
    let compile = |source: &KernelSource| compiler().compile(source, &CompileOptions::default());
    compile(&source).unwrap_or_else(|error| panic!("{error}"));
    let text = source
        .text
        .replace("sources[LISTED * TOP_K]", "sources[12289]");
    assert_ne!(text, source.text);
    source.text = text;
    let says = compile(&source).unwrap_err().to_string();
    assert!(says.contains("49152 are allowed"), "{says}");
}
