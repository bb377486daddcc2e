//! Kernels that are compiled on one machine and run on another, which has a GPU
//! and no compiler.

use moesaic_cuda::read_cubin;
use moesaic_kernel::{KernelSource, Target};
use moesaic_target::{
    Artifact, ArtifactReport, BinaryReason, CompileError, CompileOptions, Compiler, CompilerReason,
    KernelReport, SharedError,
};
use std::fs;
use std::path::{Path, PathBuf};

/// A compiler that keeps its binaries in a folder.
pub struct Keeping {
    /// The compiler.
    pub compiler: Box<dyn Compiler>,
    /// Folder of the binaries, created with the first.
    pub folder: PathBuf,
}

/// A compiler that returns the binaries that [`Keeping`] kept.
pub struct Kept {
    /// Folder of the binaries.
    pub folder: PathBuf,
}

impl Compiler for Keeping {
    fn backend(&self) -> &'static str {
        self.compiler.backend()
    }

    fn name(&self) -> String {
        self.compiler.name()
    }

    fn fingerprint(&self, target: Target) -> String {
        self.compiler.fingerprint(target)
    }

    fn targets(&self) -> Vec<Target> {
        self.compiler.targets()
    }

    fn compile(
        &self,
        source: &KernelSource,
        options: &CompileOptions,
    ) -> Result<Artifact, CompileError> {
        let artifact = self.compiler.compile(source, options)?;
        let path = self.folder.join(file_name(source));
        let kept =
            fs::create_dir_all(&self.folder).and_then(|()| fs::write(&path, &artifact.binary));
        kept.map_err(|error| failed(self.name(), source, &path, error))?;
        Ok(artifact)
    }
}

impl Compiler for Kept {
    fn backend(&self) -> &'static str {
        "cuda"
    }

    fn name(&self) -> String {
        format!("another machine, into {}", self.folder.display())
    }

    fn fingerprint(&self, _: Target) -> String {
        self.name()
    }

    /// Returns no targets, because the folder does not tell.
    fn targets(&self) -> Vec<Target> {
        Vec::new()
    }

    fn compile(&self, source: &KernelSource, _: &CompileOptions) -> Result<Artifact, CompileError> {
        let path = self.folder.join(file_name(source));
        let binary = fs::read(&path).map_err(|error| failed(self.name(), source, &path, error))?;
        let bad = |reason| CompileError::BadBinary {
            compiler: self.name(),
            kernel: source.name.clone(),
            reason,
        };
        let found = read_cubin(&binary)
            .map_err(|error| bad(BinaryReason::Unreadable(SharedError::new(error))))?;
        let report = ArtifactReport {
            compiler: self.name(),
            kernels: KernelReport::of_entries(source, found).map_err(|error| bad(error.into()))?,
            ..ArtifactReport::default()
        };
        Ok(Artifact { binary, report })
    }
}

/// A kernel that the folder lacks.
#[derive(Debug, thiserror::Error)]
#[error(
    "{}: {source}; make it with the same program: `--device {target} --compile-only FOLDER`",
    path.display()
)]
struct NotKept {
    path: PathBuf,
    target: Target,
    source: std::io::Error,
}

fn failed(
    compiler: String,
    source: &KernelSource,
    path: &Path,
    error: std::io::Error,
) -> CompileError {
    CompileError::Failed {
        compiler,
        kernel: source.name.clone(),
        reason: CompilerReason::Other(SharedError::new(NotKept {
            path: path.to_path_buf(),
            target: source.target,
            source: error,
        })),
    }
}

/// Returns a name by target, text and symbols, so that another build of the
/// probe finds its own kernels or none.
fn file_name(source: &KernelSource) -> String {
    let symbols = source.entries.iter().map(|entry| entry.symbol.as_str());
    let parts = [source.text.as_str()].into_iter().chain(symbols);
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    for byte in parts.flat_map(|part| part.bytes().chain([0])) {
        hash = (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
    }
    format!("{}-{}-{hash:016x}.cubin", source.name, source.target.arch())
}
