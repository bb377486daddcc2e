//! The root names that other crates of the workspace define, each with an example.

mod compiling;
mod errors;
mod ranks;
mod running;
mod tensors;
mod training;

pub use compiling::*;
pub use errors::*;
pub use ranks::*;
pub use running::*;
pub use tensors::*;
pub use training::*;
