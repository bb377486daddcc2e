//! The tensors of a forward pass.

use super::supported::training_only;
use super::{Role, TensorPlan};
use crate::desc;
use crate::{Machine, Operator};
use moesaic_kernel::DType::{self, F32, I32, I64};
use moesaic_kernel::Size;
use moesaic_spec::{LayerSpec, RouterKind, SharedGate, canonical_tensors};

/// Every tensor a forward pass can name.
pub(super) fn declared_tensors(
    spec: &LayerSpec,
    machine: Machine,
    training: bool,
) -> Vec<TensorPlan> {
    let mut list: Vec<TensorPlan> = canonical_tensors(spec)
        .into_iter()
        .filter(|t| training || !training_only(spec, &t.name))
        .map(|t| TensorPlan {
            name: t.name,
            dtype: t.dtype,
            shape: t.shape.into_iter().map(|n| Size::Const(n as u64)).collect(),
            role: Role::Weight,
        })
        .collect();
    list.extend(routing_tensors(spec, machine, training));
    list.extend(scan_tensors(spec, machine, training));
    list.extend(expert_tensors(spec));
    list
}

pub(super) fn tensor(name: &str, dtype: DType, shape: &[Size], role: Role) -> TensorPlan {
    TensorPlan {
        name: name.to_string(),
        dtype,
        shape: shape.to_vec(),
        role,
    }
}

pub(super) fn constant(n: usize) -> Size {
    Size::Const(n as u64)
}

fn routing_tensors(spec: &LayerSpec, machine: Machine, training: bool) -> Vec<TensorPlan> {
    let (tokens, k) = (Size::Tokens, constant(spec.shape.top_k));
    let model = constant(spec.shape.model_dim);
    let experts = constant(spec.routed_experts());
    let kind = spec.router.kind;
    let decided = if kind == RouterKind::External {
        Role::Input
    } else {
        Role::Output
    };
    let mut list = vec![
        tensor(
            "x",
            spec.precision.activations,
            &[tokens.clone(), model],
            Role::Input,
        ),
        tensor("topk_ids", I32, &[tokens.clone(), k.clone()], decided),
        tensor("topk_weights", F32, &[tokens.clone(), k], decided),
    ];
    if spec.has_logits() {
        list.push(tensor(
            "router.logits",
            F32,
            &[tokens.clone(), experts],
            Role::Output,
        ));
    }
    if let (RouterKind::Cosine, Some(width)) = (kind, spec.router.projection_dim) {
        let shape = [tokens.clone(), constant(width)];
        list.push(tensor("router.projected", F32, &shape, Role::Scratch));
    }
    if kind == RouterKind::Table {
        let shape = std::slice::from_ref(&tokens);
        list.push(tensor("token_ids", I32, shape, Role::Input));
    }
    if spec.router.token_mask {
        let shape = std::slice::from_ref(&tokens);
        list.push(tensor("token_mask", I32, shape, Role::Input));
    }
    if spec.router.active_k {
        list.push(tensor("active_k", I32, &[constant(1)], Role::Input));
    }
    if let Some(gate) = desc::gate_topk(spec, training) {
        list.extend(selection_tensors(&gate, machine));
    }
    list
}

/// What selection beyond top-k, and training, put between logits and ids.
fn selection_tensors(gate: &desc::GateTopkDesc, machine: Machine) -> Vec<TensorPlan> {
    let config = gate.tiling(machine);
    let (tokens, experts) = (Size::Tokens, constant(gate.experts));
    let per_expert = [tokens.clone(), experts.clone()];
    let tiles = Size::Tokens.ceil_div(config.logits_tile_tokens as u64);
    let parts = [tiles, constant(gate.experts + 1)];
    let x = [tokens.clone(), constant(gate.model_dim)];
    vec![
        tensor("router.x", gate.activations, &x, Role::Scratch),
        tensor("router.clean_logits", F32, &per_expert, Role::Output),
        tensor("router.noise_logits", F32, &per_expert, Role::Scratch),
        tensor(
            "router.columns",
            F32,
            std::slice::from_ref(&experts),
            Role::Scratch,
        ),
        tensor("column_parts", F32, &parts, Role::Scratch),
        tensor(
            "choice_keys",
            I32,
            &[experts.clone(), tokens],
            Role::Scratch,
        ),
        tensor("choice_bounds", I32, &[experts, constant(2)], Role::Scratch),
    ]
}

