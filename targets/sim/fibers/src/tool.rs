//! Finds a C++ compiler on the machine and runs it.

use moesaic_target::child::{self, COMPILE, ChildError, QUESTION};
use moesaic_target::{CompileError, c_compiler, script};
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};

const ADVICE: &str = "install a C++ compiler (g++ or clang++), set MOESAIC_CXX to one, \
                      or run `moesaic toolchain install c`";

/// Names inside the compile directory: relative, so that neither the binary nor
/// a message holds a path of this machine.
pub(crate) const SOURCE: &str = "kernel.cpp";
pub(crate) const BINARY: &str = "kernel.so";
const OBJECT: &str = "kernel.o";

/// Variables that would change the output or write files elsewhere.
const CLEARED: [&str; 5] = [
    "CPATH",
    "CPLUS_INCLUDE_PATH",
    "DEPENDENCIES_OUTPUT",
    "SUNPRO_DEPENDENCIES",
    "CCC_OVERRIDE_OPTIONS",
];

/// A compiler program.
#[derive(Clone, Debug)]
pub(crate) struct Tool {
    program: PathBuf,
    /// Arguments before all others, as in `ccache g++`.
    leading: Vec<String>,
    /// The `zig` binary: clang and a linker in one.
    zig: bool,
}

/// A failed run.
pub(crate) enum Failure {
    NotRun(ChildError),
    Exited(ExitStatus, String),
}

impl Tool {
    pub(crate) fn at(program: &Path, leading: &[&str]) -> Tool {
        Tool {
            program: program.to_path_buf(),
            leading: leading.iter().map(ToString::to_string).collect(),
            zig: program.file_stem().is_some_and(|stem| stem == "zig"),
        }
    }

    pub(crate) fn program(&self) -> &Path {
        &self.program
    }

    /// Returns the leading arguments that are no paths.
    pub(crate) fn leading(&self) -> impl Iterator<Item = &str> {
        let words = self.leading.iter().map(String::as_str);
        words.filter(|word| !word.contains('/'))
    }

    /// Returns a word for the scripts through which the compiler is called.
    pub(crate) fn scripts(&self) -> Option<String> {
        script::scripts(&self.program, &self.leading)
    }

    /// Returns product, version and machine as one line.
    pub(crate) fn version(&self) -> Option<String> {
        let args: &[&str] = if self.zig { &["version"] } else { &["-v"] };
        let done = child::run(&mut self.command(None, args), QUESTION).ok()?;
        let text = done.said();
        match (done.status.success(), self.zig) {
            (true, true) => Some(format!("zig {}", text.trim())),
            (true, false) => c_compiler::version_line(&text),
            (false, _) => None,
        }
    }

    /// Compiles [`SOURCE`] in `dir` to [`BINARY`]; returns the compiler's
    /// output.
    pub(crate) fn build(&self, dir: &Path, flags: &[&str]) -> Result<String, Failure> {
        let mut log = String::new();
        for args in self.steps(flags) {
            let done = child::run(&mut self.command(Some(dir), &args), COMPILE);
            let done = done.map_err(Failure::NotRun)?;
            log.push_str(&done.said());
            if !done.status.success() {
                return Err(Failure::Exited(done.status, log));
            }
        }
        Ok(log)
    }

    fn steps<'a>(&self, flags: &[&'a str]) -> Vec<Vec<&'a str>> {
        if self.zig {
            let target = match std::env::consts::ARCH {
                "aarch64" => "--target=aarch64-linux-gnu",
                _ => "--target=x86_64-linux-gnu",
            };
            let compile = ["clang", "-x", "c++", "-c", "-o", OBJECT, SOURCE, target];
            let link = ["ld.lld", "-shared", "-o", BINARY, OBJECT];
            return vec![[&compile[..], flags].concat(), link.to_vec()];
        }
        // With `-nostdlib` gcc does not add the libraries of the sanitizers
        // either; the text defines the functions that they would.
        let files = ["-x", "c++", "-pipe", "-shared", "-o", BINARY, SOURCE];
        let libraries = ["-nostdlib", "-lm", "-Wl,--build-id=none"];
        vec![[flags, &files[..], &libraries[..]].concat()]
    }

    fn command<S: AsRef<OsStr>>(&self, dir: Option<&Path>, args: &[S]) -> Command {
        let mut command = Command::new(&self.program);
        command.args(&self.leading).args(args);
        command.env("LC_ALL", "C");
        CLEARED.iter().for_each(|name| {
            command.env_remove(name);
        });
        if let Some(dir) = dir {
            command.current_dir(dir).env("TMPDIR", dir);
        }
        command
    }
}

