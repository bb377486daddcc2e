//! Collectives over any transport.

use crate::api::{Call, Collectives, Transfer};
use crate::checks::{self, Counted, Parts};
use crate::core::{self, Core, Shared};
use crate::eager::{OpKind, Signature};
use crate::handle::Handle;
use crate::memory::Region;
use crate::operation::{Group, Next, Operation, Task};
use crate::schedules::Algorithm;
use crate::schedules::{self, CollectivePlan, GroupRank, HopCounts, HopOrder, Schedule};
use crate::sub_group::{SubGroup, numbers};
use crate::transport::Transport;
use crate::{CollectiveError, InvalidReason, ProgressThread, Reduction, Slice, hierarchical};
use moesaic_kernel::Target;
use moesaic_target::{Device, DeviceError};
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The default deadline of an operation.
pub const DEADLINE: Duration = Duration::from_secs(60);

/// A group of ranks over a transport.
pub struct Communicator {
    core: Arc<Shared>,
    device: Arc<dyn Device>,
    pub(crate) group: Arc<Group>,
    sequence: u64,
    deadline: Duration,
}

impl fmt::Debug for Communicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Communicator")
            .field("rank", &self.group.rank)
            .field("members", &self.group.members)
            .field("device", &self.device)
            .finish_non_exhaustive()
    }
}

impl Communicator {
    /// Returns the group of all ranks of a transport. Operations use buffers of `device`.
    pub fn new(transport: Box<dyn Transport>, device: Arc<dyn Device>) -> Communicator {
        let group = Group {
            context: 0,
            members: (0..transport.size()).collect(),
            rank: transport.rank(),
        };
        Communicator {
            core: Arc::new(Shared::new(Core::new(transport))),
            device,
            group: Arc::new(group),
            sequence: 0,
            deadline: DEADLINE,
        }
    }

    /// Returns the same group with another default deadline.
    #[must_use]
    pub fn with_deadline(self, deadline: Duration) -> Communicator {
        Communicator { deadline, ..self }
    }
    /// Returns the same group, whose later operations use buffers of another device.
    #[must_use]
    pub fn on_device(self, device: Arc<dyn Device>) -> Communicator {
        Communicator { device, ..self }
    }

    /// Returns the transport's name and version.
    pub fn transport(&self) -> String {
        self.core.lock().transport().name()
    }

    /// Returns the device whose buffers are exchanged.
    pub fn device(&self) -> &Arc<dyn Device> {
        &self.device
    }

    /// Closes the world once all ranks have called it and nothing is in flight. Groups that were
    /// split off are unusable afterwards.
    ///
    /// # Errors
    /// The errors of a barrier; [`CollectiveError::Invalid`] on all ranks when operations of any
    /// rank are still in flight; [`CollectiveError::Setup`] when the transport cannot be closed.
    pub fn finish(mut self, call: &Call) -> Result<(), CollectiveError> {
        self.barrier(call)?.wait()?;
        self.settle(call);
        let busy = self.core.lock().in_flight().unwrap_or_default();
        let all = self.gather_bytes(busy.as_bytes(), call)?;
        match all.iter().find(|busy| !busy.is_empty()) {
            None => self.core.lock().close(),
            Some(busy) => Err(CollectiveError::Invalid {
                operation: "finish".to_string(),
                reason: InvalidReason::InFlight {
                    operation: String::from_utf8_lossy(busy).into_owned(),
                    meanwhile: false,
                },
            }),
        }
    }

    /// Waits for operations whose handles were dropped.
    fn settle(&self, call: &Call) {
        let (start, deadline) = (Instant::now(), call.deadline.unwrap_or(self.deadline));
        while self.core.lock().abandoned_only() && start.elapsed() < deadline {
            self.core.lock().progress();
            std::thread::yield_now();
        }
    }

    pub(crate) fn start(
        &mut self,
        kind: OpKind,
        call: &Call,
        draft: OperationDraft,
    ) -> Result<Handle, CollectiveError> {
        let mut core = self.core.lock();
        core.usable(kind.name())?;
        let failed = |error: DeviceError| CollectiveError::Invalid {
            operation: kind.name().to_string(),
            reason: error.into(),
        };
        let task = Task {
            signature: draft.signature,
            label: call.label.clone(),
            deadline: call.deadline.unwrap_or(self.deadline),
            inputs: draft.inputs.map_err(failed)?,
            outputs: draft.outputs.map_err(failed)?,
            plan: draft.plan,
            next: draft.next,
        };
        let (group, device) = (Arc::clone(&self.group), Arc::clone(&self.device));
        let sequence = self.sequence;
        let id = core.start(Operation::new(group, device, sequence, task))?;
        self.sequence += 1;
        Ok(core::handle(&self.core, id, kind.name(), sequence))
    }

