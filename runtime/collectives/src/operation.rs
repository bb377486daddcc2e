//! One operation in flight on one rank.

use crate::eager::{MessageKey, PartSizes, Signature};
use crate::error::ErrorSite;
use crate::memory::Region;
use crate::schedules::{self, BufferRef, CollectivePlan, Copy, ExpectedCount, ScheduleStep, Span};
use crate::transport::{MemoryRange, Request};
use crate::{CollectiveError, reduce};
use moesaic_target::Device;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Ranks that call operations together.
#[derive(Debug)]
pub(crate) struct Group {
    /// A number unique among the groups of the world.
    pub context: u64,
    /// The ranks in the world, by rank in the group.
    pub members: Vec<usize>,
    /// This rank in the group.
    pub rank: usize,
}

/// Continues a plan, given the scratch memory that its first part has filled.
pub(crate) type Next = Box<dyn FnOnce(&[u8]) -> Result<CollectivePlan, Unequal> + Send>;

/// A number from another rank that differs from this rank's.
pub(crate) struct Unequal {
    pub what: &'static str,
    /// The other rank, in the group.
    pub peer: usize,
    pub ours: u64,
    pub theirs: u64,
}

/// The work of an operation.
pub(crate) struct Task {
    pub signature: Signature,
    pub label: String,
    pub deadline: Duration,
    pub inputs: Vec<Region>,
    pub outputs: Vec<Region>,
    pub plan: CollectivePlan,
    pub next: Option<Next>,
}

/// All messages of one exchange from one rank to another. They are sent together.
pub(crate) struct Bundle {
    /// The other rank, in the world.
    pub peer: usize,
    pub sizes: PartSizes,
    /// The memory of each message that is not empty, in message order.
    pub parts: Vec<MemoryRange>,
}

/// A bundle that this rank receives.
pub(crate) struct Incoming {
    pub bundle: Bundle,
    /// The rendezvous, once its announcement has arrived.
    pub rendezvous: Option<Request>,
}

pub(crate) struct Operation {
    pub group: Arc<Group>,
    pub device: Arc<dyn Device>,
    pub sequence: u64,
    pub signature: Signature,
    pub started: Instant,
    pub deadline: Duration,
    /// The number of the current exchange.
    pub phase: u32,
    /// Rendezvous messages in flight to other ranks, each with its receiver in the world.
    pub sending: Vec<(usize, Request)>,
    pub receiving: Vec<Incoming>,
    /// Whether the caller has dropped the handle.
    pub abandoned: bool,
    label: String,
    phase_name: &'static str,
    steps: VecDeque<ScheduleStep>,
    next: Option<Next>,
    inputs: Vec<Region>,
    outputs: Vec<Region>,
    scratch: Region,
}

// SAFETY: it owns, or keeps alive, all memory that its addresses point to.
unsafe impl Send for Operation {}

/// The next action of an operation.
pub(crate) enum Advance {
    /// Send and receive these bundles, then do these copies while they are in flight.
    Exchange(Vec<Bundle>, Vec<Copy>),
    /// Nothing; the operation is finished.
    Finished,
}

impl Operation {
    pub fn new(group: Arc<Group>, device: Arc<dyn Device>, sequence: u64, task: Task) -> Operation {
        Operation {
            group,
            device,
            sequence,
            signature: task.signature,
            started: Instant::now(),
            deadline: task.deadline,
            phase: 0,
            sending: Vec::new(),
            receiving: Vec::new(),
            abandoned: false,
            label: task.label,
            phase_name: "start",
            scratch: Region::host(vec![0; task.plan.scratch]),
            steps: task.plan.steps.into(),
            next: task.next,
            inputs: task.inputs,
            outputs: task.outputs,
        }
    }

    pub fn at(&self) -> Box<ErrorSite> {
        Box::new(ErrorSite {
            operation: self.signature.kind.name(),
            sequence: self.sequence,
            label: self.label.clone(),
            phase: self.phase_name,
            rank: self.group.members[self.group.rank],
        })
    }

