//! The HIP runtime functions in use, and a safe cover over them.

use moesaic_dl::{DlError, Library, dl_table};
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::path::Path;
use std::ptr;

/// The runtime's names, newest first, in the order the loader is asked.
const NAMES: [&str; 3] = ["libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so"];

/// Bytes set aside for the property structure; the runtime's has 1472, and
/// later ones may grow at the end.
const PROPERTY_BYTES: usize = 4096;

/// Where properties lie in the structure of `hipGetDevicePropertiesR0600`,
/// which is fixed: another layout gets another function.
const NAME: usize = 0;
const TOTAL_MEMORY: usize = 288;
const SHARED_PER_BLOCK: usize = 296;
const UNITS: usize = 388;
const ARCH_NAME: usize = 1160;

/// A stream that does not wait for the default one.
const NON_BLOCKING: c_uint = 1;

/// Directions of a copy.
const HOST_TO_DEVICE: c_int = 1;
const DEVICE_TO_HOST: c_int = 2;

dl_table! {
    /// The HIP runtime, as its header declares it.
    struct Functions {
        init: fn(flags: c_uint) -> c_int = "hipInit";
        runtime_version: fn(version: *mut c_int) -> c_int = "hipRuntimeGetVersion";
        error_name: fn(code: c_int) -> *const c_char = "hipGetErrorName";
        error_string: fn(code: c_int) -> *const c_char = "hipGetErrorString";
        device_count: fn(count: *mut c_int) -> c_int = "hipGetDeviceCount";
        set_device: fn(device: c_int) -> c_int = "hipSetDevice";
        properties: fn(properties: *mut c_void, device: c_int) -> c_int
            = "hipGetDevicePropertiesR0600";
        memory_info: fn(free: *mut usize, total: *mut usize) -> c_int = "hipMemGetInfo";
        stream_create: fn(stream: *mut Stream, flags: c_uint) -> c_int = "hipStreamCreateWithFlags";
        stream_destroy: fn(stream: Stream) -> c_int = "hipStreamDestroy";
        stream_synchronize: fn(stream: Stream) -> c_int = "hipStreamSynchronize";
        alloc_async: fn(address: *mut u64, bytes: usize, stream: Stream) -> c_int = "hipMallocAsync";
        free_async: fn(address: u64, stream: Stream) -> c_int = "hipFreeAsync";
        copy_async: fn(
            to: *mut c_void, from: *const c_void, bytes: usize, kind: c_int, stream: Stream,
        ) -> c_int = "hipMemcpyAsync";
        module_load: fn(module: *mut Module, image: *const c_void) -> c_int = "hipModuleLoadData";
        module_unload: fn(module: Module) -> c_int = "hipModuleUnload";
        module_function: fn(function: *mut Function, module: Module, name: *const c_char) -> c_int
            = "hipModuleGetFunction";
        launch: fn(
            function: Function,
            grid_x: c_uint, grid_y: c_uint, grid_z: c_uint,
            block_x: c_uint, block_y: c_uint, block_z: c_uint,
            shared_bytes: c_uint,
            stream: Stream,
            params: *mut *mut c_void,
            extra: *mut *mut c_void,
        ) -> c_int = "hipModuleLaunchKernel";
    }
}

/// Handles of the runtime, valid on every thread.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub struct Stream(*mut c_void);
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub struct Module(*mut c_void);
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub struct Function(*mut c_void);

// SAFETY: HIP's handles may be used from every thread; these types hold
// nothing else, and only the runtime follows the pointer.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}
// SAFETY: as above.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}
// SAFETY: as above.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

/// A loaded HIP runtime. Its functions may be called from any thread.
pub struct Hip {
    functions: Functions,
}

/// What the runtime says of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Properties {
    pub name: String,
    /// With features: `gfx90a:sramecc+:xnack-`.
    pub arch: String,
    pub memory_bytes: u64,
    pub shared_bytes: u64,
    pub units: u32,
}

