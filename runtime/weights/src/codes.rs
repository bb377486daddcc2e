//! Experts' matrices as codes: the canonical tensors of a quantized matrix, made from the bytes of
//! the checkpoint without decoding them.

use crate::quantized::{Decoder, Quantized};
use crate::weight::{Elements, Weight};
use crate::{CodesError, WeightsError};
use moesaic_kernel::DType;
use moesaic_spec::format::{
    Blocks, CodeOrder, LARGEST, Matrices, PublishedCodes, ScaleBlock, ScaleType,
};
use moesaic_spec::{FormatTensor, OffsetType, WeightFormat};
use moesaic_tensor::{Bytes, Tensor, write_float};
use std::ops::Range;

/// A matrix of every expert, in the canonical format that holds its codes.
pub(crate) struct CodeWeight<'a> {
    /// Where its numbers are: recipes describe those.
    numbers: Weight<'a>,
    published: Published,
    format: WeightFormat,
}

/// The form of a matrix in the file, from which its canonical format follows.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Published {
    /// Codes and scales in separate tensors.
    Matrices(PublishedCodes),
    /// GGUF's blocks.
    Blocks(&'static Blocks),
}

impl Published {
    /// Returns what two matrices have in common, if one format can hold both.
    pub fn merged(self, other: Published) -> Option<Published> {
        match (self, other) {
            (Published::Matrices(a), Published::Matrices(b)) => {
                let alike = |codes: PublishedCodes| PublishedCodes {
                    block: [1, codes.block[1]],
                    zeros: false,
                    ..codes
                };
                // Scales of several rows can be written once for each row instead.
                let rows = if a.block[0] == b.block[0] {
                    a.block[0]
                } else {
                    1
                };
                let merged = PublishedCodes {
                    block: [rows, a.block[1]],
                    zeros: a.zeros || b.zeros,
                    ..a
                };
                (alike(a) == alike(b)).then_some(Published::Matrices(merged))
            }
            (a, b) => (a == b).then_some(a),
        }
    }

    /// Returns the canonical format that holds the matrix exactly, or the reason that none does.
    pub fn stored(self) -> Result<WeightFormat, CodesError> {
        match self {
            Published::Matrices(codes) => Ok(codes.stored()?),
            Published::Blocks(blocks) => Ok(blocks.stored()),
        }
    }

    /// Returns the matrix as this format describes it, if the format holds it exactly: scales of
    /// several rows may be repeated for each row, and usual zero points written out.
    fn held_by(self, format: WeightFormat) -> Option<Published> {
        let Published::Matrices(own) = self else {
            return (self.stored() == Ok(format)).then_some(self);
        };
        let rows = [own.block[0], 1].into_iter();
        let mut ways = rows.flat_map(|rows| {
            [own.zeros, true].map(|zeros| PublishedCodes {
                block: [rows, own.block[1]],
                zeros,
                ..own
            })
        });
        let found = ways.find(|codes| codes.stored() == Ok(format));
        found.map(Published::Matrices)
    }
}

/// One expert's matrix in a tensor of codes. Its element at a row and a column is at index
/// `start + row * down + column * along` of the tensor's numbers.
struct View<'q, 'a> {
    from: &'q Quantized<'a>,
    start: usize,
    down: usize,
    along: usize,
    size: [usize; 2],
}

impl<'a> Weight<'a> {
    /// Returns what the canonical format of all experts' matrices depends on. `None` if some are
    /// not quantized. The error says why a layer cannot take the codes.
    pub fn published(&self) -> Result<Option<Published>, CodesError> {
        let mut all: Option<Published> = None;
        for expert in 0..self.shape.first().copied().unwrap_or(0) {
            let Some(view) = self.view(expert) else {
                return Ok(None);
            };
            if self.columns.is_some() {
                return Err(CodesError::ColumnFactors);
            }
            let own = view.published()?;
            let merged = match all {
                None => Some(own),
                Some(all) => all.merged(own),
            };
            all = Some(merged.ok_or(CodesError::DifferentExperts)?);
        }
        Ok(all)
    }

