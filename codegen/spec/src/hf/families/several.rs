//! Models with several stacks of MoE layers, or two sets of experts per layer. Layers have one
//! numbering: first those of the text model, then the others.

use super::super::config::Config;
use super::super::draft::{DECODER, Draft};
use super::super::routing;
use super::super::source::half_of;
use super::super::{HfError, TensorStep};
use super::biased::clamped_router;
use super::block::{gated, sizes};
use super::deepseek::{self, BIAS, dots3_text};
use super::family::Family;
use super::keys::{EXPERTS, MODEL, NARROW, SHARED, TOP_K};
use super::layers::{self, Layers, depth};
use super::shared::gated_shared;
use crate::hf::draft::Sizes;
use crate::{Score, SharedGate};

/// The families of this file.
pub(super) const FAMILIES: &[Family] = &[
    Family {
        names: &["ernie4_5_vl_moe", "ernie4_5_vl_moe_text"],
        layers: |c| Ok(ernie_layers(c)?.then(ernie_layers(c)?)),
        build: ernie,
    },
    Family {
        names: &["dots3_note", "dots3_note_text"],
        layers: |c| Ok(layers::typed(c, 1, 46)?.then(eyes_layers(c)?)),
        build: dots3,
    },
    Family {
        names: &["qwen3_omni_moe"],
        layers: |c| {
            let [thinker, talker] = omni(c)?;
            Ok(layers::stepped(&thinker, 28)?.then(layers::stepped(&talker, 20)?))
        },
        build: |c, layer| {
            let [thinker, talker] = omni(c)?;
            let (half, index, mut d) = match layer.checked_sub(depth(&thinker, 28)?) {
                Some(index) => (&talker, index, omni_talker(&talker, index)?),
                None => (&thinker, layer, omni_thinker(&thinker, layer)?),
            };
            routing::check(half, &mut d, Some(index))?;
            Ok(d)
        },
    },
    // The halves are also published as models of their own.
    Family {
        names: &["qwen3_omni_moe_thinker", "qwen3_omni_moe_text"],
        layers: |c| layers::stepped(c, 28),
        build: omni_thinker,
    },
    Family {
        names: &["qwen3_omni_moe_talker", "qwen3_omni_moe_talker_text"],
        layers: |c| layers::stepped(c, 20),
        build: omni_talker,
    },
];

/// Returns the layers of one kind by ERNIE's rule.
fn ernie_layers(c: &Config) -> Result<Layers, HfError> {
    layers::typed(c, 1, 28)
}

/// Builds ERNIE 4.5 VL: a token's kind chooses between two sets of experts, each with its own
/// router. Shared experts see both kinds.
fn ernie(c: &Config, layer: usize) -> Result<Draft, HfError> {
    let total = depth(c, 28)?;
    let (kind, index) = (layer / total.max(1), layer % total.max(1));
    let name = ["text", "vision"][kind.min(1)];
    let keys = &["moe_intermediate_size"];
    let sizes = Sizes {
        model: c.size(MODEL, 2560)?,
        hidden: c.size_at(keys, kind, [1536, 512][kind.min(1)])?,
        experts: c.size_at(EXPERTS, kind, 64)?,
        top_k: c.size(TOP_K, 6)?,
    };
    let experts = sizes.experts;
    let mut d = gated(c, index, sizes, DECODER, &[&format!("mlp.{name}_moe.")])?;
    let bias = "moe_statics.e_score_correction_bias";
    clamped_router(c, &mut d, &[&format!("gate.{bias}")])?;
    // Published checkpoints keep both kinds in one tensor.
    d.decoder(index, &["mlp."]);
    d.single_experts(kind * experts);
    // The experts of the other kind sit in the same block and must not count as unread.
    let other = (1 - kind.min(1)) * experts;
    d.others = other..other + experts;
    let names = [
        ["vision_moe.", "gate.weight_1"],
        ["text_moe.", "gate.weight"],
    ][kind.min(1)];
    for root in d.roots.clone() {
        d.beside.extend(names.map(|name| format!("{root}{name}")));
    }
    let gate = ["gate.weight", "gate.weight_1"][kind.min(1)];
    d.stepped("router.weight", &[gate], &[TensorStep::Transpose]);
    let row = [
        half_of(0, kind, 1, false),
        TensorStep::Reshape(vec![experts]),
    ];
    d.stepped("router.select_bias", &[bias], &row);
    let count = c.size(SHARED, 2)?;
    if count > 0 {
        let wide = c.size_at(keys, 0, 1536)?.saturating_mul(count);
        d.shared(&["shared_experts"], wide, SharedGate::None);
    }
    if c.flag(&["use_bias"], false)? {
        d.biased();
    }
    d.notes.push(format!(
        "these are the experts of {name} tokens, and x are such; layers from {total} on are \
         the experts of vision tokens of layers from 0 on"
    ));
    Ok(d)
}

