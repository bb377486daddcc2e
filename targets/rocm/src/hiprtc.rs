//! HIPRTC, the compiler inside a ROCm runtime, always in a child process.
//!
//! HIPRTC aborts on architectures that it does not know, so this process never
//! loads it: the program starts itself again, and [`maybe_run_child`] does the
//! work in the copy. A program whose `main` does not call that function first
//! gets no HIPRTC.

use crate::clang::{COMMON, OUTPUT, UNROLL};
use moesaic_dl::{DlError, Library, dl_table};
use moesaic_kernel::RocmArch;
use moesaic_target::child::{self, ChildError, QUESTION};
use object::{Object, ObjectSection};
use std::ffi::{CStr, CString, OsString, c_char, c_int, c_void};
use std::io;
use std::path::PathBuf;
use std::process::Command;
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};

/// The variable that tells a process that it is a child, and its task.
const ROLE: &str = "MOESAIC_HIPRTC_CHILD";

/// The variable that names the library, in place of the search.
const LIBRARY: &str = "MOESAIC_HIPRTC";

/// The library's names; ROCm 5 has its functions in the HIP runtime.
const NAMES: [&str; 5] = [
    "libhiprtc.so.7",
    "libhiprtc.so.6",
    "libhiprtc.so",
    "libamdhip64.so.6",
    "libamdhip64.so",
];

/// The word before the name of the inner clang in a child's output.
const MARK: &str = "moesaic-hiprtc ";

/// The text whose compile reveals that name; the first architecture is one that
/// every such HIPRTC knows.
const NOTHING: &CStr = c"extern \"C\" __attribute__((global)) void nothing() {}\n";
const FIRST: &str = "gfx90a";

/// HIPRTC's code for a program that does not compile.
const COMPILATION: c_int = 6;

/// Exit codes of a child.
const REJECTED: i32 = 1;
const BROKEN: i32 = 3;

static HOOKED: AtomicBool = AtomicBool::new(false);

type Program = *mut c_void;

dl_table! {
    /// The functions of HIPRTC, as its header declares them.
    struct Functions {
        create: fn(
            program: *mut Program,
            text: *const c_char,
            name: *const c_char,
            header_count: c_int,
            headers: *const *const c_char,
            header_names: *const *const c_char,
        ) -> c_int = "hiprtcCreateProgram";
        compile: fn(program: Program, count: c_int, options: *const *const c_char) -> c_int
            = "hiprtcCompileProgram";
        log_size: fn(program: Program, bytes: *mut usize) -> c_int = "hiprtcGetProgramLogSize";
        log: fn(program: Program, log: *mut c_char) -> c_int = "hiprtcGetProgramLog";
        code_size: fn(program: Program, bytes: *mut usize) -> c_int = "hiprtcGetCodeSize";
        code: fn(program: Program, code: *mut c_char) -> c_int = "hiprtcGetCode";
    }
}

/// A HIPRTC and the version of its clang. `hiprtcVersion` is 9.0 in every ROCm,
/// so the version comes from the code objects that it makes: their `.comment`
/// names vendor, release and revision.
#[derive(Clone, Debug)]
pub struct Hiprtc {
    program: PathBuf,
    /// `AMD clang version 17.0.0 roc-6.0.2 24012 af27734ed982`.
    clang: String,
    /// First number of the version.
    release: u32,
}

/// The reason that there is no HIPRTC.
#[derive(Debug, thiserror::Error)]
pub enum HiprtcError {
    #[error("this program does not call `maybe_run_child` first")]
    NotHooked,
    /// The system does not name this program, or has no folder for its output.
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error(transparent)]
    Child(#[from] ChildError),
    /// The child found no library, or the library failed.
    #[error("the child {ending}: {words}")]
    Ended { ending: String, words: String },
    #[error("the child does not say which clang it is")]
    NoName,
    #[error("`{clang}` has no release")]
    NoRelease { clang: String },
}

/// Does a child's work and ends the process, if a
/// [`RocmCompiler`](crate::RocmCompiler) started this process as one; else
/// returns at once.
///
/// Call it first in `main`. HIPRTC is not used otherwise, because a program
/// that is started again without knowing would do its own work twice.
pub fn maybe_run_child() {
    HOOKED.store(true, Ordering::Relaxed);
    let Some(role) = std::env::var_os(ROLE) else {
        return;
    };
    let args = std::env::args_os().skip(1).collect::<Vec<_>>();
    let done = match role.to_str() {
        Some("name") => print_name(),
        Some("compile") => compile(&args),
        _ => Err((BROKEN, format!("{ROLE} has an unknown value"))),
    };
    if let Err((code, words)) = done {
        eprintln!("{words}");
        std::process::exit(code);
    }
    std::process::exit(0);
}

