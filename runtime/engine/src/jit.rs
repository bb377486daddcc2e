//! From kernel source to loaded module: memory, then store, then compiler.

use crate::error::EngineError;
use crate::parallel::parallel;
use moesaic_cache::{
    FetchError, KernelKey, KernelOrigin, KernelRequest, KeyParts, Store, hash_source,
};
use moesaic_kernel::{CpuCaches, KernelSource, Target};
use moesaic_target::{Artifact, CompileOptions, Compiler, Device, DeviceError, Module};
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

/// The parts of an engine.
#[derive(Debug)]
pub struct EngineParts {
    /// The device on which layers run.
    pub device: Arc<dyn Device>,
    /// The compiler; `None` runs from the store alone.
    pub compiler: Option<Arc<dyn Compiler>>,
    /// The store of compiled kernels; `None` compiles in every process.
    pub store: Option<Arc<Store>>,
    /// Whether a kernel that is not in the store is an error instead of a compile.
    pub strict: bool,
    /// Whether layers use the store's tunings for this machine.
    pub tuned: bool,
    /// The caches that plans for a CPU follow; `None` is the device's.
    pub caches: Option<CpuCaches>,
    /// The options of the compiler.
    pub options: CompileOptions,
}

/// The sources of an engine's kernels so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineStats {
    /// Kernels compiled.
    pub compiled: u64,
    /// Kernels read from the store.
    pub from_store: u64,
    /// Kernels that were already loaded.
    pub in_memory: u64,
}

/// The slot of one module. The holder of its lock makes the module.
type Slot = Arc<Mutex<Option<Arc<dyn Module>>>>;

/// The kernels of an engine.
pub(crate) struct Jit {
    target: Target,
    device: Arc<dyn Device>,
    builder: Builder,
    /// Whether nothing is compiled, because of the engine, its store, or the lack of a compiler.
    strict: bool,
    slots: Mutex<HashMap<KernelKey, Slot>>,
    in_memory: AtomicU64,
    from_store: AtomicU64,
    compiled: AtomicU64,
}

impl Jit {
    pub fn new(parts: EngineParts, target: Target) -> Jit {
        let EngineParts {
            device,
            compiler,
            store,
            strict,
            options,
            ..
        } = parts;
        let of_store = store.as_ref().is_some_and(|store| store.is_strict());
        Jit {
            strict: strict || of_store || compiler.is_none(),
            target,
            device,
            builder: Builder::new(compiler, store, options),
            slots: Mutex::default(),
            in_memory: AtomicU64::new(0),
            from_store: AtomicU64::new(0),
            compiled: AtomicU64::new(0),
        }
    }

    pub fn stats(&self) -> EngineStats {
        EngineStats {
            compiled: self.compiled.load(Ordering::Relaxed),
            from_store: self.from_store.load(Ordering::Relaxed),
            in_memory: self.in_memory.load(Ordering::Relaxed),
        }
    }

    /// Returns a loaded module per source, in the order of the sources. What is neither loaded nor
    /// stored is compiled, on all cores, and stored under the layer's name.
    pub fn modules(
        &self,
        sources: &[&KernelSource],
        layer: Option<&str>,
    ) -> Result<Vec<Arc<dyn Module>>, EngineError> {
        let fingerprint = self.builder.fingerprint(self.target);
        let jobs: Vec<(&KernelSource, KernelKey)> = sources
            .iter()
            .map(|source| (*source, self.builder.key(source, &fingerprint)))
            .collect();
        let mut modules: Vec<Option<Arc<dyn Module>>> = Vec::with_capacity(jobs.len());
        for (source, key) in &jobs {
            // A warm start ends here. Threads are only worth their start for compiles, which take
            // seconds.
            modules.push(self.at_hand(source, key)?);
        }
        let missing: Vec<usize> = (0..jobs.len()).filter(|&i| modules[i].is_none()).collect();
        let made = parallel(&missing, |&i| self.make(jobs[i].0, &jobs[i].1, layer));
        for (&i, module) in missing.iter().zip(made) {
            modules[i] = Some(module?);
        }
        Ok(modules.into_iter().flatten().collect())
    }

    pub fn store(&self) -> Option<&Store> {
        self.builder.store.as_deref()
    }

