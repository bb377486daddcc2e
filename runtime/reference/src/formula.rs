//! The formulas of a router's logits, forward and backward. What comes before them, the input of
//! the router, and behind them, bias, cap and noise, is the same for all.

use crate::math::{add, dot};
use crate::{Tensor, Weights};
use moesaic_spec::{LayerSpec, LogitsFormula};
use std::collections::BTreeMap;

/// Returns the logits of a token by the formula alone; `x` is the input of the router.
pub(crate) fn formula_row(spec: &LayerSpec, weights: &Weights, x: &[f64]) -> Vec<f64> {
    match formula(spec) {
        LogitsFormula::Linear => {
            let w = weights.get("router.weight");
            (0..spec.routed_experts())
                .map(|e| dot(w.outer(e), x))
                .collect()
        }
        LogitsFormula::Cosine => cosine_row(spec, weights, x),
    }
}

/// Runs [`formula_row`] backward: adds the gradients of its weights, returns that of x.
pub(crate) fn formula_back(
    spec: &LayerSpec,
    mut gradients: WeightGradients<'_>,
    x: &[f64],
    dlogits: &[f64],
) -> Vec<f64> {
    match formula(spec) {
        LogitsFormula::Linear => gradients.linear_back("router.weight", x, dlogits),
        LogitsFormula::Cosine => gradients.cosine_back(x, dlogits),
    }
}

fn formula(spec: &LayerSpec) -> LogitsFormula {
    let logits = spec.logits();
    logits.map_or(LogitsFormula::Linear, |logits| logits.formula)
}

/// The weights of a layer, and where their gradients add up.
pub(crate) struct WeightGradients<'a> {
    /// The weights.
    pub weights: &'a Weights,
    /// The sum of the gradients of each float weight.
    pub sums: &'a mut BTreeMap<String, Tensor>,
}

impl<'a> WeightGradients<'a> {
    /// Returns the gradient of a tensor.
    pub fn into_of(self, name: &str) -> &'a mut [f64] {
        let found = self.sums.get_mut(name);
        &mut found.unwrap_or_else(|| panic!("no tensor `{name}`")).data
    }

    fn of(&mut self, name: &str) -> &mut [f64] {
        let (weights, sums) = (self.weights, &mut *self.sums);
        WeightGradients { weights, sums }.into_of(name)
    }

    /// Runs `W · x` backward: adds the gradient of W, returns that of x.
    pub fn linear_back(&mut self, name: &str, x: &[f64], dout: &[f64]) -> Vec<f64> {
        let rows = self.of(name).chunks_mut(x.len());
        rows.zip(dout).for_each(|(row, d)| add(row, x, *d));
        let mut dx = vec![0.0; x.len()];
        let rows = self.weights.get(name).data.chunks(x.len()).zip(dout);
        rows.for_each(|(row, d)| add(&mut dx, row, *d));
        dx
    }

    /// Runs [`cosine_row`] backward.
    fn cosine_back(&mut self, x: &[f64], dlogits: &[f64]) -> Vec<f64> {
        let matrix = &self.weights.get("router.projector.weight").data;
        let bias = &self.weights.get("router.projector.bias").data;
        let similarity = &self.weights.get("router.similarity").data;
        let temperature = self.weights.get("router.temperature").data[0];
        let (width, experts) = (bias.len(), dlogits.len());
        let scale = temperature.min(100f64.ln()).exp();
        let rows = matrix.chunks(x.len()).zip(bias);
        let projected: Vec<f64> = rows.map(|(row, b)| dot(row, x) + b).collect();
        let direction = unit(&projected);
        let (mut ddirection, mut dscale) = (vec![0.0; width], 0.0);
        for (e, &dlogit) in dlogits.iter().enumerate() {
            let column: Vec<f64> = (0..width).map(|i| similarity[i * experts + e]).collect();
            let expert = unit(&column);
            dscale += dlogit * dot(&direction, &expert);
            add(&mut ddirection, &expert, dlogit * scale);
            let dexpert: Vec<f64> = direction.iter().map(|v| dlogit * scale * v).collect();
            let dcolumn = unit_back(&column, &dexpert);
            let total = self.of("router.similarity");
            (0..width).for_each(|i| total[i * experts + e] += dcolumn[i]);
        }
        // Above the limit the temperature has no effect and so no gradient.
        if temperature < 100f64.ln() {
            self.of("router.temperature")[0] += dscale * scale;
        }
        let dprojected = unit_back(&projected, &ddirection);
        add(self.of("router.projector.bias"), &dprojected, 1.0);
        self.linear_back("router.projector.weight", x, &dprojected)
    }
}

/// Returns `unit(P · x + p) · unit(S) · exp(min(t, ln 100))`, with S by columns.
fn cosine_row(spec: &LayerSpec, weights: &Weights, x: &[f64]) -> Vec<f64> {
    let (p, b) = (
        weights.get("router.projector.weight"),
        weights.get("router.projector.bias"),
    );
    let s = weights.get("router.similarity");
    let (width, experts) = (b.data.len(), spec.routed_experts());
    let projected: Vec<f64> = (0..width).map(|i| dot(p.outer(i), x) + b.data[i]).collect();
    // Both vectors are normalized, so the product is a cosine.
    let projected = unit(&projected);
    let scale = weights.get("router.temperature").data[0]
        .min(100f64.ln())
        .exp();
    let column = |e: usize| {
        (0..width)
            .map(|i| s.data[i * experts + e])
            .collect::<Vec<f64>>()
    };
    (0..experts)
        .map(|e| dot(&projected, &unit(&column(e))) * scale)
        .collect()
}

fn unit(v: &[f64]) -> Vec<f64> {
    let norm = dot(v, v).sqrt().max(1e-12);
    v.iter().map(|x| x / norm).collect()
}

fn unit_back(v: &[f64], dunit: &[f64]) -> Vec<f64> {
    let norm = dot(v, v).sqrt();
    // Below the floor the norm is constant.
    if norm <= 1e-12 {
        return dunit.iter().map(|d| d / 1e-12).collect();
    }
    let along = dot(v, dunit) / (norm * norm);
    let pairs = v.iter().zip(dunit);
    pairs.map(|(v, d)| (d - along * v) / norm).collect()
}
