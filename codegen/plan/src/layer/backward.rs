//! The backward pass, written down.

use super::tensors::{constant, tensor};
use super::{Bind, Builder, Pass, Recompute, Role, Step, TensorPlan, borrowed, latent, owned};
use crate::desc::{self, Half};
use crate::{Op, Operator};
use moesaic_kernel::DType::{self, F32};
use moesaic_kernel::Size;
use moesaic_spec::{LayerSpec, RouterInput, RouterKind, SharedGate, canonical_tensors};

/// The tensors that only a backward pass names.
pub(super) fn tensors(spec: &LayerSpec) -> Vec<TensorPlan> {
    let mut list: Vec<TensorPlan> = canonical_tensors(spec)
        .into_iter()
        .filter(|t| t.dtype.is_float())
        .map(|t| {
            let shape: Vec<Size> = t.shape.iter().map(|&n| constant(n)).collect();
            let name = format!("grad.{}", t.name);
            tensor(&name, F32, &shape, Role::WeightGradient)
        })
        .collect();
    list.extend(token_tensors(spec));
    list.extend(latent_tensors(spec));
    list.extend(row_tensors(spec));
    for index in 0..spec.shared.len() {
        list.extend(shared_tensors(spec, index));
    }
    list
}

fn token_tensors(spec: &LayerSpec) -> Vec<TensorPlan> {
    let (tokens, k) = (Size::Tokens, constant(spec.shape.top_k));
    let (model, output) = (constant(spec.shape.model_dim), constant(spec.output_dim()));
    let activations = spec.precision.activations;
    let of = |name: &str, dtype: DType, width: Size, role: Role| {
        tensor(name, dtype, &[tokens.clone(), width], role)
    };
    let experts = constant(spec.routed_experts());
    let projection = constant(spec.router.projection_dim.unwrap_or(1));
    vec![
        of("dy", activations, output, Role::OutputGradient),
        of("dx", activations, model.clone(), Role::InputGradient),
        of("grad.topk_weights", F32, k, Role::InputGradient),
        of(
            "grad.router.logits",
            F32,
            experts.clone(),
            Role::InputGradient,
        ),
        of("grad.router.projected", F32, projection, Role::Scratch),
        of("router.input", F32, model.clone(), Role::Scratch),
        of("router.dx", F32, model.clone(), Role::Scratch),
        of("router.noise_dx", F32, model, Role::Scratch),
        of(
            "grad.router.noise_logits",
            F32,
            experts.clone(),
            Role::Scratch,
        ),
        of("grad.router.noise_scale", F32, experts, Role::Scratch),
    ]
}

fn latent_tensors(spec: &LayerSpec) -> [TensorPlan; 4] {
    [
        ("drouted", spec.output_dim()),
        ("latent.dsum", spec.expert_output_dim()),
        ("latent.dx", spec.expert_input_dim()),
        ("latent.drows", spec.shape.model_dim),
    ]
    .map(|(name, width)| {
        let shape = [Size::Tokens, constant(width)];
        tensor(name, spec.precision.activations, &shape, Role::Scratch)
    })
}

fn row_tensors(spec: &LayerSpec) -> Vec<TensorPlan> {
    let rows = Size::Tokens * spec.shape.top_k as u64;
    let shape = &spec.shape;
    let of = |name: &str, dtype: DType, width: usize| {
        tensor(name, dtype, &[rows.clone(), constant(width)], Role::Scratch)
    };
    let activations = spec.precision.activations;
    vec![
        of("dout", activations, spec.expert_output_dim()),
        of("dgate", activations, shape.hidden_dim),
        of("dup", activations, shape.hidden_dim),
        of("drows", activations, spec.expert_input_dim()),
    ]
}

fn shared_tensors(spec: &LayerSpec, index: usize) -> Vec<TensorPlan> {
    let hidden = spec.shared[index].hidden_dim;
    let of = |part: &str, dtype: DType, width: usize| {
        let name = format!("shared.{index}.{part}");
        tensor(
            &name,
            dtype,
            &[Size::Tokens, constant(width)],
            Role::Scratch,
        )
    };
    let activations = spec.precision.activations;
    vec![
        of("dgate", activations, hidden),
        of("dup", activations, hidden),
        of("drows", activations, spec.shape.model_dim),
        of("weight", F32, 1),
        of("dlogit", F32, spec.shared[index].gate.logits()),
    ]
}

/// The kernels behind the sums of a forward pass.
struct CombineBwd {
    routed: usize,
    /// Of shared experts with gates that are added later.
    later: Option<usize>,
}

impl Builder {
    /// Writes down the backward pass of what the forward pass did.
    pub(super) fn backward(&mut self, recompute: Recompute) {
        self.pass = Pass::Backward;
        let mut has_rows = self.recompute(recompute);
        let combine = self.combine_bwd();
        self.expert_bwd(None, &mut has_rows);
        self.shared_bwd(&combine);
        self.gate_bwd();
        self.dispatch_bwd();
    }