    /// Implements [`Collectives::split`].
    pub(crate) fn split_off(
        &mut self,
        color: Option<u32>,
        key: i64,
        call: &Call,
    ) -> Result<Option<Communicator>, CollectiveError> {
        let context = crate::hash::of(&[
            &self.group.context.to_le_bytes(),
            &self.sequence.to_le_bytes(),
            &color.unwrap_or_default().to_le_bytes(),
        ]);
        let group = self.split_group(color, key, call)?;
        Ok(group.map(|SubGroup { members, rank }| Communicator {
            core: Arc::clone(&self.core),
            device: Arc::clone(&self.device),
            group: Arc::new(Group {
                context,
                members,
                rank,
            }),
            sequence: 0,
            deadline: self.deadline,
        }))
    }

    /// Returns the same ranks as another group, whose operations are numbered from 0.
    pub(crate) fn renewed(self, name: &str) -> Communicator {
        let own = &self.group;
        let group = Group {
            context: crate::hash::of(&[&own.context.to_le_bytes(), name.as_bytes()]),
            members: own.members.clone(),
            rank: own.rank,
        };
        Communicator {
            group: Arc::new(group),
            sequence: 0,
            ..self
        }
    }

    /// Returns the core that serves all groups of this world.
    pub(crate) fn core(&self) -> &Arc<Shared> {
        &self.core
    }

    fn own_rank(&self) -> GroupRank {
        GroupRank {
            rank: self.group.rank,
            size: self.group.members.len(),
        }
    }

    fn inputs(&self, slices: &[&Slice]) -> Regions {
        let one = |slice: &&Slice| Region::input(&*self.device, slice);
        slices.iter().map(one).collect()
    }

    fn outputs(&self, slices: &[&Slice]) -> Regions {
        let one = |slice: &&Slice| Region::output(&*self.device, slice);
        slices.iter().map(one).collect()
    }

    fn signature(&self, kind: OpKind, call: &Call, data: &Slice, elements: usize) -> Signature {
        Signature {
            element: Some(data.element()),
            elements: elements as u64,
            ..Signature::of(kind, &call.label)
        }
    }
}

pub(crate) type Regions = Result<Vec<Region>, DeviceError>;

/// An operation whose memory may still turn out to be unavailable.
pub(crate) struct OperationDraft {
    pub signature: Signature,
    pub inputs: Regions,
    pub outputs: Regions,
    pub plan: CollectivePlan,
    pub next: Option<Next>,
}

impl Collectives for Communicator {
    fn rank(&self) -> usize {
        self.group.rank
    }

    fn size(&self) -> usize {
        self.group.members.len()
    }

    fn members(&self) -> &[usize] {
        &self.group.members
    }

    fn sequence(&self) -> u64 {
        self.sequence
    }

    fn deadline(&self) -> Duration {
        self.deadline
    }

    fn all_to_all(
        &mut self,
        input: &Slice,
        output: &Slice,
        algorithm: Algorithm,
        call: &Call,
    ) -> Result<Handle, CollectiveError> {
        let kind = OpKind::AllToAll;
        let (part, hops) = checks::all_to_all(input, output, algorithm, self.size())?;
        let (rank, sizes) = (self.rank(), vec![part; self.size()]);
        let hop_code = hops.as_ref().map_or(0, HopOrder::code);
        let plan = match hops {
            None => schedules::all_to_all(rank, &sizes, &sizes),
            Some(hops) => hierarchical::equal(hops, rank, part),
        };
        let draft = OperationDraft {
            signature: Signature {
                hop_code,
                ..self.signature(kind, call, input, input.elements())
            },
            inputs: self.inputs(&[input]),
            outputs: self.outputs(&[output]),
            plan,
            next: None,
        };
        self.start(kind, call, draft)
    }

