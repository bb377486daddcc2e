//! The engine: a device with a compiler and a store, which makes layers.

use crate::device_layer::{DeviceLayer, check_size, check_spec};
use crate::error::EngineError;
use crate::jit::{EngineParts, EngineStats, Jit};
use crate::launch::Modules;
use crate::memory::passing_tensors;
use crate::texts::Texts;
use crate::tuned::Untuned;
use moesaic_cache::TunedMachine;
use moesaic_emit::emit_layer;
use moesaic_kernel::{CpuCaches, KernelSource, Target};
use moesaic_plan::{CacheClass, PlanOptions, Recompute, Tilings, Training, plan};
use moesaic_spec::LayerSpec;
use moesaic_target::{Buffer, Device, DeviceInfo, Module};
use moesaic_tensor::WeightSource;
use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

/// A device with a compiler and a store. Cheap to clone; clones share
/// everything. Layers of one engine share kernels that are equal.
#[derive(Clone)]
pub struct Engine {
    device: Arc<dyn Device>,
    target: Target,
    tuned: bool,
    caches: CacheClass,
    jit: Arc<Jit>,
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine")
            .field("device", &self.device_info())
            .field("target", &self.target)
            .field("stats", &self.stats())
            .finish_non_exhaustive()
    }
}

/// One kernel of a layer on the engine's device.
#[derive(Clone)]
pub struct LoadedKernel {
    /// Its text, entries and launch geometry.
    #[doc(hidden)]
    pub source: KernelSource,
    /// The module that launches its entries.
    #[doc(hidden)]
    pub module: Arc<dyn Module>,
}

impl fmt::Debug for LoadedKernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LoadedKernel")
            .field("name", &self.source.name)
            .field("target", &self.source.target)
            .finish_non_exhaustive()
    }
}

impl Engine {
    /// Makes an engine for the device's own target.
    pub fn new(parts: EngineParts) -> Engine {
        let target = parts.device.info().target;
        Engine::for_target(parts, target)
    }

    /// Makes an engine that generates for `target`, which the device must be able to run: an
    /// AVX-512 machine runs `cpu:avx2` too.
    pub fn for_target(parts: EngineParts, target: Target) -> Engine {
        let device = parts.device.clone();
        let caches = match target.hardware() {
            // Only a CPU's tilings follow caches. A GPU's plans get the default whatever the host
            // is, so that every host makes the same kernels and finds them in one store.
            Target::Cpu(_) => parts.caches.unwrap_or_else(|| device.caches()),
            _ => CpuCaches::default(),
        };
        Engine {
            device,
            target,
            tuned: parts.tuned,
            caches: CacheClass::of(caches),
            jit: Arc::new(Jit::new(parts, target)),
        }
    }

    /// Returns the target of the kernels.
    pub fn target(&self) -> Target {
        self.target
    }

    /// Returns the description of the device.
    pub fn device_info(&self) -> &DeviceInfo {
        self.device.info()
    }

    /// Returns the device, for memory that raw calls use.
    pub fn device(&self) -> &Arc<dyn Device> {
        &self.device
    }

    /// Returns the cache sizes that plans for a CPU use.
    pub fn caches(&self) -> CacheClass {
        self.caches
    }

    /// Returns the sources of the kernels so far.
    pub fn stats(&self) -> EngineStats {
        self.jit.stats()
    }

    /// Returns the machine, as tunings name it.
    pub fn machine(&self) -> TunedMachine {
        let info = self.device.info();
        TunedMachine {
            name: info.name.clone(),
            threads: info.units,
        }
    }

    /// Returns the plans of a layer on this engine's target: without a tuning, and with the store's
    /// tunings for this machine.
    ///
    /// # Errors
    /// [`EngineError::Spec`] and [`EngineError::Plan`].
    pub fn tilings(
        &self,
        spec: &LayerSpec,
        training: Option<Training>,
    ) -> Result<Tilings, EngineError> {
        check_spec(spec)?;
        let plan = plan(spec, self.target, &self.plan_options(training))?;
        let store = self.jit.store().filter(|_| self.tuned);
        // Asked first, because `Untuned` formats and hashes every kernel of the layer: an engine
        // whose store has no tunings should not pay for that.
        let Some(store) = store.filter(|store| store.has_tunings(self.target)) else {
            return Ok(plan.into());
        };
        let untuned = Untuned::new(plan);
        match untuned.on(store, &self.machine()) {
            Some(tuned) => Ok(tuned.tilings),
            None => Ok(untuned.plan.into()),
        }
    }

    /// Returns [`Engine::tilings`] with the texts of their kernels. A strict engine takes no
    /// tunings whose kernels it would have to compile.
    pub(crate) fn texts(
        &self,
        spec: &LayerSpec,
        training: Option<Training>,
    ) -> Result<Texts, EngineError> {
        let texts = Texts::of(self.tilings(spec, training)?)?;
        if texts.tilings.plans().len() == 1 || self.may_load(&texts) {
            Ok(texts)
        } else {
            Ok(texts.untuned())
        }
    }

