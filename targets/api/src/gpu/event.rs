//! Events: points of a stream.

use super::Vendor;
use super::lane::{Capture, Lane};
use super::mark::Mark;
use crate::{DeviceError, DriverReason, Event};
use std::any::Any;
use std::sync::Arc;

/// The flag of an event with timing.
const WITH_TIME: u32 = 0;

/// A point of a stream, and the capture that the stream was part of.
pub(super) struct GpuEvent<V: Vendor> {
    mark: Mark<V>,
    lane: Arc<Lane<V>>,
    /// The capture in which it was recorded.
    capture: Option<Arc<Capture<V>>>,
}

impl<V: Vendor> GpuEvent<V> {
    /// Records a new event.
    pub fn record(lane: &Arc<Lane<V>>) -> Result<GpuEvent<V>, DeviceError> {
        // Look up the capture before recording, because it may end in between.
        let capture = lane.capturing();
        Ok(GpuEvent {
            mark: Mark::recorded(&lane.gpu, lane.stream, WITH_TIME)?,
            lane: lane.clone(),
            capture,
        })
    }

    /// Returns this driver's event, or an error that names the operation.
    pub fn of<'a>(event: &'a dyn Event, asked: &str) -> Result<&'a GpuEvent<V>, DeviceError> {
        let event: &dyn Any = event;
        event
            .downcast_ref()
            .ok_or_else(|| DeviceError::Unsupported {
                backend: V::BACKEND.to_string(),
                asked: format!("{asked} an event of another kind of device"),
            })
    }

    /// Makes later work on `lane` wait for this event.
    pub fn hold(&self, lane: &Arc<Lane<V>>) -> Result<(), DeviceError> {
        let joins = self.joins(lane)?;
        // SAFETY: event and stream are live; 0 is the only defined flag.
        lane.gpu.call("wait for an event", |f| unsafe {
            (f.stream_wait)(lane.stream, self.mark.handle, 0)
        })?;
        if let Some(capture) = joins {
            lane.join(capture);
            capture.keep_lane(lane);
        }
        Ok(())
    }

    /// Returns the capture that `lane` joins when it waits for this event.
    fn joins(&self, lane: &Lane<V>) -> Result<Option<&Arc<Capture<V>>>, DeviceError> {
        match (&self.capture, lane.capturing()) {
            (None, None) => Ok(None),
            (None, Some(_)) => {
                let attempted = "a wait for an event from outside of it";
                lane.forbid(|| attempted.to_string()).map(|()| None)
            }
            (Some(own), _) if !own.is_open() => Err(self.captured("wait for an event", own)),
            (Some(own), None) => Ok(Some(own)),
            (Some(own), Some(other)) if Arc::ptr_eq(own, &other) => Ok(None),
            (Some(own), Some(_)) => {
                let attempted = format!("a wait for an event of graph `{}`", own.name);
                lane.forbid(|| attempted).map(|()| None)
            }
        }
    }

    fn check_real(&self, operation: &str) -> Result<(), DeviceError> {
        match &self.capture {
            None => Ok(()),
            Some(capture) => Err(self.captured(operation, capture)),
        }
    }

    fn captured(&self, operation: &str, capture: &Capture<V>) -> DeviceError {
        DeviceError::Driver {
            operation: operation.to_string(),
            reason: DriverReason::CapturedEvent {
                graph: capture.name.clone(),
            },
        }
    }
}

impl<V: Vendor> Event for GpuEvent<V> {
    fn synchronize(&self) -> Result<(), DeviceError> {
        self.check_real("wait on the host for an event")?;
        self.lane
            .forbid(|| "a wait on the host for an event".to_string())?;
        self.mark.wait("wait on the host for an event")
    }

    fn passed(&self) -> Result<bool, DeviceError> {
        self.check_real("query of an event")?;
        self.mark.passed()
    }

    fn elapsed_ms(&self, start: &dyn Event) -> Result<f32, DeviceError> {
        let start = GpuEvent::<V>::of(start, "the time from")?;
        start.synchronize()?;
        self.synchronize()?;
        let mut milliseconds = 0.0;
        // SAFETY: the pointer is valid for a write, and both events are live.
        self.lane.gpu.call("time between events", |f| unsafe {
            (f.event_elapsed)(&mut milliseconds, start.mark.handle, self.mark.handle)
        })?;
        Ok(milliseconds)
    }
}
