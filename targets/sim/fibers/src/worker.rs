//! A worker: it runs blocks on one core, thread by thread.

use crate::block::{Block, State, ThreadOrder};
use crate::fault::{Access, AccessKind, Fault, Problem};
use crate::product::{Product, Shape};
use crate::region::Region;
use crate::shared::SharedMemory;
use crate::stacks::Stacks;
use crate::stamp::{MOST_BLOCK_BARRIERS, MOST_WAVE_BARRIERS};
use crate::switch::{Context, prepare, switch};
use moesaic_kernel::RocmArch;
use std::cell::Cell;
use std::ffi::c_void;
use std::ptr;

/// The function of a kernel for one thread; `values[i]` points to argument i.
pub(crate) type Body = unsafe extern "C" fn(values: *const *mut c_void);

/// The places of a kernel's machine code, constants and shared memory.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Image {
    pub(crate) start: usize,
    pub(crate) bytes: usize,
    pub(crate) shared: usize,
    pub(crate) shared_bytes: usize,
}

/// The part of a launch that its blocks have in common.
pub(crate) struct BlockJob<'a> {
    pub(crate) body: Body,
    pub(crate) image: Image,
    pub(crate) values: *const *mut c_void,
    pub(crate) regions: &'a [Region],
    pub(crate) threads: usize,
    pub(crate) dynamic_bytes: usize,
    /// Number of the launch, for stamps.
    pub(crate) launch: u32,
    pub(crate) order: ThreadOrder,
}

/// Counts of executed operations.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counts {
    pub(crate) blocks: u64,
    pub(crate) block_barriers: u64,
    pub(crate) collectives: u64,
    pub(crate) products: u64,
    pub(crate) multiply_adds: u64,
    pub(crate) global_read_bytes: u64,
    pub(crate) global_written_bytes: u64,
}

impl Counts {
    pub(crate) fn add(&mut self, other: &Counts) {
        self.blocks += other.blocks;
        self.block_barriers += other.block_barriers;
        self.collectives += other.collectives;
        self.products += other.products;
        self.multiply_adds += other.multiply_adds;
        self.global_read_bytes += other.global_read_bytes;
        self.global_written_bytes += other.global_written_bytes;
    }
}

/// The stacks of a core and the block on it.
pub(crate) struct Worker {
    arch: RocmArch,
    pub(crate) block: Block,
    pub(crate) counts: Counts,
    pub(crate) fault: Option<Fault>,
    stacks: Stacks,
    contexts: Vec<Context>,
    scheduler: Context,
    statics: SharedMemory,
    dynamic: SharedMemory,
    dynamic_memory: Vec<u128>,
    job: JobPart,
    /// The region that an instruction touched last, by the instruction's
    /// address.
    recent: [u32; 256],
}

/// The part of a [`BlockJob`] that accesses need while it runs.
#[derive(Clone, Copy)]
struct JobPart {
    body: Option<Body>,
    values: *const *mut c_void,
    regions: *const [Region],
    image: Image,
}

// SAFETY: its pointers are to its own stacks, or to a job that is borrowed
// for as long as they are used.
unsafe impl Send for Worker {}

thread_local! {
    /// The worker whose block this thread of the host runs.
    static CURRENT: Cell<*mut Worker> = const { Cell::new(ptr::null_mut()) };
}

/// Returns the worker of the calling fiber.
///
/// # Safety
/// Only functions that a running kernel calls may use it, and the reference
/// must end before another fiber runs.
#[inline]
pub(crate) unsafe fn current<'a>() -> &'a mut Worker {
    // SAFETY: `run_block` has set it, and borrows the worker while fibers run.
    unsafe { &mut *CURRENT.get() }
}

impl Worker {
    pub(crate) fn new(arch: RocmArch) -> std::io::Result<Worker> {
        Ok(Worker {
            arch,
            block: Block::new(arch.caps().wave as usize),
            counts: Counts::default(),
            fault: None,
            stacks: Stacks::new(0)?,
            contexts: Vec::new(),
            scheduler: ptr::null_mut(),
            statics: SharedMemory::default(),
            dynamic: SharedMemory::default(),
            dynamic_memory: Vec::new(),
            job: JobPart {
                body: None,
                values: ptr::null(),
                regions: &[],
                image: Image::default(),
            },
            recent: [0; 256],
        })
    }