    /// Returns whether the engine can get the kernels of these plans.
    pub(crate) fn may_load(&self, texts: &Texts) -> bool {
        self.jit.may_load(texts.each.iter().flatten())
    }

    /// Returns the plan options without a tuning.
    pub(crate) fn plan_options(&self, training: Option<Training>) -> PlanOptions {
        PlanOptions {
            training,
            caches: self.caches,
            ..PlanOptions::default()
        }
    }

    /// Checks that a layer could take that many tokens in one call now, weights aside.
    ///
    /// # Errors
    /// [`EngineError::Input`] when a call never can, [`EngineError::NoRoom`]
    /// when memory is short, and those of [`Engine::tilings`].
    pub fn check_tokens(&self, spec: &LayerSpec, tokens: usize) -> Result<(), EngineError> {
        let tilings = self.tilings(spec, None)?;
        let tensors = passing_tensors(tilings.first());
        check_size(&tilings, tensors.iter(), &*self.device, 0, tokens)
    }

    /// Makes the layer of these plans.
    pub(crate) fn device_layer(
        &self,
        texts: &Texts,
        weights: &dyn WeightSource,
    ) -> Result<DeviceLayer, EngineError> {
        self.device_layer_sharing(texts, weights, HashMap::new())
    }

    /// Makes the layer of these plans; weights in `shared` are used in place.
    pub(crate) fn device_layer_sharing(
        &self,
        texts: &Texts,
        weights: &dyn WeightSource,
        shared: HashMap<String, Arc<Buffer>>,
    ) -> Result<DeviceLayer, EngineError> {
        let (tilings, modules) = (texts.tilings.clone(), self.modules(texts)?);
        DeviceLayer::new(tilings, modules, self.device.clone(), weights, shared)
    }

    /// Makes the layer of these plans without weights; each call brings them from a workspace.
    pub(crate) fn borrowing_layer(&self, texts: &Texts) -> Result<DeviceLayer, EngineError> {
        let (tilings, modules) = (texts.tilings.clone(), self.modules(texts)?);
        DeviceLayer::borrowing(tilings, modules, self.device.clone())
    }

    /// Loads the kernels of each plan.
    pub(crate) fn modules(&self, texts: &Texts) -> Result<Vec<Modules>, EngineError> {
        let sources: Vec<&KernelSource> = texts.each.iter().flatten().map(|s| &**s).collect();
        let training = texts.tilings.first().training.map_or("", option_of);
        // One load for all tilings: kernels that they share are compiled once, the others at the
        // same time.
        let modules = self.load(&sources, Some(&texts.tilings.first().spec.name));
        let modules = modules.map_err(|error| error.needing(training))?;
        let mut modules = modules.into_iter();
        let each = texts.each.iter();
        let own = each.map(|sources| modules.by_ref().take(sources.len()).collect());
        Ok(own.collect())
    }

    /// Loads a module per source. The error of a CPU kernel names the caches that it was made for,
    /// if these are not the default.
    pub(crate) fn load(
        &self,
        sources: &[&KernelSource],
        layer: Option<&str>,
    ) -> Result<Modules, EngineError> {
        let assumed = self.caches == CacheClass::default();
        let [l1, l2] = [self.caches.l1_bytes(), self.caches.l2_bytes()].map(|bytes| bytes >> 10);
        let modules = self.jit.modules(sources, layer);
        modules.map_err(|error| {
            if assumed {
                error
            } else {
                error.needing(&format!(" --l1 {l1}KiB --l2 {l2}KiB"))
            }
        })
    }

    /// Compiles or finds every kernel of a layer and loads it, without weights.
    ///
    /// # Errors
    /// As [`Engine::layer`].
    pub fn warm_up(&self, spec: &LayerSpec) -> Result<(), EngineError> {
        self.modules(&self.texts(spec, None)?)?;
        Ok(())
    }

    /// Loads the kernels of a layer without a tuning, to be launched one by one.
    ///
    /// # Errors
    /// As [`Engine::layer`].
    pub fn kernels(&self, spec: &LayerSpec) -> Result<Vec<LoadedKernel>, EngineError> {
        let sources = emit_layer(self.tilings(spec, None)?.first())?;
        let modules = self.load(&sources.iter().collect::<Vec<_>>(), Some(&spec.name))?;
        let pairs = sources.into_iter().zip(modules);
        Ok(pairs
            .map(|(source, module)| LoadedKernel { source, module })
            .collect())
    }
}

/// Returns the option with which `precompile` compiles kernels of training.
fn option_of(training: Training) -> &'static str {
    match training.recompute {
        Recompute::None => " --training",
        Recompute::Hidden => " --training hidden",
        Recompute::All => " --training all",
    }
}
