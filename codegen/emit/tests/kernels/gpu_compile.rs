//! The GPU kernels under the vendors' compilers: clean, without spills and
//! stack, with the signatures that the plan says.

use moesaic_emit::{emit, emit_layer};
use moesaic_harness::kept::Kept;
use moesaic_harness::specs::{self, spec};
use moesaic_harness::thorough::{in_turns, one_in};
use moesaic_kernel::{DType, KernelSource, Stem, Target};
use moesaic_plan::{KernelPlan, LayerPlan, PlanOptions, Training, plan};
use moesaic_spec::*;
use moesaic_target::{Artifact, CompileOptions, Compiler};
use moesaic_toolchain::testing;
use std::collections::BTreeSet;

const CUDA: [&str; 5] = ["sm_75", "sm_80", "sm_90a", "sm_100a", "sm_120a"];
const ROCM: [&str; 5] = ["gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201"];

/// Static shared memory every device of a family has.
const CUDA_SHARED: u32 = 48 << 10;
const ROCM_SHARED: u32 = 64 << 10;

fn with(spec: LayerSpec, change: impl FnOnce(&mut LayerSpec)) -> LayerSpec {
    let spec = specs::with(spec, change);
    spec.validate().unwrap();
    spec
}

fn typed(spec: LayerSpec, dtype: DType) -> LayerSpec {
    specs::typed(spec, dtype, dtype)
}

pub fn mixtral() -> LayerSpec {
    with(typed(spec(4096, 14336, 8, 2), DType::Bf16), |s| {
        s.router.renormalize = Renormalize::Sum;
    })
}

pub fn qwen3() -> LayerSpec {
    with(typed(spec(2048, 768, 128, 8), DType::Bf16), |s| {
        s.router.renormalize = Renormalize::Sum;
    })
}

pub fn deepseek_v3() -> LayerSpec {
    with(typed(spec(7168, 2048, 256, 8), DType::Bf16), |s| {
        s.router.score = Score::Sigmoid;
        s.router.select_bias = true;
        s.router.groups = Some(Groups {
            count: 8,
            keep: 4,
            stat: GroupStat::Top2Sum,
            mask: GroupMask::Exclude,
        });
        s.router.renormalize = Renormalize::Sum;
        s.router.renormalize_eps = 1e-20;
        s.router.scale = 2.5;
        s.shared = vec![SharedExpert {
            hidden_dim: 2048,
            gate: SharedGate::None,
            bias: None,
            clamp: None,
            activation: None,
        }];
    })
}

