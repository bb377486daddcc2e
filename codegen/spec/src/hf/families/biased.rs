//! Families with an unusual router: Ernie, LongCat, DeepSeek-V4, Gemma 4.

use super::super::HfError;
use super::super::config::Config;
use super::super::draft::{DECODER, Draft, Fused, Sizes};
use super::super::source::half_of;
use super::super::{Alternative, TensorParts, TensorStep};
use super::block::{plain, sizes};
use super::family::Family;
use super::keys::{EXPERTS, MODEL, NARROW, TOP_K};
use super::layers::{self, Layers, depth};
use crate::{Renormalize, RouterKind, Score, SharedGate};

/// The families of this file.
pub(super) const FAMILIES: &[Family] = &[
    Family {
        names: &["ernie4_5_moe"],
        layers: ernie_layers,
        build: ernie,
    },
    Family {
        names: &["longcat_flash", "longcat_flash_ngram"],
        layers: |c| layers::every(c, 28),
        build: longcat,
    },
    Family {
        names: &["deepseek_v4"],
        layers: |c| layers::every(c, 43),
        build: deepseek_v4,
    },
    Family {
        names: &["gemma4", "gemma4_text"],
        layers: gemma4_layers,
        build: |c, layer| gemma4(c, layer, DECODER),
    },
    // Encoder and decoder share all tensors, so one stack covers both.
    Family {
        names: &["diffusion_gemma", "diffusion_gemma_text"],
        layers: |c| layers::every(c, 30),
        build: |c, layer| gemma4(c, layer, DIFFUSION_GEMMA),
    },
];

/// Builds Ernie 4.5: softmax scores, a selection bias, a clamped denominator.
fn ernie(c: &Config, layer: usize) -> Result<Draft, HfError> {
    let sizes = sizes(c, NARROW, [2560, 1536, 64, 6])?;
    let hidden = sizes.hidden;
    let mut d = plain(c, layer, sizes)?;
    let bias = "moe_statics.e_score_correction_bias";
    clamped_router(c, &mut d, &[bias, &format!("gate.{bias}")])?;
    let count = c.size(&["moe_num_shared_experts"], 2)?;
    if count > 0 {
        d.shared(
            &["shared_experts"],
            count.saturating_mul(hidden),
            SharedGate::None,
        );
    }
    if c.flag(&["use_bias"], false)? {
        d.biased();
    }
    Ok(d)
}

/// Sets ERNIE's selection bias and lower bound of the denominator.
pub(super) fn clamped_router(c: &Config, d: &mut Draft, bias: &[&str]) -> Result<(), HfError> {
    d.spec.router.renormalize = Renormalize::Clamp;
    d.spec.router.renormalize_eps = c.number(&["moe_norm_min"], 1e-12)?;
    d.select_bias(bias);
    Ok(())
}

/// Returns every `moe_layer_interval`-th layer between two bounds.
fn ernie_layers(c: &Config) -> Result<Layers, HfError> {
    let interval = c.size(&["moe_layer_interval"], 1)?.max(1);
    let first = c.size(&["moe_layer_start_index"], 1)?;
    let last = c.signed(&["moe_layer_end_index"], -1)?;
    let total = depth(c, 28)?;
    let why = "moe_layer_interval, moe_layer_start_index and moe_layer_end_index leave none";
    let within = |i: usize| i >= first && (last == -1 || (i as i64) <= last);
    Ok(Layers::filtered(total, why, |i| {
        within(i) && (i + 1).is_multiple_of(interval)
    }))
}

/// Builds LongCat: softmax over experts and identity experts.
fn longcat(c: &Config, layer: usize) -> Result<Draft, HfError> {
    let sizes = sizes(c, NARROW, [6144, 2048, 512, 12])?;
    let (experts, hidden) = (sizes.experts, sizes.hidden);
    let mut d = Draft::new(c, sizes);
    d.activation(c, &["hidden_act"], "silu")?;
    d.spec.experts.identity = c.size(&["zero_expert_num"], 256)?;
    d.spec.router.scale = c.number(&["routed_scaling_factor"], 6.0)?;
    d.decoder(layer, &["mlp."]);
    d.plain("router.weight", &["router.classifier.weight"]);
    d.select_bias(&["router.e_score_correction_bias"]);
    d.gated_experts(Fused::Rows);
    // transformers also writes tensors for identity experts, which have no weights to read.
    d.others = experts..experts.saturating_add(d.spec.experts.identity);
    // transformers' in-memory tensors include gate and up rows for identity experts.
    let of = experts + d.spec.experts.identity;
    let real = TensorStep::Take {
        axis: 0,
        start: 0,
        step: 1,
        count: experts,
        of,
    };
    for (half, part) in ["gate", "up"].into_iter().enumerate() {
        let steps = [real.clone(), half_of(1, half, hidden, false)];
        d.stepped(
            &format!("experts.{part}.weight"),
            &["experts.gate_up_proj"],
            &steps,
        );
    }
    Ok(d)
}

