//! Matrix products of a wave, with the layouts of `moesaic-hardware`.

use moesaic_hardware::mfma::{MfmaElement, MfmaKind, execute};
use moesaic_kernel::{MatrixUnit, RocmArch};

/// The operands of one lane, on its stack.
#[derive(Clone, Copy)]
pub(crate) struct Operands {
    pub(crate) a: *const u32,
    pub(crate) b: *const u32,
    pub(crate) sums: *mut f32,
}

/// The shape that the text asks for: `Shape` of `prelude/sim/machine.hpp`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    edge: i32,
    k: i32,
    element: i32,
}

impl std::fmt::Display for Shape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Shape { edge, k, element } = self;
        let element = match element {
            0 => "f16",
            1 => "bf16",
            _ => "f32",
        };
        write!(f, "{edge}x{edge}x{k} of {element}")
    }
}

/// A matrix instruction.
#[derive(Clone, Copy)]
pub(crate) struct Product {
    kind: MfmaKind,
    /// Subnormal halves of A and B count as zero.
    flushes: bool,
}

impl Shape {
    /// Returns the instruction, if the architecture has it.
    pub(crate) fn on(self, arch: RocmArch) -> Option<Product> {
        let element = match self.element {
            0 => MfmaElement::F16,
            1 => MfmaElement::Bf16,
            _ => MfmaElement::F32,
        };
        let (edge, k) = (
            usize::try_from(self.edge).ok()?,
            usize::try_from(self.k).ok()?,
        );
        match arch.caps().matrix {
            MatrixUnit::Mfma(mfma) => {
                let wide = edge * k > 256 && !mfma.wide;
                let old = element == MfmaElement::Bf16 && !mfma.bf16;
                let kind = MfmaKind::mfma(edge, k, element).filter(|_| !wide && !old)?;
                let flushes = mfma.flushes && element != MfmaElement::F32;
                Some(Product { kind, flushes })
            }
            MatrixUnit::Wmma if (edge, k) == (16, 16) => Some(Product {
                kind: MfmaKind::wmma(element)?,
                flushes: false,
            }),
            _ => None,
        }
    }
}

/// Largest number of registers of an operand; `SUMS` is that of the sums.
const OPERAND: usize = 8;
const SUMS: usize = 16;

impl Product {
    /// Returns the multiply-adds of one instruction.
    pub(crate) fn multiply_adds(self) -> u64 {
        (self.kind.edge() * self.kind.edge() * self.kind.k()) as u64
    }

    /// Computes `sums += a b` for all lanes. Returns false if the two halves of
    /// a WMMA hold different operands, which must be the same.
    ///
    /// # Safety
    /// Each of `lanes` is the address of an [`Operands`] that leads to the
    /// registers of the instruction.
    pub(crate) unsafe fn run(self, lanes: &[u64]) -> bool {
        match lanes.len() {
            // SAFETY: the caller's.
            64 => unsafe { self.of_wave::<64>(lanes) },
            // SAFETY: the caller's.
            _ => unsafe { self.of_wave::<32>(lanes) },
        }
    }

    /// # Safety
    /// As [`Product::run`], with `L` lanes.
    unsafe fn of_wave<const L: usize>(self, lanes: &[u64]) -> bool {
        let (inputs, outputs) = (self.kind.a_registers(), self.kind.d_registers());
        let (mut a, mut b) = ([[0; L]; OPERAND], [[0; L]; OPERAND]);
        let (mut c, mut d) = ([[0; L]; SUMS], [[0; L]; SUMS]);
        for (lane, &brought) in lanes.iter().enumerate() {
            // SAFETY: the caller's: the operands and their registers are there.
            unsafe {
                let operands = *(brought as *const Operands);
                (0..inputs).for_each(|r| a[r][lane] = operands.a.add(r).read());
                (0..inputs).for_each(|r| b[r][lane] = operands.b.add(r).read());
                (0..outputs).for_each(|r| c[r][lane] = operands.sums.add(r).read().to_bits());
            }
        }
        let halves = |register: &[u32; L]| register[..16] == register[16..32];
        // RDNA3 ISA guide, "WMMA": lanes 0-15 and 16-31 must hold the same A
        // and B. Hardware does not check, and results for other contents are
        // not defined.
        if L == 32 && !a[..inputs].iter().chain(&b[..inputs]).all(halves) {
            return false;
        }
        if self.flushes {
            let exponent = match self.kind.element() {
                MfmaElement::F16 => 0x7c00,
                _ => 0x7f80,
            };
            let registers = a[..inputs].iter_mut().chain(&mut b[..inputs]);
            registers
                .flatten()
                .for_each(|pair| *pair = flushed(*pair, exponent));
        }
        execute::<L>(
            self.kind,
            &a[..inputs],
            &b[..inputs],
            &c[..outputs],
            &mut d[..outputs],
        );
        for (lane, &brought) in lanes.iter().enumerate() {
            // SAFETY: as above.
            unsafe {
                let sums = (*(brought as *const Operands)).sums;
                (0..outputs).for_each(|r| sums.add(r).write(f32::from_bits(d[r][lane])));
            }
        }
        true
    }
}

/// Replaces subnormal halves of a pair by zeros of the same signs; `exponent`
/// masks a half's exponent bits.
fn flushed(pair: u32, exponent: u32) -> u32 {
    let half = |half: u32| {
        if half & exponent == 0 {
            half & 0x8000
        } else {
            half
        }
    };
    half(pair & 0xffff) | half(pair >> 16) << 16
}
