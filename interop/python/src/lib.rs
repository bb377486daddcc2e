//! moesaic layers for Python: the extension module `moesaic._native`.
//!
//! The Python files of the package know torch, this crate does not. They pass tensors as names,
//! addresses, dtypes and shapes, which [`tensors`] checks against the layer's list. Arrays of other
//! libraries come and go by DLPack ([`dlpack`]).
//!
//! A layer of [`layer`] has no weights of its own: it is bound to the caller's, once, and each call
//! brings the addresses of its other tensors, which the Python files have checked.
//! All layers of one spec share its kernels and workspace ([`engines`]). A layer of [`packed`]
//! holds a copy of its weights in the order that kernels read, and so do those of [`gates`], which
//! share experts. One of [`ranks`] holds a copy of a
//! rank's part, and exchanges rows with the other ranks by [`sockets`].
//!
//! The GIL is released while a layer is made and while it runs. Nothing panics across the border:
//! [`errors`] turns every failure into `moesaic.Error`.

mod dlpack;
mod engines;
mod errors;
mod gates;
mod key;
mod layer;
mod packed;
mod pages;
mod ranks;
mod sockets;
mod sources;
mod spec;
mod state_dicts;
mod states;
mod tensors;
mod words;

use pyo3::prelude::*;

/// The compiled part of the package `moesaic`.
#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add("Error", errors::error_type(py)?)?;
    module.add("InvalidError", errors::invalid_type(py)?)?;
    module.add_class::<dlpack::Array>()?;
    module.add_class::<spec::Spec>()?;
    module.add_class::<layer::Layer>()?;
    module.add_class::<layer::BoundLayer>()?;
    module.add_class::<packed::PackedLayer>()?;
    module.add_class::<gates::GateLayer>()?;
    module.add_class::<gates::GateState>()?;
    module.add_class::<ranks::Listener>()?;
    module.add_class::<ranks::Ranks>()?;
    module.add_class::<ranks::Mesh>()?;
    module.add_class::<ranks::RankLayer>()?;
    module.add_class::<ranks::RankState>()?;
    module.add_function(wrap_pyfunction!(engines::configure, module)?)?;
    module.add_function(wrap_pyfunction!(engines::engine_info, module)?)?;
    module.add_function(wrap_pyfunction!(pages::memory, module)?)?;
    module.add_function(wrap_pyfunction!(spec::read_hf, module)?)?;
    module.add_function(wrap_pyfunction!(state_dicts::read_state_dict, module)?)?;
    engines::watch_forks(module)
}
