//! Routers over more experts than a warp holds, forward and backward, under the
//! vendors' compilers: without a word, spills or stack, in static shared memory.

use moesaic_emit::emit;
use moesaic_harness::kept::Kept;
use moesaic_harness::thorough::in_turns;
use moesaic_kernel::{Stem, Target};
use moesaic_plan::{PlanOptions, Training, plan};
use moesaic_spec::*;
use moesaic_target::{CompileOptions, Compiler};
use moesaic_toolchain::testing;

const ROUTING: [Stem; 3] = [Stem::GateTopk, Stem::ExpertScan, Stem::GateTopkBwd];

fn spec(experts: usize, top_k: usize, rest: &str) -> LayerSpec {
    let text = format!(
        "shape = {{ model_dim = 1024, hidden_dim = 64, experts = {experts}, top_k = {top_k} }}\n{rest}"
    );
    LayerSpec::from_toml(&text).unwrap_or_else(|e| panic!("{}", e.render("spec", false)))
}

/// The layers that take most registers and most shared memory.
fn layers() -> Vec<LayerSpec> {
    let losses = |kinds: &[&str]| -> String {
        let one = |kind: &&str| format!("[[losses]]\nkind = \"{kind}\"\ncoefficient = 0.1\n");
        kinds.iter().map(one).collect()
    };
    vec![
        spec(2048, 1, &losses(&["switch", "z"])),
        spec(
            4096,
            16,
            &format!(
                "capacity = {{ mode = \"factor\", order = \"probability\" }}\n\
                 router = {{ noise = 1.0, noise_kind = \"learned\", expert_scale = true }}\n{}",
                losses(&["global", "sequence", "z", "importance-load-logits"])
            ),
        ),
        spec(
            4096,
            8,
            "router = { score = \"sqrt-softplus\", select_bias = true, renormalize = \"p-norm\", norm_order = 2.0, \
             groups = { count = 8, keep = 4, stat = \"top2-sum\" } }",
        ),
        spec(
            4096,
            4096,
            "capacity = { mode = \"factor\", order = \"token-major\" }",
        ),
        spec(
            1025,
            2,
            "router = { kind = \"cosine\", projection_dim = 256, select = { sparse-mixer = 0.01 } }",
        ),
        spec(
            4096,
            2,
            "router = { kind = \"cosine\", projection_dim = 256, entropy = { temperature = 0.5, load = 0.1 } }",
        ),
    ]
}

fn check(compiler: &dyn Compiler, targets: &[&str], shared: u32) {
    for (n, target) in targets.iter().enumerate() {
        let target: Target = target.parse().unwrap();
        for spec in in_turns(n, layers()) {
            let plan = plan(&spec, target, &PlanOptions::training(Training::default())).unwrap();
            let routing = |kernel: &&moesaic_plan::KernelPlan| ROUTING.contains(&kernel.stem());
            for kernel in plan.kernels.iter().filter(routing) {
                let source = emit(kernel, target).unwrap();
                let artifact = compiler.compile(&source, &CompileOptions::default());
                let report = artifact.unwrap_or_else(|error| panic!("{error}")).report;
                assert_eq!(report.log, "", "{} for {target}", source.name);
                for entry in &report.kernels {
                    let what = format!("{} of {} for {target}", entry.symbol, spec.to_toml());
                    assert!(!entry.spills(), "{what}: {entry:?}");
                    assert_eq!(entry.stack_bytes.unwrap_or(0), 0, "{what} has a stack");
                    let bytes = entry.shared_bytes.unwrap_or(0);
                    assert!(bytes <= shared, "{what}: {bytes} bytes of shared memory");
                }
            }
        }
    }
}

#[test]
fn nvrtc_compiles_routers_of_many_experts() {
    let compiler = Kept::new(testing::nvrtc());
    let targets = ["sm_75", "sm_80", "sm_90a", "sm_100a", "sm_120a"].map(|a| format!("cuda:{a}"));
    check(&compiler, &targets.each_ref().map(String::as_str), 48 << 10);
}

#[test]
fn clang_compiles_routers_of_many_experts() {
    let compiler = Kept::new(testing::rocm());
    let targets = ["gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201"].map(|a| format!("rocm:{a}"));
    check(&compiler, &targets.each_ref().map(String::as_str), 64 << 10);
}