/// Between them these reach every option that changes the text.
fn options() -> Vec<LayerSpec> {
    let factor = |s: &mut LayerSpec, order| {
        s.capacity.mode = CapacityMode::Factor;
        s.capacity.factor = 1.25;
        s.capacity.order = order;
    };
    vec![
        deepseek_v3(),
        with(typed(spec(2880, 2880, 32, 4), DType::Bf16), |s| {
            s.router.bias = true;
            s.router.score = Score::SoftmaxSelected;
            s.experts.bias = true.into();
            s.experts.clamp = Some(7.0);
            s.experts.alpha = 1.702;
            s.experts.up_offset = 1.0;
        }),
        with(typed(spec(63, 47, 1000, 50), DType::F16), |s| {
            s.router.input = RouterInput::RmsScaled;
            s.router.score = Score::SqrtSoftplus;
            s.router.renormalize = Renormalize::PNorm;
            s.router.norm_order = 3.0;
            s.router.expert_scale = true;
            s.router.bias = true;
            s.experts.activation = Activation::Gelu;
            s.experts.form = ExpertForm::Plain;
            s.router.weight_on = WeightSite::Input;
            factor(s, CapacityOrder::Probability);
        }),
        with(spec(31, 66, 1024, 1024), |s| {
            s.router.score = Score::One;
            s.router.select_bias = false;
            s.experts.activation = Activation::Relu2;
            factor(s, CapacityOrder::TokenMajor);
        }),
        with(spec(256, 512, 64, 2), |s| {
            s.router.kind = RouterKind::Cosine;
            s.router.projection_dim = Some(256);
            s.router.select = Select::SparseMixer(0.01);
            s.experts.activation = Activation::GeluTanh;
            s.router.weight_on = WeightSite::Activation;
            s.experts.bias = true.into();
            factor(s, CapacityOrder::BatchPrioritized);
        }),
        with(spec(100, 50, 8, 2), |s| {
            s.router.kind = RouterKind::Table;
            s.router.table_rows = Some(1000);
            s.router.renormalize = Renormalize::Clamp;
            s.router.renormalize_eps = 1e-6;
            s.experts.identity = 4;
            s.capacity.mode = CapacityMode::Bounded;
            s.capacity.factor = -1.5;
            s.capacity.order = CapacityOrder::Random;
            s.capacity.align = 8;
            s.capacity.renormalize_after_drop = true;
        }),
        with(typed(spec(104, 56, 8, 3), DType::Bf16), |s| {
            s.router.kind = RouterKind::External;
            s.precision.weights = DType::F32;
            s.shape.output_dim = Some(17);
            s.experts.activation = Activation::Relu;
            s.capacity.mode = CapacityMode::Fixed;
            s.capacity.rows = Some(128);
        }),
        with(typed(spec(2048, 1408, 60, 4), DType::F16), |s| {
            s.shared = vec![SharedExpert {
                hidden_dim: 5632,
                gate: SharedGate::Sigmoid,
                bias: None,
                clamp: None,
                activation: None,
            }];
            s.capacity.mode = CapacityMode::MaxCount;
            s.router.groups = Some(Groups {
                count: 4,
                keep: 2,
                stat: GroupStat::Max,
                mask: GroupMask::Zero,
            });
        }),
        with(spec(64, 64, 4, 2), |s| {
            s.router.kind = RouterKind::Table;
            s.router.table_rows = Some(1000);
            s.router.score = Score::One;
            s.router.renormalize = Renormalize::Sum;
            factor(s, CapacityOrder::SlotMajor);
        }),
    ]
}

/// Compiles every kernel of a layer that was not compiled before.
fn compile(
    compiler: &dyn Compiler,
    spec: &LayerSpec,
    target: &str,
    shared: u32,
    done: &mut BTreeSet<String>,
) {
    let target: Target = target.parse().unwrap();
    for source in emit_layer(&plan(spec, target, &PlanOptions::default()).unwrap()).unwrap() {
        if done.insert(source.text.clone()) {
            let artifact = compiler
                .compile(&source, &CompileOptions::default())
                .unwrap_or_else(|e| panic!("{e}"));
            check(&artifact, &format!("{} for {target}", source.name), shared);
        }
    }
}

fn check(artifact: &Artifact, what: &str, shared: u32) {
    let report = &artifact.report;
    assert_eq!(report.log, "", "{what} compiles without a word");
    for kernel in &report.kernels {
        let symbol = &kernel.symbol;
        assert!(!kernel.spills(), "{what}: {kernel:?}");
        assert_eq!(
            kernel.stack_bytes.unwrap_or(0),
            0,
            "{what}: {symbol} has a stack"
        );
        assert!(
            kernel.shared_bytes.unwrap_or(0) <= shared,
            "{what}: {symbol}"
        );
    }
}

/// Real layers on every architecture, in turns; every option on one of them.
fn compile_all(compiler: &dyn Compiler, backend: &str, archs: &[&str], shared: u32) {
    let mut done = BTreeSet::new();
    for (n, arch) in archs.iter().enumerate() {
        let target = format!("{backend}:{arch}");
        for spec in in_turns(n, [mixtral(), qwen3()]) {
            compile(compiler, &spec, &target, shared, &mut done);
        }
    }
    for (spec, arch) in options().iter().zip(archs.iter().cycle()) {
        compile(
            compiler,
            spec,
            &format!("{backend}:{arch}"),
            shared,
            &mut done,
        );
    }
}

#[test]
fn nvrtc_compiles_every_kernel() {
    let compiler = Kept::new(testing::nvrtc());
    compile_all(&compiler, "cuda", &CUDA, CUDA_SHARED);
}

