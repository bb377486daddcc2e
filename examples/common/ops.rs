//! Parameters, linear maps, layer norm, ReLU, cross entropy.

use super::gemm::{View, matmul, matmul_into};
use super::threads;
use moesaic::reference::Random;

/// Rows of logits that one task takes.
const TASK_ROWS: usize = 64;

/// A learned tensor and its gradient.
pub struct Param {
    /// The sizes, outermost first; a single one where the shape does not matter.
    pub shape: Vec<usize>,
    /// The values, row major.
    pub value: Vec<f32>,
    /// The gradient of the last backward pass.
    pub grad: Vec<f32>,
}

impl Param {
    /// Returns uniform values in `(-bound, bound)`.
    pub fn uniform(count: usize, bound: f64, random: &mut Random) -> Param {
        let mut draw = || (bound * random.signed()) as f32;
        Param::of(&[count], (0..count).map(|_| draw()).collect())
    }

    /// Returns a vector filled with one value.
    pub fn constant(count: usize, value: f32) -> Param {
        Param::of(&[count], vec![value; count])
    }

    /// Returns given values in a shape.
    pub fn of(shape: &[usize], value: Vec<f32>) -> Param {
        Param {
            shape: shape.to_vec(),
            grad: vec![0.0; value.len()],
            value,
        }
    }
}

/// A set of named parameters.
pub trait Module {
    /// Calls `visit` with each parameter's name below `prefix`.
    fn params<'a>(&'a mut self, prefix: &str, visit: &mut dyn FnMut(String, &'a mut Param));
}

/// `y = x · Wᵀ + b`.
pub struct Linear {
    /// `[outputs, inputs]`.
    pub weight: Param,
    /// `[outputs]`.
    pub bias: Param,
}

impl Linear {
    /// Returns a map with weights uniform in `±gain/√inputs` and bias 0.
    pub fn new(inputs: usize, outputs: usize, gain: f64, random: &mut Random) -> Linear {
        let bound = gain / (inputs as f64).sqrt();
        Linear {
            weight: Param::uniform(inputs * outputs, bound, random),
            bias: Param::constant(outputs, 0.0),
        }
    }

    fn outputs(&self) -> usize {
        self.bias.value.len()
    }

    fn inputs(&self) -> usize {
        self.weight.value.len() / self.outputs()
    }

    fn weight(&self) -> View<'_> {
        View::new(&self.weight.value, self.outputs(), self.inputs())
    }

    /// Maps `x [T, inputs]` to `[T, outputs]`.
    pub fn forward(&self, x: &[f32]) -> Vec<f32> {
        let tokens = x.len() / self.inputs();
        let mut y = self.bias.value.repeat(tokens);
        let x = View::new(x, tokens, self.inputs());
        matmul_into(x, self.weight().t(), 1.0, &mut y);
        y
    }

    /// Returns the gradient of `x`, from `x` and the gradient of `y`.
    pub fn backward(&mut self, x: &[f32], dy: &[f32]) -> Vec<f32> {
        let (inputs, outputs) = (self.inputs(), self.outputs());
        let tokens = x.len() / inputs;
        let dy = View::new(dy, tokens, outputs);
        let x = View::new(x, tokens, inputs);
        matmul_into(dy.t(), x, 0.0, &mut self.weight.grad);
        let ones = vec![1.0; tokens];
        let ones = View::new(&ones, 1, tokens);
        matmul_into(ones, dy, 0.0, &mut self.bias.grad);
        matmul(dy, self.weight())
    }
}

impl Module for Linear {
    fn params<'a>(&'a mut self, prefix: &str, visit: &mut dyn FnMut(String, &'a mut Param)) {
        visit(format!("{prefix}.weight"), &mut self.weight);
        visit(format!("{prefix}.bias"), &mut self.bias);
    }
}

/// Layer norm over each row: `(x - mean)/√(variance + 1e-5) ⊙ gain + bias`.
pub struct LayerNorm {
    gain: Param,
    bias: Param,
}

/// The state for layer norm's backward: rows before gain and bias, and `1/√…`.
pub struct Normalized {
    rows: Vec<f32>,
    scale: Vec<f32>,
}

impl LayerNorm {
    /// Returns a norm over rows of `width`, with gain 1 and bias 0.
    pub fn new(width: usize) -> LayerNorm {
        LayerNorm {
            gain: Param::constant(width, 1.0),
            bias: Param::constant(width, 0.0),
        }
    }