    /// Returns one expert's matrix, if it is quantized.
    fn view(&self, expert: usize) -> Option<View<'_, 'a>> {
        let (part, layout) = if self.stacked {
            (&self.parts[expert], self.parts[expert].layout.clone())
        } else {
            (
                &self.parts[0],
                self.parts[0].layout.rows(expert..expert + 1),
            )
        };
        let Elements::Codes(from) = &part.elements else {
            return None;
        };
        let (size, [down, along]) = layout.inner();
        Some(View {
            from,
            start: *layout.matrices().first()?,
            down,
            along,
            size,
        })
    }
}

impl View<'_, '_> {
    /// Returns what the canonical format of the matrix depends on, or why a layer cannot take its
    /// codes.
    fn published(&self) -> Result<Published, CodesError> {
        match &self.from.decoder {
            Decoder::Blocks(blocks) if self.whole_rows(self.from.shape.last()) => {
                Ok(Published::Blocks(blocks))
            }
            Decoder::Blocks(_) => Err(CodesError::PartsOfRows),
            Decoder::Matrices(matrices) => {
                let codes = PublishedCodes {
                    format: matrices.format,
                    scale: matrices.scales.kind,
                    block: self.block(matrices)?,
                    zeros: matrices.has_zero_points(),
                    in_order: matrices.groups.is_none(),
                };
                Ok(Published::Matrices(codes))
            }
        }
    }

    /// Returns true if the rows are whole rows of the file's matrices.
    fn whole_rows(&self, columns: Option<&usize>) -> bool {
        let [rows, width] = self.size;
        let columns = columns.copied().unwrap_or(0).max(1);
        let in_steps = rows <= 1 || self.down.is_multiple_of(columns);
        self.along == 1 && width == columns && self.start.is_multiple_of(columns) && in_steps
    }

    /// Returns the rows and columns that share a scale; 0 columns for a whole row.
    fn block(&self, matrices: &Matrices<'_>) -> Result<[usize; 2], CodesError> {
        let [rows, columns] = matrices.size.map(|size| size.max(1));
        let [down, across] = matrices.scales.block;
        let first = self.start / columns % rows;
        let one = matrices.scales.grid.is_none() || (down >= rows && across >= columns);
        if self.whole_rows(Some(&columns)) {
            // A scale for each column has blocks as wide as that.
            let tiles = matches!(matrices.format.block, ScaleBlock::Tile(_)) || across < columns;
            let kept = self.down == columns && first.is_multiple_of(down);
            return Ok(match (tiles && matrices.scales.grid.is_some(), kept) {
                (false, _) => [1, 0],
                (true, true) => [down, across],
                (true, false) => [1, across],
            });
        }
        // The file's columns are the layer's rows.
        let turned = self.down == 1 && self.along == columns;
        let columns_alone = turned && across == 1 && down >= rows;
        match (turned && first.is_multiple_of(down), one || columns_alone) {
            (_, true) if self.along.is_multiple_of(columns) => Ok([1, 0]),
            (true, false) if (self.start % columns).is_multiple_of(across) => Ok([across, down]),
            (true, false) => Ok([1, down]),
            _ => Err(CodesError::PartsOfRows),
        }
    }

    /// Returns the index of an element among the numbers of the file's tensor.
    fn index(&self, row: usize, column: usize) -> usize {
        self.start + row * self.down + column * self.along
    }
}

impl<'a> CodeWeight<'a> {
    /// Returns the codes of a weight in a format.
    ///
    /// # Errors
    ///
    /// [`WeightsError::NoCodes`] if the format does not hold it exactly.
    pub fn new(numbers: Weight<'a>, format: WeightFormat) -> Result<CodeWeight<'a>, WeightsError> {
        match held_by(&numbers, format) {
            Ok(published) => Ok(CodeWeight {
                numbers,
                published,
                format,
            }),
            Err(reason) => Err(no_codes(&numbers, format, reason)),
        }
    }

    /// Returns the weight of its numbers.
    pub fn numbers(&self) -> &Weight<'a> {
        &self.numbers
    }

    fn size(&self) -> [usize; 2] {
        let shape = &self.numbers.shape;
        [shape[shape.len() - 2], shape[shape.len() - 1]]
    }

    /// Returns its canonical tensors, codes first.
    pub fn tensors(&self) -> Vec<FormatTensor> {
        self.format.tensors(self.size())
    }

    /// Returns the tensor whose name ends so: `weight`, `scale`.
    pub fn tensor(&self, end: &str) -> Option<FormatTensor> {
        self.tensors().into_iter().find(|tensor| tensor.end == end)
    }