/// Builds DeepSeek-V4: `sqrt(softplus(z))` scores; in hash layers a table picks the experts.
fn deepseek_v4(c: &Config, layer: usize) -> Result<Draft, HfError> {
    let sizes = sizes(
        c,
        &["moe_intermediate_size", "intermediate_size"],
        [4096, 2048, 256, 6],
    )?;
    let hidden = sizes.hidden;
    let mut d = plain(c, layer, sizes)?;
    d.decoder(layer, &["mlp.", "ffn."]);
    d.sources.clear();
    d.plain("router.weight", &["gate.weight"]);
    d.gated_experts(Fused::Rows);
    d.spec.experts.clamp = Some(c.number(&["swiglu_limit"], 10.0)?);
    d.spec.router.score = match c.text(&["scoring_func"], "sqrtsoftplus")?.as_str() {
        "sqrtsoftplus" => Score::SqrtSoftplus,
        "sigmoid" => Score::Sigmoid,
        _ => {
            let remedy = "known are sqrtsoftplus and sigmoid";
            return Err(c.unsupported("scoring_func", "this score", remedy));
        }
    };
    d.renormalize(true, 1e-20);
    d.spec.router.scale = c.number(&["routed_scaling_factor"], 1.5)?;
    if hashed(c, layer)? {
        d.spec.router.kind = RouterKind::Table;
        d.spec.router.table_rows = Some(c.size(&["vocab_size"], 129_280)?);
        d.plain("router.table", &["gate.tid2eid"]);
    } else {
        d.select_bias(&["gate.e_score_correction_bias", "gate.bias"]);
    }
    d.shared(&["shared_experts"], hidden, SharedGate::None);
    if c.flag(&["mlp_bias"], false)? {
        d.biased();
    }
    Ok(d)
}

/// Returns true if the layer looks its experts up by token id.
fn hashed(c: &Config, layer: usize) -> Result<bool, HfError> {
    match c.words(&["mlp_layer_types"])? {
        Some(types) => Ok(types.get(layer).is_some_and(|t| t == "hash_moe")),
        None => Ok(layer < c.size(&["num_hash_layers"], 3)?),
    }
}

/// Prefixes of DiffusionGemma's layers.
const DIFFUSION_GEMMA: &[&str] = &[
    "model.decoder.layers.",
    "decoder.layers.",
    "model.encoder.language_model.layers.",
];

/// Builds Gemma 4. Its experts see `x`, the `pre_feedforward_layernorm_2` of the residual `r`; its
/// router sees `norm(r)·s·d^-½`. Since `norm(r) = x / w` with the weight `w` of that layer norm,
/// the router is a plain projection of `x` with `W·s/w·d^-½`.
fn gemma4(c: &Config, layer: usize, prefixes: &[&str]) -> Result<Draft, HfError> {
    let sizes = Sizes {
        model: c.size(MODEL, 2304)?,
        hidden: c.need(NARROW)?,
        experts: c.need(EXPERTS)?,
        top_k: c.need(TOP_K)?,
    };
    let factor = 1.0 / (sizes.model as f64).sqrt();
    let mut d = Draft::new(c, sizes);
    d.activation(c, &["hidden_activation", "hidden_act"], "gelu_pytorch_tanh")?;
    d.renormalize(true, 0.0);
    d.spec.router.expert_scale = true;
    d.rooted(prefixes, layer, &[""]);
    let folded = |root: &String| Alternative {
        parts: TensorParts::One(format!("{root}router.proj.weight")),
        steps: vec![
            TensorStep::MulColumns(format!("{root}router.scale")),
            TensorStep::DivColumns(format!("{root}pre_feedforward_layernorm_2.weight")),
            TensorStep::Factor(factor),
        ],
    };
    let alternatives = d.roots.iter().map(folded).collect();
    d.push("router.weight", alternatives);
    d.plain("router.expert_scale", &["router.per_expert_scale"]);
    d.gated_experts(Fused::Rows);
    d.notes.push(
        "x is the output of pre_feedforward_layernorm_2; the router's own norm and scale, \
         and that layer norm's weight, are folded into router.weight"
            .to_string(),
    );
    Ok(d)
}

/// Returns all layers or none.
fn gemma4_layers(c: &Config) -> Result<Layers, HfError> {
    let on = c.flag(&["enable_moe_block"], false)?;
    Ok(Layers::filtered(
        depth(c, 30)?,
        "enable_moe_block is false",
        |_| on,
    ))
}
