//! A real MoE layer on this machine's CPU, from a checkpoint to its times.
//!
//! ```sh
//! cargo run --profile quick --example quickstart
//! ```

mod show;

use moesaic::reference::{self, Random};
use moesaic::spec::hf;
use moesaic::weights::{Checkpoint, LoadOptions, load_import};
use moesaic::{Engine, Init, Input, LayerSpec, Tensors};
use std::error::Error;
use std::path::Path;
use std::time::Instant;

fn main() -> Result<(), Box<dyn Error>> {
    let engine = Engine::cpu()?;
    println!(
        "{} · {} threads · {}\n",
        engine.device_info().name,
        engine.device_info().units,
        engine.target()
    );
    checkpoint(&engine)?;
    full_size(&engine)?;
    println!(
        "\nto read the kernels of the first layer, and those of a GPU that this machine need not have:\n  \
         cargo run -p moesaic-cli -- emit --hf examples/checkpoint --target cpu,cuda:sm_90a -o kernels"
    );
    Ok(())
}

/// Returns the layer of the checkpoint in this repository.
fn load() -> Result<(LayerSpec, Tensors<'static>), Box<dyn Error>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/checkpoint");
    let config = std::fs::read_to_string(folder.join("config.json"))?;
    let import = hf::import(&config, 1)?;
    let weights = load_import(&import, &Checkpoint::open(&folder)?, LoadOptions::default())?;
    Ok((import.spec, weights))
}

/// Loads a small DeepSeek-V3 checkpoint, builds its MoE layer, and compares the output with the f64
/// reference.
fn checkpoint(engine: &Engine) -> Result<(), Box<dyn Error>> {
    let (spec, weights) = load()?;
    println!("{}", show::spec(&spec));
    let start = Instant::now();
    let layer = engine.layer(&spec, &weights)?;
    println!("{}", show::built(engine, start.elapsed()));

    let tokens = 64;
    let x: Vec<half::bf16> = Random::new(1)
        .vec(tokens * spec.shape.model_dim)
        .into_iter()
        .map(half::bf16::from_f64)
        .collect();
    let y = layer.forward(&Input::new(tokens, &x))?.y().to_f32();
    let expected = reference::forward(
        &spec,
        &reference::Weights::from(&weights),
        &reference::Input {
            tokens,
            x: x.iter().map(|v| v.to_f64()).collect(),
            ..reference::Input::default()
        },
    );
    let error = show::error(&y, &expected.y);
    println!("{tokens} tokens through it: largest error {error:.1e} of the largest output");
    // bf16 keeps eight bits, and hidden rows, expert rows and y are rounded once each.
    if error > 0.02 {
        return Err(format!("the output is wrong: error {error:.1e} > 2e-2").into());
    }
    Ok(())
}

/// Times the same family of layer at a size that fills a machine. `moesaic bench --spec
/// examples/quickstart/full_size.toml` compares the times with what the machine allows.
fn full_size(engine: &Engine) -> Result<(), Box<dyn Error>> {
    let spec = LayerSpec::from_toml(include_str!("full_size.toml"))?;
    let layer = engine.layer(&spec, &Init::Linear.weights(&spec, 7))?;
    println!("\n{}", show::spec(&spec));
    for tokens in [1, 64, 2048] {
        let x: Vec<f32> = Random::new(2)
            .vec(tokens * spec.shape.model_dim)
            .into_iter()
            .map(|v| v as f32)
            .collect();
        let input = Input::new(tokens, &x);
        let times = show::best_of(7, || {
            layer.forward(&input)?;
            layer.time_steps(tokens)
        })?;
        println!("{}", show::timing(tokens, &times));
    }
    Ok(())
}
