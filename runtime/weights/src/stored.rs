//! The tensors of a quantized matrix, checked against its format.

use crate::WeightsError;
use crate::checkpoint::TensorRef;
use crate::finder::Finder;
use moesaic_kernel::DType;
use moesaic_spec::format::{
    CodeOrder, CodeType, Format, Matrices, ScaleBlock, ScaleType, Scales, Zero, Zeros,
};
use moesaic_spec::hf::{NameEnd, StoredFormat, replaced};
use moesaic_tensor::read_int;
use safetensors::Dtype;

/// The size in bytes of the innermost dimension of gpt-oss' blocks of FP4 codes.
const BLOCK_BYTES: usize = 16;

/// Matrices whose byte lengths match their format.
pub(crate) struct Held<'a> {
    /// The shape in numbers.
    pub shape: Vec<usize>,
    pub matrices: Matrices<'a>,
    /// All tensors besides the codes.
    pub beside: Vec<TensorRef<'a>>,
}

/// Returns true if the tensor has the type of such codes.
pub(crate) fn is_of(way: &StoredFormat, from: &TensorRef<'_>) -> bool {
    matches!(
        (way.format.element, from.dtype),
        (CodeType::E4m3, Err(Dtype::F8_E4M3))
            | (CodeType::E5m2, Err(Dtype::F8_E5M2))
            | (CodeType::E2m3 | CodeType::E2m1, Err(Dtype::U8))
            | (CodeType::Int8, Err(Dtype::I8))
            | (CodeType::Uint(_), Ok(DType::I32))
    ) || way.format.element == CodeType::E2m1
        // DeepSeek-V4 stores pairs of FP4 codes in bytes typed I8. gpt-oss' blocks are U8 only.
        && from.dtype == Err(Dtype::I8)
        && !way.names.in_blocks()
}

/// Returns the error for a tensor of another type.
pub(crate) fn unlike(way: &StoredFormat, from: &TensorRef<'_>) -> WeightsError {
    let floats = ", f32, f16 or bf16";
    let expected = match way.format.element {
        CodeType::E4m3 => format!("f8_e4m3{floats}"),
        CodeType::E5m2 => format!("f8_e5m2{floats}"),
        CodeType::E2m3 | CodeType::E2m1 => {
            format!("u8, being codes of {} bits", way.format.element.bits())
        }
        CodeType::Int8 => format!("i8{floats}"),
        CodeType::Uint(bits) => format!("i32, being packed codes of {bits} bits"),
    };
    wrong_dtype(from, &expected)
}

/// Returns the matrix `name`, whose codes are `from`.
pub(crate) fn held<'a>(
    finder: &Finder<'a, '_>,
    way: &StoredFormat,
    name: &str,
    from: TensorRef<'a>,
) -> Result<Held<'a>, WeightsError> {
    let mut parts = Parts {
        finder,
        way,
        name,
        from,
        beside: Vec::new(),
    };
    parts.refuse()?;
    let shape = parts.shape()?;
    let size = [shape[shape.len() - 2], shape[shape.len() - 1]];
    let scales = parts.scales(&shape)?;
    let matrices = shape[..shape.len() - 2].iter().product();
    let zeros = parts.zeros(&scales, matrices)?;
    let groups = parts.groups(&scales, size[1])?;
    Ok(Held {
        shape,
        matrices: Matrices {
            format: way.format,
            size,
            codes: from.bytes,
            scales,
            zeros,
            groups,
        },
        beside: parts.beside,
    })
}

/// The tensors of one matrix.
struct Parts<'a, 'f, 's> {
    finder: &'f Finder<'a, 's>,
    way: &'f StoredFormat,
    /// The name of the matrix in a float checkpoint.
    name: &'f str,
    from: TensorRef<'a>,
    beside: Vec<TensorRef<'a>>,
}

