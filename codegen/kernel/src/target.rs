//! The targets of kernels: the name of a backend and its architecture.

use crate::arch::{ArchCaps, CUDA, CudaArch, ROCM, RocmArch};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// A backend with its architecture, such as `cuda:sm_90a`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Target {
    /// C for the system C compiler.
    #[doc(hidden)]
    Cpu(CpuIsa),
    /// CUDA C++ for NVRTC.
    #[doc(hidden)]
    Cuda(CudaArch),
    /// HIP for clang or HIPRTC.
    #[doc(hidden)]
    Rocm(RocmArch),
    /// The kernels of another target, run by a simulator on this machine.
    #[doc(hidden)]
    Sim(SimArch),
}

/// The architecture that a simulator stands in for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum SimArch {
    /// PTX from NVRTC, interpreted.
    Cuda(CudaArch),
    /// HIP text as host C++.
    Rocm(RocmArch),
    /// C for an instruction set of another CPU, emulated.
    Cpu(CpuIsa),
}

/// The instruction set of CPU kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum CpuIsa {
    /// 16-byte vectors, nothing assumed beyond the baseline of the machine.
    Portable,
    /// x86-64 with AVX2, FMA and F16C.
    Avx2,
    /// x86-64 with AVX-512 F, BW, DQ, VL.
    Avx512,
    /// [`CpuIsa::Avx512`] with AVX512-BF16.
    Avx512Bf16,
    /// [`CpuIsa::Avx512`] with AMX tiles of bf16.
    Amx,
    /// aarch64.
    Neon,
    /// [`CpuIsa::Neon`] with the bf16 instructions of Armv8.6.
    NeonBf16,
}

/// A target name that moesaic does not know.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown target `{asked}`; {hint}\nknown targets: {known}")]
pub struct TargetError {
    /// The name that was asked for.
    pub asked: String,
    /// A hint.
    pub hint: String,
    /// Every name that would have worked.
    pub known: String,
}

const CPU: [(CpuIsa, &str); 7] = [
    (CpuIsa::Portable, "portable"),
    (CpuIsa::Avx2, "avx2"),
    (CpuIsa::Avx512, "avx512"),
    (CpuIsa::Avx512Bf16, "avx512bf16"),
    (CpuIsa::Amx, "amx"),
    (CpuIsa::Neon, "neon"),
    (CpuIsa::NeonBf16, "neonbf16"),
];

impl Target {
    /// Returns every target moesaic can emit for.
    pub fn all() -> Vec<Target> {
        let cpu = CPU.iter().map(|&(isa, _)| Target::Cpu(isa));
        let cuda = CUDA.iter().map(|row| Target::Cuda(row.arch));
        let rocm = ROCM.iter().map(|row| Target::Rocm(row.arch));
        let gpus: Vec<Target> = cuda.chain(rocm).collect();
        let real: Vec<Target> = cpu.chain(gpus).collect();
        let sim = real.clone().into_iter().filter_map(Target::simulated);
        real.into_iter().chain(sim).collect()
    }

    /// Returns the simulator of a GPU target, of an aarch64 one and of AMX; `None` for other CPUs
    /// and for simulators.
    pub const fn simulated(self) -> Option<Target> {
        match self {
            Target::Cuda(arch) => Some(Target::Sim(SimArch::Cuda(arch))),
            Target::Rocm(arch) => Some(Target::Sim(SimArch::Rocm(arch))),
            Target::Cpu(isa @ (CpuIsa::Neon | CpuIsa::NeonBf16 | CpuIsa::Amx)) => {
                Some(Target::Sim(SimArch::Cpu(isa)))
            }
            Target::Cpu(_) | Target::Sim(_) => None,
        }
    }

    /// Returns the target whose kernels run: the hardware that a simulator stands in for, otherwise
    /// the target itself.
    pub const fn hardware(self) -> Target {
        match self {
            Target::Sim(SimArch::Cuda(arch)) => Target::Cuda(arch),
            Target::Sim(SimArch::Rocm(arch)) => Target::Rocm(arch),
            Target::Sim(SimArch::Cpu(isa)) => Target::Cpu(isa),
            own => own,
        }
    }

    /// Returns the part before the colon: `cpu`, `cuda`, `rocm` or `sim`.
    pub const fn backend(self) -> &'static str {
        match self {
            Target::Cpu(_) => "cpu",
            Target::Cuda(_) => "cuda",
            Target::Rocm(_) => "rocm",
            Target::Sim(_) => "sim",
        }
    }

    /// Returns the part after the colon: `avx512`, `sm_90a`, `gfx942`.
    pub fn arch(self) -> String {
        match self {
            Target::Cpu(isa) | Target::Sim(SimArch::Cpu(isa)) => isa.name().to_string(),
            Target::Cuda(arch) | Target::Sim(SimArch::Cuda(arch)) => arch.to_string(),
            Target::Rocm(arch) | Target::Sim(SimArch::Rocm(arch)) => arch.name.to_string(),
        }
    }

    /// Returns a spelling that is safe in file names: `cuda-sm_90a`.
    pub fn file_name(self) -> String {
        format!("{}-{}", self.backend(), self.arch())
    }
}

