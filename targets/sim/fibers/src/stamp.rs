//! Stamps: the thread that touched memory last, and the test whether another
//! access comes after it.
//!
//! Two accesses of a block are in order if a block barrier lies between them,
//! if they are of one wave with a wave barrier between, or if they are of one
//! thread. Two blocks of a launch are never in order. A conflict is a pair out
//! of order, of which at least one access writes and not both are atomic.

/// An access, packed: launch 12 bits, block 20, thread or group 11, block
/// barriers 11, wave barriers 10. Zero is "never".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Stamp(u64);

const MANY: u64 = 2047;
const MANY_ATOMIC: u64 = 2046;
const ATOMIC_WAVE: u64 = 1024 + 64;
const SEVERAL_OF_WAVE: u64 = 1024;
const ALL_BLOCKS: u64 = (1 << 20) - 1;

/// Largest number of block barriers; then the history starts anew.
pub(crate) const MOST_BLOCK_BARRIERS: u32 = 2046;
/// Largest number of wave barriers, likewise.
pub(crate) const MOST_WAVE_BARRIERS: u32 = 1022;
/// Largest number of launches.
pub(crate) const MOST_LAUNCHES: u32 = 4094;

/// The author of an access, as far as a stamp tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Who {
    Thread(u32),
    Wave(u32),
    Many,
}

impl Stamp {
    /// A write before all others that are distinguished; no launch has it.
    pub(crate) const SETTLED: Stamp = Stamp(1);

    /// Returns the stamp of a thread's access. Launches and barriers are
    /// counted from 1.
    pub(crate) fn new(launch: u32, block: u32, thread: u32, barriers: u32, wave: u32) -> Stamp {
        let block = u64::from(block) % ALL_BLOCKS;
        Stamp(
            u64::from(launch) << 52
                | block << 32
                | u64::from(thread) << 21
                | u64::from(barriers) << 10
                | u64::from(wave),
        )
    }

    pub(crate) const fn from_bits(bits: u64) -> Stamp {
        Stamp(bits)
    }

    pub(crate) const fn bits(self) -> u64 {
        self.0
    }

    const fn launch(self) -> u64 {
        self.0 >> 52
    }

    const fn block(self) -> u64 {
        self.0 >> 32 & 0xf_ffff
    }

    const fn code(self) -> u64 {
        self.0 >> 21 & 0x7ff
    }

    const fn wave_barriers(self) -> u64 {
        self.0 & 0x3ff
    }

    const fn with_code(self, code: u64) -> Stamp {
        Stamp(self.0 & !(0x7ff << 21) | code << 21)
    }

    /// Returns the block, or `None` for several blocks.
    pub(crate) fn of_block(self) -> Option<u32> {
        (self.block() != ALL_BLOCKS).then_some(self.block() as u32)
    }

    pub(crate) fn who(self) -> Who {
        match self.code() {
            code @ 0..SEVERAL_OF_WAVE => Who::Thread(code as u32),
            code @ SEVERAL_OF_WAVE..ATOMIC_WAVE => Who::Wave((code - SEVERAL_OF_WAVE) as u32),
            code @ ATOMIC_WAVE..MANY_ATOMIC => Who::Wave((code - ATOMIC_WAVE) as u32),
            _ => Who::Many,
        }
    }

    const fn is_atomic(self) -> bool {
        self.code() >= ATOMIC_WAVE && self.code() <= MANY_ATOMIC
    }

    /// Returns the wave of an access if it is of one wave; `shift` is the
    /// binary logarithm of the wave's lanes.
    #[inline]
    const fn wave_of(self, shift: u32) -> Option<u64> {
        match self.code() {
            code if code < SEVERAL_OF_WAVE => Some(code >> shift),
            code if code < ATOMIC_WAVE => Some(code - SEVERAL_OF_WAVE),
            code if code < MANY_ATOMIC => Some(code - ATOMIC_WAVE),
            _ => None,
        }
    }

    /// Returns true if `now`, of a thread in a block with waves of `1 << shift`
    /// lanes, comes after this access.
    #[inline]
    pub(crate) fn before(self, now: Stamp, shift: u32) -> bool {
        const LAUNCH_AND_BLOCK: u64 = !0 << 32;
        const BARRIERS: u64 = 0x7ff << 10;
        let differ = self.0 ^ now.0;
        if differ & !(0x3ff) == 0 {
            return true; // the same thread since the last barrier
        }
        if differ & LAUNCH_AND_BLOCK != 0 {
            // Launches of a device are one after the other, so another launch
            // is always in order, and another block of the same one never.
            return self.launch() != now.launch();
        }
        if differ & BARRIERS != 0 || self.code() == now.code() {
            return true;
        }
        self.wave_barriers() != now.wave_barriers() && self.wave_of(shift) == now.wave_of(shift)
    }

