//! A device with its compiler, and the way a kernel runs on it.

use crate::text;
use moesaic_kernel::{
    Access, DType, Entry, KernelSource, Language, Launch, Param, ParamType, Size, Stem, Target,
    TensorMap,
};
use moesaic_target::{
    Arg, Artifact, Buffer, CompileError, CompileOptions, Compiler, Device, DeviceError, LaunchDims,
    Module,
};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use tera::Context;

/// A reason that a probe did not finish.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Trouble {
    /// A template of the probe or of the prelude failed.
    #[error("the kernel text cannot be written: {0}")]
    Text(String),
    /// The compiler failed.
    #[error(transparent)]
    Compile(#[from] CompileError),
    /// The device failed, or the simulator found a fault.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// A device and the compiler for it.
pub struct Bench {
    target: Target,
    compiler: Box<dyn Compiler>,
    device: Arc<dyn Device>,
    /// Artifacts by text and symbols: tensor maps change from case to case,
    /// kernels do not.
    artifacts: Mutex<HashMap<String, Artifact>>,
}

/// The type of a kernel's parameter.
#[derive(Clone, Copy)]
pub enum Takes {
    /// A pointer to 32-bit words.
    Words,
    /// A 64-bit integer.
    I64,
    /// A tensor map.
    Map(TensorMap),
}

/// A kernel of a file, and its parameters.
pub struct Kernel {
    /// Symbol.
    pub symbol: String,
    /// Threads of a block.
    pub threads: u32,
    /// Dynamic shared memory in bytes.
    pub shared_bytes: u32,
    /// Adjacent blocks that form a cluster; 1 where there are none.
    pub cluster: u32,
    /// Parameters in order.
    pub takes: Vec<Takes>,
}

/// A file of kernels to compile.
pub struct File<'a> {
    /// Name below `kernels`, without `.tera`.
    pub name: &'a str,
    /// Element type of the prelude's GEMMs.
    pub activations: &'a str,
    /// Further variables.
    pub context: Context,
    /// Kernels of the file.
    pub kernels: Vec<Kernel>,
}

/// A compiled and loaded file.
pub struct Program {
    module: Arc<dyn Module>,
    kernels: Vec<Kernel>,
}

