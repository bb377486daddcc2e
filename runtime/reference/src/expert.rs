//! Stems `grouped_gemm` and `combine`: the experts, and the weighted sum of their outputs.

use crate::activation::phi;
use crate::math::{dot, sigmoid};
use crate::place::kept;
use crate::row_norm::{RowNorm, through};
use crate::rows::QuantizedRows;
use crate::{AssignmentPlaces, Input, Weights};
use moesaic_spec::{Biases, ClampSite, ExpertForm, Experts, LayerSpec, SharedGate, WeightSite};

/// One set of expert weights: a routed expert or a shared one.
struct Parts<'a> {
    weights: &'a Weights,
    prefix: String,
    /// Index into the first dimension of stacked tensors.
    index: Option<usize>,
    biases: Biases,
    /// The form and activation.
    experts: Experts,
    /// The quantization of what gate and up, and down, are multiplied by.
    rows: [QuantizedRows; 2],
}

impl Parts<'_> {
    /// Returns `W · x (+ b)` of one projection.
    fn project(&self, part: &str, rows: usize, x: &[f64]) -> Vec<f64> {
        let matrix = self.slice(part, "weight");
        assert_eq!(
            matrix.len(),
            rows * x.len(),
            "{}.{part}.weight",
            self.prefix
        );
        let mut out: Vec<f64> = matrix.chunks(x.len()).map(|row| dot(row, x)).collect();
        if biased(self.biases, part) {
            out.iter_mut()
                .zip(self.slice(part, "bias"))
                .for_each(|(o, b)| *o += b);
        }
        out
    }

    fn slice(&self, part: &str, what: &str) -> &[f64] {
        let tensor = self.weights.get(&format!("{}.{part}.{what}", self.prefix));
        match self.index {
            Some(index) => tensor.outer(index),
            None => &tensor.data,
        }
    }

    fn run(&self, hidden: usize, output: usize, x: &[f64]) -> Vec<f64> {
        let [of_up, of_down] = &self.rows;
        let x = &of_up.of(x);
        let up = self.project("up", hidden, x);
        let inner: Vec<f64> = if self.experts.form == ExpertForm::Gated {
            let gate = self.project("gate", hidden, x);
            gate.iter()
                .zip(&up)
                .map(|(&g, &u)| activate(&self.experts, Some(g), u))
                .collect()
        } else {
            up.iter()
                .map(|&u| activate(&self.experts, None, u))
                .collect()
        };
        self.project("down", output, &of_down.of(&inner))
    }
}

/// Returns true if the projection `part` has a bias.
pub fn biased(biases: Biases, part: &str) -> bool {
    match part {
        "down" => biases.down(),
        _ => biases.up(),
    }
}

/// Returns `φ(gate) · up` for a gated expert, `φ(up)` for a plain one, with clamps, soft cap and
/// offset.
pub fn activate(experts: &Experts, gate: Option<f64>, up: f64) -> f64 {
    match gate {
        Some(gate) => limited_gate(experts, gate).value * limited_up(experts, up).value,
        None => phi(experts, up).0,
    }
}

/// A value and its derivative.
pub(crate) struct Sloped {
    pub value: f64,
    pub slope: f64,
}

/// Returns `φ(gate)` with the clamp on its side. A clamp in effect has slope zero.
pub(crate) fn limited_gate(experts: &Experts, gate: f64) -> Sloped {
    let limit = experts.clamp.unwrap_or(f64::INFINITY);
    let (before, after) = match experts.clamp_on {
        ClampSite::Input => (limit, f64::INFINITY),
        ClampSite::Output => (f64::INFINITY, limit),
    };
    let (value, slope) = phi(experts, below(gate, before));
    // At the limit itself there still is a slope.
    let held = gate > before || value > after;
    Sloped {
        value: below(value, after),
        slope: if held { 0.0 } else { slope },
    }
}

