//! The layer that users call, of one process or over ranks.

mod calls;
mod saved;
mod strategy;
mod weights;

use crate::call::StepTime;
use crate::device_layer::DeviceLayer;
use crate::engine::Engine;
use crate::error::EngineError;
use crate::mesh::{Mesh, RankLayer, Timestamp};
use crate::numbers::Numbers;
use crate::trace::Recorder;
use moesaic_plan::{LayerPlan, RankPlan, Strategy, Tilings, Training};
use moesaic_spec::LayerSpec;
use moesaic_tensor::WeightSource;
use std::fmt;
use std::sync::Arc;

pub use saved::Saved;
pub use strategy::{PassTime, StrategyTuner, TunedCall};

/// A layer that can run: one of a process, or one rank's part of a layer over ranks, behind the
/// same calls.
///
/// Calls from several threads take turns; threads whose calls should run at the same time use a
/// [`Layer::handle`] each.
///
/// Over ranks all of them make every call, in the same order, each with its own tokens and also
/// those that have none. Across all ranks, results equal those of one process that is given every
/// rank's tokens in rank order; dropless and with whole experts (`expert_tp = 1`) they are the same
/// bytes. [`Mesh::over`] says whose tokens losses, capacities and selections look at.
pub struct Layer {
    form: Form,
    tuner: Option<Arc<dyn StrategyTuner>>,
}

/// The two kinds of layers.
enum Form {
    /// A layer of one process.
    One(Box<DeviceLayer>),
    /// One rank's part of a layer over ranks.
    Ranks(Box<RankLayer>),
}

/// The options of a layer.
#[derive(Clone, Default)]
pub struct LayerOptions<'m> {
    /// The memory that backward may use; `None` makes a layer for inference.
    pub training: Option<Training>,
    /// The ranks that share the layer. All of them make it, and all pass the same options.
    pub mesh: Option<&'m Mesh>,
    /// Whether the weights are this rank's part alone, as [`Mesh::part`] returns it, instead of
    /// the whole layer's.
    pub part: bool,
    /// The first strategy of the ranks; see [`Layer::set_strategy`].
    pub strategy: Option<Strategy>,
    /// The tuner that chooses the strategy of each call; see [`Layer::set_tuner`].
    pub tuner: Option<Arc<dyn StrategyTuner>>,
}

impl<'m> LayerOptions<'m> {
    /// Options of a layer over ranks.
    pub fn over(mesh: &'m Mesh) -> LayerOptions<'m> {
        LayerOptions {
            mesh: Some(mesh),
            ..LayerOptions::default()
        }
    }

    /// These options, for a layer that can run backward.
    #[must_use]
    pub fn training(self, training: impl Into<Option<Training>>) -> LayerOptions<'m> {
        LayerOptions {
            training: training.into(),
            ..self
        }
    }
}

impl Engine {
    /// Makes a layer for inference of one process: plans it, gets its kernels, and copies its
    /// weights to the device, so you may free them afterwards.
    ///
    /// # Errors
    /// Whatever [`EngineError`] lists, apart from input errors.
    pub fn layer(
        &self,
        spec: &LayerSpec,
        weights: &dyn WeightSource,
    ) -> Result<Layer, EngineError> {
        self.layer_with(spec, weights, LayerOptions::default())
    }

    /// Makes a layer of one process that can run backward; see [`Layer::forward_train`].
    ///
    /// # Errors
    /// As [`Engine::layer`].
    pub fn training_layer(
        &self,
        spec: &LayerSpec,
        weights: &dyn WeightSource,
        training: Training,
    ) -> Result<Layer, EngineError> {
        self.layer_with(spec, weights, LayerOptions::default().training(training))
    }

