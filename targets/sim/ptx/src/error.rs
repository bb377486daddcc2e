//! What cannot be loaded.

/// PTX that cannot be run.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PtxError {
    /// The text is not PTX as far as it was understood.
    #[error("PTX line {line}: {what}")]
    Syntax {
        /// Line of the PTX, from 1.
        line: u32,
        /// What was found, and what was expected.
        what: String,
    },
    /// An instruction, or a form of one, that the machine does not have.
    #[error("PTX line {line}: `{instruction}` is not covered by the simulator: {what}")]
    Unsupported {
        /// Line of the PTX, from 1.
        line: u32,
        /// The opcode with its modifiers.
        instruction: String,
        /// Which part of it.
        what: String,
    },
    /// The artifact is not one of the simulator's compiler.
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
