//! The steps from tokens to experts and weights, and the random draws of training.

use super::{GateTopkDesc, fused_shared_logits, gate_topk, noise_gate, shared_gate};
use crate::layer::{Bind, Builder, TensorPlan, TensorRole, constant, tensor};
use crate::ops::grouped_gemm::{dgrad, wgrad};
use crate::ops::route::{RouteDesc, Routed, gate_calls};
use crate::ops::{Operator, TileMachine};
use moesaic_kernel::DType::{self, F32, I32};
use moesaic_kernel::Size;
use moesaic_spec::{LayerSpec, RouterInput, SharedGate};

/// Parameters whose tensors have another name, beside [`kind_names`].
const NAMES: [(&str, &str); 18] = [
    ("logits", "router.logits"),
    ("clean_logits", "router.clean_logits"),
    ("noise_logits", "router.noise_logits"),
    ("router_x", "router.x"),
    ("router_dx", "router.dx"),
    ("noise_dx", "router.noise_dx"),
    ("dlogits", "grad.router.logits"),
    ("dnoise_logits", "grad.router.noise_logits"),
    ("dnoise_scale", "grad.router.noise_scale"),
    ("bias", "router.bias"),
    ("input_scale", "router.input_scale"),
    ("select_bias", "router.select_bias"),
    ("expert_scale", "router.expert_scale"),
    ("load", "router.load"),
    ("columns", "router.columns"),
    ("shared_weight", "shared.0.router.weight"),
    ("shared_bias", "shared.0.router.bias"),
    ("shared_logits", "shared.0.router.logits"),
];

/// Returns the parameters that the router's kind has, with their tensors.
pub(super) fn kind_names(
    spec: &LayerSpec,
) -> impl Iterator<Item = (&'static str, &'static str)> + use<> {
    let def = spec.router.kind.def();
    let projected = def.logits.and_then(|logits| logits.projected);
    let weights = def.weights().map(|weight| (weight.param, weight.name));
    weights.chain(projected.map(|name| ("projected", name)))
}

/// Returns the tensors between logits and ids of selections beyond top-k, and of training.
pub(crate) fn selection_tensors(
    spec: &LayerSpec,
    machine: TileMachine,
    training: bool,
) -> Vec<TensorPlan> {
    let Some(gate) = gate_topk(spec, training) else {
        return Vec::new();
    };
    let config = gate.tiling(machine);
    let (tokens, experts) = (Size::Tokens, constant(gate.experts));
    let per_expert = [tokens.clone(), experts.clone()];
    let tiles = Size::Tokens.ceil_div(config.logits_tile_tokens as u64);
    let parts = [tiles, constant(gate.experts + 1)];
    let x = [tokens.clone(), constant(gate.model_dim)];
    // Tensors that no step binds are left out, so without blocks any size will do.
    let block_tokens = gate.blocks().map_or(1, |blocks| blocks.tokens);
    let blocks = Size::Tokens.ceil_div(block_tokens as u64);
    vec![
        tensor("router.x", gate.activations, &x, TensorRole::Scratch),
        tensor("router.clean_logits", F32, &per_expert, TensorRole::Output),
        tensor("router.noise_logits", F32, &per_expert, TensorRole::Scratch),
        tensor(
            "router.columns",
            F32,
            std::slice::from_ref(&experts),
            TensorRole::Scratch,
        ),
        tensor("column_parts", F32, &parts, TensorRole::Scratch),
        tensor(
            "choice_keys",
            I32,
            &[experts.clone(), tokens],
            TensorRole::Scratch,
        ),
        tensor(
            "block_experts",
            I32,
            &[blocks, experts.clone()],
            TensorRole::Scratch,
        ),
        tensor(
            "choice_bounds",
            I32,
            &[experts, constant(2)],
            TensorRole::Scratch,
        ),
    ]
}

impl Builder {
    /// Adds the gate; returns the routing steps with decode kernels of their own, the scan
    /// included.
    pub(crate) fn gate(&mut self) -> Routed {
        let Some(desc) = self.gate_desc() else {
            return Routed::Nothing;
        };
        let rounds = desc.sinkhorn().unwrap_or(0);
        let whole = RouteDesc {
            gate: desc.clone(),
            scan: Some(self.scan_desc()),
        };
        let routed = self.route_decode("route", whole, &self.names());
        let op = self.tiled(desc.clone());
        let kernel = self.kernel_by("gate_topk", op, |symbol| gate_calls(routed, symbol));
        self.gate_step(kernel, "gate_draw", &[]);
        let x = self.routed_tokens();
        let logits = if desc.noisy() {
            "router.clean_logits"
        } else {
            "router.logits"
        };
        let projection = [("x", x), ("logits", logits)];
        self.gate_step(kernel, "gate_project", &projection);
        self.gate_step(kernel, "gate_logits", &projection);
        self.noise_logits(x);
        self.gate_step(kernel, "gate_noise", &[]);
        self.gate_step(kernel, "gate_sinkhorn_start", &[]);
        // Each half of a round needs sums over all tokens or all experts. Blocks cannot wait for
        // each other inside a launch, so every half is one.
        for _ in 0..rounds {
            self.gate_step(kernel, "gate_sinkhorn_rows", &[]);
            self.gate_step(kernel, "gate_sinkhorn_columns", &[]);
        }
        for symbol in ["gate_scores", "gate_choose", "gate_blocks", "gate_topk"] {
            self.gate_step(kernel, symbol, &[]);
        }
        routed
    }

