//! The parameters of entries. The emitted text, the launch and the generated Rust wrappers all read
//! this one list, so they cannot drift.
//!
//! `rows` counts (token, slot) assignments that got a place: at most `tokens·top_k`. Offsets are
//! 64-bit; ids of tokens, slots and rows are 32-bit, because a call takes fewer than 2³¹
//! assignments.
//!
//! Gradients of weights are f32, those of experts' matrices also of 16 bits. They take the scalar
//! `accumulate`: 0 overwrites them, 1 adds to them in place.

use moesaic_kernel::DType::{self, F32};
use moesaic_kernel::{Access, Entry, Launch, Param, Size};

pub(crate) fn entry(
    symbol: &str,
    summary: &str,
    params: Vec<Param>,
    grid: [Size; 2],
    threads: u32,
) -> Entry {
    Entry {
        symbol: symbol.to_string(),
        summary: summary.to_string(),
        // Last in every entry: entries that become one (`together` of the router) drop it from each
        // and add it once.
        params: params.into_iter().chain([Param::i64("tokens")]).collect(),
        launch: Launch {
            grid,
            threads,
            shared_bytes: 0,
            cluster: 1,
            dependent: false,
        },
    }
}

pub(crate) fn one() -> Size {
    Size::Const(1)
}

pub(crate) fn tokens_by(tile: usize) -> Size {
    Size::Tokens.ceil_div(tile as u64)
}

pub(crate) fn slots_by(top_k: usize, tile: u64) -> Size {
    (Size::Tokens * top_k as u64).ceil_div(tile)
}

/// Returns `param` when `wanted`.
pub(crate) fn when(wanted: bool, param: Param) -> Option<Param> {
    wanted.then_some(param)
}

pub(crate) fn some(params: impl IntoIterator<Item = Option<Param>>) -> Vec<Param> {
    params.into_iter().flatten().collect()
}

pub(crate) fn per_slot(top_k: usize) -> String {
    format!("[tokens, {top_k}]")
}

pub(crate) fn edges(experts: usize) -> String {
    format!("[{}]", experts + 1)
}

pub(crate) fn gradient(matrix: &str, suffix: &str, shape: &str) -> Param {
    gradient_of(&format!("{matrix}{suffix}"), F32, shape)
}

/// Returns the gradient of a weight in this dtype.
pub(crate) fn gradient_of(weight: &str, dtype: DType, shape: &str) -> Param {
    Param::tensor(&format!("grad_{weight}"), dtype, Access::ReadWrite, shape)
}
