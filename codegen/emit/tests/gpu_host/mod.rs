//! GPU kernels on this CPU: the emitted text over `prelude/sim`, compiled by
//! the host's C++ compiler, one fiber per thread of a block.

#![allow(dead_code, reason = "each test file uses its part")]

mod memory;

use memory::GuardedMemory;
use moesaic_emit::{Prelude, emit_with};
use moesaic_kernel::{Entry, KernelSource, Stem, Target};
use moesaic_plan::{KernelPlan, LayerPlan, plan};
use moesaic_spec::LayerSpec;
use moesaic_target::{Arg, Artifact, Buffer, Device, DeviceError, DeviceInfo, LaunchDims, Module};
use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_void};
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, Mutex};

/// Host memory behind an unreadable page, full of 0xFF.
pub struct HostDevice {
    info: DeviceInfo,
}

/// The kernels of one source.
struct HostModule {
    library: Mutex<libloading::Library>,
    schedule: Arc<AtomicI32>,
}

/// The kernels of a source that nothing launches.
struct Absent;

/// The order in which the threads of a block run: 0 ascending, 1 descending.
pub type Schedule = Arc<AtomicI32>;

/// Emits, compiles and loads every kernel of a layer.
pub fn modules(plan: &LayerPlan, schedule: &Schedule) -> Vec<Arc<dyn Module>> {
    modules_of(plan, schedule, &Stem::ALL)
}

/// Emits, compiles and loads the kernels of some stems; nothing may launch the
/// others.
pub fn modules_of(plan: &LayerPlan, schedule: &Schedule, stems: &[Stem]) -> Vec<Arc<dyn Module>> {
    let load = |kernel: &KernelPlan| {
        if !stems.contains(&kernel.stem()) {
            return Arc::new(Absent) as Arc<dyn Module>;
        }
        let source = emit_with(kernel, plan.target, Prelude::Sim).unwrap();
        Arc::new(HostModule {
            library: Mutex::new(library(&source)),
            schedule: Arc::clone(schedule),
        }) as Arc<dyn Module>
    };
    plan.kernels.iter().map(load).collect()
}

/// A source over `prelude/sim`, compiled and loaded.
pub fn library(source: &KernelSource) -> libloading::Library {
    // A file of its own: a library that is loaded twice shares its fibers.
    let file = tempfile::Builder::new().suffix(".so").tempfile().unwrap();
    std::fs::write(file.path(), &*compiled(source)).unwrap();
    // SAFETY: the library is our own and runs nothing when it is loaded.
    unsafe { libloading::Library::new(file.path()) }.unwrap()
}

/// The library of a source; compiled once per process.
fn compiled(source: &KernelSource) -> Arc<Vec<u8>> {
    static KNOWN: Mutex<BTreeMap<String, Arc<Vec<u8>>>> = Mutex::new(BTreeMap::new());
    if let Some(known) = KNOWN.lock().unwrap().get(&source.text) {
        return Arc::clone(known);
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("kernel.so");
    compile(source, &path);
    let bytes = Arc::new(std::fs::read(&path).unwrap());
    KNOWN
        .lock()
        .unwrap()
        .insert(source.text.clone(), Arc::clone(&bytes));
    bytes
}

/// The plan of a valid spec.
pub fn planned(spec: &LayerSpec, target: &str) -> LayerPlan {
    if let Err(problems) = spec.validate() {
        panic!("the test's spec is invalid: {problems:?}");
    }
    plan(spec, target.parse().unwrap()).unwrap()
}

/// No warning is accepted. Unrolling is for GPUs; the vendor's compilers let a
/// pointer to elements read a pack of them.
fn compile(source: &KernelSource, to: &Path) {
    let text = to.with_extension("cpp");
    std::fs::write(&text, &source.text).unwrap();
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".to_string());
    let mut command = Command::new(&compiler);
    command.args(["-std=c++17", "-O1", "-march=native", "-shared", "-fPIC"]);
    command.args([
        "-Wall",
        "-Wextra",
        "-Werror",
        "-Wno-unknown-pragmas",
        "-fno-strict-aliasing",
    ]);
    let output = command.arg("-o").args([to, &text]).output();
    let output =
        output.unwrap_or_else(|e| panic!("these tests need a C++17 compiler; `{compiler}`: {e}"));
    let log = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success(),
        "{} for {}: {log}",
        source.name,
        source.target
    );
}

