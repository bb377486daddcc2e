//! Which calls a kernel is for. A GPU has kernels of their own for few tokens: a grid
//! is empty where another kernel does the work.

use moesaic_kernel::{Entry, Size};

/// The most tokens of a call that is said to have few.
pub const FEW_TOKENS: u64 = 64;

/// The calls in which an entry is launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Calls {
    All,
    /// Of up to [`FEW_TOKENS`] tokens.
    Few,
    /// Of more.
    Many,
}

impl Calls {
    /// An entry, launched in these calls alone.
    pub fn only(self, mut entry: Entry) -> Entry {
        let blocks = std::mem::replace(&mut entry.launch.grid[0], Size::Const(0));
        let none = Size::Const(0);
        entry.launch.grid[0] = match self {
            Calls::All => blocks,
            Calls::Few => Size::up_to(FEW_TOKENS, blocks, none),
            Calls::Many => Size::up_to(FEW_TOKENS, none, blocks),
        };
        entry
    }
}