impl<'a> Parts<'a, '_, '_> {
    /// Returns the tensor with another name ending, and records it as part of the matrix.
    fn part(&mut self, end: Option<NameEnd>) -> Option<TensorRef<'a>> {
        let name = replaced(self.name, end?)?;
        let found = self.finder.checkpoint.tensor(&name)?;
        self.beside.push(found);
        Some(found)
    }

    /// Refuses a matrix that is not the product of codes and scales alone.
    fn refuse(&self) -> Result<(), WeightsError> {
        let names = self.way.names.refused.iter();
        let mut names = names.filter_map(|end| replaced(self.name, *end));
        match names.find_map(|name| self.finder.checkpoint.tensor(&name)) {
            None => Ok(()),
            Some(found) => {
                let of = self.from.name;
                let problem = format!("it multiplies the activations of `{of}`, which is not read");
                Err(contradiction(&found, problem))
            }
        }
    }

    /// Returns the shape in numbers, with two dimensions or more.
    fn shape(&mut self) -> Result<Vec<usize>, WeightsError> {
        let Format {
            element, packing, ..
        } = self.way.format;
        let (held, bits) = (self.from.shape, element.bits());
        let in_blocks = self.way.names.in_blocks();
        let shape = match (packing, held) {
            (CodeOrder::Rows { word: 8 }, [outer @ .., groups, BLOCK_BYTES]) if in_blocks => {
                [outer, &[groups.saturating_mul(BLOCK_BYTES * 2)]].concat()
            }
            _ if in_blocks => {
                let expected = "[…, groups, 16], being codes of 4 bits in groups of 32";
                return Err(misshapen(&self.from, expected.to_string()));
            }
            (CodeOrder::Rows { word: 8 }, [outer @ .., bytes]) => {
                [outer, &[bytes.saturating_mul(8) / bits]].concat()
            }
            (CodeOrder::Rows { .. }, [outer @ .., rows, words]) => {
                let columns = self.columns(*rows, *words)?;
                [outer, &[*rows, columns]].concat()
            }
            (CodeOrder::RowPairs, [outer @ .., pairs, columns]) => {
                [outer, &[pairs.saturating_mul(2), *columns]].concat()
            }
            (CodeOrder::Columns, [words, rows]) => vec![*rows, words.saturating_mul(32) / bits],
            (CodeOrder::Interleaved, [columns, words]) => vec![words.saturating_mul(8), *columns],
            _ => {
                let expected = "two dimensions: packed codes are of one matrix";
                return Err(misshapen(&self.from, expected.to_string()));
            }
        };
        if shape.len() < 2 {
            let expected = "at least two dimensions: only matrices are quantized";
            return Err(misshapen(&self.from, expected.to_string()));
        }
        Ok(shape)
    }

    /// Returns the columns of rows of `words` words, the last of which may be partly filled.
    fn columns(&mut self, rows: usize, words: usize) -> Result<usize, WeightsError> {
        let bits = self.way.format.element.bits();
        // Saturate: the sizes come from a file and are not trustworthy yet.
        let full = words.saturating_mul(32) / bits;
        let Some(said) = self.part(self.way.names.shape) else {
            return Ok(full);
        };
        let dtype = said.dtype.ok().filter(|dtype| !dtype.is_float());
        let Some(dtype) = dtype else {
            return Err(wrong_dtype(&said, "i32 or i64, being rows and columns"));
        };
        said.check_length()?;
        let outer = self.from.shape.len().saturating_sub(2);
        let sizes = said.bytes.chunks_exact(dtype.size());
        // One more at most, since that already makes the shape wrong.
        let sizes = sizes.take(outer + 3).map(|b| read_int(dtype, b));
        let sizes: Vec<i64> = sizes.collect();
        let is = |size: &i64, of: usize| usize::try_from(*size) == Ok(of);
        let columns = match sizes.as_slice() {
            [stacked @ .., r, columns] if stacked.is_empty() || stacked.len() == outer => {
                let same = stacked
                    .iter()
                    .zip(self.from.shape)
                    .all(|(n, of)| is(n, *of));
                let columns = usize::try_from(*columns).ok();
                columns.filter(|_| same && is(r, rows))
            }
            _ => None,
        };
        // A row may end inside its last word, so many column counts fit; the stated one must be
        // among them.
        let fits = |columns: &usize| columns.saturating_mul(bits).div_ceil(32) == words;
        columns.filter(fits).ok_or_else(|| {
            let held = self.from.shape;
            let problem = format!("it says {sizes:?}, but `{}` is {held:?}", self.from.name);
            contradiction(&said, problem)
        })
    }

    fn scales(&mut self, shape: &[usize]) -> Result<Scales<'a>, WeightsError> {
        let names = self.way.names.scales(self.name);
        let found = self.way.names.scales.iter();
        let found: Vec<NameEnd> = found.copied().collect();
        let found = found.into_iter().find_map(|end| self.part(Some(end)));
        let Some(from) = found else {
            return Err(self.missing("its scales are", &names));
        };
        let format = self.way.format;
        let kind = scale_type(format.scale, &from)?;
        let (outer, inner) = shape.split_at(shape.len() - 2);
        let (rows, columns) = (inner[0], inner[1]);
        let matrices = outer.iter().product();
        let second = self.second(matrices)?;
        let made = |block: [usize; 2], grid| Scales {
            kind,
            bytes: from.bytes,
            // Empty matrices have blocks of zero, by which nothing may be divided.
            block: block.map(|size| size.max(1)),
            grid,
            second,
        };
        // A single scale of 8-bit codes covers the whole tensor, in whatever shape it is stored.
        let one = from.shape.iter().product::<usize>() == 1;
        if one && format.element.bits() == 8 && format.packing == (CodeOrder::Rows { word: 8 }) {
            return Ok(made([rows, columns], None));
        }
        // GPTQ and AWQ store matrices transposed, scales included.
        let turned = matches!(format.packing, CodeOrder::Columns | CodeOrder::Interleaved);
        let wide = |[down, across]: [usize; 2]| {
            if turned {
                vec![across, down]
            } else {
                [outer, &[down, across]].concat()
            }
        };
        let block = match format.block {
            ScaleBlock::Tile(block) => block,
            ScaleBlock::Row => [1, columns.max(1)],
            // Stacked matrices that are stored transposed have their rows as columns.
            ScaleBlock::MatrixOrRow
                if !outer.is_empty() && columns > 1 && from.shape == wide([1, columns]) =>
            {
                return Ok(made([rows, 1], Some([1, columns])));
            }
            ScaleBlock::MatrixOrRow => {
                // Dimensions of size one carry no information: rows are [rows] or [rows, 1].
                let is = |grid| bare(from.shape) == bare(&wide(grid));
                return match [[rows, 1], [1, 1]].into_iter().find(|grid| is(*grid)) {
                    Some(grid) => Ok(made([rows / grid[0].max(1), columns], Some(grid))),
                    None => Err(wrong_shape(
                        &from,
                        &[wide([rows, 1]), wide([1, 1])],
                        "scales",
                    )),
                };
            }
        };
        let grid = [rows.div_ceil(block[0]), columns.div_ceil(block[1])];
        let expected = wide(grid);
        // ModelOpt writes blocks as [rows, 1, columns, 1].
        let spread = expected.len() == 2 && *from.shape == [grid[0], 1, grid[1], 1];
        if from.shape != expected && !spread {
            return Err(wrong_shape(&from, &[expected], "scales"));
        }
        Ok(made(block, Some(grid)))
    }

    /// Returns the second scale of each matrix, or one for all.
    fn second(&mut self, matrices: usize) -> Result<Vec<f32>, WeightsError> {
        if self.way.format.second.is_none() {
            return Ok(Vec::new());
        }
        let end = self.way.names.second;
        let Some(from) = self.part(end) else {
            return Err(self.missing("its scales are", &self.named(end)));
        };
        let kind = match from.dtype {
            Ok(DType::F32) => ScaleType::F32,
            Ok(DType::F16) => ScaleType::F16,
            Ok(DType::Bf16) => ScaleType::Bf16,
            _ => return Err(wrong_dtype(&from, "f32, f16 or bf16, being a scale")),
        };
        let count: usize = from.shape.iter().product();
        if count != 1 && count != matrices {
            let expected = [vec![1], vec![matrices]];
            return Err(wrong_shape(&from, &expected, "scales"));
        }
        from.check_length()?;
        Ok((0..count).map(|at| kind.read(from.bytes, at)).collect())
    }

    fn zeros(
        &mut self,
        scales: &Scales<'_>,
        matrices: usize,
    ) -> Result<Option<Zeros<'a>>, WeightsError> {
        let Format {
            element,
            packing,
            zero,
            ..
        } = self.way.format;
        let end = self.way.names.zeros;
        // Float formats have no zero points, whatever tensors lie beside them.
        let from = if element.is_int() {
            self.part(end)
        } else {
            None
        };
        let Some(from) = from else {
            return match zero {
                Zero::None | Zero::Middle => Ok(None),
                Zero::Stored | Zero::LessOne => {
                    Err(self.missing("its zero points are", &self.named(end)))
                }
            };
        };
        let [down, across] = scales.grid.unwrap_or([1, 1]);
        let words = down.saturating_mul(element.bits()).div_ceil(32);
        let (expected, fits) = match (element, packing) {
            (CodeType::Int8, _) => (vec![down, across], from.dtype == Err(Dtype::I8)),
            (_, CodeOrder::Rows { .. }) => (vec![words, across], from.dtype == Ok(DType::I32)),
            _ => (vec![across, words], from.dtype == Ok(DType::I32)),
        };
        if !fits {
            return Err(wrong_dtype(
                &from,
                "the type of the codes, being zero points",
            ));
        }
        if bare(from.shape) != bare(&expected) || matrices != 1 {
            return Err(wrong_shape(&from, &[expected], "zero points of one matrix"));
        }
        Ok(Some(Zeros { bytes: from.bytes }))
    }

    /// Returns the group of each column, if groups are not consecutive columns.
    fn groups(
        &mut self,
        scales: &Scales<'_>,
        columns: usize,
    ) -> Result<Option<&'a [u8]>, WeightsError> {
        let (ints, names) = (self.way.format.element.is_int(), self.way.names);
        let from = ints.then(|| self.part(names.groups)).flatten();
        let across = scales.grid.map_or(1, |[_, across]| across);
        let Some(from) = from.filter(|_| scales.grid.is_some()) else {
            if names.reordered && across > 1 {
                return Err(self.missing("the group of each column is", &self.named(names.groups)));
            }
            return Ok(None);
        };
        if from.dtype != Ok(DType::I32) {
            return Err(wrong_dtype(&from, "i32, being the group of each column"));
        }
        if from.shape != [columns] {
            return Err(wrong_shape(
                &from,
                &[vec![columns]],
                "the group of each column",
            ));
        }
        from.check_length()?;
        // Check every group once here, so that the decoder can index without checks.
        let mut in_order = true;
        for (column, bytes) in from.bytes.chunks_exact(4).enumerate() {
            let value = read_int(DType::I32, bytes);
            match usize::try_from(value).ok().filter(|group| *group < across) {
                Some(group) => in_order &= group == column / scales.block[1],
                None => {
                    return Err(WeightsError::BadValue {
                        tensor: from.name.to_string(),
                        file: from.file.to_path_buf(),
                        value,
                        expected: format!("a group from 0 to {}", across.saturating_sub(1)),
                    });
                }
            }
        }
        // Without a permutation the faster path with consecutive groups gives the same numbers.
        Ok((!in_order).then_some(from.bytes))
    }

    fn named(&self, end: Option<NameEnd>) -> Vec<String> {
        end.and_then(|end| replaced(self.name, end))
            .into_iter()
            .collect()
    }

    /// Returns the error for a missing part.
    fn missing(&self, what: &str, names: &[String]) -> WeightsError {
        let names: Vec<String> = names.iter().map(|name| format!("`{name}`")).collect();
        let (from, names) = (self.from.name, names.join(", "));
        WeightsError::MissingTensor {
            tensor: self.finder.tensor.name.clone(),
            path: self.finder.checkpoint.path().to_path_buf(),
            tried: format!("; `{from}` is there, {what} not: looked for {names}"),
            near: String::new(),
        }
    }
}

