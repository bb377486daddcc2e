//! The GEMMs of a training layer alone, on any device, each held against the reference with
//! the very tensors that it read.

mod expected;

use crate::memory::{Given, Memory, Values};
use crate::plans::{only, planned, scan_tile_rows};
use crate::rows::Rows;
use crate::{Harness, accumulating};
use moesaic_kernel::{Access, DType, Param, Stem};
use moesaic_plan::{
    KernelPlan, LaunchStep, LayerPlan, Op, PlanOptions, Step, TensorPlan, Training,
};
use moesaic_reference::{Random, round_to};
use moesaic_spec::LayerSpec;
use std::collections::BTreeMap;

/// The backward GEMMs of a layer, and those whose pre-activations they start from.
pub struct BackwardGemms {
    /// With nothing but them.
    pub harness: Harness,
    tile_rows: usize,
    /// The size of made-up gradients.
    gradients: f64,
}

impl BackwardGemms {
    /// Those GEMMs that `wanted` chooses; `load` gets the plan with nothing else in it.
    pub fn new(
        spec: &LayerSpec,
        target: &str,
        wanted: impl Fn(&KernelPlan) -> bool,
        load: impl FnOnce(LayerPlan) -> Harness,
    ) -> BackwardGemms {
        let options = PlanOptions::training(Training::default());
        let plan = planned(spec, target.parse().unwrap(), &options);
        BackwardGemms {
            tile_rows: scan_tile_rows(&plan),
            gradients: 1.0,
            harness: load(only(plan, |kernel| trains(kernel) && wanted(kernel))),
        }
    }

    /// The same with gradients of another size.
    #[must_use]
    pub fn with_gradients(self, size: f64) -> BackwardGemms {
        BackwardGemms {
            gradients: size,
            ..self
        }
    }

    fn steps(&self) -> impl Iterator<Item = &LaunchStep> {
        self.harness.plan.all_steps().map(|Step::Launch(step)| step)
    }

    /// Runs the kernels one after the other: each reads what those before it wrote.
    pub fn check(&self, rows: &Rows) {
        let call = Call {
            rows,
            accumulate: rows.tokens % 2 == 1,
        };
        let memory = self.memory(self.steps(), &call);
        for step in self.steps() {
            self.check_step(step, &call, &memory);
        }
    }

    /// Runs each kernel alone from made-up values, gradients written and then added to.
    /// Returns everything that was written.
    pub fn check_alone(&self, rows: &Rows) -> Vec<Values> {
        let alone = |step, accumulate| {
            let call = Call { rows, accumulate };
            let memory = self.memory([step], &call);
            self.check_step(step, &call, &memory)
        };
        let steps = self.steps();
        steps
            .flat_map(|step| [false, true].map(|accumulate| alone(step, accumulate)))
            .collect()
    }

    /// Launches a step; returns what it wrote, by parameter.
    fn check_step(&self, step: &LaunchStep, call: &Call<'_>, memory: &Memory) -> Values {
        let harness = &self.harness;
        let values = |wanted: &dyn Fn(Access) -> bool| -> Values {
            let tensors = self.tensors(step).filter(|(_, access, _)| wanted(*access));
            tensors
                .map(|(param, _, name)| (param.to_string(), harness.read(memory, name)))
                .collect()
        };
        let given = values(&|access| call.reads(access));
        let tokens = call.rows.tokens;
        harness.launch(step, tokens, memory, &accumulating(call.accumulate));
        let got = values(&|access| access != Access::Read);
        expected::check(harness, step, call.rows, &given, &got);
        got
    }

    /// Parameters of a step with a tensor behind them, maps by the name of their tensor; what
    /// the kernel does with it, and its name in the plan.
    fn tensors<'a>(
        &'a self,
        step: &'a LaunchStep,
    ) -> impl Iterator<Item = (&'a str, Access, &'a str)> {
        let params = self.harness.plan[step.entry].params.iter();
        let params = params.filter_map(|param| Some((name(param), param.ty.tensor()?.1)));
        let names = step.tensors.iter().map(|&id| &*self.harness.plan[id].name);
        params
            .zip(names)
            .map(|((param, access), name)| (param, access, name))
    }

    /// What steps name: values of what they read before they write it, NaN elsewhere.
    fn memory<'a>(
        &'a self,
        steps: impl IntoIterator<Item = &'a LaunchStep>,
        call: &Call<'_>,
    ) -> Memory {
        let mut first = BTreeMap::new();
        for step in steps {
            for (_, access, name) in self.tensors(step) {
                first.entry(name).or_insert(access);
            }
        }
        self.harness.memory(call.rows.tokens, |tensor| {
            let access = *first.get(&*tensor.name)?;
            Some(if call.reads(access) {
                Given::First(self.given(call.rows, tensor))
            } else {
                Given::Nan
            })
        })
    }

    /// As many values as have a meaning.
    fn given(&self, rows: &Rows, tensor: &TensorPlan) -> Vec<f64> {
        let (shape, name) = (&self.harness.plan.spec.shape, &*tensor.name);
        if let Some(values) = rows.scanned(name, shape.experts, self.tile_rows) {
            return values;
        }
        if let Some(weight) = self.harness.weights.0.get(name) {
            return weight.data.clone();
        }
        let mut count = tensor.elements(rows.tokens as u64) as usize;
        if by_row(name) {
            count = count / (rows.tokens * shape.top_k).max(1) * rows.count();
        }
        let size = if ["dout", "dgate", "dup"].contains(&name) {
            self.gradients
        } else {
            1.0
        };
        random(name, tensor.dtype, count, size)
    }
}

/// How the kernels are called.
struct Call<'a> {
    rows: &'a Rows,
    /// Gradients of weights are added to what is there.
    accumulate: bool,
}

impl Call<'_> {
    /// Returns whether a kernel depends on what was in a tensor before.
    fn reads(&self, access: Access) -> bool {
        match access {
            Access::Read => true,
            Access::ReadWrite => self.accumulate,
            Access::Write => false,
        }
    }
}

/// Backward GEMMs, and of the forward pass those that keep something.
fn trains(kernel: &KernelPlan) -> bool {
    match &kernel.op {
        Op::GroupedGemm { desc, .. } => desc.keep,
        other => [Stem::GroupedGemmDgrad, Stem::GroupedGemmWgrad].contains(&other.stem()),
    }
}

/// The name of a parameter's tensor.
fn name(param: &Param) -> &str {
    param.name.strip_suffix("_map").unwrap_or(&param.name)
}

/// Returns whether a tensor has a row for each assignment: what is beyond them has no value.
fn by_row(name: &str) -> bool {
    let names = [
        "rows", "hidden", "gate_pre", "up_pre", "dout", "dgate", "dup", "drows",
    ];
    names.contains(&name)
}

/// The same values for a name every time.
fn random(name: &str, dtype: DType, count: usize, size: f64) -> Vec<f64> {
    let hash = |sum: u64, byte| sum.rotate_left(7) ^ u64::from(byte);
    let values = Random::new(name.bytes().fold(5, hash)).vec(count);
    let values = values.into_iter();
    values.map(|v| round_to(dtype, v * size)).collect()
}
