//! From a layer spec to a typed Rust layer.
