//! The shared memory of a block and the threads that touched it.

use crate::fault::{Access, AccessKind, Earlier, Fault, Problem};
use crate::memory::{GRAIN, POISON};
use crate::stamp::Stamp;

/// The history of one grain: the last writer, the last readers, and their
/// instructions as offsets from the start of the image.
#[derive(Clone, Copy, Default)]
struct Grain {
    writer: Stamp,
    readers: Stamp,
    writer_from: u32,
    readers_from: u32,
}

/// A watched range of shared memory.
#[derive(Default)]
pub(crate) struct SharedMemory {
    start: usize,
    bytes: usize,
    grains: Vec<Grain>,
}

impl SharedMemory {
    /// Watches another range, whose history is unknown.
    pub(crate) fn watch(&mut self, start: usize, bytes: usize) {
        (self.start, self.bytes) = (start, bytes);
        self.grains.clear();
        self.grains.resize(bytes.div_ceil(GRAIN), Grain::default());
    }

    pub(crate) fn holds(&self, address: usize) -> bool {
        address.wrapping_sub(self.start) < self.bytes
    }

    pub(crate) fn start(&self) -> usize {
        self.start
    }

    /// Fills the range with NaN for a new block and clears the history.
    ///
    /// # Safety
    /// The range is writable, and no thread of a block runs.
    pub(crate) unsafe fn reset(&mut self) {
        // SAFETY: the caller's.
        unsafe { (self.start as *mut u8).write_bytes(POISON, self.bytes) };
        self.grains.fill(Grain::default());
    }

    /// Orders everything so far before everything from now on, because barriers
    /// are counted anew.
    pub(crate) fn settle(&mut self) {
        for grain in &mut self.grains {
            grain.readers = Stamp::default();
            if grain.writer != Stamp::default() {
                grain.writer = Stamp::SETTLED;
            }
        }
    }

    /// Checks and records an access that starts in the range.
    #[inline]
    pub(crate) fn touch(
        &mut self,
        access: Access,
        now: Stamp,
        shift: u32,
        image: usize,
    ) -> Option<Fault> {
        let first = access.address - self.start;
        if first + access.bytes > self.bytes {
            return Some(Fault::Memory(access, Problem::Outside));
        }
        let from = access.from.wrapping_sub(image) as u32;
        let grains = first / GRAIN..(first + access.bytes).div_ceil(GRAIN);
        // The grains of one access mostly share one history.
        let mut last: Option<[Grain; 2]> = None;
        for grain in &mut self.grains[grains] {
            if let Some([before, after]) = last
                && grain.writer == before.writer
                && grain.readers == before.readers
            {
                *grain = after;
                continue;
            }
            let before = *grain;
            let fault = match access.kind {
                AccessKind::Read => grain.read(now, shift, from),
                AccessKind::Write => grain.write(now, shift, from),
                AccessKind::Atomic => grain.add(now, shift, from),
            };
            if let Some(found) = fault {
                return Some(found.of(access, image));
            }
            last = Some([before, *grain]);
        }
        None
    }
}

/// The defect that a grain finds in an access.
enum Found {
    Unwritten,
    Conflict {
        stamp: Stamp,
        wrote: bool,
        from: u32,
    },
}

impl Found {
    #[cold]
    fn of(self, access: Access, image: usize) -> Fault {
        match self {
            Found::Unwritten => Fault::Memory(access, Problem::Unwritten),
            Found::Conflict { stamp, wrote, from } => {
                let from = Some(image.wrapping_add(from as usize));
                Fault::Conflict(access, Earlier { stamp, wrote, from })
            }
        }
    }
}

impl Grain {
    #[inline]
    fn read(&mut self, now: Stamp, shift: u32, from: u32) -> Option<Found> {
        if self.writer == Stamp::default() {
            return Some(Found::Unwritten);
        }
        if !self.writer.before(now, shift) {
            return Some(self.writer_conflict());
        }
        self.readers = self.readers.and(now, shift);
        self.readers_from = from;
        None
    }

    #[inline]
    fn write(&mut self, now: Stamp, shift: u32, from: u32) -> Option<Found> {
        if !self.writer.before(now, shift) {
            return Some(self.writer_conflict());
        }
        if !self.readers.before(now, shift) {
            return Some(self.reader_conflict());
        }
        (self.writer, self.writer_from) = (now, from);
        None
    }

    fn add(&mut self, now: Stamp, shift: u32, from: u32) -> Option<Found> {
        if self.writer == Stamp::default() {
            return Some(Found::Unwritten);
        }
        if !self.readers.before(now, shift) {
            return Some(self.reader_conflict());
        }
        let Some(writer) = self.writer.and_atomic(now, shift) else {
            return Some(self.writer_conflict());
        };
        (self.writer, self.writer_from) = (writer, from);
        None
    }

    #[cold]
    fn writer_conflict(&self) -> Found {
        Found::Conflict {
            stamp: self.writer,
            wrote: true,
            from: self.writer_from,
        }
    }

    #[cold]
    fn reader_conflict(&self) -> Found {
        Found::Conflict {
            stamp: self.readers,
            wrote: false,
            from: self.readers_from,
        }
    }
}
