//! `wgmma`: the product of a 64 x k and a k x N matrix by four warps.

use crate::Lanes;
use crate::swizzle::Swizzle;
use std::fmt;

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
        let _ = bits;
        todo!()
    }

    /// The bits. Low bits that the fields cannot hold are dropped.
    pub const fn encode(&self) -> u64 {
        todo!()
    }
}

/// Which index of an operand is contiguous in shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Major {
    /// k: rows of A, or columns of B, are contiguous.
    K,
    /// m of A or n of B; `imm-trans` 1.
    Mn,
}

/// The type of the elements of A and B.
pub use crate::mma::{Accumulator, Element};

/// A form of `wgmma.mma_async.sync.aligned.m64nNkK`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WgmmaKind {
    n: u16,
    element: Element,
    accumulator: Accumulator,
}

impl WgmmaKind {
    /// The form, or `None` when there is none: n is a multiple of 8 up to
    /// 256; f16 to f32 or f16, bf16 and tf32 to f32.
    pub fn new(n: usize, element: Element, accumulator: Accumulator) -> Option<WgmmaKind> {
        let _ = (n, element, accumulator);
        todo!()
    }

    /// Columns of B.
    pub const fn n(self) -> usize {
        self.n as usize
    }

    /// Columns of A: 16, or 8 for tf32.
    pub const fn k(self) -> usize {
        todo!()
    }

    /// Element type of A and B.
    pub const fn element(self) -> Element {
        self.element
    }

    /// Element type of D.
    pub const fn accumulator(self) -> Accumulator {
        self.accumulator
    }

    /// Registers of D per lane: n / 2, or n / 4 of packed halves.
    pub const fn d_registers(self) -> usize {
        todo!()
    }

    /// Row and column of element `part` of register `register` of D, in warp
    /// `warp` of the four.
    pub const fn d_index(
        self,
        warp: usize,
        register: usize,
        part: usize,
        lane: usize,
    ) -> (usize, usize) {
        let _ = (warp, register, part, lane);
        todo!()
    }

    /// Row and k of element `part` of register `register` (of 4) of A.
    pub const fn a_index(
        self,
        warp: usize,
        register: usize,
        part: usize,
        lane: usize,
    ) -> (usize, usize) {
        let _ = (warp, register, part, lane);
        todo!()
    }
}

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
    pub const fn address(&self, mn: usize, k: usize) -> u32 {
        let _ = (mn, k);
        todo!()
    }

    /// Calls `visit` with the address of every 16-byte chunk that a product
    /// of `extent` rows (64 for A, N for B) reads.
    pub fn chunks(&self, extent: usize, visit: impl FnMut(u32)) {
        let _ = (extent, visit);
        todo!()
    }
}

/// Where A comes from.
#[derive(Clone, Copy, Debug)]
pub enum SourceA<'a> {
    /// Shared memory.
    Shared(Descriptor, Major),
    /// Registers: register `r` of warp `w` is `[4 w + r]`.
    Registers(&'a [Lanes; 16]),
}

/// One instruction.
#[derive(Clone, Copy, Debug)]
pub struct Wgmma<'a> {
    /// Shape and types.
    pub kind: WgmmaKind,
    /// A.
    pub a: SourceA<'a>,
    /// B.
    pub b: Descriptor,
    /// Which index of B is contiguous.
    pub b_major: Major,
    /// Whether D is added to (`scale-d`), or overwritten.
    pub accumulate: bool,
    /// `imm-scale-a` is -1.
    pub negate_a: bool,
    /// `imm-scale-b` is -1.
    pub negate_b: bool,
}

/// Shared memory of a block: `bytes[0]` has address `base`.
#[derive(Clone, Copy, Debug)]
pub struct Shared<'a> {
    /// Address of the first byte.
    pub base: u32,
    /// Contents.
    pub bytes: &'a [u8],
}

/// Why a product cannot be carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum WgmmaError {
    /// An operand reaches outside shared memory.
    OutOfBounds {
        /// `'A'` or `'B'`.
        operand: char,
        /// The address.
        address: u32,
    },
    /// An MN-major operand of elements that exist only K-major.
    Major(Element),
    /// A base offset other than 0: how hardware applies it has not been
    /// confirmed.
    BaseOffset(u32),
}

impl fmt::Display for WgmmaError {
    fn fmt(&self, _f: &mut fmt::Formatter<'_>) -> fmt::Result {
        todo!()
    }
}

impl std::error::Error for WgmmaError {}

impl Wgmma<'_> {
    /// Computes D. Register `r` of warp `w` is `d[w * d_registers + r]`.
    ///
    /// # Errors
    /// [`WgmmaError`]; `d` is unchanged.
    ///
    /// # Panics
    /// When `d` does not hold 4 * d_registers.
    pub fn execute(&self, shared: Shared<'_>, d: &mut [Lanes]) -> Result<(), WgmmaError> {
        let _ = (shared, d);
        todo!()
    }
}
