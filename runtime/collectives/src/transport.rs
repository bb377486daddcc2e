//! The interface to whatever carries messages between ranks.

use std::io::ErrorKind;
use std::time::Duration;

/// The largest eager message, in bytes.
pub const MAX_EAGER_BYTES: usize = 4096;

/// A rendezvous message in flight. Each transport numbers its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Request(pub u64);

/// A contiguous range of memory: one part of a rendezvous message. The sender's range is only
/// read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryRange {
    /// The first byte.
    pub address: *mut u8,
    /// The length in bytes.
    pub bytes: usize,
}

// SAFETY: the address is only a number here; each use justifies its own access.
unsafe impl Send for MemoryRange {}

impl MemoryRange {
    /// Returns the bytes of all parts together.
    pub fn total(parts: &[MemoryRange]) -> usize {
        parts.iter().map(|part| part.bytes).sum()
    }
}

/// A transport that has failed. Its name, and the operation in progress, are those of
/// [`CollectiveError::Transport`](crate::CollectiveError::Transport).
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TransportError {
    /// A call of the library underneath has failed.
    #[error("{function}: {message}")]
    Call {
        /// The function: `MPI_Isend`.
        function: &'static str,
        /// The code that it returned.
        code: i32,
        /// The library's own message.
        message: String,
    },
    /// The library allows fewer threads than are needed.
    #[error(
        "{library} allows calls from one thread only (level {provided}; {wanted} is needed): \
         initialise MPI with MPI_THREAD_SERIALIZED or more"
    )]
    OneThread {
        /// The library's name and version.
        library: String,
        /// The level of threads that it provides.
        provided: i32,
        /// The level that is needed.
        wanted: i32,
    },
    /// The library tells no limit of its tags.
    #[error("{library} does not say its greatest tag")]
    NoTagLimit {
        /// The library's name and version.
        library: String,
    },
    /// Some ranks did not start in time.
    #[error("not all of the {ranks} ranks came within {:.0} s", deadline.as_secs_f64())]
    RanksMissing {
        /// The number of ranks that were expected.
        ranks: usize,
        /// The time they had.
        deadline: Duration,
    },
    /// The system refused a thread.
    #[error("no thread can {purpose}: {message}")]
    NoThread {
        /// The thread's work: `watch over MPI_Init`.
        purpose: &'static str,
        /// The kind of the system's error.
        kind: ErrorKind,
        /// The system's message.
        message: String,
    },
    /// This rank has no connection with another.
    #[error("rank {rank} has no connection with rank {peer}")]
    NotConnected {
        /// This rank.
        rank: usize,
        /// The other rank.
        peer: usize,
    },
    /// A connection has failed.
    #[error("rank {peer}: {problem}: {message}")]
    Connection {
        /// The rank at its other end.
        peer: usize,
        /// The direction that failed: `cannot be sent to`.
        problem: &'static str,
        /// The kind of the system's error.
        kind: ErrorKind,
        /// The system's message.
        message: String,
    },
    /// A rendezvous message has another size than its receiver expects, or lies in other parts.
    #[error(
        "rank {peer} sent a rendezvous of {sent} bytes where {announced} were announced, \
         or in other parts"
    )]
    Size {
        /// The sender.
        peer: usize,
        /// The bytes that it sent.
        sent: usize,
        /// The bytes that the receiver expects.
        announced: usize,
    },
    /// A connection carries bytes that are no message.
    #[error("rank {peer}: sends what is no frame")]
    NoFrame {
        /// The rank at its other end.
        peer: usize,
    },
    /// A message that has arrived whole makes no sense here.
    #[error("a message cannot be read: the ranks run different versions")]
    Unreadable,
    /// The connection of all ranks has been ended meanwhile.
    #[error("the communicator has ended")]
    Ended,
    /// Something was still in flight when the transport was to be closed.
    #[error("{unfinished}")]
    Unclosed {
        /// The part that did not end in time: `the last messages did not leave`.
        unfinished: &'static str,
    },
}

/// The operations a transport must provide; every collective is built on these.
///
/// There are two kinds of messages. An *eager message* is small, is copied when it is posted, and
/// arrives unasked, in the order in which its sender posted it. A *rendezvous message* has any
/// size, moves directly from the sender's memory to the receiver's, and is matched by sender and
/// tag. Its bytes lie in parts; both sides pass the same number of parts with the same sizes.
///
/// No method waits. Messages in flight make progress whenever a method is called.
pub trait Transport: Send {
    /// Returns the transport's name and version, for errors.
    fn name(&self) -> String;

    /// Returns this rank in the world.
    fn rank(&self) -> usize;

    /// Returns the number of ranks in the world.
    fn size(&self) -> usize;

    /// Returns the greatest tag of a rendezvous message; tags begin at 0.
    fn last_tag(&self) -> u32;

    /// Posts an eager message of at most [`MAX_EAGER_BYTES`] bytes.
    ///
    /// # Errors
    /// When the transport fails.
    fn send_eager(&mut self, to: usize, message: &[u8]) -> Result<(), TransportError>;

    /// Returns the next eager message that has arrived from any rank.
    ///
    /// # Errors
    /// When the transport fails.
    fn receive_eager(&mut self) -> Result<Option<Vec<u8>>, TransportError>;

    /// Begins to send a rendezvous message. No two rendezvous messages in flight from here to
    /// `to` may have the same tag.
    ///
    /// # Safety
    /// The memory stays valid and unwritten until [`Transport::finished`] returns true for the
    /// request or [`Transport::revoke`] returns true.
    ///
    /// # Errors
    /// When the transport fails.
    unsafe fn send(
        &mut self,
        to: usize,
        tag: u32,
        parts: &[MemoryRange],
    ) -> Result<Request, TransportError>;

    /// Begins to receive a rendezvous message into exactly these parts.
    ///
    /// # Safety
    /// The memory stays valid, and nobody else uses it, until [`Transport::finished`] returns
    /// true for the request or [`Transport::revoke`] returns true.
    ///
    /// # Errors
    /// When the transport fails.
    unsafe fn receive(
        &mut self,
        from: usize,
        tag: u32,
        parts: &[MemoryRange],
    ) -> Result<Request, TransportError>;

    /// Returns true once a rendezvous message has been sent or received. Callers poll until it
    /// returns true, and never ask again after that.
    ///
    /// # Errors
    /// When the transport fails.
    fn finished(&mut self, request: Request) -> Result<bool, TransportError>;

    /// Returns the reason why a rank will send nothing more, if the transport knows one: `has
    /// panicked`. Eager messages that the rank posted earlier may still arrive.
    fn gone(&self, rank: usize) -> Option<&'static str>;

    /// Cancels all rendezvous messages. On true, the transport no longer touches their memory.
    fn revoke(&mut self) -> bool;

    /// Returns the number of eager messages that were posted and have not left yet.
    fn unsent_eager(&mut self) -> usize {
        0
    }

    /// Closes the transport in good order. All ranks call it, with nothing in flight.
    ///
    /// # Errors
    /// When the transport fails.
    fn close(&mut self) -> Result<(), TransportError> {
        Ok(())
    }
}