    /// The backward pass without the routed experts; where they belong.
    pub(super) fn backward_around(&mut self) -> usize {
        self.pass = Pass::Backward;
        let combine = self.combine_bwd();
        let at = self.plan.backward.len();
        self.shared_bwd(&combine);
        self.gate_bwd();
        self.dispatch_bwd();
        at
    }

    /// Shared experts, and then the weights of all.
    fn shared_bwd(&mut self, combine: &CombineBwd) {
        for index in 0..self.plan.spec.shared.len() {
            self.expert_bwd(Some(index), &mut true);
        }
        self.combine_bwd_weights(combine.routed);
        if let Some(kernel) = combine.later {
            self.combine_bwd_weights(kernel);
        }
    }

    /// Does again what was not kept; says whether `rows` are in place then.
    fn recompute(&mut self, recompute: Recompute) -> bool {
        if recompute == Recompute::None {
            return false;
        }
        let external = self.plan.spec.router.kind == RouterKind::External;
        // A caller's weights were renormalised where they lie: only once.
        let once = external && self.plan.spec.capacity.renormalize_after_drop;
        let routing = recompute == Recompute::All && !once;
        let mut has_rows = false;
        for index in 0..self.plan.steps.len() {
            let step = self.plan.steps[index].clone();
            let Step::Launch(launch) = &step;
            let kernel = &self.plan.kernels[launch.entry.kernel];
            let again = match &kernel.op {
                op if op.routes() => routing,
                Op::Dispatch { .. } => {
                    has_rows = true;
                    true
                }
                _ => kernel.name == latent::DOWN,
            };
            if again {
                self.plan.backward.push(step);
            }
        }
        self.product("grouped_gemm_up_again", Half::Up, None, true);
        for index in 0..self.plan.spec.shared.len() {
            let name = format!("grouped_gemm_up_again_shared_{index}");
            self.product(&name, Half::Up, Some(index), true);
        }
        has_rows
    }

    fn combine_bwd(&mut self) -> CombineBwd {
        let spec = &self.plan.spec;
        let shared = self.shared_parts();
        let desc = desc::grouped_gemm_dgrad(spec, Half::Down);
        let parts = self.parts(&desc);
        let routed = desc::combine_bwd(spec, parts, &shared);
        let gated = spec
            .shared
            .iter()
            .any(|shared| shared.gate != SharedGate::None);
        let later =
            (gated && desc::adds_later(spec)).then(|| desc::combine_bwd_later(spec, &shared));
        let rows = Size::Tokens * spec.shape.top_k as u64;
        let mut columns = vec![("dweight_parts".to_string(), rows, parts)];
        for (i, &parts) in shared.iter().enumerate() {
            columns.push((format!("shared.{i}.dweight_parts"), Size::Tokens, parts));
        }
        for (name, rows, parts) in columns {
            let shape = [rows, constant(parts)];
            self.plan
                .tensors
                .push(tensor(&name, F32, &shape, Role::Scratch));
        }
        let later = later.map(|desc| self.combine_bwd_first("combine_bwd_later", desc));
        self.latent_up_bwd();
        CombineBwd {
            routed: self.combine_bwd_first("combine_bwd", routed),
            later,
        }
    }

    /// All entries but the last, which needs what experts leave.
    fn combine_bwd_first(&mut self, name: &str, desc: desc::CombineBwdDesc) -> usize {
        let kernel = self.kernel(name, desc);
        let bind = self.combine_bwd_names(kernel);
        for index in 0..self.plan.kernels[kernel].entries.len() - 1 {
            self.step(kernel, index, &borrowed(&bind));
        }
        kernel
    }

    /// Parameters of `combine_bwd`. Where shared experts are added later, the
    /// kernel of the routed ones has no other tokens than theirs.
    fn combine_bwd_names(&self, kernel: usize) -> Vec<(String, String)> {
        let mut names = self.shared_names(0);
        if self.plan.kernels[kernel].name == "combine_bwd" {
            names.extend(owned(&self.around()));
        }
        names
    }

    fn combine_bwd_weights(&mut self, kernel: usize) {
        let mut bind = self.combine_bwd_names(kernel);
        let mut add = |from: &str, to: &str| bind.push((from.to_string(), to.to_string()));
        add("down_bias", "experts.down.bias");
        add("grad_topk_weights", "grad.topk_weights");
        let last = self.plan.kernels[kernel].entries.len() - 1;
        self.step(kernel, last, &borrowed(&bind));
    }

