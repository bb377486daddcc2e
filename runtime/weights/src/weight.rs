//! One weight of a layer, with the tensors of a checkpoint that it is made from.

use crate::WeightsError;
use crate::checkpoint::TensorRef;
use crate::copy::{copy, dense};
use crate::quantized::Quantized;
use crate::view::Layout;
use moesaic_kernel::DType;
use moesaic_tensor::{Bytes, Tensor, read_float, read_int, widen_floats, write_f32s, write_float};
use std::collections::BTreeSet;
use std::fmt;
use std::ops::Range;
use std::sync::Mutex;

/// A weight that was found but not read.
pub(crate) struct Weight<'a> {
    /// The type that the layer wants.
    pub dtype: DType,
    /// The shape that the layer wants.
    pub shape: Vec<usize>,
    pub parts: Vec<Part<'a>>,
    /// Whether each part is one row of the first dimension; otherwise there is one part.
    pub stacked: bool,
    /// The factor on each column, if the recipe computes.
    pub columns: Option<Vec<f64>>,
    /// The number added to each product.
    pub plus: f64,
    /// The number of experts that ids of a table must stay below, if the weight is a table.
    pub experts: Option<usize>,
    /// Whether finite values may become infinite.
    pub allow_infinite: bool,
    /// The effects of rounding in the rows read so far.
    pub tally: Mutex<Tally>,
}

/// Counts of a weight's values that left the range of the layer's element type.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rounded {
    /// The canonical name.
    pub tensor: String,
    /// The layer's element type.
    pub dtype: DType,
    /// The number of finite values that became infinite.
    pub infinite: u64,
    /// The number of nonzero values that became zero.
    pub zero: u64,
}

impl fmt::Display for Rounded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let values = |n: u64| if n == 1 { "value" } else { "values" };
        let (tensor, dtype) = (&self.tensor, self.dtype);
        let counts = [(self.infinite, "infinite"), (self.zero, "zero")];
        let said = counts.into_iter().filter(|(count, _)| *count > 0);
        let said = said.map(|(n, what)| format!("{n} {} became {what}", values(n)));
        let said: Vec<String> = said.collect();
        write!(f, "{tensor}, rounded to {dtype}: {}", said.join(", "))
    }
}

/// Counts of values. Each row of the weight counts once, however often it is read.
#[derive(Default)]
pub(crate) struct Tally {
    lost: Lost,
    rows: BTreeSet<usize>,
}

/// Values that left the range of an element type.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
struct Lost {
    infinite: u64,
    zero: u64,
}

impl Lost {
    fn add(&mut self, other: Lost) {
        self.infinite += other.infinite;
        self.zero += other.zero;
    }
}

/// The magnitudes from which values become infinite, and up to which they become zero, when rounded
/// to an element type (to nearest, ties to even).
#[derive(Clone, Copy)]
struct Range64 {
    infinite: f64,
    zero: f64,
}

impl Range64 {
    fn of(dtype: DType) -> Range64 {
        // The bounds are half a step above the largest number, and half of the smallest.
        let (largest, step, smallest) = match dtype {
            DType::F16 => (65504.0, 5, -24),
            DType::Bf16 => (f64::from_bits(0x47ef_e000_0000_0000), 120, -133),
            _ => (f64::from(f32::MAX), 104, -149),
        };
        Range64 {
            infinite: largest + 2f64.powi(step - 1),
            zero: 2f64.powi(smallest - 1),
        }
    }

    /// Counts one value.
    fn count(self, value: f64, lost: &mut Lost) {
        let size = value.abs();
        lost.infinite += u64::from(size >= self.infinite && size < f64::INFINITY);
        lost.zero += u64::from(size <= self.zero && size > 0.0);
    }
}

/// A tensor of the file as a recipe uses it.
pub(crate) struct Part<'a> {
    pub from: TensorRef<'a>,
    pub elements: Elements<'a>,
    pub layout: Layout,
}

