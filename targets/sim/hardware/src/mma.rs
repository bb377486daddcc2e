//! `mma.sync`: the product of a 16 x k and a k x 8 matrix by one warp.
//!
//! With `g = lane / 4`, `t = lane % 4`, and `p` the elements of a register
//! (2 halves, 1 tf32, 4 bytes; part 0 is the lowest):
//!
//! | register | part `i` of the register |
//! |---|---|
//! | A 0 | row `g`, k `p t + i` |
//! | A 1 | row `g + 8`, k `p t + i` |
//! | A 2 | row `g`, k `4 p + p t + i` |
//! | A 3 | row `g + 8`, k `4 p + p t + i` |
//! | B 0 | k `p t + i`, column `g` |
//! | B 1 | k `4 p + p t + i`, column `g` |
//! | C 0, 1 of 32 bits | row `g`, columns `2 t`, `2 t + 1` |
//! | C 2, 3 of 32 bits | row `g + 8`, columns `2 t`, `2 t + 1` |
//! | C 0 of halves | row `g`, column `2 t + i` |
//! | C 1 of halves | row `g + 8`, column `2 t + i` |
//!
//! Forms with a smaller k lack the upper registers of A and B.

use crate::Lanes;
use crate::float::{f16_from_f32, f32_from_bf16, f32_from_f16, f32_from_tf32};
use crate::product::add_product;

/// The type of the elements of A and B.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MmaElement {
    /// IEEE half.
    F16,
    /// bfloat16.
    Bf16,
    /// f32 with 10 bits of mantissa; one per register.
    Tf32,
    /// Signed bytes.
    S8,
    /// Unsigned bytes.
    U8,
}

/// The type of the elements of C and D.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Accumulator {
    /// One f32 per register.
    F32,
    /// Two halves per register.
    F16,
    /// One 32-bit integer per register.
    S32,
}

/// A form of `mma.sync.aligned.m16n8kK.row.col`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MmaKind {
    k: u8,
    element: MmaElement,
    accumulator: Accumulator,
}

impl MmaKind {
    /// Every form that this crate executes.
    pub const ALL: [MmaKind; 10] = [
        MmaKind::of(8, MmaElement::F16, Accumulator::F32),
        MmaKind::of(16, MmaElement::F16, Accumulator::F32),
        MmaKind::of(8, MmaElement::F16, Accumulator::F16),
        MmaKind::of(16, MmaElement::F16, Accumulator::F16),
        MmaKind::of(8, MmaElement::Bf16, Accumulator::F32),
        MmaKind::of(16, MmaElement::Bf16, Accumulator::F32),
        MmaKind::of(4, MmaElement::Tf32, Accumulator::F32),
        MmaKind::of(8, MmaElement::Tf32, Accumulator::F32),
        MmaKind::of(32, MmaElement::S8, Accumulator::S32),
        MmaKind::of(32, MmaElement::U8, Accumulator::S32),
    ];

    const fn of(k: u8, element: MmaElement, accumulator: Accumulator) -> MmaKind {
        MmaKind {
            k,
            element,
            accumulator,
        }
    }

    /// Returns the form with this k, or `None` when there is none.
    pub fn new(k: usize, element: MmaElement, accumulator: Accumulator) -> Option<MmaKind> {
        let kind = MmaKind::of(u8::try_from(k).ok()?, element, accumulator);
        MmaKind::ALL.contains(&kind).then_some(kind)
    }

    /// Returns the columns of A.
    pub const fn k(self) -> usize {
        self.k as usize
    }

    /// Returns the element type of A and B.
    pub const fn element(self) -> MmaElement {
        self.element
    }

    /// Returns the element type of C and D.
    pub const fn accumulator(self) -> Accumulator {
        self.accumulator
    }

    /// Returns the elements of A or B in one register.
    pub const fn packed(self) -> usize {
        match self.element {
            MmaElement::F16 | MmaElement::Bf16 => 2,
            MmaElement::Tf32 => 1,
            MmaElement::S8 | MmaElement::U8 => 4,
        }
    }

    /// Returns the elements of C or D in one register.
    pub const fn packed_c(self) -> usize {
        match self.accumulator {
            Accumulator::F32 | Accumulator::S32 => 1,
            Accumulator::F16 => 2,
        }
    }

    /// Returns the registers of A per lane.
    pub const fn a_registers(self) -> usize {
        16 * self.k() / 32 / self.packed()
    }

    /// Returns the registers of B per lane.
    pub const fn b_registers(self) -> usize {
        8 * self.k() / 32 / self.packed()
    }

    /// Returns the registers of C or D per lane.
    pub const fn c_registers(self) -> usize {
        4 / self.packed_c()
    }

    /// Returns row and k of element `part` of a register of A.
    pub const fn a_index(self, register: usize, part: usize, lane: usize) -> (usize, usize) {
        let row = lane / 4 + 8 * (register % 2);
        (row, self.k_of(register / 2, part, lane))
    }

    /// Returns k and column of element `part` of a register of B.
    pub const fn b_index(self, register: usize, part: usize, lane: usize) -> (usize, usize) {
        (self.k_of(register, part, lane), lane / 4)
    }

    const fn k_of(self, half: usize, part: usize, lane: usize) -> usize {
        // The fragment layouts differ only by the elements per register: four
        // lanes share a row and take `packed` neighbouring elements each, and
        // the upper registers lie one such group further along k (PTX ISA,
        // "Matrix Fragments for mma.m16n8k16" and its neighbours).
        self.packed() * (4 * half + lane % 4) + part
    }

