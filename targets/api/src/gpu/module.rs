//! Loaded modules and their launches.

use super::journal::Launched;
use super::lane::Lane;
use super::orphan::Orphan;
use super::shared::Gpu;
use super::{FunctionHandle, LaunchShape, ModuleHandle, Vendor, functions};
use crate::{
    Arg, ArgBlock, Artifact, DeviceError, FunctionId, KernelReport, LaunchDims, LaunchReason,
    LoadReason, MAP_BYTES, Module, SignatureError, gpu_grid,
};
use moesaic_kernel::Entry;
use std::cell::Cell;
use std::ffi::{CString, c_int, c_void};
use std::sync::{Arc, Mutex, PoisonError};

/// A loaded module on one stream.
pub(super) struct GpuModule<V: Vendor> {
    pub loaded: Arc<Loaded<V>>,
    lane: Arc<Lane<V>>,
}

/// A module that is unloaded on drop, after its launches have finished.
pub(super) struct Loaded<V: Vendor> {
    pub gpu: Arc<Gpu<V>>,
    handle: ModuleHandle,
    /// The binary it was loaded from. HIP reads a code object in place for as long as it is loaded.
    /// CUDA copies it, but the CUBIN is small.
    image: Box<[u8]>,
    functions: Vec<Function>,
    /// The streams on which it may have been launched.
    lanes: Mutex<Vec<Arc<Lane<V>>>>,
}

/// A kernel. Its handle is valid while its module is loaded.
pub(super) struct Function {
    pub handle: FunctionHandle,
    symbol: Arc<str>,
    entry: Entry,
    /// The largest dynamic shared memory of a launch in bytes.
    most_dynamic: u32,
}

impl<V: Vendor> GpuModule<V> {
    pub fn load(
        lane: &Arc<Lane<V>>,
        artifact: &Artifact,
        entries: &[Entry],
    ) -> Result<GpuModule<V>, DeviceError> {
        let image = artifact.binary.clone().into_boxed_slice();
        let mut loaded = Loaded {
            gpu: lane.gpu.clone(),
            handle: load(lane, &image, artifact, entries)?,
            image,
            functions: Vec::with_capacity(entries.len()),
            lanes: Mutex::default(),
        };
        for entry in entries {
            let report = artifact.report.kernel(&entry.symbol);
            let function = loaded.find(entry, report)?;
            loaded.functions.push(function);
        }
        Ok(GpuModule::on(&Arc::new(loaded), lane))
    }

    /// Returns the same module on another stream.
    pub fn on(loaded: &Arc<Loaded<V>>, lane: &Arc<Lane<V>>) -> GpuModule<V> {
        loaded.used_on(lane);
        GpuModule {
            loaded: loaded.clone(),
            lane: lane.clone(),
        }
    }

    fn refuse(symbol: &str, reason: LaunchReason) -> DeviceError {
        DeviceError::Launch {
            kernel: symbol.to_string(),
            reason,
        }
    }

    fn shape(
        &self,
        function: &Function,
        dims: &LaunchDims,
        grid: [u32; 2],
    ) -> Result<LaunchShape, LaunchReason> {
        let allowed = function.most_dynamic;
        if dims.shared_bytes > allowed {
            return Err(LaunchReason::SharedMemory {
                asked: dims.shared_bytes,
                allowed,
            });
        }
        let shape = LaunchShape {
            grid,
            threads: dims.threads,
            shared_bytes: dims.shared_bytes,
            cluster: dims.cluster.max(1),
            dependent: function.entry.launch.dependent,
        };
        self.loaded.gpu.vendor.check_shape(&shape)?;
        Ok(shape)
    }
}

impl<V: Vendor> Module for GpuModule<V> {
    fn function(&self, symbol: &str) -> Result<FunctionId, DeviceError> {
        self.loaded.find_function(symbol)
    }

