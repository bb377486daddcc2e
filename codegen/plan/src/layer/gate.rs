//! From tokens to experts and weights, and what training draws on the way.

use super::{Bind, Builder};
use crate::desc::{self, GateTopkDesc};
use moesaic_kernel::DType;
use moesaic_spec::RouterInput;

/// Parameters that are called otherwise than their tensors.
const NAMES: [(&str, &str); 22] = [
    ("logits", "router.logits"),
    ("clean_logits", "router.clean_logits"),
    ("noise_logits", "router.noise_logits"),
    ("router_x", "router.x"),
    ("router_dx", "router.dx"),
    ("noise_dx", "router.noise_dx"),
    ("dlogits", "grad.router.logits"),
    ("dnoise_logits", "grad.router.noise_logits"),
    ("dnoise_scale", "grad.router.noise_scale"),
    ("weight", "router.weight"),
    ("bias", "router.bias"),
    ("input_scale", "router.input_scale"),
    ("projector_weight", "router.projector.weight"),
    ("projector_bias", "router.projector.bias"),
    ("projected", "router.projected"),
    ("similarity", "router.similarity"),
    ("temperature", "router.temperature"),
    ("select_bias", "router.select_bias"),
    ("expert_scale", "router.expert_scale"),
    ("table", "router.table"),
    ("load", "router.load"),
    ("columns", "router.columns"),
];

impl Builder {
    pub(super) fn gate(&mut self) {
        let Some(desc) = self.gate_desc() else {
            return;
        };
        let rounds = desc.sinkhorn().unwrap_or(0);
        let kernel = self.kernel("gate_topk", desc.clone());
        self.gate_step(kernel, "gate_draw", &[]);
        let x = self.routed_tokens();
        let logits = match desc.noisy() {
            true => "router.clean_logits",
            false => "router.logits",
        };
        let projection = [("x", x), ("logits", logits)];
        self.gate_step(kernel, "gate_project", &projection);
        self.gate_step(kernel, "gate_logits", &projection);
        self.noise_logits(x);
        self.gate_step(kernel, "gate_noise", &[]);
        self.gate_step(kernel, "gate_sinkhorn_start", &[]);
        for _ in 0..rounds {
            self.gate_step(kernel, "gate_sinkhorn_rows", &[]);
            self.gate_step(kernel, "gate_sinkhorn_columns", &[]);
        }
        for symbol in ["gate_scores", "gate_choose", "gate_topk"] {
            self.gate_step(kernel, symbol, &[]);
        }
    }

    /// The tensor that the router reads.
    pub(super) fn routed_tokens(&self) -> &'static str {
        match self.gate_desc().is_some_and(|gate| gate.draws_input()) {
            true => "router.x",
            false => "x",
        }
    }

    /// The tensor that losses take as logits without noise.
    pub(super) fn clean_logits(&self) -> &'static str {
        match self.gate_desc().is_some_and(|gate| gate.noisy()) {
            true => "router.clean_logits",
            false => "router.logits",
        }
    }

    /// The gate of this pass.
    fn gate_desc(&self) -> Option<GateTopkDesc> {
        desc::gate_topk(&self.plan.spec, self.trains())
    }

    /// A step of this entry, if the kernel has it; `first` wins over the names.
    fn gate_step(&mut self, kernel: usize, symbol: &str, first: Bind) {
        let mut entries = self.plan.kernels[kernel].entries.iter();
        if let Some(index) = entries.position(|entry| entry.symbol == symbol) {
            let bind: Vec<(&str, &str)> = first.iter().chain(&NAMES).copied().collect();
            self.step(kernel, index, &bind);
        }
    }

    /// The projection behind the scale of learned noise.
    fn noise_logits(&mut self, x: &str) {
        let trains = self.trains();
        if let Some(desc) = desc::noise_gate(&self.plan.spec).filter(|_| trains) {
            let kernel = self.kernel("gate_topk_noise", desc);
            let bind = [
                ("x", x),
                ("weight", "router.noise.weight"),
                ("logits", "router.noise_logits"),
            ];
            self.gate_step(kernel, "gate_logits", &bind);
        }
    }

    /// Adds the part of learned noise to `router.dx`.
    pub(super) fn noise_bwd(&mut self) {
        let Some(desc) = desc::noise_gate(&self.plan.spec) else {
            return;
        };
        let kernel = self.gate_kernel();
        self.gate_step(kernel, "gate_noise_bwd", &[]);
        let (input, dtype) = match desc.router.input {
            RouterInput::Token => (self.routed_tokens(), desc.activations),
            RouterInput::RmsScaled => ("router.input", DType::F32),
        };
        let bind: Bind = &[
            ("dup", "grad.router.noise_logits"),
            ("dup_map", "grad.router.noise_logits"),
            ("up", "router.noise.weight"),
            ("up_map", "router.noise.weight"),
            ("drows", "router.noise_dx"),
            ("rows", input),
            ("rows_map", input),
            ("grad_up", "grad.router.noise.weight"),
        ];
        let (spec, experts) = (self.plan.spec.clone(), desc.experts);
        let dgrad = desc::router_dgrad(&spec, experts);
        self.launch("grouped_gemm_dgrad_noise", dgrad, bind);
        let wgrad = desc::router_wgrad(&spec, experts, false, dtype);
        self.launch("grouped_gemm_wgrad_noise", wgrad, bind);
        self.gate_step(kernel, "gate_noise_add", &[]);
    }

    /// Multiplies `router.dx` by the factors that tokens were multiplied by.
    pub(super) fn draw_bwd(&mut self) {
        if self.routed_tokens() != "x" {
            let kernel = self.gate_kernel();
            self.gate_step(kernel, "gate_draw_bwd", &[]);
        }
    }

    fn gate_kernel(&self) -> usize {
        let mut kernels = self.plan.kernels.iter();
        let found = kernels.position(|kernel| kernel.name == "gate_topk");
        found.expect("the forward pass has a gate")
    }
}