    /// Returns the shape of a tensor of so many experts.
    pub fn shape(&self, tensor: &FormatTensor, experts: usize) -> Vec<usize> {
        vec![experts, tensor.shape[0], tensor.shape[1]]
    }

    pub fn experts(&self) -> usize {
        self.numbers.shape.first().copied().unwrap_or(0)
    }

    /// Returns a tensor of these experts, or of the first of them: borrowed from the file if it
    /// lies there so, else assembled.
    pub fn rows(
        &self,
        tensor: &FormatTensor,
        experts: Range<usize>,
    ) -> Result<Tensor<'static>, WeightsError> {
        let first = experts.start..experts.end.min(experts.start + 1);
        for experts in [&experts, &first] {
            if let Some(lent) = self.lent(tensor, experts.clone())? {
                return Ok(lent);
            }
        }
        self.made(tensor, experts)
    }

    /// Returns a tensor of all experts.
    pub fn whole(&self, tensor: &FormatTensor) -> Result<Tensor<'static>, WeightsError> {
        let all = 0..self.experts();
        match self.lent(tensor, all.clone())? {
            Some(lent) => Ok(lent),
            None => self.made(tensor, all),
        }
    }

    /// Returns codes that the file holds in canonical form.
    fn lent(
        &self,
        tensor: &FormatTensor,
        experts: Range<usize>,
    ) -> Result<Option<Tensor<'static>>, WeightsError> {
        let weight = &self.numbers;
        let (part, layout) = match (weight.stacked, experts.len()) {
            (false, _) => (
                &weight.parts[0],
                weight.parts[0].layout.rows(experts.clone()),
            ),
            (true, 1) => {
                let part = &weight.parts[experts.start];
                (part, part.layout.clone())
            }
            (true, _) => return Ok(None),
        };
        let (Elements::Codes(from), Some(span)) = (&part.elements, layout.contiguous()) else {
            return Ok(None);
        };
        if tensor.end != "weight" || !self.as_they_are(from) {
            return Ok(None);
        }
        from.check_length()?;
        let data = part.from.data(from.bytes(&span));
        let shape = self.shape(tensor, experts.len());
        Ok(Some(Tensor {
            dtype: tensor.dtype,
            shape,
            data,
        }))
    }

    /// Returns true if the rows of the file are canonical rows of codes.
    fn as_they_are(&self, from: &Quantized<'_>) -> bool {
        let (Decoder::Matrices(matrices), Published::Matrices(codes)) =
            (&from.decoder, self.published)
        else {
            return false;
        };
        let bits = codes.format.element.bits();
        let rows = matches!(matrices.format.packing, CodeOrder::Rows { .. });
        let same = codes.code_shift() == 0 && bits == self.format.code.bits();
        rows && same && (self.size()[1] * bits).is_multiple_of(32)
    }

    /// Assembles a tensor of some experts in owned memory.
    fn made(
        &self,
        tensor: &FormatTensor,
        experts: Range<usize>,
    ) -> Result<Tensor<'static>, WeightsError> {
        let one = tensor.shape[0] * tensor.shape[1] * tensor.dtype.size();
        let mut data = Bytes::zeros(experts.len() * one);
        let outs = data.to_mut().chunks_exact_mut(one.max(1));
        for (expert, out) in experts.clone().zip(outs) {
            let Some(view) = self.numbers.view(expert) else {
                continue;
            };
            view.from.check_length()?;
            let part = Part {
                view: &view,
                of: self,
                tensor,
            };
            let filled = part.fill(out);
            filled.map_err(|reason| no_codes(&self.numbers, self.format, reason))?;
            view.release(tensor);
        }
        Ok(Tensor {
            dtype: tensor.dtype,
            shape: self.shape(tensor, experts.len()),
            data,
        })
    }
}

/// Returns the matrices of a weight as a format describes them, or the reason that it does not hold
/// them exactly.
fn held_by(numbers: &Weight<'_>, format: WeightFormat) -> Result<Published, CodesError> {
    let own = numbers.published()?;
    let own = own.ok_or(CodesError::NotQuantized)?;
    match own.held_by(format) {
        Some(held) => Ok(held),
        None => Err(CodesError::OtherFormat {
            format: own.stored()?.to_string(),
        }),
    }
}

