//! The handover from codegen to a target: text, entry points, signatures, launch geometry.

use crate::{DType, Size, Target};
use serde::{Deserialize, Serialize};
use std::fmt;

/// The operator a kernel belongs to. One spelling everywhere: Rust module,
/// template, golden folder, conformance test, bench and doc page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stem {
    /// Router projection, score, selection.
    GateTopk,
    /// Counts, capacity, locations and the maps between slots and rows.
    ExpertScan,
    /// Token rows to expert rows.
    Dispatch,
    /// The GEMMs of the experts with their epilogues.
    GroupedGemm,
    /// Expert rows back to tokens, weighted.
    Combine,
    /// Rows divided by their root mean square.
    RmsNorm,
    /// Gradients of normalised rows to those of the rows, and of the weight.
    RmsNormBwd,
    /// The gradient of expert rows from the output's, and of combine weights.
    CombineBwd,
    /// Gradients of the inputs of the experts' GEMMs.
    GroupedGemmDgrad,
    /// Gradients of an expert's matrices and biases.
    GroupedGemmWgrad,
    /// Gradients of logits, from those of weights and losses.
    GateTopkBwd,
    /// Gradients of expert rows back to tokens.
    DispatchBwd,
    /// Rows to and from the communication dtype.
    CommCast,
}

impl Stem {
    /// The stems of a forward pass, in the order it runs them.
    pub const FORWARD: [Stem; 6] = [
        Stem::GateTopk,
        Stem::ExpertScan,
        Stem::Dispatch,
        Stem::GroupedGemm,
        Stem::Combine,
        Stem::RmsNorm,
    ];

    /// The stems of a backward pass, in the order it runs them.
    pub const BACKWARD: [Stem; 6] = [
        Stem::RmsNormBwd,
        Stem::CombineBwd,
        Stem::GroupedGemmDgrad,
        Stem::GroupedGemmWgrad,
        Stem::GateTopkBwd,
        Stem::DispatchBwd,
    ];

    /// The stem of the kernels that run between ranks, in either pass.
    pub const BETWEEN: [Stem; 1] = [Stem::CommCast];

    /// Returns every stem.
    pub fn all() -> impl Iterator<Item = Stem> {
        let passes = Stem::FORWARD.into_iter().chain(Stem::BACKWARD);
        passes.chain(Stem::BETWEEN)
    }

    /// Returns the snake_case spelling.
    pub const fn name(self) -> &'static str {
        match self {
            Stem::GateTopk => "gate_topk",
            Stem::ExpertScan => "expert_scan",
            Stem::Dispatch => "dispatch",
            Stem::GroupedGemm => "grouped_gemm",
            Stem::Combine => "combine",
            Stem::RmsNorm => "rms_norm",
            Stem::RmsNormBwd => "rms_norm_bwd",
            Stem::CombineBwd => "combine_bwd",
            Stem::GroupedGemmDgrad => "grouped_gemm_dgrad",
            Stem::GroupedGemmWgrad => "grouped_gemm_wgrad",
            Stem::GateTopkBwd => "gate_topk_bwd",
            Stem::DispatchBwd => "dispatch_bwd",
            Stem::CommCast => "comm_cast",
        }
    }

    /// Returns the operator that the stem belongs to: its folder in `codegen/plan/src/ops` and in
    /// `templates`. A backward stem has that of its forward one.
    pub const fn operator(self) -> &'static str {
        match self {
            Stem::GateTopkBwd => Stem::GateTopk.name(),
            Stem::DispatchBwd => Stem::Dispatch.name(),
            Stem::GroupedGemmDgrad | Stem::GroupedGemmWgrad => Stem::GroupedGemm.name(),
            Stem::CombineBwd => Stem::Combine.name(),
            Stem::RmsNormBwd => Stem::RmsNorm.name(),
            own => own.name(),
        }
    }
}

impl fmt::Display for Stem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The language a source is written in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Language {
    /// C11 with vector extensions.
    C,
    /// CUDA C++17 without headers.
    Cuda,
    /// HIP C++17 without headers.
    Hip,
}

impl Language {
    /// Returns the extension of a file of this language.
    pub const fn extension(self) -> &'static str {
        match self {
            Language::C => "c",
            Language::Cuda => "cu",
            Language::Hip => "hip",
        }
    }
}

/// One translation unit: what `emit` returns and a target compiles.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KernelSource {
    /// The operator.
    pub stem: Stem,
    /// A readable name, unique within a layer: `grouped_gemm_up`.
    pub name: String,
    /// The target of the text.
    pub target: Target,
    /// The language of `text`.
    pub language: Language,
    /// The whole text; it includes no header.
    pub text: String,
    /// Desc and config in one canonical spelling, for cache keys.
    pub config: String,
    /// The functions that can be launched.
    pub entries: Vec<Entry>,
}

/// A function of a [`KernelSource`] that can be launched.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// The exported symbol.
    pub symbol: String,
    /// One line for people: the action of one launch.
    pub summary: String,
    /// Parameters in order.
    pub params: Vec<Param>,
    /// The numbers of blocks and threads.
    pub launch: Launch,
}

