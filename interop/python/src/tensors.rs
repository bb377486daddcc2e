//! Tensors of a call, at addresses of the caller, checked against the layer's list.

use crate::errors::Failure;
use moesaic::Ptr;
use moesaic::{Bytes, DType, Layer, LayerTensor, LayerTensorRole};
use moesaic::{Target, Tensor, TensorError, TensorKind, check_kind};
use pyo3::prelude::*;

/// A tensor of a call: a contiguous row-major one on the layer's device.
#[derive(FromPyObject)]
pub struct Given(pub String, pub u64, pub String, pub Vec<u64>);

impl Given {
    /// Returns the name.
    pub fn name(&self) -> &str {
        &self.0
    }

    fn dtype(&self) -> Result<DType, Failure> {
        let types = [DType::F32, DType::F16, DType::Bf16, DType::I32, DType::I64];
        let found = types.into_iter().find(|known| known.name() == self.2);
        found.ok_or_else(|| Failure::tensor(&self.0, "is of no type that layers have"))
    }

    fn shape(&self) -> Vec<usize> {
        self.3.iter().map(|size| *size as usize).collect()
    }

    /// Checks element type and sizes.
    fn check(
        &self,
        check: impl FnOnce(TensorKind<'_>) -> Result<(), TensorError>,
    ) -> Result<(), Failure> {
        let (dtype, shape) = (self.dtype()?, &*self.shape());
        let checked = check(TensorKind { dtype, shape });
        checked.map_err(|problem| Failure::tensor(&self.0, problem))
    }

    /// Returns the tensor where it lies.
    ///
    /// # Errors
    /// An element type that no layer has.
    ///
    /// # Safety
    /// The memory is valid and unchanged for `'b`.
    pub unsafe fn tensor<'b>(&self) -> Result<Tensor<'b>, Failure> {
        let Given(_, address, ..) = self;
        let (dtype, shape) = (self.dtype()?, self.shape());
        let bytes = shape.iter().product::<usize>() * dtype.size();
        let data: &[u8] = match bytes {
            0 => &[],
            // SAFETY: the caller vouches for it.
            _ => unsafe {
                std::slice::from_raw_parts(
                    std::ptr::with_exposed_provenance(*address as usize),
                    bytes,
                )
            },
        };
        Ok(Tensor {
            dtype,
            shape,
            data: Bytes::from(data),
        })
    }

    /// Copies a tensor here.
    ///
    /// # Errors
    /// This is no f32 tensor of its shape.
    ///
    /// # Safety
    /// The memory is valid, and nobody else uses it.
    pub unsafe fn write(&self, from: &Tensor<'_>) -> Result<(), Failure> {
        let (dtype, shape) = (from.dtype, &*from.shape);
        self.check(|found| check_kind(found, TensorKind { dtype, shape }))?;
        let Given(_, address, ..) = self;
        let to = std::ptr::with_exposed_provenance_mut::<u8>(*address as usize);
        // SAFETY: the caller vouches for as many bytes.
        unsafe { std::ptr::copy_nonoverlapping(from.data.as_ptr(), to, from.data.len()) };
        Ok(())
    }
}

/// The tensors of a call, checked.
pub struct Checked<'g> {
    pub tensors: Vec<(&'g str, Ptr)>,
}

impl Checked<'_> {
    /// Returns whether a tensor is among them.
    pub fn has(&self, name: &str) -> bool {
        self.tensors.iter().any(|(known, _)| *known == name)
    }
}

/// Checks names, element types, shapes and ids for a call of `tokens` tokens.
///
/// # Errors
/// The name of the tensor, what it is and what it should be.
pub fn check<'g>(layer: &Layer, tokens: usize, given: &'g [Given]) -> Result<Checked<'g>, Failure> {
    let checked = check_given(layer, tokens, given)?;
    // The engine refuses a launch without an address, but with the name of a kernel.
    let weights = layer.tensors().iter();
    let missing = weights
        .filter(|tensor| tensor.role == LayerTensorRole::Weight)
        .find(|tensor| !checked.has(&tensor.name));
    match missing {
        Some(tensor) => Err(Failure::Invalid(format!("no weight `{}`", tensor.name))),
        None => Ok(checked),
    }
}

/// As [`check`], of a layer that has its weights.
///
/// # Errors
/// As [`check`].
pub fn check_given<'g>(
    layer: &Layer,
    tokens: usize,
    given: &'g [Given],
) -> Result<Checked<'g>, Failure> {
    let mut tensors = Vec::with_capacity(given.len());
    for one in given {
        let Given(name, address, ..) = one;
        let Some(tensor) = layer.tensor(name) else {
            return Err(Failure::tensor(name, "is none of the layer's"));
        };
        one.check(|found| tensor.check(found, tokens))?;
        if let Some(ids) = Ids::new(layer, tensors.len(), tensor) {
            // SAFETY: the Python side passes the address of a tensor that it holds for the call,
            // of the type and shape that were just checked.
            unsafe { ids.check(tokens, Ptr(*address))? };
        }
        tensors.push((name.as_str(), Ptr(*address)));
    }
    Ok(Checked { tensors })
}

/// A tensor of a call whose numbers kernels take for indices.
pub struct Ids {
    /// Its place among the tensors of the call.
    pub at: usize,
    tensor: LayerTensor,
}

impl Ids {
    /// Returns what is known of a tensor with ids; `None` of any other, and of one on a GPU, where
    /// looking would be waiting.
    pub fn new(layer: &Layer, at: usize, tensor: &LayerTensor) -> Option<Ids> {
        let on_host = matches!(layer.target(), Target::Cpu(_));
        let has_ids = on_host && tensor.indices().is_some();
        has_ids.then(|| Ids {
            at,
            tensor: tensor.clone(),
        })
    }

    /// Checks the numbers at an address.
    ///
    /// # Errors
    /// The first that is out of range.
    ///
    /// # Safety
    /// A tensor of the layer's type and size for so many tokens must lie at the address.
    pub unsafe fn check(&self, tokens: usize, Ptr(address): Ptr) -> Result<(), Failure> {
        let name = &self.tensor.name;
        let count = self.tensor.bytes(tokens) / size_of::<i32>();
        if count == 0 {
            return Ok(());
        }
        if !address.is_multiple_of(align_of::<i32>() as u64) || address == 0 {
            return Err(Failure::tensor(name, "lies at an address that no i32 has"));
        }
        // SAFETY: the caller vouches for it; the address is aligned and not null.
        let ids = unsafe {
            std::slice::from_raw_parts(
                std::ptr::with_exposed_provenance::<i32>(address as usize),
                count,
            )
        };
        let checked = self.tensor.check_indices(ids);
        checked.map_err(|error| Failure::tensor(name, error))
    }
}
