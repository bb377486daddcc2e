//! Loaded kernels and their launch.

use crate::block::ThreadOrder;
use crate::error::FiberError;
use crate::fault::Fault;
use crate::image::Facts;
use crate::machine::{MACHINE, MachineTable};
use crate::region::Region;
use crate::state::DeviceState;
use crate::words::Scene;
use crate::worker::{BlockJob, Body, Counts, Image, Worker};
use moesaic_cpu::{LoadedLibrary, load_shared_object};
use moesaic_kernel::{Access, Entry};
use moesaic_target::{
    Arg, ArgBlock, Artifact, DeviceError, FunctionId, LaunchDims, LaunchReason, LoadReason, Module,
    SharedError, gpu_grid,
};
use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

/// The header that the text exports: `Image` of `prelude/sim/machine.hpp`.
#[repr(C)]
struct Header {
    machine: *const MachineTable,
    shared: usize,
    shared_end: usize,
    wave: i64,
}

/// The image of a kernel, loaded for one core because shared memory is part of
/// it.
struct Copy {
    image: Image,
    bodies: Vec<Body>,
    /// Keeps the code behind `bodies` mapped.
    _loaded: LoadedLibrary,
}

/// The kernels of one source.
pub(crate) struct FiberModule {
    binary: Vec<u8>,
    entries: Vec<Entry>,
    facts: Facts,
    device: Arc<DeviceState>,
    copies: Mutex<Vec<Arc<Copy>>>,
}

impl FiberModule {
    pub(crate) fn load(
        artifact: &Artifact,
        entries: &[Entry],
        device: Arc<DeviceState>,
    ) -> Result<FiberModule, DeviceError> {
        let refuse = |error: SharedError| DeviceError::Load {
            kernel: entries
                .first()
                .map_or("(no entry)".to_string(), |e| e.symbol.clone()),
            reason: LoadReason::Binary(error),
        };
        let module = FiberModule {
            binary: artifact.binary.clone(),
            entries: entries.to_vec(),
            facts: Facts::read(&artifact.binary)
                .map_err(|error| refuse(SharedError::new(error)))?,
            device,
            copies: Mutex::default(),
        };
        let first = module.load_copy();
        let first = first.map_err(|error| refuse(SharedError::new(error)))?;
        module
            .copies
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(Arc::new(first));
        Ok(module)
    }

    /// Loads another copy of the image, with shared memory of its own.
    fn load_copy(&self) -> Result<Copy, FiberError> {
        let loaded = load_shared_object(&self.binary).map_err(FiberError::Load)?;
        // SAFETY: the prelude of the text declares it so; the library is kept
        // beside what is taken from it.
        let header = unsafe { loaded.library.symbol::<*mut Header>("sim_image") }?;
        let bodies = self.entries.iter().map(|entry| {
            // SAFETY: as above: the text has such a function for each entry.
            unsafe {
                loaded
                    .library
                    .symbol::<Body>(&format!("sim_{}", entry.symbol))
            }
        });
        let bodies = bodies.collect::<Result<Vec<Body>, _>>()?;
        // SAFETY: the header lies in the image, which no kernel of runs yet.
        let (shared, end, wave) = unsafe {
            (*header).machine = &raw const MACHINE;
            ((*header).shared, (*header).shared_end, (*header).wave)
        };
        let own = i64::from(self.device.arch.caps().wave);
        if wave != own {
            let arch = self.device.arch.name;
            return Err(FiberError::Wave { wave, own, arch });
        }
        let image = Image {
            start: (header as usize).wrapping_sub(self.facts.anchor as usize),
            bytes: self.facts.end as usize,
            shared,
            shared_bytes: end - shared,
        };
        Ok(Copy {
            image,
            bodies,
            _loaded: loaded,
        })
    }

    /// Returns the first `count` copies, loading those that are missing.
    fn copies(&self, count: usize) -> Result<Vec<Arc<Copy>>, FiberError> {
        let mut copies = self.copies.lock().unwrap_or_else(PoisonError::into_inner);
        while copies.len() < count {
            copies.push(Arc::new(self.load_copy()?));
        }
        Ok(copies[..count].to_vec())
    }
}

fn refused(symbol: &str, error: FiberError) -> DeviceError {
    DeviceError::Launch {
        kernel: symbol.to_string(),
        reason: LaunchReason::Simulator(SharedError::new(error)),
    }
}

impl Module for FiberModule {
    fn function(&self, symbol: &str) -> Result<FunctionId, DeviceError> {
        FunctionId::find(self.entries.iter().map(|e| &*e.symbol), symbol)
    }

