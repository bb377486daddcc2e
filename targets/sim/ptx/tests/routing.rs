//! Routing and data movement in the machine, at awkward sizes, with every check.

use moesaic_emit::emit;
use moesaic_harness::pass::Tensors;
use moesaic_harness::{Harness, check};
use moesaic_kernel::{CudaArch, DType, SimArch, Stem, Target};
use moesaic_plan::{PlanOptions, Step, plan};
use moesaic_ptx::{PtxCompiler, PtxDevice, PtxOptions};
use moesaic_spec::*;
use moesaic_target::{
    Arg, CompileOptions, Compiler, Device, DeviceError, FunctionId, KernelCounters, LaunchDims,
    Module,
};
use moesaic_toolchain::testing;
use std::sync::{Arc, OnceLock};

const ROUTING: &[Stem] = &[Stem::GateTopk, Stem::ExpertScan, Stem::Dispatch];

/// Stands for the GEMMs and the kernels after them, which no test here
/// launches.
struct Absent;

impl Module for Absent {
    fn function(&self, symbol: &str) -> Result<FunctionId, DeviceError> {
        panic!("{symbol} was left out");
    }

    unsafe fn run(&self, _: FunctionId, _: LaunchDims, _: &[Arg]) -> Result<(), DeviceError> {
        unreachable!("there is no function")
    }
}

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

fn spec(d: usize, e: usize, k: usize) -> LayerSpec {
    let text =
        format!(r#"{{"shape":{{"model_dim":{d},"hidden_dim":4,"experts":{e},"top_k":{k}}}}}"#);
    serde_json::from_str(&text).unwrap()
}

fn rig_of(spec: &LayerSpec, name: &str, stems: &[Stem], seed: u64) -> Harness {
    spec.validate().unwrap();
    let arch = arch(name);
    let options = PtxOptions {
        seed,
        ..PtxOptions::default()
    };
    let device = PtxDevice::new(arch, options);
    let mut plan = plan(
        spec,
        Target::Sim(SimArch::Cuda(arch)),
        &PlanOptions::default(),
    )
    .unwrap();
    let launched: Vec<bool> = (plan.kernels.iter())
        .map(|kernel| stems.contains(&kernel.stem()))
        .collect();
    plan.steps
        .retain(|Step::Launch(launch)| launched[launch.entry.kernel]);
    let load = |kernel: &moesaic_plan::KernelPlan| {
        if !stems.contains(&kernel.stem()) {
            return Arc::new(Absent) as Arc<dyn Module>;
        }
        let source = emit(kernel, plan.target).unwrap();
        let artifact = compiler().compile(&source, &CompileOptions::default());
        let artifact = artifact.unwrap_or_else(|error| panic!("{error}"));
        device.load(&artifact, &source.entries).unwrap()
    };
    let modules = plan.kernels.iter().map(load).collect();
    Harness::on((Arc::new(device), modules), plan)
}

fn run(spec: &LayerSpec, name: &str, tokens: &[usize]) {
    let harness = rig_of(spec, name, ROUTING, 1);
    for &tokens in tokens {
        checked(&harness, tokens, name);
    }
}

fn checked(harness: &Harness, tokens: usize, name: &str) -> Tensors {
    let tensors = harness.run(&harness.random_input(tokens, tokens as u64));
    let what = format!("{name}, {tokens} tokens, {:?}", harness.plan.spec);
    check::routing(harness, &tensors, &what);
    tensors
}

#[test]
fn expert_counts() {
    let shapes = [
        (1, 1),
        (3, 2),
        (7, 7),
        (60, 3),
        (64, 64),
        (128, 8),
        (160, 1),
        (256, 8),
        (384, 2),
        (512, 3),
        (1000, 8),
        (1024, 8),
    ];
    for ((e, k), name) in shapes
        .into_iter()
        .zip(["sm_80", "sm_90a"].into_iter().cycle())
    {
        run(&spec(5, e, k), name, &[0, 1, 33]);
    }
    run(&spec(5, 8, 2), "sm_75", &[257]);
    run(&spec(5, 1024, 1024), "sm_80", &[2]);
}

#[test]
fn many_tokens() {
    run(&spec(4, 8, 2), "sm_80", &[257, 4096]);
    let mut by_token = spec(4, 12, 8);
    by_token.capacity.order = CapacityOrder::TokenMajor;
    run(&by_token, "sm_90a", &[4099]);
}

#[test]
fn external_routing() {
    for order in [CapacityOrder::SlotMajor, CapacityOrder::TokenMajor] {
        let mut spec = spec(4, 256, 8);
        spec.router.kind = RouterKind::External;
        spec.capacity.order = order;
        run(&spec, "sm_80", &[33, 1100]);
    }
}

#[test]
fn orders_that_sort() {
    use CapacityOrder::{BatchPrioritized, Probability, Random};
    for order in [BatchPrioritized, Probability, Random] {
        let mut spec = spec(4, 5, 2);
        spec.capacity.mode = CapacityMode::Factor;
        spec.capacity.factor = 0.7;
        spec.capacity.order = order;
        run(&spec, "sm_80", &[33, 1100]);
    }
}

/// Every warp moves whole sectors, sixteen bytes a thread, and every row once.
#[test]
fn copies_are_wide_and_coalesced() {
    let (d, k, tokens) = (256, 2, 70);
    let mut spec = spec(d, 4, k);
    spec.precision.activations = DType::Bf16;
    for name in ["sm_80", "sm_90a", "sm_100a"] {
        let harness = rig_of(&spec, name, &Stem::FORWARD, 1);
        check::all(
            &harness,
            &harness.run(&harness.random_input(tokens, 3)),
            name,
        );
        let counters = harness.take_counters();
        let row = 2 * d as u64;
        let of = |symbol: &str| counters.iter().find(|c| c.symbol == symbol);
        for (symbol, written) in [("dispatch", tokens * k), ("combine", tokens)] {
            let Some(KernelCounters {
                global_loads: loads,
                global_stores: stores,
                global_widths: widths,
                ..
            }) = of(symbol)
            else {
                panic!("{name}: {symbol} did not run: {counters:?}")
            };
            let (written, read) = (written as u64 * row, (tokens * k) as u64 * row);
            assert_eq!(stores.bytes, written, "{name}: {symbol}");
            assert_eq!(stores.sectors, written / 32, "{name}: {symbol}");
            assert_eq!(widths[4], (written + read) / 512, "{name}: {symbol}");
            // Per warp, the maps cost at most the offsets, a slot or row, and a
            // weight.
            let maps = loads.sectors - read / 32;
            assert!(
                maps <= 3 * (tokens * k) as u64,
                "{name}: {symbol}: {maps} sectors"
            );
        }
    }
}