/// A parameter of an [`Entry`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Param {
    /// The name in the kernel text.
    pub name: String,
    /// Pointer or scalar.
    pub ty: ParamType,
    /// The shape as people read it: `[tokens, 128]`; empty for scalars.
    pub shape: String,
}

/// The type of a [`Param`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ParamType {
    /// A pointer to elements in device memory.
    Tensor(DType, Access),
    /// A value.
    Scalar(Scalar),
    /// A tensor map for TMA of sm_90 and later: 128 bytes that the device encodes at launch.
    TensorMap(TensorMap),
}

/// The boxes into which TMA cuts a dense row-major tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorMap {
    /// Element type.
    pub dtype: DType,
    /// The access of the kernel to the tensor.
    pub access: Access,
    /// Dimensions that the kernel names, 1 to 5. A tensor with more is folded: the outermost
    /// dimension contains all the others.
    pub rank: u8,
    /// Elements of a box, innermost dimension first; 1 beyond the rank.
    pub tile: [u32; 5],
    /// The arrangement of 16-byte chunks of a box in shared memory.
    pub swizzle: Swizzle,
}

/// The arrangement of 16-byte chunks in shared memory: the chunk index is XORed with the row index,
/// over spans of this many bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Swizzle {
    /// Chunks stay in place.
    None,
    /// Spans of 32 bytes.
    B32,
    /// Spans of 64 bytes.
    B64,
    /// Spans of 128 bytes.
    B128,
}

/// The access of a kernel to the memory behind a pointer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Access {
    /// Only reads it.
    Read,
    /// Only writes it; contents before the launch do not matter.
    Write,
    /// Reads and writes it.
    ReadWrite,
}

/// The type of a scalar parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Scalar {
    /// `int64_t`.
    I64,
    /// `float`.
    F32,
}

/// Launch geometry. A block is the unit of work on every target: a thread
/// block on a GPU, one call of the block function on a CPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Launch {
    /// Blocks in x and y. A zero means there is nothing to launch.
    pub grid: [Size; 2],
    /// Threads per block; 1 on a CPU.
    pub threads: u32,
    /// Dynamic shared memory per block in bytes. Static shared memory is in
    /// the artifact's report.
    pub shared_bytes: u32,
    /// Adjacent blocks in x that form a cluster; 1 where there are none.
    #[serde(default = "alone")]
    pub cluster: u32,
    /// Programmatic dependent launch: blocks may start before earlier launches have ended, and wait
    /// for their end and their writes before they touch global memory. Without this attribute a
    /// kernel does not wait.
    #[serde(default)]
    pub dependent: bool,
}

impl Launch {
    /// Returns the number of blocks for a token count; zero means there is nothing to launch.
    pub fn blocks(&self, tokens: u64) -> u64 {
        let [x, y] = &self.grid;
        x.eval(tokens).saturating_mul(y.eval(tokens))
    }
}

const fn alone() -> u32 {
    1
}

impl KernelSource {
    /// Returns the file name that `emit` and the golden folder use: `grouped_gemm_up.cu`.
    pub fn file_name(&self) -> String {
        format!("{}.{}", self.name, self.language.extension())
    }

    /// Returns the entry with this symbol.
    pub fn entry(&self, symbol: &str) -> Option<&Entry> {
        self.entries.iter().find(|entry| entry.symbol == symbol)
    }
}

impl ParamType {
    /// Returns the element type and access of a parameter with a tensor behind it.
    pub fn tensor(self) -> Option<(DType, Access)> {
        match self {
            ParamType::Tensor(dtype, access) => Some((dtype, access)),
            ParamType::TensorMap(map) => Some((map.dtype, map.access)),
            ParamType::Scalar(_) => None,
        }
    }
}

impl Param {
    /// Returns a tensor the kernel reads.
    pub fn read(name: &str, dtype: DType, shape: impl Into<String>) -> Param {
        Param::tensor(name, dtype, Access::Read, shape)
    }

    /// Returns a tensor the kernel writes.
    pub fn write(name: &str, dtype: DType, shape: impl Into<String>) -> Param {
        Param::tensor(name, dtype, Access::Write, shape)
    }

    /// Returns a tensor with the given access.
    pub fn tensor(name: &str, dtype: DType, access: Access, shape: impl Into<String>) -> Param {
        Param {
            name: name.to_string(),
            ty: ParamType::Tensor(dtype, access),
            shape: shape.into(),
        }
    }

    /// Returns a tensor map over a tensor of this shape.
    pub fn map(name: &str, map: TensorMap, shape: impl Into<String>) -> Param {
        Param {
            name: name.to_string(),
            ty: ParamType::TensorMap(map),
            shape: shape.into(),
        }
    }

    /// Returns a 64-bit integer.
    pub fn i64(name: &str) -> Param {
        Param {
            name: name.to_string(),
            ty: ParamType::Scalar(Scalar::I64),
            shape: String::new(),
        }
    }
}
