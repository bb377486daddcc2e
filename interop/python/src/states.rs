//! States between forward and backward, by number.
//!
//! A custom operation of torch returns tensors alone, so the state of a call travels as a tensor of
//! one number. The memory behind it owns the state: autograd drops the tensor when nobody can run
//! backward any more, and with it the state.

use crate::dlpack::{Exported, export};
use crate::engines::Place;
use crate::errors::Failure;
use moesaic::{DType, Layer, Saved};
use pyo3::prelude::*;
use pyo3::types::PyCapsule;
use std::collections::HashMap;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

/// The state that a training call keeps.
pub struct State {
    pub layer: Arc<Layer>,
    /// Where forward ran, and backward has to.
    pub place: Place,
    pub saved: Saved,
    /// The tensors of the call that backward reads where they lie.
    pub needed: Arc<[String]>,
    /// The process that has it: a child of `fork` has none of its parent's threads.
    pub process: u32,
}

static STATES: LazyLock<Mutex<HashMap<i64, Arc<State>>>> = LazyLock::new(Mutex::default);
static NEXT: AtomicI64 = AtomicI64::new(1);

fn states() -> MutexGuard<'static, HashMap<i64, Arc<State>>> {
    STATES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The memory behind a tensor with a state's number.
struct Holder(Box<i64>);

impl Drop for Holder {
    fn drop(&mut self) {
        let removed = states().remove(&self.0);
        // A layer's last state may end the layer; not under the lock.
        drop(removed);
    }
}

/// Keeps a state, and returns a capsule of a tensor `[1]` of its number.
pub fn keep(py: Python<'_>, state: State) -> PyResult<Bound<'_, PyCapsule>> {
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    states().insert(number, Arc::new(state));
    let mut holder = Holder(Box::new(number));
    let exported = Exported {
        data: (&raw mut *holder.0).cast(),
        dtype: DType::I64,
        shape: vec![1],
    };
    // SAFETY: the number lies in the box, which the holder keeps. Should somebody write to it, the
    // holder removes nothing, or another state, whose backward then fails with an error.
    unsafe { export(py, exported, Box::new(holder)) }
}

/// Returns the state of a number.
///
/// # Errors
/// There is none any more, or another process has it.
pub fn find(number: i64) -> Result<Arc<State>, Failure> {
    let found = states().get(&number).cloned();
    let state = found.ok_or_else(|| {
        Failure::Other(
            "the state of the forward pass is gone: backward runs in the process of its forward \
             pass, on the tensor that forward returned"
                .to_string(),
        )
    })?;
    if state.process == std::process::id() {
        Ok(state)
    } else {
        Err(Failure::Other(
            "the forward pass ran before `fork`: run forward again in this process".to_string(),
        ))
    }
}

/// Returns the number of states that are alive.
pub fn count() -> usize {
    states().len()
}
