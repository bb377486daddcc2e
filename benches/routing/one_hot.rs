//! A top-2 gate with dispatch and combine as dense products with one-hot
//! masks, step by step as fairseq has it (GShard's formulation): masks of
//! `T × E·C` entries, `E·C ≈ 2T`, so every product is quadratic in T.

use matrixmultiply::sgemm;
use rayon::prelude::*;

/// The inputs: logits `[T, E]`.
pub struct OneHot {
    logits: Vec<f32>,
    tokens: usize,
    experts: usize,
    capacity: usize,
}

/// The gate's decision.
pub struct Masks {
    scores: Vec<f32>,
    /// Experts of the first and second choice.
    ids: [Vec<usize>; 2],
    /// Weights before renormalising, 0 when dropped.
    kept: [Vec<f32>; 2],
    places: [Vec<usize>; 2],
    /// `[T, E·C]`.
    combine: Vec<f32>,
    dispatch: Vec<f32>,
}

/// The state that forward keeps for backward, and its result.
pub struct State {
    masks: Masks,
    /// `[E·C, d]`: what the experts get; here also what they return.
    expert_rows: Vec<f32>,
    y: Vec<f32>,
}

/// Gradients of tokens and logits.
pub struct Gradients {
    pub x: Vec<f32>,
    pub logits: Vec<f32>,
}

impl OneHot {
    pub fn new(logits: &[f32], experts: usize) -> OneHot {
        let tokens = logits.len() / experts;
        OneHot {
            logits: logits.to_vec(),
            tokens,
            experts,
            capacity: 2 * tokens.div_ceil(experts),
        }
    }

    fn slots(&self) -> usize {
        self.experts * self.capacity
    }

    /// Where each choice goes `[T, 2]`, -1 when dropped.
    pub fn locations(&self) -> impl Iterator<Item = f32> {
        let (_, places) = self.choose(&self.scores());
        let capacity = self.capacity;
        let place = move |p: usize| if p < capacity { p as f32 } else { -1.0 };
        let [first, second] = places;
        first
            .into_iter()
            .zip(second)
            .flat_map(move |(a, b)| [place(a), place(b)])
    }

    fn scores(&self) -> Vec<f32> {
        let mut scores = self.logits.clone();
        scores.par_chunks_mut(self.experts).for_each(|row| {
            let top = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            row.iter_mut().for_each(|v| *v = (*v - top).exp());
            let sum: f32 = row.iter().sum();
            row.iter_mut().for_each(|v| *v /= sum);
        });
        scores
    }

    /// Ids of both choices, and places by two running sums over one-hot masks.
    fn choose(&self, scores: &[f32]) -> ([Vec<usize>; 2], [Vec<usize>; 2]) {
        let (e, mut ids) = (self.experts, [Vec::new(), Vec::new()]);
        for row in scores.chunks_exact(e) {
            let best = |without: Option<usize>| {
                let live = (0..e).filter(|i| Some(*i) != without);
                live.reduce(|a, b| if row[b] > row[a] { b } else { a })
                    .expect("two experts at least")
            };
            let first = best(None);
            ids[0].push(first);
            ids[1].push(best(Some(first)));
        }
        let mut places = [Vec::new(), Vec::new()];
        let mut running = vec![0usize; e];
        for (ids, places) in ids.iter().zip(&mut places) {
            let mut mask = vec![0u32; ids.len() * e];
            for (row, id) in mask.chunks_exact_mut(e).zip(ids) {
                row[*id] = 1;
            }
            for (row, id) in mask.chunks_exact(e).zip(ids) {
                places.push(running[*id]);
                for (sum, hit) in running.iter_mut().zip(row) {
                    *sum += *hit as usize;
                }
            }
        }
        (ids, places)
    }

    /// Gate, masks, and the two dense products; the experts do nothing.
    pub fn forward(&self, x: &[f32], d: usize) -> State {
        let masks = self.masks();
        let expert_rows = self.dispatch(&masks, x, d);
        let y = self.combine(&masks, &expert_rows, d);
        State {
            masks,
            expert_rows,
            y,
        }
    }

    /// The gate, and a column for every slot.
    pub fn masks(&self) -> Masks {
        let scores = self.scores();
        let (ids, places) = self.choose(&scores);
        let kept = [0, 1].map(|j| {
            let weight = |t: usize| {
                if places[j][t] < self.capacity {
                    scores[t * self.experts + ids[j][t]]
                } else {
                    0.0
                }
            };
            (0..self.tokens).map(weight).collect::<Vec<f32>>()
        });
        let slots = self.slots();
        let mut combine = vec![0.0; self.tokens * slots];
        for (t, row) in combine.chunks_exact_mut(slots).enumerate() {
            let sum = (kept[0][t] + kept[1][t]).max(f32::EPSILON);
            for j in 0..2 {
                if kept[j][t] > 0.0 {
                    row[ids[j][t] * self.capacity + places[j][t]] = kept[j][t] / sum;
                }
            }
        }
        let dispatch: Vec<f32> = combine
            .par_iter()
            .map(|v| f32::from(u8::from(*v != 0.0)))
            .collect();
        Masks {
            scores,
            ids,
            kept,
            places,
            combine,
            dispatch,
        }
    }

    /// Rows of slots `[E·C, d]`, from tokens.
    pub fn dispatch(&self, masks: &Masks, x: &[f32], d: usize) -> Vec<f32> {
        let (t, slots) = (self.tokens, self.slots());
        product((&masks.dispatch, [1, slots]), (x, [d, 1]), [slots, t, d])
    }

