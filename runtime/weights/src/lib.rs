//! Reads checkpoints into canonical tensors, and writes them.
//!
//! [`Checkpoint`] maps safetensors files into memory: one file, or a model directory with or
//! without an index. [`LayerReader`] reads one layer of it, by canonical names, by the recipes of a
//! Hugging Face import, or by those of other libraries. Every tensor comes in canonical shape and
//! in the spec's element type; quantized weights are decoded into that type.
//!
//! An engine reads a weight when it puts it on the device; [`load_canonical`], [`load_import`] and
//! [`load_keys`] read all at once. [`write_safetensors`] writes a whole file or none, and
//! [`Writer`] writes tensors that are not all in memory. [`quantize`] makes a quantized model of a
//! full-precision one.
//!
//! As a crate of its own this is an internal part of `moesaic` and changes without
//! notice.

#![warn(missing_debug_implementations)]

mod checkpoint;
mod codes;
mod copy;
mod damage;
mod error;
mod experts;
mod finder;
mod gguf;
mod gguf_header;
mod keys;
mod load;
mod matrices;
mod options;
mod quantize;
mod quantized;
mod reader;
mod recipe;
mod regular;
mod stored;
mod stray;
mod view;
mod weight;
mod write;
mod writer;

pub use checkpoint::{Checkpoint, TensorRef};
pub use damage::Damage;
pub use error::{CodesError, WeightsError};
pub use experts::{ExpertFormats, dequantized, set_expert_formats};
pub use keys::{KeyOptions, load_keys};
pub use load::{load_canonical, load_import, load_sources};
pub use options::LoadOptions;
pub use quantize::{
    MatrixError, QuantizeError, QuantizeEvent, QuantizeReport, QuantizeTo, quantize,
};
pub use reader::LayerReader;
pub use weight::Rounded;
pub use write::{Note, write_safetensors, write_safetensors_noted, write_whole};
pub use writer::Writer;
