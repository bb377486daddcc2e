//! The choice of the MPI library to open.

use super::abi::OPEN_MPIS_ABI;
use crate::launcher::RankLauncher;
use crate::world::World;
use crate::{CollectiveError, SetupError};
use moesaic_dl::{DlError, Library};
use moesaic_target::SharedError;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

const STANDARD: &str = "libmpi_abi.so.1";
const MPICH: &str = "libmpi.so.12";
const OPEN_MPI: &str = "libmpi.so.40";

/// Opens the first library of [`candidates`] that loads.
pub fn open(given: Option<&Path>, installed: Option<&Path>) -> Result<Library, CollectiveError> {
    let variable = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
    let given = given.map(Path::to_path_buf);
    let given = given.or_else(|| variable("MOESAIC_MPI").map(PathBuf::from));
    let list = candidates(given.as_deref(), installed, prefers_open_mpi(variable));
    Library::open("an MPI library", &list).map_err(no_library)
}

pub fn no_library(error: DlError) -> CollectiveError {
    let advice = "install an MPI, or run `moesaic toolchain install mpi`, and set MOESAIC_MPI to \
                  the path of its libmpi_abi.so.1, libmpi.so.40 or libmpi.so.12";
    CollectiveError::setup(SetupError::NoLibrary {
        source: SharedError::new(error),
        advice: advice.to_string(),
    })
}

/// Fails if Open MPI's `mpirun` has started this process and the library, given as path and
/// version, is another MPI's. Such a library may end the process when it initializes. The
/// opposite mismatch gives a world of one rank, which is detected after initialization.
pub fn fits(
    launched: Option<&World>,
    interface: &str,
    (path, version): (&str, &str),
) -> Result<(), CollectiveError> {
    let by_open_mpi = launched.filter(|world| world.launcher == Some(RankLauncher::OpenMpi));
    let (Some(world), false) = (by_open_mpi, interface == OPEN_MPIS_ABI) else {
        return Ok(());
    };
    Err(CollectiveError::setup(SetupError::NotOpenMpi {
        variables: world.said_by().unwrap_or_default(),
        library: path.to_string(),
        version: version.to_string(),
    }))
}

/// Returns whether the process manager is Open MPI's own, or SLURM's PMIx, which Open MPI uses.
fn prefers_open_mpi(variable: impl Fn(&str) -> Option<OsString>) -> bool {
    let set = |name: &str| variable(name).is_some();
    set("OMPI_COMM_WORLD_SIZE") || (set("PMIX_NAMESPACE") && !set("PMI_SIZE"))
}

/// Returns the libraries to try: only the requested one, if any; else the launcher's first.
fn candidates(given: Option<&Path>, installed: Option<&Path>, open_mpi: bool) -> Vec<OsString> {
    if let Some(path) = given {
        return vec![path.into()];
    }
    let mut list: Vec<OsString> = [STANDARD, MPICH].map(OsString::from).to_vec();
    list.extend(installed.map(OsString::from));
    let place = if open_mpi { 0 } else { list.len() };
    list.insert(place, OPEN_MPI.into());
    list
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_launchers_library_comes_first() {
        let installed = Path::new("/cache/libmpi_abi.so.1");
        let list = |open_mpi| candidates(None, Some(installed), open_mpi);
        let hydra = [STANDARD, MPICH, "/cache/libmpi_abi.so.1", OPEN_MPI];
        assert_eq!(list(false), hydra.map(OsString::from));
        assert_eq!(list(true)[0], OPEN_MPI);
        let given = candidates(Some(Path::new("/opt/libmpi.so")), Some(installed), true);
        assert_eq!(given, ["/opt/libmpi.so"].map(OsString::from));
    }

    #[test]
    fn srun_with_pmix_is_for_open_mpi() {
        let prefers = |names: &[&str]| {
            prefers_open_mpi(|name| names.contains(&name).then(|| OsString::from("1")))
        };
        assert!(prefers(&["OMPI_COMM_WORLD_SIZE"]) && prefers(&["PMIX_NAMESPACE"]));
        assert!(!prefers(&[]) && !prefers(&["PMI_SIZE"]));
        assert!(!prefers(&["PMI_SIZE", "PMIX_NAMESPACE"]));
    }

    #[test]
    fn under_open_mpi_another_library_is_refused_before_it_begins() {
        let by = |launcher| World {
            launcher: Some(launcher),
            ..World::new(0, 2).unwrap()
        };
        let library = ("/mpich/libmpi_abi.so.1", "MPICH Version: 5.0.2");
        let fits = |launcher, abi| fits(Some(&by(launcher)), abi, library);
        assert_eq!(fits(RankLauncher::OpenMpi, OPEN_MPIS_ABI), Ok(()));
        assert_eq!(fits(RankLauncher::Slurm, "MPICH's ABI"), Ok(()));
        let error = fits(RankLauncher::OpenMpi, "MPICH's ABI").unwrap_err();
        let error = error.to_string();
        for words in [
            "OMPI_COMM_WORLD_SIZE=2",
            library.0,
            library.1,
            "MOESAIC_MPI",
        ] {
            assert!(error.contains(words), "{error}");
        }
    }

    #[test]
    fn a_missing_library_says_what_was_tried_and_what_to_do() {
        let error = open(Some(Path::new("/no/libmpi.so.40")), None)
            .unwrap_err()
            .to_string();
        assert!(error.contains("/no/libmpi.so.40"), "{error}");
        assert!(error.contains("moesaic toolchain install mpi"), "{error}");
    }
}
