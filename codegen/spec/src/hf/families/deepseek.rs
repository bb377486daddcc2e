//! DeepSeek-V3's block and its successors: biased sigmoid or plain softmax scores, groups scored by
//! their two best experts, merged shared experts.

use super::super::HfError;
use super::super::config::Config;
use super::super::draft::{DECODER, Draft};
use super::block::{gated, merged_shared, sizes};
use super::family::Family;
use super::keys::{EXPERTS, NARROW, SHARED, TOP_K};
use super::layers;
use crate::{GroupMask, GroupStat, Groups, Latent, Score, SharedGate};

/// The families of this file.
pub(super) const FAMILIES: &[Family] = &[
    Family {
        names: &["deepseek_v3", "kimi_k2"],
        layers: |c| layers::after_dense(c, "first_k_dense_replace", 3, 61),
        build: |c, layer| deepseek(c, layer, &V3),
    },
    Family {
        names: &["deepseek_v32"],
        layers: |c| layers::typed(c, 3, 61),
        build: |c, layer| deepseek(c, layer, &V3),
    },
    Family {
        names: &["glm_moe_dsa"],
        layers: |c| layers::typed(c, 3, 78),
        build: |c, layer| deepseek(c, layer, &GLM_DSA),
    },
    Family {
        names: &["glm4_moe", "glm4v_moe", "glm4v_moe_text"],
        layers: |c| layers::after_dense(c, "first_k_dense_replace", 1, 46),
        build: |c, layer| deepseek(c, layer, &GLM4),
    },
    Family {
        names: &["glm4_moe_lite"],
        layers: |c| layers::typed(c, 1, 47),
        build: |c, layer| deepseek(c, layer, &GLM4_LITE),
    },
    Family {
        names: &["glm5_next", "glm5_next_text"],
        layers: |c| layers::typed(c, 3, 45),
        build: glm5,
    },
    Family {
        names: &["solar_open"],
        layers: |c| layers::every(c, 48),
        build: |c, layer| deepseek(c, layer, &SOLAR),
    },
    Family {
        names: &["dots1"],
        layers: |c| layers::after_dense(c, "first_k_dense_replace", 0, 62),
        build: |c, layer| deepseek(c, layer, &DOTS1),
    },
    Family {
        names: &["exaone_moe"],
        layers: |c| layers::typed(c, 1, 32),
        build: |c, layer| deepseek(c, layer, &EXAONE),
    },
    Family {
        names: &["axk1"],
        layers: |c| layers::typed(c, 1, 61),
        build: axk1,
    },
    Family {
        names: &["axk2"],
        layers: |c| layers::typed(c, 1, 48),
        build: |c, layer| deepseek(c, layer, &AXK2),
    },
    Family {
        names: &["bailing_hybrid"],
        layers: |c| layers::typed(c, 2, 42),
        build: bailing_hybrid,
    },
    Family {
        names: &["beam"],
        layers: |c| layers::typed(c, 3, 52),
        build: |c, layer| deepseek(c, layer, &BEAM),
    },
    Family {
        names: &["hy_v3"],
        layers: |c| layers::typed(c, 1, 80),
        build: |c, layer| deepseek(c, layer, &HUNYUAN_V3),
    },
    Family {
        names: &["hy_v4"],
        layers: |c| layers::typed(c, 1, 34),
        build: |c, layer| hunyuan4(c, layer, &HUNYUAN_V4),
    },
    Family {
        names: &["hy_v4_vl", "hy_v4_vl_text"],
        layers: |c| layers::typed(c, 1, 78),
        build: |c, layer| hunyuan4(c, layer, &HUNYUAN_V4_VL),
    },
    Family {
        names: &["gigachat3_5"],
        layers: |c| layers::after_dense(c, "first_k_dense_replace", 1, 12),
        build: gigachat,
    },
    Family {
        names: &["sarvam_moe"],
        layers: |c| layers::after_dense(c, "first_k_dense_replace", 1, 19),
        build: |c, layer| deepseek(c, layer, &SARVAM),
    },
    Family {
        names: &["sarvam_mla"],
        layers: |c| layers::after_dense(c, "first_k_dense_replace", 1, 32),
        build: |c, layer| deepseek(c, layer, &SARVAM_MLA),
    },
    Family {
        names: &["kimi_linear"],
        layers: |c| layers::typed(c, 1, 27),
        build: kimi_linear,
    },
    Family {
        names: &["mimo_v2_flash", "mimo_v2"],
        layers: |c| layers::typed(c, 1, 48),
        build: |c, layer| deepseek(c, layer, &MIMO_V2),
    },
    Family {
        names: &["mistral4"],
        layers: |c| layers::after_dense(c, "first_k_dense_replace", 0, 36),
        build: |c, layer| deepseek(c, layer, &MISTRAL4),
    },
    Family {
        names: &["mistral_large4", "mistral_large4_text"],
        layers: |c| layers::typed(c, 1, 72),
        build: |c, layer| deepseek(c, layer, &MISTRAL_LARGE4),
    },
];

