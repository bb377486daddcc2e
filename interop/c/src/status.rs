//! Status codes, the text of the last error, and the border that no panic crosses.

use crate::words;
use moesaic::train::replay::ReplayError;
use moesaic::{EngineError, OpenError};
use std::any::Any;
use std::cell::RefCell;
use std::ffi::{CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// The outcome of a call.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// The call succeeded.
    Ok = 0,
    /// An argument, a spec or a tensor is not as it must be. Nothing was computed.
    Invalid = 1,
    /// A device, a compiler, a library, a file or a kernel is missing.
    Unavailable = 2,
    /// The device, its memory or an exchange between ranks failed.
    Failed = 3,
    /// A defect of moesaic; please report the text. Handles of the call stay valid.
    Defect = 4,
}

/// The reason a call failed.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// A pointer that must not be NULL is.
    #[error("argument `{0}` is NULL")]
    Null(&'static str),
    /// A text is not UTF-8.
    #[error("argument `{0}` is not UTF-8")]
    NotUtf8(&'static str),
    /// An argument cannot be.
    #[error("argument `{name}` {problem}")]
    Argument {
        /// The argument's name.
        name: &'static str,
        /// The value found, and what is possible.
        problem: String,
    },
    /// A tensor is not as the layer needs it.
    #[error("tensor `{name}` {problem}")]
    Tensor {
        /// The tensor's name.
        name: String,
        /// The value found, and what is possible.
        problem: String,
    },
    /// A text is no spec.
    #[error("the spec is not valid:\n{0}")]
    Spec(String),
    /// A record cannot be read, written or replayed.
    #[error(transparent)]
    Record(#[from] ReplayError),
    /// Something failed behind this interface.
    #[error("{}", words::of(.0))]
    Below(Box<moesaic::Error>),
}

impl Failure {
    /// Makes the failure of a tensor.
    pub fn tensor(name: &str, problem: impl std::fmt::Display) -> Failure {
        Failure::Tensor {
            name: name.to_string(),
            problem: problem.to_string(),
        }
    }

    /// Makes the failure of an argument.
    pub fn argument(name: &'static str, problem: impl std::fmt::Display) -> Failure {
        Failure::Argument {
            name,
            problem: problem.to_string(),
        }
    }

    /// Returns the code of the failure.
    pub fn status(&self) -> Status {
        match self {
            Failure::Below(error) => status_of(error),
            Failure::Record(ReplayError::File { .. }) => Status::Unavailable,
            _ => Status::Invalid,
        }
    }
}

/// Returns the code of an error behind this interface.
fn status_of(error: &moesaic::Error) -> Status {
    use moesaic::Error as E;
    match error {
        E::Engine(error) => status_of_engine(error),
        E::Open(OpenError::Target(_)) | E::Spec(_) | E::Target(_) | E::Hf(_) | E::Gguf(_) => {
            Status::Invalid
        }
        E::Weights(_) | E::Plan(_) | E::Shape(_) => Status::Invalid,
        E::Open(_) | E::Io { .. } | E::NoModel { .. } => Status::Unavailable,
        E::Store(_) | E::Compile(_) => Status::Unavailable,
        _ => Status::Failed,
    }
}

fn status_of_engine(error: &EngineError) -> Status {
    use EngineError as E;
    match error {
        E::Compile(_) | E::NotCached { .. } => Status::Unavailable,
        E::Device(_) | E::Collective(_) | E::NoRoom { .. } | E::Save(_) => Status::Failed,
        E::Emit(_) | E::Unbound { .. } => Status::Defect,
        _ => Status::Invalid,
    }
}

impl From<moesaic::Error> for Failure {
    fn from(error: moesaic::Error) -> Failure {
        Failure::Below(Box::new(error))
    }
}

impl From<EngineError> for Failure {
    fn from(error: EngineError) -> Failure {
        match error {
            EngineError::NotTraining => {
                let problem = "was made for inference: set `training` in moesaic_layer_options";
                Failure::argument("layer", problem)
            }
            error => moesaic::Error::from(error).into(),
        }
    }
}

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

/// Keeps the text of an error for this thread. A NUL in it would end the text early.
fn keep(text: &str) {
    let text = CString::new(text.replace('\0', "\\0")).unwrap_or_default();
    // A call from a destructor of the thread may come after the text is gone.
    let _ = LAST.try_with(|last| *last.borrow_mut() = text);
}

/// Runs the body of a function. A failure or a panic becomes a code and a text.
pub fn guard(work: impl FnOnce() -> Result<(), Failure>) -> Status {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(Ok(())) => Status::Ok,
        Ok(Err(failure)) => {
            keep(&failure.to_string());
            failure.status()
        }
        Err(panic) => {
            let text = message(&*panic);
            keep(&format!("a defect of moesaic, please report it: {text}"));
            Status::Defect
        }
    }
}

fn message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    let owned = panic.downcast_ref::<String>().map(String::as_str);
    text.or(owned).unwrap_or("a panic without a message")
}

/// Returns the text of this thread's last failed call, in UTF-8: empty if none has failed. A call
/// that succeeds leaves it. Valid until the next failure in this thread; never NULL.
#[unsafe(no_mangle)]
pub extern "C" fn moesaic_last_error() -> *const c_char {
    let text = LAST.try_with(|last| last.borrow().as_ptr());
    text.unwrap_or(c"".as_ptr())
}

/// Returns the version of the library, such as "0.1.0". Static.
#[unsafe(no_mangle)]
pub extern "C" fn moesaic_version() -> *const c_char {
    const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "\0");
    VERSION.as_ptr().cast()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::CStr;

    fn last() -> String {
        // SAFETY: the text is valid until the next failure of this thread.
        let text = unsafe { CStr::from_ptr(moesaic_last_error()) };
        text.to_str().unwrap().to_string()
    }

    #[test]
    fn a_panic_becomes_a_status() {
        assert_eq!(guard(|| panic!("far {}", "out")), Status::Defect);
        assert!(last().ends_with("please report it: far out"), "{}", last());
    }

    #[test]
    fn a_failure_keeps_its_text_until_the_next_and_per_thread() {
        assert_eq!(guard(|| Err(Failure::Null("engine"))), Status::Invalid);
        assert_eq!(guard(|| Ok(())), Status::Ok);
        assert_eq!(last(), "argument `engine` is NULL");
        assert_eq!(std::thread::spawn(last).join().unwrap(), "");
        guard(|| Err(Failure::tensor("x\0y", "is odd")));
        assert_eq!(last(), "tensor `x\\0y` is odd");
    }
}
