//! Recipes that assemble a canonical tensor from a checkpoint.

use super::Codes;
use crate::{GateLayout, LayerSpec, TensorSpec, canonical_tensors};

/// The recipe of one canonical tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorSource {
    /// The canonical name: `experts.gate.weight`.
    pub name: String,
    /// The forms in which checkpoints hold it. The first whose tensors exist and whose shapes fit
    /// is used. If one tensor fits both as it is and transposed, the layer's other tensors decide,
    /// because a checkpoint transposes all of its experts or none.
    pub alternatives: Vec<Alternative>,
}

/// One form of a tensor in a checkpoint.
#[derive(Clone, Debug, PartialEq)]
pub struct Alternative {
    /// The tensors to read.
    pub parts: TensorParts,
    /// The steps applied to each part, in order, before several are stacked.
    pub steps: Vec<TensorStep>,
}

/// Some rows of a tensor that is joined from several.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorPiece {
    /// The tensor to read.
    pub name: String,
    /// The size of the first dimension of what the steps make of it.
    pub rows: usize,
    /// The steps applied to this tensor alone, after those of the [`Alternative`].
    pub steps: Vec<TensorStep>,
}

impl TensorPiece {
    /// Returns `rows` rows of a tensor, after the steps.
    pub(crate) fn of(name: &str, rows: usize, steps: Vec<TensorStep>) -> TensorPiece {
        TensorPiece {
            name: name.to_string(),
            rows,
            steps,
        }
    }
}

/// The tensors to read.
#[derive(Clone, Debug, PartialEq)]
pub enum TensorParts {
    /// One tensor.
    One(String),
    /// `{before}{first + e}{after}` for each expert `e` below `count`, stacked along a new first
    /// dimension.
    PerExpert {
        /// The name before the number.
        before: String,
        /// The name after the number.
        after: String,
        /// The number of the first expert.
        first: usize,
        /// The number of experts.
        count: usize,
    },
    /// One tensor for every expert, repeated along a new first dimension.
    Repeated {
        /// Its name.
        name: String,
        /// The number of repetitions.
        count: usize,
    },
    /// Tensors joined along their first dimension, such as routed experts and shared ones that
    /// the router scores with them.
    Joined(Vec<TensorPiece>),
}

/// An operation on a tensor.
#[derive(Clone, Debug, PartialEq)]
pub enum TensorStep {
    /// Decodes quantized tensors; float tensors pass unchanged, because no checkpoint quantizes all
    /// of its tensors. It comes first.
    Dequantize(Codes),
    /// Gives the elements another row-major shape.
    Reshape(Vec<usize>),
    /// Swaps the last two dimensions.
    Transpose,
    /// Takes `count` elements `start, start + step, …` along `axis`, which must have `of` elements.
    Take {
        /// The dimension.
        axis: usize,
        /// The first index.
        start: usize,
        /// The distance between two indices.
        step: usize,
        /// The number of elements taken.
        count: usize,
        /// The size of the dimension before.
        of: usize,
    },
    /// Multiplies each element by the number.
    Factor(f64),
    /// Multiplies each row by the named vector, element by element.
    MulColumns(String),
    /// Divides each row by the named vector, element by element.
    DivColumns(String),
    /// Adds the number to each element, after all factors.
    Plus(f64),
}

impl TensorParts {
    /// Returns the tensor of each part, in order.
    pub fn names(&self) -> Vec<String> {
        match self {
            TensorParts::One(name) => vec![name.clone()],
            TensorParts::PerExpert {
                before,
                after,
                first,
                count,
            } => (*first..first + count)
                .map(|e| format!("{before}{e}{after}"))
                .collect(),
            TensorParts::Repeated { name, count } => vec![name.clone(); *count],
            TensorParts::Joined(pieces) => pieces.iter().map(|piece| piece.name.clone()).collect(),
        }
    }
}

impl Alternative {
    /// Reads one tensor unchanged.
    pub fn plain(name: impl Into<String>) -> Alternative {
        Alternative {
            parts: TensorParts::One(name.into()),
            steps: Vec::new(),
        }
    }

    /// Returns true if the tensor in the file has its last two dimensions swapped.
    pub fn transposes(&self) -> bool {
        self.steps.contains(&TensorStep::Transpose)
    }

    /// Returns every tensor name that this form reads, except the scales of codes: only the tensor
    /// itself shows whether it has any.
    pub fn names(&self) -> Vec<String> {
        let mut names = self.parts.names();
        names.dedup();
        names.extend(self.steps.iter().filter_map(|step| match step {
            TensorStep::MulColumns(name) | TensorStep::DivColumns(name) => Some(name.clone()),
            _ => None,
        }));
        names
    }
}

/// Returns recipes for a file with canonical names, in the spec's own gate layout or with gate and
/// up apart.
pub fn canonical_sources(spec: &LayerSpec) -> Vec<TensorSource> {
    let source = |tensor: TensorSpec| {
        let fused = half_of_gate_up(spec.experts.layout, &tensor);
        let apart = Alternative::plain(&tensor.name);
        TensorSource {
            alternatives: fused.into_iter().chain([apart]).collect(),
            name: tensor.name,
        }
    };
    canonical_tensors(spec).into_iter().map(source).collect()
}

/// Returns a gate or up tensor as its half of `gate_up`, if the layout fuses them.
fn half_of_gate_up(layout: GateLayout, tensor: &TensorSpec) -> Option<Alternative> {
    let half = match tensor.name.split('.').rev().nth(1) {
        Some("gate") if layout != GateLayout::Split => 0,
        Some("up") if layout != GateLayout::Split => 1,
        _ => return None,
    };
    // `experts.gate.bias` is [E, h], `shared.0.gate.weight` is [h, d]: the hidden dimension is the
    // last one of a bias, and the last but one of a weight.
    let axis = tensor.shape.len() - if tensor.name.ends_with(".bias") { 1 } else { 2 };
    let from = if half == 0 { ".gate." } else { ".up." };
    Some(Alternative {
        parts: TensorParts::One(tensor.name.replacen(from, ".gate_up.", 1)),
        steps: vec![half_of(
            axis,
            half,
            tensor.shape[axis],
            layout == GateLayout::Interleaved,
        )],
    })
}

/// Takes half 0 (gate) or 1 (up) of a fused dimension of `2 * count`.
pub(crate) fn half_of(axis: usize, half: usize, count: usize, interleaved: bool) -> TensorStep {
    let (start, step) = if interleaved {
        (half, 2)
    } else {
        (half * count, 1)
    };
    TensorStep::Take {
        axis,
        start,
        step,
        count,
        of: 2 * count,
    }
}
