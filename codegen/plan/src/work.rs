//! What a launch must at least do: arithmetic and bytes, for rooflines.

use crate::KernelPlan;
use crate::desc::*;
use moesaic_kernel::Entry;

/// Least arithmetic and traffic of one launch.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Work {
    /// Floating-point operations; a multiply-add counts two.
    pub flops: f64,
    /// Bytes read and written, each tensor once; of weights only those of
    /// experts that can have rows.
    pub bytes: f64,
}

impl Work {
    /// The work of `entry` of `kernel` for `tokens` tokens, nothing dropped.
    pub fn of(kernel: &KernelPlan, entry: &Entry, tokens: u64) -> Work {
        Work {
            flops: flops(&kernel.desc, entry, tokens as f64),
            bytes: bytes(kernel, entry, tokens),
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

fn flops(desc: &KernelDesc, entry: &Entry, tokens: f64) -> f64 {
    match desc {
        KernelDesc::GateTopk(d) => match (entry.symbol.as_str(), d.logits) {
            ("gate_project", Logits::Cosine(p)) => 2.0 * tokens * (p * d.model_dim) as f64,
            ("gate_logits", Logits::Cosine(p)) => 2.0 * tokens * (p * d.experts) as f64,
            ("gate_logits", _) => 2.0 * tokens * (d.model_dim * d.experts) as f64,
            _ => tokens * (d.experts * 4) as f64,
        },
        KernelDesc::GroupedGemm(d) => {
            let matrices = if d.gated { 2.0 } else { 1.0 };
            2.0 * matrices * tokens * (d.top_k * d.inner * d.outer) as f64
        }
        KernelDesc::Combine(d) => 2.0 * tokens * (d.top_k * d.output_dim) as f64,
        KernelDesc::GroupedGemmDgrad(d) => {
            let matrices = if d.gated && d.half == Half::Up {
                2.0
            } else {
                1.0
            };
            2.0 * matrices * tokens * (d.top_k * d.inner * d.outer) as f64
        }
        KernelDesc::GroupedGemmWgrad(d) if entry.symbol.ends_with("_bias") => {
            tokens * (d.top_k * d.height) as f64
        }
        KernelDesc::GroupedGemmWgrad(d) => {
            let matrices = if d.gated { 2.0 } else { 1.0 };
            2.0 * matrices * tokens * (d.top_k * d.height * d.width) as f64
        }
        KernelDesc::GateTopkBwd(d) => tokens * (d.gate.experts * 4) as f64,
        KernelDesc::DispatchBwd(d) => tokens * (d.top_k * d.model_dim) as f64,
        KernelDesc::CombineBwd(_) | KernelDesc::ExpertScan(_) | KernelDesc::Dispatch(_) => 0.0,
    }
}

fn bytes(kernel: &KernelPlan, entry: &Entry, tokens: u64) -> f64 {
    let facts = Facts::of(&kernel.desc, tokens);
    let tensors = entry.params.iter().filter_map(|param| {
        let (dtype, _) = param.ty.tensor()?;
        Some(facts.elements(&param.shape) * dtype.size() as f64)
    });
    tensors.sum()
}

/// The values of the names that shapes of parameters use.
struct Facts {
    tokens: f64,
    slots: f64,
    /// Share of the experts that can have rows at all.
    active: f64,
    experts: f64,
}

impl Facts {
    fn of(desc: &KernelDesc, tokens: u64) -> Facts {
        let (top_k, experts) = match desc {
            KernelDesc::GateTopk(d) => (d.top_k, d.experts),
            KernelDesc::ExpertScan(d) => (d.top_k, d.experts),
            KernelDesc::Dispatch(d) => (d.top_k, d.experts),
            KernelDesc::GroupedGemm(d) => (d.top_k, d.experts),
            KernelDesc::Combine(d) => (d.top_k, d.experts),
            KernelDesc::CombineBwd(d) => (d.top_k, d.experts),
            KernelDesc::GroupedGemmDgrad(d) => (d.top_k, d.experts),
            KernelDesc::GroupedGemmWgrad(d) => (d.top_k, d.experts),
            KernelDesc::GateTopkBwd(d) => (d.gate.top_k, d.gate.experts),
            KernelDesc::DispatchBwd(d) => (d.top_k, d.experts),
        };
        let slots = tokens as f64 * top_k as f64;
        let active = (slots / experts as f64).min(1.0);
        Facts {
            tokens: tokens as f64,
            slots,
            active,
            experts: experts as f64,
        }
    }

    /// Elements of a shape such as `[tokens, 128]`.
    fn elements(&self, shape: &str) -> f64 {
        let sizes = shape.trim_matches(['[', ']']).split(", ");
        let product: f64 = sizes.clone().map(|size| self.size(size)).product();
        // A stack of three sizes is one matrix per expert.
        if sizes.count() == 3 && self.experts > 1.0 {
            product * self.active
        } else {
            product
        }
    }

    fn size(&self, name: &str) -> f64 {
        match name {
            "tokens" => self.tokens,
            "rows" | "tokens*top_k" => self.slots,
            "tiles" | "chunks" => 1.0,
            number => number.parse().unwrap_or(1.0),
        }
    }
}
