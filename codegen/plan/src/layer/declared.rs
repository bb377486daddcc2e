//! The tensors that steps may name, declared before there are any steps.

use super::supported::training_only;
use super::tensor::{TensorPlan, TensorRole, constant, tensor};
use super::{Builder, PlanOptions, backward};
use crate::TileMachine;
use crate::ops::expert_scan::scan_tensors;
use crate::ops::gate_topk::{self, selection_tensors};
use moesaic_kernel::DType::{F32, I32};
use moesaic_kernel::{Size, Target};
use moesaic_spec::{Chooser, LayerSpec, SharedGate, canonical_tensors};

impl Builder {
    /// Returns a builder with every tensor that a step may name.
    pub(crate) fn new(spec: &LayerSpec, target: Target, options: &PlanOptions) -> Builder {
        let mut builder = Builder::empty(spec, target, options);
        let (spec, machine) = (&builder.plan.spec, builder.machine);
        let mut tensors = forward_tensors(spec, machine, options.training.is_some());
        if options.training.is_some() {
            tensors.extend(backward::tensors(spec));
            tensors.extend(gate_topk::bwd::tensors(spec, machine));
        }
        builder.plan.tensors = tensors;
        builder
    }
}

/// Returns every tensor a forward pass can name.
fn forward_tensors(spec: &LayerSpec, machine: TileMachine, training: bool) -> Vec<TensorPlan> {
    let mut list: Vec<TensorPlan> = canonical_tensors(spec)
        .into_iter()
        .filter(|t| training || !training_only(spec, &t.name))
        .map(|t| TensorPlan {
            name: t.name,
            dtype: t.dtype,
            shape: t.shape.into_iter().map(|n| Size::Const(n as u64)).collect(),
            role: TensorRole::Weight,
        })
        .collect();
    list.extend(routing_tensors(spec, machine, training));
    list.extend(scan_tensors(spec, machine, training));
    list.extend(expert_tensors(spec));
    list
}

fn routing_tensors(spec: &LayerSpec, machine: TileMachine, training: bool) -> Vec<TensorPlan> {
    let (tokens, k) = (Size::Tokens, constant(spec.shape.top_k));
    let model = constant(spec.shape.model_dim);
    let experts = constant(spec.routed_experts());
    let chooser = spec.router.kind.chooser();
    let decided = if chooser == Chooser::Caller {
        TensorRole::Input
    } else {
        TensorRole::Output
    };
    let mut list = vec![
        tensor(
            "x",
            spec.precision.activations,
            &[tokens.clone(), model],
            TensorRole::Input,
        ),
        tensor("topk_ids", I32, &[tokens.clone(), k.clone()], decided),
        tensor("topk_weights", F32, &[tokens.clone(), k], decided),
    ];
    if spec.has_logits() {
        list.push(tensor(
            "router.logits",
            F32,
            &[tokens.clone(), experts],
            TensorRole::Output,
        ));
    }
    if let Some(logits) = spec.logits()
        && let Some(projected) = logits.projected
    {
        let shape = [tokens.clone(), constant(logits.width.size(spec))];
        list.push(tensor(projected, F32, &shape, TensorRole::Scratch));
    }
    if chooser == Chooser::Table {
        let shape = std::slice::from_ref(&tokens);
        list.push(tensor("token_ids", I32, shape, TensorRole::Input));
    }
    if spec.router.token_mask {
        let shape = std::slice::from_ref(&tokens);
        list.push(tensor("token_mask", I32, shape, TensorRole::Input));
    }
    if spec.router.active_k {
        list.push(tensor("active_k", I32, &[constant(1)], TensorRole::Input));
    }
    list.extend(selection_tensors(spec, machine, training));
    list
}

fn expert_tensors(spec: &LayerSpec) -> Vec<TensorPlan> {
    let (tokens, activations) = (Size::Tokens, spec.precision.activations);
    // As many rows as any routing can make: how many there are is known on the device alone, after
    // memory was allocated. Masks, drops and identity experts only take some away.
    let rows = tokens.clone() * spec.shape.top_k as u64;
    let output = constant(spec.output_dim());
    let scratch = |name: &str, rows: &Size, width: Size| {
        tensor(
            name,
            activations,
            &[rows.clone(), width],
            TensorRole::Scratch,
        )
    };
    let mut list = vec![
        scratch("hidden", &rows, constant(spec.shape.hidden_dim)),
        scratch("out", &rows, constant(spec.expert_output_dim())),
        scratch("normed", &rows, constant(spec.expert_output_dim())),
        scratch("rows", &rows, constant(spec.expert_input_dim())),
        tensor(
            "row_weights",
            F32,
            std::slice::from_ref(&rows),
            TensorRole::Scratch,
        ),
        scratch(
            "latent.projected",
            &tokens,
            constant(spec.expert_input_dim()),
        ),
        scratch("latent.x", &tokens, constant(spec.expert_input_dim())),
        scratch("latent.sum", &tokens, constant(spec.expert_output_dim())),
        scratch("latent.normed", &tokens, constant(spec.expert_output_dim())),
        scratch("routed", &tokens, output.clone()),
        scratch("gate_pre", &rows, constant(spec.shape.hidden_dim)),
        scratch("up_pre", &rows, constant(spec.shape.hidden_dim)),
    ];
    for (i, shared) in spec.shared.iter().enumerate() {
        let hidden = constant(shared.hidden_dim);
        for part in ["hidden", "gate_pre", "up_pre"] {
            let name = format!("shared.{i}.{part}");
            list.push(scratch(&name, &tokens, hidden.clone()));
        }
        list.push(scratch(&format!("shared.{i}.out"), &tokens, output.clone()));
        if shared.gate != SharedGate::None {
            let name = format!("shared.{i}.router.logits");
            list.push(tensor(
                &name,
                F32,
                &[tokens.clone(), constant(shared.gate.logits())],
                TensorRole::Scratch,
            ));
        }
    }
    list.push(tensor(
        "y",
        activations,
        &[tokens, output],
        TensorRole::Output,
    ));
    list
}
