//! [`HipDevice`] against a fake runtime that the system C compiler builds.

use moesaic_dl::Library;
use moesaic_kernel::{
    Access, DType, Entry, KernelSource, Language, Launch, Param, ParamType, Scalar, Size, Stem,
};
use moesaic_rocm::HipDevice;
use moesaic_target::{
    Arg, Artifact, CompileOptions, Compiler, Device, DeviceError, LaunchDims, Ptr,
};
use moesaic_toolchain::{Kind, Registry, install, rocm};
use std::ffi::{CStr, CString, c_char, c_int};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

const TEXT: &str = "
extern \"C\" __attribute__((global)) __attribute__((amdgpu_flat_work_group_size(256, 256)))
void scale(float factor, const float* in, float* out, long count, float bias) {
  __attribute__((shared)) float tile[256];
  unsigned t = __builtin_amdgcn_workitem_id_x();
  long i = __builtin_amdgcn_workgroup_id_x() * 256l + t;
  tile[t] = i < count ? in[i] : 0.0f;
  __builtin_amdgcn_s_barrier();
  if (i < count) out[i] = tile[255 - t] * factor + bias;
}
";

/// A runtime of its own for each test, and the hooks into it.
struct Fake {
    library: Library,
    path: PathBuf,
    _folder: tempfile::TempDir,
}

impl Fake {
    fn new() -> Fake {
        Fake::build(&[])
    }

    fn build(flags: &[&str]) -> Fake {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("libamdhip64.so");
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fake_hip.c");
        let status = Command::new("cc")
            .args(["-shared", "-fPIC", "-o"])
            .arg(&path)
            .arg(source)
            .args(flags)
            .status()
            .expect("the test needs a C compiler named `cc`");
        assert!(status.success(), "cc: {status}");
        let library = Library::open_path("the fake", &path).unwrap();
        Fake {
            library,
            path,
            _folder: folder,
        }
    }

    fn fail(self, function: &str, code: c_int) -> Fake {
        let function = CString::new(function).unwrap();
        // SAFETY: the fake's own signature; it copies the name.
        unsafe {
            let fail = self
                .library
                .symbol::<unsafe extern "C" fn(*const c_char, c_int)>("fake_fail");
            fail.unwrap()(function.as_ptr(), code);
        }
        self
    }

    fn arch(self, name: &str) -> Fake {
        let name = CString::new(name).unwrap();
        // SAFETY: the fake's own signature; it copies the name.
        unsafe {
            let arch = self
                .library
                .symbol::<unsafe extern "C" fn(*const c_char)>("fake_arch");
            arch.unwrap()(name.as_ptr());
        }
        self
    }

    fn calls(&self) -> Vec<String> {
        // SAFETY: the fake's own signature; the text is static.
        let text = unsafe {
            let calls = self
                .library
                .symbol::<unsafe extern "C" fn() -> *const c_char>("fake_calls");
            CStr::from_ptr(calls.unwrap()())
        };
        text.to_str().unwrap().lines().map(str::to_string).collect()
    }

    fn open(&self) -> HipDevice {
        HipDevice::open_with(&self.path, 1).unwrap_or_else(|error| panic!("{error}"))
    }

    fn refusal(&self, ordinal: usize) -> String {
        HipDevice::open_with(&self.path, ordinal)
            .unwrap_err()
            .to_string()
    }
}

fn artifact() -> &'static Artifact {
    static ARTIFACT: OnceLock<Artifact> = OnceLock::new();
    ARTIFACT.get_or_init(|| {
        let mut registry = Registry::open().unwrap();
        install(&mut registry, &[Kind::Rocm], &mut |_| {})
            .unwrap_or_else(|error| panic!("{error}"));
        let source = KernelSource {
            stem: Stem::Combine,
            name: "scale".to_string(),
            target: "rocm:gfx942".parse().unwrap(),
            language: Language::Hip,
            text: TEXT.to_string(),
            config: String::new(),
            entries: vec![entry()],
        };
        rocm(&registry)
            .unwrap()
            .compile(&source, &CompileOptions::default())
            .unwrap()
    })
}

fn entry() -> Entry {
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
        },
    }
}

fn bytes_of(values: &[f32]) -> Vec<u8> {
    values
        .iter()
        .flat_map(|value| value.to_le_bytes())
        .collect()
}

