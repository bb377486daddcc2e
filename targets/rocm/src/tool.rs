//! A compiler that was found: clang or HIPRTC.

use crate::clang::{Clang, ClangFacts};
use crate::hiprtc::Hiprtc;
use moesaic_kernel::RocmArch;
use std::path::Path;
use std::process::Command;

/// Either compiler, called in the same way: a command that compiles a file of
/// its working folder.
#[derive(Clone, Debug)]
pub enum Tool {
    Clang(Clang),
    Hiprtc(Hiprtc),
}

impl Tool {
    pub fn knows(&self, arch: RocmArch) -> bool {
        match self {
            Tool::Clang(clang) => clang.knows(arch),
            Tool::Hiprtc(hiprtc) => hiprtc.knows(arch),
        }
    }

    pub fn name(&self) -> String {
        match self {
            Tool::Clang(clang) => clang.name(),
            Tool::Hiprtc(hiprtc) => hiprtc.name(),
        }
    }

    pub fn program(&self) -> &Path {
        match self {
            Tool::Clang(clang) => clang.program(),
            Tool::Hiprtc(hiprtc) => hiprtc.program(),
        }
    }

    pub fn fingerprint(&self, arch: RocmArch) -> String {
        match self {
            Tool::Clang(clang) => clang.fingerprint(arch),
            Tool::Hiprtc(hiprtc) => hiprtc.fingerprint(arch),
        }
    }

    pub fn command(&self, arch: RocmArch, file: &str) -> Command {
        match self {
            Tool::Clang(clang) => clang.command(arch, file),
            Tool::Hiprtc(hiprtc) => hiprtc.command(arch, file),
        }
    }

    /// Returns the facts to remember; none for HIPRTC, which ROCm updates.
    pub fn facts(&self) -> Option<&ClangFacts> {
        match self {
            Tool::Clang(clang) => Some(&clang.facts),
            Tool::Hiprtc(_) => None,
        }
    }
}
