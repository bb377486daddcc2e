//! Handwritten digits, read by two residual Mixture-of-Experts layers.
//!
//! ```sh
//! cargo run --release --features train --example digits
//! ```

#[path = "../common/mod.rs"]
mod common;

mod images;
mod model;

use common::experts::{Experts, spec};
use common::optimizer;
use images::Images;
use model::Classifier;
use moesaic::Engine;
use moesaic::reference::Random;
use std::error::Error;
use std::time::Instant;

const WIDTH: usize = 64;
const HIDDEN: usize = 64;
const EXPERTS: usize = 16;
const TOP_K: usize = 2;
const LAYERS: usize = 2;
const BATCH: usize = 128;
const PEAK_RATE: f32 = 3e-3;

fn main() -> Result<(), Box<dyn Error>> {
    let quick = std::env::args().any(|arg| arg == "--quick");
    let epochs = if quick { 1 } else { 60 };
    let (train, test) = Images::load();
    println!(
        "{} images to learn from, {} to test on; {LAYERS} layers of {EXPERTS} experts, {TOP_K} per image",
        train.labels.len(),
        test.labels.len()
    );
    let start = Instant::now();
    let mut model = model(&Engine::cpu()?)?;
    let mut state = optimizer::adamw(0.05);
    let mut random = Random::new(9);
    for epoch in 0..epochs {
        let turn = std::f32::consts::PI * epoch as f32 / epochs as f32;
        let rate = PEAK_RATE * (0.51 + 0.49 * turn.cos());
        let batches = train.shuffled(BATCH, &mut random);
        let mut sum = 0.0;
        for batch in &batches {
            sum += model.gradients(batch)?;
            optimizer::step(&mut state, &mut model, rate)?;
        }
        if (epoch + 1) % 10 == 0 || quick {
            println!(
                "epoch {:3}: training loss {:.4}, test accuracy {:.1} %",
                epoch + 1,
                sum / batches.len() as f64,
                100.0 * model.accuracy(&test)?
            );
        }
    }
    println!("{:.1} s", start.elapsed().as_secs_f64());
    Ok(())
}

fn model(engine: &Engine) -> Result<Classifier<Experts>, Box<dyn Error>> {
    let spec = spec(WIDTH, HIDDEN, EXPERTS, TOP_K);
    let mut random = Random::new(4);
    let layers: Result<Vec<Experts>, _> = (0..LAYERS)
        .map(|_| Experts::new(engine, &spec, 0.5, &mut random))
        .collect();
    Ok(Classifier::new(WIDTH, layers?, 1))
}
