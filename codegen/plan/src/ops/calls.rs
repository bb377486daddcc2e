//! The calls that launch a kernel. On GPUs small calls have kernels of their own (decode kernels).
//! The plan has both kernels, and in each call the grid of one is empty, so the host launches the
//! same list for any number of tokens.

use moesaic_kernel::{Entry, Size};

/// The largest number of tokens of a call that runs the decode kernels.
// The scan of `route` takes as many tokens for one tile, so one block places a whole decode call.
pub const DECODE_TOKENS: u64 = 64;

/// The calls in which an entry is launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Calls {
    /// Every call.
    All,
    /// Calls of at most [`DECODE_TOKENS`] tokens.
    Decode,
    /// Calls of more tokens.
    Prefill,
}

impl Calls {
    /// Returns `entry` with a grid that is empty in all other calls.
    pub fn only(self, mut entry: Entry) -> Entry {
        let blocks = std::mem::replace(&mut entry.launch.grid[0], Size::Const(0));
        let none = Size::Const(0);
        entry.launch.grid[0] = match self {
            Calls::All => blocks,
            Calls::Decode => Size::up_to(DECODE_TOKENS, blocks, none),
            Calls::Prefill => Size::up_to(DECODE_TOKENS, none, blocks),
        };
        entry
    }
}