/// The content of a tensor in the file.
pub(crate) enum Elements<'a> {
    /// Elements of a supported type.
    Numbers(DType),
    /// Codes and scales.
    Codes(Box<Quantized<'a>>),
}

impl Weight<'_> {
    /// Returns true if some of it is codes in the file.
    pub fn is_quantized(&self) -> bool {
        let codes = |part: &Part<'_>| matches!(part.elements, Elements::Codes(_));
        self.parts.iter().any(codes)
    }

    /// Returns rows of the first dimension, at most these: borrowed from the file if they are
    /// contiguous there, even if that is only one, else assembled.
    pub fn rows(&self, rows: Range<usize>) -> Result<Tensor<'static>, WeightsError> {
        // If not all rows are contiguous, a single one may be. Lending one row costs nothing, while
        // assembling all would copy.
        let first = rows.start..rows.end.min(rows.start + 1);
        for rows in [&rows, &first] {
            if let Some(tensor) = self.lent(rows)? {
                return Ok(tensor);
            }
        }
        self.made(rows)
    }

    /// Returns all rows.
    pub fn whole(&self) -> Result<Tensor<'static>, WeightsError> {
        let all = 0..self.shape.first().copied().unwrap_or(1);
        match self.lent(&all)? {
            Some(tensor) => Ok(tensor),
            None => self.made(all),
        }
    }

    /// Returns rows that the file holds in the wanted form.
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
        // The bytes stay in the mapped file; nothing is copied.
        let data = part.from.data(span.start * size..span.end * size);
        self.check_table(&part.from, &data)?;
        Ok(Some(self.tensor(rows.len(), data)))
    }

    /// Assembles rows in owned memory, so that pages of the file can be dropped.
    fn made(&self, rows: Range<usize>) -> Result<Tensor<'static>, WeightsError> {
        let row = self.shape.iter().skip(1).product::<usize>() * self.dtype.size();
        // Allocate only after the file was checked, because a spec can promise more than memory
        // holds.
        let mut data = Bytes::zeros(rows.len() * row);
        let lost = self.make(rows.clone(), row, data.to_mut())?;
        if lost.infinite > 0 && !self.allow_infinite {
            return Err(self.overflow(row)?);
        }
        if let Ok(mut tally) = self.tally.lock()
            // Ranks and retries may read a row several times.
            && rows.clone().all(|row| !tally.rows.contains(&row))
        {
            tally.rows.extend(rows.clone());
            tally.lost.add(lost);
        }
        Ok(self.tensor(rows.len(), data))
    }

    /// Writes rows of `row` bytes each, and counts the values that the element type cannot hold.
    fn make(&self, rows: Range<usize>, row: usize, out: &mut [u8]) -> Result<Lost, WeightsError> {
        let elements = row / self.dtype.size();
        if !self.stacked {
            let (part, first) = (&self.parts[0], rows.start * elements);
            return self.fill(part, &part.layout.rows(rows), first, out);
        }
        let mut lost = Lost::default();
        for (index, out) in rows.zip(out.chunks_mut(row.max(1))) {
            let part = &self.parts[index];
            lost.add(self.fill(part, &part.layout, index * elements, out)?);
        }
        Ok(lost)
    }

    /// Returns the error with counts over all values of the weight, not only some rows.
    fn overflow(&self, row: usize) -> Result<WeightsError, WeightsError> {
        let (mut lost, mut out) = (Lost::default(), vec![0; row]);
        // Count over the whole weight, so that the error is the same whichever rows were asked for.
        for index in 0..self.shape.first().copied().unwrap_or(1) {
            lost.add(self.make(index..index + 1, row, &mut out)?);
        }
        let from = &self.parts[0].from;
        Ok(WeightsError::Overflow {
            tensor: from.name.to_string(),
            file: from.file.to_path_buf(),
            wanted: self.dtype.to_string(),
            infinite: lost.infinite,
            zero: lost.zero,
        })
    }

    /// Returns the effects of rounding in the rows read so far, if there were any.
    pub fn rounded(&self, name: &str) -> Option<Rounded> {
        let Lost { infinite, zero } = self.tally.lock().ok()?.lost;
        (infinite + zero > 0).then(|| Rounded {
            tensor: name.to_string(),
            dtype: self.dtype,
            infinite,
            zero,
        })
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

    /// Returns true if the file holds the elements in the form that the layer wants.
    fn as_it_is(&self, part: &Part<'_>) -> bool {
        let same = matches!(part.elements, Elements::Numbers(found) if found == self.dtype);
        same && self.columns.is_none()
    }

    /// Writes a part, or rows of it, starting at this element of the weight.
    fn fill(
        &self,
        part: &Part<'_>,
        layout: &Layout,
        first: usize,
        out: &mut [u8],
    ) -> Result<Lost, WeightsError> {
        let span = layout.span();
        let mut lost = Lost::default();
        let read = match &part.elements {
            Elements::Codes(codes) => {
                codes.check_length()?;
                lost = self.decode(codes, layout, first, out);
                codes.bytes(&span)
            }
            Elements::Numbers(found) => {
                part.from.check_length()?;
                let size = found.size();
                if self.as_it_is(part) {
                    copy(layout, part.from.bytes, size, out)
                } else {
                    lost = self.convert(part, *found, layout, first, out)?
                }
                span.start * size..span.end * size
            }
        };
        // The pages were read once and would only crowd the page cache of this process.
        part.from.data(read).release();
        self.check_table(&part.from, out)?;
        Ok(lost)
    }

    /// Decodes codes: their products with the scales in f32, rounded once. Other implementations
    /// dequantize in the same way, to the bit.
    fn decode(&self, codes: &Quantized<'_>, layout: &Layout, first: usize, out: &mut [u8]) -> Lost {
        let (wanted, size) = (self.dtype, self.dtype.size());
        let (range, mut lost) = (Range64::of(wanted), Lost::default());
        codes.read(layout, |before, values| {
            let out = &mut out[before * size..(before + values.len()) * size];
            let Some(factors) = &self.columns else {
                let all = values.iter();
                all.for_each(|value| range.count(f64::from(*value), &mut lost));
                return write_f32s(wanted, values, out);
            };
            let pairs = values.iter().zip(out.chunks_exact_mut(size));
            for (i, (value, out)) in pairs.enumerate() {
                let factor = factors[(first + before + i) % factors.len()];
                // The value is formed in f64 and rounded once.
                let value = f64::from(*value) * factor + self.plus;
                range.count(value, &mut lost);
                write_float(wanted, value, out);
            }
        });
        lost
    }

    /// Converts elements one by one.
    fn convert(
        &self,
        part: &Part<'_>,
        found: DType,
        layout: &Layout,
        first: usize,
        out: &mut [u8],
    ) -> Result<Lost, WeightsError> {
        let wanted = self.dtype;
        let (range, mut lost) = (Range64::of(wanted), Lost::default());
        let dense = dense(layout, part.from.bytes, found.size());
        if wanted == DType::F32 && self.columns.is_none() && found.is_float() {
            // No float has a wider range, so nothing is lost.
            widen_floats(found, &dense, out);
            return Ok(lost);
        }
        let pairs = dense
            .chunks_exact(found.size())
            .zip(out.chunks_exact_mut(wanted.size()));
        for (i, (b, out)) in pairs.enumerate() {
            if wanted.is_float() {
                let column = |c: &Vec<f64>| c[(first + i) % c.len()];
                let factor = self.columns.as_ref().map_or(1.0, column);
                let value = read_float(found, b) * factor + self.plus;
                range.count(value, &mut lost);
                write_float(wanted, value, out);
            } else {
                let value = self.int(&part.from, read_int(found, b))?;
                out.copy_from_slice(&value.to_le_bytes());
            }
        }
        Ok(lost)
    }

    /// Converts an integer that must fit into 32 bits.
    fn int(&self, from: &TensorRef<'_>, value: i64) -> Result<i32, WeightsError> {
        i32::try_from(value).map_err(|_| self.bad_value(from, value))
    }

    /// Checks that the entries of an expert table name experts.
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
