//! Errors of the engine, from a spec to its results.

use crate::reason::{InputReason, OutputReason, SaveReason, SpecReason, WeightReason};
use moesaic_collectives::CollectiveError;
use moesaic_emit::EmitError;
use moesaic_plan::PlanError;
use moesaic_spec::FactorError;
use moesaic_target::{CompileError, DeviceError};
use moesaic_tensor::SourceError;
use std::fmt;
use std::sync::Arc;

/// An engine operation that failed.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// The spec is not valid.
    #[error("the layer spec is not valid:\n{0}")]
    Spec(#[source] SpecReason),
    /// An option that cannot be planned.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// A defect in a template.
    #[error(transparent)]
    Emit(#[from] EmitError),
    /// The compiler failed.
    #[error(transparent)]
    Compile(#[from] Arc<CompileError>),
    /// The kernel is not cached and compiling is not allowed.
    #[error(
        "kernel `{kernel}` for `{target}` is not in the cache and compiling is off\n\
         add it with: moesaic precompile --spec <file> --target {target}{options}"
    )]
    NotCached {
        /// The kernel's name.
        kernel: String,
        /// The target.
        target: String,
        /// Further options of the command.
        options: String,
    },
    /// The device failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// An exchange with other ranks failed.
    #[error(transparent)]
    Collective(#[from] CollectiveError),
    /// A weight tensor is missing or not as the spec says.
    #[error("weight `{name}`: {reason}")]
    Weight {
        /// The canonical name.
        name: String,
        /// The value found and the value expected.
        #[source]
        reason: WeightReason,
    },
    /// Several weights are missing or not as the spec says.
    #[error("{} weights do not fit:{}", .0.len(), lines(.0))]
    Weights(Vec<EngineError>),
    /// A weight that its source cannot give.
    #[error("weight `{name}`: {source}")]
    Source {
        /// The canonical name.
        name: String,
        /// The source's reason.
        source: SourceError,
    },
    /// Ranks hold different values of weights that should be the same.
    #[error(
        "ranks hold different values of {}:{}\n\
         give all ranks the same weights: of one checkpoint, one seed, or those of rank 0",
        if .0.len() == 1 { "a weight" } else { "weights" }, lines(.0)
    )]
    DifferentWeights(Vec<DifferentWeight>),
    /// The tensors of all ranks cannot be saved.
    #[error("the tensors of all ranks cannot be saved: {0}")]
    Save(#[source] SaveReason),
    /// An input is missing or not as the spec says.
    #[error("input `{name}`: {reason}")]
    Input {
        /// The tensor's name.
        name: String,
        /// The value found and the value expected.
        #[source]
        reason: InputReason,
    },
    /// The memory for an output is not as the spec says.
    #[error("output `{name}`: {reason}")]
    Output {
        /// The tensor's name.
        name: String,
        /// The memory given and the memory expected.
        #[source]
        reason: OutputReason,
    },
    /// An address of a raw call at which kernels cannot access their tensor.
    #[error(
        "tensor `{name}` lies at {address:#x}, which is no multiple of {alignment} bytes; its \
         kernels take {alignment} bytes at a time, so allocate it aligned or copy it"
    )]
    Misaligned {
        /// The tensor's name.
        name: String,
        /// The address.
        address: u64,
        /// The alignment that kernels need.
        alignment: u64,
    },
    /// A call is too large for the memory of the device.
    #[error(
        "{tokens} tokens need {} of memory, {} are free; run fewer tokens per call",
        gigabytes(*.needed), gigabytes(*.free)
    )]
    NoRoom {
        /// Tokens of the call.
        tokens: usize,
        /// Bytes the call needs.
        needed: u64,
        /// Bytes there are.
        free: u64,
    },
    /// Backward was asked of a layer that was made without it.
    #[error(
        "the layer was made for inference\nmake it with `Engine::training_layer` to run backward"
    )]
    NotTraining,
    /// The gradient of quantized experts was asked for.
    #[error(
        "`{name}` has no gradient: experts of `precision.experts` are codes, which cannot be \
         trained\nleave the key out (`--dequantize f32` for a checkpoint of codes) to train the \
         numbers that codes stand for"
    )]
    Frozen {
        /// The weight's name.
        name: String,
    },
    /// Something was asked of a layer over ranks that only a layer of one process can do.
    #[error(
        "the layer is one of a mesh, {asked} is for a layer of one process\n\
         make it without the mesh, or call `forward` and `forward_train` on all ranks"
    )]
    OverRanks {
        /// The thing that was asked for.
        asked: &'static str,
    },
    /// Something was asked of a layer of one process that only one over ranks can do.
    #[error("the layer is of one process, {asked} is for a layer over ranks\nmake it with a mesh")]
    NotOverRanks {
        /// The thing that was asked for.
        asked: &'static str,
    },
    /// A call of a layer without weights does not bring all of them.
    #[error(
        "the layer holds no weights, and the call has no address for `{name}`\n\
         name the address of every weight in the call, and in backward that of every gradient \
         (`RawCall`, `RawBackward`), or make the layer with weights"
    )]
    NoWeight {
        /// The weight, or `grad.` and the weight.
        name: String,
    },
    /// A plan and its kernels do not fit: a defect of the planner.
    #[error("kernel entry `{symbol}` cannot be launched: {problem}")]
    Unbound {
        /// The entry.
        symbol: String,
        /// The reason.
        problem: String,
    },
    /// The saved state belongs to another layer or plan.
    #[error(
        "the saved state is of another layer; backward takes what its own `forward_train` gave"
    )]
    ForeignSaved,
    /// A call's capacity factor cannot be.
    #[error("capacity factor {factor:?}: {problem}")]
    Capacity {
        /// The thing that was asked for.
        factor: f64,
        /// The reason, and what is possible.
        #[source]
        problem: FactorError,
    },
    /// An evaluation was asked for what only training computes.
    #[error("`{name}` is what training computes; ask `forward_train` for it")]
    TrainingOutput {
        /// The thing that was asked for.
        name: String,
    },
    /// A tensor the layer does not have was asked for.
    #[error("the layer has no output `{name}`; it has: {known}")]
    NoOutput {
        /// The thing that was asked for.
        name: String,
        /// The names that exist.
        known: String,
    },
}

