//! A tensor in host memory.

use crate::{Bytes, Element};
use half::{bf16, f16};
use moesaic_kernel::DType;
use std::borrow::Cow;
use std::ops::Range;

/// A row-major tensor in host memory, little endian.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor<'a> {
    /// Element type.
    pub dtype: DType,
    /// Sizes, outermost first.
    pub shape: Vec<usize>,
    /// The bytes of the elements. Their number is checked against the shape when the tensor is
    /// used, not before.
    pub data: Bytes<'a>,
}

impl<'a> Tensor<'a> {
    /// Borrows `data`.
    pub fn new<E: Element>(shape: &[usize], data: &'a [E]) -> Tensor<'a> {
        Tensor {
            dtype: E::DTYPE,
            shape: shape.to_vec(),
            data: Bytes::from(bytemuck::cast_slice(data)),
        }
    }

    /// Returns a tensor that owns its bytes.
    pub fn owned<E: Element>(shape: &[usize], data: Vec<E>) -> Tensor<'static> {
        Tensor::copied(shape, &data)
    }

    /// Returns a tensor that owns a copy of `data`.
    pub fn copied<E: Element>(shape: &[usize], data: &[E]) -> Tensor<'static> {
        Tensor {
            dtype: E::DTYPE,
            shape: shape.to_vec(),
            data: Bytes::copied(bytemuck::cast_slice(data)),
        }
    }

    /// Returns a tensor of zeros.
    pub fn zeros(dtype: DType, shape: &[usize]) -> Tensor<'static> {
        let elements: usize = shape.iter().product();
        Tensor {
            dtype,
            shape: shape.to_vec(),
            data: Bytes::zeros(elements * dtype.size()),
        }
    }

    /// Returns `values` in a float type, rounded to nearest, ties to even. Values that stay f32 are
    /// borrowed.
    pub fn rounded(dtype: DType, shape: &[usize], values: &'a [f32]) -> Tensor<'a> {
        let each = values.iter();
        match dtype {
            DType::F16 => Tensor::owned(shape, each.map(|v| f16::from_f32(*v)).collect()),
            DType::Bf16 => Tensor::owned(shape, each.map(|v| bf16::from_f32(*v)).collect()),
            _ => Tensor::new(shape, values),
        }
    }

    /// Borrows the same tensor, without a copy.
    pub fn lend(&self) -> Tensor<'_> {
        Tensor {
            dtype: self.dtype,
            shape: self.shape.clone(),
            data: self.data.lend(),
        }
    }

    /// Returns a tensor that borrows nothing; see [`Bytes::into_static`].
    pub fn into_static(self) -> Tensor<'static> {
        Tensor {
            dtype: self.dtype,
            shape: self.shape,
            data: self.data.into_static(),
        }
    }

    /// Returns the number of elements in its shape.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Borrows rows of the first dimension without a copy; in a weight of experts, some experts. A
    /// tensor without dimensions is one row.
    ///
    /// # Errors
    /// [`TensorError`], if the tensor has fewer rows, or bytes that do not fit its shape.
    pub fn rows(&self, rows: Range<usize>) -> Result<Tensor<'_>, TensorError> {
        self.check_length()?;
        let count = self.shape.first().copied().unwrap_or(1);
        if rows.start > rows.end || rows.end > count {
            return Err(TensorError::Rows { count, asked: rows });
        }
        let row = self.shape.iter().skip(1).product::<usize>() * self.dtype.size();
        let mut shape = self.shape.clone();
        if let Some(first) = shape.first_mut() {
            *first = rows.len();
        }
        let data = self.data.part(rows.start * row..rows.end * row);
        Ok(Tensor {
            dtype: self.dtype,
            shape,
            data: data.unwrap_or_default(),
        })
    }

    /// Returns the elements if they are of type `E`: borrowed, or copied if they are misaligned.
    pub fn values<E: Element>(&self) -> Option<Cow<'_, [E]>> {
        if self.dtype != E::DTYPE {
            return None;
        }
        Some(match bytemuck::try_cast_slice(&self.data) {
            Ok(values) => Cow::Borrowed(values),
            Err(_) => Cow::Owned(self.map(|value: E| value)),
        })
    }

    /// Returns the elements for writing if they are of type `E`. Elements that are not owned are
    /// copied first.
    pub fn values_mut<E: Element>(&mut self) -> Option<&mut [E]> {
        if self.dtype != E::DTYPE {
            return None;
        }
        bytemuck::try_cast_slice_mut(self.data.to_mut()).ok()
    }

    /// Copies the elements if they are of type `E`.
    pub fn to_vec<E: Element>(&self) -> Option<Vec<E>> {
        self.values().map(Cow::into_owned)
    }

    /// Converts the elements to `f32`: exact for f32, f16 and bf16; rounded for wide integers.
    pub fn to_f32(&self) -> Vec<f32> {
        match self.dtype {
            DType::F32 => self.map(|v: f32| v),
            DType::F16 => self.map(|v: f16| v.to_f32()),
            DType::Bf16 => self.map(|v: bf16| v.to_f32()),
            DType::I32 => self.map(|v: i32| v as f32),
            DType::I64 => self.map(|v: i64| v as f32),
        }
    }

    /// Converts the elements to `f64`: exact for floats, and for integers below 2⁵³.
    pub fn to_f64(&self) -> Vec<f64> {
        match self.dtype {
            DType::F32 => self.map(|v: f32| f64::from(v)),
            DType::F16 => self.map(|v: f16| v.to_f64()),
            DType::Bf16 => self.map(|v: bf16| v.to_f64()),
            DType::I32 => self.map(|v: i32| f64::from(v)),
            DType::I64 => self.map(|v: i64| v as f64),
        }
    }

    fn map<E: Element, R>(&self, convert: impl Fn(E) -> R) -> Vec<R> {
        self.data
            .chunks_exact(size_of::<E>())
            .map(|bytes| convert(bytemuck::pod_read_unaligned(bytes)))
            .collect()
    }

    /// Checks dtype, shape and length.
    ///
    /// # Errors
    /// [`TensorError`] has the actual and the expected values.
    pub fn check(&self, dtype: DType, shape: &[usize]) -> Result<(), TensorError> {
        let found = TensorKind {
            dtype: self.dtype,
            shape: &self.shape,
        };
        check_kind(found, TensorKind { dtype, shape })?;
        self.check_length()
    }

    fn check_length(&self) -> Result<(), TensorError> {
        let (found, needed) = (self.data.len(), self.elements() * self.dtype.size());
        if found == needed {
            Ok(())
        } else {
            Err(TensorError::Length { found, needed })
        }
    }
}

