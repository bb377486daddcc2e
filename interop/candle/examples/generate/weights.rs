//! The tensors of a checkpoint outside its experts, in f32.

use candle_core::{DType, Device, Error, Result, Tensor};
use candle_nn::Linear;
use moesaic::weights::Checkpoint;

/// The tensors below a name. candle multiplies f32 fastest on a CPU, so all of them become f32.
#[derive(Clone, Debug)]
pub struct Weights<'c> {
    checkpoint: &'c Checkpoint,
    prefix: String,
}

impl<'c> Weights<'c> {
    pub fn new(checkpoint: &'c Checkpoint) -> Weights<'c> {
        let prefix = String::new();
        Weights { checkpoint, prefix }
    }

    /// Returns the tensors below a further name.
    pub fn below(&self, name: &str) -> Weights<'c> {
        Weights {
            checkpoint: self.checkpoint,
            prefix: format!("{}{name}.", self.prefix),
        }
    }

    /// Reads a tensor.
    ///
    /// # Errors
    /// It is missing, of another shape, or quantized in a form other than FP8 with scales of
    /// blocks.
    pub fn get(&self, name: &str, shape: &[usize]) -> Result<Tensor> {
        let name = format!("{}{name}", self.prefix);
        let tensor = self.read(&name)?;
        if tensor.dims() != shape {
            let found = tensor.dims();
            candle_core::bail!("`{name}` has shape {found:?}, config.json says {shape:?}");
        }
        Ok(tensor)
    }

    /// Reads the projection `name`, with its bias if there is one.
    ///
    /// # Errors
    /// As [`Weights::get`].
    pub fn linear(&self, name: &str, from: usize, to: usize) -> Result<Linear> {
        let weight = self.get(&format!("{name}.weight"), &[to, from])?;
        let bias = format!("{name}.bias");
        let has = self.checkpoint.has(&format!("{}{bias}", self.prefix));
        let bias = has.then(|| self.get(&bias, &[to])).transpose()?;
        Ok(Linear::new(weight, bias))
    }

    fn read(&self, name: &str) -> Result<Tensor> {
        let found = self.checkpoint.find(name).map_err(Error::wrap)?;
        let Some(found) = found else {
            let path = self.checkpoint.path().display();
            candle_core::bail!(
                "{path} has no tensor `{name}`; outside experts, only FP8 is read of quantized ones"
            )
        };
        let dtype = match found.dtype {
            Ok(moesaic::DType::F32) => DType::F32,
            Ok(moesaic::DType::F16) => DType::F16,
            Ok(moesaic::DType::Bf16) => DType::BF16,
            _ => match self.scales(name)? {
                Some(scales) => return blocks(found.bytes, found.shape, &scales),
                None => candle_core::bail!(
                    "`{name}` is neither f32, f16, bf16 nor FP8 with scales of blocks; experts may \
                     be of every format that moesaic reads, the rest of a model not"
                ),
            },
        };
        let tensor = Tensor::from_raw_buffer(found.bytes, dtype, found.shape, &Device::Cpu)?;
        tensor.to_dtype(DType::F32)
    }

    /// Reads the scales of an FP8 matrix.
    fn scales(&self, name: &str) -> Result<Option<Tensor>> {
        let scales = format!("{name}_scale_inv");
        let has = self.checkpoint.has(&scales);
        has.then(|| self.read(&scales)).transpose()
    }
}

/// Multiplies FP8 numbers by the scales of their blocks.
fn blocks(bytes: &[u8], shape: &[usize], scales: &Tensor) -> Result<Tensor> {
    let codes = Tensor::from_raw_buffer(bytes, DType::F8E4M3, shape, &Device::Cpu)?;
    let codes = codes.to_dtype(DType::F32)?;
    let ((rows, columns), (down, along)) = (codes.dims2()?, scales.dims2()?);
    // The edge of a block is a power of two, and the last block may be cut.
    let edge = |size: usize, count: usize| size.div_ceil(count).next_power_of_two();
    let (height, width) = (edge(rows, down), edge(columns, along));
    let scales = scales.reshape((down, 1, along, 1))?;
    let scales = scales.broadcast_as((down, height, along, width))?;
    let scales = scales.reshape((down * height, along * width))?;
    let scales = scales.narrow(0, 0, rows)?.narrow(1, 0, columns)?;
    codes * scales
}
