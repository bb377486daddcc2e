//! The text of one `wgmma`.

use moesaic_hardware::wgmma::{Accumulator, Major, MmaElement, WgmmaKind};
use serde::Serialize;

/// Widths for which the prelude's functions are made: both kinds of text, with
/// and without a rest beyond eight registers a line.
pub const PRELUDE_COLUMNS: [usize; 6] = [8, 16, 24, 64, 128, 256];

/// The place of operand A.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Left {
    /// In shared memory.
    Shared(Major),
    /// In registers.
    Registers,
}

/// One instruction.
#[derive(Clone, Copy)]
pub struct Form {
    /// Shape and types.
    pub kind: WgmmaKind,
    /// Place of A.
    pub left: Left,
    /// Contiguous index of B.
    pub b_major: Major,
    /// Signs of A and B: true negates.
    pub negate: [bool; 2],
    /// Whether the product is added to D.
    pub accumulate: bool,
    /// Whether the prelude's function is used, which makes its own descriptors.
    pub prelude: bool,
}

/// The template's view of a form.
#[derive(Serialize)]
pub struct Text {
    symbol: String,
    d_registers: usize,
    sum_type: &'static str,
    to_sum: &'static str,
    from_sum: &'static str,
    constraint: &'static str,
    statement: String,
}

impl Form {
    /// Returns a form with K-major operands in shared memory, added to D.
    pub const fn plain(kind: WgmmaKind) -> Form {
        Form {
            kind,
            left: Left::Shared(Major::K),
            b_major: Major::K,
            negate: [false; 2],
            accumulate: true,
            prelude: false,
        }
    }

    /// Returns the kernel's name, which is unique to the form.
    pub fn symbol(&self) -> String {
        let left = match self.left {
            Left::Shared(Major::K) => "k",
            Left::Shared(Major::Mn) => "mn",
            Left::Registers => "regs",
        };
        let right = if self.b_major == Major::K { "k" } else { "mn" };
        let sign = |negative: bool| if negative { "_neg" } else { "" };
        let (element, accumulator) = names(self.kind);
        format!(
            "{}wgmma_n{}_{accumulator}_{element}_{left}{}_{right}{}{}",
            if self.prelude { "prelude_" } else { "" },
            self.kind.n(),
            sign(self.negate[0]),
            sign(self.negate[1]),
            if self.accumulate { "" } else { "_fresh" },
        )
    }
}

fn names(kind: WgmmaKind) -> (&'static str, &'static str) {
    let element = match kind.element() {
        MmaElement::F16 => "f16",
        MmaElement::Bf16 => "bf16",
        MmaElement::Tf32 => "tf32",
        MmaElement::S8 | MmaElement::U8 => "8-bit",
    };
    let accumulator = match kind.accumulator() {
        Accumulator::F16 => "f16",
        _ => "f32",
    };
    (element, accumulator)
}

/// Returns a form for the template.
pub fn text(form: &Form) -> Text {
    let float = form.kind.accumulator() == Accumulator::F32;
    Text {
        symbol: form.symbol(),
        d_registers: form.kind.d_registers(),
        sum_type: if float { "f32" } else { "u32" },
        to_sum: if float { "float_of" } else { "u32" },
        from_sum: if float { "bits_of" } else { "u32" },
        constraint: if float { "+f" } else { "+r" },
        statement: if form.prelude {
            call(form)
        } else {
            assembly(form)
        },
    }
}

/// Returns the call; B begins 16 KB behind A, as in `B_AT`.
fn call(form: &Form) -> String {
    let (element, _) = names(form.kind);
    format!(
        "wgmma_m64n{}k16_{element}(sums, operand_128b(room.tile), \
         operand_128b(room.tile + 4096), true);",
        form.kind.n()
    )
}

fn assembly(form: &Form) -> String {
    let kind = form.kind;
    let (element, accumulator) = names(kind);
    let count = kind.d_registers();
    let constraint = if accumulator == "f32" { "+f" } else { "+r" };
    let list = |first: usize, count: usize| {
        let all: Vec<String> = (first..first + count).map(|i| format!("%{i}")).collect();
        format!("{{{}}}", all.join(", "))
    };
    let sums: Vec<String> = (0..count)
        .map(|i| format!("\"{constraint}\"(sums[{i}])"))
        .collect();
    let registers = r#""r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])"#;
    let (left, inputs, next) = match form.left {
        Left::Registers => (list(count, 4), registers, count + 4),
        Left::Shared(_) => (format!("%{count}"), r#""l"(left + base)"#, count + 1),
    };
    let scale = |negative: bool| if negative { -1 } else { 1 };
    format!(
        "asm volatile(\"{{ .reg .pred add; setp.ne.b32 add, {}, 0; \
         wgmma.mma_async.sync.aligned.m64n{}k{}.{accumulator}.{element}.{element} \
         {}, {left}, %{next}, add, {}, {}{}; }}\" : {} : {inputs}, \"l\"(right + base));",
        u32::from(form.accumulate),
        kind.n(),
        kind.k(),
        list(0, count),
        scale(form.negate[0]),
        scale(form.negate[1]),
        transposes(form),
        sums.join(", "),
    )
}

/// Returns the immediates that mark MN-major operands; tf32 has none.
fn transposes(form: &Form) -> String {
    let bit = |major| u32::from(major == Major::Mn);
    let right = bit(form.b_major);
    match (form.kind.element(), form.left) {
        (MmaElement::Tf32, _) => String::new(),
        (_, Left::Registers) => format!(", {right}"),
        (_, Left::Shared(major)) => format!(", {}, {right}", bit(major)),
    }
}