/// A code of the runtime, in its own words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HipError {
    pub code: i32,
    pub words: String,
}

/// The shape of a launch.
pub struct Shape {
    pub grid: [u32; 2],
    pub threads: u32,
    pub shared_bytes: u32,
}

impl Hip {
    /// Opens the runtime: the library at `path` alone, if one is given, else
    /// by the loader, then in the usual folders.
    pub fn open(path: Option<&Path>) -> Result<Hip, DlError> {
        let library = match path {
            Some(path) => Library::open_path("the HIP runtime", path),
            None => Library::open("the HIP runtime", &candidates()),
        }?;
        // SAFETY: the signatures are those of hip_runtime_api.h, from ROCm
        // 6.0 on; older runtimes lack hipGetDevicePropertiesR0600.
        let functions = unsafe { Functions::load(library)? };
        Ok(Hip { functions })
    }

    pub fn count(&self) -> Result<usize, HipError> {
        let mut count = 0;
        // SAFETY: no pointers.
        self.check(unsafe { self.functions.init(0) })?;
        // SAFETY: the pointer is valid for a write.
        self.check(unsafe { self.functions.device_count(&mut count) })?;
        Ok(usize::try_from(count).unwrap_or(0))
    }

    /// Major and minor version; the runtime packs them as one number.
    pub fn version(&self) -> Option<(u32, u32)> {
        let mut version = 0;
        // SAFETY: the pointer is valid for a write.
        let code = unsafe { self.functions.runtime_version(&mut version) };
        let version = version.unsigned_abs();
        (code == 0).then_some((version / 10_000_000, version / 100_000 % 100))
    }

    /// Makes `device` the one of this thread.
    pub fn bind(&self, device: i32) -> Result<(), HipError> {
        // SAFETY: no pointers; an unknown device is an error code.
        self.check(unsafe { self.functions.set_device(device) })
    }

    pub fn properties(&self, device: i32) -> Result<Properties, HipError> {
        // Words, so that the structure is aligned.
        let mut words = vec![0u64; PROPERTY_BYTES / 8];
        // SAFETY: the space is aligned and larger than the structure.
        let code = unsafe { self.functions.properties(words.as_mut_ptr().cast(), device) };
        self.check(code)?;
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        Ok(read_properties(&bytes))
    }

