//! Fetches and unpacks wheels with the machine's Python.

use crate::error::own_compiler;
use crate::package::Package;
use crate::{ToolKind, ToolchainError};
use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

/// The number of lines of pip's messages that are passed on.
const LOG_LINES: usize = 12;

/// Unpacks some members of a wheel without their folders. A wheel is a zip file, and Python
/// compares the checksums on the way.
const UNPACK: &str = "\
import fnmatch, os, shutil, sys, zipfile
wheel, folder, *patterns = sys.argv[1:]
with zipfile.ZipFile(wheel) as archive:
    for member in archive.namelist():
        if any(fnmatch.fnmatchcase(member, pattern) for pattern in patterns):
            with archive.open(member) as source:
                with open(os.path.join(folder, os.path.basename(member)), 'wb') as target:
                    shutil.copyfileobj(source, target, 1 << 20)
";

/// The command that starts Python.
#[derive(Clone, Debug)]
pub struct Python {
    program: PathBuf,
    args: Vec<String>,
}

impl Python {
    /// Returns the machine's `python3`.
    pub fn of_machine() -> Python {
        Python {
            program: PathBuf::from("python3"),
            args: Vec::new(),
        }
    }

    /// Returns a script in place of Python, read by the shell, because a program that was just
    /// written cannot always be started.
    #[cfg(test)]
    pub fn shell(script: &Path) -> Python {
        let args = vec![script.display().to_string()];
        Python {
            program: PathBuf::from("sh"),
            args,
        }
    }

    /// Downloads the wheel of `kind` into `folder` and returns its path. `received` gets the number
    /// of bytes in the folder whenever it has changed.
    pub fn download(
        &self,
        kind: ToolKind,
        folder: &Path,
        received: &mut dyn FnMut(u64),
    ) -> Result<PathBuf, ToolchainError> {
        let package = kind.package();
        self.require_pip(kind)?;
        let requirement = package.requirement();
        let mut command = self.command();
        command
            .args([
                "-m",
                "pip",
                "download",
                "--no-deps",
                "--only-binary=:all:",
                "--no-cache-dir",
            ])
            .args([
                "--disable-pip-version-check",
                "--quiet",
                "--no-input",
                "--retries=2",
                "--timeout=20",
                "--dest",
            ])
            .arg(folder)
            .arg(&requirement)
            // Pip writes to a temporary folder first, where its bytes would not be counted.
            .env("TMPDIR", folder);
        let output = watched(&mut command, folder, received);
        let output = output.map_err(|error| no_pip(kind, self.cannot_run(&error)))?;
        if !output.status.success() {
            let log = last_lines(&output);
            return Err(ToolchainError::Download {
                package: requirement,
                log,
                own: own_compiler(kind),
            });
        }
        wheel_in(folder).ok_or_else(|| unpack_error(&package, "pip left no wheel"))
    }

    /// Unpacks the package's members from `wheel` into `folder`.
    pub fn unpack(
        &self,
        kind: ToolKind,
        wheel: &Path,
        folder: &Path,
    ) -> Result<(), ToolchainError> {
        let package = kind.package();
        let mut command = self.command();
        command
            .args(["-c", UNPACK])
            .args([wheel, folder])
            .args(package.members);
        let output = self.output(&mut command, kind)?;
        if output.status.success() {
            Ok(())
        } else {
            Err(unpack_error(&package, &last_lines(&output)))
        }
    }

    fn require_pip(&self, kind: ToolKind) -> Result<(), ToolchainError> {
        self.pip_version()
            .map(|_| ())
            .map_err(|reason| no_pip(kind, reason))
    }

    /// Returns pip's version line, such as `pip 24.0 from ...`. The error states why pip does not
    /// run.
    pub(crate) fn pip_version(&self) -> Result<String, String> {
        let output = self.command().args(["-m", "pip", "--version"]).output();
        let output = output.map_err(|error| self.cannot_run(&error))?;
        if output.status.success() {
            Ok(String::from_utf8_lossy(&output.stdout).trim().to_string())
        } else {
            Err(last_lines(&output))
        }
    }

    fn cannot_run(&self, error: &std::io::Error) -> String {
        format!("`{}` cannot be run ({error})", self.program.display())
    }

    fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        command.args(&self.args).env("PYTHONDONTWRITEBYTECODE", "1");
        command
    }

    fn output(&self, command: &mut Command, kind: ToolKind) -> Result<Output, ToolchainError> {
        command
            .output()
            .map_err(|error| no_pip(kind, self.cannot_run(&error)))
    }
}

/// The time between two looks at a download.
const LOOK: Duration = Duration::from_millis(200);

/// Runs a command to its end, and tells how many bytes it has put into a folder.
fn watched(
    command: &mut Command,
    folder: &Path,
    received: &mut dyn FnMut(u64),
) -> io::Result<Output> {
    let child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    // A thread reads what the command prints, because a full pipe would stop it.
    let (send, ended) = mpsc::channel();
    thread::spawn(move || send.send(child.wait_with_output()));
    let mut last = 0;
    loop {
        match ended.recv_timeout(LOOK) {
            Ok(output) => return output,
            Err(mpsc::RecvTimeoutError::Timeout) => {}
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                return Err(io::Error::other("the thread that waits for it has ended"));
            }
        }
        let bytes = bytes_below(folder);
        if bytes != last {
            received(bytes);
            last = bytes;
        }
    }
}

