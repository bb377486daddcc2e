//! A GPU with the streams of the stand-in for NCCL, and ranks with one such GPU each.
#![allow(dead_code)]

use moesaic_collectives::nccl::{self, Fold, Folding, Nccl};
use moesaic_collectives::{CollectiveError, CommElement, Communicator, Reduction, threads};
use moesaic_dl::{Library, dl_table};
use moesaic_kernel::Entry;
use moesaic_target::{
    Arg, Artifact, Buffer, Device, DeviceCopy, DeviceError, DeviceInfo, Event, FunctionId, GpuInfo,
    Graph, HostBuffer, LaunchDims, Module, Ptr, StreamDevice,
};
use std::ffi::{CStr, CString, c_char, c_int, c_long, c_void};
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Arc, Mutex, OnceLock};

type Run = extern "C" fn(*mut c_void);

dl_table! {
    /// The functions that the stand-in has beyond the library's.
    pub struct Stand {
        set: fn(name: *const c_char, value: c_long) = "fake_set";
        log: fn() -> *mut c_char = "fake_log";
        live: fn() -> c_int = "fake_live";
        bind: fn(device: c_int) = "fake_bind";
        stream: fn(device: c_int) -> *mut c_void = "fake_stream";
        push: fn(stream: *mut c_void, run: Run, argument: *mut c_void) = "fake_push";
        position: fn(stream: *mut c_void) -> c_long = "fake_position";
        passed: fn(stream: *mut c_void, position: c_long) -> c_int = "fake_passed";
        wait: fn(stream: *mut c_void, position: c_long) = "fake_wait";
        capture: fn(stream: *mut c_void) = "fake_capture";
        graph: fn(stream: *mut c_void) -> *mut c_void = "fake_graph";
        launch: fn(graph: *mut c_void, stream: *mut c_void) = "fake_launch";
        meet: fn(device: c_int, exchange: c_long) = "fake_meet";
        kernel: fn(device: c_int) = "fake_kernel";
    }
}

/// A stand-in for one test alone.
pub struct Lab {
    _folder: tempfile::TempDir,
    pub library: PathBuf,
    stand: Arc<Stand>,
}

/// Returns one of two builds of the stand-in: with an all-to-all function, and without.
fn built(without: bool) -> &'static PathBuf {
    static BUILT: [OnceLock<(tempfile::TempDir, PathBuf)>; 2] = [OnceLock::new(), OnceLock::new()];
    let build = || {
        let folder = tempfile::tempdir().unwrap();
        let library = folder.path().join("libnccl.so.2");
        let source = folder.path().join("fake_nccl.c");
        std::fs::write(&source, include_str!("fake_nccl.c")).unwrap();
        let status = Command::new("cc")
            .args(["-shared", "-fPIC", "-w", "-O1", "-pthread", "-o"])
            .arg(&library)
            .arg(&source)
            .args(without.then_some("-DWITHOUT_ALL_TO_ALL"))
            .status()
            .expect("the test needs a C compiler named `cc`");
        assert!(status.success(), "cc: {status}");
        (folder, library)
    };
    &BUILT[usize::from(without)].get_or_init(build).1
}

impl Lab {
    pub fn new() -> Lab {
        Lab::with(false)
    }

    pub fn with(without_all_to_all: bool) -> Lab {
        let folder = tempfile::tempdir().unwrap();
        let library = folder.path().join("libnccl.so.2");
        std::fs::copy(built(without_all_to_all), &library).unwrap();
        let opened = Library::open_path("the stand-in", &library).unwrap();
        // SAFETY: the signatures are those of fake_nccl.c.
        let stand = Arc::new(unsafe { Stand::load(opened) }.unwrap());
        Lab {
            _folder: folder,
            library,
            stand,
        }
    }

    pub fn set(&self, name: &str, value: i64) {
        let name = CString::new(name).unwrap();
        // SAFETY: the name ends in a zero.
        unsafe { self.stand.set(name.as_ptr(), value) };
    }

