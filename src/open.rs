//! Engines for the targets that exist.

use crate::compilers::{Compilers, TargetNameError, resolve_target};
use crate::simulators;
use moesaic_cache::Store;
use moesaic_collectives::World;
use moesaic_cpu::CpuDevice;
use moesaic_engine::EngineParts;
use moesaic_kernel::{CpuCaches, Target};
use moesaic_target::{CompileError, CompileOptions, Compiler, Device, DeviceError};
use std::ops::Deref;
use std::sync::Arc;

/// An engine that could not be opened.
///
/// ```
/// use moesaic::{Engine, EngineOptions, OpenError};
///
/// let Err(error) = Engine::open("quantum", EngineOptions::default()) else { panic!() };
/// assert!(matches!(error, OpenError::Target(_)), "{error}");
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The target's name is not known.
    #[error(transparent)]
    Target(#[from] TargetNameError),
    /// The device is not here, or cannot run the target.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// There is no compiler.
    #[error(transparent)]
    Compile(#[from] CompileError),
}

/// How to open an engine. The default keeps kernels in the user's cache
/// directory and compiles what is not there.
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
    /// Where kernels are kept; `None` keeps none on disk.
    pub store: Option<Arc<Store>>,
    /// A kernel that is not in the store is an error instead of a compile.
    pub strict: bool,
    /// Layers are made with what `moesaic tune` found for this machine, if the
    /// store has it. The default is that, unless MOESAIC_TUNING is `off`.
    pub tuned: bool,
    /// The caches of a CPU's core that sizes of blocks follow; `None` is this
    /// machine's. Results are the same bytes.
    pub caches: Option<CpuCaches>,
    /// CPU threads; `None` is one per core.
    pub threads: Option<usize>,
    /// Each of these threads stays on one processor; see [`CpuDevice::pinned`].
    pub pinned: bool,
    /// The number of the GPU.
    pub ordinal: usize,
    /// New CPU memory holds NaN, so that a read of unwritten memory shows.
    pub poison: bool,
    /// What is asked of the compiler.
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
    /// With the GPU of a rank: of those that this process sees, the one with the rank's
    /// number on its node, or the only one. `target` is what will be opened.
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

/// How many GPUs the first driver has that answers.
fn gpus(drivers: &[fn() -> Result<usize, DeviceError>]) -> usize {
    let mut found = drivers.iter().filter_map(|count| count().ok());
    found.find(|count| *count > 0).unwrap_or(0)
}

/// A device with a compiler and a kernel store: what layers are made with.
/// It is a [`moesaic_engine::Engine`] that knows how to open itself.
///
/// ```
/// use moesaic::{Engine, Input};
///
/// # use moesaic::example::{spec, wave, weights};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let engine = Engine::auto()?; // a GPU where there is one, else the CPU
/// let layer = engine.layer(&spec(), &weights())?;
/// layer.forward(&Input::new(3, &wave(24)))?;
/// println!("{} on {}", engine.target(), engine.device_info().name);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Engine(moesaic_engine::Engine);

impl Deref for Engine {
    type Target = moesaic_engine::Engine;

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

impl Engine {
    /// The best device of this machine: a CUDA or ROCm GPU where a driver
    /// answers and a compiler is found, else the CPU.
    ///
    /// # Errors
    /// When not even a C compiler is found.
    pub fn auto() -> Result<Engine, OpenError> {
        Engine::open("auto", EngineOptions::default())
    }

    /// This machine's CPU, all cores.
    ///
    /// # Errors
    /// When no C compiler is found.
    pub fn cpu() -> Result<Engine, OpenError> {
        Engine::open("cpu", EngineOptions::default())
    }

    /// An NVIDIA GPU.
    ///
    /// # Errors
    /// When there is no driver, no such device, or no NVRTC.
    pub fn cuda(ordinal: usize) -> Result<Engine, OpenError> {
        Engine::open(
            "cuda",
            EngineOptions {
                ordinal,
                ..EngineOptions::default()
            },
        )
    }

    /// An AMD GPU.
    ///
    /// # Errors
    /// When there is no driver, no such device, or no compiler.
    pub fn rocm(ordinal: usize) -> Result<Engine, OpenError> {
        Engine::open(
            "rocm",
            EngineOptions {
                ordinal,
                ..EngineOptions::default()
            },
        )
    }

    /// The engine of a target name: `auto`, `cpu`, `cuda`, `rocm`, or one with
    /// an architecture, such as `cpu:avx2`, `cuda:sm_90a` or `sim:sm_90a`.
    ///
    /// # Errors
    /// [`OpenError`] says what is missing and what to do about it.
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

    /// [`Engine::open`] with a compiler of the caller's.
    ///
    /// # Errors
    /// As [`Engine::open`].
    pub fn open_with(
        name: &str,
        options: EngineOptions,
        compiler: Arc<dyn Compiler>,
    ) -> Result<Engine, OpenError> {
        let (device, target) = open_device(name, &options)?;
        Ok(Engine::build(device, target, options, Some(compiler)))
    }

    /// An engine on a device that the caller opened: a CUDA device on a stream
    /// of another library, for instance. Raw calls are then in that stream's
    /// order.
    ///
    /// # Errors
    /// When no compiler for the device is found.
    pub fn on_device(device: Arc<dyn Device>, options: EngineOptions) -> Result<Engine, OpenError> {
        let target = device.info().target;
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

/// The compiler; a strict engine with a store can do without one.
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

/// The device of a target name, and the target to generate for.
fn open_device(
    name: &str,
    options: &EngineOptions,
) -> Result<(Arc<dyn Device>, Target), OpenError> {
    // A name that is not known is worth saying before any device is tried.
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

/// Whether the device can run code for a target.
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
    let reason = format!("{} runs `{own}`, not `{target}`", device.info().name);
    Err(DeviceError::Unavailable {
        backend: target.backend().to_string(),
        reason,
    })
}
