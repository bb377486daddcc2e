//! Softmax routers beside shared experts.

use super::super::config::Config;
use super::super::draft::{DECODER, Draft, Fused, Sizes};
use super::super::source::half_of;
use super::super::{HfError, TensorStep};
use super::block::{gated, merged_shared, plain, sizes};
use super::deepseek::{self, GLM4};
use super::family::Family;
use super::keys::{EXPERTS, MODEL, NARROW, SHARED, TOP_K, WIDE};
use super::layers::{self, Layers, depth};
use super::softmax::granite;
use crate::{GroupMask, GroupStat, Groups, Score, SharedExpert, SharedGate, TokenBlocks};

/// The families of this file.
pub(super) const FAMILIES: &[Family] = &[
    Family {
        names: &["qwen2_moe"],
        layers: |c| layers::stepped(c, 24),
        build: qwen2,
    },
    Family {
        names: &["lara_mini"],
        layers: |c| layers::every(c, 34),
        build: lara_mini,
    },
    Family {
        names: &["step3_vl", "step3_text"],
        layers: step3_layers,
        build: step3,
    },
    Family {
        names: &["qwen3_next"],
        layers: |c| layers::stepped(c, 48),
        build: qwen3_next,
    },
    Family {
        names: &["qwen3_5_moe", "qwen3_5_moe_text"],
        layers: |c| layers::every(c, 40),
        build: qwen3_5,
    },
    Family {
        names: &["interns2_mobius", "interns2_mobius_text"],
        layers: |c| layers::every(c, 40),
        build: mobius,
    },
    Family {
        names: &["qwen4_exp", "qwen4_exp_text"],
        layers: |c| layers::every(c, 40),
        build: qwen3_next,
    },
    Family {
        names: &["deepseek_v2"],
        layers: |c| layers::after_dense(c, "first_k_dense_replace", 0, 32),
        build: |c, layer| deepseek_v2(c, layer, [4096, 1407, 64, 0]),
    },
    Family {
        names: &["deepseek"],
        layers: |c| layers::after_dense(c, "first_k_dense_replace", 0, 28),
        build: deepseek_v1,
    },
    Family {
        names: &["deepseek_ref"],
        layers: |c| layers::after_dense(c, "first_k_dense_replace", 0, 32),
        build: deepseek_ref,
    },
    Family {
        names: &["bailing_moe", "bailing_moe_v2", "llada2_moe"],
        layers: |c| layers::after_dense(c, "first_k_dense_replace", 0, 28),
        build: bailing,
    },
    Family {
        names: &["deepseek_ocr2", "deepseek_ocr2_text"],
        layers: |c| layers::typed(c, 1, 32),
        build: |c, layer| deepseek_v2(c, layer, [4096, 1407, 64, 0]),
    },
    Family {
        names: &["unlimited_ocr", "unlimited_ocr_text"],
        layers: |c| layers::typed(c, 1, 12),
        build: |c, layer| deepseek_v2(c, layer, [1280, 896, 64, 6]),
    },
    Family {
        names: &["aria", "aria_text"],
        layers: |c| layers::every(c, 32),
        build: aria,
    },
    Family {
        names: &["cohere2_moe"],
        layers: |c| layers::typed(c, 0, 40),
        build: cohere,
    },
    Family {
        names: &["granitemoeshared", "granitemoe_swa"],
        layers: |c| layers::every(c, 32),
        build: |c, layer| granite_shared(c, layer, 0),
    },
    Family {
        names: &["granitemoehybrid"],
        layers: hybrid_layers,
        build: |c, layer| granite_shared(c, layer, 1024),
    },
    Family {
        names: &["hunyuan_v1_moe"],
        layers: |c| layers::every(c, 32),
        build: hunyuan,
    },
];

fn qwen2(c: &Config, layer: usize) -> Result<Draft, HfError> {
    let mut d = plain(c, layer, sizes(c, NARROW, [2048, 1408, 60, 4])?)?;
    d.renormalize(c.flag(&["norm_topk_prob"], false)?, 0.0);
    gated_shared(c, d, 5632)
}

fn qwen3_next(c: &Config, layer: usize) -> Result<Draft, HfError> {
    let mut d = plain(c, layer, sizes(c, NARROW, [2048, 512, 512, 10])?)?;
    d.renormalize(c.flag(&["norm_topk_prob"], true)?, 0.0);
    gated_shared(c, d, 512)
}

