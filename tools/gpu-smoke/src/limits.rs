//! What the card can do: a copy, and a large product.

use crate::Result;
use crate::cases::{of_type, small};
use crate::data::{noise_call, weights};
use crate::layers::DTYPE;
use crate::timing::median;
use moesaic::spec::LayerSpec;
use moesaic::target::DeviceCopy;
use moesaic::{Engine, Input, Tensor, engine::StepTime};

/// Bytes of a copy: many times any cache.
const BYTES: usize = 1 << 30;

const ROUNDS: usize = 5;

/// Measured rates.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Read and written by a copy, in GB/s.
    pub copy: f64,
    /// Of a large product in TFLOP/s.
    pub product: f64,
}

impl Limits {
    pub const UNKNOWN: Limits = Limits {
        copy: f64::NAN,
        product: f64::NAN,
    };
}

/// A layer of one expert that takes every token: its two products are plain ones, of
/// matrices as wide as there are tokens.
pub fn product(tiny: bool) -> LayerSpec {
    let width = if tiny { 128 } else { 8192 };
    let mut spec = of_type(DTYPE, small(width, width, 1, 1));
    spec.name = "product".to_string();
    spec.experts.form = moesaic::spec::ExpertForm::Plain;
    spec
}

/// Measures both on the device.
///
/// # Errors
/// When the device has no events, or not the memory.
pub fn measure(engine: &Engine, tiny: bool) -> Result<Limits> {
    Ok(Limits {
        copy: copy(engine)?,
        product: our_product(engine, &product(tiny))?,
    })
}

fn copy(engine: &Engine) -> Result<f64> {
    let (device, gpu) = (engine.device(), engine.device().streams()?);
    let (from, to) = (device.alloc(BYTES)?, device.alloc(BYTES)?);
    let copy = DeviceCopy {
        from: &from,
        from_offset: 0,
        to: &to,
        to_offset: 0,
        bytes: BYTES,
    };
    gpu.copy(&copy)?;
    let mut rates = Vec::new();
    for _ in 0..ROUNDS {
        let start = gpu.record()?;
        gpu.copy(&copy)?;
        let ms = f64::from(gpu.record()?.elapsed_ms(&*start)?);
        rates.push(2.0 * BYTES as f64 / ms / 1e6);
    }
    Ok(median(rates).unwrap_or(f64::NAN))
}

/// The faster product of the layer, by our own kernels.
fn our_product(engine: &Engine, spec: &LayerSpec) -> Result<f64> {
    let width = spec.shape.model_dim;
    let layer = engine.layer(spec, &weights(spec, DTYPE))?;
    let mut input = Input {
        tokens: width,
        ..Input::default()
    };
    let x = Tensor {
        dtype: DTYPE,
        shape: vec![width, width],
        data: noise_call(width, DTYPE, width).x.into(),
    };
    input.insert("x", x);
    layer.forward(&input)?;
    let mut rates = Vec::new();
    for _ in 0..ROUNDS {
        let times = layer.time_steps(width)?;
        let products = times.iter().filter(|step| step.symbol.contains("gemm"));
        let rate = |step: &StepTime| 2.0 * (width as f64).powi(3) / step.time.as_secs_f64() / 1e12;
        rates.push(products.map(rate).fold(0.0, f64::max));
    }
    Ok(median(rates).unwrap_or(f64::NAN))
}
