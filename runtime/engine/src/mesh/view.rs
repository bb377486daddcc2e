//! What a rank runs in a form: at a adaptive parallelism degree, with so many shadows.

use super::passes::{Launched, Passes, SHADOWED, SHARDED, Segment, segments};
use super::raw::exchanged;
use super::shadows::IdleWeights;
use crate::engine::Engine;
use crate::error::EngineError;
use crate::layer::Layer;
use crate::texts::Texts;
use crate::trace::Recorder;
use moesaic_plan::TensorId;
use moesaic_plan::{self as plan, LayerPlan, Overlap, RankPlan, RankStep, Role, Step, Strategy};
use moesaic_tensor::Tensors;
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

/// A plan and its steps, bound, over the layers of a rank's parts: those that hold its
/// weights, but where a adaptive parallelism degree needs others.
pub(super) struct View {
    /// What of a strategy it is for.
    pub form: Form,
    pub plan: RankPlan,
    /// Where what comes back of weights of rows has other sizes; weights and gradients are
    /// the same.
    pub tokens: Option<Layer>,
    /// Where weights are gathered.
    pub experts: Option<Layer>,
    /// Where experts may have shadows.
    pub shadows: Option<Layer>,
    /// Memory for weights of shadows that no call has.
    pub idle_weights: Arc<IdleWeights>,
    /// Of the strategy that was chosen last.
    pub passes: Arc<Passes>,
    /// Of an evaluation, and of a pass that trains.
    pub routing: [Vec<Segment>; 2],
    /// Tensors of the dispatch part that exchanges move.
    pub exchanged: BTreeSet<TensorId>,
}

/// What of a strategy makes other kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Form {
    /// To how many shards of its expert a row goes.
    pub adaptive_r: usize,
    /// The most experts with shadows, as asked for.
    pub shadows: usize,
}

/// The layers of a rank's parts.
#[derive(Clone, Copy)]
pub(super) struct PartLayers<'l> {
    pub tokens: &'l Layer,
    pub experts: &'l Layer,
    /// Where experts may have shadows.
    pub shadows: Option<&'l Layer>,
    /// Where shared experts are sliced.
    pub shared: Option<&'l Layer>,
}

impl View {
    /// Over layers that have weights.
    pub fn over(form: Form, plan: RankPlan, parts: PartLayers<'_>) -> Result<View, EngineError> {
        let routing = |steps: &[RankStep], of: Launched| {
            parts.bind(&plan.routing_of(steps, of(&plan.tokens)), of)
        };
        let evaluation = plan.evaluation_steps();
        Ok(View {
            form,
            routing: [
                routing(evaluation, LayerPlan::evaluation_steps)?,
                routing(&plan.steps, |plan| &plan.steps)?,
            ],
            passes: parts.passes(&plan, Strategy::default().chunks())?.into(),
            tokens: None,
            experts: None,
            shadows: None,
            idle_weights: Arc::default(),
            exchanged: exchanged(&plan),
            plan,
        })
    }

    /// Of a plan with shadows, whose other parts are those that hold weights.
    pub fn shadowed(
        engine: &Engine,
        (form, plan): (Form, RankPlan),
        held: PartLayers<'_>,
    ) -> Result<View, EngineError> {
        let texts = |plan: &LayerPlan| Texts::of(plan.clone().into());
        let shadows = plan.shadows.as_ref();
        let shadows = shadows.map(|plan| engine.borrowing_layer(&texts(plan)?));
        let shadows = shadows.transpose()?;
        let parts = PartLayers {
            shadows: shadows.as_ref(),
            ..held
        };
        let view = View::over(form, plan, parts)?;
        Ok(View { shadows, ..view })
    }

    /// Of a plan whose weights are gathered, beside layers that have what it needs.
    pub fn beside(
        engine: &Engine,
        (form, plan): (Form, RankPlan),
        held: PartLayers<'_>,
    ) -> Result<View, EngineError> {
        let texts = |plan: &LayerPlan| Texts::of(plan.clone().into());
        let experts = engine.borrowing_layer(&texts(&plan.experts)?)?;
        // Weights that are gathered must not change meanwhile.
        let experts = experts.taking_turns(held.experts.turn());
        let tokens = if plan.tokens == *held.tokens.plan() {
            None
        } else {
            Some(sharing(engine, &texts(&plan.tokens)?, held.tokens)?)
        };
        let parts = PartLayers {
            tokens: tokens.as_ref().unwrap_or(held.tokens),
            experts: &experts,
            ..held
        };
        let view = View::over(form, plan, parts)?;
        Ok(View {
            tokens,
            experts: Some(experts),
            ..view
        })
    }

    /// Binds its passes for rows in chunks.
    pub fn take_pieces(
        &mut self,
        held: PartLayers<'_>,
        chunks: Overlap,
    ) -> Result<(), EngineError> {
        if chunks != self.passes.chunks {
            let passes = self.parts(held).passes(&self.plan, chunks)?;
            self.passes = passes.into();
        }
        Ok(())
    }

    /// Tells a recorder of the launches of its own layers.
    pub fn record(&mut self, recorder: Option<&Arc<dyn Recorder>>) {
        for layer in self.own_layers_mut() {
            layer.record(recorder.cloned());
        }
    }

    /// The layers that are its own.
    pub fn own_layers(&self) -> impl Iterator<Item = &Layer> {
        let own = [&self.tokens, &self.experts, &self.shadows];
        own.into_iter().flatten()
    }

    fn own_layers_mut(&mut self) -> impl Iterator<Item = &mut Layer> {
        let own = [&mut self.tokens, &mut self.experts, &mut self.shadows];
        own.into_iter().flatten()
    }

    /// The layers that it runs on, out of those that hold weights.
    pub fn parts<'l>(&'l self, held: PartLayers<'l>) -> PartLayers<'l> {
        PartLayers {
            tokens: self.tokens.as_ref().unwrap_or(held.tokens),
            experts: self.experts.as_ref().unwrap_or(held.experts),
            shadows: self.shadows.as_ref(),
            ..held
        }
    }
}

impl PartLayers<'_> {
    fn get(&self, part: plan::PlanPart) -> &Layer {
        match part {
            plan::PlanPart::Dispatch => self.tokens,
            plan::PlanPart::Experts => self.experts,
            plan::PlanPart::Shadows => self.shadows.expect(SHADOWED),
            plan::PlanPart::Shared => self.shared.expect(SHARDED),
        }
    }

    /// Steps of a pass; `of` has the steps of the same pass of a part.
    fn bind(&self, steps: &[RankStep], of: Launched) -> Result<Vec<Segment>, EngineError> {
        segments(steps, |part, numbers| {
            let layer = self.get(part);
            let all = of(layer.plan());
            let steps: Vec<Step> = numbers.iter().map(|&at| all[at].clone()).collect();
            layer.bind(&steps)
        })
    }

    /// The passes of a plan with rows in chunks.
    fn passes(&self, plan: &RankPlan, chunks: Overlap) -> Result<Passes, EngineError> {
        let plan = plan.in_chunks(chunks);
        Ok(Passes {
            chunks,
            forward: self.bind(&plan.steps, |plan| &plan.steps)?,
            evaluation: self.bind(plan.evaluation_steps(), LayerPlan::evaluation_steps)?,
            backward: self.bind(&plan.backward, |plan| &plan.backward)?,
        })
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