fn floats_of(bytes: &[u8]) -> Vec<f32> {
    bytes
        .chunks_exact(4)
        .map(|four| f32::from_le_bytes(four.try_into().unwrap()))
        .collect()
}

/// 300 floats, scaled, from a buffer with an offset so that a wrong one shows.
fn scale(device: &HipDevice) -> Result<(), DeviceError> {
    let values = (0..300).map(|i| i as f32 * 0.5 - 3.0).collect::<Vec<_>>();
    let module = device.load(artifact(), &[entry()])?;
    let input = device.alloc(1204)?;
    let output = device.alloc(1200)?;
    device.upload(&bytes_of(&values), &input, 4)?;
    let from = Arg::Ptr(Ptr(input.ptr().0 + 4));
    let args = [
        Arg::F32(-2.0),
        from,
        Arg::Ptr(output.ptr()),
        Arg::I64(300),
        Arg::F32(0.25),
    ];
    let dims = LaunchDims {
        grid: [2, 1],
        threads: 256,
        shared_bytes: 64,
        cluster: 1,
    };
    // SAFETY: the arguments are those of `entry`, and both buffers hold 300 floats.
    unsafe { module.launch("scale", dims, &args) }?;
    let mut bytes = vec![0; 1200];
    device.download(&output, 0, &mut bytes)?;
    let expected = values
        .iter()
        .map(|value| value * -2.0 + 0.25)
        .collect::<Vec<_>>();
    assert_eq!(floats_of(&bytes), expected);
    Ok(())
}

#[test]
fn a_layer_runs_from_any_thread() {
    let fake = Fake::new();
    let device = fake.open();
    let info = device.info();
    assert_eq!((info.name.as_str(), info.units), ("Fake MI300X", 304));
    assert_eq!(info.target.to_string(), "rocm:gfx942");
    assert_eq!(info.memory_bytes, Some(206_141_652_992));
    // Another thread has no current device, and the last owner may be there.
    std::thread::scope(|scope| {
        scope
            .spawn(|| assert_eq!(device.memory().unwrap(), (4096, 206_141_652_992)))
            .join()
            .unwrap();
    });
    std::thread::spawn(move || scale(&device).unwrap())
        .join()
        .unwrap();
    let expected = [
        "create stream 1",
        "load an ELF file",
        "alloc 1204",
        "alloc 1200",
        "copy 1200 up",
        "synchronize",
        "launch scale grid 2 1 1 block 256 1 1 shared 64 stream ours extra none",
        "copy 1200 down",
        "synchronize",
        "free",
        "free",
        "synchronize",
        "unload",
        "destroy stream",
    ];
    assert_eq!(fake.calls(), expected);
}

#[test]
fn no_runtime_lists_what_was_tried() {
    let error = HipDevice::open_with(Path::new("/no/such/libamdhip64.so"), 0)
        .unwrap_err()
        .to_string();
    assert!(error.starts_with("no `rocm` device is available: cannot load the HIP runtime; tried `/no/such/libamdhip64.so` ("), "{error}");
    assert!(
        error.ends_with("install ROCm, or set ROCM_PATH to it"),
        "{error}"
    );
}

#[test]
fn an_old_runtime_is_named_as_such() {
    let error = Fake::build(&["-DOLD"]).refusal(0);
    assert!(
        error.contains("has no symbol `hipGetDevicePropertiesR0600`"),
        "{error}"
    );
    assert!(error.ends_with("ROCm 6.0 or later is needed"), "{error}");
}

#[test]
fn no_gpu_and_wrong_gpu_are_told_apart() {
    let error = Fake::new().fail("hipGetDeviceCount", 100).refusal(0);
    assert_eq!(
        error,
        "no `rocm` device is available: hipErrorSome: some words"
    );
    let error = Fake::new().refusal(2);
    assert!(
        error.ends_with("GPU 2 was asked for; the runtime has 2, counted from 0"),
        "{error}"
    );
    let error = Fake::new().arch("gfx803").refusal(1);
    assert!(
        error.ends_with("Fake MI300X is of architecture `gfx803`, which is not supported"),
        "{error}"
    );
    let plain = Fake::new().arch("gfx1100");
    assert_eq!(plain.open().info().target.to_string(), "rocm:gfx1100");
}

#[test]
fn out_of_memory_says_what_is_free() {
    let device = Fake::new().fail("hipMallocAsync", 2);
    let error = device.open().alloc(1 << 40).unwrap_err().to_string();
    assert_eq!(
        error,
        "out of device memory: 1099511627776 bytes were asked for (4096 bytes are free)"
    );
}

