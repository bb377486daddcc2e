//! What the reference makes of one row of an expert.

use moesaic_reference::{Weights, activate};
use moesaic_spec::{Experts, LayerSpec};

/// An expert, and the weight of a row in it.
pub struct ExpertRow<'a> {
    /// Of which layer.
    pub spec: &'a LayerSpec,
    /// The layer's.
    pub weights: &'a Weights,
    /// `experts` or `shared.0`.
    pub prefix: &'a str,
    /// Which of the routed experts.
    pub index: Option<usize>,
    /// What multiplies the activation.
    pub weight: f64,
}

impl ExpertRow<'_> {
    /// What `up` and the activation make of an input.
    pub fn hidden(&self, x: &[f64]) -> Vec<f64> {
        let gate = self.spec.gated().then(|| self.product("gate", x));
        let up = self.product("up", x).into_iter().enumerate();
        let shared = self.prefix.strip_prefix("shared.");
        let experts = match shared.and_then(|index| index.parse().ok()) {
            Some(index) => self.spec.shared_experts(index),
            None => self.spec.experts.clone(),
        };
        let value = |(i, up): (usize, (f64, f64))| {
            let gate = gate.as_ref().map(|g| g[i].0 + g[i].1);
            self.weight * activate(&experts, gate, up.0 + up.1)
        };
        up.map(value).collect()
    }

    /// From the hidden row, which has the weight already.
    pub fn out(&self, hidden: &[f64]) -> Vec<f64> {
        let down = self.product("down", hidden).into_iter();
        down.map(|(sum, bias)| sum + self.weight * bias).collect()
    }

    /// Products and biases of one projection.
    fn product(&self, part: &str, x: &[f64]) -> Vec<(f64, f64)> {
        let name = |what: &str| format!("{}.{part}.{what}", self.prefix);
        let slice = |what: &str| {
            let tensor = self.weights.get(&name(what));
            self.index.map_or(&*tensor.data, |e| tensor.outer(e))
        };
        let biased = self.weights.0.contains_key(&name("bias"));
        let bias = biased.then(|| slice("bias"));
        let dot = |line: &[f64]| line.iter().zip(x).map(|(w, v)| w * v).sum();
        let lines = slice("weight").chunks(x.len()).enumerate();
        lines
            .map(|(i, line)| (dot(line), bias.map_or(0.0, |b| b[i])))
            .collect()
    }
}

/// An activation and its derivatives, by differences.
pub struct Slopes {
    /// The activation.
    pub value: f64,
    /// By the gate's product.
    pub gate: f64,
    /// By the product of `up`.
    pub up: f64,
    /// A corner of the activation or of a clamp is near.
    pub kink: bool,
}

impl Slopes {
    /// At these products.
    pub fn of(experts: &Experts, gate: Option<f64>, up: f64) -> Slopes {
        let step = 1e-6;
        let slope = |f: &dyn Fn(f64) -> f64| {
            let (left, right) = ((f(0.0) - f(-step)) / step, (f(step) - f(0.0)) / step);
            (
                (left + right) / 2.0,
                (left - right).abs() > 1e-4 * (1.0 + left.abs()),
            )
        };
        let value = |dg: f64, du: f64| activate(experts, gate.map(|g| g + dg), up + du);
        let (by_gate, corner) = slope(&|v| value(v, 0.0));
        let (by_up, other) = slope(&|v| value(0.0, v));
        Slopes {
            value: value(0.0, 0.0),
            gate: by_gate,
            up: by_up,
            kink: corner || other,
        }
    }
}

/// A sum, and how large its terms are together, to which rounding is relative.
#[derive(Clone, Copy, Default)]
pub struct Sum {
    /// The sum.
    pub value: f64,
    /// Of the terms without their signs.
    pub terms: f64,
}

impl Sum {
    /// One term more.
    pub fn add(&mut self, term: f64) {
        self.value += term;
        self.terms += term.abs();
    }

    /// Every term times `factor`.
    pub fn times(self, factor: f64) -> Sum {
        Sum {
            value: self.value * factor,
            terms: self.terms * factor.abs(),
        }
    }
}

impl FromIterator<f64> for Sum {
    fn from_iter<T: IntoIterator<Item = f64>>(terms: T) -> Sum {
        let mut sum = Sum::default();
        terms.into_iter().for_each(|term| sum.add(term));
        sum
    }
}
