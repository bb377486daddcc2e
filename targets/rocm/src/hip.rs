//! The functions of the HIP runtime, and its facts about a GPU.

use moesaic_dl::{DlError, Library, dl_table};
use moesaic_target::gpu::{AddressedRows, Fault, FunctionNames, Functions, StreamHandle};
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::path::Path;
use std::sync::Arc;

/// The runtime's names, newest first, in the order in which the loader is
/// asked.
const LIBRARIES: [&str; 3] = ["libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so"];

/// Bytes set aside for the property structure. The runtime's has 1472, and
/// later ones may grow at the end.
const PROPERTY_BYTES: usize = 4096;

/// Offsets of properties in the structure of `hipGetDevicePropertiesR0600`,
/// which is fixed: another layout gets another function.
const NAME: usize = 0;
const TOTAL_MEMORY: usize = 288;
const SHARED_PER_BLOCK: usize = 296;
const WAVE: usize = 308;
const CLOCK_KHZ: usize = 348;
const UNITS: usize = 388;
const L2_BYTES: usize = 616;
const THREADS_PER_UNIT: usize = 624;
const SHARED_PER_UNIT: usize = 640;
const ARCH_NAME: usize = 1160;

/// HIP's names of the functions that GPU drivers share. ROCm 6.0 and later have
/// them all.
const NAMES: FunctionNames = FunctionNames {
    memory_info: "hipMemGetInfo",
    default_pool: "hipDeviceGetDefaultMemPool",
    pool_set: "hipMemPoolSetAttribute",
    pool_access: "hipMemPoolSetAccess",
    can_access_peer: "hipDeviceCanAccessPeer",
    stream_create: "hipStreamCreateWithFlags",
    stream_destroy: "hipStreamDestroy",
    stream_synchronize: "hipStreamSynchronize",
    stream_wait: "hipStreamWaitEvent",
    alloc_async: "hipMallocAsync",
    free_async: "hipFreeAsync",
    alloc: "hipMalloc",
    free: "hipFree",
    host_alloc: "hipHostMalloc",
    host_free: "hipHostFree",
    upload: "hipMemcpyHtoDAsync",
    download: "hipMemcpyDtoHAsync",
    copy: "hipMemcpyDtoDAsync",
    module_load: "hipModuleLoadData",
    module_unload: "hipModuleUnload",
    module_function: "hipModuleGetFunction",
    launch: "hipModuleLaunchKernel",
    occupancy: "hipModuleOccupancyMaxActiveBlocksPerMultiprocessor",
    event_create: "hipEventCreateWithFlags",
    event_record: "hipEventRecord",
    event_query: "hipEventQuery",
    event_synchronize: "hipEventSynchronize",
    event_elapsed: "hipEventElapsedTime",
    event_destroy: "hipEventDestroy",
    capture_begin: "hipStreamBeginCapture",
    capture_end: "hipStreamEndCapture",
    graph_instantiate: "hipGraphInstantiateWithFlags",
    graph_launch: "hipGraphLaunch",
    graph_destroy: "hipGraphDestroy",
    exec_destroy: "hipGraphExecDestroy",
};

dl_table! {
    /// The functions that only HIP has.
    struct Own {
        init: fn(flags: c_uint) -> c_int = "hipInit";
        runtime_version: fn(version: *mut c_int) -> c_int = "hipRuntimeGetVersion";
        error_name: fn(code: c_int) -> *const c_char = "hipGetErrorName";
        error_string: fn(code: c_int) -> *const c_char = "hipGetErrorString";
        device_count: fn(count: *mut c_int) -> c_int = "hipGetDeviceCount";
        set_device: fn(device: c_int) -> c_int = "hipSetDevice";
        properties: fn(properties: *mut c_void, device: c_int) -> c_int
            = "hipGetDevicePropertiesR0600";
        copy_rows: fn(
            to: *mut c_void,
            to_stride: usize,
            from: *const c_void,
            from_stride: usize,
            row_bytes: usize,
            rows: usize,
            kind: c_int,
            stream: StreamHandle,
        ) -> c_int = "hipMemcpy2DAsync";
    }
    optional {
        bus: fn(text: *mut c_char, bytes: c_int, device: c_int) -> c_int
            = "hipDeviceGetPCIBusId";
    }
}

/// The direction from GPU memory to GPU memory, in copies of rows.
const DEVICE_TO_DEVICE: c_int = 3;

/// A loaded HIP runtime. Its functions may be called from any thread.
#[derive(Clone)]
pub struct Hip {
    pub functions: Functions,
    own: Arc<Own>,
}

/// The runtime's facts about a device; zero where it does not know.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Properties {
    pub name: String,
    /// The architecture with features: `gfx90a:sramecc+:xnack-`.
    pub arch: String,
    pub memory_bytes: u64,
    pub shared_bytes: u64,
    pub shared_bytes_per_unit: u64,
    pub threads_per_unit: u32,
    pub wave: u32,
    pub units: u32,
    pub l2_bytes: u32,
    pub clock_khz: u32,
}

impl Hip {
    /// Copies rows in stream order.
    ///
    /// # Safety
    /// The rows lie in memory of the current GPU, and the stream is live.
    pub unsafe fn copy_rows(&self, rows: &AddressedRows, stream: StreamHandle) -> c_int {
        let [from, to] = [rows.from, rows.to].map(|start| start.0 as usize as *mut c_void);
        let (strides, (bytes, count)) =
            ([rows.from_stride, rows.to_stride], (rows.bytes, rows.count));
        let kind = DEVICE_TO_DEVICE;
        // SAFETY: the caller's promise.
        unsafe {
            self.own
                .copy_rows(to, strides[1], from, strides[0], bytes, count, kind, stream)
        }
    }

