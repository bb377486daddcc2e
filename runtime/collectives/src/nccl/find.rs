//! The choice of the NCCL or RCCL library to open.

use super::table::{NcclTable, OLDEST, Version};
use crate::{CollectiveError, SetupError};
use moesaic_dl::{DlError, Library};
use moesaic_kernel::Target;
use moesaic_target::SharedError;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

const NCCL: [&str; 2] = ["libnccl.so.2", "libnccl.so"];
const RCCL: [&str; 2] = ["librccl.so.1", "librccl.so"];

/// NCCL or RCCL, opened and checked for its version.
pub struct Api {
    pub table: NcclTable,
    pub version: Version,
    family: &'static str,
}

impl Api {
    /// Opens the library for a device's target.
    pub fn open(given: Option<&Path>, target: Target) -> Result<Api, CollectiveError> {
        let variable = std::env::var_os("MOESAIC_NCCL").filter(|value| !value.is_empty());
        let variable = variable.map(PathBuf::from);
        let given = given.map(Path::to_path_buf).or(variable);
        let (family, names) = match target {
            Target::Rocm(_) => ("RCCL", RCCL),
            _ => ("NCCL", NCCL),
        };
        let candidates = match given {
            Some(path) => vec![path.into()],
            None => names.map(OsString::from).to_vec(),
        };
        let missing = |source: DlError| {
            CollectiveError::setup(SetupError::NoLibrary {
                source: SharedError::new(source),
                advice: advice(family),
            })
        };
        let library = Library::open(family, &candidates).map_err(missing)?;
        // SAFETY: the signatures are those of nccl.h since 2.18, and tests compare them with
        // cudarc's. A file that is neither library lacks the functions.
        let table = unsafe { NcclTable::load(library) }.map_err(missing)?;
        let mut version = Version(0);
        // SAFETY: the pointer is valid for a write.
        let code = unsafe { table.version(&mut version.0) };
        if code != 0 || version < OLDEST {
            return Err(CollectiveError::setup(SetupError::OldLibrary {
                library: table.library().to_string(),
                version: format!("{family} {version}"),
                oldest: OLDEST.to_string(),
                advice: advice(family),
            }));
        }
        Ok(Api {
            table,
            version,
            family,
        })
    }

    /// Returns the name and version for errors: `NCCL 2.28.3`.
    pub fn name(&self) -> String {
        format!("{} {}", self.family, self.version)
    }
}

fn advice(family: &str) -> String {
    let source = match family {
        "RCCL" => "install ROCm's rccl",
        _ => "install it by `pip install nvidia-nccl-cu12` or from NVIDIA's packages",
    };
    format!("{source}, and set MOESAIC_NCCL to the path of its library")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(path: &str, target: &str) -> String {
        let target = target.parse().unwrap();
        match Api::open(Some(Path::new(path)), target) {
            Ok(_) => panic!("{path} is no NCCL"),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn what_is_missing_and_what_to_do_is_said() {
        let text = error("/no/libnccl.so.2", "cuda:sm_90a");
        assert!(
            text.contains("cannot load NCCL; tried `/no/libnccl.so.2`"),
            "{text}"
        );
        assert!(text.contains("pip install nvidia-nccl-cu12"), "{text}");
        let text = error("libc.so.6", "rocm:gfx942");
        assert!(text.contains("has no symbol `ncclGetVersion`"), "{text}");
        assert!(text.contains("install ROCm's rccl"), "{text}");
    }
}
