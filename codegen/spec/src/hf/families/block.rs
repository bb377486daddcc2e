//! The parts of an MoE block that families share.

use super::super::HfError;
use super::super::config::Config;
use super::super::draft::{DECODER, Draft, Fused, Sizes};
use super::keys::{EXPERTS, MODEL, TOP_K};
use crate::SharedGate;

/// Reads the sizes with a family's defaults: width, experts' width, experts, K.
pub(super) fn sizes(
    c: &Config,
    hidden_keys: &[&str],
    defaults: [usize; 4],
) -> Result<Sizes, HfError> {
    let [model, hidden, experts, top_k] = defaults;
    Ok(Sizes {
        model: c.size(MODEL, model)?,
        hidden: c.size(hidden_keys, hidden)?,
        experts: c.size(EXPERTS, experts)?,
        top_k: c.size(TOP_K, top_k)?,
    })
}

/// Builds a softmax router and gated experts under `mlp.` or `block_sparse_moe.`.
pub(super) fn plain(c: &Config, layer: usize, sizes: Sizes) -> Result<Draft, HfError> {
    gated(c, layer, sizes, DECODER, &["mlp.", "block_sparse_moe."])
}

/// Builds a softmax router and gated experts under `{prefix}{layer}.{block}`.
pub(super) fn gated(
    c: &Config,
    layer: usize,
    sizes: Sizes,
    prefixes: &[&str],
    blocks: &[&str],
) -> Result<Draft, HfError> {
    let mut d = Draft::new(c, sizes);
    d.activation(c, &["hidden_act", "activation_function"], "silu")?;
    d.rooted(prefixes, layer, blocks);
    let names = ["gate", "router", "router.layer", "router.gate"].map(|n| format!("{n}.weight"));
    d.plain("router.weight", &names.each_ref().map(String::as_str));
    d.gated_experts(Fused::Rows);
    Ok(d)
}

/// Adds DeepSeek's shared experts, merged into one wide expert, with biases if `mlp_bias` is set.
pub(super) fn merged_shared(
    c: &Config,
    d: &mut Draft,
    keys: &[&str],
    default: usize,
    hidden: usize,
) -> Result<(), HfError> {
    let count = c.size(keys, default)?;
    if count > 0 {
        d.shared(
            &["shared_experts", "shared_mlp"],
            count.saturating_mul(hidden),
            SharedGate::None,
        );
    }
    if c.flag(&["mlp_bias"], false)? {
        d.biased();
    }
    Ok(())
}
