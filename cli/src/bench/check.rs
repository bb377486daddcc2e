//! Is what is timed also right?
//!
//! The reference takes f64 weights, eight bytes an element, and real layers
//! are too large for that. Two tokens reach few experts, so only those are
//! handed over.

use crate::failure::{Failure, Result};
use crate::random;
use crate::run::relative_error;
use crate::timing;
use moesaic::reference::rng::Draw;
use moesaic::reference::{self, Decision, Weights};
use moesaic::{DType, Input, Layer, LayerSpec, Tensor, Tensors};

const TOKENS: usize = 2;

/// Runs two tokens; the largest error of `y` relative to its largest element.
///
/// # Errors
/// When the result is wrong: there is no point in timing it then.
pub fn check(layer: &Layer, weights: &Tensors<'_>) -> Result<f64> {
    let spec = layer.spec();
    let call = random::input(spec, TOKENS);
    let found: Vec<f64> = timing::y(layer, &call)?
        .to_f32()
        .into_iter()
        .map(f64::from)
        .collect();
    let trains = layer.plan().training.is_some();
    let error = relative_error(&found, &expected(spec, weights, &call, trains));
    let allowed = match spec.precision.tf32 {
        true => 8.0 * 2f64.powi(-11),
        false => tolerance(spec.precision.activations),
    };
    if error > allowed {
        return Err(Failure::work(format!(
            "the layer is wrong: y is off by {error:.1e} of its largest element, {allowed:.0e} is allowed"
        ))
        .hint("please report it with the spec and the output of `moesaic doctor`"));
    }
    Ok(error)
}

/// Roundings of hidden rows, expert rows and output. Weights have none: the
/// reference gets them as they are stored.
fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F32 => 1e-4,
        other => 8.0 * other.unit_roundoff(),
    }
}

/// The reference's `y`, with the random numbers of training if it trains.
fn expected(spec: &LayerSpec, weights: &Tensors<'_>, call: &Input<'_>, trains: bool) -> Vec<f64> {
    let floats = |name| call.tensors.get(name).map(Tensor::to_f64);
    let ints = |name| call.tensors.get(name).and_then(|t| t.to_vec::<i32>());
    let input = reference::Input {
        tokens: call.tokens,
        x: floats("x").unwrap_or_default(),
        token_ids: ints("token_ids"),
        routing: ints("topk_ids").zip(floats("topk_weights")),
        token_mask: ints("token_mask"),
        active_k: ints("active_k").map(|k| k[0].max(0) as usize),
        draw: trains.then(Draw::default),
        ..reference::Input::default()
    };
    let router = weights
        .iter()
        .filter(|(name, _)| name.starts_with("router."));
    let router = Weights(router.map(|(name, t)| (name.clone(), t.into())).collect());
    let decision = reference::gate(spec, &router, &input).decision;
    let placed = reference::scan(spec, &decision, &input);
    let few = Few::of(spec, &decision);
    reference::combine(&few.spec, &few.weights(weights), &input, &few.ids, &placed)
}

/// The layer with only the experts that are used, under new numbers.
struct Few {
    spec: LayerSpec,
    used: Vec<usize>,
    ids: Vec<i32>,
}

impl Few {
    fn of(spec: &LayerSpec, decision: &Decision) -> Few {
        let experts = spec.shape.experts;
        let real = decision
            .ids
            .iter()
            .filter_map(|&id| usize::try_from(id).ok());
        let mut used: Vec<usize> = real.filter(|&id| id < experts).collect();
        used.sort_unstable();
        used.dedup();
        let renumber = |&id: &i32| match usize::try_from(id) {
            Err(_) => id,
            // Experts without weights come after those that have them.
            Ok(id) if id >= experts => (used.len() + id - experts) as i32,
            Ok(id) => used.binary_search(&id).unwrap_or(0) as i32,
        };
        let ids = decision.ids.iter().map(renumber).collect();
        let mut spec = spec.clone();
        spec.shape.experts = used.len();
        Few { spec, used, ids }
    }

    fn weights(&self, all: &Tensors<'_>) -> Weights {
        let needed = all.iter().filter(|(name, _)| !name.starts_with("router."));
        let tensor = |name: &str, t: &Tensor<'_>| match name.starts_with("experts.") {
            true => self.some(t),
            false => t.into(),
        };
        Weights(
            needed
                .map(|(name, t)| (name.clone(), tensor(name, t)))
                .collect(),
        )
    }

    /// The used rows of the first dimension.
    fn some(&self, tensor: &Tensor<'_>) -> reference::Tensor {
        let row = |&e: &usize| tensor.rows(e..e + 1).map_or(vec![], |row| row.to_f64());
        let mut shape = tensor.shape.clone();
        shape[0] = self.used.len();
        reference::Tensor {
            shape,
            data: self.used.iter().flat_map(row).collect(),
        }
    }
}
