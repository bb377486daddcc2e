//! [`CudaDevice`] against a fake driver that the system C compiler builds.
//!
//! cudarc finds the driver by the loader's path, which is read when a process
//! starts. So each case is a process of its own: this program, started over
//! with `CASE` set.

use moesaic_cuda::CudaDevice;
use moesaic_kernel::{
    Access, DType, Entry, KernelSource, Language, Launch, Param, ParamType, Scalar, Size, Stem,
};
use moesaic_target::{Arg, Artifact, CompileOptions, Compiler, Device, DeviceError, LaunchDims};
use moesaic_toolchain::{Kind, Registry, install, nvrtc};
use std::path::Path;
use std::process::Command;

const TEXT: &str = r#"
extern "C" __global__ void __launch_bounds__(256) scale(
    float factor, const float* in, float* out, long long count, float bias) {
  __shared__ float tile[256];
  long long i = blockIdx.x * 256ll + threadIdx.x;
  tile[threadIdx.x] = i < count ? in[i] : 0.0f;
  __syncthreads();
  if (i < count) out[i] = tile[threadIdx.x] * factor + bias;
}
"#;

fn main() {
    match std::env::var("CASE") {
        Ok(case) => run_case(&case),
        Err(_) => run_all(),
    }
}

fn run_all() {
    let folder = tempfile::tempdir().unwrap();
    build(&folder.path().join("new"), &[]);
    build(&folder.path().join("old"), &["-DOLD"]);
    no_driver(&folder.path().join("none"));
    let artifact = folder.path().join("scale.cubin");
    std::fs::write(&artifact, compile().binary).unwrap();
    for (case, driver, fail) in CASES {
        let log = folder.path().join(format!("{case}.log"));
        let output = Command::new(std::env::current_exe().unwrap())
            .env("CASE", case)
            .env("LD_LIBRARY_PATH", folder.path().join(driver))
            .env("FAKE_CUDA_FAIL", fail)
            .env("FAKE_CUDA_LOG", &log)
            .env("CUBIN", &artifact)
            .output()
            .unwrap();
        let text =
            String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
        assert!(
            output.status.success(),
            "case {case}: {}\n{text}",
            output.status
        );
        println!("test {case} ... ok");
    }
}

/// Case, folder of the driver, the function that fails and its code.
const CASES: [(&str, &str, &str); 12] = [
    ("a_layer_runs", "new", ""),
    ("without_pools", "new", ""),
    ("no_driver", "none", ""),
    ("old_driver", "old", ""),
    ("no_gpu", "new", "cuInit:100"),
    ("wrong_ordinal", "new", ""),
    ("out_of_memory", "new", "cuMemAllocAsync:2"),
    ("refused_binary", "new", "cuModuleLoadData:209"),
    ("refused_launch", "new", "cuLaunchKernel:701"),
    ("late_fault", "new", "cuStreamSynchronize:700"),
    ("bad_requests", "new", ""),
    ("shared_memory", "new", ""),
];

fn run_case(case: &str) {
    match case {
        "a_layer_runs" => a_layer_runs(),
        "without_pools" => without_pools(),
        "no_driver" => check_unavailable(&[
            "the CUDA driver",
            "`libcuda.so.1` (",
            "`libcuda.so` (",
            "install the NVIDIA driver",
        ]),
        "old_driver" => check_unavailable(&[
            "has no symbol `cuGetErrorString`",
            "update the NVIDIA driver",
        ]),
        "no_gpu" => check_unavailable(&["CUDA_ERROR_NO_DEVICE: some words"]),
        "wrong_ordinal" => wrong_ordinal(),
        "out_of_memory" => out_of_memory(),
        "refused_binary" => refused_binary(),
        "refused_launch" => refused_launch(),
        "late_fault" => late_fault(),
        "bad_requests" => bad_requests(),
        "shared_memory" => shared_memory(),
        _ => panic!("no case {case}"),
    }
}

fn build(folder: &Path, flags: &[&str]) {
    std::fs::create_dir(folder).unwrap();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fake_cuda.c");
    let status = Command::new("cc")
        .args(["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o"])
        .arg(folder.join("libcuda.so.1"))
        .arg(source)
        .args(flags)
        .status()
        .expect("the test needs a C compiler named `cc`");
    assert!(status.success(), "cc: {status}");
}

/// Files that are no libraries hide a driver the machine may have.
fn no_driver(folder: &Path) {
    std::fs::create_dir(folder).unwrap();
    for name in ["libcuda.so.1", "libcuda.so"] {
        std::fs::write(
            folder.join(name),
            "no library, and long enough to hold an ELF header, which it has not",
        )
        .unwrap();
    }
}

