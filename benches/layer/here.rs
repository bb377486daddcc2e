//! Our layer, on memory that stays where it is between calls, as that of the
//! peers does.

use crate::Result;
use crate::data::{Call, floats};
use crate::gradient;
use crate::pass::Pass;
use moesaic::engine::StepTime;
use moesaic::plan::{Op, Step, Work};
use moesaic::target::{Buffer, Device, Ptr};
use moesaic::{
    DType, Engine, EngineOptions, Input, Layer, LayerSpec, RawBackward, RawCall, RngKey, Tensor,
    Tensors, Training,
};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A layer with its weights.
pub struct Here {
    layer: Layer,
    device: Arc<dyn Device>,
    pass: Pass,
}

impl Here {
    /// # Errors
    /// When there is no C compiler or no memory.
    pub fn new(
        spec: &LayerSpec,
        weights: &Tensors<'_>,
        threads: usize,
        pass: Pass,
    ) -> Result<Here> {
        let options = EngineOptions {
            threads: Some(threads),
            ..EngineOptions::default()
        };
        let engine = Engine::open("cpu", options)?;
        let layer = match pass {
            Pass::Forward => engine.layer(spec, weights)?,
            Pass::Both => engine.training_layer(spec, weights, Training::default())?,
        };
        Ok(Here {
            layer,
            device: engine.device().clone(),
            pass,
        })
    }

    /// Puts a call's tensors in place, and sees that tokens go to the experts
    /// `ids [T, K]`, ascending within a token, that they were made for.
    ///
    /// # Errors
    /// When they do not, or the layer fails.
    pub fn start(&self, call: &Call, ids: &[i32]) -> Result<Run<'_>> {
        self.check_routing(call, ids)?;
        let buffer = |bytes: &[u8]| -> Result<Buffer> {
            let buffer = self.device.alloc(bytes.len())?;
            self.device.upload(bytes, &buffer, 0)?;
            Ok(buffer)
        };
        let empty = vec![0; call.x.len()];
        Ok(Run {
            here: self,
            tokens: call.tokens,
            x: buffer(&call.x)?,
            y: buffer(&empty)?,
            dy: buffer(&call.dy)?,
            dx: buffer(&empty)?,
        })
    }

    /// Sees that tokens go to the experts `ids [T, K]`, ascending within a token.
    ///
    /// # Errors
    /// When they do not, or the layer fails.
    pub fn check_routing(&self, call: &Call, ids: &[i32]) -> Result {
        let k = self.layer.spec().shape.top_k;
        let output = self
            .layer
            .forward(self.input(call).reading(&["topk_ids"]))?;
        let found = output.get("topk_ids").and_then(Tensor::to_vec::<i32>);
        let mut found = found.ok_or("no topk_ids")?;
        found.chunks_mut(k).for_each(<[i32]>::sort_unstable);
        if found == ids {
            Ok(())
        } else {
            Err("tokens do not go to the experts that they were made for".into())
        }
    }

    fn input<'a>(&self, call: &'a Call) -> Input<'a> {
        let mut input = Input {
            tokens: call.tokens,
            ..Input::default()
        };
        input.insert("x", self.rows(call.tokens, &call.x));
        input
    }

    fn rows<'a>(&self, tokens: usize, data: &'a [u8]) -> Tensor<'a> {
        let spec = self.layer.spec();
        Tensor {
            dtype: spec.precision.activations,
            shape: vec![tokens, spec.shape.model_dim],
            data: data.into(),
        }
    }

    /// Runs the layer once, so that [`Here::time_steps`] runs its launches on the
    /// same tensors.
    ///
    /// # Errors
    /// When the layer fails.
    pub fn stage(&self, call: &Call) -> Result {
        let input = self.input(call);
        match self.pass {
            Pass::Forward => {
                self.layer.forward(&input)?;
            }
            Pass::Both => {
                let (_, saved) = self
                    .layer
                    .forward_train(input.reading(&[]), RngKey::default())?;
                let dy = self.rows(call.tokens, &call.dy);
                self.layer.backward(&saved, &dy, false)?;
            }
        }
        Ok(())
    }

    /// Every launch of the pass, timed on its own.
    ///
    /// # Errors
    /// When a launch fails.
    pub fn time_steps(&self, tokens: usize) -> Result<Vec<StepTime>> {
        Ok(self.layer.time_steps(tokens)?)
    }

    /// Floating point operations of each step of the pass, where it is a product
    /// of experts' weights or of their gradients.
    #[must_use]
    pub fn products(&self, tokens: usize) -> Vec<Option<f64>> {
        let plan = self.layer.tilings().at(tokens);
        let product = |step: &Step| {
            let Step::Launch(launch) = step;
            let dense = match &plan.kernels[launch.entry.kernel].op {
                Op::GroupedGemm { desc: d, .. } => d.dense,
                Op::GroupedGemmDgrad { desc: d, .. } => d.dense,
                Op::GroupedGemmWgrad { desc: d, .. } => d.dense,
                _ => true,
            };
            (!dense).then(|| Work::of(plan, step, tokens as u64).flops)
        };
        plan.all_steps().map(product).collect()
    }
}

/// One call in place.
pub struct Run<'a> {
    here: &'a Here,
    tokens: usize,
    x: Buffer,
    y: Buffer,
    dy: Buffer,
    dx: Buffer,
}

impl Run<'_> {
    /// Runs the pass once.
    ///
    /// # Errors
    /// When the layer fails.
    pub fn once(&self) -> Result<Duration> {
        let start = Instant::now();
        let tensors = [("x", self.x.ptr()), ("y", self.y.ptr())];
        // SAFETY: x and y hold T x d elements, and the CPU works in order.
        let call = unsafe { RawCall::new(self.tokens, &tensors) };
        match self.here.pass {
            Pass::Forward => self.forward(call)?,
            Pass::Both => self.both(call)?,
        }
        Ok(start.elapsed())
    }

    fn forward(&self, call: RawCall<'_>) -> Result {
        self.here.layer.forward(call)?;
        Ok(())
    }

    fn both(&self, call: RawCall<'_>) -> Result {
        let layer = &self.here.layer;
        // SAFETY: as in `forward`; x stays as it is.
        let (_, saved) = layer.forward_train(call, RngKey::default())?;
        let tensors: [(&str, Ptr); 2] = [("dy", self.dy.ptr()), ("dx", self.dx.ptr())];
        // SAFETY: dy and dx hold T x d elements.
        let call = unsafe { RawBackward::new(&tensors) };
        layer.backward(&saved, call, false)?;
        Ok(())
    }

    /// Returns the results of the last pass: `y`, and after backward `dx`.
    ///
    /// # Errors
    /// When memory cannot be read.
    pub fn rows(&self, name: &str) -> Result<Vec<f32>> {
        let buffer = if name == "dx" { &self.dx } else { &self.y };
        let mut bytes = vec![0; buffer.bytes()];
        self.here.device.download(buffer, 0, &mut bytes)?;
        Ok(floats(&bytes, self.dtype()))
    }

    /// As [`gradient::of`].
    ///
    /// # Errors
    /// When there is none.
    pub fn gradient(&self, name: &str) -> Result<Vec<f32>> {
        gradient::of(&self.here.layer, name)
    }

    /// Elements of a row of `y`.
    pub fn width(&self) -> usize {
        self.here.layer.spec().shape.model_dim
    }

    pub fn dtype(&self) -> DType {
        self.here.layer.spec().precision.activations
    }
}
