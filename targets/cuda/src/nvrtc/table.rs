//! The NVRTC functions in use, with a safe interface.

use moesaic_dl::{DlError, Library, dl_table};
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::ptr;

type Program = *mut c_void;

dl_table! {
    /// The functions of NVRTC, as its header declares them.
    struct Functions {
        version: fn(major: *mut c_int, minor: *mut c_int) -> c_int = "nvrtcVersion";
        arch_count: fn(count: *mut c_int) -> c_int = "nvrtcGetNumSupportedArchs";
        archs: fn(archs: *mut c_int) -> c_int = "nvrtcGetSupportedArchs";
        error_string: fn(code: c_int) -> *const c_char = "nvrtcGetErrorString";
        create: fn(
            program: *mut Program,
            text: *const c_char,
            name: *const c_char,
            header_count: c_int,
            headers: *const *const c_char,
            header_names: *const *const c_char,
        ) -> c_int = "nvrtcCreateProgram";
        compile: fn(program: Program, count: c_int, options: *const *const c_char) -> c_int
            = "nvrtcCompileProgram";
        log_size: fn(program: Program, bytes: *mut usize) -> c_int = "nvrtcGetProgramLogSize";
        log: fn(program: Program, log: *mut c_char) -> c_int = "nvrtcGetProgramLog";
        cubin_size: fn(program: Program, bytes: *mut usize) -> c_int = "nvrtcGetCUBINSize";
        cubin: fn(program: Program, cubin: *mut c_char) -> c_int = "nvrtcGetCUBIN";
        ptx_size: fn(program: Program, bytes: *mut usize) -> c_int = "nvrtcGetPTXSize";
        ptx: fn(program: Program, ptx: *mut c_char) -> c_int = "nvrtcGetPTX";
        destroy: fn(program: *mut Program) -> c_int = "nvrtcDestroyProgram";
    }
}

/// NVRTC's code for a program that does not compile.
const COMPILATION: c_int = 6;

/// Reads the size of a result, or the result itself.
type Size = unsafe fn(&Functions, Program, *mut usize) -> c_int;
type Fetch = unsafe fn(&Functions, Program, *mut c_char) -> c_int;

/// A loaded NVRTC. Its functions may be called from any thread.
pub struct Nvrtc {
    functions: Functions,
}

/// The result of a compile.
pub struct Compiled {
    pub cubin: Vec<u8>,
    pub log: String,
}

/// The reason that a compile failed.
pub enum NvrtcFailure {
    /// NVRTC rejected the text; the log says why.
    Rejected(String),
    /// Any other failure.
    Broken(NvrtcError),
}

/// A call of NVRTC that failed.
#[derive(Debug, thiserror::Error)]
pub enum NvrtcError {
    /// NVRTC returned an error code.
    #[error("{}", words(*code, text.as_deref()))]
    Code {
        /// The code.
        code: c_int,
        /// NVRTC's own name for it.
        text: Option<String>,
    },
    /// The same, while it compiled.
    #[error("{error}\n{log}")]
    Logged {
        /// NVRTC's error.
        #[source]
        error: Box<NvrtcError>,
        /// The log, which often says more.
        log: String,
    },
    /// A text cannot be given to a library of C.
    #[error("the text holds a NUL character")]
    Nul,
}

fn words(code: c_int, text: Option<&str>) -> String {
    match text {
        Some(text) => format!("{text} ({code})"),
        None => format!("NVRTC error {code}"),
    }
}

impl Nvrtc {
    /// Looks the functions up in an opened library.
    pub fn load(library: Library) -> Result<Nvrtc, DlError> {
        // SAFETY: the signatures are those of nvrtc.h, unchanged since the
        // release that added the newest of them, nvrtcGetCUBIN in 11.1.
        let functions = unsafe { Functions::load(library)? };
        Ok(Nvrtc { functions })
    }

    /// Returns the name or path by which it was loaded.
    pub fn library(&self) -> &str {
        self.functions.library()
    }

    /// Returns the major and minor version.
    pub(super) fn version(&self) -> Result<(u32, u32), NvrtcError> {
        let (mut major, mut minor) = (0, 0);
        // SAFETY: both pointers are valid for a write.
        self.check(unsafe { self.functions.version(&mut major, &mut minor) })?;
        Ok((major.unsigned_abs(), minor.unsigned_abs()))
    }

    /// Returns the compute capabilities that it compiles for, times ten.
    pub(super) fn archs(&self) -> Result<Vec<u16>, NvrtcError> {
        let mut count = 0;
        // SAFETY: the pointer is valid for a write.
        self.check(unsafe { self.functions.arch_count(&mut count) })?;
        let mut archs = vec![0; usize::try_from(count).unwrap_or(0)];
        // SAFETY: the array has as many elements as NVRTC has just said.
        self.check(unsafe { self.functions.archs(archs.as_mut_ptr()) })?;
        Ok(archs
            .into_iter()
            .filter_map(|arch| u16::try_from(arch).ok())
            .collect())
    }

