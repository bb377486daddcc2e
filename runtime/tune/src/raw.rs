//! Steps on device memory that the caller owns. They are timed on the device: only the next step
//! waits for the end of this one, to learn its time.

use crate::layer::Pass;
use crate::{AdaptiveLayer, AdaptiveSaved, Calls};
use moesaic_engine::{EngineError, MeshLayer, RawBackward, RawCall, RngKey};
use std::sync::Arc;

impl AdaptiveLayer {
    /// Runs [`MeshLayer::forward_raw`] with the strategy that the tuner chooses for evaluations.
    ///
    /// # Safety
    /// As [`MeshLayer::forward_raw`].
    ///
    /// # Errors
    /// As [`MeshLayer::forward_raw`].
    pub unsafe fn forward_raw(&mut self, call: &RawCall<'_>) -> Result<(), EngineError> {
        let asked = (Calls::Evaluation, call.tokens, call.capacity_factor);
        // SAFETY: what the caller vouches for is the same.
        let chosen = self.choose(asked, |layer| unsafe {
            layer.tokens_per_expert_raw(call, None)
        })?;
        // SAFETY: as above.
        let ((), pass) = timed(&self.layer, |layer| unsafe { layer.forward_raw(call) })?;
        self.took(chosen, [pass]);
        Ok(())
    }

    /// Runs [`MeshLayer::forward_train_raw`] with the strategy that the tuner chooses.
    ///
    /// # Safety
    /// As [`MeshLayer::forward_train_raw`].
    ///
    /// # Errors
    /// As [`MeshLayer::forward_train_raw`].
    pub unsafe fn forward_train_raw(
        &mut self,
        call: &RawCall<'_>,
        rng_key: RngKey,
    ) -> Result<AdaptiveSaved, EngineError> {
        let asked = (Calls::Training, call.tokens, call.capacity_factor);
        // SAFETY: what the caller vouches for is the same.
        let loads = |layer: &MeshLayer| unsafe { layer.tokens_per_expert_raw(call, Some(rng_key)) };
        let chosen = self.choose(asked, loads)?;
        // SAFETY: as above.
        let train = |layer: &MeshLayer| unsafe { layer.forward_train_raw(call, rng_key) };
        let (saved, forward) = timed(&self.layer, train)?;
        Ok(AdaptiveSaved {
            saved,
            chosen,
            forward,
        })
    }

    /// Runs [`MeshLayer::backward_raw`] for a forward pass of this layer.
    ///
    /// # Safety
    /// As [`MeshLayer::backward_raw`].
    ///
    /// # Errors
    /// As [`MeshLayer::backward_raw`].
    pub unsafe fn backward_raw(
        &mut self,
        saved: &AdaptiveSaved,
        call: &RawBackward<'_>,
    ) -> Result<(), EngineError> {
        // SAFETY: the caller's contract is the same.
        let back = |layer: &MeshLayer| unsafe { layer.backward_raw(&saved.saved, call) };
        let ((), pass) = timed(&self.layer, back)?;
        self.took(saved.chosen.clone(), [saved.forward.clone(), pass]);
        Ok(())
    }
}

/// Runs a pass and returns its time on the device.
fn timed<T>(
    layer: &MeshLayer,
    pass: impl FnOnce(&MeshLayer) -> Result<T, EngineError>,
) -> Result<(T, Pass), EngineError> {
    let start = layer.timestamp()?;
    let result = pass(layer)?;
    let moments = [start, layer.timestamp()?];
    Ok((result, Pass::Between(Arc::new(moments))))
}
