//! Opening engines on the devices of this machine.

use crate::Engine;
use crate::compilers::{Compilers, TargetNameError, resolve_target};
use crate::simulators;
use moesaic_cache::Store;
use moesaic_collectives::World;
use moesaic_cpu::CpuDevice;
use moesaic_engine::EngineParts;
use moesaic_kernel::{CpuCaches, Target};
use moesaic_target::{
    CompileError, CompileOptions, Compiler, Device, DeviceError, UnavailableReason,
};
use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;

/// The reason an engine could not be opened.
///
/// ```
/// use moesaic::{Engine, EngineOptions, OpenError};
///
/// let Err(error) = Engine::open("quantum", EngineOptions::default()) else { panic!() };
/// assert!(matches!(error, OpenError::Target(_)), "{error}");
/// ```
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The target name is unknown.
    #[error(transparent)]
    Target(#[from] TargetNameError),
    /// The device is missing, or cannot run the target.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// No compiler for the target was found.
    #[error(transparent)]
    Compile(#[from] CompileError),
}

/// The text of `Display`: Rust prints the `Debug` of an error that `main` returns.
impl fmt::Debug for OpenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The settings of a new engine. By default it keeps kernels in your cache directory and compiles
/// those that are missing there.
///
/// ```
/// use moesaic::{Engine, EngineOptions};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let options = EngineOptions { threads: Some(2), pinned: true, ..EngineOptions::default() };
/// let engine = Engine::open("cpu:portable", options)?;
/// assert_eq!(engine.target().to_string(), "cpu:portable");
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// The kernel store; `None` keeps nothing on disk.
    pub store: Option<Arc<Store>>,
    /// Refuse to compile: a kernel that the store lacks is an error.
    pub strict: bool,
    /// Use what `moesaic tune` measured on this machine, if the store has it. The default is true
    /// unless the environment sets `MOESAIC_TUNING=off`.
    pub tuned: bool,
    /// The cache sizes of one CPU core, from which kernels take their block sizes; `None` reads
    /// this machine's. Results are the same bytes for every value.
    pub caches: Option<CpuCaches>,
    /// The number of CPU threads; `None` starts one per core.
    pub threads: Option<usize>,
    /// Bind each thread that the engine starts to a processor of its own, NUMA nodes in turn, so
    /// that it stays near the weights that it reads. The thread that calls is yours to bind.
    pub pinned: bool,
    /// The number of the GPU, as its driver counts.
    pub ordinal: usize,
    /// Fill new CPU memory with NaN, so reads of unwritten memory show in results.
    pub poison: bool,
    /// Options for the compiler.
    pub compile: CompileOptions,
}

impl Default for EngineOptions {
    fn default() -> Self {
        EngineOptions {
            store: Some(Arc::new(Store::open_default())),
            strict: false,
            tuned: std::env::var_os("MOESAIC_TUNING").is_none_or(|value| value != "off"),
            caches: None,
            threads: None,
            pinned: false,
            ordinal: 0,
            poison: false,
            compile: CompileOptions::default(),
        }
    }
}

impl EngineOptions {
    /// Selects the GPU of a rank: of the GPUs visible to this process, the one whose number is the
    /// rank's on its node, or the only one. `target` is the name that you will open.
    ///
    /// ```
    /// use moesaic::collectives::World;
    /// use moesaic::{Engine, EngineOptions};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let options = match World::from_environment()? {
    ///     Some(world) => EngineOptions::default().for_rank("auto", &world),
    ///     None => EngineOptions::default(),
    /// };
    /// let engine = Engine::open("auto", options)?;
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn for_rank(mut self, target: &str, world: &World) -> EngineOptions {
        let seen = match target.split(':').next() {
            Some("cuda") => gpus(&[cuda_devices]),
            Some("rocm") => gpus(&[rocm_devices]),
            Some("auto") => gpus(&[cuda_devices, rocm_devices]),
            _ => 0,
        };
        if let (2.., Some(local)) = (seen, world.local_rank) {
            self.ordinal = local;
        }
        self
    }
}

/// Returns the number of GPUs that the first answering driver reports.
fn gpus(drivers: &[fn() -> Result<usize, DeviceError>]) -> usize {
    let mut found = drivers.iter().filter_map(|count| count().ok());
    found.find(|count| *count > 0).unwrap_or(0)
}

/// Constructors.
impl Engine {
    /// Opens the best device of this machine: a CUDA or ROCm GPU if its driver answers and a
    /// compiler for it is found, else the CPU.
    ///
    /// # Errors
    /// [`OpenError`] if this machine has not even a C compiler.
    pub fn auto() -> Result<Engine, OpenError> {
        Engine::open("auto", EngineOptions::default())
    }

    /// Opens this machine's CPU with all of its cores.
    ///
    /// # Errors
    /// [`OpenError`] if no C compiler is found.
    pub fn cpu() -> Result<Engine, OpenError> {
        Engine::open("cpu", EngineOptions::default())
    }

