//! The `layer!` macro: a shell over `moesaic_rustgen::generate` that finds the
//! spec and puts its problems where they are.
//!
//! This is the one crate of `codegen` that reads a file, since the compiler
//! runs it: the file named in the macro.
//!
//! As a crate of its own this is an internal part of `moesaic` and changes without
//! notice.

mod expand;
mod layer;
mod problems;
mod toml;

use proc_macro::TokenStream;
use std::path::PathBuf;

/// Generates typed layers from their specs, which are files or written in
/// place.
///
/// ```
/// moesaic::layer! {
///     /// A small layer, its spec written as TOML.
///     pub struct Tiny {
///         [shape]
///         model_dim = 64
///         hidden_dim = 128
///         experts = 8
///         top_k = 2
///
///         [router]
///         renormalize = "sum"
///     }
///
///     /// A layer whose spec is a file, relative to the folder of Cargo.toml.
///     pub struct Mixtral = "../../examples/specs/mixtral-8x7b.toml";
/// }
///
/// assert_eq!(Tiny::MODEL_DIM, 64);
/// assert_eq!(Mixtral::spec().shape.experts, 8);
/// ```
///
/// For `pub struct Tiny` it makes, all with the same visibility:
///
/// * `Tiny`, the layer: `Tiny::new(&engine, &weights)`, `forward(&x)`,
///   `forward_all(&x)`, `Tiny::spec()`, and its sizes as constants;
///   `Tiny::new_over(&engine, &mesh, &weights)`, a rank's part of it with the same calls,
///   and `set_strategy`;
/// * `Tiny::training` and `Tiny::training_over`, `forward_train`, `backward`,
///   `reduce_gradients`, `average_gradients`, `gradients`;
/// * `TinyWeights<'a>`, one field per tensor: `router_weight: &'a [[f32; 64]; 8]`;
/// * `TinyOutput`, what `forward_all` reads back;
/// * `TinyRaw`, `TinyRawTraining`, `TinyRawBackward`, addresses for `forward_raw`,
///   `forward_train_raw` and `backward_raw` of `moesaic::typed::TypedLayer`;
/// * `tiny_kernels`, an argument struct per kernel entry for
///   `moesaic::typed::Launcher`.
///
/// Shapes are types, so a weight of the wrong shape does not compile. Problems
/// of a spec are compile errors, one for each: for TOML in place at the value
/// at fault; for a file at its name, with the line and column in the message.
///
/// TOML in place is made of Rust tokens: strings stand in double quotes and
/// comments start with `//`. A change of a file rebuilds what uses it.
#[proc_macro]
pub fn layer(input: TokenStream) -> TokenStream {
    // Set by cargo; without it, paths are relative to the working directory.
    let root = std::env::var_os("CARGO_MANIFEST_DIR")
        .map(PathBuf::from)
        .unwrap_or_default();
    let layers = syn::parse_macro_input!(input as layer::Layers);
    expand::expand(layers, &root).into()
}
