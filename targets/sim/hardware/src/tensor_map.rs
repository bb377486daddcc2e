//! Tensor maps: TMA's description of a tensor in global memory.

use crate::swizzle::Swizzle;
use std::fmt;

/// The type of a tensor's elements. Loads use the size alone; reductions and
/// NaN fill depend on the type.
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

/// The value that a load writes where a box reaches beyond the tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OobFill {
    /// All bits are zero.
    Zero,
    /// The NaN with all bits below the sign set; only for floats.
    Nan,
}

/// A tensor and how boxes are cut from it. Dimension 0 is the innermost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorMap {
    /// Element type.
    pub element: ElementType,
    /// Number of dimensions, 1 to 5. Array entries beyond it are ignored.
    pub rank: u32,
    /// Address of the first element.
    pub address: u64,
    /// Elements in each dimension.
    pub dims: [u64; 5],
    /// `strides[i]`: bytes from one index of dimension `i + 1` to the next.
    pub strides: [u64; 4],
    /// Elements of a box in each dimension.
    pub tile: [u32; 5],
    /// Distance, in elements, between two elements that a box takes; 1 in most
    /// maps. Dimension 0 ignores its entry.
    pub element_strides: [u32; 5],
    /// Arrangement in shared memory.
    pub swizzle: Swizzle,
    /// Value that loads write outside the tensor.
    pub fill: OobFill,
}

/// The rule of `cuTensorMapEncodeTiled` that a map breaks, or the reason that
/// 128 bytes are no map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum TensorMapFault {
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
    /// The map asks for NaN fill of integers.
    NanOfIntegers(ElementType),
    /// The bytes were not made by [`TensorMap::encode`].
    NotAMap,
}

impl fmt::Display for TensorMapFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        use TensorMapFault as E;
        match self {
            E::Rank(rank) => write!(f, "a tensor map has 1 to 5 dimensions, not {rank}"),
            E::Address(at) => write!(f, "the address {at:#x} is no multiple of 16"),
            E::Dim { dim, size } => {
                write!(
                    f,
                    "dimension {dim} has {size} elements; 1 to 2^32 are possible"
                )
            }
            E::Stride { dim, bytes } => write!(
                f,
                "the stride of dimension {dim} is {bytes} bytes; it must be a multiple of 16 \
                 below 2^40"
            ),
            E::Box { dim, size } => write!(
                f,
                "the box has {size} elements in dimension {dim}; 1 to 256 are possible"
            ),
            E::InnerBytes(bytes) => write!(
                f,
                "an innermost row of the box has {bytes} bytes; it must be a multiple of 16"
            ),
            E::InnerSpan { bytes, swizzle } => write!(
                f,
                "an innermost row of the box has {bytes} bytes; the swizzle allows {}",
                swizzle.span()
            ),
            E::ElementStride { dim, stride } => write!(
                f,
                "the element stride of dimension {dim} is {stride}; 1 to 8 are possible"
            ),
            E::NanOfIntegers(element) => {
                write!(f, "{element:?} has no NaN to fill with; only floats have")
            }
            E::NotAMap => write!(f, "these 128 bytes are no tensor map of this simulator"),
        }
    }
}

impl std::error::Error for TensorMapFault {}

/// The first bytes of an encoded map.
const MAGIC: [u8; 8] = *b"moesTMap";

impl TensorMap {
    /// Returns a dense row-major map: strides from `dims`, element strides 1,
    /// zero fill, and the length of `dims` as rank.
    pub fn dense(
        element: ElementType,
        address: u64,
        dims: &[u64],
        tile: &[u32],
        swizzle: Swizzle,
    ) -> TensorMap {
        let mut map = TensorMap {
            element,
            rank: dims.len() as u32,
            address,
            dims: padded(dims),
            strides: [0; 4],
            tile: padded(tile),
            element_strides: [1; 5],
            swizzle,
            fill: OobFill::Zero,
        };
        let mut bytes = u64::from(element.bytes());
        for (stride, size) in map.strides.iter_mut().zip(dims.iter().rev().skip(1).rev()) {
            bytes = bytes.saturating_mul(*size);
            *stride = bytes;
        }
        map
    }

