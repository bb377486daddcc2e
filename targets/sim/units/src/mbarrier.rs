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
    fn fmt(&self, _f: &mut fmt::Formatter<'_>) -> fmt::Result {
        todo!()
    }
}

impl std::error::Error for MbarrierError {}

impl Mbarrier {
    /// `mbarrier.init` over a word with these contents.
    ///
    /// # Errors
    /// [`MbarrierError::InitTwice`], [`MbarrierError::Count`].
    pub fn init(word: u64, count: u32) -> Result<u64, MbarrierError> {
        let _ = (word, count);
        todo!()
    }

    /// `mbarrier.inval`: a word that is no barrier.
    ///
    /// # Errors
    /// [`MbarrierError::Uninitialised`].
    pub fn inval(word: u64) -> Result<u64, MbarrierError> {
        let _ = word;
        todo!()
    }

    /// Reads a word.
    ///
    /// # Errors
    /// [`MbarrierError::Uninitialised`].
    pub fn load(word: u64) -> Result<Mbarrier, MbarrierError> {
        let _ = word;
        todo!()
    }

    /// The word.
    pub fn store(self) -> u64 {
        todo!()
    }

    /// `mbarrier.arrive` with `count` arrivals. True when a phase completed.
    ///
    /// # Errors
    /// [`MbarrierError::ArrivePastCount`].
    pub fn arrive(&mut self, count: u32) -> Result<bool, MbarrierError> {
        let _ = count;
        todo!()
    }

    /// `mbarrier.arrive_drop`: arrives, and expects as many fewer from the
    /// next phase on.
    ///
    /// # Errors
    /// [`MbarrierError::ArrivePastCount`].
    pub fn arrive_drop(&mut self, count: u32) -> Result<bool, MbarrierError> {
        let _ = count;
        todo!()
    }

    /// `mbarrier.expect_tx`: announces bytes.
    ///
    /// # Errors
    /// [`MbarrierError::TxOverflow`].
    pub fn expect_tx(&mut self, bytes: u32) -> Result<(), MbarrierError> {
        let _ = bytes;
        todo!()
    }

    /// `mbarrier.arrive.expect_tx`: announces, then arrives once. True when a
    /// phase completed.
    ///
    /// # Errors
    /// As both.
    pub fn arrive_expect_tx(&mut self, bytes: u32) -> Result<bool, MbarrierError> {
        let _ = bytes;
        todo!()
    }

    /// Bytes have arrived. True when a phase completed.
    ///
    /// # Errors
    /// [`MbarrierError::TxOverflow`].
    pub fn complete_tx(&mut self, bytes: u32) -> Result<bool, MbarrierError> {
        let _ = bytes;
        todo!()
    }

    /// `test_wait.parity`: whether the phase of this parity has completed.
    pub fn test_parity(&self, parity: bool) -> bool {
        self.phase != parity
    }
}
