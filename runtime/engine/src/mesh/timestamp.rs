//! Points in time of a rank's device.

use crate::error::EngineError;
use moesaic_target::{Device, Event};
use std::fmt;
use std::sync::Arc;
use std::time::Instant;

/// A point between two launches of a rank's device. A call on device memory does not wait for its
/// launches, so only the time from one such point to the next says how long the call takes.
pub struct Timestamp(When);

impl fmt::Debug for Timestamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // No time: that of an event is known only once the device has come to it.
        f.debug_struct("Timestamp")
            .field("on_device", &matches!(self.0, When::Device(_)))
            .finish_non_exhaustive()
    }
}

enum When {
    /// An event in the stream of the device.
    Device(Arc<dyn Event>),
    /// A host time; the device had finished its launches by then.
    Host(Instant),
}

impl Timestamp {
    /// Records the point at which the device has finished the launches so far. If the device has no
    /// streams, the host waits for it.
    pub(crate) fn now(device: &dyn Device) -> Result<Timestamp, EngineError> {
        Ok(Timestamp(match device.streams() {
            Ok(streams) => When::Device(streams.record()?),
            Err(_) => {
                device.synchronize()?;
                When::Host(Instant::now())
            }
        }))
    }

    /// Returns the seconds from an earlier timestamp of the same layer to this one; waits for both.
    ///
    /// # Errors
    /// [`EngineError::Device`], also when a launch before one of them has failed.
    pub fn seconds_since(&self, earlier: &Timestamp) -> Result<f64, EngineError> {
        Ok(match (&self.0, &earlier.0) {
            (When::Device(end), When::Device(start)) => f64::from(end.elapsed_ms(&**start)?) / 1e3,
            (When::Host(end), When::Host(start)) => {
                end.saturating_duration_since(*start).as_secs_f64()
            }
            // Timestamps of two different devices cannot be compared.
            _ => 0.0,
        })
    }
}