    /// Checks the rules of `cuTensorMapEncodeTiled` for maps without
    /// interleaving. The rules come from the CUDA driver API reference; no
    /// driver has confirmed them. The check leaves out that each stride must be
    /// a multiple of the one before.
    ///
    /// # Errors
    /// The first rule that the map breaks.
    pub fn validate(&self) -> Result<(), TensorMapFault> {
        if self.rank == 0 || self.rank > 5 {
            return Err(TensorMapFault::Rank(self.rank));
        }
        if !self.address.is_multiple_of(16) {
            return Err(TensorMapFault::Address(self.address));
        }
        self.check_dims()?;
        self.check_box()?;
        match (self.fill, self.element.is_float()) {
            (OobFill::Nan, false) => Err(TensorMapFault::NanOfIntegers(self.element)),
            _ => Ok(()),
        }
    }

    fn check_dims(&self) -> Result<(), TensorMapFault> {
        let rank = self.rank as usize;
        for (dim, &size) in self.dims[..rank].iter().enumerate() {
            if size == 0 || size > 1 << 32 {
                return Err(TensorMapFault::Dim { dim, size });
            }
        }
        for (index, &bytes) in self.strides[..rank - 1].iter().enumerate() {
            // A kernel meets this rule with rows whose width is no multiple of
            // 8 halves: such tensors need another kind of copy.
            if !bytes.is_multiple_of(16) || bytes >= 1 << 40 {
                return Err(TensorMapFault::Stride {
                    dim: index + 1,
                    bytes,
                });
            }
        }
        Ok(())
    }

    fn check_box(&self) -> Result<(), TensorMapFault> {
        for dim in 0..self.rank as usize {
            let (size, stride) = (self.tile[dim], self.element_strides[dim]);
            // The limits are those that the CUDA driver API gives for `boxDim`
            // and `elementStrides` of `cuTensorMapEncodeTiled`.
            if size == 0 || size > 256 {
                return Err(TensorMapFault::Box { dim, size });
            }
            if stride == 0 || stride > 8 {
                return Err(TensorMapFault::ElementStride { dim, stride });
            }
        }
        let (bytes, swizzle) = (self.row_bytes(), self.swizzle);
        if !bytes.is_multiple_of(16) {
            return Err(TensorMapFault::InnerBytes(bytes));
        }
        // A row longer than the span would wrap into the next row's chunks,
        // which TMA does not do: the caller has to split such a box.
        if swizzle != Swizzle::None && bytes > swizzle.span() {
            return Err(TensorMapFault::InnerSpan { bytes, swizzle });
        }
        Ok(())
    }

    /// Returns the bytes of an innermost row of a box.
    pub fn row_bytes(&self) -> u32 {
        self.tile[0] * self.element.bytes()
    }

    /// Returns the elements that a box takes in a dimension: one in every
    /// `element_strides[dim]` of its extent.
    pub fn taken(&self, dim: usize) -> u32 {
        match dim {
            0 => self.tile[0],
            _ => self.tile[dim].div_ceil(self.element_strides[dim]),
        }
    }

    /// Returns the bytes that a box takes in shared memory, which a load counts
    /// on its barrier. The count is that of the full box, even where part of it
    /// lies outside the tensor.
    pub fn box_bytes(&self) -> u32 {
        let outer = (1..self.rank as usize).map(|dim| self.taken(dim));
        self.row_bytes() * outer.product::<u32>()
    }

    /// Validates the map and encodes it as 128 bytes for a kernel parameter.
    /// The layout is this simulator's own: no GPU reads it,
    /// [`TensorMap::decode`] does.
    ///
    /// # Errors
    /// As [`TensorMap::validate`].
    pub fn encode(&self) -> Result<[u8; 128], TensorMapFault> {
        self.validate()?;
        let mut bytes = [0; 128];
        let mut put = Cursor {
            bytes: &mut bytes,
            at: 0,
        };
        put.write(&MAGIC);
        put.write(&self.address.to_le_bytes());
        let long = self.dims.iter().chain(&self.strides);
        long.for_each(|value| put.write(&value.to_le_bytes()));
        // A box of 256 is stored as 0 in its byte.
        self.tile.iter().for_each(|size| put.write(&[*size as u8]));
        let strides = self.element_strides.iter();
        strides.for_each(|stride| put.write(&[*stride as u8]));
        put.write(&[self.rank as u8, self.element as u8]);
        put.write(&[self.swizzle as u8, self.fill as u8]);
        let sum = checksum(&bytes[..CHECKED]);
        bytes[CHECKED..].copy_from_slice(&sum.to_le_bytes());
        Ok(bytes)
    }

