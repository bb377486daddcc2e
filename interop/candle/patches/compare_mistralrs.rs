//! The experts of mistral.rs with and without `mistralrs-core.patch`: equal outputs, and the times
//! of both in turns. `compare_mistralrs.sh` builds it.

use candle_core::{D, DType, Device, Result, Tensor};
use mistralrs_quant::{Comm, Id, ShardedSafeTensors};
use moe::{MoEExperts, MoEExpertsBackend, MoEExpertsConfig};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

mod cuda {
    pub mod moe;
}
mod layers;
mod moe;

use layers::Activation;

const CPU: Device = Device::Cpu;

/// Tensors by name, as a checkpoint holds them.
type Checkpoint = HashMap<String, Tensor>;

fn main() -> Result<()> {
    let rounds = std::env::var("ROUNDS").map_or(9, |rounds| rounds.parse().expect("a number"));
    // No width fills a tile.
    let odd = config(7, 3, 52, 37);
    for act in [
        Activation::Silu,
        Activation::Gelu,
        Activation::GeluPytorchTanh,
    ] {
        let weights = stacked(&odd)?;
        compare("odd", &odd, &weights, DType::F32, act, 0)?;
        compare("odd", &odd, &weights, DType::F16, act, 0)?;
    }
    layouts(&odd)?;
    bf16(&odd)?;

    let threads = std::thread::available_parallelism().map_or(1, |threads| threads.get());
    println!("{threads} threads, medians of {rounds} rounds in turns");
    println!("layer          T  mistral.rs ms  patched ms  ratio  difference");
    let qwen3 = config(128, 8, 2048, 768);
    let weights = stacked(&qwen3)?;
    for dtype in [DType::F16, DType::F32] {
        compare("qwen3", &qwen3, &weights, dtype, Activation::Silu, rounds)?;
    }
    Ok(())
}

fn config(experts: usize, top_k: usize, dim: usize, hidden: usize) -> MoEExpertsConfig {
    MoEExpertsConfig {
        num_experts: experts,
        num_experts_per_tok: top_k,
        hidden_size: dim,
        moe_intermediate_size: hidden,
    }
}

/// Returns random weights in the layout that the loop of mistral.rs reads.
fn stacked(cfg: &MoEExpertsConfig) -> Result<Checkpoint> {
    let (experts, dim) = (cfg.num_experts, cfg.hidden_size);
    let hidden = cfg.moe_intermediate_size;
    let random = |rows: usize, columns: usize| {
        let deviation = 1.0 / (rows as f32).sqrt();
        Tensor::randn(0f32, deviation, (experts, rows, columns), &CPU)
    };
    Ok(HashMap::from([
        ("experts.gate_up_proj".to_string(), random(dim, 2 * hidden)?),
        ("experts.down_proj".to_string(), random(hidden, dim)?),
    ]))
}

/// Makes the experts with the back end that mistral.rs chooses, or with its loop.
fn experts(
    cfg: &MoEExpertsConfig,
    checkpoint: &Checkpoint,
    dtype: DType,
    act: Activation,
    looped: bool,
) -> Result<MoEExperts> {
    let vb = ShardedSafeTensors::wrap(Box::new(checkpoint.clone()), dtype, CPU);
    let comm = Arc::new(Comm::from_device(Id::new(), &CPU, 0, 1)?);
    if looped {
        let slow = MoEExpertsBackend::Slow;
        return MoEExperts::new_with_backend(cfg, vb, CPU, &comm, slow, &None, act);
    }
    let chosen = MoEExpertsBackend::select(&CPU, false, &None, &comm, act);
    assert!(matches!(chosen, MoEExpertsBackend::Moesaic));
    MoEExperts::new(cfg, vb, CPU, &comm, false, &None, act)
}

/// Returns `x [1, tokens, dim]`, and the weights and experts of its tokens.
fn call(cfg: &MoEExpertsConfig, tokens: usize, dtype: DType) -> Result<[Tensor; 3]> {
    let x = Tensor::randn(0f32, 1.0, (1, tokens, cfg.hidden_size), &CPU)?;
    let logits = Tensor::randn(0f32, 1.0, (tokens, cfg.num_experts), &CPU)?;
    let scores = candle_nn::ops::softmax_last_dim(&logits)?;
    let ids = scores.arg_sort_last_dim(false)?;
    let ids = ids.narrow(D::Minus1, 0, cfg.num_experts_per_tok)?;
    let ids = ids.contiguous()?;
    let weights = scores.gather(&ids, D::Minus1)?;
    let weights = weights.broadcast_div(&weights.sum_keepdim(D::Minus1)?)?;
    Ok([x.to_dtype(dtype)?, weights, ids])
}

