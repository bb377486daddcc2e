//! What the tests of the C interface need beside a C compiler.

use crate::{is_there, run, target};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Installs cmake beside the build, if there is none, and returns its folder then.
pub fn cmake(root: &Path) -> Result<Option<PathBuf>, String> {
    if is_there("cmake") {
        return Ok(None);
    }
    let packages = target(root).join("cmake-package");
    let mut pip = Command::new("python3");
    pip.args(["-m", "pip", "install", "--quiet", "--upgrade", "--target"]);
    run(pip.arg(&packages).arg("cmake"))?;
    // The program itself: the script in `bin` looks for Python packages elsewhere.
    Ok(Some(packages.join("cmake/data/bin")))
}
