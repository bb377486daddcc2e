//! The tensors that quantized checkpoints hold in place of float weights, and their names.

use crate::format::{CodeType, Format};
use std::fmt;
use std::sync::Arc;

/// The forms in which a quantized checkpoint may hold a matrix. The tensors that are present decide
/// which form it is, or that the matrix is not quantized.
#[derive(Clone, PartialEq, Eq)]
pub struct Codes {
    /// The forms; the first that fits is used.
    pub stored: Arc<[StoredFormat]>,
    /// Modules that the configuration exempts from quantization.
    pub kept: Arc<[String]>,
}

/// A format, and the names of the tensors that hold its parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoredFormat {
    /// The format.
    pub format: Format,
    /// The names of the tensors.
    pub names: TensorNames,
}

/// The names of a quantized matrix's tensors, each derived from the matrix's float name by
/// replacing its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorNames {
    /// The codes.
    pub codes: NameEnd,
    /// The scales, by one of these names.
    pub scales: &'static [NameEnd],
    /// The second scale.
    pub second: Option<NameEnd>,
    /// The zero points.
    pub zeros: Option<NameEnd>,
    /// The group of each column.
    pub groups: Option<NameEnd>,
    /// Whether groups are in any order, so that the group of each column must be there.
    pub reordered: bool,
    /// The row and column counts of the matrix.
    pub shape: Option<NameEnd>,
    /// Tensors without information on the weights, such as the scales of activations.
    pub unread: &'static [NameEnd],
    /// Tensors with which the matrix computes something else.
    pub refused: &'static [NameEnd],
}

/// A replacement for the end of a tensor's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NameEnd {
    /// The text that is cut off; a name that ends otherwise has no replacement.
    pub cut: &'static str,
    /// The text that takes its place.
    pub put: &'static str,
}

/// Replaces `cut` by `put`.
pub(super) const fn end(cut: &'static str, put: &'static str) -> NameEnd {
    NameEnd { cut, put }
}

/// Names of formats that put codes under the float name, with scales beside them.
pub(super) const IN_PLACE: TensorNames = TensorNames {
    codes: end("", ""),
    scales: &[
        end("", "_scale_inv"),
        end("", "_scale"),
        end(".weight", ".scale"),
        end(".weight", ".qscale_weight"),
        // ModelOpt's, of a stack of experts that is no module of its own.
        end("", "_weight_scale"),
    ],
    second: Some(end("", "_scale_2")),
    zeros: Some(end("", "_zero_point")),
    groups: Some(end("", "_g_idx")),
    reordered: false,
    shape: None,
    unread: &[
        end(".weight", ".input_scale"),
        end(".weight", ".activation_scale"),
    ],
    // ModelOpt's AWQ multiplies activations by it.
    refused: &[end(".weight", ".pre_quant_scale")],
};

/// ModelOpt's names of a stack of experts that is no module of its own.
pub(super) const STACKED: TensorNames = TensorNames {
    scales: &[end("", "_weight_scale")],
    second: Some(end("", "_weight_scale_2")),
    unread: &[end("", "_input_scale")],
    ..IN_PLACE
};

/// compressed-tensors' names of packed codes.
pub(super) const PACKED: TensorNames = TensorNames {
    codes: end("", "_packed"),
    scales: &[end("", "_scale")],
    second: Some(end("", "_global_scale")),
    shape: Some(end("", "_shape")),
    unread: &[
        end(".weight", ".input_scale"),
        end(".weight", ".input_zero_point"),
        end(".weight", ".input_global_scale"),
    ],
    ..IN_PLACE
};

/// The names that GPTQ, AWQ and AutoRound share.
pub(super) const QWEIGHT: TensorNames = TensorNames {
    codes: end(".weight", ".qweight"),
    scales: &[end(".weight", ".scales")],
    second: None,
    zeros: Some(end(".weight", ".qzeros")),
    groups: Some(end(".weight", ".g_idx")),
    reordered: false,
    shape: None,
    unread: &[],
    refused: &[],
};

/// gpt-oss' names. Its recipes name the codes themselves.
pub(super) const BLOCKS: TensorNames = TensorNames {
    codes: end("", ""),
    scales: &[end("_blocks", "_scales")],
    second: None,
    zeros: None,
    groups: None,
    reordered: false,
    shape: None,
    unread: &[],
    refused: &[],
};

impl TensorNames {
    /// Returns the possible names of the scales of the matrix `name`, the usual one first.
    pub fn scales(&self, name: &str) -> Vec<String> {
        let ends = self.scales.iter();
        ends.filter_map(|end| replaced(name, *end)).collect()
    }

    /// Returns true for gpt-oss' form, whose codes have one more dimension: groups of 32 codes in
    /// 16 bytes.
    pub fn in_blocks(&self) -> bool {
        *self == BLOCKS
    }
}

/// Replaces the end of a name. `None` if the name does not end in `cut`.
pub fn replaced(name: &str, NameEnd { cut, put }: NameEnd) -> Option<String> {
    Some(name.strip_suffix(cut)?.to_string() + put)
}

impl Codes {
    /// Returns codes in one of these forms.
    pub fn new(stored: &[StoredFormat], kept: Vec<String>) -> Codes {
        Codes {
            stored: stored.into(),
            kept: kept.into(),
        }
    }

    /// Returns every name that a tensor of the matrix `name` may have.
    pub fn names(&self, name: &str) -> Vec<String> {
        let of = |stored: &StoredFormat| {
            let names = stored.names;
            let few = [names.second, names.zeros, names.groups, names.shape];
            let ends = [names.codes].into_iter().chain(few.into_iter().flatten());
            let ends = ends.chain(names.scales.iter().chain(names.unread).copied());
            ends.filter_map(|end| replaced(name, end))
                .collect::<Vec<String>>()
        };
        let mut names: Vec<String> = self.stored.iter().flat_map(of).collect();
        names.sort();
        names.dedup();
        names
    }

    /// Returns the names of the matrix `name`'s codes other than `name` itself.
    pub fn apart(&self, name: &str) -> Vec<String> {
        let stored = self.stored.iter();
        let names = stored.filter_map(|stored| replaced(name, stored.names.codes));
        let mut names: Vec<String> = names.filter(|other| other != name).collect();
        names.dedup();
        names
    }

    /// Returns true for gpt-oss' MXFP4, which has its own recipes.
    pub(super) fn is_blocks(&self) -> bool {
        self.stored
            .first()
            .is_some_and(|stored| stored.names.in_blocks())
    }
}

/// Prints a short form, because every recipe of a layer holds one of these.
impl fmt::Debug for Codes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let way = |stored: &StoredFormat| {
            let Format {
                name,
                element,
                block,
                ..
            } = stored.format;
            match element {
                CodeType::Uint(bits) => format!("{name} of {bits} bits, {block:?}"),
                _ => format!("{name}, {block:?}"),
            }
        };
        let ways: Vec<String> = self.stored.iter().map(way).collect();
        write!(f, "Codes({})", ways.join("; "))
    }
}