impl Hiprtc {
    /// Starts a child to ask for the version of the clang.
    pub fn ask() -> Result<Hiprtc, HiprtcError> {
        if !HOOKED.load(Ordering::Relaxed) {
            return Err(HiprtcError::NotHooked);
        }
        let program = std::env::current_exe()?;
        let done = child::run(Command::new(&program).env(ROLE, "name"), QUESTION)?;
        if !done.status.success() {
            return Err(HiprtcError::Ended {
                ending: child::ending(done.status),
                words: done.stderr.trim().to_string(),
            });
        }
        let clang = read_name(&done.stdout).ok_or(HiprtcError::NoName)?;
        let Some(release) = release(&clang) else {
            return Err(HiprtcError::NoRelease { clang });
        };
        Ok(Hiprtc {
            program,
            clang,
            release,
        })
    }

    /// Returns the program that is started again.
    pub fn program(&self) -> &PathBuf {
        &self.program
    }

    /// Returns the version as people write it: `HIPRTC of AMD clang 17.0.0`.
    pub fn name(&self) -> String {
        let (vendor, version) = self.clang.split_once("clang version ").unwrap_or_default();
        let version = version.split(' ').next().unwrap_or_default();
        format!("HIPRTC of {vendor}clang {version}")
    }

    /// Returns true if the clang in the first ROCm for `arch` is not newer: HIPRTC has no list.
    pub fn knows(&self, arch: RocmArch) -> bool {
        self.release >= arch.caps().clang
    }

    pub fn fingerprint(&self, arch: RocmArch) -> String {
        format!("HIPRTC of {} {}", self.clang, flags(arch.name).join(" "))
    }

    /// Returns the command that compiles `file` of its working folder to
    /// [`OUTPUT`].
    pub fn command(&self, arch: RocmArch, file: &str) -> Command {
        let mut command = Command::new(&self.program);
        command
            .env(ROLE, "compile")
            .arg(file)
            .args(flags(arch.name));
        command
    }
}

fn flags(arch: &str) -> Vec<String> {
    std::iter::once(format!("--offload-arch={arch}"))
        .chain(COMMON.map(str::to_string))
        .chain(UNROLL.map(str::to_string))
        .collect()
}

/// Finds the marked line, because the runtime may print to the same stream.
fn read_name(text: &str) -> Option<String> {
    let name = text.lines().find_map(|line| line.strip_prefix(MARK))?;
    Some(name.to_string())
}

/// Returns 17 from `AMD clang version 17.0.0 …`.
fn release(clang: &str) -> Option<u32> {
    let (_, version) = clang.split_once("clang version ")?;
    version.split('.').next()?.parse().ok()
}

/// Returns the clang that made a code object, in its own words but without the
/// path of its source, which has no place in a cache key.
fn maker(code_object: &[u8]) -> Option<String> {
    let elf = object::File::parse(code_object).ok()?;
    let comment = elf.section_by_name(".comment")?.data().ok()?;
    let mut lines = comment
        .split(|byte| *byte == 0)
        .map(String::from_utf8_lossy);
    let line = lines.find(|line| line.contains("clang version "))?;
    let words = line.split_whitespace().filter(|word| !word.contains('/'));
    let words = words.map(|word| word.trim_matches(['(', ')']));
    Some(words.collect::<Vec<_>>().join(" "))
}

/// A failure of a child: its exit code, and a message for its parent.
type Failure = (i32, String);

fn broken(words: impl ToString) -> Failure {
    (BROKEN, words.to_string())
}

fn functions() -> Result<Functions, Failure> {
    let library = match std::env::var_os(LIBRARY).filter(|path| !path.is_empty()) {
        Some(path) => Library::open("HIPRTC", &[path]),
        None => Library::open("HIPRTC", &candidates()),
    };
    let load = |library| -> Result<Functions, DlError> {
        // SAFETY: the signatures are those of hiprtc.h.
        unsafe { Functions::load(library) }
    };
    library.and_then(load).map_err(broken)
}