    /// Decodes a map: the inverse of [`TensorMap::encode`]. Entries beyond the
    /// rank keep their value, except that those out of range come back reduced.
    ///
    /// # Errors
    /// [`TensorMapFault::NotAMap`] for other bytes, or the rule that the map
    /// breaks.
    pub fn decode(bytes: &[u8; 128]) -> Result<TensorMap, TensorMapFault> {
        // A kernel could pass any 128 bytes, for one a map that was made for a
        // real driver. Magic and checksum turn that into an error instead of a
        // copy of random memory.
        let sum = checksum(&bytes[..CHECKED]).to_le_bytes();
        if bytes[..8] != MAGIC || bytes[CHECKED..] != sum {
            return Err(TensorMapFault::NotAMap);
        }
        let long = |index: usize| {
            let at = 8 + 8 * index;
            u64::from_le_bytes(std::array::from_fn(|i| bytes[at + i]))
        };
        let small = |index: usize| u32::from(bytes[88 + index]);
        let size = |index| match small(index) {
            0 => 256,
            size => size,
        };
        let map = TensorMap {
            element: *pick(&ElementType::ALL, small(11))?,
            rank: small(10),
            address: long(0),
            dims: std::array::from_fn(|i| long(1 + i)),
            strides: std::array::from_fn(|i| long(6 + i)),
            tile: std::array::from_fn(size),
            element_strides: std::array::from_fn(|i| small(5 + i)),
            swizzle: *pick(&Swizzle::ALL, small(12))?,
            fill: *pick(&[OobFill::Zero, OobFill::Nan], small(13))?,
        };
        map.validate().map(|()| map)
    }
}

/// The bytes of an encoded map in front of its checksum.
const CHECKED: usize = 120;

struct Cursor<'a> {
    bytes: &'a mut [u8; 128],
    at: usize,
}

impl Cursor<'_> {
    fn write(&mut self, value: &[u8]) {
        self.bytes[self.at..][..value.len()].copy_from_slice(value);
        self.at += value.len();
    }
}

/// Computes FNV-1a.
fn checksum(bytes: &[u8]) -> u64 {
    let step = |sum: u64, byte: &u8| (sum ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, step)
}

fn pick<T>(list: &[T], index: u32) -> Result<&T, TensorMapFault> {
    list.get(index as usize).ok_or(TensorMapFault::NotAMap)
}

/// Returns the first five of `values`, padded with ones.
fn padded<T: Copy + From<u8>>(values: &[T]) -> [T; 5] {
    std::array::from_fn(|i| values.get(i).copied().unwrap_or_else(|| T::from(1)))
}

impl ElementType {
    /// Every type, in the order of its code in an encoded map.
    pub const ALL: [ElementType; 10] = [
        ElementType::U8,
        ElementType::U16,
        ElementType::U32,
        ElementType::S32,
        ElementType::U64,
        ElementType::S64,
        ElementType::F16,
        ElementType::F32,
        ElementType::F64,
        ElementType::Bf16,
    ];

    /// Returns the bytes of one element.
    pub const fn bytes(self) -> u32 {
        match self {
            ElementType::U8 => 1,
            ElementType::U16 | ElementType::F16 | ElementType::Bf16 => 2,
            ElementType::U32 | ElementType::S32 | ElementType::F32 => 4,
            ElementType::U64 | ElementType::S64 | ElementType::F64 => 8,
        }
    }

    /// Returns true for floating-point types.
    pub const fn is_float(self) -> bool {
        use ElementType as E;
        matches!(self, E::F16 | E::F32 | E::F64 | E::Bf16)
    }
}

#[cfg(test)]
#[path = "tensor_map_tests.rs"]
mod tests;
