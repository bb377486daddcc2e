//! One GPU: what its streams, modules, buffers and events share.

use super::journal::{Journal, Launched};
use super::{Fault, Functions, Vendor};
use crate::{DeviceError, DeviceInfo, GpuInfo};
use std::ffi::c_int;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

pub(super) struct Gpu<V> {
    pub vendor: V,
    pub info: DeviceInfo,
    pub gpu_info: GpuInfo,
    journal: Mutex<Journal>,
    /// What broke the driver's context, once something has.
    lost: OnceLock<String>,
    lanes: AtomicU64,
}

impl<V: Vendor> Gpu<V> {
    pub fn new(vendor: V, info: DeviceInfo, gpu_info: GpuInfo) -> Gpu<V> {
        Gpu {
            vendor,
            info,
            gpu_info,
            journal: Mutex::default(),
            lost: OnceLock::new(),
            lanes: AtomicU64::new(0),
        }
    }

    /// A number for a new stream.
    pub fn next_lane(&self) -> u64 {
        self.lanes.fetch_add(1, Ordering::Relaxed)
    }

    pub fn journal(&self) -> MutexGuard<'_, Journal> {
        self.journal.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Before any call to the driver: refuses when the context is lost, and
    /// makes the GPU the one of this thread.
    pub fn enter(&self, operation: &str) -> Result<(), DeviceError> {
        if let Some(cause) = self.lost.get() {
            return Err(DeviceError::Lost {
                operation: operation.to_string(),
                cause: cause.clone(),
            });
        }
        let bound = self.vendor.bind();
        bound.map_err(|fault| self.error(operation, &fault))
    }

    /// Calls the driver.
    pub fn call(
        &self,
        operation: &str,
        call: impl FnOnce(&Functions) -> c_int,
    ) -> Result<(), DeviceError> {
        self.enter(operation)?;
        self.check(call(self.vendor.functions()))
            .map_err(|fault| self.error(operation, &fault))
    }

    /// Calls the driver where a failure has nowhere to go: on drop. A context
    /// that is lost has lost what was to be freed, too.
    pub fn call_quietly(&self, call: impl FnOnce(&Functions) -> c_int) {
        if self.lost.get().is_none() && self.vendor.bind().is_ok() {
            call(self.vendor.functions());
        }
    }

    pub fn check(&self, code: c_int) -> Result<(), Fault> {
        match code {
            0 => Ok(()),
            code => Err(Fault {
                code,
                words: self.vendor.words(code),
            }),
        }
    }

    /// The error of a call, which may report what an earlier launch did.
    pub fn error(&self, operation: &str, fault: &Fault) -> DeviceError {
        match fault.breaks_the_context() {
            true => self.lose(operation, fault),
            false => DeviceError::Driver {
                operation: operation.to_string(),
                reason: fault.words.clone(),
            },
        }
    }

    fn lose(&self, operation: &str, fault: &Fault) -> DeviceError {
        let journal = self.journal();
        let light = format!("it came to light at a later {operation}");
        let error = match journal.suspects().as_slice() {
            [Launched::Kernel { symbol, shape }] => DeviceError::Launch {
                kernel: symbol.to_string(),
                reason: format!("{}; {light}; {shape}", fault.words),
            },
            _ => DeviceError::Faulted {
                reason: format!("{}; {light}", fault.words),
                suspects: journal.words(V::BLOCKING),
            },
        };
        self.lost.get_or_init(|| error.to_string());
        error
    }
}

impl Fault {
    /// Errors of a kernel's own doing, after which the driver refuses all
    /// that follows.
    pub(super) fn breaks_the_context(&self) -> bool {
        matches!(self.code, 700 | 702 | 710 | 714..=719)
    }
}
