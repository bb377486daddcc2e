//! Loaded code objects and their launch.

use super::Shared;
use crate::hip::{self, Shape};
use crate::read_code_object;
use moesaic_kernel::Entry;
use moesaic_target::{Arg, ArgBlock, Artifact, DeviceError, LaunchDims, Module, gpu_grid};
use std::collections::HashMap;
use std::ffi::CString;
use std::sync::{Arc, PoisonError};

/// A loaded code object. Its functions are valid while it lives.
pub(super) struct HipModule {
    functions: HashMap<String, Function>,
    handle: Handle,
}

struct Function {
    handle: hip::Function,
    entry: Entry,
}

/// A module that is unloaded on drop.
struct Handle {
    module: hip::Module,
    shared: Arc<Shared>,
}

impl HipModule {
    pub fn load(
        shared: &Arc<Shared>,
        artifact: &Artifact,
        entries: &[Entry],
    ) -> Result<HipModule, DeviceError> {
        let handle = Handle::load(shared, artifact, entries)?;
        let functions = entries
            .iter()
            .map(|entry| Ok((entry.symbol.clone(), function(&handle, artifact, entry)?)))
            .collect::<Result<_, DeviceError>>()?;
        Ok(HipModule { functions, handle })
    }

    fn unknown(&self) -> String {
        let mut names = self
            .functions
            .keys()
            .map(String::as_str)
            .collect::<Vec<_>>();
        names.sort_unstable();
        format!("it was not loaded; loaded are: {}", names.join(", "))
    }
}

impl Module for HipModule {
    unsafe fn launch(
        &self,
        symbol: &str,
        dims: LaunchDims,
        args: &[Arg],
    ) -> Result<(), DeviceError> {
        let refuse = |reason| DeviceError::Launch {
            kernel: symbol.to_string(),
            reason,
        };
        let function = self
            .functions
            .get(symbol)
            .ok_or_else(|| refuse(self.unknown()))?;
        let mut block = ArgBlock::new(&function.entry, args)?;
        let Some(grid) = gpu_grid(symbol, &dims)? else {
            return Ok(());
        };
        check_threads(grid, dims.threads).map_err(refuse)?;
        let shape = Shape {
            grid,
            threads: dims.threads,
            shared_bytes: dims.shared_bytes,
        };
        let shared = &self.handle.shared;
        shared.bind("launch")?;
        symbol.clone_into(&mut shared.recent.lock().unwrap_or_else(PoisonError::into_inner));
        // SAFETY: the arguments are of the entry's kinds, checked above, and
        // the binary's signature agreed when it was loaded; the runtime copies
        // them during the call. The caller vouches for what they point to.
        unsafe {
            shared
                .hip
                .launch(function.handle, &shape, block.pointers(), shared.stream)
        }
        .map_err(|error| refuse(error.words))
    }
}

/// HIP counts the threads of a dimension in 32 bits.
fn check_threads(grid: [u32; 2], threads: u32) -> Result<(), String> {
    match grid[0].checked_mul(threads) {
        Some(_) => Ok(()),
        None => Err(format!(
            "a grid of {} blocks of {threads} threads is too large: HIP has at most {} threads in x",
            grid[0],
            u32::MAX
        )),
    }
}

fn function(handle: &Handle, artifact: &Artifact, entry: &Entry) -> Result<Function, DeviceError> {
    let refuse = |reason| DeviceError::Load {
        kernel: entry.symbol.clone(),
        reason,
    };
    let report = artifact.report.kernel(&entry.symbol);
    if let Some(reason) = report.and_then(|report| report.disagreement(entry)) {
        return Err(refuse(reason));
    }
    let fixed = report.and_then(|report| report.shared_bytes).unwrap_or(0);
    check_shared(
        handle,
        u64::from(fixed) + u64::from(entry.launch.shared_bytes),
    )
    .map_err(refuse)?;
    let function = handle.function(&entry.symbol).map_err(refuse)?;
    Ok(Function {
        handle: function,
        entry: entry.clone(),
    })
}

fn check_shared(handle: &Handle, bytes: u64) -> Result<(), String> {
    let most = handle.shared.most_shared;
    if bytes <= most {
        return Ok(());
    }
    Err(format!(
        "it needs {bytes} bytes of shared memory per block, the device has {most}"
    ))
}

impl Handle {
    fn load(
        shared: &Arc<Shared>,
        artifact: &Artifact,
        entries: &[Entry],
    ) -> Result<Handle, DeviceError> {
        shared.bind("load")?;
        let kernel = entries.first().map_or("(no entry)", |entry| &entry.symbol);
        let refuse = |reason| DeviceError::Load {
            kernel: kernel.to_string(),
            reason,
        };
        // The runtime finds the end of the image by itself: it must be one.
        read_code_object(&artifact.binary).map_err(|error| refuse(error.to_string()))?;
        // SAFETY: a complete code object, checked above.
        let module = unsafe { shared.hip.load(&artifact.binary) }.map_err(|error| {
            let compiler = &artifact.report.compiler;
            refuse(format!(
                "{}; it was compiled by {compiler}{}",
                error.words,
                runtime(shared)
            ))
        })?;
        Ok(Handle {
            module,
            shared: shared.clone(),
        })
    }

    fn function(&self, symbol: &str) -> Result<hip::Function, String> {
        let name = CString::new(symbol).map_err(|_| "its name holds a NUL".to_string())?;
        // SAFETY: the module is loaded.
        unsafe { self.shared.hip.function(self.module, &name) }.map_err(|error| error.words)
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // A launch of it may still be running. Errors have nowhere to go.
        let _ = self.shared.bind("unload");
        // SAFETY: the stream lives as long as `shared`.
        let _ = unsafe { self.shared.hip.synchronize(self.shared.stream) };
        // SAFETY: loaded once and unloaded once, with nothing running.
        let _ = unsafe { self.shared.hip.unload(self.module) };
    }
}

/// For a refused module: `, and the runtime is HIP 6.2`.
fn runtime(shared: &Shared) -> String {
    shared
        .hip
        .version()
        .map_or(String::new(), |(major, minor)| {
            format!(", and the runtime is HIP {major}.{minor}")
        })
}