    /// Adds the gate of a shared expert, unless it has none or the router computes it.
    pub(crate) fn shared_gate(&mut self, index: usize) {
        let spec = &self.plan.spec;
        let fused_shared = index == 0 && self.fused_shared_logits() > 0;
        if fused_shared || spec.shared[index].gate == SharedGate::None {
            return;
        }
        let desc = shared_gate(spec, index);
        let name = |part: &str| format!("shared.{index}.router.{part}");
        let (weight, bias, logits) = (name("weight"), name("bias"), name("logits"));
        let bind = [("weight", &*weight), ("bias", &*bias), ("logits", &*logits)];
        let decode = format!("route_shared_{index}");
        let logits = RouteDesc {
            gate: desc.clone(),
            scan: None,
        };
        let routed = self.route_decode(&decode, logits, &bind);
        let (name, op) = (format!("gate_topk_shared_{index}"), self.tiled(desc));
        let kernel = self.kernel_by(&name, op, |symbol| gate_calls(routed, symbol));
        self.launch_all(kernel, &bind);
    }

    /// Returns the tensor that the router reads.
    pub(crate) fn routed_tokens(&self) -> &'static str {
        if self.gate_desc().is_some_and(|gate| gate.draws_input()) {
            "router.x"
        } else {
            "x"
        }
    }

    /// Returns the tensor that losses take as logits without noise.
    pub(crate) fn clean_logits(&self) -> &'static str {
        if self.gate_desc().is_some_and(|gate| gate.noisy()) {
            "router.clean_logits"
        } else {
            "router.logits"
        }
    }

    /// Returns the gate of this pass.
    fn gate_desc(&self) -> Option<GateTopkDesc> {
        let gate = gate_topk(&self.plan.spec, self.trains())?;
        Some(GateTopkDesc {
            shared: self.fused_shared_logits(),
            ..gate
        })
    }

    /// Returns the logits of the first shared expert's gate that the router computes too: on GPUs,
    /// where that saves a launch.
    fn fused_shared_logits(&self) -> usize {
        match self.machine {
            TileMachine::Gpu(_) => fused_shared_logits(&self.plan.spec),
            TileMachine::Cpu(_) => 0,
        }
    }

    /// Returns all parameters whose tensors have another name.
    fn names(&self) -> Vec<(&'static str, &'static str)> {
        NAMES
            .into_iter()
            .chain(kind_names(&self.plan.spec))
            .collect()
    }

    /// Adds a step of this entry, if the kernel has it; `first` takes precedence over the names.
    fn gate_step(&mut self, kernel: usize, symbol: &str, first: Bind) {
        let mut entries = self.plan.kernels[kernel].entries.iter();
        if let Some(index) = entries.position(|entry| entry.symbol == symbol) {
            let bind: Vec<(&str, &str)> = first.iter().copied().chain(self.names()).collect();
            self.step(kernel, index, &bind);
        }
    }

    /// Adds the projection to the scale of learned noise.
    fn noise_logits(&mut self, x: &str) {
        let trains = self.trains();
        if let Some(desc) = noise_gate(&self.plan.spec).filter(|_| trains) {
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
    pub(crate) fn noise_bwd(&mut self) {
        let Some(desc) = noise_gate(&self.plan.spec) else {
            return;
        };
        let kernel = self.gate_kernel();
        self.gate_step(kernel, "gate_noise_bwd", &[]);
        let (input, dtype) = match desc.router.input {
            RouterInput::Token => (self.routed_tokens(), desc.activations),
            RouterInput::RmsScaled => ("router.input", DType::F32),
        };
        let (spec, experts) = (self.plan.spec.clone(), desc.experts);
        let wgrad = wgrad::router(&spec, experts, false, dtype);
        // Tokens without an expert may hold NaN. Their gradient is zero, but 0 · NaN is NaN, so the
        // kernel reads a copy with zeros in their place.
        let factor = if wgrad.clears { "router.rows" } else { input };
        let bind: Bind = &[
            ("dup", "grad.router.noise_logits"),
            ("dup_map", "grad.router.noise_logits"),
            ("up", "router.noise.weight"),
            ("up_map", "router.noise.weight"),
            ("drows", "router.noise_dx"),
            ("given", input),
            ("rows", factor),
            ("rows_map", factor),
            ("grad_up", "grad.router.noise.weight"),
        ];
        let dgrad = dgrad::router(&spec, experts);
        self.launch("grouped_gemm_dgrad_noise", dgrad, bind);
        self.launch("grouped_gemm_wgrad_noise", wgrad, bind);
        self.gate_step(kernel, "gate_noise_add", &[]);
    }

    /// Multiplies `router.dx` by the factors that tokens were multiplied by.
    pub(crate) fn draw_bwd(&mut self) {
        // Where nothing was drawn the gradient is that of `x` already.
        if self.routed_tokens() != "x" {
            let kernel = self.gate_kernel();
            self.gate_step(kernel, "gate_draw_bwd", &[]);
        }
    }

    fn gate_kernel(&self) -> usize {
        let mut kernels = self.plan.kernels.iter();
        // By name, because the gates of shared experts and of learned noise are the same operator.
        let found = kernels.position(|kernel| kernel.name == "gate_topk");
        found.expect("the forward pass has a gate")
    }
}
