//! Instruction sets that add to another: most of their texts are the same, and what gcc makes
//! of those is looked at once.

use moesaic_kernel::{CpuIsa, Target};

/// The features of an instruction set that the text of a narrower one lacks.
pub fn own<T>(isa: CpuIsa, of: impl Fn(CpuIsa) -> Vec<T>, text: impl Fn(&T) -> &str) -> Vec<T> {
    let mut own = of(isa);
    if let Some(less) = narrower(isa) {
        let known = of(less);
        own.retain(|it| {
            let renamed = renamed(text(it), isa, less);
            !known.iter().any(|known| text(known) == renamed)
        });
    }
    own
}

/// The set that this one adds products of bf16 or tiles to.
fn narrower(isa: CpuIsa) -> Option<CpuIsa> {
    match isa {
        CpuIsa::Avx512Bf16 => Some(CpuIsa::Avx512),
        CpuIsa::Amx => Some(CpuIsa::Avx512Bf16),
        CpuIsa::NeonBf16 => Some(CpuIsa::Neon),
        _ => None,
    }
}

/// A text of one set as the other would have it, where it names nothing but the set.
fn renamed(text: &str, from: CpuIsa, to: CpuIsa) -> String {
    let [from, to] = [from, to].map(|isa| Target::Cpu(isa).to_string());
    text.replace(
        from.trim_start_matches("cpu:"),
        to.trim_start_matches("cpu:"),
    )
}