    /// Free and total bytes of this thread's device.
    pub fn memory(&self) -> Result<(usize, usize), HipError> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: both pointers are valid for a write.
        self.check(unsafe { self.functions.memory_info(&mut free, &mut total) })?;
        Ok((free, total))
    }

    /// A new stream of this thread's device.
    pub fn stream(&self) -> Result<Stream, HipError> {
        let mut stream = Stream(ptr::null_mut());
        // SAFETY: the pointer is valid for a write.
        self.check(unsafe { self.functions.stream_create(&mut stream, NON_BLOCKING) })?;
        Ok(stream)
    }

    /// # Safety
    /// The stream is live, and used no more.
    pub unsafe fn destroy_stream(&self, stream: Stream) -> Result<(), HipError> {
        // SAFETY: the caller's promise.
        self.check(unsafe { self.functions.stream_destroy(stream) })
    }

    /// # Safety
    /// The stream is live.
    pub unsafe fn synchronize(&self, stream: Stream) -> Result<(), HipError> {
        // SAFETY: the caller's promise.
        self.check(unsafe { self.functions.stream_synchronize(stream) })
    }

    /// # Safety
    /// The stream is live.
    pub unsafe fn alloc(&self, bytes: usize, stream: Stream) -> Result<u64, HipError> {
        let mut address = 0;
        // SAFETY: the pointer is valid for a write; the stream by promise.
        self.check(unsafe { self.functions.alloc_async(&mut address, bytes, stream) })?;
        Ok(address)
    }

    /// # Safety
    /// The stream is live; the address came from `alloc` and is used no more
    /// by what is launched later.
    pub unsafe fn free(&self, address: u64, stream: Stream) -> Result<(), HipError> {
        // SAFETY: the caller's promise.
        self.check(unsafe { self.functions.free_async(address, stream) })
    }

    /// # Safety
    /// The stream is live, the range is allocated, and `bytes` live until the
    /// stream has been waited for.
    pub unsafe fn upload(&self, to: u64, bytes: &[u8], stream: Stream) -> Result<(), HipError> {
        let to = to as *mut c_void;
        let from = bytes.as_ptr().cast();
        // SAFETY: the caller's promise.
        self.check(unsafe {
            self.functions
                .copy_async(to, from, bytes.len(), HOST_TO_DEVICE, stream)
        })
    }

    /// # Safety
    /// As for `upload`.
    pub unsafe fn download(
        &self,
        bytes: &mut [u8],
        from: u64,
        stream: Stream,
    ) -> Result<(), HipError> {
        let to = bytes.as_mut_ptr().cast();
        let from = from as *const c_void;
        // SAFETY: the caller's promise.
        self.check(unsafe {
            self.functions
                .copy_async(to, from, bytes.len(), DEVICE_TO_HOST, stream)
        })
    }

    /// # Safety
    /// `image` is a complete code object.
    pub unsafe fn load(&self, image: &[u8]) -> Result<Module, HipError> {
        let mut module = Module(ptr::null_mut());
        // SAFETY: the pointer is valid for a write; the image by promise.
        self.check(unsafe {
            self.functions
                .module_load(&mut module, image.as_ptr().cast())
        })?;
        Ok(module)
    }

    /// # Safety
    /// The module is loaded, and used no more.
    pub unsafe fn unload(&self, module: Module) -> Result<(), HipError> {
        // SAFETY: the caller's promise.
        self.check(unsafe { self.functions.module_unload(module) })
    }

    /// # Safety
    /// The module is loaded.
    pub unsafe fn function(&self, module: Module, name: &CString) -> Result<Function, HipError> {
        let mut function = Function(ptr::null_mut());
        // SAFETY: the pointer is valid for a write; the module by promise.
        let code = unsafe {
            self.functions
                .module_function(&mut function, module, name.as_ptr())
        };
        self.check(code)?;
        Ok(function)
    }

    /// # Safety
    /// The function's module is loaded, the stream is live, and `params` hold
    /// a pointer to each of the kernel's parameters.
    pub unsafe fn launch(
        &self,
        function: Function,
        shape: &Shape,
        params: &mut [*mut c_void],
        stream: Stream,
    ) -> Result<(), HipError> {
        let ([x, y], threads) = (shape.grid, shape.threads);
        let (params, none) = (params.as_mut_ptr(), ptr::null_mut());
        // SAFETY: the caller's promise.
        self.check(unsafe {
            self.functions.launch(
                function,
                x,
                y,
                1,
                threads,
                1,
                1,
                shape.shared_bytes,
                stream,
                params,
                none,
            )
        })
    }

    fn check(&self, code: c_int) -> Result<(), HipError> {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: the runtime answers any code with a static string.
        let (name, text) = unsafe {
            (
                self.functions.error_name(code),
                self.functions.error_string(code),
            )
        };
        // SAFETY: as above.
        let (name, text) = unsafe { (static_text(name), static_text(text)) };
        Err(HipError {
            code,
            words: format!("{name}: {text}"),
        })
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

/// Names for the loader, then files of an installation it does not know.
fn candidates() -> Vec<String> {
    let root = std::env::var("ROCM_PATH")
        .ok()
        .filter(|root| !root.is_empty());
    let folders = root.into_iter().chain(["/opt/rocm".to_string()]);
    let files = folders.map(|root| format!("{root}/lib/libamdhip64.so"));
    NAMES.map(str::to_string).into_iter().chain(files).collect()
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
        units: half(UNITS),
    }
}
