//! The choice of shadows: experts that every group of ranks holds for one step, as in FasterMoE.
//!
//! A shadowed expert's weights go to all groups, its rows stay, and its gradients are summed at the
//! owner. The model predicts latency from the rows of the busiest group. Let `H` be the width of
//! tokens, `aH` that of experts, `w` the size of a weight; `P` operations and `W` elements a second:
//!
//! ```text
//! plain         L₀ = 12·B·a·H² / P + 4·B·H / W
//! r shadows     L  = 12·B'·a·H² / P + 2·r·2·w·a·H² / W                 paper
//!               L  = 12·B'·a·H² / P + 4·B'·H / W + r·2·w·a·H² / W      as released
//! ```
//!
//! A step has three GEMM passes of 4·a·H² operations a row and four exchanges of a row's H
//! elements. The paper (PPoPP 2022, sections 3 and 4) counts a shadow's weights and its gradients;
//! the released policy counts one of the two, and takes for `B` the rows of an expert instead of a
//! group's, as if each group had one expert.

use super::Placement;
use moesaic_spec::{FormatTensor, LayerSpec};

/// The parameters of the shadow model: layer and machine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ShadowModel {
    /// `H`: elements of a token.
    pub width: f64,
    /// `a`: the hidden width of experts, in `H`.
    pub ratio: f64,
    /// `w`: elements that a shadowed weight travels as, the mean of its copy and its gradient. One
    /// for numbers. Codes have no gradient: half their bytes, scales included, over an element's.
    pub weight: f64,
    /// `P`: operations a second of a rank.
    pub operations: f64,
    /// `W`: elements a second from rank to rank.
    pub elements: f64,
    /// The form of the shadow model.
    pub form: ShadowForm,
    /// The most experts that are shadowed.
    pub most: usize,
}

/// The form of the shadow model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ShadowForm {
    /// The form of the paper, by rows of groups.
    #[default]
    Paper,
    /// The form of FastMoE as released, by rows of experts.
    Released,
}

impl ShadowModel {
    /// Returns the paper's form for a layer, with FastMoE's constants of a machine.
    pub fn of(spec: &LayerSpec) -> ShadowModel {
        let width = spec.expert_input_dim();
        ShadowModel {
            ratio: spec.shape.hidden_dim as f64 / width as f64,
            weight: weight_size(spec),
            form: ShadowForm::Paper,
            ..ShadowModel::fastmoe(width)
        }
    }

    /// Returns FastMoE's constants: elements of 4 bytes over 50 Gb/s, 11.5 TFLOP/s, `a` of 2.
    pub fn fastmoe(width: usize) -> ShadowModel {
        ShadowModel {
            width: width as f64,
            ratio: 2.0,
            weight: 1.0,
            operations: 11.5e12,
            elements: 50e9 / 8.0 / 4.0,
            form: ShadowForm::Released,
            most: usize::MAX,
        }
    }

    /// Returns the seconds of a step whose busiest group, or expert, has `rows` rows.
    pub fn plain(&self, rows: f64) -> f64 {
        self.products(rows) + self.exchanges(rows)
    }

    /// Returns the seconds of a step with `shadows` shadowed experts.
    pub fn shadowed(&self, rows: f64, shadows: usize) -> f64 {
        let weights = 2.0 * self.weight * self.ratio * self.width * self.width / self.elements;
        let sent = shadows as f64 * weights;
        match self.form {
            ShadowForm::Paper => self.products(rows) + 2.0 * sent,
            ShadowForm::Released => self.products(rows) + self.exchanges(rows) + sent,
        }
    }

    /// Returns the paper's condition for `shadows` experts that take the rows of the busiest group
    /// from `before` to `after`: either the rows before exceed `r·w·a·H`, or the saved operations
    /// outweigh the exchanged weights. The condition equals `shadowed(after) < plain(before)` where
    /// rows do not increase.
    pub fn worth(&self, before: f64, after: f64, shadows: usize) -> bool {
        let sent = shadows as f64 * self.weight * self.ratio * self.width;
        let saved = 3.0 * (before - after) * self.ratio * self.width;
        before > sent || saved / (sent - before) > self.operations / self.elements
    }

    fn products(&self, rows: f64) -> f64 {
        12.0 * rows * self.ratio * self.width * self.width / self.operations
    }

    fn exchanges(&self, rows: f64) -> f64 {
        4.0 * rows * self.width / self.elements
    }
}

/// Returns [`ShadowModel::weight`] of a layer.
fn weight_size(spec: &LayerSpec) -> f64 {
    let Some(format) = spec.precision.experts else {
        return 1.0;
    };
    let size = [spec.shape.hidden_dim, spec.expert_input_dim()];
    let bytes = |tensor: FormatTensor| tensor.dtype.size() * tensor.shape[0] * tensor.shape[1];
    let codes: usize = format.tensors(size).into_iter().map(bytes).sum();
    let elements = spec.precision.activations.size() * size[0] * size[1];
    0.5 * codes as f64 / elements as f64
}

/// Chooses the shadowed experts of a step, hottest first. Experts are tried by their rows,
/// descending; of equal ones the lower id comes first. Each is shadowed while the model predicts a
/// shorter step; the first that does not shorten the step ends the search. `counts` are the rows of
/// each rank of a group for each expert, gathered from all, so that every rank decides alike;
/// `expert_tp` as in [`Placement::received`]. The last expert is never shadowed.
pub fn shadows(
    model: &ShadowModel,
    present: &Placement,
    expert_tp: usize,
    counts: &[Vec<usize>],
) -> Vec<usize> {
    let experts = present.experts();
    let of = |expert: usize| counts.iter().map(|rank| rank[expert]).sum::<usize>();
    let totals: Vec<usize> = (0..experts).map(of).collect();
    let mut order: Vec<usize> = (0..experts).collect();
    // A stable sort: of equal experts the lower id comes first, on every rank.
    order.sort_by_key(|&expert| std::cmp::Reverse(totals[expert]));
    let rows_with = |chosen: usize| match model.form {
        ShadowForm::Released => totals[order[chosen]],
        ShadowForm::Paper => busiest(present, expert_tp, counts, &order[..chosen]),
    };
    let mut chosen = 0;
    let mut best = model.plain(rows_with(0) as f64);
    let last = experts.saturating_sub(1).min(model.most);
    while chosen < last {
        let next = model.shadowed(rows_with(chosen + 1) as f64, chosen + 1);
        if next >= best {
            break;
        }
        (best, chosen) = (next, chosen + 1);
    }
    order.truncate(chosen);
    order
}

/// Returns the rows of the busiest group when some experts are shadowed.
fn busiest(
    present: &Placement,
    expert_tp: usize,
    counts: &[Vec<usize>],
    shadowed: &[usize],
) -> usize {
    let placed = match shadowed {
        // `with_shadows` also keeps the rows of replicas near, so without shadows it would not give
        // the same rows.
        [] => Ok(present.clone()),
        _ => present.with_shadows(shadowed),
    };
    let placed = placed.expect("they are the layer's");
    placed
        .received(expert_tp, counts)
        .into_iter()
        .max()
        .unwrap_or(0)
}