/// Builds Lara 4 mini, whose shared expert has no gate.
fn lara_mini(c: &Config, layer: usize) -> Result<Draft, HfError> {
    let mut d = plain(c, layer, sizes(c, NARROW, [1024, 512, 128, 4])?)?;
    d.renormalize(c.flag(&["norm_topk_prob"], true)?, 0.0);
    let hidden = c.size(&["shared_expert_intermediate_size"], 512)?;
    d.shared(&["shared_expert"], hidden, SharedGate::None);
    Ok(d)
}

/// Builds Step 3 as vLLM serves it: stacked experts under `moe`, and a shared expert beside it.
fn step3(c: &Config, layer: usize) -> Result<Draft, HfError> {
    let mut d = gated(
        c,
        layer,
        sizes(c, NARROW, [7168, 5120, 48, 3])?,
        DECODER,
        &["moe."],
    )?;
    for part in ["gate", "up", "down"] {
        let name = format!("{part}_proj.weight");
        d.plain(&format!("experts.{part}.weight"), &[&name]);
    }
    d.renormalize(c.flag(&["norm_expert_weight"], false)?, 0.0);
    d.decoder(layer, &[""]);
    let hidden = c.size(&["share_expert_dim"], 5120)?;
    d.shared(&["share_expert"], hidden, SharedGate::None);
    Ok(d)
}

/// Returns the layers of `moe_layers_enum`; without it, the first layer is dense.
fn step3_layers(c: &Config) -> Result<Layers, HfError> {
    let list = c.numbers("moe_layers_enum")?;
    let why = "moe_layers_enum names none";
    Ok(Layers::filtered(depth(c, 61)?, why, |i| {
        list.as_ref().map_or(i > 0, |list| list.contains(&i))
    }))
}

fn qwen3_5(c: &Config, layer: usize) -> Result<Draft, HfError> {
    let mut d = plain(c, layer, sizes(c, NARROW, [2048, 512, 256, 8])?)?;
    d.renormalize(true, 0.0);
    gated_shared(c, d, 512)
}

/// Builds Intern-S2-Mobius as SGLang serves it: layers take turns with a few banks, which are
/// experts with their router, and each has a shared expert of its own.
fn mobius(c: &Config, layer: usize) -> Result<Draft, HfError> {
    const BANKS: [&str; 3] = [
        "model.language_model.meta_mlp.",
        "model.meta_mlp.",
        "meta_mlp.",
    ];
    let bank = layer % c.size(&["num_blocks"], 4)?.max(1);
    let sizes = sizes(c, NARROW, [2048, 512, 256, 8])?;
    let mut d = gated(c, bank, sizes, &BANKS, &[""])?;
    d.renormalize(c.flag(&["norm_topk_prob"], true)?, 0.0);
    d.notes.push(format!(
        "the experts and the router are those of bank {bank}, which other layers share"
    ));
    d.decoder(layer, &["mlp."]);
    gated_shared(c, d, 512)
}

/// Adds Qwen's shared expert, weighted by `σ(x · w)`.
pub(super) fn gated_shared(c: &Config, mut d: Draft, default: usize) -> Result<Draft, HfError> {
    let hidden = c.size(&["shared_expert_intermediate_size"], default)?;
    d.shared(&["shared_expert"], hidden, SharedGate::Sigmoid);
    d.plain("shared.0.router.weight", &["shared_expert_gate.weight"]);
    Ok(d)
}

/// Builds DeepSeek-V2. transformers computes softmax scores and reads neither `scoring_func` nor
/// `norm_topk_prob`. A file that asks for DeepSeek-V3's router, such as DeepSeek-VL2, gets that, as
/// in the model's own code.
fn deepseek_v2(c: &Config, layer: usize, defaults: [usize; 4]) -> Result<Draft, HfError> {
    let mut sizes = sizes(c, NARROW, defaults)?;
    if sizes.top_k == 0 {
        sizes.top_k = c.need(TOP_K)?;
    }
    let hidden = sizes.hidden;
    let mut d = plain(c, layer, sizes)?;
    deepseek_router(c, &mut d)?;
    merged_shared(c, &mut d, SHARED, 2, hidden)?;
    Ok(d)
}

