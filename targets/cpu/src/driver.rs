//! Runs a compiler program.

use crate::flags;
use moesaic_kernel::CpuIsa;
use moesaic_target::child::{self, COMPILE, ChildError, QUESTION};
use moesaic_target::{CompileError, CompilerReason, c_compiler, script};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};

/// Names inside the compile directory. They are relative, so neither the binary
/// nor a message holds a path of this machine.
pub(crate) const SOURCE: &str = "kernel.c";
const OBJECT: &str = "kernel.o";
pub(crate) const MAIN: &str = "main.c";
const MAIN_OBJECT: &str = "main.o";
pub(crate) const BINARY: &str = "kernel.so";

/// Variables that would change the output or write files elsewhere.
const CLEARED: [&str; 7] = [
    "CPATH",
    "C_INCLUDE_PATH",
    "DEPENDENCIES_OUTPUT",
    "SUNPRO_DEPENDENCIES",
    "GCC_COMPARE_DEBUG",
    "CCC_OVERRIDE_OPTIONS",
    "CL",
];

/// The product of a build.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// A shared object of `SOURCE`.
    Library,
    /// A static program of `SOURCE` and `MAIN`, without a C library.
    Program,
}

/// A compiler program and its calling convention.
#[derive(Clone, Debug)]
pub(crate) struct Driver {
    program: PathBuf,
    args: Vec<String>,
    kind: Kind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// gcc, clang or anything that takes their options.
    Cc,
    /// The `zig` binary: a clang and a linker for every architecture in one.
    Zig,
}

impl Driver {
    /// Makes a driver of `program` with `args` before every other argument. A
    /// `zig` needs none.
    pub(crate) fn new(program: PathBuf, args: Vec<String>) -> Driver {
        let is_zig = program.file_stem().is_some_and(|stem| stem == "zig");
        if is_zig && (args.is_empty() || args == ["cc"]) {
            Driver {
                program,
                args: Vec::new(),
                kind: Kind::Zig,
            }
        } else {
            Driver {
                program,
                args,
                kind: Kind::Cc,
            }
        }
    }

    pub(crate) fn program(&self) -> &Path {
        &self.program
    }

    pub(crate) fn leading_args(&self) -> &[String] {
        &self.args
    }

    /// Returns a word for the scripts through which the compiler is called.
    pub(crate) fn scripts(&self) -> Option<String> {
        script::scripts(&self.program, &self.args)
    }

    /// Returns the program and its leading arguments, as a person would type
    /// them.
    pub(crate) fn spelling(&self) -> String {
        let mut words = vec![self.program.display().to_string()];
        words.extend_from_slice(&self.args);
        words.join(" ")
    }

    /// Returns true if the program compiles for every machine.
    pub(crate) fn is_universal(&self) -> bool {
        self.kind == Kind::Zig
    }

    /// Returns the machine that the program compiles for, if it is not this
    /// one, from the name of the cross compiler: `aarch64-linux-gnu-gcc`.
    pub(crate) fn foreign_machine(&self) -> Option<&'static str> {
        let name = self.program.file_name()?.to_str()?;
        let machine = ["aarch64", "x86_64"]
            .into_iter()
            .find(|machine| name.starts_with(&format!("{machine}-linux-")));
        machine.filter(|machine| *machine != std::env::consts::ARCH)
    }

    /// Asks for product, version and machine; returns one line without paths.
    pub(crate) fn version(&self) -> Option<String> {
        let args: &[&str] = match self.kind {
            Kind::Cc => &["-v"],
            Kind::Zig => &["version"],
        };
        let done = child::run(&mut self.command(None, args), QUESTION).ok()?;
        let text = done.said();
        match self.kind {
            Kind::Zig if done.status.success() => Some(format!("zig {}", text.trim())),
            Kind::Cc if done.status.success() => c_compiler::version_line(&text),
            _ => None,
        }
    }

    /// Builds the texts in `dir` into `BINARY`; returns the compiler's output.
    pub(crate) fn build(&self, dir: &Path, isa: CpuIsa, form: Form) -> Result<String, Failure> {
        let mut log = String::new();
        for args in self.steps(isa, form) {
            let done = child::run(&mut self.command(Some(dir), &args), COMPILE);
            let done = done.map_err(Failure::NotRun)?;
            log.push_str(&done.said());
            if !done.status.success() {
                return Err(Failure::Exited(done.status, log));
            }
        }
        Ok(log)
    }

    fn steps(&self, isa: CpuIsa, form: Form) -> Vec<Vec<String>> {
        let flags = flags::compile_flags(isa);
        match self.kind {
            Kind::Cc => vec![cc_step(&flags, form)],
            Kind::Zig => zig_steps(&flags, isa, form),
        }
    }

    fn command<S: AsRef<OsStr>>(&self, dir: Option<&Path>, args: &[S]) -> Command {
        let mut command = Command::new(&self.program);
        command.args(&self.args).args(args).env("LC_ALL", "C");
        for name in CLEARED {
            command.env_remove(name);
        }
        if let Some(dir) = dir {
            // The compiler's temporary files go where they are removed even
            // when it is killed.
            command.current_dir(dir).env("TMPDIR", dir);
        }
        command
    }
}

