//! The tools that can be installed, and their wheels.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// A tool that can be installed: a compiler, or an MPI.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ToolKind {
    /// NVRTC, for every `cuda` target.
    Cuda,
    /// Clang with the AMDGPU target and its linker, for every `rocm` target.
    Rocm,
    /// Clang for the CPU, for machines without a C compiler.
    C,
    /// MPICH and its launcher, for ranks that are processes.
    Mpi,
}

/// The error of an unknown kind.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown toolchain `{0}`; choose from cuda, rocm, c, mpi")]
pub struct KindError(String);

/// A wheel, and the files kept of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Package {
    /// Its name in pip.
    pub name: &'static str,
    /// The tested version.
    pub version: &'static str,
    /// The members to unpack, as shell patterns over whole paths.
    pub members: &'static [&'static str],
    /// The start of the main file's name.
    pub main: &'static str,
    /// The files to make executable.
    pub programs: &'static [&'static str],
}

const NVRTC: Package = Package {
    name: "nvidia-cuda-nvrtc",
    version: "13.0.88",
    members: &[
        "*/libnvrtc.so.*",
        "*/libnvrtc-builtins.so.*",
        "*/License.txt",
    ],
    main: "libnvrtc.so",
    programs: &[],
};

const ZIG: Package = Package {
    name: "ziglang",
    version: "0.17.0",
    members: &["ziglang/zig", "ziglang/LICENSE"],
    main: "zig",
    programs: &["zig"],
};

/// Its library looks for others in its own folder first.
const MPICH: Package = Package {
    name: "mpich",
    version: "5.0.2",
    members: &[
        "*/bin/mpiexec",
        "*/bin/hydra_pmi_proxy",
        "*/lib/libmpi_abi.so.1",
        "*/lib/libmpi.so.12",
        "*/lib/mpich/*.so*",
        "*/licenses/LICENSE*",
    ],
    main: "libmpi_abi.so",
    programs: &["mpiexec", "hydra_pmi_proxy"],
};

impl ToolKind {
    /// Every kind.
    pub const ALL: [ToolKind; 4] = [ToolKind::Cuda, ToolKind::Rocm, ToolKind::C, ToolKind::Mpi];

    /// Returns the word on the command line: `cuda`, `rocm`, `c` or `mpi`.
    pub const fn name(self) -> &'static str {
        match self {
            ToolKind::Cuda => "cuda",
            ToolKind::Rocm => "rocm",
            ToolKind::C => "c",
            ToolKind::Mpi => "mpi",
        }
    }

    /// Returns the wheel. AMD and C share one, which is fetched and kept once.
    pub(crate) const fn package(self) -> Package {
        match self {
            ToolKind::Cuda => NVRTC,
            ToolKind::Rocm | ToolKind::C => ZIG,
            ToolKind::Mpi => MPICH,
        }
    }
}

impl fmt::Display for ToolKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for ToolKind {
    type Err = KindError;

    fn from_str(word: &str) -> Result<ToolKind, KindError> {
        let kind = ToolKind::ALL.into_iter().find(|kind| kind.name() == word);
        kind.ok_or_else(|| KindError(word.to_string()))
    }
}

impl Package {
    /// Returns `name==version`, as pip wants it.
    pub fn requirement(&self) -> String {
        format!("{}=={}", self.name, self.version)
    }

    /// Returns the folder it is kept in, below `toolchain/`.
    pub fn folder(&self) -> String {
        format!("{}-{}", self.name, self.version)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_read_back_and_others_are_refused() {
        for kind in ToolKind::ALL {
            assert_eq!(kind.name().parse(), Ok(kind));
        }
        let error = "nvcc".parse::<ToolKind>().unwrap_err();
        assert_eq!(
            error.to_string(),
            "unknown toolchain `nvcc`; choose from cuda, rocm, c, mpi"
        );
    }
}
