//! Tokens that are steered to experts, so that routing is uniform or as skewed as requested.

use crate::failure::{Failure, Result};
use crate::random;
use moesaic::reference::Skew;
use moesaic::spec::{Chooser, LogitsFormula, RouterInput};
use moesaic::{Input, Layer, LayerSpec, Tensor, Tensors};

/// The amount that is added to the logits of a token's intended experts. The other logits are of
/// the order of one.
const LEAN: f32 = 8.0;

const SEED: u64 = 5;

/// Returns a call whose tokens want experts as often as `skew` says. Groups or a capacity may still
/// change the routing: see [`busiest`].
///
/// # Errors
/// Fails for a router whose choices do not follow from tokens so simply.
pub fn input(
    spec: &LayerSpec,
    weights: &Tensors<'_>,
    tokens: usize,
    skew: Skew,
) -> Result<Input<'static>> {
    let mut input = random::input(spec, tokens);
    let (experts, k) = (spec.routed_experts(), spec.shape.top_k);
    let ids = skew.draw(experts, k.min(experts), tokens, SEED);
    let kind = spec.router.kind.def();
    let linear = kind.logits.map(|logits| logits.formula) == Some(LogitsFormula::Linear);
    match kind.chooser {
        Chooser::Scores if linear => {
            let x = leaned(&input.tensors["x"], &ids, k, &directions(spec, weights));
            input.insert("x", x);
        }
        Chooser::Caller => input.insert("topk_ids", Tensor::owned(&[tokens, k], ids)),
        Chooser::Table => {
            let rows = rows_of(&weights["router.table"], experts, k);
            let wanted = ids.chunks(k).map(|ids| rows[ids[0] as usize]).collect();
            input.insert("token_ids", Tensor::owned(&[tokens], wanted));
        }
        Chooser::Scores => {
            return Err(Failure::input(format!(
                "--skew: tokens cannot be led to the experts of a {} router",
                kind.name
            )));
        }
    }
    Ok(input)
}

/// Returns, for each expert, the vector to add to a token so that the expert's logit grows by
/// [`LEAN`].
fn directions(spec: &LayerSpec, weights: &Tensors<'_>) -> Vec<Vec<f32>> {
    let d = spec.shape.model_dim;
    let scale = match spec.router.input {
        RouterInput::RmsScaled => weights.get("router.input_scale"),
        RouterInput::Token => None,
    };
    let scale = scale.map_or(vec![1.0; d], |scale| scale.to_f64());
    let router = weights["router.weight"].to_f64();
    let one = |row: &[f64]| {
        let row: Vec<f64> = row.iter().zip(&scale).map(|(w, s)| w * s).collect();
        let square: f64 = row.iter().map(|w| w * w).sum();
        let each = row.iter();
        each.map(|w| (f64::from(LEAN) * w / square.max(1e-9)) as f32)
            .collect()
    };
    router.chunks(d).map(one).collect()
}

fn leaned(x: &Tensor<'_>, ids: &[i32], k: usize, directions: &[Vec<f32>]) -> Tensor<'static> {
    let d = x.shape[1];
    random::changed(x, |i, value| {
        let (token, channel) = (i / d, i % d);
        let wanted = &ids[token * k..(token + 1) * k];
        let lean = |id: &i32| directions[*id as usize][channel];
        value + wanted.iter().map(lean).sum::<f32>()
    })
}

/// Returns, for each expert, a row of the table that contains it.
fn rows_of(table: &Tensor<'_>, experts: usize, k: usize) -> Vec<i32> {
    let mut rows = vec![0; experts];
    let ids = table.to_vec::<i32>().unwrap_or_default();
    for (at, id) in ids.into_iter().enumerate() {
        if let Some(row) = usize::try_from(id).ok().and_then(|id| rows.get_mut(id)) {
            *row = (at / k) as i32;
        }
    }
    rows
}

/// Returns the rows of the busiest expert over the mean, as the layer routes a call.
///
/// # Errors
/// Fails if a launch fails.
pub fn busiest(layer: &Layer, input: &Input<'_>) -> Result<f64> {
    let output = layer.route(input.reading(&["counts"]))?;
    let counts: Vec<i64> = output
        .get("counts")
        .and_then(|t| t.to_vec())
        .unwrap_or_default();
    let sum: i64 = counts.iter().sum();
    let most = counts.iter().copied().max().unwrap_or_default();
    Ok(most as f64 * counts.len() as f64 / sum.max(1) as f64)
}
