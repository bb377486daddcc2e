//! The operations of a group of ranks with a GPU each.

use super::comm::Comm;
use super::launch::{Operands, StreamLaunch, done};
use super::options::Sums;
use super::table::{BYTE, kind_of, op_of};
use super::watch::DeviceOperation;
use super::world::{NcclWorld, OnStream, overhear, report_failure};
use crate::api::{Call, Collectives, Transfer};
use crate::checks::{self, Counted, Parts};
use crate::communicator::Communicator;
use crate::eager::{OpKind, Signature};
use crate::error::ErrorSite;
use crate::handle::Handle;
use crate::operation::{Group, Next};
use crate::schedules::Algorithm;
use crate::schedules::{self, CollectivePlan, GroupRank, HopCounts, HopOrder, Schedule};
use crate::sub_group::numbers;
use crate::{CollectiveError, CommElement, InvalidReason, Reduction, Slice, hierarchical};
use moesaic_target::{Device, DeviceError, StreamDevice};
use std::ffi::c_int;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A group of ranks with a GPU each, over NCCL or RCCL.
pub struct Nccl {
    pub(super) world: Arc<NcclWorld>,
    pub(super) comm: Arc<Comm>,
    /// The same ranks over eager messages, where a transport carries them.
    pub(super) control: Option<Communicator>,
    pub(super) group: Arc<Group>,
    pub(super) sequence: u64,
    pub(super) deadline: Duration,
}

type Done = Result<(), CollectiveError>;
pub(super) type BegunHandle = Result<Handle, CollectiveError>;

/// An operation before it is on the stream.
pub(super) struct Task<'a> {
    pub(super) kind: OpKind,
    pub(super) call: &'a Call,
    pub(super) signature: Signature,
    /// The plan by which ranks compare the operation; `None` compares only the signature.
    pub(super) agreement: Option<CollectivePlan>,
    pub(super) keep: Vec<Slice>,
    /// The reason why the host has to wait in the middle of the operation, if it has to.
    pub(super) waits: Option<&'static str>,
    /// The stream of the operation, where it is not the device's own.
    pub(super) overlapped: Option<Arc<dyn StreamDevice>>,
}

impl Nccl {
    /// Returns the same group with another default deadline.
    #[must_use]
    pub fn with_deadline(mut self, deadline: Duration) -> Nccl {
        self.control = self.control.map(|control| control.with_deadline(deadline));
        Nccl { deadline, ..self }
    }

    /// Returns the library's name and version.
    pub fn transport(&self) -> String {
        self.world.api.name()
    }

    /// Returns the device whose buffers are exchanged.
    pub fn device(&self) -> &Arc<dyn Device> {
        &self.world.device
    }

    /// Watches everything launched on the device's stream until now, such as a graph with
    /// captured operations, which have no deadline by themselves. All ranks call it.
    ///
    /// # Errors
    /// As those of [`Collectives`].
    pub fn watch(&mut self, call: &Call) -> Result<Handle, CollectiveError> {
        let task = self.task(OpKind::Graph, call);
        self.start(task, |_| Ok(()))
    }

    pub(super) fn own_rank(&self) -> GroupRank {
        GroupRank {
            rank: self.group.rank,
            size: self.group.members.len(),
        }
    }

