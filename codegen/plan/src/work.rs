//! The least work of a launch, arithmetic and bytes, for rooflines.

use crate::{LayerPlan, Role, Step, TensorPlan};
use std::collections::BTreeSet;

/// The least arithmetic and traffic of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Work {
    /// Floating-point operations; a multiply-add counts two.
    pub flops: f64,
    /// Bytes read and written, each tensor once; of weights only those of
    /// experts that can have rows.
    pub bytes: f64,
}

impl Work {
    /// Returns the work of a step of `plan` for `tokens` tokens, without drops; none if its grid is
    /// empty in such a call.
    ///
    /// # Panics
    ///
    /// When the step is not of this plan.
    pub fn of(plan: &LayerPlan, step: &Step, tokens: u64) -> Work {
        let Step::Launch(launch) = step;
        let op = &plan.kernels[launch.entry.kernel].op;
        if plan[launch.entry].launch.blocks(tokens) == 0 {
            return Work::default();
        }
        Work {
            flops: op.flops(plan.symbol(step), tokens as f64),
            bytes: bytes(plan, step, tokens),
        }
    }

    /// Returns the roofline on a machine of these rates.
    pub fn floor(&self, flops_per_second: f64, bytes_per_second: f64) -> Floor {
        let (compute, memory) = (self.flops / flops_per_second, self.bytes / bytes_per_second);
        Floor {
            seconds: compute.max(memory),
            compute_bound: compute >= memory,
        }
    }
}

/// The roofline of a [`Work`] on a machine: no kernel is faster.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Floor {
    /// The time.
    pub seconds: f64,
    /// Whether arithmetic bounds it, and not memory.
    pub compute_bound: bool,
}

impl std::ops::Add for Work {
    type Output = Work;
    fn add(self, rhs: Work) -> Work {
        Work {
            flops: self.flops + rhs.flops,
            bytes: self.bytes + rhs.bytes,
        }
    }
}

/// Returns the bytes of the step's tensors, each once.
fn bytes(plan: &LayerPlan, step: &Step, tokens: u64) -> f64 {
    // By name, because one tensor may stand behind two parameters, a pointer and a tensor map.
    let names: BTreeSet<&str> = plan.names(step).collect();
    let tensors = names.into_iter().filter_map(|name| plan.tensor(name));
    let bytes = tensors.map(|tensor| {
        let matrices = matches!(tensor.role, Role::Weight | Role::Packed);
        // A stack of matrices has three dimensions. A stack of biases has two, and counts as a
        // whole: it is a thousandth of the traffic.
        let stack = matrices && tensor.shape.len() > 2;
        let share = if stack {
            active(plan, tensor, tokens)
        } else {
            1.0
        };
        tensor.bytes(tokens) as f64 * share
    });
    bytes.sum()
}

/// Returns the share of a stack's matrices, one per expert, that can have rows at all.
fn active(plan: &LayerPlan, stack: &TensorPlan, tokens: u64) -> f64 {
    let experts = stack.shape[0].eval(tokens) as f64;
    let slots = tokens as f64 * plan.spec.shape.top_k as f64;
    // The most that can be active: every assignment goes to an expert of its own, until all have
    // one.
    (slots / experts).min(1.0)
}
