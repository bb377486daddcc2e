//! A real MoE layer on this machine's CPU, from a checkpoint to a roofline.
//!
//! ```sh
//! cargo run --profile quick --example quickstart
//! ```

mod show;

use moesaic::cpu::{CpuCompiler, CpuDevice, host_isa, limits};
use moesaic::reference::{self, Random};
use moesaic::spec::hf;
use moesaic::weights::{Checkpoint, LoadOptions, load_import};
use moesaic::{Engine, Input, LayerSpec, PlanOptions, Tensors};
use std::error::Error;
use std::path::{Path, PathBuf};
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
    let emitted = emit(&engine)?;
    println!(
        "\nthe emitted source of every kernel lies in {}",
        emitted.display()
    );
    Ok(())
}

/// Returns the layer of the checkpoint in this repository.
fn load() -> Result<(LayerSpec, moesaic::Tensors<'static>), Box<dyn Error>> {
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
    println!("{}", show::built(engine, &layer, start.elapsed()));
    println!("{}", show::plan(layer.plan()));

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

/// Times the same family of layer at a size that fills a machine, against the roofline of the
/// machine.
fn full_size(engine: &Engine) -> Result<(), Box<dyn Error>> {
    let spec = LayerSpec::from_toml(
        r#"
        name = "full-size"
        shape = { model_dim = 1024, hidden_dim = 512, experts = 16, top_k = 4 }
        router = { score = "sigmoid", select_bias = true, renormalize = "sum", scale = 2.5 }
        "#,
    )?;
    let random = reference::Weights::random(&spec, 7);
    let stored: Vec<(String, Vec<usize>, Vec<f32>)> = random
        .0
        .iter()
        .map(|(name, t)| {
            (
                name.clone(),
                t.shape.clone(),
                t.data.iter().map(|&v| v as f32).collect(),
            )
        })
        .collect();
    let mut weights = Tensors::new();
    for (name, shape, data) in &stored {
        weights = weights.with(name, shape, data);
    }
    let layer = engine.layer(&spec, &weights)?;
    let measure = || {
        let compiler = CpuCompiler::find(None)?;
        Ok::<_, Box<dyn Error>>(limits::measure(&compiler, &CpuDevice::new(), host_isa())?)
    };
    let before = measure()?;
    let mut runs = Vec::new();
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
        runs.push((tokens, times));
    }
    // The machine may have been busy: a limit that moved makes the shares below uncertain.
    let limits = show::Watched::new(&before, &measure()?);
    println!("{}", show::limits(&spec, &limits, before.threads));
    for (tokens, times) in runs {
        println!("{}", show::timing(&layer, tokens, &times, &limits));
    }
    Ok(())
}

/// Writes the kernels of the checkpoint's layer for this CPU and for two GPUs that this machine
/// need not have.
fn emit(engine: &Engine) -> Result<PathBuf, Box<dyn Error>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/quickstart");
    let (spec, _) = load()?;
    let targets = [
        engine.target(),
        "cuda:sm_90a".parse()?,
        "rocm:gfx942".parse()?,
    ];
    for target in targets {
        let into = folder.join(target.file_name());
        std::fs::create_dir_all(&into)?;
        let plan = moesaic::plan::plan(&spec, target, &PlanOptions::default())?;
        for source in moesaic::emit::emit_layer(&plan)? {
            std::fs::write(into.join(source.file_name()), &source.text)?;
        }
    }
    Ok(folder)
}
