//! Counts of memory requests, sectors, bank passes and multiply-adds.

use super::warp::Doubles;

/// Bytes that global memory moves at a time.
const SECTOR: u64 = 32;

/// Sums over the warps of a machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    pub global_load_requests: u64,
    pub global_load_sectors: u64,
    pub global_load_bytes: u64,
    pub global_store_requests: u64,
    pub global_store_sectors: u64,
    pub global_store_bytes: u64,
    /// Global accesses of 1, 2, 4, 8 and 16 bytes per thread, in requests.
    pub global_widths: [u64; 5],
    pub shared_requests: u64,
    pub shared_wavefronts: u64,
    pub shared_ideal: u64,
    pub async_load_bytes: u64,
    pub async_store_bytes: u64,
    pub multiply_adds: u64,
}

impl Tally {
    /// Counts one global request of `bytes` per active lane.
    pub fn global(&mut self, store: bool, addresses: &Doubles, mask: u32, bytes: u64) {
        let moved = bytes * u64::from(mask.count_ones());
        let sectors = sectors(addresses, mask, bytes);
        let width = (bytes.ilog2() as usize).min(4);
        self.global_widths[width] += 1;
        if store {
            self.global_store_requests += 1;
            self.global_store_sectors += sectors;
            self.global_store_bytes += moved;
        } else {
            self.global_load_requests += 1;
            self.global_load_sectors += sectors;
            self.global_load_bytes += moved;
        }
    }

    /// Counts one shared request of `bytes` per active lane.
    pub fn shared(&mut self, addresses: &Doubles, mask: u32, bytes: u64) {
        let (wavefronts, ideal) = wavefronts(addresses, mask, bytes);
        self.shared_requests += 1;
        self.shared_wavefronts += wavefronts;
        self.shared_ideal += ideal;
    }

    /// Adds the sums of another machine.
    pub fn add(&mut self, other: &Tally) {
        self.global_load_requests += other.global_load_requests;
        self.global_load_sectors += other.global_load_sectors;
        self.global_load_bytes += other.global_load_bytes;
        self.global_store_requests += other.global_store_requests;
        self.global_store_sectors += other.global_store_sectors;
        self.global_store_bytes += other.global_store_bytes;
        for (own, other) in self.global_widths.iter_mut().zip(other.global_widths) {
            *own += other;
        }
        self.shared_requests += other.shared_requests;
        self.shared_wavefronts += other.shared_wavefronts;
        self.shared_ideal += other.shared_ideal;
        self.async_load_bytes += other.async_load_bytes;
        self.async_store_bytes += other.async_store_bytes;
        self.multiply_adds += other.multiply_adds;
    }
}

/// Returns the number of different sectors that the active lanes touch.
fn sectors(addresses: &Doubles, mask: u32, bytes: u64) -> u64 {
    let (mut list, mut count, mut sorted) = ([0u64; 64], 0, true);
    let mut last = None;
    for lane in (0..32).filter(|lane| mask >> lane & 1 == 1) {
        let first = addresses[lane] / SECTOR;
        let end = (addresses[lane] + bytes - 1) / SECTOR;
        for sector in first..=end {
            if last == Some(sector) {
                continue;
            }
            sorted &= last.is_none_or(|last| last < sector);
            list[count.min(63)] = sector;
            count += 1;
            last = Some(sector);
        }
    }
    // Ascending sectors, the common case, were counted once each. The list
    // holds 64; a request with more keeps the plain count.
    if sorted || count > 64 {
        return count as u64;
    }
    let list = &mut list[..count];
    list.sort_unstable();
    1 + list.windows(2).filter(|pair| pair[0] != pair[1]).count() as u64
}

/// Returns the passes over the 32 banks that an access takes, and the fewest
/// possible. Accesses of 8 and 16 bytes go in halves and quarters of the warp.
pub fn wavefronts(addresses: &Doubles, mask: u32, bytes: u64) -> (u64, u64) {
    let per_pass = match bytes {
        16.. => 8,
        8.. => 16,
        _ => 32,
    };
    let (mut total, mut ideal) = (0, 0);
    for first in (0..32).step_by(per_pass) {
        let lanes = (first..first + per_pass).filter(|lane| mask >> lane & 1 == 1);
        let (mut seen, mut depth, mut most) = ([[u64::MAX; 4]; 32], [0u8; 32], 0u64);
        let mut any = false;
        for lane in lanes {
            any = true;
            for word in addresses[lane] / 4..(addresses[lane] + bytes).div_ceil(4) {
                let bank = (word % 32) as usize;
                let known = depth[bank].min(4) as usize;
                // Two lanes that read the same word share a pass by broadcast,
                // so equal words of a bank count once.
                if seen[bank][..known].contains(&word) {
                    continue;
                }
                if known < 4 {
                    seen[bank][known] = word;
                }
                depth[bank] += 1;
                most = most.max(u64::from(depth[bank]));
            }
        }
        total += most;
        ideal += u64::from(any);
    }
    (total, ideal)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn strided(stride: u64) -> Doubles {
        std::array::from_fn(|lane| 4096 + lane as u64 * stride)
    }

    #[test]
    fn sectors_count_different_ones() {
        assert_eq!(sectors(&strided(4), u32::MAX, 4), 4);
        assert_eq!(sectors(&strided(16), u32::MAX, 16), 16);
        assert_eq!(sectors(&strided(128), u32::MAX, 4), 32);
        assert_eq!(sectors(&strided(0), u32::MAX, 4), 1);
        let back: Doubles = std::array::from_fn(|lane| 4096 + (31 - lane as u64) * 4);
        assert_eq!(sectors(&back, u32::MAX, 4), 4);
        assert_eq!(sectors(&strided(128), 0b101, 4), 2);
    }

    #[test]
    fn banks_conflict_when_words_differ() {
        assert_eq!(wavefronts(&strided(4), u32::MAX, 4), (1, 1));
        assert_eq!(wavefronts(&strided(0), u32::MAX, 4), (1, 1));
        assert_eq!(wavefronts(&strided(8), u32::MAX, 4), (2, 1));
        assert_eq!(wavefronts(&strided(12), u32::MAX, 4), (1, 1));
        assert_eq!(wavefronts(&strided(16), u32::MAX, 16), (4, 4));
        assert_eq!(wavefronts(&strided(128), u32::MAX, 16), (32, 4));
        assert_eq!(wavefronts(&strided(8), u32::MAX, 8), (2, 2));
    }
}
