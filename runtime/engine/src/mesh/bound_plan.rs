//! Bound plans: the launches and exchanges of a rank for one adaptive parallelism degree and one
//! number of shadows.

use super::passes::{Launched, Passes, SHADOWED, SHARDED, Segment, segments};
use super::shadow_weights::IdleWeights;
use crate::device_layer::DeviceLayer;
use crate::engine::Engine;
use crate::error::EngineError;
use crate::memory::Buffers;
use crate::shared::same_memory;
use crate::texts::Texts;
use crate::trace::Recorder;
use moesaic_plan::TensorId;
use moesaic_plan::{
    self as plan, LayerPlan, Overlap, PlanForm, RankPlan, RankStep, Step, Strategy, TensorRole,
};
use moesaic_tensor::{Tensors, WeightSource};
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

/// A rank plan with its steps bound to kernels. It runs on the layers that hold the rank's weights,
/// except where the degree needs layers of its own.
pub(super) struct BoundPlan {
    /// The parts of the strategy that the plan is for.
    pub form: PlanForm,
    pub plan: RankPlan,
    /// The dispatch part, where gradients of row weights have another size than in the held layer,
    /// or experts weight their outputs. Weights and gradients are the same memory.
    pub tokens: Option<DeviceLayer>,
    /// The expert part, where weights are gathered, or experts weight their outputs.
    pub experts: Option<DeviceLayer>,
    /// The shadow part, where experts may have shadows.
    pub shadows: Option<DeviceLayer>,
    /// Memory for weights of shadows that no call uses now.
    pub idle_weights: Arc<IdleWeights>,
    /// The passes for the overlap that was chosen last.
    pub passes: Arc<Passes>,
    /// The passes without chunks, with which a handle begins.
    unchunked: Arc<Passes>,
    /// The routing steps of an evaluation and of a training pass.
    pub routing: Arc<[Vec<Segment>; 2]>,
    /// The tensors of the dispatch part that exchanges move.
    pub exchanged: BTreeSet<TensorId>,
}

/// The layers of a rank's parts.
#[derive(Clone, Copy)]
pub(super) struct PartLayers<'l> {
    pub tokens: &'l DeviceLayer,
    pub experts: &'l DeviceLayer,
    /// The shadow part, where experts may have shadows.
    pub shadows: Option<&'l DeviceLayer>,
    /// The shared-expert part, where shared experts are sharded.
    pub shared: Option<&'l DeviceLayer>,
}

impl BoundPlan {
    /// Binds a plan over layers that hold weights.
    pub fn over(
        form: PlanForm,
        plan: RankPlan,
        parts: PartLayers<'_>,
    ) -> Result<BoundPlan, EngineError> {
        let routing = |steps: &[RankStep], of: Launched| {
            parts.bind(&plan.routing_of(steps, of(&plan.tokens)), of)
        };
        let evaluation = plan.evaluation_steps();
        let routing = [
            routing(evaluation, LayerPlan::evaluation_steps)?,
            routing(&plan.steps, |plan| &plan.steps)?,
        ];
        let unchunked = Arc::new(parts.passes(&plan, Strategy::default().chunks())?);
        Ok(BoundPlan {
            form,
            routing: routing.into(),
            passes: Arc::clone(&unchunked),
            unchunked,
            tokens: None,
            experts: None,
            shadows: None,
            idle_weights: Arc::default(),
            exchanged: exchanged(&plan),
            plan,
        })
    }

    /// Binds a plan whose ranks run the experts that they own: other kernels over the same weights
    /// where the plan has some, and a new shadow part if it has one.
    pub fn owning(
        engine: &Engine,
        form: PlanForm,
        plan: RankPlan,
        held: PartLayers<'_>,
    ) -> Result<BoundPlan, EngineError> {
        let texts = |plan: &LayerPlan| Texts::of(plan.clone().into());
        let shadows = plan.shadows.as_ref();
        let shadows = shadows.map(|plan| engine.borrowing_layer(&texts(plan)?));
        let shadows = shadows.transpose()?;
        let tokens = other_kernels(engine, &plan.tokens, held.tokens)?;
        let experts = other_kernels(engine, &plan.experts, held.experts)?;
        let parts = PartLayers {
            tokens: tokens.as_ref().unwrap_or(held.tokens),
            experts: experts.as_ref().unwrap_or(held.experts),
            shadows: shadows.as_ref(),
            ..held
        };
        let bound = BoundPlan::over(form, plan, parts)?;
        Ok(BoundPlan {
            tokens,
            experts,
            shadows,
            ..bound
        })
    }

    /// Binds a plan whose expert part gathers its weights.
    pub fn gathering(
        engine: &Engine,
        form: PlanForm,
        plan: RankPlan,
        held: PartLayers<'_>,
    ) -> Result<BoundPlan, EngineError> {
        let texts = |plan: &LayerPlan| Texts::of(plan.clone().into());
        let experts = engine.borrowing_layer(&texts(&plan.experts)?)?;
        // A call that gathers weights must not run while another call changes them, so both take
        // the same lock.
        let experts = experts.taking_turns(held.experts.turn());
        // The degree changes the width of an expert's shard, and with it the number of partial sums
        // that the gradient of a row's weight comes in.
        let tokens = other_kernels(engine, &plan.tokens, held.tokens)?;
        let parts = PartLayers {
            tokens: tokens.as_ref().unwrap_or(held.tokens),
            experts: &experts,
            ..held
        };
        let bound = BoundPlan::over(form, plan, parts)?;
        Ok(BoundPlan {
            tokens,
            experts: Some(experts),
            ..bound
        })
    }

