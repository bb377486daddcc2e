//! The losses of a forward pass, and the way back through the router.

use super::{GateTopkBwdDesc, gate_topk_bwd};
use crate::KernelPlan;
use crate::layer::{Bind, Builder, TensorPlan, TensorRole, borrowed, constant, tensor};
use crate::ops::gate_topk::logits::backward_scratch;
use crate::ops::gate_topk::steps::kind_names;
use crate::ops::gate_topk::{Logits, WARP_EXPERTS};
use crate::ops::grouped_gemm::{dgrad, wgrad};
use crate::ops::{Op, Operator, TileMachine};
use moesaic_kernel::DType::{F32, I32, I64};
use moesaic_kernel::Size;
use moesaic_spec::{LayerSpec, LossKind, RouterInput, SharedGate};
use std::slice::from_ref;

/// Parameters whose tensors have another name, beside those of the router's kind.
const NAMES: [(&str, &str); 12] = [
    ("logits", "router.logits"),
    ("dlogits", "grad.router.logits"),
    ("noise_logits", "router.noise_logits"),
    ("dnoise_scale", "grad.router.noise_scale"),
    ("expert_scale", "router.expert_scale"),
    ("load", "router.load"),
    ("grad_expert_scale", "grad.router.expert_scale"),
    ("grad_topk_weights", "grad.topk_weights"),
    ("input_scale", "router.input_scale"),
    ("grad_input_scale", "grad.router.input_scale"),
    ("router_input", "router.input"),
    ("router_dx", "router.dx"),
];

/// Returns the tensors of the losses, and the scratch of their backward pass.
pub(crate) fn tensors(spec: &LayerSpec, machine: TileMachine) -> Vec<TensorPlan> {
    let Some(desc) = gate_topk_bwd(spec) else {
        return Vec::new();
    };
    let config = desc.tiling(machine);
    let experts = constant(desc.gate.experts);
    let tiles = Size::Tokens.ceil_div(config.tile_tokens as u64);
    let scratch = |name: &str, shape: &[Size]| tensor(name, F32, shape, TensorRole::Scratch);
    let per_tile = [tiles, experts.clone()];
    let mut list = vec![
        scratch("scale_parts", &per_tile),
        scratch("inverse_rms", &[Size::Tokens]),
    ];
    let of_formula = backward_scratch(&desc.gate).into_iter();
    list.extend(of_formula.map(|row| scratch(row.name, &[row.size])));
    list.extend(loss_tensors(&desc, &per_tile));
    list
}

fn loss_tensors(desc: &GateTopkBwdDesc, [tiles, experts]: &[Size; 2]) -> Vec<TensorPlan> {
    let sequences = match desc.sequence_length {
        Some(length) => Size::Tokens.ceil_div(length as u64),
        // Sequences named by ids may be as many as tokens.
        None => Size::Tokens,
    };
    let (sums, slopes) = (constant(desc.sums.len()), constant(desc.slopes.len()));
    let of = |name: &str, shape: [&Size; 2], role: TensorRole| {
        tensor(name, F32, &shape.map(Size::clone), role)
    };
    // The one block of `gate_losses_sum` keeps its sums in shared memory, which has no room for so
    // many experts, so they get a row of their own here.
    let spare = u64::from(desc.gate.experts > WARP_EXPERTS);
    let (pair, tokens) = (constant(2), Size::Tokens);
    let mut list = vec![
        tensor(
            "loss_parts",
            F32,
            &[tiles.clone() + spare, sums, experts.clone()],
            TensorRole::Scratch,
        ),
        of("token_parts", [tiles, &pair], TensorRole::Scratch),
        of("sequence_parts", [tiles, &pair], TensorRole::Scratch),
        of("loss_slopes", [&slopes, experts], TensorRole::Scratch),
        of(
            "sequence_slopes",
            [&sequences, experts],
            TensorRole::Scratch,
        ),
        tensor(
            "sequence_first",
            I32,
            from_ref(&tokens),
            TensorRole::Scratch,
        ),
        tensor("sequence_ids", I32, from_ref(&tokens), TensorRole::Input),
        tensor("global_counts", I64, from_ref(experts), TensorRole::Input),
        tensor("global_tokens", I64, &[constant(1)], TensorRole::Input),
    ];
    let outputs = desc.losses.iter().map(|loss| loss_name(loss.kind));
    list.extend(outputs.map(|name| tensor(&name, F32, &[constant(1)], TensorRole::Output)));
    list
}

fn loss_name(kind: LossKind) -> String {
    format!("loss.{}", kind.name())
}

impl Builder {
    /// Adds the auxiliary losses to the forward pass.
    pub(crate) fn losses(&mut self) {
        if self.plan.spec.losses.is_empty() {
            return;
        }
        if let Some(desc) = gate_topk_bwd(&self.plan.spec) {
            let kernel = self.kernel("gate_topk_bwd", desc);
            self.gate_steps(
                kernel,
                &["gate_losses", "gate_sequences", "gate_losses_sum"],
            );
        }
    }

