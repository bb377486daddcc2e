//! Models that transformers has no code for, as vLLM and SGLang serve them.

use super::super::HfError;
use super::super::config::Config;
use super::super::draft::Draft;
use super::block::{merged_shared, plain, sizes};
use super::deepseek::{self, GLM4};
use super::family::Family;
use super::keys::{EXPERTS, NARROW, SHARED, WIDE};
use super::layers::{self, Layers, depth};
use crate::{Score, SharedGate};

/// The families of this file.
pub(super) const FAMILIES: &[Family] = &[
    Family {
        names: &["k2_horizon"],
        layers: |c| layers::stepped(c, 48),
        build: k2_horizon,
    },
    Family {
        names: &["minicpm"],
        layers: |c| with_experts(c, 40),
        build: minicpm,
    },
    Family {
        names: &["pangu_ultra_moe"],
        layers: |c| layers::after_dense(c, "first_k_dense_replace", 3, 61),
        build: pangu,
    },
    Family {
        names: &["param2moe"],
        layers: |c| layers::after_dense(c, "first_k_dense_replace", 0, 21),
        build: param2,
    },
    Family {
        names: &["xverse"],
        layers: |c| with_experts(c, 28),
        build: xverse,
    },
];

/// Returns all layers, or none where dense models share the `model_type` and no experts are named.
fn with_experts(c: &Config, total: usize) -> Result<Layers, HfError> {
    let some = c.size(EXPERTS, 0)? > 0;
    let why = "num_experts names none";
    Ok(Layers::filtered(depth(c, total)?, why, |_| some))
}

/// Sets sigmoid or softmax scores by the key of a family.
fn score(c: &Config, d: &mut Draft, key: &str) -> Result<(), HfError> {
    d.spec.router.score = match c.text(&[key], "sigmoid")?.as_str() {
        "sigmoid" => Score::Sigmoid,
        "softmax" => Score::Softmax,
        _ => return Err(c.unsupported(key, "this score", "known are sigmoid and softmax")),
    };
    Ok(())
}

/// Builds K2-Horizon's block of experts. In some of these models attention has experts of its own,
/// which are no part of the block.
fn k2_horizon(c: &Config, layer: usize) -> Result<Draft, HfError> {
    let sizes = sizes(c, NARROW, [2560, 768, 100, 8])?;
    let hidden = sizes.hidden;
    let mut d = plain(c, layer, sizes)?;
    score(c, &mut d, "router_score_func")?;
    if c.flag(&["moe_gate_bias"], true)? {
        // The bias of the projection is for selection only.
        d.select_bias(&["gate.bias"]);
    }
    d.renormalize(c.flag(&["norm_topk_prob"], true)?, deepseek::EPS);
    d.spec.router.scale = c.number(&["router_scaling_factor"], 1.0)?;
    merged_shared(c, &mut d, SHARED, 1, hidden)?;
    if c.size(&["mova_num_experts"], 0)? > 0 {
        let note = "attention has experts for its values (mova_num_experts), which are not read";
        d.notes.push(note.to_string());
    }
    Ok(d)
}

/// Builds MiniCPM-MoE: Mixtral's block under another name.
fn minicpm(c: &Config, layer: usize) -> Result<Draft, HfError> {
    let mut d = plain(c, layer, sizes(c, WIDE, [2304, 5760, 8, 2])?)?;
    d.renormalize(true, 0.0);
    Ok(d)
}

/// Builds openPangu-Ultra-MoE: DeepSeek-V3's block without groups, whose bias may be missing.
fn pangu(c: &Config, layer: usize) -> Result<Draft, HfError> {
    let sizes = sizes(c, NARROW, [7680, 2048, 256, 8])?;
    let hidden = sizes.hidden;
    let mut d = plain(c, layer, sizes)?;
    deepseek::router(c, &mut d, &GLM4)?;
    d.spec.router.select_bias = c.flag(&["router_enable_expert_bias"], false)?;
    merged_shared(c, &mut d, SHARED, 1, hidden)?;
    Ok(d)
}

/// Builds Param2-MoE. vLLM takes the mean from the bias for selection, which changes no choice.
fn param2(c: &Config, layer: usize) -> Result<Draft, HfError> {
    let sizes = sizes(c, NARROW, [2048, 768, 64, 6])?;
    let hidden = sizes.hidden;
    let mut d = plain(c, layer, sizes)?;
    deepseek::router(c, &mut d, &GLM4)?;
    score(c, &mut d, "score_function")?;
    d.spec.router.select_bias = c.flag(&["moe_router_enable_expert_bias"], true)?;
    let count = c.size(SHARED, 1)?;
    if count > 0 {
        // This key is the width of all shared experts together.
        let together = c.size_opt(&["moe_shared_expert_intermediate_size"])?;
        let width = together.unwrap_or(hidden.saturating_mul(count));
        d.shared(&["shared_experts"], width, SharedGate::None);
    }
    Ok(d)
}

/// Builds XVERSE-MoE: softmax scores beside shared experts, all as wide as `intermediate_size`.
fn xverse(c: &Config, layer: usize) -> Result<Draft, HfError> {
    let sizes = sizes(c, WIDE, [2560, 1728, 64, 6])?;
    let hidden = sizes.hidden;
    let mut d = plain(c, layer, sizes)?;
    d.renormalize(c.flag(&["norm_topk_prob"], false)?, 0.0);
    merged_shared(c, &mut d, SHARED, 0, hidden)?;
    Ok(d)
}