    /// Returns whether the engine can get these modules: always, unless it may not compile and one
    /// is neither loaded nor stored.
    pub fn may_load<'s>(&self, mut sources: impl Iterator<Item = &'s Arc<KernelSource>>) -> bool {
        if !self.strict {
            return true;
        }
        let fingerprint = self.builder.fingerprint(self.target);
        let has = |source: &Arc<KernelSource>| {
            let key = self.builder.key(source, &fingerprint);
            lock(&self.slot(&key)).is_some() || self.builder.stored(source, &key).is_some()
        };
        sources.all(has)
    }

    fn slot(&self, key: &KernelKey) -> Slot {
        lock(&self.slots).entry(*key).or_default().clone()
    }

    /// Returns the module, if that needs no compile.
    fn at_hand(
        &self,
        source: &KernelSource,
        key: &KernelKey,
    ) -> Result<Option<Arc<dyn Module>>, EngineError> {
        let slot = self.slot(key);
        let mut slot = lock(&slot);
        if slot.is_some() {
            self.in_memory.fetch_add(1, Ordering::Relaxed);
        } else if let Some(artifact) = self.builder.stored(source, key) {
            *slot = Some(self.device.load(&artifact, &source.entries)?);
            self.from_store.fetch_add(1, Ordering::Relaxed);
        }
        Ok(slot.clone())
    }

    /// Returns the module, and compiles it unless another thread has done so meanwhile.
    fn make(
        &self,
        source: &KernelSource,
        key: &KernelKey,
        layer: Option<&str>,
    ) -> Result<Arc<dyn Module>, EngineError> {
        let slot = self.slot(key);
        let mut slot = lock(&slot);
        // The slot stays locked through the compile: a second thread with the same kernel waits for
        // it here instead of compiling it again.
        if let Some(module) = &*slot {
            self.in_memory.fetch_add(1, Ordering::Relaxed);
            return Ok(module.clone());
        }
        // A graph under capture allows no load (`Device::capturing`). Asked before the compile, which
        // would take seconds for nothing.
        if let Some(graph) = self.device.capturing() {
            let attempted = format!("the compile of kernel `{}`", source.name);
            return Err(DeviceError::Capturing { graph, attempted }.into());
        }
        if self.strict {
            return Err(not_cached(source));
        }
        let Built { artifact, compiled } = self.builder.build(source, key, layer)?;
        let counter = if compiled {
            &self.compiled
        } else {
            &self.from_store
        };
        counter.fetch_add(1, Ordering::Relaxed);
        let module = self.device.load(&artifact, &source.entries)?;
        *slot = Some(module.clone());
        Ok(module)
    }
}

/// Locks a mutex also after a panic, which cannot leave a map or a slot half written.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// An artifact, and whether it had to be compiled.
pub(crate) struct Built {
    pub artifact: Artifact,
    pub compiled: bool,
}

/// From kernel source to artifact: store, then compiler.
pub(crate) struct Builder {
    pub compiler: Option<Arc<dyn Compiler>>,
    pub store: Option<Arc<Store>>,
    pub options: CompileOptions,
    /// Without a compiler there is no fingerprint and so no key: any build of
    /// the same text for the same target will do. Filled when first needed.
    pub by_source: OnceLock<HashMap<(Target, String), KernelKey>>,
}

impl Builder {
    pub fn new(
        compiler: Option<Arc<dyn Compiler>>,
        store: Option<Arc<Store>>,
        options: CompileOptions,
    ) -> Builder {
        Builder {
            compiler,
            store,
            options,
            by_source: OnceLock::new(),
        }
    }

    /// Returns the compiler's fingerprint for a target; empty without a compiler.
    pub fn fingerprint(&self, target: Target) -> String {
        self.compiler
            .as_ref()
            .map_or_else(String::new, |c| c.fingerprint(target))
    }

    /// Returns the key of a source under a compiler fingerprint.
    pub fn key(&self, source: &KernelSource, fingerprint: &str) -> KernelKey {
        KernelKey::new(&KeyParts {
            target: source.target,
            config: &source.config,
            source: &source.text,
            // Another compiler or another option may make another binary from the same text, so
            // both are part of the key.
            flags: &format!("{:?}", self.options),
            compiler: fingerprint,
        })
    }

    /// Returns the artifact, if the store has it.
    pub fn stored(&self, source: &KernelSource, key: &KernelKey) -> Option<Artifact> {
        let store = self.store.as_ref()?;
        match &self.compiler {
            Some(_) => Some(store.get(key)?.artifact),
            None => Some(store.get(self.same_source(store, source)?)?.artifact),
        }
    }

    fn same_source(&self, store: &Store, source: &KernelSource) -> Option<&KernelKey> {
        // The list reads an entry of every kernel in the store, so it is made once. A process
        // without a compiler stores nothing itself; kernels that others store later are not seen.
        let index = self.by_source.get_or_init(|| {
            let kernels = store.list().into_iter();
            kernels
                .map(|k| ((k.info.target, k.info.source_hash), k.key))
                .collect()
        });
        index.get(&(source.target, hash_source(&source.text)))
    }

