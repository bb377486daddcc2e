//! `moesaic.Error` and how failures become it.

use crate::words;
use moesaic::{EngineError, OpenError};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyTuple, PyType};
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// A failure on its way to Python.
#[derive(Debug)]
pub enum Failure {
    /// A value that the caller gave cannot be: `moesaic.InvalidError`.
    Invalid(String),
    /// Everything else: `moesaic.Error`.
    Other(String),
}

impl Failure {
    /// Makes the failure of a tensor of a call.
    pub fn tensor(name: &str, problem: impl std::fmt::Display) -> Failure {
        Failure::Invalid(format!("tensor `{name}` {problem}"))
    }
}

impl From<EngineError> for Failure {
    fn from(error: EngineError) -> Failure {
        use EngineError as E;
        let text = words::of_engine(&error);
        match error {
            E::Spec(_) | E::Weight { .. } | E::Weights(_) | E::Input { .. } => {
                Failure::Invalid(text)
            }
            E::Plan(_) | E::Misaligned { .. } | E::Capacity { .. } => Failure::Invalid(text),
            E::NoOutput { .. } | E::TrainingOutput { .. } => Failure::Invalid(text),
            E::OverRanks { .. } | E::NotOverRanks { .. } => Failure::Invalid(text),
            _ => Failure::Other(text),
        }
    }
}

impl From<moesaic::Error> for Failure {
    fn from(error: moesaic::Error) -> Failure {
        use moesaic::Error as E;
        match error {
            E::Engine(error) => error.into(),
            E::Open(error) => error.into(),
            E::Device(error) => Failure::Other(words::of_device(&error)),
            E::Spec(_)
            | E::Target(_)
            | E::Hf(_)
            | E::Gguf(_)
            | E::Io { .. }
            | E::NoModel { .. } => Failure::Invalid(error.to_string()),
            E::Weights(_) | E::Plan(_) | E::Shape(_) => Failure::Invalid(error.to_string()),
            other => Failure::Other(other.to_string()),
        }
    }
}

impl From<OpenError> for Failure {
    fn from(error: OpenError) -> Failure {
        match error {
            OpenError::Target(_) => Failure::Invalid(error.to_string()),
            OpenError::Device(error) => Failure::Other(words::of_device(&error)),
            other => Failure::Other(other.to_string()),
        }
    }
}

impl From<Failure> for PyErr {
    fn from(failure: Failure) -> PyErr {
        Python::attach(|py| {
            let (found, text) = match failure {
                Failure::Invalid(text) => (invalid_type(py), text),
                Failure::Other(text) => (error_type(py), text),
            };
            match found {
                Ok(class) => PyErr::from_type(class.clone(), text),
                Err(error) => error,
            }
        })
    }
}

/// Runs work without the GIL. A panic becomes an error with its message.
pub fn without_gil<R: Send>(
    py: Python<'_>,
    work: impl FnOnce() -> Result<R, Failure> + Send,
) -> PyResult<R> {
    let ended = py.detach(|| catch_unwind(AssertUnwindSafe(work)));
    let result = ended.unwrap_or_else(|panic| {
        let text = message(&*panic);
        Err(Failure::Other(format!(
            "a defect of moesaic, please report it: {text}"
        )))
    });
    Ok(result?)
}

fn message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    let owned = panic.downcast_ref::<String>().map(String::as_str);
    text.or(owned).unwrap_or("a panic without a message")
}

/// Returns `moesaic.Error`, a `RuntimeError`.
pub fn error_type(py: Python<'_>) -> PyResult<&Bound<'_, PyType>> {
    static TYPE: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    let made = TYPE.get_or_try_init(py, || {
        let base = py.get_type::<PyRuntimeError>();
        let doc = "An operation of moesaic that failed.";
        class(py, "Error", doc, PyTuple::new(py, [base])?)
    })?;
    Ok(made.bind(py))
}

/// Returns `moesaic.InvalidError`, an `Error` and a `ValueError`.
pub fn invalid_type(py: Python<'_>) -> PyResult<&Bound<'_, PyType>> {
    static TYPE: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    let made = TYPE.get_or_try_init(py, || {
        let bases = [error_type(py)?.clone(), py.get_type::<PyValueError>()];
        let doc = "A spec, a tensor or an argument that cannot be.";
        class(py, "InvalidError", doc, PyTuple::new(py, bases)?)
    })?;
    Ok(made.bind(py))
}

fn class(py: Python<'_>, name: &str, doc: &str, bases: Bound<'_, PyTuple>) -> PyResult<Py<PyType>> {
    let members = PyDict::new(py);
    members.set_item("__module__", "moesaic")?;
    members.set_item("__doc__", doc)?;
    let made = py.get_type::<PyType>().call1((name, bases, members))?;
    Ok(made.cast_into::<PyType>()?.unbind())
}
