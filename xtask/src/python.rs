//! Tests of the Python package that need no torch, whose wheel is larger than all else here.

use crate::{pip_install, run, target};
use std::path::Path;
use std::process::Command;

/// Installs numpy and pytest beside the build, takes the extension that was built and runs the
/// tests of arrays and of the pages' blocks without torch.
pub fn test(root: &Path) -> Result<(), String> {
    let (built, packages) = (target(root), target(root).join("python-packages"));
    pip_install(&packages, &["numpy", "pytest"])?;
    let sources = root.join("interop/python/python");
    let (from, to) = ("debug/lib_native.so", "moesaic/_native.abi3.so");
    std::fs::copy(built.join(from), sources.join(to)).map_err(|error| error.to_string())?;
    let paths = std::env::join_paths([packages, sources]).map_err(|error| error.to_string())?;
    let folder = root.join("interop/python/tests");
    let tests = ["test_arrays.py", "test_pages.py"].map(|file| folder.join(file));
    let mut pytest = Command::new("python3");
    pytest.args(["-m", "pytest", "--quiet", "-p", "no:cacheprovider"]);
    run(pytest.args(tests).env("PYTHONPATH", paths))
}
