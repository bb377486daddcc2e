//! [`HipDevice`] against a stand-in for the runtime: the suite that GPU targets
//! share, and the functions that only HIP has.

#[path = "../../api/tests/gpu/mod.rs"]
mod gpu;

use gpu::{Case, Harness, Words, check_error, check_part, dims, entry, log, nothing};
use moesaic_kernel::{KernelSource, Language, Stem};
use moesaic_rocm::HipDevice;
use moesaic_target::{Artifact, ArtifactReport, CompileOptions, Compiler, Device, LaunchDims};
use moesaic_toolchain::testing;
use std::path::Path;
use std::sync::Arc;

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

const CASES: &[Case] = &[
    Case::new("hip_facts", hip_facts),
    Case::new("hip_by_path", by_path),
    Case::new("hip_architectures", architectures),
    Case::new("hip_limits", limits),
    Case::new("hip_no_device_of_the_thread", no_device)
        .failing("current", 101, 2)
        .leaking(),
];

fn main() {
    gpu::main(&Harness {
        backend: "rocm",
        fake: "tests/fake_hip.c",
        library: "libamdhip64.so.7",
        open: |ordinal| Ok(Arc::new(HipDevice::open(ordinal)?)),
        on_handle: |ordinal, stream| {
            // SAFETY: the suite keeps the stream's owner for longer than the device.
            Ok(Arc::new(unsafe { HipDevice::on_handle(ordinal, stream) }?))
        },
        count: HipDevice::count,
        symbol,
        compile,
        read,
        words: Words {
            illegal_address: "hipErrorIllegalAddress",
            out_of_resources: "hipErrorLaunchOutOfResources",
            no_device: "hipErrorNoDevice",
            no_binary: "hipErrorNoBinaryForGpu",
            blocking: "HIP_LAUNCH_BLOCKING",
            driver: "the runtime is HIP 6.2",
            compiler: "clang 22.1.8",
            last: "",
        },
        cases: CASES,
    });
}

/// Returns the runtime's name of a function, independent of the code under
/// test.
fn symbol(function: &str) -> &'static str {
    match function {
        "init" => "hipInit",
        "current" => "hipSetDevice",
        "memory_info" => "hipMemGetInfo",
        "default_pool" => "hipDeviceGetDefaultMemPool",
        "pool_set" => "hipMemPoolSetAttribute",
        "pool_access" => "hipMemPoolSetAccess",
        "can_access_peer" => "hipDeviceCanAccessPeer",
        "stream_create" => "hipStreamCreateWithFlags",
        "stream_destroy" => "hipStreamDestroy",
        "stream_synchronize" => "hipStreamSynchronize",
        "stream_wait" => "hipStreamWaitEvent",
        "alloc_async" => "hipMallocAsync",
        "free_async" => "hipFreeAsync",
        "alloc" => "hipMalloc",
        "free" => "hipFree",
        "host_alloc" => "hipHostMalloc",
        "host_free" => "hipHostFree",
        "upload" => "hipMemcpyHtoDAsync",
        "download" => "hipMemcpyDtoHAsync",
        "copy" => "hipMemcpyDtoDAsync",
        "copy_rows" => "hipMemcpy2DAsync",
        "module_load" => "hipModuleLoadData",
        "module_unload" => "hipModuleUnload",
        "module_function" => "hipModuleGetFunction",
        "launch" => "hipModuleLaunchKernel",
        "occupancy" => "hipModuleOccupancyMaxActiveBlocksPerMultiprocessor",
        "event_create" => "hipEventCreateWithFlags",
        "event_record" => "hipEventRecord",
        "event_query" => "hipEventQuery",
        "event_synchronize" => "hipEventSynchronize",
        "event_elapsed" => "hipEventElapsedTime",
        "event_destroy" => "hipEventDestroy",
        "capture_begin" => "hipStreamBeginCapture",
        "capture_end" => "hipStreamEndCapture",
        "graph_instantiate" => "hipGraphInstantiateWithFlags",
        "graph_launch" => "hipGraphLaunch",
        "graph_destroy" => "hipGraphDestroy",
        "exec_destroy" => "hipGraphExecDestroy",
        _ => panic!("no function {function}"),
    }
}

fn compile() -> Artifact {
    let source = KernelSource {
        stem: Stem::Combine,
        name: "scale".to_string(),
        target: "rocm:gfx942".parse().unwrap(),
        language: Language::Hip,
        text: TEXT.to_string(),
        config: String::new(),
        entries: vec![entry()],
    };
    testing::rocm()
        .compile(&source, &CompileOptions::default())
        .unwrap()
}

