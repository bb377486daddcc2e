//! Logs of the bytes of global memory that each block touches.
//!
//! A block keeps its own log while it runs. Finished logs are merged into the
//! log of the launch in any order. The findings do not depend on the order,
//! because the merge consists of unions, minima and maxima only.

use super::bits::words;
use super::{Regions, bits::SharedBits};
use std::collections::HashMap;
use std::sync::{Mutex, OnceLock};

const PAGE: usize = 4096;
const PAGE_WORDS: usize = PAGE / 64;
/// Granularity, in bytes, of reads of constant memory. Tensors start at
/// multiples of it.
const LINE: usize = 64;

type Bytes = [u64; PAGE_WORDS];

/// The way in which memory was touched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Touch {
    Read,
    Write,
    Atomic,
}

struct Page {
    touched: [Bytes; 3],
    /// Instruction of the first touch of each kind.
    first: [u32; 3],
}

/// The bytes that one block has touched.
#[derive(Default)]
pub struct BlockLog {
    /// Per region and page: the page's place in `pages`, plus one.
    index: Vec<Vec<u32>>,
    pages: Vec<Page>,
    /// Region and number of the pages in use.
    used: Vec<(u32, u32)>,
}

impl BlockLog {
    #[inline(always)]
    fn place(&self, region: usize, page: usize) -> Option<usize> {
        let place = *self.index.get(region)?.get(page)?;
        (place as usize).checked_sub(1)
    }

    #[inline(always)]
    fn page(&mut self, region: usize, page: usize) -> &mut Page {
        let place = self.place(region, page);
        let place = place.unwrap_or_else(|| self.add(region, page));
        &mut self.pages[place]
    }

    #[cold]
    fn add(&mut self, region: usize, page: usize) -> usize {
        let place = self.used.len();
        if self.index.len() <= region {
            self.index.resize(region + 1, Vec::new());
        }
        let own = &mut self.index[region];
        if own.len() <= page {
            own.resize(page + 1, 0);
        }
        own[page] = place as u32 + 1;
        self.used.push((region as u32, page as u32));
        if self.pages.len() <= place {
            self.pages.push(Page {
                touched: [[0; PAGE_WORDS]; 3],
                first: [u32::MAX; 3],
            });
        }
        place
    }

    /// Records a touch of `count` bytes by instruction `pc`.
    #[inline]
    pub fn touch(&mut self, touch: Touch, region: usize, offset: usize, count: usize, pc: u32) {
        let (mut at, end) = (offset, offset + count);
        while at < end {
            let page = at / PAGE;
            let take = (end - at).min((page + 1) * PAGE - at);
            let own = self.page(region, page);
            let kind = touch as usize;
            own.first[kind] = own.first[kind].min(pc);
            words(at % PAGE, take, |word, mask| {
                own.touched[kind][word] |= mask
            });
            at += take;
        }
    }

    /// Returns true if the block itself, or an earlier launch, has written all
    /// of these bytes.
    pub fn wrote(&self, region: usize, offset: usize, valid: &SharedBits, count: usize) -> bool {
        let mut all = true;
        words(offset, count, |word, mask| {
            let page = self.place(region, word / PAGE_WORDS);
            let page = page.map(|place| &self.pages[place]);
            let own = page.map_or(0, |page| {
                let at = word % PAGE_WORDS;
                page.touched[1][at] | page.touched[2][at]
            });
            all &= (own | valid.word(word)) & mask == mask;
        });
        all
    }
}

/// The touches of all blocks on one page.
struct PageSum {
    /// Bytes touched by any block.
    once: [Bytes; 3],
    /// Bytes touched by more than one block.
    again: [Bytes; 3],
    /// Bytes touched in two ways by one block: read or updated by the block
    /// that wrote them.
    own: [Bytes; 3],
    least: [(u64, u32); 3],
    largest: [(u64, u32); 3],
}

/// Two blocks that touched the same byte with nothing to order them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Conflict {
    pub region: usize,
    pub offset: usize,
    /// Block and instruction of the write.
    pub writer: (u64, u32),
    /// Block and instruction of the other touch; `None` for a load of memory
    /// that the kernel declares constant.
    pub other: Option<(u64, u32)>,
    /// The other touch is a write too.
    pub both_write: bool,
    pub atomic: bool,
}

/// The log of a launch.
pub struct LaunchLog {
    pages: Vec<Mutex<HashMap<u32, Box<PageSum>>>>,
    constant: Vec<OnceLock<SharedBits>>,
}

impl LaunchLog {
    pub fn new(regions: &Regions) -> LaunchLog {
        LaunchLog {
            pages: regions.list.iter().map(|_| Mutex::default()).collect(),
            constant: regions.list.iter().map(|_| OnceLock::new()).collect(),
        }
    }

    /// Records a read of memory that nobody may write during the launch.
    #[inline]
    pub fn constant(&self, regions: &Regions, region: usize, offset: usize, count: usize) {
        let lines = || SharedBits::new(regions.list[region].bytes.div_ceil(LINE));
        let bits = self.constant[region].get_or_init(lines);
        let first = offset / LINE;
        bits.set(first, (offset + count - 1) / LINE + 1 - first);
    }