fn words(args: &[&str]) -> Vec<String> {
    args.iter().map(ToString::to_string).collect()
}

/// Compiles and links in one call.
fn cc_step(flags: &[&str], form: Form) -> Vec<String> {
    let mut args = words(flags);
    args.extend(words(&["-pipe", "-o", BINARY, SOURCE]));
    args.extend(match form {
        Form::Library => words(&["-shared"]),
        Form::Program => words(&[MAIN, "-static", "-nostdlib", "-fno-stack-protector"]),
    });
    if cfg!(target_os = "linux") {
        args.push("-Wl,--build-id=none".to_string());
    }
    args
}

/// Compiles each text, then links.
fn zig_steps(flags: &[&str], isa: CpuIsa, form: Form) -> Vec<Vec<String>> {
    let compile = |text, object| {
        let mut args = words(&["clang", "-c", "-o", object, text]);
        args.extend(words(flags));
        args.push(format!("--target={}-linux-gnu", flags::arch_of(isa)));
        args
    };
    let kernel = compile(SOURCE, OBJECT);
    let link = |args: &[&str]| words(&[&["ld.lld", "-o", BINARY, OBJECT], args].concat());
    match form {
        Form::Library => vec![kernel, link(&["-shared"])],
        Form::Program => vec![
            kernel,
            compile(MAIN, MAIN_OBJECT),
            link(&["-static", MAIN_OBJECT]),
        ],
    }
}

/// A build without a binary.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The program could not be started, or did not end.
    NotRun(ChildError),
    /// The program failed with this output.
    Exited(ExitStatus, String),
}

impl Failure {
    /// Returns the error to report for kernel `kernel`.
    pub(crate) fn into_error(self, who: &str, kernel: &str, isa: CpuIsa) -> CompileError {
        let compiler = who.to_string();
        let failed = |reason| CompileError::Failed {
            compiler: compiler.clone(),
            kernel: kernel.to_string(),
            reason,
        };
        let target = moesaic_kernel::Target::Cpu(isa).to_string();
        match self {
            Failure::NotRun(error) => failed(error.into()),
            Failure::Exited(status, log) => match Verdict::of(status, &log) {
                Verdict::Crashed(how) => failed(CompilerReason::Crashed {
                    how,
                    log: c_compiler::trim(&log),
                }),
                Verdict::NoRoom => failed(CompilerReason::NoRoom {
                    log: c_compiler::trim(&log),
                }),
                Verdict::UnknownFlag => {
                    let advice = format!(
                        "use a newer compiler, or a narrower target\n{}",
                        c_compiler::trim(&log)
                    );
                    CompileError::UnsupportedTarget {
                        compiler,
                        target,
                        advice,
                    }
                }
                Verdict::Silent => failed(CompilerReason::Silent { status }),
                Verdict::Rejected => {
                    let kernel = kernel.to_string();
                    CompileError::Rejected {
                        compiler,
                        kernel,
                        target,
                        log: c_compiler::trim(&log),
                    }
                }
            },
        }
    }
}

/// The reason that a compiler failed, as far as its output tells.
enum Verdict {
    Crashed(String),
    NoRoom,
    UnknownFlag,
    Silent,
    Rejected,
}

impl Verdict {
    fn of(status: ExitStatus, log: &str) -> Verdict {
        let says = |words: &[&str]| words.iter().any(|word| log.contains(word));
        if says(&[
            "No space left",
            "Disk quota exceeded",
            "emporary file",
            "annot allocate memory",
        ]) {
            Verdict::NoRoom
        } else if let Some(signal) = signal(status) {
            Verdict::Crashed(format!("it was killed by signal {signal}"))
        } else if says(&["internal compiler error", "PLEASE submit a bug report"]) {
            Verdict::Crashed("it crashed".to_string())
        } else if says(&[
            "cannot execute",
            "error trying to exec",
            "posix_spawn failed",
        ]) {
            Verdict::Crashed("its installation is incomplete".to_string())
        } else if says(&[
            "unrecognized command",
            "unknown argument",
            "unsupported option",
        ]) {
            Verdict::UnknownFlag
        } else if log.trim().is_empty() {
            Verdict::Silent
        } else {
            Verdict::Rejected
        }
    }
}

#[cfg(unix)]
fn signal(status: ExitStatus) -> Option<i32> {
    use std::os::unix::process::ExitStatusExt;
    status.signal()
}

#[cfg(not(unix))]
fn signal(_: ExitStatus) -> Option<i32> {
    None
}