#[test]
fn a_refused_binary_names_kernel_compiler_and_runtime() {
    let fake = Fake::new().fail("hipModuleLoadData", 209);
    let error = fake
        .open()
        .load(artifact(), &[entry()])
        .err()
        .unwrap()
        .to_string();
    assert!(
        error.starts_with("cannot load kernel `scale`: hipErrorNoBinaryForGpu: some words"),
        "{error}"
    );
    assert!(
        error.ends_with("it was compiled by clang 22.1.8, and the runtime is HIP 6.2"),
        "{error}"
    );
}

#[test]
fn faults_name_the_kernel_at_once_or_later() {
    let fake = Fake::new().fail("hipModuleLaunchKernel", 701);
    let error = scale(&fake.open()).unwrap_err().to_string();
    assert_eq!(
        error,
        "launch of kernel `scale` failed: hipErrorSome: some words"
    );

    let fake = Fake::new();
    let device = fake.open();
    scale(&device).unwrap();
    let _fake = fake.fail("hipStreamSynchronize", 700);
    let error = device.synchronize().unwrap_err().to_string();
    assert!(
        error.starts_with("launch of kernel `scale` failed: hipErrorIllegalAddress: some words"),
        "{error}"
    );
    assert!(error.contains("HIP_LAUNCH_BLOCKING=1"), "{error}");
}

#[test]
fn bad_requests_never_reach_the_runtime() {
    let fake = Fake::new();
    let device = fake.open();
    let module = device.load(artifact(), &[entry()]).unwrap();
    let dims = |grid| LaunchDims {
        grid,
        threads: 256,
        shared_bytes: 0,
        cluster: 1,
    };
    // SAFETY: each launch is refused, or has nothing to do.
    let launch =
        |symbol: &str, grid, args: &[Arg]| unsafe { module.launch(symbol, dims(grid), args) };
    let nothing = [
        Arg::F32(0.0),
        Arg::Ptr(Ptr(0)),
        Arg::Ptr(Ptr(0)),
        Arg::I64(0),
        Arg::F32(0.0),
    ];
    launch("scale", [0, 1], &nothing).unwrap();
    let check =
        |error: DeviceError, part: &str| assert!(error.to_string().contains(part), "{error}");
    check(
        launch("gone", [1, 1], &nothing).unwrap_err(),
        "it was not loaded; loaded are: scale",
    );
    check(
        launch("scale", [1, 1], &nothing[1..]).unwrap_err(),
        "it takes 5 arguments and got 4",
    );
    check(
        launch("scale", [1 << 24, 1], &nothing).unwrap_err(),
        "HIP has at most 4294967295 threads in x",
    );
    assert!(!fake.calls().iter().any(|call| call.starts_with("launch")));

    let buffer = device.alloc(0).unwrap();
    assert_ne!(buffer.ptr().0, 0);
    check(
        device.upload(&[1, 2], &buffer, 0).unwrap_err(),
        "upload of 2 bytes at byte 0 failed: the buffer holds 0 bytes",
    );
    check(
        device
            .download(&buffer, usize::MAX, &mut [0; 2])
            .unwrap_err(),
        "the buffer holds 0 bytes",
    );
    assert!(!fake.calls().iter().any(|call| call.starts_with("copy")));
}

#[test]
fn what_cannot_run_is_refused_at_load() {
    let fake = Fake::new();
    let device = fake.open();
    let refusal = |artifact: &Artifact, entry: Entry| {
        device.load(artifact, &[entry]).err().unwrap().to_string()
    };
    let mut short = entry();
    short.params.pop();
    assert!(
        refusal(artifact(), short).contains("`scale` declares 4 parameters, the binary takes 5")
    );
    let mut gone = entry();
    gone.symbol = "gone".to_string();
    assert!(refusal(artifact(), gone).starts_with("cannot load kernel `gone`: hipErrorSome"));
    let mut greedy = entry();
    greedy.launch.shared_bytes = 65_000;
    let error = refusal(artifact(), greedy);
    assert!(
        error.ends_with("it needs 66024 bytes of shared memory per block, the device has 65536"),
        "{error}"
    );
    let rubbish = Artifact {
        binary: b"\x7fELF".to_vec(),
        report: Default::default(),
    };
    assert!(refusal(&rubbish, entry()).contains("not a readable ELF file"));
}
