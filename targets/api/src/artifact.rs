//! Compiled kernels and the facts in their binaries.

use crate::SignatureError;
use moesaic_kernel::{Entry, KernelSource, ParamType, Scalar};
use serde::{Deserialize, Serialize};

/// A compiled kernel source: the bytes that a device loads, and a report on them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Artifact {
    /// A shared object, a CUBIN or a code object.
    #[serde(skip)]
    pub binary: Vec<u8>,
    /// Facts read from the binary and from the compiler's log.
    pub report: ArtifactReport,
}

/// Facts about an artifact.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ArtifactReport {
    /// The compiler's name, such as `NVRTC 13.0` or `gcc 12.2.0`.
    pub compiler: String,
    /// The compile time in milliseconds.
    pub compile_ms: f64,
    /// One report per entry, in the order of the source's entries.
    pub kernels: Vec<KernelReport>,
    /// The compiler's messages, trimmed; usually empty.
    pub log: String,
}

/// Facts about one entry. A fact that the binary lacks is `None`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct KernelReport {
    /// The entry's symbol.
    pub symbol: String,
    /// Registers per thread (for AMD: vector registers).
    pub registers: Option<u32>,
    /// Accumulation registers per thread, AMD only. On targets with a unified register file they
    /// are part of `registers`.
    #[serde(default)]
    pub accumulator_registers: Option<u32>,
    /// Scalar registers per wave, AMD only.
    pub scalar_registers: Option<u32>,
    /// Bytes spilled to local memory per thread.
    pub spill_bytes: Option<u32>,
    /// Spilled scalar registers, AMD only. They go to lanes of vector registers where possible,
    /// without touching memory, so `spill_bytes` does not count them.
    #[serde(default)]
    pub scalar_spills: Option<u32>,
    /// Bytes of stack per thread.
    pub stack_bytes: Option<u32>,
    /// Bytes of static shared memory (LDS) per block.
    pub shared_bytes: Option<u32>,
    /// The largest block size that the kernel was compiled for.
    pub max_threads: Option<u32>,
    /// Bytes of machine code.
    pub code_bytes: Option<u64>,
    /// The parameters that the binary declares; empty if it declares none.
    #[doc(hidden)]
    pub params: Vec<ParamSlot>,
}

/// A parameter that the binary declares.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ParamSlot {
    /// Byte offset in the parameter block.
    pub offset: u32,
    /// Its size in bytes.
    pub size: u32,
}

impl ArtifactReport {
    /// Returns the facts about the entry with this symbol.
    pub fn kernel(&self, symbol: &str) -> Option<&KernelReport> {
        self.kernels.iter().find(|kernel| kernel.symbol == symbol)
    }
}

impl KernelReport {
    /// Returns true if any register is spilled, to memory or to other registers.
    pub fn spills(&self) -> bool {
        self.spill_bytes.unwrap_or(0) > 0 || self.scalar_spills.unwrap_or(0) > 0
    }

    /// Picks the source's entries from the contents of a binary, in their order, and compares the
    /// signatures. A source without entries gets all of them.
    ///
    /// # Errors
    /// [`SignatureError`] names the missing kernel or the
    /// [`disagreement`](KernelReport::disagreement).
    #[doc(hidden)]
    pub fn of_entries(
        source: &KernelSource,
        found: Vec<KernelReport>,
    ) -> Result<Vec<KernelReport>, SignatureError> {
        if source.entries.is_empty() {
            return Ok(found);
        }
        let one = |entry: &Entry| {
            let kernel = found.iter().find(|kernel| kernel.symbol == entry.symbol);
            let kernel = kernel.ok_or_else(|| SignatureError::Missing {
                symbol: entry.symbol.clone(),
            })?;
            match kernel.disagreement(entry) {
                None => Ok(kernel.clone()),
                Some(disagreement) => Err(SignatureError::Disagrees {
                    symbol: entry.symbol.clone(),
                    disagreement,
                }),
            }
        };
        source.entries.iter().map(one).collect()
    }

    /// Returns the difference between the binary's signature and `entry`: the number and sizes of
    /// the parameters, and the largest block. `None` if they agree. Use it only for binaries that
    /// declare their parameters.
    #[doc(hidden)]
    pub fn disagreement(&self, entry: &Entry) -> Option<String> {
        self.count_disagreement(entry)
            .or_else(|| self.size_disagreement(entry))
            .or_else(|| self.block_disagreement(entry))
    }

    fn count_disagreement(&self, entry: &Entry) -> Option<String> {
        let (declared, found) = (entry.params.len(), self.params.len());
        (declared != found).then(|| {
            format!(
                "`{}` declares {declared} parameters, the binary takes {found}",
                self.symbol
            )
        })
    }

    fn size_disagreement(&self, entry: &Entry) -> Option<String> {
        let mut pairs = entry.params.iter().zip(&self.params);
        let (param, slot) = pairs.find(|(param, slot)| param_bytes(param.ty) != slot.size)?;
        Some(format!(
            "parameter `{}` of `{}` is declared as {} bytes, the binary takes {}",
            param.name,
            self.symbol,
            param_bytes(param.ty),
            slot.size
        ))
    }

    fn block_disagreement(&self, entry: &Entry) -> Option<String> {
        let most = self.max_threads?;
        let threads = entry.launch.threads;
        (threads > most).then(|| {
            format!(
                "`{}` launches {threads} threads, the binary allows {most}",
                self.symbol
            )
        })
    }
}

/// Returns the size of a parameter in the parameter block, in bytes.
fn param_bytes(ty: ParamType) -> u32 {
    match ty {
        ParamType::Tensor(..) | ParamType::Scalar(Scalar::I64) => 8,
        ParamType::Scalar(Scalar::F32) => 4,
        ParamType::TensorMap(_) => crate::MAP_BYTES as u32,
    }
}
