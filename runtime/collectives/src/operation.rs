//! One operation in flight on one rank.

use crate::eager::{Key, PartSizes, Signature};
use crate::error::At;
use crate::memory::Region;
use crate::plan::{self, Copy, Place, Plan, Span, Step};
use crate::transport::{MemoryRange, Request};
use crate::{CollectiveError, reduce};
use moesaic_target::Device;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Ranks that call operations together.
#[derive(Debug)]
pub(crate) struct Group {
    /// A number that no other group of the world has.
    pub context: u64,
    /// Ranks in the world, by rank in the group.
    pub members: Vec<usize>,
    /// This rank in the group.
    pub rank: usize,
}

/// Makes the rest of a plan from what the first part has left in the scratch memory.
pub(crate) type Next = Box<dyn FnOnce(&[u8]) -> Result<Plan, Unequal> + Send>;

/// Another rank's number that is not what this rank expects.
pub(crate) struct Unequal {
    pub what: &'static str,
    /// The rank, in the group.
    pub peer: usize,
    pub ours: u64,
    pub theirs: u64,
}

/// What is to be done.
pub(crate) struct Task {
    pub signature: Signature,
    pub label: String,
    pub deadline: Duration,
    pub inputs: Vec<Region>,
    pub outputs: Vec<Region>,
    pub plan: Plan,
    pub next: Option<Next>,
}

/// All messages of an exchange between this rank and another, in one direction. They
/// travel together.
pub(crate) struct Bundle {
    /// The other rank, in the world.
    pub peer: usize,
    pub pieces: PartSizes,
    /// Where they are, or go: a part for each that is not empty, in their order.
    pub parts: Vec<MemoryRange>,
}

/// Messages that are waited for.
pub(crate) struct Incoming {
    pub bundle: Bundle,
    /// Set once their eager message has come.
    pub rendezvous: Option<Request>,
}

pub(crate) struct Operation {
    pub group: Arc<Group>,
    pub device: Arc<dyn Device>,
    pub sequence: u64,
    pub signature: Signature,
    pub started: Instant,
    pub deadline: Duration,
    /// The number of the exchange that is going on.
    pub phase: u32,
    /// Messages to others, with their receivers in the world.
    pub sending: Vec<(usize, Request)>,
    pub receiving: Vec<Incoming>,
    /// Nobody will ask how it ended.
    pub abandoned: bool,
    label: String,
    phase_name: &'static str,
    steps: VecDeque<Step>,
    next: Option<Next>,
    inputs: Vec<Region>,
    outputs: Vec<Region>,
    scratch: Region,
}

// SAFETY: addresses in it are of memory that it owns or keeps alive itself.
unsafe impl Send for Operation {}

/// What a step asks for.
pub(crate) enum Advance {
    /// These messages, and then, while they travel, these copies.
    Exchange(Vec<Bundle>, Vec<Copy>),
    /// Nothing: the operation is finished.
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

    pub fn at(&self) -> Box<At> {
        Box::new(At {
            operation: self.signature.kind.name(),
            sequence: self.sequence,
            label: self.label.clone(),
            phase: self.phase_name,
            rank: self.group.members[self.group.rank],
        })
    }

    pub fn key(&self, from: usize) -> Key {
        Key {
            context: self.group.context,
            sequence: self.sequence,
            phase: self.phase,
            from: from as u32,
        }
    }

    /// Ranks of the world that the exchange waits for, each once.
    pub fn waits_for(&self) -> Vec<usize> {
        let senders = self.receiving.iter().map(|incoming| incoming.bundle.peer);
        let mut ranks: Vec<usize> = senders
            .chain(self.sending.iter().map(|(to, _)| *to))
            .collect();
        ranks.sort_unstable();
        ranks.dedup();
        ranks
    }

    pub fn into_outputs(self) -> Vec<Region> {
        self.outputs
    }

