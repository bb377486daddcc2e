//! The data of a plan: kernels, tensors, and the steps in order.

use super::step::{EntryId, LaunchStep, Step, TensorId};
use super::tensor::{TensorPlan, TensorRole};
use crate::{CacheClass, KernelPlan, Op, Tuning};
use moesaic_kernel::{Access, Entry, Target};
use moesaic_spec::LayerSpec;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::ops::Index;

/// Everything a runtime needs to run a layer forward on one target.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LayerPlan {
    /// The layer.
    pub spec: LayerSpec,
    /// The target the configs were chosen for.
    pub target: Target,
    /// Sizes that were chosen by measurement.
    #[serde(default, skip_serializing_if = "Tuning::is_empty")]
    pub tuning: Tuning,
    /// The caches of the CPU that its tiles are for.
    #[serde(default, skip_serializing_if = "CacheClass::is_assumed")]
    pub caches: CacheClass,
    /// The kernel sources to emit.
    pub kernels: Vec<KernelPlan>,
    /// Every tensor that a step names.
    pub tensors: Vec<TensorPlan>,
    /// The launches that make each [`TensorRole::Packed`] tensor from a weight, once and whenever
    /// the weight changes. A step names the weight first, then the tensor.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub prepare: Vec<LaunchStep>,
    /// The steps of a forward pass, in order; of a training pass if the plan has a backward pass.
    pub steps: Vec<Step>,
    /// The steps of an evaluation, where `steps` trains: see
    /// [`LayerPlan::evaluation_steps`].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub evaluation: Vec<Step>,
    /// The intermediates that backward computes again; `None` for a plan without backward.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub training: Option<Training>,
    /// The steps of a backward pass, in order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub backward: Vec<Step>,
}

/// The options of a plan besides spec and target.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PlanOptions {
    /// The mode of training; `None` is inference alone.
    pub training: Option<Training>,
    /// Sizes instead of those that operators choose. GPUs have none.
    #[doc(hidden)]
    pub tuning: Tuning,
    /// The caches that sizes are chosen for, on a CPU.
    pub caches: CacheClass,
    /// Decode calls on a GPU run the kernels of larger calls, as in layers that train.
    #[doc(hidden)]
    pub one_for_all: bool,
    /// A CPU leaves experts' weights unpacked, as in layers that train, so that other ranks can
    /// gather them ([`AdaptiveMesh`]).
    ///
    /// [`AdaptiveMesh`]: crate::AdaptiveMesh
    #[doc(hidden)]
    pub unpacked: bool,
}

impl PlanOptions {
    /// Returns the default options with this training mode; `None` is inference.
    pub fn training(training: impl Into<Option<Training>>) -> PlanOptions {
        PlanOptions {
            training: training.into(),
            ..PlanOptions::default()
        }
    }
}

/// The mode of training.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Training {
    /// The intermediates that backward computes again instead of keeping them.
    pub recompute: Recompute,
}

/// The intermediates that backward computes again. Kernels are reproducible to the bit, so
/// gradients are the same in every mode.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Recompute {
    /// Nothing: x, the routing record and the pre-activations are kept.
    #[default]
    None,
    /// The pre-activations: x and the routing record are kept.
    Hidden,
    /// Routing too: the inputs are kept, and of a layer with projections around
    /// its experts their sum.
    All,
}

impl LayerPlan {
    /// Returns the tensors that a forward pass leaves for backward, inputs included: those that
    /// backward reads before it writes them.
    pub fn saved(&self) -> Vec<TensorId> {
        let mut written = BTreeSet::new();
        let mut saved = BTreeSet::new();
        for step in &self.backward {
            for (tensor, access) in self.accesses(step) {
                if access != Access::Write && !written.contains(&tensor) {
                    saved.insert(tensor);
                }
                // Second, because a step that reads and writes a tensor needs what forward left in
                // it.
                if access != Access::Read {
                    written.insert(tensor);
                }
            }
        }
        // Weights and their gradients live as long as the layer, and `dy` comes with the backward
        // call.
        let passed = |id: &TensorId| {
            matches!(
                self[*id].role,
                TensorRole::Input | TensorRole::Output | TensorRole::Scratch
            )
        };
        saved.into_iter().filter(passed).collect()
    }

    /// Returns the steps of a forward pass, then those of a backward pass.
    pub fn all_steps(&self) -> impl Iterator<Item = &Step> {
        self.steps.iter().chain(&self.backward)
    }

