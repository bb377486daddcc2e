//! Recipes carried out.

use crate::checkpoint::{Checkpoint, TensorRef};
use crate::host::{read_float, read_int, write_float};
use crate::view::Layout;
use crate::{HostTensor, HostWeights, WeightsError};
use moesaic_kernel::DType;
use moesaic_spec::hf::{Alternative, Import, Parts, Step, TensorSource, canonical_sources};
use moesaic_spec::{LayerSpec, RouterKind, TensorSpec, canonical_tensors};

/// How strict loading is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LoadOptions {
    /// Round values to the spec's element type where it cannot hold those of
    /// the file; otherwise that is an error.
    pub narrow: bool,
}

/// All tensors of a file with canonical names, in canonical shape and the
/// spec's element types.
///
/// With `experts.layout` `concat` or `interleaved` the file's `gate_up`
/// tensors are taken apart; a set of experts without one has both by name.
///
/// # Errors
///
/// [`WeightsError`] names the tensor, what it is and what was expected.
pub fn load_canonical(
    spec: &LayerSpec,
    checkpoint: &Checkpoint,
    options: LoadOptions,
) -> Result<HostWeights, WeightsError> {
    load_sources(spec, &canonical_sources(spec), checkpoint, options)
}

/// All tensors of one layer of a Hugging Face checkpoint.
///
/// # Errors
///
/// As [`load_canonical`].
pub fn load_import(
    import: &Import,
    checkpoint: &Checkpoint,
    options: LoadOptions,
) -> Result<HostWeights, WeightsError> {
    load_sources(&import.spec, &import.sources, checkpoint, options)
}

/// All tensors of `spec`, each put together by its recipe in `sources`.
///
/// Use this instead of [`load_import`] when the spec's precision was changed
/// after the import.
///
/// # Errors
///
/// As [`load_canonical`].
pub fn load_sources(
    spec: &LayerSpec,
    sources: &[TensorSource],
    checkpoint: &Checkpoint,
    options: LoadOptions,
) -> Result<HostWeights, WeightsError> {
    load_tensors(spec, &canonical_tensors(spec), sources, checkpoint, options)
}

/// These tensors of a layer.
pub(crate) fn load_tensors(
    spec: &LayerSpec,
    tensors: &[TensorSpec],
    sources: &[TensorSource],
    checkpoint: &Checkpoint,
    options: LoadOptions,
) -> Result<HostWeights, WeightsError> {
    let mut weights = HostWeights::new();
    for tensor in tensors {
        let source = sources.iter().find(|source| source.name == tensor.name);
        let alternatives = source.map_or(&[][..], |source| &source.alternatives);
        let loader = Loader {
            spec,
            checkpoint,
            options,
            tensor,
        };
        let loaded = loader.load(alternatives)?;
        weights.insert(tensor.name.clone(), loaded);
    }
    Ok(weights)
}

/// What is needed to load one tensor.
struct Loader<'a> {
    spec: &'a LayerSpec,
    checkpoint: &'a Checkpoint,
    options: LoadOptions,
    tensor: &'a TensorSpec,
}

/// A tensor of the file as a recipe wants it.
struct Part<'a> {
    from: TensorRef<'a>,
    found: DType,
    layout: Layout,
}

