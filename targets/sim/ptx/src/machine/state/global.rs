//! The shadow of global memory.

use crate::machine::clock::Known;

const PAGE: usize = 4096;
/// Size in bytes of the smallest element that threads share words of.
pub const GRAIN: usize = 2;
pub const CELLS: usize = PAGE / GRAIN;
/// Pages kept from block to block.
const MOST_PAGES: usize = 1024;
pub const ATOMIC: u32 = 1 << 31;

#[derive(Clone, Copy, Default)]
pub struct Stamp {
    pub time: u32,
    pub thread: u32,
}

pub struct Page {
    pub writes: [Stamp; CELLS],
    /// Instructions of the writes.
    pub pcs: [u32; CELLS],
    /// The last read by an ordinary load.
    pub reads: [Stamp; CELLS],
}

/// The pages that a machine has seen. Times only grow, so the accesses of
/// earlier blocks count as ordered.
#[derive(Default)]
pub struct GlobalShadow {
    pub index: Vec<Vec<u32>>,
    pub pages: Vec<Box<Page>>,
}

/// The access of one lane.
#[derive(Clone, Copy)]
pub struct GlobalAccess {
    pub region: usize,
    pub offset: usize,
    pub bytes: usize,
    pub lane: usize,
    pub atomic: bool,
}

impl GlobalShadow {
    /// Drops all pages once there are too many.
    pub fn begin(&mut self) {
        if self.pages.len() > MOST_PAGES {
            self.index.clear();
            self.pages.clear();
        }
    }

    pub fn page(&mut self, region: usize, number: usize, add: bool) -> Option<&mut Page> {
        let known = self.index.get(region).and_then(|own| own.get(number));
        let place = known.copied().unwrap_or(0);
        if place == 0 && !add {
            return None;
        }
        if place != 0 {
            return Some(&mut self.pages[place as usize - 1]);
        }
        if self.index.len() <= region {
            self.index.resize(region + 1, Vec::new());
        }
        let own = &mut self.index[region];
        if own.len() <= number {
            own.resize(number + 1, 0);
        }
        self.pages.push(Box::new(Page {
            writes: [Stamp::default(); CELLS],
            pcs: [0; CELLS],
            reads: [Stamp::default(); CELLS],
        }));
        own[number] = self.pages.len() as u32;
        self.pages.last_mut().map(|page| &mut **page)
    }
}

/// The other thread that touched the bytes without order.
pub enum Other {
    Wrote { thread: u32, pc: u32 },
    Read { thread: u32 },
}

impl Page {
    pub fn read(&mut self, at: usize, thread: u32, time: u32, known: &Known) -> Option<Other> {
        let write = self.writes[at];
        let own = write.thread & !ATOMIC;
        if own != thread && !known.seen.knows(own, write.time) {
            return Some(Other::Wrote {
                thread: own,
                pc: self.pcs[at],
            });
        }
        // Only the last reader of a cell is kept. With several unordered
        // readers the race with one of them may go unseen in a run, which keeps
        // a page at three stamps per cell; shared memory keeps all readers.
        self.reads[at] = Stamp { time, thread };
        None
    }

    pub fn write(&mut self, at: usize, by: Stamp, pc: u32, known: &Known) -> Option<Other> {
        let (write, read) = (self.writes[at], self.reads[at]);
        let (own, thread) = (write.thread & !ATOMIC, by.thread & !ATOMIC);
        let both = write.thread & by.thread & ATOMIC != 0;
        if own != thread && !both && !known.seen.knows(own, write.time) {
            return Some(Other::Wrote {
                thread: own,
                pc: self.pcs[at],
            });
        }
        if read.thread != thread && !known.seen.knows(read.thread, read.time) {
            return Some(Other::Read {
                thread: read.thread,
            });
        }
        self.writes[at] = by;
        self.pcs[at] = pc;
        None
    }
}
