//! What a rank runs at a number of ways.

use super::run::{SLICED, Segment, segments};
use crate::engine::Engine;
use crate::error::EngineError;
use crate::layer::Layer;
use crate::texts::Texts;
use moesaic_plan::{self as plan, LayerPlan, RankPlan, RankStep, Role, Step};
use moesaic_tensor::Tensors;
use std::collections::HashMap;

/// A plan and its steps, bound, over the layers of a rank's sides: those that hold its
/// weights, but where a number of ways needs others.
pub(super) struct View {
    pub plan: RankPlan,
    /// Where what comes back of weights of rows has other sizes; weights and gradients are
    /// the same.
    pub tokens: Option<Layer>,
    /// Where weights are gathered.
    pub experts: Option<Layer>,
    pub forward: Vec<Segment>,
    pub evaluation: Vec<Segment>,
    pub backward: Vec<Segment>,
    /// Of an evaluation, and of a pass that trains.
    pub routing: [Vec<Segment>; 2],
}

/// The layers of a rank's sides.
#[derive(Clone, Copy)]
pub(super) struct Sides<'l> {
    pub tokens: &'l Layer,
    pub experts: &'l Layer,
    /// Where shared experts are sliced.
    pub shared: Option<&'l Layer>,
}

impl View {
    /// Over layers that have weights.
    pub fn over(plan: RankPlan, sides: Sides<'_>) -> Result<View, EngineError> {
        let bound = |steps: &[RankStep], of: fn(&LayerPlan) -> &[Step]| {
            segments(steps, |side, numbers| {
                let layer = match side {
                    plan::Side::Tokens => sides.tokens,
                    plan::Side::Experts => sides.experts,
                    plan::Side::Shared => sides.shared.expect(SLICED),
                };
                let all = of(layer.plan());
                let steps: Vec<Step> = numbers.iter().map(|&at| all[at].clone()).collect();
                layer.bind(&steps)
            })
        };
        let routing = |steps: &[RankStep], of: fn(&LayerPlan) -> &[Step]| {
            bound(&plan.routing_of(steps, of(&plan.tokens)), of)
        };
        let evaluation = plan.evaluation_steps();
        Ok(View {
            routing: [
                routing(evaluation, LayerPlan::evaluation_steps)?,
                routing(&plan.steps, |plan| &plan.steps)?,
            ],
            forward: bound(&plan.steps, |plan| &plan.steps)?,
            evaluation: bound(evaluation, LayerPlan::evaluation_steps)?,
            backward: bound(&plan.backward, |plan| &plan.backward)?,
            tokens: None,
            experts: None,
            plan,
        })
    }

    /// Of a plan whose weights are gathered, beside layers that have what it needs.
    pub fn beside(engine: &Engine, plan: RankPlan, held: Sides<'_>) -> Result<View, EngineError> {
        let texts = |plan: &LayerPlan| Texts::of(plan.clone().into());
        let experts = engine.borrowing_layer(&texts(&plan.experts)?)?;
        // Weights that are gathered must not change meanwhile.
        let experts = experts.taking_turns(held.experts.turn());
        let tokens = match plan.tokens == *held.tokens.plan() {
            true => None,
            false => Some(sharing(engine, &texts(&plan.tokens)?, held.tokens)?),
        };
        let sides = Sides {
            tokens: tokens.as_ref().unwrap_or(held.tokens),
            experts: &experts,
            ..held
        };
        let view = View::over(plan, sides)?;
        Ok(View {
            tokens,
            experts: Some(experts),
            ..view
        })
    }

    /// The layers that it runs on, out of those that hold weights.
    pub fn sides<'l>(&'l self, held: Sides<'l>) -> Sides<'l> {
        Sides {
            tokens: self.tokens.as_ref().unwrap_or(held.tokens),
            experts: self.experts.as_ref().unwrap_or(held.experts),
            ..held
        }
    }
}

/// A layer over the weights and gradients of another.
fn sharing(engine: &Engine, texts: &Texts, of: &Layer) -> Result<Layer, EngineError> {
    let named = |buffers: &crate::memory::Buffers, role: fn(Role) -> bool| {
        let tensors = of.plan().tensors.iter().filter(|tensor| role(tensor.role));
        let buffer = |name: &String| {
            Some((
                name.clone(),
                of.id(name).and_then(|id| buffers.handle(id))?.clone(),
            ))
        };
        tensors
            .filter_map(|tensor| buffer(&tensor.name))
            .collect::<HashMap<_, _>>()
    };
    let weights = named(&of.weights, |role| {
        matches!(role, Role::Weight | Role::Packed)
    });
    let layer = engine.layer_with(texts, &Tensors::new(), weights)?;
    if of.plan().training.is_some() {
        let gradients = named(of.gradient_buffers()?, |role| role == Role::WeightGradient);
        layer.share_gradients(gradients)?;
    }
    Ok(layer.taking_turns(of.turn()))
}