/// Possible names of the selection bias.
pub(super) const BIAS: &[&str] = &[
    "gate.e_score_correction_bias",
    "e_score_correction_bias",
    "gate.expert_bias",
    "expert_bias",
];

/// Spellings of the weight factor, of renormalization and of the group keys.
const SCALE: &[&str] = &["routed_scaling_factor", "router_scaling_factor"];
const RENORMALIZE: &[&str] = &["norm_topk_prob", "moe_renormalize"];
const GROUPS: &[&str] = &["n_group", "num_expert_group"];

/// The epsilon in the denominator of renormalization.
pub(super) const EPS: f64 = 1e-20;

/// The defaults that transformers assumes for the keys of such a block, and properties without a
/// key.
pub(super) struct Defaults {
    /// Width, experts' width, experts, K.
    pub sizes: [usize; 4],
    pub scale: f64,
    /// Number of groups, and number kept.
    pub groups: [usize; 2],
    pub renormalize: bool,
    pub shared: usize,
    /// The score function. Sigmoid scores have a selection bias, softmax scores have none.
    pub score: Score,
    /// The scores of experts in dropped groups.
    pub mask: GroupMask,
    /// The block's possible paths inside a layer.
    pub blocks: &'static [&'static str],
}

const V3: Defaults = Defaults {
    sizes: [7168, 2048, 256, 8],
    scale: 2.5,
    groups: [8, 4],
    renormalize: true,
    shared: 1,
    score: Score::Sigmoid,
    mask: GroupMask::Exclude,
    blocks: &["mlp.", "block_sparse_moe."],
};
const GLM_DSA: Defaults = Defaults {
    sizes: [6144, 2048, 256, 8],
    groups: [1, 1],
    ..V3
};
pub(super) const GLM4: Defaults = Defaults {
    sizes: [4096, 1408, 128, 8],
    scale: 1.0,
    groups: [1, 1],
    ..V3
};
const GLM4_LITE: Defaults = Defaults {
    sizes: [2048, 1536, 64, 4],
    scale: 1.8,
    ..GLM4
};
const GLM5: Defaults = Defaults {
    sizes: [4096, 2048, 288, 8],
    scale: 2.5,
    ..GLM4
};
const SOLAR: Defaults = Defaults {
    sizes: [4096, 1280, 128, 8],
    ..GLM4
};
const EXAONE: Defaults = Defaults {
    sizes: [4096, 1024, 64, 8],
    scale: 2.5,
    ..GLM4
};
/// Zeros stand for keys without a default.
const DOTS1: Defaults = Defaults {
    sizes: [4608, 1408, 0, 0],
    renormalize: false,
    shared: 0,
    ..GLM4
};
const AXK1: Defaults = Defaults {
    sizes: [7168, 2048, 192, 8],
    ..V3
};
const AXK2: Defaults = Defaults {
    sizes: [2048, 512, 128, 8],
    groups: [1, 1],
    mask: GroupMask::Zero,
    ..V3
};
const BAILING: Defaults = Defaults {
    sizes: [2560, 768, 512, 8],
    ..V3
};
const BEAM: Defaults = Defaults {
    sizes: [5120, 2560, 256, 8],
    shared: 0,
    ..V3
};
const HUNYUAN_V3: Defaults = Defaults {
    sizes: [4096, 1536, 192, 8],
    scale: 2.826,
    ..GLM4
};
const HUNYUAN_V4: Defaults = Defaults {
    sizes: [2816, 768, 256, 8],
    scale: 2.827,
    ..GLM4
};
const HUNYUAN_V4_VL: Defaults = Defaults {
    sizes: [6144, 2048, 256, 8],
    ..HUNYUAN_V4
};
const GIGACHAT: Defaults = Defaults {
    sizes: [1280, 896, 64, 6],
    scale: 2.5,
    shared: 2,
    ..GLM4
};
const SARVAM: Defaults = Defaults {
    sizes: [4096, 1024, 128, 6],
    scale: 2.5,
    ..GLM4
};
const SARVAM_MLA: Defaults = Defaults {
    sizes: [4096, 2048, 128, 8],
    ..SARVAM
};
const KIMI_LINEAR: Defaults = Defaults {
    sizes: [2304, 1024, 256, 8],
    scale: 2.446,
    ..GLM4
};
const MIMO_V2: Defaults = Defaults {
    sizes: [4096, 2048, 256, 8],
    shared: 0,
    ..GLM4
};
const MISTRAL4: Defaults = Defaults {
    sizes: [4096, 2048, 128, 4],
    score: Score::Softmax,
    mask: GroupMask::Zero,
    ..GLM4
};
/// Published checkpoints keep the block's tensors directly under the layer.
const MISTRAL_LARGE4: Defaults = Defaults {
    sizes: [6144, 6144, 128, 4],
    blocks: &["mlp.", ""],
    ..MISTRAL4
};