/// Looks for a compiler: `MOESAIC_CXX`, `CXX`, `c++`, `g++`, `clang++`, then
/// `cc`, `gcc` and `clang`, which compile C++ where they can, then `fallback`.
/// An unusable `MOESAIC_CXX` is an error, because you asked for it by name.
pub(crate) fn find(
    var: impl Fn(&str) -> Option<OsString>,
    fallback: Option<&Path>,
) -> Result<Tool, CompileError> {
    let path = var("PATH").unwrap_or_default();
    let mut tried = Vec::new();
    for name in ["MOESAIC_CXX", "CXX"] {
        let Some(value) = var(name).filter(|value| !value.is_empty()) else {
            tried.push(format!("{name} (not set)"));
            continue;
        };
        if let Some(tool) = from_variable(&value, &path) {
            return Ok(tool);
        }
        let value = value.to_string_lossy();
        tried.push(format!("{name}={value} (no such program)"));
        if name == "MOESAIC_CXX" {
            return Err(none(&tried));
        }
    }
    for name in ["c++", "g++", "clang++", "cc", "gcc", "clang"] {
        match on_path(Path::new(name), &path) {
            Some(program) => return Ok(Tool::at(&program, &[])),
            None => tried.push(format!("{name} (not on PATH)")),
        }
    }
    match fallback {
        Some(program) if is_program(program) => return Ok(Tool::at(program, &[])),
        Some(program) => tried.push(format!("{} (registered, but not there)", program.display())),
        None => tried.push("moesaic's own toolchain (not installed)".to_string()),
    }
    Err(none(&tried))
}

fn none(tried: &[String]) -> CompileError {
    CompileError::NoCompiler {
        backend: "sim".to_string(),
        tried: tried.join(", "),
        advice: ADVICE.to_string(),
    }
}

/// Reads a variable that holds a program, possibly with leading arguments.
fn from_variable(value: &OsString, path: &OsStr) -> Option<Tool> {
    if let Some(program) = on_path(Path::new(value), path) {
        return Some(Tool::at(&program, &[]));
    }
    let mut words = value.to_str()?.split_whitespace();
    let program = on_path(Path::new(words.next()?), path)?;
    Some(Tool::at(&program, &words.collect::<Vec<_>>()))
}

/// Returns the program as an absolute path, because compiles run in another
/// directory.
fn on_path(program: &Path, path: &OsStr) -> Option<PathBuf> {
    if program.components().count() > 1 {
        let program = std::path::absolute(program).ok()?;
        return is_program(&program).then_some(program);
    }
    let folders = std::env::split_paths(path).filter(|dir| dir.is_absolute());
    folders.map(|dir| dir.join(program)).find(|p| is_program(p))
}

fn is_program(path: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt;
    let meta = path.metadata();
    meta.is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn programs(names: &[&str]) -> tempfile::TempDir {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        for name in names {
            let file = dir.path().join(name);
            std::fs::write(&file, "#!/bin/sh\n").unwrap();
            std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o755)).unwrap();
        }
        dir
    }

    fn found(vars: &[(&str, &str)], fallback: Option<&Path>) -> Result<String, String> {
        let var = |name: &str| {
            let value = vars.iter().find(|(key, _)| *key == name);
            value.map(|(_, value)| OsString::from(value))
        };
        let name = |tool: Tool| tool.program.file_name().unwrap().to_owned();
        find(var, fallback)
            .map(|tool| name(tool).to_string_lossy().into_owned())
            .map_err(|error| error.to_string())
    }

    #[test]
    fn the_order_is_kept() {
        let dir = programs(&["mine", "theirs", "g++", "cc", "zig"]);
        let path = ("PATH", dir.path().to_str().unwrap());
        let (mine, theirs) = (("MOESAIC_CXX", "mine -B x"), ("CXX", "theirs"));
        assert_eq!(found(&[path, theirs, mine], None).unwrap(), "mine");
        assert_eq!(found(&[path, theirs], None).unwrap(), "theirs");
        assert_eq!(found(&[path, ("CXX", "gone")], None).unwrap(), "g++");
        let zig = dir.path().join("zig");
        assert_eq!(found(&[], Some(&zig)).unwrap(), "zig");
    }

    #[test]
    fn nothing_found_says_what_was_tried_and_what_to_do() {
        let error = found(&[("CXX", "icc")], Some(Path::new("/no/zig"))).unwrap_err();
        for part in [
            "no compiler for `sim` was found",
            "MOESAIC_CXX (not set)",
            "CXX=icc (no such program)",
            "clang++ (not on PATH)",
            "/no/zig (registered, but not there)",
            "moesaic toolchain install c",
        ] {
            assert!(error.contains(part), "{part:?} is not in {error}");
        }
    }

    #[test]
    fn a_wrong_moesaic_cxx_is_not_passed_over() {
        let dir = programs(&["c++"]);
        let path = ("PATH", dir.path().to_str().unwrap());
        let error = found(&[path, ("MOESAIC_CXX", "/no/g++")], None).unwrap_err();
        assert!(
            error.contains("MOESAIC_CXX=/no/g++ (no such program)"),
            "{error}"
        );
    }
}
