//! `wgmma`: the product of a 64 x k and a k x N matrix by four warps.
//!
//! With `w` the warp of the four, `g = lane / 4`, `t = lane % 4`:
//!
//! | register | element |
//! |---|---|
//! | D `4 j + 2 h + e` of f32 | row `16 w + g + 8 h`, column `8 j + 2 t + e` |
//! | D `2 j + h` of halves | row `16 w + g + 8 h`, columns `8 j + 2 t`, `8 j + 2 t + 1` |
//! | A `2 v + h` of 16 bits | row `16 w + g + 8 h`, k `8 v + 2 t`, `8 v + 2 t + 1` |
//! | A `2 v + h` of tf32 | row `16 w + g + 8 h`, k `4 v + t` |

mod descriptor;

pub use descriptor::{Descriptor, Major, SharedOperand};

use crate::Lanes;
use crate::float::{f16_from_f32, f32_from_f16};
use crate::product::add_product;
use std::fmt;

/// The type of the elements of A and B.
pub use crate::mma::{Accumulator, MmaElement};

/// A form of `wgmma.mma_async.sync.aligned.m64nNkK`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WgmmaKind {
    n: u16,
    element: MmaElement,
    accumulator: Accumulator,
}

impl WgmmaKind {
    /// Returns the form, or `None` when there is none: n is a multiple of 8 up
    /// to 256; f16 accumulates in f32 or f16, bf16 and tf32 in f32.
    pub fn new(n: usize, element: MmaElement, accumulator: Accumulator) -> Option<WgmmaKind> {
        let types = matches!(
            (element, accumulator),
            (MmaElement::F16, Accumulator::F32 | Accumulator::F16)
                | (MmaElement::Bf16 | MmaElement::Tf32, Accumulator::F32)
        );
        let shape = n.is_multiple_of(8) && (8..=256).contains(&n);
        (types && shape).then_some(WgmmaKind {
            n: n as u16,
            element,
            accumulator,
        })
    }

    /// Returns the columns of B.
    pub const fn n(self) -> usize {
        self.n as usize
    }

    /// Returns the columns of A: 16, or 8 for tf32.
    pub const fn k(self) -> usize {
        match self.element {
            MmaElement::Tf32 => 8,
            _ => 16,
        }
    }

    /// Returns the element type of A and B.
    pub const fn element(self) -> MmaElement {
        self.element
    }

    /// Returns the element type of D.
    pub const fn accumulator(self) -> Accumulator {
        self.accumulator
    }

    /// Returns the registers of D per lane: n / 2, or n / 4 for packed halves.
    pub const fn d_registers(self) -> usize {
        self.n() / 2 / self.packed_d()
    }

    /// Returns the elements of D in one register.
    pub const fn packed_d(self) -> usize {
        match self.accumulator {
            Accumulator::F16 => 2,
            _ => 1,
        }
    }

    /// Returns the elements of A in one register.
    pub const fn packed_a(self) -> usize {
        match self.element {
            MmaElement::Tf32 => 1,
            _ => 2,
        }
    }

    /// Returns row and column of element `part` of register `register` of D, in
    /// warp `warp` of the four.
    pub const fn d_index(
        self,
        warp: usize,
        register: usize,
        part: usize,
        lane: usize,
    ) -> (usize, usize) {
        let element = register * self.packed_d() + part;
        let (group, half, edge) = (element / 4, element / 2 % 2, element % 2);
        let row = 16 * warp + lane / 4 + 8 * half;
        (row, 8 * group + 2 * (lane % 4) + edge)
    }

    /// Returns row and k of element `part` of register `register` (of 4) of A.
    pub const fn a_index(
        self,
        warp: usize,
        register: usize,
        part: usize,
        lane: usize,
    ) -> (usize, usize) {
        let row = 16 * warp + lane / 4 + 8 * (register % 2);
        let group = 4 * (register / 2) + lane % 4;
        (row, self.packed_a() * group + part)
    }
}

/// The source of operand A.
#[derive(Clone, Copy, Debug)]
pub enum SourceA<'a> {
    /// SharedMemory memory.
    Shared(Descriptor, Major),
    /// Registers: register `r` of warp `w` is `[4 w + r]`.
    Registers(&'a [Lanes; 16]),
}

/// One `wgmma.mma_async` instruction.
#[derive(Clone, Copy, Debug)]
pub struct Wgmma<'a> {
    /// Shape and types.
    pub kind: WgmmaKind,
    /// Source of A.
    pub a: SourceA<'a>,
    /// Descriptor of B.
    pub b: Descriptor,
    /// Contiguous index of B.
    pub b_major: Major,
    /// Whether the product is added to D (`scale-d`) or overwrites it.
    pub accumulate: bool,
    /// Whether `imm-scale-a` is -1.
    pub negate_a: bool,
    /// Whether `imm-scale-b` is -1.
    pub negate_b: bool,
}

