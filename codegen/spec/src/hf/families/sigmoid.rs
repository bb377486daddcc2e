//! Sigmoid routers: DeepSeek-V3 and those after it, Llama 4.

use super::super::HfError;
use super::super::config::Config;
use super::super::draft::{Draft, Fused};
use super::layers::{self, Layers, depth};
use super::shared::merged_shared;
use super::softmax::{plain, sizes};
use super::{EXPERTS, Family, NARROW, TOP_K, WIDE};
use crate::{ExpertForm, GroupMask, GroupStat, Groups, Score, SharedGate, WeightSite};

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
        names: &["nemotron_h"],
        layers: nemotron_layers,
        build: nemotron,
    },
    Family {
        names: &["minimax_m2"],
        layers: |c| layers::every(c, 62),
        build: minimax_m2,
    },
    Family {
        names: &["lfm2_moe"],
        layers: |c| layers::after_dense(c, "num_dense_layers", 2, 32),
        build: lfm2,
    },
    Family {
        names: &["afmoe"],
        layers: |c| layers::after_dense(c, "num_dense_layers", 1, 32),
        build: afmoe,
    },
    Family {
        names: &["llama4", "llama4_text"],
        layers: llama4_layers,
        build: llama4,
    },
];

/// Where the DeepSeek-V3 block keeps its selection bias.
const BIAS: &[&str] = &["gate.e_score_correction_bias", "e_score_correction_bias"];

/// What transformers assumes for the keys of a DeepSeek-V3 block.
struct Defaults {
    /// Width, experts' width, experts, K.
    sizes: [usize; 4],
    scale: f64,
    /// Groups and how many are kept.
    groups: [usize; 2],
    renormalize: bool,
    shared: usize,
}

