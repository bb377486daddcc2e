//! Whole models of candle-transformers beside those of `examples/generate`: the same random weights
//! from the same folder, equal logits, and the times of prefill and decode in turns.
//!
//! ```sh
//! cargo run --release --manifest-path interop/candle/Cargo.toml --features beside --example beside
//! ```
//! `-- 32 16 1` sets the tokens of the prompt, those after it, and the number of rounds.

#[path = "generate/attention.rs"]
mod attention;
#[path = "generate/config.rs"]
mod config;
#[path = "generate/model.rs"]
#[expect(dead_code, reason = "nothing here ends a text")]
mod model;
#[path = "generate/rope.rs"]
mod rope;
#[path = "generate/weights.rs"]
mod weights;

use candle_core::{DType, Device, Error, Result, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::{mixtral, qwen3_moe};
use moesaic::Engine;
use serde_json::{Value, json};
use std::collections::HashMap;
use std::path::Path;
use std::time::Instant;

/// A model of either side, with the cache of one text.
trait Text {
    /// Returns the logits of the last of some tokens, which follow `before` others.
    fn last(&mut self, tokens: &[u32], before: usize) -> Result<Tensor>;
}

impl Text for model::Model {
    fn last(&mut self, tokens: &[u32], _before: usize) -> Result<Tensor> {
        let states = self.forward(tokens)?;
        self.logits(&states.narrow(0, tokens.len() - 1, 1)?)
    }
}

impl Text for qwen3_moe::ModelForCausalLM {
    fn last(&mut self, tokens: &[u32], before: usize) -> Result<Tensor> {
        let tokens = Tensor::new(tokens, &Device::Cpu)?.unsqueeze(0)?;
        self.forward(&tokens, before)?.squeeze(0)
    }
}

impl Text for mixtral::Model {
    fn last(&mut self, tokens: &[u32], before: usize) -> Result<Tensor> {
        let tokens = Tensor::new(tokens, &Device::Cpu)?.unsqueeze(0)?;
        self.forward(&tokens, before)?.squeeze(0)
    }
}

/// The times of a run in tokens per second, and the last logits.
struct Timed {
    prefill: f64,
    decode: f64,
    logits: Tensor,
}

/// Runs a prompt and then one token after the other, the same on both sides.
fn run(text: &mut dyn Text, prompt: &[u32], after: &[u32]) -> Result<Timed> {
    let start = Instant::now();
    let mut logits = text.last(prompt, 0)?;
    let prefill = prompt.len() as f64 / start.elapsed().as_secs_f64();
    let start = Instant::now();
    for (at, token) in after.iter().enumerate() {
        logits = text.last(&[*token], prompt.len() + at)?;
    }
    let decode = after.len() as f64 / start.elapsed().as_secs_f64();
    Ok(Timed {
        prefill,
        decode,
        logits,
    })
}

/// The sizes of a run.
struct Sizes {
    prompt: usize,
    after: usize,
    rounds: usize,
}

fn main() -> Result<()> {
    let sizes = std::env::args().skip(1).map(|size| size.parse::<usize>());
    let sizes = sizes.collect::<std::result::Result<Vec<_>, _>>();
    let sizes = sizes.map_err(|_| Error::Msg("sizes are numbers".to_string()))?;
    let size = |at: usize, default| sizes.get(at).copied().unwrap_or(default).max(1);
    let sizes = Sizes {
        prompt: size(0, 128),
        after: size(1, 32),
        rounds: size(2, 5),
    };
    let threads = std::thread::available_parallelism().map_or(1, |threads| threads.get());
    println!(
        "{threads} threads, f32, {} tokens of a prompt and {} after it, medians of {} rounds in turns",
        sizes.prompt, sizes.after, sizes.rounds
    );
    println!("model      pass     candle-transformers  moesaic tokens/s  ratio  difference");
    compare("qwen3_moe", &qwen3_moe_config(), &sizes)?;
    compare("mixtral", &mixtral_config(), &sizes)
}

/// Qwen3-30B-A3B with half the width and the experts, and 3 layers.
fn qwen3_moe_config() -> Value {
    json!({
        "model_type": "qwen3_moe", "vocab_size": 4096, "hidden_size": 1024,
        "intermediate_size": 3072, "num_hidden_layers": 3, "num_attention_heads": 16,
        "head_dim": 128, "attention_bias": false, "num_key_value_heads": 4,
        "max_position_embeddings": 4096, "sliding_window": null, "max_window_layers": 0,
        "tie_word_embeddings": false, "rope_theta": 1e6, "rms_norm_eps": 1e-6,
        "use_sliding_window": false, "hidden_act": "silu", "decoder_sparse_step": 1,
        "moe_intermediate_size": 384, "num_experts_per_tok": 8, "num_experts": 64,
        "norm_topk_prob": true, "torch_dtype": "float32",
    })
}

/// Mixtral 8x7B with a quarter of the width, and 3 layers.
fn mixtral_config() -> Value {
    json!({
        "model_type": "mixtral", "vocab_size": 4096, "hidden_size": 1024,
        "intermediate_size": 3584, "num_hidden_layers": 3, "num_attention_heads": 8,
        "num_key_value_heads": 2, "hidden_act": "silu", "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5, "rope_theta": 1e6, "sliding_window": 4096,
        "num_experts_per_tok": 2, "num_local_experts": 8, "use_flash_attn": false,
        "tie_word_embeddings": false, "torch_dtype": "float32",
    })
}

/// Writes a model, loads it on both sides, and prints the medians.
fn compare(name: &str, config: &Value, sizes: &Sizes) -> Result<()> {
    let folder = tempfile::tempdir()?;
    write(config, folder.path())?;
    let engine = Engine::cpu().map_err(Error::wrap)?;
    let ours = model::Model::load(&engine, folder.path(), sizes.prompt + sizes.after)?;
    let file = folder.path().join("model.safetensors");
    let theirs = candles(config, &std::fs::read(file)?)?;
    let word = |at: usize| (at * 2_654_435_761 % 4096) as u32;
    let tokens: Vec<u32> = (0..sizes.prompt + sizes.after).map(word).collect();
    let (prompt, after) = tokens.split_at(sizes.prompt);
    let (mut all, mut difference) = ([vec![], vec![], vec![], vec![]], 0f32);
    for round in 0..=sizes.rounds {
        let candle = run(&mut *theirs(), prompt, after)?;
        // Both sides begin with an empty cache; a clone of ours has a new workspace, too.
        let mut ours = ours.clone();
        let moesaic = run(&mut ours, prompt, after)?;
        let apart = (&moesaic.logits - &candle.logits)?.abs()?.max_all()?;
        let largest = candle.logits.abs()?.max_all()?;
        difference = difference.max((apart / largest)?.to_scalar()?);
        // The first round reads every page for the first time.
        if round > 0 {
            let speeds = [
                candle.prefill,
                moesaic.prefill,
                candle.decode,
                moesaic.decode,
            ];
            all.iter_mut()
                .zip(speeds)
                .for_each(|(list, speed)| list.push(speed));
        }
    }
    let [candle_prefill, prefill, candle_decode, decode] = all.map(median);
    for (pass, candle, moesaic) in [
        ("prefill", candle_prefill, prefill),
        ("decode", candle_decode, decode),
    ] {
        println!(
            "{name:10} {pass:8} {candle:19.1}  {moesaic:16.1}  {:5.2}  {difference:.0e}",
            moesaic / candle
        );
    }
    Ok(())
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Returns what makes candle's model of a file, with an empty cache each time.
fn candles(config: &Value, file: &[u8]) -> Result<Box<dyn Fn() -> Box<dyn Text>>> {
    let vb = VarBuilder::from_slice_safetensors(file, DType::F32, &Device::Cpu)?;
    let text = config.to_string();
    if config["model_type"] == "mixtral" {
        let config: mixtral::Config = serde_json::from_str(&text).map_err(Error::wrap)?;
        let model = mixtral::Model::new(&config, vb)?;
        return Ok(Box::new(move || Box::new(model.clone())));
    }
    let config: qwen3_moe::Config = serde_json::from_str(&text).map_err(Error::wrap)?;
    let model = qwen3_moe::ModelForCausalLM::new(&config, vb)?;
    Ok(Box::new(move || Box::new(model.clone())))
}

/// Writes `config.json` and `model.safetensors` with random weights.
fn write(config: &Value, folder: &Path) -> Result<()> {
    std::fs::write(folder.join("config.json"), config.to_string())?;
    let size = |key: &str| config[key].as_u64().unwrap_or_default() as usize;
    let (hidden, words) = (size("hidden_size"), size("vocab_size"));
    let mixtral = config["model_type"] == "mixtral";
    let heads = size("num_attention_heads");
    let head_dim = if mixtral {
        hidden / heads
    } else {
        size("head_dim")
    };
    let (queries, keys) = (heads * head_dim, size("num_key_value_heads") * head_dim);
    let mut shapes = vec![
        ("model.embed_tokens.weight".to_string(), vec![words, hidden]),
        ("model.norm.weight".to_string(), vec![hidden]),
        ("lm_head.weight".to_string(), vec![words, hidden]),
    ];
    for layer in 0..size("num_hidden_layers") {
        let mut add = |name: &str, shape: &[usize]| {
            let name = format!("model.layers.{layer}.{name}.weight");
            shapes.push((name, shape.to_vec()));
        };
        add("input_layernorm", &[hidden]);
        add("post_attention_layernorm", &[hidden]);
        add("self_attn.q_proj", &[queries, hidden]);
        add("self_attn.k_proj", &[keys, hidden]);
        add("self_attn.v_proj", &[keys, hidden]);
        add("self_attn.o_proj", &[hidden, queries]);
        let (block, inner, experts, matrices) = match mixtral {
            true => (
                "block_sparse_moe",
                "intermediate_size",
                "num_local_experts",
                ["w1", "w3", "w2"],
            ),
            false => {
                add("self_attn.q_norm", &[head_dim]);
                add("self_attn.k_norm", &[head_dim]);
                let names = ["gate_proj", "up_proj", "down_proj"];
                ("mlp", "moe_intermediate_size", "num_experts", names)
            }
        };
        let (inner, experts) = (size(inner), size(experts));
        add(&format!("{block}.gate"), &[experts, hidden]);
        for expert in 0..experts {
            let [gate, up, down] = matrices.map(|m| format!("{block}.experts.{expert}.{m}"));
            add(&gate, &[inner, hidden]);
            add(&up, &[inner, hidden]);
            add(&down, &[hidden, inner]);
        }
    }
    let mut tensors = HashMap::new();
    for (name, shape) in shapes {
        let tensor = match shape[..] {
            [_, fan_in] => Tensor::randn(0f32, 1.0 / (fan_in as f32).sqrt(), shape, &Device::Cpu)?,
            _ => Tensor::ones(shape, DType::F32, &Device::Cpu)?,
        };
        tensors.insert(name, tensor);
    }
    candle_core::safetensors::save(&tensors, folder.join("model.safetensors"))
}
