//! The expert layer in plain loops: what the compiled kernels must compute.

use super::common::feed_forward::FeedForward;
use super::common::gemm::{View, matmul, matmul_into};
use super::common::ops::{Linear, Module, Param, add, relu, relu_backward};
use moesaic::EngineError;
use moesaic::reference::Random;

/// Linear router, softmax over the selected logits, ReLU experts.
pub struct Plain {
    router: Param,
    experts: Vec<(Linear, Linear)>,
    width: usize,
    top_k: usize,
    kept: Kept,
}

#[derive(Default)]
struct Kept {
    x: Vec<f32>,
    /// Per expert: token, choice.
    slots: Vec<Vec<(usize, usize)>>,
    weights: Vec<f32>,
    ids: Vec<usize>,
    rows: Vec<Vec<f32>>,
    hidden: Vec<Vec<f32>>,
    out: Vec<Vec<f32>>,
}

impl Plain {
    pub fn new(
        [width, hidden, experts, top_k]: [usize; 4],
        gain: f64,
        random: &mut Random,
    ) -> Plain {
        let router = Param::uniform(experts * width, 1.0 / (width as f64).sqrt(), random);
        Plain {
            router,
            experts: (0..experts)
                .map(|_| {
                    (
                        Linear::new(width, hidden, 1.0, random),
                        Linear::new(hidden, width, gain, random),
                    )
                })
                .collect(),
            width,
            top_k,
            kept: Kept::default(),
        }
    }

    fn route(&self, x: &[f32]) -> (Vec<usize>, Vec<f32>) {
        let e = self.experts.len();
        let t = x.len() / self.width;
        let logits = matmul(
            View::new(x, t, self.width),
            View::new(&self.router.value, e, self.width).t(),
        );
        let (mut ids, mut weights) = (vec![], vec![]);
        for row in logits.chunks_exact(e) {
            let mut order: Vec<usize> = (0..e).collect();
            order.sort_by(|a, b| row[*b].total_cmp(&row[*a]));
            let top = &order[..self.top_k];
            let s: Vec<f32> = top.iter().map(|i| (row[*i] - row[top[0]]).exp()).collect();
            let sum: f32 = s.iter().sum();
            ids.extend(top);
            weights.extend(s.iter().map(|v| v / sum));
        }
        (ids, weights)
    }
}

impl FeedForward for Plain {
    fn forward(&mut self, x: Vec<f32>) -> Result<Vec<f32>, EngineError> {
        let d = self.width;
        let (ids, weights) = self.route(&x);
        let mut slots = vec![vec![]; self.experts.len()];
        for (i, e) in ids.iter().enumerate() {
            slots[*e].push((i / self.top_k, i));
        }
        let mut y = vec![0.0; x.len()];
        let mut kept = Kept::default();
        for (e, slots) in slots.iter().enumerate() {
            let rows: Vec<f32> = slots
                .iter()
                .flat_map(|(t, _)| x[t * d..(t + 1) * d].iter().copied())
                .collect();
            let mut hidden = self.experts[e].0.forward(&rows);
            relu(&mut hidden);
            let out = self.experts[e].1.forward(&hidden);
            for (r, (t, s)) in slots.iter().enumerate() {
                for i in 0..d {
                    y[t * d + i] += weights[*s] * out[r * d + i];
                }
            }
            kept.rows.push(rows);
            kept.hidden.push(hidden);
            kept.out.push(out);
        }
        (kept.x, kept.slots, kept.ids, kept.weights) = (x, slots, ids, weights);
        self.kept = kept;
        Ok(y)
    }

    fn backward(&mut self, dy: &[f32]) -> Result<Vec<f32>, EngineError> {
        let (d, k, e) = (self.width, self.top_k, self.experts.len());
        let kept = &self.kept;
        let t = kept.x.len() / d;
        let mut dx = vec![0.0; kept.x.len()];
        let mut dw = vec![0.0; kept.weights.len()];
        for (e, slots) in kept.slots.iter().enumerate() {
            let mut dout = vec![];
            for (r, (t, s)) in slots.iter().enumerate() {
                let dy = &dy[t * d..(t + 1) * d];
                dw[*s] = dy
                    .iter()
                    .zip(&kept.out[e][r * d..])
                    .map(|(a, b)| a * b)
                    .sum();
                dout.extend(dy.iter().map(|v| v * kept.weights[*s]));
            }
            let (up, down) = &mut self.experts[e];
            let mut dh = down.backward(&kept.hidden[e], &dout);
            relu_backward(&kept.hidden[e], &mut dh);
            let drows = up.backward(&kept.rows[e], &dh);
            for (r, (t, _)) in slots.iter().enumerate() {
                add(&mut dx[t * d..(t + 1) * d], &drows[r * d..(r + 1) * d]);
            }
        }
        let mut dlogits = vec![0.0; t * e];
        for t in 0..t {
            let mean: f32 = (t * k..t * k + k).map(|s| kept.weights[s] * dw[s]).sum();
            for s in t * k..t * k + k {
                dlogits[t * e + kept.ids[s]] = kept.weights[s] * (dw[s] - mean);
            }
        }
        let dl = View::new(&dlogits, t, e);
        matmul_into(dl.t(), View::new(&kept.x, t, d), 0.0, &mut self.router.grad);
        matmul_into(dl, View::new(&self.router.value, e, d), 1.0, &mut dx);
        Ok(dx)
    }
}

impl Module for Plain {
    fn params<'a>(&'a mut self, prefix: &str, visit: &mut dyn FnMut(String, &'a mut Param)) {
        visit(format!("{prefix}.router"), &mut self.router);
        for (i, (up, down)) in self.experts.iter_mut().enumerate() {
            up.params(&format!("{prefix}.up{i}"), visit);
            down.params(&format!("{prefix}.down{i}"), visit);
        }
    }
}