/// Returns `up` clamped, softly capped, and with its offset. A clamp in effect has slope zero.
pub(crate) fn limited_up(experts: &Experts, up: f64) -> Sloped {
    let limit = experts.clamp.unwrap_or(f64::INFINITY);
    let clamped = -below(-below(up, limit), limit);
    let (value, slope) = match experts.up_softcap {
        None => (clamped, 1.0),
        Some(cap) => {
            let tanh = (clamped / cap).tanh();
            (cap * tanh, 1.0 - tanh * tanh)
        }
    };
    Sloped {
        value: value + experts.up_offset,
        slope: if up.abs() > limit { 0.0 } else { slope },
    }
}

/// Returns the lower of two numbers; a NaN stays, which `min` would swallow.
fn below(value: f64, limit: f64) -> f64 {
    if value > limit { limit } else { value }
}

/// Runs one row through one routed expert, unweighted, and normalises the output where the spec
/// says so. Identity experts return the row, zero experts return zeros.
pub fn expert_row(spec: &LayerSpec, weights: &Weights, expert: usize, x: &[f64]) -> Vec<f64> {
    let out = plain_row(spec, weights, expert, x);
    let norm = RowNorm::of_output(spec).filter(|_| expert < spec.shape.experts);
    through(norm, weights, out)
}

/// Does the same as [`expert_row`], without a norm.
pub(crate) fn plain_row(spec: &LayerSpec, weights: &Weights, expert: usize, x: &[f64]) -> Vec<f64> {
    if expert >= spec.shape.experts + spec.experts.identity {
        return vec![0.0; spec.expert_output_dim()];
    }
    if expert >= spec.shape.experts {
        return x.to_vec();
    }
    let parts = Parts {
        weights,
        prefix: "experts".to_string(),
        index: Some(expert),
        biases: spec.experts.bias,
        experts: spec.experts.clone(),
        rows: QuantizedRows::routed(spec),
    };
    parts.run(spec.shape.hidden_dim, spec.expert_output_dim(), x)
}

/// Runs one row through one shared expert, with its gate.
pub fn shared_row(spec: &LayerSpec, weights: &Weights, index: usize, x: &[f64]) -> Vec<f64> {
    let shared = &spec.shared[index];
    let prefix = format!("shared.{index}");
    let factor = match shared.gate {
        SharedGate::None => 1.0,
        SharedGate::Residual => residual_weights(spec, weights, x)[1],
        SharedGate::Sigmoid => sigmoid(dot(
            &weights.get(&format!("{prefix}.router.weight")).data,
            x,
        )),
    };
    let parts = Parts {
        weights,
        prefix,
        index: None,
        biases: spec.shared_bias(index),
        experts: spec.shared_experts(index),
        rows: [QuantizedRows::NUMBERS; 2],
    };
    let out = parts.run(shared.hidden_dim, spec.output_dim(), x);
    out.iter().map(|v| factor * v).collect()
}

/// Returns the weights of the routed experts' sum and of the residual shared expert: the softmax of
/// its two logits, or 1 and 0 without one.
pub(crate) fn residual_weights(spec: &LayerSpec, weights: &Weights, x: &[f64]) -> [f64; 2] {
    let Some(index) = spec.residual() else {
        return [1.0, 0.0];
    };
    let prefix = format!("shared.{index}.router");
    let bias = &weights.get(&format!("{prefix}.bias")).data;
    let rows = weights.get(&format!("{prefix}.weight"));
    let [first, second] = [0, 1].map(|i| dot(rows.outer(i), x) + bias[i]);
    [sigmoid(first - second), sigmoid(second - first)]
}

/// Returns `W · x (+ b)` of the projection before (`down`) or after (`up`) the routed experts, or x
/// itself without one.
pub(crate) fn project_latent(
    spec: &LayerSpec,
    weights: &Weights,
    part: &str,
    x: &[f64],
) -> Vec<f64> {
    let Some(latent) = &spec.latent else {
        return x.to_vec();
    };
    let matrix = &weights.get(&format!("latent.{part}.weight")).data;
    let mut out: Vec<f64> = matrix.chunks(x.len()).map(|row| dot(row, x)).collect();
    if latent.bias {
        add(&mut out, &weights.get(&format!("latent.{part}.bias")).data);
    }
    out
}