    /// Products of the routed experts, or of a shared one.
    fn expert_bwd(&mut self, shared: Option<usize>, has_rows: &mut bool) {
        let spec = self.plan.spec.clone();
        let suffix = shared.map_or(String::new(), |i| format!("_shared_{i}"));
        let names = self.expert_names(shared);
        let bind = borrowed(&names);
        let dgrad = |half| match shared {
            None => desc::grouped_gemm_dgrad(&spec, half),
            Some(i) => desc::shared_dgrad(&spec, half, i),
        };
        let wgrad = |half| match shared {
            None => desc::grouped_gemm_wgrad(&spec, half),
            Some(i) => desc::shared_wgrad(&spec, half, i),
        };
        let name = |stem: &str| format!("grouped_gemm_{stem}{suffix}");
        self.launch(&name("dgrad_down"), dgrad(Half::Down), &bind);
        self.launch(&name("wgrad_down"), wgrad(Half::Down), &bind);
        self.launch(&name("dgrad_up"), dgrad(Half::Up), &bind);
        let up = wgrad(Half::Up);
        if shared.is_none() && !up.tiling(self.machine).gather() && !*has_rows {
            self.dispatch_again();
            *has_rows = true;
        }
        self.launch(&name("wgrad_up"), up, &bind);
    }

    /// Rows were the forward pass's own: they are copied once more.
    fn dispatch_again(&mut self) {
        let is_dispatch = |kernel: &crate::KernelPlan| matches!(kernel.op, Op::Dispatch { .. });
        match self.plan.kernels.iter().position(is_dispatch) {
            Some(kernel) => self.step(kernel, 0, &self.around()),
            None => {
                let desc = desc::dispatch(&self.plan.spec);
                self.launch("dispatch", desc, &self.around());
            }
        }
    }

    /// The projection to logits, or before the cosine: `router.dx` and the
    /// gradients of matrix and bias.
    pub(super) fn router_products(&mut self) {
        let spec = self.plan.spec.clone();
        let (matrix, rows, width) = match (spec.router.kind, spec.router.projection_dim) {
            (RouterKind::Cosine, Some(width)) => {
                ("router.projector", "grad.router.projected", width)
            }
            _ => ("router", "grad.router.logits", spec.routed_experts()),
        };
        let (input, dtype) = match spec.router.input {
            RouterInput::Token => (self.routed_tokens(), spec.precision.activations),
            RouterInput::RmsScaled => ("router.input", F32),
        };
        let bias = spec.router.bias || spec.router.kind == RouterKind::Cosine;
        let weight = format!("{matrix}.weight");
        let (grad, grad_bias) = (format!("grad.{weight}"), format!("grad.{matrix}.bias"));
        let bind: Bind = &[
            ("dup", rows),
            ("dup_map", rows),
            ("up", &weight),
            ("up_map", &weight),
            ("drows", "router.dx"),
            ("rows", input),
            ("rows_map", input),
            ("grad_up", &grad),
            ("grad_up_bias", &grad_bias),
        ];
        let dgrad = desc::router_dgrad(&spec, width);
        self.launch("grouped_gemm_dgrad_router", dgrad, bind);
        let wgrad = desc::router_wgrad(&spec, width, bias, dtype);
        self.launch("grouped_gemm_wgrad_router", wgrad, bind);
    }

    pub(super) fn shared_gates_bwd(&mut self) {
        let spec = self.plan.spec.clone();
        for (i, shared) in spec.shared.iter().enumerate() {
            if shared.gate == SharedGate::None {
                continue;
            }
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
            let desc = desc::shared_gate_wgrad(&spec, i);
            self.launch(&format!("grouped_gemm_wgrad_gate_shared_{i}"), desc, bind);
        }
    }

    fn dispatch_bwd(&mut self) {
        let parts = self.shared_parts();
        let desc = desc::dispatch_bwd(&self.plan.spec, &parts);
        let mut bind = self.shared_names(0);
        bind.push(("router_dx".to_string(), "router.dx".to_string()));
        bind.extend(owned(&self.around()));
        self.launch("dispatch_bwd", desc, &borrowed(&bind));
        self.latent_down_bwd();
        self.dispatch_bwd_later(&parts);
    }

    /// Column tiles of a product that leaves parts of the weight's gradient.
    fn parts(&self, desc: &desc::GroupedGemmDgradDesc) -> usize {
        desc.outer.div_ceil(desc.tiling(self.machine).tile_columns)
    }

    fn shared_parts(&self) -> Vec<usize> {
        let spec = &self.plan.spec;
        let indices = 0..spec.shared.len();
        indices
            .map(|i| self.parts(&desc::shared_dgrad(spec, Half::Down, i)))
            .collect()
    }

    /// Parameters of `combine_bwd` and `dispatch_bwd` that belong to shared
    /// experts, the first of which is the parameters' `first`.
    pub(super) fn shared_names(&self, first: usize) -> Vec<(String, String)> {
        let parts = [
            ("logit", "router.logits"),
            ("weight", "weight"),
            ("parts", "dweight_parts"),
            ("down_bias", "down.bias"),
            ("dlogit", "dlogit"),
            ("drows", "drows"),
            ("router", "router.weight"),
        ];
        let indices = 0..self.plan.spec.shared.len();
        let names = indices.flat_map(|i| {
            let at = first + i;
            parts.map(|(from, to)| (format!("shared_{at}_{from}"), format!("shared.{i}.{to}")))
        });
        names.collect()
    }
}
