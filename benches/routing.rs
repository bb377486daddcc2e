//! Routing, dispatch and combine alone, forward and backward: this compiler's
//! kernels against the one-hot and einsum formulation that GShard and fairseq
//! use, and at the size that Tutel's routing was measured at.
//!
//! ```sh
//! cargo bench -p moesaic-benches --bench routing
//! cargo bench -p moesaic-benches --bench routing -- --share  # of a whole layer; takes 10 GB
//! ```

#[path = "routing/one_hot.rs"]
mod one_hot;
#[path = "routing/share.rs"]
mod share;

use moesaic::engine::StepTime;
use moesaic::reference::{self, Random};
use moesaic::{Engine, EngineOptions, Input, Layer, LayerSpec, RngKey, Tensor, Tensors, Training};
use one_hot::OneHot;
use std::time::{Duration, Instant};

const RUNS: usize = 7;

fn main() {
    if std::env::args().any(|arg| arg == "--list") {
        return;
    }
    println!(
        "routing + dispatch + combine from logits on, best of {RUNS}, experts' products apart"
    );
    println!("{} threads\n", rayon::current_num_threads());
    if std::env::args().any(|arg| arg == "--share") {
        share::report();
        return;
    }
    against_one_hot();
    at_tutels_size();
}

/// fairseq's top-2 gate: 16 experts, capacity `2·ceil(T/E)`, weights
/// renormalised over what was not dropped.
fn against_one_hot() {
    let (d, experts) = (512, 16);
    println!("d = {d}, {experts} experts, top-2, capacity factor 1");
    println!("              forward, ms               forward + backward, ms");
    println!("tokens   here   one-hot   ratio      here   one-hot   ratio");
    let engine = Engine::cpu().expect("a C compiler");
    let spec = LayerSpec::from_toml(&format!(
        "shape = {{ model_dim = {d}, hidden_dim = 16, experts = {experts}, top_k = 2 }}\n\
         capacity = {{ mode = \"factor\", factor = 1.0, renormalize_after_drop = true }}\n\
         experts = {{ form = \"plain\", activation = \"relu\" }}\n"
    ))
    .expect("a valid spec");
    let layer = layer(&engine, &spec);
    for tokens in [256, 512, 1024, 2048, 4096] {
        let x = rows(tokens, d, 1);
        let run = Run::new(&layer, &x, tokens);
        let one_hot = OneHot::new(&run.logits, experts);
        run.agrees_with(&one_hot);
        let here = run.best();
        let there = one_hot_times(&one_hot, &x, d);
        let (forward, backward) = (here.routing(false), here.routing(true));
        println!(
            "{tokens:6} {:6.2} {:9.2} {:7.1} {:9.2} {:9.2} {:7.1}",
            ms(forward),
            ms(there.0),
            ratio(there.0, forward),
            ms(forward + backward),
            ms(there.0 + there.1),
            ratio(there.0 + there.1, forward + backward),
        );
    }
}

/// 8192 tokens, 256 experts, top-8, rows of 1024, on one thread.
fn at_tutels_size() {
    let (tokens, d) = (8192, 1024);
    println!("\n{tokens} tokens, d = {d}, 256 experts, top-8, capacity factor 1, one thread");
    let options = EngineOptions {
        threads: Some(1),
        ..EngineOptions::default()
    };
    let engine = Engine::open("cpu", options).expect("a C compiler");
    let spec = LayerSpec::from_toml(&format!(
        "shape = {{ model_dim = {d}, hidden_dim = 16, experts = 256, top_k = 8 }}\n\
         capacity = {{ mode = \"factor\", factor = 1.0 }}\n\
         router = {{ renormalize = \"clamp\", renormalize_eps = 1e-7 }}\n\
         experts = {{ form = \"plain\", activation = \"relu\" }}\n"
    ));
    let layer = layer(&engine, &spec.expect("a valid spec"));
    let x = rows(tokens, d, 2);
    let times = Run::new(&layer, &x, tokens).best();
    for (stem, time) in times.by_stem() {
        println!("  {stem:14} {:8.2} ms", ms(time));
    }
}

