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

    /// Calls `run` with the longest pieces that are in a row on both sides: those of
    /// `from` in their order are those of `to` in theirs.
    pub fn matched(from: &[Part], to: &[Part], mut run: impl FnMut(*mut u8, *mut u8, usize)) {
        let filled = |part: &&Part| part.bytes > 0;
        let mut to = to.iter().filter(filled).copied();
        let mut target: Option<Part> = None;
        for mut source in from.iter().copied() {
            while source.bytes > 0 {
                let Some(mut room) = target.take().or_else(|| to.next()) else {
                    return;
                };
                let bytes = source.bytes.min(room.bytes);
                run(source.address, room.address, bytes);
                source.forward(bytes);
                room.forward(bytes);
                target = Some(room).filter(|room| room.bytes > 0);
            }
        }
    }

    fn forward(&mut self, bytes: usize) {
        self.address = self.address.wrapping_add(bytes);
        self.bytes -= bytes;
    }
}

/// The least that an engine must do; all operations are written above it.
///
/// There are two kinds of messages. A *letter* is small, is copied when it is
/// posted, and arrives by itself, in the order of its sender. A *parcel* has any
/// size, is sent from and received into memory in place, and is matched by sender
/// and tag. Its bytes lie in parts, cut differently on both sides. Nothing here waits: what was begun goes on whenever the engine is
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

    /// Begins to receive a parcel of exactly so many bytes as these parts have.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_both_sides_are_matched_however_they_are_cut() {
        let data: Vec<u8> = (0..60).collect();
        let mut found = vec![0u8; 60];
        let parts = |base: *mut u8, list: &[(usize, usize)]| -> Vec<Part> {
            let part = |(at, bytes): &(usize, usize)| Part {
                address: base.wrapping_add(*at),
                bytes: *bytes,
            };
            list.iter().map(part).collect()
        };
        let from = parts(
            data.as_ptr().cast_mut(),
            &[(40, 10), (5, 0), (0, 17), (20, 3)],
        );
        let to = parts(found.as_mut_ptr(), &[(0, 0), (3, 1), (30, 25), (10, 4)]);
        assert_eq!((Part::total(&from), Part::total(&to)), (30, 30));
        let mut pieces = Vec::new();
        Part::matched(&from, &to, |from, to, bytes| {
            pieces.push(bytes);
            // SAFETY: all parts lie in the two lists above.
            unsafe { std::ptr::copy_nonoverlapping(from, to, bytes) };
        });
        assert_eq!(pieces, [1, 9, 16, 1, 3]);
        let sent = [&data[40..50], &data[..17], &data[20..23]].concat();
        let received = [&found[3..4], &found[30..55], &found[10..14]].concat();
        assert_eq!(sent, received);
        assert_eq!(found.iter().filter(|byte| **byte != 0).count(), 29);
    }
}