    pub(super) fn task<'a>(&self, kind: OpKind, call: &'a Call) -> Task<'a> {
        Task {
            kind,
            call,
            signature: Signature::of(kind, &call.label),
            agreement: None,
            keep: Vec::new(),
            waits: None,
            overlapped: None,
        }
    }

    fn data_task<'a>(
        &self,
        kind: OpKind,
        call: &'a Call,
        data: &Slice,
        elements: usize,
    ) -> Task<'a> {
        let mut task = self.task(kind, call);
        task.signature.element = Some(data.element());
        task.signature.elements = elements as u64;
        task
    }

    /// Fails with an earlier failure of this rank or another.
    pub(super) fn usable(&mut self, kind: OpKind) -> Done {
        let board = &self.world.board;
        let usable = board.usable(kind.name());
        let Some(control) = &self.control else {
            return usable;
        };
        report_failure(board, Some(control.core()));
        usable?;
        overhear(board, control.core());
        board.usable(kind.name())
    }

    fn at(&self, kind: OpKind, call: &Call) -> Box<ErrorSite> {
        Box::new(ErrorSite {
            operation: kind.name(),
            sequence: self.sequence(),
            label: call.label.clone(),
            phase: "transfer",
            rank: self.group.members[self.group.rank],
        })
    }

    /// Starts an operation: first the comparison with other ranks, then what `launch` puts on the
    /// stream. Later failures are reported by the handle.
    pub(super) fn start(
        &mut self,
        task: Task<'_>,
        launch: impl FnOnce(&StreamLaunch<'_>) -> Done,
    ) -> BegunHandle {
        self.usable(task.kind)?;
        let capturing = self.world.device.capturing();
        let deadline = task.call.deadline.unwrap_or(self.deadline);
        let (kind, sequence) = (task.kind, self.sequence());
        let at = self.at(kind, task.call);
        // The comparison starts before the launch, so that it runs while the operation is on the
        // stream.
        let agreement = self.agree(&task)?;
        // Counted even if the launch fails below, because the other ranks count this call too.
        self.sequence += 1;
        let board = Arc::clone(&self.world.board);
        let id = board.begin(DeviceOperation {
            at: at.clone(),
            group: Arc::clone(&self.group),
            comm: Arc::clone(&self.comm),
            started: Instant::now(),
            deadline,
            event: None,
            keep: task.keep,
            agreed: false,
            done: false,
            abandoned: false,
        });
        let mut work = OnStream {
            world: Arc::clone(&self.world),
            id,
            control: self
                .control
                .as_ref()
                .map(|control| Arc::clone(control.core())),
            agreement,
            overlapped: None,
        };
        // Nothing of a captured graph runs now, so its ranks can wait for each other here; during
        // a replay nobody could compare them.
        let agreed = match (&capturing, work.agreement.take_if(|_| capturing.is_some())) {
            (Some(_), Some(agreement)) => agreement.wait(),
            _ => Ok(()),
        };
        let streams = (task.overlapped.as_deref(), capturing.is_some());
        let launched = agreed.and_then(|()| self.launch(&at, streams, launch));
        match launched {
            Ok(event) => {
                work.overlapped = event.clone().filter(|_| task.overlapped.is_some());
                board.launched(id, event);
            }
            // A failed launch fails the world, not only this call: other ranks already wait for
            // this one on their streams.
            Err(error) => board.fail(Some(id), error),
        }
        Ok(Handle::of(Box::new(work), kind.name(), sequence))
    }

    fn launch(
        &self,
        at: &ErrorSite,
        (overlapped, capturing): (Option<&dyn StreamDevice>, bool),
        launch: impl FnOnce(&StreamLaunch<'_>) -> Done,
    ) -> Result<Option<Arc<dyn moesaic_target::Event>>, CollectiveError> {
        let device = |error: DeviceError| CollectiveError::Device {
            at: Box::new(at.clone()),
            reason: Box::new(error),
        };
        let gpu = match overlapped {
            Some(stream) => stream,
            None => {
                // An operation on the device's own stream must not run at the same time as one on
                // the second stream. A captured graph cannot wait for an event outside of it.
                if !capturing {
                    self.world.join().map_err(device)?;
                }
                self.world.device.streams().map_err(device)?
            }
        };
        let stream = gpu.native_stream().map_err(device)?;
        let Some(comm) = self.comm.enter() else {
            // A failure ended the communicator a moment ago.
            self.world.board.usable(at.operation)?;
            return Ok(None);
        };
        launch(&StreamLaunch {
            world: &self.world,
            comm,
            gpu,
            stream,
            at,
            members: &self.group.members,
        })?;
        if capturing {
            return Ok(None);
        }
        let event = gpu.record().map_err(device)?;
        if overlapped.is_some() {
            self.world.set_overlap_end(&event);
        }
        Ok(Some(event))
    }

    /// Starts an operation that is messages, copies and folds alone.
    pub(super) fn start_plan(
        &mut self,
        task: Task<'_>,
        inputs: &[&Slice],
        outputs: &[&Slice],
        plan: CollectivePlan,
    ) -> BegunHandle {
        self.start_plans(task, inputs, outputs, plan, None)
    }

    pub(super) fn start_plans(
        &mut self,
        mut task: Task<'_>,
        inputs: &[&Slice],
        outputs: &[&Slice],
        plan: CollectivePlan,
        next: Option<Next>,
    ) -> BegunHandle {
        let own = |list: &[&Slice]| -> Vec<Slice> { list.iter().map(|s| (*s).clone()).collect() };
        if let (Some(graph), Some(why)) = (self.world.device.capturing(), task.waits) {
            let reason = InvalidReason::Captured {
                graph,
                why: Some(why),
            };
            return Err(checks::invalid(task.kind, reason));
        }
        let failed = |error: DeviceError| checks::invalid(task.kind, error);
        // Folds would compete with the kernels that the operation overlaps, and a plan that
        // continues needs the host, so neither is overlapped.
        let may = task.call.overlapped && next.is_none() && plan.only_moves();
        if may && self.world.device.capturing().is_none() {
            task.overlapped = Some(self.world.overlapped().map_err(failed)?);
        }
        let scratch = match task.overlapped {
            Some(_) => self.world.overlap_scratch(plan.scratch),
            None => self.world.scratch(plan.scratch),
        };
        let scratch = scratch.map_err(failed)?;
        let mut operands = Operands {
            inputs: own(inputs),
            outputs: own(outputs),
            scratch,
        };
        task.keep = [own(inputs), own(outputs), vec![operands.scratch.clone()]].concat();
        self.start(task, move |launch| launch.plan(&plan, next, &mut operands))
    }

    /// Returns whether a reduction is folded here, in rank order.
    fn folds(&self, elements: usize) -> bool {
        self.world.sums == Sums::InOrder || elements == 0
    }

    fn fold_waits(&self, element: CommElement) -> Option<&'static str> {
        let waits = self.world.fold.waits(element);
        waits.then_some("its rows are folded on the host; give `NcclOptions::fold` a device's")
    }
}

