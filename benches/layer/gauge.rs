//! The rates of the machine, measured in turns with the work that is compared
//! with them.

use crate::Result;
use crate::work::Work;
use moesaic::DType;
use moesaic::cpu::{CpuDevice, host_isa, limits};
use moesaic::toolchain::{self, Registry};
use std::path::Path;
use std::time::Duration;

/// The probes of one type on a number of threads.
pub struct Gauge {
    probe: limits::Probe,
    memory: limits::ProbeMemory,
    dtype: DType,
}

/// The rates of the machine over some time, not its best.
#[derive(Clone, Copy)]
pub struct Limits {
    /// Multiply-adds.
    pub gflops: f64,
    /// Memory read.
    pub gbps: f64,
}

/// Time for each limit.
const TURN: Duration = Duration::from_millis(20);

impl Gauge {
    /// # Errors
    /// When the probe does not compile, or there is no room.
    pub fn new(threads: usize, dtype: DType) -> Result<Gauge> {
        let registry = Registry::open().unwrap_or_else(|_| Registry::at(Path::new("")));
        let compiler = toolchain::c(&registry)?;
        let device = CpuDevice::with_threads(threads)?;
        Ok(Gauge {
            probe: limits::Probe::new(&compiler, &device, host_isa())?,
            memory: limits::ProbeMemory::new(&device)?,
            dtype,
        })
    }

    /// Returns the GFLOP/s over `time`.
    ///
    /// # Errors
    /// A launch fails.
    pub fn arithmetic(&self, time: Duration) -> Result<f64> {
        Ok(self.probe.sustained(self.dtype, time)?)
    }

    /// # Errors
    /// When a launch fails.
    pub fn measure(&self) -> Result<Limits> {
        Ok(Limits {
            gflops: self.arithmetic(TURN)?,
            gbps: self.probe.sustained_read(&self.memory, TURN)?,
        })
    }
}

impl Limits {
    /// Returns the means of the rates before and after some work.
    #[must_use]
    pub fn mean(self, after: Limits) -> Limits {
        Limits {
            gflops: (self.gflops + after.gflops) / 2.0,
            gbps: (self.gbps + after.gbps) / 2.0,
        }
    }

    /// Returns the roofline of the work in seconds: arithmetic or memory, whichever takes
    /// longer.
    #[must_use]
    pub fn roofline(&self, work: &Work) -> f64 {
        (work.flops / self.gflops).max(work.bytes / self.gbps) / 1e9
    }
}
