//! The barrier in shared memory that counts arrivals and bytes.

use std::fmt;

/// The 64-bit word of a barrier. The layout is our own: programs may not
/// look inside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mbarrier {
    /// Arrivals per phase.
    pub expected: u32,
    /// Arrivals still missing in this phase.
    pub pending: u32,
    /// Bytes announced and not yet arrived; below zero when they arrive first.
    pub tx: i32,
    /// Parity of the phase that is under way.
    pub phase: bool,
}

/// Misuse of a barrier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum MbarrierError {
    /// The word is no initialised barrier.
    Uninitialised,
    /// `init` of a word that is a barrier already.
    InitTwice,
    /// The count of `init` is not from 1 to 2^20 - 1.
    Count(u32),
    /// More arrivals than are pending.
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

/// Arrivals and bytes a barrier can count.
const MOST: u32 = (1 << 20) - 1;
/// The upper bits of a word that is a barrier.
const TAG: u64 = 0b10;

impl Mbarrier {
    /// `mbarrier.init` over a word with these contents.
    ///
    /// # Errors
    /// [`MbarrierError::InitTwice`], [`MbarrierError::Count`].
    pub fn init(word: u64, count: u32) -> Result<u64, MbarrierError> {
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

    /// `mbarrier.inval`: a word that is no barrier.
    ///
    /// # Errors
    /// [`MbarrierError::Uninitialised`].
    pub fn inval(word: u64) -> Result<u64, MbarrierError> {
        Mbarrier::load(word).map(|_| 0)
    }

    /// Reads a word.
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

    /// The word: expected arrivals from bit 0, pending from 20, the phase at
    /// 40, bytes from 41, a tag from 62.
    pub fn store(self) -> u64 {
        let tx = u64::from(self.tx.cast_unsigned()) & 0x1f_ffff;
        u64::from(self.expected)
            | u64::from(self.pending) << 20
            | u64::from(self.phase) << 40
            | tx << 41
            | TAG << 62
    }

    /// `mbarrier.arrive` with `count` arrivals. True when a phase completed.
    ///
    /// # Errors
    /// [`MbarrierError::ArrivePastCount`].
    pub fn arrive(&mut self, count: u32) -> Result<bool, MbarrierError> {
        let pending = self.pending;
        let left = pending
            .checked_sub(count)
            .ok_or(MbarrierError::ArrivePastCount {
                arrivals: count,
                pending,
            })?;
        self.pending = left;
        Ok(self.turn())
    }

    /// `mbarrier.arrive_drop`: arrives, and expects as many fewer from the
    /// next phase on.
    ///
    /// # Errors
    /// [`MbarrierError::ArrivePastCount`].
    pub fn arrive_drop(&mut self, count: u32) -> Result<bool, MbarrierError> {
        let expected = self.expected.saturating_sub(count);
        let mut after = Mbarrier { expected, ..*self };
        let turned = after.arrive(count)?;
        *self = after;
        Ok(turned)
    }

    /// `mbarrier.expect_tx`: announces bytes.
    ///
    /// # Errors
    /// [`MbarrierError::TxOverflow`].
    pub fn expect_tx(&mut self, bytes: u32) -> Result<(), MbarrierError> {
        self.add(i64::from(bytes))
    }

    /// `mbarrier.arrive.expect_tx`: announces, then arrives once. True when a
    /// phase completed.
    ///
    /// # Errors
    /// As both.
    pub fn arrive_expect_tx(&mut self, bytes: u32) -> Result<bool, MbarrierError> {
        let mut after = *self;
        after.expect_tx(bytes)?;
        let turned = after.arrive(1)?;
        *self = after;
        Ok(turned)
    }

    /// Bytes have arrived. True when a phase completed.
    ///
    /// # Errors
    /// [`MbarrierError::TxOverflow`].
    pub fn complete_tx(&mut self, bytes: u32) -> Result<bool, MbarrierError> {
        self.add(-i64::from(bytes))?;
        Ok(self.turn())
    }

    /// `test_wait.parity`: whether the phase of this parity has completed.
    /// True for the phase before the one under way, so also for parity 1 of a
    /// fresh barrier.
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

    /// Starts the next phase when nothing is missing any more.
    fn turn(&mut self) -> bool {
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