    /// Prepares for the blocks of a job.
    pub(crate) fn begin(&mut self, job: &BlockJob) -> std::io::Result<()> {
        if self.stacks.count() < job.threads {
            self.stacks = Stacks::new(job.threads)?;
        }
        self.contexts.resize(job.threads, ptr::null_mut());
        self.statics.watch(job.image.shared, job.image.shared_bytes);
        self.dynamic_memory.clear();
        self.dynamic_memory
            .resize(job.dynamic_bytes.div_ceil(16), 0);
        let start = self.dynamic_memory.as_ptr() as usize;
        self.dynamic.watch(start, job.dynamic_bytes);
        self.counts = Counts::default();
        self.recent = [0; 256];
        self.block.begin(job.launch, job.order);
        self.job = JobPart {
            body: Some(job.body),
            values: job.values,
            regions: ptr::from_ref(job.regions),
            image: job.image,
        };
        Ok(())
    }

    /// Runs one block; returns false and leaves the fault in the worker if it
    /// fails.
    ///
    /// # Safety
    /// `begin` was called with this job, whose body takes its values.
    pub(crate) unsafe fn run_block(&mut self, job: &BlockJob, number: u32, at: [i64; 2]) -> bool {
        self.fault = None;
        self.counts.blocks += 1;
        // SAFETY: the image's shared memory and the worker's own; no fiber runs.
        unsafe {
            self.statics.reset();
            self.dynamic.reset();
        }
        self.block.reset(number, at, job.threads);
        for i in 0..job.threads {
            // SAFETY: a stack is larger than what a context takes.
            self.contexts[i] = unsafe { prepare(self.stacks.top(i), fiber) };
        }
        let this = ptr::from_mut(self);
        let outer = CURRENT.replace(this);
        // SAFETY: the worker outlives the switch; no reference to it is used
        // until a fiber switches back here.
        unsafe {
            let to = successor(&mut *this);
            switch(&raw mut (*this).scheduler, to);
        }
        CURRENT.set(outer);
        self.fault.is_none()
    }

    /// Checks and records an access of the current thread.
    #[inline]
    pub(crate) fn access(&mut self, access: Access) -> Option<Fault> {
        let Access { address, bytes, .. } = access;
        let (now, shift) = (self.block.now, self.block.shift);
        let image = self.job.image.start;
        if self.statics.holds(address) {
            return self.statics.touch(access, now, shift, image);
        }
        if let Some(owner) = self.stacks.owner(address) {
            let foreign = owner != self.block.current;
            return foreign.then_some(Fault::Memory(access, Problem::Foreign(owner)));
        }
        // SAFETY: the job is borrowed while its blocks run.
        let regions = unsafe { &*self.job.regions };
        // An instruction mostly touches the same tensor again, so a table by
        // instruction address finds the region without a search.
        let slot = access.from >> 2 & 255;
        let guess = self.recent[slot] as usize;
        let hit = regions.get(guess).is_some_and(|r| r.holds(address));
        let found = if hit {
            Some(guess)
        } else {
            find(regions, address)
        };
        if let Some(i) = found {
            self.recent[slot] = i as u32;
            match access.kind {
                AccessKind::Read => self.counts.global_read_bytes += bytes as u64,
                _ => self.counts.global_written_bytes += bytes as u64,
            }
            return regions[i].touch(access, now, shift);
        }
        if self.dynamic.holds(address) {
            return self.dynamic.touch(access, now, shift, image);
        }
        self.elsewhere(access)
    }

    /// Checks a read of global memory whose value nobody uses. A lane may make
    /// it for the sake of others, so it is not counted, and its bytes may be
    /// unwritten.
    pub(crate) fn read_along(&mut self, access: Access) -> Option<Fault> {
        // SAFETY: the job is borrowed while its blocks run.
        let regions = unsafe { &*self.job.regions };
        match find(regions, access.address) {
            Some(i) => regions[i].bounds(access),
            None => self.elsewhere(access),
        }
    }

