//! Gradients of the whole layer, by the chain rule over the forward's loops.
//!
//! The loss is `Σ y · dy + Σ coefficient · loss`. Everything that chooses (ids, places, drops,
//! clamps, masks) is constant; everything that weights is differentiated.

mod expert;
mod gate;

use crate::expert::{Choices, project_latent, residual_weights, transposed_latent};
use crate::formula::WeightGradients;
use crate::math::{add, dot};
use crate::place::{AssignmentPlaces, kept};
use crate::row_norm::{RowNorm, through};
use crate::{Decision, GateOutput, Input, Tensor, Weights, gate as decide, scan};
use moesaic_spec::{LayerSpec, WeightSite, canonical_tensors};
use std::collections::BTreeMap;

/// The gradients of one call of the layer.
#[derive(Clone, Debug, PartialEq)]
pub struct Gradients {
    /// The gradient of x `[T, d]`.
    pub x: Vec<f64>,
    /// The gradient of the gate's weights `[T, K]` before dropping, which goes to the caller of an
    /// external router.
    pub topk_weights: Vec<f64>,
    /// The gradient of the logits `[T, E + identity]`; empty without logits.
    pub logits: Vec<f64>,
    /// The gradient of every float weight by canonical name; zero for a tensor that only chooses.
    pub weights: BTreeMap<String, Tensor>,
}

/// A running backward pass.
struct Pass<'a> {
    spec: &'a LayerSpec,
    weights: &'a Weights,
    input: &'a Input,
    gradients: Gradients,
}

/// Returns the gradients of `Σ y · dy` and of the auxiliary losses times their coefficients; `dy`
/// is `[T, d_out]`.
pub fn backward(spec: &LayerSpec, weights: &Weights, input: &Input, dy: &[f64]) -> Gradients {
    let gate = decide(spec, weights, input);
    let decision = &gate.decision;
    let placed = scan(spec, decision, input);
    let mut pass = Pass::new(spec, weights, input);
    let mut weighed = pass.combine(decision, &placed, dy);
    pass.undo_dropping(decision, &placed, &mut weighed);
    pass.gradients.topk_weights = weighed;
    pass.shared(dy);
    pass.gate(&gate);
    pass.gradients
}

/// Returns the part of [`backward`] that flows through the router: from gradients of the gate's
/// weights `[T, K]`, and from the auxiliary losses.
pub fn router_backward(
    spec: &LayerSpec,
    weights: &Weights,
    input: &Input,
    gate: &GateOutput,
    dweights: &[f64],
) -> Gradients {
    let mut pass = Pass::new(spec, weights, input);
    pass.gradients.topk_weights = dweights.to_vec();
    pass.gate(gate);
    pass.gradients
}

impl<'a> Pass<'a> {
    fn new(spec: &'a LayerSpec, weights: &'a Weights, input: &'a Input) -> Pass<'a> {
        let zero = |shape: Vec<usize>| Tensor {
            data: vec![0.0; shape.iter().product()],
            shape,
        };
        let tensors = canonical_tensors(spec).into_iter();
        let floats = tensors.filter(|tensor| tensor.dtype.is_float());
        Pass {
            spec,
            weights,
            input,
            gradients: Gradients {
                x: vec![0.0; input.x.len()],
                topk_weights: Vec::new(),
                logits: Vec::new(),
                weights: floats.map(|t| (t.name, zero(t.shape))).collect(),
            },
        }
    }

    /// Returns the gradient of a tensor.
    fn of(&mut self, name: &str) -> &mut [f64] {
        self.of_weights().into_of(name)
    }

    /// Returns the weights with their gradients.
    fn of_weights(&mut self) -> WeightGradients<'_> {
        WeightGradients {
            weights: self.weights,
            sums: &mut self.gradients.weights,
        }
    }