/// Builds the block with merged shared experts: one as wide as all of them.
fn deepseek(c: &Config, layer: usize, defaults: &Defaults) -> Result<Draft, HfError> {
    let mut d = routed(c, layer, defaults)?;
    let hidden = d.spec.shape.hidden_dim;
    merged_shared(c, &mut d, SHARED, defaults.shared, hidden)?;
    Ok(d)
}

/// Builds the block without shared experts.
pub(super) fn routed(c: &Config, layer: usize, defaults: &Defaults) -> Result<Draft, HfError> {
    let mut sizes = sizes(c, NARROW, defaults.sizes)?;
    if sizes.experts == 0 {
        sizes.experts = c.need(EXPERTS)?;
    }
    if sizes.top_k == 0 {
        sizes.top_k = c.need(TOP_K)?;
    }
    let mut d = gated(c, layer, sizes, DECODER, defaults.blocks)?;
    router(c, &mut d, defaults)?;
    Ok(d)
}

/// Sets the scores, the groups by their two best, and unbiased weights.
pub(super) fn router(c: &Config, d: &mut Draft, defaults: &Defaults) -> Result<(), HfError> {
    if defaults.score == Score::Sigmoid {
        d.sigmoid(BIAS);
    }
    d.spec.router.scale = c.number(SCALE, defaults.scale)?;
    d.renormalize(c.flag(RENORMALIZE, defaults.renormalize)?, EPS);
    d.groups(Groups {
        count: c.size(GROUPS, defaults.groups[0])?,
        keep: c.size(&["topk_group"], defaults.groups[1])?,
        stat: GroupStat::Top2Sum,
        mask: defaults.mask,
    });
    Ok(())
}

/// Builds Hunyuan 4, which clamps activations in routed experts alone.
fn hunyuan4(c: &Config, layer: usize, defaults: &Defaults) -> Result<Draft, HfError> {
    let mut d = deepseek(c, layer, defaults)?;
    d.spec.experts.clamp = Some(c.number(&["swiglu_limit"], 10.0)?);
    let shared = d.spec.shared.iter_mut();
    shared.for_each(|expert| expert.clamp = Some(0.0));
    // transformers saves every `gate_proj` so, as attention's is published.
    d.plain(
        "shared.0.gate.weight",
        &["shared_experts.linear_gate.weight"],
    );
    Ok(d)
}

