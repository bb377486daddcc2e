//! The passes of a rank with their launches bound, by the pieces that rows travel in.

use crate::error::EngineError;
use crate::launch::Bound;
use moesaic_plan::{self as plan, Cut, Exchange, LayerPlan, Pieces, RankStep, Step};
use std::collections::HashMap;
use std::sync::Arc;

/// Why there is a side of shared experts.
pub(super) const SLICED: &str = "steps of shared experts are of ranks with slices of them";

/// Why there is a side of shadows.
pub(super) const SHADOWED: &str = "steps of shadows are of plans with shadows";

/// Steps of a pass, launches bound.
pub(super) enum Segment {
    /// Of a side, for all rows or for a piece of them.
    Launches(plan::Side, Arc<Bound>, Option<plan::Piece>),
    Exchange(Exchange),
    /// Rows of several tensors that [go together](Exchange::goes_with).
    Together(Vec<Exchange>),
}

/// The steps of a pass, launches of a side that follow each other together. The same
/// launches for several pieces are bound once.
pub(super) fn segments(
    steps: &[RankStep],
    bind: impl Fn(plan::Side, &[usize]) -> Result<Bound, EngineError>,
) -> Result<Vec<Segment>, EngineError> {
    let whose = |step: &RankStep| match step {
        RankStep::Launch { side, piece, .. } => Some((*side, *piece)),
        RankStep::Exchange(_) => None,
    };
    let together =
        |a: &RankStep, b: &RankStep| a.goes_with(b) || (whose(a).is_some() && whose(a) == whose(b));
    let mut known: HashMap<(plan::Side, Vec<usize>), Arc<Bound>> = HashMap::new();
    let parts = steps.chunk_by(together).map(|part| match &part[0] {
        RankStep::Exchange(exchange) if part.len() == 1 => Ok(Segment::Exchange(exchange.clone())),
        RankStep::Exchange(_) => {
            let exchanges = part.iter().filter_map(RankStep::exchange);
            Ok(Segment::Together(exchanges.cloned().collect()))
        }
        RankStep::Launch { side, piece, .. } => {
            let numbers = part.iter().filter_map(|step| match step {
                RankStep::Launch { step, .. } => Some(*step),
                RankStep::Exchange(_) => None,
            });
            let numbers: Vec<usize> = numbers.collect();
            let bound = match known.get(&(*side, numbers.clone())) {
                Some(bound) => Arc::clone(bound),
                None => Arc::new(bind(*side, &numbers)?),
            };
            known.insert((*side, numbers), Arc::clone(&bound));
            Ok(Segment::Launches(*side, bound, *piece))
        }
    });
    parts.collect()
}

/// For how many pieces the experts' products are launched, and what makes one.
pub(super) fn pieces(segments: &[Segment]) -> (usize, Cut) {
    let of = |segment: &Segment| match segment {
        Segment::Launches(plan::Side::Experts, _, piece) => {
            piece.map(|piece| (piece.of, piece.cut))
        }
        _ => None,
    };
    let found = segments.iter().find_map(of);
    found.unwrap_or((1, Cut::default()))
}

/// Steps of passes of a side.
pub(super) type Launched = fn(&LayerPlan) -> &[Step];

/// What a rank does in each pass.
pub(super) struct Passes {
    pub pieces: Pieces,
    pub forward: Vec<Segment>,
    pub evaluation: Vec<Segment>,
    pub backward: Vec<Segment>,
}
