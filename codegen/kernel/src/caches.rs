//! Sizes of caches, as far as they are known.

use serde::{Deserialize, Serialize};

/// The known cache sizes of a CPU's core.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct CpuCaches {
    /// Bytes of the first level's data cache.
    pub l1_bytes: Option<u64>,
    /// Bytes of the second level.
    pub l2_bytes: Option<u64>,
}

impl CpuCaches {
    /// Returns these sizes, and the other's where a size is unknown.
    #[must_use]
    pub fn or(self, other: CpuCaches) -> CpuCaches {
        CpuCaches {
            l1_bytes: self.l1_bytes.or(other.l1_bytes),
            l2_bytes: self.l2_bytes.or(other.l2_bytes),
        }
    }

    /// Returns the smaller of both sizes, level by level, as far as they are known.
    #[must_use]
    pub fn least(self, other: CpuCaches) -> CpuCaches {
        let least = |a: Option<u64>, b: Option<u64>| a.into_iter().chain(b).min();
        CpuCaches {
            l1_bytes: least(self.l1_bytes, other.l1_bytes),
            l2_bytes: least(self.l2_bytes, other.l2_bytes),
        }
    }
}
