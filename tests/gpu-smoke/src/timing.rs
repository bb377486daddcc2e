//! A layer with memory of its own, and how long its calls take.

use crate::Result;
use crate::data::{Call, floats};
use crate::pass::Pass;
use moesaic::target::{Buffer, Device, Graph, Ptr};
use moesaic::{DType, Engine, Layer, LayerSpec, RawBackward, RawCall, RngKey, Tensors, Training};
use std::sync::Arc;
use std::time::Instant;

/// A layer that was made for one pass.
pub struct Made {
    pub layer: Layer,
    device: Arc<dyn Device>,
    pass: Pass,
}

/// Milliseconds of one call.
#[derive(Clone, Copy, Debug)]
pub struct Clocked {
    /// Between events of the stream.
    pub device: f64,
    /// The host's clock, from the first call of a turn to the end of the last.
    pub wall: f64,
    /// The host's clock, until the last call of a turn was queued.
    pub queued: f64,
}

impl Made {
    /// # Errors
    /// When a kernel is not there, or memory is not.
    pub fn new(
        engine: &Engine,
        spec: &LayerSpec,
        weights: &Tensors<'_>,
        pass: Pass,
    ) -> Result<Made> {
        let layer = match pass {
            Pass::Forward => engine.layer(spec, weights)?,
            Pass::Both => engine.training_layer(spec, weights, Training::default())?,
        };
        Ok(Made {
            layer,
            device: engine.device().clone(),
            pass,
        })
    }

    /// Launches of a call.
    pub fn launches(&self, tokens: usize) -> usize {
        let plan = self.layer.tilings().at(tokens);
        match self.pass {
            Pass::Forward => plan.launched(plan.evaluation_steps(), tokens as u64),
            Pass::Both => plan.launched(plan.all_steps(), tokens as u64),
        }
    }

    /// Puts a call's tensors on the device.
    ///
    /// # Errors
    /// When there is no memory for them.
    pub fn place(&self, call: &Call) -> Result<Placed<'_>> {
        let buffer = |bytes: &[u8]| -> Result<Buffer> {
            let buffer = self.device.alloc(bytes.len())?;
            self.device.upload(bytes, &buffer, 0)?;
            Ok(buffer)
        };
        // What a call leaves unwritten shows as NaN.
        let unwritten = vec![0xff; call.x.len()];
        Ok(Placed {
            made: self,
            tokens: call.tokens,
            x: buffer(&call.x)?,
            y: buffer(&unwritten)?,
            dy: buffer(&call.dy)?,
            dx: buffer(&unwritten)?,
        })
    }
}

/// One call in place.
pub struct Placed<'a> {
    made: &'a Made,
    tokens: usize,
    x: Buffer,
    y: Buffer,
    dy: Buffer,
    dx: Buffer,
}

impl Placed<'_> {
    /// Queues the pass once.
    ///
    /// # Errors
    /// When the layer fails.
    pub fn once(&self) -> Result {
        let tensors = [("x", self.x.ptr()), ("y", self.y.ptr())];
        // SAFETY: x and y hold T x d elements, and live until the device was waited for.
        let call = unsafe { RawCall::new(self.tokens, &tensors) };
        match self.made.pass {
            Pass::Forward => drop(self.made.layer.forward(call)?),
            Pass::Both => self.both(call)?,
        }
        Ok(())
    }

    fn both(&self, call: RawCall<'_>) -> Result {
        let layer = &self.made.layer;
        // SAFETY: as in `once`; x stays as it is.
        let (_, saved) = layer.forward_train(call, RngKey::default())?;
        let tensors: [(&str, Ptr); 2] = [("dy", self.dy.ptr()), ("dx", self.dx.ptr())];
        // SAFETY: dy and dx hold T x d elements.
        let call = unsafe { RawBackward::new(&tensors) };
        layer.backward(&saved, call, false)?;
        Ok(())
    }

    /// Waits for what was queued.
    ///
    /// # Errors
    /// When a launch failed.
    pub fn wait(&self) -> Result {
        Ok(self.made.device.synchronize()?)
    }

    /// What the last pass left: `y`, and after backward `dx`.
    ///
    /// # Errors
    /// When memory cannot be read.
    pub fn rows(&self, name: &str) -> Result<Vec<f32>> {
        let buffer = if name == "dx" { &self.dx } else { &self.y };
        let mut bytes = vec![0; buffer.bytes()];
        self.made.device.download(buffer, 0, &mut bytes)?;
        Ok(floats(&bytes, self.dtype()))
    }

    pub fn dtype(&self) -> DType {
        self.made.layer.spec().precision.activations
    }

    /// `count` calls in a row.
    ///
    /// # Errors
    /// When the layer fails, or the device has no events.
    pub fn time(&self, count: usize) -> Result<Clocked> {
        self.clock(count, || self.once())
    }

    /// The call as a graph, to be launched while the call's tensors are in place.
    ///
    /// # Errors
    /// When the call cannot be captured.
    pub fn capture(&self) -> Result<Arc<dyn Graph>> {
        let gpu = self.made.device.streams()?;
        // A captured training call takes the memory that a call before it leaves.
        self.once()?;
        self.wait()?;
        gpu.begin_capture("layer")?;
        let called = self.once();
        let graph = gpu.end_capture()?;
        called?;
        Ok(graph)
    }

    /// `count` launches of a graph of this call.
    ///
    /// # Errors
    /// When a launch fails.
    pub fn time_graph(&self, graph: &dyn Graph, count: usize) -> Result<Clocked> {
        self.clock(count, || {
            // SAFETY: the layer and the call's tensors live until the device was waited for.
            unsafe { graph.launch()? };
            Ok(())
        })
    }

    fn clock(&self, count: usize, call: impl Fn() -> Result) -> Result<Clocked> {
        let gpu = self.made.device.streams()?;
        call()?;
        self.wait()?;
        let (first, start) = (gpu.record()?, Instant::now());
        for _ in 0..count {
            call()?;
        }
        let queued = start.elapsed();
        let last = gpu.record()?;
        last.synchronize()?;
        let wall = start.elapsed();
        let each = |seconds: f64| seconds * 1e3 / count as f64;
        Ok(Clocked {
            device: f64::from(last.elapsed_ms(&*first)?) / count as f64,
            wall: each(wall.as_secs_f64()),
            queued: each(queued.as_secs_f64()),
        })
    }
}

/// The middle one; `None` of none.
pub fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_unstable_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}
