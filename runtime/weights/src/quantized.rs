//! Tensors of codes with scales, read as numbers.

use crate::WeightsError;
use crate::checkpoint::TensorRef;
use crate::codes::{E2M1, E4M3, e8m0};
use crate::recipe::Finder;
use crate::view::Layout;
use moesaic_kernel::DType;
use moesaic_spec::hf::Codes;
use moesaic_tensor::read_float;
use safetensors::Dtype;
use std::ops::Range;

/// Numbers that are made at a time.
const RUN: usize = 256;

/// Columns that share a scale in FP4, where nothing else is said.
const GROUP: usize = 32;

/// A tensor of codes, and the tensor of their scales.
pub(crate) struct Quantized<'a> {
    codes: TensorRef<'a>,
    kind: Kind,
    /// Of the numbers: matrices in the last two dimensions.
    pub shape: Vec<usize>,
    scales: Scales<'a>,
}

/// How numbers lie in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    E4m3,
    /// Two in a byte, the first in its low half.
    E2m1,
}

/// The scales of matrices, row major.
struct Scales<'a> {
    from: TensorRef<'a>,
    /// None: powers of two, E8M0.
    float: Option<DType>,
    /// Rows and columns of a matrix that share a scale.
    block: [usize; 2],
    /// Rows and columns of scales that a matrix has; none where all have one.
    grid: Option<[usize; 2]>,
}

impl<'a> Quantized<'a> {
    /// The tensor as `codes` has it, and its scales; none if it does not hold codes.
    pub fn find(
        finder: &Finder<'a, '_>,
        codes: Codes,
        from: TensorRef<'a>,
    ) -> Result<Option<Quantized<'a>>, WeightsError> {
        let Some((kind, shape)) = numbers(codes, &from)? else {
            return Ok(None);
        };
        let names = codes.scales(from.name);
        let found = names.iter().find(|name| finder.checkpoint.has(name));
        let found = found.map_or(Ok(None), |name| finder.checkpoint.find(name))?;
        let Some(scales) = found else {
            return Err(no_scales(finder, &from, &names));
        };
        let scales = Scales::new(codes, kind, &shape, scales)?;
        Ok(Some(Quantized {
            codes: from,
            kind,
            shape,
            scales,
        }))
    }

    /// Whether both files still have all of it.
    pub fn check_length(&self) -> Result<(), WeightsError> {
        self.codes.check_length()?;
        self.scales.from.check_length()
    }

    /// The bytes of these numbers, at least.
    pub fn bytes(&self, span: &Range<usize>) -> Range<usize> {
        match self.kind {
            Kind::E4m3 => span.clone(),
            Kind::E2m1 => span.start / 2..span.end.div_ceil(2),
        }
    }

    /// Gives the numbers of a view, in its order, some at a time, with how many came before.
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

    /// Numbers from `first` on that share a scale, and how many.
    fn run(&self, first: usize, values: &mut [f32]) -> usize {
        let columns = self.shape.last().copied().unwrap_or(1);
        let (row, column) = (first / columns, first % columns);
        let width = self.scales.block[1];
        let left = (width - column % width).min(columns - column);
        let count = left.min(values.len());
        let scale = self
            .scales
            .at(self.shape[self.shape.len() - 2], row, column);
        let codes = &self.codes.bytes[self.bytes(&(first..first + count))];
        let values = values[..count].iter_mut();
        match self.kind {
            Kind::E4m3 => values.zip(codes).for_each(|(value, code)| {
                *value = E4M3[usize::from(*code)] * scale;
            }),
            Kind::E2m1 => values.zip(first % 2..).for_each(|(value, at)| {
                *value = E2M1[usize::from(codes[at / 2] >> (at % 2 * 4) & 15)] * scale;
            }),
        }
        count
    }
}

