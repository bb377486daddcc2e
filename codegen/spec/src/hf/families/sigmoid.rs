//! Sigmoid routers other than DeepSeek-V3's, and Nemotron-H.

use super::super::config::Config;
use super::super::draft::{DECODER, Draft, Fused};
use super::super::source::half_of;
use super::super::{HfError, TensorPiece, TensorStep};
use super::block::{gated, merged_shared, plain, sizes};
use super::deepseek::{self, BIAS, GLM4};
use super::family::Family;
use super::keys::{NARROW, SHARED, WIDE};
use super::layers::{self, Layers, depth};
use crate::{BiasedValues, ExpertForm, Latent, Score, SharedGate, WeightSite};
use serde_json::Value;

/// The factor on Muse Spark's logits, `1 / sqrt(hidden_size / 256)` of the published model.
const MUSE_LOGITS: f64 = 0.176_776_695_296_636_9;

/// The families of this file.
pub(super) const FAMILIES: &[Family] = &[
    Family {
        names: &["nemotron_h"],
        layers: nemotron_layers,
        build: nemotron,
    },
    Family {
        names: &["nemotron_h_puzzle"],
        layers: puzzle_layers,
        build: puzzle,
    },
    Family {
        names: &["minimax_m2"],
        layers: |c| layers::every(c, 62),
        build: minimax_m2,
    },
    Family {
        names: &["muse_spark", "muse_spark_text"],
        layers: |c| layers::typed(c, 0, 62),
        build: muse_spark,
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
    Family {
        names: &["flint"],
        layers: |c| layers::stepped_except(c, &[0, 1], 49),
        build: flint,
    },
    Family {
        names: &["laguna"],
        layers: |c| layers::typed(c, 1, 40),
        build: laguna,
    },
    Family {
        names: &["kolibri1"],
        layers: |c| layers::every(c, 50),
        build: kolibri,
    },
    Family {
        names: &["minimax_m3_vl", "minimax_m3_vl_text", "minimax_m3"],
        layers: |c| layers::typed(c, 0, 60),
        build: minimax_m3,
    },
    Family {
        names: &["inkling_mm_model", "inkling_text"],
        layers: inkling_layers,
        build: inkling,
    },
    Family {
        names: &["inkling2", "inkling2_text"],
        layers: |c| layers::every(c, 48),
        build: |c, layer| inkling2(c, layer, [4608, 2304, 384, 8]),
    },
    Family {
        names: &["inkling2_loop", "inkling2_loop_text"],
        layers: |c| layers::every(c, 24),
        build: |c, layer| inkling2(c, layer, [2304, 1152, 128, 8]),
    },
    Family {
        names: &["step3p7", "step3p5"],
        layers: step_layers,
        build: step,
    },
];

/// Builds Nemotron-H: DeepSeek-V3's router and plain experts, in some models narrower than the
/// model.
fn nemotron(c: &Config, layer: usize) -> Result<Draft, HfError> {
    let mut d = Draft::new(c, sizes(c, NARROW, [4096, 7688, 8, 2])?);
    d.spec.experts.form = ExpertForm::Plain;
    d.activation(c, &["mlp_hidden_act"], "relu2")?;
    d.rooted(
        &["model.layers.", "backbone.layers.", "layers."],
        layer,
        &["mixer."],
    );
    deepseek::router(c, &mut d, &GLM4)?;
    d.plain("router.weight", &["gate.weight"]);
    for (part, leaf) in [("up", "up_proj"), ("down", "down_proj")] {
        let name = format!("experts.{part}.weight");
        d.per_expert(&name, "experts.", &[format!("{leaf}.weight")]);
        d.plain(&name, &[&format!("experts.{leaf}")]);
    }
    let hidden = c.size(&["moe_shared_expert_intermediate_size"], 7688)?;
    d.shared(&["shared_experts"], hidden, SharedGate::None);
    let bias = c.flag(&["mlp_bias"], false)?;
    if bias {
        d.biased();
    }
    if let Some(dim) = c.size_opt(&["moe_latent_size"])? {
        d.spec.latent = Some(Latent {
            dim,
            bias,
            norm_eps: None,
            input_norm_eps: None,
        });
        for (part, leaf) in [("down", "fc1_latent_proj"), ("up", "fc2_latent_proj")] {
            for kind in ["weight", "bias"] {
                d.plain(
                    &format!("latent.{part}.{kind}"),
                    &[&format!("{leaf}.{kind}")],
                );
            }
        }
    }
    Ok(d)
}

/// Builds a layer of Nemotron-H Puzzle, where each layer has sizes of its own.
fn puzzle(c: &Config, layer: usize) -> Result<Draft, HfError> {
    let own = c.with_entry("block_configs", layer)?;
    let draft = nemotron(&own, layer);
    c.mark_read(&own);
    draft
}

fn puzzle_layers(c: &Config) -> Result<Layers, HfError> {
    let types = c.entry_words("block_configs", "block_type")?;
    let why = "block_configs has none of block_type moe";
    Ok(Layers::filtered(types.len(), why, |i| types[i] == "moe"))
}

/// Returns the entries `moe` in the list of layer types, or the letters `E` in the pattern.
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

/// Builds Muse Spark, whose experts work between norms in a narrower width. Its norms multiply by
/// 1 + w.
fn muse_spark(c: &Config, layer: usize) -> Result<Draft, HfError> {
    let mut d = plain(c, layer, sizes(c, NARROW, [8192, 4096, 256, 8])?)?;
    d.sigmoid(BIAS);
    d.renormalize(true, 1e-15);
    d.spec.router.scale = c.number(&["routed_scaling_factor"], 1.0)?;
    // The same key also scales the model's logits; the router's are linear in its weight.
    let factor = c.number(&["output_multiplier"], MUSE_LOGITS)?;
    d.then("router.weight", TensorStep::Factor(factor));
    d.spec.latent = Some(Latent {
        dim: c.size(&["moe_hidden_size"], 4096)?,
        bias: false,
        norm_eps: None,
        input_norm_eps: Some(c.number(&["rms_norm_eps"], 1e-5)?),
    });
    d.spec.experts.output_norm_eps = Some(c.number(&["post_norm_eps"], 1e-8)?);
    d.plain("latent.down.weight", &["pre_expert_proj.weight"]);
    d.plain("latent.up.weight", &["post_expert_proj.weight"]);
    for (name, own) in [
        ("latent.input_norm.weight", "pre_expert_norm.weight"),
        ("expert_norm.weight", "experts.post_expert_norm.weight"),
    ] {
        d.stepped(name, &[own], &[TensorStep::Plus(1.0)]);
    }
    Ok(d)
}

fn lfm2(c: &Config, layer: usize) -> Result<Draft, HfError> {
    let mut d = Draft::new(c, sizes(c, NARROW, [2048, 1792, 32, 4])?);
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
    d.sigmoid(BIAS);
    d.spec.router.scale = c.number(&["route_scale"], 1.0)?;
    d.renormalize(true, 1e-20);
    merged_shared(c, &mut d, SHARED, 2, hidden)?;
    Ok(d)
}

/// Builds Llama 4, which weights the expert's input.
fn llama4(c: &Config, layer: usize) -> Result<Draft, HfError> {
    let sizes = sizes(c, WIDE, [5120, 8192, 16, 1])?;
    let hidden = sizes.hidden;
    let mut d = Draft::new(c, sizes);
    d.activation(c, &["hidden_act"], "silu")?;
    d.spec.router.score = Score::Sigmoid;
    d.spec.router.weight_on = WeightSite::Input;
    d.decoder(layer, &["feed_forward."]);
    d.plain("router.weight", &["router.weight"]);
    d.gated_experts(Fused::Columns);
    d.shared(&["shared_expert"], hidden, SharedGate::None);
    Ok(d)
}

/// Returns `moe_layers`, or every `interleave_moe_layer_step`-th layer.
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

/// Builds Flint: sigmoid scores without a bias, and Qwen's shared expert without its gate.
fn flint(c: &Config, layer: usize) -> Result<Draft, HfError> {
    let mut d = plain(c, layer, sizes(c, NARROW, [2048, 512, 256, 6])?)?;
    d.spec.router.score = Score::Sigmoid;
    d.renormalize(c.flag(&["norm_topk_prob"], true)?, 0.0);
    let hidden = c.size(&["shared_expert_intermediate_size"], 1024)?;
    d.shared(&["shared_expert"], hidden, SharedGate::None);
    Ok(d)
}

fn laguna(c: &Config, layer: usize) -> Result<Draft, HfError> {
    let key = "moe_apply_router_weight_on_input";
    if let Some((key, value @ Value::Bool(true))) = c.find(&[key]) {
        return Err(c.bad(key, value, "false: transformers computes nothing else"));
    }
    let mut d = plain(c, layer, sizes(c, NARROW, [2048, 512, 256, 8])?)?;
    d.sigmoid(&[BIAS, &["experts.e_score_correction_bias"]].concat());
    d.renormalize(true, 0.0);
    d.spec.router.scale = c.number(&["moe_routed_scaling_factor"], 1.0)?;
    let cap = c.number(&["moe_router_logit_softcapping"], 0.0)?;
    d.spec.router.logit_softcap = (cap > 0.0).then_some(cap);
    let hidden = c.size(&["shared_expert_intermediate_size"], 512)?;
    d.shared(
        &["shared_expert", "shared_experts"],
        hidden,
        SharedGate::None,
    );
    Ok(d)
}

/// Builds Kolibri 1: biased logits choose, and sigmoids of the others weigh.
fn kolibri(c: &Config, layer: usize) -> Result<Draft, HfError> {
    let mut d = plain(c, layer, sizes(c, NARROW, [2560, 512, 384, 6])?)?;
    d.sigmoid(BIAS);
    d.spec.router.select_bias_on = BiasedValues::Logits;
    d.renormalize(c.flag(&["norm_topk_prob"], false)?, 0.0);
    let hidden = c.size(&["shared_expert_intermediate_size"], 512)?;
    d.shared(&["shared_experts"], hidden, SharedGate::None);
    // Published checkpoints keep the bias beside the block.
    d.decoder(layer, &["moe."]);
    d.select_bias(&["router.expert_bias"]);
    Ok(d)
}

/// Builds MiniMax-M3: M2's router and gpt-oss's activation.
fn minimax_m3(c: &Config, layer: usize) -> Result<Draft, HfError> {
    let sizes = sizes(c, WIDE, [6144, 3072, 128, 4])?;
    // transformers ignores `hidden_act` here and writes the activation out, so this does too.
    let mut d = Draft::new(c, sizes);
    d.decoder(layer, &["mlp.", "block_sparse_moe."]);
    d.plain("router.weight", &["gate.weight"]);
    d.gated_experts(Fused::Rows);
    d.sigmoid(BIAS);
    d.renormalize(true, 0.0);
    d.spec.router.scale = c.number(&["routed_scaling_factor"], 2.0)?;
    d.swiglu_oai(c)?;
    let hidden = c.size(&["shared_intermediate_size"], 3072)?;
    d.shared(&["shared_experts"], hidden, SharedGate::None);
    for (half, part) in ["gate", "up"].into_iter().enumerate() {
        let name = format!("shared.0.{part}.weight");
        let half = half_of(0, half, hidden, false);
        d.stepped(&name, &["shared_experts.gate_up_proj.weight"], &[half]);
    }
    Ok(d)
}

/// Returns the sparse layers of `mlp_layer_types`, or those from `dense_mlp_idx` on.
fn inkling_layers(c: &Config) -> Result<Layers, HfError> {
    let dense = c.size(&["dense_mlp_idx"], 0)?;
    layers::typed(c, dense, 66)
}

/// Builds Inkling, whose shared experts are the last ones of the router: every token chooses them,
/// and their weights are normalised with those of the others.
fn inkling(c: &Config, layer: usize) -> Result<Draft, HfError> {
    let mut sizes = sizes(c, NARROW, [6144, 3072, 256, 6])?;
    // Such files have the experts' width in the key that is the dense layers' elsewhere.
    if c.size_opt(&["dense_intermediate_size"])?.is_some() {
        sizes.hidden = c.size(WIDE, sizes.hidden)?;
    }
    if !c.flag(&["shared_expert_sink"], true)? {
        let axis = "shared experts without a share of the weights";
        return Err(c.unsupported("shared_expert_sink", axis, "only true can be read"));
    }
    let (routed, shared) = (sizes.experts, c.size(SHARED, 2)?);
    sizes.experts = routed.saturating_add(shared);
    sizes.top_k = sizes.top_k.saturating_add(shared);
    let mut d = Draft::new(c, sizes);
    d.activation(c, &["hidden_act"], "silu")?;
    let prefixes = [DECODER, &["model.llm.layers."]].concat();
    d.rooted(&prefixes, layer, &["mlp."]);
    d.spec.router.always_chosen = shared;
    d.spec.router.score = Score::Sigmoid;
    d.renormalize(true, 0.0);
    d.spec.router.scale = c.number(&["route_scale"], 8.0)?;
    d.plain("router.weight", &["gate.weight"]);
    d.spec.router.expert_scale = true;
    d.repeated("router.expert_scale", "gate.global_scale");
    d.spec.router.select_bias = true;
    inkling_bias(&mut d, [routed, shared]);
    inkling_experts(&mut d, [routed, shared]);
    Ok(d)
}

/// Adds the selection bias. Shared experts have none, and any number serves them, because every
/// token chooses them.
fn inkling_bias(d: &mut Draft, [routed, shared]: [usize; 2]) {
    for name in ["gate.bias", "gate.e_score_correction_bias"] {
        let of_shared = TensorStep::Take {
            axis: 0,
            start: 0,
            step: 1,
            count: shared,
            of: routed,
        };
        let pieces = [
            TensorPiece::of(name, routed, vec![]),
            TensorPiece::of(name, shared, vec![of_shared]),
        ];
        d.joined("router.select_bias", &pieces);
    }
}

/// Adds routed and shared experts. Published checkpoints interleave the rows of gate and up.
fn inkling_experts(d: &mut Draft, [routed, shared]: [usize; 2]) {
    let hidden = d.spec.shape.hidden_dim;
    for (half, part) in ["gate", "up"].into_iter().enumerate() {
        let name = format!("experts.{part}.weight");
        let rows = |interleaved| vec![half_of(1, half, hidden, interleaved)];
        let published = [
            TensorPiece::of("experts.w13_weight", routed, rows(true)),
            TensorPiece::of("shared_experts.shared_w13_weight", shared, rows(true)),
        ];
        let own = format!("shared_experts.{part}_proj");
        let in_memory = [
            TensorPiece::of("experts.gate_up_proj", routed, rows(false)),
            TensorPiece::of(&own, shared, vec![]),
        ];
        d.joined(&name, &published);
        d.joined(&name, &in_memory);
    }
    for [of_routed, of_shared] in [
        ["experts.w2_weight", "shared_experts.shared_w2_weight"],
        ["experts.down_proj", "shared_experts.down_proj"],
    ] {
        let pieces = [
            TensorPiece::of(of_routed, routed, vec![]),
            TensorPiece::of(of_shared, shared, vec![]),
        ];
        d.joined("experts.down.weight", &pieces);
    }
}

/// Builds Inkling 2, whose experts have SiTU-GLU. Published checkpoints interleave the rows of gate
/// and up.
fn inkling2(c: &Config, layer: usize, defaults: [usize; 4]) -> Result<Draft, HfError> {
    let mut d = Draft::new(c, sizes(c, NARROW, defaults)?);
    d.rooted(
        &[DECODER, &["model.llm.layers."]].concat(),
        layer,
        &["mlp."],
    );
    d.plain("router.weight", &["gate.weight"]);
    d.fused_experts(Fused::Rows, "experts.gate_up_proj", "experts.down_proj");
    let hidden = d.spec.shape.hidden_dim;
    for (half, part) in ["gate", "up"].into_iter().enumerate() {
        let half = half_of(1, half, hidden, true);
        let name = format!("experts.{part}.weight");
        d.stepped(&name, &["experts.w13_weight"], &[half]);
    }
    d.plain("experts.down.weight", &["experts.w2_weight"]);
    let score = c.text(&["scoring_func"], "sigmoid")?;
    if score != "sigmoid" {
        let remedy = "only sigmoid can be read";
        return Err(c.unsupported("scoring_func", "these scores with a bias", remedy));
    }
    d.sigmoid(&[BIAS, &["gate.bias"]].concat());
    d.spec.router.scale = c.number(&["route_scale", "routed_scaling_factor"], 8.0)?;
    d.renormalize(true, deepseek::EPS);
    let up = c.number(&["mlp_up_softcap"], 25.0)?;
    d.situ(c, "mlp_gate_softcap", 4.0, Some(up))?;
    Ok(d)
}

/// Builds Step 3.7. Published checkpoints stack the experts, with gate and up apart.
fn step(c: &Config, layer: usize) -> Result<Draft, HfError> {
    // transformers reads n_routed_experts even where num_local_experts differs.
    let experts = c.size(&["n_routed_experts", "moe_num_experts"], 288)?;
    let mut sizes = sizes(c, NARROW, [4096, 1280, experts, 8])?;
    sizes.experts = experts;
    let mut d = gated(c, layer, sizes, DECODER, &["mlp.", "moe."])?;
    for part in ["gate", "up", "down"] {
        let name = format!("{part}_proj.weight");
        d.plain(&format!("experts.{part}.weight"), &[&name]);
    }
    d.sigmoid(&[BIAS, &["router_bias"]].concat());
    d.renormalize(true, 0.0);
    d.spec.router.scale = c.number(&["moe_router_scaling_factor"], 1.0)?;
    let hidden = c.size(&["share_expert_dim", "share_expert_dims"], 1280)?;
    d.decoder(layer, &["", "mlp."]);
    d.shared(
        &["share_expert", "shared_experts"],
        hidden,
        SharedGate::None,
    );
    if c.flag(&["mlp_bias"], false)? {
        d.biased();
    }
    d.limits_behind(c, layer, ["swiglu_limits", "swiglu_limits_shared"])?;
    Ok(d)
}

/// Returns the layers of `mlp_layer_types` or of `moe_layers_enum`; without both, the first three
/// layers are dense.
fn step_layers(c: &Config) -> Result<Layers, HfError> {
    match c.numbers("moe_layers_enum")? {
        Some(list) if c.words(&["mlp_layer_types"])?.is_none() => {
            let why = "moe_layers_enum names none";
            Ok(Layers::filtered(depth(c, 45)?, why, |i| list.contains(&i)))
        }
        _ => layers::typed(c, 3, 45),
    }
}