    /// Makes a layer with options: for training, over ranks, with a strategy. Over ranks all of
    /// them call it, and a rank reads its own experts and what every rank holds: router,
    /// projections, and shared experts or its shards of them.
    ///
    /// # Errors
    /// [`EngineError::Plan`] for a mesh that the layer cannot have; [`EngineError::Collective`] when
    /// ranks ask for different layers, naming what differs; [`EngineError::NotOverRanks`] for
    /// options of ranks without a mesh; otherwise as [`Engine::layer`].
    pub fn layer_with(
        &self,
        spec: &LayerSpec,
        weights: &dyn WeightSource,
        options: LayerOptions<'_>,
    ) -> Result<Layer, EngineError> {
        let LayerOptions { training, mesh, .. } = options;
        let mut layer = match mesh {
            Some(mesh) if options.part => {
                let layer = self.rank_layer_of_part(mesh, spec, weights, training)?;
                Layer::over_ranks(layer)
            }
            Some(mesh) => Layer::over_ranks(self.rank_layer(mesh, spec, weights, training)?),
            None if options.part => {
                let asked = "a part of the weights";
                return Err(EngineError::NotOverRanks { asked });
            }
            None => {
                let weights = Numbers::new(spec, self.target(), weights);
                Layer::of_one(self.device_layer(&self.texts(spec, training)?, &weights)?)
            }
        };
        // After the layer is there, because ranks compare strategies by a call of its mesh, and
        // before the tuner, whose first choice is compared with the present one.
        if let Some(strategy) = options.strategy {
            layer.set_strategy(strategy)?;
        }
        if options.tuner.is_some() {
            layer.set_tuner(options.tuner)?;
        }
        Ok(layer)
    }

    /// Makes a layer whose routed experts are those of `bank`, in the same memory (Intern-S2-Mobius,
    /// whose decoder layers share banks of experts). Router, projections and shared experts are the
    /// layer's own, from `weights`, which need not have the experts. The spec may differ in all but
    /// the experts. The layer trains if `bank` does, and has the mesh of `bank`, all of whose ranks
    /// make it.
    ///
    /// The experts of both have one gradient, too: begin a step with [`Layer::zero_gradients`] of
    /// each, and let every backward pass add. [`Layer::reduce_gradients`] of the new layer leaves
    /// it to that of `bank` to sum the experts' gradients, so reduce `bank` last.
    ///
    /// # Errors
    /// [`EngineError::Weight`] for an expert's tensor that the bank does not have in the form that
    /// the spec asks for; otherwise as [`Engine::layer_with`].
    pub fn layer_over_experts_of(
        &self,
        bank: &Layer,
        spec: &LayerSpec,
        weights: &dyn WeightSource,
    ) -> Result<Layer, EngineError> {
        match &bank.form {
            Form::One(bank) => {
                let texts = self.texts(spec, bank.plan().training)?;
                let weights = Numbers::new(spec, self.target(), weights);
                let layer = self.device_layer_over(&texts, &weights, bank)?;
                Ok(Layer::of_one(layer))
            }
            Form::Ranks(bank) => Ok(Layer::over_ranks(
                self.rank_layer_over(bank, spec, weights)?,
            )),
        }
    }

    /// Makes a training layer without weights. Each call names the address of every weight, and
    /// each backward pass also that of every gradient, `grad.<weight>`, so the layer copies
    /// neither. Layers of other weights can share it.
    ///
    /// # Errors
    /// As [`Engine::layer`], without those of weights. Calls fail with
    /// [`EngineError::NoWeight`] where they do not bring a weight.
    pub fn layer_without_weights(
        &self,
        spec: &LayerSpec,
        training: Training,
    ) -> Result<Layer, EngineError> {
        let layer = self.borrowing_layer(&self.texts(spec, Some(training))?)?;
        Ok(Layer::of_one(layer))
    }
}

// The two kinds are matched in this module and its folder alone. A trait in place of the enum would
// need every call twice, too, and dynamic dispatch would hide which of them wait for other ranks.
impl Layer {
    pub(crate) fn of_one(layer: DeviceLayer) -> Layer {
        Layer {
            form: Form::One(Box::new(layer)),
            tuner: None,
        }
    }

    fn over_ranks(layer: RankLayer) -> Layer {
        Layer {
            form: Form::Ranks(Box::new(layer)),
            tuner: None,
        }
    }

    /// Returns the layer of one process; `asked` names the purpose in the error.
    pub(crate) fn one(&self, asked: &'static str) -> Result<&DeviceLayer, EngineError> {
        match &self.form {
            Form::One(layer) => Ok(layer),
            Form::Ranks(_) => Err(EngineError::OverRanks { asked }),
        }
    }

    /// Returns the rank's part; `asked` names the purpose in the error.
    fn of_rank(&self, asked: &'static str) -> Result<&RankLayer, EngineError> {
        match &self.form {
            Form::One(_) => Err(EngineError::NotOverRanks { asked }),
            Form::Ranks(layer) => Ok(layer),
        }
    }

