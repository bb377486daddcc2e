//! What ranks tell each other of themselves, through memory of the host.

use crate::api::{Call, Collectives};
use crate::communicator::{Communicator, Job};
use crate::eager::{Kind, Signature};
use crate::handle::host_result;
use crate::memory::Region;
use crate::{CollectiveError, plan};

impl Communicator {
    /// Bytes of every rank, `sizes[p]` of rank `p`, one after the other.
    pub(crate) fn gather_host(
        &mut self,
        own: &[u8],
        sizes: &[usize],
        call: &Call,
    ) -> Result<Vec<u8>, CollectiveError> {
        let job = Job {
            signature: Signature::of(Kind::Agree, &call.label),
            inputs: Ok(vec![Region::host(own.to_vec())]),
            outputs: Ok(vec![Region::host(vec![0; sizes.iter().sum()])]),
            plan: plan::all_gather(self.rank(), sizes),
            next: None,
        };
        host_result(self.start(Kind::Agree, call, job)?)
    }

    /// Members of this rank's new group, by rank in the world, and its place there.
    pub(crate) fn split_group(
        &mut self,
        color: Option<u32>,
        key: i64,
        call: &Call,
    ) -> Result<Option<(Vec<usize>, usize)>, CollectiveError> {
        let code = color.map_or(-1, i64::from);
        let own = [code.to_le_bytes(), key.to_le_bytes()].concat();
        let job = Job {
            signature: Signature::of(Kind::Split, &call.label),
            inputs: Ok(vec![Region::host(own.clone())]),
            outputs: Ok(vec![Region::host(vec![0; own.len() * self.size()])]),
            plan: plan::all_gather(self.rank(), &vec![own.len(); self.size()]),
            next: None,
        };
        let all = host_result(self.start(Kind::Split, call, job)?)?;
        let numbers: Vec<i64> = all
            .as_chunks::<8>()
            .0
            .iter()
            .map(|n| i64::from_le_bytes(*n))
            .collect();
        let chosen = chosen(&numbers, code);
        let place = chosen.iter().position(|rank| *rank == self.rank());
        let members = chosen
            .iter()
            .map(|rank| self.group.members[*rank])
            .collect();
        Ok(color.and(place).map(|place| (members, place)))
    }
}

/// Ranks of a colour, in the order of keys, then of ranks; `numbers` has colour and key of
/// each rank.
pub(crate) fn chosen(numbers: &[i64], color: i64) -> Vec<usize> {
    let pairs = numbers.as_chunks::<2>().0.iter().enumerate();
    let mut chosen: Vec<(i64, usize)> = pairs
        .filter(|(_, [own, _])| *own == color)
        .map(|(rank, [_, key])| (*key, rank))
        .collect();
    chosen.sort_unstable();
    chosen.into_iter().map(|(_, rank)| rank).collect()
}

/// Of so many numbers of each rank those of each.
pub(crate) fn numbers(all: &[u8], each: usize, ranks: usize) -> Vec<Vec<u64>> {
    let (numbers, _) = all.as_chunks::<8>();
    let of = |rank: usize| {
        let own = numbers[rank * each..].iter().take(each);
        own.map(|n| u64::from_le_bytes(*n)).collect()
    };
    (0..ranks).map(of).collect()
}
