//! What layers call.

use crate::plan::{HopCounts, HopOrder, Schedule};
use crate::{CollectiveError, Handle, Levels, NodeShape, ProgressThread, Reduction, Slice};
use std::sync::Arc;
use std::time::Duration;

/// How an operation is called.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Call {
    /// What errors call it: `layer 3 dispatch`. Ranks must give the same one; its
    /// first 32 bytes are compared.
    pub label: String,
    /// How long it may take, from its start. `None` is the group's own.
    pub deadline: Option<Duration>,
    /// Whether it may go on overlapped what is launched on the device. Where operations are in the
    /// order of its stream, those that only move bytes then have a stream of their own: see
    /// [`Handle::is_overlapped`].
    pub overlapped: bool,
}

impl Call {
    /// A call with a label and the group's deadline.
    pub fn new(label: &str) -> Call {
        Call {
            label: label.to_string(),
            deadline: None,
            overlapped: false,
        }
    }

    /// The same, overlapped what is launched.
    #[must_use]
    pub fn overlapped(self) -> Call {
        Call {
            overlapped: true,
            ..self
        }
    }

    /// The same with a deadline.
    #[must_use]
    pub fn within(self, deadline: Duration) -> Call {
        Call {
            deadline: Some(deadline),
            ..self
        }
    }
}

/// How an all-to-all exchange goes. Results are the same bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Algorithm {
    /// Everybody sends to everybody.
    #[default]
    Direct,
    /// Inside nodes first, then between nodes among ranks of equal place: fewer and
    /// larger messages over the network, more copies.
    Hierarchical(NodeShape),
    /// Between nodes first among ranks of equal place, then inside nodes: as few and as large
    /// messages.
    InterFirst(NodeShape),
    /// One half of each part inside nodes first, the other between nodes first, so that both
    /// kinds of links are busy all the time.
    Concurrent(NodeShape),
    /// [`Algorithm::Hierarchical`] in groups of groups: the smallest groups first.
    Levels(Levels),
}

impl Algorithm {
    /// The ways of parts; `None` where they go straight.
    pub fn hops(self) -> Option<HopOrder> {
        match self {
            Algorithm::Direct => None,
            Algorithm::Hierarchical(shape) => Some(HopOrder::intra_first(shape)),
            Algorithm::InterFirst(shape) => Some(HopOrder::inter_first(shape)),
            Algorithm::Concurrent(shape) => Some(HopOrder::concurrent(shape)),
            Algorithm::Levels(levels) => Some(HopOrder::upwards(levels)),
        }
    }
}

/// A message of [`Collectives::exchange`].
#[derive(Clone, Debug)]
pub struct Transfer {
    /// The other rank.
    pub peer: usize,
    /// What is sent, or where it is received.
    pub slice: Slice,
}

/// A group of ranks, each with a device.
///
/// Every operation is called by all ranks of the group, in the same order, also by those
/// that have nothing to give. It begins when what was launched on the device before has
/// run, and returns at once; what is launched after [`Handle::wait`] sees its result.
/// Until then its slices must not be used, and inputs not be written. Progress is made
/// in calls: of [`Handle::wait`], [`Handle::test`], and of further operations.
///
/// Ranks are compared while messages are exchanged: another operation, label, type, size
/// or algorithm is [`CollectiveError::Mismatch`], a missing rank [`CollectiveError::Deadline`].
/// After a failure every rank has an error, and the group can do nothing more.
///
/// Errors of all operations: [`CollectiveError::Invalid`] for arguments that cannot be
/// right, [`CollectiveError::Failed`] after an earlier failure; all others come from the
/// handle.
pub trait Collectives: Send {
    /// This rank within the group.
    fn rank(&self) -> usize;

    /// Ranks of the group.
    fn size(&self) -> usize;

    /// The members' ranks in the world.
    fn members(&self) -> &[usize];

    /// A thread that makes operations go on while the rank computes, as long as it is held:
    /// that of the world if it has one, else a new one. `None` where operations go on by
    /// themselves, as with NCCL, or only in calls, as with devices whose memory the host does
    /// not reach.
    fn progress_thread(&mut self) -> Option<Arc<ProgressThread>> {
        None
    }

    /// The number that the next operation will have.
    fn sequence(&self) -> u64;

    /// The deadline of operations whose call names none.
    fn deadline(&self) -> Duration;

    /// Part `q` of the input goes to rank `q`, and what comes from rank `p` becomes part
    /// `p` of the output. Both have as many elements, a multiple of the number of ranks.
    ///
    /// # Errors
    /// As the trait says.
    fn all_to_all(
        &mut self,
        input: &Slice,
        output: &Slice,
        algorithm: Algorithm,
        call: &Call,
    ) -> Result<Handle, CollectiveError>;

