//! Experts in Rust on two ranks: moesaic routes tokens, exchanges rows and combines outputs, and
//! the code here computes each expert and its gradients. `y` has the bytes of one process.
//!
//! ```sh
//! cargo run --example own_experts
//! ```

use moesaic::collectives::{Call, threads};
use moesaic::experts::{ExpertBackward, UserExpert};
use moesaic::reference::Random;
use moesaic::{
    Engine, Init, Input, LayerOptions, LayerSpec, Mesh, Parallel, Result, RngKey, Tensor, Training,
};

/// The layer needs the number of experts and the width of rows; `hidden_dim` counts for nothing.
const SPEC: &str = "shape = { model_dim = 16, hidden_dim = 1, experts = 4, top_k = 2 }";
const EXPERTS: usize = 4;
const WIDTH: usize = 16;
const RANKS: usize = 2;
/// Tokens per rank.
const TOKENS: usize = 8;

/// `out = scale ⊙ row`, with one parameter per column.
struct Scale {
    scale: Vec<f32>,
    gradient: Vec<f32>,
}

impl Scale {
    fn new(id: usize) -> Scale {
        Scale {
            scale: vec![1.0 + id as f32; WIDTH],
            gradient: vec![0.0; WIDTH],
        }
    }
}

impl UserExpert for Scale {
    fn forward(&self, rows: &[f32], out: &mut [f32], _saved: Option<&mut Vec<f32>>) {
        for (i, (out, x)) in out.iter_mut().zip(rows).enumerate() {
            *out = self.scale[i % WIDTH] * x;
        }
    }

    fn backward(&mut self, call: &ExpertBackward<'_>, drows: &mut [f32]) {
        if !call.accumulate {
            self.gradient.fill(0.0);
        }
        for (i, (x, dout)) in call.rows.iter().zip(call.dout).enumerate() {
            self.gradient[i % WIDTH] += x * dout;
            drows[i] = self.scale[i % WIDTH] * dout;
        }
    }
}

fn main() -> Result<()> {
    let spec = LayerSpec::from_toml(SPEC)?;
    let x: Vec<f32> = Random::new(1)
        .vec(RANKS * TOKENS * WIDTH)
        .into_iter()
        .map(|v| v as f32)
        .collect();
    let weights = Init::Linear.weights(&spec, 2); // the router's are read, experts bring their own
    let engine = Engine::cpu()?;

    let experts = (0..EXPERTS).map(Scale::new).collect();
    let layer = engine.user_layer(&spec, &weights, experts, LayerOptions::default())?;
    let alone = layer.forward(&Input::new(RANKS * TOKENS, &x))?.y().to_f32();

    let device = |_| Ok(engine.device().clone());
    let ranks = threads::run(RANKS, device, |mut world| {
        let mesh = Mesh::new(
            &mut world,
            Parallel {
                ep: RANKS,
                ..Parallel::default()
            },
        )?;
        let rank = mesh.rank();
        let held = mesh.experts(EXPERTS); // by their numbers
        let experts = held.into_iter().map(Scale::new).collect();
        let options = LayerOptions::over(&mesh).training(Training::default());
        let mut layer = engine.user_layer(&spec, &weights, experts, options)?;
        let tokens = &x[rank * TOKENS * WIDTH..][..TOKENS * WIDTH];
        let (output, saved) =
            layer.forward_train(&Input::new(TOKENS, tokens), RngKey::default())?;
        let y = output.y().to_f32();
        // As if the loss were half the sum of y².
        layer.backward(&saved, &Tensor::new(&[TOKENS, WIDTH], &y), false)?;
        let gradients = layer.experts().iter().map(|expert| expert.gradient[0]);
        let gradients: Vec<f32> = gradients.collect();
        world.finish(&Call::new("end"))?;
        Ok::<_, moesaic::Error>((y, gradients))
    })?;
    let mut together = Vec::new();
    for (rank, result) in ranks.into_iter().enumerate() {
        let (y, gradients) = result.expect("no rank panicked")?;
        println!("rank {rank}: first gradient of its experts {gradients:.3?}");
        together.extend(y);
    }
    println!("y equals that of one process: {}", together == alone);
    Ok(())
}