/// Returns the bytes of all files below a folder.
fn bytes_below(folder: &Path) -> u64 {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let sizes = entries.map(|entry| match entry.metadata() {
        Ok(metadata) if metadata.is_dir() => bytes_below(&entry.path()),
        Ok(metadata) => metadata.len(),
        Err(_) => 0,
    });
    sizes.sum()
}

fn no_pip(kind: ToolKind, reason: String) -> ToolchainError {
    let package = kind.package().requirement();
    ToolchainError::NoPip {
        package,
        reason,
        own: own_compiler(kind),
    }
}

fn unpack_error(package: &Package, reason: &str) -> ToolchainError {
    ToolchainError::Unpack {
        package: package.requirement(),
        reason: reason.to_string(),
    }
}

fn wheel_in(folder: &Path) -> Option<PathBuf> {
    let entries = std::fs::read_dir(folder).ok()?;
    entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .find(|path| path.extension() == Some(OsStr::new("whl")))
}

/// Returns the last lines of the output, where errors are.
fn last_lines(output: &Output) -> String {
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    let lines = text.trim().lines().collect::<Vec<_>>();
    lines[lines.len().saturating_sub(LOG_LINES)..].join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fake_python(script: &str) -> (tempfile::TempDir, Python) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("python.sh");
        std::fs::write(&path, script).unwrap();
        let python = Python::shell(&path);
        (folder, python)
    }

    #[test]
    fn no_python_is_one_clear_error() {
        let folder = tempfile::tempdir().unwrap();
        let python = Python {
            program: PathBuf::from("/no/such/python3"),
            args: Vec::new(),
        };
        let error = python
            .download(ToolKind::Cuda, folder.path(), &mut |_| {})
            .unwrap_err()
            .to_string();
        assert!(
            error.starts_with(
                "cannot fetch `nvidia-cuda-nvrtc==13.0.88`: `/no/such/python3` cannot be run ("
            ),
            "{error}"
        );
        assert!(error.contains("install Python 3 with pip"), "{error}");
        assert!(error.contains("set MOESAIC_NVRTC"), "{error}");
    }

    #[test]
    fn no_pip_is_told_apart_from_no_network() {
        let (folder, python) = fake_python("echo \"$0: No module named pip\" >&2; exit 1");
        let error = python
            .download(ToolKind::Rocm, folder.path(), &mut |_| {})
            .unwrap_err();
        assert!(matches!(error, ToolchainError::NoPip { .. }), "{error}");
        assert!(error.to_string().contains("No module named pip"), "{error}");
    }

    #[test]
    fn a_failed_download_has_the_end_of_the_log_and_a_way_out() {
        let (folder, python) = fake_python(
            "[ \"$3\" = --version ] && exit 0; seq 1 40; echo 'ERROR: No matching distribution' >&2; exit 1",
        );
        let error = python
            .download(ToolKind::Rocm, folder.path(), &mut |_| {})
            .unwrap_err()
            .to_string();
        assert!(
            error.starts_with("pip could not fetch `ziglang==0.17.0`:\n"),
            "{error}"
        );
        assert!(error.contains("ERROR: No matching distribution"), "{error}");
        assert!(
            !error.contains("\n20\n") && error.contains("\n40\n"),
            "{error}"
        );
        assert!(
            error.contains("PIP_FIND_LINKS") && error.contains("MOESAIC_CLANG"),
            "{error}"
        );
    }

    #[test]
    fn only_the_named_members_are_unpacked() {
        let folder = tempfile::tempdir().unwrap();
        let wheel = folder.path().join("z.whl");
        let script = "import sys, zipfile\n\
            with zipfile.ZipFile(sys.argv[1], 'w') as z:\n\
            \x20   for name in ['ziglang/zig', 'ziglang/LICENSE', 'ziglang/lib/zig', 'other/zig']:\n\
            \x20       z.writestr(name, 'content of ' + name)\n";
        let made = Command::new("python3")
            .args(["-c", script])
            .arg(&wheel)
            .status()
            .unwrap();
        assert!(made.success());
        let out = folder.path().join("out");
        std::fs::create_dir(&out).unwrap();
        Python::of_machine()
            .unpack(ToolKind::C, &wheel, &out)
            .unwrap();
        assert_eq!(
            std::fs::read_to_string(out.join("zig")).unwrap(),
            "content of ziglang/zig"
        );
        assert_eq!(std::fs::read_dir(&out).unwrap().count(), 2);
    }

    #[test]
    fn a_broken_wheel_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let wheel = folder.path().join("z.whl");
        std::fs::write(&wheel, "no zip").unwrap();
        let error = Python::of_machine()
            .unpack(ToolKind::C, &wheel, folder.path())
            .unwrap_err();
        assert!(error.to_string().contains("cannot be unpacked"), "{error}");
    }
}