    pub fn log(&self) -> String {
        // SAFETY: a string that is nobody else's; it is not freed.
        let text = unsafe { CStr::from_ptr(self.stand.log()) };
        text.to_str().unwrap().to_string()
    }

    /// Makes exchange `exchange` of a device end only once a kernel behind the exchange before it
    /// has begun, and that kernel end only once the exchange has ended. If they wait in vain,
    /// that is reported as illegal.
    pub fn meet(&self, device: usize, exchange: i64) {
        // SAFETY: any number is allowed.
        unsafe { self.stand.meet(device as c_int, exchange) };
    }

    /// Returns the number of communicators that were not ended.
    pub fn live(&self) -> i32 {
        // SAFETY: no arguments.
        unsafe { self.stand.live() }
    }

    /// Asserts that nothing was done that NCCL forbids.
    #[track_caller]
    pub fn legal(&self) {
        let log = self.log();
        assert!(!log.contains("ILLEGAL"), "{log}");
    }

    pub fn device(&self, number: usize) -> Arc<Gpu> {
        self.device_at(number, &format!("0000:{number:02x}:00"))
    }

    pub fn device_at(&self, number: usize, bus: &str) -> Arc<Gpu> {
        Arc::new(Gpu {
            // SAFETY: any number is allowed.
            stream: Stream(unsafe { self.stand.stream(number as c_int) }),
            stand: Arc::clone(&self.stand),
            number,
            capture: Mutex::new(None),
            info: DeviceInfo {
                name: "a fake GPU".to_string(),
                target: "cuda:sm_90a".parse().unwrap(),
                units: 1,
                memory_bytes: None,
            },
            gpu_info: GpuInfo {
                ordinal: number,
                bus: Some(bus.to_string()),
                ..GpuInfo::default()
            },
            admitted: Mutex::default(),
            cpu: None,
        })
    }

    /// Returns a device whose kernels are those of a CPU and run when its stream reaches them.
    pub fn device_of(&self, number: usize, cpu: Arc<dyn Device>) -> Arc<Gpu> {
        let gpu = Arc::into_inner(self.device(number)).expect("nobody has it yet");
        Arc::new(Gpu {
            info: cpu.info().clone(),
            cpu: Some(cpu),
            ..gpu
        })
    }

    pub fn options(&self) -> nccl::NcclOptions {
        nccl::NcclOptions {
            library: Some(self.library.clone()),
            ..nccl::NcclOptions::default()
        }
    }

    /// Returns the result of every rank; `None` for ranks that panicked.
    pub fn run<T: Send>(
        &self,
        ranks: usize,
        options: impl Fn(usize, &Arc<Gpu>) -> nccl::NcclOptions + Sync,
        body: impl Fn(Result<Nccl, CollectiveError>) -> T + Sync,
    ) -> Vec<Option<T>> {
        let gpus: Vec<Arc<Gpu>> = (0..ranks).map(|rank| self.device(rank)).collect();
        self.run_on(&gpus, |control, gpu| {
            let device = Arc::clone(control.device());
            body(nccl::over(control, device, &options(gpu.number, gpu)))
        })
    }

    /// The same for ranks that start by themselves, on these devices.
    pub fn run_on<T: Send>(
        &self,
        gpus: &[Arc<Gpu>],
        body: impl Fn(Communicator, &Arc<Gpu>) -> T + Sync,
    ) -> Vec<Option<T>> {
        let device = |rank: usize| -> Result<Arc<dyn Device>, DeviceError> {
            Ok(Arc::clone(&gpus[rank]) as Arc<dyn Device>)
        };
        let results = threads::run(gpus.len(), device, |control| {
            use moesaic_collectives::Collectives;
            let gpu = &gpus[control.rank()];
            body(control, gpu)
        });
        results.unwrap().into_iter().map(Result::ok).collect()
    }
}

#[derive(Clone, Copy)]
struct Stream(*mut c_void);

// SAFETY: streams are used under the stand-in's lock, and live as long as the process.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