impl CpuIsa {
    /// Returns the name after `cpu:`.
    pub fn name(self) -> &'static str {
        CPU.iter()
            .find(|(isa, _)| *isa == self)
            .expect("CPU lists every variant")
            .1
    }

    /// Returns the bytes of one vector register.
    pub const fn vector_bytes(self) -> usize {
        match self {
            CpuIsa::Portable | CpuIsa::Neon | CpuIsa::NeonBf16 => 16,
            CpuIsa::Avx2 => 32,
            CpuIsa::Avx512 | CpuIsa::Avx512Bf16 | CpuIsa::Amx => 64,
        }
    }

    /// Returns whether one instruction multiplies two pairs of bf16 in each 32-bit lane and adds
    /// both products to an f32.
    pub const fn bf16_pairs(self) -> bool {
        matches!(self, CpuIsa::Avx512Bf16 | CpuIsa::NeonBf16 | CpuIsa::Amx)
    }

    /// Returns whether one instruction multiplies four bytes in each 32-bit lane by four signed ones
    /// and adds the products to an integer: VNNI, which every CPU with AVX512-BF16 has, and USDOT,
    /// which those with BFMMLA have.
    pub const fn byte_dots(self) -> bool {
        matches!(self, CpuIsa::Avx512Bf16 | CpuIsa::Amx | CpuIsa::NeonBf16)
    }

    /// Returns whether one instruction multiplies two rows by two columns of bf16, each four deep,
    /// and adds the results to four f32. That is BFMMLA, which every CPU with the dot products of
    /// Armv8.6 has.
    pub const fn bf16_quads(self) -> bool {
        matches!(self, CpuIsa::NeonBf16)
    }

    /// Returns whether it is x86-64 with AVX2 at least.
    pub const fn has_avx2(self) -> bool {
        matches!(self, CpuIsa::Avx2) || self.has_avx512()
    }

    /// Returns whether it is x86-64 with AVX-512 at least.
    pub const fn has_avx512(self) -> bool {
        matches!(self, CpuIsa::Avx512 | CpuIsa::Avx512Bf16 | CpuIsa::Amx)
    }

    /// Returns the number of vector registers of the instruction set.
    pub const fn vector_registers(self) -> usize {
        match self {
            CpuIsa::Portable | CpuIsa::Avx2 => 16,
            CpuIsa::Avx512 | CpuIsa::Avx512Bf16 | CpuIsa::Amx | CpuIsa::Neon | CpuIsa::NeonBf16 => {
                32
            }
        }
    }
}

impl Target {
    /// Returns the row of a GPU, also of one that is simulated; `None` for CPUs.
    #[doc(hidden)]
    pub fn caps(self) -> Option<&'static ArchCaps> {
        match self.hardware() {
            Target::Cuda(arch) => Some(arch.caps()),
            Target::Rocm(arch) => Some(arch.caps()),
            Target::Cpu(_) | Target::Sim(_) => None,
        }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.backend(), self.arch())
    }
}

impl FromStr for Target {
    type Err = TargetError;

    /// Reads a full name such as `cuda:sm_90a`. The bare `cpu` depends on the
    /// machine and is resolved where the machine is known, not here.
    fn from_str(asked: &str) -> Result<Target, TargetError> {
        let all = Target::all();
        if let Some(target) = all.iter().find(|target| target.to_string() == asked) {
            return Ok(*target);
        }
        let same_arch = all.iter().find(|target| target.arch() == asked);
        let hint = match same_arch {
            Some(target) => format!("did you mean `{target}`?"),
            None => "write it as backend:arch".to_string(),
        };
        let known = all
            .iter()
            .map(Target::to_string)
            .collect::<Vec<_>>()
            .join(", ");
        Err(TargetError {
            asked: asked.to_string(),
            hint,
            known,
        })
    }
}

impl Serialize for Target {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Target {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Target, D::Error> {
        String::deserialize(deserializer)?
            .parse()
            .map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_reads_back() {
        for target in Target::all() {
            assert_eq!(target.to_string().parse(), Ok(target));
        }
    }

    #[test]
    fn waves_are_those_of_the_family() {
        for target in Target::all() {
            if let Target::Rocm(arch) = target {
                let lanes = if arch.name.starts_with("gfx9") {
                    64
                } else {
                    32
                };
                assert_eq!(arch.caps().wave, lanes, "{}", arch.name);
            }
        }
    }

    #[test]
    fn newer_gpus_run_older_code() {
        let arch = |name: &str| match name.parse() {
            Ok(Target::Cuda(arch)) => arch,
            other => panic!("{other:?}"),
        };
        assert!(arch("cuda:sm_89").runs(arch("cuda:sm_80")));
        assert!(arch("cuda:sm_90a").runs(arch("cuda:sm_90")));
        assert!(arch("cuda:sm_90").runs(arch("cuda:sm_90a")));
        assert!(!arch("cuda:sm_100a").runs(arch("cuda:sm_90a")));
        assert!(!arch("cuda:sm_90").runs(arch("cuda:sm_80")));
    }

    #[test]
    fn a_bare_arch_gets_a_suggestion() {
        let error = "sm_90a".parse::<Target>().unwrap_err();
        assert!(
            error.to_string().contains("did you mean `cuda:sm_90a`?"),
            "{error}"
        );
    }
}
