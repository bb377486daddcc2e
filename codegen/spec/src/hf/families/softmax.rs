//! Softmax routers without shared experts, and gpt-oss and PhiMoE.

use super::super::config::Config;
use super::super::draft::{Draft, Fused, Sizes};
use super::super::routing;
use super::super::source::half_of;
use super::super::{Alternative, HfError, TensorParts, TensorStep};
use super::block::{plain, sizes};
use super::family::Family;
use super::keys::{EXPERTS, MODEL, NARROW, WIDE};
use super::layers::{self, Layers, depth};
use crate::{Activation, Biases, Renormalize, Score, Select, SharedGate};
use std::f64::consts::FRAC_1_SQRT_2;

/// The families of this file.
pub(super) const FAMILIES: &[Family] = &[
    Family {
        names: &["iquest_q1"],
        layers: |c| layers::stepped_except(c, &[0], 88),
        build: iquest,
    },
    Family {
        names: &["mixtral", "minimax"],
        layers: |c| layers::every(c, 32),
        build: mixtral,
    },
    Family {
        names: &["olmoe"],
        layers: |c| layers::every(c, 16),
        build: olmoe,
    },
    Family {
        names: &["flex_olmo"],
        layers: |c| layers::every(c, 32),
        build: flex_olmo,
    },
    Family {
        names: &["qwen3_moe", "sdar_moe"],
        layers: |c| layers::stepped(c, 24),
        build: qwen3,
    },
    Family {
        names: &["qwen3_vl_moe", "qwen3_vl_moe_text"],
        layers: |c| layers::stepped(c, 24),
        build: qwen3_vl,
    },
    Family {
        names: &["interns1_pro", "interns1_pro_text"],
        layers: |c| layers::stepped(c, 94),
        build: intern_pro,
    },
    Family {
        names: &["mellum"],
        layers: |c| layers::typed(c, 0, 28),
        build: mellum,
    },
    Family {
        names: &["dbrx"],
        layers: |c| layers::every(c, 24),
        build: dbrx,
    },
    Family {
        names: &["granitemoe"],
        layers: |c| layers::every(c, 32),
        build: granite,
    },
    Family {
        names: &["jetmoe"],
        layers: |c| layers::every(c, 12),
        build: jetmoe,
    },
    Family {
        names: &["gpt_oss"],
        layers: |c| layers::every(c, 36),
        build: |c, layer| {
            let sizes = sizes(c, WIDE, [2880, 2880, 128, 4])?;
            gpt_oss(c, layer, sizes, Fused::InterleavedColumns)
        },
    },
    Family {
        names: &["openai_privacy_filter"],
        layers: |c| layers::every(c, 8),
        build: |c, layer| {
            let sizes = sizes(c, WIDE, [640, 640, 128, 4])?;
            gpt_oss(c, layer, sizes, Fused::Columns)
        },
    },
    Family {
        names: &["moondream3", "moondream3_text"],
        layers: moondream_layers,
        build: moondream,
    },
    Family {
        names: &["grok-1"],
        layers: |c| layers::every(c, 64),
        build: grok,
    },
    Family {
        names: &["phimoe"],
        layers: |c| layers::every(c, 32),
        build: phimoe,
    },
    Family {
        names: &["jamba"],
        layers: jamba_layers,
        build: jamba,
    },
];

/// Builds IQuest Q1 as SGLang serves it.
fn iquest(c: &Config, layer: usize) -> Result<Draft, HfError> {
    let mut d = plain(c, layer, sizes(c, WIDE, [3072, 1536, 256, 8])?)?;
    d.renormalize(true, 0.0);
    Ok(d)
}

fn mixtral(c: &Config, layer: usize) -> Result<Draft, HfError> {
    let mut d = plain(c, layer, sizes(c, WIDE, [4096, 14336, 8, 2])?)?;
    d.renormalize(true, 0.0);
    note_jitter(c, &mut d, "router_jitter_noise")?;
    Ok(d)
}

fn olmoe(c: &Config, layer: usize) -> Result<Draft, HfError> {
    let mut d = plain(c, layer, sizes(c, WIDE, [2048, 2048, 64, 8])?)?;
    d.renormalize(c.flag(&["norm_topk_prob"], false)?, 0.0);
    Ok(d)
}

fn flex_olmo(c: &Config, layer: usize) -> Result<Draft, HfError> {
    let mut d = plain(c, layer, sizes(c, WIDE, [4096, 11008, 7, 5])?)?;
    d.renormalize(c.flag(&["norm_topk_prob"], false)?, 0.0);
    Ok(d)
}

fn qwen3(c: &Config, layer: usize) -> Result<Draft, HfError> {
    let mut d = plain(c, layer, sizes(c, NARROW, [2048, 768, 128, 8])?)?;
    d.renormalize(c.flag(&["norm_topk_prob"], false)?, 0.0);
    Ok(d)
}

