//! Reductions in rank order, on a device.

use crate::{CommElement, Reduction, Slice, reduce};
use moesaic_kernel::{
    Access, DType, Entry, KernelSource, Language, Launch, Param, SimArch, Size, Stem, Target,
};
use moesaic_target::{Arg, Artifact, Device, DeviceError, FunctionId, LaunchDims, Module};
use std::fmt;
use std::sync::Arc;

/// A reduction of rows, one per rank, to one row.
#[doc(hidden)]
#[derive(Debug)]
pub struct Folding {
    /// The element type.
    pub element: CommElement,
    /// The operator.
    pub reduction: Reduction,
    /// The rows in rank order. They may be overwritten.
    pub rows: Slice,
    /// The bytes of a row.
    pub row_bytes: usize,
    /// The memory of the result.
    pub to: Slice,
}

/// An implementation of reductions. All give the same bytes: `((x0 + x1) + x2) + ...`, in f32 for
/// bf16 and f16, rounded once.
#[doc(hidden)]
pub trait Fold: Send + Sync {
    /// Folds rows, in the order of the device's stream.
    ///
    /// # Errors
    /// When the device fails.
    fn fold(&self, folding: &Folding) -> Result<(), DeviceError>;

    /// Returns whether the host waits for rows of this type; such a fold cannot be captured in a
    /// graph.
    fn waits(&self, element: CommElement) -> bool;
}

impl fmt::Debug for dyn Fold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Fold")
    }
}

/// Folds on the host after a copy: correct for every device, and slow.
#[doc(hidden)]
#[derive(Debug)]
pub struct OnHost {
    device: Arc<dyn Device>,
}

impl OnHost {
    /// Returns a fold for rows of this device.
    pub fn new(device: &Arc<dyn Device>) -> OnHost {
        OnHost {
            device: Arc::clone(device),
        }
    }
}

impl Fold for OnHost {
    fn fold(&self, folding: &Folding) -> Result<(), DeviceError> {
        let (rows, to) = (&folding.rows, &folding.to);
        let mut bytes = vec![0; rows.bytes()];
        self.device
            .download(rows.buffer(), rows.offset(), &mut bytes)?;
        reduce::fold(
            folding.element,
            folding.reduction,
            &mut bytes,
            folding.row_bytes,
        );
        self.device
            .upload(&bytes[..folding.row_bytes], to.buffer(), to.offset())
    }

    fn waits(&self, _: CommElement) -> bool {
        true
    }
}

/// Folds by a kernel of the device; rows of bytes are folded on the host.
#[doc(hidden)]
pub struct Kernels {
    module: Arc<dyn Module>,
    functions: [FunctionId; 5],
    host: OnHost,
}

impl fmt::Debug for Kernels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Kernels")
            .field("host", &self.host)
            .finish_non_exhaustive()
    }
}

/// The types that have a kernel.
const TYPES: [(CommElement, DType); 5] = [
    (CommElement::F32, DType::F32),
    (CommElement::Bf16, DType::Bf16),
    (CommElement::F16, DType::F16),
    (CommElement::I32, DType::I32),
    (CommElement::I64, DType::I64),
];
const THREADS: u32 = 256;

const CUDA: &str = "\
#define KERNEL extern \"C\" __global__ void __launch_bounds__(256)
#define DEVICE static __device__ __forceinline__
#define INDEX ((long long)blockIdx.x * 256 + threadIdx.x)
#define BITS_OF(value) __float_as_uint(value)
#define FLOAT_OF(bits) __uint_as_float(bits)
";
const HIP: &str = "\
#define KERNEL extern \"C\" __attribute__((global, amdgpu_flat_work_group_size(256, 256))) void
#define DEVICE static __attribute__((device)) inline __attribute__((always_inline))
#define INDEX (__builtin_amdgcn_workgroup_id_x() * 256ll + __builtin_amdgcn_workitem_id_x())
#define BITS_OF(value) __builtin_bit_cast(unsigned, value)
#define FLOAT_OF(bits) __builtin_bit_cast(float, bits)
";

