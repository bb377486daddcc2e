//! Tensor maps: what a copy engine knows of a tensor in global memory.

use crate::swizzle::Swizzle;
use std::fmt;

/// What the elements are. Sizes matter to loads, kinds to reductions and to
/// what may be filled with NaN.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ElementType {
    /// Unsigned bytes.
    U8,
    /// Unsigned 16-bit integers.
    U16,
    /// Unsigned 32-bit integers.
    U32,
    /// Signed 32-bit integers.
    S32,
    /// Unsigned 64-bit integers.
    U64,
    /// Signed 64-bit integers.
    S64,
    /// IEEE half.
    F16,
    /// f32.
    F32,
    /// f64.
    F64,
    /// bfloat16.
    Bf16,
}

/// What a load puts where a box reaches beyond the tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OobFill {
    /// Zeros.
    Zero,
    /// The NaN with all bits below the sign set; only for floats.
    Nan,
}

/// A tensor and how boxes are cut from it. Dimension 0 is the innermost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorMap {
    /// Element type.
    pub element: ElementType,
    /// Dimensions, 1 to 5. Entries of the arrays beyond it are ignored.
    pub rank: u32,
    /// Address of the first element.
    pub address: u64,
    /// Elements in each dimension.
    pub dims: [u64; 5],
    /// `strides[i]`: bytes from one index of dimension `i + 1` to the next.
    pub strides: [u64; 4],
    /// Elements of a box in each dimension.
    pub tile: [u32; 5],
    /// Every how many elements one is taken; 1 in most maps. Dimension 0 has
    /// none whatever it says.
    pub element_strides: [u32; 5],
    /// Arrangement in shared memory.
    pub swizzle: Swizzle,
    /// What loads put outside the tensor.
    pub fill: OobFill,
}

/// The rule of `cuTensorMapEncodeTiled` that a map breaks, or why 128 bytes
/// are no map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum TensorMapError {
    /// The rank is not 1 to 5.
    Rank(u32),
    /// The address is not a multiple of 16.
    Address(u64),
    /// A dimension is 0 or above 2^32.
    Dim {
        /// Dimension.
        dim: usize,
        /// Its size.
        size: u64,
    },
    /// A stride is no multiple of 16 or not below 2^40.
    Stride {
        /// Dimension, from 1.
        dim: usize,
        /// Bytes.
        bytes: u64,
    },
    /// A box is 0 or above 256 in a dimension.
    Box {
        /// Dimension.
        dim: usize,
        /// Elements.
        size: u32,
    },
    /// The innermost row of a box is no multiple of 16 bytes.
    InnerBytes(u32),
    /// The innermost row of a box is longer than the swizzle's span.
    InnerSpan {
        /// Bytes of the row.
        bytes: u32,
        /// The pattern.
        swizzle: Swizzle,
    },
    /// An element stride is 0 or above 8.
    ElementStride {
        /// Dimension.
        dim: usize,
        /// Stride.
        stride: u32,
    },
    /// NaN fill of integers.
    NanOfIntegers(ElementType),
    /// The bytes are not what [`TensorMap::encode`] makes.
    NotAMap,
}

impl fmt::Display for TensorMapError {
    fn fmt(&self, _f: &mut fmt::Formatter<'_>) -> fmt::Result {
        todo!()
    }
}

impl std::error::Error for TensorMapError {}

impl TensorMap {
    /// A dense row-major map: strides from dims, element strides 1, zero fill.
    pub fn dense(
        element: ElementType,
        address: u64,
        dims: &[u64],
        tile: &[u32],
        swizzle: Swizzle,
    ) -> TensorMap {
        let _ = (element, address, dims, tile, swizzle);
        todo!()
    }

    /// Checks what `cuTensorMapEncodeTiled` checks.
    ///
    /// # Errors
    /// The first rule that is broken.
    pub fn validate(&self) -> Result<(), TensorMapError> {
        todo!()
    }

    /// 128 bytes for a kernel parameter, once the map is valid. The layout is
    /// our own: no GPU reads it, [`TensorMap::decode`] does.
    ///
    /// # Errors
    /// As [`TensorMap::validate`].
    pub fn encode(&self) -> Result<[u8; 128], TensorMapError> {
        todo!()
    }

    /// The inverse of [`TensorMap::encode`].
    ///
    /// # Errors
    /// [`TensorMapError::NotAMap`] for other bytes, or the rule that is broken.
    pub fn decode(bytes: &[u8; 128]) -> Result<TensorMap, TensorMapError> {
        let _ = bytes;
        todo!()
    }

    /// Bytes a box takes in shared memory, and what a load counts on its
    /// barrier: always the full box.
    pub fn box_bytes(&self) -> u32 {
        todo!()
    }
}

impl ElementType {
    /// Bytes of one element.
    pub const fn bytes(self) -> u32 {
        match self {
            ElementType::U8 => 1,
            ElementType::U16 | ElementType::F16 | ElementType::Bf16 => 2,
            ElementType::U32 | ElementType::S32 | ElementType::F32 => 4,
            ElementType::U64 | ElementType::S64 | ElementType::F64 => 8,
        }
    }
}
