//! What an exchange over other ranks may be.

use super::{HopSchedule, Plan, exchange_with};
use std::collections::HashMap;

/// Ways of messages over other ranks that were told of them.
pub trait Schedule {
    /// A number that is the same on all ranks of an exchange, and another for other ways.
    fn code(&self) -> u64;

    /// What a rank of so many does, with messages by peer and bytes: input `i` goes to rank
    /// `sends[i].0`, output `j` comes from rank `receives[j].0`.
    ///
    /// # Errors
    /// Messages that ranks on the way were not told of.
    fn plan(
        &self,
        rank: (usize, usize),
        sends: &[(usize, usize)],
        receives: &[(usize, usize)],
    ) -> Result<Plan, String>;
}

impl Schedule for HopSchedule {
    fn code(&self) -> u64 {
        self.hops.code()
    }

    fn plan(
        &self,
        rank: (usize, usize),
        sends: &[(usize, usize)],
        receives: &[(usize, usize)],
    ) -> Result<Plan, String> {
        self.check(rank, sends, receives)?;
        Ok(exchange_with(self, sends, receives))
    }
}

impl HopSchedule {
    /// Whether messages of a rank of so many are the pieces that have bytes.
    pub(super) fn check(
        &self,
        rank: (usize, usize),
        sends: &[(usize, usize)],
        receives: &[(usize, usize)],
    ) -> Result<(), String> {
        self.check_from(rank, sends, receives, &|_| true)
    }

    /// The same of messages from some ranks alone.
    pub(super) fn check_from(
        &self,
        (rank, size): (usize, usize),
        sends: &[(usize, usize)],
        receives: &[(usize, usize)],
        from: &dyn Fn(usize) -> bool,
    ) -> Result<(), String> {
        let ranks = self.hops.levels.ranks();
        if self.rank != rank || ranks != size {
            let own = self.rank;
            return Err(format!(
                "what was told is of rank {own} of {ranks}, this is rank {rank} of {size}"
            ));
        }
        same("to", sends, 0..size, &|peer| self.sent(peer))?;
        let peers = (0..size).filter(|peer| from(*peer));
        same("from", receives, peers, &|peer| self.received(peer))
    }
}

fn same<'j>(
    way: &str,
    messages: &[(usize, usize)],
    mut peers: impl Iterator<Item = usize>,
    told: &dyn Fn(usize) -> &'j [usize],
) -> Result<(), String> {
    let mut given: HashMap<usize, Vec<usize>> = HashMap::new();
    for (peer, bytes) in messages.iter().filter(|(_, bytes)| *bytes > 0) {
        given.entry(*peer).or_default().push(*bytes);
    }
    let given = |peer: &usize| given.get(peer).map_or(&[][..], Vec::as_slice);
    let told = |peer: usize| told(peer).iter().copied().filter(|bytes| *bytes > 0);
    let other = peers.find(|peer| !told(*peer).eq(given(peer).iter().copied()));
    match other {
        None => Ok(()),
        Some(peer) => {
            let (told, given) = (told(peer).collect::<Vec<_>>(), given(&peer));
            Err(format!(
                "messages {way} rank {peer} have {given:?} bytes, ranks were told of {told:?}"
            ))
        }
    }
}
