//! Tensors of the caller: names, addresses, shapes and strides, checked before anything reads them.

use crate::pointers::{slice, text};
use crate::status::Failure;
use moesaic::spec::check_weight_name;
use moesaic::{Bytes, DType, LayerSpec, LayerTensor, TensorKind, check_kind};
use std::ffi::{c_char, c_int, c_void};

/// The type of a tensor's elements.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dtype {
    /// IEEE binary32.
    F32 = 0,
    /// IEEE binary16.
    F16 = 1,
    /// The upper half of a binary32.
    Bf16 = 2,
    /// Signed, 32 bits.
    I32 = 3,
    /// Signed, 64 bits.
    I64 = 4,
}

const DTYPES: [(Dtype, DType); 5] = [
    (Dtype::F32, DType::F32),
    (Dtype::F16, DType::F16),
    (Dtype::Bf16, DType::Bf16),
    (Dtype::I32, DType::I32),
    (Dtype::I64, DType::I64),
];

impl From<DType> for Dtype {
    fn from(dtype: DType) -> Dtype {
        let found = DTYPES.iter().find(|(_, known)| *known == dtype);
        found.expect("every type is listed").0
    }
}

/// A tensor in memory of the caller's. The library copies the structure, never keeps it.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Tensor {
    /// The canonical name, such as "x", "y" or "experts.up.weight".
    pub name: *const c_char,
    /// The first element: on the host for weights and for layers on a CPU, on the device for calls
    /// of layers on a GPU. An input is only read, but for "topk_weights" of a spec with
    /// `renormalize_after_drop`.
    pub data: *mut c_void,
    /// A moesaic_dtype.
    pub dtype: c_int,
    /// The number of sizes.
    pub dims: usize,
    /// The sizes, outermost first.
    pub shape: *const i64,
    /// The distance of neighbours along each dimension, in elements. NULL: packed, row-major. Others
    /// cost a copy, on a GPU they are refused.
    pub strides: *const i64,
}

/// The most sizes of a tensor.
pub const MAX_DIMS: usize = 8;

/// A tensor of the caller's, read.
pub struct Given<'a> {
    pub name: &'a str,
    pub data: *mut u8,
    pub dtype: DType,
    pub shape: Vec<usize>,
    /// `None` for elements that lie packed.
    pub strides: Option<Vec<usize>>,
}

