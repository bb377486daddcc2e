//! Groups of some of the ranks.

use super::group::Nccl;
use crate::api::{Call, Collectives};
use crate::communicator::Communicator;
use crate::eager::OpKind;
use crate::operation::Group;
use crate::{CollectiveError, CommElement, InvalidReason, Slice, checks};
use moesaic_target::DeviceError;
use std::sync::Arc;

/// A new group, as one of its ranks sees it.
struct NewGroup {
    /// The members, by rank in the world.
    members: Vec<usize>,
    rank: usize,
    /// The same group over eager messages.
    control: Option<Communicator>,
}

impl Nccl {
    /// Runs `count` operations of the group over the transport of small messages, if there is
    /// one.
    pub(super) fn by_control<T>(
        &mut self,
        operations: u64,
        gather: impl FnOnce(&mut Communicator) -> Result<T, CollectiveError>,
    ) -> Option<Result<T, CollectiveError>> {
        self.control.as_ref()?;
        if let Err(error) = self.usable(OpKind::Agree) {
            return Some(Err(error));
        }
        self.sequence += operations;
        let gathered = gather(self.control.as_mut()?);
        Some(gathered.inspect_err(|error| self.world.board.fail(None, error.clone())))
    }

    /// Gathers equally many bytes of every rank through the device, where no other transport
    /// carries them.
    pub(super) fn gather_equal(
        &mut self,
        own: &[u8],
        call: &Call,
    ) -> Result<Vec<u8>, CollectiveError> {
        let failed = |error: DeviceError| checks::invalid(OpKind::Agree, error);
        let device = Arc::clone(&self.world.device);
        let allocate = |bytes| device.alloc(bytes).map(Arc::new).map_err(failed);
        let (from, to) = (allocate(own.len())?, allocate(own.len() * self.size())?);
        device.upload(own, &from, 0).map_err(failed)?;
        let (from, to) = (
            Slice::whole(&from, CommElement::U8),
            Slice::whole(&to, CommElement::U8),
        );
        self.all_gather(&from, &to, call)?.wait()?;
        let mut all = vec![0; to.bytes()];
        device.download(to.buffer(), 0, &mut all).map_err(failed)?;
        Ok(all)
    }

    fn members_of(
        &mut self,
        color: Option<u32>,
        key: i64,
        call: &Call,
    ) -> Result<Option<NewGroup>, CollectiveError> {
        if let Some(control) = &mut self.control {
            self.sequence += 1;
            let group = control.split_off(color, key, call);
            let group = group.inspect_err(|error| self.world.board.fail(None, error.clone()))?;
            return Ok(group.map(|group| NewGroup {
                members: group.members().to_vec(),
                rank: group.rank(),
                control: Some(group),
            }));
        }
        let code = color.map_or(-1, i64::from);
        let own = [code.to_le_bytes(), key.to_le_bytes()].concat();
        let all = self.gather_equal(&own, call)?;
        let numbers = all.as_chunks::<8>().0.iter();
        let numbers: Vec<i64> = numbers.map(|n| i64::from_le_bytes(*n)).collect();
        let chosen = crate::sub_group::chosen(&numbers, code);
        let place = chosen.iter().position(|rank| *rank == self.rank());
        let members = chosen.iter().map(|rank| self.group.members[*rank]);
        let members: Vec<usize> = members.collect();
        Ok(color.and(place).map(|rank| NewGroup {
            members,
            rank,
            control: None,
        }))
    }

    pub(super) fn split_off(
        &mut self,
        color: Option<u32>,
        key: i64,
        call: &Call,
    ) -> Result<Option<Nccl>, CollectiveError> {
        self.usable(OpKind::Split)?;
        if let Some(graph) = self.world.device.capturing() {
            let reason = InvalidReason::Captured { graph, why: None };
            return Err(checks::invalid(OpKind::Split, reason));
        }
        let found = self.members_of(color, key, call)?;
        // A colour that no other new group has and that fits the type: the group's least member.
        let least = |group: &NewGroup| group.members.iter().min().map(|rank| *rank as u32);
        let number = found.as_ref().and_then(least);
        let place = found.as_ref().map_or(0, |part| part.rank);
        let mut made = None;
        let parent = Arc::clone(&self.comm);
        let task = self.task(OpKind::Split, call);
        let handle = self.start(task, |launch| {
            let comm = parent
                .begin_split(number, place)
                .map_err(|reason| launch.transport(reason))?;
            let comm = Arc::new(comm);
            launch.world.board.add_comm(&comm);
            launch.wait_for(&parent)?;
            if number.is_some() {
                launch.wait_for(&comm)?;
                made = Some(comm);
            }
            Ok(())
        })?;
        handle.wait()?;
        Ok(found.zip(made).map(|(part, comm)| Nccl {
            world: Arc::clone(&self.world),
            comm,
            control: part.control,
            group: Arc::new(Group {
                context: 0,
                members: part.members,
                rank: part.rank,
            }),
            sequence: 0,
            deadline: self.deadline,
        }))
    }
}