    /// Tokens again, from what experts made of the rows.
    pub fn combine(&self, masks: &Masks, rows: &[f32], d: usize) -> Vec<f32> {
        let (t, slots) = (self.tokens, self.slots());
        product((&masks.combine, [slots, 1]), (rows, [d, 1]), [t, slots, d])
    }

    /// From `dy`, for which `dy` itself serves, through three dense products.
    pub fn backward(&self, state: &State, dy: &[f32], d: usize) -> Gradients {
        let (rows, logits) = self.combine_backward(&state.masks, &state.expert_rows, dy, d);
        Gradients {
            x: self.dispatch_backward(&state.masks, &rows, d),
            logits,
        }
    }

    /// Gradients of what experts made of the rows, `[E·C, d]`, and of the logits.
    pub fn combine_backward(
        &self,
        masks: &Masks,
        rows: &[f32],
        dy: &[f32],
        d: usize,
    ) -> (Vec<f32>, Vec<f32>) {
        let (t, slots) = (self.tokens, self.slots());
        let dcombine = product((dy, [d, 1]), (rows, [1, d]), [t, d, slots]);
        let drows = product((&masks.combine, [1, slots]), (dy, [d, 1]), [slots, t, d]);
        (drows, self.gate_backward(masks, &dcombine))
    }

    /// Gradients of tokens, from those of the rows that experts got.
    pub fn dispatch_backward(&self, masks: &Masks, drows: &[f32], d: usize) -> Vec<f32> {
        let (t, slots) = (self.tokens, self.slots());
        product(
            (&masks.dispatch, [slots, 1]),
            (drows, [d, 1]),
            [t, slots, d],
        )
    }

    fn gate_backward(&self, masks: &Masks, dcombine: &[f32]) -> Vec<f32> {
        let (e, slots, state) = (self.experts, self.slots(), masks);
        let mut dlogits = vec![0.0; self.tokens * e];
        let rows = dlogits.par_chunks_mut(e).enumerate();
        rows.for_each(|(t, row)| {
            let kept = [state.kept[0][t], state.kept[1][t]];
            let sum = (kept[0] + kept[1]).max(f32::EPSILON);
            let place = |j: usize| state.ids[j][t] * self.capacity + state.places[j][t];
            let dw = [0, 1].map(|j| {
                if kept[j] > 0.0 {
                    dcombine[t * slots + place(j)]
                } else {
                    0.0
                }
            });
            let mean = (dw[0] * kept[0] + dw[1] * kept[1]) / sum;
            for j in 0..2 {
                if kept[j] > 0.0 {
                    row[state.ids[j][t]] += (dw[j] - mean) / sum;
                }
            }
            let scores = &state.scores[t * e..(t + 1) * e];
            let along: f32 = row.iter().zip(scores).map(|(g, s)| g * s).sum();
            for (g, s) in row.iter_mut().zip(scores) {
                *g = s * (*g - along);
            }
        });
        dlogits
    }
}

impl State {
    /// With experts that do nothing a token comes back times the sum of its
    /// weights: 1, or 0 when both choices were dropped.
    pub fn check(&self, x: &[f32], d: usize) {
        for (t, (y, x)) in self.y.chunks_exact(d).zip(x.chunks_exact(d)).enumerate() {
            let kept = self.masks.kept[0][t] + self.masks.kept[1][t];
            let factor = if kept > 0.0 { 1.0 } else { 0.0 };
            let close = y.iter().zip(x).all(|(y, x)| (y - factor * x).abs() < 1e-4);
            assert!(close, "token {t} did not come back");
        }
    }
}

impl Gradients {
    /// The same token again gets the gradient back times the sum of its
    /// weights, and moving weight between experts that do nothing changes
    /// nothing.
    pub fn check(&self, state: &State, dy: &[f32], d: usize) {
        let width = self.logits.len() * d / dy.len();
        let flat = |row: &[f32]| row.iter().all(|g| g.abs() < 1e-3);
        for (t, (dx, dy)) in self.x.chunks_exact(d).zip(dy.chunks_exact(d)).enumerate() {
            let kept = state.masks.kept[0][t] + state.masks.kept[1][t];
            let factor = if kept > 0.0 { 1.0 } else { 0.0 };
            let mut pairs = dx.iter().zip(dy);
            let close = pairs.all(|(dx, dy)| (dx - factor * dy).abs() < 1e-4);
            assert!(close, "token {t} has another gradient");
            assert!(flat(&self.logits[t * width..][..width]), "logits of {t}");
        }
    }
}

/// A matrix and its strides by row and column.
type Strided<'a> = (&'a [f32], [usize; 2]);

/// `a · b`, `[m, k] · [k, n]`, spread over threads by rows.
pub fn product(a: Strided, b: Strided, [m, k, n]: [usize; 3]) -> Vec<f32> {
    let last =
        |[row, col]: [usize; 2], rows: usize, cols: usize| (rows - 1) * row + (cols - 1) * col;
    assert!(last(a.1, m, k) < a.0.len() && last(b.1, k, n) < b.0.len());
    let mut c = vec![0.0; m * n];
    let rows = m.div_ceil(rayon::current_num_threads()).max(1);
    c.par_chunks_mut(rows * n).enumerate().for_each(|(i, c)| {
        let a_part = &a.0[i * rows * a.1[0]..];
        // SAFETY: the last element of each factor was checked above; this part
        // of c has as many rows as it is asked for.
        unsafe {
            sgemm(
                c.len() / n,
                k,
                n,
                1.0,
                a_part.as_ptr(),
                a.1[0] as isize,
                a.1[1] as isize,
                b.0.as_ptr(),
                b.1[0] as isize,
                b.1[1] as isize,
                0.0,
                c.as_mut_ptr(),
                n as isize,
                1,
            );
        }
    });
    c
}