    /// Returns row and column of element `part` of a register of C or D.
    pub const fn c_index(self, register: usize, part: usize, lane: usize) -> (usize, usize) {
        let element = register * self.packed_c() + part;
        (lane / 4 + 8 * (element / 2), 2 * (lane % 4) + element % 2)
    }
}

impl MmaElement {
    /// Returns the value of element `part` of a register; integers are exact.
    #[inline(always)]
    pub fn unpack(self, register: u32, part: usize) -> f32 {
        // The masks only bound the shift: one closure serves all types, and an
        // unused one must not overflow for parts 2 and 3 of bytes.
        let half = (register >> ((16 * part) & 31)) as u16;
        let byte = (register >> ((8 * part) & 31)) as u8;
        match self {
            MmaElement::F16 => f32_from_f16(half),
            MmaElement::Bf16 => f32_from_bf16(half),
            MmaElement::Tf32 => f32_from_tf32(register),
            MmaElement::S8 => f32::from(byte.cast_signed()),
            MmaElement::U8 => f32::from(byte),
        }
    }
}

/// Computes `d = a b + c`. The slices hold the registers that `kind` gives.
/// Sums are made in f32 in the order of k and, for f16, rounded once at the
/// end; integer sums wrap.
///
/// # Panics
/// Panics when a slice is shorter than `kind` needs.
pub fn mma_sync(kind: MmaKind, a: &[Lanes], b: &[Lanes], c: &[Lanes], d: &mut [Lanes]) {
    let form = MmaKind::ALL.iter().position(|form| *form == kind);
    FORMS[form.expect("kinds are made by MmaKind::new")](a, b, c, d);
}

type Form = fn(&[Lanes], &[Lanes], &[Lanes], &mut [Lanes]);

/// One function per kind, so that all its indices are constants.
const FORMS: [Form; MmaKind::ALL.len()] = [
    form::<0>, form::<1>, form::<2>, form::<3>, form::<4>, form::<5>, form::<6>, form::<7>,
    form::<8>, form::<9>,
];

fn form<const INDEX: usize>(a: &[Lanes], b: &[Lanes], c: &[Lanes], d: &mut [Lanes]) {
    let kind = const { MmaKind::ALL[INDEX] };
    let k = kind.k();
    let (mut rows, mut columns) = ([0.0; 16 * 32], [0.0; 32 * 8]);
    for_each(kind.a_registers(), kind.packed(), |r, part, lane| {
        let (row, at) = kind.a_index(r, part, lane);
        rows[row * k + at] = kind.element.unpack(a[r][lane], part);
    });
    for_each(kind.b_registers(), kind.packed(), |r, part, lane| {
        let (at, column) = kind.b_index(r, part, lane);
        columns[at * 8 + column] = kind.element.unpack(b[r][lane], part);
    });
    let (rows, columns) = (&rows[..16 * k], &columns[..8 * k]);
    match kind.accumulator {
        Accumulator::S32 => add_integers(kind, rows, columns, c, d),
        Accumulator::F32 => add_floats(kind, rows, columns, c, d),
        Accumulator::F16 => add_halves(kind, rows, columns, c, d),
    }
}

#[inline(always)]
fn for_each(registers: usize, parts: usize, mut visit: impl FnMut(usize, usize, usize)) {
    for register in 0..registers {
        for part in 0..parts {
            for lane in 0..32 {
                visit(register, part, lane);
            }
        }
    }
}

#[inline(always)]
fn add_floats(kind: MmaKind, a: &[f32], b: &[f32], c: &[Lanes], d: &mut [Lanes]) {
    let mut sums = [0.0; 16 * 8];
    for_each(4, 1, |r, part, lane| {
        let (row, column) = kind.c_index(r, part, lane);
        sums[row * 8 + column] = f32::from_bits(c[r][lane]);
    });
    add_product(a, b, &mut sums, 8, kind.k());
    for_each(4, 1, |r, part, lane| {
        let (row, column) = kind.c_index(r, part, lane);
        d[r][lane] = sums[row * 8 + column].to_bits();
    });
}

#[inline(always)]
fn add_halves(kind: MmaKind, a: &[f32], b: &[f32], c: &[Lanes], d: &mut [Lanes]) {
    let mut sums = [0.0; 16 * 8];
    for_each(2, 2, |r, part, lane| {
        let (row, column) = kind.c_index(r, part, lane);
        sums[row * 8 + column] = f32_from_f16((c[r][lane] >> (16 * part)) as u16);
    });
    add_product(a, b, &mut sums, 8, kind.k());
    for_each(2, 1, |r, _, lane| {
        let half = |part| {
            let (row, column) = kind.c_index(r, part, lane);
            // PTX leaves the order of the sum and the intermediate precision
            // open. One rounding at the end is the most exact reading.
            u32::from(f16_from_f32(sums[row * 8 + column]))
        };
        d[r][lane] = half(0) | half(1) << 16;
    });
}

/// Adds integer products: 32 products of bytes stay below 2^24, so f32 holds
/// them exactly.
fn add_integers(kind: MmaKind, a: &[f32], b: &[f32], c: &[Lanes], d: &mut [Lanes]) {
    let mut sums = [0.0; 16 * 8];
    add_product(a, b, &mut sums, 8, kind.k());
    for_each(4, 1, |r, part, lane| {
        let (row, column) = kind.c_index(r, part, lane);
        let product = (sums[row * 8 + column] as i32).cast_unsigned();
        d[r][lane] = c[r][lane].wrapping_add(product);
    });
}

#[cfg(test)]
#[path = "mma_tests.rs"]
mod tests;
