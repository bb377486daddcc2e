//! `mma.sync`: the product of a 16 x k and a k x 8 matrix by one warp.

use crate::Lanes;

/// The type of the elements of A and B.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Element {
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
    element: Element,
    accumulator: Accumulator,
}

impl MmaKind {
    /// Every form there is.
    pub const ALL: [MmaKind; 10] = [
        MmaKind::of(8, Element::F16, Accumulator::F32),
        MmaKind::of(16, Element::F16, Accumulator::F32),
        MmaKind::of(8, Element::F16, Accumulator::F16),
        MmaKind::of(16, Element::F16, Accumulator::F16),
        MmaKind::of(8, Element::Bf16, Accumulator::F32),
        MmaKind::of(16, Element::Bf16, Accumulator::F32),
        MmaKind::of(4, Element::Tf32, Accumulator::F32),
        MmaKind::of(8, Element::Tf32, Accumulator::F32),
        MmaKind::of(32, Element::S8, Accumulator::S32),
        MmaKind::of(32, Element::U8, Accumulator::S32),
    ];

    const fn of(k: u8, element: Element, accumulator: Accumulator) -> MmaKind {
        MmaKind {
            k,
            element,
            accumulator,
        }
    }

    /// The form with this k, or `None` when there is none.
    pub fn new(k: usize, element: Element, accumulator: Accumulator) -> Option<MmaKind> {
        let kind = MmaKind::of(u8::try_from(k).ok()?, element, accumulator);
        MmaKind::ALL.contains(&kind).then_some(kind)
    }

    /// Columns of A.
    pub const fn k(self) -> usize {
        self.k as usize
    }

    /// Element type of A and B.
    pub const fn element(self) -> Element {
        self.element
    }

    /// Element type of C and D.
    pub const fn accumulator(self) -> Accumulator {
        self.accumulator
    }

    /// Elements of A or B in one register.
    pub const fn packed(self) -> usize {
        match self.element {
            Element::F16 | Element::Bf16 => 2,
            Element::Tf32 => 1,
            Element::S8 | Element::U8 => 4,
        }
    }

    /// Elements of C or D in one register.
    pub const fn packed_c(self) -> usize {
        match self.accumulator {
            Accumulator::F32 | Accumulator::S32 => 1,
            Accumulator::F16 => 2,
        }
    }

    /// Registers of A per lane.
    pub const fn a_registers(self) -> usize {
        16 * self.k() / 32 / self.packed()
    }

    /// Registers of B per lane.
    pub const fn b_registers(self) -> usize {
        8 * self.k() / 32 / self.packed()
    }

    /// Registers of C or D per lane.
    pub const fn c_registers(self) -> usize {
        4 / self.packed_c()
    }

    /// Row and k of element `part` of a register of A.
    pub const fn a_index(self, register: usize, part: usize, lane: usize) -> (usize, usize) {
        let _ = (register, part, lane);
        todo!()
    }

    /// k and column of element `part` of a register of B.
    pub const fn b_index(self, register: usize, part: usize, lane: usize) -> (usize, usize) {
        let _ = (register, part, lane);
        todo!()
    }

    /// Row and column of element `part` of a register of C or D.
    pub const fn c_index(self, register: usize, part: usize, lane: usize) -> (usize, usize) {
        let _ = (register, part, lane);
        todo!()
    }
}

/// `d = a b + c`. The slices hold as many registers as `kind` says. Sums are
/// made in f32 in the order of k and, for f16, rounded once at the end.
///
/// # Panics
/// When a slice is shorter than `kind` says.
pub fn mma_sync(kind: MmaKind, a: &[Lanes], b: &[Lanes], c: &[Lanes], d: &mut [Lanes]) {
    let _ = (kind, a, b, c, d);
    todo!()
}
