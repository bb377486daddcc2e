//! Gradients of experts: two or three GEMVs and an activation.

use super::{Pass, add, all_zero, dot};
use crate::activate;
use crate::activation::phi;
use crate::expert::{biased, limited_gate, limited_up, plain_row, residual_weights};
use crate::math::sigmoid;
use crate::row_norm::RowNorm;
use moesaic_spec::{Biases, Experts, SharedGate};

/// One set of expert weights.
#[derive(Clone)]
struct Set {
    prefix: String,
    /// Index into the first dimension of stacked tensors.
    index: usize,
    hidden: usize,
    biases: Biases,
    /// The form and activation.
    experts: Experts,
}

/// Returns the elements of one expert in a stacked tensor.
fn range(set: &Set, rows: usize, columns: usize) -> std::ops::Range<usize> {
    let size = rows * columns;
    set.index * size..(set.index + 1) * size
}

impl Pass<'_> {
    /// Returns the output of a routed expert for `x`, normalised where the spec says so, and the gradient of `x`. Identity experts
    /// return their input, zero experts return zeros.
    pub(super) fn expert(
        &mut self,
        expert: usize,
        x: &[f64],
        dout: &[f64],
    ) -> (Vec<f64>, Vec<f64>) {
        if expert >= self.spec.shape.experts + self.spec.experts.identity {
            return (vec![0.0; dout.len()], vec![0.0; x.len()]);
        }
        if expert >= self.spec.shape.experts {
            return (x.to_vec(), dout.to_vec());
        }
        let set = Set {
            prefix: "experts".to_string(),
            index: expert,
            hidden: self.spec.shape.hidden_dim,
            biases: self.spec.experts.bias,
            experts: self.spec.experts.clone(),
        };
        let Some(norm) = RowNorm::of_output(self.spec) else {
            return self.set(&set, x, dout);
        };
        let out = plain_row(self.spec, self.weights, expert, x);
        let dplain = self.norm_back(Some(norm), &out, dout.to_vec());
        let (_, dx) = self.set(&set, x, &dplain);
        (norm.of(self.weights, &out), dx)
    }

    /// Runs the shared experts of every token backward.
    pub(super) fn shared(&mut self, dy: &[f64]) {
        let width = self.spec.output_dim();
        for index in 0..self.spec.shared.len() {
            for t in 0..self.input.tokens {
                self.shared_row(index, t, &dy[t * width..(t + 1) * width]);
            }
        }
    }

    fn shared_row(&mut self, index: usize, t: usize, dy: &[f64]) {
        let (shared, x) = (&self.spec.shared[index], self.token(t));
        let set = Set {
            prefix: format!("shared.{index}"),
            index: 0,
            hidden: shared.hidden_dim,
            biases: self.spec.shared_bias(index),
            experts: self.spec.shared_experts(index),
        };
        if shared.gate == SharedGate::None {
            let (_, dx) = self.set(&set, x, dy);
            return self.add_to_token(t, &dx, 1.0);
        }
        // The second logit weights this expert; the first one is handled by `lean`.
        if shared.gate == SharedGate::Residual {
            let [rest, factor] = residual_weights(self.spec, self.weights, x);
            let dout: Vec<f64> = dy.iter().map(|v| factor * v).collect();
            let (out, dx) = self.set(&set, x, &dout);
            self.add_to_token(t, &dx, 1.0);
            return self.lean(t, dot(&out, dy) * factor * rest);
        }
        let name = format!("{}.router.weight", set.prefix);
        let router = self.weights.get(&name).data.clone();
        let factor = sigmoid(dot(&router, x));
        let dout: Vec<f64> = dy.iter().map(|v| factor * v).collect();
        let (out, dx) = self.set(&set, x, &dout);
        self.add_to_token(t, &dx, 1.0);
        let dlogit = dot(&out, dy) * factor * (1.0 - factor);
        add(self.of(&name), x, dlogit);
        self.add_to_token(t, &router, dlogit);
    }

    /// Adds the gradients that follow from `d`, the gradient of the second logit of the residual
    /// gate. The first logit gets -d, because the softmax of two logits depends on their
    /// difference.
    pub(super) fn lean(&mut self, t: usize, d: f64) {
        let Some(index) = self.spec.residual() else {
            return;
        };
        let (x, prefix) = (self.token(t), format!("shared.{index}.router"));
        let name = format!("{prefix}.weight");
        let rows = self.weights.get(&name).data.chunks(x.len());
        for (i, (row, d)) in rows.zip([-d, d]).enumerate() {
            add(&mut self.of(&name)[i * x.len()..(i + 1) * x.len()], x, d);
            self.of(&format!("{prefix}.bias"))[i] += d;
            self.add_to_token(t, row, d);
        }
    }

    /// Runs one row forward and backward: `(out, dx)`.
    fn set(&mut self, set: &Set, x: &[f64], dout: &[f64]) -> (Vec<f64>, Vec<f64>) {
        let experts = &set.experts;
        let up = self.project(set, "up", set.hidden, x);
        let gate = self
            .spec
            .gated()
            .then(|| self.project(set, "gate", set.hidden, x));
        let gate_at = |i: usize| gate.as_ref().map(|g| g[i]);
        let inner: Vec<f64> = (0..set.hidden)
            .map(|i| activate(experts, gate_at(i), up[i]))
            .collect();
        let out = self.project(set, "down", dout.len(), &inner);
        let dinner = self.project_back(set, "down", &inner, dout);
        let slopes: Vec<Slopes> = (0..set.hidden)
            .map(|i| slopes(experts, gate_at(i), up[i]))
            .collect();
        let through = |slope: fn(&Slopes) -> f64| -> Vec<f64> {
            slopes
                .iter()
                .zip(&dinner)
                .map(|(s, d)| slope(s) * d)
                .collect()
        };
        let mut dx = self.project_back(set, "up", x, &through(|s| s.up));
        if gate.is_some() {
            let dgate = self.project_back(set, "gate", x, &through(|s| s.gate));
            add(&mut dx, &dgate, 1.0);
        }
        (out, dx)
    }

    /// Runs the projection before or after the routed experts backward: adds the gradients of W and
    /// b, returns that of x. A zero gradient adds nothing, even where x is NaN.
    pub(super) fn project_latent_back(&mut self, part: &str, x: &[f64], dout: &[f64]) -> Vec<f64> {
        let Some(latent) = &self.spec.latent else {
            return dout.to_vec();
        };
        // Padding must add nothing, even if x is NaN.
        if all_zero(dout) {
            return vec![0.0; x.len()];
        }
        if latent.bias {
            add(self.of(&format!("latent.{part}.bias")), dout, 1.0);
        }
        self.linear_back(&format!("latent.{part}.weight"), x, dout)
    }

    /// Returns `W · x (+ b)`.
    fn project(&self, set: &Set, part: &str, rows: usize, x: &[f64]) -> Vec<f64> {
        let matrix = &self
            .weights
            .get(&format!("{}.{part}.weight", set.prefix))
            .data;
        let matrix = &matrix[range(set, rows, x.len())];
        let mut out: Vec<f64> = matrix.chunks(x.len()).map(|row| dot(row, x)).collect();
        if biased(set.biases, part) {
            let bias = &self
                .weights
                .get(&format!("{}.{part}.bias", set.prefix))
                .data;
            add(&mut out, &bias[range(set, rows, 1)], 1.0);
        }
        out
    }

    /// Adds the gradients of W and b of `W · x + b`; returns that of x.
    fn project_back(&mut self, set: &Set, part: &str, x: &[f64], dout: &[f64]) -> Vec<f64> {
        let (name, at) = (
            format!("{}.{part}.weight", set.prefix),
            range(set, dout.len(), x.len()),
        );
        let matrix = self.weights.get(&name).data[at.clone()].to_vec();
        let rows = self.of(&name)[at].chunks_mut(x.len());
        rows.zip(dout).for_each(|(row, d)| add(row, x, *d));
        if biased(set.biases, part) {
            let bias = format!("{}.{part}.bias", set.prefix);
            add(&mut self.of(&bias)[range(set, dout.len(), 1)], dout, 1.0);
        }
        let mut dx = vec![0.0; x.len()];
        let rows = matrix.chunks(x.len()).zip(dout);
        rows.for_each(|(row, d)| add(&mut dx, row, *d));
        dx
    }
}

/// Derivatives of the activation with respect to its inputs.
struct Slopes {
    gate: f64,
    up: f64,
}

/// Returns the derivatives of [`activate`].
fn slopes(experts: &Experts, gate: Option<f64>, up: f64) -> Slopes {
    let Some(gate) = gate else {
        return Slopes {
            gate: 0.0,
            up: phi(experts, up).1,
        };
    };
    let (gate, up) = (limited_gate(experts, gate), limited_up(experts, up));
    Slopes {
        gate: gate.slope * up.value,
        up: gate.value * up.slope,
    }
}
