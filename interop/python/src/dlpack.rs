//! Arrays that come and go by DLPack, <https://dmlc.github.io/dlpack>.

use crate::errors::Failure;
use moesaic::{Bytes, DType, Tensor, Tensors};
use pyo3::exceptions::{PyBufferError, PyTypeError};
use pyo3::ffi::c_str;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyCapsuleMethods, PyDict};
use std::any::Any;
use std::collections::BTreeMap;
use std::ffi::{CStr, c_void};
use std::ptr;

/// The name of a capsule that nobody has taken yet.
const FRESH: &CStr = c_str!("dltensor");

/// As [`FRESH`], of DLPack 1, whose capsules may hold memory that nobody may write.
const VERSIONED: &CStr = c_str!("dltensor_versioned");

/// `kDLCPU`.
const CPU: i32 = 1;

#[repr(C)]
#[derive(Clone, Copy)]
struct Device {
    kind: i32,
    id: i32,
}

/// `DLDataType`: the codes are 0 for signed integers, 2 for floats, 4 for bfloat.
#[repr(C)]
#[derive(Clone, Copy, PartialEq)]
struct DataType {
    code: u8,
    bits: u8,
    lanes: u16,
}

#[repr(C)]
struct View {
    data: *mut c_void,
    device: Device,
    ndim: i32,
    dtype: DataType,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

/// `DLManagedTensor`.
#[repr(C)]
struct Managed {
    view: View,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Managed)>,
}

/// `DLManagedTensorVersioned` of version 1.
#[repr(C)]
struct Versioned {
    _major: u32,
    _minor: u32,
    _context: *mut c_void,
    _deleter: Option<unsafe extern "C" fn(*mut Versioned)>,
    _flags: u64,
    view: View,
}

/// The owner of an exported tensor: `view.shape` and `view.strides` point into it.
struct Owner {
    shape: Vec<i64>,
    strides: Vec<i64>,
    _kept: Box<dyn Any + Send>,
}

impl DataType {
    fn of(dtype: DType) -> DataType {
        let (code, bits) = match dtype {
            DType::F32 => (2, 32),
            DType::F16 => (2, 16),
            DType::Bf16 => (4, 16),
            DType::I32 => (0, 32),
            DType::I64 => (0, 64),
        };
        let lanes = 1;
        DataType { code, bits, lanes }
    }

    fn dtype(self) -> Option<DType> {
        let all = [DType::F32, DType::F16, DType::Bf16, DType::I32, DType::I64];
        all.into_iter().find(|dtype| DataType::of(*dtype) == self)
    }
}

/// Memory with a type and a shape that somebody else owns.
pub struct Exported {
    /// The first byte.
    pub data: *mut c_void,
    /// The element type.
    pub dtype: DType,
    /// The sizes, outermost first; row major.
    pub shape: Vec<usize>,
}

/// Makes a capsule of memory that lives as long as `kept`. Whoever takes the capsule may write
/// there, and drops `kept` from any thread.
///
/// # Safety
/// `kept` must keep the memory alive, and nobody else may write to it.
pub unsafe fn export(
    py: Python<'_>,
    exported: Exported,
    kept: Box<dyn Any + Send>,
) -> PyResult<Bound<'_, PyCapsule>> {
    let shape: Vec<i64> = exported.shape.iter().map(|&size| size as i64).collect();
    let mut strides = vec![1; shape.len()];
    for at in (1..shape.len()).rev() {
        strides[at - 1] = strides[at] * shape[at].max(1);
    }
    let mut owner = Box::new(Owner {
        shape,
        strides,
        _kept: kept,
    });
    let view = View {
        data: exported.data,
        device: Device { kind: CPU, id: 0 },
        ndim: owner.shape.len() as i32,
        dtype: DataType::of(exported.dtype),
        shape: owner.shape.as_mut_ptr(),
        strides: owner.strides.as_mut_ptr(),
        byte_offset: 0,
    };
    let managed = Box::into_raw(Box::new(Managed {
        view,
        context: Box::into_raw(owner).cast(),
        deleter: Some(delete),
    }));
    // SAFETY: the pointer is not null, the name lives for good, and the destructor frees what
    // nobody has taken. On failure the tensor is freed here.
    unsafe {
        let capsule = pyo3::ffi::PyCapsule_New(managed.cast(), FRESH.as_ptr(), Some(drop_capsule));
        if capsule.is_null() {
            delete(managed);
        }
        Ok(Bound::from_owned_ptr_or_err(py, capsule)?.cast_into_unchecked())
    }
}

unsafe extern "C" fn delete(managed: *mut Managed) {
    // SAFETY: the consumer calls it once, with what `export` made of two boxes.
    unsafe {
        let managed = Box::from_raw(managed);
        drop(Box::from_raw(managed.context.cast::<Owner>()));
    }
}

