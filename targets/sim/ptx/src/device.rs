//! The simulated GPU as a device.

use crate::artifact::Texts;
use crate::code::Kernel;
use crate::error::PtxError;
use crate::finding::Finding;
use crate::launch::launch;
use crate::memory::Allocation;
use crate::state::{DeviceState, ModuleKernel, PtxOptions, lock};
use crate::text::{self, StateSpace};
use moesaic_kernel::{CudaArch, Entry, SimArch, Target};
use moesaic_target::{
    Arg, Artifact, Buffer, Device, DeviceError, DeviceInfo, DriverReason, FunctionId,
    KernelCounters, LaunchDims, LoadReason, Module, Ptr, SharedError, SignatureError,
};
use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex};

/// A simulated NVIDIA GPU. A launch runs on the calling thread and its workers
/// and has ended when the call returns; a defect is the error of the launch.
pub struct PtxDevice {
    info: DeviceInfo,
    shared: Arc<DeviceState>,
}

impl PtxDevice {
    /// Returns a GPU of this architecture.
    pub fn new(arch: CudaArch, options: PtxOptions) -> PtxDevice {
        let threads = options
            .threads
            .or(std::thread::available_parallelism().ok())
            .unwrap_or(NonZeroUsize::MIN);
        PtxDevice {
            info: DeviceInfo {
                name: format!("PTX simulator, {arch}"),
                target: Target::Sim(SimArch::Cuda(arch)),
                units: threads.get() as u32,
                memory_bytes: None,
            },
            shared: Arc::new(DeviceState {
                options,
                threads: threads.get(),
                shared_limit: arch.caps().block_shared,
                heap: Mutex::default(),
                findings: Mutex::default(),
                counters: Mutex::default(),
            }),
        }
    }

    /// Returns the defects found so far, oldest first; a failing launch adds
    /// one.
    pub fn findings(&self) -> Vec<Finding> {
        lock(&self.shared.findings).clone()
    }

    fn allocation(&self, buffer: &Buffer) -> Result<Arc<Allocation>, DeviceError> {
        let found = lock(&self.shared.heap).at(buffer.ptr().0);
        found.ok_or_else(|| DeviceError::Driver {
            operation: format!("a copy with the buffer at {:#x}", buffer.ptr().0),
            reason: DriverReason::ForeignBuffer,
        })
    }
}

impl std::fmt::Debug for PtxDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "PtxDevice({})", self.info.name)
    }
}

/// Frees an allocation on drop.
struct Owner {
    shared: Arc<DeviceState>,
    base: u64,
}

impl Drop for Owner {
    fn drop(&mut self) {
        lock(&self.shared.heap).free(self.base);
    }
}

#[doc(hidden)]
impl Device for PtxDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn load(&self, artifact: &Artifact, entries: &[Entry]) -> Result<Arc<dyn Module>, DeviceError> {
        let name = entries.first().map_or("", |entry| &entry.symbol);
        let refuse = |error: PtxError| DeviceError::Load {
            kernel: name.to_string(),
            reason: LoadReason::Binary(SharedError::new(error)),
        };
        let module = PtxModule::load(&self.shared, artifact, entries).map_err(refuse)?;
        module.check(entries)?;
        Ok(Arc::new(module))
    }

    fn alloc(&self, bytes: usize) -> Result<Buffer, DeviceError> {
        let allocation = lock(&self.shared.heap).allocate(bytes.max(1));
        let owner = Owner {
            shared: Arc::clone(&self.shared),
            base: allocation.base,
        };
        Ok(Buffer::new(Ptr(allocation.base), bytes, Box::new(owner)))
    }

    fn upload(&self, bytes: &[u8], buffer: &Buffer, offset: usize) -> Result<(), DeviceError> {
        buffer.range("upload", offset, bytes.len())?;
        let allocation = self.allocation(buffer)?;
        allocation.copy_in(offset, bytes);
        allocation.valid.set(offset, bytes.len());
        Ok(())
    }

    fn download(
        &self,
        buffer: &Buffer,
        offset: usize,
        bytes: &mut [u8],
    ) -> Result<(), DeviceError> {
        buffer.range("download", offset, bytes.len())?;
        self.allocation(buffer)?.copy_out(offset, bytes);
        Ok(())
    }

    fn synchronize(&self) -> Result<(), DeviceError> {
        Ok(())
    }

    fn take_counters(&self) -> Vec<KernelCounters> {
        std::mem::take(&mut *lock(&self.shared.counters))
    }
}