    /// Opens the runtime: the library at `path` alone, if one is given; else by
    /// the loader, then in the usual folders.
    pub fn open(path: Option<&Path>) -> Result<Hip, DlError> {
        let library = match path {
            Some(path) => Library::open_path("the HIP runtime", path),
            None => Library::open("the HIP runtime", &candidates()),
        }?;
        // SAFETY: the signatures are those of hip_runtime_api.h, from ROCm
        // 6.0 on; older runtimes lack hipGetDevicePropertiesR0600. The
        // library is kept loaded.
        unsafe {
            let functions = Functions::load(&NAMES, |name| library.symbol(name))?;
            let own = Arc::new(Own::load(library)?);
            Ok(Hip { functions, own })
        }
    }

    pub fn count(&self) -> Result<usize, Fault> {
        let mut count = 0;
        // SAFETY: no pointers.
        self.check(unsafe { self.own.init(0) })?;
        // SAFETY: the pointer is valid for a write.
        self.check(unsafe { self.own.device_count(&mut count) })?;
        Ok(usize::try_from(count).unwrap_or(0))
    }

    /// Returns a sentence for errors: `the runtime is HIP 6.2`. The runtime
    /// packs major, minor and patch as one number.
    pub fn version(&self) -> Option<String> {
        let mut version = 0;
        // SAFETY: the pointer is valid for a write.
        let code = unsafe { self.own.runtime_version(&mut version) };
        let (major, minor) = (version / 10_000_000, version / 100_000 % 100);
        (code == 0).then(|| format!("the runtime is HIP {major}.{minor}"))
    }

    /// Returns a GPU's place on the bus: `0000:17:00`.
    pub fn bus(&self, device: i32) -> Option<String> {
        let mut text = [0 as c_char; 32];
        let bytes = text.len() as c_int - 1;
        // SAFETY: so many bytes are there; an unknown device is an error code.
        let code = unsafe { self.own.bus?(text.as_mut_ptr(), bytes, device) };
        // SAFETY: the last byte is still zero.
        let words = unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy();
        // The last part is a function of the device, always 0.
        let place = words.split('.').next().unwrap_or_default();
        (code == 0 && !place.is_empty()).then(|| place.to_lowercase())
    }

    /// Makes `device` the current one of this thread.
    pub fn bind(&self, device: i32) -> Result<(), Fault> {
        // SAFETY: no pointers; an unknown device is an error code.
        self.check(unsafe { self.own.set_device(device) })
    }

    pub fn properties(&self, device: i32) -> Result<Properties, Fault> {
        // Words, so that the structure is aligned.
        let mut words = vec![0u64; PROPERTY_BYTES / 8];
        // SAFETY: the space is aligned and larger than the structure.
        let code = unsafe { self.own.properties(words.as_mut_ptr().cast(), device) };
        self.check(code)?;
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        Ok(read_properties(&bytes))
    }

    /// Returns the runtime's name and text for a code.
    pub fn words(&self, code: c_int) -> String {
        // SAFETY: the runtime answers any code with static strings.
        let (name, text) = unsafe {
            (
                static_text(self.own.error_name(code)),
                static_text(self.own.error_string(code)),
            )
        };
        format!("{name}: {text}")
    }

    fn check(&self, code: c_int) -> Result<(), Fault> {
        match code {
            0 => Ok(()),
            code => Err(Fault {
                code,
                words: self.words(code),
            }),
        }
    }
}

/// # Safety
/// Null, or a NUL-terminated string that is never freed.
unsafe fn static_text(text: *const c_char) -> String {
    if text.is_null() {
        return "?".to_string();
    }
    // SAFETY: the caller's promise.
    unsafe { CStr::from_ptr(text) }
        .to_string_lossy()
        .into_owned()
}

/// Returns names for the loader, then files of an installation that it does not
/// know.
fn candidates() -> Vec<String> {
    let root = std::env::var("ROCM_PATH")
        .ok()
        .filter(|root| !root.is_empty());
    let folders = root.into_iter().chain(["/opt/rocm".to_string()]);
    let files = folders.map(|root| format!("{root}/lib/libamdhip64.so"));
    LIBRARIES
        .map(str::to_string)
        .into_iter()
        .chain(files)
        .collect()
}

fn read_properties(bytes: &[u8]) -> Properties {
    let text = |at: usize| {
        let field = &bytes[at..at + 256];
        let end = field
            .iter()
            .position(|byte| *byte == 0)
            .unwrap_or(field.len());
        String::from_utf8_lossy(&field[..end]).into_owned()
    };
    let word = |at: usize| bytes[at..at + 8].try_into().map_or(0, u64::from_ne_bytes);
    let half = |at: usize| bytes[at..at + 4].try_into().map_or(0, u32::from_ne_bytes);
    Properties {
        name: text(NAME),
        arch: text(ARCH_NAME),
        memory_bytes: word(TOTAL_MEMORY),
        shared_bytes: word(SHARED_PER_BLOCK),
        shared_bytes_per_unit: word(SHARED_PER_UNIT),
        threads_per_unit: half(THREADS_PER_UNIT),
        wave: half(WAVE),
        units: half(UNITS),
        l2_bytes: half(L2_BYTES),
        clock_khz: half(CLOCK_KHZ),
    }
}