    fn all_to_all_v(
        &mut self,
        input: &Slice,
        sends: &[usize],
        output: &Slice,
        receives: &[usize],
        algorithm: Algorithm,
        call: &Call,
    ) -> Result<Handle, CollectiveError> {
        let kind = OpKind::AllToAllByCounts;
        let own = self.own_rank();
        let Counted {
            sends,
            receives,
            hops,
        } = checks::all_to_all_v(
            Parts {
                slice: input,
                counts: sends,
            },
            Parts {
                slice: output,
                counts: receives,
            },
            algorithm,
            own,
        )?;
        // Only the counted elements become regions, so bytes behind them stay untouched even
        // where the slice is copied through the host.
        let input = &input.head(sends.iter().sum());
        let output = &output.head(receives.iter().sum());
        let hop_code = hops.as_ref().map_or(0, HopOrder::code);
        let (plan, next) = match hops {
            None => (schedules::all_to_all(self.rank(), &sends, &receives), None),
            Some(hops) => {
                let (first, next) = hierarchical::counted(hops, self.rank(), sends, receives);
                (first, Some(next))
            }
        };
        let draft = OperationDraft {
            signature: Signature {
                hop_code,
                ..self.signature(kind, call, input, 0)
            },
            inputs: self.inputs(&[input]),
            outputs: self.outputs(&[output]),
            plan,
            next,
        };
        self.start(kind, call, draft)
    }

    fn all_gather(
        &mut self,
        input: &Slice,
        output: &Slice,
        call: &Call,
    ) -> Result<Handle, CollectiveError> {
        let kind = OpKind::AllGather;
        let own = self.own_rank();
        checks::all_gather(input, output, own)?;
        let plan = schedules::all_gather(self.rank(), &vec![input.bytes(); self.size()]);
        let draft = OperationDraft {
            signature: self.signature(kind, call, input, input.elements()),
            inputs: self.inputs(&[input]),
            outputs: self.outputs(&[output]),
            plan,
            next: None,
        };
        self.start(kind, call, draft)
    }

    fn reduce_scatter(
        &mut self,
        input: &Slice,
        output: &Slice,
        reduction: Reduction,
        call: &Call,
    ) -> Result<Handle, CollectiveError> {
        let counts = checks::reduce_scatter(input, output, self.size())?;
        self.reduce_scatter_v(input, &counts, output, reduction, call)
    }

    fn reduce_scatter_v(
        &mut self,
        input: &Slice,
        counts: &[usize],
        output: &Slice,
        reduction: Reduction,
        call: &Call,
    ) -> Result<Handle, CollectiveError> {
        let kind = OpKind::ReduceScatter;
        let own = self.own_rank();
        let sizes = checks::reduce_scatter_v(input, counts, output, own)?;
        let draft = OperationDraft {
            signature: Signature {
                reduction: Some(reduction),
                ..self.signature(kind, call, input, input.elements())
            },
            inputs: self.inputs(&[input]),
            outputs: self.outputs(&[output]),
            plan: schedules::reduce_scatter(self.rank(), &sizes, input.element(), reduction),
            next: None,
        };
        self.start(kind, call, draft)
    }

    fn all_reduce(
        &mut self,
        input: &Slice,
        output: &Slice,
        reduction: Reduction,
        call: &Call,
    ) -> Result<Handle, CollectiveError> {
        let kind = OpKind::AllReduce;
        checks::all_reduce(input, output)?;
        let (rank, size, element) = (self.rank(), self.size(), input.element());
        let draft = OperationDraft {
            signature: Signature {
                reduction: Some(reduction),
                ..self.signature(kind, call, input, input.elements())
            },
            inputs: self.inputs(&[input]),
            outputs: self.outputs(&[output]),
            plan: schedules::all_reduce(rank, size, input.bytes(), element, reduction),
            next: None,
        };
        self.start(kind, call, draft)
    }

    fn broadcast(
        &mut self,
        data: &Slice,
        root: usize,
        call: &Call,
    ) -> Result<Handle, CollectiveError> {
        let kind = OpKind::Broadcast;
        checks::broadcast(root, self.size())?;
        let region = if self.rank() == root {
            Region::both(&*self.device, data)
        } else {
            Region::output(&*self.device, data)
        };
        let draft = OperationDraft {
            signature: Signature {
                root: root as u32,
                ..self.signature(kind, call, data, data.elements())
            },
            inputs: Ok(Vec::new()),
            outputs: region.map(|region| vec![region]),
            plan: schedules::broadcast(self.rank(), self.size(), root, data.bytes()),
            next: None,
        };
        self.start(kind, call, draft)
    }

