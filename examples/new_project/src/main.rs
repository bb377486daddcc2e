//! Trains a layer of experts in a project of its own. The project has one
//! dependency, which its build script uses too:
//!
//! ```sh
//! cargo new experts && cd experts
//! cargo add moesaic --path MOESAIC --features macros,train
//! cargo add moesaic --path MOESAIC --build
//! cp -r MOESAIC/examples/new_project/* .
//! cargo run
//! ```

use moesaic::train::{self, AdamW};
use moesaic::typed::{TypedLayer, tensor};
use moesaic::{Engine, EngineOptions, Init, RngKey, Store, Tensors, Training};
use std::error::Error;
use std::sync::Arc;

moesaic::layer! {
    /// The layer of layer.toml, its shapes as types.
    struct Experts = "layer.toml";
}

type Token = [f32; Experts::MODEL_DIM];

const STEPS: u64 = 120;
const TOKENS: usize = 64;

fn main() -> Result<(), Box<dyn Error>> {
    // Strict mode turns a kernel that the build script did not compile into an error.
    let options = EngineOptions {
        store: Some(Arc::new(Store::open(env!("KERNELS")))),
        strict: true,
        ..EngineOptions::default()
    };
    let engine = Engine::open("cpu", options)?;
    let mut masters = Init::Linear.weights(&Experts::spec(), 1);
    let layer = made(&engine, &masters)?;
    let mut adam = AdamW::new(0.01);

    let mut losses = Vec::new();
    for step in 0..STEPS {
        let (x, goal) = batch(step);
        let rng_key = RngKey {
            step,
            ..RngKey::default()
        };
        let trained = layer.forward_train(&x, rng_key)?;
        let (loss, dy) = squared_error(&trained.output.y, &goal);
        layer.backward(&trained.saved, &dy, false)?;
        train::update(layer.layer(), &mut adam, &mut masters)?;
        losses.push(loss);
    }
    let (x, goal) = batch(STEPS);
    let (unseen, _) = squared_error(&layer.forward(&x)?, &goal);
    println!(
        "loss {:.4} in the first step, {unseen:.4} on tokens not seen",
        losses[0]
    );
    println!("kernels compiled while it ran: {}", engine.stats().compiled);
    Ok(())
}

fn made(engine: &Engine, masters: &Tensors<'_>) -> Result<Experts, Box<dyn Error>> {
    let values = |name: &str| masters[name].values().expect("masters are f32");
    let router = values("router.weight");
    let [gate, up, down] = ["gate", "up", "down"].map(|m| values(&format!("experts.{m}.weight")));
    let weights = ExpertsWeights {
        router_weight: tensor(&router)?,
        experts_gate_weight: tensor(&gate)?,
        experts_up_weight: tensor(&up)?,
        experts_down_weight: tensor(&down)?,
    };
    Ok(Experts::training(engine, &weights, Training::default())?)
}

/// Returns tokens and targets: the sign of a token's first number decides how the target is turned.
fn batch(step: u64) -> (Vec<Token>, Vec<Token>) {
    let token = |t: usize| std::array::from_fn(|i| noise(step, (t * 16 + i) as u64));
    let x: Vec<Token> = (0..TOKENS).map(token).collect();
    let goal = x.iter().map(|x| x.map(|v| v * x[0].signum()));
    let goal = goal.collect();
    (x, goal)
}

/// Returns the mean squared error and its gradient.
fn squared_error(y: &[Token], goal: &[Token]) -> (f32, Vec<Token>) {
    let elements = (TOKENS * Experts::MODEL_DIM) as f32;
    let mut loss = 0.0;
    let mut dy = y.to_vec();
    for (dy, goal) in dy.iter_mut().flatten().zip(goal.iter().flatten()) {
        let error = *dy - goal;
        loss += error * error / elements;
        *dy = 2.0 * error / elements;
    }
    (loss, dy)
}

/// Returns a number in (-1, 1) for a position in a stream.
fn noise(stream: u64, place: u64) -> f32 {
    let mut z = (stream << 32 | place).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (z >> 40) as f32 / (1 << 23) as f32 - 1.0
}
