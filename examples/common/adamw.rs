//! AdamW over parameters in the order that a module visits them.

use super::ops::{Module, Param};
use rayon::prelude::*;

/// AdamW (Loshchilov and Hutter, 2019): moments with bias correction, decay
/// apart from the gradient.
pub struct AdamW {
    /// β₁ and β₂.
    pub betas: (f32, f32),
    /// Decoupled decay per unit of learning rate.
    pub decay: f32,
    step: i32,
    moments: Vec<(Vec<f32>, Vec<f32>)>,
}

impl AdamW {
    /// With the usual β₁ = 0.9, and the β₂ = 0.95 of language models.
    pub fn new(decay: f32) -> AdamW {
        AdamW {
            betas: (0.9, 0.95),
            decay,
            step: 0,
            moments: Vec::new(),
        }
    }

    /// One step on every parameter of `module`.
    pub fn step(&mut self, module: &mut impl Module, rate: f32) {
        self.step += 1;
        let mut list: Vec<&mut Param> = Vec::new();
        module.params("", &mut |_, param| list.push(param));
        for (index, param) in list.into_iter().enumerate() {
            if self.moments.len() == index {
                let zero = vec![0.0; param.value.len()];
                self.moments.push((zero.clone(), zero));
            }
            self.update(index, param, rate);
        }
    }

    fn update(&mut self, index: usize, param: &mut Param, rate: f32) {
        const CHUNK: usize = 1 << 14;
        let (b1, b2) = self.betas;
        let (c1, c2) = (1.0 - b1.powi(self.step), 1.0 - b2.powi(self.step));
        let shrink = 1.0 - rate * if param.decay { self.decay } else { 0.0 };
        let (first, second) = &mut self.moments[index];
        param
            .value
            .par_chunks_mut(CHUNK)
            .zip(param.grad.par_chunks(CHUNK))
            .zip(first.par_chunks_mut(CHUNK))
            .zip(second.par_chunks_mut(CHUNK))
            .for_each(|(((value, grad), first), second)| {
                for i in 0..value.len() {
                    first[i] = b1 * first[i] + (1.0 - b1) * grad[i];
                    second[i] = b2 * second[i] + (1.0 - b2) * grad[i] * grad[i];
                    let direction = first[i] / c1 / ((second[i] / c2).sqrt() + 1e-8);
                    value[i] = shrink * value[i] - rate * direction;
                }
            });
    }
}