    /// The same with parts of unequal sizes: `sends[q]` elements for rank `q`,
    /// `receives[p]` from rank `p`. Zeros are sizes like others.
    ///
    /// # Errors
    /// As the trait says.
    fn all_to_all_v(
        &mut self,
        input: &Slice,
        sends: &[usize],
        output: &Slice,
        receives: &[usize],
        algorithm: Algorithm,
        call: &Call,
    ) -> Result<Handle, CollectiveError>;

    /// The inputs of all ranks, of equal sizes, become everybody's output, in the order
    /// of ranks. The input may be this rank's part of the output.
    ///
    /// # Errors
    /// As the trait says.
    fn all_gather(
        &mut self,
        input: &Slice,
        output: &Slice,
        call: &Call,
    ) -> Result<Handle, CollectiveError>;

    /// Part `q` of all inputs is reduced and becomes the output of rank `q`.
    ///
    /// # Errors
    /// As the trait says.
    fn reduce_scatter(
        &mut self,
        input: &Slice,
        output: &Slice,
        reduction: Reduction,
        call: &Call,
    ) -> Result<Handle, CollectiveError>;

    /// The same with parts of unequal sizes: `counts[q]` elements for rank `q`, the same
    /// numbers on every rank. Zeros are sizes like others.
    ///
    /// # Errors
    /// As the trait says.
    fn reduce_scatter_v(
        &mut self,
        input: &Slice,
        counts: &[usize],
        output: &Slice,
        reduction: Reduction,
        call: &Call,
    ) -> Result<Handle, CollectiveError>;

    /// All inputs are reduced, in the order of ranks, and become everybody's output, which
    /// may be the input.
    ///
    /// # Errors
    /// As the trait says.
    fn all_reduce(
        &mut self,
        input: &Slice,
        output: &Slice,
        reduction: Reduction,
        call: &Call,
    ) -> Result<Handle, CollectiveError>;

    /// What is in `data` on rank `root` is in everybody's `data` after.
    ///
    /// # Errors
    /// As the trait says.
    fn broadcast(
        &mut self,
        data: &Slice,
        root: usize,
        call: &Call,
    ) -> Result<Handle, CollectiveError>;

    /// Messages between any ranks, all at once. Those of one pair of ranks keep their
    /// order, so that receive `i` from a rank gets what that rank sends here as its `i`th.
    ///
    /// # Errors
    /// As the trait says.
    fn exchange(
        &mut self,
        sends: &[Transfer],
        receives: &[Transfer],
        call: &Call,
    ) -> Result<Handle, CollectiveError>;

    /// Ranks tell each other how many units (rows, bytes) there are of the pieces of parts,
    /// over the ways of an algorithm: `units[q * pieces + i]` of piece `i` for rank `q`.
    /// [`Collectives::exchange_with`] then sends such pieces over the same ranks. Waits.
    ///
    /// # Errors
    /// As the trait and its handles.
    fn exchange_counts(
        &mut self,
        algorithm: Algorithm,
        pieces: usize,
        units: &[u64],
        call: &Call,
    ) -> Result<HopCounts, CollectiveError>;

    /// As [`Collectives::exchange`] over other ranks, which pass on what they were told of:
    /// of each pair of ranks the messages are the pieces that have bytes, in their order.
    ///
    /// # Errors
    /// As the trait says.
    fn exchange_with(
        &mut self,
        sends: &[Transfer],
        receives: &[Transfer],
        schedule: &dyn Schedule,
        call: &Call,
    ) -> Result<Handle, CollectiveError>;

    /// Finished when all ranks have called it.
    ///
    /// # Errors
    /// As the trait says.
    fn barrier(&mut self, call: &Call) -> Result<Handle, CollectiveError>;

    /// Numbers of every rank, as many of each, in the order of ranks. Waits.
    ///
    /// # Errors
    /// As the trait and its handles.
    fn gather_numbers(
        &mut self,
        own: &[u64],
        call: &Call,
    ) -> Result<Vec<Vec<u64>>, CollectiveError>;

    /// Bytes of every rank, of any sizes, in the order of ranks: their sizes first. Waits.
    ///
    /// # Errors
    /// As the trait and its handles.
    fn gather_bytes(&mut self, own: &[u8], call: &Call) -> Result<Vec<Vec<u8>>, CollectiveError>;

    /// A group of those that give the same colour, in the order of keys, then of ranks;
    /// `None` for those without a colour. Waits.
    ///
    /// # Errors
    /// As the trait and its handles.
    fn split(
        &mut self,
        color: Option<u32>,
        key: i64,
        call: &Call,
    ) -> Result<Option<Box<dyn Collectives>>, CollectiveError>;
}
