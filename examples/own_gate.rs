//! A layer behind a gate in Rust: it computes logits from tokens and gets their gradient back. The
//! gate here is linear and learns by plain SGD, the experts learn by AdamW.
//!
//! ```sh
//! cargo run --features train --example own_gate
//! ```

use moesaic::reference::Random;
use moesaic::train::{self, AdamW, Gate, GateBackward, GatedLayer};
use moesaic::{Engine, Init, Input, LayerSpec, Result, RngKey, Tensor, Training};

/// The experts' choice comes from outside, so the spec has no weight of a router.
const SPEC: &str = "
    shape = { model_dim = 16, hidden_dim = 32, experts = 4, top_k = 2 }
    router = { kind = \"external\" }
";
const EXPERTS: usize = 4;
const WIDTH: usize = 16;
const TOKENS: usize = 64;
const STEPS: u64 = 100;
/// The gate's learning rate.
const RATE: f32 = 0.1;

/// `logits = x · weightᵀ`.
struct Linear {
    /// `[E, d]`.
    weight: Vec<f32>,
    gradient: Vec<f32>,
}

impl Gate for Linear {
    fn logits(&self, x: &[f32]) -> Vec<f32> {
        let dot = |x: &[f32], w: &[f32]| -> f32 { x.iter().zip(w).map(|(x, w)| x * w).sum() };
        let rows = |x| self.weight.chunks(WIDTH).map(move |w| dot(x, w));
        x.chunks(WIDTH).flat_map(rows).collect()
    }

    fn backward(&mut self, call: &GateBackward<'_>, dx: &mut [f32]) {
        if !call.accumulate {
            self.gradient.fill(0.0);
        }
        let tokens = call.x.chunks(WIDTH).zip(dx.chunks_mut(WIDTH));
        for ((x, dx), dlogits) in tokens.zip(call.dlogits.chunks(EXPERTS)) {
            for (expert, dlogit) in dlogits.iter().enumerate() {
                for i in 0..WIDTH {
                    self.gradient[expert * WIDTH + i] += dlogit * x[i];
                    dx[i] += dlogit * self.weight[expert * WIDTH + i];
                }
            }
        }
    }
}

fn main() -> Result<()> {
    let spec = LayerSpec::from_toml(SPEC)?;
    let mut masters = Init::Linear.weights(&spec, 1);
    let layer = Engine::cpu()?.training_layer(&spec, &masters, Training::default())?;
    let gate = Linear {
        weight: draw(2, EXPERTS * WIDTH),
        gradient: vec![0.0; EXPERTS * WIDTH],
    };
    let mut layer = GatedLayer::new(layer, gate)?;
    let (x, goal) = (draw(3, TOKENS * WIDTH), draw(4, TOKENS * WIDTH));
    let mut adam = AdamW::new(0.01);

    for step in 0..=STEPS {
        let rng_key = RngKey {
            step,
            ..RngKey::default()
        };
        let input = Input::new(TOKENS, &x);
        let (output, saved) = layer.forward_train(&input, rng_key)?;
        let error: Vec<f32> = output
            .y()
            .to_f32()
            .iter()
            .zip(&goal)
            .map(|(y, g)| y - g)
            .collect();
        let loss = error.iter().map(|e| e * e).sum::<f32>() / error.len() as f32;
        let dy = error.iter().map(|e| e / TOKENS as f32).collect();
        // dx is the gradient of x through the experts and through the gate.
        let _dx = layer.backward(&saved, &Tensor::owned(&[TOKENS, WIDTH], dy), false)?;
        train::update(layer.layer(), &mut adam, &mut masters)?;
        let gate = layer.gate_mut();
        for (weight, gradient) in gate.weight.iter_mut().zip(&gate.gradient) {
            *weight -= RATE * gradient;
        }
        if step % 25 == 0 {
            println!("step {step:3}  loss {loss:.4}");
        }
    }
    Ok(())
}

/// Returns numbers in (-1, 1).
fn draw(seed: u64, count: usize) -> Vec<f32> {
    let values = Random::new(seed).vec(count);
    values.into_iter().map(|v| v as f32).collect()
}
