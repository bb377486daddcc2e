//! The content-addressed kernel store and its packs.

mod home;

pub use home::{NoHome, home};
