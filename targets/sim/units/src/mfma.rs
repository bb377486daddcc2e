//! The matrix instructions of AMD: MFMA of CDNA and WMMA of RDNA 3.

/// The type of the elements of A and B.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Element {
    /// IEEE half.
    F16,
    /// bfloat16.
    Bf16,
    /// f32.
    F32,
}

/// An instruction with f32 results.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MfmaKind {
    /// Rows of A and columns of B, 16 or 32.
    edge: u8,
    k: u8,
    element: Element,
    lanes: u8,
}

impl MfmaKind {
    /// Every instruction there is.
    pub const ALL: [MfmaKind; 12] = [
        MfmaKind::of(32, 8, Element::F16, 64),
        MfmaKind::of(32, 8, Element::Bf16, 64),
        MfmaKind::of(16, 16, Element::F16, 64),
        MfmaKind::of(16, 16, Element::Bf16, 64),
        MfmaKind::of(32, 16, Element::F16, 64),
        MfmaKind::of(32, 16, Element::Bf16, 64),
        MfmaKind::of(16, 32, Element::F16, 64),
        MfmaKind::of(16, 32, Element::Bf16, 64),
        MfmaKind::of(32, 2, Element::F32, 64),
        MfmaKind::of(16, 4, Element::F32, 64),
        MfmaKind::of(16, 16, Element::F16, 32),
        MfmaKind::of(16, 16, Element::Bf16, 32),
    ];

    const fn of(edge: u8, k: u8, element: Element, lanes: u8) -> MfmaKind {
        MfmaKind {
            edge,
            k,
            element,
            lanes,
        }
    }

    /// `v_mfma_f32_EDGExEDGExK` of wave64; `None` when there is none.
    pub fn mfma(edge: usize, k: usize, element: Element) -> Option<MfmaKind> {
        let _ = (edge, k, element);
        todo!()
    }

    /// `v_wmma_f32_16x16x16` of wave32; `None` for f32.
    pub fn wmma(element: Element) -> Option<MfmaKind> {
        let _ = element;
        todo!()
    }

    /// Rows of A and columns of B.
    pub const fn edge(self) -> usize {
        self.edge as usize
    }

    /// Columns of A.
    pub const fn k(self) -> usize {
        self.k as usize
    }

    /// Element type of A and B.
    pub const fn element(self) -> Element {
        self.element
    }

    /// Lanes of a wave: 64, 32 for WMMA.
    pub const fn lanes(self) -> usize {
        self.lanes as usize
    }

    /// Registers of A, or of B, per lane.
    pub const fn a_registers(self) -> usize {
        todo!()
    }

    /// Registers of C and D per lane.
    pub const fn d_registers(self) -> usize {
        todo!()
    }

    /// Row and k of element `part` of a register of A; for B column and k.
    pub const fn a_index(self, register: usize, part: usize, lane: usize) -> (usize, usize) {
        let _ = (register, part, lane);
        todo!()
    }

    /// Row and column of a register of C or D.
    pub const fn d_index(self, register: usize, lane: usize) -> (usize, usize) {
        let _ = (register, lane);
        todo!()
    }
}

/// `d = a b + c` for a wave of `L` lanes.
///
/// # Panics
/// When `L` is not the kind's, or a slice is shorter than the kind says.
pub fn execute<const L: usize>(
    kind: MfmaKind,
    a: &[[u32; L]],
    b: &[[u32; L]],
    c: &[[u32; L]],
    d: &mut [[u32; L]],
) {
    let _ = (kind, a, b, c, d);
    todo!()
}
