//! The matrix instructions of AMD: MFMA of CDNA and WMMA of RDNA 3.
//!
//! The layouts are those of the CDNA3 ISA guide, "Matrix Arithmetic
//! Instructions", and of the RDNA3 ISA guide, "Wave Matrix Multiply Accumulate
//! (WMMA)".
//!
//! With `e` the edge (16 or 32), `q = lane / e`, and `h` the elements of A in
//! a lane (`k` times edge over lanes; all 16 of k for WMMA):
//!
//! | operand | element `i` of a lane |
//! |---|---|
//! | A | row `lane % e`, k `h q + i` |
//! | B | column `lane % e`, k `h q + i` |
//! | A, B of WMMA | row or column `lane % 16`, k `i`; both half-waves hold the same |
//! | D, edge 32 | row `8 (i / 4) + 4 q + i % 4`, column `lane % 32` |
//! | D, edge 16 | row `4 q + i`, column `lane % 16` |
//! | D of WMMA | row `2 i + q`, column `lane % 16` |
//!
//! Elements are packed into registers lowest first.

use crate::float::{f32_from_bf16, f32_from_f16};
use crate::product::add_product;

/// The type of the elements of A and B.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MfmaElement {
    /// IEEE half.
    F16,
    /// bfloat16.
    Bf16,
    /// f32.
    F32,
}

/// A matrix instruction with f32 results.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MfmaKind {
    /// Rows of A and columns of B, 16 or 32.
    edge: u8,
    k: u8,
    element: MfmaElement,
    lanes: u8,
}

impl MfmaKind {
    /// Every instruction that this crate executes.
    pub const ALL: [MfmaKind; 12] = [
        MfmaKind::of(32, 8, MfmaElement::F16, 64),
        MfmaKind::of(32, 8, MfmaElement::Bf16, 64),
        MfmaKind::of(16, 16, MfmaElement::F16, 64),
        MfmaKind::of(16, 16, MfmaElement::Bf16, 64),
        MfmaKind::of(32, 16, MfmaElement::F16, 64),
        MfmaKind::of(32, 16, MfmaElement::Bf16, 64),
        MfmaKind::of(16, 32, MfmaElement::F16, 64),
        MfmaKind::of(16, 32, MfmaElement::Bf16, 64),
        MfmaKind::of(32, 2, MfmaElement::F32, 64),
        MfmaKind::of(16, 4, MfmaElement::F32, 64),
        MfmaKind::of(16, 16, MfmaElement::F16, 32),
        MfmaKind::of(16, 16, MfmaElement::Bf16, 32),
    ];

    const fn of(edge: u8, k: u8, element: MfmaElement, lanes: u8) -> MfmaKind {
        MfmaKind {
            edge,
            k,
            element,
            lanes,
        }
    }

    /// Returns `v_mfma_f32_EDGExEDGExK` of wave64, or `None` when there is
    /// none.
    pub fn mfma(edge: usize, k: usize, element: MfmaElement) -> Option<MfmaKind> {
        let (edge, k) = (u8::try_from(edge).ok()?, u8::try_from(k).ok()?);
        let kind = MfmaKind::of(edge, k, element, 64);
        MfmaKind::ALL.contains(&kind).then_some(kind)
    }

    /// Returns `v_wmma_f32_16x16x16` of wave32, or `None` for f32.
    pub fn wmma(element: MfmaElement) -> Option<MfmaKind> {
        let kind = MfmaKind::of(16, 16, element, 32);
        MfmaKind::ALL.contains(&kind).then_some(kind)
    }

    /// Returns the rows of A and columns of B.
    pub const fn edge(self) -> usize {
        self.edge as usize
    }

    /// Returns the columns of A.
    pub const fn k(self) -> usize {
        self.k as usize
    }

    /// Returns the element type of A and B.
    pub const fn element(self) -> MfmaElement {
        self.element
    }

    /// Returns the lanes of a wave: 64, or 32 for WMMA.
    pub const fn lanes(self) -> usize {
        self.lanes as usize
    }

    /// Returns the elements of A or B in one register.
    pub const fn packed(self) -> usize {
        match self.element {
            MfmaElement::F16 | MfmaElement::Bf16 => 2,
            MfmaElement::F32 => 1,
        }
    }

