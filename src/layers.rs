//! The engine and the layers that it makes.

use crate::experts::{MultiGate, UserExpert, UserLayer};
use crate::mesh::Ranks;
use crate::{
    EngineError, Layer, LayerOptions, LayerSpec, Mesh, Target, Tensors, Training, WeightSource,
};
use moesaic_cache::TunedMachine;
use moesaic_collectives::Communicator;
use moesaic_collectives::nccl::{self, Nccl};
use moesaic_engine::{EngineStats, LoadedKernel, Variants};
use moesaic_plan::{CacheClass, Tilings};
use moesaic_target::{Device, DeviceInfo};
use std::sync::Arc;

/// A device, its compiler and a kernel store; you make layers with it. Clones share everything, and
/// layers of one engine share kernels that are equal.
///
/// ```
/// use moesaic::{Engine, Input};
///
/// # use moesaic::example::{spec, wave, weights};
/// # fn main() -> Result<(), moesaic::Error> {
/// let engine = Engine::auto()?; // a GPU where there is one, else the CPU
/// let layer = engine.layer(&spec(), &weights())?;
/// layer.forward(&Input::new(3, &wave(24)))?;
/// println!("{} on {}", engine.target(), engine.device_info().name);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Engine(pub(crate) moesaic_engine::Engine);

/// Layers.
impl Engine {
    /// Makes a layer for inference in one process: plans it, gets its kernels, and copies its
    /// weights to the device, so you may free yours afterwards.
    ///
    /// # Errors
    /// [`EngineError`], all of its variants but those of inputs.
    pub fn layer(
        &self,
        spec: &LayerSpec,
        weights: &dyn WeightSource,
    ) -> Result<Layer, EngineError> {
        self.0.layer(spec, weights)
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
        self.0.training_layer(spec, weights, training)
    }

    /// Makes a layer with options: for training, over ranks, with a strategy. Over ranks all of
    /// them call it, and a rank reads its own experts and what every rank holds: router,
    /// projections, and shared experts or its shards of them.
    ///
    /// # Errors
    /// [`EngineError::Plan`] for a mesh that the layer cannot have; [`EngineError::Collective`] when
    /// ranks ask for different layers, naming what differs; [`EngineError::DifferentWeights`] when
    /// they bring different values of a weight that every rank holds; [`EngineError::NotOverRanks`]
    /// for options of ranks without a mesh; otherwise as [`Engine::layer`].
    pub fn layer_with(
        &self,
        spec: &LayerSpec,
        weights: &dyn WeightSource,
        options: LayerOptions<'_>,
    ) -> Result<Layer, EngineError> {
        self.0.layer_with(spec, weights, options)
    }

    /// Makes a training layer without weights. Each call names the address of every weight
    /// ([`RawCall`](crate::RawCall)), and each backward pass also that of every gradient,
    /// `grad.<weight>`, so the layer copies neither. One such layer serves any number of weight
    /// sets.
    ///
    /// # Errors
    /// As [`Engine::layer`], without those of weights. Calls fail with
    /// [`EngineError::NoWeight`] where they do not bring a weight.
    pub fn layer_without_weights(
        &self,
        spec: &LayerSpec,
        training: Training,
    ) -> Result<Layer, EngineError> {
        self.0.layer_without_weights(spec, training)
    }

    /// Makes a layer around `experts`: one per expert of the spec, or over ranks one per expert that
    /// the mesh places on this rank, in that order. `weights` are those of router and shared
    /// experts; of the spec's experts only their number counts.
    ///
    /// # Errors
    /// [`EngineError::Spec`] when the number of experts differs, for a mesh that splits or
    /// replicates experts, and for options that such a layer does not take: a part of the weights,
    /// a tuner, settings of a strategy that move weights or sums of experts (`r`, `shadows`,
    /// `overlap_by=peers`, `all_to_all=dedup`). [`EngineError::Plan`] when the spec has biases of
    /// experts or `weight_on = "activation"`, which are inside them; otherwise as
    /// [`Engine::layer_with`].
    pub fn user_layer<E: UserExpert>(
        &self,
        spec: &LayerSpec,
        weights: &dyn WeightSource,
        experts: Vec<E>,
        options: LayerOptions<'_>,
    ) -> Result<UserLayer<E>, EngineError> {
        self.0.user_layer(spec, weights, experts, options)
    }

