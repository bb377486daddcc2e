//! The `layer!` macro: a shell around `moesaic_rustgen::generate` that finds the spec and reports
//! its problems at their place.
//!
//! This is the only crate of `codegen` that reads a file, the one named in the macro, because it
//! runs inside the compiler.
//!
//! As a crate of its own this is an internal part of `moesaic` and changes without
//! notice.

mod expand;
mod layer;
mod problems;
mod toml;

use proc_macro::TokenStream;
use std::path::PathBuf;

/// For `pub struct Tiny` the macro generates these items, all with the same visibility:
///
/// * `Tiny`, the layer: `Tiny::new(&engine, &weights)`, `forward(&x)`, `forward_all(&x)`,
///   `Tiny::spec()`, and its sizes as constants; `Tiny::new_over(&engine, &mesh, &weights)`, one
///   rank's part of it with the same calls, and `set_strategy`;
/// * `Tiny::training` and `Tiny::training_over`, `forward_train`, `backward`,
///   `reduce_gradients`, `average_gradients`, `gradients`;
/// * `TinyWeights<'a>`, one field per tensor: `router_weight: &'a [[f32; 64]; 8]`;
/// * `TinyOutput`, the results that `forward_all` reads back;
/// * `TinyRaw`, `TinyRawTraining`, `TinyRawBackward`, the addresses for `forward_raw`,
///   `forward_train_raw` and `backward_raw` of `moesaic::typed::TypedLayer`;
/// * `tiny_kernels`, an argument struct per kernel entry for
///   `moesaic::typed::Launcher`.
///
/// Shapes are types, so a weight of the wrong shape does not compile. Each problem of a spec is a
/// compile error: at the value itself for TOML in place, at the file's name for a file, with line
/// and column in the message.
///
/// TOML in place consists of Rust tokens, so strings need double quotes and comments start with
/// `//`. When a spec file changes, the code that uses it is rebuilt.
#[proc_macro]
pub fn layer(input: TokenStream) -> TokenStream {
    // Cargo sets this; without cargo, paths are relative to the working directory.
    let root = std::env::var_os("CARGO_MANIFEST_DIR")
        .map(PathBuf::from)
        .unwrap_or_default();
    let layers = syn::parse_macro_input!(input as layer::LayerItems);
    expand::expand(layers, &root).into()
}