impl<'a> Scales<'a> {
    /// The scales of matrices of numbers of this shape.
    fn new(
        codes: Codes,
        kind: Kind,
        shape: &[usize],
        from: TensorRef<'a>,
    ) -> Result<Scales<'a>, WeightsError> {
        let float = match from.dtype {
            Ok(dtype) if dtype.is_float() => Some(dtype),
            Err(Dtype::U8 | Dtype::F8_E8M0) => None,
            _ => {
                return Err(wrong_dtype(
                    &from,
                    "f32, f16, bf16 or f8_e8m0, being scales",
                ));
            }
        };
        let (outer, inner) = shape.split_at(shape.len() - 2);
        let (rows, columns) = (inner[0], inner[1]);
        let made = |block: [usize; 2], grid| Scales {
            from,
            float,
            block: block.map(|size| size.max(1)),
            grid,
        };
        let count: usize = from.shape.iter().product();
        let block = match (codes, kind) {
            (Codes::Mxfp4, _) | (_, Kind::E2m1) => Some([1, GROUP]),
            _ if count == 1 => return Ok(made([rows, columns], None)),
            (Codes::Fp8 { block }, _) => block,
        };
        let wide = |last: [usize; 2]| [outer, &last].concat();
        let Some([down, across]) = block else {
            // Rows are [rows] or [rows, 1]; [1, rows] would be scales of columns, which are
            // as many in a square matrix.
            let bare = |shape: &[usize]| -> Vec<usize> {
                let ones = shape.iter().rev().take_while(|size| **size == 1).count();
                shape[..shape.len() - ones].to_vec()
            };
            let is = |last| bare(from.shape) == bare(&wide(last));
            return match [[rows, 1], [1, 1]].into_iter().find(|grid| is(*grid)) {
                Some(grid) => Ok(made([rows / grid[0].max(1), columns], Some(grid))),
                None => Err(wrong_shape(&from, &[wide([rows, 1]), wide([1, 1])])),
            };
        };
        let grid = [rows.div_ceil(down), columns.div_ceil(across)];
        if from.shape != wide(grid) {
            return Err(wrong_shape(&from, &[wide(grid)]));
        }
        Ok(made([down, across], Some(grid)))
    }

    /// The scale of a number in this row of all matrices, which have `rows` each.
    fn at(&self, rows: usize, row: usize, column: usize) -> f32 {
        let index = self.grid.map_or(0, |[down, across]| {
            let line = row / rows * down + row % rows / self.block[0];
            line * across + column / self.block[1]
        });
        match self.float {
            None => e8m0(self.from.bytes[index]),
            Some(dtype) => {
                let at = index * dtype.size();
                read_float(dtype, &self.from.bytes[at..at + dtype.size()]) as f32
            }
        }
    }
}

/// Which codes a tensor holds, and the shape of its numbers; none if it holds floats.
fn numbers(codes: Codes, from: &TensorRef<'_>) -> Result<Option<(Kind, Vec<usize>)>, WeightsError> {
    let (kind, shape) = match (codes, from.dtype, from.shape) {
        (_, Ok(_), _) => return Ok(None),
        (Codes::Fp8 { .. }, Err(Dtype::F8_E4M3), shape) => (Kind::E4m3, shape.to_vec()),
        (Codes::Fp8 { .. }, Err(Dtype::I8), [outer @ .., bytes]) => {
            (Kind::E2m1, [outer, &[bytes.saturating_mul(2)]].concat())
        }
        (Codes::Mxfp4, Err(Dtype::U8), [outer @ .., groups, 16]) => (
            Kind::E2m1,
            [outer, &[groups.saturating_mul(GROUP)]].concat(),
        ),
        (Codes::Mxfp4, Err(Dtype::U8), _) => {
            let expected = "[…, groups, 16], being codes of 4 bits in groups of 32";
            return Err(misshapen(from, expected.to_string()));
        }
        (Codes::Fp8 { .. }, ..) => {
            return Err(wrong_dtype(from, "f8_e4m3, f32, f16 or bf16"));
        }
        (Codes::Mxfp4, ..) => return Err(wrong_dtype(from, "u8, being codes of 4 bits")),
    };
    if shape.len() < 2 {
        let expected = "at least two dimensions: only matrices are quantized";
        return Err(misshapen(from, expected.to_string()));
    }
    Ok(Some((kind, shape)))
}

fn wrong_dtype(from: &TensorRef<'_>, expected: &str) -> WeightsError {
    let found = match from.dtype {
        Ok(dtype) => dtype.to_string(),
        Err(other) => format!("{other:?}").to_lowercase(),
    };
    WeightsError::WrongDType {
        tensor: from.name.to_string(),
        file: from.file.to_path_buf(),
        found,
        expected: expected.to_string(),
    }
}

fn wrong_shape(from: &TensorRef<'_>, expected: &[Vec<usize>]) -> WeightsError {
    let shapes: Vec<String> = expected.iter().map(|shape| format!("{shape:?}")).collect();
    misshapen(from, format!("{}, being scales", shapes.join(" or ")))
}

fn misshapen(from: &TensorRef<'_>, expected: String) -> WeightsError {
    WeightsError::WrongShape {
        tensor: from.name.to_string(),
        file: from.file.to_path_buf(),
        found: from.shape.to_vec(),
        expected,
    }
}

fn no_scales(finder: &Finder<'_, '_>, from: &TensorRef<'_>, names: &[String]) -> WeightsError {
    let names: Vec<String> = names.iter().map(|name| format!("`{name}`")).collect();
    WeightsError::MissingTensor {
        tensor: finder.tensor.name.clone(),
        path: finder.checkpoint.path().to_path_buf(),
        tried: format!(
            "; `{}` is there, its scales are not: looked for {}",
            from.name,
            names.join(", ")
        ),
        near: String::new(),
    }
}