    /// Opens an NVIDIA GPU by its number.
    ///
    /// # Errors
    /// [`OpenError`] if the driver, the device or NVRTC is missing.
    pub fn cuda(ordinal: usize) -> Result<Engine, OpenError> {
        Engine::open(
            "cuda",
            EngineOptions {
                ordinal,
                ..EngineOptions::default()
            },
        )
    }

    /// Opens an AMD GPU by its number.
    ///
    /// # Errors
    /// [`OpenError`] if the driver, the device or a compiler is missing.
    pub fn rocm(ordinal: usize) -> Result<Engine, OpenError> {
        Engine::open(
            "rocm",
            EngineOptions {
                ordinal,
                ..EngineOptions::default()
            },
        )
    }

    /// Opens the engine of a target name: `auto`, `cpu`, `cuda`, `rocm`, or a name with an
    /// architecture, such as `cpu:avx2`, `cuda:sm_90a` or `sim:sm_90a`.
    ///
    /// # Errors
    /// [`OpenError`] names the missing part and how to get it.
    pub fn open(name: &str, options: EngineOptions) -> Result<Engine, OpenError> {
        if name == "auto" {
            return Engine::open("cuda", options.clone())
                .or_else(|_| Engine::open("rocm", options.clone()))
                .or_else(|_| Engine::open("cpu", options));
        }
        let (device, target) = open_device(name, &options)?;
        let compiler = compiler(target, &options)?;
        Ok(Engine::build(device, target, options, compiler))
    }

    /// Opens an engine as [`Engine::open`] does, with a compiler that you bring.
    ///
    /// # Errors
    /// The same as [`Engine::open`].
    #[doc(hidden)]
    pub fn open_with(
        name: &str,
        options: EngineOptions,
        compiler: Arc<dyn Compiler>,
    ) -> Result<Engine, OpenError> {
        let (device, target) = open_device(name, &options)?;
        Ok(Engine::build(device, target, options, Some(compiler)))
    }

    /// Makes an engine on a device that you opened, such as a CUDA device on another library's
    /// stream. Raw calls then run in that stream's order.
    ///
    /// # Errors
    /// [`OpenError`] if no compiler for the device is found.
    #[doc(hidden)]
    pub fn on_device(device: Arc<dyn Device>, options: EngineOptions) -> Result<Engine, OpenError> {
        let target = device.info().target;
        let compiler = compiler(target, &options)?;
        Ok(Engine::build(device, target, options, compiler))
    }

    /// Opens an engine as [`Engine::open`] does, on a stream of another library, such as PyTorch.
    /// Raw calls then run in that stream's order. `stream` is the driver's handle, `CUstream` or
    /// `hipStream_t`; null is the default stream.
    ///
    /// # Safety
    /// The handle is null or a stream of the GPU `options.ordinal`, and lives as long as the engine
    /// and its layers. Nobody captures the stream during a call.
    ///
    /// # Errors
    /// The same as [`Engine::open`]; a target that has no streams is [`OpenError::Device`].
    pub unsafe fn on_stream(
        name: &str,
        stream: *mut c_void,
        options: EngineOptions,
    ) -> Result<Engine, OpenError> {
        let ordinal = options.ordinal;
        let device = match name.split(':').next().unwrap_or(name) {
            // SAFETY: the caller vouches for the stream.
            "cuda" => unsafe { cuda_on(ordinal, stream) }?,
            // SAFETY: as above.
            "rocm" => unsafe { rocm_on(ordinal, stream) }?,
            other => {
                return Err(OpenError::Device(DeviceError::Unsupported {
                    backend: other.to_string(),
                    asked: "a stream of another library".to_string(),
                }));
            }
        };
        let own = device.info().target;
        let target = if name.contains(':') {
            resolve_target(name)?
        } else {
            own
        };
        runs(&*device, target)?;
        let compiler = compiler(target, &options)?;
        Ok(Engine::build(device, target, options, compiler))
    }

    fn build(
        device: Arc<dyn Device>,
        target: Target,
        options: EngineOptions,
        compiler: Option<Arc<dyn Compiler>>,
    ) -> Engine {
        let parts = EngineParts {
            compiler,
            device,
            store: options.store,
            strict: options.strict,
            tuned: options.tuned,
            caches: options.caches,
            options: options.compile,
        };
        Engine(moesaic_engine::Engine::for_target(parts, target))
    }
}

/// Returns the compiler, or none for a strict engine with a store, which never compiles.
fn compiler(
    target: Target,
    options: &EngineOptions,
) -> Result<Option<Arc<dyn Compiler>>, CompileError> {
    match Compilers::new(options.store.clone()).get(target) {
        Ok(compiler) => Ok(Some(compiler)),
        Err(_) if options.strict && options.store.is_some() => Ok(None),
        Err(error) => Err(error),
    }
}

