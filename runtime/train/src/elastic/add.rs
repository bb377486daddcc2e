//! Adding experts to a trained layer.

use super::slices::gather;
use super::{Layout, check_spec, weight_of};
use crate::{STATE_PREFIX, TrainError};
use moesaic_kernel::DType;
use moesaic_spec::{Chooser, GroupMask, LayerSpec, Score, Select, canonical_tensors};
use moesaic_tensor::{Tensor, Tensors, write_float};
use std::ops::RangeInclusive;

/// The experts to add, and their initial state.
#[derive(Clone, Copy, Debug)]
pub struct Growth<'a> {
    /// The expert that each new one is copied from.
    pub sources: &'a [usize],
    /// Set the down projections of new experts, biases included, to zero, so they add nothing until
    /// they have learned something.
    pub zero_down: bool,
    /// The distance of a new expert's logit below its source's. `None` is so far below that no
    /// token ever arrives: the layer computes the same as before, and new experts learn nothing
    /// until [`wake_experts`] lowers the distance.
    pub margin: Option<f32>,
    /// The tokens of a call for which a capacity by factor must be kept. No factor keeps it for
    /// all, because `ceil(T/E)` steps at other T when E changes. Other capacities do not need it.
    pub tokens: Option<usize>,
}

/// A layer with added experts.
#[derive(Clone, Debug)]
pub struct Grown {
    /// Its spec: more experts, and a bias that keeps the new ones quiet.
    pub spec: LayerSpec,
    /// Its tensors.
    pub tensors: Tensors<'static>,
    /// Whether it computes exactly the same as the smaller layer.
    pub exact: bool,
    /// The token counts of a call for which it does, if a capacity by factor limits that; `None`
    /// means all.
    pub tokens: Option<RangeInclusive<usize>>,
}

/// Adds experts after those with weights. Ids of identity and zero experts move up, in a routing
/// table too. If you route externally, move them yourself.
///
/// New experts get the weights of their sources. In the optimizer state their squares are copied,
/// so that the next step has a sensible size, and their moments are zero. Without a margin, their
/// logits are so low that their share in a softmax over all logits is exactly 0, and their
/// selection keys lie below all others. Losses that count experts still change.
///
/// # Errors
/// [`TrainError::NotPreserved`] if the layer's function depends on the number of experts: expert
/// choice, Sinkhorn, entropy, groups that the new experts do not fill, a softmax over logits that
/// can have no bias, and capacity by factor without [`Growth::tokens`]; also for a margin below 0
/// or not finite. [`TrainError::Tensor`] for tensors that are not the layer's.
pub fn add_experts(
    spec: &LayerSpec,
    tensors: &Tensors<'_>,
    growth: &Growth<'_>,
) -> Result<Grown, TrainError> {
    check_spec(spec)?;
    let layout = Layout::new(spec);
    layout.check(tensors)?;
    check_sources(spec, growth.sources)?;
    check_margin(growth.margin)?;
    // Refuse what cannot be preserved before any tensor is copied.
    let quiet = Quiet::of(spec, growth.margin)?;
    let mut larger = larger_spec(spec, growth.sources.len(), &quiet)?;
    let tokens = keep_capacity(spec, &mut larger, growth.tokens)?;
    check_spec(&larger)?;
    layout.complete(tensors)?;
    let mut grown = Tensors::new();
    for (name, tensor) in tensors {
        let tensor = match layout.axis(name) {
            // Every tensor that counts experts grows, the optimizer state of those weights
            // included.
            Some(axis) => with_copies(name, tensor, axis, spec.shape.experts, growth),
            None if name == "router.table" => moved_ids(tensor, spec, growth.sources.len()),
            None => tensor.clone().into_static(),
        };
        grown.insert(name.clone(), tensor);
    }
    let mut layer = Grown {
        exact: growth.margin.is_none() || !(quiet.logits || quiet.keys),
        spec: larger,
        tensors: grown,
        tokens,
    };
    quiet.apply(&mut layer, growth);
    Ok(layer)
}