/// Layers that bring out what differs between GEMMs on tensor or matrix cores: types,
/// rows in packs of every width, both heights of a tile, the longest epilogues.
fn gemm_layers(dtype: DType) -> Vec<LayerSpec> {
    let epilogue = |s: &mut LayerSpec| {
        s.experts.bias = true.into();
        s.experts.clamp = Some(7.0);
        s.experts.up_offset = 1.0;
        s.router.weight_on = WeightSite::Activation;
    };
    vec![
        with(typed(spec(2880, 2880, 32, 4), dtype), epilogue),
        with(typed(spec(63, 47, 60, 1), dtype), epilogue),
        with(typed(spec(1028, 706, 60, 1), dtype), |s| {
            s.experts.form = ExpertForm::Plain;
            s.experts.activation = Activation::Gelu;
        }),
        with(typed(spec(66, 130, 4, 1), dtype), |s| {
            s.experts.form = ExpertForm::Plain;
            s.router.weight_on = WeightSite::Input;
        }),
        // Pieces of 8 bytes: more addresses. Of 64 rows a lane kept too many.
        with(typed(spec(78, 78, 1, 1), dtype), |s| {
            s.precision.tf32 = dtype == DType::F32;
            s.experts.form = ExpertForm::Plain;
            s.experts.activation = Activation::Relu2;
            s.experts.bias = true.into();
        }),
    ]
}

/// Architectures, each with one of the types of 16 bits.
fn halves<'a>(archs: &'a [&str]) -> impl Iterator<Item = (&'a str, DType)> {
    let types = [DType::Bf16, DType::F16].into_iter().cycle();
    archs.iter().copied().zip(types)
}

#[test]
fn nvrtc_compiles_every_matrix_gemm() {
    let compiler = Kept::new(testing::nvrtc());
    let archs = ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a"];
    for (n, (arch, half)) in halves(&archs).enumerate() {
        let target: Target = format!("cuda:{arch}").parse().unwrap();
        for spec in one_in(6, n, [half, DType::F32].map(gemm_layers).concat()) {
            for source in gemms(&plan(&spec, target, &PlanOptions::default()).unwrap()) {
                let artifact = compiler.compile(&source, &CompileOptions::default());
                let artifact = artifact.unwrap_or_else(|error| panic!("{error}"));
                check(
                    &artifact,
                    &format!("{} for {target}, {spec:?}", source.name),
                    CUDA_SHARED,
                );
            }
        }
    }
}

/// Products that keep what enters an error function and multiply rows by weights: what
/// asks for most registers beside the sums.
#[test]
fn nvrtc_compiles_the_longest_epilogues() {
    let compiler = Kept::new(testing::nvrtc());
    let archs = ["sm_80", "sm_89", "sm_100a"];
    let forms = [ExpertForm::Plain, ExpertForm::Gated].into_iter().cycle();
    for (arch, form) in archs.iter().zip(forms) {
        let target: Target = format!("cuda:{arch}").parse().unwrap();
        let spec = with(typed(spec(2048, 768, 8, 2), DType::Bf16), |s| {
            s.experts.form = form;
            s.experts.activation = Activation::Gelu;
            s.router.weight_on = WeightSite::Activation;
        });
        let plan = plan(&spec, target, &PlanOptions::training(Training::default())).unwrap();
        for source in gemms(&plan) {
            if source.name.starts_with("grouped_gemm_up") {
                let artifact = compiler.compile(&source, &CompileOptions::default());
                let artifact = artifact.unwrap_or_else(|error| panic!("{error}"));
                check(
                    &artifact,
                    &format!("{} for {target}", source.name),
                    CUDA_SHARED,
                );
            }
        }
    }
}

/// The sources of the GEMMs that run on tensor or matrix cores.
fn gemms(plan: &LayerPlan) -> Vec<KernelSource> {
    let matrix = |kernel: &&KernelPlan| kernel.family().is_some_and(|family| family != "simt");
    let kernels = plan.kernels.iter().filter(matrix);
    kernels
        .map(|kernel| emit(kernel, plan.target).unwrap())
        .collect()
}

/// Layers that bring out what differs between Hopper GEMMs: both heights of a
/// tile, all three widths, the longest epilogues, and odd columns.
fn hopper_layers() -> Vec<LayerSpec> {
    let long = |s: &mut LayerSpec| {
        s.experts.activation = Activation::Gelu;
        s.experts.bias = true.into();
        s.experts.clamp = Some(7.0);
        s.experts.up_offset = 1.0;
        s.router.weight_on = WeightSite::Activation;
    };
    let plain = |s: &mut LayerSpec| {
        long(s);
        s.experts.form = ExpertForm::Plain;
        (s.experts.clamp, s.experts.up_offset) = (None, 0.0);
        s.shape.output_dim = Some(65);
    };
    vec![
        with(typed(spec(2880, 2880, 32, 4), DType::Bf16), long),
        with(typed(spec(200, 136, 60, 1), DType::F16), long),
        with(typed(spec(456, 1408, 8, 2), DType::F16), plain),
        with(typed(spec(72, 40, 60, 1), DType::Bf16), plain),
    ]
}

