//! The GEMMs that only training has, on NVIDIA's tensor cores, under NVRTC:
//! without a word, spills or stack.

use moesaic_emit::emit;
use moesaic_harness::kept::Kept;
use moesaic_harness::specs::layer;
use moesaic_harness::thorough::{in_turns, one_in};
use moesaic_kernel::{DType, Target};
use moesaic_plan::{KernelPlan, Op, PlanOptions, Recompute, Training, plan};
use moesaic_spec::*;
use moesaic_target::{Artifact, CompileOptions, Compiler};
use moesaic_toolchain::testing;
use std::collections::BTreeSet;

fn spec([d, h]: [usize; 2], experts: [usize; 2], dtype: DType) -> LayerSpec {
    layer([d, h, d], experts, dtype)
}

/// Layers that bring out what differs: rows in packs of every width, both
/// heights of a tile, one matrix and two, the longest epilogues.
fn layers(dtype: DType) -> Vec<LayerSpec> {
    let long = |mut s: LayerSpec| {
        s.experts.bias = true.into();
        s.experts.clamp = Some(7.0);
        s.experts.up_offset = 1.0;
        s.experts.activation = Activation::Gelu;
        s.router.weight_on = WeightSite::Activation;
        s
    };
    let plain = |mut s: LayerSpec| {
        s.experts.form = ExpertForm::Plain;
        s.experts.activation = Activation::GeluTanh;
        s
    };
    let input = |mut s: LayerSpec| {
        s.router.weight_on = WeightSite::Input;
        s
    };
    vec![
        spec([4096, 14336], [8, 2], dtype),
        long(spec([2880, 2880], [32, 4], dtype)),
        long(spec([66, 42], [60, 1], dtype)),
        plain(spec([1032, 712], [60, 1], dtype)),
        plain(input(spec([72, 136], [4, 1], dtype))),
    ]
}

/// Whether a kernel runs on tensor or matrix cores and only training has it.
fn wanted(kernel: &KernelPlan) -> bool {
    let matrix = kernel.family().is_some_and(|family| family != "simt");
    let forward = matches!(&kernel.op, Op::GroupedGemm { desc, .. } if !desc.keep);
    matrix && !forward
}

/// Kernels of some layers compiled for one architecture; each text once.
fn compile<'a>(arch: &str, layers: impl Iterator<Item = &'a LayerSpec>) -> usize {
    let compiler = Kept::new(testing::nvrtc());
    let target: Target = format!("cuda:{arch}").parse().unwrap();
    let training = Training {
        recompute: Recompute::None,
    };
    let (mut compiled, mut problems) = (BTreeSet::new(), Vec::new());
    for spec in layers {
        let plan = plan(spec, target, &PlanOptions::training(training)).unwrap();
        for kernel in plan.kernels.iter().filter(|kernel| wanted(kernel)) {
            let source = emit(kernel, target).unwrap();
            if !compiled.insert(source.text.clone()) {
                continue;
            }
            let what = format!("{} for {target}, {:?}", source.name, kernel.op);
            match compiler.compile(&source, &CompileOptions::default()) {
                Ok(artifact) => check(&artifact, &what),
                Err(error) => problems.push(format!("{what}: {error}")),
            }
        }
    }
    assert!(problems.is_empty(), "{}", problems.join("\n"));
    compiled.len()
}

fn check(artifact: &Artifact, what: &str) {
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
    }
}

/// All layers where families are at home, the longest kernels elsewhere, in turns.
#[test]
fn halves_on_every_architecture() {
    let all = layers(DType::Bf16);
    for (n, arch) in ["sm_90a", "sm_80"].into_iter().enumerate() {
        assert!(compile(arch, one_in(2, n, &all)) >= 8, "{arch}");
    }
    let long = &layers(DType::F16)[1..3];
    let others = ["sm_86", "sm_89", "sm_100a", "sm_120a"];
    for (n, arch) in others.into_iter().enumerate() {
        assert!(compile(arch, in_turns(n, long)) >= 4, "{arch}");
    }
}

#[test]
fn f32_where_three_products_pay() {
    let all = layers(DType::F32);
    let archs = ["sm_80", "sm_90a", "sm_100a"];
    for (n, arch) in archs.into_iter().enumerate() {
        assert!(compile(arch, in_turns(n, &all[1..4])) >= 4, "{arch}");
    }
}