/// Checks that a bias can hold the distance, and that it does not put copies above their sources.
fn check_margin(margin: Option<f32>) -> Result<(), TrainError> {
    match margin {
        Some(margin) if !(margin.is_finite() && margin >= 0.0) => {
            let reason = format!("a margin of {margin} is no distance: finite, and not below 0");
            Err(TrainError::NotPreserved(reason))
        }
        _ => Ok(()),
    }
}

/// Gives added experts the biases of their sources less `margin`, so tokens start to arrive.
/// `pairs` are new expert and source.
///
/// # Errors
/// [`TrainError::NotPreserved`] for a margin below 0 or not finite. [`TrainError::Tensor`] if there
/// is no bias, or no such expert.
pub fn wake_experts(
    tensors: &mut Tensors<'_>,
    pairs: &[(usize, usize)],
    margin: f32,
) -> Result<(), TrainError> {
    check_margin(Some(margin))?;
    let names = ["router.bias", "router.select_bias"];
    if !names.iter().any(|name| tensors.contains_key(*name)) {
        return Err(TrainError::tensor(names[0], "is missing"));
    }
    for (name, margin) in names.into_iter().zip([margin, 0.0]) {
        let Some(bias) = tensors.get_mut(name) else {
            continue;
        };
        let count = bias.shape[0];
        for &(expert, source) in pairs {
            if expert.max(source) >= count {
                let problem = format!("has {count} elements, none for {expert} and {source}");
                return Err(TrainError::tensor(name, problem));
            }
            let value = bias.to_f64()[source] - f64::from(margin);
            set(bias, expert, value);
        }
    }
    Ok(())
}

/// The biases that keep new experts from being selected and from taking a share.
#[derive(Clone, Copy)]
struct Quiet {
    /// A bias on their logits.
    logits: bool,
    /// A bias on their selection keys.
    keys: bool,
}

impl Quiet {
    fn of(spec: &LayerSpec, margin: Option<f32>) -> Result<Quiet, TrainError> {
        let router = &spec.router;
        refuse_dependence(spec)?;
        let (mut logits, mut keys) = (spec.has_logits(), router.select_bias);
        let unbiased = spec.logits().is_some_and(|logits| logits.own_bias);
        match router.kind.chooser() {
            Chooser::Caller => (logits, keys) = (false, false),
            // The table selects, so the others matter only in a softmax over all experts.
            Chooser::Table => logits &= router.score == Score::Softmax,
            Chooser::Scores if unbiased => match router.score {
                Score::Sigmoid | Score::SqrtSoftplus if margin.is_none() => {
                    // Without a bias on its logits, a router can only keep new experts out of the
                    // selection.
                    (logits, keys) = (false, true);
                }
                _ => {
                    let reason = format!(
                        "a {} router has no bias on its logits; experts can be added to one with \
                         score = \"sigmoid\" or \"sqrt-softplus\" and no margin",
                        router.kind.def().name
                    );
                    return Err(TrainError::NotPreserved(reason));
                }
            },
            Chooser::Scores => {}
        }
        Ok(Quiet { logits, keys })
    }

    fn apply(&self, layer: &mut Grown, growth: &Growth<'_>) {
        for (wanted, name) in [
            (self.logits, "router.bias"),
            (self.keys, "router.select_bias"),
        ] {
            if !wanted || !layer.tensors.contains_key(&router_tensor(&layer.spec)) {
                continue;
            }
            let bias = layer
                .tensors
                .entry(name.to_string())
                .or_insert_with(|| zeros(&layer.spec, name));
            let first = layer.spec.shape.experts - growth.sources.len();
            let values = bias.to_f64();
            for (i, &source) in growth.sources.iter().enumerate() {
                // The selection bias of a new expert equals its source's, because the margin is in
                // the logits already.
                let value = match growth.margin {
                    None => lowest(bias.dtype),
                    Some(margin) if name == "router.bias" => values[source] - f64::from(margin),
                    Some(_) => values[source],
                };
                set(bias, first + i, value);
            }
        }
    }
}