fn qwen3_vl(c: &Config, layer: usize) -> Result<Draft, HfError> {
    let mut d = plain(c, layer, sizes(c, NARROW, [2048, 1408, 60, 4])?)?;
    // Published checkpoints store the fused tensors transposed.
    d.fused_experts(Fused::Columns, "experts.gate_up_proj", "experts.down_proj");
    d.renormalize(true, 0.0);
    Ok(d)
}

/// Builds Intern-S1-Pro: Qwen3's block, with as many experts from each of several groups.
fn intern_pro(c: &Config, layer: usize) -> Result<Draft, HfError> {
    let mut d = plain(c, layer, sizes(c, NARROW, [4096, 1536, 512, 8])?)?;
    d.fused_experts(Fused::Columns, "experts.gate_up_proj", "experts.down_proj");
    d.renormalize(c.flag(&["norm_topk_prob"], true)?, 0.0);
    let groups = c.signed(&["router_n_groups"], -1)?;
    if let Ok(groups @ 1..) = usize::try_from(groups) {
        d.spec.router.select = Select::PerGroup(groups);
    }
    Ok(d)
}

fn mellum(c: &Config, layer: usize) -> Result<Draft, HfError> {
    let mut d = plain(c, layer, sizes(c, NARROW, [2304, 896, 64, 8])?)?;
    d.renormalize(c.flag(&["norm_topk_prob"], true)?, 0.0);
    Ok(d)
}

fn dbrx(c: &Config, layer: usize) -> Result<Draft, HfError> {
    let ffn = c.nested("ffn_config")?;
    let sizes = Sizes {
        model: c.size(MODEL, 2048)?,
        hidden: ffn.size(&["ffn_hidden_size"], 3584)?,
        experts: ffn.size(&["moe_num_experts"], 4)?,
        top_k: ffn.size(&["moe_top_k"], 1)?,
    };
    let stacked = TensorStep::Reshape(vec![sizes.experts, sizes.hidden, sizes.model]);
    let mut d = Draft::new(c, sizes);
    d.activation(&ffn.nested("ffn_act_fn")?, &["name"], "silu")?;
    if !ffn.is_null("moe_normalize_expert_weights") {
        d.spec.router.renormalize = Renormalize::PNorm;
        d.spec.router.norm_order = ffn.number(&["moe_normalize_expert_weights"], 1.0)?;
    }
    routing::check_part(&ffn, &mut d, None)?;
    d.rooted(&["transformer.blocks.", "blocks."], layer, &["ffn."]);
    d.plain("router.weight", &["router.layer.weight"]);
    d.stepped(
        "experts.gate.weight",
        &["experts.mlp.w1"],
        std::slice::from_ref(&stacked),
    );
    d.stepped(
        "experts.up.weight",
        &["experts.mlp.v1"],
        std::slice::from_ref(&stacked),
    );
    let down = [stacked, TensorStep::Transpose];
    d.stepped("experts.down.weight", &["experts.mlp.w2"], &down);
    Ok(d)
}

/// Builds Granite: the top k logits, then their softmax.
pub(super) fn granite(c: &Config, layer: usize) -> Result<Draft, HfError> {
    let mut d = plain(c, layer, sizes(c, WIDE, [4096, 11008, 8, 2])?)?;
    d.spec.router.score = Score::SoftmaxSelected;
    d.fused_experts(Fused::Rows, "input_linear.weight", "output_linear.weight");
    Ok(d)
}

/// Builds JetMoE: Granite's router, and one bias on the sum. Each expert can carry that bias
/// because a token's weights sum to 1.
fn jetmoe(c: &Config, layer: usize) -> Result<Draft, HfError> {
    let mut d = plain(c, layer, sizes(c, WIDE, [2048, 5632, 8, 2])?)?;
    d.spec.router.score = Score::SoftmaxSelected;
    d.fused_experts(Fused::Rows, "input_linear.weight", "output_linear.weight");
    d.spec.experts.bias = Biases::Down;
    let count = d.spec.shape.experts;
    let repeated = |root: &String| Alternative {
        parts: TensorParts::Repeated {
            name: format!("{root}bias"),
            count,
        },
        steps: Vec::new(),
    };
    let alternatives = d.roots.iter().map(repeated).collect();
    d.push("experts.down.bias", alternatives);
    Ok(d)
}

/// Builds gpt-oss: biases everywhere, a clamped activation, and the layout `fused`.
fn gpt_oss(c: &Config, layer: usize, sizes: Sizes, fused: Fused) -> Result<Draft, HfError> {
    let hidden = sizes.hidden;
    let mut d = Draft::new(c, sizes);
    d.spec.router.bias = true;
    d.spec.router.score = Score::SoftmaxSelected;
    d.spec.experts.bias = true.into();
    d.swiglu_oai(c)?;
    d.decoder(layer, &["mlp."]);
    d.plain("router.weight", &["router.weight"]);
    d.plain("router.bias", &["router.bias"]);
    d.mxfp4_experts(fused);
    d.fused_experts(fused, "experts.gate_up_proj", "experts.down_proj");
    for (half, part) in ["gate", "up"].into_iter().enumerate() {
        let name = format!("experts.{part}.bias");
        let half = half_of(1, half, hidden, fused == Fused::InterleavedColumns);
        d.stepped(&name, &["experts.gate_up_proj_bias"], &[half]);
    }
    d.plain("experts.down.bias", &["experts.down_proj_bias"]);
    Ok(d)
}

