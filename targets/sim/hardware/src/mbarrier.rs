//! The barrier object in shared memory that counts arrivals and bytes.

use std::fmt;

/// The fields of a barrier's 64-bit word. The bit layout is this simulator's
/// own, because the PTX ISA calls the contents of an mbarrier object opaque.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mbarrier {
    /// Arrivals per phase.
    pub expected: u32,
    /// Arrivals still missing in the current phase.
    pub pending: u32,
    /// Bytes announced and not yet arrived; negative when bytes arrive first.
    pub tx: i32,
    /// Parity of the current phase.
    pub phase: bool,
}

/// A misuse of a barrier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum MbarrierError {
    /// The word is not an initialised barrier.
    Uninitialised,
    /// `init` ran on a word that already is a barrier.
    InitTwice,
    /// The count of `init` is not from 1 to 2^20 - 1.
    Count(u32),
    /// An operation arrives more often than the phase expects.
    ArrivePastCount {
        /// Arrivals of this operation.
        arrivals: u32,
        /// Arrivals still missing.
        pending: u32,
    },
    /// The transaction count leaves ±(2^20 - 1).
    TxOverflow(i64),
}

impl fmt::Display for MbarrierError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            MbarrierError::Uninitialised => {
                write!(f, "the word is no barrier: mbarrier.init has not run on it")
            }
            MbarrierError::InitTwice => write!(
                f,
                "the barrier is initialised already; mbarrier.inval has to come first"
            ),
            MbarrierError::Count(count) => write!(
                f,
                "a barrier counts 1 to {MOST} arrivals, mbarrier.init asks for {count}"
            ),
            MbarrierError::ArrivePastCount { arrivals, pending } => write!(
                f,
                "arrive past the count: {arrivals} arrivals where the phase waits for {pending}"
            ),
            MbarrierError::TxOverflow(tx) => write!(
                f,
                "the barrier's byte count would be {tx}, outside -{MOST} to {MOST}"
            ),
        }
    }
}

impl std::error::Error for MbarrierError {}

/// The largest count of arrivals, and of bytes in either direction. PTX ISA,
/// "Contents of the mbarrier object", gives both ranges.
const MOST: u32 = (1 << 20) - 1;
/// The two upper bits of every word that is a barrier.
const TAG: u64 = 0b10;

impl Mbarrier {
    /// Executes `mbarrier.init` over `word`, the old contents, and returns the
    /// new word.
    ///
    /// # Errors
    /// [`MbarrierError::InitTwice`], [`MbarrierError::Count`].
    pub fn init(word: u64, count: u32) -> Result<u64, MbarrierError> {
        // PTX ISA, "mbarrier.init": initialising a location that already holds
        // a valid object is undefined, so a kernel has to invalidate it first.
        if Mbarrier::load(word).is_ok() {
            return Err(MbarrierError::InitTwice);
        }
        if count == 0 || count > MOST {
            return Err(MbarrierError::Count(count));
        }
        let fresh = Mbarrier {
            expected: count,
            pending: count,
            tx: 0,
            phase: false,
        };
        Ok(fresh.store())
    }

    /// Executes `mbarrier.inval` and returns a word that is no barrier.
    ///
    /// # Errors
    /// [`MbarrierError::Uninitialised`].
    pub fn inval(word: u64) -> Result<u64, MbarrierError> {
        Mbarrier::load(word).map(|_| 0)
    }

    /// Reads the fields of a word.
    ///
    /// # Errors
    /// [`MbarrierError::Uninitialised`].
    pub fn load(word: u64) -> Result<Mbarrier, MbarrierError> {
        let barrier = Mbarrier {
            expected: word as u32 & MOST,
            pending: (word >> 20) as u32 & MOST,
            phase: word >> 40 & 1 != 0,
            // The 21 bits below the tag, sign-extended.
            tx: ((word << 2).cast_signed() >> 43) as i32,
        };
        // A finished phase would have started the next one.
        let open = barrier.pending != 0 || barrier.tx != 0;
        if word >> 62 == TAG && open && barrier.pending <= barrier.expected {
            Ok(barrier)
        } else {
            Err(MbarrierError::Uninitialised)
        }
    }