    /// Merges and empties the log of a finished block. With `visible` memory,
    /// the block's writes count as written at once.
    pub fn merge(&self, block: u64, log: &mut BlockLog, visible: Option<&Regions>) {
        for (place, (region, number)) in std::mem::take(&mut log.used).into_iter().enumerate() {
            let page = &mut log.pages[place];
            if let Some(regions) = visible {
                regions.publish(region, number, page);
            }
            let mut pages = lock(&self.pages[region as usize]);
            let sum = pages.entry(number).or_insert_with(PageSum::new);
            sum.add(block, page);
            page.touched = [[0; PAGE_WORDS]; 3];
            page.first = [u32::MAX; 3];
            log.index[region as usize][number as usize] = 0;
        }
    }

    /// Marks the bytes that the launch has written and returns the first
    /// conflict. With `ordered`, blocks may know each other's writes, and only
    /// two writes to the same byte conflict.
    pub fn finish(&self, regions: &Regions, ordered: bool) -> Option<Conflict> {
        let mut found: Option<Conflict> = None;
        for (region, pages) in self.pages.iter().enumerate() {
            let allocation = &regions.list[region];
            for (number, sum) in lock(pages).iter() {
                let first = *number as usize * PAGE_WORDS;
                for word in 0..PAGE_WORDS {
                    // The smallest conflict is kept, not the first one found:
                    // pages sit in a hash map, whose order changes from run to
                    // run.
                    let written = sum.once[1][word] | sum.once[2][word];
                    allocation.valid.set_word(first + word, written);
                }
                let constant = self.constant[region].get();
                if let Some(conflict) = sum.conflict(region, *number as usize, constant, ordered) {
                    found = Some(found.map_or(conflict, |least| least.min(conflict)));
                }
            }
        }
        found
    }
}

impl Regions {
    /// Publishes the bytes that a page's block wrote.
    fn publish(&self, region: u32, number: u32, page: &Page) {
        let valid = &self.list[region as usize].valid;
        for word in 0..PAGE_WORDS {
            let written = page.touched[1][word] | page.touched[2][word];
            valid.set_word(number as usize * PAGE_WORDS + word, written);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner())
}

impl PageSum {
    fn new() -> Box<PageSum> {
        Box::new(PageSum {
            once: [[0; PAGE_WORDS]; 3],
            again: [[0; PAGE_WORDS]; 3],
            own: [[0; PAGE_WORDS]; 3],
            least: [(u64::MAX, 0); 3],
            largest: [(0, 0); 3],
        })
    }

    fn add(&mut self, block: u64, page: &Page) {
        for kind in 0..3 {
            if page.first[kind] == u32::MAX {
                continue;
            }
            self.least[kind] = self.least[kind].min((block, page.first[kind]));
            self.largest[kind] = self.largest[kind].max((block, page.first[kind]));
            for word in 0..PAGE_WORDS {
                let own = page.touched[kind][word];
                self.again[kind][word] |= self.once[kind][word] & own;
                self.once[kind][word] |= own;
            }
        }
        // Pairs: read and write, write and atomic, atomic and read.
        for (at, (a, b)) in [(0, 1), (1, 2), (2, 0)].into_iter().enumerate() {
            for word in 0..PAGE_WORDS {
                self.own[at][word] |= page.touched[a][word] & page.touched[b][word];
            }
        }
    }

    fn conflict(
        &self,
        region: usize,
        number: usize,
        constant: Option<&SharedBits>,
        ordered: bool,
    ) -> Option<Conflict> {
        let [read, write, atomic, constant_read] = [0, 1, 2, 3];
        (0..PAGE_WORDS).find_map(|word| {
            // Both kinds touch the byte, and not within one block alone.
            let mixed = |a: usize, b: usize, pair: usize| {
                let both = self.once[a][word] & self.once[b][word];
                both & (self.again[a][word] | self.again[b][word] | !self.own[pair][word])
            };
            let line = number * PAGE_WORDS + word;
            let constant = constant
                .filter(|bits| bits.word(line / 64) >> (line % 64) & 1 == 1)
                .map_or(0, |_| self.once[write][word] | self.once[atomic][word]);
            let kinds = [
                (self.again[write][word], write, write),
                (mixed(read, write, 0), write, read),
                (mixed(write, atomic, 1), write, atomic),
                (mixed(atomic, read, 2), atomic, read),
                (constant, write, constant_read),
            ];
            // A kernel that synchronises blocks by flags orders its reads in
            // ways the logs cannot follow. Two plain writes to one byte stay
            // suspicious even then.
            let counts = |other: usize| other == write || !ordered;
            let mut found = kinds.into_iter().filter(|kind| counts(kind.2));
            let (bits, writer, other) = found.find(|(bits, ..)| *bits != 0)?;
            let first = self.least[writer];
            let second = (other != constant_read).then(|| match self.largest[other] {
                same if same.0 == first.0 => self.least[other],
                another => another,
            });
            Some(Conflict {
                region,
                offset: number * PAGE + 64 * word + bits.trailing_zeros() as usize,
                writer: first,
                other: second,
                both_write: other == write,
                atomic: other == atomic || writer == atomic,
            })
        })
    }
}
