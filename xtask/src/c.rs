//! Tests of the C interface: its examples, built by a C compiler from an installed library.

use crate::{CARGO, INTEROP, is_there, run, target};
use std::path::Path;
use std::process::Command;

/// Installs cmake beside the build, if there is none, and runs the tests.
pub fn test(root: &Path) -> Result<(), String> {
    let (target, mut paths) = (target(root), Vec::new());
    if !is_there("cmake") {
        let packages = target.join("cmake-package");
        let mut pip = Command::new("python3");
        pip.args(["-m", "pip", "install", "--quiet", "--upgrade", "--target"]);
        run(pip.arg(&packages).arg("cmake"))?;
        // The program itself: the script in `bin` looks for Python packages elsewhere.
        paths.push(packages.join("cmake/data/bin"));
    }
    paths.extend(std::env::split_paths(
        &std::env::var_os("PATH").unwrap_or_default(),
    ));
    let path = std::env::join_paths(paths).map_err(|error| error.to_string())?;
    let mut cargo = Command::new(CARGO);
    cargo.args(["test", "--locked", "--package", "moesaic-c"]);
    cargo.args(["--manifest-path", INTEROP, "--target-dir"]);
    run(cargo.arg(target).env("PATH", path))
}
