//! The metadata of a GGUF file, as data.

use moesaic_kernel::DType;
use std::collections::BTreeMap;

/// The metadata of a GGUF file, or of the first file of a split model.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Metadata {
    /// Values by key. Lists are kept as their length alone.
    pub values: BTreeMap<String, GgufValue>,
    /// Shape and type of each tensor.
    pub tensors: BTreeMap<String, TensorInfo>,
}

/// A tensor of a GGUF file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Sizes, outermost first.
    pub shape: Vec<usize>,
    /// The element type; `None` for blocks of codes.
    pub dtype: Option<DType>,
}

/// A value of the metadata.
#[derive(Clone, Debug, PartialEq)]
pub enum GgufValue {
    /// A whole number.
    Int(i64),
    /// A number.
    Float(f64),
    /// True or false.
    Bool(bool),
    /// A string.
    Text(String),
    /// A list, by its number of values.
    List(u64),
}

impl std::fmt::Display for GgufValue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            GgufValue::Int(value) => write!(f, "{value}"),
            GgufValue::Float(value) => write!(f, "{value}"),
            GgufValue::Bool(value) => write!(f, "{value}"),
            GgufValue::Text(value) => write!(f, "{:?}", value.chars().take(60).collect::<String>()),
            GgufValue::List(count) => write!(f, "a list of {count}"),
        }
    }
}
