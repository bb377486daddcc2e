//! The norms of a pass: of what routed experts read, of each output, of their sum.

use super::{RmsNormBwdDesc, RmsNormDesc};
use crate::layer::{Bind, Builder};
use crate::ops::grouped_gemm::has_empty_tokens;
use moesaic_spec::LayerSpec;

/// The name of the kernel that normalises what routed experts read.
pub(crate) const INPUT_NORM: &str = "rms_norm_input";

/// The tensors around the norm of the routed experts' sum.
const OF_SUM: Bind = &[
    ("x", "latent.sum"),
    ("weight", "latent.norm.weight"),
    ("y", "latent.normed"),
    ("dy", "latent.dnormed"),
    ("inverse_rms", "latent.inverse_rms"),
    ("dx", "latent.dsum"),
    ("grad_weight", "grad.latent.norm.weight"),
];

/// The tensors around the norm of what routed experts read.
const OF_INPUT: Bind = &[
    ("x", "latent.projected"),
    ("weight", "latent.input_norm.weight"),
    ("y", "latent.x"),
    ("dy", "latent.dx"),
    ("inverse_rms", "latent.inverse_rms"),
    ("dx", "latent.dprojected"),
    ("grad_weight", "grad.latent.input_norm.weight"),
];

/// The tensors around the norm of experts' outputs. Its backward pass multiplies by the weights of
/// rows, so the experts behind it do not.
const OF_OUTPUT: Bind = &[
    ("x", "out"),
    ("weight", "expert_norm.weight"),
    ("y", "normed"),
    ("dy", "dnormed"),
    ("factors", "expert_norm.factors"),
    ("dweight_parts", "expert_norm.dweights"),
    ("dx", "dout"),
    ("grad_weight", "grad.expert_norm.weight"),
];

/// Returns a norm of tokens' rows in the width of the routed experts.
fn of_tokens(spec: &LayerSpec, eps: f64) -> RmsNormDesc {
    RmsNormDesc {
        width: spec.expert_input_dim(),
        activations: spec.precision.activations,
        eps,
        experts: 0,
        top_k: 0,
    }
}

/// Returns the norm of the routed experts' sum, in a layer that has one.
fn of_sum(spec: &LayerSpec) -> Option<RmsNormDesc> {
    let eps = spec.latent.as_ref()?.norm_eps?;
    Some(of_tokens(spec, eps))
}

/// Returns the norm of what routed experts read, in a layer that has one.
fn of_input(spec: &LayerSpec) -> Option<RmsNormDesc> {
    let eps = spec.latent.as_ref()?.input_norm_eps?;
    Some(of_tokens(spec, eps))
}

/// Returns the norm of experts' outputs, in a layer that has one.
fn of_output(spec: &LayerSpec) -> Option<RmsNormDesc> {
    Some(RmsNormDesc {
        width: spec.expert_output_dim(),
        activations: spec.precision.activations,
        eps: spec.experts.output_norm_eps?,
        experts: spec.shape.experts,
        top_k: spec.shape.top_k,
    })
}

/// Returns the backward pass of a norm.
fn back(norm: RmsNormDesc, clears: bool) -> RmsNormBwdDesc {
    RmsNormBwdDesc {
        width: norm.width,
        activations: norm.activations,
        eps: norm.eps,
        experts: norm.experts,
        top_k: norm.top_k,
        clears,
    }
}

/// Returns the tensor that the projection behind the routed experts reads, and its gradient.
pub(crate) fn read_by_projection(spec: &LayerSpec) -> [&'static str; 2] {
    match of_sum(spec) {
        Some(_) => ["latent.normed", "latent.dnormed"],
        None => ["latent.sum", "latent.dsum"],
    }
}

impl Builder {
    /// Adds the norm of the routed experts' sum, if the layer has one.
    pub(crate) fn latent_norm(&mut self) {
        if let Some(desc) = of_sum(&self.plan.spec) {
            self.launch("rms_norm", desc, OF_SUM);
        }
    }

    /// Adds the steps from the gradient of the normalised sum to that of the sum.
    pub(crate) fn latent_norm_bwd(&mut self) {
        if let Some(norm) = of_sum(&self.plan.spec) {
            // A token without experts has a sum of zeros, so it needs no condition.
            self.launch("rms_norm_bwd", back(norm, false), OF_SUM);
        }
    }

    /// Returns the tensor that the projection before the routed experts writes, and its gradient.
    pub(crate) fn written_by_projection(&self) -> [&'static str; 2] {
        match of_input(&self.plan.spec) {
            Some(_) => ["latent.projected", "latent.dprojected"],
            None => ["latent.x", "latent.dx"],
        }
    }

    /// Adds the norm of what routed experts read, if the layer has one.
    pub(crate) fn input_norm(&mut self) {
        if let Some(desc) = of_input(&self.plan.spec) {
            self.launch(INPUT_NORM, desc, OF_INPUT);
        }
    }

    /// Adds the steps from the gradient of what routed experts read to that of the projection.
    pub(crate) fn input_norm_bwd(&mut self) {
        let spec = &self.plan.spec;
        if let Some(norm) = of_input(spec) {
            let clears = has_empty_tokens(spec);
            self.launch("rms_norm_bwd_input", back(norm, clears), OF_INPUT);
        }
    }

    /// Returns the names that the kernels of sums have for the rows of experts: the normalised ones
    /// and their gradients, where the layer normalises them.
    pub(crate) fn normed_rows(&self) -> Bind<'static> {
        match of_output(&self.plan.spec) {
            Some(_) => &[
                ("out", "normed"),
                ("dout", "dnormed"),
                ("dweight_parts", "expert_norm.dweights"),
            ],
            None => &[],
        }
    }

    /// Adds the norm of experts' outputs, if the layer has one.
    pub(crate) fn expert_norm(&mut self) {
        if let Some(desc) = of_output(&self.plan.spec) {
            self.launch("rms_norm_experts", desc, OF_OUTPUT);
        }
    }

    /// Adds the steps from the gradients of normalised rows to those of experts' outputs and of the
    /// rows' weights.
    pub(crate) fn expert_norm_bwd(&mut self) {
        if let Some(norm) = of_output(&self.plan.spec) {
            self.launch("rms_norm_bwd_experts", back(norm, false), OF_OUTPUT);
        }
    }
}
