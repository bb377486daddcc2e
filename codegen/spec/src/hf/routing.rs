//! The routing keys of a configuration, and the treatment of each.
//!
//! A family reads the keys that transformers reads for it. Every other key in this table must
//! either agree with what the layer computes, or be known to change no output. A key that asks for
//! something else is an error, so none is ignored silently.

use super::HfError;
use super::config::{Config, unlimited};
use super::draft::Draft;
use super::families::keys;
use super::said::Said;
use crate::{Score, Select, SharedGate, WeightSite};

/// Spellings of one setting.
struct Keys {
    names: &'static [&'static str],
    /// The subject, for messages.
    about: &'static str,
    rule: Rule,
}

/// The treatment of a key that the family does not read.
enum Rule {
    /// It must agree with what the layer computes.
    Same(fn(&Said<'_>) -> bool),
    /// It changes no output of a layer, for this reason.
    Ignored(&'static str),
}

const TABLE: &[Keys] = &[
    Keys {
        names: &[
            "scoring_func",
            "score_func",
            "score_function",
            "moe_router_activation_func",
            "moe_router_activation",
            "router_activation",
            "moe_router_score_function",
            "expert_selection_fn",
            "moe_gate_act",
        ],
        about: "the scores of experts",
        rule: Rule::Same(|s| s.score()),
    },
    Keys {
        names: &["moe_router_use_sigmoid", "use_sigmoid_gating"],
        about: "the scores of experts",
        rule: Rule::Same(|s| s.is(s.spec.router.score == Score::Sigmoid)),
    },
    Keys {
        names: &["topk_method"],
        about: "the choice of experts",
        rule: Rule::Same(|s| s.method()),
    },
    Keys {
        names: &[
            "norm_topk_prob",
            "moe_renormalize",
            "route_norm",
            "norm_expert_weight",
            "moe_router_norm_topk_prob",
        ],
        about: "whether the chosen weights are divided by their sum",
        rule: Rule::Same(|s| s.normalised()),
    },
    Keys {
        names: &["n_group", "num_expert_group", "num_expert_groups"],
        about: "groups of experts",
        rule: Rule::Same(|s| s.grouped(|groups| groups.count)),
    },
    Keys {
        names: &["topk_group", "num_limited_groups"],
        about: "groups of experts",
        rule: Rule::Same(|s| s.grouped(|groups| groups.keep)),
    },
    Keys {
        names: &["router_n_groups"],
        about: "groups that each give as many experts",
        rule: Rule::Same(|s| {
            let groups = match s.spec.router.select {
                Select::PerGroup(groups) => groups as f64,
                _ => 0.0,
            };
            s.value.as_f64().is_some_and(|n| n.max(0.0) == groups)
        }),
    },
    Keys {
        names: &["expert_capacity"],
        about: "the experts that a block of tokens agrees on",
        rule: Rule::Same(|s| {
            let blocks = s.spec.router.blocks.map(|blocks| blocks.experts as u64);
            s.value.as_u64() == blocks
        }),
    },
    Keys {
        names: &["group_limited_greedy", "use_grouped_topk"],
        about: "groups of experts",
        // With one group, or with all groups kept, both settings compute the same.
        rule: Rule::Same(|s| {
            s.value.as_bool() == Some(s.spec.router.groups.is_some()) || s.one_group()
        }),
    },
    Keys {
        names: &[
            "routed_scaling_factor",
            "router_scaling_factor",
            "moe_routed_scaling_factor",
            "moe_router_scaling_factor",
            "moe_router_topk_scaling_factor",
            "route_scale",
            "router_scale",
        ],
        about: "the factor on all weights",
        rule: Rule::Same(|s| s.value.as_f64() == Some(s.spec.router.scale)),
    },
    Keys {
        names: &["moe_router_enable_routed_scaling"],
        about: "the factor on all weights",
        rule: Rule::Same(|s| s.value.as_bool() == Some(true) || s.spec.router.scale == 1.0),
    },
    Keys {
        names: &[
            "router_bias",
            "moe_router_bias",
            "use_router_bias",
            "add_router_bias",
        ],
        about: "a bias of the router's logits",
        rule: Rule::Same(|s| s.is(s.spec.router.bias)),
    },
    Keys {
        names: &[
            "use_routing_bias",
            "moe_router_enable_expert_bias",
            "use_expert_bias",
            "moe_use_aux_free",
            "use_moe_router_bias",
        ],
        about: "a bias for selection",
        rule: Rule::Same(|s| s.is(s.spec.router.select_bias) || s.by_table()),
    },
    Keys {
        names: keys::EXPERTS,
        about: "the number of experts",
        rule: Rule::Same(|s| s.numbers(|n| n == s.others(s.spec.shape.experts))),
    },
    Keys {
        names: keys::TOP_K,
        about: "the number of experts per token",
        rule: Rule::Same(|s| s.counts_top_k()),
    },
    Keys {
        // Beside another spelling in gpt-oss, so no family reads it.
        names: &["experts_per_token"],
        about: "the number of experts per token",
        rule: Rule::Same(|s| s.counts_top_k()),
    },
    Keys {
        names: keys::SHARED,
        about: "shared experts",
        rule: Rule::Same(|s| s.counts_shared()),
    },
    Keys {
        // By layer, so only the family that has such lists reads it.
        names: &["num_shared_expert"],
        about: "shared experts",
        rule: Rule::Same(|s| s.counts_shared()),
    },
    Keys {
        names: &[
            "shared_expert_intermediate_size",
            "moe_shared_expert_intermediate_size",
            "shared_experts_intermediate_size",
            "shared_intermediate_size",
            "share_expert_dim",
            "share_expert_dims",
        ],
        about: "the width of shared experts",
        rule: Rule::Same(|s| s.numbers(|n| s.shared_width(n))),
    },
    Keys {
        names: &["use_mixed_mlp_moe", "moe_router_enable_shared_expert"],
        about: "shared experts",
        rule: Rule::Same(|s| s.is(!s.spec.shared.is_empty())),
    },
    Keys {
        names: &["shared_moe_mode"],
        about: "the gate of shared experts",
        rule: Rule::Same(|s| {
            let mut gates = s.spec.shared.iter().map(|expert| expert.gate);
            gates.all(|gate| (gate == SharedGate::Sigmoid) == (s.value == "sigmoid"))
        }),
    },
    Keys {
        names: &["moe_router_logit_softcapping", "router_logit_softcapping"],
        about: "a soft cap on logits",
        rule: Rule::Same(|s| s.value.as_f64() == Some(s.spec.router.logit_softcap.unwrap_or(0.0))),
    },
    Keys {
        names: &[
            "moe_apply_router_weight_on_input",
            "apply_router_weight_on_input",
        ],
        about: "what the weights multiply",
        rule: Rule::Same(|s| s.is(s.spec.router.weight_on == WeightSite::Input)),
    },
    Keys {
        names: &["zero_expert_num"],
        about: "experts that return their input",
        rule: Rule::Same(|s| s.value.as_u64() == Some(s.spec.experts.identity as u64)),
    },
    Keys {
        names: &["zero_expert_type"],
        about: "what experts without weights return",
        rule: Rule::Same(|s| s.value == "identity" || s.spec.experts.identity == 0),
    },
    Keys {
        names: &[
            "moe_latent_size",
            "routed_expert_hidden_size",
            "moe_hidden_size",
        ],
        about: "the width that experts work in",
        rule: Rule::Same(|s| {
            let dim = s.spec.latent.as_ref().map(|latent| latent.dim as u64);
            s.value.as_u64() == Some(dim.unwrap_or(s.spec.shape.model_dim as u64))
        }),
    },
    Keys {
        names: &["latent_moe_use_norm"],
        about: "a norm around experts",
        rule: Rule::Same(|s| {
            let latent = s.spec.latent.as_ref();
            s.is(latent.is_some_and(|latent| latent.norm_eps.is_some()))
        }),
    },
    Keys {
        names: &["swiglu_limit"],
        about: "the clamp of the activation",
        rule: Rule::Same(|s| s.value.as_f64() == Some(s.spec.experts.clamp.unwrap_or(0.0))),
    },
    Keys {
        names: &[
            "swiglu_limits",
            "swiglu_limits_shared",
            "expert_swiglu_limit_list",
            "share_expert_swiglu_limit_list",
        ],
        about: "clamps of the activation by layer",
        rule: Rule::Same(|s| unlimited(s.value, s.layer)),
    },
    Keys {
        names: &["mlp_bias", "moe_bias"],
        about: "biases of experts",
        rule: Rule::Same(|s| s.biased()),
    },
    Keys {
        names: &[
            "first_k_dense_replace",
            "num_dense_layers",
            "moe_layer_num_skipped",
        ],
        about: "which layers have experts",
        rule: Rule::Same(|s| s.placed(|layer, n| n <= layer)),
    },
    Keys {
        names: &[
            "decoder_sparse_step",
            "interleave_moe_layer_step",
            "moe_layer_interval",
        ],
        about: "which layers have experts",
        rule: Rule::Same(|s| s.placed(|layer, n| n > 0 && (layer + 1).is_multiple_of(n))),
    },
    Keys {
        names: &["moe_layer_freq", "moe_every_n_layer"],
        about: "which layers have experts",
        rule: Rule::Same(|s| s.frequent()),
    },
    Keys {
        names: &["mlp_only_layers"],
        about: "which layers have experts",
        rule: Rule::Same(|s| !s.lists_layer()),
    },
    Keys {
        names: &["moe_layers", "moe_layers_enum"],
        about: "which layers have experts",
        rule: Rule::Same(|s| s.layer.is_none() || s.lists_layer()),
    },
    Keys {
        names: &["capacity_factor", "moe_drop_tokens"],
        about: "a capacity of experts",
        // Zero or less means no capacity.
        rule: Rule::Same(|s| {
            let none = s.value.as_f64().is_some_and(|n| n <= 0.0);
            s.spec.may_drop() || none || s.is(false)
        }),
    },
    Keys {
        names: &[
            "add_router_probs",
            "uniform_expert_assignment",
            "multi_gate",
        ],
        about: "what the router chooses",
        rule: Rule::Same(|s| s.is(false)),
    },
    Keys {
        names: &[
            "router_jitter_noise",
            "input_jitter_noise",
            "jitter_noise",
            "moe_jitter_eps",
            "moe_random_routing_dropped_token",
            "moe_dropout",
            "expert_dropout",
        ],
        about: "randomness in training",
        rule: Rule::Ignored("training only"),
    },
    Keys {
        names: &[
            "router_aux_loss_coef",
            "aux_loss_alpha",
            "aux_loss_coef",
            "moe_aux_loss_coeff",
            "moe_loss_weight",
            "router_z_loss_coef",
            "z_loss_coef",
            "seq_aux",
            "output_router_logits",
            "load_balance_coeff",
            "router_bias_update_speed",
            "moe_router_bias_update_rate",
            "router_ignore_padding_tokens",
        ],
        about: "losses and balancing in training",
        rule: Rule::Ignored("training only"),
    },
    Keys {
        names: &["moe_capacity"],
        about: "a capacity of experts in training",
        rule: Rule::Ignored("inference drops no token"),
    },
    Keys {
        names: &[
            "router_dtype",
            "moe_router_dtype",
            "need_fp32_gate",
            "moe_router_force_fp32",
        ],
        about: "the element type of the router",
        rule: Rule::Ignored("the router is f32 in any case"),
    },
    Keys {
        names: &["router_type"],
        about: "routers by modality",
        rule: Rule::Same(|s| s.value != "MultiRouter"),
    },
    Keys {
        names: &["rms_norm_eps_moe_gate"],
        about: "a norm in the router",
        rule: Rule::Ignored("no program reads it, and the router has no norm"),
    },
    Keys {
        names: &[
            "ep_size",
            "moe_tp_size",
            "expert_dtype",
            "moe_implementation",
            "moe_shared_expert_overlap",
            "enable_moe_fp32_combine",
        ],
        about: "where and how experts are computed",
        rule: Rule::Ignored("it changes no result"),
    },
];

/// Spellings of one setting, and its treatment in families that do not read it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RoutingKeys {
    /// The spellings.
    pub names: &'static [&'static str],
    /// The subject.
    pub about: &'static str,
    /// The reason it changes no output of a layer; `None` if it must agree with what the layer
    /// computes.
    pub ignored: Option<&'static str>,
}

/// Returns every known routing key.
pub fn routing_keys() -> Vec<RoutingKeys> {
    let each = TABLE.iter().map(|keys| RoutingKeys {
        names: keys.names,
        about: keys.about,
        ignored: match keys.rule {
            Rule::Same(_) => None,
            Rule::Ignored(why) => Some(why),
        },
    });
    each.collect()
}

/// Refuses a configuration that asks for other routing than the draft's, and notes routing keys
/// that the table lacks. `layer` is the layer's index in the stack that the configuration
/// describes, if known. A draft already checked against its own stack's configuration is not
/// checked against the one around it.
pub(super) fn check(c: &Config, draft: &mut Draft, layer: Option<usize>) -> Result<(), HfError> {
    if std::mem::replace(&mut draft.checked, true) {
        return Ok(());
    }
    check_part(c, draft, layer)
}

/// Checks a part of the configuration; the whole is checked as well.
pub(super) fn check_part(
    c: &Config,
    draft: &mut Draft,
    layer: Option<usize>,
) -> Result<(), HfError> {
    let mut unknown = Vec::new();
    for (key, value) in c.unread() {
        let Some(keys) = TABLE.iter().find(|keys| keys.names.contains(&key)) else {
            unknown.extend(about_routing(key).then(|| format!("`{key}`")));
            continue;
        };
        let said = Said {
            value,
            config: c,
            spec: &draft.spec,
            layer,
        };
        match keys.rule {
            Rule::Same(agrees) if !agrees(&said) => {
                return Err(c.other_routing(key, keys.about));
            }
            Rule::Same(_) | Rule::Ignored(_) => {}
        }
    }
    if !unknown.is_empty() {
        let (list, them) = (
            unknown.join(", "),
            if unknown.len() == 1 { "it" } else { "them" },
        );
        let note = format!("no rule is known for {list} of config.json: the layer ignores {them}");
        draft.notes.push(note);
    }
    Ok(())
}

/// Returns true if an unknown key sounds like one of a router.
fn about_routing(key: &str) -> bool {
    const PARTS: [&str; 6] = ["moe_", "_moe", "router", "routing", "expert", "topk"];
    // These are widths of experts; no family routes by them.
    const OTHERS: [&str; 2] = ["moe_intermediate_size", "expert_ffn_hidden_size"];
    let of_attention = key.starts_with("index_");
    PARTS.iter().any(|part| key.contains(part)) && !OTHERS.contains(&key) && !of_attention
}
