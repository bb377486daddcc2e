//! Trains a small layer on a task that one expert alone cannot do: four
//! different linear maps, told apart by where a token lies.
//!
//! `cargo run --manifest-path interop/candle/Cargo.toml --example train`

use candle_core::{DType, Device, Result, Tensor, Var};
use moesaic::spec::canonical_tensors;
use moesaic::{Engine, LayerSpec};
use moesaic_candle::{Inputs, MoeLayer, RngKey};
use std::collections::BTreeMap;

const SPEC: &str = r#"
shape = { model_dim = 16, hidden_dim = 32, experts = 8, top_k = 2 }
router = { renormalize = "sum", noise = 1.0 }

[[losses]]
kind = "switch"
coefficient = 0.1
"#;

const STEPS: u64 = 300;
const RATE: f64 = 0.1;

fn main() -> Result<()> {
    let spec = LayerSpec::from_toml(SPEC).expect("a valid spec");
    let engine = Engine::cpu().map_err(candle_core::Error::wrap)?;
    let vars = variables(&spec)?;
    let weights = vars
        .iter()
        .map(|(name, var)| (name.clone(), var.as_tensor().clone()));
    let layer = MoeLayer::new(&engine, &spec, &weights.collect())?;
    let maps = Tensor::randn(0f32, 0.25, (4, 16, 16), &Device::Cpu)?;
    let (unseen, unseen_goal) = batch(&maps)?;

    for step in 0..=STEPS {
        // Another RNG key in every step, and in every layer of a model: other noise.
        let rng_key = RngKey {
            step,
            ..RngKey::default()
        };
        let (x, goal) = batch(&maps)?;
        let trained = layer.forward_train(&Inputs::new(&x), rng_key)?;
        let loss = (&trained.y - goal)?.sqr()?.mean_all()?;
        // The layer adds the gradient of its own losses.
        let gradients = loss.backward()?;
        for var in vars.values() {
            if let Some(gradient) = gradients.get(var) {
                var.set(&(var.as_tensor() - (gradient * RATE)?)?)?;
            }
        }
        if step % 50 == 0 {
            let y = layer.forward(&Inputs::new(&unseen))?.y;
            let evaluated = (y - &unseen_goal)?.sqr()?.mean_all()?;
            println!(
                "step {step:3}  loss {:.4}  balance {:.3}  evaluated {:.4}  experts {:?}",
                loss.to_scalar::<f32>()?,
                trained.losses["switch"].to_scalar::<f32>()?,
                evaluated.to_scalar::<f32>()?,
                trained.routing.counts.to_vec1::<i64>()?,
            );
        }
    }
    Ok(())
}

/// A variable for each weight, of the size that keeps a sum's variance.
fn variables(spec: &LayerSpec) -> Result<BTreeMap<String, Var>> {
    let draw = |tensor: moesaic::spec::TensorSpec| {
        let fan_in = *tensor.shape.last().unwrap_or(&1) as f64;
        let scale = 1.0 / fan_in.sqrt();
        let values = Tensor::randn(0f64, scale, tensor.shape, &Device::Cpu)?;
        Ok((
            tensor.name,
            Var::from_tensor(&values.to_dtype(DType::F32)?)?,
        ))
    };
    canonical_tensors(spec).into_iter().map(draw).collect()
}

/// Tokens of four clusters; each cluster has a linear map of its own.
fn batch(maps: &Tensor) -> Result<(Tensor, Tensor)> {
    let (mut tokens, mut goals) = (Vec::new(), Vec::new());
    for cluster in 0..4 {
        let mark = Tensor::eye(16, DType::F32, &Device::Cpu)?.narrow(0, cluster, 1)?;
        let around = Tensor::randn(0f32, 1.0, (64, 16), &Device::Cpu)?;
        let x = around.broadcast_add(&(mark * 4.0)?)?;
        goals.push(x.matmul(&maps.get(cluster)?)?);
        tokens.push(x);
    }
    Ok((Tensor::cat(&tokens, 0)?, Tensor::cat(&goals, 0)?))
}