/// Returns the type of the scales, which may differ from the format's usual one.
fn scale_type(usual: ScaleType, from: &TensorRef<'_>) -> Result<ScaleType, WeightsError> {
    match (usual, from.dtype) {
        (ScaleType::E4m3, Err(Dtype::F8_E4M3)) => Ok(ScaleType::E4m3),
        (ScaleType::E4m3, _) => Err(wrong_dtype(from, "f8_e4m3, being scales")),
        (_, Ok(DType::F32)) => Ok(ScaleType::F32),
        (_, Ok(DType::F16)) => Ok(ScaleType::F16),
        (_, Ok(DType::Bf16)) => Ok(ScaleType::Bf16),
        (_, Err(Dtype::U8 | Dtype::F8_E8M0)) => Ok(ScaleType::E8m0),
        _ => {
            let expected = "f32, f16, bf16 or f8_e8m0, being scales";
            Err(wrong_dtype(from, expected))
        }
    }
}

/// Returns a shape without its ones.
fn bare(shape: &[usize]) -> Vec<usize> {
    shape.iter().copied().filter(|size| *size != 1).collect()
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

fn wrong_shape(from: &TensorRef<'_>, expected: &[Vec<usize>], what: &str) -> WeightsError {
    let shapes: Vec<String> = expected.iter().map(|shape| format!("{shape:?}")).collect();
    misshapen(from, format!("{}, being {what}", shapes.join(" or ")))
}

fn misshapen(from: &TensorRef<'_>, expected: String) -> WeightsError {
    WeightsError::WrongShape {
        tensor: from.name.to_string(),
        file: from.file.to_path_buf(),
        found: from.shape.to_vec(),
        expected,
    }
}

fn contradiction(from: &TensorRef<'_>, problem: String) -> WeightsError {
    WeightsError::Contradiction {
        tensor: from.name.to_string(),
        file: from.file.to_path_buf(),
        problem,
    }
}
