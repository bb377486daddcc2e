//! A kernel entry with the argument list that it was generated for.

use moesaic_engine::LoadedKernel;
use moesaic_kernel::{Entry, Launch, Param, ParamType};
use moesaic_target::{Arg, DeviceError, LaunchDims, LaunchReason, Module};
use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

/// The arguments of one kernel entry: a struct with one field per parameter, generated from the
/// same list as the kernel's text. Generated code implements it.
pub trait KernelArgs {
    /// The kernel's name within its layer.
    const KERNEL: &'static str;

    /// The entry's symbol.
    const SYMBOL: &'static str;

    /// Names and types of the parameters, in order.
    #[doc(hidden)]
    const PARAMS: &'static [(&'static str, ParamType)];

    /// The argument list.
    #[doc(hidden)]
    type Args: AsRef<[Arg]>;

    /// Returns the arguments, in the order of the parameters.
    #[doc(hidden)]
    fn args(&self) -> Self::Args;

    /// Returns the token count, which determines the launch geometry.
    fn tokens(&self) -> i64;
}

/// The reason a loaded kernel does not match the generated arguments.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum KernelArgsError {
    /// The layer has no such kernel or entry.
    #[error("the layer has no kernel entry `{asked}`; it has: {known}")]
    Missing {
        /// Kernel and symbol.
        asked: String,
        /// The kernels and entries of the layer.
        known: String,
    },
    /// The parameters differ.
    #[error(
        "kernel entry `{entry}` was generated as ({generated}) and is now ({found})\n\
         generate the Rust code again"
    )]
    Differs {
        /// Kernel and symbol.
        entry: String,
        /// The parameters in the generated code.
        generated: String,
        /// The parameters of the kernel.
        found: String,
    },
}

/// A loaded kernel entry that takes arguments of type `A`.
///
/// The launch geometry is that of the target that the kernel was loaded for. Grid sizes are
/// evaluated for the token count of each launch.
pub struct Launcher<A> {
    module: Arc<dyn Module>,
    launch: Launch,
    args: PhantomData<fn(A)>,
}

impl<A: KernelArgs> fmt::Debug for Launcher<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Launcher")
            .field("kernel", &A::KERNEL)
            .field("symbol", &A::SYMBOL)
            .finish_non_exhaustive()
    }
}

impl<A: KernelArgs> Launcher<A> {
    /// Finds the entry of `A` among the kernels of a layer.
    ///
    /// # Errors
    /// If it is missing, or takes other parameters.
    pub fn new(kernels: &[LoadedKernel]) -> Result<Launcher<A>, KernelArgsError> {
        let kernel = kernels
            .iter()
            .find(|kernel| kernel.source.name == A::KERNEL);
        let entry = kernel.and_then(|kernel| kernel.source.entry(A::SYMBOL));
        let (Some(kernel), Some(entry)) = (kernel, entry) else {
            return Err(missing::<A>(kernels));
        };
        check::<A>(entry)?;
        let (module, launch) = (kernel.module.clone(), entry.launch.clone());
        Ok(Launcher {
            module,
            launch,
            args: PhantomData,
        })
    }

    /// Launches the kernel, in stream order and without waiting.
    ///
    /// # Safety
    /// Every address in `args` must point to device memory of the field's element type and shape,
    /// valid until the launch has finished. Ids and offsets in that memory must be values that the
    /// layer's earlier kernels would have written.
    ///
    /// # Errors
    /// If the token count is negative or the driver refuses the launch.
    pub unsafe fn launch(&self, args: &A) -> Result<(), DeviceError> {
        let tokens = u64::try_from(args.tokens()).map_err(|_| DeviceError::Launch {
            kernel: A::SYMBOL.to_string(),
            reason: LaunchReason::Tokens(args.tokens()),
        })?;
        let [x, y] = &self.launch.grid;
        let dims = LaunchDims {
            grid: [x.eval(tokens), y.eval(tokens)],
            threads: self.launch.threads,
            shared_bytes: self.launch.shared_bytes,
            cluster: self.launch.cluster,
        };
        // SAFETY: `check` compared the parameters with the entry's, so the
        // arguments match in number, kind and order; the caller vouches for
        // the memory.
        unsafe { self.module.launch(A::SYMBOL, dims, args.args().as_ref()) }
    }
}

fn entry_name<A: KernelArgs>() -> String {
    format!("{}::{}", A::KERNEL, A::SYMBOL)
}

fn missing<A: KernelArgs>(kernels: &[LoadedKernel]) -> KernelArgsError {
    let name = |kernel: &LoadedKernel| {
        let (kernel, entries) = (&kernel.source.name, &kernel.source.entries);
        entries
            .iter()
            .map(|e| format!("{kernel}::{}", e.symbol))
            .collect::<Vec<_>>()
    };
    let known = kernels.iter().flat_map(name).collect::<Vec<_>>().join(", ");
    KernelArgsError::Missing {
        asked: entry_name::<A>(),
        known,
    }
}

fn check<A: KernelArgs>(entry: &Entry) -> Result<(), KernelArgsError> {
    let found = |param: &Param| (param.name.clone(), param.ty);
    let found: Vec<_> = entry.params.iter().map(found).collect();
    let generated: Vec<_> = A::PARAMS
        .iter()
        .map(|(name, ty)| (name.to_string(), *ty))
        .collect();
    if found == generated {
        return Ok(());
    }
    Err(KernelArgsError::Differs {
        entry: entry_name::<A>(),
        generated: list(&generated),
        found: list(&found),
    })
}

fn list(params: &[(String, ParamType)]) -> String {
    params
        .iter()
        .map(|(name, ty)| format!("{name}: {}", spell(*ty)))
        .collect::<Vec<_>>()
        .join(", ")
}

fn spell(ty: ParamType) -> String {
    use moesaic_kernel::{Access, Scalar};
    match ty {
        ParamType::Tensor(dtype, Access::Read) => format!("In<{dtype}>"),
        ParamType::Tensor(dtype, Access::Write) => format!("Out<{dtype}>"),
        ParamType::Tensor(dtype, Access::ReadWrite) => format!("InOut<{dtype}>"),
        ParamType::Scalar(Scalar::I64) => "i64".to_string(),
        ParamType::Scalar(Scalar::F32) => "f32".to_string(),
        ParamType::TensorMap(map) => format!("a tensor map of {}", map.dtype),
    }
}
