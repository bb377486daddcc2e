//! The shadow of the global memory that a block touches, for races between the
//! block's own threads. The logs of the launch find races between blocks.

use super::ClusterRunner;
use super::access::lanes_of;
use super::clock::Known;
use super::warp::Warp;
use crate::finding::{Fault, FindingKind, Step};

const PAGE: usize = 4096;
/// Size in bytes of the smallest element that threads share words of.
const GRAIN: usize = 2;
const CELLS: usize = PAGE / GRAIN;
/// Pages kept from block to block.
const MOST_PAGES: usize = 1024;
const ATOMIC: u32 = 1 << 31;

#[derive(Clone, Copy, Default)]
struct Stamp {
    time: u32,
    thread: u32,
}

struct Page {
    writes: [Stamp; CELLS],
    /// Instructions of the writes.
    pcs: [u32; CELLS],
    /// The last read by an ordinary load.
    reads: [Stamp; CELLS],
}

/// The pages that a machine has seen. Times only grow, so the accesses of
/// earlier blocks count as ordered.
#[derive(Default)]
pub struct GlobalShadow {
    index: Vec<Vec<u32>>,
    pages: Vec<Box<Page>>,
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

    fn page(&mut self, region: usize, number: usize, add: bool) -> Option<&mut Page> {
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
enum Other {
    Wrote { thread: u32, pc: u32 },
    Read { thread: u32 },
}

impl Page {
    fn read(&mut self, at: usize, thread: u32, time: u32, known: &Known) -> Option<Other> {
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

    fn write(&mut self, at: usize, by: Stamp, pc: u32, known: &Known) -> Option<Other> {
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

impl ClusterRunner<'_> {
    /// Checks and records an ordinary load.
    pub fn global_read(&mut self, warp: &Warp, access: GlobalAccess) -> Step<()> {
        // Accesses of single bytes are left out, because two threads may share
        // a cell of two bytes without a race.
        if !self.launch.full || access.atomic || access.bytes < GRAIN {
            return Ok(());
        }
        let thread = warp.number * 32 + access.lane as u32;
        let (time, known) = (self.time, &warp.known[access.lane]);
        let first = access.offset / GRAIN;
        for cell in first..first + access.bytes / GRAIN {
            let page = self.global.page(access.region, cell / CELLS, true);
            let other = page.and_then(|page| page.read(cell % CELLS, thread, time, known));
            if let Some(other) = other {
                return Err(self.global_clash(warp, access, "reads", &other));
            }
        }
        Ok(())
    }

    /// Checks and records a store or an atomic; `same` says that the bytes do
    /// not change.
    pub fn global_write(&mut self, warp: &Warp, access: GlobalAccess, same: bool) -> Step<()> {
        if !self.launch.full || access.bytes < GRAIN {
            return Ok(());
        }
        let flag = if access.atomic { ATOMIC } else { 0 };
        let by = Stamp {
            time: self.time,
            thread: (warp.number * 32 + access.lane as u32) | flag,
        };
        let (pc, known) = (self.pc, &warp.known[access.lane]);
        let first = access.offset / GRAIN;
        for cell in first..first + access.bytes / GRAIN {
            let page = self.global.page(access.region, cell / CELLS, true);
            let other = page.and_then(|page| page.write(cell % CELLS, by, pc, known));
            match other {
                None => {}
                // Threads of a block may store the same value to one place.
                Some(Other::Wrote { pc: at, .. }) if same && at == pc => {}
                Some(other) => return Err(self.global_clash(warp, access, "writes", &other)),
            }
        }
        Ok(())
    }

    #[cold]
    fn global_clash(
        &self,
        warp: &Warp,
        access: GlobalAccess,
        verb: &str,
        other: &Other,
    ) -> Box<Fault> {
        let (thread, what, pc) = match other {
            Other::Wrote { thread, pc } => (*thread, "writes", Some(*pc)),
            Other::Read { thread } => (*thread, "reads", None),
        };
        let bytes = self.launch.regions.list[access.region].bytes;
        let text = format!(
            "{verb} {} bytes of global memory that {} {what}, and nothing orders the two: \
             byte {} of an allocation of {bytes} bytes",
            access.bytes,
            self.thread_name(warp, thread),
            access.offset
        );
        let mut fault = Fault::new(FindingKind::GlobalRace, 1 << access.lane, text);
        fault.other = pc;
        fault
    }

    /// Checks and records the ordinary loads of several lanes.
    pub fn global_reads(
        &mut self,
        warp: &Warp,
        places: &[(usize, usize); 32],
        bytes: usize,
        mask: u32,
    ) -> Step<()> {
        for lane in lanes_of(mask) {
            let (region, offset) = places[lane];
            self.global_read(
                warp,
                GlobalAccess {
                    region,
                    offset,
                    bytes,
                    lane,
                    atomic: false,
                },
            )?;
        }
        Ok(())
    }
}
