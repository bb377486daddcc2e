//! Tensors in host memory.

use crate::error::EngineError;
use moesaic_kernel::DType;
use std::borrow::Cow;
use std::collections::BTreeMap;

/// A row-major tensor in host memory, little endian.
#[derive(Clone, Debug, PartialEq)]
pub struct HostTensor<'a> {
    /// Element type.
    pub dtype: DType,
    /// Sizes, outermost first.
    pub shape: Vec<usize>,
    /// The elements' bytes.
    pub data: Cow<'a, [u8]>,
}

/// A Rust type that has a [`DType`].
pub trait Element: bytemuck::Pod {
    /// The element type in kernels and files.
    const DTYPE: DType;
}

impl Element for f32 {
    const DTYPE: DType = DType::F32;
}
impl Element for half::f16 {
    const DTYPE: DType = DType::F16;
}
impl Element for half::bf16 {
    const DTYPE: DType = DType::Bf16;
}
impl Element for i32 {
    const DTYPE: DType = DType::I32;
}
impl Element for i64 {
    const DTYPE: DType = DType::I64;
}

impl<'a> HostTensor<'a> {
    /// A view of `data`, whose length is the caller's claim until the tensor
    /// is used: then it is checked against `shape`.
    pub fn new<E: Element>(shape: &[usize], data: &'a [E]) -> HostTensor<'a> {
        let data = Cow::Borrowed(bytemuck::cast_slice(data));
        HostTensor {
            dtype: E::DTYPE,
            shape: shape.to_vec(),
            data,
        }
    }

    /// A tensor that owns its bytes.
    pub fn owned<E: Element>(shape: &[usize], data: Vec<E>) -> HostTensor<'static> {
        let data = Cow::Owned(bytemuck::cast_slice(&data).to_vec());
        HostTensor {
            dtype: E::DTYPE,
            shape: shape.to_vec(),
            data,
        }
    }

    /// The number of elements its shape has.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// The elements, when they are of type `E`.
    pub fn to_vec<E: Element>(&self) -> Option<Vec<E>> {
        (self.dtype == E::DTYPE).then(|| self.map(|value: E| value))
    }

    /// The elements as `f32`: exact for f32, f16 and bf16; rounded for wide
    /// integers.
    pub fn to_f32(&self) -> Vec<f32> {
        match self.dtype {
            DType::F32 => self.map(|v: f32| v),
            DType::F16 => self.map(|v: half::f16| v.to_f32()),
            DType::Bf16 => self.map(|v: half::bf16| v.to_f32()),
            DType::I32 => self.map(|v: i32| v as f32),
            DType::I64 => self.map(|v: i64| v as f32),
        }
    }

    fn map<E: Element, R>(&self, convert: impl Fn(E) -> R) -> Vec<R> {
        self.data
            .chunks_exact(size_of::<E>())
            .map(|bytes| convert(bytemuck::pod_read_unaligned(bytes)))
            .collect()
    }

    /// Checks dtype, shape and length; `Err` holds a sentence for people.
    pub(crate) fn check(&self, dtype: DType, shape: &[usize]) -> Result<(), String> {
        if self.dtype != dtype {
            return Err(format!("is {}, expected {dtype}", self.dtype));
        }
        if self.shape != shape {
            return Err(format!("has shape {:?}, expected {shape:?}", self.shape));
        }
        let bytes = self.elements() * dtype.size();
        if self.data.len() != bytes {
            return Err(format!(
                "has {} bytes, its shape needs {bytes}",
                self.data.len()
            ));
        }
        Ok(())
    }
}

/// The weights of a layer, by canonical name.
#[derive(Clone, Debug, Default)]
pub struct Weights<'a>(BTreeMap<String, HostTensor<'a>>);

impl<'a> Weights<'a> {
    /// No weights yet.
    pub fn new() -> Weights<'a> {
        Weights::default()
    }

    /// These weights and one more.
    pub fn with<E: Element>(mut self, name: &str, shape: &[usize], data: &'a [E]) -> Weights<'a> {
        self.insert(name, HostTensor::new(shape, data));
        self
    }

    /// Adds or replaces a tensor.
    pub fn insert(&mut self, name: &str, tensor: HostTensor<'a>) {
        self.0.insert(name.to_string(), tensor);
    }

    /// The tensor of this name.
    pub fn get(&self, name: &str) -> Option<&HostTensor<'a>> {
        self.0.get(name)
    }

    /// Every tensor, by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &HostTensor<'a>)> {
        self.0.iter().map(|(name, tensor)| (name.as_str(), tensor))
    }

    /// The tensor of this name, checked.
    pub(crate) fn expect(
        &self,
        name: &str,
        dtype: DType,
        shape: &[usize],
    ) -> Result<&HostTensor<'a>, EngineError> {
        let problem = |problem| EngineError::Weight {
            name: name.to_string(),
            problem,
        };
        let tensor = self
            .get(name)
            .ok_or_else(|| problem(format!("is missing, expected {dtype} of shape {shape:?}")))?;
        tensor.check(dtype, shape).map_err(problem)?;
        Ok(tensor)
    }
}

/// The bytes of values in a float type: to nearest, ties to even.
pub(crate) fn bytes_of(values: &[f32], dtype: DType) -> Vec<u8> {
    match dtype {
        DType::F16 => {
            let each = values.iter().map(|v| half::f16::from_f32(*v));
            bytemuck::cast_slice(&each.collect::<Vec<_>>()).to_vec()
        }
        DType::Bf16 => {
            let each = values.iter().map(|v| half::bf16::from_f32(*v));
            bytemuck::cast_slice(&each.collect::<Vec<_>>()).to_vec()
        }
        _ => bytemuck::cast_slice(values).to_vec(),
    }
}
