//! Ranks with a GPU each.

use crate::engine::Engine;
use crate::error::EngineError;
use moesaic_collectives::Communicator;
use moesaic_collectives::nccl::{self, Fold, Kernels, Nccl};
use std::sync::Arc;

impl Engine {
    /// The ranks that a launcher has started, this process one of them, with a GPU each,
    /// over NCCL or RCCL. Waits until all have come. Sums of ranks are made by a kernel of
    /// the device, if the options name nothing else.
    ///
    /// # Errors
    /// [`EngineError::Collective`] as [`nccl::start`]; those of a kernel that cannot be had.
    pub fn nccl(&self, options: nccl::Options) -> Result<Nccl, EngineError> {
        let options = self.folding(options)?;
        Ok(nccl::start(self.device().clone(), &options)?)
    }

    /// The same out of ranks that can already talk to each other: by MPI, or because they
    /// are threads of one process.
    ///
    /// # Errors
    /// [`EngineError::Collective`] as [`nccl::over`]; those of a kernel that cannot be had.
    pub fn nccl_over(
        &self,
        control: Communicator,
        options: nccl::Options,
    ) -> Result<Nccl, EngineError> {
        let options = self.folding(options)?;
        Ok(nccl::over(control, self.device().clone(), &options)?)
    }

    fn folding(&self, options: nccl::Options) -> Result<nccl::Options, EngineError> {
        let fold = match options.fold {
            Some(fold) => Some(fold),
            None => self.fold()?,
        };
        Ok(nccl::Options { fold, ..options })
    }

    /// The kernels that fold rows of ranks; `None` where a device has none.
    fn fold(&self) -> Result<Option<Arc<dyn Fold>>, EngineError> {
        let Some(source) = Kernels::source(self.target()) else {
            return Ok(None);
        };
        let Some(module) = self.load(&[&source])?.pop() else {
            return Ok(None);
        };
        Ok(Some(Arc::new(Kernels::of(self.device(), module)?)))
    }
}
