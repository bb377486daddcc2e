//! The share of routing, maps, dispatch and combine in a whole layer, and the
//! cost of unequally popular experts.

use crate::{ms, rows};
use moesaic::engine::StepTime;
use moesaic::kernel::DType;
use moesaic::reference::Random;
use moesaic::spec::canonical_tensors;
use moesaic::{Engine, Input, Layer, LayerSpec, Tensor, Tensors};
use std::time::Duration;

const TOKENS: usize = 8192;
const MODEL_DIM: usize = 2048;
const EXPERTS: usize = 256;
const RUNS: usize = 3;

const SPEC: &str = "
shape = { model_dim = 2048, hidden_dim = 768, experts = 256, top_k = 8 }
router = { renormalize = \"sum\", bias = true }
experts = { form = \"gated\", activation = \"silu\" }
";

/// Times the layer with even routing and with choices near Zipf's law: logits
/// are ln p of each expert, p falling with its rank to the power 1.2, and noise
/// as wide as Gumbel's.
pub fn report() {
    let engine = Engine::cpu().expect("a C compiler");
    let spec = LayerSpec::from_toml(SPEC).expect("a valid spec");
    let layer = layer(&engine, &spec);
    let x = rows(TOKENS, MODEL_DIM, 3);
    println!(
        "\n{TOKENS} tokens, d = {MODEL_DIM}, h = 768, {EXPERTS} experts, top-8, f32, best of {RUNS}"
    );
    let even = best(&layer, &x, |_| 0.0);
    let zipf = best(&layer, &x, |rank| -1.2 * (rank as f32 + 1.0).ln());
    println!("                          even      Zipf(1.2)");
    for (even, zipf) in even.iter().zip(&zipf) {
        let (a, b) = (ms(even.time), ms(zipf.time));
        println!("  {:22} {a:8.2} {b:10.2} ms", even.symbol);
    }
    let (whole_even, whole_zipf) = (sum(&even, |_| true), sum(&zipf, |_| true));
    println!(
        "  {:22} {:8.2} {:10.2} ms",
        "whole layer",
        ms(whole_even),
        ms(whole_zipf)
    );
    let share = |times: &[StepTime], product: &str| {
        let routing = |step: &StepTime| !step.symbol.starts_with(product);
        100.0 * ms(sum(times, routing)) / ms(sum(times, |_| true))
    };
    println!(
        "  without products of experts: {:.1} % and {:.1} % of the layer",
        share(&even, "grouped_gemm"),
        share(&zipf, "grouped_gemm")
    );
    println!(
        "  Zipf's speed is {:.2} of even routing's",
        ms(whole_even) / ms(whole_zipf)
    );
}

fn sum(times: &[StepTime], counts: impl Fn(&StepTime) -> bool) -> Duration {
    times
        .iter()
        .filter(|step| counts(step))
        .map(|step| step.time)
        .sum()
}

/// Values that repeat after a prime number: they do not matter to the time.
fn layer(engine: &Engine, spec: &LayerSpec) -> Layer {
    let tensors = canonical_tensors(spec);
    let most = tensors
        .iter()
        .map(|t| t.shape.iter().product::<usize>())
        .max();
    let mut values = Random::new(5)
        .vec(65_521)
        .into_iter()
        .map(|v| 0.028 * v as f32)
        .collect::<Vec<_>>();
    let period = values.len();
    for i in period..most.unwrap_or(0) {
        values.push(values[i - period]);
    }
    let mut weights = Tensors::new();
    for tensor in &tensors {
        assert_eq!(tensor.dtype, DType::F32);
        let count = tensor.shape.iter().product();
        weights = weights.with(&tensor.name, &tensor.shape, &values[..count]);
    }
    engine.layer(spec, &weights).expect("the kernels compile")
}

/// Every step at its fastest, with this bias by the rank of an expert.
fn best(layer: &Layer, x: &[f32], bias: impl Fn(usize) -> f32) -> Vec<StepTime> {
    // Neighbouring ranks lie apart, as in a model.
    let bias: Vec<f32> = (0..EXPERTS).map(|e| bias(e * 97 % EXPERTS)).collect();
    layer
        .set_weight("router.bias", &Tensor::new(&[EXPERTS], &bias))
        .expect("a router with a bias");
    layer
        .forward(&Input::new(TOKENS, x))
        .expect("the layer runs");
    let mut best: Vec<StepTime> = layer.time_steps(TOKENS).expect("it ran before");
    for _ in 1..RUNS {
        let times = layer.time_steps(TOKENS).expect("it ran before");
        for (best, time) in best.iter_mut().zip(times) {
            best.time = best.time.min(time.time);
        }
    }
    best
}
