//! The only user of `dlopen`: library search and typed symbol tables.
//!
//! Nothing in moesaic links a vendor library. A target lists the libraries it can use, opens the
//! first that loads with [`Library::open`], and makes a table of typed functions from it with
//! [`dl_table!`]. A missing library or symbol is a [`DlError`] that lists everything tried.
//!
//! ```
//! use std::ffi::c_int;
//!
//! moesaic_dl::dl_table! {
//!     /// What we use of the C library.
//!     struct CLibrary {
//!         absolute: fn(value: c_int) -> c_int = "abs";
//!     }
//!     optional {
//!         missing: fn(value: c_int) -> c_int = "no_such_function";
//!     }
//! }
//!
//! # fn main() -> Result<(), moesaic_dl::DlError> {
//! let library = moesaic_dl::Library::open("the C library", &["libc.so.6", "libSystem.dylib"])?;
//! // SAFETY: both signatures are those of the C library's headers.
//! let table = unsafe { CLibrary::load(library)? };
//! // SAFETY: `abs` takes any value but the smallest.
//! assert_eq!(unsafe { table.absolute(-3) }, 3);
//! assert!(table.missing.is_none());
//! # Ok(())
//! # }
//! ```
//!
//! As a crate of its own this is an internal part of `moesaic` and changes without
//! notice.

mod error;
mod library;
mod table;

pub use error::{Attempt, DlError};
pub use library::Library;
