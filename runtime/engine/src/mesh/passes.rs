//! The passes of a rank with their launches bound, by the pieces that rows travel in.

use crate::error::EngineError;
use crate::launch::Bound;
use crate::layer::Layer;
use moesaic_plan::{self as plan, Both, Exchange, LayerPlan, RankPlan, RankStep, Step};
use std::collections::HashMap;
use std::sync::Arc;

/// Why there is a side of shared experts.
pub(super) const SLICED: &str = "steps of shared experts are of ranks with slices of them";

/// Steps of a pass, launches bound.
pub(super) enum Segment {
    /// Of a side, for all rows or for a piece of them.
    Launches(plan::Side, Arc<Bound>, Option<plan::Piece>),
    Exchange(Exchange),
}

/// The steps of a pass, launches of a side that follow each other together. The same
/// launches for several pieces are bound once.
fn segments(
    steps: &[RankStep],
    bind: impl Fn(plan::Side, &[usize]) -> Result<Bound, EngineError>,
) -> Result<Vec<Segment>, EngineError> {
    let whose = |step: &RankStep| match step {
        RankStep::Launch { side, piece, .. } => Some((*side, *piece)),
        RankStep::Exchange(_) => None,
    };
    let together = |a: &RankStep, b: &RankStep| whose(a).is_some() && whose(a) == whose(b);
    let mut known: HashMap<(plan::Side, Vec<usize>), Arc<Bound>> = HashMap::new();
    let parts = steps.chunk_by(together).map(|part| match &part[0] {
        RankStep::Exchange(exchange) => Ok(Segment::Exchange(exchange.clone())),
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

/// For how many pieces the experts' products are launched.
pub(super) fn pieces(segments: &[Segment]) -> usize {
    let of = |segment: &Segment| match segment {
        Segment::Launches(plan::Side::Experts, _, piece) => piece.map(|piece| piece.of),
        _ => None,
    };
    segments.iter().find_map(of).unwrap_or(1)
}

/// The sides of a rank.
pub(super) struct Sides {
    pub tokens: Layer,
    pub experts: Layer,
    /// Where shared experts are sliced.
    pub shared: Option<Layer>,
}

/// Steps of passes of a side.
pub(super) type Launched = fn(&LayerPlan) -> &[Step];

/// What a rank does in each pass.
pub(super) struct Passes {
    pub degree: Both<usize>,
    pub forward: Vec<Segment>,
    pub evaluation: Vec<Segment>,
    pub backward: Vec<Segment>,
}

impl Sides {
    pub fn all(&self) -> impl Iterator<Item = &Layer> {
        [&self.tokens, &self.experts]
            .into_iter()
            .chain(&self.shared)
    }

    pub fn all_mut(&mut self) -> impl Iterator<Item = &mut Layer> {
        [&mut self.tokens, &mut self.experts]
            .into_iter()
            .chain(&mut self.shared)
    }

    fn get(&self, side: plan::Side) -> &Layer {
        match side {
            plan::Side::Tokens => &self.tokens,
            plan::Side::Experts => &self.experts,
            plan::Side::Shared => self.shared.as_ref().expect(SLICED),
        }
    }

    /// Steps of a pass; `of` has the steps of the same pass of a side.
    pub fn bind(&self, steps: &[RankStep], of: Launched) -> Result<Vec<Segment>, EngineError> {
        segments(steps, |side, numbers| -> Result<Bound, EngineError> {
            let layer = self.get(side);
            let all = of(layer.plan());
            let steps: Vec<Step> = numbers.iter().map(|&at| all[at].clone()).collect();
            layer.bind(&steps)
        })
    }

    /// The passes of a plan with rows in so many pieces.
    pub fn passes(&self, plan: &RankPlan, degree: Both<usize>) -> Result<Passes, EngineError> {
        let plan = plan.in_pieces(degree);
        Ok(Passes {
            degree,
            forward: self.bind(&plan.steps, |plan| &plan.steps)?,
            evaluation: self.bind(plan.evaluation_steps(), LayerPlan::evaluation_steps)?,
            backward: self.bind(&plan.backward, |plan| &plan.backward)?,
        })
    }
}