    unsafe fn run(
        &self,
        FunctionId(index): FunctionId,
        dims: LaunchDims,
        args: &[Arg],
    ) -> Result<(), DeviceError> {
        let entry = &self.entries[index];
        let symbol = &*entry.symbol;
        let mut values = ArgBlock::new(entry, args)?;
        let Some([x, y]) = gpu_grid(symbol, &dims)? else {
            return Ok(());
        };
        self.check_block(entry, &dims)
            .map_err(|error| refused(symbol, error))?;
        let regions = self
            .regions(entry, args)
            .map_err(|error| refused(symbol, error))?;
        let _turn = self
            .device
            .turn
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let launch = Launch {
            module: self,
            index,
            args,
            regions: &regions,
            values: values.pointers().as_ptr(),
            dims,
            grid: [u64::from(x), u64::from(y)],
        };
        launch.run().map_err(|error| refused(symbol, error))
    }
}

impl FiberModule {
    /// Checks that a compute unit could run such a block.
    fn check_block(&self, entry: &Entry, dims: &LaunchDims) -> Result<(), FiberError> {
        let wave = self.device.arch.caps().wave;
        if dims.threads == 0 || dims.threads > 1024 || !dims.threads.is_multiple_of(wave) {
            let threads = dims.threads;
            return Err(FiberError::Threads { threads, wave });
        }
        let statics = self.facts.shared_bytes(&entry.symbol, &self.entries);
        let (asked, most) = (statics + dims.shared_bytes, self.device.shared_bytes());
        if asked > most {
            let arch = self.device.arch.name;
            Err(FiberError::SharedMemory { asked, most, arch })
        } else {
            Ok(())
        }
    }

    /// Returns the allocations behind the arguments, by address.
    fn regions(&self, entry: &Entry, args: &[Arg]) -> Result<Vec<Region>, FiberError> {
        let mut regions: Vec<Region> = Vec::new();
        for (param, arg) in entry.params.iter().zip(args) {
            let (Arg::Ptr(ptr), Some((_, access))) = (arg, param.ty.tensor()) else {
                continue;
            };
            let allocation = self.device.memory.find(ptr.0 as usize);
            let allocation = allocation.ok_or_else(|| FiberError::NoBuffer {
                param: param.name.to_string(),
                address: ptr.0,
            })?;
            let start = allocation.start();
            let at = regions.partition_point(|region| region.start < start);
            if regions.get(at).is_none_or(|region| region.start != start) {
                regions.insert(at, Region::new(allocation));
            }
            // Several tensors may lie in one allocation. One written parameter
            // makes all of it writable, since a region has one history.
            regions[at].writable |= access != Access::Read;
        }
        Ok(regions)
    }
}

/// One launch.
struct Launch<'a> {
    module: &'a FiberModule,
    index: usize,
    args: &'a [Arg],
    regions: &'a [Region],
    values: *const *mut c_void,
    dims: LaunchDims,
    grid: [u64; 2],
}

// SAFETY: the values are only read, and outlive the launch.
unsafe impl Sync for Launch<'_> {}

/// The state that the cores of a launch share.
struct Progress {
    next: AtomicU64,
    /// The lowest failing block; no block above it starts.
    stop: AtomicU64,
    first: Mutex<Option<(u64, FiberError)>>,
    counts: Mutex<Counts>,
}

