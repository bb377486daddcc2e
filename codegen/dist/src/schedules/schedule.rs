//! Exchanges over intermediate ranks that know the sizes in advance.

use super::{CollectivePlan, GroupRank, HopSchedule, exchange_with};
use std::collections::HashMap;

/// Messages that differ from the exchanged counts.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ScheduleError {
    /// The counts belong to another rank.
    #[error("the counts are of rank {counted} of {ranks}, this is rank {rank} of {size}")]
    OtherRank {
        /// The rank that has the counts.
        counted: usize,
        /// The number of ranks that they are of.
        ranks: usize,
        /// This rank.
        rank: usize,
        /// The size of its group.
        size: usize,
    },
    /// The messages to or from a rank have other sizes.
    #[error(
        "messages {direction} rank {peer} have {given:?} bytes, the exchanged counts say {counted:?}"
    )]
    Messages {
        /// `to` or `from`.
        direction: &'static str,
        /// The other rank.
        peer: usize,
        /// The sizes that the caller gave.
        given: Vec<usize>,
        /// The sizes by the counts.
        counted: Vec<usize>,
    },
    /// The sums for a rank have more or fewer outputs.
    #[error("{outputs} outputs for sums for rank {peer}, there are {sums} sums")]
    Sums {
        /// The rank that gets the sums.
        peer: usize,
        /// The outputs that the caller gave.
        outputs: usize,
        /// The sums that there are.
        sums: usize,
    },
}

/// A schedule of messages over intermediate ranks, made from exchanged counts.
pub trait Schedule {
    /// Returns a number that is equal on all ranks of an exchange and different for every other
    /// path.
    fn code(&self) -> u64;

    /// Plans the exchange of a rank. `sends` and `receives` are peers and bytes: input `i` goes to
    /// rank `sends[i].0`, output `j` comes from rank `receives[j].0`.
    ///
    /// # Errors
    /// [`ScheduleError`] names the messages that differ from the exchanged counts.
    fn plan(
        &self,
        own: GroupRank,
        sends: &[(usize, usize)],
        receives: &[(usize, usize)],
    ) -> Result<CollectivePlan, ScheduleError>;
}

impl Schedule for HopSchedule {
    fn code(&self) -> u64 {
        self.hops.code()
    }

    fn plan(
        &self,
        own: GroupRank,
        sends: &[(usize, usize)],
        receives: &[(usize, usize)],
    ) -> Result<CollectivePlan, ScheduleError> {
        self.check(own, sends, receives)?;
        Ok(exchange_with(self, sends, receives))
    }
}

impl HopSchedule {
    /// Checks that the messages are the blocks of the schedule that are not empty.
    pub(super) fn check(
        &self,
        own: GroupRank,
        sends: &[(usize, usize)],
        receives: &[(usize, usize)],
    ) -> Result<(), ScheduleError> {
        self.check_from(own, sends, receives, &|_| true)
    }

    /// Checks only the received messages from some ranks.
    pub(super) fn check_from(
        &self,
        own: GroupRank,
        sends: &[(usize, usize)],
        receives: &[(usize, usize)],
        from: &dyn Fn(usize) -> bool,
    ) -> Result<(), ScheduleError> {
        let ranks = self.hops.ranks();
        let GroupRank { rank, size } = own;
        if self.rank != rank || ranks != size {
            return Err(ScheduleError::OtherRank {
                counted: self.rank,
                ranks,
                rank,
                size,
            });
        }
        compare_blocks("to", sends, 0..size, &|peer| self.sent(peer))?;
        let peers = (0..size).filter(|peer| from(*peer));
        compare_blocks("from", receives, peers, &|peer| self.received(peer))
    }
}

fn compare_blocks<'j>(
    direction: &'static str,
    messages: &[(usize, usize)],
    mut peers: impl Iterator<Item = usize>,
    counted: &dyn Fn(usize) -> &'j [usize],
) -> Result<(), ScheduleError> {
    let mut given: HashMap<usize, Vec<usize>> = HashMap::new();
    // Empty blocks have no message, and callers may still pass empty messages, so both sides
    // leave them out.
    for (peer, bytes) in messages.iter().filter(|(_, bytes)| *bytes > 0) {
        given.entry(*peer).or_default().push(*bytes);
    }
    let given = |peer: &usize| given.get(peer).map_or(&[][..], Vec::as_slice);
    let counted = |peer: usize| counted(peer).iter().copied().filter(|bytes| *bytes > 0);
    let other = peers.find(|peer| !counted(*peer).eq(given(peer).iter().copied()));
    match other {
        None => Ok(()),
        Some(peer) => Err(ScheduleError::Messages {
            direction,
            peer,
            given: given(&peer).to_vec(),
            counted: counted(peer).collect(),
        }),
    }
}