    pub fn key(&self, from: usize) -> MessageKey {
        MessageKey {
            context: self.group.context,
            sequence: self.sequence,
            phase: self.phase,
            from: from as u32,
        }
    }

    /// Returns the ranks of the world that the exchange waits for, each once.
    pub fn waits_for(&self) -> Vec<usize> {
        let mut ranks: Vec<usize> = self.peers().collect();
        ranks.sort_unstable();
        ranks.dedup();
        ranks
    }

    /// Returns the ranks of the world that the exchange waits for, some of them twice.
    pub fn peers(&self) -> impl Iterator<Item = usize> {
        let senders = self.receiving.iter().map(|incoming| incoming.bundle.peer);
        senders.chain(self.sending.iter().map(|(to, _)| *to))
    }

    pub fn into_outputs(self) -> Vec<Region> {
        self.outputs
    }

    /// Executes steps until one needs other ranks. Called when no exchange is in flight.
    pub fn advance(&mut self) -> Result<Advance, CollectiveError> {
        loop {
            match self.steps.pop_front() {
                Some(ScheduleStep::Exchange {
                    phase,
                    name,
                    sends,
                    receives,
                    copies,
                }) => {
                    (self.phase, self.phase_name) = (phase, name);
                    let arriving = self.bundles(&receives)?.into_iter();
                    let waited = |bundle| Incoming {
                        bundle,
                        rendezvous: None,
                    };
                    self.receiving = arriving.map(waited).collect();
                    return Ok(Advance::Exchange(self.bundles(&sends)?, copies));
                }
                Some(ScheduleStep::Repack(copies)) => self.copy(&copies)?,
                Some(ScheduleStep::Write(offset, numbers)) => self.write(offset, &numbers)?,
                Some(ScheduleStep::Check { what, numbers }) => self.check(what, &numbers)?,
                Some(step) => self.reduce(step)?,
                None if self.next.is_some() => self.go_on()?,
                None => return Ok(Advance::Finished),
            }
        }
    }

    /// Copies received data to the device.
    pub fn finish(&mut self) -> Result<(), CollectiveError> {
        for output in &self.outputs {
            let written = output.write_back(&*self.device);
            written.map_err(|error| CollectiveError::Device {
                at: self.at(),
                reason: Box::new(error),
            })?;
        }
        Ok(())
    }

    fn go_on(&mut self) -> Result<(), CollectiveError> {
        let Some(next) = self.next.take() else {
            return Ok(());
        };
        let old = std::mem::replace(&mut self.scratch, Region::host(Vec::new()));
        let plan = next(&old.into_host()).map_err(|unequal| self.unequal(&unequal))?;
        self.scratch = Region::host(vec![0; plan.scratch]);
        self.steps = plan.steps.into();
        Ok(())
    }

    fn unequal(&self, unequal: &Unequal) -> CollectiveError {
        CollectiveError::Mismatch {
            at: self.at(),
            peer: self.group.members[unequal.peer],
            what: unequal.what,
            ours: unequal.ours.to_string(),
            theirs: unequal.theirs.to_string(),
        }
    }

    fn address(
        &self,
        place: BufferRef,
        offset: usize,
        bytes: usize,
    ) -> Result<*mut u8, CollectiveError> {
        let region = match place {
            BufferRef::Input(index) => self.inputs.get(index),
            BufferRef::Output(index) => self.outputs.get(index),
            BufferRef::Scratch => Some(&self.scratch),
        };
        let address = region.and_then(|region| region.at(offset, bytes));
        address.ok_or_else(|| CollectiveError::Invalid {
            operation: self.at().to_string(),
            reason: format!("{bytes} bytes at byte {offset} of {place:?} are not there").into(),
        })
    }

    fn span(&self, span: &Span) -> Result<*mut u8, CollectiveError> {
        self.address(span.buffer, span.offset, span.bytes)
    }