#[test]
fn nvrtc_compiles_the_hopper_gemm() {
    let compiler = Kept::new(testing::nvrtc());
    let target: Target = "cuda:sm_90a".parse().unwrap();
    for spec in hopper_layers() {
        for source in gemms(&plan(&spec, target, &PlanOptions::default()).unwrap()) {
            let decode = source.name.contains("_decode");
            assert!(
                decode || source.text.contains("wgmma"),
                "{}: {spec:?}",
                source.name
            );
            let artifact = compiler.compile(&source, &CompileOptions::default());
            let artifact = artifact.unwrap_or_else(|error| panic!("{error}"));
            let what = format!("{} for {target}, {spec:?}", source.name);
            check(&artifact, &what, 0);
        }
    }
}

#[test]
fn clang_compiles_every_matrix_gemm() {
    let compiler = Kept::new(testing::rocm());
    let archs = ["gfx90a", "gfx942", "gfx950", "gfx1100"];
    for (n, (arch, half)) in halves(&archs).enumerate() {
        let target: Target = format!("rocm:{arch}").parse().unwrap();
        for spec in one_in(6, n, [half, DType::F32].map(gemm_layers).concat()) {
            for source in gemms(&plan(&spec, target, &PlanOptions::default()).unwrap()) {
                let artifact = compiler.compile(&source, &CompileOptions::default());
                let artifact = artifact.unwrap_or_else(|error| panic!("{error}"));
                check(
                    &artifact,
                    &format!("{} for {target}", source.name),
                    ROCM_SHARED,
                );
            }
        }
    }
}

/// Forward with what it keeps, and backward; every type on every architecture.
#[test]
fn clang_compiles_every_matrix_gemm_of_training() {
    let compiler = Kept::new(testing::rocm());
    let types = [DType::Bf16, DType::F16, DType::F32];
    for (first, arch) in ["gfx90a", "gfx942", "gfx950", "gfx1100"].iter().enumerate() {
        let target: Target = format!("rocm:{arch}").parse().unwrap();
        for i in in_turns(first, 0..4) {
            let spec = gemm_layers(types[(first + i) % 3]).swap_remove(i);
            let plan = plan(&spec, target, &PlanOptions::training(Training::default())).unwrap();
            for source in gemms(&plan) {
                let artifact = compiler.compile(&source, &CompileOptions::default());
                let artifact = artifact.unwrap_or_else(|error| panic!("{error}"));
                let what = format!("{} for {target}, {spec:?}", source.name);
                check(&artifact, &what, ROCM_SHARED);
            }
        }
    }
}

/// An expression so long that clang gives up unrolling the loop over the sums it is
/// applied to, unless it is told not to; and backward of it, which is no product of `wmma`.
#[test]
fn clang_compiles_long_expressions() {
    let compiler = Kept::new(testing::rocm());
    let long = "tanh(x) * exp(-x) * sigmoid(1.7 * x) * softplus(x) * erf(x) * sqrt(1 + x^2) \
                * log(1 + x^2) * tanh(2 * x) * exp(-0.5 * x) * sigmoid(x) * erf(0.5 * x)";
    let spec = with(typed(spec(2048, 768, 8, 2), DType::Bf16), |s| {
        s.experts.form = ExpertForm::Plain;
        s.experts.activation = Activation::Custom(Expression::parse(long).unwrap());
        s.router.weight_on = WeightSite::Activation;
    });
    let training = PlanOptions::training(Training::default());
    for (arch, name, options) in [
        ("gfx942", "grouped_gemm_up", PlanOptions::default()),
        ("gfx1101", "grouped_gemm_dgrad_down", training),
    ] {
        let target: Target = format!("rocm:{arch}").parse().unwrap();
        let plan = plan(&spec, target, &options).unwrap();
        let sources = plan.kernels.iter().map(|k| emit(k, target).unwrap());
        let source = sources.into_iter().find(|source| source.name == name);
        let source = source.expect("the layer has it");
        let artifact = compiler.compile(&source, &CompileOptions::default());
        let artifact = artifact.unwrap_or_else(|error| panic!("{error}"));
        check(
            &artifact,
            &format!("{} for {target}", source.name),
            ROCM_SHARED,
        );
    }
}