impl HostDevice {
    pub fn new(target: Target) -> HostDevice {
        let info = DeviceInfo {
            name: "host".to_string(),
            target,
            units: 1,
            memory_bytes: None,
        };
        HostDevice { info }
    }
}

impl Device for HostDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn load(&self, _: &Artifact, _: &[Entry]) -> Result<Arc<dyn Module>, DeviceError> {
        unimplemented!("modules are built from text")
    }

    fn alloc(&self, bytes: usize) -> Result<Buffer, DeviceError> {
        let memory = GuardedMemory::new(bytes);
        Ok(Buffer::new(memory.ptr(), bytes, Box::new(memory)))
    }

    fn upload(&self, bytes: &[u8], buffer: &Buffer, offset: usize) -> Result<(), DeviceError> {
        let to = buffer.range("upload", offset, bytes.len())?;
        // SAFETY: the range lies within the buffer, which no launch uses now.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to.0 as *mut u8, bytes.len()) };
        Ok(())
    }

    fn download(
        &self,
        buffer: &Buffer,
        offset: usize,
        bytes: &mut [u8],
    ) -> Result<(), DeviceError> {
        let from = buffer.range("download", offset, bytes.len())?;
        // SAFETY: as above.
        unsafe {
            std::ptr::copy_nonoverlapping(from.0 as *const u8, bytes.as_mut_ptr(), bytes.len())
        };
        Ok(())
    }

    fn synchronize(&self) -> Result<(), DeviceError> {
        Ok(())
    }
}

impl Module for Absent {
    unsafe fn launch(&self, symbol: &str, _: LaunchDims, _: &[Arg]) -> Result<(), DeviceError> {
        panic!("{symbol} was left out");
    }
}

type Launcher = unsafe extern "C" fn(*const *const c_void, i64, i64, i32, i32) -> *const c_char;

impl Module for HostModule {
    unsafe fn launch(
        &self,
        symbol: &str,
        dims: LaunchDims,
        args: &[Arg],
    ) -> Result<(), DeviceError> {
        // One launch at a time: a library has one set of fibers.
        let library = self.library.lock().unwrap();
        // SAFETY: every emitted entry has this launcher.
        let launcher = unsafe { library.get::<Launcher>(format!("sim_{symbol}")) }.unwrap();
        let values: Vec<u64> = args
            .iter()
            .map(|arg| match arg {
                Arg::Ptr(ptr) | Arg::TensorMap { base: ptr, .. } => ptr.0,
                Arg::I64(value) => *value as u64,
                Arg::F32(value) => u64::from(value.to_bits()),
            })
            .collect();
        let pointers: Vec<*const c_void> = values
            .iter()
            .map(|v| std::ptr::from_ref(v).cast())
            .collect();
        let [x, y] = dims.grid.map(|n| n as i64);
        let schedule = self.schedule.load(Ordering::Relaxed);
        // SAFETY: the caller answers for the arguments; each is at most eight
        // bytes, and this machine is little-endian.
        let error = unsafe { launcher(pointers.as_ptr(), x, y, dims.threads as i32, schedule) };
        if !error.is_null() {
            // SAFETY: the error is a literal of the library.
            let reason = unsafe { CStr::from_ptr(error) }
                .to_string_lossy()
                .into_owned();
            return Err(DeviceError::Driver {
                operation: symbol.to_string(),
                reason,
            });
        }
        Ok(())
    }
}
