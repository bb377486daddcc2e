//! The identity of a compiler, known without running it every time.

use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

/// A compiler's version and the file that reported it. While the file's size
/// and time stay the same, nobody has to ask again: persist this value and pass
/// it to [`crate::CpuCompiler::recall`] in the next process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// The program, with its leading arguments if it has any.
    pub path: PathBuf,
    /// Bytes of the file behind the path.
    pub size: u64,
    /// Modification time, in nanoseconds of Unix time.
    pub mtime_ns: u64,
    /// Product, version and machine, as one line.
    pub version: String,
}

impl Identity {
    /// Returns the identity of `program` now, if `version` is its version.
    pub(crate) fn new(program: &Path, version: String) -> Option<Identity> {
        let meta = program.metadata().ok()?;
        let mtime = meta.modified().ok()?.duration_since(UNIX_EPOCH).ok()?;
        let mtime_ns = u64::try_from(mtime.as_nanos()).ok()?;
        Some(Identity {
            path: program.to_path_buf(),
            size: meta.len(),
            mtime_ns,
            version,
        })
    }

    /// Returns true if the program is still the one that reported the version.
    pub(crate) fn is_current(&self, program: &Path) -> bool {
        Identity::new(program, self.version.clone()).is_some_and(|now| now == *self)
    }
}
