//! Forward, or forward and backward.

/// The passes of one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    Forward,
    /// Forward and backward.
    Both,
}

impl std::fmt::Display for Pass {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Pass::Forward => "forward",
            Pass::Both => "both",
        })
    }
}