/// Builds GigaChat 3.5 as SGLang serves it, which leaves the gate of the shared expert undefined.
fn gigachat(c: &Config, layer: usize) -> Result<Draft, HfError> {
    if c.flag(&["use_shared_expert_sigmoid"], false)? {
        let axis = "the gate of this shared expert";
        return Err(c.unsupported("use_shared_expert_sigmoid", axis, "only false can be read"));
    }
    deepseek(c, layer, &GIGACHAT)
}

/// Builds Ling 3 and its older siblings. vLLM and SGLang read the limits of Ling 3, transformers
/// does not.
fn bailing_hybrid(c: &Config, layer: usize) -> Result<Draft, HfError> {
    let mut d = deepseek(c, layer, &BAILING)?;
    let lists = ["expert_swiglu_limit_list", "share_expert_swiglu_limit_list"];
    d.limits_behind(c, layer, lists)?;
    modality_routers(c, &mut d)?;
    Ok(d)
}

/// Adds Ling's routers of images and audio, as SGLang serves them. Video has that of images.
pub(super) fn modality_routers(c: &Config, d: &mut Draft) -> Result<(), HfError> {
    let flag = c.flag(&["multi_gate"], false)?;
    let named = c.text(&["router_type"], "topN")? == "MultiRouter";
    if !flag && !named {
        return Ok(());
    }
    if !d.spec.router.select_bias {
        let key = if flag { "multi_gate" } else { "router_type" };
        let axis = "routers by modality without a bias for selection";
        return Err(c.unsupported(key, axis, "known with it is score_function sigmoid"));
    }
    for name in ["image", "audio"] {
        d.modality_router(name);
    }
    let note = "tokens of images and audio have routers of their own over the layer's experts; \
                the layer alone routes text, and every token of a call without modalities";
    d.notes.push(note.to_string());
    Ok(())
}

/// Builds Kimi-Linear, and Kimi-K3, whose routed experts are narrower than the model.
fn kimi_linear(c: &Config, layer: usize) -> Result<Draft, HfError> {
    let mut d = deepseek(c, layer, &KIMI_LINEAR)?;
    if let Some(dim) = c.size_opt(&["routed_expert_hidden_size"])? {
        let norms = c.flag(&["latent_moe_use_norm"], false)?;
        let eps = c.number(&["rms_norm_eps"], 1e-6)?;
        d.spec.latent = Some(Latent {
            dim,
            bias: false,
            norm_eps: norms.then_some(eps),
            input_norm_eps: None,
        });
        d.plain("latent.norm.weight", &["routed_expert_norm.weight"]);
        for part in ["down", "up"] {
            let name = format!("routed_expert_{part}_proj.weight");
            d.plain(&format!("latent.{part}.weight"), &[&name]);
        }
    }
    Ok(d)
}

/// Builds GLM-5, which clamps activations in routed and shared experts.
fn glm5(c: &Config, layer: usize) -> Result<Draft, HfError> {
    let mut d = deepseek(c, layer, &GLM5)?;
    d.spec.experts.clamp = Some(c.number(&["swiglu_limit"], 10.0)?);
    Ok(d)
}

/// Builds A.X-K1, which has a norm after the block; checkpoints keep it in the layer.
fn axk1(c: &Config, layer: usize) -> Result<Draft, HfError> {
    let mut d = deepseek(c, layer, &AXK1)?;
    let note = "y is the input of post_mlp_layernorm, which transformers counts to the block";
    d.notes.push(note.to_string());
    Ok(d)
}

/// Builds Dots 3's language model, whose shared experts have their own width.
pub(super) fn dots3_text(c: &Config, layer: usize) -> Result<Draft, HfError> {
    const DOTS3: Defaults = Defaults {
        sizes: [5120, 1536, 256, 8],
        ..GLM4
    };
    let mut d = routed(c, layer, &DOTS3)?;
    let keys = [
        "moe_shared_expert_intermediate_size",
        "shared_experts_intermediate_size",
    ];
    let (width, count) = (c.size(&keys, 1536)?, c.size(SHARED, DOTS3.shared)?);
    d.shared(
        &["shared_experts"],
        width.saturating_mul(count),
        SharedGate::None,
    );
    Ok(d)
}