    fn token(&self, t: usize) -> &'a [f64] {
        let d = self.spec.shape.model_dim;
        &self.input.x[t * d..(t + 1) * d]
    }

    fn add_to_token(&mut self, t: usize, row: &[f64], factor: f64) {
        let d = self.spec.shape.model_dim;
        add(&mut self.gradients.x[t * d..(t + 1) * d], row, factor);
    }

    /// Runs the experts and their inputs backward. Returns the gradient of the weights that the
    /// combination used `[T, K]`.
    fn combine(&mut self, decision: &Decision, placed: &AssignmentPlaces, dy: &[f64]) -> Vec<f64> {
        let (k, out) = (self.spec.shape.top_k, self.spec.output_dim());
        let mut weighed = vec![0.0; decision.ids.len()];
        for t in 0..self.input.tokens {
            let routed = Choices::of(t, k, &decision.ids, placed);
            let dweights = self.routed(t, &routed, &dy[t * out..(t + 1) * out]);
            weighed[t * k..(t + 1) * k].copy_from_slice(&dweights);
        }
        weighed
    }

    /// Runs the routed experts of a token and the projections around them backward. Returns the
    /// gradients of their weights.
    fn routed(&mut self, t: usize, routed: &Choices<'_>, dy: &[f64]) -> Vec<f64> {
        let (spec, weights, x) = (self.spec, self.weights, self.token(t));
        let shares = residual_weights(spec, weights, x);
        let whole = dy;
        let dy: Vec<f64> = dy.iter().map(|v| shares[0] * v).collect();
        let projected = project_latent(spec, weights, "down", x);
        let read = through(RowNorm::of_input(spec), weights, projected.clone());
        let sum = routed.sum(spec, weights, &read);
        let dnormed = transposed_latent(spec, weights, &dy);
        let dsum = self.norm_back(RowNorm::of_sum(spec), &sum, dnormed);
        let mut row = Row {
            dx: vec![0.0; read.len()],
            x: read,
            dsum,
        };
        let slots = 0..routed.ids.len();
        let of = |slot: usize| match routed.ids[slot] {
            id if id >= 0 && kept(spec, id, routed.locations[slot]) => {
                self.slot(id as usize, routed.weights[slot], &mut row)
            }
            _ => 0.0,
        };
        let dweights = slots.map(of).collect();
        let normed = through(RowNorm::of_sum(spec), weights, sum);
        let raised = project_latent(spec, weights, "up", &normed);
        self.lean(t, -dot(&raised, whole) * shares[0] * shares[1]);
        self.project_latent_back("up", &normed, &dy);
        // Padding must add nothing, even if x is NaN.
        let norm = RowNorm::of_input(spec).filter(|_| !all_zero(&row.dx));
        let dprojected = self.norm_back(norm, &projected, row.dx);
        let dx = self.project_latent_back("down", x, &dprojected);
        self.add_to_token(t, &dx, 1.0);
        dweights
    }

    /// Runs a norm backward: adds the gradient of its weight, returns that of the row. Without a norm
    /// the gradient stays.
    fn norm_back(&mut self, norm: Option<RowNorm>, x: &[f64], dout: Vec<f64>) -> Vec<f64> {
        let Some(norm) = norm else { return dout };
        let gradients = norm.back(self.weights, x, &dout);
        add(self.of(norm.weight), &gradients.weight, 1.0);
        gradients.x
    }

    /// Runs one assignment backward. Returns the gradient of its weight.
    fn slot(&mut self, expert: usize, weight: f64, row: &mut Row) -> f64 {
        if self.spec.router.weight_on == WeightSite::Input {
            let scaled: Vec<f64> = row.x.iter().map(|v| weight * v).collect();
            let (_, dx) = self.expert(expert, &scaled, &row.dsum);
            add(&mut row.dx, &dx, weight);
            return dot(&dx, &row.x);
        }
        let dout: Vec<f64> = row.dsum.iter().map(|v| weight * v).collect();
        let (out, dx) = self.expert(expert, &row.x, &dout);
        add(&mut row.dx, &dx, 1.0);
        dot(&out, &row.dsum)
    }

    /// Turns gradients of weights after dropping into those before it, in place.
    fn undo_dropping(&self, decision: &Decision, placed: &AssignmentPlaces, weighed: &mut [f64]) {
        if !self.spec.capacity.renormalize_after_drop {
            return;
        }
        let k = self.spec.shape.top_k;
        for first in (0..weighed.len()).step_by(k) {
            let live: Vec<usize> = (first..first + k)
                .filter(|&slot| {
                    let id = decision.ids[slot];
                    id >= 0 && kept(self.spec, id, placed.locations[slot])
                })
                .collect();
            let sum: f64 = live.iter().map(|&slot| decision.weights[slot]).sum();
            if sum == 0.0 {
                continue;
            }
            // w' = scale · w / Σw.
            let scale = self.spec.router.scale;
            let mean: f64 = live
                .iter()
                .map(|&slot| weighed[slot] * decision.weights[slot] / sum)
                .sum();
            for slot in live {
                weighed[slot] = scale / sum * (weighed[slot] - mean);
            }
        }
    }
}

/// The input of a token's experts with its gradient, and the gradient of their sum.
struct Row {
    x: Vec<f64>,
    dx: Vec<f64>,
    dsum: Vec<f64>,
}

/// Returns true if a row of gradients adds nothing to a sum over tokens. NaN is not zero.
fn all_zero(row: &[f64]) -> bool {
    row.iter().all(|v| *v == 0.0)
}