/// A device of the stand-in.
pub struct Gpu {
    stand: Arc<Stand>,
    stream: Stream,
    number: usize,
    capture: Mutex<Option<String>>,
    info: DeviceInfo,
    gpu_info: GpuInfo,
    /// The GPUs that may use its memory.
    pub admitted: Mutex<Vec<usize>>,
    /// The device whose kernels it runs.
    cpu: Option<Arc<dyn Device>>,
}

type Job = Box<dyn FnMut() + Send>;

extern "C" fn run(job: *mut c_void) {
    // SAFETY: a job of `push`, which is never freed: a graph may run it again.
    unsafe { (*job.cast::<Job>())() };
}

impl Gpu {
    fn push(&self, job: impl FnMut() + Send + 'static) {
        let job: Box<Job> = Box::new(Box::new(job));
        // SAFETY: the stream is live, the job is kept for ever.
        unsafe {
            self.stand
                .push(self.stream.0, run, Box::into_raw(job).cast())
        };
    }

    fn forbid(&self, attempted: &str) -> Result<(), DeviceError> {
        match self.capturing() {
            None => Ok(()),
            Some(graph) => Err(DeviceError::Capturing {
                graph,
                attempted: attempted.to_string(),
            }),
        }
    }
}

fn address(ptr: Ptr) -> *mut u8 {
    std::ptr::with_exposed_provenance_mut(ptr.0 as usize)
}

/// Kernels of a CPU, run on the stream.
struct Kernels {
    of_cpu: Arc<dyn Module>,
    device: usize,
    stand: Arc<Stand>,
    stream: Stream,
}

impl Module for Kernels {
    fn function(&self, symbol: &str) -> Result<FunctionId, DeviceError> {
        self.of_cpu.function(symbol)
    }

    unsafe fn run(
        &self,
        function: FunctionId,
        dims: LaunchDims,
        args: &[Arg],
    ) -> Result<(), DeviceError> {
        let (kernel, args) = (Arc::clone(&self.of_cpu), args.to_vec());
        let (stand, device) = (Arc::clone(&self.stand), self.device);
        let job: Box<Job> = Box::new(Box::new(move || {
            // SAFETY: any number is allowed.
            unsafe { stand.kernel(device as c_int) };
            // SAFETY: the caller's promise, which holds until the stream has come here.
            unsafe { kernel.run(function, dims, &args) }.expect("a kernel that runs");
        }));
        // SAFETY: as in `Gpu::push`.
        unsafe {
            self.stand
                .push(self.stream.0, run, Box::into_raw(job).cast())
        };
        Ok(())
    }
}

/// Memory that is freed when the stream reaches it.
struct Block {
    memory: Option<Vec<u64>>,
    stand: Arc<Stand>,
    stream: Stream,
}

impl Drop for Block {
    fn drop(&mut self) {
        let mut memory = self.memory.take();
        let job: Box<Job> = Box::new(Box::new(move || drop(memory.take())));
        // SAFETY: as in `Gpu::push`.
        unsafe {
            self.stand
                .push(self.stream.0, run, Box::into_raw(job).cast())
        };
    }
}

impl Device for Gpu {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn streams(&self) -> Result<&dyn StreamDevice, DeviceError> {
        Ok(self)
    }

    fn capturing(&self) -> Option<String> {
        self.capture.lock().unwrap().clone()
    }

    fn load(&self, artifact: &Artifact, entries: &[Entry]) -> Result<Arc<dyn Module>, DeviceError> {
        let cpu = self.cpu.as_ref().expect("no kernels run here");
        Ok(Arc::new(Kernels {
            of_cpu: cpu.load(artifact, entries)?,
            device: self.number,
            stand: Arc::clone(&self.stand),
            stream: self.stream,
        }))
    }

