//! What carries messages between ranks.

/// The most bytes of a letter.
pub const LETTER_BYTES: usize = 4096;

/// A message that was begun; each engine numbers its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ticket(pub u64);

/// Bytes in a row, one of the pieces of a parcel. What is sent is only read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Where they are.
    pub address: *mut u8,
    /// How many.
    pub bytes: usize,
}

// SAFETY: a number until somebody uses it, who says then why that is sound.
unsafe impl Send for Part {}

impl Part {
    /// Bytes of all parts.
    pub fn total(parts: &[Part]) -> usize {
        parts.iter().map(|part| part.bytes).sum()
    }
}

/// The least that an engine must do; all operations are written above it.
///
/// There are two kinds of messages. A *letter* is small, is copied when it is
/// posted, and arrives by itself, in the order of its sender. A *parcel* has any
/// size, is sent from and received into memory in place, and is matched by sender
/// and tag. Its bytes lie in parts, as many and of the same sizes on both sides. Nothing here waits: what was begun goes on whenever the engine is
/// called. Errors are the engine's own words.
pub trait Engine: Send {
    /// What it is, with its version, for errors.
    fn name(&self) -> String;

    /// This rank in the world.
    fn rank(&self) -> usize;

    /// Ranks of the world.
    fn size(&self) -> usize;

    /// The greatest tag of a parcel; tags begin at 0.
    fn last_tag(&self) -> u32;

    /// Posts a letter of at most [`LETTER_BYTES`] bytes.
    ///
    /// # Errors
    /// When the engine fails.
    fn post(&mut self, to: usize, letter: &[u8]) -> Result<(), String>;

    /// The next letter that has arrived, from anybody.
    ///
    /// # Errors
    /// When the engine fails.
    fn collect(&mut self) -> Result<Option<Vec<u8>>, String>;

    /// Begins to send a parcel. No other parcel from here to `to` may have that tag
    /// before it is finished.
    ///
    /// # Safety
    /// The memory is valid, and not written, until [`Engine::finished`] says so or
    /// [`Engine::revoke`] has returned true.
    ///
    /// # Errors
    /// When the engine fails.
    unsafe fn send(&mut self, to: usize, tag: u32, parts: &[Part]) -> Result<Ticket, String>;

    /// Begins to receive a parcel of exactly these parts.
    ///
    /// # Safety
    /// The memory is valid, and used by nobody else, until [`Engine::finished`]
    /// says so or [`Engine::revoke`] has returned true.
    ///
    /// # Errors
    /// When the engine fails.
    unsafe fn receive(&mut self, from: usize, tag: u32, parts: &[Part]) -> Result<Ticket, String>;

    /// Whether a parcel has been sent or received. It is asked until it says yes,
    /// and not after.
    ///
    /// # Errors
    /// When the engine fails.
    fn finished(&mut self, ticket: Ticket) -> Result<bool, String>;

    /// Why a rank will send nothing more, if that is known: `has panicked`. Letters
    /// that it has posted before may still be there.
    fn gone(&self, rank: usize) -> Option<&'static str>;

    /// Ends all parcels. True: their memory is not touched from now on.
    fn revoke(&mut self) -> bool;

    /// Letters that were posted and have not left yet.
    fn unposted(&mut self) -> usize {
        0
    }

    /// Ends the engine in good order; all ranks call it, with nothing under way.
    ///
    /// # Errors
    /// When the engine fails.
    fn close(&mut self) -> Result<(), String> {
        Ok(())
    }
}
