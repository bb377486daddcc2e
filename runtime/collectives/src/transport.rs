//! The interface to whatever carries messages between ranks.

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

/// The operations a transport must provide; every collective is built on these.
///
/// There are two kinds of messages. An *eager message* is small, is copied when it is posted, and
/// arrives unasked, in the order in which its sender posted it. A *rendezvous message* has any
/// size, moves directly from the sender's memory to the receiver's, and is matched by sender and
/// tag. Its bytes lie in parts; both sides pass the same number of parts with the same sizes.
///
/// No method waits. Messages in flight make progress whenever a method is called. Errors are the
/// transport's own words.
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
    fn send_eager(&mut self, to: usize, message: &[u8]) -> Result<(), String>;

    /// Returns the next eager message that has arrived from any rank.
    ///
    /// # Errors
    /// When the transport fails.
    fn receive_eager(&mut self) -> Result<Option<Vec<u8>>, String>;

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
    ) -> Result<Request, String>;

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
    ) -> Result<Request, String>;

    /// Returns true once a rendezvous message has been sent or received. Callers poll until it
    /// returns true, and never ask again after that.
    ///
    /// # Errors
    /// When the transport fails.
    fn finished(&mut self, request: Request) -> Result<bool, String>;

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
    fn close(&mut self) -> Result<(), String> {
        Ok(())
    }
}