impl Loader<'_> {
    /// The first alternative that is there and whose shape fits.
    fn load(&self, alternatives: &[Alternative]) -> Result<HostTensor, WeightsError> {
        let mut misfit = None;
        for alternative in alternatives.iter().filter(|a| self.present(a)) {
            match self.carry_out(alternative) {
                Err(error @ WeightsError::WrongShape { .. }) => misfit = misfit.or(Some(error)),
                done => return done,
            }
        }
        Err(misfit.unwrap_or_else(|| self.missing(alternatives)))
    }

    /// Whether the checkpoint has the alternative's first tensor. One that
    /// lacks a later one is damaged, which reading it will say.
    fn present(&self, alternative: &Alternative) -> bool {
        let names = alternative.names();
        names
            .first()
            .is_none_or(|name| self.checkpoint.tensor(name).is_some())
    }

    fn carry_out(&self, alternative: &Alternative) -> Result<HostTensor, WeightsError> {
        let (dtype, shape) = (self.tensor.dtype, &self.tensor.shape);
        let steps = &alternative.steps;
        let parts = match &alternative.parts {
            Parts::One(name) => vec![self.part(name, steps, shape)?],
            Parts::PerExpert { .. } | Parts::Repeated { .. } => {
                let names = alternative.parts.names();
                let parts = names.iter().map(|name| self.part(name, steps, &shape[1..]));
                parts.collect::<Result<_, _>>()?
            }
        };
        // Only now: a spec can promise more than a file has and memory holds.
        let mut bytes = vec![0u8; shape.iter().product::<usize>() * dtype.size()];
        let size = bytes.len() / parts.len().max(1);
        for (part, out) in parts.iter().zip(bytes.chunks_mut(size.max(1))) {
            self.fill(part, steps, out)?;
        }
        Ok(HostTensor {
            dtype,
            shape: shape.clone(),
            bytes,
        })
    }

    /// One tensor of the file, after the steps; it has the shape.
    fn part(&self, name: &str, steps: &[Step], shape: &[usize]) -> Result<Part<'_>, WeightsError> {
        let from = self.find(name)?;
        let found = self.convertible(&from)?;
        let wrong = |expected: String| WeightsError::WrongShape {
            tensor: name.to_string(),
            file: from.file.to_path_buf(),
            found: from.shape.to_vec(),
            expected,
        };
        let mut layout = Layout::dense(from.shape);
        for step in steps {
            layout = layout.apply(step).map_err(&wrong)?;
        }
        if layout.shape != shape {
            let after = if steps.is_empty() {
                ""
            } else {
                " after rearranging"
            };
            return Err(wrong(format!("{shape:?}{after}")));
        }
        Ok(Part {
            from,
            found,
            layout,
        })
    }

    /// Writes a part to its place.
    fn fill(&self, part: &Part<'_>, steps: &[Step], out: &mut [u8]) -> Result<(), WeightsError> {
        let Part {
            from,
            found,
            layout,
        } = part;
        let columns = self.columns(steps, &layout.shape)?;
        if *found == self.tensor.dtype && columns.is_none() {
            copy(layout, from.bytes, found.size(), out);
            return self.check_table(from, out);
        }
        self.convert(from, *found, layout, columns.as_deref(), out)
    }

    fn find(&self, name: &str) -> Result<TensorRef<'_>, WeightsError> {
        self.checkpoint
            .tensor(name)
            .ok_or_else(|| WeightsError::MissingTensor {
                tensor: self.tensor.name.clone(),
                path: self.checkpoint.path().to_path_buf(),
                tried: format!("; looked for `{name}`"),
                near: String::new(),
            })
    }

    /// The element type of the file, if it can become the spec's.
    fn convertible(&self, from: &TensorRef<'_>) -> Result<DType, WeightsError> {
        let wanted = self.tensor.dtype;
        let file = from.file.to_path_buf();
        let tensor = from.name.to_string();
        let expected = if wanted.is_float() {
            "f32, f16 or bf16"
        } else {
            "i32 or i64"
        };
        let found = match from.dtype {
            Ok(found) if found.is_float() == wanted.is_float() => found,
            Ok(other) => {
                let found = other.to_string();
                return Err(WeightsError::WrongDType {
                    tensor,
                    file,
                    found,
                    expected: expected.into(),
                });
            }
            Err(other) => {
                let found = format!("{other:?}").to_lowercase();
                return Err(WeightsError::WrongDType {
                    tensor,
                    file,
                    found,
                    expected: expected.into(),
                });
            }
        };
        let exact = found == wanted || wanted == DType::F32 || !wanted.is_float();
        if exact || self.options.narrow {
            return Ok(found);
        }
        let (found, wanted) = (found.to_string(), wanted.to_string());
        Err(WeightsError::Narrowing {
            tensor,
            file,
            found,
            wanted,
        })
    }

    /// The product of all factors on each column, when there are any.
    fn columns(&self, steps: &[Step], shape: &[usize]) -> Result<Option<Vec<f64>>, WeightsError> {
        let width = shape.last().copied().unwrap_or(1);
        let mut columns: Option<Vec<f64>> = None;
        for step in steps {
            let factors = match step {
                Step::Factor(factor) => vec![*factor; width],
                Step::MulColumns(name) => self.vector(name, width)?,
                Step::DivColumns(name) => {
                    self.nonzero(name, width)?.iter().map(|v| 1.0 / v).collect()
                }
                Step::Reshape(_) | Step::Transpose | Step::Take { .. } => continue,
            };
            let product = columns.get_or_insert_with(|| vec![1.0; width]);
            product.iter_mut().zip(factors).for_each(|(p, f)| *p *= f);
        }
        Ok(columns)
    }

    /// A vector that scales columns.
    fn vector(&self, name: &str, width: usize) -> Result<Vec<f64>, WeightsError> {
        let from = self.find(name)?;
        let found = self.convertible(&from)?;
        if from.shape != [width] {
            return Err(WeightsError::WrongShape {
                tensor: name.to_string(),
                file: from.file.to_path_buf(),
                found: from.shape.to_vec(),
                expected: format!("{:?}", [width]),
            });
        }
        Ok(from
            .bytes
            .chunks_exact(found.size())
            .map(|b| read_float(found, b))
            .collect())
    }

    /// A vector that divides columns.
    fn nonzero(&self, name: &str, width: usize) -> Result<Vec<f64>, WeightsError> {
        let vector = self.vector(name, width)?;
        if vector.iter().all(|v| *v != 0.0) {
            return Ok(vector);
        }
        let file = self.find(name)?.file.to_path_buf();
        let expected = "no zeros: columns are divided by it".to_string();
        Err(WeightsError::BadValue {
            tensor: name.to_string(),
            file,
            value: 0,
            expected,
        })
    }

    /// Elements converted one by one.
    fn convert(
        &self,
        from: &TensorRef<'_>,
        found: DType,
        layout: &Layout,
        columns: Option<&[f64]>,
        out: &mut [u8],
    ) -> Result<(), WeightsError> {
        let (size, wanted) = (found.size(), self.tensor.dtype);
        let ([_, width], _) = layout.inner();
        let dense = dense_bytes(layout, from.bytes, size);
        let pairs = dense
            .chunks_exact(size)
            .zip(out.chunks_exact_mut(wanted.size()));
        for (i, (b, out)) in pairs.enumerate() {
            if wanted.is_float() {
                let factor = columns.map_or(1.0, |c| c[i % width.max(1)]);
                write_float(wanted, read_float(found, b) * factor, out);
            } else {
                let value = self.int(from, read_int(found, b))?;
                out.copy_from_slice(&value.to_le_bytes());
            }
        }
        self.check_table(from, out)
    }

    /// An integer that fits into 32 bits.
    fn int(&self, from: &TensorRef<'_>, value: i64) -> Result<i32, WeightsError> {
        i32::try_from(value).map_err(|_| self.bad_value(from, value))
    }

    /// Whether the entries of an expert table name experts.
    fn check_table(&self, from: &TensorRef<'_>, out: &[u8]) -> Result<(), WeightsError> {
        if self.spec.router.kind != RouterKind::Table || self.tensor.dtype != DType::I32 {
            return Ok(());
        }
        let values = out.chunks_exact(4).map(|b| read_int(DType::I32, b));
        let legal = 0..self.spec.routed_experts() as i64;
        match values.into_iter().find(|value| !legal.contains(value)) {
            Some(value) => Err(self.bad_value(from, value)),
            None => Ok(()),
        }
    }

    fn bad_value(&self, from: &TensorRef<'_>, value: i64) -> WeightsError {
        WeightsError::BadValue {
            tensor: from.name.to_string(),
            file: from.file.to_path_buf(),
            value,
            expected: format!("0 to {}", self.spec.routed_experts() as i64 - 1),
        }
    }

    /// The error that lists what was looked for and what is near it.
    fn missing(&self, alternatives: &[Alternative]) -> WeightsError {
        let mut tried: Vec<String> = alternatives
            .iter()
            .filter_map(|a| a.names().into_iter().next())
            .collect();
        tried.dedup();
        WeightsError::MissingTensor {
            tensor: self.tensor.name.clone(),
            path: self.checkpoint.path().to_path_buf(),
            near: self.near(&tried),
            tried: match tried.iter().all(|name| *name == self.tensor.name) {
                true => String::new(),
                false => format!("; looked for {}", listed(&tried)),
            },
        }
    }

    /// Names of the checkpoint that end like those looked for.
    fn near(&self, tried: &[String]) -> String {
        if let Some(fused) = self.fused(tried) {
            return format!(
                "; it has `{fused}`: say layout = \"concat\" or \"interleaved\" under [experts]"
            );
        }
        let end = |name: &str| {
            let parts: Vec<&str> = name.rsplit('.').take(2).collect();
            parts.join(".")
        };
        let ends: Vec<String> = tried.iter().map(|name| end(name)).collect();
        let similar: Vec<String> = self
            .checkpoint
            .names()
            .filter(|name| ends.contains(&end(name)))
            .map(str::to_string)
            .collect();
        if similar.is_empty() {
            String::new()
        } else {
            format!("; it has {}", listed(&similar))
        }
    }

    /// The fused tensor of the checkpoint that holds the one looked for, where
    /// the spec says that gate and up are apart.
    fn fused(&self, tried: &[String]) -> Option<String> {
        let [name] = tried else { return None };
        [".gate.", ".up."]
            .iter()
            .filter(|part| name.contains(*part))
            .map(|part| name.replacen(part, ".gate_up.", 1))
            .find(|fused| self.checkpoint.tensor(fused).is_some())
    }
}