#[test]
fn clang_compiles_every_kernel() {
    let compiler = Kept::new(testing::rocm());
    compile_all(&compiler, "rocm", &ROCM, ROCM_SHARED);
}

/// The kernels of training in the SIMT families: the kernels of backward, and
/// products that keep what enters the activation.
fn of_training(spec: &LayerSpec, target: Target) -> Vec<KernelSource> {
    let plan = plan(spec, target, &PlanOptions::training(Training::default())).unwrap();
    let ordinary = |kernel: &KernelPlan| match kernel.family() {
        Some(family) => family == "simt",
        None => Stem::BACKWARD.contains(&kernel.stem()),
    };
    let kernels = plan.kernels.iter().filter(|kernel| ordinary(kernel));
    kernels
        .map(|kernel| emit(kernel, target).unwrap())
        .collect()
}

/// Every option that changes a backward kernel.
fn training_options() -> Vec<LayerSpec> {
    let sigmoid = |hidden_dim| SharedExpert {
        hidden_dim,
        gate: SharedGate::Sigmoid,
        bias: None,
        clamp: None,
        activation: None,
    };
    vec![
        with(typed(spec(2880, 2880, 32, 4), DType::Bf16), |s| {
            s.experts.bias = true.into();
            s.experts.clamp = Some(7.0);
            s.experts.alpha = 1.702;
            s.experts.up_offset = 1.0;
        }),
        with(typed(spec(2048, 1408, 60, 4), DType::F16), |s| {
            s.shared = vec![sigmoid(5632)];
            s.experts.bias = true.into();
            s.experts.activation = Activation::Gelu;
        }),
        with(typed(spec(63, 47, 100, 50), DType::F16), |s| {
            s.precision.weights = DType::F32;
            s.experts.activation = Activation::GeluTanh;
            s.experts.form = ExpertForm::Plain;
            s.router.weight_on = WeightSite::Input;
            s.experts.bias = true.into();
        }),
        with(spec(100, 50, 8, 2), |s| {
            s.experts.identity = 4;
            s.experts.zero = 2;
            s.capacity.mode = CapacityMode::Factor;
            s.capacity.renormalize_after_drop = true;
            s.experts.activation = Activation::Relu2;
        }),
    ]
}

fn compile_training(compiler: &dyn Compiler, archs: &[&str], shared: u32) {
    let mut done = BTreeSet::new();
    let options = training_options();
    for (n, (arch, option)) in archs.iter().zip(options.iter().cycle()).enumerate() {
        let target: Target = arch.parse().unwrap();
        // No tensor or matrix core takes operands of two types.
        let mixed = with(mixtral(), |s| s.precision.weights = DType::F32);
        let real = if n % 2 == 0 { &mixed } else { &qwen3() };
        for spec in [real, option] {
            for source in of_training(spec, target) {
                if !done.insert(source.text.clone()) {
                    continue;
                }
                let artifact = compiler.compile(&source, &CompileOptions::default());
                let artifact = artifact.unwrap_or_else(|error| panic!("{error}"));
                let what = format!("{} for {target}, {spec:?}", source.name);
                check(&artifact, &what, shared);
            }
        }
    }
}

#[test]
fn nvrtc_compiles_every_backward_kernel() {
    let compiler = Kept::new(testing::nvrtc());
    let archs = ["cuda:sm_75", "cuda:sm_80", "cuda:sm_90a", "cuda:sm_100a"];
    compile_training(&compiler, &archs, CUDA_SHARED);
}

#[test]
fn clang_compiles_every_backward_kernel() {
    let compiler = Kept::new(testing::rocm());
    let archs = ["rocm:gfx90a", "rocm:gfx942", "rocm:gfx950", "rocm:gfx1100"];
    compile_training(&compiler, &archs, ROCM_SHARED);
}