    /// Returns the artifact, from the store or the compiler.
    pub fn build(
        &self,
        source: &KernelSource,
        key: &KernelKey,
        layer: Option<&str>,
    ) -> Result<Built, EngineError> {
        let Some(compiler) = &self.compiler else {
            let stored = self.stored(source, key).map(|artifact| Built {
                artifact,
                compiled: false,
            });
            return stored.ok_or_else(|| not_cached(source));
        };
        let compile = || compiler.compile(source, &self.options);
        let Some(store) = &self.store else {
            return Ok(Built {
                artifact: compile().map_err(Arc::new)?,
                compiled: true,
            });
        };
        let request = KernelRequest {
            key: *key,
            source,
            spec: None,
            layer,
        };
        match store.get_or_compile(&request, compile) {
            Ok(fetched) => Ok(Built {
                artifact: fetched.stored.artifact.clone(),
                compiled: fetched.origin == KernelOrigin::Compiled,
            }),
            Err(FetchError::Compile(error)) => Err(error.into()),
            Err(_) => Err(not_cached(source)),
        }
    }
}

fn not_cached(source: &KernelSource) -> EngineError {
    EngineError::NotCached {
        kernel: source.name.clone(),
        target: source.target.to_string(),
        options: String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use moesaic_kernel::{Entry, Language, Stem};
    use moesaic_target::{Buffer, CompileError, DeviceInfo};

    /// A device that captures a graph, and a compiler that must not be asked.
    struct Capturing(DeviceInfo);

    impl Device for Capturing {
        fn info(&self) -> &DeviceInfo {
            &self.0
        }

        fn capturing(&self) -> Option<String> {
            Some("decode".to_string())
        }

        fn load(&self, _: &Artifact, _: &[Entry]) -> Result<Arc<dyn Module>, DeviceError> {
            unreachable!()
        }

        fn alloc(&self, _: usize) -> Result<Buffer, DeviceError> {
            unreachable!()
        }

        fn upload(&self, _: &[u8], _: &Buffer, _: usize) -> Result<(), DeviceError> {
            unreachable!()
        }

        fn download(&self, _: &Buffer, _: usize, _: &mut [u8]) -> Result<(), DeviceError> {
            unreachable!()
        }

        fn synchronize(&self) -> Result<(), DeviceError> {
            unreachable!()
        }
    }

    impl Compiler for Capturing {
        fn backend(&self) -> &'static str {
            "cuda"
        }

        fn name(&self) -> String {
            "none".to_string()
        }

        fn fingerprint(&self, _: Target) -> String {
            String::new()
        }

        fn targets(&self) -> Vec<Target> {
            vec![self.0.target]
        }

        fn compile(&self, _: &KernelSource, _: &CompileOptions) -> Result<Artifact, CompileError> {
            unreachable!("a compile while capturing")
        }
    }

    fn target() -> Target {
        "cuda:sm_80".parse().unwrap()
    }

    /// Returns the parts of an engine that captures; with `compiler` it has one that must not be
    /// asked.
    fn parts(compiler: bool) -> EngineParts {
        let info = DeviceInfo {
            name: String::new(),
            target: target(),
            units: 1,
            memory_bytes: None,
        };
        let unasked = || Arc::new(Capturing(info.clone())) as Arc<dyn Compiler>;
        EngineParts {
            device: Arc::new(Capturing(info.clone())),
            compiler: compiler.then(unasked),
            store: None,
            strict: false,
            tuned: false,
            caches: None,
            options: CompileOptions::default(),
        }
    }

    fn source() -> KernelSource {
        KernelSource {
            stem: Stem::Combine,
            name: "combine".to_string(),
            target: target(),
            language: Language::Cuda,
            text: String::new(),
            config: String::new(),
            entries: Vec::new(),
        }
    }

    /// Checks that a tuning without kernels is no error, whatever keeps them from being compiled.
    #[test]
    fn strict_engines_say_what_they_may_load() {
        let strict = Arc::new(Store::open("/no/such/cache").strict());
        let of_store = EngineParts {
            store: Some(strict),
            ..parts(true)
        };
        let of_engine = EngineParts {
            strict: true,
            ..parts(true)
        };
        let source = Arc::new(source());
        for parts in [of_store, of_engine, parts(false)] {
            let jit = Jit::new(parts, target());
            assert!(!jit.may_load([&source].into_iter()));
        }
        assert!(Jit::new(parts(true), target()).may_load([&source].into_iter()));
    }

    /// A rank that waits in vain for a lock, and then compiles, is not late for the others.
    #[test]
    fn another_processs_lock_is_waited_for_less_than_a_deadline() {
        assert!(moesaic_cache::PATIENCE * 2 < moesaic_collectives::DEADLINE);
    }

    #[test]
    fn nothing_is_compiled_while_a_graph_is_captured() {
        let jit = Jit::new(parts(true), target());
        let error = jit.modules(&[&source()], None).err().unwrap();
        assert_eq!(
            error.to_string(),
            "the compile of kernel `combine` is not possible while graph `decode` is being \
             captured: do it before the capture, or after its end"
        );
    }
}
