//! The passes of a rank with bound launches, for one overlap.

use crate::error::EngineError;
use crate::launch::Bound;
use moesaic_plan::{self as plan, Exchange, LayerPlan, Overlap, OverlapBy, RankStep, Step};
use std::collections::HashMap;
use std::sync::Arc;

/// The reason that a step of shared experts finds its part.
pub(super) const SHARDED: &str = "steps of shared experts are of ranks with shards of them";

/// The reason that a step of shadows finds its part.
pub(super) const SHADOWED: &str = "steps of shadows are of plans with shadows";

/// Consecutive steps of a pass, with launches bound.
pub(super) enum Segment {
    /// Launches of a part, for all rows or for a chunk of them.
    Launches(plan::PlanPart, Arc<Bound>, Option<plan::Chunk>),
    Exchange(Exchange),
    /// Exchanges of several tensors that [go together](Exchange::goes_with).
    Together(Vec<Exchange>),
}

/// Groups the steps of a pass: consecutive launches of a part become one segment. Equal launches
/// for several chunks are bound once.
pub(super) fn segments(
    steps: &[RankStep],
    bind: impl Fn(plan::PlanPart, &[usize]) -> Result<Bound, EngineError>,
) -> Result<Vec<Segment>, EngineError> {
    let whose = |step: &RankStep| match step {
        RankStep::Launch { part, chunk, .. } => Some((*part, *chunk)),
        RankStep::Exchange(_) => None,
    };
    let together =
        |a: &RankStep, b: &RankStep| a.goes_with(b) || (whose(a).is_some() && whose(a) == whose(b));
    let mut known: HashMap<(plan::PlanPart, Vec<usize>), Arc<Bound>> = HashMap::new();
    let parts = steps.chunk_by(together).map(|run| match &run[0] {
        RankStep::Exchange(exchange) if run.len() == 1 => Ok(Segment::Exchange(exchange.clone())),
        RankStep::Exchange(_) => {
            let exchanges = run.iter().filter_map(RankStep::exchange);
            Ok(Segment::Together(exchanges.cloned().collect()))
        }
        RankStep::Launch { part, chunk, .. } => {
            let numbers = run.iter().filter_map(|step| match step {
                RankStep::Launch { step, .. } => Some(*step),
                RankStep::Exchange(_) => None,
            });
            let numbers: Vec<usize> = numbers.collect();
            // With 64 chunks the experts' launches would be bound 64 times, and each binding looks
            // up every function by its symbol.
            let bound = match known.get(&(*part, numbers.clone())) {
                Some(bound) => Arc::clone(bound),
                None => Arc::new(bind(*part, &numbers)?),
            };
            known.insert((*part, numbers), Arc::clone(&bound));
            Ok(Segment::Launches(*part, bound, *chunk))
        }
    });
    parts.collect()
}

/// The chunks for which the experts' GEMMs are launched.
pub(super) struct LaunchedChunks {
    pub count: usize,
    pub by: OverlapBy,
}

/// Returns the chunks of a pass.
pub(super) fn chunks(segments: &[Segment]) -> LaunchedChunks {
    let of = |segment: &Segment| match segment {
        Segment::Launches(plan::PlanPart::Experts, _, chunk) => chunk.map(|chunk| LaunchedChunks {
            count: chunk.of,
            by: chunk.by,
        }),
        _ => None,
    };
    let found = segments.iter().find_map(of);
    found.unwrap_or(LaunchedChunks {
        count: 1,
        by: OverlapBy::default(),
    })
}

/// Selects the steps of one pass of a layer plan.
pub(super) type Launched = fn(&LayerPlan) -> &[Step];

/// The bound steps of each pass.
pub(super) struct Passes {
    pub chunks: Overlap,
    pub forward: Vec<Segment>,
    pub evaluation: Vec<Segment>,
    pub backward: Vec<Segment>,
}