    /// Returns the stamp that remembers two reads, this one and `now`.
    #[inline]
    pub(crate) fn and(self, now: Stamp, shift: u32) -> Stamp {
        if self.before(now, shift) {
            return now;
        }
        self.joined(now, shift, SEVERAL_OF_WAVE, MANY)
    }

    /// Returns the stamp that remembers an atomic access `now` after this
    /// write, or `None` if they conflict.
    pub(crate) fn and_atomic(self, now: Stamp, shift: u32) -> Option<Stamp> {
        let alone = now.with_code(ATOMIC_WAVE + now.wave_of(shift).unwrap_or(0));
        if self.before(now, shift) {
            return Some(alone);
        }
        self.is_atomic()
            .then(|| self.joined(alone, shift, ATOMIC_WAVE, MANY_ATOMIC))
    }

    /// Joins two accesses that are out of order.
    #[inline]
    fn joined(self, now: Stamp, shift: u32, of_wave: u64, many: u64) -> Stamp {
        if self.block() != now.block() {
            return Stamp(now.0 | ALL_BLOCKS << 32).with_code(many);
        }
        // A stamp has room for one author. Two lanes become their wave, and two
        // waves become "many": less precise in the message, never wrong about
        // the order.
        match (self.wave_of(shift), now.wave_of(shift)) {
            (Some(a), Some(b)) if a == b => now.with_code(of_wave + a),
            _ => now.with_code(many),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(thread: u32, barriers: u32, wave: u32) -> Stamp {
        Stamp::new(3, 5, thread, barriers, wave)
    }

    #[test]
    fn barriers_order() {
        assert!(at(0, 1, 1).before(at(99, 2, 1), 6));
        assert!(!at(0, 1, 1).before(at(99, 1, 2), 6), "another wave");
        assert!(at(0, 1, 1).before(at(63, 1, 2), 6), "the same wave");
        assert!(!at(0, 1, 1).before(at(63, 1, 1), 6), "no barrier");
        assert!(!at(0, 1, 1).before(at(63, 1, 2), 5), "waves of 32");
        assert!(at(7, 1, 1).before(at(7, 1, 1), 6), "one thread");
        assert!(Stamp::default().before(at(1, 1, 1), 6));
    }

    #[test]
    fn blocks_are_never_in_order() {
        let (a, b) = (Stamp::new(3, 5, 0, 1, 1), Stamp::new(3, 6, 0, 9, 1));
        assert!(!a.before(b, 6));
        assert!(a.before(Stamp::new(4, 6, 0, 1, 1), 6), "another launch");
        let both = a.and(b, 6);
        assert!(!both.before(a, 6) && !both.before(b, 6));
        assert_eq!(both.of_block(), None);
    }

    #[test]
    fn several_readers_are_kept() {
        let wave = at(0, 1, 1).and(at(5, 1, 1), 6);
        assert_eq!(wave.who(), Who::Wave(0));
        assert!(!wave.before(at(0, 1, 1), 6), "the writer was one of two");
        assert!(wave.before(at(0, 1, 2), 6));
        let many = wave.and(at(70, 1, 1), 6);
        assert_eq!(many.who(), Who::Many);
        assert!(!many.before(at(70, 1, 9), 6) && many.before(at(0, 2, 1), 6));
    }

    #[test]
    fn atomics_agree_with_each_other_only() {
        let one = Stamp::default().and_atomic(at(3, 1, 1), 6).unwrap();
        assert!(!one.before(at(4, 1, 1), 6), "a plain access");
        assert!(one.before(at(4, 1, 2), 6) && !one.before(at(80, 1, 2), 6));
        let two = one.and_atomic(at(80, 1, 1), 6).unwrap();
        assert_eq!(two.who(), Who::Many);
        assert!(!two.before(at(3, 1, 9), 6) && two.before(at(3, 2, 1), 6));
        assert_eq!(at(3, 1, 1).and_atomic(at(4, 1, 1), 6), None);
    }
}
