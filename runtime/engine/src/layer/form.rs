//! The type of layers, and of what tunes them.

use crate::call::{CallInput, RngKey, StepTime};
use crate::device_layer::DeviceLayer;
use crate::error::EngineError;
use crate::mesh::{Mesh, RankLayer, Timestamp};
use crate::tensor_list::{LayerTensor, of_one, over_ranks, saturated};
use crate::trace::Recorder;
use moesaic_kernel::Target;
use moesaic_plan::{LayerPlan, RankPlan, Tilings};
use moesaic_spec::LayerSpec;
use moesaic_tensor::WeightSource;
use std::fmt;
use std::sync::Arc;

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
    pub(super) form: Form,
    pub(super) tuner: Option<Arc<dyn StrategyTuner>>,
    tensors: Arc<[LayerTensor]>,
}

/// The two kinds of layers.
pub(super) enum Form {
    /// A layer of one process.
    One(Box<DeviceLayer>),
    /// One rank's part of a layer over ranks.
    Ranks(Box<RankLayer>),
}

/// A tuner of strategies: it sets the strategy of each call before the call runs, and learns its
/// time afterwards. The ranks of a layer have one each, and these must decide alike.
/// `moesaic::tune::LayerTuner` is one.
pub trait StrategyTuner: Send + Sync {
    /// Sets the strategy of a call by [`Layer::set_strategy`]. Returns a number of the tuner's own
    /// by which [`StrategyTuner::took`] names the choice.
    ///
    /// # Errors
    /// As the layer's calls.
    fn choose(&self, layer: &Layer, call: &TunedCall<'_>) -> Result<usize, EngineError>;

    /// Takes the times of a choice's passes: forward, and backward if there was one.
    fn took(&self, choice: usize, passes: Vec<PassTime>);
}

/// No more than its name, because a tuner's state is behind locks.
impl fmt::Debug for dyn StrategyTuner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("StrategyTuner")
    }
}

/// A call whose strategy a tuner chooses.
#[derive(Clone, Copy, Debug)]
pub struct TunedCall<'c> {
    /// Tokens of this rank.
    pub tokens: usize,
    /// The capacity factor of this call instead of the spec's.
    pub capacity_factor: Option<f64>,
    /// The RNG key of a training call; `None` for an evaluation.
    pub rng_key: Option<RngKey>,
    /// The arguments, for [`Layer::tokens_per_expert`].
    pub input: CallInput<'c>,
}

/// The time of a pass.
#[derive(Clone, Debug)]
pub enum PassTime {
    /// Seconds, of a call that waits.
    Seconds(f64),
    /// From one moment to the other, of a call that does not.
    Between(Arc<[Timestamp; 2]>),
}

impl PassTime {
    /// Returns the seconds; waits for the end of the pass.
    ///
    /// # Errors
    /// [`EngineError::Device`], also when a launch of the pass has failed.
    pub fn seconds(&self) -> Result<f64, EngineError> {
        match self {
            PassTime::Seconds(seconds) => Ok(*seconds),
            PassTime::Between(moments) => moments[1].seconds_since(&moments[0]),
        }
    }
}

// The two kinds are matched in this folder alone. A trait in place of the enum would
// need every call twice, too, and dynamic dispatch would hide which of them wait for other ranks.
impl Layer {
    pub(crate) fn of_one(layer: DeviceLayer) -> Layer {
        Layer {
            tensors: of_one(&layer).into(),
            form: Form::One(Box::new(layer)),
            tuner: None,
        }
    }

    pub(super) fn over_ranks(layer: RankLayer) -> Layer {
        Layer {
            tensors: over_ranks(layer.replicated(), layer.held_tensors()).into(),
            form: Form::Ranks(Box::new(layer)),
            tuner: None,
        }
    }