    /// Returns the number of these steps of the plan that launch something in a call of `tokens`
    /// tokens; the grids of the others are empty.
    pub fn launched<'s>(&self, steps: impl IntoIterator<Item = &'s Step>, tokens: u64) -> usize {
        let has_blocks = |Step::Launch(step): &&Step| self[step.entry].launch.blocks(tokens) > 0;
        steps.into_iter().filter(has_blocks).count()
    }

    /// Returns the rows of a row tile of the experts' GEMMs, which all share one list; 1 without
    /// experts.
    pub fn tile_rows(&self) -> usize {
        let mut products = self.kernels.iter().filter_map(|kernel| kernel.op.gemm());
        products.next().map_or(1, |config| config.tile_rows)
    }

    /// Returns the steps of a forward pass that draws nothing and keeps nothing.
    pub fn evaluation_steps(&self) -> &[Step] {
        match self.training {
            Some(_) => &self.evaluation,
            None => &self.steps,
        }
    }

    /// Returns the first steps of a forward pass, which decide where tokens go.
    pub fn routing_of<'s>(&self, steps: &'s [Step]) -> &'s [Step] {
        let routes = |step: &Step| self.op(step).is_some_and(Op::routes);
        let count = steps.iter().take_while(|step| routes(step)).count();
        &steps[..count]
    }

    /// Returns every step of a call: [`LayerPlan::all_steps`], then an evaluation's where it has
    /// its own.
    pub(crate) fn call_steps(&self) -> impl Iterator<Item = &Step> {
        self.all_steps().chain(&self.evaluation)
    }

    /// Returns whether kernels read a weight only in its packed form, so that a runtime need not
    /// keep it.
    pub fn packs_away(&self, weight: TensorId) -> bool {
        let packed = self
            .prepare
            .iter()
            .any(|step| step.tensors.contains(&weight));
        packed
            && !self
                .call_steps()
                .any(|step| step.tensors().contains(&weight))
    }

    /// Returns whether a tensor holds weights in the form that kernels multiply: packed, where
    /// weights are packed.
    pub fn is_multiplied(&self, tensor: TensorId) -> bool {
        match self[tensor].role {
            TensorRole::Packed => true,
            TensorRole::Weight => !self.packs_away(tensor),
            _ => false,
        }
    }

    /// Returns the dimension of the grid of a step of `prepare` that counts experts, so that a
    /// launch can pack some of them.
    pub fn expert_axis(&self, step: &LaunchStep) -> usize {
        match &self.kernels[step.entry.kernel].op {
            Op::GroupedGemm { desc, config } => crate::ops::grouped_gemm::expert_axis(desc, config),
            _ => 0,
        }
    }

    /// Returns the tensor of this name.
    pub fn tensor(&self, name: &str) -> Option<&TensorPlan> {
        self.tensors.iter().find(|tensor| tensor.name == name)
    }

    /// Returns the number of the tensor of this name.
    pub fn id(&self, name: &str) -> Option<TensorId> {
        let found = self.tensors.iter().position(|tensor| tensor.name == name);
        found.map(TensorId)
    }

    /// Returns the readable name of a step: for a launch the symbol of its entry.
    ///
    /// # Panics
    ///
    /// When the step is not of this plan.
    pub fn symbol(&self, step: &Step) -> &str {
        match step {
            Step::Launch(launch) => &self[launch.entry].symbol,
        }
    }

    /// Returns a name that is unique within a pass: the symbol, or the kernel's name if several
    /// steps share a symbol.
    ///
    /// # Panics
    ///
    /// As [`LayerPlan::symbol`].
    pub fn label(&self, step: &Step) -> &str {
        let symbol = self.symbol(step);
        let mut same = self
            .all_steps()
            .filter(|other| self.symbol(other) == symbol);
        // Routed and shared experts run kernels with the same symbols.
        match (same.nth(1), step) {
            (None, _) => symbol,
            (Some(_), Step::Launch(launch)) => &self.kernels[launch.entry.kernel].name,
        }
    }

    /// Returns the tensors of a step by name, in order.
    pub fn names<'p>(&'p self, step: &'p Step) -> impl Iterator<Item = &'p str> {
        step.tensors().iter().map(|&tensor| &*self[tensor].name)
    }

    /// Returns the access of a step to each of its tensors, in order.
    ///
    /// # Panics
    ///
    /// As [`LayerPlan::symbol`].
    pub fn accesses<'p>(
        &'p self,
        step: &'p Step,
    ) -> impl Iterator<Item = (TensorId, Access)> + use<'p> {
        let Step::Launch(launch) = step;
        let params = self[launch.entry].params.iter();
        let accesses = params.filter_map(|param| Some(param.ty.tensor()?.1));
        launch.tensors.iter().copied().zip(accesses)
    }

    /// Returns the operator of a step; `None` if the step launches no kernel.
    pub(crate) fn op(&self, step: &Step) -> Option<&Op> {
        let kernel = step.launch()?.entry.kernel;
        Some(&self.kernels[kernel].op)
    }

    /// Returns every launch there is, those of [`LayerPlan::prepare`] first.
    pub(crate) fn launches(&self) -> impl Iterator<Item = &LaunchStep> {
        let called = self.call_steps().filter_map(Step::launch);
        self.prepare.iter().chain(called)
    }
}

impl Index<TensorId> for LayerPlan {
    type Output = TensorPlan;

    fn index(&self, tensor: TensorId) -> &TensorPlan {
        &self.tensors[tensor.0]
    }
}

impl Index<EntryId> for LayerPlan {
    type Output = Entry;

    fn index(&self, id: EntryId) -> &Entry {
        &self.kernels[id.kernel].entries[id.entry]
    }
}
