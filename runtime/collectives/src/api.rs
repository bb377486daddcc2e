//! The interface that layers call.

use crate::schedules::{Algorithm, HopCounts, Schedule};
use crate::{CollectiveError, Handle, ProgressThread, Reduction, Slice};
use std::sync::Arc;
use std::time::Duration;

/// The options of one operation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Call {
    /// The name of the operation in errors: `layer 3 dispatch`. All ranks must pass the same one;
    /// its first 32 bytes are compared.
    pub label: String,
    /// The time limit, counted from the start. `None` uses the group's own.
    pub deadline: Option<Duration>,
    /// Whether the operation may overlap launches on the device. Where operations are in the
    /// order of the device's stream, an overlapped operation that only moves bytes runs on a
    /// stream of its own: see [`Handle::is_overlapped`].
    pub overlapped: bool,
}

impl Call {
    /// Returns a call with a label and the group's deadline.
    pub fn new(label: &str) -> Call {
        Call {
            label: label.to_string(),
            deadline: None,
            overlapped: false,
        }
    }

    /// Returns the same call, overlapped with launches.
    #[must_use]
    pub fn overlapped(self) -> Call {
        Call {
            overlapped: true,
            ..self
        }
    }

    /// Returns the same call with a deadline.
    #[must_use]
    pub fn within(self, deadline: Duration) -> Call {
        Call {
            deadline: Some(deadline),
            ..self
        }
    }
}

/// A message of [`Collectives::exchange`].
#[derive(Clone, Debug)]
pub struct Transfer {
    /// The other rank.
    pub peer: usize,
    /// The memory that is sent or received into.
    pub slice: Slice,
}

/// A group of ranks, each with a device.
///
/// All ranks of the group call every operation, in the same order, even with nothing to
/// contribute. The operation starts after everything launched earlier on the device has run, and
/// the call returns at once. Launches after [`Handle::wait`] see its result; until then you must
/// not use its slices, nor write its inputs. Progress is made inside calls: [`Handle::wait`],
/// [`Handle::test`], and further operations.
///
/// Ranks are compared while messages are exchanged: another operation, label, type, size or
/// algorithm is [`CollectiveError::Mismatch`], a missing rank is [`CollectiveError::Deadline`].
/// After a failure every rank has an error, and the group is unusable.
///
/// All operations return [`CollectiveError::Invalid`] for arguments that cannot be right and
/// [`CollectiveError::Failed`] after an earlier failure; all other errors come from the handle.
pub trait Collectives: Send {
    /// Returns this rank within the group.
    fn rank(&self) -> usize;

    /// Returns the number of ranks in the group.
    fn size(&self) -> usize;

    /// Returns the members' ranks in the world.
    fn members(&self) -> &[usize];

    /// Returns a thread that makes progress while the rank computes, for as long as you hold it:
    /// the thread of the world if it has one, else a new one. Returns `None` where operations
    /// need no help, as with NCCL, or where only calls can make progress, as with devices whose
    /// memory the host cannot reach.
    fn progress_thread(&mut self) -> Option<Arc<ProgressThread>> {
        None
    }

    /// Returns the number of the next operation.
    fn sequence(&self) -> u64;

    /// Returns the deadline of operations whose call names none.
    fn deadline(&self) -> Duration;

    /// Sends part `q` of the input to rank `q`; the data from rank `p` become part `p` of the
    /// output. Both have the same number of elements, a multiple of the number of ranks.
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

    /// Does the same with parts of unequal sizes: `sends[q]` elements go to rank `q`,
    /// `receives[p]` come from rank `p`. Zero is allowed.
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

    /// Concatenates the inputs of all ranks, of equal sizes, in rank order into every rank's
    /// output. The input may be this rank's part of the output.
    ///
    /// # Errors
    /// As the trait says.
    fn all_gather(
        &mut self,
        input: &Slice,
        output: &Slice,
        call: &Call,
    ) -> Result<Handle, CollectiveError>;

    /// Reduces part `q` of all inputs into the output of rank `q`.
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

    /// Does the same with parts of unequal sizes: `counts[q]` elements for rank `q`, equal on
    /// every rank. Zero is allowed.
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

    /// Reduces all inputs, in rank order, into every rank's output, which may be the input.
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

    /// Copies `data` of rank `root` into `data` of every rank.
    ///
    /// # Errors
    /// As the trait says.
    fn broadcast(
        &mut self,
        data: &Slice,
        root: usize,
        call: &Call,
    ) -> Result<Handle, CollectiveError>;

    /// Sends and receives any number of messages at once. Messages between two ranks keep their
    /// order: the `i`th receive from a rank gets the `i`th message that the rank sends here.
    ///
    /// # Errors
    /// As the trait says.
    fn exchange(
        &mut self,
        sends: &[Transfer],
        receives: &[Transfer],
        call: &Call,
    ) -> Result<Handle, CollectiveError>;

    /// Exchanges the number of units (rows, bytes) of every block, over the hops of an algorithm:
    /// block `i` for rank `q` has `units[q * blocks_per_peer + i]`.
    /// [`Collectives::exchange_with`] then sends such blocks over the same ranks. Waits.
    ///
    /// # Errors
    /// As the trait and its handles.
    fn exchange_counts(
        &mut self,
        algorithm: Algorithm,
        blocks_per_peer: usize,
        units: &[u64],
        call: &Call,
    ) -> Result<HopCounts, CollectiveError>;

    /// Does [`Collectives::exchange`] over intermediate ranks, which forward the blocks that an
    /// earlier [`Collectives::exchange_counts`] announced. For each pair of ranks the messages
    /// are the blocks that are not empty, in their order.
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

    /// Completes once every rank has called it.
    ///
    /// # Errors
    /// As the trait says.
    fn barrier(&mut self, call: &Call) -> Result<Handle, CollectiveError>;

    /// Returns the numbers of every rank, equally many from each, in rank order. Waits.
    ///
    /// # Errors
    /// As the trait and its handles.
    fn gather_numbers(
        &mut self,
        own: &[u64],
        call: &Call,
    ) -> Result<Vec<Vec<u64>>, CollectiveError>;

    /// Returns the bytes of every rank in rank order. Sizes may differ; they are exchanged first.
    /// Waits.
    ///
    /// # Errors
    /// As the trait and its handles.
    fn gather_bytes(&mut self, own: &[u8], call: &Call) -> Result<Vec<Vec<u8>>, CollectiveError>;

    /// Splits the group by colour, each new group ordered by key, then by rank. Returns `None` to
    /// ranks without a colour. Waits.
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