/// A weight of which ranks hold different values.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DifferentWeight {
    /// The canonical name.
    pub name: String,
    /// The expert, of a weight of routed experts.
    pub expert: Option<usize>,
    /// The ranks that hold equal values, most ranks first.
    pub ranks: Vec<Vec<usize>>,
}

impl fmt::Display for DifferentWeight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}`", self.name)?;
        if let Some(expert) = self.expert {
            write!(f, " of expert {expert}")?;
        }
        for (at, ranks) in self.ranks.iter().enumerate() {
            let which = if at == 0 { ": one" } else { ", another" };
            let s = if ranks.len() == 1 { "" } else { "s" };
            let shown = ranks[..ranks.len().min(SHOWN)].iter().map(usize::to_string);
            let shown = shown.collect::<Vec<_>>().join(", ");
            write!(f, "{which} on rank{s} {shown}")?;
            if let more @ 1.. = ranks.len().saturating_sub(SHOWN) {
                write!(f, " and {more} more")?;
            }
        }
        Ok(())
    }
}

/// The text of `Display`: Rust prints the `Debug` of an error that `main` returns, and of one that
/// is unwrapped.
impl fmt::Debug for EngineError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Errors that are shown one by one.
const SHOWN: usize = 8;

fn lines(list: &[impl fmt::Display]) -> String {
    let shown = list.iter().take(SHOWN);
    let mut text: String = shown.map(|one| format!("\n  {one}")).collect();
    if let more @ 1.. = list.len().saturating_sub(SHOWN) {
        text += &format!("\n  and {more} more");
    }
    text
}

fn gigabytes(bytes: u64) -> String {
    format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30))
}

impl EngineError {
    pub(crate) fn weight(name: &str, reason: impl Into<WeightReason>) -> EngineError {
        EngineError::Weight {
            name: name.to_string(),
            reason: reason.into(),
        }
    }

    pub(crate) fn input(name: &str, reason: impl Into<InputReason>) -> EngineError {
        EngineError::Input {
            name: name.to_string(),
            reason: reason.into(),
        }
    }

    /// Returns the error of memory for an output.
    pub(crate) fn output(name: &str, reason: OutputReason) -> EngineError {
        EngineError::Output {
            name: name.to_string(),
            reason,
        }
    }

    /// Returns the same error; that of a kernel that is not cached names further options for
    /// `precompile`.
    #[doc(hidden)]
    #[must_use]
    pub fn needing(mut self, more: &str) -> EngineError {
        if let EngineError::NotCached { options, .. } = &mut self
            && !options.contains(more)
        {
            options.push_str(more);
        }
        self
    }
}
