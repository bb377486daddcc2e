//! Matrix descriptors, and where the elements of an operand lie.

use crate::mma::Element;
use crate::swizzle::Swizzle;

/// A 64-bit matrix descriptor, its fields in bytes.
///
/// | bits | field |
/// |---|---|
/// | 0..14 | start address / 16 |
/// | 16..30 | leading byte offset / 16 |
/// | 32..46 | stride byte offset / 16 |
/// | 49..52 | base offset |
/// | 62..64 | 0 no swizzle, 1: 128 bytes, 2: 64 bytes, 3: 32 bytes |
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Descriptor {
    /// Shared-memory address, a multiple of 16 below 2^18.
    pub start: u32,
    /// Leading byte offset.
    pub leading: u32,
    /// Stride byte offset.
    pub stride: u32,
    /// Phase of the pattern; 0 where tiles are aligned to its atom.
    pub base_offset: u32,
    /// Arrangement.
    pub swizzle: Swizzle,
}

impl Descriptor {
    /// Reads the bits.
    pub const fn decode(bits: u64) -> Descriptor {
        const SWIZZLES: [Swizzle; 4] = [Swizzle::None, Swizzle::B128, Swizzle::B64, Swizzle::B32];
        Descriptor {
            start: field(bits),
            leading: field(bits >> 16),
            stride: field(bits >> 32),
            base_offset: (bits >> 49) as u32 & 7,
            swizzle: SWIZZLES[(bits >> 62) as usize],
        }
    }

    /// The bits. Low bits that the fields cannot hold are dropped.
    pub const fn encode(&self) -> u64 {
        let layout = match self.swizzle {
            Swizzle::None => 0,
            Swizzle::B128 => 1,
            Swizzle::B64 => 2,
            Swizzle::B32 => 3,
        };
        bits(self.start)
            | bits(self.leading) << 16
            | bits(self.stride) << 32
            | (self.base_offset as u64 & 7) << 49
            | layout << 62
    }
}

/// Bytes out of the 14 bits of a field.
const fn field(bits: u64) -> u32 {
    (bits as u32 & 0x3fff) << 4
}

/// The 14 bits of a field of bytes.
const fn bits(bytes: u32) -> u64 {
    (bytes as u64 >> 4) & 0x3fff
}

/// Which index of an operand is contiguous in shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Major {
    /// k: rows of A, or columns of B, are contiguous.
    K,
    /// m of A or n of B; `imm-trans` 1.
    Mn,
}

/// Shared-memory addresses of a descriptor have 18 bits.
const ADDRESS_MASK: u32 = 0x3_ffff;

/// An operand in shared memory: where its elements lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Operand {
    /// Where.
    pub descriptor: Descriptor,
    /// How.
    pub major: Major,
    /// Element type.
    pub element: Element,
}

impl Operand {
    /// Shared-memory address of element (`mn`, `k`): row and k of A, or
    /// column and k of B.
    ///
    /// With chunks of 16 bytes, `per` elements in each, and `s` the swizzle's
    /// span in bytes (16 for none), before the swizzle:
    ///
    /// | operand | address - start |
    /// |---|---|
    /// | K-major, none | `mn / 8 * stride + mn % 8 * 16 + k / per * leading` |
    /// | K-major, swizzled | `mn / 8 * stride + mn % 8 * s + k / per * 16` |
    /// | MN-major, none | `mn / per * stride + k / 8 * leading + k % 8 * 16` |
    /// | MN-major, swizzled | `mn / w * leading + mn % w / per * 16 + k / 8 * stride + k % 8 * s`, `w = s / 16 * per` |
    ///
    /// and the bytes of the element within its chunk on top.
    #[inline(always)]
    pub const fn address(&self, mn: usize, k: usize) -> u32 {
        let (mn, k) = (mn as u32, k as u32);
        let size = self.element_bytes();
        let per = 16 / size;
        let d = &self.descriptor;
        let span = d.swizzle.span();
        let (plain, within) = match (self.major, d.swizzle) {
            (Major::K, Swizzle::None) => {
                let rows = mn / 8 * d.stride + mn % 8 * 16;
                (rows + k / per * d.leading, k % per)
            }
            (Major::K, _) => {
                let rows = mn / 8 * d.stride + mn % 8 * span;
                (rows + k / per * 16, k % per)
            }
            (Major::Mn, Swizzle::None) => {
                let depth = k / 8 * d.leading + k % 8 * 16;
                (mn / per * d.stride + depth, mn % per)
            }
            (Major::Mn, _) => {
                let wide = span / size;
                let depth = k / 8 * d.stride + k % 8 * span;
                let across = mn / wide * d.leading + mn % wide / per * 16;
                (across + depth, mn % per)
            }
        };
        let address = d.start.wrapping_add(plain) & ADDRESS_MASK;
        d.swizzle.apply(address) + within * size
    }

    /// Elements in a chunk of 16 bytes.
    pub const fn chunk(&self) -> usize {
        16 / self.element_bytes() as usize
    }

    const fn element_bytes(&self) -> u32 {
        match self.element {
            Element::F16 | Element::Bf16 => 2,
            Element::Tf32 => 4,
            Element::S8 | Element::U8 => 1,
        }
    }

    /// Calls `visit` with the address of every 16-byte chunk that a product
    /// of `extent` rows (64 for A, N for B) reads.
    pub fn chunks(&self, extent: usize, mut visit: impl FnMut(u32)) {
        let per = self.chunk();
        let (inner, outer) = match self.major {
            Major::K => (2 * per, extent),
            Major::Mn => (extent, 2 * per),
        };
        for other in 0..outer {
            for first in (0..inner).step_by(per) {
                visit(match self.major {
                    Major::K => self.address(other, first),
                    Major::Mn => self.address(first, other),
                });
            }
        }
    }
}