    /// Returns the elements of A, or of B, in one lane.
    const fn held(self) -> usize {
        match self.lanes {
            // Each element of A and B is held twice in WMMA, once in each
            // half-wave, so a lane holds all of k. MFMA splits k over the lanes
            // of a wave.
            32 => self.k(),
            _ => self.k() * self.edge() / 64,
        }
    }

    /// Returns the registers of A, or of B, per lane.
    pub const fn a_registers(self) -> usize {
        self.held() / self.packed()
    }

    /// Returns the registers of C and D per lane.
    pub const fn d_registers(self) -> usize {
        self.edge() * self.edge() / self.lanes()
    }

    /// Returns row and k of element `part` of a register of A; for B, column
    /// and k.
    pub const fn a_index(self, register: usize, part: usize, lane: usize) -> (usize, usize) {
        let element = register * self.packed() + part;
        let first = match self.lanes {
            32 => 0,
            _ => self.held() * (lane / self.edge()),
        };
        (lane % self.edge(), first + element)
    }

    /// Returns row and column of a register of C or D.
    pub const fn d_index(self, register: usize, lane: usize) -> (usize, usize) {
        let part = lane / self.edge();
        // WMMA interleaves the rows of the half-waves. The 32 x 32 forms of
        // MFMA put four neighbouring rows into four registers, then skip to the
        // next block of eight rows.
        let row = match (self.lanes, self.edge) {
            (32, _) => 2 * register + part,
            (_, 32) => 8 * (register / 4) + 4 * part + register % 4,
            _ => 4 * part + register,
        };
        (row, lane % self.edge())
    }

    fn unpack(self, register: u32, part: usize) -> f32 {
        let half = (register >> (16 * part)) as u16;
        match self.element {
            MfmaElement::F16 => f32_from_f16(half),
            MfmaElement::Bf16 => f32_from_bf16(half),
            MfmaElement::F32 => f32::from_bits(register),
        }
    }
}

/// Computes `d = a b + c` for a wave of `L` lanes, summed in f32 in the order
/// of k. The function keeps denormals; no GPU has confirmed that.
///
/// # Panics
/// Panics when `L` is not the kind's, or a slice is shorter than the kind
/// needs.
pub fn execute<const L: usize>(
    kind: MfmaKind,
    a: &[[u32; L]],
    b: &[[u32; L]],
    c: &[[u32; L]],
    d: &mut [[u32; L]],
) {
    assert_eq!(L, kind.lanes(), "lanes of a wave");
    let (edge, k) = (kind.edge(), kind.k());
    let (mut rows, mut columns) = ([0.0; 512], [0.0; 512]);
    for (index, part, lane) in places(kind) {
        let (at, depth) = kind.a_index(index, part, lane);
        rows[at * k + depth] = kind.unpack(a[index][lane], part);
        columns[depth * edge + at] = kind.unpack(b[index][lane], part);
    }
    let mut sums = [0.0; 1024];
    let results = || (0..kind.d_registers()).flat_map(|r| (0..L).map(move |lane| (r, lane)));
    for (register, lane) in results() {
        let (row, column) = kind.d_index(register, lane);
        sums[row * edge + column] = f32::from_bits(c[register][lane]);
    }
    let (rows, columns) = (&rows[..edge * k], &columns[..edge * k]);
    add_product(rows, columns, &mut sums[..edge * edge], edge, k);
    for (register, lane) in results() {
        let (row, column) = kind.d_index(register, lane);
        d[register][lane] = sums[row * edge + column].to_bits();
    }
}

/// Iterates over register, part and lane of every element of A in a wave.
fn places(kind: MfmaKind) -> impl Iterator<Item = (usize, usize, usize)> {
    let parts = move |register| (0..kind.packed()).map(move |part| (register, part));
    let registers = (0..kind.a_registers()).flat_map(parts);
    registers.flat_map(move |(r, part)| (0..kind.lanes()).map(move |lane| (r, part, lane)))
}

#[cfg(test)]
#[path = "mfma_tests.rs"]
mod tests;