    /// Compiles `text` to a CUBIN. Messages contain `name`.
    pub fn compile(
        &self,
        name: &str,
        text: &str,
        flags: &[String],
    ) -> Result<Compiled, NvrtcFailure> {
        let program = self.program(name, text).map_err(NvrtcFailure::Broken)?;
        program.compile(flags)?;
        let log = program.log().map_err(NvrtcFailure::Broken)?;
        let cubin = program
            .read(Functions::cubin_size, Functions::cubin)
            .map_err(NvrtcFailure::Broken)?;
        Ok(Compiled { cubin, log })
    }

    /// Compiles `text` to PTX, the assembly from which a CUBIN is made.
    pub fn ptx(&self, name: &str, text: &str, flags: &[String]) -> Result<String, NvrtcFailure> {
        let program = self.program(name, text).map_err(NvrtcFailure::Broken)?;
        program.compile(flags)?;
        let bytes = program
            .read(Functions::ptx_size, Functions::ptx)
            .map_err(NvrtcFailure::Broken)?;
        Ok(until_nul(&bytes))
    }

    fn program(&self, name: &str, text: &str) -> Result<Loaded<'_>, NvrtcError> {
        let text = c_string(text)?;
        let name = c_string(name)?;
        let mut program = ptr::null_mut();
        // SAFETY: both strings live through the call, which copies them;
        // there are no headers.
        self.check(unsafe {
            self.functions.create(
                &mut program,
                text.as_ptr(),
                name.as_ptr(),
                0,
                ptr::null(),
                ptr::null(),
            )
        })?;
        Ok(Loaded {
            nvrtc: self,
            program,
        })
    }

    fn check(&self, code: c_int) -> Result<(), NvrtcError> {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: NVRTC answers any code with a static string.
        let text = unsafe { self.functions.error_string(code) };
        if text.is_null() {
            return Err(NvrtcError::Code { code, text: None });
        }
        // SAFETY: not null, so a NUL-terminated string that is never freed.
        let text = unsafe { CStr::from_ptr(text) };
        let text = Some(text.to_string_lossy().into_owned());
        Err(NvrtcError::Code { code, text })
    }
}

/// A program that is destroyed on drop.
struct Loaded<'a> {
    nvrtc: &'a Nvrtc,
    program: Program,
}

impl Loaded<'_> {
    fn compile(&self, flags: &[String]) -> Result<(), NvrtcFailure> {
        let flags = flags
            .iter()
            .map(|flag| c_string(flag))
            .collect::<Result<Vec<_>, _>>()
            .map_err(NvrtcFailure::Broken)?;
        let pointers = flags.iter().map(|flag| flag.as_ptr()).collect::<Vec<_>>();
        let count = c_int::try_from(pointers.len()).unwrap_or(c_int::MAX);
        // SAFETY: the program is live and used by this thread alone; the
        // flags live through the call.
        let code = unsafe {
            self.nvrtc
                .functions
                .compile(self.program, count, pointers.as_ptr())
        };
        match code {
            COMPILATION => Err(NvrtcFailure::Rejected(self.log().unwrap_or_default())),
            code => self.nvrtc.check(code).map_err(|error| self.broken(error)),
        }
    }

    /// Returns the failure for a code, with the log, which often says more than
    /// NVRTC's terse message.
    fn broken(&self, error: NvrtcError) -> NvrtcFailure {
        match self.log() {
            Ok(log) if !log.trim().is_empty() => NvrtcFailure::Broken(NvrtcError::Logged {
                error: Box::new(error),
                log: log.trim().to_string(),
            }),
            _ => NvrtcFailure::Broken(error),
        }
    }

    fn log(&self) -> Result<String, NvrtcError> {
        let bytes = self.read(Functions::log_size, Functions::log)?;
        Ok(until_nul(&bytes))
    }

    fn read(&self, size: Size, fetch: Fetch) -> Result<Vec<u8>, NvrtcError> {
        let functions = &self.nvrtc.functions;
        let mut bytes = 0;
        // SAFETY: the program is live, the pointer valid for a write.
        let code = unsafe { size(functions, self.program, &mut bytes) };
        self.nvrtc.check(code)?;
        let mut buffer = vec![0u8; bytes];
        if bytes > 0 {
            // SAFETY: the buffer has the size NVRTC has just asked for.
            let code = unsafe { fetch(functions, self.program, buffer.as_mut_ptr().cast()) };
            self.nvrtc.check(code)?;
        }
        Ok(buffer)
    }
}

impl Drop for Loaded<'_> {
    fn drop(&mut self) {
        // SAFETY: created by this NVRTC and destroyed once.
        unsafe { self.nvrtc.functions.destroy(&mut self.program) };
    }
}

fn c_string(text: &str) -> Result<CString, NvrtcError> {
    CString::new(text).map_err(|_| NvrtcError::Nul)
}

/// Returns the text before the terminating NUL, which NVRTC counts.
fn until_nul(bytes: &[u8]) -> String {
    let end = bytes
        .iter()
        .position(|byte| *byte == 0)
        .unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).into_owned()
}
