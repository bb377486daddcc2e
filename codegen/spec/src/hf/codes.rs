//! What quantised checkpoints hold in place of numbers, and under which names.

use super::HfError;
use super::quantization;
use crate::format::{Element, Format};
use serde_json::Value;
use std::fmt;
use std::sync::Arc;

/// The ways in which a quantised checkpoint may hold a matrix; its tensors say which one
/// it is, or that the matrix has floats.
#[derive(Clone, PartialEq, Eq)]
pub struct Codes {
    /// The ways; the first that fits is taken.
    pub stored: Arc<[Stored]>,
    /// Modules that the configuration says are not quantised.
    pub kept: Arc<[String]>,
}

/// A format, and the tensors that hold its parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stored {
    /// The format.
    pub format: Format,
    /// The names of the tensors.
    pub names: Names,
}

/// The names of a quantised matrix' tensors: what is cut off the end of the name that the
/// matrix has as floats, and what is put there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Names {
    /// The codes.
    pub codes: End,
    /// The scales: alternatives.
    pub scales: &'static [End],
    /// The second scale.
    pub second: Option<End>,
    /// The zero points.
    pub zeros: Option<End>,
    /// The group of each column.
    pub groups: Option<End>,
    /// Rows and columns of the matrix.
    pub shape: Option<End>,
    /// Tensors that tell nothing about the weights, such as the scales of activations.
    pub unread: &'static [End],
}

/// What is cut off the end of a name, and what is put there.
pub type End = (&'static str, &'static str);

/// Codes where the floats would be, with names of the scales after theirs.
pub(super) const IN_PLACE: Names = Names {
    codes: ("", ""),
    scales: &[
        ("", "_scale_inv"),
        ("", "_scale"),
        (".weight", ".scale"),
        (".weight", ".qscale_weight"),
    ],
    second: Some(("", "_scale_2")),
    zeros: Some(("", "_zero_point")),
    groups: Some(("", "_g_idx")),
    shape: None,
    unread: &[
        (".weight", ".input_scale"),
        (".weight", ".activation_scale"),
    ],
};

/// compressed-tensors' names of packed codes.
pub(super) const PACKED: Names = Names {
    codes: ("", "_packed"),
    scales: &[("", "_scale")],
    second: Some(("", "_global_scale")),
    shape: Some(("", "_shape")),
    unread: &[
        (".weight", ".input_scale"),
        (".weight", ".input_zero_point"),
        (".weight", ".input_global_scale"),
    ],
    ..IN_PLACE
};

/// The names of GPTQ, AWQ and AutoRound.
pub(super) const QWEIGHT: Names = Names {
    codes: (".weight", ".qweight"),
    scales: &[(".weight", ".scales")],
    second: None,
    zeros: Some((".weight", ".qzeros")),
    groups: Some((".weight", ".g_idx")),
    shape: None,
    unread: &[],
};

/// gpt-oss' names, whose recipes name the codes.
pub(super) const BLOCKS: Names = Names {
    codes: ("", ""),
    scales: &[("_blocks", "_scales")],
    second: None,
    zeros: None,
    groups: None,
    shape: None,
    unread: &[],
};

impl Names {
    /// Where the scales of the matrix under `name` may be, most usual first.
    pub fn scales(&self, name: &str) -> Vec<String> {
        let ends = self.scales.iter();
        ends.filter_map(|end| replaced(name, *end)).collect()
    }

    /// Whether they are gpt-oss', whose codes have a dimension more: groups of 32 in 16 bytes.
    pub fn in_blocks(&self) -> bool {
        *self == BLOCKS
    }
}

/// Returns a name with another end, if it has the one that is cut off.
pub fn replaced(name: &str, (cut, put): End) -> Option<String> {
    Some(name.strip_suffix(cut)?.to_string() + put)
}

impl Codes {
    /// Codes of these ways.
    pub fn new(stored: &[Stored], kept: Vec<String>) -> Codes {
        Codes {
            stored: stored.into(),
            kept: kept.into(),
        }
    }

    /// Every name that tensors of the matrix under `name` may have.
    pub fn names(&self, name: &str) -> Vec<String> {
        let of = |stored: &Stored| {
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

    /// The names that codes of the matrix under `name` may have besides its own.
    pub fn apart(&self, name: &str) -> Vec<String> {
        let stored = self.stored.iter();
        let names = stored.filter_map(|stored| replaced(name, stored.names.codes));
        let mut names: Vec<String> = names.filter(|other| other != name).collect();
        names.dedup();
        names
    }

    /// Whether it is gpt-oss' MXFP4, which has recipes of its own.
    pub(super) fn is_blocks(&self) -> bool {
        self.stored
            .first()
            .is_some_and(|stored| stored.names.in_blocks())
    }

    /// The codes that a `quantization_config` speaks of.
    pub(super) fn read(model: &str, value: &Value) -> Result<Codes, HfError> {
        quantization::read(model, value)
    }
}

/// Short, since every recipe of a layer has it.
impl fmt::Debug for Codes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let way = |stored: &Stored| {
            let Format {
                name,
                element,
                block,
                ..
            } = stored.format;
            match element {
                Element::Uint(bits) => format!("{name} of {bits} bits, {block:?}"),
                _ => format!("{name}, {block:?}"),
            }
        };
        let ways: Vec<String> = self.stored.iter().map(way).collect();
        write!(f, "Codes({})", ways.join("; "))
    }
}
