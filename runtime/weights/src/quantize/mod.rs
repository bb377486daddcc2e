//! Quantizes the experts of a full-precision model, and writes them as a Hugging Face folder or as
//! a GGUF file.
//!
//! [`quantize`] reads every expert through the recipes of the import, encodes it by the format's
//! own rules, and writes it under the names that the format's readers know. Everything else is
//! copied. A file is written under a temporary name and renamed once it is whole, and config.json
//! comes last, so a folder that was interrupted is no model; the next run keeps the files that are
//! finished.

mod error;
mod folder;
mod gguf;
mod journal;
mod model;
mod output;
mod targets;
mod way;

pub use error::QuantizeError;

use moesaic_spec::format::{BLOCKS, Blocks};
use moesaic_spec::hf::Scheme;
use std::path::Path;

/// The layout and the format of a quantized model.
#[derive(Clone, Copy, Debug, PartialEq)]
#[expect(
    clippy::large_enum_variant,
    reason = "a run has one, and it can be copied"
)]
pub enum QuantizeTo {
    /// A Hugging Face folder in one of [`SCHEMES`](moesaic_spec::hf::SCHEMES).
    Folder(Scheme),
    /// A GGUF file with blocks of this type. Rows that are no whole blocks take the next type that
    /// fits, as llama-quantize does: Q5_0 for Q4_K, Q5_1 for Q5_K, Q8_0 for Q6_K.
    Gguf(&'static Blocks),
}

impl QuantizeTo {
    /// Returns the GGUF block type of that name, in lower case, if moesaic encodes it.
    pub fn gguf(name: &str) -> Option<QuantizeTo> {
        let named = |blocks: &&Blocks| blocks.name.to_lowercase() == name && blocks.can_encode();
        BLOCKS.iter().find(named).map(QuantizeTo::Gguf)
    }
}

/// The progress of [`quantize`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum QuantizeEvent<'a> {
    /// The work begins; progress counts the bytes of the source's tensors.
    Begins {
        /// The bytes in all.
        bytes: u64,
    },
    /// Some bytes of the source are done.
    Done {
        /// Their number.
        bytes: u64,
    },
    /// A file of the output is finished.
    Written {
        /// Its name.
        file: &'a str,
        /// Its size.
        bytes: u64,
    },
    /// A file that an earlier run finished was checked, and stays.
    Kept {
        /// Its name.
        file: &'a str,
    },
}

/// The results of [`quantize`].
#[derive(Clone, Debug, Default, PartialEq)]
pub struct QuantizeReport {
    /// The quantized matrices, sorted by name.
    pub matrices: Vec<MatrixError>,
    /// The bytes of the source's tensors.
    pub bytes_before: u64,
    /// The bytes of the output's files with tensors.
    pub bytes_after: u64,
}

/// The error of a quantized matrix, or of all experts' matrices in one tensor of a GGUF file.
#[derive(Clone, Debug, PartialEq)]
pub struct MatrixError {
    /// The name of the float tensor; in a GGUF file its own.
    pub name: String,
    /// The format's published name, or ggml's name of the blocks.
    pub format: String,
    /// The root of the summed squared errors, over that of the squared elements.
    pub relative_rms: f64,
}

impl QuantizeReport {
    /// Returns the matrix with the largest error.
    pub fn worst(&self) -> Option<&MatrixError> {
        let by_error =
            |a: &&MatrixError, b: &&MatrixError| a.relative_rms.total_cmp(&b.relative_rms);
        self.matrices.iter().max_by(by_error)
    }

    /// Returns the mean error of the matrices.
    pub fn mean(&self) -> f64 {
        let sum: f64 = self.matrices.iter().map(|matrix| matrix.relative_rms).sum();
        sum / self.matrices.len().max(1) as f64
    }
}

/// Sums of squares, from which a relative error is made.
#[derive(Clone, Copy, Debug, Default)]
struct Squares {
    errors: f64,
    values: f64,
}

impl Squares {
    fn add(&mut self, values: &[f32], found: &[f32]) {
        // Several sums side by side, because one waits for each of its additions.
        const LANES: usize = 8;
        let (mut errors, mut squares) = ([0f64; LANES], [0f64; LANES]);
        for (values, found) in values.chunks(LANES).zip(found.chunks(LANES)) {
            for (at, (value, found)) in values.iter().zip(found).enumerate() {
                let (value, found) = (f64::from(*value), f64::from(*found));
                errors[at] += (found - value) * (found - value);
                squares[at] += value * value;
            }
        }
        self.errors += errors.iter().sum::<f64>();
        self.values += squares.iter().sum::<f64>();
    }

    fn relative_rms(self) -> f64 {
        if self.errors == 0.0 {
            return 0.0;
        }
        (self.errors / self.values).sqrt()
    }
}

/// Quantizes the routed experts of the model in the folder `from`, and writes the model to `to`: a
/// folder, or a GGUF file. It works on one matrix per thread at a time.
///
/// If `to` holds finished files of an earlier run with the same source and format, they are checked
/// and kept. `watch` is called from several threads.
///
/// # Errors
///
/// [`QuantizeError`] says why the model cannot be read, quantized or written. No unfinished file
/// has a final name then.
pub fn quantize(
    from: &Path,
    to: &Path,
    target: QuantizeTo,
    watch: &(dyn Fn(QuantizeEvent<'_>) + Sync),
) -> Result<QuantizeReport, QuantizeError> {
    let model = model::Model::open(from)?;
    match target {
        QuantizeTo::Folder(scheme) => folder::write(&model, to, scheme, watch),
        QuantizeTo::Gguf(blocks) => gguf::write(&model, to, blocks, watch),
    }
}
