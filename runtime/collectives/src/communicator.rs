//! Operations over any transport.

use crate::api::{Algorithm, Call, Collectives, Transfer};
use crate::checks::{self, Counted};
use crate::core::{Core, Shared};
use crate::eager::{Kind, Signature};
use crate::groups::numbers;
use crate::handle::{Handle, lock};
use crate::memory::Region;
use crate::operation::{Group, Next, Operation, Task};
use crate::plan::{self, HopCounts, HopOrder, Plan, Schedule};
use crate::transport::Transport;
use crate::{CollectiveError, ProgressThread, Reduction, Slice, hierarchical};
use moesaic_kernel::Target;
use moesaic_target::{Device, DeviceError};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long an operation may take where nothing else is said.
pub const DEADLINE: Duration = Duration::from_secs(60);

/// A group of ranks over an transport.
pub struct Communicator {
    core: Arc<Shared>,
    device: Arc<dyn Device>,
    pub(crate) group: Arc<Group>,
    sequence: u64,
    deadline: Duration,
}

impl Communicator {
    /// All ranks of an transport. Operations use buffers of `device`.
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

    /// The same group with another deadline for operations that name none.
    #[must_use]
    pub fn with_deadline(self, deadline: Duration) -> Communicator {
        Communicator { deadline, ..self }
    }
    /// The same group, whose later operations use buffers of another device.
    #[must_use]
    pub fn on_device(self, device: Arc<dyn Device>) -> Communicator {
        Communicator { device, ..self }
    }

    /// What carries the messages, with its version.
    pub fn transport(&self) -> String {
        lock(&self.core).transport().name()
    }

    /// The device whose buffers are exchanged.
    pub fn device(&self) -> &Arc<dyn Device> {
        &self.device
    }

    /// Ends the world in good order, when all ranks have come to it and nothing is under
    /// way. Groups that were split off can do nothing after it.
    ///
    /// # Errors
    /// As a barrier; [`CollectiveError::Invalid`] on all ranks when operations of any are
    /// still in flight; [`CollectiveError::Setup`] when the transport cannot be closed.
    pub fn finish(mut self, call: &Call) -> Result<(), CollectiveError> {
        self.barrier(call)?.wait()?;
        self.settle(call);
        let busy = lock(&self.core).in_flight().unwrap_or_default();
        let all = self.gather_bytes(busy.as_bytes(), call)?;
        match all.iter().find(|busy| !busy.is_empty()) {
            None => lock(&self.core).close(),
            Some(busy) => Err(CollectiveError::Invalid {
                operation: "finish".to_string(),
                reason: format!(
                    "{} is still in flight; wait for it first",
                    String::from_utf8_lossy(busy)
                ),
            }),
        }
    }

    /// Waits for operations whose handles were dropped.
    fn settle(&self, call: &Call) {
        let (start, deadline) = (Instant::now(), call.deadline.unwrap_or(self.deadline));
        while lock(&self.core).abandoned_only() && start.elapsed() < deadline {
            lock(&self.core).progress();
            std::thread::yield_now();
        }
    }

    pub(crate) fn start(
        &mut self,
        kind: Kind,
        call: &Call,
        job: Job,
    ) -> Result<Handle, CollectiveError> {
        let mut core = lock(&self.core);
        core.usable(kind.name())?;
        let failed = |error: DeviceError| CollectiveError::Invalid {
            operation: kind.name().to_string(),
            reason: error.to_string(),
        };
        let task = Task {
            signature: job.signature,
            label: call.label.clone(),
            deadline: call.deadline.unwrap_or(self.deadline),
            inputs: job.inputs.map_err(failed)?,
            outputs: job.outputs.map_err(failed)?,
            plan: job.plan,
            next: job.next,
        };
        let (group, device) = (Arc::clone(&self.group), Arc::clone(&self.device));
        let sequence = self.sequence;
        let id = core.start(Operation::new(group, device, sequence, task))?;
        self.sequence += 1;
        Ok(Handle::new(&self.core, id, kind.name(), sequence))
    }

