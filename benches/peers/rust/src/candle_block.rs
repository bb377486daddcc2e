//! A block of candle's operations, put together as candle-transformers does in
//! its Mixtral and Qwen3 models, whose own types are private: tokens of each
//! expert are listed on the host, then selected, multiplied and added back.

use crate::layer::{Files, Layer};
use crate::{Block, Result};
use candle_core::{DType, Device, Tensor};
use candle_nn::ops::{sigmoid, silu};
use safetensors::tensor::{Dtype, TensorView};

/// The layer.
pub struct CandleBlock {
    layer: Layer,
    router: Linear,
    select_bias: Option<Vec<f32>>,
    experts: Vec<[Linear; 2]>,
    shared: Option<[Linear; 2]>,
    x: Option<Tensor>,
    y: Option<Tensor>,
}

struct Linear {
    /// `[n, k]`.
    weight: Tensor,
    bias: Option<Tensor>,
}

impl Linear {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let y = x.matmul(&self.weight.t()?)?;
        match &self.bias {
            Some(bias) => y.broadcast_add(bias),
            None => Ok(y),
        }
    }
}

impl CandleBlock {
    pub fn new(layer: Layer, files: &Files<'_>) -> Result<CandleBlock> {
        let some = |name: &str| files.get(name).as_ref().map(tensor).transpose();
        let need = |name: &str| files.need(name).and_then(|view| tensor(&view));
        let (into, out) = (need(&layer.first("weight"))?, need("experts.down.weight")?);
        let into_bias = some(&layer.first("bias"))?;
        let out_bias = some("experts.down.bias")?;
        let one = |weights: &Tensor, bias: &Option<Tensor>, e: usize| -> Result<Linear> {
            Ok(Linear {
                weight: weights.get(e)?,
                bias: bias.as_ref().map(|bias| bias.get(e)).transpose()?,
            })
        };
        let experts: Result<Vec<[Linear; 2]>> = (0..layer.experts)
            .map(|e| Ok([one(&into, &into_bias, e)?, one(&out, &out_bias, e)?]))
            .collect();
        let plain = |weight: Tensor| Linear { weight, bias: None };
        let shared = match layer.shared_dim {
            0 => None,
            _ => Some([
                plain(need("shared.0.gate_up.weight")?),
                plain(need("shared.0.down.weight")?),
            ]),
        };
        let select_bias = some("router.select_bias")?;
        let select_bias = select_bias.map(|t| t.to_dtype(DType::F32)?.to_vec1::<f32>());
        Ok(CandleBlock {
            router: Linear {
                weight: need("router.weight")?,
                bias: some("router.bias")?,
            },
            select_bias: select_bias.transpose()?,
            experts: experts?,
            shared,
            layer,
            x: None,
            y: None,
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let logits = self.router.forward(x)?.to_dtype(DType::F32)?;
        let mut tokens: Vec<Vec<u32>> = vec![Vec::new(); self.layer.experts];
        let mut weights: Vec<Vec<f32>> = vec![Vec::new(); self.layer.experts];
        for (t, mut row) in logits.to_vec2::<f32>()?.into_iter().enumerate() {
            for (e, weight) in self.layer.choose(&mut row, self.select_bias.as_deref()) {
                tokens[e].push(t as u32);
                weights[e].push(weight);
            }
        }
        let mut y = x.zeros_like()?;
        for (e, expert) in self.experts.iter().enumerate() {
            if tokens[e].is_empty() {
                continue;
            }
            let rows = Tensor::new(tokens[e].as_slice(), &Device::Cpu)?;
            let weight = Tensor::new(weights[e].as_slice(), &Device::Cpu)?;
            let weight = weight.reshape(((), 1))?.to_dtype(x.dtype())?;
            let out = self.mlp(expert, &x.index_select(&rows, 0)?)?;
            y = y.index_add(&rows, &out.broadcast_mul(&weight)?, 0)?;
        }
        match &self.shared {
            Some(shared) => Ok((y + self.mlp(shared, x)?)?),
            None => Ok(y),
        }
    }

    fn mlp(&self, [into, out]: &[Linear; 2], x: &Tensor) -> Result<Tensor> {
        let inner = into.forward(x)?;
        let hidden = match self.layer.activation.as_str() {
            "relu" => inner.relu()?,
            kind => {
                let halves = inner.chunk(2, 1)?;
                let (gate, up) = (&halves[0], &halves[1]);
                match kind {
                    "clamped" => clamped(gate, up)?,
                    _ => (silu(&gate.contiguous()?)? * up)?,
                }
            }
        };
        Ok(out.forward(&hidden)?)
    }
}

/// gpt-oss.
fn clamped(gate: &Tensor, up: &Tensor) -> candle_core::Result<Tensor> {
    let (gate, up) = (gate.minimum(7f64)?, up.clamp(-7f64, 7f64)?);
    (&gate * sigmoid(&(&gate * 1.702)?)?)? * (up + 1.0)?
}

impl Block for CandleBlock {
    fn ways(&self) -> &'static [&'static str] {
        &["layer"]
    }

    fn input(&mut self, x: &TensorView<'_>) -> Result {
        self.x = Some(tensor(x)?);
        Ok(())
    }

    fn run(&mut self, _way: &str) -> Result {
        let x = self.x.as_ref().ok_or("no input")?;
        self.y = Some(self.forward(x)?);
        Ok(())
    }

    fn y(&self) -> Result<Vec<f32>> {
        let y = self.y.as_ref().ok_or("no result")?;
        Ok(y.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?)
    }
}

fn tensor(view: &TensorView<'_>) -> Result<Tensor> {
    let dtype = match view.dtype() {
        Dtype::BF16 => DType::BF16,
        _ => DType::F32,
    };
    Ok(Tensor::from_raw_buffer(
        view.data(),
        dtype,
        view.shape(),
        &Device::Cpu,
    )?)
}
