//! The builder of a plan: each kernel once, steps in order. The operators add their own steps to
//! it.

use super::{EntryId, LaunchStep, LayerPlan, PlanOptions, Step, TensorId, TensorRole};
use crate::ops::Calls;
use crate::{KernelPlan, Op, Operator, TileMachine};
use moesaic_kernel::Target;
use moesaic_spec::LayerSpec;
use std::collections::{BTreeMap, BTreeSet};

/// Collects kernels and steps of a plan.
pub(crate) struct Builder {
    pub(crate) plan: LayerPlan,
    /// The machine that kernels are tiled for.
    pub(crate) machine: TileMachine,
    /// The tensors that steps have named so far. Until the plan is finished, a step refers to a
    /// tensor by its number in this map.
    named: BTreeMap<String, TensorId>,
    /// The pass that gets the steps.
    pub(crate) pass: Pass,
    /// The part of the layer that the plan is of.
    pub(crate) part: Part,
    /// Whether decode calls have kernels of their own.
    pub(crate) decode: bool,
    /// Whether a CPU may pack weights.
    pub(crate) packs: bool,
    /// Whether the matrices of routed experts are codes, which have no gradients. GPUs multiply
    /// numbers in their place, and make no gradients of those either.
    pub(crate) frozen: bool,
    /// For each shared expert whose shards are in the shared-expert part: the number of partial
    /// sums of its weight's gradient that the shards leave.
    pub(crate) sharded: Option<Vec<usize>>,
}

/// The part of a layer that a plan is of.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Part {
    /// All of it.
    Whole,
    /// The steps for this rank's tokens. Experts are on other ranks, whose kernels leave `parts`
    /// partial sums of the gradient of a row's weight.
    Tokens { parts: usize },
    /// The GEMMs of experts, over rows that arrived for them, in a layer of `of` experts with
    /// `top_k` for each token.
    Experts { of: usize, top_k: usize },
}

/// The pass that gets the steps.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pass {
    /// The forward pass; a training one if the plan has a backward pass.
    Forward,
    Backward,
    /// The evaluation of a layer that trains.
    Evaluation,
}

/// Renames a parameter to the tensor behind it.
pub(crate) type Bind<'a> = &'a [(&'a str, &'a str)];

/// Returns the layer as a machine multiplies it: GPUs have no kernels for codes, so they get
/// dequantized weights.
fn multiplied(spec: &LayerSpec, machine: TileMachine) -> LayerSpec {
    match machine {
        TileMachine::Gpu(_) => spec.dequantized(),
        TileMachine::Cpu(_) => spec.clone(),
    }
}

impl Builder {
    /// Returns a builder that has neither tensors nor steps yet.
    pub(super) fn empty(spec: &LayerSpec, target: Target, options: &PlanOptions) -> Builder {
        let training = options.training;
        let machine = TileMachine::of(target, options.caches);
        // Asked before `multiplied` takes the codes away: on a GPU, too, they have no gradients.
        let frozen = spec.precision.experts.is_some();
        let spec = &multiplied(spec, machine);
        let (tuning, caches) = match machine {
            TileMachine::Cpu(core) => (options.tuning.clone(), core.caches),
            TileMachine::Gpu(_) => Default::default(),
        };
        Builder {
            plan: LayerPlan {
                spec: spec.clone(),
                target,
                tuning,
                caches,
                kernels: vec![],
                tensors: vec![],
                prepare: vec![],
                steps: vec![],
                evaluation: vec![],
                training,
                backward: vec![],
            },
            machine,
            named: BTreeMap::new(),
            pass: Pass::Forward,
            part: Part::Whole,
            decode: training.is_none() && !options.one_for_all,
            packs: training.is_none(),
            frozen,
            sharded: None,
        }
    }

    /// Drops the tensors that no step names, but no weight, and renumbers the others in all steps.
    pub(crate) fn finish(self) -> LayerPlan {
        let Builder {
            mut plan, named, ..
        } = self;
        let used: BTreeSet<TensorId> = plan.launches().flat_map(|s| s.tensors.clone()).collect();
        let used = |name: &str| named.get(name).is_some_and(|id| used.contains(id));
        plan.tensors
            .retain(|t| t.role == TensorRole::Weight || used(&t.name));
        // Tensors are declared and dropped until the end (`declare_parts`, `forget_experts`), so
        // only now their numbers are known.
        let mut places = vec![None; named.len()];
        for (at, tensor) in plan.tensors.iter().enumerate() {
            if let Some(id) = named.get(&tensor.name) {
                places[id.0] = Some(TensorId(at));
            }
        }
        let LayerPlan {
            prepare,
            steps,
            evaluation,
            backward,
            ..
        } = &mut plan;
        let called = steps.iter_mut().chain(evaluation).chain(backward);
        let called = called.map(|Step::Launch(launch)| launch);
        for tensor in prepare
            .iter_mut()
            .chain(called)
            .flat_map(|s| &mut s.tensors)
        {
            *tensor = places[tensor.0].expect("steps name declared tensors");
        }
        plan
    }

    /// Returns the tensors that steps name so far.
    pub(crate) fn named_tensors(&self) -> BTreeSet<String> {
        self.named.keys().cloned().collect()
    }

