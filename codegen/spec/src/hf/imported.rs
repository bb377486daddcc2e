//! One MoE layer of a checkpoint, as it is imported.

use super::TensorSource;
use crate::LayerSpec;
use std::ops::Range;

/// The note of an import whose checkpoint is quantized.
pub const QUANTIZED_NOTE: &str = "the checkpoint's weights are quantized and become the layer's \
                                  type when they are read; activations are not quantized";

/// One MoE layer of a checkpoint.
#[derive(Clone, Debug, PartialEq)]
pub struct Import {
    /// The layer's spec. Weights and activations have the checkpoint's element type; if the
    /// configuration names none, f32, or bf16 for a quantized checkpoint.
    pub spec: LayerSpec,
    /// One recipe per canonical tensor of `spec`, in their order.
    pub sources: Vec<TensorSource>,
    /// Notes for you: settings that were not taken over, or the exact meaning of `x`.
    pub notes: Vec<String>,
    /// Name prefixes of the layer's own MoE block.
    pub block: Vec<String>,
    /// Name prefixes of tensors inside it that belong to another layer or are not used.
    pub beside: Vec<String>,
    /// Indices of experts, in tensors of their own, that belong to another layer or are not used.
    pub others: Range<usize>,
    /// Routers that tokens of some modality have instead of the layer's own, over the same experts.
    pub routers: Vec<ModalityRouter>,
}

/// The router of a modality's tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct ModalityRouter {
    /// The modality: `image`, `audio`.
    pub name: String,
    /// One recipe per canonical tensor whose name begins with `router.`.
    pub sources: Vec<TensorSource>,
}

impl Import {
    /// Returns true if a tensor of that name belongs to this layer's MoE block. If no recipe reads
    /// such a tensor, the configuration does not describe the checkpoint. Scales of quantized
    /// tensors and the statistics that quantizers keep of activations do not count.
    pub fn owns(&self, name: &str) -> bool {
        let leaf = name.rsplit('.').next().unwrap_or(name);
        let codes = ["scale", "zero_point", "g_idx", "weight_shape", "observer"];
        let begins = |list: &[String]| list.iter().any(|part| name.starts_with(part.as_str()));
        let number = name
            .split_once(".experts.")
            .map(|(_, rest)| rest.split('.').next());
        let number = number.flatten().and_then(|digits| digits.parse().ok());
        let other = number.is_some_and(|number| self.others.contains(&number));
        let ours = begins(&self.block) && !begins(&self.beside) && !other;
        ours && !codes.iter().any(|part| leaf.contains(part))
    }
}