    fn exchange(
        &mut self,
        sends: &[Transfer],
        receives: &[Transfer],
        call: &Call,
    ) -> Result<Handle, CollectiveError> {
        let kind = OpKind::Exchange;
        let own = self.own_rank();
        checks::transfers(kind, own, sends, receives)?;
        let slices = |list| -> Vec<&Slice> { <[Transfer]>::iter(list).map(|t| &t.slice).collect() };
        let draft = OperationDraft {
            signature: Signature::of(kind, &call.label),
            inputs: self.inputs(&slices(sends)),
            outputs: self.outputs(&slices(receives)),
            plan: schedules::exchange(
                self.rank(),
                &hierarchical::sizes(sends),
                &hierarchical::sizes(receives),
            ),
            next: None,
        };
        self.start(kind, call, draft)
    }

    fn exchange_counts(
        &mut self,
        algorithm: Algorithm,
        blocks_per_peer: usize,
        units: &[u64],
        call: &Call,
    ) -> Result<HopCounts, CollectiveError> {
        let kind = OpKind::Agree;
        checks::units(kind, blocks_per_peer, units.len(), self.size())?;
        let exchange = hierarchical::CountExchange::new(algorithm, self.size(), kind)?;
        let (plan, next) = exchange.plan(self.rank(), blocks_per_peer, units);
        let draft = OperationDraft {
            signature: Signature {
                hop_code: exchange.hops.code(),
                elements: blocks_per_peer as u64,
                ..Signature::of(kind, &call.label)
            },
            inputs: Ok(Vec::new()),
            outputs: Ok(Vec::new()),
            plan,
            next: Some(next),
        };
        self.start(kind, call, draft)?.wait()?;
        exchange.result(kind)
    }

    fn exchange_with(
        &mut self,
        sends: &[Transfer],
        receives: &[Transfer],
        schedule: &dyn Schedule,
        call: &Call,
    ) -> Result<Handle, CollectiveError> {
        let kind = OpKind::Exchange;
        let own = self.own_rank();
        checks::transfers(kind, own, sends, receives)?;
        let (to, from) = (hierarchical::sizes(sends), hierarchical::sizes(receives));
        let plan = schedule.plan(own, &to, &from);
        let plan = plan.map_err(|error| checks::invalid(kind, error))?;
        let slices = |list| -> Vec<&Slice> { <[Transfer]>::iter(list).map(|t| &t.slice).collect() };
        let draft = OperationDraft {
            signature: Signature {
                hop_code: schedule.code(),
                ..Signature::of(kind, &call.label)
            },
            inputs: self.inputs(&slices(sends)),
            outputs: self.outputs(&slices(receives)),
            plan,
            next: None,
        };
        self.start(kind, call, draft)
    }

    fn progress_thread(&mut self) -> Option<Arc<ProgressThread>> {
        // Other devices are excluded, because their received data are copied back at the end of
        // an operation, on the caller's own stream.
        if !matches!(self.device.info().target, Target::Cpu(_)) {
            return None;
        }
        let running = self.core.lock().progress_thread();
        running.or_else(|| core::start_progress_thread(&self.core))
    }

    fn barrier(&mut self, call: &Call) -> Result<Handle, CollectiveError> {
        let draft = OperationDraft {
            signature: Signature::of(OpKind::Barrier, &call.label),
            inputs: Ok(Vec::new()),
            outputs: Ok(Vec::new()),
            plan: schedules::barrier(self.rank(), self.size()),
            next: None,
        };
        self.start(OpKind::Barrier, call, draft)
    }

    fn gather_numbers(
        &mut self,
        own: &[u64],
        call: &Call,
    ) -> Result<Vec<Vec<u64>>, CollectiveError> {
        let bytes: Vec<u8> = own.iter().flat_map(|n| n.to_le_bytes()).collect();
        let all = self.gather_host(&bytes, &vec![bytes.len(); self.size()], call)?;
        Ok(numbers(&all, own.len(), self.size()))
    }

    fn gather_bytes(&mut self, own: &[u8], call: &Call) -> Result<Vec<Vec<u8>>, CollectiveError> {
        let lengths = self.gather_numbers(&[own.len() as u64], call)?;
        let sizes: Vec<usize> = lengths.concat().into_iter().map(|n| n as usize).collect();
        let all = self.gather_host(own, &sizes, call)?;
        let starts = schedules::offsets(&sizes);
        Ok(starts
            .windows(2)
            .map(|w| all[w[0]..w[1]].to_vec())
            .collect())
    }

    fn split(
        &mut self,
        color: Option<u32>,
        key: i64,
        call: &Call,
    ) -> Result<Option<Box<dyn Collectives>>, CollectiveError> {
        let group = self.split_off(color, key, call)?;
        Ok(group.map(|group| Box::new(group) as Box<dyn Collectives>))
    }
}

#[cfg(test)]
#[path = "communicator_tests.rs"]
mod tests;