    /// Returns the same plan for a handle of the layer, without chunks. It has to be one without
    /// layers of its own.
    pub fn handle(&self) -> BoundPlan {
        BoundPlan {
            form: self.form,
            plan: self.plan.clone(),
            tokens: None,
            experts: None,
            shadows: None,
            // Memory of shadows belongs to the calls of one handle. Bound steps name tensors by
            // number and no address, so handles have them in common.
            idle_weights: Arc::default(),
            passes: Arc::clone(&self.unchunked),
            unchunked: Arc::clone(&self.unchunked),
            routing: Arc::clone(&self.routing),
            exchanged: self.exchanged.clone(),
        }
    }

    /// Binds the passes for an overlap.
    pub fn bind_chunks(
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

    /// Sets the recorder of the launches of its own layers.
    pub fn record(&mut self, recorder: Option<&Arc<dyn Recorder>>) {
        for layer in self.own_layers_mut() {
            layer.record(recorder.cloned());
        }
    }

    /// Returns the layers that belong to this plan alone.
    pub fn own_layers(&self) -> impl Iterator<Item = &DeviceLayer> {
        let own = [&self.tokens, &self.experts, &self.shadows];
        own.into_iter().flatten()
    }

    fn own_layers_mut(&mut self) -> impl Iterator<Item = &mut DeviceLayer> {
        let own = [&mut self.tokens, &mut self.experts, &mut self.shadows];
        own.into_iter().flatten()
    }

    /// Returns the layers that the plan runs on; `held` are those that hold weights.
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
    fn get(&self, part: plan::PlanPart) -> &DeviceLayer {
        match part {
            plan::PlanPart::Dispatch => self.tokens,
            plan::PlanPart::Experts => self.experts,
            plan::PlanPart::Shadows => self.shadows.expect(SHADOWED),
            plan::PlanPart::Shared => self.shared.expect(SHARDED),
        }
    }

    /// Binds the steps of a pass; `of` returns the steps of the same pass of a part.
    fn bind(&self, steps: &[RankStep], of: Launched) -> Result<Vec<Segment>, EngineError> {
        segments(steps, |part, numbers| {
            let layer = self.get(part);
            let all = of(layer.plan());
            let steps: Vec<Step> = numbers.iter().map(|&at| all[at].clone()).collect();
            layer.bind(&steps)
        })
    }

    /// Binds the passes of a plan with rows in chunks.
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

/// Makes a layer of a plan over all weights and gradients of another; `None` if the other has this
/// plan.
fn other_kernels(
    engine: &Engine,
    plan: &LayerPlan,
    of: &DeviceLayer,
) -> Result<Option<DeviceLayer>, EngineError> {
    if plan == of.plan() {
        return Ok(None);
    }
    // Packed weights in another layout would be read wrongly.
    debug_assert!(same_memory(plan, of.plan()));
    // An empty source: every weight is among the shared buffers, and a missing one is an error
    // instead of a second copy.
    let (texts, none) = (Texts::of(plan.clone().into())?, Tensors::new());
    sharing(engine, &texts, of, &none, |_| true).map(Some)
}

/// Makes a layer over the weights and gradients of another whose names are `common`; it reads the
/// other weights from `own` and has gradients of its own for them.
pub(super) fn sharing(
    engine: &Engine,
    texts: &Texts,
    of: &DeviceLayer,
    own: &dyn WeightSource,
    common: fn(&str) -> bool,
) -> Result<DeviceLayer, EngineError> {
    let named = |buffers: &Buffers, role: fn(TensorRole) -> bool| {
        let tensors = of.plan().tensors.iter();
        let tensors = tensors.filter(|tensor| role(tensor.role) && common(&tensor.name));
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
        matches!(role, TensorRole::Weight | TensorRole::Packed)
    });
    let layer = engine.device_layer_sharing(texts, own, weights)?;
    if of.plan().training.is_some() {
        let gradients = named(of.gradient_buffers()?, |role| {
            role == TensorRole::WeightGradient
        });
        layer.share_gradients(gradients)?;
    }
    Ok(layer.taking_turns(of.turn()))
}

/// Returns the tensors of the dispatch part that exchanges move, or that the host reads for them.
fn exchanged(plan: &RankPlan) -> BTreeSet<TensorId> {
    let steps = plan.steps.iter().chain(&plan.evaluation);
    let exchanges = steps.chain(&plan.backward).filter_map(RankStep::exchange);
    let moved = exchanges.flat_map(|exchange| [exchange.reads(), exchange.writes()]);
    let moved = moved
        .flatten()
        .filter(|at| at.part == plan::PlanPart::Dispatch);
    let moved = moved.map(|at| at.tensor);
    let read = ["offsets", "row_slots"];
    let read = read.into_iter().filter_map(|name| plan.tokens.id(name));
    moved.chain(read).collect()
}