/// SharedMemory memory of a block: `bytes[0]` has address `base`.
#[derive(Clone, Copy, Debug)]
pub struct SharedMemory<'a> {
    /// Address of the first byte.
    pub base: u32,
    /// Contents, from `base` on.
    pub bytes: &'a [u8],
}

/// A reason that a product cannot run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum WgmmaError {
    /// An operand reaches outside shared memory.
    OutOfBounds {
        /// `'A'` or `'B'`.
        operand: char,
        /// SharedMemory-memory address of the read.
        address: u32,
    },
    /// The operand is MN-major, but its elements exist only K-major.
    Major(MmaElement),
    /// The descriptor has a base offset other than 0, whose effect no hardware
    /// has confirmed.
    BaseOffset(u32),
}

impl fmt::Display for WgmmaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            WgmmaError::OutOfBounds { operand, address } => write!(
                f,
                "operand {operand} of wgmma reads shared memory at {address:#x}, outside what \
                 the block has"
            ),
            WgmmaError::Major(element) => write!(
                f,
                "wgmma reads {element:?} operands K-major only, not MN-major"
            ),
            WgmmaError::BaseOffset(offset) => write!(
                f,
                "the descriptor's base offset is {offset}: what hardware does with it is not \
                 confirmed; align tiles to the atom of their swizzle"
            ),
        }
    }
}

impl std::error::Error for WgmmaError {}

impl Wgmma<'_> {
    /// Computes D. Register `r` of warp `w` is `d[w * d_registers + r]`. Sums
    /// are made in f32 in the order of k and, for f16, rounded once at the end.
    ///
    /// # Errors
    /// [`WgmmaError`]; `d` is unchanged then.
    ///
    /// # Panics
    /// Panics when the length of `d` is not `4 * d_registers`.
    pub fn execute(&self, shared: SharedMemory<'_>, d: &mut [Lanes]) -> Result<(), WgmmaError> {
        let (n, k) = (self.kind.n(), self.kind.k());
        assert_eq!(d.len(), 4 * self.kind.d_registers(), "registers of D");
        let (mut a, mut b) = ([0.0; 64 * 16], [0.0; 16 * 256]);
        let (a, b) = (&mut a[..64 * k], &mut b[..k * n]);
        self.read_a(shared, a)?;
        let operand = self.operand_b();
        read(operand, 'B', shared, n, |column, depth, value| {
            b[depth * n + column] = value;
        })?;
        // Two negations cancel, so one pass over A, the smaller operand, serves
        // both immediates.
        if self.negate_a != self.negate_b {
            a.iter_mut().for_each(|value| *value = -*value);
        }
        let mut sums = [0.0; 64 * 256];
        let sums = &mut sums[..64 * n];
        if self.accumulate {
            read_d(self.kind, d, sums);
        }
        add_product(a, b, sums, n, k);
        write_d(self.kind, sums, d);
        Ok(())
    }

    /// Returns B as an operand in shared memory.
    pub fn operand_b(&self) -> SharedOperand {
        SharedOperand {
            descriptor: self.b,
            major: self.b_major,
            element: self.kind.element,
        }
    }

    /// Returns A as an operand in shared memory; `None` when it is in
    /// registers.
    pub fn operand_a(&self) -> Option<SharedOperand> {
        match self.a {
            SourceA::Registers(_) => None,
            SourceA::Shared(descriptor, major) => Some(SharedOperand {
                descriptor,
                major,
                element: self.kind.element,
            }),
        }
    }

    fn read_a(&self, shared: SharedMemory<'_>, a: &mut [f32]) -> Result<(), WgmmaError> {
        let k = self.kind.k();
        let mut put = |row: usize, depth: usize, value| a[row * k + depth] = value;
        match (self.a, self.operand_a()) {
            (_, Some(operand)) => read(operand, 'A', shared, 64, put),
            (SourceA::Registers(registers), _) => {
                for_each_a(self.kind, |warp, register, part, lane| {
                    let (row, depth) = self.kind.a_index(warp, register, part, lane);
                    let word = registers[4 * warp + register][lane];
                    put(row, depth, self.kind.element.unpack(word, part));
                });
                Ok(())
            }
            (SourceA::Shared(..), None) => unreachable!("shared memory has an operand"),
        }
    }
}

fn for_each_a(kind: WgmmaKind, mut visit: impl FnMut(usize, usize, usize, usize)) {
    for register in 0..16 {
        for part in 0..kind.packed_a() {
            for lane in 0..32 {
                visit(register / 4, register % 4, part, lane);
            }
        }
    }
}