/// Opens the device of a target name and returns it with the target to generate code for.
fn open_device(
    name: &str,
    options: &EngineOptions,
) -> Result<(Arc<dyn Device>, Target), OpenError> {
    // An unknown name is reported before any driver is loaded, so the first error is the useful
    // one.
    let asked = match name {
        "cuda" | "rocm" => None,
        name => Some(resolve_target(name)?),
    };
    let device = match asked {
        Some(Target::Sim(arch)) => simulators::device(arch, options.threads)?,
        _ => hardware_device(name, options)?,
    };
    let own = device.info().target;
    let target = if name.contains(':') {
        asked.unwrap_or(own)
    } else {
        own
    };
    runs(&*device, target)?;
    Ok((device, target))
}

fn hardware_device(name: &str, options: &EngineOptions) -> Result<Arc<dyn Device>, DeviceError> {
    match name.split(':').next().unwrap_or(name) {
        "cuda" => cuda_device(options.ordinal),
        "rocm" => rocm_device(options.ordinal),
        _ => cpu_device(options),
    }
}

fn cpu_device(options: &EngineOptions) -> Result<Arc<dyn Device>, DeviceError> {
    let device = match options.threads {
        Some(threads) => CpuDevice::with_threads(threads)?,
        None if options.pinned => CpuDevice::with_threads(CpuDevice::new().threads())?,
        None => CpuDevice::new(),
    };
    let device = if options.pinned {
        device.pinned()?
    } else {
        device
    };
    Ok(Arc::new(if options.poison {
        device.poisoned()
    } else {
        device
    }))
}

#[cfg(feature = "cuda")]
fn cuda_device(ordinal: usize) -> Result<Arc<dyn Device>, DeviceError> {
    Ok(Arc::new(moesaic_cuda::CudaDevice::open(ordinal)?))
}

/// # Safety
/// As [`Engine::on_stream`].
#[cfg(feature = "cuda")]
unsafe fn cuda_on(ordinal: usize, stream: *mut c_void) -> Result<Arc<dyn Device>, DeviceError> {
    // SAFETY: the caller vouches for the stream.
    let device = unsafe { moesaic_cuda::CudaDevice::on_handle(ordinal, stream) };
    Ok(Arc::new(device?))
}

#[cfg(not(feature = "cuda"))]
unsafe fn cuda_on(_: usize, _: *mut c_void) -> Result<Arc<dyn Device>, DeviceError> {
    Err(crate::missing::device("cuda"))
}

/// # Safety
/// As [`Engine::on_stream`].
#[cfg(feature = "rocm")]
unsafe fn rocm_on(ordinal: usize, stream: *mut c_void) -> Result<Arc<dyn Device>, DeviceError> {
    // SAFETY: the caller vouches for the stream.
    let device = unsafe { moesaic_rocm::HipDevice::on_handle(ordinal, stream) };
    Ok(Arc::new(device?))
}

#[cfg(not(feature = "rocm"))]
unsafe fn rocm_on(_: usize, _: *mut c_void) -> Result<Arc<dyn Device>, DeviceError> {
    Err(crate::missing::device("rocm"))
}

#[cfg(feature = "cuda")]
fn cuda_devices() -> Result<usize, DeviceError> {
    moesaic_cuda::CudaDevice::count()
}

#[cfg(not(feature = "cuda"))]
fn cuda_devices() -> Result<usize, DeviceError> {
    Err(crate::missing::device("cuda"))
}

#[cfg(not(feature = "cuda"))]
fn cuda_device(_: usize) -> Result<Arc<dyn Device>, DeviceError> {
    Err(crate::missing::device("cuda"))
}

#[cfg(feature = "rocm")]
fn rocm_device(ordinal: usize) -> Result<Arc<dyn Device>, DeviceError> {
    Ok(Arc::new(moesaic_rocm::HipDevice::open(ordinal)?))
}

#[cfg(feature = "rocm")]
fn rocm_devices() -> Result<usize, DeviceError> {
    moesaic_rocm::HipDevice::count()
}

#[cfg(not(feature = "rocm"))]
fn rocm_devices() -> Result<usize, DeviceError> {
    Err(crate::missing::device("rocm"))
}

#[cfg(not(feature = "rocm"))]
fn rocm_device(_: usize) -> Result<Arc<dyn Device>, DeviceError> {
    Err(crate::missing::device("rocm"))
}

/// Checks that the device can run code generated for `target`.
fn runs(device: &dyn Device, target: Target) -> Result<(), DeviceError> {
    let own = device.info().target;
    let possible = match (own, target) {
        (Target::Cpu(_), Target::Cpu(asked)) => moesaic_cpu::host_runs(asked),
        (Target::Cuda(own), Target::Cuda(asked)) => own.runs(asked),
        (own, asked) => own == asked,
    };
    if possible {
        return Ok(());
    }
    Err(DeviceError::Unavailable {
        backend: target.backend().to_string(),
        reason: UnavailableReason::OtherTarget {
            device: device.info().name.clone(),
            own,
            asked: target,
        },
    })
}
