//! The steps of the backward pass.

use super::builder::Pass;
use super::tensor::{TensorPlan, TensorRole, constant, tensor};
use super::{Builder, Recompute, Step};
use crate::Op;
use crate::ops::combine::CombineBwd;
use crate::ops::grouped_gemm::{ExpertGemm, LATENT_DOWN, dgrad};
use crate::ops::rms_norm::INPUT_NORM;
use moesaic_kernel::DType::{self, F32};
use moesaic_kernel::Size;
use moesaic_spec::{Chooser, LayerSpec, RouterInput, canonical_tensors, gradient_dtype};

/// Returns the tensors that only a backward pass names.
pub(super) fn tensors(spec: &LayerSpec) -> Vec<TensorPlan> {
    let mut list: Vec<TensorPlan> = canonical_tensors(spec)
        .into_iter()
        // A routing table holds ids, which have no gradient.
        .filter(|t| t.dtype.is_float())
        .map(|t| {
            let shape: Vec<Size> = t.shape.iter().map(|&n| constant(n)).collect();
            let dtype = gradient_dtype(spec, &t.name);
            let name = format!("grad.{}", t.name);
            tensor(&name, dtype, &shape, TensorRole::WeightGradient)
        })
        .collect();
    list.extend(token_tensors(spec));
    list.extend(latent_tensors(spec));
    let tokens = std::slice::from_ref(&Size::Tokens);
    list.push(tensor(
        "latent.inverse_rms",
        F32,
        tokens,
        TensorRole::Scratch,
    ));
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
    let of = |name: &str, dtype: DType, width: Size, role: TensorRole| {
        tensor(name, dtype, &[tokens.clone(), width], role)
    };
    // `router.rows` is a copy of what the router read, and an `rms-scaled` router read f32.
    let router = match spec.router.input {
        RouterInput::Token => activations,
        RouterInput::RmsScaled => F32,
    };
    let experts = constant(spec.routed_experts());
    // Without a projection no step names its tensor, so any width will do.
    let projection = constant(spec.logits().map_or(1, |logits| logits.width.size(spec)));
    vec![
        of("dy", activations, output, TensorRole::OutputGradient),
        of("dx", activations, model.clone(), TensorRole::InputGradient),
        of("grad.topk_weights", F32, k, TensorRole::InputGradient),
        of(
            "grad.router.logits",
            F32,
            experts.clone(),
            TensorRole::InputGradient,
        ),
        of(
            "grad.router.projected",
            F32,
            projection,
            TensorRole::Scratch,
        ),
        of("router.input", F32, model.clone(), TensorRole::Scratch),
        of("router.rows", router, model.clone(), TensorRole::Scratch),
        of("router.dx", F32, model.clone(), TensorRole::Scratch),
        of("router.noise_dx", F32, model, TensorRole::Scratch),
        of(
            "grad.router.noise_logits",
            F32,
            experts.clone(),
            TensorRole::Scratch,
        ),
        of("grad.router.noise_scale", F32, experts, TensorRole::Scratch),
    ]
}

fn latent_tensors(spec: &LayerSpec) -> [TensorPlan; 7] {
    [
        ("drouted", spec.output_dim()),
        ("latent.dsum", spec.expert_output_dim()),
        ("latent.dnormed", spec.expert_output_dim()),
        ("latent.dx", spec.expert_input_dim()),
        ("latent.dprojected", spec.expert_input_dim()),
        ("latent.drows", spec.shape.model_dim),
        ("latent.rows", spec.shape.model_dim),
    ]
    .map(|(name, width)| {
        let shape = [Size::Tokens, constant(width)];
        tensor(
            name,
            spec.precision.activations,
            &shape,
            TensorRole::Scratch,
        )
    })
}

fn row_tensors(spec: &LayerSpec) -> Vec<TensorPlan> {
    let rows = Size::Tokens * spec.shape.top_k as u64;
    let shape = &spec.shape;
    let of = |name: &str, dtype: DType, width: usize| {
        tensor(
            name,
            dtype,
            &[rows.clone(), constant(width)],
            TensorRole::Scratch,
        )
    };
    let activations = spec.precision.activations;
    vec![
        of("dout", activations, spec.expert_output_dim()),
        of("dgate", activations, shape.hidden_dim),
        of("dup", activations, shape.hidden_dim),
        of("drows", activations, spec.expert_input_dim()),
        of("dnormed", activations, spec.expert_output_dim()),
        of("expert_norm.factors", F32, 2),
        of("expert_norm.dweights", F32, 1),
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
            TensorRole::Scratch,
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

impl Builder {
    /// Adds the backward pass of the forward pass.
    pub(super) fn backward(&mut self, recompute: Recompute) {
        self.pass = Pass::Backward;
        let mut has_rows = self.recompute(recompute);
        let combine = self.combine_bwd();
        self.expert_bwd(None, &mut has_rows);
        self.shared_bwd(&combine);
        self.gate_bwd();
        // Last, because it sums what all the others left for each token, the router included.
        self.dispatch_bwd();
    }

    /// Adds the backward pass of experts alone, whose rows are in place.
    pub(crate) fn backward_of_experts(&mut self, recompute: Recompute) {
        self.pass = Pass::Backward;
        let parts = self.parts(&dgrad::routed(&self.plan.spec, ExpertGemm::Down));
        let shape = [Size::Tokens, constant(parts)];
        // It goes back to the tokens' rank, which needs it for the gradient of the router's
        // weights.
        let parts = tensor("dweight_parts", F32, &shape, TensorRole::InputGradient);
        self.plan.tensors.push(parts);
        self.recompute(recompute);
        self.expert_bwd(None, &mut true);
    }

    /// Adds the shared experts, and then the weights of all.
    pub(super) fn shared_bwd(&mut self, combine: &CombineBwd) {
        // The rows of a shared expert are the tokens, so they are always in place (`true`).
        if self.sharded.is_none() {
            self.every_shared(|builder, index| builder.expert_bwd(Some(index), &mut true));
        }
        self.combine_bwd_weights(combine.routed);
        if let Some(kernel) = combine.later {
            self.combine_bwd_weights(kernel);
        }
    }

    /// Adds the recomputation of what was not kept; returns whether `rows` are in place then.
    pub(super) fn recompute(&mut self, recompute: Recompute) -> bool {
        if recompute == Recompute::None {
            return false;
        }
        let external = self.plan.spec.router.kind.chooser() == Chooser::Caller;
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
                // Experts on other ranks keep the rows that they got.
                Op::Dispatch { .. } => {
                    has_rows = !self.is_around();
                    has_rows
                }
                // Dispatch reads what this projection makes, so it runs again with it instead of
                // being kept. So does the norm behind it.
                _ => [LATENT_DOWN, INPUT_NORM].contains(&kernel.name.as_str()),
            };
            if again {
                self.plan.backward.push(step);
            }
        }
        // Experts on other ranks recompute their own pre-activations.
        if !self.is_around() {
            self.expert_gemm("grouped_gemm_up_again", ExpertGemm::Up, None, true);
        }
        if self.sharded.is_none() {
            self.shared_again(recompute);
        }
        has_rows
    }

    /// Adds the recomputation of pre-activations of shared experts that were not kept.
    pub(super) fn shared_again(&mut self, recompute: Recompute) {
        if recompute == Recompute::None {
            return;
        }
        self.every_shared(|builder, index| {
            let name = format!("grouped_gemm_up_again_shared_{index}");
            builder.expert_gemm(&name, ExpertGemm::Up, Some(index), true);
        });
    }
}
