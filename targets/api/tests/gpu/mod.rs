//! One suite for every target that builds a GPU on a driver. It runs against a stand-in for the
//! driver, which the system C compiler builds.
//!
//! The loader's path, read at process start, selects the driver. So each case runs in its own
//! process: this program, restarted with `CASE` set. Afterwards the stand-in's log must show no
//! illegal call and no leaked resource.

mod capture;
mod faults;
mod launches;
mod streams;

use moesaic_kernel::{Access, DType, Entry, Launch, Param, ParamType, Scalar, Size};
use moesaic_target::{
    Arg, Artifact, ArtifactReport, Buffer, Device, DeviceError, FunctionId, LaunchDims, Module,
    Ptr, StreamDevice,
};
use std::ffi::c_void;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

/// A device, or the reason there is none.
pub type Opened = Result<Arc<dyn Device>, DeviceError>;

/// A target under test.
pub struct Harness {
    /// The backend's name in errors.
    pub backend: &'static str,
    /// The stand-in's source, in the target's tests.
    pub fake: &'static str,
    /// The file name the target looks for first.
    pub library: &'static str,
    pub open: fn(usize) -> Opened,
    /// Makes a device on a stream that another owns, which lives longer.
    pub on_handle: fn(usize, *mut c_void) -> Opened,
    pub count: fn() -> Result<usize, DeviceError>,
    /// Returns the driver's name of a function: `launch` is `cuLaunchKernel`.
    pub symbol: fn(&str) -> &'static str,
    /// Compiles the kernel `scale`.
    pub compile: fn() -> Artifact,
    /// Reads the report of a binary.
    pub read: fn(&[u8]) -> ArtifactReport,
    /// The vendor's wording in errors.
    pub words: Words,
    /// Cases that only this target has.
    pub cases: &'static [Case],
}

/// A vendor's wording.
pub struct Words {
    pub illegal_address: &'static str,
    pub out_of_resources: &'static str,
    pub no_device: &'static str,
    pub no_binary: &'static str,
    pub blocking: &'static str,
    /// Its version text.
    pub driver: &'static str,
    pub compiler: &'static str,
    /// The last line of the log, after all lines that the suite expects; or empty.
    pub last: &'static str,
}

/// A case and its driver.
pub struct Case {
    pub name: &'static str,
    pub driver: Driver,
    /// A function that fails, its code, and the number of calls that succeed first.
    pub fail: Option<(&'static str, i32, u32)>,
    pub run: fn(&Harness),
    /// Whether a broken context may leak resources.
    pub may_leak: bool,
}

#[derive(Clone, Copy)]
pub enum Driver {
    Whole,
    /// A driver without this function.
    Lacks(&'static str),
    Absent,
}

impl Case {
    pub const fn new(name: &'static str, run: fn(&Harness)) -> Case {
        Case {
            name,
            driver: Driver::Whole,
            fail: None,
            run,
            may_leak: false,
        }
    }

    pub const fn failing(mut self, function: &'static str, code: i32, skip: u32) -> Case {
        self.fail = Some((function, code, skip));
        self
    }

    pub const fn leaking(mut self) -> Case {
        self.may_leak = true;
        self
    }

