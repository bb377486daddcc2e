//! Gathers of host memory: the small exchanges by which ranks agree and form groups.

use crate::api::{Call, Collectives};
use crate::communicator::{Communicator, OperationDraft};
use crate::eager::{OpKind, Signature};
use crate::handle::host_result;
use crate::memory::Region;
use crate::sub_group::{SubGroup, chosen};
use crate::{CollectiveError, schedules};

impl Communicator {
    /// Gathers the bytes of every rank in rank order: `sizes[p]` bytes from rank `p`.
    pub(crate) fn gather_host(
        &mut self,
        own: &[u8],
        sizes: &[usize],
        call: &Call,
    ) -> Result<Vec<u8>, CollectiveError> {
        let draft = OperationDraft {
            signature: Signature::of(OpKind::Agree, &call.label),
            inputs: Ok(vec![Region::host(own.to_vec())]),
            outputs: Ok(vec![Region::host(vec![0; sizes.iter().sum()])]),
            plan: schedules::all_gather(self.rank(), sizes),
            next: None,
        };
        host_result(self.start(OpKind::Agree, call, draft)?)
    }

    /// Returns this rank's new group.
    pub(crate) fn split_group(
        &mut self,
        color: Option<u32>,
        key: i64,
        call: &Call,
    ) -> Result<Option<SubGroup>, CollectiveError> {
        // Colours are unsigned 32-bit numbers, so -1 is free for "no colour".
        let code = color.map_or(-1, i64::from);
        let own = [code.to_le_bytes(), key.to_le_bytes()].concat();
        let draft = OperationDraft {
            signature: Signature::of(OpKind::Split, &call.label),
            inputs: Ok(vec![Region::host(own.clone())]),
            outputs: Ok(vec![Region::host(vec![0; own.len() * self.size()])]),
            plan: schedules::all_gather(self.rank(), &vec![own.len(); self.size()]),
            next: None,
        };
        let all = host_result(self.start(OpKind::Split, call, draft)?)?;
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
        Ok(color.and(place).map(|rank| SubGroup { members, rank }))
    }
}