impl<'a> Given<'a> {
    /// Reads the description of a tensor, not its elements.
    ///
    /// # Safety
    /// Texts end in NUL, `shape` and `strides` have `dims` elements.
    pub unsafe fn read(tensor: &'a Tensor) -> Result<Given<'a>, Failure> {
        // SAFETY: the caller vouches for its pointers.
        let name = unsafe { text(tensor.name, "name") }?;
        let known = DTYPES
            .iter()
            .find(|(code, _)| *code as c_int == tensor.dtype);
        let (_, dtype) = known.ok_or_else(|| {
            let problem = format!("has dtype {}, which is no moesaic_dtype", tensor.dtype);
            Failure::tensor(name, problem)
        })?;
        if tensor.dims > MAX_DIMS {
            let problem = format!(
                "has {} dimensions, at most {MAX_DIMS} are taken",
                tensor.dims
            );
            return Err(Failure::tensor(name, problem));
        }
        // SAFETY: as above.
        let shape = unsafe { slice(tensor.shape, tensor.dims, "shape") }?;
        let shape = sizes(name, "size", shape)?;
        let strides = if tensor.strides.is_null() {
            None
        } else {
            // SAFETY: as above.
            let strides = unsafe { slice(tensor.strides, tensor.dims, "strides") }?;
            let strides = sizes(name, "stride", strides)?;
            (!is_packed(&shape, &strides)).then_some(strides)
        };
        let given = Given {
            name,
            data: tensor.data.cast(),
            dtype: *dtype,
            shape,
            strides,
        };
        given.check_extent()?;
        Ok(given)
    }

    /// Reads the descriptions of all tensors of a list, no name twice.
    ///
    /// # Safety
    /// As [`Given::read`], for each.
    pub unsafe fn read_all(tensors: &'a [Tensor]) -> Result<Vec<Given<'a>>, Failure> {
        let mut all: Vec<Given<'a>> = Vec::with_capacity(tensors.len());
        for tensor in tensors {
            // SAFETY: the caller vouches for each.
            let given = unsafe { Given::read(tensor) }?;
            if all.iter().any(|known| known.name == given.name) {
                return Err(Failure::tensor(given.name, "is named twice"));
            }
            all.push(given);
        }
        Ok(all)
    }

    /// Checks that the tensor has an address, and that its bytes can be counted, where they lie and
    /// packed: strides of 0 lay any number of elements in one place.
    fn check_extent(&self) -> Result<(), Failure> {
        let mut sizes = self.shape.iter();
        let elements = sizes.try_fold(1usize, |n, size| n.checked_mul(*size));
        let reach = self.strides.iter().flatten().zip(&self.shape);
        let mut reach = reach.map(|(stride, size)| size.saturating_sub(1).checked_mul(*stride));
        let extent = reach.try_fold(1usize, |n, far| n.checked_add(far?));
        let fits = |elements: Option<usize>| {
            let bytes = elements.and_then(|n| n.checked_mul(self.dtype.size()));
            bytes.is_some_and(|bytes| bytes <= isize::MAX as usize)
        };
        if !fits(elements) || !fits(extent) {
            return Err(Failure::tensor(self.name, "is larger than memory"));
        }
        if self.elements() > 0 && self.data.is_null() {
            return Err(Failure::tensor(self.name, "has data NULL"));
        }
        Ok(())
    }

    /// Returns the number of elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Returns the number of bytes, packed.
    pub fn bytes(&self) -> usize {
        self.elements() * self.dtype.size()
    }

    /// Checks type and sizes against those of a layer's tensor in a call.
    pub fn check(&self, tensor: &LayerTensor, tokens: usize) -> Result<(), Failure> {
        let checked = tensor.check(self.kind(), tokens);
        checked.map_err(|problem| Failure::tensor(self.name, problem))
    }

    /// Checks type and sizes against others.
    pub fn check_kind(&self, dtype: DType, shape: &[usize]) -> Result<(), Failure> {
        let checked = check_kind(self.kind(), TensorKind { dtype, shape });
        checked.map_err(|problem| Failure::tensor(self.name, problem))
    }

    fn kind(&self) -> TensorKind<'_> {
        TensorKind {
            dtype: self.dtype,
            shape: &self.shape,
        }
    }

    /// Returns the elements on the host, borrowed if they lie packed, else as a packed copy.
    ///
    /// # Safety
    /// The memory is on the host, valid, and unchanged for `'b`.
    pub unsafe fn host<'b>(&self) -> Result<moesaic::Tensor<'b>, Failure> {
        let data = match (&self.strides, self.bytes()) {
            (_, 0) => Bytes::default(),
            // SAFETY: the caller vouches for as many bytes.
            (None, bytes) => unsafe { std::slice::from_raw_parts(self.data, bytes) }.into(),
            (Some(_), bytes) => {
                let mut packed = Bytes::try_zeros(bytes).ok_or_else(|| {
                    let problem = format!("has strides, and no memory for {bytes} bytes packed");
                    Failure::tensor(self.name, problem)
                })?;
                // SAFETY: there is room for every element.
                unsafe { self.gather(packed.to_mut().as_mut_ptr()) };
                packed
            }
        };
        Ok(moesaic::Tensor {
            dtype: self.dtype,
            shape: self.shape.clone(),
            data,
        })
    }

    /// Copies the elements to packed memory.
    ///
    /// # Safety
    /// Both are host memory with room for every element, and do not overlap.
    pub unsafe fn gather(&self, to: *mut u8) {
        self.runs(|strided, packed, bytes| {
            // SAFETY: a run lies inside both, as the caller vouches for.
            unsafe { std::ptr::copy_nonoverlapping(self.data.add(strided), to.add(packed), bytes) }
        });
    }

    /// Copies packed memory to the elements.
    ///
    /// # Safety
    /// As [`Given::gather`].
    pub unsafe fn scatter(&self, from: *const u8) {
        self.runs(|strided, packed, bytes| {
            // SAFETY: as in `gather`.
            unsafe {
                std::ptr::copy_nonoverlapping(from.add(packed), self.data.add(strided), bytes);
            }
        });
    }

    /// Calls `copy` for each run of elements that lie together in both orders: the byte offset of
    /// the strided one, that of the packed one, and the bytes.
    fn runs(&self, mut copy: impl FnMut(usize, usize, usize)) {
        let size = self.dtype.size();
        let strides = match &self.strides {
            _ if self.elements() == 0 => return,
            None => return copy(0, 0, self.bytes()),
            Some(strides) => strides,
        };
        let inner = (0..=self.shape.len())
            .find(|&first| is_packed(&self.shape[first..], &strides[first..]))
            .expect("no dimensions are packed");
        let run = self.shape[inner..].iter().product::<usize>() * size;
        let mut index = vec![0usize; inner];
        for number in 0..self.shape[..inner].iter().product() {
            let steps = index.iter().zip(strides);
            let offset: usize = steps.map(|(at, stride)| at * stride).sum();
            copy(offset * size, number * run, run);
            for dim in (0..inner).rev() {
                index[dim] += 1;
                if index[dim] < self.shape[dim] {
                    break;
                }
                index[dim] = 0;
            }
        }
    }

    /// Returns whether two packed tensors have a byte in common.
    pub fn overlaps(&self, other: &Given<'_>) -> bool {
        let (own, others) = (self.data as usize, other.data as usize);
        own < others + other.bytes() && others < own + self.bytes()
    }

    /// Refuses strides by which two elements share memory, for a tensor that is written.
    pub fn check_distinct(&self) -> Result<(), Failure> {
        let Some(strides) = &self.strides else {
            return Ok(());
        };
        let mut dims: Vec<(usize, usize)> =
            strides.iter().copied().zip(self.shape.clone()).collect();
        dims.retain(|(_, size)| *size > 1);
        dims.sort_unstable();
        let mut reach = 0;
        for (stride, size) in dims {
            if stride <= reach {
                let problem = "is written, and its strides put two elements at one place";
                return Err(Failure::tensor(self.name, problem));
            }
            reach += (size - 1) * stride;
        }
        Ok(())
    }
}

/// The most tokens of a call.
const MOST_TOKENS: usize = i32::MAX as usize;

/// Refuses a number of tokens that no call takes.
pub fn check_tokens(tokens: usize) -> Result<(), Failure> {
    if tokens <= MOST_TOKENS {
        return Ok(());
    }
    let problem = format!("is {tokens}, a call takes at most {MOST_TOKENS}");
    Err(Failure::argument("tokens", problem))
}

/// Returns weights of a spec by name, borrowed where they lie packed.
///
/// # Safety
/// The tensors are valid host memory, unchanged for `'a`.
pub unsafe fn read_weights<'a>(
    spec: &LayerSpec,
    tensors: &'a [Tensor],
) -> Result<moesaic::Tensors<'a>, Failure> {
    let mut read = moesaic::Tensors::new();
    // SAFETY: the caller vouches for each.
    for given in unsafe { Given::read_all(tensors) }? {
        let named = check_weight_name(spec, given.name);
        named.map_err(|unknown| Failure::tensor(given.name, unknown))?;
        // SAFETY: as above.
        read.insert(given.name, unsafe { given.host() }?);
    }
    Ok(read)
}

