//! The f64 reference of the whole layer, written for reading.
//!
//! Every test takes its expected values from here. So nothing is fast and nothing is shared with
//! the code under test: plain loops over rows, one function per stage. Values are f64. The caller
//! rounds weights and tokens to the storage type first ([`round_to`], [`Weights::rounded`]), so
//! that only the arithmetic differs.
//!
//! ```text
//! logits ──select──> ids, weights ──scan──> locations, capacity ──expert──combine──> y
//! ```
//!
//! The spec must be valid. A missing or misshapen tensor is a mistake in the test and panics with
//! its name.
//!
//! As a crate of its own this is an internal part of `moesaic` and changes without
//! notice.

#![warn(missing_debug_implementations)]

mod activation;
mod backward;
mod choice;
mod comm_cast;
mod expert;
mod expression;
mod few;
mod formula;
mod gate;
mod losses;
mod math;
mod noise;
mod norm;
mod place;
mod random;
pub mod rng;
mod router_input;
mod row_norm;
mod rows;
mod scores;
mod skew;
mod stored;
mod weights;

pub use backward::{Gradients, backward, router_backward};
pub use choice::chosen_per_expert;
pub use comm_cast::{CommDtype, of_e4m3, pack_row, to_e4m3, unpack_row};
pub use expert::{activate, combine, expert_row, shared_row};
pub use few::y_of_few;
pub use gate::{Decision, GateOutput, decide, gate, select_row};
pub use losses::{LossValue, Routed, losses};
pub use math::{descending, erf, rank, round_to, softmax};
pub use noise::gaussian_scale;
pub use place::{
    AssignmentPlaces, capacity_rows, demanded, kept, processing_order, random_key, scan,
};
pub use router_input::{input_factors, router_input};
pub use skew::{ParseSkewError, Skew};
pub use stored::numbers;
pub use weights::{Random, Tensor, Weights};

pub use gate::logits;

use moesaic_spec::LayerSpec;

/// The input of one call of the layer.
#[derive(Clone, Debug, Default)]
pub struct Input {
    /// The number of rows of `x`, `T`. Zero is legal.
    pub tokens: usize,
    /// Tokens, `[T, d]` row major.
    pub x: Vec<f64>,
    /// Token ids `[T]`, for a table router.
    pub token_ids: Option<Vec<i32>>,
    /// Ids and weights, both `[T, K]`, for an external router.
    pub routing: Option<(Vec<i32>, Vec<f64>)>,
    /// The position of a training call. Absent in evaluation, which draws nothing and has its own
    /// capacity factor.
    pub draw: Option<rng::Draw>,
    /// A capacity factor that replaces the spec's for this call.
    pub capacity_factor: Option<f64>,
    /// `[T]`, for a router with `token_mask`: 0 excludes a token from all experts.
    pub token_mask: Option<Vec<i32>>,
    /// The number of slots that the call uses, for a router with `active_k`.
    pub active_k: Option<usize>,
    /// `[T]`, for a loss of kind `sequence`: runs of equal ids are sequences, negative ids belong
    /// to none. When absent, all tokens are one sequence.
    pub sequence_ids: Option<Vec<i32>>,
    /// For a loss of kind `global`: the assignments of each expert `[E + identity]` and the token
    /// count of the whole group. When absent, those of this call.
    pub global: Option<(Vec<i64>, u64)>,
}

/// The result of one call of the layer.
#[derive(Clone, Debug)]
pub struct Output {
    /// `[T, d_out]`.
    pub y: Vec<f64>,
    /// `[T, E + identity]`, if the router has any.
    pub logits: Option<Vec<f64>>,
    /// `[T, K]`, best first; -1 masks a slot.
    pub topk_ids: Vec<i32>,
    /// `[T, K]` from the gate, before dropping.
    pub topk_weights: Vec<f64>,
    /// `[T, K]` as the combination uses them: zero when dropped.
    pub combine_weights: Vec<f64>,
    /// Assignments to each expert, dropped ones included `[E + identity]`.
    pub counts: Vec<i64>,
    /// `[T, K]`: position inside the expert, -1 when dropped or masked.
    pub locations: Vec<i32>,
    /// Rows per expert; `None` when dropless.
    pub capacity: Option<i64>,
    /// Dropped assignments.
    pub overflow: i64,
}

/// Runs the whole layer.
pub fn forward(spec: &LayerSpec, weights: &Weights, input: &Input) -> Output {
    let gate = gate(spec, weights, input);
    let placed = scan(spec, &gate.decision, input);
    let y = combine(spec, weights, input, &gate.decision.ids, &placed);
    Output {
        y,
        logits: gate.logits,
        topk_ids: gate.decision.ids,
        topk_weights: gate.decision.weights,
        combine_weights: placed.weights,
        counts: placed.counts,
        locations: placed.locations,
        capacity: placed.capacity,
        overflow: placed.overflow,
    }
}