    unsafe fn run(
        &self,
        function: FunctionId,
        dims: LaunchDims,
        args: &[Arg],
    ) -> Result<(), DeviceError> {
        let function = &self.loaded.functions[function.0];
        let symbol = &*function.symbol;
        let refuse = |reason| GpuModule::<V>::refuse(symbol, reason);
        let gpu = &self.lane.gpu;
        let grid = gpu_grid(symbol, &dims)?;
        let mut block = ARGS.take();
        block.pack(&function.entry, args, |map, base, sizes| match grid {
            Some(_) => {
                let encoded = gpu.vendor.encode(map, base, sizes);
                encoded.map_err(|error| refuse(error.into()))
            }
            None => Ok([0; MAP_BYTES]),
        })?;
        let Some(grid) = grid else {
            return Ok(());
        };
        let shape = self.shape(function, &dims, grid).map_err(refuse)?;
        gpu.enter(format_args!("launch of kernel `{symbol}`"))?;
        // SAFETY: the arguments are of the entry's kinds, checked above, and the binary's signature
        // agreed when it was loaded. The caller vouches for the memory they point to.
        let code = unsafe { self.start(function.handle, &shape, block.pointers()) };
        ARGS.set(block);
        match gpu.check(code) {
            Ok(()) => self.launched(function, shape),
            Err(fault) if fault.breaks_the_context() => return Err(gpu.error("launch", &fault)),
            Err(fault) => return Err(refuse(LaunchReason::Driver { fault, shape })),
        }
        Ok(())
    }
}

thread_local! {
    /// The arguments of a launch, reused by the next launch on this thread.
    static ARGS: Cell<ArgBlock> = Cell::default();
}

impl<V: Vendor> GpuModule<V> {
    /// # Safety
    /// Starts the kernel. The driver copies `params` during the call.
    unsafe fn start(
        &self,
        function: FunctionHandle,
        shape: &LaunchShape,
        params: &mut [*mut c_void],
    ) -> c_int {
        let (vendor, stream) = (&self.lane.gpu.vendor, self.lane.stream);
        if shape.cluster > 1 || (shape.dependent && vendor.overlaps()) {
            // SAFETY: the module is loaded, the stream is live, and the caller promises the rest.
            return unsafe { vendor.launch_with(function, shape, params, stream) };
        }
        let ([x, y], threads, shared) = (shape.grid, shape.threads, shape.shared_bytes);
        let (params, none) = (params.as_mut_ptr(), functions::NULL.cast());
        let launch = vendor.functions().launch;
        // SAFETY: as above.
        unsafe {
            launch(
                function, x, y, 1, threads, 1, 1, shared, stream, params, none,
            )
        }
    }

    fn launched(&self, function: &Function, shape: LaunchShape) {
        let launched = Launched::Kernel {
            symbol: function.symbol.clone(),
            shape,
        };
        match self.lane.capturing() {
            Some(capture) => capture.launched(self.loaded.clone(), launched),
            None => self.lane.journal().note(&launched),
        }
    }
}

impl<V: Vendor> Loaded<V> {
    fn find_function(&self, symbol: &str) -> Result<FunctionId, DeviceError> {
        FunctionId::find(self.functions.iter().map(|f| &*f.symbol), symbol)
    }

    /// Returns the kernel with this symbol.
    pub fn function(&self, symbol: &str) -> Result<&Function, DeviceError> {
        Ok(&self.functions[self.find_function(symbol)?.0])
    }

    /// Records that unloading has to wait for this stream too.
    fn used_on(&self, lane: &Arc<Lane<V>>) {
        let mut lanes = self.lanes.lock().unwrap_or_else(PoisonError::into_inner);
        if !lanes.iter().any(|other| Arc::ptr_eq(other, lane)) {
            lanes.push(lane.clone());
        }
    }

    /// Looks a kernel up and requests the resources for its launches.
    fn find(&self, entry: &Entry, report: Option<&KernelReport>) -> Result<Function, DeviceError> {
        let refuse = |reason| DeviceError::Load {
            kernel: entry.symbol.clone(),
            reason,
        };
        if let Some(disagreement) = report.and_then(|report| report.disagreement(entry)) {
            let symbol = entry.symbol.clone();
            let signature = SignatureError::Disagrees {
                symbol,
                disagreement,
            };
            return Err(refuse(signature.into()));
        }
        let handle = self.look_up(&entry.symbol).map_err(refuse)?;
        let most_dynamic = self.prepare(handle, entry, report).map_err(refuse)?;
        Ok(Function {
            handle,
            symbol: entry.symbol.as_str().into(),
            entry: entry.clone(),
            most_dynamic,
        })
    }