/// A tensor that is not as it is wanted. The text belongs after the tensor's name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TensorError {
    /// It has another element type.
    #[error("is {found}, expected {wanted}")]
    DType {
        /// The tensor's element type.
        found: DType,
        /// The expected one.
        wanted: DType,
    },
    /// It has another shape.
    #[error("has shape {found:?}, expected {wanted:?}")]
    Shape {
        /// The tensor's shape.
        found: Vec<usize>,
        /// The expected one.
        wanted: Vec<usize>,
    },
    /// Its bytes are more or fewer than its shape needs.
    #[error("has {found} bytes, its shape needs {needed}")]
    Length {
        /// The bytes that are there.
        found: usize,
        /// The bytes of its shape.
        needed: usize,
    },
    /// It lacks some of the rows that were asked for.
    #[error("has {count} rows, not those of {asked:?}")]
    Rows {
        /// The rows that it has.
        count: usize,
        /// The rows that were asked for.
        asked: Range<usize>,
    },
}

/// The element type and shape of a tensor.
#[derive(Clone, Copy, Debug)]
pub struct TensorKind<'a> {
    /// The element type.
    pub dtype: DType,
    /// The sizes, outermost first.
    pub shape: &'a [usize],
}

/// Checks an element type and a shape against the wanted ones.
///
/// # Errors
/// [`TensorError`], whose text belongs after the tensor's name.
pub fn check_kind(found: TensorKind<'_>, wanted: TensorKind<'_>) -> Result<(), TensorError> {
    if found.dtype != wanted.dtype {
        return Err(TensorError::DType {
            found: found.dtype,
            wanted: wanted.dtype,
        });
    }
    if found.shape != wanted.shape {
        return Err(TensorError::Shape {
            found: found.shape.to_vec(),
            wanted: wanted.shape.to_vec(),
        });
    }
    Ok(())
}
