//! A layer with shapes as types, so that a wrong shape does not compile.
//!
//! ```sh
//! cargo run --features macros --example typed_layer
//! ```

use moesaic::Engine;
use moesaic::typed::tensor;
use std::error::Error;

moesaic::layer! {
    /// Top-2 of eight experts.
    pub struct Tiny {
        [shape]
        model_dim = 64
        hidden_dim = 128
        experts = 8
        top_k = 2

        [router]
        renormalize = "sum"
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    // A nested array, or a flat vector viewed as one.
    let router: [[f32; 64]; 8] = std::array::from_fn(|e| std::array::from_fn(|i| wave(e + i)));
    let up: Vec<f32> = (0..8 * 128 * 64).map(wave).collect();
    let down: Vec<f32> = (0..8 * 64 * 128).map(wave).collect();
    let weights = TinyWeights {
        router_weight: &router,
        experts_gate_weight: tensor(&up)?,
        experts_up_weight: tensor(&up)?,
        experts_down_weight: tensor(&down)?,
    };
    let layer = Tiny::new(&Engine::cpu()?, &weights)?;

    let x: [[f32; 64]; 3] = std::array::from_fn(|t| std::array::from_fn(|i| wave(7 * t + i)));
    let output = layer.forward_all(&x)?;
    for (token, (ids, weights)) in output.topk_ids.iter().zip(&output.topk_weights).enumerate() {
        let [first, second, ..] = output.y[token];
        println!(
            "token {token}: experts {ids:?}, weights {weights:.3?}, y = [{first:.4}, {second:.4}, ...]"
        );
    }
    println!("assignments per expert: {:?}", output.counts);
    Ok(())
}

/// Returns some number to compute with.
fn wave(i: usize) -> f32 {
    (i as f32 * 0.37).sin() * 0.2
}
