//! Models of candle-transformers with and without the patches beside this file: equal logits, and
//! the times of their MoE blocks in turns. `compare.sh` builds it.

use candle_core::{DType, Device, Error, Module, Result, Tensor};
use candle_nn::{VarBuilder, VarMap};
use serde_json::{Value, json};
use std::time::Instant;

/// The first block of a model, as a function.
type Block = Box<dyn Fn(&Tensor) -> Result<Tensor>>;

/// A model of one side.
struct Side {
    logits: Tensor,
    block: Block,
}

/// Makes a model of both crates, runs it, and takes its first block.
macro_rules! sides {
    ($module:ident::$model:ident, $own:expr, $tokens:expr,
     $($layers:ident).+, |$layer:ident, $x:ident| $block:expr) => {{
        let values = values($own);
        let map = VarMap::new();
        // The second model reads the variables that the first one made.
        let vb = VarBuilder::from_varmap(&map, DType::F32, &Device::Cpu);
        [sides!(@ original $module $model values vb $tokens, $($layers).+, $layer $x $block),
         sides!(@ patched $module $model values vb $tokens, $($layers).+, $layer $x $block)]
    }};
    (@ $krate:ident $module:ident $model:ident $values:ident $vb:ident $tokens:expr,
     $($layers:ident).+, $layer:ident $x:ident $block:expr) => {{
        let config: $krate::models::$module::Config =
            serde_json::from_value($values.clone()).map_err(Error::wrap)?;
        let mut model = $krate::models::$module::$model::new(&config, $vb.clone())?;
        let logits = model.forward($tokens, 0)?.flatten_all()?;
        let $layer = model.$($layers).+.swap_remove(0);
        Side { logits, block: Box::new(move |$x: &Tensor| $block) }
    }};
}

const WIDTH: usize = 1024;
const ROUNDS: usize = 9;

/// Returns the keys that all models read, with those of one.
fn values(own: Value) -> Value {
    let mut values = json!({
        "vocab_size": 512, "hidden_size": WIDTH, "intermediate_size": 1792,
        "num_hidden_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 8,
        "head_dim": 128, "attention_bias": false, "max_position_embeddings": 512,
        "sliding_window": 512, "max_window_layers": 0, "tie_word_embeddings": false,
        "rope_theta": 1e4, "rms_norm_eps": 1e-6, "use_sliding_window": false,
        "hidden_act": "silu", "decoder_sparse_step": 1, "use_flash_attn": false,
        "norm_topk_prob": true,
    });
    let all = values.as_object_mut().expect("an object");
    all.extend(own.as_object().expect("an object").clone());
    values
}

fn main() -> Result<()> {
    let threads = std::thread::available_parallelism().map_or(1, |threads| threads.get());
    println!("{threads} threads, f32, width {WIDTH}, medians of {ROUNDS} rounds in turns");
    println!("block          T  candle-transformers ms  patched ms  ratio");
    let tokens: Vec<u32> = (0..24).map(|at| at * 37 % 512).collect();
    let tokens = &Tensor::new(tokens, &Device::Cpu)?.unsqueeze(0)?;
    let own = json!({"num_experts_per_tok": 2, "num_local_experts": 8});
    let mixtral = sides!(mixtral::Model, own, tokens, layers, |layer, x| layer
        .block_sparse_moe
        .forward(x));
    compare("mixtral", &mixtral)?;
    let own = json!({
        "num_experts_per_tok": 4, "num_experts": 60, "moe_intermediate_size": 352,
        "shared_expert_intermediate_size": 1408,
    });
    let qwen2 = sides!(qwen2_moe::Model, own, tokens, layers, |layer, x| layer
        .mlp
        .forward(x));
    compare("qwen2_moe", &qwen2)?;
    let own = json!({
        "num_experts_per_tok": 8, "num_experts": 64, "moe_intermediate_size": 384,
    });
    let qwen3 = sides!(
        qwen3_moe::ModelForCausalLM,
        own,
        tokens,
        base.layers,
        |layer, x| { layer.feed_forward.forward(x, false) }
    );
    compare("qwen3_moe", &qwen3)
}

/// Returns the largest difference, as a share of the largest number.
fn difference(found: &Tensor, expected: &Tensor) -> Result<f32> {
    let largest = |tensor: &Tensor| tensor.abs()?.max_all()?.to_scalar::<f32>();
    Ok(largest(&(found - expected)?)? / largest(expected)?)
}

/// Compares logits and blocks, and prints the times.
fn compare(name: &str, [original, patched]: &[Side; 2]) -> Result<()> {
    let apart = difference(&patched.logits, &original.logits)?;
    assert!(apart < 1e-4, "{name}: logits differ by {apart}");
    for tokens in [1, 8, 64, 512] {
        let x = Tensor::randn(0f32, 1.0, (1, tokens, WIDTH), &Device::Cpu)?;
        let mut times = [vec![], vec![]];
        for round in 0..=ROUNDS {
            let mut results = Vec::new();
            for (block, times) in [&original.block, &patched.block]
                .into_iter()
                .zip(&mut times)
            {
                let start = Instant::now();
                results.push(block(&x)?);
                // The first round makes workspaces and reads every page for the first time.
                if round > 0 {
                    times.push(start.elapsed().as_secs_f64() * 1e3);
                }
            }
            let apart = difference(&results[1], &results[0])?;
            assert!(
                apart < 1e-4,
                "{name}: blocks differ by {apart} for {tokens} tokens"
            );
        }
        let [candle, ours] = times.map(median);
        let ratio = candle / ours;
        println!("{name:10} {tokens:5}  {candle:22.2}  {ours:10.2}  {ratio:5.2}");
    }
    println!("{name:10} logits differ by {apart:.0e} of the largest");
    Ok(())
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