/// A loaded artifact.
struct PtxModule {
    shared: Arc<DeviceState>,
    kernels: Vec<ModuleKernel>,
    /// Memory of the module's own variables.
    _variables: Vec<Owner>,
}

impl PtxModule {
    fn load(
        shared: &Arc<DeviceState>,
        artifact: &Artifact,
        entries: &[Entry],
    ) -> Result<PtxModule, PtxError> {
        let texts = Texts::unpack(&artifact.binary)?;
        let module = text::parse(&texts.ptx)?;
        let (addresses, variables) = place_variables(shared, &module);
        let source: Arc<[String]> = texts.source.lines().map(str::to_string).collect();
        let locations = Arc::new(module.locations.clone());
        let mut kernels = Vec::with_capacity(module.entries.len());
        for text in &module.entries {
            let kernel = Kernel::decode(&module, text, &addresses)?;
            let entry = entries.iter().find(|entry| entry.symbol == text.name);
            kernels.push(ModuleKernel {
                kernel,
                entry: entry.cloned(),
                source: Arc::clone(&source),
                locations: Arc::clone(&locations),
            });
        }
        Ok(PtxModule {
            shared: Arc::clone(shared),
            kernels,
            _variables: variables,
        })
    }

    /// Checks that the entries exist, with the signature that they declare.
    fn check(&self, entries: &[Entry]) -> Result<(), DeviceError> {
        for entry in entries {
            let refuse = |error: SignatureError| DeviceError::Load {
                kernel: entry.symbol.clone(),
                reason: error.into(),
            };
            let symbol = entry.symbol.clone();
            let mut kernels = self.kernels.iter();
            let loaded = kernels.find(|loaded| loaded.kernel.name == entry.symbol);
            let Some(loaded) = loaded else {
                return Err(refuse(SignatureError::Missing { symbol }));
            };
            if let Some(disagreement) = loaded.report().disagreement(entry) {
                return Err(refuse(SignatureError::Disagrees {
                    symbol,
                    disagreement,
                }));
            }
        }
        Ok(())
    }
}

/// Allocates the global and constant variables that kernels use.
fn place_variables(shared: &Arc<DeviceState>, module: &text::ModuleText) -> (Vec<u64>, Vec<Owner>) {
    let mut owners = Vec::new();
    let address = |(i, variable): (usize, &text::Variable)| {
        // A module names every variable of its headers. Only those that an
        // instruction uses get memory, so that an unused table costs no
        // allocation and no race log.
        let placed = matches!(variable.space, StateSpace::Global | StateSpace::Const);
        if !placed || !crate::code::layout::is_used(module, i) {
            return 0;
        }
        let bytes = (variable.bytes as usize).max(1);
        let allocation = lock(&shared.heap).allocate(bytes);
        let mut contents = variable.contents.clone();
        contents.resize(bytes, 0);
        allocation.copy_in(0, &contents);
        allocation.valid.set(0, bytes);
        owners.push(Owner {
            shared: Arc::clone(shared),
            base: allocation.base,
        });
        allocation.base
    };
    let addresses = module.variables.iter().enumerate().map(address).collect();
    (addresses, owners)
}

impl Module for PtxModule {
    fn function(&self, symbol: &str) -> Result<FunctionId, DeviceError> {
        FunctionId::find(self.kernels.iter().map(|l| &*l.kernel.name), symbol)
    }

    unsafe fn run(
        &self,
        function: FunctionId,
        dims: LaunchDims,
        args: &[Arg],
    ) -> Result<(), DeviceError> {
        launch(&self.shared, &self.kernels[function.0], dims, args)
    }
}