/// Returns a tensor that every router of this kind has. Its absence marks a set of state without
/// weights.
fn router_tensor(spec: &LayerSpec) -> String {
    let logits = spec.router.kind.def().logits;
    let name = logits.map_or("router.weight", |logits| logits.expert_weight());
    name.to_string()
}

/// Refuses layers whose function depends on the number of experts.
fn refuse_dependence(spec: &LayerSpec) -> Result<(), TrainError> {
    let reason = match spec.router.select {
        Select::ExpertChoice(_) => "experts that choose tokens share them by their number",
        Select::Sinkhorn(_) => "Sinkhorn's iteration balances over all experts",
        Select::PerGroup(_) => "every group gives as many experts, and new ones move the groups",
        _ if spec.router.always_chosen > 0 => "the last experts are chosen by every token",
        _ if spec.router.blocks.is_some() => {
            "blocks agree on some of all experts, where a copy takes the place of another expert"
        }
        _ if spec.router.entropy.is_some() => "entropy is over all experts",
        _ if spec.router.logit_softcap.is_some() => {
            "a soft cap bounds the bias that keeps new experts silent"
        }
        _ => return Ok(()),
    };
    Err(TrainError::NotPreserved(reason.to_string()))
}

/// Gives the larger layer a factor that keeps the smaller one's capacity `K·int(f·ceil(T/E))` in
/// calls of `tokens` tokens. Returns the token counts for which it does.
fn keep_capacity(
    spec: &LayerSpec,
    larger: &mut LayerSpec,
    tokens: Option<usize>,
) -> Result<Option<RangeInclusive<usize>>, TrainError> {
    let capacity = &spec.capacity;
    let factors = [Some(capacity.factor), capacity.eval_factor];
    // Factor zero takes the largest count, which new experts do not change.
    let counts_tokens = factors.iter().flatten().any(|factor| *factor != 0.0);
    let same = larger.shape.experts == spec.shape.experts;
    if !capacity.has_factor() || !counts_tokens || same {
        return Ok(None);
    }
    let Some(tokens) = tokens.filter(|&tokens| tokens > 0) else {
        let reason = "a capacity by a factor steps at other numbers of tokens when there are \
                      more experts: say for how many tokens a call it is to be kept, or use \
                      mode = \"dropless\", \"fixed\" or \"max-count\"";
        return Err(TrainError::NotPreserved(reason.to_string()));
    };
    let (old, new) = (spec.shape.experts, larger.shape.experts);
    // The formula counts tokens as ceil(T/E), so a kept capacity holds while both ceilings stay the
    // same.
    let (old_share, new_share) = (tokens.div_ceil(old), tokens.div_ceil(new));
    let kept = &mut larger.capacity;
    let factors = [Some(&mut kept.factor), kept.eval_factor.as_mut()];
    for factor in factors.into_iter().flatten() {
        *factor = kept_factor(*factor, old_share as f64, new_share as f64);
    }
    let first = ((old_share - 1) * old).max((new_share - 1) * new) + 1;
    let last = (old_share * old).min(new_share * new);
    Ok(Some(first..=last))
}

/// Returns the factor with which `share` tokens per expert get the rows that `factor` gives
/// `old_share`.
fn kept_factor(factor: f64, old_share: f64, share: f64) -> f64 {
    let rows = (factor.abs() * old_share).floor();
    match factor {
        0.0 => factor,
        // In the middle of the interval, so that rounding of the product cannot change its integer
        // part.
        _ => ((rows + 0.5) / share).copysign(factor),
    }
}

fn check_sources(spec: &LayerSpec, sources: &[usize]) -> Result<(), TrainError> {
    let experts = spec.shape.experts;
    match sources.iter().find(|&&source| source >= experts) {
        Some(source) => {
            let reason = format!("there is no expert {source} to copy, there are {experts}");
            Err(TrainError::NotPreserved(reason))
        }
        None => Ok(()),
    }
}

