//! The reasons inside the errors of devices, compilers and libraries, for programs that react to
//! one. The errors themselves are at the crate root.
//!
//! ```
//! use moesaic::errors::{DriverReason, FreeMemory};
//! use moesaic::DeviceError;
//!
//! /// Tells a user what to do.
//! fn advice(error: &DeviceError) -> String {
//!     match error {
//!         DeviceError::OutOfMemory { asked, free: FreeMemory::Bytes(free) } => {
//!             format!("free {} MB, or call with fewer tokens", (asked - free) >> 20)
//!         }
//!         DeviceError::Driver { reason: DriverReason::OutOfRange { bytes }, .. } => {
//!             format!("the buffer has only {bytes} bytes")
//!         }
//!         DeviceError::Lost { .. } => "restart this process".to_string(),
//!         other => other.to_string(), // names what was asked, and what to change
//!     }
//! }
//! # let engine = moesaic::example::engine();
//! # let buffer = engine.device().alloc(4).unwrap();
//! # let error = engine.device().upload(&[0; 99], &buffer, 0).unwrap_err();
//! # assert_eq!(advice(&error), "the buffer has only 4 bytes");
//! ```
//!
//! | error | reasons |
//! |---|---|
//! | [`DeviceError`](crate::DeviceError) | [`UnavailableReason`](crate::UnavailableReason), [`LoadReason`], [`LaunchReason`], [`DriverReason`], [`FreeMemory`] |
//! | [`CompileError`](crate::CompileError) | [`CompilerReason`], [`BinaryReason`] |
//! | inside several of them | [`Fault`] of a driver, [`SystemError`], [`SharedError`] of another crate, [`SignatureError`] of a binary |

#[doc(inline)]
pub use moesaic_target::{
    BinaryReason, CompilerReason, DriverReason, Fault, FreeMemory, LaunchReason, LoadReason,
    SharedError, SignatureError, SystemError,
};