fn compile() -> Artifact {
    let mut registry = Registry::open().unwrap();
    install(&mut registry, &[Kind::Cuda], &mut |_| {}).unwrap_or_else(|error| panic!("{error}"));
    let source = KernelSource {
        stem: Stem::Combine,
        name: "scale".to_string(),
        target: "cuda:sm_90a".parse().unwrap(),
        language: Language::Cuda,
        text: TEXT.to_string(),
        config: String::new(),
        entries: vec![entry()],
    };
    nvrtc(&registry)
        .unwrap()
        .compile(&source, &CompileOptions::default())
        .unwrap()
}

fn artifact() -> Artifact {
    let binary = std::fs::read(std::env::var("CUBIN").unwrap()).unwrap();
    let kernels = moesaic_cuda::read_cubin(&binary).unwrap();
    let compiler = "NVRTC 13.0".to_string();
    Artifact {
        binary,
        report: moesaic_target::Report {
            compiler,
            kernels,
            ..Default::default()
        },
    }
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

fn dims(grid: [u64; 2]) -> LaunchDims {
    LaunchDims {
        grid,
        threads: 256,
        shared_bytes: 0,
        cluster: 1,
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

fn log() -> Vec<String> {
    let text = std::fs::read_to_string(std::env::var("FAKE_CUDA_LOG").unwrap()).unwrap_or_default();
    text.lines().map(str::to_string).collect()
}

fn open() -> CudaDevice {
    CudaDevice::open(0).unwrap_or_else(|error| panic!("{error}"))
}

/// 300 floats, scaled, with the buffers offset so that a wrong offset shows.
fn scale(device: &CudaDevice) -> Result<Vec<f32>, DeviceError> {
    let values = (0..300).map(|i| i as f32 * 0.5 - 3.0).collect::<Vec<_>>();
    let module = device.load(&artifact(), &[entry()])?;
    let input = device.alloc(1204)?;
    let output = device.alloc(1200)?;
    device.upload(&bytes_of(&values), &input, 4)?;
    let from = Arg::Ptr(moesaic_target::Ptr(input.ptr().0 + 4));
    let args = [
        Arg::F32(-2.0),
        from,
        Arg::Ptr(output.ptr()),
        Arg::I64(300),
        Arg::F32(0.25),
    ];
    // SAFETY: the arguments are those of `entry`, and both buffers hold 300 floats.
    unsafe { module.launch("scale", dims([2, 1]), &args) }?;
    let mut bytes = vec![0; 1200];
    device.download(&output, 0, &mut bytes)?;
    let expected = values
        .iter()
        .map(|value| value * -2.0 + 0.25)
        .collect::<Vec<_>>();
    assert_eq!(floats_of(&bytes), expected);
    let mut tail = [0; 8];
    device.download(&output, 1192, &mut tail)?;
    assert_eq!(floats_of(&tail), expected[298..]);
    Ok(expected)
}

fn a_layer_runs() {
    let device = open();
    let info = device.info();
    assert_eq!((info.name.as_str(), info.units), ("Fake H200", 132));
    assert_eq!(info.target.to_string(), "cuda:sm_90a");
    assert_eq!(info.memory_bytes, Some(150_754_820_096));
    assert_eq!(device.memory().unwrap(), (4096, 150_754_820_096));
    assert_eq!(CudaDevice::count().unwrap(), 2);
    // Another thread has no context of its own.
    std::thread::scope(|scope| scope.spawn(|| scale(&device).unwrap()).join().unwrap());
    drop(device);
    let expected = [
        "pool attribute 4 = ffffffffffffffff",
        "load an ELF file",
        "alloc 1204",
        "alloc 1200",
        "upload 1200",
        "launch scale grid 2 1 1 block 256 1 1 shared 0 stream ours extra none",
        "download 1200",
        "synchronize",
        "download 8",
        "synchronize",
        "free",
        "free",
        "synchronize",
        "unload",
        "destroy stream",
        "release",
    ];
    assert_eq!(log(), expected);
}

fn without_pools() {
    // SAFETY: this process has one thread, which reads no variables now.
    unsafe { std::env::set_var("FAKE_CUDA_NO_POOLS", "1") };
    scale(&open()).unwrap();
    let log = log();
    assert!(
        log.contains(&"alloc sync 1204".to_string()) && log.contains(&"free sync".to_string()),
        "{log:?}"
    );
    assert!(
        !log.iter()
            .any(|line| line.starts_with("pool") || line == "free"),
        "{log:?}"
    );
}

fn check_unavailable(parts: &[&str]) {
    let errors = [
        CudaDevice::open(0)
            .expect_err("there is no usable driver")
            .to_string(),
        CudaDevice::count()
            .expect_err("there is no usable driver")
            .to_string(),
    ];
    for error in errors {
        assert!(
            error.starts_with("no `cuda` device is available: "),
            "{error}"
        );
        for part in parts {
            assert!(error.contains(part), "{part:?} is not in {error}");
        }
    }
}

fn wrong_ordinal() {
    let error = CudaDevice::open(2).err().unwrap().to_string();
    assert!(
        error.ends_with("GPU 2 was asked for; the driver has 2, counted from 0"),
        "{error}"
    );
}

fn out_of_memory() {
    let error = open().alloc(1 << 40).unwrap_err();
    assert_eq!(
        error.to_string(),
        "out of device memory: 1099511627776 bytes were asked for (4096 bytes are free)"
    );
}

fn refused_binary() {
    let error = open()
        .load(&artifact(), &[entry()])
        .err()
        .unwrap()
        .to_string();
    assert!(
        error.starts_with("cannot load kernel `scale`: CUDA_ERROR_NO_BINARY_FOR_GPU: some words"),
        "{error}"
    );
    assert!(
        error.ends_with("compiled by NVRTC 13.0, and the driver is for CUDA 12.4"),
        "{error}"
    );
}

fn refused_launch() {
    let error = scale(&open()).unwrap_err().to_string();
    assert!(
        error.starts_with("launch of kernel `scale` failed: CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"),
        "{error}"
    );
}

fn late_fault() {
    let error = scale(&open()).unwrap_err().to_string();
    assert!(
        error.starts_with(
            "launch of kernel `scale` failed: CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access"
        ),
        "{error}"
    );
    assert!(error.contains("CUDA_LAUNCH_BLOCKING=1"), "{error}");
}

fn bad_requests() {
    let device = open();
    let module = device.load(&artifact(), &[entry()]).unwrap();
    // SAFETY: each launch is refused, or has nothing to do.
    let launch =
        |symbol: &str, grid, args: &[Arg]| unsafe { module.launch(symbol, dims(grid), args) };
    let nothing = [
        Arg::F32(0.0),
        Arg::Ptr(moesaic_target::Ptr(0)),
        Arg::Ptr(moesaic_target::Ptr(0)),
        Arg::I64(0),
        Arg::F32(0.0),
    ];
    launch("scale", [0, 1], &nothing).unwrap();
    assert!(
        !log().iter().any(|line| line.starts_with("launch")),
        "nothing is launched"
    );
    let error = launch("gone", [1, 1], &nothing).unwrap_err().to_string();
    assert!(
        error.contains("it was not loaded; loaded are: scale"),
        "{error}"
    );
    let error = launch("scale", [1, 1], &nothing[1..])
        .unwrap_err()
        .to_string();
    assert!(error.contains("it takes 5 arguments and got 4"), "{error}");
    let error = launch("scale", [1, 70_000], &nothing)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("a grid of 1 x 70000 blocks is too large"),
        "{error}"
    );

    let buffer = device.alloc(0).unwrap();
    assert_ne!(buffer.ptr().0, 0);
    let error = device.upload(&[1, 2], &buffer, 0).unwrap_err().to_string();
    assert_eq!(
        error,
        "upload of 2 bytes at byte 0 failed: the buffer holds 0 bytes"
    );
    let error = device
        .download(&buffer, usize::MAX, &mut [0; 2])
        .unwrap_err()
        .to_string();
    assert!(error.starts_with("download of 2 bytes at byte "), "{error}");

    let mut other = entry();
    other.params.pop();
    let error = device
        .load(&artifact(), &[other])
        .err()
        .unwrap()
        .to_string();
    assert!(
        error.contains("`scale` declares 4 parameters, the binary takes 5"),
        "{error}"
    );
    let mut gone = entry();
    gone.symbol = "gone".to_string();
    let error = device.load(&artifact(), &[gone]).err().unwrap().to_string();
    assert!(
        error.contains("cannot load kernel `gone`: CUDA_ERROR_NOT_FOUND"),
        "{error}"
    );
    let short = Artifact {
        binary: b"\x7fELF".to_vec(),
        report: Default::default(),
    };
    let error = device.load(&short, &[entry()]).err().unwrap().to_string();
    assert!(error.contains("not a readable ELF file"), "{error}");
}

fn shared_memory() {
    let device = open();
    let with = |bytes| {
        let mut entry = entry();
        entry.launch.shared_bytes = bytes;
        device
            .load(&artifact(), &[entry])
            .map(|_| ())
            .map_err(|error| error.to_string())
    };
    with(48 << 10).unwrap();
    assert!(
        !log()
            .iter()
            .any(|line| line.starts_with("function attribute"))
    );
    with(200 << 10).unwrap();
    assert!(
        log().contains(&"function attribute 8 = 204800".to_string()),
        "{:?}",
        log()
    );
    let error = with(232_448).unwrap_err();
    assert!(
        error.contains("it needs 233472 bytes of shared memory per block, Fake H200 has 232448"),
        "{error}"
    );
}