/// A value for a parameter.
pub enum Value<'a> {
    /// Words that the kernel may change and that come back.
    Words(&'a mut [u32]),
    /// Words that the kernel only reads.
    Read(&'a [u32]),
    /// An integer.
    I64(i64),
    /// A tensor of these sizes, innermost first, for a tensor map; it comes
    /// back.
    Tensor(&'a mut [u32], [u64; 5]),
}

impl Bench {
    /// Makes a bench of a target, a compiler and a device.
    pub fn new(target: Target, compiler: Box<dyn Compiler>, device: Arc<dyn Device>) -> Bench {
        Bench {
            target,
            compiler,
            device,
            artifacts: Mutex::default(),
        }
    }

    /// Returns the target of the kernels.
    pub fn target(&self) -> Target {
        self.target
    }

    /// Returns true if an earlier failure broke the device for this process.
    pub fn is_broken(&self) -> bool {
        self.device.synchronize().is_err()
    }

    /// Returns the device's description of itself, and the compiler's name.
    pub fn description(&self) -> String {
        let (device, compiler) = (&self.device.info().name, self.compiler.name());
        format!("{device} ({}), compiled by {compiler}", self.target)
    }

    /// Returns the compute capability times ten.
    pub fn capability(&self) -> u16 {
        text::capability(self.target)
    }

    /// Writes, compiles and loads a file.
    ///
    /// # Errors
    /// [`Trouble`].
    pub fn load(&self, file: File<'_>) -> Result<Program, Trouble> {
        let text = text::render(file.name, self.target, file.activations, file.context)?;
        let source = KernelSource {
            // A probe is no operator; the field is for readers.
            stem: Stem::GroupedGemm,
            name: file.name.to_string(),
            target: self.target,
            language: Language::Cuda,
            text,
            config: String::new(),
            entries: file.kernels.iter().map(entry).collect(),
        };
        let artifact = self.compile(&source)?;
        let module = self.device.load(&artifact, &source.entries)?;
        Ok(Program {
            module,
            kernels: file.kernels,
        })
    }

    fn compile(&self, source: &KernelSource) -> Result<Artifact, Trouble> {
        let options = CompileOptions {
            allow_spills: true,
            allow_performance_loss: true,
        };
        let artifacts = || {
            self.artifacts
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
        };
        let symbols: String = source.entries.iter().map(|e| e.symbol.as_str()).collect();
        let key = source.text.clone() + &symbols;
        if let Some(artifact) = artifacts().get(&key) {
            return Ok(artifact.clone());
        }
        let artifact = self.compiler.compile(source, &options)?;
        artifacts().insert(key, artifact.clone());
        Ok(artifact)
    }

    /// Runs `blocks` blocks of a kernel and brings back the words that it may
    /// have written.
    ///
    /// # Errors
    /// [`Trouble`].
    ///
    /// # Panics
    /// When the program has no such kernel.
    pub fn run(
        &self,
        program: &Program,
        symbol: &str,
        blocks: usize,
        values: &mut [Value<'_>],
    ) -> Result<(), Trouble> {
        let kernel = program.kernels.iter().find(|k| k.symbol == symbol);
        let kernel = kernel.unwrap_or_else(|| panic!("no kernel {symbol}"));
        let buffers: Vec<Option<Buffer>> = values
            .iter()
            .map(|value| self.upload(value))
            .collect::<Result<_, _>>()?;
        let args: Vec<Arg> = values.iter().zip(&buffers).map(argument).collect();
        let dims = LaunchDims {
            grid: [blocks as u64, 1],
            threads: kernel.threads,
            shared_bytes: kernel.shared_bytes,
            cluster: kernel.cluster,
        };
        // SAFETY: the arguments are made from the values in their order, the
        // probes pass what their kernels take, and buffers live until the
        // synchronisation below.
        unsafe { program.module.launch(symbol, dims, &args)? };
        self.device.synchronize()?;
        for (value, buffer) in values.iter_mut().zip(&buffers) {
            self.download(value, buffer.as_ref())?;
        }
        Ok(())
    }

    fn upload(&self, value: &Value<'_>) -> Result<Option<Buffer>, Trouble> {
        let words: &[u32] = match value {
            Value::Words(words) | Value::Tensor(words, _) => words,
            Value::Read(words) => words,
            Value::I64(_) => return Ok(None),
        };
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        let buffer = self.device.alloc(bytes.len().max(4))?;
        self.device.upload(&bytes, &buffer, 0)?;
        Ok(Some(buffer))
    }

    fn download(&self, value: &mut Value<'_>, buffer: Option<&Buffer>) -> Result<(), Trouble> {
        let (Value::Words(words) | Value::Tensor(words, _), Some(buffer)) = (value, buffer) else {
            return Ok(());
        };
        let mut bytes = vec![0; 4 * words.len()];
        self.device.download(buffer, 0, &mut bytes)?;
        for (word, four) in words.iter_mut().zip(bytes.chunks_exact(4)) {
            *word = u32::from_le_bytes(std::array::from_fn(|i| four[i]));
        }
        Ok(())
    }
}

fn argument((value, buffer): (&Value<'_>, &Option<Buffer>)) -> Arg {
    match (value, buffer) {
        (Value::I64(value), _) => Arg::I64(*value),
        (Value::Tensor(_, dims), Some(buffer)) => Arg::TensorMap {
            base: buffer.ptr(),
            dims: *dims,
        },
        (_, Some(buffer)) => Arg::Ptr(buffer.ptr()),
        (_, None) => unreachable!("all but integers have a buffer"),
    }
}

fn entry(kernel: &Kernel) -> Entry {
    let params = kernel.takes.iter().enumerate().map(|(index, takes)| Param {
        name: format!("p{index}"),
        ty: match takes {
            Takes::Words => ParamType::Tensor(DType::I32, Access::ReadWrite),
            Takes::I64 => ParamType::Scalar(moesaic_kernel::Scalar::I64),
            Takes::Map(map) => ParamType::TensorMap(*map),
        },
        shape: String::new(),
    });
    Entry {
        symbol: kernel.symbol.clone(),
        summary: String::new(),
        params: params.collect(),
        launch: Launch {
            grid: [Size::Tokens, Size::Const(1)],
            threads: kernel.threads,
            shared_bytes: kernel.shared_bytes,
            cluster: kernel.cluster,
            dependent: false,
        },
    }
}
