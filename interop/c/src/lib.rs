//! The C interface of moesaic. cbindgen makes `include/moesaic.h` from these files, so their doc
//! comments speak to people who write C.
//!
//! Every function that can fail returns a [`Status`] and leaves its text to
//! [`moesaic_last_error`](status::moesaic_last_error). No panic crosses the border:
//! [`status::guard`] turns it into [`Status::Defect`]. Handles are opaque boxes; [`pointers`] has
//! the only code that turns a caller's pointer into a reference.

pub mod calls;
pub mod engine;
pub mod gates;
pub mod info;
pub mod layer;
pub mod options;
pub mod pointers;
pub mod ranks;
pub mod replay;
pub mod spec;
pub mod status;
pub mod tensors;
mod words;

pub use status::Status;