/// Calls `put(mn, k, value)` for every element of an operand.
fn read(
    operand: SharedOperand,
    name: char,
    shared: SharedMemory<'_>,
    extent: usize,
    mut put: impl FnMut(usize, usize, f32),
) -> Result<(), WgmmaError> {
    check(operand)?;
    let per = operand.chunk();
    let (inner, outer) = match operand.major {
        Major::K => (2 * per, extent),
        Major::Mn => (extent, 2 * per),
    };
    for other in 0..outer {
        // The unit is a chunk of 16 bytes because the swizzle keeps chunks
        // whole: one address computation serves its eight (four for tf32)
        // elements.
        for first in (0..inner).step_by(per) {
            let (mn, k, step_mn) = match operand.major {
                Major::K => (other, first, 0),
                Major::Mn => (first, other, 1),
            };
            let address = operand.address(mn, k);
            let chunk = shared.chunk(address).ok_or(WgmmaError::OutOfBounds {
                operand: name,
                address,
            })?;
            let values = widen(operand.element, chunk);
            for (i, value) in values[..per].iter().enumerate() {
                put(mn + i * step_mn, k + i * (1 - step_mn), *value);
            }
        }
    }
    Ok(())
}

fn check(operand: SharedOperand) -> Result<(), WgmmaError> {
    let offset = operand.descriptor.base_offset;
    match (operand.major, operand.element) {
        // `imm-trans-a` and `imm-trans-b` exist for f16 and bf16 alone (PTX
        // ISA, "wgmma.mma_async"). No ptxas sees the text that runs here, so
        // the machine has to refuse.
        (Major::Mn, MmaElement::Tf32) => Err(WgmmaError::Major(MmaElement::Tf32)),
        _ if offset != 0 => Err(WgmmaError::BaseOffset(offset)),
        _ => Ok(()),
    }
}

/// Widens the elements of a chunk: four of tf32, repeated, or eight.
#[inline]
fn widen(element: MmaElement, chunk: &[u8; 16]) -> [f32; 8] {
    let half = |i: usize| u32::from(u16::from_le_bytes([chunk[2 * i], chunk[2 * i + 1]]));
    let word = |i: usize| u32::from_le_bytes(std::array::from_fn(|b| chunk[4 * i + b]));
    match element {
        MmaElement::Tf32 => std::array::from_fn(|i| element.unpack(word(i % 4), 0)),
        MmaElement::F16 => std::array::from_fn(|i| MmaElement::F16.unpack(half(i), 0)),
        _ => std::array::from_fn(|i| MmaElement::Bf16.unpack(half(i), 0)),
    }
}

impl<'a> SharedMemory<'a> {
    /// Returns the 16 bytes at an address.
    #[inline]
    pub fn chunk(&self, address: u32) -> Option<&'a [u8; 16]> {
        // A descriptor may point below the block's window as well as beyond it.
        let at = address.checked_sub(self.base)? as usize;
        self.bytes.get(at..)?.first_chunk()
    }
}

/// Calls `visit` for every eight neighbouring columns of a row with the row,
/// the first column, the index of the first register that holds them, and the
/// first of their four lanes.
#[inline(always)]
fn for_each_eight(kind: WgmmaKind, mut visit: impl FnMut(usize, usize, usize, usize)) {
    let (n, registers) = (kind.n(), kind.d_registers());
    let per_row = 2 / kind.packed_d();
    for row in 0..64 {
        let (warp, half, group) = (row / 16, row / 8 % 2, row % 8);
        for column in (0..n).step_by(8) {
            let register = (column / 4 + half) * per_row;
            visit(row, column, warp * registers + register, 4 * group);
        }
    }
}

fn read_d(kind: WgmmaKind, d: &[Lanes], sums: &mut [f32]) {
    let n = kind.n();
    for_each_eight(kind, |row, column, register, lane| {
        let eight = &mut sums[row * n + column..][..8];
        for (t, pair) in eight.chunks_exact_mut(2).enumerate() {
            let low = d[register][lane + t];
            match kind.accumulator {
                Accumulator::F16 => {
                    pair[0] = f32_from_f16(low as u16);
                    pair[1] = f32_from_f16((low >> 16) as u16);
                }
                _ => {
                    pair[0] = f32::from_bits(low);
                    pair[1] = f32::from_bits(d[register + 1][lane + t]);
                }
            }
        }
    });
}

fn write_d(kind: WgmmaKind, sums: &[f32], d: &mut [Lanes]) {
    let n = kind.n();
    for_each_eight(kind, |row, column, register, lane| {
        let eight = &sums[row * n + column..][..8];
        for (t, pair) in eight.chunks_exact(2).enumerate() {
            match kind.accumulator {
                Accumulator::F16 => {
                    let [low, high] = [pair[0], pair[1]].map(|v| u32::from(f16_from_f32(v)));
                    d[register][lane + t] = low | high << 16;
                }
                _ => {
                    d[register][lane + t] = pair[0].to_bits();
                    d[register + 1][lane + t] = pair[1].to_bits();
                }
            }
        }
    });
}

#[cfg(test)]
mod tests;
