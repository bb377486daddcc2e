//! Causal self-attention with several heads, and its gradient.

use super::common::gemm::{View, product};
use super::common::ops::{Linear, Module, Param};
use super::common::threads;
use moesaic::reference::Random;

/// `softmax(Q·Kᵀ/√w, causal) · V` per head, between two linear maps.
pub struct Attention {
    /// The projection to queries, keys and values, `[3d, d]`.
    qkv: Linear,
    out: Linear,
    shape: Shape,
}

/// The sizes of an attention layer.
#[derive(Clone, Copy)]
pub struct Shape {
    /// Tokens of a sequence, `N`.
    pub context: usize,
    /// Width of a token, `d`.
    pub width: usize,
    /// Heads of width `d / heads`.
    pub heads: usize,
}

/// The state of a forward pass for backward.
pub struct Saved {
    x: Vec<f32>,
    qkv: Vec<f32>,
    /// `[sequences, heads, N, N]`.
    probabilities: Vec<f32>,
    mixed: Vec<f32>,
}

impl Shape {
    fn head(self) -> usize {
        self.width / self.heads
    }

    fn scale(self) -> f32 {
        1.0 / (self.head() as f32).sqrt()
    }

    /// Returns part 0, 1 or 2 (query, key, value) of a head `[N, w]` in the rows of a sequence
    /// `[N, 3d]`.
    fn part(self, qkv: &[f32], part: usize, head: usize) -> View<'_> {
        let first = part * self.width + head * self.head();
        View::strided(&qkv[first..], self.context, self.head(), 3 * self.width)
    }

    fn square(self, matrix: &[f32]) -> View<'_> {
        View::new(matrix, self.context, self.context)
    }

    /// Returns one head of rows `[N, d]`.
    fn column(self, rows: &[f32], head: usize) -> View<'_> {
        let first = head * self.head();
        View::strided(&rows[first..], self.context, self.head(), self.width)
    }

    /// Computes probabilities `[heads, N, N]` and mixed values `[N, d]` of a sequence.
    fn mix(self, qkv: &[f32], probabilities: &mut [f32], mixed: &mut [f32]) {
        let n = self.context;
        for (head, p) in probabilities.chunks_exact_mut(n * n).enumerate() {
            let (q, k) = (self.part(qkv, 0, head), self.part(qkv, 1, head));
            product(self.scale(), q, k.t(), 0.0, p, n);
            for (i, row) in p.chunks_exact_mut(n).enumerate() {
                causal_softmax(&mut row[..i + 1]);
                row[i + 1..].fill(0.0);
            }
            let v = self.part(qkv, 2, head);
            let into = &mut mixed[head * self.head()..];
            product(1.0, self.square(p), v, 0.0, into, self.width);
        }
    }

    /// Computes the gradient of a sequence's `qkv` from that of its mixed values.
    fn unmix(self, qkv: &[f32], probabilities: &[f32], dmixed: &[f32], dqkv: &mut [f32]) {
        let (n, d, row) = (self.context, self.width, 3 * self.width);
        let mut ds = vec![0.0; n * n];
        for (head, p) in probabilities.chunks_exact(n * n).enumerate() {
            let at = |part: usize| part * d + head * self.head();
            let (q, k) = (self.part(qkv, 0, head), self.part(qkv, 1, head));
            let (v, dout) = (self.part(qkv, 2, head), self.column(dmixed, head));
            product(1.0, self.square(p).t(), dout, 0.0, &mut dqkv[at(2)..], row);
            product(1.0, dout, v.t(), 0.0, &mut ds, n);
            for (ds, p) in ds.chunks_exact_mut(n).zip(p.chunks_exact(n)) {
                softmax_backward(p, ds);
            }
            let ds = self.square(&ds);
            product(self.scale(), ds, k, 0.0, &mut dqkv[at(0)..], row);
            product(self.scale(), ds.t(), q, 0.0, &mut dqkv[at(1)..], row);
        }
    }
}

fn causal_softmax(row: &mut [f32]) {
    let top = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    row.iter_mut().for_each(|v| *v = (*v - top).exp());
    let sum: f32 = row.iter().sum();
    row.iter_mut().for_each(|v| *v /= sum);
}

/// Computes `ds = p ⊙ (dp - Σ p·dp)` in place of `dp`.
fn softmax_backward(p: &[f32], dp: &mut [f32]) {
    let mean: f32 = p.iter().zip(&*dp).map(|(p, d)| p * d).sum();
    dp.iter_mut().zip(p).for_each(|(d, p)| *d = p * (*d - mean));
}

impl Attention {
    /// Returns a layer with random projections; `gain` scales the last one.
    pub fn new(shape: Shape, gain: f64, random: &mut Random) -> Attention {
        assert_eq!(shape.width % shape.heads, 0, "heads must divide the width");
        Attention {
            qkv: Linear::new(shape.width, 3 * shape.width, 1.0, random),
            out: Linear::new(shape.width, shape.width, gain, random),
            shape,
        }
    }

    /// Maps `x [sequences · N, d]` to the same shape.
    pub fn forward(&self, x: Vec<f32>) -> (Vec<f32>, Saved) {
        let (n, d, shape) = (self.shape.context, self.shape.width, self.shape);
        let qkv = self.qkv.forward(&x);
        let squares = n * n * shape.heads;
        let mut probabilities = vec![0.0; x.len() / (n * d) * squares];
        let mut mixed = vec![0.0; x.len()];
        let sequences = probabilities
            .chunks_exact_mut(squares)
            .zip(mixed.chunks_exact_mut(n * d))
            .zip(qkv.chunks_exact(3 * n * d));
        threads::for_each(sequences, |((p, mixed), qkv)| shape.mix(qkv, p, mixed));
        let y = self.out.forward(&mixed);
        let saved = Saved {
            x,
            qkv,
            probabilities,
            mixed,
        };
        (y, saved)
    }

    /// Returns the gradient of `x`.
    pub fn backward(&mut self, saved: &Saved, dy: &[f32]) -> Vec<f32> {
        let (n, d, shape) = (self.shape.context, self.shape.width, self.shape);
        let dmixed = self.out.backward(&saved.mixed, dy);
        let mut dqkv = vec![0.0; saved.qkv.len()];
        let sequences = dqkv
            .chunks_exact_mut(3 * n * d)
            .zip(saved.qkv.chunks_exact(3 * n * d))
            .zip(saved.probabilities.chunks_exact(n * n * shape.heads))
            .zip(dmixed.chunks_exact(n * d));
        threads::for_each(sequences, |(((dqkv, qkv), p), dmixed)| {
            shape.unmix(qkv, p, dmixed, dqkv);
        });
        self.qkv.backward(&saved.x, &dqkv)
    }
}

impl Module for Attention {
    fn params<'a>(&'a mut self, prefix: &str, visit: &mut dyn FnMut(String, &'a mut Param)) {
        self.qkv.params(&format!("{prefix}.qkv"), visit);
        self.out.params(&format!("{prefix}.out"), visit);
    }
}