/// A training layer whose experts' products hardly count.
fn layer(engine: &Engine, spec: &LayerSpec) -> Layer {
    let random = reference::Weights::random(spec, 7);
    let stored: Vec<(String, Vec<usize>, Vec<f32>)> = random
        .0
        .into_iter()
        .map(|(name, t)| (name, t.shape, t.data.iter().map(|v| *v as f32).collect()))
        .collect();
    let mut weights = Tensors::new();
    for (name, shape, data) in &stored {
        weights = weights.with(name, shape, data);
    }
    let layer = engine.training_layer(spec, &weights, Training::default());
    layer.expect("the kernels compile")
}

fn rows(tokens: usize, d: usize, seed: u64) -> Vec<f32> {
    let values = Random::new(seed).vec(tokens * d);
    values.into_iter().map(|v| v as f32).collect()
}

/// One call of a layer, both ways.
struct Run<'a> {
    layer: &'a Layer,
    tokens: usize,
    logits: Vec<f32>,
    locations: Vec<f32>,
}

impl<'a> Run<'a> {
    fn new(layer: &'a Layer, x: &[f32], tokens: usize) -> Run<'a> {
        let names = ["y", "router.logits", "locations"];
        let input = Input::new(tokens, x);
        let (output, saved) = layer
            .forward_train(input.reading(&names), RngKey::default())
            .expect("the layer runs");
        let dy = Tensor::new(&[tokens, x.len() / tokens], x);
        layer.backward(&saved, &dy, false).expect("the layer runs");
        let get = |name: &str| output.get(name).expect("asked for").to_f32();
        Run {
            layer,
            tokens,
            logits: get("router.logits"),
            locations: get("locations"),
        }
    }

    /// Both must have put every token at the same place.
    fn agrees_with(&self, one_hot: &OneHot) {
        let same = one_hot.locations().eq(self.locations.iter().copied());
        assert!(same, "the two implementations route differently");
    }

    /// Every step at its fastest.
    fn best(&self) -> Times {
        let mut best: Vec<StepTime> = Vec::new();
        for _ in 0..RUNS {
            let times = self.layer.time_steps(self.tokens).expect("it ran before");
            if best.is_empty() {
                best = times;
                continue;
            }
            for (best, time) in best.iter_mut().zip(times) {
                best.time = best.time.min(time.time);
            }
        }
        Times(best)
    }
}

/// The steps of both passes.
struct Times(Vec<StepTime>);

impl Times {
    /// Returns the time of routing, dispatch and combine in one direction.
    fn routing(&self, backward: bool) -> Duration {
        let first = self.0.iter().position(|step| step.kernel.contains("_bwd"));
        let (forward, back) = self.0.split_at(first.expect("a training layer"));
        let steps = if backward { back } else { forward };
        let counted = |step: &&StepTime| !is_product(step);
        steps.iter().filter(counted).map(|step| step.time).sum()
    }

    /// Returns times by stem, in order of appearance, without GEMMs.
    fn by_stem(&self) -> Vec<(&str, Duration)> {
        let mut list: Vec<(&str, Duration)> = Vec::new();
        for step in self.0.iter().filter(|step| !is_product(step)) {
            match list.iter_mut().find(|(stem, _)| *stem == step.kernel) {
                Some((_, sum)) => *sum += step.time,
                None => list.push((&step.kernel, step.time)),
            }
        }
        list
    }
}

/// Products of experts or of the router with its matrix: the same in every
/// implementation.
fn is_product(step: &StepTime) -> bool {
    step.kernel.starts_with("grouped_gemm") || step.symbol.contains("gate_logits")
}

/// Forward and backward of the one-hot formulation, each at its fastest.
fn one_hot_times(one_hot: &OneHot, x: &[f32], d: usize) -> (Duration, Duration) {
    let mut best = (Duration::MAX, Duration::MAX);
    for _ in 0..RUNS.min(3) {
        let start = Instant::now();
        let state = one_hot.forward(x, d);
        best.0 = best.0.min(start.elapsed());
        state.check(x, d);
        let start = Instant::now();
        let gradients = one_hot.backward(&state, x, d);
        best.1 = best.1.min(start.elapsed());
        gradients.check(&state, x, d);
    }
    best
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

fn ratio(there: Duration, here: Duration) -> f64 {
    there.as_secs_f64() / here.as_secs_f64()
}
