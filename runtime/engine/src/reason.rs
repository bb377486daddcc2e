//! The reasons of [`EngineError`](crate::EngineError)s about a spec, a weight or a call, for callers
//! to match. Each text belongs after the name of its tensor.

use moesaic_kernel::DType;
use moesaic_spec::{Problem, UnknownWeight};
use moesaic_tensor::TensorError;

/// The reason that a layer cannot be made of a spec.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SpecReason {
    /// The spec contradicts itself.
    #[error("{}", listed(.0))]
    Invalid(Vec<Problem>),
    /// The number of experts in Rust is not the spec's; over ranks, not that of this rank.
    #[error("  {given} experts were given, the spec has {expected} here")]
    ExpertCount {
        /// The experts that were given.
        given: usize,
        /// The experts of the spec.
        expected: usize,
    },
    /// An option that a layer around experts in Rust does not take.
    #[error("  a layer around experts in Rust takes no {option}")]
    ExpertsOption {
        /// The option: `tuner of strategies`.
        option: &'static str,
    },
    /// A setting of a strategy that experts in Rust cannot follow.
    #[error("  experts in Rust take no `{setting}`: {reason}")]
    ExpertsStrategy {
        /// The setting as a strategy spells it.
        setting: &'static str,
        /// The reason.
        reason: &'static str,
    },
    /// A mesh that experts in Rust cannot have.
    #[error("  experts in Rust {problem}")]
    ExpertsMesh {
        /// The obstacle, and what is possible.
        problem: &'static str,
    },
}

fn listed(problems: &[Problem]) -> String {
    let lines = problems.iter().map(|problem| format!("  {problem}"));
    lines.collect::<Vec<_>>().join("\n")
}

