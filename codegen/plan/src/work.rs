//! What a launch must at least do: arithmetic and bytes, for rooflines.

use crate::{LayerPlan, Role, Step, TensorPlan};
use std::collections::BTreeSet;

/// Least arithmetic and traffic of one step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Work {
    /// Floating-point operations; a multiply-add counts two.
    pub flops: f64,
    /// Bytes read and written, each tensor once; of weights only those of
    /// experts that can have rows.
    pub bytes: f64,
}

impl Work {
    /// The work of a step of `plan` for `tokens` tokens, nothing dropped; none where it
    /// launches nothing, since another step is for so many.
    ///
    /// # Panics
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

    /// The least time in seconds on a machine of these rates, and whether
    /// arithmetic is what bounds it.
    pub fn floor(&self, flops_per_second: f64, bytes_per_second: f64) -> (f64, bool) {
        let (compute, memory) = (self.flops / flops_per_second, self.bytes / bytes_per_second);
        (compute.max(memory), compute >= memory)
    }
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

/// Bytes of the step's tensors, each once.
fn bytes(plan: &LayerPlan, step: &Step, tokens: u64) -> f64 {
    let names: BTreeSet<&str> = plan.names(step).collect();
    let tensors = names.into_iter().filter_map(|name| plan.tensor(name));
    let bytes = tensors.map(|tensor| {
        let matrices = matches!(tensor.role, Role::Weight | Role::Packed);
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

/// The share of a stack's matrices, one per expert, that can have rows at all.
fn active(plan: &LayerPlan, stack: &TensorPlan, tokens: u64) -> f64 {
    let experts = stack.shape[0].eval(tokens) as f64;
    let slots = tokens as f64 * plan.spec.shape.top_k as f64;
    (slots / experts).min(1.0)
}
