//! A Qwen3-MoE block as candle programs write it, and the same with moesaic: equal results, and
//! the times of both.
//!
//! ```sh
//! cargo run --release --manifest-path interop/candle/Cargo.toml --example qwen3_moe
//! ```
//! `-- 512 256 16` sets the width of tokens, the inner width of experts, and their number.

use candle_core::{D, DType, Device, Error, Module, Result, Tensor};
use candle_nn::ops::{silu, softmax_last_dim};
use candle_nn::{Linear, VarBuilder, VarMap, linear_no_bias};
use moesaic::{Engine, LayerSpec};
use moesaic_candle::{InferenceLayer, Names};
use std::time::{Duration, Instant};

/// The keys of a model's config.json that its MoE blocks read.
struct Config {
    hidden_size: usize,
    moe_intermediate_size: usize,
    num_experts: usize,
    num_experts_per_tok: usize,
}

/// One expert, in candle.
struct Expert {
    gate_proj: Linear,
    up_proj: Linear,
    down_proj: Linear,
}

impl Expert {
    fn new(config: &Config, vb: VarBuilder<'_>) -> Result<Expert> {
        let (outer, inner) = (config.hidden_size, config.moe_intermediate_size);
        Ok(Expert {
            gate_proj: linear_no_bias(outer, inner, vb.pp("gate_proj"))?,
            up_proj: linear_no_bias(outer, inner, vb.pp("up_proj"))?,
            down_proj: linear_no_bias(inner, outer, vb.pp("down_proj"))?,
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let hidden = (silu(&self.gate_proj.forward(x)?)? * self.up_proj.forward(x)?)?;
        self.down_proj.forward(&hidden)
    }
}

/// The block, in candle: the rows of each expert are gathered, multiplied, and added back.
struct CandleBlock {
    gate: Linear,
    experts: Vec<Expert>,
    top_k: usize,
}

impl CandleBlock {
    fn new(config: &Config, vb: VarBuilder<'_>) -> Result<CandleBlock> {
        let experts = 0..config.num_experts;
        let experts = experts.map(|e| Expert::new(config, vb.pp(format!("experts.{e}"))));
        Ok(CandleBlock {
            gate: linear_no_bias(config.hidden_size, config.num_experts, vb.pp("gate"))?,
            experts: experts.collect::<Result<_>>()?,
            top_k: config.num_experts_per_tok,
        })
    }
}

impl Module for CandleBlock {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let scores = softmax_last_dim(&self.gate.forward(x)?)?;
        let ids = scores.arg_sort_last_dim(false)?;
        let ids = ids.narrow(D::Minus1, 0, self.top_k)?.contiguous()?;
        let weights = scores.gather(&ids, D::Minus1)?;
        let weights = weights.broadcast_div(&weights.sum_keepdim(D::Minus1)?)?;
        let (ids, weights) = (ids.to_vec2::<u32>()?, weights.to_vec2::<f32>()?);
        let mut chosen = vec![(Vec::new(), Vec::new()); self.experts.len()];
        for (token, (ids, weights)) in ids.iter().zip(&weights).enumerate() {
            for (expert, weight) in ids.iter().zip(weights) {
                chosen[*expert as usize].0.push(token as u32);
                chosen[*expert as usize].1.push(*weight);
            }
        }
        let mut y = x.zeros_like()?;
        for (expert, (tokens, weights)) in self.experts.iter().zip(chosen) {
            if tokens.is_empty() {
                continue;
            }
            let weights = Tensor::new(weights, x.device())?.unsqueeze(1)?;
            let tokens = Tensor::new(tokens, x.device())?;
            let out = expert.forward(&x.index_select(&tokens, 0)?)?;
            y = y.index_add(&tokens, &out.broadcast_mul(&weights)?, 0)?;
        }
        Ok(y)
    }
}

/// The block, with moesaic: the lines that change in a model.
fn moesaic_block(engine: &Engine, config: &Config, vb: VarBuilder<'_>) -> Result<InferenceLayer> {
    let (model_dim, hidden_dim) = (config.hidden_size, config.moe_intermediate_size);
    let (experts, top_k) = (config.num_experts, config.num_experts_per_tok);
    let shape = format!(
        "shape = {{ model_dim = {model_dim}, hidden_dim = {hidden_dim}, experts = {experts}, \
         top_k = {top_k} }}\nrouter = {{ renormalize = \"sum\" }}"
    );
    let spec = LayerSpec::from_toml(&shape).map_err(|e| Error::Msg(e.to_string()))?;
    InferenceLayer::load(engine, &spec, Names::Qwen, |shape, name| {
        vb.get(shape, name)
    })
}

fn main() -> Result<()> {
    let sizes = std::env::args().skip(1).map(|size| size.parse::<usize>());
    let sizes = sizes.collect::<std::result::Result<Vec<_>, _>>();
    let sizes = sizes.map_err(|_| Error::Msg("sizes are numbers".to_string()))?;
    let size = |at: usize, default| sizes.get(at).copied().unwrap_or(default);
    let config = Config {
        hidden_size: size(0, 64),
        moe_intermediate_size: size(1, 48),
        num_experts: size(2, 8),
        num_experts_per_tok: 4,
    };
    // Random weights; a model would read them with `VarBuilder::from_mmaped_safetensors`.
    let map = VarMap::new();
    let vb = VarBuilder::from_varmap(&map, DType::F32, &Device::Cpu).pp("mlp");
    let candles = CandleBlock::new(&config, vb.clone())?;
    let engine = Engine::cpu().map_err(Error::wrap)?;
    let ours = moesaic_block(&engine, &config, vb)?;
    println!("{ours:?}\n");
    println!("     T   candle  moesaic        largest difference");
    for tokens in [1, 8, 64, 512] {
        let x = Tensor::randn(0f32, 1.0, (tokens, config.hidden_size), &Device::Cpu)?;
        let (expected, found) = (candles.forward(&x)?, ours.forward(&x)?);
        let difference = (&found - &expected)?.abs()?.max_all()?.to_scalar::<f32>()?;
        let largest = expected.abs()?.max_all()?.to_scalar::<f32>()?;
        assert!(difference <= 1e-4 * largest, "{difference} of {largest}");
        let [candles, ours] = [&candles as &dyn Module, &ours].map(|block| median(block, &x));
        let (candles, ours) = (candles?, ours?);
        println!(
            "{tokens:6}  {:7.2}  {:7.2} ms  {:4.1}x  {difference:.1e} of {largest:.1e}",
            candles.as_secs_f64() * 1e3,
            ours.as_secs_f64() * 1e3,
            candles.as_secs_f64() / ours.as_secs_f64(),
        );
    }
    Ok(())
}

/// Returns the median time of a call.
fn median(block: &dyn Module, x: &Tensor) -> Result<Duration> {
    let mut times = Vec::new();
    let begin = Instant::now();
    while times.len() < 5 || (begin.elapsed() < Duration::from_secs(2) && times.len() < 200) {
        let start = Instant::now();
        block.forward(x)?;
        times.push(start.elapsed());
    }
    times.sort();
    Ok(times[times.len() / 2])
}