fn sizes(name: &str, what: &str, numbers: &[i64]) -> Result<Vec<usize>, Failure> {
    let size = |number: &i64| {
        usize::try_from(*number)
            .map_err(|_| Failure::tensor(name, format!("has {what} {number}, expected 0 or more")))
    };
    numbers.iter().map(size).collect()
}

/// Returns whether strides are those of a packed row-major tensor. A dimension of one element may
/// have any.
fn is_packed(shape: &[usize], strides: &[usize]) -> bool {
    let mut wanted = 1usize;
    shape.iter().zip(strides).rev().all(|(&size, &stride)| {
        let fits = size == 1 || stride == wanted;
        // Of sizes that no memory holds, too, which are refused later.
        wanted = wanted.saturating_mul(size);
        fits
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn given(values: &mut [f32], shape: &[usize], strides: &[usize]) -> Given<'static> {
        Given {
            name: "x",
            data: values.as_mut_ptr().cast(),
            dtype: DType::F32,
            shape: shape.to_vec(),
            strides: (!is_packed(shape, strides)).then(|| strides.to_vec()),
        }
    }

    #[test]
    fn strided_elements_are_packed_and_put_back() {
        let mut values: Vec<f32> = (0..24u8).map(f32::from).collect();
        for (shape, strides, wanted) in [
            (vec![2, 3], vec![8, 1], vec![0.0, 1.0, 2.0, 8.0, 9.0, 10.0]),
            (vec![3, 2], vec![1, 3], vec![0.0, 3.0, 1.0, 4.0, 2.0, 5.0]),
            (vec![2, 1, 2], vec![12, 99, 1], vec![0.0, 1.0, 12.0, 13.0]),
            (vec![2, 2], vec![0, 1], vec![0.0, 1.0, 0.0, 1.0]),
        ] {
            let given = given(&mut values, &shape, &strides);
            // SAFETY: the values outlive the tensor.
            assert_eq!(unsafe { given.host() }.unwrap().to_f32(), wanted);
        }
        let strided = given(&mut values, &[2, 2], &[8, 1]);
        let news = [-1.0f32, -2.0, -3.0, -4.0];
        // SAFETY: four values on both sides.
        unsafe { strided.scatter(news.as_ptr().cast()) };
        assert_eq!(values[..2], [-1.0, -2.0]);
        assert_eq!(values[8..10], [-3.0, -4.0]);
        assert_eq!(values[2], 2.0);
    }

    #[test]
    fn a_written_tensor_has_a_place_for_each_element() {
        let mut values = [0.0; 24];
        let mut distinct = |shape: &[usize], strides: &[usize]| {
            given(&mut values, shape, strides).check_distinct().is_ok()
        };
        assert!(distinct(&[2, 3], &[8, 1]));
        assert!(distinct(&[3, 2], &[1, 3]));
        assert!(!distinct(&[3, 2], &[1, 2]));
        assert!(!distinct(&[2, 2], &[0, 1]));
        assert!(distinct(&[1, 2], &[0, 3]));
    }
}