/// The reason that a weight is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WeightReason {
    /// The source does not have it.
    #[error("is missing, expected {dtype} of shape {shape:?}")]
    Missing {
        /// The expected element type.
        dtype: DType,
        /// The expected shape.
        shape: Vec<usize>,
    },
    /// The source of a rank's part does not have it.
    #[error("is missing")]
    PartMissing,
    /// It has another element type or shape.
    #[error(transparent)]
    Tensor(#[from] TensorError),
    /// The layer has no weight of this name.
    #[error(transparent)]
    Unknown(#[from] UnknownWeight),
    /// A routing table names an expert that the layer does not have.
    #[error("names expert {found} at element {at}, there are {experts}")]
    NoExpert {
        /// The expert's id.
        found: i32,
        /// The index in the table.
        at: usize,
        /// The number of experts.
        experts: i32,
    },
    /// The mesh cannot share it.
    #[error("of shape {shape:?} cannot be shared by {ep} x {expert_tp} ranks")]
    NotShareable {
        /// The whole tensor's shape.
        shape: Vec<usize>,
        /// The number of groups that share the experts.
        ep: usize,
        /// The number of shards of an expert.
        expert_tp: usize,
    },
    /// Kernels read a packed copy, so an address of the caller's cannot stand in for it.
    #[error("is not read where it lies: copy it by `set_weight`")]
    Packed,
    /// The bank of experts belongs to another engine.
    #[error("is on the device of another engine")]
    OtherDevice,
    /// The bank of experts does not have it in this layer's form.
    #[error("is not in the layer whose experts are shared, or has another form there")]
    NotInBank,
    /// It is packed, so other ranks cannot gather it.
    #[error("is not on the device as other ranks could gather it")]
    NotGatherable,
    /// Kernels read it, and nothing holds it.
    #[error("is read by kernels and has no memory")]
    NoMemory,
}

/// The reason that an input of a call is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InputReason {
    /// The call does not have it.
    #[error("is missing, expected {dtype} of shape {shape:?}")]
    Missing {
        /// The expected element type.
        dtype: DType,
        /// The expected shape.
        shape: Vec<usize>,
    },
    /// A call of a slice does not have it.
    #[error("is missing: the layer reads it beside `x`, so pass an `Input`")]
    NotBesideSlice,
    /// It has another element type, shape or length.
    #[error(transparent)]
    Tensor(#[from] TensorError),
    /// A slice has another element type, or no whole rows.
    #[error("has {elements} elements of {found}, expected rows of {width} of {wanted}")]
    Rows {
        /// The slice's elements.
        elements: usize,
        /// The slice's element type.
        found: DType,
        /// The elements of a row.
        width: usize,
        /// The expected element type.
        wanted: DType,
    },
    /// An id is out of its range.
    #[error("has {found} at element {at}, expected {least}..={most}")]
    Range {
        /// The id.
        found: i32,
        /// Its index.
        at: usize,
        /// The least that it may be.
        least: i32,
        /// The most that it may be.
        most: i32,
    },
    /// A count is too small.
    #[error("has {found} at element {at}, expected {least} or more")]
    Count {
        /// The count.
        found: i64,
        /// Its index.
        at: usize,
        /// The least that it may be.
        least: i64,
    },
    /// A call of so many tokens can never be.
    #[error("has {tokens} tokens; a call takes at most {most}, so split it")]
    TooManyTokens {
        /// The tokens of the call.
        tokens: usize,
        /// The most that a call takes.
        most: usize,
    },
    /// Launches are timed on the inputs of an earlier call, and none was as large.
    #[error("has fewer than {tokens} tokens so far; run {call} on them first")]
    NotRun {
        /// The tokens to time.
        tokens: usize,
        /// The call to make: `forward`.
        call: &'static str,
    },
    /// It is in device memory, and the call passes through the host.
    #[error("is in device memory, and this layer takes host memory: pass `Input`")]
    OnDevice,
    /// It is in device memory, and ranks route the tokens of all together on the host.
    #[error(
        "is in device memory, but this mesh routes the tokens of all ranks together; give it in \
         host memory, or make the layer on a mesh of TokenScope::Rank"
    )]
    RoutedTogether,
    /// A raw call does not name it.
    #[error("has no address: add it to the call's tensors")]
    NoAddress,
    /// A raw call names address 0.
    #[error("lies at address 0, where no memory is")]
    Null,
    /// A raw call over ranks names a weight.
    #[error("stays in the layer's memory on a mesh; leave it out, and replace it by `set_weight`")]
    WeightOverRanks,
    /// A raw call over ranks names a gradient of a weight.
    #[error(
        "stays in the layer's memory on a mesh, where ranks add it up; leave it out, and ask \
         `gradient_ptr` where it lies"
    )]
    GradientOverRanks,
    /// There is no router to choose.
    #[error("there is no router")]
    NoRouter,
    /// A choice that depends on other tokens has no router for each token.
    #[error(
        "a router for each token needs a choice that follows from the token alone, which {key} \
         does not"
    )]
    BeyondOneToken {
        /// The key of the spec.
        key: &'static str,
    },
    /// There is not a router's id for each token.
    #[error("has {found} ids for {tokens} tokens")]
    RouterIds {
        /// The ids.
        found: usize,
        /// The tokens of the call.
        tokens: usize,
    },
    /// An id names no router.
    #[error("has {found} at element {at}, of {routers} routers")]
    RouterId {
        /// The id.
        found: i32,
        /// Its index.
        at: usize,
        /// The number of routers.
        routers: usize,
    },
    /// A tensor by token has no row for each.
    #[error("has shape {shape:?}, expected a row for each of {tokens} tokens")]
    RowPerToken {
        /// The tensor's shape.
        shape: Vec<usize>,
        /// The tokens of the call.
        tokens: usize,
    },
}

/// The reason why an output, or the memory for one, is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OutputReason {
    /// A slice has another length or element type.
    #[error(
        "has {elements} elements of {found}, expected {expected} of {wanted}: a row for each token \
         of the call, here {tokens}"
    )]
    Slice {
        /// The slice's elements.
        elements: usize,
        /// The slice's element type.
        found: DType,
        /// The expected elements.
        expected: usize,
        /// The expected element type.
        wanted: DType,
        /// The tokens of the call.
        tokens: usize,
    },
    /// It is a slice, and the inputs are addresses.
    #[error("is a slice, and the call names addresses; name that of `y` and call `forward`")]
    SliceOfRawCall,
    /// It belongs to one router, and the call has several.
    #[error("has no row for each token, and each router has its own")]
    PerRouter,
}

/// The reason that the tensors of all ranks cannot be saved.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SaveReason {
    /// The first rank's sink failed; the text is that of its error, which the other ranks get as
    /// text.
    #[error("{0}")]
    Sink(String),
    /// Ranks have different numbers of tensors.
    #[error("{here} tensors here, {there} in part {part} of the layer")]
    Tensors {
        /// The tensors of this rank.
        here: usize,
        /// The tensors of the other.
        there: usize,
        /// The other's part of the layer.
        part: usize,
    },
    /// Groups do not have the experts that the placement gives them.
    #[error("groups have {found:?} experts of `{name}`, placed are {placed:?}")]
    Placement {
        /// The tensor's name.
        name: String,
        /// The experts of each group.
        found: Vec<usize>,
        /// The experts of each group by the placement.
        placed: Vec<usize>,
    },
}