    pub const fn on(mut self, driver: Driver) -> Case {
        self.driver = driver;
        self
    }
}

/// Runs the whole test program.
pub fn main(harness: &Harness) {
    let cases = || {
        let common = [
            launches::CASES,
            streams::CASES,
            capture::CASES,
            faults::CASES,
        ];
        common.into_iter().flatten().chain(harness.cases)
    };
    match std::env::var("CASE") {
        Ok(name) if name.starts_with("each ") => faults::whole_life(harness),
        Ok(name) => {
            let mut found = cases().filter(|case| case.name == name);
            (found.next().expect("a case of this name").run)(harness);
        }
        Err(_) => {
            let lab = Lab::new(harness);
            cases().for_each(|case| lab.run(case));
            faults::EACH.iter().for_each(|function| lab.fail(function));
        }
    }
}

/// A builder of stand-ins that runs cases against them.
struct Lab<'a> {
    harness: &'a Harness,
    folder: tempfile::TempDir,
    binary: PathBuf,
}

impl Lab<'_> {
    fn new(harness: &Harness) -> Lab<'_> {
        let folder = tempfile::tempdir().unwrap();
        let binary = folder.path().join("scale.bin");
        std::fs::write(&binary, (harness.compile)().binary).unwrap();
        Lab {
            harness,
            folder,
            binary,
        }
    }

    fn run(&self, case: &Case) {
        let fail = case.fail.map(|(function, code, skip)| {
            let function = (self.harness.symbol)(function);
            format!("{function}:{code}:{skip}")
        });
        let driver = self.driver(case.driver);
        self.child(case.name, &driver, fail.as_deref(), case.may_leak);
    }

    /// Runs a whole life in which every call of this function fails, and one in which all but the
    /// first do.
    fn fail(&self, function: &str) {
        let may_leak = ["free", "destroy", "unload", "synchronize"]
            .iter()
            .any(|part| function.contains(part));
        for skip in 0..2 {
            let fail = format!("{}:1:{skip}", (self.harness.symbol)(function));
            let name = format!("each {function} {skip}");
            let driver = self.driver(Driver::Whole);
            self.child(&name, &driver, Some(&fail), may_leak);
        }
    }

    fn child(&self, name: &str, driver: &Path, fail: Option<&str>, may_leak: bool) {
        let log = self.folder.path().join(format!("{name}.log"));
        let output = Command::new(std::env::current_exe().unwrap())
            .env("CASE", name)
            .env("LD_LIBRARY_PATH", driver)
            .env("ROCM_PATH", "/no/such/folder")
            .env("FAKE_GPU_FAIL", fail.unwrap_or_default())
            .env("FAKE_GPU_LOG", &log)
            .env("BINARY", &self.binary)
            .output()
            .unwrap();
        let log = std::fs::read_to_string(&log).unwrap_or_default();
        let text = [&output.stdout[..], &output.stderr].concat();
        let text = format!("{}\nlog:\n{log}", String::from_utf8_lossy(&text));
        assert!(
            output.status.success(),
            "case {name}: {}\n{text}",
            output.status
        );
        assert!(!log.contains("ILLEGAL"), "case {name}\n{text}");
        assert!(may_leak || !log.contains("LEAKED"), "case {name}\n{text}");
        println!("test {name} ... ok");
    }

    /// Returns the folder of a driver, built at its first use.
    fn driver(&self, driver: Driver) -> PathBuf {
        let (name, flag) = match driver {
            Driver::Whole => ("whole".to_string(), None),
            Driver::Lacks(function) => {
                let symbol = (self.harness.symbol)(function);
                (format!("no_{symbol}"), Some(format!("-D{symbol}=absent")))
            }
            Driver::Absent => ("absent".to_string(), None),
        };
        let folder = self.folder.path().join(name);
        if !folder.exists() {
            std::fs::create_dir(&folder).unwrap();
            match driver {
                Driver::Absent => hide_drivers(&folder),
                _ => self.build(&folder, flag),
            }
        }
        folder
    }

    fn build(&self, folder: &Path, flag: Option<String>) {
        let shared = Path::new(env!("CARGO_MANIFEST_DIR")).join("../api/tests/gpu");
        let status = Command::new("cc")
            .args(["-shared", "-fPIC", "-w", "-o"])
            .arg(folder.join(self.harness.library))
            .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join(self.harness.fake))
            .arg("-I")
            .arg(shared)
            .args(flag)
            .status()
            .expect("the test needs a C compiler named `cc`");
        assert!(status.success(), "cc: {status}");
    }
}

/// Writes files that are no libraries, to hide a driver of the machine.
fn hide_drivers(folder: &Path) {
    for name in [
        "libcuda.so.1",
        "libcuda.so",
        "libamdhip64.so.7",
        "libamdhip64.so.6",
        "libamdhip64.so",
    ] {
        let text = "no library, and long enough to hold an ELF header, which it has not";
        std::fs::write(folder.join(name), text).unwrap();
    }
}

