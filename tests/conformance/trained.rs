//! A layer trained once: what both passes give, and what the reference gives.

use super::Case;
use super::case::{floats, host, ints};
use moesaic::reference::{self, Random};
use moesaic::{Counters, Engine, Layer, Recompute, Training};
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
        let passed = layer.forward_train(&self.input(), &["y", "topk_ids"], Counters::default());
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

    /// The input of a training call with counters of zero, where it has none.
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