fn read(binary: &[u8]) -> ArtifactReport {
    let kernels = moesaic_rocm::read_code_object(binary).unwrap();
    ArtifactReport {
        compiler: "clang 22.1.8".to_string(),
        kernels: kernels.into_iter().map(|kernel| kernel.report).collect(),
        ..ArtifactReport::default()
    }
}

fn hip_facts(_: &Harness) {
    let device = HipDevice::open(1).unwrap();
    let info = device.info();
    assert_eq!((info.name.as_str(), info.units), ("Fake MI300X", 304));
    assert_eq!(info.target.to_string(), "rocm:gfx942");
    assert_eq!(info.memory_bytes, Some(206_141_652_992));
    // Another thread has no current device.
    std::thread::scope(|scope| {
        let memory = scope.spawn(|| device.memory().unwrap()).join().unwrap();
        assert_eq!(memory, (4096, 150_754_820_096));
    });
    let facts = gpu::streams(&device).gpu_info();
    assert_eq!((facts.ordinal, facts.shared_bytes), (1, 65_536));
    assert_eq!(facts.bus.as_deref(), Some("0000:c1:00"));
    assert_eq!((facts.lanes, facts.l2_bytes), (Some(64), Some(4_194_304)));
    assert_eq!(facts.threads_per_unit, Some(2048));
    assert_eq!(facts.clock_khz, Some(2_100_000));
    assert_eq!(facts.shared_bytes_per_unit, None, "zero is not known");
}

fn by_path(harness: &Harness) {
    let folder = std::env::var("LD_LIBRARY_PATH").unwrap();
    let path = Path::new(&folder).join(harness.library);
    let device = HipDevice::open_with(&path, 0).unwrap();
    drop(device.alloc(8).unwrap());
    check_part(
        HipDevice::open_with(Path::new("/no/such/libamdhip64.so"), 0),
        "cannot load the HIP runtime; tried `/no/such/libamdhip64.so` (",
    );
}

fn architectures(harness: &Harness) {
    let set = |arch| {
        // SAFETY: this process has one thread.
        unsafe { std::env::set_var("FAKE_HIP_ARCH", arch) };
    };
    set("gfx1100");
    assert_eq!(harness.open().info().target.to_string(), "rocm:gfx1100");
    set("gfx803");
    check_part(
        (harness.open)(0),
        "Fake MI300X is of architecture `gfx803`, which is not supported",
    );
}

fn limits(harness: &Harness) {
    let device = harness.open();
    let module = harness.load(&*device);
    // SAFETY: each launch is refused, or touches nothing.
    let launch = |dims| unsafe { module.launch("scale", dims, &nothing()) };
    check_part(
        launch(dims([1 << 24, 1])),
        "HIP has at most 4294967295 threads in x",
    );
    let clusters = LaunchDims {
        cluster: 2,
        ..dims([2, 1])
    };
    check_part(
        launch(clusters),
        "it runs in clusters of 2 blocks, which AMD GPUs do not have",
    );
    let mut entry = entry();
    entry.launch.cluster = 2;
    check_error(
        device.load(&harness.artifact(), &[entry.clone()]),
        "cannot load kernel `scale`: it runs in clusters of 2 blocks, which AMD GPUs do not have",
    );
    // All of a block's memory is available without asking.
    entry.launch.cluster = 1;
    entry.launch.shared_bytes = 64_000;
    let module = device.load(&harness.artifact(), &[entry]).unwrap();
    let dims = LaunchDims {
        shared_bytes: 64_000,
        ..dims([1, 1])
    };
    // SAFETY: it touches nothing.
    unsafe { module.launch("scale", dims, &nothing()) }.unwrap();
    assert!(log().iter().any(|line| line.contains("shared 64000")));
    let dims = LaunchDims {
        shared_bytes: 65_000,
        ..dims
    };
    // SAFETY: it is refused.
    check_part(
        unsafe { module.launch("scale", dims, &nothing()) },
        "it asks for 65000 bytes of dynamic shared memory, and was loaded for 64512",
    );
}

fn no_device(harness: &Harness) {
    check_error(
        harness.open().alloc(8),
        "allocation of 8 bytes failed: hipErrorSome: some words",
    );
}