    fn look_up(&self, symbol: &str) -> Result<FunctionHandle, LoadReason> {
        let name = CString::new(symbol).map_err(|_| LoadReason::NulInName)?;
        let mut function = FunctionHandle(functions::NULL);
        // SAFETY: the pointer is valid for a write, the module is loaded, and
        // the name ends in a NUL.
        let code = unsafe {
            (self.gpu.vendor.functions().module_function)(&mut function, self.handle, name.as_ptr())
        };
        self.gpu.check(code)?;
        Ok(function)
    }

    /// Requests the kernel's resources. Returns the largest dynamic shared memory of its launches.
    fn prepare(
        &self,
        function: FunctionHandle,
        entry: &Entry,
        report: Option<&KernelReport>,
    ) -> Result<u32, LoadReason> {
        let gpu = &self.gpu;
        // SAFETY: the module is loaded.
        let fixed = unsafe { gpu.vendor.static_shared(function, report)? };
        let (dynamic, most) = (entry.launch.shared_bytes, gpu.gpu_info.shared_bytes);
        if u64::from(dynamic) + u64::from(fixed) > u64::from(most) {
            return Err(LoadReason::SharedMemory {
                dynamic,
                fixed,
                device: gpu.info.name.clone(),
                most,
            });
        }
        // SAFETY: as above.
        unsafe { gpu.vendor.allow(function, &entry.launch, fixed)? };
        let free = V::FREE_SHARED.min(most).saturating_sub(fixed);
        Ok(dynamic.max(free))
    }
}

impl<V: Vendor> Drop for Loaded<V> {
    fn drop(&mut self) {
        let lanes = self.lanes.get_mut().unwrap_or_else(PoisonError::into_inner);
        let image = std::mem::take(&mut self.image);
        let orphan = Orphan::new(self.gpu.clone(), self.handle, image);
        // A launch of it may still be running. A stream under capture cannot be waited for now, so
        // the end of its capture waits and then drops the module.
        let mut captures = Vec::new();
        for lane in lanes.iter() {
            match lane.capturing() {
                Some(capture) => captures.push(capture),
                None if lane.synchronize("end of a module").is_ok() => {}
                None => return orphan.abandon(),
            }
        }
        let Some(first) = captures.first() else {
            return;
        };
        // With several captures, none knows when the others' streams have finished.
        if captures.iter().all(|other| Arc::ptr_eq(first, other)) {
            first.keep_orphan(orphan)
        } else {
            orphan.abandon()
        }
    }
}

fn load<V: Vendor>(
    lane: &Lane<V>,
    image: &[u8],
    artifact: &Artifact,
    entries: &[Entry],
) -> Result<ModuleHandle, DeviceError> {
    let kernel = entries.first().map_or("(no entry)", |entry| &entry.symbol);
    let refuse = |reason| DeviceError::Load {
        kernel: kernel.to_string(),
        reason,
    };
    lane.forbid(|| format!("the load of kernel `{kernel}`"))?;
    let gpu = &lane.gpu;
    gpu.enter(format_args!("load of kernel `{kernel}`"))?;
    // The driver finds the end of the image by itself, so the image must be complete.
    let checked = gpu.vendor.check_binary(image);
    checked.map_err(|error| refuse(error.into()))?;
    let mut module = ModuleHandle(functions::NULL);
    // SAFETY: the pointer is valid for a write; the image is a complete
    // binary, checked above, and stays until the module is unloaded.
    let code = unsafe { (gpu.vendor.functions().module_load)(&mut module, image.as_ptr().cast()) };
    match gpu.check(code) {
        Ok(()) => Ok(module),
        Err(fault) if fault.breaks_the_context() => Err(gpu.error("load", &fault)),
        Err(fault) => Err(refuse(LoadReason::Refused {
            fault,
            compiler: artifact.report.compiler.clone(),
            driver: gpu.gpu_info.driver.clone(),
        })),
    }
}