    /// Maps `x [T, width]` to the same shape.
    pub fn forward(&self, x: &[f32]) -> (Vec<f32>, Normalized) {
        let width = self.gain.value.len();
        let mut rows = x.to_vec();
        let mut scale = vec![0.0; x.len() / width];
        for (row, scale) in rows.chunks_exact_mut(width).zip(&mut scale) {
            let mean = row.iter().sum::<f32>() / width as f32;
            row.iter_mut().for_each(|v| *v -= mean);
            let variance = row.iter().map(|v| v * v).sum::<f32>() / width as f32;
            *scale = 1.0 / (variance + 1e-5).sqrt();
            row.iter_mut().for_each(|v| *v *= *scale);
        }
        let mut y = rows.clone();
        for row in y.chunks_exact_mut(width) {
            let affine = self.gain.value.iter().zip(&self.bias.value);
            for (v, (gain, bias)) in row.iter_mut().zip(affine) {
                *v = *v * gain + bias;
            }
        }
        (y, Normalized { rows, scale })
    }

    /// Returns the gradient of `x`.
    pub fn backward(&mut self, saved: &Normalized, dy: &[f32]) -> Vec<f32> {
        let width = self.gain.value.len();
        self.gain.grad.fill(0.0);
        self.bias.grad.fill(0.0);
        let mut dx = dy.to_vec();
        let rows = saved.rows.chunks_exact(width).zip(&saved.scale);
        for (dx, (n, scale)) in dx.chunks_exact_mut(width).zip(rows) {
            for i in 0..width {
                self.gain.grad[i] += dx[i] * n[i];
                self.bias.grad[i] += dx[i];
                dx[i] *= self.gain.value[i];
            }
            let mean = dx.iter().sum::<f32>() / width as f32;
            let along = dx.iter().zip(n).map(|(d, n)| d * n).sum::<f32>() / width as f32;
            for (d, n) in dx.iter_mut().zip(n) {
                *d = scale * (*d - mean - along * n);
            }
        }
        dx
    }
}

impl Module for LayerNorm {
    fn params<'a>(&'a mut self, prefix: &str, visit: &mut dyn FnMut(String, &'a mut Param)) {
        visit(format!("{prefix}.gain"), &mut self.gain);
        visit(format!("{prefix}.bias"), &mut self.bias);
    }
}

/// Computes `max(x, 0)` in place.
pub fn relu(x: &mut [f32]) {
    x.iter_mut().for_each(|v| *v = v.max(0.0));
}

/// Computes the input gradient in place, from the output of [`relu`] and its gradient.
pub fn relu_backward(y: &[f32], dy: &mut [f32]) {
    for (d, y) in dy.iter_mut().zip(y) {
        if *y <= 0.0 {
            *d = 0.0;
        }
    }
}

/// Computes `a += b`.
pub fn add(a: &mut [f32], b: &[f32]) {
    assert_eq!(a.len(), b.len());
    a.iter_mut().zip(b).for_each(|(a, b)| *a += b);
}

/// Returns the cross entropy in nats of `logits [T, classes]` against `targets [T]`, and its
/// gradient. Both are divided by `all`, the number of targets in the whole batch.
pub fn cross_entropy(mut logits: Vec<f32>, targets: &[usize], all: usize) -> (f64, Vec<f32>) {
    let classes = (logits.len() / targets.len().max(1)).max(1);
    let share = 1.0 / all as f32;
    let one = |row: &mut [f32], target: usize| {
        let top = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let hit = f64::from(row[target] - top);
        row.iter_mut().for_each(|v| *v = (*v - top).exp());
        let sum: f32 = row.iter().sum();
        row.iter_mut().for_each(|v| *v *= share / sum);
        row[target] -= share;
        f64::from(sum).ln() - hit
    };
    let mut losses = vec![0.0f64; targets.len()];
    let parts = logits
        .chunks_mut(TASK_ROWS * classes)
        .zip(targets.chunks(TASK_ROWS))
        .zip(losses.chunks_mut(TASK_ROWS));
    threads::for_each(parts, |((rows, targets), losses)| {
        let rows = rows.chunks_exact_mut(classes);
        for ((row, target), loss) in rows.zip(targets).zip(losses) {
            *loss = one(row, *target);
        }
    });
    (losses.iter().sum::<f64>() / all as f64, logits)
}
