//! One weight of a layer, in the tensors of a checkpoint that make it.

use crate::WeightsError;
use crate::checkpoint::TensorRef;
use crate::copy::{copy, dense};
use crate::quantized::Quantized;
use crate::view::Layout;
use moesaic_kernel::DType;
use moesaic_tensor::{Bytes, Tensor, read_float, read_int, write_f32s, write_float};
use std::ops::Range;

/// A weight that was found; nothing of it was read.
pub(crate) struct Weight<'a> {
    /// As the layer wants it.
    pub dtype: DType,
    /// As the layer wants it.
    pub shape: Vec<usize>,
    pub parts: Vec<Part<'a>>,
    /// A part is a row of the first dimension, else there is one part.
    pub stacked: bool,
    /// What multiplies each column, when anything does.
    pub columns: Option<Vec<f64>>,
    /// The weight is a table of ids below this number.
    pub experts: Option<usize>,
}

/// A tensor of the file as a recipe wants it.
pub(crate) struct Part<'a> {
    pub from: TensorRef<'a>,
    pub elements: Elements<'a>,
    pub layout: Layout,
}

/// What a tensor of the file has.
pub(crate) enum Elements<'a> {
    /// Elements of one of our types.
    Numbers(DType),
    /// Codes and scales.
    Codes(Box<Quantized<'a>>),
}