    /// Returns whether the pass draws random numbers and keeps what backward needs.
    pub(crate) fn trains(&self) -> bool {
        self.plan.training.is_some() && self.pass != Pass::Evaluation
    }

    /// Adds a kernel and one step per entry. `bind` renames parameters to
    /// tensors; a parameter it does not name is a tensor of the same name.
    pub(crate) fn launch(&mut self, name: &str, desc: impl Operator, bind: Bind) {
        let kernel = self.kernel(name, desc);
        self.launch_all(kernel, bind);
    }

    /// Adds one step per entry of a kernel.
    pub(crate) fn launch_all(&mut self, kernel: usize, bind: Bind) {
        for index in 0..self.plan.kernels[kernel].entries.len() {
            self.step(kernel, index, bind);
        }
    }

    /// Adds a kernel without a step.
    pub(crate) fn kernel(&mut self, name: &str, desc: impl Operator) -> usize {
        let op = self.tiled(desc);
        self.kernel_of(name, op)
    }

    /// Adds a kernel that is tiled already; for an evaluation only if training has
    /// no such kernel.
    pub(crate) fn kernel_of(&mut self, name: &str, op: Op) -> usize {
        self.kernel_for(name, op, Calls::All)
    }

    /// Adds a kernel as [`Builder::kernel_of`] does, launched in these calls alone.
    pub(crate) fn kernel_for(&mut self, name: &str, op: Op, calls: Calls) -> usize {
        self.kernel_by(name, op, |_| calls)
    }

    /// Adds a kernel as [`Builder::kernel_of`] does. `calls` returns the calls of an entry by its
    /// symbol.
    pub(crate) fn kernel_by(&mut self, name: &str, op: Op, calls: impl Fn(&str) -> Calls) -> usize {
        let entries = op.entries().into_iter();
        let entries = entries
            .map(|entry| self.machine.overlapping(calls(&entry.symbol).only(entry)))
            .collect();
        let mut name = name.to_string();
        if self.pass == Pass::Evaluation {
            // Entries count too: kernels for small and for large calls may have one text and other
            // grids.
            let same = |known: &KernelPlan| known.op == op && known.entries == entries;
            if let Some(known) = self.plan.kernels.iter().position(same) {
                return known;
            }
            // Names are file names of `moesaic emit`, so no two kernels may share one.
            name += "_eval";
        }
        self.plan.kernels.push(KernelPlan { name, op, entries });
        self.plan.kernels.len() - 1
    }

    /// Adds a step: the entry `index` of a kernel.
    pub(crate) fn step(&mut self, kernel: usize, index: usize, bind: Bind) {
        let step = Step::Launch(self.step_of(kernel, index, bind));
        match self.pass {
            Pass::Forward => self.plan.steps.push(step),
            Pass::Backward => self.plan.backward.push(step),
            Pass::Evaluation => self.plan.evaluation.push(step),
        }
    }

    /// Returns the launch of the entry `index` of a kernel.
    pub(crate) fn step_of(&mut self, kernel: usize, index: usize, bind: Bind) -> LaunchStep {
        let params = self.plan.kernels[kernel].entries[index].params.iter();
        let pointers = params.filter(|param| param.ty.tensor().is_some());
        let tensors = pointers.map(|param| {
            let renamed = bind.iter().find(|(from, _)| *from == param.name);
            let name = renamed.map_or(&*param.name, |(_, to)| to);
            let next = TensorId(self.named.len());
            *self.named.entry(name.to_string()).or_insert(next)
        });
        LaunchStep {
            tensors: tensors.collect(),
            entry: EntryId {
                kernel,
                entry: index,
            },
        }
    }

    /// Returns the tiling of a kernel. The experts of a rank are tiled as in the whole layer, so
    /// that their results are the same to the bit.
    pub(crate) fn tiling<D: Operator>(&self, desc: &D) -> D::Config {
        match self.part {
            Part::Experts { of, top_k } => desc.among(of, top_k).tiling(self.machine),
            _ => desc.tiling(self.machine),
        }
    }

    /// Returns a kernel with its tiling: measured sizes where there are any. Weights that change at
    /// every step are not packed, because a block packs them in its cache and a pass over memory
    /// would cost more. Codes never change.
    pub(crate) fn tiled(&self, desc: impl Operator) -> Op {
        let config = self.tiling(&desc);
        let mut op = desc.with(config);
        self.plan.tuning.apply(&mut op);
        let codes = matches!(&op, Op::GroupedGemm { desc, .. } if desc.format.is_some());
        if let Some(cpu) = op.gemm_mut().and_then(|gemm| gemm.family.cpu_mut()) {
            cpu.packed &= self.packs || codes;
        }
        op
    }
}

pub(crate) fn owned(names: Bind) -> Vec<(String, String)> {
    let owned = |(from, to): &(&str, &str)| (from.to_string(), to.to_string());
    names.iter().map(owned).collect()
}

pub(crate) fn borrowed(names: &[(String, String)]) -> Vec<(&str, &str)> {
    names.iter().map(|(a, b)| (&**a, &**b)).collect()
}
