//! The state that one GPU's streams, modules, buffers and events share.

use super::journal::{Journals, Launched};
use super::{Fault, Functions, Vendor};
use crate::{DeviceError, DeviceInfo, DriverReason, GpuInfo, LaunchReason};
use std::ffi::c_int;
use std::fmt::Display;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

pub(super) struct Gpu<V> {
    pub vendor: V,
    pub info: DeviceInfo,
    pub gpu_info: GpuInfo,
    pub journals: Journals,
    /// The failure that broke the driver's context, if one did.
    lost: OnceLock<DeviceError>,
    lanes: AtomicU64,
}

impl<V: Vendor> Gpu<V> {
    pub fn new(vendor: V, info: DeviceInfo, gpu_info: GpuInfo) -> Gpu<V> {
        Gpu {
            vendor,
            info,
            gpu_info,
            journals: Journals::default(),
            lost: OnceLock::new(),
            lanes: AtomicU64::new(0),
        }
    }

    /// Returns a number for a new stream.
    pub fn next_lane(&self) -> u64 {
        self.lanes.fetch_add(1, Ordering::Relaxed)
    }

    /// Prepares a call to the driver: refuses if the context is lost, and makes the GPU current on
    /// this thread.
    pub fn enter(&self, operation: impl Display) -> Result<(), DeviceError> {
        if let Some(cause) = self.lost.get() {
            return Err(DeviceError::Lost {
                operation: operation.to_string(),
                cause: Box::new(cause.clone()),
            });
        }
        let bound = self.vendor.bind();
        bound.map_err(|fault| self.error(&operation.to_string(), &fault))
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

    /// Calls the driver on drop, where no error can be reported. If the context is lost, so is the
    /// resource that was to be freed.
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

    /// Returns the error of a call, which may stem from an earlier launch.
    pub fn error(&self, operation: &str, fault: &Fault) -> DeviceError {
        if fault.breaks_the_context() {
            self.lose(operation, fault)
        } else {
            DeviceError::Driver {
                operation: operation.to_string(),
                reason: fault.clone().into(),
            }
        }
    }

    fn lose(&self, operation: &str, fault: &Fault) -> DeviceError {
        let error = if fault.is_a_kernels() {
            self.accuse(operation, fault)
        } else {
            DeviceError::Driver {
                operation: operation.to_string(),
                reason: DriverReason::Lost(fault.clone()),
            }
        };
        self.lost.get_or_init(|| error.clone());
        error
    }

    fn accuse(&self, operation: &str, fault: &Fault) -> DeviceError {
        let suspects = self.journals.suspects();
        let (fault, operation) = (fault.clone(), operation.to_string());
        match suspects.launches.as_slice() {
            [Launched::Kernel { symbol, shape }] => DeviceError::Launch {
                kernel: symbol.to_string(),
                reason: LaunchReason::Failed {
                    fault,
                    operation,
                    shape: *shape,
                },
            },
            _ => DeviceError::Faulted {
                fault,
                operation,
                suspects: suspects.words(V::BLOCKING),
            },
        }
    }
}

impl Fault {
    /// Returns true if the driver refuses everything from now on. For these codes cuda.h (13.2)
    /// requires a restart of the process or the context. After uncorrectable errors of memory (214)
    /// or NVLink (220), and in a context that somebody has destroyed (709), nothing can be relied
    /// on.
    pub(super) fn breaks_the_context(&self) -> bool {
        self.is_a_kernels() || matches!(self.code, 214 | 220 | 709 | 810)
    }

    /// Returns true if a kernel may be the cause.
    fn is_a_kernels(&self) -> bool {
        matches!(self.code, 226 | 700 | 702 | 710 | 714..=719 | 721)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_that_break_the_context() {
        let broken = |code: &c_int| {
            let words = String::new();
            Fault { code: *code, words }.breaks_the_context()
        };
        let found: Vec<c_int> = (0..2000).filter(broken).collect();
        let expected = [
            214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 810,
        ];
        assert_eq!(found, expected);
    }
}