    /// Returns the part with the inputs and outputs of a call.
    fn dispatch(&self) -> &DeviceLayer {
        match &self.form {
            Form::One(layer) => layer,
            Form::Ranks(layer) => layer.replicated(),
        }
    }

    /// Returns another handle to the layer: its weights and kernels are the same memory, its
    /// workspace is its own. Calls of two handles run at the same time, on a GPU in the order of the
    /// stream; calls of one take turns. [`Layer::set_weight`] changes a weight for all handles.
    ///
    /// A handle to a training layer has gradients of its own, and its backward takes what its own
    /// `forward_train` saved. Over ranks a handle begins with the default strategy, and calls take
    /// turns at exchanges.
    pub fn handle(&self) -> Layer {
        let form = match &self.form {
            Form::One(layer) => Form::One(Box::new(layer.handle())),
            Form::Ranks(layer) => Form::Ranks(Box::new(layer.handle())),
        };
        Layer {
            form,
            tuner: self.tuner.clone(),
        }
    }

    /// Returns the mesh, if the layer is over ranks.
    pub fn mesh(&self) -> Option<&Mesh> {
        match &self.form {
            Form::One(_) => None,
            Form::Ranks(layer) => Some(layer.mesh()),
        }
    }

    /// Returns the spec of the whole layer.
    pub fn spec(&self) -> &LayerSpec {
        &self.plan().spec
    }

    /// Returns the plan with the inputs and outputs of a call; over ranks the dispatch part's.
    /// `moesaic tune` changes tiles for some numbers of tokens, and with them sizes of scratch: see
    /// [`Layer::tilings`].
    pub fn plan(&self) -> &LayerPlan {
        self.dispatch().plan()
    }

    /// Returns the plan of this rank under the present strategy, without chunks; `None` for a layer
    /// of one process. Apply [`RankPlan::in_chunks`] with [`Strategy::chunks`] to get its exact
    /// steps.
    pub fn rank_plan(&self) -> Option<RankPlan> {
        match &self.form {
            Form::One(_) => None,
            Form::Ranks(layer) => Some(layer.plan()),
        }
    }

    /// Returns its plans by the number of tokens of a call.
    pub fn tilings(&self) -> &Tilings {
        self.dispatch().tilings()
    }

    /// Returns the most tokens of one call: assignments are counted in 31 bits.
    pub fn max_tokens(&self) -> usize {
        self.dispatch().max_tokens()
    }

    /// Returns the bytes of device memory that its intermediates use now; over ranks with those of
    /// the workspace pool, which all layers of the mesh share.
    pub fn workspace_bytes(&self) -> u64 {
        match &self.form {
            Form::One(layer) => layer.workspace_bytes(),
            Form::Ranks(layer) => layer.workspace_bytes(),
        }
    }

    /// Sets the recorder of every launch, and over ranks of every exchange; `None` removes it. With
    /// a recorder each launch on a GPU is waited for: times are right, and launches that would
    /// overlap do not.
    pub fn record(&mut self, recorder: Option<Arc<dyn Recorder>>) {
        match &mut self.form {
            Form::One(layer) => layer.record(recorder),
            Form::Ranks(layer) => layer.record(recorder),
        }
    }

    /// Records the point at which the device has finished the launches so far. A device without
    /// streams is waited for.
    ///
    /// # Errors
    /// [`EngineError::Device`].
    pub fn timestamp(&self) -> Result<Timestamp, EngineError> {
        Timestamp::now(&*self.dispatch().device)
    }

    /// Runs the steps again on the inputs of the last call, the first `tokens` of them, and times
    /// each: those of an evaluation, or where the layer trains of a call that did, backward too.
    /// For `bench` and the quickstart.
    ///
    /// # Errors
    /// When no call was that large, or a launch fails; [`EngineError::OverRanks`].
    pub fn time_steps(&self, tokens: usize) -> Result<Vec<StepTime>, EngineError> {
        self.one("the time of each step")?.time_steps(tokens)
    }
}

impl fmt::Debug for Layer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plan = self.plan();
        f.debug_struct("Layer")
            .field("shape", &plan.spec.shape)
            .field("target", &plan.target.to_string())
            .field("trains", &plan.training.is_some())
            .field("mesh", &self.mesh().map(Mesh::parallel))
            .finish_non_exhaustive()
    }
}
