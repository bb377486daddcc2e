//! From a request to a kernel, by a lookup in the store or one compile.

use crate::lock::MachineLock;
use crate::{FetchError, KernelKey, Store, StoreError, StoredKernel};
use moesaic_kernel::KernelSource;
use moesaic_target::{Artifact, CompileError};
use std::sync::{Arc, PoisonError};

/// A request for a kernel.
#[derive(Clone, Copy, Debug)]
pub struct KernelRequest<'a> {
    /// Its key.
    pub key: KernelKey,
    /// Its source.
    pub source: &'a KernelSource,
    /// Your name for its spec, for messages.
    pub spec: Option<&'a str>,
    /// The name of its layer, for listings.
    pub layer: Option<&'a str>,
}

/// A kernel and its origin.
#[derive(Debug)]
pub struct Fetched {
    /// The kernel.
    pub stored: Arc<StoredKernel>,
    /// The origin of the kernel.
    pub origin: KernelOrigin,
    /// The reason a compiled kernel was not kept, if it was not. Statistics and `tracing` have
    /// recorded it already.
    pub trouble: Option<StoreError>,
}

/// The origin of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KernelOrigin {
    /// The store already held it.
    Store,
    /// It was compiled for this request.
    Compiled,
    /// Another thread was already compiling it.
    Shared,
}

impl Store {
    /// Returns the kernel from the store, else from `compile`. `compile` runs once however many
    /// threads ask, and as a rule once however many processes of this machine do.
    ///
    /// # Errors
    /// [`FetchError::Compile`] if it does not compile, for every thread that waited.
    /// [`FetchError::Missing`] for a miss in strict mode. A failure of the store itself is never an
    /// error.
    #[doc(hidden)]
    pub fn get_or_compile(
        &self,
        request: &KernelRequest<'_>,
        compile: impl FnOnce() -> Result<Artifact, CompileError>,
    ) -> Result<Fetched, FetchError> {
        if let Some(stored) = self.get(&request.key) {
            return Ok(Fetched::new(Arc::new(stored), KernelOrigin::Store));
        }
        if self.strict {
            return Err(self.missing(request));
        }
        // All threads that miss the same kernel share one flight, so only the first compiles.
        let flight = self.flights.join(request.key);
        // Poison only means that the compile panicked. The slot is empty, so the next thread
        // compiles.
        let mut outcome = flight.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(outcome) = &*outcome {
            let stored = outcome.clone().map_err(FetchError::Compile)?;
            return Ok(Fetched::new(stored, KernelOrigin::Shared));
        }
        let fetched = self.lead(request, compile);
        *outcome = Some(match &fetched {
            Ok(fetched) => Ok(Arc::clone(&fetched.stored)),
            Err(error) => Err(Arc::clone(error)),
        });
        // Later misses must start anew: a kernel may have been pruned, and an error may have been
        // fixed.
        self.flights.leave(&request.key);
        fetched.map_err(FetchError::Compile)
    }

    /// Compiles under the machine's lock, unless another process has just finished the same kernel.
    fn lead(
        &self,
        request: &KernelRequest<'_>,
        compile: impl FnOnce() -> Result<Artifact, CompileError>,
    ) -> Result<Fetched, Arc<CompileError>> {
        let key = &request.key;
        // Processes without a usable store cannot hand each other kernels, so waiting would be
        // useless.
        let _lock = match self.trouble() {
            None => MachineLock::acquire(&self.layout, key, self.patience),
            Some(_) => None,
        };
        // Another process may have compiled it while this one waited for the lock.
        if let Some(stored) = self.look(key) {
            self.counters.hits.add(1);
            return Ok(Fetched::new(Arc::new(stored), KernelOrigin::Store));
        }
        self.counters.compiles.add(1);
        let artifact = compile().map_err(Arc::new)?;
        let stored = StoredKernel::new(request.source, artifact).of_layer(request.layer);
        let trouble = self.put(key, request.source, &stored).err();
        if let Some(error) = &trouble {
            self.pass_over(error);
        }
        Ok(Fetched {
            trouble,
            ..Fetched::new(Arc::new(stored), KernelOrigin::Compiled)
        })
    }

    fn missing(&self, request: &KernelRequest<'_>) -> FetchError {
        FetchError::Missing {
            kernel: request.source.name.clone(),
            target: request.source.target.to_string(),
            spec: request.spec.unwrap_or("SPEC.toml").to_string(),
            cache: self.dir().display().to_string(),
        }
    }
}

impl Fetched {
    fn new(stored: Arc<StoredKernel>, origin: KernelOrigin) -> Fetched {
        Fetched {
            stored,
            origin,
            trouble: None,
        }
    }
}
