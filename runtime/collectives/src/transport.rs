//! What carries messages between ranks.

/// The most bytes of an eager message.
pub const MAX_EAGER_BYTES: usize = 4096;

/// A message that was begun; each transport numbers its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Request(pub u64);

/// Bytes in a row, one of the pieces of a rendezvous message. What is sent is only read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryRange {
    /// Where they are.
    pub address: *mut u8,
    /// How many.
    pub bytes: usize,
}

// SAFETY: a number until somebody uses it, who says then why that is sound.
unsafe impl Send for MemoryRange {}

impl MemoryRange {
    /// Bytes of all parts.
    pub fn total(parts: &[MemoryRange]) -> usize {
        parts.iter().map(|part| part.bytes).sum()
    }
}

/// The least that an transport must do; all operations are written above it.
///
/// There are two kinds of messages. An *eager message* is small, is copied when it is
/// posted, and arrives by itself, in the order of its sender. A *rendezvous message* has any
/// size, is sent from and received into memory in place, and is matched by sender
/// and tag. Its bytes lie in parts, as many and of the same sizes on both sides. Nothing here waits: what was begun goes on whenever the transport is
/// called. Errors are the transport's own words.
pub trait Transport: Send {
    /// What it is, with its version, for errors.
    fn name(&self) -> String;

    /// This rank in the world.
    fn rank(&self) -> usize;

    /// Ranks of the world.
    fn size(&self) -> usize;

    /// The greatest tag of a rendezvous message; tags begin at 0.
    fn last_tag(&self) -> u32;

    /// Posts an eager message of at most [`MAX_EAGER_BYTES`] bytes.
    ///
    /// # Errors
    /// When the transport fails.
    fn send_eager(&mut self, to: usize, message: &[u8]) -> Result<(), String>;

    /// The next eager message that has arrived, from anybody.
    ///
    /// # Errors
    /// When the transport fails.
    fn receive_eager(&mut self) -> Result<Option<Vec<u8>>, String>;

    /// Begins to send a rendezvous message. No other rendezvous message from here to `to` may have that tag
    /// before it is finished.
    ///
    /// # Safety
    /// The memory is valid, and not written, until [`Transport::finished`] says so or
    /// [`Transport::revoke`] has returned true.
    ///
    /// # Errors
    /// When the transport fails.
    unsafe fn send(
        &mut self,
        to: usize,
        tag: u32,
        parts: &[MemoryRange],
    ) -> Result<Request, String>;

    /// Begins to receive a rendezvous message of exactly these parts.
    ///
    /// # Safety
    /// The memory is valid, and used by nobody else, until [`Transport::finished`]
    /// says so or [`Transport::revoke`] has returned true.
    ///
    /// # Errors
    /// When the transport fails.
    unsafe fn receive(
        &mut self,
        from: usize,
        tag: u32,
        parts: &[MemoryRange],
    ) -> Result<Request, String>;

    /// Whether a rendezvous message has been sent or received. It is asked until it says yes,
    /// and not after.
    ///
    /// # Errors
    /// When the transport fails.
    fn finished(&mut self, ticket: Request) -> Result<bool, String>;

    /// Why a rank will send nothing more, if that is known: `has panicked`. Eager messages
    /// that it has posted before may still be there.
    fn gone(&self, rank: usize) -> Option<&'static str>;

    /// Ends all rendezvous messages. True: their memory is not touched from now on.
    fn revoke(&mut self) -> bool;

    /// Eager messages that were posted and have not left yet.
    fn unsent_eager(&mut self) -> usize {
        0
    }

    /// Ends the transport in good order; all ranks call it, with nothing in flight.
    ///
    /// # Errors
    /// When the transport fails.
    fn close(&mut self) -> Result<(), String> {
        Ok(())
    }
}