const V3: Defaults = Defaults {
    sizes: [7168, 2048, 256, 8],
    scale: 2.5,
    groups: [8, 4],
    renormalize: true,
    shared: 1,
};
const GLM_DSA: Defaults = Defaults {
    sizes: [6144, 2048, 256, 8],
    groups: [1, 1],
    ..V3
};
const GLM4: Defaults = Defaults {
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

fn deepseek(c: &Config, layer: usize, defaults: &Defaults) -> Result<Draft, HfError> {
    let mut sizes = sizes(c, NARROW, defaults.sizes)?;
    if sizes.experts == 0 {
        sizes.experts = c.need(EXPERTS)?;
    }
    if sizes.top_k == 0 {
        sizes.top_k = c.need(TOP_K)?;
    }
    let hidden = sizes.hidden;
    let mut d = plain(c, layer, sizes)?;
    sigmoid_router(c, &mut d, defaults)?;
    let key = if c.model == "exaone_moe" {
        "num_shared_experts"
    } else {
        "n_shared_experts"
    };
    merged_shared(c, &mut d, key, defaults.shared, hidden)?;
    Ok(d)
}

/// Biased sigmoid scores, groups by their two best, unbiased weights.
fn sigmoid_router(c: &Config, d: &mut Draft, defaults: &Defaults) -> Result<(), HfError> {
    d.sigmoid(BIAS);
    d.spec.router.scale = c.number(&["routed_scaling_factor"], defaults.scale)?;
    d.renormalize(c.flag(&["norm_topk_prob"], defaults.renormalize)?, 1e-20);
    d.groups(Groups {
        count: c.size(&["n_group"], defaults.groups[0])?,
        keep: c.size(&["topk_group"], defaults.groups[1])?,
        stat: GroupStat::Top2Sum,
        mask: GroupMask::Exclude,
    });
    Ok(())
}

/// Nemotron-H: DeepSeek-V3's router, plain experts.
fn nemotron(c: &Config, layer: usize) -> Result<Draft, HfError> {
    if c.size_opt(&["moe_latent_size"])?.is_some() {
        let axis = "a latent projection around the routed experts";
        return Err(c.unsupported(
            "moe_latent_size",
            axis,
            "only models without it can be read",
        ));
    }
    let mut d = Draft::new(c, layer, sizes(c, NARROW, [4096, 7688, 8, 2])?);
    d.spec.experts.form = ExpertForm::Plain;
    d.activation(c, &["mlp_hidden_act"], "relu2")?;
    d.rooted(
        &["model.layers.", "backbone.layers.", "layers."],
        layer,
        &["mixer."],
    );
    sigmoid_router(c, &mut d, &GLM4)?;
    d.plain("router.weight", &["gate.weight"]);
    for (part, leaf) in [("up", "up_proj"), ("down", "down_proj")] {
        let name = format!("experts.{part}.weight");
        d.per_expert(&name, "experts.", &[format!("{leaf}.weight")]);
        d.plain(&name, &[&format!("experts.{leaf}")]);
    }
    let hidden = c.size(&["moe_shared_expert_intermediate_size"], 7688)?;
    d.shared("shared_experts", hidden, SharedGate::None);
    if c.flag(&["mlp_bias"], false)? {
        d.biased();
    }
    Ok(d)
}

/// Entries `moe` of the list of layer types, or letters `E` of the pattern.
fn nemotron_layers(c: &Config) -> Result<Layers, HfError> {
    let why = "layers_block_type or hybrid_override_pattern names none";
    let types = match c.words(&["layers_block_type", "layer_types"])? {
        Some(types) => types.iter().map(|t| t == "moe").collect(),
        None => match c.find(&["hybrid_override_pattern"]) {
            Some(_) => c
                .text(&["hybrid_override_pattern"], "")?
                .chars()
                .map(|l| l == 'E')
                .collect(),
            None => vec![false, true, false, false],
        },
    };
    Ok(Layers::filtered(types.len(), why, |i| types[i]))
}

fn minimax_m2(c: &Config, layer: usize) -> Result<Draft, HfError> {
    let mut d = plain(c, layer, sizes(c, WIDE, [3072, 1536, 256, 8])?)?;
    d.sigmoid(BIAS);
    d.renormalize(true, 0.0);
    Ok(d)
}

fn lfm2(c: &Config, layer: usize) -> Result<Draft, HfError> {
    let mut d = Draft::new(c, layer, sizes(c, NARROW, [2048, 1792, 32, 4])?);
    d.decoder(layer, &["feed_forward."]);
    d.plain("router.weight", &["gate.weight"]);
    d.gated_experts(Fused::Rows);
    d.spec.router.score = Score::Sigmoid;
    if c.flag(&["use_expert_bias"], true)? {
        d.select_bias(&["expert_bias"]);
    }
    d.spec.router.scale = c.number(&["routed_scaling_factor"], 1.0)?;
    d.renormalize(c.flag(&["norm_topk_prob"], true)?, 1e-6);
    Ok(d)
}

fn afmoe(c: &Config, layer: usize) -> Result<Draft, HfError> {
    let sizes = sizes(c, NARROW, [2048, 1408, 64, 6])?;
    let hidden = sizes.hidden;
    let mut d = plain(c, layer, sizes)?;
    d.plain("router.weight", &["router.gate.weight"]);
    d.sigmoid(&["expert_bias"]);
    d.spec.router.scale = c.number(&["route_scale"], 1.0)?;
    d.renormalize(true, 1e-20);
    merged_shared(c, &mut d, "num_shared_experts", 2, hidden)?;
    Ok(d)
}

/// Llama 4 weighs the expert's input.
fn llama4(c: &Config, layer: usize) -> Result<Draft, HfError> {
    let sizes = sizes(c, WIDE, [5120, 8192, 16, 1])?;
    let hidden = sizes.hidden;
    let mut d = Draft::new(c, layer, sizes);
    d.activation(c, &["hidden_act"], "silu")?;
    d.spec.router.score = Score::Sigmoid;
    d.spec.router.weight_on = WeightSite::Input;
    d.decoder(layer, &["feed_forward."]);
    d.plain("router.weight", &["router.weight"]);
    d.gated_experts(Fused::Columns);
    d.shared("shared_expert", hidden, SharedGate::None);
    Ok(d)
}

/// `moe_layers`, or every `interleave_moe_layer_step`-th layer.
fn llama4_layers(c: &Config) -> Result<Layers, HfError> {
    let why = "moe_layers or interleave_moe_layer_step leave none";
    let total = depth(c, 48)?;
    if let Some(list) = c.sizes("moe_layers")? {
        return Ok(Layers::filtered(total, why, |i| list.contains(&i)));
    }
    let step = c.size(&["interleave_moe_layer_step"], 1)?;
    Ok(Layers::filtered(total, why, |i| {
        step > 0 && (i + 1).is_multiple_of(step)
    }))
}