    fn alloc(&self, bytes: usize) -> Result<Buffer, DeviceError> {
        self.forbid("an allocation")?;
        let mut memory = vec![0xA5A5_A5A5_A5A5_A5A5u64; bytes.div_ceil(8) + 8];
        let start = memory.as_mut_ptr().expose_provenance();
        let ptr = Ptr(start.next_multiple_of(64) as u64);
        let block = Block {
            memory: Some(memory),
            stand: Arc::clone(&self.stand),
            stream: self.stream,
        };
        Ok(Buffer::new(ptr, bytes, Box::new(block)))
    }

    fn upload(&self, bytes: &[u8], buffer: &Buffer, offset: usize) -> Result<(), DeviceError> {
        self.forbid("an upload")?;
        let to = buffer.range("upload", offset, bytes.len())?;
        let bytes = bytes.to_vec();
        self.push(move || {
            // SAFETY: the range is in the buffer, which is freed in stream order.
            unsafe { address(to).copy_from(bytes.as_ptr(), bytes.len()) };
        });
        Ok(())
    }

    fn download(
        &self,
        buffer: &Buffer,
        offset: usize,
        bytes: &mut [u8],
    ) -> Result<(), DeviceError> {
        self.forbid("a download")?;
        let from = buffer.range("download", offset, bytes.len())?;
        self.synchronize()?;
        // SAFETY: the range is in the buffer, and nothing else is on the stream.
        unsafe { address(from).copy_to(bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }

    fn synchronize(&self) -> Result<(), DeviceError> {
        self.forbid("a wait")?;
        // SAFETY: the stream is live.
        unsafe {
            let position = self.stand.position(self.stream.0);
            self.stand.wait(self.stream.0, position);
        }
        Ok(())
    }
}

struct At {
    stand: Arc<Stand>,
    stream: Stream,
    position: c_long,
}

impl Event for At {
    fn synchronize(&self) -> Result<(), DeviceError> {
        // SAFETY: the stream is live.
        unsafe { self.stand.wait(self.stream.0, self.position) };
        Ok(())
    }

    fn passed(&self) -> Result<bool, DeviceError> {
        // SAFETY: the stream is live.
        Ok(unsafe { self.stand.passed(self.stream.0, self.position) } != 0)
    }

    fn elapsed_ms(&self, _: &dyn Event) -> Result<f32, DeviceError> {
        Ok(0.0)
    }
}

struct Recorded {
    stand: Arc<Stand>,
    stream: Stream,
    graph: Stream,
    name: String,
}

impl Graph for Recorded {
    fn name(&self) -> &str {
        &self.name
    }

    fn kernels(&self) -> Vec<String> {
        Vec::new()
    }

    unsafe fn launch(&self) -> Result<(), DeviceError> {
        // SAFETY: graph and stream live as long as the process.
        unsafe { self.stand.launch(self.graph.0, self.stream.0) };
        Ok(())
    }
}

impl StreamDevice for Gpu {
    fn gpu_info(&self) -> &GpuInfo {
        &self.gpu_info
    }

    fn native_stream(&self) -> Result<*mut c_void, DeviceError> {
        // SAFETY: any number is allowed.
        unsafe { self.stand.bind(self.number as c_int) };
        Ok(self.stream.0)
    }

    fn fork(&self) -> Result<Arc<dyn StreamDevice>, DeviceError> {
        self.forbid("another stream")?;
        Ok(Arc::new(Gpu {
            // SAFETY: any number is allowed.
            stream: Stream(unsafe { self.stand.stream(self.number as c_int) }),
            stand: Arc::clone(&self.stand),
            number: self.number,
            capture: Mutex::new(None),
            info: self.info.clone(),
            gpu_info: self.gpu_info.clone(),
            admitted: Mutex::default(),
            cpu: self.cpu.clone(),
        }))
    }

    fn adopt(&self, _: &dyn Module) -> Result<Arc<dyn Module>, DeviceError> {
        unreachable!("no kernels run here")
    }

    fn occupancy(&self, _: &dyn Module, _: &str, _: u32, _: u32) -> Result<u32, DeviceError> {
        unreachable!("no kernels run here")
    }

    fn record(&self) -> Result<Arc<dyn Event>, DeviceError> {
        Ok(Arc::new(At {
            // SAFETY: the stream is live.
            position: unsafe { self.stand.position(self.stream.0) },
            stand: Arc::clone(&self.stand),
            stream: self.stream,
        }))
    }

    fn wait(&self, event: &dyn Event) -> Result<(), DeviceError> {
        let event: &dyn std::any::Any = event;
        let at: &At = event.downcast_ref().expect("an event of the stand-in");
        let (stand, stream, position) = (Arc::clone(&at.stand), at.stream, at.position);
        self.push(move || {
            let stream = stream;
            // SAFETY: streams live as long as the process.
            unsafe { stand.wait(stream.0, position) };
        });
        Ok(())
    }

    fn copy(&self, copy: &DeviceCopy<'_>) -> Result<(), DeviceError> {
        let from = copy.from.range("copy", copy.from_offset, copy.bytes)?;
        let to = copy.to.range("copy", copy.to_offset, copy.bytes)?;
        let bytes = copy.bytes;
        self.push(move || {
            // SAFETY: both ranges are in buffers, which are freed in stream order.
            unsafe { address(to).copy_from(address(from), bytes) };
        });
        Ok(())
    }

    fn pinned(&self, _: usize) -> Result<HostBuffer, DeviceError> {
        unreachable!("nothing is pinned here")
    }

    fn reaches(&self, _: usize) -> Result<bool, DeviceError> {
        Ok(false)
    }

    fn admit(&self, peer: usize) -> Result<(), DeviceError> {
        self.admitted.lock().unwrap().push(peer);
        Ok(())
    }

    fn begin_capture(&self, graph: &str) -> Result<(), DeviceError> {
        *self.capture.lock().unwrap() = Some(graph.to_string());
        // SAFETY: the stream is live.
        unsafe { self.stand.capture(self.stream.0) };
        Ok(())
    }

    fn end_capture(&self) -> Result<Arc<dyn Graph>, DeviceError> {
        let name = self.capture.lock().unwrap().take().unwrap();
        Ok(Arc::new(Recorded {
            // SAFETY: the stream is live.
            graph: Stream(unsafe { self.stand.graph(self.stream.0) }),
            stand: Arc::clone(&self.stand),
            stream: self.stream,
            name,
        }))
    }
}

/// Folds on the stream, as a kernel does.
pub struct OnStream(pub Arc<Gpu>);

impl Fold for OnStream {
    fn fold(&self, folding: &Folding) -> Result<(), DeviceError> {
        let (rows, to) = (&folding.rows, &folding.to);
        let from = rows.buffer().range("fold", rows.offset(), rows.bytes())?;
        let to = to.buffer().range("fold", to.offset(), folding.row_bytes)?;
        let (count, bytes) = (rows.bytes() / folding.row_bytes, folding.row_bytes);
        let (element, reduction) = (folding.element, folding.reduction);
        self.0.push(move || match element {
            CommElement::F32 => fold::<f32>(from, to, count, bytes, |a, b| match reduction {
                Reduction::Sum => a + b,
                Reduction::Max => a.max(b),
                Reduction::Min => a.min(b),
            }),
            CommElement::I64 => fold::<i64>(from, to, count, bytes, |a, b| a.wrapping_add(b)),
            other => panic!("no test folds {other}"),
        });
        Ok(())
    }

    fn waits(&self, _: CommElement) -> bool {
        false
    }
}

fn fold<T: Copy>(from: Ptr, to: Ptr, rows: usize, row_bytes: usize, join: impl Fn(T, T) -> T) {
    let elements = row_bytes / size_of::<T>();
    let (from, to) = (address(from).cast::<T>(), address(to).cast::<T>());
    for i in 0..elements {
        // SAFETY: the rows are there, and folded in stream order.
        let row = |row: usize| unsafe { from.add(row * elements + i).read_unaligned() };
        let value = (1..rows).fold(row(0), |value, next| join(value, row(next)));
        // SAFETY: as above.
        unsafe { to.add(i).write_unaligned(value) };
    }
}
