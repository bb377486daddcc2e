//! The error of a text that is no expression.

use std::ops::Range;

/// A text that is not a valid expression.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct ExpressionError {
    /// The problem.
    pub message: String,
    /// A few words shown beside the place.
    pub label: String,
    /// The accepted forms.
    pub help: Option<String>,
    /// Bytes of the text at fault.
    pub span: Range<usize>,
}

impl ExpressionError {
    pub(super) fn new(span: Range<usize>, message: impl Into<String>) -> ExpressionError {
        ExpressionError {
            message: message.into(),
            label: String::new(),
            help: None,
            span,
        }
    }

    pub(super) fn label(mut self, label: impl Into<String>) -> ExpressionError {
        self.label = label.into();
        self
    }

    pub(super) fn help(mut self, help: impl Into<String>) -> ExpressionError {
        self.help = Some(help.into());
        self
    }
}