    pub fn copy(&self, copies: &[Copy]) -> Result<(), CollectiveError> {
        for copy in copies {
            let from = self.span(&copy.from)?;
            let to = self.address(copy.to, copy.offset, copy.from.bytes)?;
            // A rank's own part may already be in its place while the transport reads it for
            // other ranks, so it must not be written, not even with the same bytes.
            if from == to {
                continue;
            }
            // SAFETY: the operation keeps both ranges alive; `copy` allows them to overlap.
            unsafe { std::ptr::copy(from, to, copy.from.bytes) };
        }
        Ok(())
    }

    fn write(&self, offset: usize, numbers: &[u64]) -> Result<(), CollectiveError> {
        let to = self.address(BufferRef::Scratch, offset, 8 * numbers.len())?;
        let bytes: Vec<u8> = numbers.iter().flat_map(|n| n.to_le_bytes()).collect();
        // SAFETY: `address` checked that the bytes fit in the scratch memory, which the operation
        // owns.
        unsafe { std::ptr::copy(bytes.as_ptr(), to, bytes.len()) };
        Ok(())
    }

    fn reduce(&self, step: ScheduleStep) -> Result<(), CollectiveError> {
        let ScheduleStep::Reduce {
            element,
            reduction,
            rows,
            row_bytes,
            to,
            offset,
        } = step
        else {
            return Ok(());
        };
        let from = self.address(BufferRef::Scratch, rows.start, rows.len())?;
        let to = self.address(to, offset, row_bytes)?;
        // SAFETY: the range lies in the scratch memory, which nobody else uses between exchanges.
        let bytes = unsafe { std::slice::from_raw_parts_mut(from, rows.len()) };
        reduce::fold(element, reduction, bytes, row_bytes);
        // SAFETY: as in `copy`.
        unsafe { std::ptr::copy(from, to, row_bytes) };
        Ok(())
    }

    fn check(&self, what: &'static str, numbers: &[ExpectedCount]) -> Result<(), CollectiveError> {
        for expected in numbers {
            let from = self.address(BufferRef::Scratch, expected.offset, 8)?;
            // SAFETY: `address` checked that eight bytes fit in the scratch memory.
            let theirs = u64::from_le_bytes(unsafe { *from.cast::<[u8; 8]>() });
            if theirs != expected.value {
                return Err(self.unequal(&Unequal {
                    what,
                    peer: expected.peer,
                    ours: expected.value,
                    theirs,
                }));
            }
        }
        Ok(())
    }

    /// Groups messages by peer, in the order in which the peers first appear. The order is kept
    /// so that a plan controls which rank is served first.
    fn bundles(&self, messages: &[schedules::Message]) -> Result<Vec<Bundle>, CollectiveError> {
        let bundles = |messages: &[schedules::Message]| {
            let runs = messages.chunk_by(|a, b| a.peer == b.peer);
            runs.map(|run| self.bundle(run)).collect()
        };
        // Nearly all plans list a peer's messages one behind the other, so that nothing is sorted.
        let mut seen = vec![false; self.group.members.len()];
        let mut runs = messages.chunk_by(|a, b| a.peer == b.peer);
        if runs.all(|run| !std::mem::replace(&mut seen[run[0].peer], true)) {
            return bundles(messages);
        }
        let mut first = HashMap::new();
        for (at, message) in messages.iter().enumerate() {
            first.entry(message.peer).or_insert(at);
        }
        let mut sorted = messages.to_vec();
        sorted.sort_by_key(|message| first[&message.peer]);
        bundles(&sorted)
    }

    /// Bundles messages to or from one peer.
    fn bundle(&self, messages: &[schedules::Message]) -> Result<Bundle, CollectiveError> {
        let mut parts = Vec::with_capacity(messages.len());
        for schedules::Message { span, .. } in messages {
            let (address, bytes) = (self.span(span)?, span.bytes);
            if bytes > 0 {
                parts.push(MemoryRange { address, bytes });
            }
        }
        Ok(Bundle {
            peer: self.group.members[messages[0].peer],
            sizes: PartSizes::of(messages.iter().map(|message| message.span.bytes as u64)),
            parts,
        })
    }
}