unsafe extern "C" fn drop_capsule(capsule: *mut pyo3::ffi::PyObject) {
    // SAFETY: Python calls it with a live capsule. A consumer renames the capsule, and then calls
    // the deleter itself.
    unsafe {
        if pyo3::ffi::PyCapsule_IsValid(capsule, FRESH.as_ptr()) == 1 {
            let managed = pyo3::ffi::PyCapsule_GetPointer(capsule, FRESH.as_ptr());
            delete(managed.cast());
        }
    }
}

/// A tensor that moesaic made. `numpy.from_dlpack` and `torch.from_dlpack` take it without a copy.
#[pyclass(frozen, module = "moesaic")]
pub struct Array {
    tensor: Tensor<'static>,
}

impl Array {
    /// Makes an array of a tensor. Bytes of a mapped file are copied, because a consumer may write
    /// to them.
    pub fn new(tensor: Tensor<'static>) -> Array {
        let Tensor { dtype, shape, data } = tensor;
        let data = match data.is_mapped() {
            true => Bytes::copied(&data),
            false => data,
        };
        let tensor = Tensor { dtype, shape, data };
        Array { tensor }
    }
}

#[pymethods]
impl Array {
    /// The sizes, outermost first.
    #[getter]
    fn shape(&self) -> Vec<usize> {
        self.tensor.shape.clone()
    }

    /// The element type: `f32`, `f16`, `bf16`, `i32` or `i64`.
    #[getter]
    fn dtype(&self) -> String {
        self.tensor.dtype.to_string()
    }

    #[pyo3(signature = (**_options))]
    fn __dlpack__<'py>(
        slf: &Bound<'py, Self>,
        _options: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<Bound<'py, PyCapsule>> {
        let mut tensor = slf.get().tensor.clone();
        let data = tensor.data.to_mut().as_mut_ptr().cast();
        let exported = Exported {
            data,
            dtype: tensor.dtype,
            shape: tensor.shape.clone(),
        };
        // SAFETY: the bytes are owned by the clone, whose words do not move with it.
        unsafe { export(slf.py(), exported, Box::new(tensor)) }
    }

    /// Returns a NumPy array in the same memory, read-only, or with `dtype` or `copy` a copy.
    #[pyo3(signature = (dtype=None, copy=None))]
    fn __array__<'py>(
        slf: &Bound<'py, Self>,
        dtype: Option<Bound<'py, PyAny>>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let array = slf
            .py()
            .import("numpy")?
            .call_method1("from_dlpack", (slf,))?;
        match (dtype, copy) {
            (Some(dtype), _) => array.call_method1("astype", (dtype,)),
            (None, Some(true)) => array.call_method0("copy"),
            (None, _) => Ok(array),
        }
    }

    fn __dlpack_device__(&self) -> (i32, i32) {
        (CPU, 0)
    }

    fn __repr__(&self) -> String {
        format!("Array({}, {:?})", self.tensor.dtype, self.tensor.shape)
    }
}

/// A tensor of another library in its own memory, alive while the capsule is.
pub struct Imported {
    /// The address of the first element.
    pub address: usize,
    /// The element type.
    pub dtype: DType,
    /// The sizes, outermost first; row major.
    pub shape: Vec<usize>,
    _capsule: Py<PyAny>,
}

impl Imported {
    /// Takes an object with `__dlpack__`, such as a NumPy array, without a copy.
    ///
    /// # Errors
    /// It is none, is not on the CPU, has another element type, or is not contiguous.
    pub fn new(name: &str, object: &Bound<'_, PyAny>) -> PyResult<Imported> {
        let capsule = capsule_of(object).map_err(|error| {
            Failure::tensor(name, format!("has no DLPack capsule to give: {error}"))
        })?;
        let owned = capsule.clone().unbind();
        let capsule = capsule.cast_into::<PyCapsule>()?;
        // SAFETY: the view is alive while the capsule is.
        let read = unsafe { read(view_of(&capsule)?) };
        let (address, dtype, shape) = read.map_err(|problem| Failure::tensor(name, problem))?;
        Ok(Imported {
            address,
            dtype,
            shape,
            _capsule: owned,
        })
    }

    /// Returns a tensor in the same memory.
    pub fn tensor(&self) -> Tensor<'_> {
        let bytes = self.shape.iter().product::<usize>() * self.dtype.size();
        let data: &[u8] = match bytes {
            0 => &[],
            // SAFETY: the producer vouches for memory of this type and shape, alive while the
            // capsule is, which `self` holds.
            _ => unsafe {
                std::slice::from_raw_parts(ptr::with_exposed_provenance(self.address), bytes)
            },
        };
        Tensor {
            dtype: self.dtype,
            shape: self.shape.clone(),
            data: Bytes::from(data),
        }
    }
}