    /// Packs the fields into a word: expected arrivals from bit 0, pending from
    /// 20, the phase at 40, bytes from 41, a tag from 62.
    pub fn store(self) -> u64 {
        let tx = u64::from(self.tx.cast_unsigned()) & 0x1f_ffff;
        u64::from(self.expected)
            | u64::from(self.pending) << 20
            | u64::from(self.phase) << 40
            | tx << 41
            | TAG << 62
    }

    /// Executes `mbarrier.arrive` with `count` arrivals; returns true when the
    /// phase completed.
    ///
    /// # Errors
    /// [`MbarrierError::ArrivePastCount`].
    pub fn arrive(&mut self, count: u32) -> Result<bool, MbarrierError> {
        // The count may not go below zero (PTX ISA, "Arrive-on operation on
        // mbarrier object"). An arrival too many would belong to a later phase
        // and complete it early, far from its cause.
        let pending = self.pending;
        let left = pending
            // A word of random contents has to fail here too: shared memory
            // that nobody has initialised may hold any bits. The tag and both
            // relations between the counts make an accident unlikely.
            .checked_sub(count)
            .ok_or(MbarrierError::ArrivePastCount {
                arrivals: count,
                pending,
            })?;
        self.pending = left;
        Ok(self.turn())
    }

    /// Executes `mbarrier.arrive_drop`: arrives, and lowers the count expected
    /// from the next phase on by `count`.
    ///
    /// # Errors
    /// [`MbarrierError::ArrivePastCount`].
    pub fn arrive_drop(&mut self, count: u32) -> Result<bool, MbarrierError> {
        // The lower count must be in place before `arrive`, because the arrival
        // itself may complete the phase and reload `pending` from `expected`.
        // The copy keeps `self` unchanged when the arrival fails.
        let expected = self.expected.saturating_sub(count);
        let mut after = Mbarrier { expected, ..*self };
        let turned = after.arrive(count)?;
        *self = after;
        Ok(turned)
    }

    /// Executes `mbarrier.expect_tx`: announces bytes.
    ///
    /// # Errors
    /// [`MbarrierError::TxOverflow`].
    pub fn expect_tx(&mut self, bytes: u32) -> Result<(), MbarrierError> {
        // An announcement never completes a phase here, although it can bring
        // `tx` to zero when the bytes came first: the arrival that follows it
        // does.
        self.add(i64::from(bytes))
    }

    /// Executes `mbarrier.arrive.expect_tx`: announces bytes, then arrives
    /// once; returns true when the phase completed.
    ///
    /// # Errors
    /// [`MbarrierError::TxOverflow`], [`MbarrierError::ArrivePastCount`].
    pub fn arrive_expect_tx(&mut self, bytes: u32) -> Result<bool, MbarrierError> {
        // The announcement comes first (PTX ISA, "mbarrier.arrive": expect-tx,
        // then arrive-on). In the other order the last arrival would complete
        // the phase before its bytes.
        let mut after = *self;
        after.expect_tx(bytes)?;
        let turned = after.arrive(1)?;
        *self = after;
        Ok(turned)
    }

    /// Counts bytes that arrived; returns true when the phase completed.
    ///
    /// # Errors
    /// [`MbarrierError::TxOverflow`].
    pub fn complete_tx(&mut self, bytes: u32) -> Result<bool, MbarrierError> {
        self.add(-i64::from(bytes))?;
        Ok(self.turn())
    }

    /// Executes `test_wait.parity`: returns true when the phase of this parity
    /// has completed. The phase before the current one counts as completed, so
    /// parity 1 of a fresh barrier returns true.
    pub fn test_parity(&self, parity: bool) -> bool {
        self.phase != parity
    }

    fn add(&mut self, bytes: i64) -> Result<(), MbarrierError> {
        let tx = i64::from(self.tx) + bytes;
        if tx.unsigned_abs() > u64::from(MOST) {
            return Err(MbarrierError::TxOverflow(tx));
        }
        self.tx = tx as i32;
        Ok(())
    }

