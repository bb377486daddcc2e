//! A device on which nothing happens: what is uploaded stays as it is.

use moesaic_kernel::{Entry, Target};
use moesaic_target::{
    Arg, Artifact, Buffer, Device, DeviceError, DeviceInfo, DriverReason, FunctionId, LaunchDims,
    Module, Ptr, SignatureError,
};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A device that accepts kernels and runs none of them. On it the probe
/// compiles everything, and must find every result wrong.
pub struct Idle {
    info: DeviceInfo,
    memory: Mutex<HashMap<u64, Vec<u8>>>,
}

impl Idle {
    /// Makes one that kernels are written for as for `target`.
    pub fn new(target: Target) -> Idle {
        Idle {
            info: DeviceInfo {
                name: "idle".to_string(),
                target,
                units: 1,
                memory_bytes: None,
            },
            memory: Mutex::default(),
        }
    }

    fn memory(&self) -> MutexGuard<'_, HashMap<u64, Vec<u8>>> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct IdleModule;

impl Module for IdleModule {
    fn function(&self, _: &str) -> Result<FunctionId, DeviceError> {
        Ok(FunctionId(0))
    }

    unsafe fn run(&self, _: FunctionId, _: LaunchDims, _: &[Arg]) -> Result<(), DeviceError> {
        Ok(())
    }
}

/// Returns the error of a range that does not fit the buffer.
fn range(buffer: &Buffer, offset: usize, bytes: usize) -> DeviceError {
    DeviceError::Driver {
        operation: format!("a copy of {bytes} bytes at {offset}"),
        reason: DriverReason::OutOfRange {
            bytes: buffer.bytes(),
        },
    }
}

impl Device for Idle {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn load(&self, artifact: &Artifact, entries: &[Entry]) -> Result<Arc<dyn Module>, DeviceError> {
        let missing = entries
            .iter()
            .find(|entry| artifact.report.kernel(&entry.symbol).is_none());
        match missing {
            None => Ok(Arc::new(IdleModule)),
            Some(entry) => Err(DeviceError::Driver {
                operation: format!("loading kernel `{}`", entry.symbol),
                reason: SignatureError::Missing {
                    symbol: entry.symbol.clone(),
                }
                .into(),
            }),
        }
    }

    fn alloc(&self, bytes: usize) -> Result<Buffer, DeviceError> {
        let mut memory = self.memory();
        let at = (memory.len() as u64 + 1) << 32;
        memory.insert(at, vec![0; bytes]);
        Ok(Buffer::new(Ptr(at), bytes, Box::new(())))
    }

    fn upload(&self, bytes: &[u8], buffer: &Buffer, offset: usize) -> Result<(), DeviceError> {
        let mut memory = self.memory();
        let all = memory.get_mut(&buffer.ptr().0);
        let place = all.and_then(|all| all.get_mut(offset..offset + bytes.len()));
        let place = place.ok_or_else(|| range(buffer, offset, bytes.len()))?;
        place.copy_from_slice(bytes);
        Ok(())
    }

    fn download(
        &self,
        buffer: &Buffer,
        offset: usize,
        bytes: &mut [u8],
    ) -> Result<(), DeviceError> {
        let memory = self.memory();
        let all = memory.get(&buffer.ptr().0);
        let place = all.and_then(|all| all.get(offset..offset + bytes.len()));
        let place = place.ok_or_else(|| range(buffer, offset, bytes.len()))?;
        bytes.copy_from_slice(place);
        Ok(())
    }

    fn synchronize(&self) -> Result<(), DeviceError> {
        Ok(())
    }
}
