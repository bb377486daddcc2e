//! Loaded kernels and their launch.

use crate::executor::Executor;
use crate::library::{self, LoadedLibrary};
use crate::scratch;
use moesaic_kernel::{Entry, ParamType, Scalar};
use moesaic_target::{
    Arg, Artifact, DeviceError, FunctionId, LaunchDims, LaunchReason, LoadReason, Module,
    SharedError,
};
use std::ffi::c_void;
use std::sync::{Arc, OnceLock};

/// An entry of a CPU kernel: argument values, first block, last block, grid x,
/// scratch memory. Entries without scratch memory ignore the last parameter.
type Code = unsafe extern "C" fn(*const *const c_void, i64, i64, i64, *mut c_void);

/// A loaded entry.
struct Function {
    symbol: String,
    params: Vec<ParamType>,
    code: Code,
}

/// A loaded shared object.
pub(crate) struct CpuModule {
    functions: Vec<Function>,
    executor: Arc<Executor>,
    /// Keeps the code behind `functions` mapped.
    _loaded: LoadedLibrary,
}

impl CpuModule {
    pub(crate) fn load(
        artifact: &Artifact,
        entries: &[Entry],
        executor: Arc<Executor>,
    ) -> Result<CpuModule, DeviceError> {
        let kernel = entries.first().map_or("(no entry)", |entry| &entry.symbol);
        let loaded = library::load(&artifact.binary)
            .map_err(|refused| error(kernel, LoadReason::Binary(SharedError::new(refused))))?;
        let functions = entries.iter().map(|entry| function(&loaded, entry));
        let functions = functions.collect::<Result<_, _>>()?;
        Ok(CpuModule {
            functions,
            executor,
            _loaded: loaded,
        })
    }
}

impl Function {
    fn refuse(&self, reason: LaunchReason) -> DeviceError {
        DeviceError::Launch {
            kernel: self.symbol.clone(),
            reason,
        }
    }

    /// Checks that the arguments are of the entry's kinds.
    fn check(&self, args: &[Arg]) -> Result<(), DeviceError> {
        let params = &self.params;
        if params.len() != args.len() {
            return Err(self.refuse(LaunchReason::ArgumentCount {
                expected: params.len(),
                found: args.len(),
            }));
        }
        let wrong = params
            .iter()
            .zip(args)
            .position(|(param, arg)| !fits(param, arg));
        match wrong {
            Some(index) => Err(self.refuse(LaunchReason::Argument {
                argument: index.to_string(),
                found: format!("{:?}", args[index]),
                expected: params[index],
            })),
            None => Ok(()),
        }
    }
}

fn error(kernel: &str, reason: LoadReason) -> DeviceError {
    DeviceError::Load {
        kernel: kernel.to_string(),
        reason,
    }
}

fn function(loaded: &LoadedLibrary, entry: &Entry) -> Result<Function, DeviceError> {
    // SAFETY: every entry of a CPU kernel has this type; it is copied into
    // the module that also holds the library.
    let code = unsafe { loaded.library.symbol::<Code>(&entry.symbol) }
        .map_err(|missing| error(&entry.symbol, LoadReason::Binary(SharedError::new(missing))))?;
    Ok(Function {
        symbol: entry.symbol.clone(),
        params: entry.params.iter().map(|param| param.ty).collect(),
        code,
    })
}

fn fits(param: &ParamType, arg: &Arg) -> bool {
    matches!(
        (param, arg),
        (ParamType::Tensor(..), Arg::Ptr(_))
            | (ParamType::Scalar(Scalar::I64), Arg::I64(_))
            | (ParamType::Scalar(Scalar::F32), Arg::F32(_))
    )
}

impl Module for CpuModule {
    fn function(&self, symbol: &str) -> Result<FunctionId, DeviceError> {
        FunctionId::find(self.functions.iter().map(|f| &*f.symbol), symbol)
    }

    unsafe fn run(
        &self,
        function: FunctionId,
        dims: LaunchDims,
        args: &[Arg],
    ) -> Result<(), DeviceError> {
        let function = &self.functions[function.0];
        function.check(args)?;
        let [x, y] = dims.grid;
        let blocks = x
            .checked_mul(y)
            .and_then(|blocks| i64::try_from(blocks).ok());
        let Some(blocks) = blocks else {
            return Err(function.refuse(LaunchReason::LargeGrid {
                grid: dims.grid,
                most: None,
            }));
        };
        let scratch_bytes = dims.shared_bytes as usize;
        self.executor.provide(scratch_bytes)?;
        let failure = OnceLock::new();
        with_table(args, |table| {
            self.executor.run(blocks, |first, last| {
                // A Slot is transparent over the pointer that the kernel
                // expects.
                let table = table.as_ptr().cast::<*const c_void>();
                let done = scratch::with(scratch_bytes, |own| {
                    // SAFETY: the arguments are of the entry's kinds, checked above;
                    // the caller vouches for the memory behind them. Both tables
                    // outlive the call, x fits since x * y does or y is 0, and the
                    // thread's own memory is as large as the launch asks for.
                    unsafe { (function.code)(table, first, last, x as i64, own) }
                });
                if let Err(error) = done {
                    let _ = failure.set(error); // one of them is enough
                }
            });
        });
        failure.into_inner().map_or(Ok(()), Err)
    }
}

/// Largest number of arguments whose tables need no allocation.
const NEAR: usize = 64;

/// Calls `launch` with the addresses of the arguments' values.
fn with_table(args: &[Arg], launch: impl FnOnce(&[Slot])) {
    if args.len() <= NEAR {
        let values: [u64; NEAR] = std::array::from_fn(|i| args.get(i).map_or(0, value));
        let table: [Slot; NEAR] = std::array::from_fn(|i| Slot::new(&values[i]));
        launch(&table[..args.len()]);
    } else {
        let values: Vec<u64> = args.iter().map(value).collect();
        let table: Vec<Slot> = values.iter().map(Slot::new).collect();
        launch(&table);
    }
}

/// Returns an argument value at the start of 8 aligned bytes.
fn value(arg: &Arg) -> u64 {
    match arg {
        Arg::Ptr(address) | Arg::TensorMap { base: address, .. } => address.0,
        Arg::I64(value) => *value as u64,
        Arg::F32(value) => {
            let mut bytes = [0; 8];
            bytes[..4].copy_from_slice(&value.to_ne_bytes());
            u64::from_ne_bytes(bytes)
        }
    }
}

/// The address of one value.
#[repr(transparent)]
struct Slot(*const c_void);

// SAFETY: kernels only read through it, and the values do not change.
unsafe impl Sync for Slot {}

impl Slot {
    fn new(value: &u64) -> Slot {
        Slot(std::ptr::from_ref(value).cast())
    }
}