    /// Starts the next phase once no arrivals and no bytes are missing.
    fn turn(&mut self) -> bool {
        // Both counts must be zero at once (PTX ISA, "Phase Completion of the
        // mbarrier object"); `tx` below zero means that bytes came before their
        // announcement, so the phase stays open.
        let done = self.pending == 0 && self.tx == 0;
        if done {
            self.phase = !self.phase;
            self.pending = self.expected;
        }
        done
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fresh(count: u32) -> Mbarrier {
        Mbarrier::load(Mbarrier::init(0, count).unwrap()).unwrap()
    }

    #[test]
    fn a_phase_ends_when_arrivals_and_bytes_are_there() {
        let mut barrier = fresh(2);
        assert!(barrier.test_parity(true) && !barrier.test_parity(false));
        assert_eq!(barrier.arrive_expect_tx(4096), Ok(false));
        assert_eq!(barrier.arrive(1), Ok(false));
        assert_eq!(barrier.complete_tx(4000), Ok(false));
        assert!(!barrier.test_parity(false));
        assert_eq!(barrier.complete_tx(96), Ok(true));
        assert!(barrier.test_parity(false) && !barrier.test_parity(true));
        assert_eq!((barrier.pending, barrier.tx), (2, 0));
        assert_eq!(barrier.arrive(2), Ok(true));
        assert!(barrier.test_parity(true));
    }

    #[test]
    fn bytes_may_come_before_they_are_announced() {
        let mut barrier = fresh(1);
        assert_eq!(barrier.complete_tx(512), Ok(false));
        assert_eq!(barrier.tx, -512);
        assert_eq!(Mbarrier::load(barrier.store()), Ok(barrier));
        assert_eq!(barrier.arrive_expect_tx(512), Ok(true));
    }

    #[test]
    fn dropping_lowers_the_next_count() {
        let mut barrier = fresh(3);
        assert_eq!(barrier.arrive_drop(1), Ok(false));
        assert_eq!(barrier.arrive(2), Ok(true));
        assert_eq!(barrier.pending, 2);
    }

    #[test]
    fn misuse_is_named_and_changes_nothing() {
        let word = Mbarrier::init(0, 1).unwrap();
        assert_eq!(Mbarrier::init(word, 1), Err(MbarrierError::InitTwice));
        assert_eq!(Mbarrier::inval(word), Ok(0));
        assert_eq!(Mbarrier::init(0, 0), Err(MbarrierError::Count(0)));
        assert_eq!(
            Mbarrier::init(0, 1 << 20),
            Err(MbarrierError::Count(1 << 20))
        );
        let mut barrier = fresh(1);
        assert_eq!(barrier.arrive_expect_tx(16), Ok(false));
        let before = barrier;
        let error = barrier.arrive_expect_tx(16).unwrap_err();
        assert_eq!(
            error.to_string(),
            "arrive past the count: 1 arrivals where the phase waits for 0"
        );
        assert_eq!(
            barrier.expect_tx(1 << 20),
            Err(MbarrierError::TxOverflow((1 << 20) + 16))
        );
        assert!(barrier.arrive_drop(1).is_err());
        assert_eq!(barrier, before);
    }

    #[test]
    fn what_shared_memory_holds_by_chance_is_no_barrier() {
        let poison = [0, u64::MAX, 0x7fc1_7fc1_7fc1_7fc1, 0xffff_ffff_7fc0_0000];
        for word in poison {
            assert_eq!(Mbarrier::load(word), Err(MbarrierError::Uninitialised));
        }
    }

    #[test]
    fn words_keep_every_field() {
        for tx in [0, 1, -1, 77_777, MOST as i32, -(MOST as i32)] {
            for phase in [false, true] {
                let barrier = Mbarrier {
                    expected: MOST,
                    pending: 12_345,
                    tx,
                    phase,
                };
                assert_eq!(Mbarrier::load(barrier.store()), Ok(barrier));
            }
        }
    }
}
