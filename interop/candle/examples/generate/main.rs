//! Generates text with a whole model: attention, norms and the cache by candle, experts by moesaic.
//!
//! ```sh
//! cargo run --release --manifest-path interop/candle/Cargo.toml --example generate -- \
//!     --model ~/models/qwen3-30b-a3b --prompt "The capital of France is"
//! ```
//! `-- --help` lists the options.

mod args;
mod attention;
mod config;
mod model;
mod rope;
mod sampling;
mod text;
mod weights;

use args::Args;
use candle_core::{Error, Result};
use model::Model;
use moesaic::Engine;
use sampling::Sampler;
use std::io::{Write, stdout};
use std::process::ExitCode;
use std::time::Instant;

const HELP: &str = "\
Generates text with a mixture-of-experts model: attention by candle, experts by moesaic.

usage: generate --model DIR --prompt TEXT [options]

  --model DIR        folder with config.json, safetensors files and tokenizer.json, of a
                     Qwen3-MoE, Mixtral, OLMoE or gpt-oss; experts may be quantized
  --prompt TEXT      the text that the model goes on with, as it is: no chat template
  --tokens N         generate at most N tokens (64)
  --temperature X    0 takes the likeliest token each time (0)
  --top-k N          sample from the N likeliest tokens
  --top-p X          sample from the likeliest tokens that have the share X together
  --seed N           start of the random numbers (0)
  --help             print this text

Attention, embeddings and the last projection become f32 when they are read: they take twice the
bytes of a bf16 file. Experts keep the type that the file holds them in.
RAYON_NUM_THREADS sets candle's threads; kernels of experts take all cores that are free.
";

fn main() -> ExitCode {
    let done = match Args::read(std::env::args().skip(1)) {
        Ok(Some(args)) => run(&args).map_err(|error| error.to_string()),
        Ok(None) => {
            print!("{HELP}");
            Ok(())
        }
        Err(error) => Err(error),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(2)
        }
    }
}

fn run(args: &Args) -> Result<()> {
    let start = Instant::now();
    let tokenizer = text::tokenizer(&args.model)?;
    let encoded = tokenizer.encode(args.prompt.as_str(), true);
    let encoded = encoded.map_err(Error::wrap)?;
    let prompt = encoded.get_ids();
    let engine = Engine::cpu().map_err(Error::wrap)?;
    let mut model = Model::load(&engine, &args.model, prompt.len() + args.tokens)?;
    eprintln!("loaded in {:.1} s", start.elapsed().as_secs_f64());
    print!("{}", args.prompt);
    let mut sampler = Sampler::new(args.sampling);
    let mut piece = text::pieces(&tokenizer, prompt)?;
    let show = |token| {
        print!("{}", piece(token)?);
        Ok(stdout().flush()?)
    };
    let generated = text::generate(&mut model, &mut sampler, prompt, args.tokens, show)?;
    println!();
    let [prefill, decode] = generated.speeds(prompt.len());
    eprintln!(
        "prefill: {} tokens, {prefill:.1} tokens/s; decode: {} tokens, {decode:.1} tokens/s",
        prompt.len(),
        generated.tokens.len(),
    );
    Ok(())
}
