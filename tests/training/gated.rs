//! A gate in Rust before a layer with an external router: a linear one is the layer's own linear
//! router, on one process and over ranks.

use crate::conformance::mesh::{mesh, on_ranks};
use moesaic::reference;
use moesaic::spec::canonical_tensors;
use moesaic::train::{Gate, GateBackward, GatedLayer, TrainError};
use moesaic::{Engine, Input, LayerOptions, LayerSpec, RngKey, Tensor, Tensors, Training};

const EXPERTS: usize = 6;
const WIDTH: usize = 8;
const TOKENS: usize = 12;

fn spec(router: &str) -> LayerSpec {
    let shape = "shape = { model_dim = 8, hidden_dim = 6, experts = 6, top_k = 2 }";
    let text = format!("{shape}\nrouter = {router}");
    LayerSpec::from_toml(&text).unwrap_or_else(|e| panic!("{e}"))
}

fn own_router() -> LayerSpec {
    spec("{ score = 'softmax-selected' }")
}

fn weights() -> Tensors<'static> {
    let spec = own_router();
    let drawn = reference::Weights::random(&spec, 5).rounded(&spec);
    let tensors = canonical_tensors(&spec).into_iter().map(|tensor| {
        let values = drawn.get(&tensor.name).data.iter().map(|v| *v as f32);
        let values = Tensor::owned(&tensor.shape, values.collect());
        (tensor.name, values)
    });
    tensors.collect()
}

/// A linear gate: `x · Wᵀ`.
struct Linear {
    weight: Vec<f32>,
    gradient: Vec<f32>,
}

impl Linear {
    fn new() -> Linear {
        Linear {
            weight: weights()["router.weight"].to_f32().to_vec(),
            gradient: vec![0.0; EXPERTS * WIDTH],
        }
    }
}

impl Gate for Linear {
    fn logits(&self, x: &[f32]) -> Vec<f32> {
        let rows = x.chunks(WIDTH);
        let dot = |row: &[f32], w: &[f32]| row.iter().zip(w).map(|(x, w)| x * w).sum();
        rows.flat_map(|row| self.weight.chunks(WIDTH).map(move |w| dot(row, w)))
            .collect()
    }

    fn backward(&mut self, call: &GateBackward<'_>, dx: &mut [f32]) {
        if !call.accumulate {
            self.gradient.fill(0.0);
        }
        let rows = call.x.chunks(WIDTH).zip(call.dlogits.chunks(EXPERTS));
        for ((x, dlogits), dx) in rows.zip(dx.chunks_mut(WIDTH)) {
            for (expert, dlogit) in dlogits.iter().enumerate() {
                for at in 0..WIDTH {
                    self.gradient[expert * WIDTH + at] += dlogit * x[at];
                    dx[at] += dlogit * self.weight[expert * WIDTH + at];
                }
            }
        }
    }
}

fn x() -> Vec<f32> {
    let values = reference::Random::new(9).vec(TOKENS * WIDTH);
    values.into_iter().map(|v| v as f32).collect()
}

/// `y`, `dx`, and the gradient of the router.
type Found = [Vec<f32>; 3];

/// Runs the gated layer for some of the tokens.
fn gated(engine: &Engine, options: LayerOptions<'_>, x: &[f32]) -> Result<Found, TrainError> {
    let mut weights = weights();
    weights.remove("router.weight");
    let spec = spec("{ kind = 'external' }");
    let options = options.training(Training::default());
    let layer = engine.layer_with(&spec, &weights, options)?;
    let mut layer = GatedLayer::new(layer, Linear::new())?;
    let input = Input::new(x.len() / WIDTH, x);
    let evaluated = layer.forward(input.reading(&["y"]))?;
    let (output, saved) = layer.forward_train(&input, RngKey::default())?;
    assert_eq!(evaluated.y().data, output.y().data);
    let dy = Tensor::new(&[input.tokens, WIDTH], x);
    layer.backward(&saved, &dy, false)?;
    let dx = layer.backward(&saved, &dy, true)?; // the gradient of the gate is twice as large then
    let gradient = layer.gate().gradient.iter().map(|g| g / 2.0).collect();
    Ok([output.y().to_f32().to_vec(), dx.to_f32().to_vec(), gradient])
}

/// Runs the layer with its own router.
fn expected(engine: &Engine) -> Found {
    let layer = engine.training_layer(&own_router(), &weights(), Training::default());
    let (layer, x) = (layer.unwrap(), x());
    let call = layer.forward_train(&Input::new(TOKENS, &x), RngKey::default());
    let (output, saved) = call.unwrap();
    let dy = Tensor::new(&[TOKENS, WIDTH], &x);
    let back = layer.backward(&saved, &dy, false).unwrap();
    let gradient = layer.gradient("router.weight").unwrap();
    [output.y(), back.get("dx").unwrap(), &gradient].map(|tensor| tensor.to_f32().to_vec())
}

fn check(found: &Found, expected: &Found) {
    for (found, expected) in found.iter().zip(expected) {
        assert_eq!(found.len(), expected.len());
        for (found, expected) in found.iter().zip(expected) {
            assert!((found - expected).abs() < 1e-4, "{found}, not {expected}");
        }
    }
}

#[test]
fn a_linear_gate_is_the_linear_router() {
    let engine = Engine::cpu().expect("a C compiler");
    let found = gated(&engine, LayerOptions::default(), &x()).unwrap();
    check(&found, &expected(&engine));
}

#[test]
fn a_gate_routes_over_ranks() {
    let engine = Engine::cpu().expect("a C compiler");
    let all = x();
    let ranks = on_ranks(&engine, mesh(2, 1, 1), |mesh| {
        // Other numbers of tokens on each rank.
        let own = [&all[..5 * WIDTH], &all[5 * WIDTH..]][mesh.rank()];
        gated(&engine, LayerOptions::over(mesh), own).unwrap()
    });
    let [first, second] = ranks.try_into().unwrap();
    let sum = first[2].iter().zip(&second[2]).map(|(a, b)| a + b);
    let found = [
        [&first[0][..], &second[0]].concat(),
        [&first[1][..], &second[1]].concat(),
        sum.collect(),
    ];
    check(&found, &expected(&engine));
}

#[test]
fn a_layer_with_a_router_takes_no_gate() {
    let engine = Engine::cpu().expect("a C compiler");
    let layer = engine.layer(&own_router(), &weights()).unwrap();
    let refused = GatedLayer::new(layer, Linear::new()).err().unwrap();
    assert!(refused.to_string().contains("external"), "{refused}");
}