impl Kernels {
    /// Returns the source to compile for a target; `None` where there are no kernels.
    pub fn source(target: Target) -> Option<KernelSource> {
        let (language, head) = match target {
            Target::Cuda(_) | Target::Sim(SimArch::Cuda(_)) => (Language::Cuda, CUDA),
            Target::Rocm(_) => (Language::Hip, HIP),
            _ => return None,
        };
        Some(KernelSource {
            stem: Stem::Combine,
            name: "fold_ranks".to_string(),
            target,
            language,
            text: format!("{head}{}", include_str!("fold.cu")),
            config: "fold_ranks".to_string(),
            entries: TYPES.iter().map(|(_, dtype)| entry(*dtype)).collect(),
        })
    }

    /// Loads the compiled [`Kernels::source`].
    ///
    /// # Errors
    /// As [`Device::load`].
    pub fn load(device: &Arc<dyn Device>, artifact: &Artifact) -> Result<Kernels, DeviceError> {
        let entries = TYPES.map(|(_, dtype)| entry(dtype));
        Kernels::of(device, device.load(artifact, &entries)?)
    }

    /// Returns the kernels of a module that was made from [`Kernels::source`].
    ///
    /// # Errors
    /// As [`Module::function`].
    pub fn of(device: &Arc<dyn Device>, module: Arc<dyn Module>) -> Result<Kernels, DeviceError> {
        let entries = TYPES.map(|(_, dtype)| entry(dtype));
        let mut functions = [FunctionId(0); TYPES.len()];
        for (function, entry) in functions.iter_mut().zip(&entries) {
            *function = module.function(&entry.symbol)?;
        }
        Ok(Kernels {
            module,
            functions,
            host: OnHost::new(device),
        })
    }
}

fn entry(dtype: DType) -> Entry {
    Entry {
        symbol: format!("fold_{}", dtype.name()),
        summary: "rows of all ranks become one, in the order of ranks".to_string(),
        params: vec![
            Param::tensor("rows", dtype, Access::Read, "[ranks, count]"),
            Param::tensor("to", dtype, Access::Write, "[count]"),
            Param::i64("count"),
            Param::i64("ranks"),
            Param::i64("how"),
        ],
        launch: Launch {
            grid: [Size::Const(1), Size::Const(1)],
            threads: THREADS,
            shared_bytes: 0,
            cluster: 1,
            dependent: false,
        },
    }
}

impl Fold for Kernels {
    fn fold(&self, folding: &Folding) -> Result<(), DeviceError> {
        let place = TYPES.iter().position(|(own, _)| *own == folding.element);
        let Some(place) = place else {
            return self.host.fold(folding);
        };
        let (rows, to) = (&folding.rows, &folding.to);
        let from = rows.buffer().range("fold", rows.offset(), rows.bytes())?;
        let into = to.buffer().range("fold", to.offset(), folding.row_bytes)?;
        let count = folding.row_bytes / folding.element.size();
        let ranks = rows.bytes() / folding.row_bytes.max(1);
        let dims = LaunchDims {
            grid: [count.div_ceil(THREADS as usize) as u64, 1],
            threads: THREADS,
            shared_bytes: 0,
            cluster: 1,
        };
        let args = [
            Arg::Ptr(from),
            Arg::Ptr(into),
            Arg::I64(count as i64),
            Arg::I64(ranks as i64),
            Arg::I64(folding.reduction as i64),
        ];
        // SAFETY: the function belongs to this module and takes these arguments; the operation
        // keeps the buffers until the stream has passed it.
        unsafe { self.module.run(self.functions[place], dims, &args) }
    }

    fn waits(&self, element: CommElement) -> bool {
        TYPES.iter().all(|(own, _)| *own != element)
    }
}
