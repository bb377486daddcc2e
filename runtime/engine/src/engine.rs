//! A device with a compiler and a store: what layers are made with.

use crate::jit::Jit;
use crate::layer::Layer;
use crate::{EngineError, Untuned, Weights};
use moesaic_cache::{Machine, Store};
use moesaic_emit::emit_layer;
use moesaic_kernel::{KernelSource, Target};
use moesaic_plan::{LayerPlan, Training, plan, plan_training};
use moesaic_spec::LayerSpec;
use moesaic_target::{Buffer, CompileOptions, Compiler, Device, DeviceInfo, Module};
use std::collections::HashMap;
use std::sync::Arc;

/// What an engine is made of.
pub struct EngineParts {
    /// Where layers run.
    pub device: Arc<dyn Device>,
    /// What compiles kernels; `None` runs from the store alone.
    pub compiler: Option<Arc<dyn Compiler>>,
    /// Where compiled kernels are kept; `None` compiles in every process.
    pub store: Option<Arc<Store>>,
    /// A kernel that is not in the store is an error instead of a compile.
    pub strict: bool,
    /// Layers are made with the tunings of this machine that the store has.
    pub tuned: bool,
    /// What is asked of the compiler.
    pub options: CompileOptions,
}

/// A device with a compiler and a store. Cheap to clone; clones share
/// everything. Layers of one engine share kernels that are equal.
#[derive(Clone)]
pub struct Engine {
    device: Arc<dyn Device>,
    target: Target,
    tuned: bool,
    jit: Arc<Jit>,
}

/// One kernel of a layer on the engine's device.
#[derive(Clone)]
pub struct LoadedKernel {
    /// Its text, entries and launch geometry.
    pub source: KernelSource,
    /// What launches its entries.
    pub module: Arc<dyn Module>,
}

/// Where the kernels of an engine came from, so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Kernels compiled.
    pub compiled: u64,
    /// Kernels read from the store.
    pub from_store: u64,
    /// Kernels that were already loaded.
    pub in_memory: u64,
}

impl Engine {
    /// An engine for the device's own target.
    pub fn new(parts: EngineParts) -> Engine {
        let target = parts.device.info().target;
        Engine::for_target(parts, target)
    }

    /// An engine that generates for `target`, which the device must be able
    /// to run: an AVX-512 machine runs `cpu:avx2` too.
    pub fn for_target(parts: EngineParts, target: Target) -> Engine {
        let device = parts.device.clone();
        Engine {
            device,
            target,
            tuned: parts.tuned,
            jit: Arc::new(Jit::new(parts, target)),
        }
    }

    /// The target kernels are generated for.
    pub fn target(&self) -> Target {
        self.target
    }

    /// The device layers run on.
    pub fn device_info(&self) -> &DeviceInfo {
        self.device.info()
    }

    /// The device itself, for memory that raw calls use.
    pub fn device(&self) -> &Arc<dyn Device> {
        &self.device
    }

    /// Where kernels came from, so far.
    pub fn stats(&self) -> Stats {
        self.jit.stats()
    }

    /// The machine, as tunings name it.
    pub fn machine(&self) -> Machine {
        let info = self.device.info();
        Machine {
            name: info.name.clone(),
            threads: info.units,
        }
    }

    /// The plan of a layer on this engine's target.
    ///
    /// # Errors
    /// [`EngineError::Spec`] and [`EngineError::Plan`].
    pub fn plan(&self, spec: &LayerSpec) -> Result<LayerPlan, EngineError> {
        crate::layer::check_spec(spec)?;
        self.best(plan(spec, self.target)?)
    }

    /// The plan with the tuning that the store has of it for this machine. A
    /// strict engine takes no tuning whose kernels it would have to compile.
    fn best(&self, plan: LayerPlan) -> Result<LayerPlan, EngineError> {
        let store = self.jit.store().filter(|_| self.tuned);
        let Some(store) = store.filter(|store| store.has_tunings(self.target)) else {
            return Ok(plan);
        };
        let untuned = Untuned::of(plan)?;
        match untuned.on(store, &self.machine()) {
            Some(tuned) if self.jit.may_load(&emit_layer(&tuned.plan)?) => Ok(tuned.plan),
            _ => Ok(untuned.plan),
        }
    }

    /// Whether a layer could take that many tokens in one call now, weights
    /// aside.
    ///
    /// # Errors
    /// [`EngineError::Input`] when a call never can, [`EngineError::NoRoom`]
    /// when memory is short, and those of [`Engine::plan`].
    pub fn check_tokens(&self, spec: &LayerSpec, tokens: usize) -> Result<(), EngineError> {
        crate::forward::check_size(&self.plan(spec)?, &*self.device, 0, tokens)
    }

    /// Makes a layer: plans it, gets its kernels, puts its weights on the
    /// device. Weights are copied; the caller may let go of them.
    ///
    /// # Errors
    /// Whatever [`EngineError`] lists, apart from input errors.
    pub fn layer(&self, spec: &LayerSpec, weights: &Weights<'_>) -> Result<Layer, EngineError> {
        self.layer_of(self.plan(spec)?, weights)
    }

    /// The layer of a plan.
    pub(crate) fn layer_of(
        &self,
        plan: LayerPlan,
        weights: &Weights<'_>,
    ) -> Result<Layer, EngineError> {
        self.layer_with(plan, weights, HashMap::new())
    }

    /// The layer of a plan; weights that are in `shared` lie there.
    pub(crate) fn layer_with(
        &self,
        plan: LayerPlan,
        weights: &Weights<'_>,
        shared: HashMap<String, Buffer>,
    ) -> Result<Layer, EngineError> {
        let modules = self.modules(&plan)?;
        Layer::new(plan, modules, self.device.clone(), weights, shared)
    }

    /// The kernels of a plan, loaded.
    pub(crate) fn modules(&self, plan: &LayerPlan) -> Result<Vec<Arc<dyn Module>>, EngineError> {
        self.jit.modules(&emit_layer(plan)?)
    }

    /// Makes a layer that can run backward; see [`Layer::forward_train`].
    ///
    /// # Errors
    /// As [`Engine::layer`].
    pub fn training_layer(
        &self,
        spec: &LayerSpec,
        weights: &Weights<'_>,
        training: Training,
    ) -> Result<Layer, EngineError> {
        self.layer_of(self.training_plan(spec, training)?, weights)
    }

    /// The plan of a layer that can run backward.
    ///
    /// # Errors
    /// As [`Engine::plan`].
    pub fn training_plan(
        &self,
        spec: &LayerSpec,
        training: Training,
    ) -> Result<LayerPlan, EngineError> {
        crate::layer::check_spec(spec)?;
        self.best(plan_training(spec, self.target, training)?)
    }

    /// Compiles or finds every kernel of a layer and loads it, without weights.
    ///
    /// # Errors
    /// As [`Engine::layer`].
    pub fn warm_up(&self, spec: &LayerSpec) -> Result<(), EngineError> {
        let plan = self.plan(spec)?;
        self.jit.modules(&emit_layer(&plan)?)?;
        Ok(())
    }

    /// The kernels of a layer, loaded, to be launched one by one.
    ///
    /// # Errors
    /// As [`Engine::layer`].
    pub fn kernels(&self, spec: &LayerSpec) -> Result<Vec<LoadedKernel>, EngineError> {
        let sources = emit_layer(&self.plan(spec)?)?;
        let modules = self.jit.modules(&sources)?;
        let pairs = sources.into_iter().zip(modules);
        Ok(pairs
            .map(|(source, module)| LoadedKernel { source, module })
            .collect())
    }
}