impl Weight<'_> {
    /// Rows of the first dimension, at most these: where they lie in the file, be it
    /// one alone; if they do not, put together.
    pub fn rows(&self, rows: Range<usize>) -> Result<Tensor<'static>, WeightsError> {
        let first = rows.start..rows.end.min(rows.start + 1);
        for rows in [&rows, &first] {
            if let Some(tensor) = self.lent(rows)? {
                return Ok(tensor);
            }
        }
        self.made(rows)
    }

    /// All of it.
    pub fn whole(&self) -> Result<Tensor<'static>, WeightsError> {
        let all = 0..self.shape.first().copied().unwrap_or(1);
        match self.lent(&all)? {
            Some(tensor) => Ok(tensor),
            None => self.made(all),
        }
    }

    /// Rows that lie in the file as they should.
    fn lent(&self, rows: &Range<usize>) -> Result<Option<Tensor<'static>>, WeightsError> {
        let (part, layout) = match (self.stacked, rows.len()) {
            (false, _) => (&self.parts[0], self.parts[0].layout.rows(rows.clone())),
            (true, 1) => (
                &self.parts[rows.start],
                self.parts[rows.start].layout.clone(),
            ),
            (true, _) => return Ok(None),
        };
        let Some(span) = layout.contiguous().filter(|_| self.as_it_is(part)) else {
            return Ok(None);
        };
        part.from.check_length()?;
        let size = self.dtype.size();
        let data = part.from.data(span.start * size..span.end * size);
        self.check_table(&part.from, &data)?;
        Ok(Some(self.tensor(rows.len(), data)))
    }

    /// Rows put together: in memory that lasts, while pages of the file do not.
    fn made(&self, rows: Range<usize>) -> Result<Tensor<'static>, WeightsError> {
        let row = self.shape.iter().skip(1).product::<usize>() * self.dtype.size();
        // Only now: a spec can promise more than a file has and memory holds.
        let mut data = Bytes::zeros(rows.len() * row);
        let elements = row / self.dtype.size();
        if self.stacked {
            let out = data.to_mut().chunks_mut(row.max(1));
            for (index, out) in rows.clone().zip(out) {
                let part = &self.parts[index];
                self.fill(part, &part.layout, index * elements, out)?;
            }
        } else {
            let (part, first) = (&self.parts[0], rows.start * elements);
            let layout = part.layout.rows(rows.clone());
            self.fill(part, &layout, first, data.to_mut())?;
        }
        Ok(self.tensor(rows.len(), data))
    }

    fn tensor(&self, rows: usize, data: Bytes<'static>) -> Tensor<'static> {
        let mut shape = self.shape.clone();
        if let Some(first) = shape.first_mut() {
            *first = rows;
        }
        Tensor {
            dtype: self.dtype,
            shape,
            data,
        }
    }

    /// Whether the elements are in the file as the layer wants them.
    fn as_it_is(&self, part: &Part<'_>) -> bool {
        let same = matches!(part.elements, Elements::Numbers(found) if found == self.dtype);
        same && self.columns.is_none()
    }

    /// Writes a part, or rows of it, to its place: from this element of the weight on.
    fn fill(
        &self,
        part: &Part<'_>,
        layout: &Layout,
        first: usize,
        out: &mut [u8],
    ) -> Result<(), WeightsError> {
        let span = layout.span();
        let read = match &part.elements {
            Elements::Codes(codes) => {
                codes.check_length()?;
                self.decode(codes, layout, first, out);
                codes.bytes(&span)
            }
            Elements::Numbers(found) => {
                part.from.check_length()?;
                let size = found.size();
                if self.as_it_is(part) {
                    copy(layout, part.from.bytes, size, out)
                } else {
                    self.convert(part, *found, layout, first, out)?
                }
                span.start * size..span.end * size
            }
        };
        part.from.data(read).release();
        self.check_table(&part.from, out)
    }

    /// Codes as numbers: their products with the scales in f32, which are rounded once. That is
    /// how checkpoints are dequantized elsewhere, to the bit.
    fn decode(&self, codes: &Quantized<'_>, layout: &Layout, first: usize, out: &mut [u8]) {
        let (wanted, size) = (self.dtype, self.dtype.size());
        codes.read(layout, |before, values| {
            let out = &mut out[before * size..(before + values.len()) * size];
            let Some(factors) = &self.columns else {
                return write_f32s(wanted, values, out);
            };
            let pairs = values.iter().zip(out.chunks_exact_mut(size));
            for (i, (value, out)) in pairs.enumerate() {
                let factor = factors[(first + before + i) % factors.len()];
                write_float(wanted, f64::from(*value) * factor, out);
            }
        });
    }

    /// Elements converted one by one.
    fn convert(
        &self,
        part: &Part<'_>,
        found: DType,
        layout: &Layout,
        first: usize,
        out: &mut [u8],
    ) -> Result<(), WeightsError> {
        let wanted = self.dtype;
        let dense = dense(layout, part.from.bytes, found.size());
        let pairs = dense
            .chunks_exact(found.size())
            .zip(out.chunks_exact_mut(wanted.size()));
        for (i, (b, out)) in pairs.enumerate() {
            if wanted.is_float() {
                let column = |c: &Vec<f64>| c[(first + i) % c.len()];
                let factor = self.columns.as_ref().map_or(1.0, column);
                write_float(wanted, read_float(found, b) * factor, out);
            } else {
                let value = self.int(&part.from, read_int(found, b))?;
                out.copy_from_slice(&value.to_le_bytes());
            }
        }
        Ok(())
    }

    /// An integer that fits into 32 bits.
    fn int(&self, from: &TensorRef<'_>, value: i64) -> Result<i32, WeightsError> {
        i32::try_from(value).map_err(|_| self.bad_value(from, value))
    }

    /// Whether the entries of an expert table name experts.
    fn check_table(&self, from: &TensorRef<'_>, out: &[u8]) -> Result<(), WeightsError> {
        let Some(experts) = self.experts else {
            return Ok(());
        };
        let values = out.chunks_exact(4).map(|b| read_int(DType::I32, b));
        let legal = 0..experts as i64;
        match values.into_iter().find(|value| !legal.contains(value)) {
            Some(value) => Err(self.bad_value(from, value)),
            None => Ok(()),
        }
    }

    fn bad_value(&self, from: &TensorRef<'_>, value: i64) -> WeightsError {
        let expected = match self.experts {
            Some(experts) => format!("0 to {}", experts as i64 - 1),
            None => "a number of 32 bits".to_string(),
        };
        WeightsError::BadValue {
            tensor: from.name.to_string(),
            file: from.file.to_path_buf(),
            value,
            expected,
        }
    }
}
