//! Ranks with one GPU each, over NCCL or RCCL.

use crate::engine::Engine;
use crate::error::EngineError;
use moesaic_collectives::nccl::{self, Fold, Folding, Kernels, Nccl};
use moesaic_collectives::{Call, CollectiveError, CommElement, Communicator, with_heartbeat};
use moesaic_target::DeviceError;
use std::sync::{Arc, OnceLock};

impl Engine {
    /// Starts this process as one of the ranks that a launcher started. `moesaic::Engine` documents
    /// this and what follows.
    pub fn nccl(&self, options: nccl::NcclOptions) -> Result<Nccl, EngineError> {
        self.folding(options, |options| {
            nccl::start(self.device().clone(), options)
        })
    }

    /// Starts ranks that can already exchange messages.
    pub fn nccl_over(
        &self,
        control: Communicator,
        options: nccl::NcclOptions,
    ) -> Result<Nccl, EngineError> {
        self.folding(options, |options| {
            nccl::over(control, self.device().clone(), options)
        })
    }

    /// Starts ranks and then compiles the kernels that sum their rows. A rank that compiled earlier
    /// would keep the others waiting where they join.
    fn folding(
        &self,
        mut options: nccl::NcclOptions,
        start: impl FnOnce(&nccl::NcclOptions) -> Result<Nccl, CollectiveError>,
    ) -> Result<Nccl, EngineError> {
        let source = Kernels::source(self.target()).filter(|_| options.fold.is_none());
        let Some(source) = source else {
            return Ok(start(&options)?);
        };
        let fold = Arc::new(LateFold::default());
        options.fold = Some(fold.clone());
        let mut ranks = start(&options)?;
        let call = Call::new("kernels of sums");
        with_heartbeat(&mut ranks, &call, || {
            if let Some(module) = self.load(&[&source], None)?.pop() {
                let _ = fold.0.set(Kernels::of(self.device(), module)?);
            }
            Ok::<_, EngineError>(())
        })?;
        Ok(ranks)
    }
}

/// Kernels that are compiled after the ranks have joined and before the first sum.
#[derive(Default)]
struct LateFold(OnceLock<Kernels>);

impl Fold for LateFold {
    fn fold(&self, folding: &Folding) -> Result<(), DeviceError> {
        match self.0.get() {
            Some(kernels) => kernels.fold(folding),
            None => Err(DeviceError::Unsupported {
                backend: "nccl".to_string(),
                asked: "sums of ranks before their kernels are loaded".to_string(),
            }),
        }
    }

    // Until the kernels are here the answer must be the careful one.
    fn waits(&self, element: CommElement) -> bool {
        self.0.get().is_none_or(|kernels| kernels.waits(element))
    }
}
