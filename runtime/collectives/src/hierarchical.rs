//! Plans of all-to-all exchanges over intermediate ranks, shared by every executor of plans.

use crate::api::Transfer;
use crate::checks;
use crate::eager::OpKind;
use crate::operation::{Next, Unequal};
use crate::schedules::Algorithm;
use crate::schedules::{self, CollectivePlan, HopCounts, HopOrder, HopSchedule};
use crate::{CollectiveError, Levels};
use std::sync::{Arc, OnceLock};

/// Plans an all-to-all with parts of equal size.
pub(crate) fn equal(hops: HopOrder, rank: usize, bytes: usize) -> CollectivePlan {
    let sizes = vec![bytes; hops.ranks()];
    let schedule = HopSchedule::equal(hops, rank, bytes);
    schedules::all_to_all_with(&schedule, &sizes, &sizes, 0)
}

/// Plans an all-to-all with counts: a count exchange, then the exchange that it describes.
pub(crate) fn counted(
    hops: HopOrder,
    rank: usize,
    sends: Vec<usize>,
    receives: Vec<usize>,
) -> (CollectivePlan, Next) {
    let numbers: Vec<u64> = sends.iter().map(|bytes| *bytes as u64).collect();
    let first = schedules::count_hops(&hops, rank, 1, &numbers);
    let next = move |scratch: &[u8]| {
        // The data phases are numbered behind the count phases, because both belong to one
        // operation.
        let phase = hops.count() as u32;
        let hop_counts = HopCounts::read(hops, rank, 1, scratch);
        // Ranks compare counts before any data move: a wrong count would otherwise surface on an
        // intermediate rank, which could not name the caller at fault.
        check(&hop_counts, &receives)?;
        let schedule = hop_counts.there(&|block| block.units as usize);
        Ok(schedules::all_to_all_with(
            &schedule, &sends, &receives, phase,
        ))
    };
    (first, Box::new(next))
}

fn check(hop_counts: &HopCounts, receives: &[usize]) -> Result<(), Unequal> {
    for (peer, (ours, theirs)) in receives.iter().zip(hop_counts.received()).enumerate() {
        let (ours, theirs) = (*ours as u64, *theirs);
        if ours != theirs {
            let what = "the number of bytes from there to here";
            return Err(Unequal {
                what,
                peer,
                ours,
                theirs,
            });
        }
    }
    Ok(())
}

/// Returns peer and bytes of each message.
pub(crate) fn sizes(list: &[Transfer]) -> Vec<(usize, usize)> {
    list.iter().map(|t| (t.peer, t.slice.bytes())).collect()
}

/// [`Collectives::exchange_counts`](crate::Collectives::exchange_counts) in flight.
pub(crate) struct CountExchange {
    pub hops: HopOrder,
    counts: Arc<OnceLock<HopCounts>>,
}

impl CountExchange {
    pub fn new(
        algorithm: Algorithm,
        size: usize,
        kind: OpKind,
    ) -> Result<CountExchange, CollectiveError> {
        let direct = || {
            let levels = Levels::new(&[size]);
            levels.map(HopOrder::upwards)
        };
        let hops = checks::algorithm(kind, algorithm, size)?.or_else(direct);
        let none = || checks::invalid(kind, "a group of no ranks".to_string());
        Ok(CountExchange {
            hops: hops.ok_or_else(none)?,
            counts: Arc::default(),
        })
    }

    pub fn plan(
        &self,
        rank: usize,
        blocks_per_peer: usize,
        units: &[u64],
    ) -> (CollectivePlan, Next) {
        let plan = schedules::count_hops(&self.hops, rank, blocks_per_peer, units);
        let (hops, counts) = (self.hops.clone(), Arc::clone(&self.counts));
        let next = move |scratch: &[u8]| {
            let _ = counts.set(HopCounts::read(hops, rank, blocks_per_peer, scratch)); // once
            Ok(CollectivePlan::default())
        };
        (plan, Box::new(next))
    }

    /// Returns the result of an exchange that has succeeded.
    pub fn result(self, kind: OpKind) -> Result<HopCounts, CollectiveError> {
        let nothing = || checks::invalid(kind, "it has ended without a result".to_string());
        self.counts.get().cloned().ok_or_else(nothing)
    }
}
