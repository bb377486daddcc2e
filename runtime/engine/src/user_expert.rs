//! Experts as code of the caller, and their passes over the rows of a rank.

/// One expert as code. Rows are f32, whatever the layer's types; experts of
/// one layer may differ in everything but the widths of rows.
pub trait UserExpert: Send {
    /// Computes `out [n, output_dim]` from `rows [n, model_dim]`; `n` may be 0. In training, put
    /// what backward needs into `saved`.
    fn forward(&self, rows: &[f32], out: &mut [f32], saved: Option<&mut Vec<f32>>);

    /// Computes `drows [n, model_dim]` and the gradients of the expert's own parameters, which it
    /// holds. It is called for every expert in the order of ids, also without rows: gradients are
    /// then zero, or unchanged if they accumulate.
    fn backward(&mut self, call: &ExpertBackward<'_>, drows: &mut [f32]);

    /// Returns the gradients of the expert's own parameters, in an order and in sizes of its own,
    /// for [`UserLayer::reduce_gradients`](crate::UserLayer::reduce_gradients) to sum over the ranks with a copy of the expert. By
    /// default there are none, which is right without `dp`.
    fn gradients(&mut self) -> Vec<&mut [f32]> {
        Vec::new()
    }
}

/// The inputs of an expert's backward.
#[derive(Debug)]
pub struct ExpertBackward<'a> {
    /// `[n, model_dim]`, as forward had them.
    pub rows: &'a [f32],
    /// The values that forward saved.
    pub saved: &'a [f32],
    /// The gradient of `out [n, output_dim]`, the weight of each row included.
    pub dout: &'a [f32],
    /// Whether gradients of parameters are added to instead of overwritten.
    pub accumulate: bool,
}

impl<E: UserExpert + ?Sized> UserExpert for Box<E> {
    fn forward(&self, rows: &[f32], out: &mut [f32], saved: Option<&mut Vec<f32>>) {
        (**self).forward(rows, out, saved);
    }

    fn backward(&mut self, call: &ExpertBackward<'_>, drows: &mut [f32]) {
        (**self).backward(call, drows);
    }

    fn gradients(&mut self) -> Vec<&mut [f32]> {
        (**self).gradients()
    }
}

/// The rows that this rank's experts compute; without ranks those of its own tokens.
#[derive(Default)]
pub(crate) struct Held {
    /// The first row of each expert, and the number of all.
    pub offsets: Vec<usize>,
    /// `[R, d]`.
    pub rows: Vec<f32>,
    /// The saved values of the experts.
    pub saved: Vec<Vec<f32>>,
}

impl Held {
    /// Keeps the rows of the next experts and what these saved, for backward.
    pub fn keep(&mut self, rows: Vec<f32>, saved: Vec<Vec<f32>>) {
        // Ranges of experts come in order, so what is appended stays in the order of ids.
        self.saved.extend(saved);
        if self.rows.is_empty() {
            // All rows, unless there are chunks: no copy.
            self.rows = rows;
        } else {
            self.rows.extend(rows);
        }
    }
}

/// Runs some experts on their rows, in the order of ids; returns their outputs and what they saved.
pub(crate) fn run_forward(
    experts: &[impl UserExpert],
    edges: &[usize],
    rows: &[f32],
    [model, output]: [usize; 2],
    keep: bool,
) -> (Vec<f32>, Vec<Vec<f32>>) {
    let base = edges[0];
    let mut out = vec![0.0; (edges[experts.len()] - base) * output];
    let mut kept = Vec::new();
    for (expert, edges) in experts.iter().zip(edges.windows(2)) {
        let (first, end) = (edges[0] - base, edges[1] - base);
        let mut saved = Vec::new();
        let out = &mut out[first * output..end * output];
        let rows = &rows[first * model..end * model];
        expert.forward(rows, out, keep.then_some(&mut saved));
        kept.push(saved);
    }
    (out, kept)
}

/// Runs backward of some experts on their rows; returns the gradient of these rows.
pub(crate) fn run_backward(
    experts: &mut [impl UserExpert],
    held: &Held,
    first: usize,
    dout: &[f32],
    [output, model]: [usize; 2],
    accumulate: bool,
) -> Vec<f32> {
    let edges = &held.offsets[first..=first + experts.len()];
    let base = edges[0];
    let mut drows = vec![0.0; (edges[experts.len()] - base) * model];
    let each = edges.windows(2).zip(&held.saved[first..]);
    for (expert, (edges, saved)) in experts.iter_mut().zip(each) {
        let (start, end) = (edges[0] - base, edges[1] - base);
        let call = ExpertBackward {
            rows: &held.rows[edges[0] * model..edges[1] * model],
            saved,
            dout: &dout[start * output..end * output],
            accumulate,
        };
        expert.backward(&call, &mut drows[start * model..end * model]);
    }
    drows
}