    /// Makes one layer per element of `routers`, the weights whose names begin with `router.`; all
    /// others are in `weights`, once for all layers. Over ranks all of them call it, with the same
    /// number of routers.
    ///
    /// # Errors
    /// As [`Engine::layer_with`].
    pub fn multi_gate(
        &self,
        spec: &LayerSpec,
        weights: &dyn WeightSource,
        routers: &[Tensors<'_>],
        options: LayerOptions<'_>,
    ) -> Result<MultiGate, EngineError> {
        self.0.multi_gate(spec, weights, routers, options)
    }

    /// Makes a layer whose routed experts are those of `bank`, in the same memory
    /// (Intern-S2-Mobius, whose decoder layers share banks of experts). Router, projections and
    /// shared experts are the layer's own, from `weights`, which need not have the experts. The spec
    /// may differ in all but the experts. The layer trains if `bank` does, and has the mesh of
    /// `bank`, all of whose ranks make it.
    ///
    /// The experts of both have one gradient, too: begin a step with [`Layer::zero_gradients`] of
    /// each, and let every backward pass add. [`Layer::reduce_gradients`] of the new layer leaves
    /// it to that of `bank` to sum the experts' gradients, so reduce `bank` last.
    ///
    /// ```
    /// use moesaic::Input;
    ///
    /// # use moesaic::example::{engine, spec, wave, weights};
    /// # fn main() -> Result<(), moesaic::Error> {
    /// # let engine = engine();
    /// let bank = engine.layer(&spec(), &weights())?;
    /// let mut own = spec();
    /// own.router.scale = 2.0;
    /// let layer = engine.layer_over_experts_of(&bank, &own, &weights())?;
    /// layer.forward(&Input::new(3, &wave(24)))?;
    /// # Ok(())
    /// # }
    /// ```
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
        self.0.layer_over_experts_of(bank, spec, weights)
    }

    /// Compiles or finds every kernel of a layer and loads it, without weights.
    ///
    /// # Errors
    /// As [`Engine::layer`].
    pub fn warm_up(&self, spec: &LayerSpec) -> Result<(), EngineError> {
        self.0.warm_up(spec)
    }

    /// Loads the kernels of a layer, without a tuning, for
    /// [`Launcher`](crate::typed::Launcher)s that launch them one by one.
    ///
    /// # Errors
    /// As [`Engine::layer`].
    pub fn kernels(&self, spec: &LayerSpec) -> Result<Vec<LoadedKernel>, EngineError> {
        self.0.kernels(spec)
    }

    /// Checks that a layer could take that many tokens in one call now, weights aside.
    ///
    /// # Errors
    /// [`EngineError::Input`] when a call never can, [`EngineError::NoRoom`] when memory is short;
    /// otherwise as [`Engine::layer`].
    pub fn check_tokens(&self, spec: &LayerSpec, tokens: usize) -> Result<(), EngineError> {
        self.0.check_tokens(spec, tokens)
    }
}

/// Ranks.
impl Engine {
    /// Returns a handle to exchange host memory between the ranks of a mesh. It uses this engine's
    /// device, which must be the mesh's.
    pub fn ranks(&self, mesh: &Mesh) -> Ranks {
        self.0.ranks(mesh)
    }

    /// Starts this process as one of the ranks that a launcher started, with one GPU each, over
    /// NCCL or RCCL. Waits until all ranks have joined. A kernel of the device sums over ranks,
    /// unless the options name something else.
    ///
    /// # Errors
    /// [`EngineError::Collective`] as [`nccl::start`]; those of a kernel that cannot be had.
    pub fn nccl(&self, options: nccl::NcclOptions) -> Result<Nccl, EngineError> {
        self.0.nccl(options)
    }

    /// Starts ranks that can already exchange messages: by MPI, or because they are threads of one
    /// process.
    ///
    /// # Errors
    /// [`EngineError::Collective`] as [`nccl::over`]; those of a kernel that cannot be had.
    pub fn nccl_over(
        &self,
        control: Communicator,
        options: nccl::NcclOptions,
    ) -> Result<Nccl, EngineError> {
        self.0.nccl_over(control, options)
    }
}

/// The machine below.
impl Engine {
    /// Returns the target of the kernels.
    pub fn target(&self) -> Target {
        self.0.target()
    }

    /// Returns the description of the device.
    pub fn device_info(&self) -> &DeviceInfo {
        self.0.device_info()
    }

    /// Returns the device, for memory that raw calls use.
    pub fn device(&self) -> &Arc<dyn Device> {
        self.0.device()
    }

    /// Returns the sources of the kernels so far: memory, store, compiler.
    pub fn stats(&self) -> EngineStats {
        self.0.stats()
    }
}

// The command line and the tests call these, which change without notice.
#[doc(hidden)]
impl Engine {
    /// Returns the cache sizes that plans for a CPU use.
    pub fn caches(&self) -> CacheClass {
        self.0.caches()
    }

    /// Returns the machine, as tunings name it.
    pub fn machine(&self) -> TunedMachine {
        self.0.machine()
    }

    /// Returns the plans of a layer on this engine's target: without a tuning, and with the store's
    /// tunings for this machine.
    ///
    /// # Errors
    /// As [`Engine::layer`].
    pub fn tilings(
        &self,
        spec: &LayerSpec,
        training: Option<Training>,
    ) -> Result<Tilings, EngineError> {
        self.0.tilings(spec, training)
    }

    /// Makes the memory that all tilings of a layer use.
    ///
    /// # Errors
    /// As [`Engine::layer`].
    pub fn variants<'a>(
        &self,
        spec: &LayerSpec,
        weights: &'a dyn WeightSource,
        training: Option<Training>,
    ) -> Result<Variants<'a>, EngineError> {
        self.0.variants(spec, weights, training)
    }
}
