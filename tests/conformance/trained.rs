//! A layer trained once: what both passes give, and what the reference gives.

use super::Case;
use super::case::{floats, host, ints};
use super::compare::{close, equal};
use moesaic::reference::{self, Random, rng::Draw};
use moesaic::spec::{LayerSpec, gradient_dtype};
use moesaic::{Engine, Layer, Recompute, RngKey, Training};
use std::collections::BTreeMap;

/// `y`, `dx`, `grad.topk_weights`, and gradients by the names of weights.
pub type Results = BTreeMap<String, Vec<f64>>;

impl Case {
    /// The layer on an engine, able to run backward.
    pub fn training_layer(&self, engine: &Engine, recompute: Recompute) -> Layer {
        let weights = self.host_weights();
        engine
            .training_layer(&self.spec, &weights, Training { recompute })
            .unwrap_or_else(|e| panic!("{}: {e}", self.what("the plan")))
    }

    /// A gradient of the output `[T, d_out]`, in its element type.
    pub fn dy(&self, seed: u64) -> Vec<f64> {
        let values = Random::new(seed).vec(self.input.tokens * self.spec.output_dim());
        let round = |v: f64| reference::round_to(self.spec.precision.activations, v);
        values.into_iter().map(round).collect()
    }

    /// Forward, then a backward pass per element of `accumulate`; and the ids
    /// of the experts that were chosen.
    pub fn train(&self, layer: &Layer, dy: &[f64], accumulate: &[bool]) -> (Results, Vec<i32>) {
        let passed =
            layer.forward_train(self.input().reading(&["y", "topk_ids"]), RngKey::default());
        let (output, saved) = passed.unwrap_or_else(|e| panic!("{}: {e}", self.what("forward")));
        let mut all = Results::from([("y".to_string(), floats(&output, "y"))]);
        let shape = [self.input.tokens, self.spec.output_dim()];
        let dy = host(self.spec.precision.activations, &shape, dy);
        for &accumulate in accumulate {
            let back = layer.backward(&saved, &dy, accumulate);
            let back = back.unwrap_or_else(|e| panic!("{}: {e}", self.what("backward")));
            for name in ["dx", "grad.topk_weights"] {
                all.insert(name.to_string(), floats(&back, name));
            }
        }
        for (name, gradient) in layer.gradients().expect("the layer trains") {
            all.insert(name, gradient.to_f32().into_iter().map(f64::from).collect());
        }
        (all, ints(&output, "topk_ids"))
    }

    /// The input of a training call with RNG key of zero, where it has none.
    pub fn drawing(&self) -> reference::Input {
        reference::Input {
            draw: Some(self.input.draw.unwrap_or_default()),
            ..self.input.clone()
        }
    }

    /// The same in f64.
    pub fn trained(&self, dy: &[f64]) -> Results {
        let input = self.drawing();
        let y = reference::forward(&self.spec, &self.weights, &input).y;
        let back = reference::backward(&self.spec, &self.weights, &input, dy);
        let named = [
            ("y", y),
            ("dx", back.x),
            ("grad.topk_weights", back.topk_weights),
        ];
        let mut all = Results::from(named.map(|(name, values)| (name.to_string(), values)));
        all.extend(back.weights.into_iter().map(|(name, t)| (name, t.data)));
        all
    }

    /// The experts that the reference chooses.
    pub fn chosen(&self) -> Vec<i32> {
        let gate = reference::gate(&self.spec, &self.weights, &self.drawing());
        gate.decision.ids
    }
}

pub const RNG_KEY: RngKey = RngKey {
    seed: 1 << 40 | 7,
    step: 3,
    layer: 2,
    first_token: 11,
};

/// The RNG key as the reference takes them.
pub fn draw(rng_key: RngKey) -> Draw {
    Draw {
        seed: rng_key.seed,
        step: rng_key.step,
        layer: rng_key.layer as u32,
        first_token: rng_key.first_token,
    }
}

impl Case {
    /// Trains once and holds every gradient against the reference.
    pub fn check_training(&self, engine: &Engine, recompute: Recompute) {
        self.check_gradients(&self.training_layer(engine, recompute));
    }

    /// The same with a layer that was made of this case.
    pub fn check_gradients(&self, layer: &Layer) {
        let dy = self.dy(0xd7);
        let (found, ids) = self.train(layer, &dy, &[false]);
        // Gradients of two different choices cannot be compared.
        equal(&self.what("ids"), &ids, &self.chosen());
        let expected = self.trained(&dy);
        for (name, found) in found.iter().filter(|(name, _)| *name != "y") {
            let what = match layer.gradient(name) {
                Ok(_) => self.what(&format!("grad.{name}")),
                Err(_) => self.what(name),
            };
            let stored = gradient_dtype(&self.spec, name).unit_roundoff();
            close(&what, found, &expected[name], self.rounding() + stored);
        }
    }

    /// Pre-activations, hidden, their gradients, rows and dx are rounded once
    /// each; sums of products in f32 add a little.
    fn rounding(&self) -> f64 {
        4e-5 + 16.0 * self.spec.precision.activations.unit_roundoff()
    }
}

/// Holds every gradient against the reference; `false` where the router's f32
/// scores chose another expert than f64 does, so that nothing can be compared.
pub fn agrees(case: &Case, engine: &Engine) -> bool {
    let layer = case.training_layer(engine, Recompute::None);
    let (found, ids) = case.train(&layer, &case.dy(77), &[false]);
    if ids != case.chosen() {
        return false;
    }
    let mut want = case.trained(&case.dy(77));
    want.remove("y");
    let largest = want
        .values()
        .flatten()
        .filter(|v| v.is_finite())
        .fold(0.0, |most: f64, v| most.max(v.abs()));
    for (name, want) in &want {
        let what = || format!("gradient `{name}` of {}", case.describe());
        match found.get(name) {
            Some(found) => near(&what(), &case.spec, found, want, largest),
            None => assert!(want.iter().all(|v| *v == 0.0), "no {}", what()),
        }
    }
    true
}

/// Errors in root mean square, relative to the tensor's. Pre-activations,
/// hidden, dout, dgate, dup and drows are each rounded once to storage; a sum
/// that cancels keeps the errors of its terms. NaN only where NaN is due.
pub fn near(what: &str, spec: &LayerSpec, found: &[f64], want: &[f64], largest: f64) {
    assert_eq!(found.len(), want.len(), "{what}: length");
    let wrong = (0..found.len()).find(|&i| found[i].is_nan() != want[i].is_nan());
    if let Some(i) = wrong {
        panic!("{what}\nelement {i} is {}, expected {}", found[i], want[i]);
    }
    let rms = |values: &mut dyn Iterator<Item = f64>| {
        let squares = values.filter(|v| !v.is_nan()).map(|v| v * v);
        (squares.sum::<f64>() / want.len().max(1) as f64).sqrt()
    };
    let error = rms(&mut found.iter().zip(want).map(|(f, w)| f - w));
    let size = rms(&mut want.iter().copied());
    let rounding = if spec.precision.tf32 {
        2f64.powi(-11) // the factors' own
    } else {
        spec.precision.activations.unit_roundoff()
    };
    // Of a rank's sums, then of those of all.
    let stored = 2.0 * spec.precision.expert_gradients.unit_roundoff();
    let tolerance = (5e-5 + 8.0 * rounding + stored) * size + (1e-6 + rounding) * largest;
    assert!(
        error <= tolerance,
        "{what}\nerror {error:e} of {size:e} is more than {tolerance:e}"
    );
}
