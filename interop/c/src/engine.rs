//! Engines.

use crate::pointers::{Out, borrow, free, optional_text};
use crate::status::{Failure, Status, guard};
use moesaic::EngineOptions as Settings;
use moesaic::Store;
use std::ffi::{CString, c_char, c_int, c_void};
use std::path::Path;
use std::sync::Arc;

/// A device with its compiler and its cache of kernels. Layers keep what they need of it, so you
/// may free it before them.
pub struct Engine {
    pub(crate) engine: moesaic::Engine,
    target: CString,
}

/// The choices that open an engine. All zero is the default.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct EngineOptions {
    /// "auto", "cpu", "cuda", "rocm", or a name with an architecture, such as "cpu:avx2" or
    /// "cuda:sm_90a". NULL is "auto". Targets of GPUs need a library that was built for them.
    pub target: *const c_char,
    /// The directory that keeps compiled kernels, which is made where it is missing. NULL is your
    /// cache directory, "" keeps none.
    pub cache: *const c_char,
    /// The number of CPU threads, the caller included. 0 is one per core, shared by all such
    /// engines of the process, which end with the process.
    pub threads: usize,
    /// The number of the GPU, as its driver counts; 0 for a CPU. "auto" may find a CPU, which has
    /// no number.
    pub device: usize,
    /// Not 0: never compile, so a kernel that the cache lacks is an error.
    pub strict: c_int,
    /// A stream of yours on the GPU, a CUstream or hipStream_t, for the targets "cuda" and "rocm":
    /// calls run in its order. It must live as long as the engine and its layers, and nobody may
    /// capture it during a call. CU_STREAM_LEGACY is CUDA's default stream. NULL: the engine makes a
    /// stream of its own.
    pub stream: *mut c_void,
}

impl Default for EngineOptions {
    fn default() -> EngineOptions {
        EngineOptions {
            target: std::ptr::null(),
            cache: std::ptr::null(),
            threads: 0,
            device: 0,
            strict: 0,
            stream: std::ptr::null_mut(),
        }
    }
}

/// Opens an engine. `options` may be NULL. Free it by moesaic_engine_free.
///
/// # Safety
/// `options` is NULL or valid, and its stream as it says; `out` is valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moesaic_engine_open(
    options: *const EngineOptions,
    out: *mut *mut Engine,
) -> Status {
    guard(|| {
        // SAFETY: the caller vouches for its pointers.
        let (out, options) = unsafe { (Out::handle(out)?, options.as_ref().copied()) };
        // SAFETY: as above.
        out.give(unsafe { open(options.unwrap_or_default()) }?);
        Ok(())
    })
}

/// # Safety
/// The texts are NULL or end in NUL, the stream is as [`EngineOptions`] says.
unsafe fn open(options: EngineOptions) -> Result<Engine, Failure> {
    // SAFETY: the caller vouches for the texts.
    let (target, cache) = unsafe {
        let target = optional_text(options.target, "target")?;
        (target, optional_text(options.cache, "cache")?)
    };
    let store = match cache {
        None => Some(Arc::new(Store::open_default())),
        Some("") => None,
        Some(folder) => Some(Arc::new(named_store(folder, options.strict != 0)?)),
    };
    let settings = Settings {
        store,
        strict: options.strict != 0,
        threads: (options.threads > 0).then_some(options.threads),
        ordinal: options.device,
        ..Settings::default()
    };
    let target = target.unwrap_or("auto");
    check_device(target, options.device)?;
    let engine = match options.stream.is_null() {
        true => moesaic::Engine::open(target, settings),
        false => {
            check_streams(target)?;
            // SAFETY: the caller vouches for the stream.
            unsafe { moesaic::Engine::on_stream(target, options.stream, settings) }
        }
    };
    let engine = engine.map_err(moesaic::Error::from)?;
    let target = CString::new(engine.target().to_string()).unwrap_or_default();
    Ok(Engine { engine, target })
}

/// Opens the store in a directory that the caller named, which therefore has to be of use: a store
/// is otherwise passed over, and every process compiles.
fn named_store(folder: &str, strict: bool) -> Result<Store, Failure> {
    if strict && !Path::new(folder).is_dir() {
        let problem = format!(
            "is `{folder}`, where no directory is, and a strict engine compiles nothing: fill it \
             by `moesaic precompile --cache {folder}`"
        );
        return Err(Failure::argument("cache", problem));
    }
    let store = Store::open(folder);
    store.check_use().map_err(moesaic::Error::from)?;
    Ok(store)
}

/// Refuses the number of a GPU for a target that has none.
fn check_device(target: &str, device: usize) -> Result<(), Failure> {
    match target.split(':').next() {
        Some("cpu" | "sim") if device != 0 => {
            let problem = format!(
                "is {device}, the number of a GPU, and the target `{target}`: take 0, or name \
                 \"cuda\" or \"rocm\""
            );
            Err(Failure::argument("device", problem))
        }
        _ => Ok(()),
    }
}

/// Refuses a stream for a target that has none.
fn check_streams(target: &str) -> Result<(), Failure> {
    match target.split(':').next() {
        Some("cuda" | "rocm") => Ok(()),
        _ => {
            let problem =
                format!("is a GPU's, and the target `{target}`: name \"cuda\" or \"rocm\"");
            Err(Failure::argument("stream", problem))
        }
    }
}

/// Returns the target of an engine's kernels, such as "cpu:avx512". Valid as long as the engine;
/// NULL for NULL.
///
/// # Safety
/// `engine` is NULL or a live engine.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moesaic_engine_target(engine: *const Engine) -> *const c_char {
    // SAFETY: the caller vouches for it.
    match unsafe { engine.as_ref() } {
        Some(engine) => engine.target.as_ptr(),
        None => std::ptr::null(),
    }
}

/// Waits until the device has done all that was launched. On a CPU every call is over when it
/// returns.
///
/// # Safety
/// `engine` is NULL or a live engine.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moesaic_engine_synchronize(engine: *const Engine) -> Status {
    guard(|| {
        // SAFETY: the caller vouches for it.
        let engine = unsafe { borrow(engine, "engine") }?;
        let done = engine.engine.device().synchronize();
        Ok(done.map_err(moesaic::Error::from)?)
    })
}

/// Frees an engine; NULL is allowed.
///
/// # Safety
/// `engine` is NULL or a live engine that no other thread uses.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moesaic_engine_free(engine: *mut Engine) {
    // SAFETY: the caller vouches for it.
    unsafe { free(engine) }
}
