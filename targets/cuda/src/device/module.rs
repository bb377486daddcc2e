//! Loaded CUBINs and their launch.

use super::Shared;
use super::words::{driver_version, words};
use cudarc::driver::{result, sys};
use moesaic_kernel::Entry;
use moesaic_target::{Arg, ArgBlock, Artifact, DeviceError, LaunchDims, Module, gpu_grid};
use std::collections::HashMap;
use std::ffi::CString;
use std::sync::{Arc, PoisonError};

/// A loaded module. Its functions are valid while it lives.
pub(super) struct CudaModule {
    pub functions: HashMap<String, Function>,
    pub module: Handle,
}

pub(super) struct Function {
    pub handle: sys::CUfunction,
    pub entry: Entry,
}

// SAFETY: a function handle may be used from every thread with the context.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

impl Module for CudaModule {
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
        let Some([x, y]) = gpu_grid(symbol, &dims)? else {
            return Ok(());
        };
        let shared = &self.module.shared;
        shared.bind("launch")?;
        symbol.clone_into(&mut shared.recent.lock().unwrap_or_else(PoisonError::into_inner));
        // SAFETY: the arguments are of the entry's kinds, checked above, and
        // the binary's signature agreed when it was loaded; the driver copies
        // them during the call. The caller vouches for what they point to.
        unsafe {
            result::launch_kernel(
                function.handle,
                (x, y, 1),
                (dims.threads, 1, 1),
                dims.shared_bytes,
                shared.stream.cu_stream(),
                block.pointers(),
            )
        }
        .map_err(|error| refuse(words(&error)))
    }
}

impl CudaModule {
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

/// A module that is unloaded on drop.
pub(super) struct Handle {
    module: sys::CUmodule,
    shared: Arc<Shared>,
}

// SAFETY: a module handle may be used from every thread with the context.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

impl Handle {
    pub fn load(
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
        // The driver finds the end of the image by itself: it must be one.
        crate::read_cubin(&artifact.binary).map_err(|error| refuse(error.to_string()))?;
        // SAFETY: the image is a complete ELF file, checked above, and is
        // copied by the call.
        let module = unsafe { result::module::load_data(artifact.binary.as_ptr().cast()) };
        let module = module.map_err(|error| {
            refuse(format!(
                "{}; it was compiled by {}{}",
                words(&error),
                artifact.report.compiler,
                driver_version()
            ))
        })?;
        Ok(Handle {
            module,
            shared: shared.clone(),
        })
    }

    pub fn function(&self, symbol: &str) -> Result<sys::CUfunction, String> {
        let name = CString::new(symbol).map_err(|_| "its name holds a NUL".to_string())?;
        // SAFETY: the module is loaded.
        unsafe { result::module::get_function(self.module, name) }.map_err(|error| words(&error))
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // A launch of it may still be running. Errors have nowhere to go: a
        // context that is broken has lost the module anyway.
        let _ = self.shared.stream.synchronize();
        // SAFETY: loaded once and unloaded once, with nothing running.
        let _ = unsafe { result::module::unload(self.module) };
    }
}