fn larger_spec(spec: &LayerSpec, new: usize, quiet: &Quiet) -> Result<LayerSpec, TrainError> {
    let mut larger = spec.clone();
    larger.shape.experts += new;
    larger.router.bias |= quiet.logits;
    larger.router.select_bias |= quiet.keys;
    if let Some(groups) = &mut larger.router.groups {
        let size = spec.routed_experts() / groups.count;
        // Groups cover scored experts in order. New ones would shift experts without weights into
        // other groups.
        let behind = spec.routed_experts() > spec.shape.experts;
        if !new.is_multiple_of(size) || behind || groups.mask == GroupMask::Zero {
            let reason = format!(
                "groups of {size} experts stay as they are only when whole groups of new ones \
                 come last, and mask = \"exclude\" leaves them out"
            );
            return Err(TrainError::NotPreserved(reason));
        }
        groups.count += new / size;
    }
    check_spec(&larger)?;
    Ok(larger)
}

/// Returns a tensor with copies of some experts after its own.
fn with_copies(
    name: &str,
    tensor: &Tensor<'_>,
    axis: usize,
    experts: usize,
    growth: &Growth<'_>,
) -> Tensor<'static> {
    let behind = experts..tensor.shape[axis];
    let order: Vec<usize> = (0..experts)
        .chain(growth.sources.iter().copied())
        .chain(behind)
        .collect();
    let mut grown = gather(tensor, axis, &order);
    let weight = weight_of(name).unwrap_or(name);
    let state = name.strip_prefix(STATE_PREFIX);
    // A zero second moment would make the next step of Adam huge, so only first moments are
    // cleared.
    let moment = state.is_some_and(|kind| !kind.starts_with("second."));
    let down = state.is_none() && weight.starts_with("experts.down.");
    if moment || (growth.zero_down && down) {
        clear(&mut grown, axis, experts..experts + growth.sources.len());
    }
    grown
}

/// Sets slices along a dimension to zero, which is all bits zero in every type.
fn clear(tensor: &mut Tensor<'_>, axis: usize, slices: std::ops::Range<usize>) {
    let inner: usize = tensor.shape[axis + 1..].iter().product();
    let slice = inner * tensor.dtype.size();
    let block = tensor.shape[axis] * slice;
    for bytes in tensor.data.to_mut().chunks_exact_mut(block.max(1)) {
        bytes[slices.start * slice..slices.end * slice].fill(0);
    }
}

/// Returns a routing table in which experts without weights have moved up.
fn moved_ids(table: &Tensor<'_>, spec: &LayerSpec, new: usize) -> Tensor<'static> {
    let moved = |id: f64| {
        let id = id as i32;
        id + if id >= spec.shape.experts as i32 {
            new as i32
        } else {
            0
        }
    };
    let ids: Vec<i32> = table.to_f64().into_iter().map(moved).collect();
    Tensor::copied(&table.shape, &ids)
}

/// Returns a tensor of the layer, all zero.
fn zeros(spec: &LayerSpec, name: &str) -> Tensor<'static> {
    let all = canonical_tensors(spec);
    let found = all.into_iter().find(|tensor| tensor.name == name);
    let (dtype, shape) = found.map_or((DType::F32, vec![spec.routed_experts()]), |tensor| {
        (tensor.dtype, tensor.shape)
    });
    Tensor::zeros(dtype, &shape)
}

/// Returns a bias below every logit, with an exponential of 0 in f32.
fn lowest(dtype: DType) -> f64 {
    match dtype {
        // Near the smallest finite f16.
        DType::F16 => -6e4,
        _ => -1e30,
    }
}

/// Sets one element, rounded to nearest.
fn set(tensor: &mut Tensor<'_>, index: usize, value: f64) {
    let (dtype, size) = (tensor.dtype, tensor.dtype.size());
    if dtype.is_float() {
        let bytes = &mut tensor.data.to_mut()[index * size..(index + 1) * size];
        write_float(dtype, value, bytes);
    }
}
