//! When a rank's device has come to a point of its work.

use super::layer::MeshLayer;
use crate::error::EngineError;
use moesaic_target::Event;
use std::sync::Arc;
use std::time::Instant;

/// A point group the launches of a rank's device: what a call on device memory takes is from
/// one to the other, since the call itself does not wait.
pub struct Moment(When);

enum When {
    /// Of a device with streams.
    Device(Arc<dyn Event>),
    /// Of any other, which had finished then.
    Host(Instant),
}

impl MeshLayer {
    /// This moment of the layer's device: when it has finished what was launched so far. Waits
    /// for that where a device has no streams.
    ///
    /// # Errors
    /// [`EngineError::Device`].
    pub fn moment(&self) -> Result<Moment, EngineError> {
        let device = &*self.tokens.device;
        Ok(Moment(match device.streams() {
            Ok(streams) => When::Device(streams.record()?),
            Err(_) => {
                device.synchronize()?;
                When::Host(Instant::now())
            }
        }))
    }
}

impl Moment {
    /// Seconds from an earlier moment of the same layer to this one; waits for both.
    ///
    /// # Errors
    /// [`EngineError::Device`], also when a launch before one of them has failed.
    pub fn seconds_since(&self, earlier: &Moment) -> Result<f64, EngineError> {
        Ok(match (&self.0, &earlier.0) {
            (When::Device(end), When::Device(start)) => f64::from(end.elapsed_ms(&**start)?) / 1e3,
            (When::Host(end), When::Host(start)) => {
                end.saturating_duration_since(*start).as_secs_f64()
            }
            // Of two devices: nothing is known of it.
            _ => 0.0,
        })
    }
}
