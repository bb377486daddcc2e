//! The strategies that a mesh allows.

use crate::strategy_error::StrategyError;
use crate::{AdaptiveMesh, Both, CommDtype, MAX_CHUNKS, Parallel, Strategy};

impl Strategy {
    /// Checks that a mesh allows the strategy.
    ///
    /// # Errors
    /// [`StrategyError`] says what is possible.
    pub fn check(&self, mesh: &Parallel) -> Result<(), StrategyError> {
        AdaptiveMesh::new(*mesh, self.adaptive_r(mesh))?.shadowing(self.shadows)?;
        let comm_dtype = self.comm_dtype;
        if self.all_to_all.row().deduplicates_ranks()
            && comm_dtype != Both::same(CommDtype::Unchanged)
        {
            return Err(StrategyError::UncastSums { comm_dtype });
        }
        let degrees = [self.overlap_degree.forward, self.overlap_degree.backward];
        let wrong = degrees.iter().find(|n| !(1..=MAX_CHUNKS).contains(*n));
        if let Some(&overlap_degree) = wrong {
            return Err(StrategyError::Degree { overlap_degree });
        }
        let Both { forward, backward } = self.overlap_degree;
        let chunks = self.chunks().common();
        if chunks > MAX_CHUNKS {
            return Err(StrategyError::Degrees {
                forward,
                backward,
                chunks,
            });
        }
        Ok(())
    }
}
