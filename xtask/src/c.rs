//! Finds cmake for the tests of the C interface.

use crate::{is_there, pip_install, target};
use std::path::{Path, PathBuf};

/// Installs cmake beside the build, if there is none, and returns its folder then.
pub fn cmake(root: &Path) -> Result<Option<PathBuf>, String> {
    if is_there("cmake") {
        return Ok(None);
    }
    let packages = target(root).join("cmake-package");
    pip_install(&packages, &["cmake"])?;
    // The program itself: the script in `bin` looks for Python packages elsewhere.
    Ok(Some(packages.join("cmake/data/bin")))
}
