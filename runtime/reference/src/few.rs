//! `y` of a few tokens, computed from weights in their stored types.
//!
//! The reference takes f64 weights, and real layers are too large for eight bytes per element. A
//! few tokens reach few experts, so only those are converted.

use crate::{Decision, Input, Tensor, Weights, combine, gate, numbers, scan};
use moesaic_spec::LayerSpec;
use moesaic_tensor::{Tensor as Stored, Tensors};

/// Returns `y [T, d_out]` of a call with few tokens. `weights` are the layer's, by canonical name.
pub fn y_of_few(spec: &LayerSpec, weights: &Tensors<'_>, input: &Input) -> Vec<f64> {
    let router = weights
        .iter()
        .filter(|(name, _)| name.starts_with("router."));
    let router = Weights(router.map(|(name, t)| (name.clone(), t.into())).collect());
    let decision = gate(spec, &router, input).decision;
    let placed = scan(spec, &decision, input);
    let few = Few::of(spec, &decision);
    let (plain, numbers) = numbers(&few.spec, &few.weights(weights));
    combine(&plain, &numbers, input, &few.ids, &placed)
}

/// The layer with only its used experts, renumbered.
struct Few {
    spec: LayerSpec,
    used: Vec<usize>,
    ids: Vec<i32>,
}

impl Few {
    fn of(spec: &LayerSpec, decision: &Decision) -> Few {
        let experts = spec.shape.experts;
        let real = decision
            .ids
            .iter()
            .filter_map(|&id| usize::try_from(id).ok());
        let mut used: Vec<usize> = real.filter(|&id| id < experts).collect();
        used.sort_unstable();
        used.dedup();
        let renumber = |&id: &i32| match usize::try_from(id) {
            Err(_) => id,
            // Experts without weights are numbered after those with weights.
            Ok(id) if id >= experts => (used.len() + id - experts) as i32,
            Ok(id) => used.binary_search(&id).unwrap_or(0) as i32,
        };
        let ids = decision.ids.iter().map(renumber).collect();
        let mut spec = spec.clone();
        spec.shape.experts = used.len();
        Few { spec, used, ids }
    }

    fn weights(&self, all: &Tensors<'_>) -> Weights {
        let needed = all.iter().filter(|(name, _)| !name.starts_with("router."));
        let tensor = |name: &str, t: &Stored<'_>| {
            if name.starts_with("experts.") {
                self.some(t)
            } else {
                t.into()
            }
        };
        Weights(
            needed
                .map(|(name, t)| (name.clone(), tensor(name, t)))
                .collect(),
        )
    }

    /// Returns the used rows of the first dimension.
    fn some(&self, tensor: &Stored<'_>) -> Tensor {
        let row = |&e: &usize| tensor.rows(e..e + 1).map_or(vec![], |row| row.to_f64());
        let mut shape = tensor.shape.clone();
        shape[0] = self.used.len();
        Tensor {
            shape,
            data: self.used.iter().flat_map(row).collect(),
        }
    }
}
