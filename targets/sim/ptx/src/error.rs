//! Errors of loading PTX.

/// A reason that PTX cannot run.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PtxError {
    /// The parser does not understand the text as PTX.
    #[error("PTX line {line}: {what}")]
    Syntax {
        /// Line of the PTX, from 1.
        line: u32,
        /// The text found and the text expected.
        what: String,
    },
    /// The machine lacks an instruction, or a form of one.
    #[error("PTX line {line}: `{instruction}` is not covered by the simulator: {what}")]
    Unsupported {
        /// Line of the PTX, from 1.
        line: u32,
        /// The opcode with its modifiers.
        instruction: String,
        /// The part that the machine lacks.
        what: String,
    },
    /// The artifact was not made by the simulator's compiler.
    #[error("this is no PTX artifact: {0}")]
    Artifact(String),
}

impl PtxError {
    pub(crate) fn syntax(line: u32, what: impl Into<String>) -> PtxError {
        PtxError::Syntax {
            line,
            what: what.into(),
        }
    }
}
