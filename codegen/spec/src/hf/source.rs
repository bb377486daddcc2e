//! Recipes: how a canonical tensor is put together from a checkpoint.

use super::Codes;
use crate::{GateLayout, LayerSpec, TensorSpec, canonical_tensors};

/// How one canonical tensor is put together.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorSource {
    /// The canonical name: `experts.gate.weight`.
    pub name: String,
    /// The ways checkpoints hold it; the first whose tensors are all there and
    /// whose shapes fit is taken. Where the same tensor fits both as it is and transposed, the
    /// layer's other tensors decide: a checkpoint transposes all of its experts or none.
    pub alternatives: Vec<Alternative>,
}

/// One way to hold a tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct Alternative {
    /// The tensors to read.
    pub parts: Parts,
    /// What is done to each of them, in order, before several are stacked.
    pub steps: Vec<Step>,
}

/// The tensors to read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Parts {
    /// One tensor.
    One(String),
    /// `{before}{first + e}{after}` for each expert `e` below `count`, stacked
    /// along a new first dimension.
    PerExpert {
        /// The name up to the number.
        before: String,
        /// The name after the number.
        after: String,
        /// The number of the first.
        first: usize,
        /// How many.
        count: usize,
    },
    /// One tensor for every expert, repeated along a new first dimension.
    Repeated {
        /// Its name.
        name: String,
        /// How often.
        count: usize,
    },
}

/// What is done to a tensor.
#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    /// Codes become numbers, where the tensor has codes; one of floats stays as it is, since
    /// no checkpoint has all of its tensors quantized. It stands first.
    Dequantize(Codes),
    /// The same elements in another row-major shape.
    Reshape(Vec<usize>),
    /// The last two dimensions are swapped.
    Transpose,
    /// Elements `start, start + step, …`, `count` of them, along `axis`, which
    /// must have `of` elements.
    Take {
        /// The dimension.
        axis: usize,
        /// The first index.
        start: usize,
        /// The distance between two indices.
        step: usize,
        /// How many.
        count: usize,
        /// Size of the dimension before.
        of: usize,
    },
    /// Each element times the number.
    Factor(f64),
    /// Each row times the named vector, element by element.
    MulColumns(String),
    /// Each row divided by the named vector, element by element.
    DivColumns(String),
}

impl Parts {
    /// The tensor of each part, in order.
    pub fn names(&self) -> Vec<String> {
        match self {
            Parts::One(name) => vec![name.clone()],
            Parts::PerExpert {
                before,
                after,
                first,
                count,
            } => (*first..first + count)
                .map(|e| format!("{before}{e}{after}"))
                .collect(),
            Parts::Repeated { name, count } => vec![name.clone(); *count],
        }
    }
}

impl Alternative {
    /// One tensor as it is.
    pub fn plain(name: impl Into<String>) -> Alternative {
        Alternative {
            parts: Parts::One(name.into()),
            steps: Vec::new(),
        }
    }

    /// Whether the last two dimensions of the tensor in the file are swapped.
    pub fn transposes(&self) -> bool {
        self.steps.contains(&Step::Transpose)
    }

    /// Every tensor name that this way reads, scales of codes aside: only a tensor says whether
    /// it has any.
    pub fn names(&self) -> Vec<String> {
        let mut names = self.parts.names();
        names.dedup();
        names.extend(self.steps.iter().filter_map(|step| match step {
            Step::MulColumns(name) | Step::DivColumns(name) => Some(name.clone()),
            _ => None,
        }));
        names
    }
}

/// Recipes for a file with canonical names in the spec's own gate layout, or
/// with gate and up apart.
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

/// A gate or up tensor as its half of `gate_up`, where the layout has that.
fn half_of_gate_up(layout: GateLayout, tensor: &TensorSpec) -> Option<Alternative> {
    let half = match tensor.name.split('.').rev().nth(1) {
        Some("gate") if layout != GateLayout::Split => 0,
        Some("up") if layout != GateLayout::Split => 1,
        _ => return None,
    };
    // `experts.gate.bias` is [E, h], `shared.0.gate.weight` is [h, d]: the
    // hidden dimension is the last of a bias, the one before of a weight.
    let axis = tensor.shape.len() - if tensor.name.ends_with(".bias") { 1 } else { 2 };
    let from = if half == 0 { ".gate." } else { ".up." };
    Some(Alternative {
        parts: Parts::One(tensor.name.replacen(from, ".gate_up.", 1)),
        steps: vec![half_of(
            axis,
            half,
            tensor.shape[axis],
            layout == GateLayout::Interleaved,
        )],
    })
}

/// Half 0 (gate) or 1 (up) of a fused dimension of `2 * count`.
pub(crate) fn half_of(axis: usize, half: usize, count: usize, interleaved: bool) -> Step {
    let (start, step) = if interleaved {
        (half, 2)
    } else {
        (half * count, 1)
    };
    Step::Take {
        axis,
        start,
        step,
        count,
        of: 2 * count,
    }
}