/// Sets the router named by `topk_method`.
fn deepseek_router(c: &Config, d: &mut Draft) -> Result<(), HfError> {
    d.spec.router.scale = c.number(&["routed_scaling_factor"], 1.0)?;
    let by = |stat, mask| -> Result<Groups, HfError> {
        Ok(Groups {
            count: c.need(&["n_group"])?,
            keep: c.need(&["topk_group"])?,
            stat,
            mask,
        })
    };
    match c.text(&["topk_method"], "greedy")?.as_str() {
        "greedy" => Ok(()),
        "group_limited_greedy" => {
            d.groups(by(GroupStat::Max, GroupMask::Zero)?);
            Ok(())
        }
        "noaux_tc" => {
            if c.text(&["scoring_func"], "sigmoid")? == "softmax" {
                let axis = "a bias for selection on softmax scores";
                return Err(c.unsupported("scoring_func", axis, "known with noaux_tc is sigmoid"));
            }
            deepseek::router(c, d, &GLM4)
        }
        _ => {
            let remedy = "known are greedy, group_limited_greedy and noaux_tc";
            Err(c.unsupported("topk_method", "this selection", remedy))
        }
    }
}

/// Builds DeepSeek-MoE, the version before V2: `norm_topk_prob` is read, and there is no factor.
fn deepseek_v1(c: &Config, layer: usize) -> Result<Draft, HfError> {
    let sizes = sizes(c, NARROW, [2048, 1408, 64, 6])?;
    let hidden = sizes.hidden;
    let mut d = plain(c, layer, sizes)?;
    d.renormalize(c.flag(&["norm_topk_prob"], false)?, deepseek::EPS);
    merged_shared(c, &mut d, SHARED, 0, hidden)?;
    Ok(d)
}

/// Builds a DeepSeek block whose type tells no version, so its keys must say everything.
fn deepseek_ref(c: &Config, layer: usize) -> Result<Draft, HfError> {
    let sizes = Sizes {
        model: c.need(MODEL)?,
        hidden: c.need(NARROW)?,
        experts: c.need(EXPERTS)?,
        top_k: c.need(TOP_K)?,
    };
    for key in ["topk_method", "scoring_func", "norm_topk_prob"] {
        if c.peek(key).is_none() {
            return Err(c.missing(&[key]));
        }
    }
    let hidden = sizes.hidden;
    let mut d = plain(c, layer, sizes)?;
    deepseek_router(c, &mut d)?;
    merged_shared(c, &mut d, SHARED, 0, hidden)?;
    Ok(d)
}

/// Builds BailingMoE (Ling, Ring): softmax scores, or DeepSeek-V3's router from the second version
/// on, with a separate width for shared experts.
fn bailing(c: &Config, layer: usize) -> Result<Draft, HfError> {
    let sizes = Sizes {
        model: c.need(MODEL)?,
        hidden: c.need(NARROW)?,
        experts: c.need(EXPERTS)?,
        top_k: c.need(TOP_K)?,
    };
    let hidden = sizes.hidden;
    let mut d = plain(c, layer, sizes)?;
    let biased = c.flag(&["moe_router_enable_expert_bias"], false)?;
    match c.text(&["score_function"], "softmax")?.as_str() {
        "softmax" if biased => {
            let key = "moe_router_enable_expert_bias";
            let axis = "a bias for selection on softmax scores";
            return Err(c.unsupported(key, axis, "known with it is score_function sigmoid"));
        }
        "softmax" => {
            d.renormalize(c.flag(&["norm_topk_prob"], true)?, 0.0);
        }
        "sigmoid" => {
            deepseek::router(c, &mut d, &GLM4)?;
            d.spec.router.select_bias = biased;
        }
        _ => {
            let remedy = "known are softmax and sigmoid";
            return Err(c.unsupported("score_function", "this score", remedy));
        }
    }
    deepseek::modality_routers(c, &mut d)?;
    if let Some(experts) = c.size_opt(&["expert_capacity"])? {
        // A block's tokens choose among its experts, whatever their groups.
        let tokens = c.need(&["block_size"])?;
        d.spec.router.blocks = Some(TokenBlocks { tokens, experts });
        d.spec.router.groups = None;
        d.renormalize(true, 1e-20);
    }
    let count = c.size(SHARED, 0)?;
    if count > 0 {
        let width = c.size(&["moe_shared_expert_intermediate_size"], hidden)?;
        let modules = ["shared_experts"];
        d.shared(&modules, width.saturating_mul(count), SharedGate::None);
    }
    if c.flag(&["use_bias"], false)? {
        let axis = "biases of routed experts";
        return Err(c.unsupported("use_bias", axis, "only false, as published, can be read"));
    }
    Ok(d)
}

