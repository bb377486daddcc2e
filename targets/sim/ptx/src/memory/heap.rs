//! The address space of a device.

use super::Allocation;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The first device address.
const START: u64 = 0x10_0000_0000;
/// Least number of unowned bytes behind an allocation.
const GAP: u64 = 4096;
/// Alignment of allocations.
const ALIGN: u64 = 512;

/// The live allocations. Addresses are never used twice.
#[derive(Default)]
pub struct Heap {
    used: u64,
    live: BTreeMap<u64, Arc<Allocation>>,
    freed: BTreeMap<u64, usize>,
}

impl Heap {
    /// Returns a new allocation.
    pub fn allocate(&mut self, bytes: usize) -> Arc<Allocation> {
        let base = START + self.used;
        // An address is never handed out again, so a pointer to freed memory
        // stays recognisable for as long as the device lives.
        self.used += (bytes as u64 + GAP).next_multiple_of(ALIGN);
        let allocation = Arc::new(Allocation::new(base, bytes));
        self.live.insert(base, Arc::clone(&allocation));
        allocation
    }

    /// Frees an allocation.
    pub fn free(&mut self, base: u64) {
        if let Some(allocation) = self.live.remove(&base) {
            self.freed.insert(base, allocation.bytes);
        }
    }

    /// Returns the live allocation that holds this address.
    pub fn at(&self, base: u64) -> Option<Arc<Allocation>> {
        let (_, allocation) = self.live.range(..=base).next_back()?;
        allocation.holds(base, 0).then(|| Arc::clone(allocation))
    }

    /// Returns the allocations that a launch can reach.
    pub fn regions(&self) -> Regions {
        Regions {
            list: self.live.values().cloned().collect(),
            freed: self.freed.clone(),
        }
    }
}

/// The allocations of a launch, by address.
#[derive(Clone, Default)]
pub struct Regions {
    pub list: Vec<Arc<Allocation>>,
    freed: BTreeMap<u64, usize>,
}

impl Regions {
    /// Returns the region that holds `count` bytes from `address` on; tries
    /// `hint` first.
    #[inline(always)]
    pub fn find(&self, address: u64, count: usize, hint: usize) -> Option<usize> {
        let hinted = self.list.get(hint);
        if hinted.is_some_and(|region| region.holds(address, count)) {
            return Some(hint);
        }
        let at = self.list.partition_point(|region| region.base <= address);
        let at = at.checked_sub(1)?;
        self.list[at].holds(address, count).then_some(at)
    }

    /// Describes the place of an address outside all regions.
    pub fn describe(&self, address: u64) -> String {
        let freed = self.freed.range(..=address).next_back();
        if let Some((base, bytes)) = freed
            && address < base + *bytes as u64
        {
            let inside = address - base;
            return format!("{inside} bytes into {bytes} bytes that were freed");
        }
        let after = self.list.partition_point(|region| region.base <= address);
        let below = after.checked_sub(1).map(|at| &self.list[at]);
        let distance = |region: &Arc<Allocation>| address - (region.base + region.bytes as u64);
        let above = self.list.get(after);
        let closer_above = match (below, above) {
            (Some(below), Some(above)) if address >= below.base + below.bytes as u64 => {
                above.base - address < distance(below)
            }
            (None, _) => true,
            _ => false,
        };
        match (below, above, closer_above) {
            (_, Some(above), true) => format!(
                "{} bytes before an allocation of {} bytes",
                above.base - address,
                above.bytes
            ),
            (Some(below), _, _) if address < below.base + below.bytes as u64 => format!(
                "it starts {} bytes into an allocation of {} bytes and reaches past its end",
                address - below.base,
                below.bytes
            ),
            (Some(below), _, _) => format!(
                "{} bytes past the end of an allocation of {} bytes",
                distance(below),
                below.bytes
            ),
            _ => "no memory is allocated".to_string(),
        }
    }
}