    /// Adds the steps from the gradient of `topk_weights` to those of the router's tensors and to
    /// its part of dx.
    pub(crate) fn gate_bwd(&mut self) {
        if let Some(desc) = gate_topk_bwd(&self.plan.spec) {
            let logits = desc.gate.logits;
            let is_bwd = |kernel: &KernelPlan| matches!(kernel.op, Op::GateTopkBwd { .. });
            // One kernel has the entries of losses and of gradients, and with losses forward has
            // added it already.
            let known = self.plan.kernels.iter().position(is_bwd);
            let kernel = known.unwrap_or_else(|| self.kernel("gate_topk_bwd", desc));
            self.gate_steps(kernel, &["gate_topk_bwd", "gate_scale_bwd"]);
            self.gate_steps(kernel, logits.backward_symbols());
            if logits != Logits::None {
                // Forward keeps tokens and not what the router made of them, so this computes the
                // GEMMs' factor again.
                self.gate_steps(kernel, &["gate_input"]);
                self.router_gemms();
                // Second, because it adds to the `router.dx` that the GEMMs write.
                self.noise_bwd();
            }
            // In this order: `gate_rms_bwd` overwrites in place the gradient that the other reads.
            self.gate_steps(kernel, &["gate_input_scale_bwd", "gate_rms_bwd"]);
            // Forward multiplied tokens by random factors before the router took their root mean
            // square, so backward meets the factors last.
            self.draw_bwd();
        }
        self.shared_gates_bwd();
    }

    /// Adds a step for each of these entries that the kernel has.
    fn gate_steps(&mut self, kernel: usize, symbols: &[&str]) {
        let of_kind = kind_names(&self.plan.spec).flat_map(|(param, name)| {
            let grad = match param {
                "projected" => "dprojected".to_string(),
                weight => format!("grad_{weight}"),
            };
            [
                (param.to_string(), name.to_string()),
                (grad, format!("grad.{name}")),
            ]
        });
        let renamed = NAMES.map(|(from, to)| (from.to_string(), to.to_string()));
        let losses = self.plan.spec.losses.iter().map(|loss| {
            let name = loss_name(loss.kind);
            (name.replace(['.', '-'], "_"), name)
        });
        let given = [
            ("x", self.routed_tokens()),
            ("clean_logits", self.clean_logits()),
        ];
        let given = given.map(|(from, to)| (from.to_string(), to.to_string()));
        let names = renamed
            .into_iter()
            .chain(of_kind)
            .chain(given)
            .chain(losses);
        let names: Vec<(String, String)> = names.collect();
        for symbol in symbols {
            let mut entries = self.plan.kernels[kernel].entries.iter();
            if let Some(index) = entries.position(|entry| entry.symbol == *symbol) {
                self.step(kernel, index, &borrowed(&names));
            }
        }
    }

    /// Adds the GEMMs of the matrix that tokens are multiplied by: `router.dx` and the gradients of
    /// matrix and bias.
    fn router_gemms(&mut self) {
        let spec = self.plan.spec.clone();
        let Some(logits) = spec.logits() else {
            return;
        };
        let (matrix, width) = (logits.matrix, logits.width.size(&spec));
        let rows = &format!("grad.{}", logits.projected.unwrap_or("router.logits"));
        let (input, dtype) = match spec.router.input {
            RouterInput::Token => (self.routed_tokens(), spec.precision.activations),
            RouterInput::RmsScaled => ("router.input", F32),
        };
        let bias = spec.router.bias || logits.own_bias;
        let weight = format!("{matrix}.weight");
        let (grad, grad_bias) = (format!("grad.{weight}"), format!("grad.{matrix}.bias"));
        let wgrad = wgrad::router(&spec, width, bias, dtype);
        let factor = if wgrad.clears { "router.rows" } else { input };
        let bind: Bind = &[
            ("dup", rows),
            ("dup_map", rows),
            ("up", &weight),
            ("up_map", &weight),
            ("drows", "router.dx"),
            ("given", input),
            ("rows", factor),
            ("rows_map", factor),
            ("grad_up", &grad),
            ("grad_up_bias", &grad_bias),
        ];
        let dgrad = dgrad::router(&spec, width);
        self.launch("grouped_gemm_dgrad_router", dgrad, bind);
        self.launch("grouped_gemm_wgrad_router", wgrad, bind);
    }

    fn shared_gates_bwd(&mut self) {
        let spec = self.plan.spec.clone();
        for (i, shared) in spec.shared.iter().enumerate() {
            if shared.gate == SharedGate::None {
                continue;
            }
            // The weights alone, because `dispatch_bwd` adds the gate's part of `dx`.
            let dlogit = format!("shared.{i}.dlogit");
            let grad = format!("grad.shared.{i}.router.weight");
            let grad_bias = format!("grad.shared.{i}.router.bias");
            let bind: Bind = &[
                ("dup", &dlogit),
                ("dup_map", &dlogit),
                ("rows", "x"),
                ("rows_map", "x"),
                ("grad_up", &grad),
                ("grad_up_bias", &grad_bias),
            ];
            let desc = wgrad::shared_gate(&spec, i);
            self.launch(&format!("grouped_gemm_wgrad_gate_shared_{i}"), desc, bind);
        }
    }
}