impl Harness {
    pub fn open(&self) -> Arc<dyn Device> {
        (self.open)(0).unwrap_or_else(|error| panic!("{error}"))
    }

    pub fn artifact(&self) -> Artifact {
        let binary = std::fs::read(std::env::var("BINARY").unwrap()).unwrap();
        let report = (self.read)(&binary);
        Artifact { binary, report }
    }

    pub fn load(&self, device: &dyn Device) -> Arc<dyn Module> {
        let loaded = device.load(&self.artifact(), &[entry()]);
        loaded.unwrap_or_else(|error| panic!("{error}"))
    }
}

pub fn streams(device: &dyn Device) -> &dyn StreamDevice {
    device.streams().unwrap_or_else(|error| panic!("{error}"))
}

/// Returns the calls of the stand-in so far.
pub fn log() -> Vec<String> {
    let text = std::fs::read_to_string(std::env::var("FAKE_GPU_LOG").unwrap()).unwrap_or_default();
    text.lines().map(str::to_string).collect()
}

/// Makes this function fail from now on.
pub fn fail(harness: &Harness, function: &str, code: i32) {
    let value = format!("{}:{code}", (harness.symbol)(function));
    // SAFETY: each case is a process with one thread when it calls this.
    unsafe { std::env::set_var("FAKE_GPU_FAIL", value) };
}

pub fn check_error<T>(result: Result<T, DeviceError>, expected: &str) {
    let error = result.err().expect("an error").to_string();
    assert_eq!(error, expected);
}

pub fn check_part<T>(result: Result<T, DeviceError>, part: &str) {
    let error = result.err().expect("an error").to_string();
    assert!(error.contains(part), "{part:?} is not in {error:?}");
}

pub fn entry() -> Entry {
    let float = |name: &str| Param {
        name: name.to_string(),
        ty: ParamType::Scalar(Scalar::F32),
        shape: String::new(),
    };
    let tensor = |name: &str, access| Param::tensor(name, DType::F32, access, "[tokens]");
    Entry {
        symbol: "scale".to_string(),
        summary: String::new(),
        params: vec![
            float("factor"),
            tensor("in", Access::Read),
            tensor("out", Access::Write),
            Param::i64("count"),
            float("bias"),
        ],
        launch: Launch {
            grid: [Size::Tokens.ceil_div(256), Size::Const(1)],
            threads: 256,
            shared_bytes: 0,
            cluster: 1,
            dependent: false,
        },
    }
}

pub fn dims(grid: [u64; 2]) -> LaunchDims {
    LaunchDims {
        grid,
        threads: 256,
        shared_bytes: 0,
        cluster: 1,
    }
}

pub fn bytes_of(values: &[f32]) -> Vec<u8> {
    values
        .iter()
        .flat_map(|value| value.to_le_bytes())
        .collect()
}

pub fn floats_of(bytes: &[u8]) -> Vec<f32> {
    let four = |four: &[u8]| f32::from_le_bytes(four.try_into().unwrap());
    bytes.chunks_exact(4).map(four).collect()
}

/// The arguments of `out = in * factor + bias` over `count` floats; an empty launch has none.
pub struct Scale<'a> {
    pub from: &'a Buffer,
    pub to: &'a Buffer,
    pub factor: f32,
    pub count: i64,
}

impl Scale<'_> {
    pub fn launch(&self, module: &dyn Module, grid: [u64; 2]) -> Result<(), DeviceError> {
        let args = [
            Arg::F32(self.factor),
            Arg::Ptr(self.from.ptr()),
            Arg::Ptr(self.to.ptr()),
            Arg::I64(self.count),
            Arg::F32(0.25),
        ];
        // SAFETY: the arguments are those of `entry`, and the stand-in checks
        // the buffers' sizes.
        unsafe { module.launch("scale", dims(grid), &args) }
    }
}

/// Returns the arguments of a launch that touches nothing.
pub fn nothing() -> [Arg; 5] {
    let null = Arg::Ptr(Ptr(0));
    [Arg::F32(0.0), null, null, Arg::I64(0), Arg::F32(0.0)]
}
