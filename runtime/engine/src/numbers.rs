//! Dequantization of experts' codes, for targets that have no kernels for codes.

use moesaic_kernel::{DType, Target};
use moesaic_spec::format::StoredMatrix;
use moesaic_spec::{FormatTensor, LayerSpec, TensorSpec, WeightFormat, canonical_tensors};
use moesaic_tensor::{Bytes, SourceError, Tensor, WeightSource, write_f32s};
use std::ops::Range;

/// The weights of `source`, dequantized where the target has no kernels for codes. Each expert is
/// decoded when it is read.
pub(crate) struct Numbers<'a> {
    source: &'a dyn WeightSource,
    /// The matrices that are decoded.
    matrices: Vec<Matrix>,
}

/// A matrix of every expert.
struct Matrix {
    /// The tensor of numbers.
    tensor: TensorSpec,
    /// The format of the codes.
    format: WeightFormat,
}

impl Matrix {
    /// Returns the name of another tensor of the same codes.
    fn part(&self, end: &str) -> String {
        let name = self.tensor.name.trim_end_matches("weight");
        format!("{name}{end}")
    }

    fn size(&self) -> [usize; 2] {
        let shape = &self.tensor.shape;
        [shape[1], shape[2]]
    }
}

impl<'a> Numbers<'a> {
    /// Returns the weights that a target takes of a layer: CPUs have kernels for codes.
    pub fn new(spec: &LayerSpec, target: Target, source: &'a dyn WeightSource) -> Numbers<'a> {
        let tensors = match target.hardware() {
            Target::Cpu(_) => Vec::new(),
            _ => canonical_tensors(&spec.dequantized()),
        };
        let matrix = |tensor: TensorSpec| {
            let format = spec.precision.format_of(&tensor.name);
            format.map(|format| Matrix { tensor, format })
        };
        Numbers {
            source,
            matrices: tensors.into_iter().filter_map(matrix).collect(),
        }
    }

    fn matrix(&self, name: &str) -> Option<&Matrix> {
        self.matrices
            .iter()
            .find(|matrix| matrix.tensor.name == name)
    }

    /// Returns a tensor of the codes of some experts, the first of which are the wanted ones.
    fn part(
        &self,
        matrix: &Matrix,
        part: &FormatTensor,
        experts: Range<usize>,
    ) -> Result<Tensor<'_>, SourceError> {
        let name = matrix.part(part.end);
        let read = self.source.rows(&name, experts.clone())?;
        let count = read.shape.first().copied().unwrap_or(0);
        let shape = [count.clamp(1, experts.len()), part.shape[0], part.shape[1]];
        let checked = read.check(part.dtype, &shape);
        checked.map_err(|problem| format!("`{name}` {problem}"))?;
        Ok(read)
    }

    /// Decodes one expert.
    fn decode(
        &self,
        matrix: &Matrix,
        expert: usize,
        dtype: DType,
        out: &mut [u8],
    ) -> Result<(), SourceError> {
        let size = matrix.size();
        let tensors = matrix.format.tensors(size).into_iter();
        let parts = tensors.map(|part| {
            let read = self.part(matrix, &part, expert..expert + 1)?;
            Ok(Part {
                end: part.end,
                read,
            })
        });
        let parts = parts.collect::<Result<Vec<Part<'_>>, SourceError>>()?;
        let bytes = |end: &str| {
            let part = parts.iter().find(|part| part.end == end);
            part.map_or(&[][..], |part| &part.read.data)
        };
        let stored = StoredMatrix {
            format: matrix.format,
            size,
            codes: bytes("weight"),
            scales: bytes("scale"),
            scales_2: bytes("scale_2"),
            offsets: bytes("offset"),
            offsets_2: bytes("offset_2"),
        };
        let mut values = vec![0f32; size[1]];
        let row = (size[1] * dtype.size()).max(1);
        for (at, out) in out.chunks_exact_mut(row).enumerate() {
            stored.row(at, &mut values);
            write_f32s(dtype, &values, out);
        }
        parts.iter().for_each(|part| part.read.data.release());
        Ok(())
    }
}

/// A tensor of one expert's codes.
struct Part<'a> {
    end: &'static str,
    read: Tensor<'a>,
}

impl WeightSource for Numbers<'_> {
    fn describe(&self, name: &str) -> Option<(DType, Vec<usize>)> {
        let found = self.source.describe(name)?;
        let Some(matrix) = self.matrix(name) else {
            return Some(found);
        };
        let part = matrix.format.tensors(matrix.size()).into_iter().next()?;
        let (dtype, mut shape) = found;
        // Codes of another shape, or numbers, are passed on as they are: the layer reports them.
        if dtype != part.dtype || shape.get(1..) != Some(&part.shape[..]) {
            return Some((dtype, shape));
        }
        shape[1..].copy_from_slice(&matrix.tensor.shape[1..]);
        Some((matrix.tensor.dtype, shape))
    }

    fn rows(&self, name: &str, rows: Range<usize>) -> Result<Tensor<'_>, SourceError> {
        let Some(matrix) = self.matrix(name) else {
            return self.source.rows(name, rows);
        };
        let ([height, width], dtype) = (matrix.size(), matrix.tensor.dtype);
        let one = height * width * dtype.size();
        let mut data = Bytes::zeros(rows.len() * one);
        let outs = data.to_mut().chunks_exact_mut(one.max(1));
        for (expert, out) in rows.clone().zip(outs) {
            self.decode(matrix, expert, dtype, out)?;
        }
        Ok(Tensor {
            dtype,
            shape: vec![rows.len(), height, width],
            data,
        })
    }
}