    /// [`Collectives::split`].
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
        Ok(group.map(|(members, rank)| Communicator {
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

    /// The same ranks as another group, whose operations are numbered from 0.
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

    /// What carries all groups of this world.
    pub(crate) fn core(&self) -> &Arc<Shared> {
        &self.core
    }

    fn inputs(&self, slices: &[&Slice]) -> Regions {
        let one = |slice: &&Slice| Region::input(&*self.device, slice);
        slices.iter().map(one).collect()
    }

    fn outputs(&self, slices: &[&Slice]) -> Regions {
        let one = |slice: &&Slice| Region::output(&*self.device, slice);
        slices.iter().map(one).collect()
    }

    fn signature(&self, kind: Kind, call: &Call, data: &Slice, elements: usize) -> Signature {
        Signature {
            element: Some(data.element()),
            elements: elements as u64,
            ..Signature::of(kind, &call.label)
        }
    }
}

pub(crate) type Regions = Result<Vec<Region>, DeviceError>;

/// An operation before its memory is known to be there.
pub(crate) struct Job {
    pub signature: Signature,
    pub inputs: Regions,
    pub outputs: Regions,
    pub plan: Plan,
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
        let kind = Kind::AllToAll;
        let (part, hops) = checks::all_to_all(input, output, algorithm, self.size())?;
        let (rank, sizes) = (self.rank(), vec![part; self.size()]);
        let ways = hops.as_ref().map_or(0, HopOrder::code);
        let plan = match hops {
            None => plan::all_to_all(rank, &sizes, &sizes),
            Some(hops) => hierarchical::equal(hops, rank, part),
        };
        let job = Job {
            signature: Signature {
                ways,
                ..self.signature(kind, call, input, input.elements())
            },
            inputs: self.inputs(&[input]),
            outputs: self.outputs(&[output]),
            plan,
            next: None,
        };
        self.start(kind, call, job)
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
        let kind = Kind::AllToAllByCounts;
        let own = (self.rank(), self.size());
        let Counted {
            sends,
            receives,
            hops,
        } = checks::all_to_all_v((input, sends), (output, receives), algorithm, own)?;
        // What lies behind is left alone, also where the slice is copied.
        let input = &input.head(sends.iter().sum());
        let output = &output.head(receives.iter().sum());
        let ways = hops.as_ref().map_or(0, HopOrder::code);
        let (plan, next) = match hops {
            None => (plan::all_to_all(self.rank(), &sends, &receives), None),
            Some(hops) => {
                let (first, next) = hierarchical::counted(hops, self.rank(), sends, receives);
                (first, Some(next))
            }
        };
        let job = Job {
            signature: Signature {
                ways,
                ..self.signature(kind, call, input, 0)
            },
            inputs: self.inputs(&[input]),
            outputs: self.outputs(&[output]),
            plan,
            next,
        };
        self.start(kind, call, job)
    }

    fn all_gather(
        &mut self,
        input: &Slice,
        output: &Slice,
        call: &Call,
    ) -> Result<Handle, CollectiveError> {
        let kind = Kind::AllGather;
        checks::all_gather(input, output, (self.rank(), self.size()))?;
        let plan = plan::all_gather(self.rank(), &vec![input.bytes(); self.size()]);
        let job = Job {
            signature: self.signature(kind, call, input, input.elements()),
            inputs: self.inputs(&[input]),
            outputs: self.outputs(&[output]),
            plan,
            next: None,
        };
        self.start(kind, call, job)
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
        let kind = Kind::ReduceScatter;
        let own = (self.rank(), self.size());
        let sizes = checks::reduce_scatter_v(input, counts, output, own)?;
        let job = Job {
            signature: Signature {
                reduction: Some(reduction),
                ..self.signature(kind, call, input, input.elements())
            },
            inputs: self.inputs(&[input]),
            outputs: self.outputs(&[output]),
            plan: plan::reduce_scatter(self.rank(), &sizes, input.element(), reduction),
            next: None,
        };
        self.start(kind, call, job)
    }

    fn all_reduce(
        &mut self,
        input: &Slice,
        output: &Slice,
        reduction: Reduction,
        call: &Call,
    ) -> Result<Handle, CollectiveError> {
        let kind = Kind::AllReduce;
        checks::all_reduce(input, output)?;
        let (rank, size, element) = (self.rank(), self.size(), input.element());
        let job = Job {
            signature: Signature {
                reduction: Some(reduction),
                ..self.signature(kind, call, input, input.elements())
            },
            inputs: self.inputs(&[input]),
            outputs: self.outputs(&[output]),
            plan: plan::all_reduce(rank, size, input.bytes(), element, reduction),
            next: None,
        };
        self.start(kind, call, job)
    }

    fn broadcast(
        &mut self,
        data: &Slice,
        root: usize,
        call: &Call,
    ) -> Result<Handle, CollectiveError> {
        let kind = Kind::Broadcast;
        checks::broadcast(root, self.size())?;
        let region = if self.rank() == root {
            Region::both(&*self.device, data)
        } else {
            Region::output(&*self.device, data)
        };
        let job = Job {
            signature: Signature {
                root: root as u32,
                ..self.signature(kind, call, data, data.elements())
            },
            inputs: Ok(Vec::new()),
            outputs: region.map(|region| vec![region]),
            plan: plan::broadcast(self.rank(), self.size(), root, data.bytes()),
            next: None,
        };
        self.start(kind, call, job)
    }

    fn exchange(
        &mut self,
        sends: &[Transfer],
        receives: &[Transfer],
        call: &Call,
    ) -> Result<Handle, CollectiveError> {
        let kind = Kind::Exchange;
        checks::transfers(kind, self.rank(), self.size(), sends, receives)?;
        let slices = |list| -> Vec<&Slice> { <[Transfer]>::iter(list).map(|t| &t.slice).collect() };
        let job = Job {
            signature: Signature::of(kind, &call.label),
            inputs: self.inputs(&slices(sends)),
            outputs: self.outputs(&slices(receives)),
            plan: plan::exchange(
                self.rank(),
                &hierarchical::sizes(sends),
                &hierarchical::sizes(receives),
            ),
            next: None,
        };
        self.start(kind, call, job)
    }

    fn exchange_counts(
        &mut self,
        algorithm: Algorithm,
        pieces: usize,
        units: &[u64],
        call: &Call,
    ) -> Result<HopCounts, CollectiveError> {
        let kind = Kind::Agree;
        checks::units(kind, pieces, units.len(), self.size())?;
        let exchange = hierarchical::CountExchange::new(algorithm, self.size(), kind)?;
        let (plan, next) = exchange.plan(self.rank(), pieces, units);
        let job = Job {
            signature: Signature {
                ways: exchange.hops.code(),
                elements: pieces as u64,
                ..Signature::of(kind, &call.label)
            },
            inputs: Ok(Vec::new()),
            outputs: Ok(Vec::new()),
            plan,
            next: Some(next),
        };
        self.start(kind, call, job)?.wait()?;
        exchange.result(kind)
    }

    fn exchange_with(
        &mut self,
        sends: &[Transfer],
        receives: &[Transfer],
        schedule: &dyn Schedule,
        call: &Call,
    ) -> Result<Handle, CollectiveError> {
        let kind = Kind::Exchange;
        let own = (self.rank(), self.size());
        checks::transfers(kind, own.0, own.1, sends, receives)?;
        let (to, from) = (hierarchical::sizes(sends), hierarchical::sizes(receives));
        let plan = schedule.plan(own, &to, &from);
        let plan = plan.map_err(|reason| checks::invalid(kind, reason))?;
        let slices = |list| -> Vec<&Slice> { <[Transfer]>::iter(list).map(|t| &t.slice).collect() };
        let job = Job {
            signature: Signature {
                ways: schedule.code(),
                ..Signature::of(kind, &call.label)
            },
            inputs: self.inputs(&slices(sends)),
            outputs: self.outputs(&slices(receives)),
            plan,
            next: None,
        };
        self.start(kind, call, job)
    }

    fn progress_thread(&mut self) -> Option<Arc<ProgressThread>> {
        // What other devices receive is put there when an operation ends, by their own stream.
        if !matches!(self.device.info().target, Target::Cpu(_)) {
            return None;
        }
        let running = lock(&self.core).progress_thread();
        running.or_else(|| ProgressThread::start(&self.core))
    }

    fn barrier(&mut self, call: &Call) -> Result<Handle, CollectiveError> {
        let job = Job {
            signature: Signature::of(Kind::Barrier, &call.label),
            inputs: Ok(Vec::new()),
            outputs: Ok(Vec::new()),
            plan: plan::barrier(self.rank(), self.size()),
            next: None,
        };
        self.start(Kind::Barrier, call, job)
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
        let starts = plan::offsets(&sizes);
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
mod tests {
    use super::*;
    use moesaic_cpu::CpuDevice;

    /// What another thread begins in a group while the world is closed must not wait for ever.
    #[test]
    fn an_operation_begun_while_the_world_is_closed_ends() {
        let device = Arc::new(CpuDevice::with_threads(1).unwrap());
        let mut transports = crate::threads::world(2).into_iter();
        let (own, _other) = (transports.next().unwrap(), transports.next().unwrap());
        let mut world = Communicator::new(Box::new(own), device);
        let barrier = world.barrier(&Call::new("late")).unwrap();
        let error = lock(&world.core).close().unwrap_err().to_string();
        assert!(error.contains("was begun meanwhile"), "{error}");
        let error = barrier.wait().unwrap_err().to_string();
        assert!(error.contains("was begun meanwhile"), "{error}");
        assert!(world.barrier(&Call::new("after")).is_err());
    }

    /// Messages of a rank that makes no call travel, and the progress thread ends with its last holder.
    #[test]
    fn operations_go_on_between_calls() {
        let ranks = crate::threads::run(
            2,
            |_| Ok(Arc::new(CpuDevice::with_threads(1).unwrap()) as Arc<dyn Device>),
            |mut world| {
                let elements = 1 << 16;
                let buffer = |value: u8| {
                    let buffer = Arc::new(world.device.alloc(elements).unwrap());
                    let bytes = vec![value; elements];
                    world.device.upload(&bytes, &buffer, 0).unwrap();
                    Slice::whole(&buffer, crate::Element::U8)
                };
                let peer = 1 - world.rank();
                let (sent, received) = (buffer(world.rank() as u8), buffer(9));
                let progress_thread = world.progress_thread().unwrap();
                assert!(Arc::ptr_eq(
                    &progress_thread,
                    &world.progress_thread().unwrap()
                ));
                let to = |slice: &Slice| Transfer {
                    peer,
                    slice: slice.clone(),
                };
                let call = Call::new("rows");
                let exchange = world.exchange(&[to(&sent)], &[to(&received)], &call);
                let until = Instant::now() + Duration::from_secs(40);
                while lock(&world.core).is_busy() && Instant::now() < until {
                    std::thread::sleep(Duration::from_millis(1));
                }
                let before = Instant::now();
                assert!(exchange.unwrap().wait_timed().unwrap() <= before);
                let mut bytes = vec![0; elements];
                let buffer = received.buffer();
                world.device.download(buffer, 0, &mut bytes).unwrap();
                assert!(bytes.iter().all(|byte| *byte == peer as u8));
                drop(progress_thread);
                assert!(lock(&world.core).progress_thread().is_none());
                world.finish(&Call::new("end")).unwrap();
            },
        );
        for rank in ranks.unwrap() {
            rank.unwrap();
        }
    }

    /// The same where the failure is older than the operation.
    #[test]
    fn an_operation_after_the_end_has_its_deadline() {
        let device = Arc::new(CpuDevice::with_threads(1).unwrap());
        let mut transports = crate::threads::world(2).into_iter();
        let (own, _other) = (transports.next().unwrap(), transports.next().unwrap());
        let mut world = Communicator::new(Box::new(own), device);
        let call = Call::new("late").within(Duration::from_millis(1));
        let barrier = world.barrier(&call).unwrap();
        lock(&world.core).fail_before(CollectiveError::Setup {
            reason: "the world was ended".to_string(),
        });
        let error = barrier.wait().unwrap_err();
        assert!(matches!(error, CollectiveError::Deadline { .. }), "{error}");
    }
}
