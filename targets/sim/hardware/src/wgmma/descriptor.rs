//! Matrix descriptors and the addresses of an operand's elements.

use crate::mma::MmaElement;
use crate::swizzle::Swizzle;

/// A 64-bit matrix descriptor, its fields in bytes (PTX ISA, "Matrix Descriptor
/// Format").
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
    /// Leading byte offset, a multiple of 16.
    pub leading: u32,
    /// Stride byte offset, a multiple of 16.
    pub stride: u32,
    /// Phase of the swizzle pattern; 0 where tiles are aligned to its atom.
    pub base_offset: u32,
    /// Arrangement of chunks.
    pub swizzle: Swizzle,
}

impl Descriptor {
    /// Decodes the bits.
    pub const fn decode(bits: u64) -> Descriptor {
        // The order of the codes is not that of the spans: 1 is the widest
        // pattern and 3 the narrowest.
        const SWIZZLES: [Swizzle; 4] = [Swizzle::None, Swizzle::B128, Swizzle::B64, Swizzle::B32];
        Descriptor {
            start: field(bits),
            leading: field(bits >> 16),
            stride: field(bits >> 32),
            base_offset: (bits >> 49) as u32 & 7,
            swizzle: SWIZZLES[(bits >> 62) as usize],
        }
    }

    /// Encodes the descriptor, dropping low bits that the fields cannot hold.
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

/// Returns the bytes that the 14 bits of a field stand for.
const fn field(bits: u64) -> u32 {
    (bits as u32 & 0x3fff) << 4
}

/// Returns the 14 bits for a field of bytes.
const fn bits(bytes: u32) -> u64 {
    (bytes as u64 >> 4) & 0x3fff
}

/// The index of an operand that is contiguous in shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Major {
    /// k: rows of A, or columns of B, are contiguous.
    K,
    /// m of A or n of B; `imm-trans` 1.
    Mn,
}

/// The shared-memory addresses of a descriptor have 18 bits.
const ADDRESS_MASK: u32 = 0x3_ffff;

/// An operand in shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharedOperand {
    /// Address, strides and swizzle.
    pub descriptor: Descriptor,
    /// Contiguous index.
    pub major: Major,
    /// MmaElement type.
    pub element: MmaElement,
}

impl SharedOperand {
    /// Returns the shared-memory address of element (`mn`, `k`): row and k of
    /// A, or column and k of B.
    ///
    /// Chunks have 16 bytes with `per` elements each, and `s` is the swizzle's
    /// span in bytes (16 for none). Before the swizzle:
    ///
    /// | operand | address - start |
    /// |---|---|
    /// | K-major, none | `mn / 8 * stride + mn % 8 * 16 + k / per * leading` |
    /// | K-major, swizzled | `mn / 8 * stride + mn % 8 * s + k / per * 16` |
    /// | MN-major, none | `mn / per * stride + k / 8 * leading + k % 8 * 16` |
    /// | MN-major, swizzled | `mn / w * leading + mn % w / per * 16 + k / 8 * stride + k % 8 * s`, `w = s / 16 * per` |
    ///
    /// The bytes of the element within its chunk come on top.
    #[inline(always)]
    pub const fn address(&self, mn: usize, k: usize) -> u32 {
        let (mn, k) = (mn as u32, k as u32);
        let size = self.element_bytes();
        let per = 16 / size;
        let d = &self.descriptor;
        let span = d.swizzle.span();
        // Leading and stride trade their roles between the four layouts, and
        // one of them is unused in K-major swizzled tiles (PTX ISA, "Strides").
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
        // The swizzle applies to the final address and not to the offset within
        // the tile, so stepping the start address along k inside an atom works.
        // The mask comes first, because addresses wrap at 18 bits.
        let address = d.start.wrapping_add(plain) & ADDRESS_MASK;
        d.swizzle.apply(address) + within * size
    }

    /// Returns the elements in a chunk of 16 bytes.
    pub const fn chunk(&self) -> usize {
        16 / self.element_bytes() as usize
    }

    const fn element_bytes(&self) -> u32 {
        match self.element {
            MmaElement::F16 | MmaElement::Bf16 => 2,
            MmaElement::Tf32 => 4,
            MmaElement::S8 | MmaElement::U8 => 1,
        }
    }

    /// Calls `visit` with the address of every 16-byte chunk that a product of
    /// `extent` rows (64 for A, N for B) reads.
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