fn candidates() -> Vec<OsString> {
    let root = std::env::var_os("ROCM_PATH").filter(|root| !root.is_empty());
    let roots = root.into_iter().chain([OsString::from("/opt/rocm")]);
    let files = roots.map(|root| {
        PathBuf::from(root)
            .join("lib/libhiprtc.so")
            .into_os_string()
    });
    NAMES.map(OsString::from).into_iter().chain(files).collect()
}

fn print_name() -> Result<(), Failure> {
    let flags = flags(FIRST).into_iter().map(OsString::from);
    let flags = flags
        .map(|flag| c_string(&flag))
        .collect::<Result<Vec<_>, _>>()?;
    let binary = build(&functions()?, NOTHING, c"nothing.hip", &flags)?;
    let maker = maker(&binary).ok_or_else(|| broken("its code objects do not name their clang"))?;
    println!("{MARK}{maker}");
    Ok(())
}

fn check(function: &str, code: c_int) -> Result<(), Failure> {
    match code {
        0 => Ok(()),
        code => Err(broken(format!("{function} failed with code {code}"))),
    }
}

/// Compiles; the arguments are the file, then the flags.
fn compile(args: &[OsString]) -> Result<(), Failure> {
    let [file, flags @ ..] = args else {
        return Err(broken("no file was named"));
    };
    let text = std::fs::read(file).map_err(broken)?;
    let text = CString::new(text).map_err(broken)?;
    let name = c_string(file)?;
    let flags = flags.iter().map(c_string).collect::<Result<Vec<_>, _>>()?;
    let binary = build(&functions()?, &text, &name, &flags)?;
    std::fs::write(OUTPUT, binary).map_err(broken)
}

/// Returns a code object; the compiler's output goes to the error stream.
fn build(
    functions: &Functions,
    text: &CStr,
    name: &CStr,
    flags: &[CString],
) -> Result<Vec<u8>, Failure> {
    let mut program = ptr::null_mut();
    // SAFETY: both strings live through the call; there are no headers.
    let code = unsafe {
        functions.create(
            &mut program,
            text.as_ptr(),
            name.as_ptr(),
            0,
            ptr::null(),
            ptr::null(),
        )
    };
    check("hiprtcCreateProgram", code)?;
    let pointers = flags.iter().map(|flag| flag.as_ptr()).collect::<Vec<_>>();
    let count = c_int::try_from(pointers.len()).unwrap_or(c_int::MAX);
    // SAFETY: the program is live, and the flags live through the call.
    let code = unsafe { functions.compile(program, count, pointers.as_ptr()) };
    let log = read(functions, program, Functions::log_size, Functions::log)?;
    let log = String::from_utf8_lossy(&log)
        .trim_end_matches('\0')
        .to_string();
    match code {
        0 => eprint!("{log}"),
        COMPILATION => return Err((REJECTED, log)),
        code => {
            return Err(broken(format!(
                "hiprtcCompileProgram failed with code {code}\n{log}"
            )));
        }
    }
    // The program is not destroyed, because the process ends soon.
    read(functions, program, Functions::code_size, Functions::code)
}

fn c_string(text: &OsString) -> Result<CString, Failure> {
    CString::new(text.as_encoded_bytes()).map_err(broken)
}

/// Reads a result whose size is asked for first.
fn read(
    functions: &Functions,
    program: Program,
    size: unsafe fn(&Functions, Program, *mut usize) -> c_int,
    fetch: unsafe fn(&Functions, Program, *mut c_char) -> c_int,
) -> Result<Vec<u8>, Failure> {
    let mut bytes = 0;
    // SAFETY: the program is live, the pointer valid for a write.
    check("a size query", unsafe {
        size(functions, program, &mut bytes)
    })?;
    let mut buffer = vec![0u8; bytes];
    if bytes > 0 {
        // SAFETY: the buffer has the size that was just asked for.
        check("a read", unsafe {
            fetch(functions, program, buffer.as_mut_ptr().cast())
        })?;
    }
    Ok(buffer)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_has_a_release_and_no_place() {
        let named = |clang: &str| Hiprtc {
            program: PathBuf::new(),
            clang: clang.to_string(),
            release: release(clang).unwrap(),
        };
        let amd = named("AMD clang version 18.0.0git roc-6.3.1 24491 1e0fda770a2079fb");
        assert_eq!(amd.name(), "HIPRTC of AMD clang 18.0.0git");
        assert_eq!(
            named("clang version 19.1.7").name(),
            "HIPRTC of clang 19.1.7"
        );
        assert_eq!(release("gcc 12"), None);
        assert_eq!(maker(b"no ELF file"), None);
    }
}
