//! HIPRTC, the compiler inside a ROCm run time, always in a child process.
//!
//! HIPRTC aborts on architectures it does not know, so it is never loaded
//! here: the program starts itself over, and [`maybe_run_child`] does the work
//! in the copy. A program whose `main` does not call it first gets no HIPRTC.

use crate::child;
use crate::clang::{COMMON, OUTPUT};
use moesaic_dl::{DlError, Library, dl_table};
use moesaic_kernel::RocmArch;
use std::ffi::{CString, OsString, c_char, c_int, c_void};
use std::path::PathBuf;
use std::process::Command;
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Tells a process that it is a child, and what to do.
const ROLE: &str = "MOESAIC_HIPRTC_CHILD";

/// Names the library, in place of the search.
const LIBRARY: &str = "MOESAIC_HIPRTC";

/// The library's names; ROCm 5 has its functions in the HIP run time.
const NAMES: [&str; 5] = [
    "libhiprtc.so.7",
    "libhiprtc.so.6",
    "libhiprtc.so",
    "libamdhip64.so.6",
    "libamdhip64.so",
];

/// Before the version in a child's output.
const MARK: &str = "moesaic-hiprtc ";

/// HIPRTC's code for a program that does not compile.
const COMPILATION: c_int = 6;

/// Exit codes of a child.
const REJECTED: i32 = 1;
const BROKEN: i32 = 3;

/// How long the question for the version may take.
const ASK: Duration = Duration::from_secs(20);

static HOOKED: AtomicBool = AtomicBool::new(false);

type Program = *mut c_void;

dl_table! {
    /// HIPRTC, as its header declares it.
    struct Functions {
        version: fn(major: *mut c_int, minor: *mut c_int) -> c_int = "hiprtcVersion";
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

/// A HIPRTC that has said its version.
#[derive(Clone, Debug)]
pub struct Hiprtc {
    program: PathBuf,
    version: (u32, u32),
}

/// Does a child's work and ends the process, if this process was started as
/// one by a [`RocmCompiler`](crate::RocmCompiler); else returns at once.
///
/// Call it first in `main`. Where it is not called, HIPRTC is not used: a
/// program that is started over and does not know it would do its own work
/// twice.
pub fn maybe_run_child() {
    HOOKED.store(true, Ordering::Relaxed);
    let Some(role) = std::env::var_os(ROLE) else {
        return;
    };
    let args = std::env::args_os().skip(1).collect::<Vec<_>>();
    let done = match role.to_str() {
        Some("version") => print_version(),
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
    /// Starts a child to ask for the version.
    pub fn ask() -> Result<Hiprtc, String> {
        if !HOOKED.load(Ordering::Relaxed) {
            return Err("this program does not call `maybe_run_child` first".to_string());
        }
        let program = std::env::current_exe().map_err(|error| error.to_string())?;
        let folder = tempfile::tempdir().map_err(|error| error.to_string())?;
        let done = child::run(
            Command::new(&program).env(ROLE, "version"),
            folder.path(),
            ASK,
        )?;
        if !done.status.success() {
            return Err(format!(
                "the child {}: {}",
                child::ending(done.status),
                done.stderr.trim()
            ));
        }
        let version = read_version(&done.stdout).ok_or("it does not say its version")?;
        Ok(Hiprtc { program, version })
    }

    /// The program that is started over.
    pub fn program(&self) -> &PathBuf {
        &self.program
    }

    pub fn name(&self) -> String {
        format!("HIPRTC {}.{}", self.version.0, self.version.1)
    }

    /// The list is of what each release was made for: HIPRTC has no list.
    pub fn knows(&self, arch: RocmArch) -> bool {
        let since = match arch.name {
            "gfx950" => (7, 0),
            "gfx1200" | "gfx1201" => (6, 4),
            "gfx942" | "gfx1100" | "gfx1101" => (6, 0),
            _ => (5, 0),
        };
        self.version >= since
    }

    pub fn fingerprint(&self, arch: RocmArch) -> String {
        format!("{} {}", self.name(), flags(arch).join(" "))
    }

    /// The command that compiles `file` of its working folder to [`OUTPUT`].
    pub fn command(&self, arch: RocmArch, file: &str) -> Command {
        let mut command = Command::new(&self.program);
        command.env(ROLE, "compile").arg(file).args(flags(arch));
        command
    }
}

fn flags(arch: RocmArch) -> Vec<String> {
    std::iter::once(format!("--offload-arch={}", arch.name))
        .chain(COMMON.map(str::to_string))
        .collect()
}

/// The run time may talk on the same stream, so the line is marked.
fn read_version(text: &str) -> Option<(u32, u32)> {
    let version = text.lines().find_map(|line| line.strip_prefix(MARK))?;
    let (major, minor) = version.split_once('.')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

/// What a child could not do: its exit code, and words for its parent.
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

fn print_version() -> Result<(), Failure> {
    let functions = functions()?;
    let (mut major, mut minor) = (0, 0);
    // SAFETY: both pointers are valid for a write.
    check("hiprtcVersion", unsafe {
        functions.version(&mut major, &mut minor)
    })?;
    println!("{MARK}{major}.{minor}");
    Ok(())
}

fn check(function: &str, code: c_int) -> Result<(), Failure> {
    match code {
        0 => Ok(()),
        code => Err(broken(format!("{function} failed with code {code}"))),
    }
}

/// Arguments: the file, then the flags.
fn compile(args: &[OsString]) -> Result<(), Failure> {
    let [file, flags @ ..] = args else {
        return Err(broken("no file was named"));
    };
    let text = std::fs::read(file).map_err(broken)?;
    let text = CString::new(text).map_err(broken)?;
    let name = c_string(file)?;
    let flags = flags.iter().map(c_string).collect::<Result<Vec<_>, _>>()?;
    let functions = functions()?;
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
    let log = read(&functions, program, Functions::log_size, Functions::log)?;
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
    let binary = read(&functions, program, Functions::code_size, Functions::code)?;
    // The program is not destroyed: the process ends now.
    std::fs::write(OUTPUT, binary).map_err(broken)
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