/// Compares outputs, and prints times if there are rounds.
fn compare(
    name: &str,
    cfg: &MoEExpertsConfig,
    weights: &Checkpoint,
    dtype: DType,
    act: Activation,
    rounds: usize,
) -> Result<()> {
    let sides = [true, false].map(|looped| experts(cfg, weights, dtype, act, looped));
    let [original, patched] = sides;
    let sides = [original?, patched?];
    // The loop rounds each expert's output, and the sum after each expert.
    let bound = if dtype == DType::F32 { 2e-5 } else { 4e-3 };
    for tokens in [1, 8, 64, 512] {
        let [x, weights, ids] = call(cfg, tokens, dtype)?;
        let (mut times, mut largest) = ([vec![], vec![]], 0f32);
        for round in 0..=rounds {
            let mut results = Vec::new();
            for (side, times) in sides.iter().zip(&mut times) {
                let start = Instant::now();
                results.push(side.forward(&x, weights.clone(), &ids)?);
                // The first round makes workspaces and reads every page for the first time.
                if round > 0 {
                    times.push(start.elapsed().as_secs_f64() * 1e3);
                }
            }
            largest = largest.max(difference(&results[1], &results[0])?);
            assert!(largest < bound, "{name}, {tokens} tokens: {largest}");
        }
        if rounds > 0 {
            let [looped, ours] = times.map(median);
            let (layer, ratio) = (format!("{name} {}", dtype.as_str()), looped / ours);
            print!("{layer:10} {tokens:5}  {looped:13.2}  {ours:10.2}  ");
            println!("{ratio:5.2}  {largest:10.0e}");
        }
    }
    Ok(())
}

/// Checks the other layouts of a checkpoint: the transpose of the stacked one, and tensors of each
/// expert, which mistral.rs without the patch loads on a CPU and cannot run.
fn layouts(cfg: &MoEExpertsConfig) -> Result<()> {
    let (dtype, act, hidden) = (DType::F32, Activation::Silu, cfg.moe_intermediate_size);
    let checkpoint = stacked(cfg)?;
    let mut transposed = Checkpoint::new();
    for (name, tensor) in &checkpoint {
        transposed.insert(name.clone(), tensor.transpose(1, 2)?.contiguous()?);
    }
    let mut each = Checkpoint::new();
    for expert in 0..cfg.num_experts {
        let gate_up = transposed["experts.gate_up_proj"].get(expert)?;
        let matrices = [
            ("gate", gate_up.narrow(0, 0, hidden)?),
            ("up", gate_up.narrow(0, hidden, hidden)?),
            ("down", transposed["experts.down_proj"].get(expert)?),
        ];
        for (matrix, tensor) in matrices {
            each.insert(format!("experts.{expert}.{matrix}_proj.weight"), tensor);
        }
    }
    let [x, weights, ids] = call(cfg, 9, dtype)?;
    let run = |checkpoint, looped| {
        experts(cfg, checkpoint, dtype, act, looped)?.forward(&x, weights.clone(), &ids)
    };
    let expected = run(&checkpoint, false)?;
    for checkpoint in [&transposed, &each] {
        assert_eq!(difference(&run(checkpoint, false)?, &expected)?, 0.0);
    }
    let error = run(&each, true).expect_err("layers without weights");
    println!(
        "tensors of each expert, without the patch: {}",
        line(&error)
    );
    Ok(())
}

/// Compares bf16 with f32 of the same values, because the loop does not run in bf16 on a CPU.
fn bf16(cfg: &MoEExpertsConfig) -> Result<()> {
    let act = Activation::Silu;
    let mut checkpoint = stacked(cfg)?;
    for tensor in checkpoint.values_mut() {
        *tensor = tensor.to_dtype(DType::BF16)?;
    }
    let [x, weights, ids] = call(cfg, 64, DType::BF16)?;
    let run = |dtype, looped| {
        let x = x.to_dtype(dtype)?;
        experts(cfg, &checkpoint, dtype, act, looped)?.forward(&x, weights.clone(), &ids)
    };
    let apart = difference(&run(DType::BF16, false)?, &run(DType::F32, true)?)?;
    assert!(apart < 1e-2, "bf16: {apart}");
    println!("bf16 is {apart:.0e} of the largest from f32 of the same values");
    let error = run(DType::BF16, true).expect_err("no bf16 on a CPU");
    println!("bf16, without the patch: {}", line(&error));
    Ok(())
}

/// Returns the largest difference, as a share of the largest number.
fn difference(found: &Tensor, expected: &Tensor) -> Result<f32> {
    let (found, expected) = (found.to_dtype(DType::F32)?, expected.to_dtype(DType::F32)?);
    let largest = |tensor: &Tensor| tensor.abs()?.flatten_all()?.max(0)?.to_scalar::<f32>();
    Ok(largest(&(found - &expected)?)? / largest(&expected)?)
}

/// Returns the first line of an error, which may have a backtrace.
fn line(error: &candle_core::Error) -> String {
    error.to_string().lines().next().unwrap_or("").to_string()
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