/// Builds Granite with a shared expert beside the block in one fused tensor.
fn granite_shared(c: &Config, layer: usize, default: usize) -> Result<Draft, HfError> {
    let mut d = granite(c, layer)?;
    let hidden = c.size(&["shared_intermediate_size"], default)?;
    if hidden > 0 {
        d.spec.shared.push(SharedExpert {
            hidden_dim: hidden,
            gate: SharedGate::None,
            bias: None,
            clamp: None,
            activation: None,
        });
        d.decoder(layer, &["shared_mlp."]);
        for (half, part) in ["gate", "up"].into_iter().enumerate() {
            let name = format!("shared.0.{part}.weight");
            d.stepped(
                &name,
                &["input_linear.weight"],
                &[half_of(0, half, hidden, false)],
            );
        }
        d.plain("shared.0.down.weight", &["output_linear.weight"]);
    }
    Ok(d)
}

/// Returns all layers of the hybrid model, or none if it has zero experts.
fn hybrid_layers(c: &Config) -> Result<Layers, HfError> {
    let experts = c.size(EXPERTS, 8)?;
    let total = layers::depth(c, 32)?;
    Ok(Layers::filtered(total, "num_local_experts is 0", |_| {
        experts > 0
    }))
}

fn hunyuan(c: &Config, layer: usize) -> Result<Draft, HfError> {
    let wide = c.size_at(WIDE, layer, 11008)?;
    let hidden = c.size_at(&["moe_intermediate_size"], layer, wide)?;
    let sizes = Sizes {
        model: c.size(MODEL, 4096)?,
        hidden,
        experts: c.size_at(EXPERTS, layer, 1)?,
        top_k: c.size_at(TOP_K, layer, 1)?,
    };
    let mut d = plain(c, layer, sizes)?;
    d.renormalize(true, 0.0);
    d.plain("router.weight", &["gate.wg.weight"]);
    let count = c.size_at(&["num_shared_expert"], layer, 1)?;
    if count > 0 {
        d.shared(
            &["shared_mlp"],
            wide.saturating_mul(count),
            SharedGate::None,
        );
    }
    Ok(d)
}

/// Builds Aria, whose routed experts are always silu whatever the shared ones use.
fn aria(c: &Config, layer: usize) -> Result<Draft, HfError> {
    let sizes = sizes(c, WIDE, [4096, 4096, 8, 2])?;
    let hidden = sizes.hidden;
    if c.text(&["hidden_act"], "silu")? != "silu" {
        let axis = "an activation of shared experts alone";
        return Err(c.unsupported("hidden_act", axis, "only silu can be read"));
    }
    let mut d = plain(c, layer, sizes)?;
    d.spec.router.score = Score::SoftmaxSelected;
    d.fused_experts(Fused::Columns, "experts.fc1.weight", "experts.fc2.weight");
    d.fused_experts(Fused::Columns, "experts.gate_up_proj", "experts.down_proj");
    merged_shared(c, &mut d, SHARED, 2, hidden)?;
    Ok(d)
}

/// Builds Cohere 2: the top k logits, then softmax or sigmoid over them. The average of routed and
/// shared experts becomes half of each.
fn cohere(c: &Config, layer: usize) -> Result<Draft, HfError> {
    let sizes = sizes(c, WIDE, [8192, 22528, 8, 2])?;
    let hidden = sizes.hidden;
    let mut d = plain(c, layer, sizes)?;
    match c.text(&["expert_selection_fn"], "softmax")?.as_str() {
        "softmax" => d.spec.router.score = Score::SoftmaxSelected,
        "sigmoid" => {
            d.spec.router.score = Score::Sigmoid;
            d.renormalize(c.flag(&["norm_topk_prob"], true)?, 0.0);
        }
        _ => {
            let remedy = "known are softmax and sigmoid";
            return Err(c.unsupported("expert_selection_fn", "this score", remedy));
        }
    }
    merged_shared(c, &mut d, SHARED, 0, hidden)?;
    let key = "shared_expert_combination_strategy";
    match c.text(&[key], "average")?.as_str() {
        "average" if !d.spec.shared.is_empty() => {
            d.spec.router.scale = 0.5;
            d.then("shared.0.down.weight", TensorStep::Factor(0.5));
        }
        "average" | "sum" => {}
        _ => {
            let remedy = "known are average and sum";
            return Err(c.unsupported(key, "this way to add shared experts", remedy));
        }
    }
    Ok(d)
}
