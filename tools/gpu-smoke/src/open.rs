//! Devices and their kernels.

use crate::Result;
use crate::commands::Place;
use moesaic::{Engine, EngineOptions, Store};
use std::error::Error;
use std::fmt;
use std::sync::Arc;

/// The device is not here.
#[derive(Debug)]
pub struct Absent(pub String);

impl fmt::Display for Absent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Error for Absent {}

impl Place {
    /// An engine that compiles nothing: a kernel that the folder lacks is an error. `run.sh`
    /// hides NVRTC, since kernels of one release are not those of another.
    ///
    /// # Errors
    /// [`Absent`], when there is no such device.
    pub fn open(&self) -> Result<Engine> {
        let options = EngineOptions {
            store: Some(Arc::new(Store::open(&self.store).strict())),
            strict: true,
            tuned: false,
            ..EngineOptions::default()
        };
        let opened = Engine::open(&self.device, options);
        opened.map_err(|error| Absent(error.to_string()).into())
    }

    /// Times mean nothing on a simulator.
    pub fn simulates(&self) -> bool {
        self.device.starts_with("sim:")
    }

    /// The device in a line, with its driver where it has one.
    ///
    /// # Errors
    /// When there is no such device.
    pub fn describe(&self) -> Result<String> {
        let engine = self.open()?;
        let info = engine.device_info();
        let memory = info.memory_bytes.map_or(0, |bytes| bytes >> 20);
        let mut line = format!(
            "{}, {}, {} multiprocessors, {memory} MiB",
            info.name, info.target, info.units
        );
        if let Ok(gpu) = engine.device().streams() {
            let gpu = gpu.gpu_info();
            let l2 = gpu.l2_bytes.unwrap_or(0) >> 20;
            let clock = gpu.clock_khz.unwrap_or(0) / 1000;
            let driver = gpu.driver.as_deref().unwrap_or("an unknown driver");
            line += &format!(", {l2} MiB of L2 cache, up to {clock} MHz, {driver}");
        }
        Ok(line)
    }
}