/// Asks for a capsule of DLPack 1, for which an array may be read-only, and a library that knows
/// no versions for one without.
fn capsule_of<'py>(object: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    // torch exports the memory of such a view, which holds the negatives of its numbers.
    let negative = object.call_method0("is_neg");
    if negative.is_ok_and(|bit| bit.is_truthy().unwrap_or(false)) {
        let problem = "it is a view with torch's negative bit, give its resolve_neg()";
        return Err(PyBufferError::new_err(problem));
    }
    let options = PyDict::new(object.py());
    options.set_item("max_version", (1, 0))?;
    match object.call_method("__dlpack__", (), Some(&options)) {
        Err(error) if error.is_instance_of::<PyTypeError>(object.py()) => {
            object.call_method0("__dlpack__")
        }
        given => given,
    }
}

/// Returns the view in a capsule of either form.
fn view_of<'c>(capsule: &'c Bound<'_, PyCapsule>) -> PyResult<&'c View> {
    if !capsule.is_valid_checked(Some(VERSIONED)) {
        let managed = capsule.pointer_checked(Some(FRESH))?.cast::<Managed>();
        // SAFETY: a capsule of this name holds a `DLManagedTensor`, alive while the capsule is.
        return Ok(unsafe { &managed.as_ref().view });
    }
    let managed = capsule.pointer_checked(Some(VERSIONED))?;
    // SAFETY: a capsule of this name begins with the version of what it holds.
    let major = unsafe { managed.cast::<u32>().read() };
    if major != 1 {
        let problem = format!("a DLPack capsule of version {major}, expected 1");
        return Err(Failure::Invalid(problem).into());
    }
    // SAFETY: one of version 1 holds this structure, alive while the capsule is.
    Ok(unsafe { &managed.cast::<Versioned>().as_ref().view })
}

/// Takes named objects as [`Imported::new`] does.
///
/// # Errors
/// As [`Imported::new`].
pub fn imported(objects: &BTreeMap<String, Bound<'_, PyAny>>) -> PyResult<Vec<(String, Imported)>> {
    let each = objects.iter();
    each.map(|(name, object)| Ok((name.clone(), Imported::new(name, object)?)))
        .collect()
}

/// Returns named tensors in the memory of their libraries.
pub fn lent(tensors: &[(String, Imported)]) -> Tensors<'_> {
    let each = tensors.iter();
    each.map(|(name, tensor)| (name.clone(), tensor.tensor()))
        .collect()
}

/// Reads a view.
///
/// # Safety
/// Its shape and strides must point to `ndim` numbers, unless they are null.
unsafe fn read(view: &View) -> Result<(usize, DType, Vec<usize>), String> {
    if view.device.kind != CPU {
        return Err(format!(
            "is on a device of DLPack's kind {}, expected the CPU",
            view.device.kind
        ));
    }
    let DataType { code, bits, lanes } = view.dtype;
    let dtype = view.dtype.dtype().ok_or_else(|| {
        format!(
            "has elements of DLPack's code {code} with {bits} bits and {lanes} lanes, expected \
             f32, f16, bf16, i32 or i64"
        )
    })?;
    let sizes = |at: *const i64| match at.is_null() {
        true => Vec::new(),
        // SAFETY: the caller vouches for it.
        false => unsafe { std::slice::from_raw_parts(at, view.ndim.max(0) as usize) }.to_vec(),
    };
    let (shape, strides) = (sizes(view.shape), sizes(view.strides));
    if !is_contiguous(&shape, &strides) {
        return Err(format!(
            "has strides {strides:?} at shape {shape:?}, expected a contiguous one: copy it first"
        ));
    }
    let shape = shape.iter().map(|&size| size.max(0) as usize).collect();
    Ok((view.data as usize + view.byte_offset as usize, dtype, shape))
}

/// Returns whether elements lie row by row without gaps; no strides mean that they do.
fn is_contiguous(shape: &[i64], strides: &[i64]) -> bool {
    let mut expected = 1;
    let pairs = shape.iter().zip(strides).rev();
    let mut dense = true;
    for (&size, &stride) in pairs {
        dense &= size <= 1 || stride == expected;
        expected *= size.max(1);
    }
    dense || shape.contains(&0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strides_of_dense_rows_are_contiguous() {
        assert!(is_contiguous(&[2, 3], &[3, 1]));
        assert!(is_contiguous(&[2, 3], &[]));
        assert!(is_contiguous(&[1, 3], &[99, 1]));
        assert!(is_contiguous(&[0, 3], &[7, 7]));
        assert!(!is_contiguous(&[2, 3], &[1, 2]));
        assert!(!is_contiguous(&[2, 3], &[4, 1]));
    }

    #[test]
    fn every_type_has_a_code_of_its_own() {
        for dtype in [DType::F32, DType::F16, DType::Bf16, DType::I32, DType::I64] {
            assert_eq!(DataType::of(dtype).dtype(), Some(dtype));
        }
        let double = DataType {
            code: 2,
            bits: 64,
            lanes: 1,
        };
        assert_eq!(double.dtype(), None);
    }
}