    /// Returns the layer, whose caller counts the values that casts between ranks saturate.
    pub(crate) fn counting_saturated(self) -> Layer {
        let counted = std::iter::once(saturated(self.plan()));
        let mut tensors: Vec<LayerTensor> = self.tensors.iter().cloned().chain(counted).collect();
        tensors.sort_by_key(|tensor| tensor.role);
        Layer {
            tensors: tensors.into(),
            ..self
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
    pub(super) fn of_rank(&self, asked: &'static str) -> Result<&RankLayer, EngineError> {
        match &self.form {
            Form::One(_) => Err(EngineError::NotOverRanks { asked }),
            Form::Ranks(layer) => Ok(layer),
        }
    }

    /// Returns the part with the inputs and outputs of a call.
    pub(super) fn dispatch(&self) -> &DeviceLayer {
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
            tensors: Arc::clone(&self.tensors),
        }
    }

    /// Returns a layer of another router over the same experts of ranks; all ranks call it.
    pub(crate) fn with_router(&self, router: &dyn WeightSource) -> Result<Layer, EngineError> {
        let layer = self.of_rank("a router over experts of ranks")?;
        Ok(Layer {
            form: Form::Ranks(Box::new(layer.with_router(router)?)),
            tuner: self.tuner.clone(),
            tensors: Arc::clone(&self.tensors),
        })
    }

    /// Returns the mesh, if the layer is over ranks.
    pub fn mesh(&self) -> Option<&Mesh> {
        match &self.form {
            Form::One(_) => None,
            Form::Ranks(layer) => Some(layer.mesh()),
        }
    }

    /// Returns the target of the kernels.
    pub fn target(&self) -> Target {
        self.plan().target
    }

    /// Returns the spec of the whole layer.
    pub fn spec(&self) -> &LayerSpec {
        &self.plan().spec
    }

    /// Returns every tensor that calls take or return, then weights and their gradients: name,
    /// element type, role, and the sizes for any number of tokens. The list is made with the layer.
    /// Over ranks the calls' tensors are those of this rank's tokens, and weights are this rank's
    /// part. [`layer_tensors`](crate::layer_tensors) lists them before there is a layer.
    pub fn tensors(&self) -> &[LayerTensor] {
        &self.tensors
    }

    /// Returns the tensor of this name among [`Layer::tensors`].
    pub fn tensor(&self, name: &str) -> Option<&LayerTensor> {
        self.tensors.iter().find(|tensor| tensor.name == name)
    }

    /// Returns the plan with the inputs and outputs of a call; over ranks the dispatch part's.
    /// `moesaic tune` changes tiles for some numbers of tokens, and with them sizes of scratch: see
    /// [`Layer::tilings`].
    #[doc(hidden)]
    pub fn plan(&self) -> &LayerPlan {
        self.dispatch().plan()
    }

    /// Returns the plan of this rank under the present strategy, without chunks; `None` for a layer
    /// of one process. Apply [`RankPlan::in_chunks`] with [`Strategy::chunks`] to get its exact
    /// steps.
    #[doc(hidden)]
    pub fn rank_plan(&self) -> Option<RankPlan> {
        match &self.form {
            Form::One(_) => None,
            Form::Ranks(layer) => Some(layer.plan()),
        }
    }

    /// Returns its plans by the number of tokens of a call.
    #[doc(hidden)]
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
    /// a recorder the host waits for each launch on a GPU, so times are right and launches do not
    /// overlap.
    pub fn record(&mut self, recorder: Option<Arc<dyn Recorder>>) {
        match &mut self.form {
            Form::One(layer) => layer.record(recorder),
            Form::Ranks(layer) => layer.record(recorder),
        }
    }

    /// Records the point at which the device has finished the launches so far. If the device has no
    /// streams, the host waits for it.
    ///
    /// # Errors
    /// [`EngineError::Device`].
    pub fn timestamp(&self) -> Result<Timestamp, EngineError> {
        Timestamp::now(&*self.dispatch().device)
    }

    /// Runs the steps of the last call again on its first `tokens` tokens, and times each: an
    /// evaluation's, or for a layer that trains those of both passes. Make that call first.
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