    #[cold]
    fn elsewhere(&self, access: Access) -> Option<Fault> {
        let image = self.job.image;
        let constant = access.address.wrapping_sub(image.start) < image.bytes;
        match (constant, access.kind) {
            (true, AccessKind::Read) => None,
            (true, _) => Some(Fault::Memory(access, Problem::Constant)),
            _ => Some(Fault::Memory(access, Problem::Outside)),
        }
    }

    /// Returns the instruction of a product and counts one lane's arrival.
    pub(crate) fn product(&mut self, shape: Shape) -> Option<Product> {
        let product = shape.on(self.arch)?;
        if self.block.lane() == 0 {
            self.counts.products += 1;
            self.counts.multiply_adds += product.multiply_adds();
        }
        Some(product)
    }

    pub(crate) fn dynamic_shared(&self) -> *mut c_void {
        self.dynamic.start() as *mut c_void
    }

    /// Counts a wave barrier of the current thread's wave.
    pub(crate) fn count_wave_barrier(&mut self) {
        self.block.wave().barriers += 1;
        if self.block.wave().barriers > MOST_WAVE_BARRIERS {
            self.settle();
        }
        self.block.stamp();
    }

    /// Counts a barrier of the block.
    pub(crate) fn count_block_barrier(&mut self) {
        self.counts.block_barriers += 1;
        self.block.barriers += 1;
        if self.block.barriers > MOST_BLOCK_BARRIERS {
            self.settle();
        }
        self.block.stamp();
    }

    /// Starts counting barriers anew. The history is forgotten, so some
    /// conflicts are missed and none is invented.
    fn settle(&mut self) {
        self.statics.settle();
        self.dynamic.settle();
        // SAFETY: the job is borrowed while its blocks run.
        let regions = unsafe { &*self.job.regions };
        let written = regions.iter().filter(|region| region.writable);
        written.for_each(|region| region.allocation.forget());
        self.block.barriers = 1;
        self.block
            .waves
            .iter_mut()
            .for_each(|wave| wave.barriers = 1);
    }
}

#[cold]
fn find(regions: &[Region], address: usize) -> Option<usize> {
    let after = regions.partition_point(|region| region.start <= address);
    let at = after.checked_sub(1)?;
    regions[at].holds(address).then_some(at)
}

/// The first function of every fiber.
extern "C" fn fiber() -> ! {
    // SAFETY: the job's body and values, as `run_block`'s caller vouches; no
    // reference to the worker is held while the body runs.
    unsafe {
        let (body, values) = (current().job.body, current().job.values);
        if let Some(body) = body {
            body(values);
        }
        let block = &mut current().block;
        block.states[block.current] = State::Done;
        block.live -= 1;
    }
    leave()
}

/// Runs other threads of the block until this one is woken.
pub(crate) fn park(state: State) {
    // SAFETY: the worker is there while fibers run; the reference ends before
    // the switch, and the context belongs to a stack of the worker.
    unsafe {
        let worker = current();
        let own = worker.block.current;
        worker.block.states[own] = state;
        let to = successor(worker);
        let from = &raw mut worker.contexts[own];
        switch(from, to);
    }
}

/// Returns the fiber that runs next, or the scheduler when none can.
fn successor(worker: &mut Worker) -> Context {
    match worker.block.next() {
        Some(next) => worker.contexts[next],
        None => {
            if worker.block.live > 0 {
                worker.fault = Some(Fault::Deadlock);
            }
            worker.scheduler
        }
    }
}

/// Runs other threads of the block for good.
fn leave() -> ! {
    let mut nowhere = ptr::null_mut();
    // SAFETY: as in `park`; nobody takes up what is left here.
    unsafe {
        let to = successor(current());
        switch(&raw mut nowhere, to);
    }
    unreachable!("a fiber that has ended was taken up")
}

/// Ends the block with a fault of the running thread.
#[cold]
pub(crate) fn fail(fault: Fault) -> ! {
    let mut nowhere = ptr::null_mut();
    // SAFETY: as in `leave`: the scheduler waits in `run_block`.
    unsafe {
        let worker = current();
        worker.fault = Some(fault);
        let to = worker.scheduler;
        switch(&raw mut nowhere, to);
    }
    unreachable!("a block that has failed was taken up")
}
