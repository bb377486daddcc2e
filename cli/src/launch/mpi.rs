//! The choice of the `mpiexec` that starts the ranks.

use crate::failure::Result;
use moesaic::toolchain::{Registry, mpi};
use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The use of MPI: whether the ranks are an MPI world.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum MpiUse {
    /// If an MPI is found
    Auto,
    /// Yes, or nothing is started
    On,
    /// No: ranks only have torchrun's variables
    Off,
}

/// The launcher of an MPI installation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mpiexec {
    pub program: PathBuf,
    /// The MPI library that ranks open; `None` leaves the choice to them.
    pub library: Option<PathBuf>,
    /// Whether `MOESAIC_MPI` names its library.
    pub is_asked_for: bool,
    /// Whether the launcher may start ranks as root.
    pub as_root: bool,
}

/// Variables, in pairs, that Open MPI 4 and 5 require before they run as root.
const ROOT: [[&str; 2]; 2] = [
    ["OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"],
    ["PRTE_ALLOW_RUN_AS_ROOT", "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM"],
];

/// Returns whether the environment allows Open MPI to start ranks as root.
pub fn root_is_allowed() -> bool {
    let set = |name: &&str| env::var_os(name).is_some_and(|value| value == "1");
    ROOT.iter().any(|pair| pair.iter().all(set))
}

/// Returns the launcher that belongs to `MOESAIC_MPI`, else the one that `moesaic toolchain`
/// installed, else the one on PATH.
pub fn find() -> Result<Option<Mpiexec>> {
    let named = env::var_os("MOESAIC_MPI").filter(|value| !value.is_empty());
    let path = env::var_os("PATH").unwrap_or_default();
    if let Some(library) = named {
        let program = of_library(Path::new(&library), &path);
        return Ok(program.map(|program| Mpiexec {
            is_asked_for: true,
            ..Mpiexec::at(program, None)
        }));
    }
    let registry = Registry::open()?;
    let installed = mpi(&registry);
    let installed = installed.map(|found| Mpiexec::at(found.launcher, Some(found.library)));
    let of_machine = || {
        let program = on_path(&["mpiexec", "mpirun"], &path)?;
        Some(Mpiexec::at(program, None))
    };
    Ok(installed.or_else(of_machine))
}

/// Looks for the launcher near the library, in the `bin` of its installation, and on the path.
fn of_library(library: &Path, path: &OsString) -> Option<PathBuf> {
    let folder = library.parent().filter(|f| !f.as_os_str().is_empty());
    let near = folder.into_iter().flat_map(|folder| {
        let above = folder.ancestors().skip(1).take(3);
        std::iter::once(folder.to_path_buf()).chain(above.map(|folder| folder.join("bin")))
    });
    let found = near.flat_map(|folder| ["mpiexec", "mpirun"].map(|name| folder.join(name)));
    let open_mpi = library.to_string_lossy().ends_with("libmpi.so.40");
    let names = if open_mpi {
        ["mpiexec.openmpi", "mpirun.openmpi", "mpiexec", "mpirun"]
    } else {
        ["mpiexec.mpich", "mpiexec.hydra", "mpiexec", "mpirun"]
    };
    // A system's `bin` may hold another MPI's launcher under the plain names.
    let system =
        folder.is_none_or(|folder| folder.starts_with("/usr") || folder.starts_with("/lib"));
    let mut near = found.filter(|program| !system && program.is_file());
    near.next().or_else(|| on_path(&names, path))
}

fn on_path(names: &[&str], path: &OsString) -> Option<PathBuf> {
    let folders: Vec<PathBuf> = env::split_paths(path).collect();
    let all = names
        .iter()
        .flat_map(|name| folders.iter().map(move |folder| folder.join(name)));
    all.into_iter().find(|program| program.is_file())
}

impl Mpiexec {
    fn at(program: PathBuf, library: Option<PathBuf>) -> Mpiexec {
        Mpiexec {
            program,
            library,
            is_asked_for: false,
            as_root: false,
        }
    }

    /// Returns whether this is Open MPI's launcher. Its `--version` decides, because distributors
    /// give the program many names.
    pub fn is_open_mpi(&self) -> bool {
        let said = Command::new(&self.program).arg("--version").output();
        said.is_ok_and(|said| {
            let text = String::from_utf8_lossy(&said.stdout);
            ["Open MPI", "OpenRTE", "PRRTE"]
                .iter()
                .any(|name| text.contains(name))
        })
    }

    /// Returns `mpiexec -n ranks` for this machine alone, also inside a cluster's job. `mpiexec`
    /// starts every rank even on too few cores, and binds none: the launcher does.
    pub fn command(&self, ranks: usize) -> Command {
        let mut command = Command::new(&self.program);
        command.args(["-n", &ranks.to_string()]);
        for (name, value) in [
            ("HYDRA_LAUNCHER", "fork"),
            ("HYDRA_RMK", "user"),
            ("I_MPI_HYDRA_BOOTSTRAP", "fork"),
            ("OMPI_MCA_rmaps_base_oversubscribe", "1"),
            ("OMPI_MCA_hwloc_base_binding_policy", "none"),
            ("OMPI_MCA_plm", "isolated"),
            ("OMPI_MCA_ras", "^slurm,tm,lsf,gridengine"),
            ("PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe"),
            ("PRTE_MCA_hwloc_default_binding_policy", "none"),
        ] {
            command.env(name, value);
        }
        if let Some(library) = &self.library {
            command.env("MOESAIC_MPI", library);
        }
        if self.as_root {
            command.envs(ROOT.into_iter().flatten().map(|name| (name, "1")));
        }
        command
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn the_launcher_is_that_of_the_library() {
        let root = tempfile::tempdir().unwrap();
        let at = |path: &str| root.path().join(path);
        for file in [
            "one/bin/mpiexec",
            "one/lib/libmpi.so.12",
            "wheel/mpiexec",
            "wheel/libmpi_abi.so.1",
            "path/mpirun.openmpi",
            "path/mpiexec",
        ] {
            fs::create_dir_all(at(file).parent().unwrap()).unwrap();
            fs::write(at(file), "").unwrap();
        }
        let path = at("path").into_os_string();
        let of = |library: &Path| of_library(library, &path).unwrap();
        assert_eq!(of(&at("one/lib/libmpi.so.12")), at("one/bin/mpiexec"));
        assert_eq!(of(&at("wheel/libmpi_abi.so.1")), at("wheel/mpiexec"));
        assert_eq!(of(Path::new("libmpi.so.40")), at("path/mpirun.openmpi"));
        assert_eq!(of(Path::new("libmpi.so.12")), at("path/mpiexec"));
        assert_eq!(
            of_library(Path::new("libmpi.so.12"), &OsString::new()),
            None
        );
    }
}
