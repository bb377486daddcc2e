//! A tensor of a plan: its type, its sizes, and who owns it.

use moesaic_kernel::{DType, Size};
use serde::{Deserialize, Serialize};

/// A tensor of the layer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorPlan {
    /// The canonical name, or that of an intermediate.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Sizes, outermost first; row major.
    pub shape: Vec<Size>,
    /// The owner.
    pub role: TensorRole,
}

/// The owner of a tensor, and its readers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TensorRole {
    /// The caller, at every call.
    Input,
    /// The caller, once.
    Weight,
    /// The layer, once, from weights: see [`LayerPlan::prepare`](crate::LayerPlan::prepare).
    Packed,
    /// The layer; the caller may read it after a call.
    Output,
    /// The layer, for itself.
    Scratch,
    /// The caller, at every backward pass: `dy`.
    OutputGradient,
    /// Backward; the caller may read it: `dx`, `grad.topk_weights`.
    InputGradient,
    /// Backward, which overwrites it or adds to it; the layer keeps it.
    WeightGradient,
}

impl TensorRole {
    /// Every role.
    pub const ALL: [TensorRole; 8] = [
        TensorRole::Input,
        TensorRole::Weight,
        TensorRole::Packed,
        TensorRole::Output,
        TensorRole::Scratch,
        TensorRole::OutputGradient,
        TensorRole::InputGradient,
        TensorRole::WeightGradient,
    ];
}

impl TensorPlan {
    /// Returns whether the tensor has a row for each token and nothing else, so that the rows of
    /// some tokens are a tensor of a call with these tokens alone.
    pub fn is_by_token(&self) -> bool {
        let mut sizes = self.shape.iter();
        // A size is an expression. These counts tell `tokens` from every division and rounding of
        // it that plans have.
        let counts = |size: &Size| [0, 1, 63, 1000, 1 << 20].iter().all(|&n| size.eval(n) == n);
        let constant = |size: &Size| size.eval(0) == size.eval(1 << 20);
        sizes.next().is_some_and(counts) && sizes.all(constant)
    }

    /// Returns the elements for a token count.
    pub fn elements(&self, tokens: u64) -> u64 {
        self.shape
            .iter()
            // A call that is too large must fail when its memory is allocated. A product that wraps
            // would be small enough to succeed.
            .fold(1, |product, size| product.saturating_mul(size.eval(tokens)))
    }

    /// Returns the bytes for a token count.
    pub fn bytes(&self, tokens: u64) -> u64 {
        self.elements(tokens)
            .saturating_mul(self.dtype.size() as u64)
    }
}

/// Returns the tensor of this name.
pub(crate) fn tensor(name: &str, dtype: DType, shape: &[Size], role: TensorRole) -> TensorPlan {
    TensorPlan {
        name: name.to_string(),
        dtype,
        shape: shape.to_vec(),
        role,
    }
}

/// Returns a size that does not depend on the tokens of a call.
pub(crate) fn constant(n: usize) -> Size {
    Size::Const(n as u64)
}