/// Returns the error for a weight whose codes a format cannot hold.
fn no_codes(numbers: &Weight<'_>, format: WeightFormat, reason: CodesError) -> WeightsError {
    let from = numbers.parts.first().map(|part| part.from);
    WeightsError::NoCodes {
        tensor: from.map_or("", |from| from.name).to_string(),
        file: from.map(|from| from.file.to_path_buf()).unwrap_or_default(),
        format: format.to_string(),
        reason,
    }
}

impl View<'_, '_> {
    /// Drops the pages that were read from this process's memory.
    fn release(&self, tensor: &FormatTensor) {
        let blocks = matches!(self.from.decoder, Decoder::Blocks(_));
        if blocks || tensor.end == "weight" {
            let [rows, columns] = self.size;
            let last = self.index(rows.max(1) - 1, columns.max(1) - 1);
            let span = self.start..if rows * columns == 0 {
                self.start
            } else {
                last + 1
            };
            self.from.from.data(self.from.bytes(&span)).release();
        } else {
            let all = |from: &crate::TensorRef<'_>| from.data(0..from.bytes.len());
            self.from.beside.iter().for_each(|from| all(from).release());
        }
    }
}

/// One of the canonical tensors of one expert's matrix.
struct Part<'p, 'q, 'a> {
    view: &'p View<'q, 'a>,
    of: &'p CodeWeight<'a>,
    tensor: &'p FormatTensor,
}