/// Returns the gradient of the input of the projection after the routed experts.
pub(crate) fn transposed_latent(spec: &LayerSpec, weights: &Weights, dy: &[f64]) -> Vec<f64> {
    let Some(latent) = &spec.latent else {
        return dy.to_vec();
    };
    let matrix = &weights.get("latent.up.weight").data;
    let of = |i: usize| {
        dy.iter()
            .enumerate()
            .map(|(o, d)| matrix[o * latent.dim + i] * d)
            .sum()
    };
    (0..latent.dim).map(of).collect()
}

/// Returns the output `[T, d_out]`: weighted expert outputs in slot order, then the shared experts.
/// A dropped or masked slot adds nothing, whatever its expert would have returned.
pub fn combine(
    spec: &LayerSpec,
    weights: &Weights,
    input: &Input,
    topk_ids: &[i32],
    placed: &AssignmentPlaces,
) -> Vec<f64> {
    let (d, k) = (spec.shape.model_dim, spec.shape.top_k);
    let mut y = Vec::with_capacity(input.tokens * spec.output_dim());
    for t in 0..input.tokens {
        let x = &input.x[t * d..(t + 1) * d];
        let choices = Choices::of(t, k, topk_ids, placed);
        let read = project_latent(spec, weights, "down", x);
        let read = through(RowNorm::of_input(spec), weights, read);
        let sum = choices.sum(spec, weights, &read);
        let sum = through(RowNorm::of_sum(spec), weights, sum);
        let mut sum = project_latent(spec, weights, "up", &sum);
        let factor = residual_weights(spec, weights, x)[0];
        sum.iter_mut().for_each(|v| *v *= factor);
        for index in 0..spec.shared.len() {
            add(&mut sum, &shared_row(spec, weights, index, x));
        }
        y.extend(sum);
    }
    y
}

/// A token's choices and what became of them.
pub(crate) struct Choices<'a> {
    pub ids: &'a [i32],
    pub locations: &'a [i32],
    pub weights: &'a [f64],
}

impl<'a> Choices<'a> {
    /// Returns those of token `t`.
    pub fn of(t: usize, k: usize, ids: &'a [i32], placed: &'a AssignmentPlaces) -> Choices<'a> {
        let slots = t * k..(t + 1) * k;
        Choices {
            ids: &ids[slots.clone()],
            locations: &placed.locations[slots.clone()],
            weights: &placed.weights[slots],
        }
    }

    /// Returns the weighted sum of the experts' rows for `x`, in slot order.
    pub fn sum(&self, spec: &LayerSpec, weights: &Weights, x: &[f64]) -> Vec<f64> {
        let mut sum = vec![0.0; spec.expert_output_dim()];
        let reaches = |&slot: &usize| kept(spec, self.ids[slot], self.locations[slot]);
        for slot in (0..self.ids.len()).filter(reaches) {
            let (expert, weight) = (self.ids[slot] as usize, self.weights[slot]);
            add(&mut sum, &weighted_row(spec, weights, expert, weight, x));
        }
        sum
    }
}

/// Runs one row through one routed expert, with its weight at the place that the spec chooses.
fn weighted_row(
    spec: &LayerSpec,
    weights: &Weights,
    expert: usize,
    weight: f64,
    x: &[f64],
) -> Vec<f64> {
    match spec.router.weight_on {
        WeightSite::Input => {
            let scaled: Vec<f64> = x.iter().map(|v| weight * v).collect();
            expert_row(spec, weights, expert, &scaled)
        }
        // A weight on the activation also weights the output bias, so both give the same value.
        WeightSite::Output | WeightSite::Activation => expert_row(spec, weights, expert, x)
            .iter()
            .map(|v| weight * v)
            .collect(),
    }
}

fn add(sum: &mut [f64], row: &[f64]) {
    assert_eq!(sum.len(), row.len());
    sum.iter_mut().zip(row).for_each(|(s, v)| *s += v);
}
