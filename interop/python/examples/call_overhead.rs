//! The calls of `benches/call_overhead.py`, from Rust: what they take without Python.
//!
//! ```sh
//! cargo run --release --manifest-path interop/python/Cargo.toml --example call_overhead
//! ```

use moesaic::Ptr;
use moesaic::spec::canonical_tensors;
use moesaic::{Engine, EngineOptions, Layer, LayerSpec, RawBackward, RawCall, RngKey, Training};
use std::time::Instant;

const SPEC: &str = "shape = { model_dim = 16, hidden_dim = 16, experts = 2, top_k = 1 }";
const REPEATS: usize = 40;
const CALLS: u32 = 500;
const WIDTH: usize = 16;

fn main() {
    let options = EngineOptions {
        threads: Some(1),
        ..EngineOptions::default()
    };
    let engine = Engine::open("cpu", options).expect("a C compiler");
    let spec = LayerSpec::from_toml(SPEC).expect("a valid spec");
    let layer = engine.layer_without_weights(&spec, Training::default());
    let layer = layer.expect("a layer");
    println!("microseconds per call, least of {REPEATS}");
    println!("tokens  call                         us");
    for tokens in [0, 1] {
        let mut memory = Memory::new(&spec, tokens);
        let forward = memory.tensors(&["x", "y"], &spec, false);
        let backward = memory.tensors(&["x", "dy", "dx"], &spec, true);
        let show = |name: &str, time: f64| println!("{tokens:6}  {name:<24} {time:6.2}");
        show("evaluation", least(|| evaluate(&layer, tokens, &forward)));
        show(
            "training, forward",
            least(|| train(&layer, tokens, &forward, None)),
        );
        let both = least(|| train(&layer, tokens, &forward, Some(&backward)));
        show("training, both passes", both);
    }
}

/// Room for the tensors of a call.
struct Memory(Vec<(String, Vec<f32>)>);

impl Memory {
    fn new(spec: &LayerSpec, tokens: usize) -> Memory {
        let rows = ["x", "y", "dy", "dx"].map(|name| (name.to_string(), tokens * WIDTH));
        let weights = canonical_tensors(spec).into_iter().flat_map(|tensor| {
            let size = tensor.shape.iter().product();
            [(format!("grad.{}", tensor.name), size), (tensor.name, size)]
        });
        let all = rows.into_iter().chain(weights);
        Memory(all.map(|(name, size)| (name, vec![0.1; size])).collect())
    }

    /// Returns the addresses of rows and weights, and of gradients.
    fn tensors(
        &mut self,
        rows: &[&str],
        spec: &LayerSpec,
        gradients: bool,
    ) -> Vec<(&'static str, Ptr)> {
        let weights = canonical_tensors(spec);
        let is_weight = |name: &str| weights.iter().any(|weight| weight.name == name);
        let wanted = |name: &str| {
            rows.contains(&name) || is_weight(name) || gradients && name.starts_with("grad.")
        };
        let found = self.0.iter_mut().filter(|(name, _)| wanted(name));
        let address = |(name, values): &mut (String, Vec<f32>)| {
            (&*name.clone().leak(), Ptr(values.as_mut_ptr() as u64))
        };
        found.map(address).collect()
    }
}

fn evaluate(layer: &Layer, tokens: usize, tensors: &[(&str, Ptr)]) {
    // SAFETY: each address is that of a vector of the tensor's size, which outlives the call.
    let call = unsafe { RawCall::new(tokens, tensors) };
    layer.forward(call).expect("a forward pass");
}

fn train(layer: &Layer, tokens: usize, tensors: &[(&str, Ptr)], backward: Option<&[(&str, Ptr)]>) {
    // SAFETY: as in `evaluate`; the vectors outlive backward, too.
    let call = unsafe { RawCall::new(tokens, tensors) };
    let trained = layer.forward_train(call, RngKey::default());
    let (_, saved) = trained.expect("a forward pass");
    if let Some(tensors) = backward {
        // SAFETY: as in `evaluate`.
        let call = unsafe { RawBackward::new(tensors) };
        layer
            .backward(&saved, call, false)
            .expect("a backward pass");
    }
}

/// Returns microseconds per call.
fn least(call: impl Fn()) -> f64 {
    call();
    let sample = || {
        let start = Instant::now();
        (0..CALLS).for_each(|_| call());
        start.elapsed().as_secs_f64() * 1e6 / f64::from(CALLS)
    };
    (0..REPEATS).map(|_| sample()).fold(f64::INFINITY, f64::min)
}
