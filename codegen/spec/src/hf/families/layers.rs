//! The layers of a model that have experts.

use super::super::HfError;
use super::super::config::Config;
use super::keys::DEPTH;

/// The layers of a model.
pub struct Layers {
    /// The number of layers.
    pub total: usize,
    /// The layers with experts, ascending.
    pub moe: Vec<usize>,
    /// The keys that decide, for messages.
    why: &'static str,
}

impl Layers {
    /// Returns the layers in `0..total` for which `moe` returns true.
    pub fn filtered(total: usize, why: &'static str, moe: impl Fn(usize) -> bool) -> Layers {
        Layers {
            total,
            moe: (0..total).filter(|&i| moe(i)).collect(),
            why,
        }
    }

    /// Appends another stack, continuing the numbering.
    pub fn then(mut self, next: Layers) -> Layers {
        self.moe.extend(next.moe.iter().map(|i| self.total + i));
        self.total += next.total;
        self
    }

    /// Checks that `layer` exists and has experts.
    pub fn check(&self, config: &Config, layer: usize) -> Result<(), HfError> {
        let (model, moe) = (config.model.clone(), ranges(&self.moe));
        if self.moe.is_empty() {
            return Err(HfError::NoMoeLayer {
                model,
                why: self.why.to_string(),
            });
        }
        if layer >= self.total {
            return Err(HfError::LayerOutOfRange {
                model,
                layer,
                layers: self.total,
                moe,
            });
        }
        if self.moe.binary_search(&layer).is_err() {
            return Err(HfError::DenseLayer { model, layer, moe });
        }
        Ok(())
    }
}

/// Formats a list as `0, 3-5, 9`.
fn ranges(list: &[usize]) -> String {
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for &i in list {
        match runs.last_mut() {
            Some((_, last)) if *last + 1 == i => *last = i,
            _ => runs.push((i, i)),
        }
    }
    let run = |&(a, b): &(usize, usize)| {
        if a == b {
            a.to_string()
        } else {
            format!("{a}-{b}")
        }
    };
    runs.iter().map(run).collect::<Vec<_>>().join(", ")
}

/// Returns the number of decoder layers.
pub fn depth(c: &Config, default: usize) -> Result<usize, HfError> {
    c.layers(DEPTH, default)
}

/// Returns all layers.
pub fn every(c: &Config, total: usize) -> Result<Layers, HfError> {
    Ok(Layers::filtered(
        depth(c, total)?,
        "num_hidden_layers is 0",
        |_| true,
    ))
}

/// Applies Qwen's rule: `decoder_sparse_step`, except `mlp_only_layers`.
pub fn stepped(c: &Config, total: usize) -> Result<Layers, HfError> {
    stepped_except(c, &[], total)
}

/// Applies the rule of `stepped` with a default for `mlp_only_layers`.
pub fn stepped_except(c: &Config, dense: &[usize], total: usize) -> Result<Layers, HfError> {
    let step = c.size(&["decoder_sparse_step"], 1)?;
    let dense = c.sizes("mlp_only_layers")?.unwrap_or(dense.to_vec());
    let why = "decoder_sparse_step and mlp_only_layers leave none";
    let moe = |i: usize| !dense.contains(&i) && step > 0 && (i + 1).is_multiple_of(step);
    Ok(Layers::filtered(depth(c, total)?, why, moe))
}

/// Returns the layers after the first, dense ones; with `moe_layer_freq` only every n-th of them.
pub fn after_dense(c: &Config, key: &str, first: usize, total: usize) -> Result<Layers, HfError> {
    let first = c.size(&[key], first)?;
    let why = "first_k_dense_replace, num_dense_layers or moe_layer_freq leave none";
    let every = match c.find(&["moe_layer_freq"]) {
        Some((_, value)) if value.is_array() => return listed_frequency(c, total),
        _ => c.size(&["moe_layer_freq"], 1)?.max(1),
    };
    let total = depth(c, total)?;
    Ok(Layers::filtered(total, why, |i| {
        i >= first && i.is_multiple_of(every)
    }))
}

/// Reads `moe_layer_freq` as a list of zeros and ones.
fn listed_frequency(c: &Config, total: usize) -> Result<Layers, HfError> {
    let list = c.sizes("moe_layer_freq")?.unwrap_or_default();
    let moe = |i: usize| list.get(i).is_some_and(|&n| n > 0);
    Ok(Layers::filtered(
        depth(c, total)?,
        "moe_layer_freq is zero everywhere",
        moe,
    ))
}

/// Returns the sparse layers of `mlp_layer_types`; without that key the first layers are dense.
pub fn typed(c: &Config, first: usize, total: usize) -> Result<Layers, HfError> {
    let Some(types) = c.words(&["mlp_layer_types"])? else {
        return after_dense(c, "first_k_dense_replace", first, total);
    };
    let moe = |i: usize| types.get(i).is_some_and(|t| t == "sparse");
    Ok(Layers::filtered(
        depth(c, types.len())?,
        "mlp_layer_types names none sparse",
        moe,
    ))
}
