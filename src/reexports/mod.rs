//! The names at the root of this crate that other crates define, with an
//! example of each.

mod compiling;
mod ranks;
mod running;
mod training;

pub use compiling::*;
pub use ranks::*;
pub use running::*;
pub use training::*;
