//! Times one set of experts behind four routers: all routers in one pass over the experts, against
//! one pass per router.
//!
//! `cargo run --release --features train --example multi_gate`

use moesaic::reference::Random;
use moesaic::spec::canonical_tensors;
use moesaic::{
    Engine, EngineError, Input, LayerOptions, LayerSpec, RngKey, Tensor, Tensors, Training,
};
use std::error::Error;
use std::time::{Duration, Instant};

const GATES: usize = 4;
const REPEATS: usize = 5;

/// Two of many experts per token, and all of a few experts, as in the published MMoE.
const SHAPES: [&str; 2] = [
    "shape = { model_dim = 512, hidden_dim = 1024, experts = 16, top_k = 2 }",
    "shape = { model_dim = 512, hidden_dim = 1024, experts = 8, top_k = 8 }",
];

fn main() -> Result<(), Box<dyn Error>> {
    println!(
        "experts top_k tokens   forward: one pass   gate by gate   training: one pass   gate by gate"
    );
    for shape in SHAPES {
        let spec = LayerSpec::from_toml(shape)?;
        for tokens in [8, 512] {
            let [once, each, train_once, train_each] = measure(&spec, tokens)?;
            let ms = |time: Duration| time.as_secs_f64() * 1e3;
            println!(
                "{:7} {:5} {tokens:6}   {:14.2} ms   {:9.2} ms   {:15.2} ms   {:9.2} ms",
                spec.shape.experts,
                spec.shape.top_k,
                ms(once),
                ms(each),
                ms(train_once),
                ms(train_each),
            );
        }
    }
    Ok(())
}

fn measure(spec: &LayerSpec, tokens: usize) -> Result<[Duration; 4], moesaic::Error> {
    let mut random = Random::new(1);
    let experts = weights(spec, &mut random, false);
    let routers: Vec<Tensors<'_>> = (0..GATES)
        .map(|_| weights(spec, &mut random, true))
        .collect();
    let x = floats(&mut random, tokens * spec.shape.model_dim);
    let input = Input::new(tokens, &x);
    let dy = Tensor::new(&[tokens, spec.output_dim()], &x);
    let dy = vec![dy; GATES];

    let engine = Engine::cpu()?;
    let gates = engine.multi_gate(spec, &experts, &routers, LayerOptions::default())?;
    let once = best(|| gates.forward(input.reading(&["y"])).map(drop))?;
    let each = best(|| {
        let each = gates.layers().iter();
        each.map(|layer| layer.forward(&input))
            .collect::<Result<Vec<_>, _>>()
            .map(drop)
    })?;
    let options = LayerOptions::default().training(Training::default());
    let gates = engine.multi_gate(spec, &experts, &routers, options)?;
    let rng_key = RngKey::default();
    let train_once = best(|| {
        let (_, saved) = gates.forward_train(input.reading(&["y"]), rng_key)?;
        gates.backward(&saved, &dy, false).map(drop)
    })?;
    let train_each = best(|| {
        let calls = gates.layers().iter();
        let saved = calls.map(|layer| Ok(layer.forward_train(input.reading(&["y"]), rng_key)?.1));
        let saved = saved.collect::<Result<Vec<_>, EngineError>>()?;
        gates.backward(&saved.into(), &dy, false).map(drop)
    })?;
    Ok([once, each, train_once, train_each])
}

/// Returns the shortest of several runs, after a warm-up run that allocates memory.
fn best(mut run: impl FnMut() -> Result<(), EngineError>) -> Result<Duration, EngineError> {
    run()?;
    let mut shortest = Duration::MAX;
    for _ in 0..REPEATS {
        let start = Instant::now();
        run()?;
        shortest = shortest.min(start.elapsed());
    }
    Ok(shortest)
}

/// Returns the weights of a router, or those that all routers share.
fn weights(spec: &LayerSpec, random: &mut Random, router: bool) -> Tensors<'static> {
    let mut weights = Tensors::new();
    let tensors = canonical_tensors(spec).into_iter();
    for tensor in tensors.filter(|tensor| tensor.name.starts_with("router.") == router) {
        let values = floats(random, tensor.shape.iter().product());
        weights.insert(&tensor.name, Tensor::owned(&tensor.shape, values));
    }
    weights
}

fn floats(random: &mut Random, count: usize) -> Vec<f32> {
    random
        .vec(count)
        .into_iter()
        .map(|v| 0.1 * v as f32)
        .collect()
}