/// Returns the number of routed experts of each block of Dots 3's vision tower, if it has such a
/// list. Blocks below one are dense.
fn pyramid(eyes: &Config) -> Result<Option<Vec<i64>>, HfError> {
    let listed = eyes.signed_list("pyramid_num_routed")?;
    if listed.is_some() || eyes.words(&["mlp_layer_types"])?.is_some() {
        return Ok(listed);
    }
    let growing = (4..=64).step_by(4).chain([64]);
    Ok(Some([-1; 25].into_iter().chain(growing).collect()))
}

/// Returns the blocks of the tower, if the configuration has one.
fn eyes_layers(c: &Config) -> Result<Layers, HfError> {
    let why = "mlp_layer_types or pyramid_num_routed name none";
    let Some(eyes) = c.beside("vision_config")? else {
        return Ok(Layers::filtered(0, why, |_| false));
    };
    let sparse: Vec<bool> = match pyramid(&eyes)? {
        Some(list) => list.iter().map(|&count| count > 0).collect(),
        None => {
            let types = eyes.words(&["mlp_layer_types"])?.unwrap_or_default();
            types.iter().map(|kind| kind == "sparse").collect()
        }
    };
    Ok(Layers::filtered(sparse.len(), why, |i| sparse[i]))
}

fn dots3(c: &Config, layer: usize) -> Result<Draft, HfError> {
    let index = layer.checked_sub(depth(c, 46)?);
    match (index, c.beside("vision_config")?) {
        (Some(index), Some(eyes)) => dots3_eyes(&eyes, index),
        _ => dots3_text(c, layer),
    }
}

/// Builds a block of the tower: DeepSeek-V3's router without groups, and an expert count per block.
fn dots3_eyes(c: &Config, index: usize) -> Result<Draft, HfError> {
    let own = c.nested("per_layer_config")?.nested(&index.to_string())?;
    let listed = pyramid(c)?.and_then(|list| list.get(index).copied());
    let listed = listed.and_then(|count| usize::try_from(count).ok());
    let experts = own.size(EXPERTS, listed.unwrap_or(c.size(EXPERTS, 64)?))?;
    let most = c.size(&["num_experts_per_tok", "capacity_factor"], 2)?;
    let sizes = Sizes {
        model: c.size(&["embed_dim", "hidden_size"], 1536)?,
        hidden: c.size(NARROW, 2112)?,
        experts,
        top_k: own.size(TOP_K, most.min(experts))?,
    };
    let prefixes = [
        "vision_encoder.blocks.",
        "model.vision_encoder.blocks.",
        "model.vision_tower.blocks.",
        "blocks.",
    ];
    let mut d = gated(c, index, sizes, &prefixes, &["mlp."])?;
    d.plain("router.weight", &["gate_weight"]);
    for (part, leaf) in [("gate", "fc1"), ("up", "fc3"), ("down", "fc2")] {
        let name = [format!("{leaf}.weight")];
        d.per_expert(&format!("experts.{part}.weight"), "experts.", &name);
    }
    d.spec.router.score = Score::Sigmoid;
    d.select_bias(&[BIAS, &["router_bias"]].concat());
    d.renormalize(true, deepseek::EPS);
    d.spec.router.scale = c.number(&["router_scaling_factor", "router_scale"], 1.0)?;
    // Here this key is an older name of the number of experts per token, not a capacity.
    c.find(&["capacity_factor"]);
    routing::check(c, &mut d, None)?;
    Ok(d)
}

/// Returns the text models of Qwen3-Omni's two halves.
fn omni(c: &Config) -> Result<[Config; 2], HfError> {
    let half = |key: &str| c.nested(key)?.nested("text_config");
    Ok([half("thinker_config")?, half("talker_config")?])
}

fn omni_thinker(c: &Config, layer: usize) -> Result<Draft, HfError> {
    let prefixes = [
        &[
            "thinker.model.layers.",
            "thinker.model.language_model.layers.",
        ],
        DECODER,
    ];
    let sizes = sizes(c, NARROW, [2048, 768, 128, 8])?;
    let mut d = gated(c, layer, sizes, &prefixes.concat(), &["mlp."])?;
    d.renormalize(c.flag(&["norm_topk_prob"], true)?, 0.0);
    Ok(d)
}

fn omni_talker(c: &Config, layer: usize) -> Result<Draft, HfError> {
    let prefixes = [&["talker.model.layers."], DECODER].concat();
    let sizes = sizes(c, NARROW, [1024, 384, 128, 8])?;
    let mut d = gated(c, layer, sizes, &prefixes, &["mlp."])?;
    d.renormalize(c.flag(&["norm_topk_prob"], false)?, 0.0);
    let hidden = c.need(&["shared_expert_intermediate_size"])?;
    gated_shared(c, d, hidden)
}
