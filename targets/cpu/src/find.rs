//! Finds a C compiler on the machine.

use crate::driver::Driver;
use moesaic_target::CompileError;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

const ADVICE: &str = "install a C compiler (gcc or clang), set MOESAIC_CC to one, \
                      or run `moesaic toolchain install c`";

/// The part of a machine that the search sees: the environment, or a test's
/// stand-in.
pub(crate) trait SearchSpace {
    fn var(&self, name: &str) -> Option<OsString>;
}

/// The environment of this process.
pub(crate) struct Process;

impl SearchSpace for Process {
    fn var(&self, name: &str) -> Option<OsString> {
        std::env::var_os(name)
    }
}

/// Looks for a compiler: `MOESAIC_CC`, `CC`, `cc`, `gcc`, `clang`, then
/// `fallback`. An unusable `MOESAIC_CC` is an error, because you asked for it
/// by name. `CC` is often set for other builds, so it is only a hint.
pub(crate) fn find(
    machine: &impl SearchSpace,
    fallback: Option<&Path>,
) -> Result<Driver, CompileError> {
    let mut tried = Vec::new();
    let path = machine.var("PATH").unwrap_or_default();
    for name in ["MOESAIC_CC", "CC"] {
        let Some(value) = machine.var(name).filter(|value| !value.is_empty()) else {
            tried.push(format!("{name} (not set)"));
            continue;
        };
        if let Some(driver) = from_variable(&value, &path) {
            return Ok(driver);
        }
        tried.push(format!(
            "{name}={} (no such program)",
            value.to_string_lossy()
        ));
        if name == "MOESAIC_CC" {
            return Err(none(tried));
        }
    }
    for name in ["cc", "gcc", "clang"] {
        if let Some(program) = on_path(Path::new(name), &path) {
            return Ok(Driver::new(program, Vec::new()));
        }
        tried.push(format!("{name} (not on PATH)"));
    }
    match fallback {
        Some(program) if is_program(program) => Ok(Driver::new(program.to_path_buf(), Vec::new())),
        Some(program) => {
            tried.push(format!("{} (registered, but not there)", program.display()));
            Err(none(tried))
        }
        None => {
            tried.push("moesaic's own toolchain (not installed)".to_string());
            Err(none(tried))
        }
    }
}

/// Looks for a compiler for another machine of Linux: `MOESAIC_CC_AARCH64`,
/// `aarch64-linux-gnu-gcc`, then `fallback`, if that compiles for all.
pub(crate) fn find_for(
    architecture: &str,
    machine: &impl SearchSpace,
    fallback: Option<&Path>,
) -> Result<Driver, CompileError> {
    let path = machine.var("PATH").unwrap_or_default();
    let variable = format!("MOESAIC_CC_{}", architecture.to_uppercase());
    let program = if architecture == std::env::consts::ARCH {
        "cc".to_string()
    } else {
        format!("{architecture}-linux-gnu-gcc")
    };
    let asked = machine.var(&variable).filter(|value| !value.is_empty());
    let found = match &asked {
        Some(value) => from_variable(value, &path),
        None => on_path(Path::new(&program), &path)
            .map(|program| Driver::new(program, Vec::new()))
            .or_else(|| fallback.map(|zig| Driver::new(zig.to_path_buf(), Vec::new())))
            .filter(|driver| is_program(driver.program())),
    };
    found.ok_or_else(|| CompileError::NoCompiler {
        backend: architecture.to_string(),
        tried: match asked {
            Some(value) => format!("{variable}={} (no such program)", value.to_string_lossy()),
            None => format!(
                "{variable} (not set), {program} (not on PATH), moesaic's own toolchain (not installed)"
            ),
        },
        advice: format!(
            "run `moesaic toolchain install c`, or install Debian's gcc-{}-linux-gnu",
            architecture.replace('_', "-")
        ),
    })
}

fn none(tried: Vec<String>) -> CompileError {
    CompileError::NoCompiler {
        backend: "cpu".to_string(),
        tried: tried.join(", "),
        advice: ADVICE.to_string(),
    }
}

/// Reads a variable that holds a program, possibly with leading arguments such
/// as `ccache gcc`.
fn from_variable(value: &OsString, path: &OsString) -> Option<Driver> {
    if let Some(program) = on_path(Path::new(value), path) {
        return Some(Driver::new(program, Vec::new()));
    }
    let mut words = value.to_str()?.split_whitespace();
    let program = on_path(Path::new(words.next()?), path)?;
    Some(Driver::new(program, words.map(str::to_string).collect()))
}

