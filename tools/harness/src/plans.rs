//! Plans of valid layers, and what is left of one without some of its kernels.

use moesaic_kernel::{Size, Stem, Target};
use moesaic_plan::{KernelPlan, LaunchStep, LayerPlan, Op, PlanOptions, Step, plan};
use moesaic_spec::LayerSpec;
use std::collections::BTreeSet;

/// The stems that decide where tokens go, and bring them there.
pub const ROUTING: [Stem; 3] = [Stem::GateTopk, Stem::ExpertScan, Stem::Dispatch];

/// The plan of a valid layer.
pub fn planned(spec: &LayerSpec, target: Target, options: &PlanOptions) -> LayerPlan {
    if let Err(problems) = spec.validate() {
        panic!("the test's spec is invalid: {problems:?}");
    }
    plan(spec, target, options).unwrap()
}

/// Leaves only the kernels that are wanted and launched, and the steps that launch them.
pub fn only(mut plan: LayerPlan, wanted: impl Fn(&KernelPlan) -> bool) -> LayerPlan {
    let kernels = std::mem::take(&mut plan.kernels);
    let launches = |step: &LaunchStep| wanted(&kernels[step.entry.kernel]);
    plan.prepare.retain(launches);
    for steps in [&mut plan.steps, &mut plan.evaluation, &mut plan.backward] {
        steps.retain(|Step::Launch(step)| launches(step));
    }
    let called = [&mut plan.steps, &mut plan.evaluation, &mut plan.backward];
    let called = called.into_iter().flatten().map(|Step::Launch(step)| step);
    let mut launched: Vec<_> = plan.prepare.iter_mut().chain(called).collect();
    let kept: BTreeSet<usize> = launched.iter().map(|step| step.entry.kernel).collect();
    for step in &mut launched {
        step.entry.kernel = kept.range(..step.entry.kernel).count();
    }
    let kernels = kernels.into_iter().enumerate();
    let kernels = kernels.filter(|(number, _)| kept.contains(number));
    plan.kernels = kernels.map(|(_, kernel)| kernel).collect();
    plan
}

/// The same with at most so many blocks for products that go from tile to tile.
pub fn at_most(mut plan: LayerPlan, blocks: u64) -> LayerPlan {
    let goes = |kernel: &&mut KernelPlan| {
        kernel.stem() == Stem::GroupedGemm && kernel.family() == Some("wgmma")
    };
    let kernels = plan.kernels.iter_mut().filter(goes);
    for entry in kernels.flat_map(|kernel| &mut kernel.entries) {
        let grid = &mut entry.launch.grid;
        assert_eq!(grid[1], Size::Const(1), "a block has any tile");
        grid[0] = grid[0].clone().min(blocks);
    }
    plan
}

/// Returns whether a kernel routes.
pub fn routes(kernel: &KernelPlan) -> bool {
    ROUTING.contains(&kernel.stem())
}

/// The rows of the tiles that the scan lists.
pub fn scan_tile_rows(plan: &LayerPlan) -> usize {
    let mut rows = plan.kernels.iter().filter_map(|kernel| match &kernel.op {
        Op::ExpertScan { config, .. } => Some(config.tile_rows),
        _ => None,
    });
    rows.next().unwrap()
}
