//! Cache sizes of a CPU core, rounded down to the few classes that plans distinguish.

use moesaic_kernel::CpuCaches;
use serde::{Deserialize, Serialize};

/// The cache sizes that a CPU plan depends on. There are few classes, so that similar CPUs have the
/// same kernels. The default is assumed where nothing is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct CacheClass {
    l1_bytes: u64,
    l2_bytes: u64,
}

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

impl Default for CacheClass {
    fn default() -> CacheClass {
        // The caches of server CPUs with AMX, which the constants of `tiles/cpu.rs` assume, so an
        // unknown CPU gets them unchanged.
        CacheClass {
            l1_bytes: 48 * KIB,
            l2_bytes: 2 * MIB,
        }
    }
}

impl CacheClass {
    /// First-level data caches, ascending.
    pub const L1_BYTES: [u64; 2] = [32 * KIB, 48 * KIB];

    /// Second-level caches, ascending.
    pub const L2_BYTES: [u64; 4] = [256 * KIB, 512 * KIB, MIB, 2 * MIB];

    /// Returns the largest class that these caches reach, or the smallest class.
    pub fn of(caches: CpuCaches) -> CacheClass {
        let assumed = CacheClass::default();
        CacheClass {
            l1_bytes: at_most(&CacheClass::L1_BYTES, caches.l1_bytes).unwrap_or(assumed.l1_bytes),
            l2_bytes: at_most(&CacheClass::L2_BYTES, caches.l2_bytes).unwrap_or(assumed.l2_bytes),
        }
    }

    /// Returns every class.
    pub fn all() -> impl Iterator<Item = CacheClass> {
        let of = |l1_bytes| {
            let each = CacheClass::L2_BYTES.into_iter();
            each.map(move |l2_bytes| CacheClass { l1_bytes, l2_bytes })
        };
        CacheClass::L1_BYTES.into_iter().flat_map(of)
    }

    /// Returns the bytes of the first-level data cache, rounded down to the class.
    pub fn l1_bytes(self) -> usize {
        self.l1_bytes as usize
    }

    /// Returns the bytes of the second level, or somewhat fewer.
    pub fn l2_bytes(self) -> usize {
        self.l2_bytes as usize
    }

    pub(crate) fn is_assumed(&self) -> bool {
        *self == CacheClass::default()
    }
}

/// Returns the largest of ascending sizes that is at most `size`, or the first.
fn at_most(sizes: &[u64], size: Option<u64>) -> Option<u64> {
    let size = size?;
    // Rounded down, because tiles for a larger cache than there is would fall out of it between two
    // uses; tiles for a smaller one only leave some of it unused.
    let fits = sizes.iter().rev().find(|class| **class <= size);
    fits.or(sizes.first()).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn class(l1: Option<u64>, l2: Option<u64>) -> (u64, u64) {
        let kib = |size: Option<u64>| size.map(|size| size * KIB);
        let class = CacheClass::of(CpuCaches {
            l1_bytes: kib(l1),
            l2_bytes: kib(l2),
        });
        (class.l1_bytes / KIB, class.l2_bytes / KIB)
    }

    #[test]
    fn sizes_are_rounded_down_to_a_class() {
        assert_eq!(class(None, None), (48, 2048));
        assert_eq!(class(Some(48), Some(2048)), (48, 2048));
        assert_eq!(class(Some(32), Some(1024)), (32, 1024));
        assert_eq!(class(Some(128), Some(12288)), (48, 2048));
        assert_eq!(class(Some(47), Some(1280)), (32, 1024));
        assert_eq!(class(Some(64), Some(1023)), (48, 512));
        assert_eq!(class(None, Some(256)), (48, 256));
        assert_eq!(class(Some(16), Some(128)), (32, 256));
        assert_eq!(class(Some(0), None), (32, 2048));
    }

    #[test]
    fn a_class_is_its_own() {
        assert_eq!(CacheClass::all().count(), 8);
        for class in CacheClass::all() {
            let caches = CpuCaches {
                l1_bytes: Some(class.l1_bytes),
                l2_bytes: Some(class.l2_bytes),
            };
            assert_eq!(CacheClass::of(caches), class);
        }
    }
}