/// Returns the layers behind the first dense ones.
fn moondream_layers(c: &Config) -> Result<Layers, HfError> {
    let first = c.size(&["moe_start_layer"], 4)?;
    let why = "moe_start_layer leaves none";
    Ok(Layers::filtered(depth(c, 24)?, why, |i| i >= first))
}

/// Builds Moondream 3 as vLLM serves it: gpt-oss's router, and `gelu(gate) · (up + 1)`.
fn moondream(c: &Config, layer: usize) -> Result<Draft, HfError> {
    let mut d = Draft::new(c, sizes(c, &["moe_expert_inner_dim"], [2048, 1024, 64, 8])?);
    d.spec.experts.activation = Activation::Gelu;
    d.spec.experts.up_offset = 1.0;
    d.spec.router.bias = true;
    d.spec.router.score = Score::SoftmaxSelected;
    let prefixes = ["model.text.blocks.", "text.blocks."];
    d.rooted(&prefixes, layer, &["mlp."]);
    d.plain("router.weight", &["router.weight"]);
    d.plain("router.bias", &["router.bias"]);
    d.fused_experts(Fused::Rows, "fc1.weight", "fc2.weight");
    Ok(d)
}

/// Builds Grok 1 and 2 as SGLang serves them. With `residual_moe` the layer's dense experts are
/// added, and the sum of both is divided by the square root of 2.
fn grok(c: &Config, layer: usize) -> Result<Draft, HfError> {
    let keys = ["moe_intermediate_size", "intermediate_size"];
    let mut d = Draft::new(c, sizes(c, &keys, [6144, 32768, 8, 2])?);
    d.spec.experts.activation = Activation::Gelu;
    d.spec.router.logit_softcap = Some(c.number(&["router_logit_softcapping"], 30.0)?);
    d.decoder(layer, &["block_sparse_moe."]);
    d.plain("router.weight", &["gate.weight"]);
    d.gated_experts(Fused::Rows);
    if c.flag(&["residual_moe"], false)? {
        let hidden = c.size(WIDE, 32768)?;
        d.decoder(layer, &[""]);
        d.shared(&["mlp"], hidden, SharedGate::None);
        let own = d.spec.shared.iter_mut();
        own.for_each(|shared| shared.activation = Some(Activation::GeluTanh));
        d.spec.router.scale = FRAC_1_SQRT_2;
        d.then("shared.0.down.weight", TensorStep::Factor(FRAC_1_SQRT_2));
    }
    Ok(d)
}

fn phimoe(c: &Config, layer: usize) -> Result<Draft, HfError> {
    let sizes = sizes(c, WIDE, [4096, 6400, 16, 2])?;
    if sizes.top_k != 2 {
        let remedy = "SparseMixer is defined for two experts per token";
        return Err(c.unsupported(
            "num_experts_per_tok",
            "SparseMixer with another number",
            remedy,
        ));
    }
    let mut d = plain(c, layer, sizes)?;
    d.spec.router.select = Select::SparseMixer(c.number(&["router_jitter_noise"], 0.01)?);
    note_jitter(c, &mut d, "input_jitter_noise")?;
    Ok(d)
}

fn jamba(c: &Config, layer: usize) -> Result<Draft, HfError> {
    let mut d = plain(c, layer, sizes(c, WIDE, [4096, 14336, 16, 2])?)?;
    d.sources.clear();
    d.decoder(layer, &["feed_forward."]);
    d.plain("router.weight", &["router.weight"]);
    d.gated_experts(Fused::Rows);
    Ok(d)
}

/// Applies `expert_layer_period` and `expert_layer_offset`, if there is more than one expert.
fn jamba_layers(c: &Config) -> Result<Layers, HfError> {
    let period = c.size(&["expert_layer_period"], 2)?.max(1);
    let offset = c.size(&["expert_layer_offset"], 1)?;
    let sparse = c.size(EXPERTS, 16)? > 1;
    let why = "expert_layer_period, expert_layer_offset and num_experts leave none";
    Ok(Layers::filtered(depth(c, 32)?, why, |i| {
        sparse && i % period == offset
    }))
}

/// Notes that the training-only jitter on the whole block's input is left out.
fn note_jitter(c: &Config, d: &mut Draft, key: &str) -> Result<(), HfError> {
    if c.number(&[key], 0.0)? > 0.0 {
        d.notes.push(format!(
            "{key} multiplies the input of router and experts in training; it is not taken over"
        ));
    }
    Ok(())
}