/// The first few, and how many more.
fn listed(names: &[String]) -> String {
    let shown: Vec<String> = names.iter().take(4).map(|n| format!("`{n}`")).collect();
    let more = names.len().saturating_sub(4);
    let tail = if more > 0 {
        format!(" and {more} more")
    } else {
        String::new()
    };
    format!("{}{tail}", shown.join(", "))
}

/// The elements of a view in row-major order.
fn dense_bytes(layout: &Layout, from: &[u8], size: usize) -> Vec<u8> {
    let mut dense = vec![0u8; layout.shape.iter().product::<usize>() * size];
    copy(layout, from, size, &mut dense);
    dense
}

/// Copies a view of elements of `size` bytes into row-major order.
fn copy(layout: &Layout, from: &[u8], size: usize, out: &mut [u8]) {
    let ([rows, columns], strides) = layout.inner();
    let matrix = rows * columns * size;
    if matrix == 0 {
        return;
    }
    for (start, out) in layout
        .matrices()
        .into_iter()
        .zip(out.chunks_exact_mut(matrix))
    {
        if strides[1] == 1 {
            for (row, out) in out.chunks_exact_mut(columns * size).enumerate() {
                let at = (start + row * strides[0]) * size;
                out.copy_from_slice(&from[at..at + columns * size]);
            }
        } else {
            let from = &from[start * size..];
            match size {
                2 => copy_strided::<2>(from, strides, columns, out),
                4 => copy_strided::<4>(from, strides, columns, out),
                _ => copy_strided::<8>(from, strides, columns, out),
            }
        }
    }
}

/// Copies a matrix whose columns are apart, in tiles that stay in cache; `SIZE`
/// is that of an element, known so that a copy is one load and one store.
fn copy_strided<const SIZE: usize>(
    from: &[u8],
    strides: [usize; 2],
    columns: usize,
    out: &mut [u8],
) {
    const TILE: usize = 32;
    let rows = out.len() / (columns * SIZE);
    for row in (0..rows).step_by(TILE) {
        for column in (0..columns).step_by(TILE) {
            for r in row..rows.min(row + TILE) {
                for c in column..columns.min(column + TILE) {
                    let at = (r * strides[0] + c * strides[1]) * SIZE;
                    let to = (r * columns + c) * SIZE;
                    out[to..to + SIZE].copy_from_slice(&from[at..at + SIZE]);
                }
            }
        }
    }
}