impl Launch<'_> {
    /// Runs the grid under each of the device's orders and compares the
    /// results.
    fn run(&self) -> Result<(), FiberError> {
        let orders = &self.module.device.orders;
        let (first, others) = orders
            .split_first()
            .unwrap_or((&ThreadOrder::Ascending, &[]));
        if others.is_empty() {
            return self.run_once(*first).map(|counts| self.count(&counts));
        }
        // Every order starts from the same bytes. Only memory that the kernel
        // may write is kept, as the rest cannot change.
        let before = self.contents();
        let counts = self.run_once(*first)?;
        self.count(&counts);
        let want = self.contents();
        for order in others {
            self.restore(&before);
            self.run_once(*order)?;
            self.compare(&want, [*first, *order])?;
        }
        Ok(())
    }

    fn count(&self, counts: &Counts) {
        let symbol = &self.module.entries[self.index].symbol;
        self.module.device.count(symbol, counts);
    }

    fn written(&self) -> impl Iterator<Item = &Region> {
        self.regions.iter().filter(|region| region.writable)
    }

    /// Returns the bytes that the kernel may change.
    fn contents(&self) -> Vec<Vec<u8>> {
        let bytes = |region: &Region| {
            // SAFETY: the allocation is this long, and no kernel runs.
            unsafe { std::slice::from_raw_parts(region.start as *const u8, region.bytes) }.to_vec()
        };
        self.written().map(bytes).collect()
    }

    fn restore(&self, contents: &[Vec<u8>]) {
        for (region, bytes) in self.written().zip(contents) {
            // SAFETY: as in `contents`.
            unsafe { (region.start as *mut u8).copy_from(bytes.as_ptr(), bytes.len()) };
        }
    }

    fn compare(&self, want: &[Vec<u8>], orders: [ThreadOrder; 2]) -> Result<(), FiberError> {
        for ((region, want), got) in self.written().zip(want).zip(self.contents()) {
            let Some(byte) = want.iter().zip(&got).position(|(a, b)| a != b) else {
                continue;
            };
            let stamp = region.writer(byte);
            let number = u64::from(stamp.of_block().unwrap_or(0));
            let (x, y) = (number % self.grid[0], number / self.grid[0]);
            let scene = self.scene(Image::default());
            return Err(FiberError::Order {
                block: [x, y],
                place: scene.place(region.start + byte),
                orders,
            });
        }
        Ok(())
    }

    fn scene(&self, image: Image) -> Scene<'_> {
        Scene {
            arch: self.module.device.arch.name,
            facts: &self.module.facts,
            image,
            entry: &self.module.entries[self.index],
            args: self.args,
            regions: self.regions,
            grid_x: self.grid[0],
        }
    }

    fn run_once(&self, order: ThreadOrder) -> Result<Counts, FiberError> {
        let device = &self.module.device;
        let blocks = self.grid[0] * self.grid[1];
        let cores = (device.cores as u64).min(blocks) as usize;
        let copies = self.module.copies(cores)?;
        let number = device.next_launch();
        let progress = Progress {
            next: AtomicU64::new(0),
            stop: AtomicU64::new(blocks),
            first: Mutex::default(),
            counts: Mutex::default(),
        };
        let core = |copy: &Copy| self.run_blocks(copy, number, order, &progress);
        std::thread::scope(|scope| {
            for copy in &copies[1..] {
                scope.spawn(|| core(copy));
            }
            core(&copies[0]);
        });
        let counts = progress
            .counts
            .into_inner()
            .unwrap_or_else(PoisonError::into_inner);
        let first = progress
            .first
            .into_inner()
            .unwrap_or_else(PoisonError::into_inner);
        first.map_or(Ok(counts), |(_, error)| Err(error))
    }

    /// Runs blocks on one core until none is left or one has failed.
    fn run_blocks(&self, copy: &Copy, number: u32, order: ThreadOrder, progress: &Progress) {
        let job = BlockJob {
            body: copy.bodies[self.index],
            image: copy.image,
            values: self.values,
            regions: self.regions,
            threads: self.dims.threads as usize,
            dynamic_bytes: self.dims.shared_bytes as usize,
            launch: number,
            order,
        };
        let device = &self.module.device;
        let ready = device.worker().and_then(|mut worker| {
            worker.begin(&job)?;
            Ok(worker)
        });
        let mut worker = match ready {
            Ok(worker) => worker,
            Err(error) => return progress.fail(0, FiberError::NoStacks(error)),
        };
        loop {
            let block = progress.next.fetch_add(1, Relaxed);
            if block >= progress.stop.load(Relaxed) {
                break;
            }
            let at = [block % self.grid[0], block / self.grid[0]].map(|i| i as i64);
            // SAFETY: the worker has begun this job; the values are those of
            // the entry, as the launch's caller vouches.
            if !unsafe { worker.run_block(&job, block as u32, at) } {
                let fault = worker.fault.take().unwrap_or(Fault::Deadlock);
                let reason = self.scene(copy.image).describe(&fault, &worker.block);
                progress.fail(block, FiberError::Fault(reason));
            }
        }
        progress.add(&worker);
        device.give_back(worker);
    }
}

impl Progress {
    /// Keeps the failure of the lowest block, which does not depend on the
    /// spread of blocks over cores.
    fn fail(&self, block: u64, error: FiberError) {
        self.stop.fetch_min(block, Relaxed);
        let mut first = self.first.lock().unwrap_or_else(PoisonError::into_inner);
        if first.as_ref().is_none_or(|(lowest, _)| block < *lowest) {
            *first = Some((block, error));
        }
    }

    fn add(&self, worker: &Worker) {
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        counts.add(&worker.counts);
    }
}