impl Collectives for Nccl {
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
    ) -> BegunHandle {
        let kind = OpKind::AllToAll;
        let (part, hops) = checks::all_to_all(input, output, algorithm, self.size())?;
        let mut task = self.data_task(kind, call, input, input.elements());
        task.signature.hop_code = hops.as_ref().map_or(0, HopOrder::code);
        let (rank, sizes) = (self.rank(), vec![part; self.size()]);
        match (hops, self.world.api.table.all_to_all()) {
            (None, Some(exchange)) if part > 0 => {
                task.keep = vec![input.clone(), output.clone()];
                let (from, to) = (input.address(), output.address());
                self.start(task, |launch| {
                    launch.together(|_, comm, stream| {
                        // SAFETY: the memory is kept until the stream has passed the operation.
                        let code = unsafe { exchange(from, to, part, BYTE, comm, stream) };
                        done("ncclAlltoAll", code)
                    })
                })
            }
            (None, _) => {
                let plan = schedules::all_to_all(rank, &sizes, &sizes);
                self.start_plan(task, &[input], &[output], plan)
            }
            (Some(hops), _) => {
                let plan = hierarchical::equal(hops, rank, part).packed();
                self.start_plan(task, &[input], &[output], plan)
            }
        }
    }

    fn all_to_all_v(
        &mut self,
        input: &Slice,
        sends: &[usize],
        output: &Slice,
        receives: &[usize],
        algorithm: Algorithm,
        call: &Call,
    ) -> BegunHandle {
        let kind = OpKind::AllToAllByCounts;
        let rank = self.rank();
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
            self.own_rank(),
        )?;
        let mut task = self.data_task(kind, call, input, 0);
        task.signature.hop_code = hops.as_ref().map_or(0, HopOrder::code);
        let list = |sizes: &[usize]| -> Vec<(usize, usize)> {
            sizes.iter().copied().enumerate().collect()
        };
        task.agreement = Some(schedules::sizes(rank, &list(&sends), &list(&receives)));
        match hops {
            None => {
                let plan = schedules::all_to_all(rank, &sends, &receives);
                self.start_plan(task, &[input], &[output], plan)
            }
            Some(hops) => {
                task.waits = Some("its second phase follows from what the first has brought");
                let (first, next) = hierarchical::counted(hops, rank, sends, receives);
                let next: Next = Box::new(|scratch| next(scratch).map(CollectivePlan::packed));
                self.start_plans(task, &[input], &[output], first.packed(), Some(next))
            }
        }
    }

    fn all_gather(&mut self, input: &Slice, output: &Slice, call: &Call) -> BegunHandle {
        let kind = OpKind::AllGather;
        let own = self.own_rank();
        checks::all_gather(input, output, own)?;
        let mut task = self.data_task(kind, call, input, input.elements());
        task.keep = vec![input.clone(), output.clone()];
        let (from, to, bytes) = (input.address(), output.address(), input.bytes());
        self.start(task, |launch| match bytes {
            0 => Ok(()),
            _ => launch.together(|table, comm, stream| {
                // SAFETY: the memory is kept until the stream has passed the operation.
                let code = unsafe { table.all_gather(from, to, bytes, BYTE, comm, stream) };
                done("ncclAllGather", code)
            }),
        })
    }

    fn reduce_scatter(
        &mut self,
        input: &Slice,
        output: &Slice,
        reduction: Reduction,
        call: &Call,
    ) -> BegunHandle {
        let counts = checks::reduce_scatter(input, output, self.size())?;
        self.reduce_scatter_v(input, &counts, output, reduction, call)
    }

    /// NCCL has no reduce-scatter of unequal parts, so the rows are always folded here.
    fn reduce_scatter_v(
        &mut self,
        input: &Slice,
        counts: &[usize],
        output: &Slice,
        reduction: Reduction,
        call: &Call,
    ) -> BegunHandle {
        let kind = OpKind::ReduceScatter;
        let own = self.own_rank();
        let sizes = checks::reduce_scatter_v(input, counts, output, own)?;
        let mut task = self.data_task(kind, call, input, input.elements());
        task.signature.reduction = Some(reduction);
        let (element, count) = (input.element(), output.elements());
        if self.folds(count) || counts.iter().any(|other| *other != count) {
            task.waits = self.fold_waits(element);
            let plan = schedules::reduce_scatter(self.rank(), &sizes, element, reduction);
            return self.start_plan(task, &[input], &[output], plan);
        }
        task.keep = vec![input.clone(), output.clone()];
        let (from, to) = (input.address(), output.address());
        let (number, op) = (kind_of(element), op_of(reduction));
        self.start(task, |launch| {
            launch.together(|table, comm, stream| {
                // SAFETY: the memory is kept until the stream has passed the operation.
                let code =
                    unsafe { table.reduce_scatter(from, to, count, number, op, comm, stream) };
                done("ncclReduceScatter", code)
            })
        })
    }

    fn all_reduce(
        &mut self,
        input: &Slice,
        output: &Slice,
        reduction: Reduction,
        call: &Call,
    ) -> BegunHandle {
        let kind = OpKind::AllReduce;
        checks::all_reduce(input, output)?;
        let mut task = self.data_task(kind, call, input, input.elements());
        task.signature.reduction = Some(reduction);
        let (element, count) = (input.element(), input.elements());
        if self.folds(count) {
            task.waits = self.fold_waits(element);
            let (rank, size) = (self.rank(), self.size());
            let plan = schedules::all_reduce(rank, size, input.bytes(), element, reduction);
            return self.start_plan(task, &[input], &[output], plan);
        }
        task.keep = vec![input.clone(), output.clone()];
        let (from, to) = (input.address(), output.address());
        let (number, op) = (kind_of(element), op_of(reduction));
        self.start(task, |launch| {
            launch.together(|table, comm, stream| {
                // SAFETY: the memory is kept until the stream has passed the operation.
                let code = unsafe { table.all_reduce(from, to, count, number, op, comm, stream) };
                done("ncclAllReduce", code)
            })
        })
    }

    fn broadcast(&mut self, data: &Slice, root: usize, call: &Call) -> BegunHandle {
        let kind = OpKind::Broadcast;
        checks::broadcast(root, self.size())?;
        let mut task = self.data_task(kind, call, data, data.elements());
        task.signature.root = root as u32;
        task.keep = vec![data.clone()];
        let (at, bytes, root) = (data.address(), data.bytes(), root as c_int);
        self.start(task, |launch| match bytes {
            0 => Ok(()),
            _ => launch.together(|table, comm, stream| {
                // SAFETY: the memory is kept until the stream has passed the operation.
                let code = unsafe { table.broadcast(at, at, bytes, BYTE, root, comm, stream) };
                done("ncclBroadcast", code)
            }),
        })
    }

    fn exchange(&mut self, sends: &[Transfer], receives: &[Transfer], call: &Call) -> BegunHandle {
        let kind = OpKind::Exchange;
        let rank = self.rank();
        checks::transfers(kind, self.own_rank(), sends, receives)?;
        let slices = |list| -> Vec<&Slice> { <[Transfer]>::iter(list).map(|t| &t.slice).collect() };
        let (to, from) = (hierarchical::sizes(sends), hierarchical::sizes(receives));
        let mut task = self.task(kind, call);
        task.agreement = Some(schedules::sizes(rank, &to, &from));
        let plan = schedules::exchange(rank, &to, &from);
        self.start_plan(task, &slices(sends), &slices(receives), plan)
    }

    fn exchange_counts(
        &mut self,
        algorithm: Algorithm,
        blocks_per_peer: usize,
        units: &[u64],
        call: &Call,
    ) -> Result<HopCounts, CollectiveError> {
        self.count_exchange(algorithm, blocks_per_peer, units, call)
    }

    fn exchange_with(
        &mut self,
        sends: &[Transfer],
        receives: &[Transfer],
        schedule: &dyn Schedule,
        call: &Call,
    ) -> BegunHandle {
        self.exchange_over_ranks(sends, receives, schedule, call)
    }

    fn barrier(&mut self, call: &Call) -> BegunHandle {
        let mut task = self.task(OpKind::Barrier, call);
        task.keep = vec![self.world.token.clone()];
        let at = self.world.token.address();
        let (number, op) = (kind_of(CommElement::I32), op_of(Reduction::Max));
        self.start(task, |launch| {
            launch.together(|table, comm, stream| {
                // SAFETY: the memory is the world's, which outlives its operations.
                let code = unsafe { table.all_reduce(at, at, 1, number, op, comm, stream) };
                done("ncclAllReduce", code)
            })
        })
    }

    fn gather_numbers(
        &mut self,
        own: &[u64],
        call: &Call,
    ) -> Result<Vec<Vec<u64>>, CollectiveError> {
        if let Some(gathered) = self.by_control(1, |control| control.gather_numbers(own, call)) {
            return gathered;
        }
        let bytes: Vec<u8> = own.iter().flat_map(|n| n.to_le_bytes()).collect();
        let all = self.gather_equal(&bytes, call)?;
        Ok(numbers(&all, own.len(), self.size()))
    }

    fn gather_bytes(&mut self, own: &[u8], call: &Call) -> Result<Vec<Vec<u8>>, CollectiveError> {
        if let Some(gathered) = self.by_control(2, |control| control.gather_bytes(own, call)) {
            return gathered;
        }
        let lengths = self.gather_numbers(&[own.len() as u64], call)?.concat();
        let lengths: Vec<usize> = lengths.into_iter().map(|n| n as usize).collect();
        let most = lengths.iter().copied().max().unwrap_or(0).max(1);
        let mut padded = own.to_vec();
        padded.resize(most, 0);
        let all = self.gather_equal(&padded, call)?;
        let parts = all.chunks(most).zip(&lengths);
        Ok(parts
            .map(|(part, length)| part[..*length].to_vec())
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
