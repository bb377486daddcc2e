//! Reads quantized tensors as numbers.

use crate::WeightsError;
use crate::checkpoint::TensorRef;
use crate::finder::Finder;
use crate::stored::{self, Held};
use crate::view::Layout;
use moesaic_spec::format::{Blocks, LARGEST, Matrices};
use moesaic_spec::hf::{Codes, replaced};
use std::ops::Range;

/// The number of elements decoded at a time.
const RUN: usize = LARGEST;

/// A quantized tensor, with everything that its decoding needs.
pub(crate) struct Quantized<'a> {
    /// The codes.
    pub from: TensorRef<'a>,
    /// The shape in numbers; the last two dimensions are matrices.
    pub shape: Vec<usize>,
    pub decoder: Decoder<'a>,
    /// The tensors of scales and zero points.
    pub beside: Vec<TensorRef<'a>>,
}

/// The decoder of the codes.
pub(crate) enum Decoder<'a> {
    /// Codes and scales in separate tensors.
    Matrices(Matrices<'a>),
    /// GGUF's blocks.
    Blocks(&'static Blocks),
}

impl<'a> Quantized<'a> {
    /// Finds the matrix `name`, if the checkpoint holds it as codes.
    pub fn find(
        finder: &Finder<'a, '_>,
        codes: &Codes,
        name: &str,
    ) -> Result<Option<Quantized<'a>>, WeightsError> {
        let plain = finder.checkpoint.find(name)?;
        let plain = plain.filter(|from| from.dtype.is_ok());
        let (mut misfit, mut unlike) = (None, None);
        for way in codes.stored.iter() {
            let from = replaced(name, way.names.codes);
            let Some(from) = from.and_then(|name| finder.checkpoint.tensor(&name)) else {
                continue;
            };
            if plain.is_some_and(|plain| plain.name == from.name) {
                return Ok(None);
            }
            if !stored::is_of(way, &from) {
                unlike.get_or_insert((way, from));
                continue;
            }
            check_said(codes, name, plain.as_ref(), &from)?;
            match stored::held(finder, way, name, from) {
                Ok(held) => return Ok(Some(Quantized::new(from, held))),
                Err(error) => drop(misfit.get_or_insert(error)),
            }
        }
        match (misfit, unlike) {
            (Some(error), _) => Err(error),
            (None, Some((way, from))) if plain.is_none() => Err(stored::unlike(way, &from)),
            (None, _) => Ok(None),
        }
    }

    fn new(from: TensorRef<'a>, held: Held<'a>) -> Quantized<'a> {
        Quantized {
            from,
            shape: held.shape,
            decoder: Decoder::Matrices(held.matrices),
            beside: held.beside,
        }
    }

    /// Returns a tensor of GGUF's blocks.
    pub fn of_blocks(from: TensorRef<'a>, blocks: &'static Blocks) -> Quantized<'a> {
        Quantized {
            from,
            shape: from.shape.to_vec(),
            decoder: Decoder::Blocks(blocks),
            beside: Vec::new(),
        }
    }

    /// Checks that the files still contain all of it.
    pub fn check_length(&self) -> Result<(), WeightsError> {
        self.from.check_length()?;
        self.beside.iter().try_for_each(TensorRef::check_length)
    }

    /// Returns a byte range that is sufficient for these numbers.
    pub fn bytes(&self, span: &Range<usize>) -> Range<usize> {
        match &self.decoder {
            Decoder::Matrices(matrices) => matrices.bytes(span),
            Decoder::Blocks(blocks) => {
                let end = span.end.div_ceil(blocks.elements) * blocks.bytes;
                span.start / blocks.elements * blocks.bytes..end
            }
        }
    }

    /// Passes the numbers of a view to `give`, in order and some at a time, each time with the
    /// number of those before.
    pub fn read(&self, layout: &Layout, mut give: impl FnMut(usize, &[f32])) {
        let ([rows, columns], [down, along]) = layout.inner();
        let (mut values, mut before) = ([0f32; RUN], 0);
        for matrix in layout.matrices() {
            for row in 0..rows {
                let mut column = 0;
                while column < columns {
                    let most = if along == 1 { columns - column } else { 1 };
                    let first = matrix + row * down + column * along;
                    let count = self.run(first, &mut values[..most.min(RUN)]);
                    give(before, &values[..count]);
                    (column, before) = (column + count, before + count);
                }
            }
        }
    }

    /// Decodes numbers from `first` on, and returns their count.
    fn run(&self, first: usize, values: &mut [f32]) -> usize {
        let blocks = match &self.decoder {
            Decoder::Matrices(matrices) => return matrices.run(first, values),
            Decoder::Blocks(blocks) => blocks,
        };
        let (block, skipped) = (first / blocks.elements, first % blocks.elements);
        let count = values.len().min(blocks.elements - skipped);
        let bytes = &self.from.bytes[block * blocks.bytes..];
        let mut whole = [0f32; LARGEST];
        blocks.decode(bytes, &mut whole);
        values[..count].copy_from_slice(&whole[skipped..skipped + count]);
        count
    }
}

/// Refuses codes for a matrix that the configuration or another tensor declares as floats.
fn check_said(
    codes: &Codes,
    name: &str,
    plain: Option<&TensorRef<'_>>,
    from: &TensorRef<'_>,
) -> Result<(), WeightsError> {
    let module = name.strip_suffix(".weight").unwrap_or(name);
    let problem = match plain {
        Some(plain) => format!("`{}` is there, too, with floats", plain.name),
        None if codes.kept.iter().any(|kept| kept == module) => {
            format!("quantization_config says that `{module}` is not quantized")
        }
        None => return Ok(()),
    };
    Err(WeightsError::Contradiction {
        tensor: from.name.to_string(),
        file: from.file.to_path_buf(),
        problem,
    })
}