/// Returns the program as an absolute path, because compiles run in another
/// directory.
fn on_path(program: &Path, path: &OsString) -> Option<PathBuf> {
    if program.components().count() > 1 {
        return std::path::absolute(program)
            .ok()
            .filter(|program| is_program(program));
    }
    std::env::split_paths(path)
        .filter(|dir| dir.is_absolute())
        .map(|dir| dir.join(program))
        .find(|candidate| is_program(candidate))
}

#[cfg(unix)]
fn is_program(path: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt;
    path.metadata()
        .is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
}

#[cfg(not(unix))]
fn is_program(path: &Path) -> bool {
    path.is_file()
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Fake<'a>(&'a [(&'a str, String)]);

    impl SearchSpace for Fake<'_> {
        fn var(&self, name: &str) -> Option<OsString> {
            self.0
                .iter()
                .find(|(key, _)| *key == name)
                .map(|(_, value)| value.into())
        }
    }

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

    fn found(vars: &[(&str, String)], fallback: Option<&Path>) -> Result<String, String> {
        find(&Fake(vars), fallback)
            .map(|driver| {
                driver
                    .program()
                    .file_name()
                    .unwrap()
                    .to_string_lossy()
                    .into_owned()
            })
            .map_err(|error| error.to_string())
    }

    #[test]
    fn the_order_is_kept() {
        let dir = programs(&["mine", "theirs", "gcc", "clang", "spare"]);
        let path = ("PATH", dir.path().display().to_string());
        let mine = ("MOESAIC_CC", "mine".to_string());
        let theirs = ("CC", dir.path().join("theirs").display().to_string());
        assert_eq!(
            found(&[path.clone(), theirs.clone(), mine], None).unwrap(),
            "mine"
        );
        assert_eq!(found(&[path.clone(), theirs], None).unwrap(), "theirs");
        let gone = ("CC", "gone".to_string());
        assert_eq!(found(&[path, gone.clone()], None).unwrap(), "gcc");
        let spare = dir.path().join("spare");
        assert_eq!(found(&[gone], Some(&spare)).unwrap(), "spare");
    }

    #[test]
    fn a_variable_may_hold_arguments() {
        let dir = programs(&["ccache"]);
        let path = ("PATH", dir.path().display().to_string());
        let machine = [path, ("MOESAIC_CC", "ccache gcc -B x".to_string())];
        let driver = find(&Fake(&machine), None).unwrap();
        assert_eq!(driver.leading_args(), ["gcc", "-B", "x"]);
    }

    #[test]
    fn nothing_found_says_what_was_tried_and_what_to_do() {
        let error = found(&[("CC", "icc".to_string())], Some(Path::new("/no/zig"))).unwrap_err();
        for part in [
            "no compiler for `cpu` was found",
            "MOESAIC_CC (not set)",
            "CC=icc (no such program)",
            "clang (not on PATH)",
            "/no/zig (registered, but not there)",
            "moesaic toolchain install c",
        ] {
            assert!(error.contains(part), "{part:?} is not in {error}");
        }
    }

    #[test]
    fn compilers_for_other_machines_are_found_by_name() {
        let dir = programs(&["mips-linux-gnu-gcc", "mine", "zig"]);
        let path = ("PATH", dir.path().display().to_string());
        let find = |architecture, vars: &[(&str, String)], zig: Option<&Path>| {
            let found = find_for(architecture, &Fake(vars), zig);
            let name = |driver: Driver| driver.program().file_name().map(OsString::from);
            found.map(name).map_err(|error| error.to_string())
        };
        let named = |name: &str| Ok(Some(OsString::from(name)));
        let asked = ("MOESAIC_CC_MIPS", "mine".to_string());
        let zig = dir.path().join("zig");
        assert_eq!(
            find("mips", std::slice::from_ref(&path), None),
            named("mips-linux-gnu-gcc")
        );
        assert_eq!(find("mips", &[path.clone(), asked], None), named("mine"));
        assert_eq!(
            find("riscv64", std::slice::from_ref(&path), Some(&zig)),
            named("zig")
        );
        let error = find("riscv64", &[path], None).unwrap_err();
        for part in [
            "MOESAIC_CC_RISCV64",
            "riscv64-linux-gnu-gcc",
            "toolchain install c",
        ] {
            assert!(error.contains(part), "{error}");
        }
    }

    #[test]
    fn a_wrong_moesaic_cc_is_not_passed_over() {
        let dir = programs(&["cc"]);
        let path = ("PATH", dir.path().display().to_string());
        let error = found(&[path, ("MOESAIC_CC", "/no/gcc".to_string())], None).unwrap_err();
        assert!(
            error.contains("MOESAIC_CC=/no/gcc (no such program)"),
            "{error}"
        );
    }
}