fn scan_tensors(spec: &LayerSpec, machine: Machine, training: bool) -> Vec<TensorPlan> {
    let desc = desc::expert_scan(spec, training);
    let config = desc.tiling(machine);
    let (tokens, k) = (Size::Tokens, constant(desc.top_k));
    let slots = tokens.clone() * k.clone();
    let tiles = desc.tiles(&config);
    let (routed, edges) = (constant(desc.routed_experts), constant(desc.experts + 1));
    let per_slot = [tokens.clone(), k];
    let tile_shape = [tiles.clone(), routed.clone()];
    let edge = std::slice::from_ref(&edges);
    let mut list = vec![
        tensor("tile_counts", I32, &tile_shape, Role::Scratch),
        tensor("counts", I64, std::slice::from_ref(&routed), Role::Output),
        tensor("offsets", I64, edge, Role::Output),
        tensor("row_tiles", I32, edge, Role::Scratch),
        tensor("locations", I32, &per_slot, Role::Output),
        tensor("slot_rows", I32, &per_slot, Role::Output),
        tensor("row_slots", I32, std::slice::from_ref(&slots), Role::Output),
    ];
    if let Some(chunk) = config.chunk_tiles {
        let shape = [tiles.floor_div(chunk as u64) + 1, routed];
        list.push(tensor("chunk_counts", I32, &shape, Role::Scratch));
    }
    if desc.limited() {
        list.push(tensor("capacity", I64, &[constant(1)], Role::Output));
    }
    if desc.capacity.mode == moesaic_spec::CapacityMode::Bounded {
        list.push(tensor("overflow", I64, &[constant(1)], Role::Output));
    }
    if let Some(items) = desc.sorted_items() {
        list.push(match config.sort_run {
            Some(_) => tensor("sorted_keys", I64, &[items], Role::Scratch),
            None => tensor("sort_items", I64, &[constant(2), items], Role::Scratch),
        });
    }
    let per_token = std::slice::from_ref(&tokens);
    list.push(tensor("kept_sums", F32, per_token, Role::Scratch));
    if desc.ordered() {
        list.push(tensor("best_score", F32, per_token, Role::Scratch));
        list.push(tensor("token_order", I32, per_token, Role::Scratch));
    }
    if desc.ranked() {
        list.push(tensor("bucket_offsets", I64, &[edges], Role::Scratch));
        list.push(tensor("bucket_slots", I32, &[slots], Role::Scratch));
    }
    list
}

fn expert_tensors(spec: &LayerSpec) -> Vec<TensorPlan> {
    let (tokens, activations) = (Size::Tokens, spec.precision.activations);
    let rows = tokens.clone() * spec.shape.top_k as u64;
    let output = constant(spec.output_dim());
    let scratch = |name: &str, rows: &Size, width: Size| {
        tensor(name, activations, &[rows.clone(), width], Role::Scratch)
    };
    let mut list = vec![
        scratch("hidden", &rows, constant(spec.shape.hidden_dim)),
        scratch("out", &rows, constant(spec.expert_output_dim())),
        scratch("rows", &rows, constant(spec.expert_input_dim())),
        scratch("latent.x", &tokens, constant(spec.expert_input_dim())),
        scratch("latent.sum", &tokens, constant(spec.expert_output_dim())),
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
                Role::Scratch,
            ));
        }
    }
    list.push(tensor("y", activations, &[tokens, output], Role::Output));
    list
}
