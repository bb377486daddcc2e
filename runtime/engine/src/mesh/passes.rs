//! The passes of a rank with their launches bound, by the pieces that rows travel in.

use super::run::{SLICED, Segment, segments};
use crate::error::EngineError;
use crate::launch::Bound;
use crate::layer::Layer;
use moesaic_plan::{self as plan, Both, LayerPlan, RankPlan, RankStep, Step};

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