    /// Does all that needs nobody else. Called when no exchange is going on.
    pub fn advance(&mut self) -> Result<Advance, CollectiveError> {
        loop {
            match self.steps.pop_front() {
                Some(Step::Exchange {
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
                Some(Step::Repack(copies)) => self.copy(&copies)?,
                Some(Step::Write(offset, numbers)) => self.write(offset, &numbers)?,
                Some(Step::Check { what, numbers }) => self.check(what, &numbers)?,
                Some(step) => self.reduce(step)?,
                None if self.next.is_some() => self.go_on()?,
                None => return Ok(Advance::Finished),
            }
        }
    }

    /// Gives the device what was received.
    pub fn finish(&mut self) -> Result<(), CollectiveError> {
        for output in &self.outputs {
            let written = output.write_back(&*self.device);
            written.map_err(|error| CollectiveError::Device {
                at: self.at(),
                reason: error.to_string(),
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
        place: Place,
        offset: usize,
        bytes: usize,
    ) -> Result<*mut u8, CollectiveError> {
        let region = match place {
            Place::Input(index) => self.inputs.get(index),
            Place::Output(index) => self.outputs.get(index),
            Place::Scratch => Some(&self.scratch),
        };
        let address = region.and_then(|region| region.at(offset, bytes));
        address.ok_or_else(|| CollectiveError::Invalid {
            operation: self.at().to_string(),
            reason: format!("{bytes} bytes at byte {offset} of {place:?} are not there"),
        })
    }

    fn span(&self, span: &Span) -> Result<*mut u8, CollectiveError> {
        self.address(span.place, span.offset, span.bytes)
    }

    pub fn copy(&self, copies: &[Copy]) -> Result<(), CollectiveError> {
        for copy in copies {
            let from = self.span(&copy.from)?;
            let to = self.address(copy.to, copy.offset, copy.from.bytes)?;
            // A rank's own part may be in its place, and be on its way to others.
            if from == to {
                continue;
            }
            // SAFETY: both ranges lie in memory that this operation keeps alive; they
            // may overlap.
            unsafe { std::ptr::copy(from, to, copy.from.bytes) };
        }
        Ok(())
    }

    fn write(&self, offset: usize, numbers: &[u64]) -> Result<(), CollectiveError> {
        let to = self.address(Place::Scratch, offset, 8 * numbers.len())?;
        let bytes: Vec<u8> = numbers.iter().flat_map(|n| n.to_le_bytes()).collect();
        // SAFETY: so many bytes are in the scratch memory, which is this operation's.
        unsafe { std::ptr::copy(bytes.as_ptr(), to, bytes.len()) };
        Ok(())
    }

    fn reduce(&self, step: Step) -> Result<(), CollectiveError> {
        let Step::Reduce {
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
        let from = self.address(Place::Scratch, rows.start, rows.len())?;
        let to = self.address(to, offset, row_bytes)?;
        // SAFETY: the range lies in the scratch memory, which nobody else uses between
        // exchanges.
        let bytes = unsafe { std::slice::from_raw_parts_mut(from, rows.len()) };
        reduce::fold(element, reduction, bytes, row_bytes);
        // SAFETY: as in `copy`.
        unsafe { std::ptr::copy(from, to, row_bytes) };
        Ok(())
    }

    fn check(
        &self,
        what: &'static str,
        numbers: &[(usize, u64, usize)],
    ) -> Result<(), CollectiveError> {
        for (offset, ours, peer) in numbers {
            let from = self.address(Place::Scratch, *offset, 8)?;
            // SAFETY: eight bytes in the scratch memory.
            let theirs = u64::from_le_bytes(unsafe { *from.cast::<[u8; 8]>() });
            if theirs != *ours {
                let (ours, peer) = (*ours, *peer);
                return Err(self.unequal(&Unequal {
                    what,
                    peer,
                    ours,
                    theirs,
                }));
            }
        }
        Ok(())
    }

    /// Messages by their other rank, in the order in which these first come.
    fn bundles(&self, messages: &[plan::Message]) -> Result<Vec<Bundle>, CollectiveError> {
        let mut numbers = HashMap::new();
        let mut lists: Vec<(usize, Vec<&plan::Message>)> = Vec::new();
        for message in messages {
            let number = *numbers.entry(message.peer).or_insert(lists.len());
            if number == lists.len() {
                lists.push((message.peer, Vec::new()));
            }
            lists[number].1.push(message);
        }
        let bundle = |(peer, own): (usize, Vec<_>)| self.bundle(peer, own.into_iter());
        lists.into_iter().map(bundle).collect()
    }

    fn bundle<'m>(
        &self,
        peer: usize,
        messages: impl Iterator<Item = &'m plan::Message>,
    ) -> Result<Bundle, CollectiveError> {
        let (mut sizes, mut parts) = (Vec::new(), Vec::<MemoryRange>::new());
        for message in messages {
            let (address, bytes) = (self.span(&message.span)?, message.span.bytes);
            sizes.push(bytes as u64);
            if bytes > 0 {
                parts.push(MemoryRange { address, bytes });
            }
        }
        Ok(Bundle {
            peer: self.group.members[peer],
            pieces: PartSizes::of(&sizes),
            parts,
        })
    }
}