impl Part<'_, '_, '_> {
    /// Writes the tensor. The error is the reason that its type cannot hold a number of the file.
    fn fill(&self, out: &mut [u8]) -> Result<(), CodesError> {
        let row = self.tensor.shape[1] * self.tensor.dtype.size();
        let rows = out.chunks_exact_mut(row.max(1)).enumerate();
        match (&self.view.from.decoder, self.of.published) {
            (Decoder::Matrices(matrices), Published::Matrices(codes)) => {
                for (row, out) in rows {
                    self.matrix_row(matrices, &codes, row, out);
                }
            }
            (Decoder::Blocks(blocks), _) => {
                let codes = blocks.stored_codes();
                for (row, out) in rows {
                    self.block_row(blocks, &codes, row, out)?;
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// Writes a row of the tensor of a matrix with codes and scales apart.
    fn matrix_row(
        &self,
        matrices: &Matrices<'_>,
        codes: &PublishedCodes,
        row: usize,
        out: &mut [u8],
    ) {
        if self.tensor.end == "weight" {
            return self.codes(matrices, codes, row, out);
        }
        let format = &self.of.format;
        let [_, across] = format.scale_shape(self.view.size);
        if self.tensor.end == "scale_2" {
            let factor = matrices.factor(self.view.index(row, 0));
            return out.copy_from_slice(&factor.to_le_bytes());
        }
        let width = format.block_columns(self.view.size[1]);
        let size = format.scale.size();
        for block in 0..across {
            let at = self.view.index(row * format.block[0], block * width);
            if self.tensor.end == "scale" {
                let to = &mut out[block * size..(block + 1) * size];
                to.copy_from_slice(matrices.scale_bytes(at));
            } else {
                out[block] = (matrices.zero_point(at) + codes.zero_shift()) as u8;
            }
        }
    }

    /// Writes a row of codes of a matrix with codes and scales apart.
    fn codes(&self, matrices: &Matrices<'_>, codes: &PublishedCodes, row: usize, out: &mut [u8]) {
        let (view, code) = (self.view, self.of.format.code);
        let (first, columns) = (view.index(row, 0), view.size[1]);
        let (shift, bits) = (codes.code_shift(), codes.format.element.bits());
        let same = bits == code.bits() && view.along == 1;
        if let (true, 0, Some(bytes)) = (same, shift, matrices.row(first)) {
            let held = (columns * bits).div_ceil(8);
            out[..held].copy_from_slice(&bytes[..held]);
            return pad(code.bits(), columns, code.zero(), out);
        }
        // Bytes with another middle; codes of four bits are as they are.
        let turned = u32::from_le_bytes([shift; 4]);
        if same && matrices.column_word(first, 0).is_some() && (bits == 8 || shift == 0) {
            for (at, out) in out.chunks_exact_mut(4).enumerate() {
                let word = matrices.column_word(first, at).unwrap_or_default();
                out.copy_from_slice(&(word ^ turned).to_le_bytes());
            }
            return pad(code.bits(), columns, code.zero(), out);
        }
        let mut own = vec![0u8; columns];
        if view.along == 1 {
            matrices.codes(first, &mut own);
        } else {
            for (column, one) in own.iter_mut().enumerate() {
                matrices.codes(view.index(row, column), std::slice::from_mut(one));
            }
        }
        own.iter_mut().for_each(|one| *one = codes.canonical(*one));
        pack(code.bits(), own.into_iter(), out);
        pad(code.bits(), columns, code.zero(), out);
    }

    /// Writes a row of the tensor of a matrix of GGUF's blocks.
    fn block_row(
        &self,
        blocks: &Blocks,
        codes: &[u8; 256],
        row: usize,
        out: &mut [u8],
    ) -> Result<(), CodesError> {
        let (view, format) = (self.view, &self.of.format);
        let first = view.index(row, 0) / blocks.elements;
        let count = view.size[1] / blocks.elements;
        let bytes = &view.from.from.bytes[first * blocks.bytes..(first + count) * blocks.bytes];
        let each = bytes.chunks_exact(blocks.bytes);
        if self.tensor.end == "weight" {
            let (bits, mut own) = (format.code.bits(), [0i8; LARGEST]);
            let wide = blocks.elements * bits / 8;
            for (block, out) in each.zip(out.chunks_exact_mut(wide)) {
                blocks.codes(block, &mut own);
                let own = own[..blocks.elements].iter();
                pack(bits, own.map(|code| codes[usize::from(*code as u8)]), out);
            }
            return Ok(());
        }
        let groups = blocks.elements / blocks.group;
        for (at, block) in each.enumerate() {
            let parts = blocks.stored_scales(block);
            let (numbers, factor) = match self.tensor.end {
                "scale" | "scale_2" => (&parts.scales, parts.scale_2),
                _ => (&parts.offsets, parts.offset_2),
            };
            if self.tensor.end.ends_with("_2") {
                out[at * 4..(at + 1) * 4].copy_from_slice(&factor.to_le_bytes());
                continue;
            }
            let kind = match (self.tensor.end, format.offset) {
                ("scale", _) => format.scale,
                (_, Some(OffsetType::F16)) => ScaleType::F16,
                _ => ScaleType::Int8,
            };
            let out = out[at * groups * kind.size()..].chunks_exact_mut(kind.size());
            for (number, out) in numbers[..groups].iter().zip(out) {
                put(kind, *number, out)?;
            }
        }
        Ok(())
    }
}

/// Packs codes, the first in the lowest bits.
fn pack(bits: usize, codes: impl Iterator<Item = u8>, out: &mut [u8]) {
    if bits == 8 {
        return out
            .iter_mut()
            .zip(codes)
            .for_each(|(out, code)| *out = code);
    }
    let mut codes = codes;
    for out in out {
        let Some(low) = codes.next() else { return };
        *out = low | codes.next().unwrap_or(0) << 4;
    }
}

/// Fills what a row of codes leaves of its last word.
fn pad(bits: usize, columns: usize, zero: u8, out: &mut [u8]) {
    let mut full = columns * bits / 8;
    if !(columns * bits).is_multiple_of(8) {
        out[full] = out[full] & 15 | zero << 4;
        full += 1;
    }
    let both = if bits == 8 { zero } else { zero | zero << 4 };
    out[full..].fill(both);
}

/// Writes a scale or an offset. The error says that the type cannot hold it.
fn put(kind: ScaleType, number: f32, out: &mut [u8]) -> Result<(), CodesError> {
    match kind {
        ScaleType::F32 => write_float(DType::F32, f64::from(number), out),
        ScaleType::F16 => write_float(DType::F16, f64::from(number), out),
        ScaleType::Bf16 => write_float(DType::Bf16, f64::from(number), out),
        ScaleType::E8m0 => out[0] = (number.to_bits() >> 23) as u8,
        ScaleType::Int8 | ScaleType::E4m3 => out[0] = number as i8 as u8,
    }
    let read = kind.read(out, 0);
    if read == number || read.is_nan() && number.is_nan() {
        return Ok(());
    }
    Err(CodesError::Scale { number })
}
