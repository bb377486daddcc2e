//! [`CudaDevice`] against a stand-in for the driver: the suite that GPU targets
//! share, and the functions that only CUDA has.

#[path = "../../api/tests/gpu/mod.rs"]
mod gpu;

use gpu::{Case, Driver, Harness, Words, check_error, check_part, dims, entry, fail, log, nothing};
use moesaic_cuda::CudaDevice;
use moesaic_kernel::{
    Access, DType, Entry, KernelSource, Language, Param, Stem, Swizzle, TensorMap,
};
use moesaic_target::{
    Arg, Artifact, ArtifactReport, CompileOptions, Compiler, Device, DeviceError, LaunchDims, Ptr,
};
use moesaic_toolchain::testing;
use std::sync::Arc;

const TEXT: &str = r#"
extern "C" __global__ void __launch_bounds__(256) scale(
    float factor, const float* in, float* out, long long count, float bias) {
  __shared__ float tile[256];
  long long i = blockIdx.x * 256ll + threadIdx.x;
  tile[threadIdx.x] = i < count ? in[i] : 0.0f;
  __syncthreads();
  if (i < count) out[i] = tile[threadIdx.x] * factor + bias;
}
struct alignas(64) Map { unsigned long long words[16]; };
extern "C" __global__ void mapped(const __grid_constant__ Map map, unsigned long long* out) {
  out[threadIdx.x] = map.words[threadIdx.x % 16];
}
"#;

const CASES: &[Case] = &[
    Case::new("cuda_facts", cuda_facts),
    Case::new("cuda_shares_its_stream", shares_its_stream),
    Case::new("cuda_shared_memory", shared_memory),
    Case::new("cuda_refused_shared_memory", refused_shared_memory).failing("function_set", 1, 0),
    Case::new("cuda_clusters", clusters),
    Case::new("cuda_no_clusters_by_driver", no_clusters).on(Driver::Lacks("launch_ex")),
    Case::new("cuda_no_clusters_by_gpu", no_clusters_on_ampere),
    Case::new("cuda_tensor_maps", tensor_maps),
    Case::new("cuda_no_tensor_maps", no_tensor_maps).on(Driver::Lacks("encode_tiled")),
    Case::new("cuda_refused_tensor_map", refused_tensor_map).failing("encode_tiled", 1, 0),
    Case::new("cuda_unknown_code", unknown_code).failing("alloc_async", 9999, 0),
    Case::new("cuda_no_context", no_context).failing("current", 201, 1),
];

fn main() {
    gpu::main(&Harness {
        backend: "cuda",
        fake: "tests/fake_cuda.c",
        library: "libcuda.so.1",
        open: |ordinal| Ok(Arc::new(CudaDevice::open(ordinal)?)),
        on_handle: |ordinal, stream| {
            // SAFETY: the suite keeps the stream's owner for longer than the device.
            Ok(Arc::new(unsafe { CudaDevice::on_handle(ordinal, stream) }?))
        },
        count: CudaDevice::count,
        symbol,
        compile,
        read: |binary| ArtifactReport {
            compiler: "NVRTC 13.0".to_string(),
            kernels: moesaic_cuda::read_cubin(binary).unwrap(),
            ..ArtifactReport::default()
        },
        words: Words {
            illegal_address: "CUDA_ERROR_ILLEGAL_ADDRESS",
            out_of_resources: "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES",
            no_device: "CUDA_ERROR_NO_DEVICE",
            no_binary: "CUDA_ERROR_NO_BINARY_FOR_GPU",
            blocking: "CUDA_LAUNCH_BLOCKING",
            driver: "the driver is for CUDA 12.4",
            compiler: "NVRTC 13.0",
            last: "release context",
        },
        cases: CASES,
    });
}

/// Returns the driver's name of a function, independent of the code under test.
fn symbol(function: &str) -> &'static str {
    match function {
        "init" => "cuInit",
        "current" => "cuCtxSetCurrent",
        "function_set" => "cuFuncSetAttribute",
        "launch_ex" => "cuLaunchKernelEx",
        "encode_tiled" => "cuTensorMapEncodeTiled",
        "memory_info" => "cuMemGetInfo_v2",
        "default_pool" => "cuDeviceGetDefaultMemPool",
        "pool_set" => "cuMemPoolSetAttribute",
        "pool_access" => "cuMemPoolSetAccess",
        "can_access_peer" => "cuDeviceCanAccessPeer",
        "stream_create" => "cuStreamCreate",
        "stream_destroy" => "cuStreamDestroy_v2",
        "stream_synchronize" => "cuStreamSynchronize",
        "stream_wait" => "cuStreamWaitEvent",
        "alloc_async" => "cuMemAllocAsync",
        "free_async" => "cuMemFreeAsync",
        "alloc" => "cuMemAlloc_v2",
        "free" => "cuMemFree_v2",
        "host_alloc" => "cuMemHostAlloc",
        "host_free" => "cuMemFreeHost",
        "upload" => "cuMemcpyHtoDAsync_v2",
        "download" => "cuMemcpyDtoHAsync_v2",
        "copy" => "cuMemcpyDtoDAsync_v2",
        "copy_rows" => "cuMemcpy2DAsync_v2",
        "module_load" => "cuModuleLoadData",
        "module_unload" => "cuModuleUnload",
        "module_function" => "cuModuleGetFunction",
        "launch" => "cuLaunchKernel",
        "occupancy" => "cuOccupancyMaxActiveBlocksPerMultiprocessor",
        "event_create" => "cuEventCreate",
        "event_record" => "cuEventRecord",
        "event_query" => "cuEventQuery",
        "event_synchronize" => "cuEventSynchronize",
        "event_elapsed" => "cuEventElapsedTime",
        "event_destroy" => "cuEventDestroy_v2",
        "capture_begin" => "cuStreamBeginCapture_v2",
        "capture_end" => "cuStreamEndCapture",
        "graph_instantiate" => "cuGraphInstantiateWithFlags",
        "graph_launch" => "cuGraphLaunch",
        "graph_destroy" => "cuGraphDestroy",
        "exec_destroy" => "cuGraphExecDestroy",
        _ => panic!("no function {function}"),
    }
}

fn compile() -> Artifact {
    let source = KernelSource {
        stem: Stem::Combine,
        name: "scale".to_string(),
        target: "cuda:sm_90a".parse().unwrap(),
        language: Language::Cuda,
        text: TEXT.to_string(),
        config: String::new(),
        entries: vec![entry()],
    };
    testing::nvrtc()
        .compile(&source, &CompileOptions::default())
        .unwrap()
}

fn cuda_facts(_: &Harness) {
    let device = CudaDevice::open(0).unwrap();
    let info = device.info();
    assert_eq!((info.name.as_str(), info.units), ("Fake H200", 132));
    assert_eq!(info.target.to_string(), "cuda:sm_90a");
    assert_eq!(info.memory_bytes, Some(150_754_820_096));
    assert_eq!(device.memory().unwrap(), (4096, 150_754_820_096));
    let facts = gpu::streams(&device).gpu_info();
    assert_eq!(facts.bus.as_deref(), Some("0000:17:00"));
    assert_eq!(facts.shared_bytes, 232_448);
    assert_eq!(facts.shared_bytes_per_unit, Some(233_472));
    assert_eq!(facts.threads_per_unit, Some(2048));
    assert_eq!((facts.lanes, facts.l2_bytes), (Some(32), Some(62_914_560)));
}

fn shares_its_stream(_: &Harness) {
    let first = CudaDevice::open(0).unwrap();
    let stream = first.stream().clone();
    let second = CudaDevice::on(stream).unwrap();
    drop(first.alloc(8).unwrap());
    drop(first);
    drop(second.alloc(8).unwrap());
    assert_eq!(
        log().last().unwrap(),
        "free a2 on s1",
        "one stream for both"
    );
}

fn with_shared(harness: &Harness, device: &dyn Device, bytes: u32) -> Result<(), DeviceError> {
    let mut entry = entry();
    entry.launch.shared_bytes = bytes;
    let module = device.load(&harness.artifact(), &[entry])?;
    let dims = LaunchDims {
        shared_bytes: bytes,
        ..dims([1, 1])
    };
    // SAFETY: it touches nothing.
    unsafe { module.launch("scale", dims, &nothing()) }
}

fn shared_memory(harness: &Harness) {
    let device = harness.open();
    // 1024 bytes are static, and both kinds count.
    with_shared(harness, &*device, 47 << 10).unwrap();
    assert!(!log().iter().any(|line| line.starts_with("attribute")));
    with_shared(harness, &*device, (47 << 10) + 1).unwrap();
    assert!(log().contains(&"attribute 8 of scale = 48129".to_string()));
    with_shared(harness, &*device, 200 << 10).unwrap();
    assert!(log().contains(&"attribute 8 of scale = 204800".to_string()));
    check_part(
        with_shared(harness, &*device, 232_448),
        "it needs 233472 bytes of shared memory per block (232448 dynamic, 1024 static), Fake \
         H200 has 232448",
    );
    let module = harness.load(&*device);
    let dims = LaunchDims {
        shared_bytes: 48_129,
        ..dims([1, 1])
    };
    // SAFETY: it is refused.
    check_part(
        unsafe { module.launch("scale", dims, &nothing()) },
        "it asks for 48129 bytes of dynamic shared memory, and was loaded for 48128",
    );
}

fn refused_shared_memory(harness: &Harness) {
    check_error(
        with_shared(harness, &*harness.open(), 100_000),
        "cannot load kernel `scale`: 100000 bytes of dynamic shared memory are refused: \
         CUDA_ERROR_SOME: some words",
    );
}

fn in_clusters(harness: &Harness, blocks: u32, x: u64) -> Result<(), DeviceError> {
    let device = harness.open();
    let mut entry = entry();
    entry.launch.cluster = blocks;
    let module = device.load(&harness.artifact(), &[entry])?;
    let dims = LaunchDims {
        cluster: blocks,
        ..dims([x, 2])
    };
    // SAFETY: it touches nothing.
    unsafe { module.launch("scale", dims, &nothing()) }
}

fn clusters(harness: &Harness) {
    in_clusters(harness, 2, 6).unwrap();
    let launch = "launch scale grid 6 2 1 block 256 1 1 shared 0 attribute 4 = 2 1 1 on s1";
    assert!(log().iter().any(|line| line.starts_with(launch)));
    assert!(!log().iter().any(|line| line.starts_with("attribute")));
    in_clusters(harness, 16, 32).unwrap();
    assert!(log().contains(&"attribute 14 of scale = 1".to_string()));
    check_error(
        in_clusters(harness, 4, 6),
        "launch of kernel `scale` failed: 6 blocks in x are not whole clusters of 4; grid 6 x 2, \
         256 threads, 0 bytes of dynamic shared memory, clusters of 4",
    );
    check_part(
        in_clusters(harness, 32, 32),
        "clusters of 32 blocks are too large; the most are 16",
    );
    fail(harness, "launch_ex", 701);
    check_part(in_clusters(harness, 2, 6), "clusters of 2");
}

fn no_clusters(harness: &Harness) {
    check_error(
        in_clusters(harness, 2, 6),
        "cannot load kernel `scale`: it runs in clusters of 2 blocks, which need sm_90 or later \
         and a driver for CUDA 11.8 or later",
    );
}

fn no_clusters_on_ampere(harness: &Harness) {
    // SAFETY: this process has one thread now.
    unsafe { std::env::set_var("FAKE_CUDA_MAJOR", "8") };
    assert_eq!(harness.open().info().target.to_string(), "cuda:sm_80");
    check_part(in_clusters(harness, 2, 6), "which need sm_90 or later");
    check_part(map_over(harness, [128, 100, 1, 1, 1], 0), "it needs sm_90");
    // SAFETY: as above.
    unsafe { std::env::set_var("FAKE_CUDA_MAJOR", "6") };
    check_part(
        (harness.open)(0),
        "Fake H200 has compute capability 6.0, which is not supported",
    );
}

fn mapped() -> Entry {
    let map = TensorMap {
        dtype: DType::Bf16,
        access: Access::Read,
        rank: 2,
        tile: [64, 8, 1, 1, 1],
        swizzle: Swizzle::B128,
    };
    let mut entry = entry();
    entry.symbol = "mapped".to_string();
    entry.params = vec![
        Param::map("map", map, "[rows, 128]"),
        Param::tensor("out", DType::I64, Access::Write, "[16]"),
    ];
    entry
}

/// Launches `mapped` over a tensor that starts `offset` bytes into a buffer.
fn map_over(harness: &Harness, dims: [u64; 5], offset: u64) -> Result<(), DeviceError> {
    let device = harness.open();
    let module = device.load(&harness.artifact(), &[mapped()])?;
    let (tensor, out) = (device.alloc(40_000)?, device.alloc(128)?);
    let args = [
        Arg::TensorMap {
            base: Ptr(tensor.ptr().0 + offset),
            dims,
        },
        Arg::Ptr(out.ptr()),
    ];
    let blocks = dims[1].min(1);
    // SAFETY: the arguments are those of `mapped`.
    unsafe { module.launch("mapped", gpu::dims([blocks, 1]), &args) }
}

fn tensor_maps(harness: &Harness) {
    map_over(harness, [128, 100, 1, 1, 1], 256).unwrap();
    let log = log();
    assert!(
        log.contains(
            &"encode type 9 of a1+256 sizes 128 100 strides 256 box 64/1 8/1 interleave 0 \
              swizzle 3 promotion 3 fill 0"
                .to_string()
        ),
        "{log:?}"
    );
    let launch = log.iter().find(|line| line.starts_with("launch")).unwrap();
    assert!(launch.ends_with("params map 0001 a2+0"), "{launch}");
    map_over(harness, [128, 0, 1, 1, 1], 0).unwrap();
    let error = map_over(harness, [128, 100, 1, 1, 1], 8).unwrap_err();
    let error = error.to_string();
    assert!(
        error
            .starts_with("launch of kernel `mapped` failed: tensor map over bf16 [128, 100] at 0x")
            && error.ends_with(
                "in boxes of [64, 8], swizzle B128: the address is not a multiple of 16"
            ),
        "{error}"
    );
    check_part(
        map_over(harness, [100, 100, 1, 1, 1], 0),
        "the stride of dimension 1 is 200 bytes, not a multiple of 16",
    );
    let encodes = gpu::log()
        .iter()
        .filter(|line| line.starts_with("encode"))
        .count();
    assert_eq!(
        encodes, 1,
        "bad maps and empty launches never reach the driver"
    );
}

fn no_tensor_maps(harness: &Harness) {
    check_part(
        map_over(harness, [128, 100, 1, 1, 1], 0),
        "it needs sm_90 or later and a driver for CUDA 12.0 or later",
    );
}

fn refused_tensor_map(harness: &Harness) {
    check_part(
        map_over(harness, [128, 100, 1, 1, 1], 0),
        "swizzle B128: CUDA_ERROR_SOME: some words",
    );
}

fn unknown_code(harness: &Harness) {
    check_error(
        harness.open().alloc(8),
        "allocation of 8 bytes failed: CUDA error 9999",
    );
}

/// The first thread has a context, which another thread cannot get.
fn no_context(harness: &Harness) {
    let device = harness.open();
    let error = std::thread::scope(|scope| scope.spawn(|| device.alloc(8)).join().unwrap());
    check_part(error, "allocation of 8 bytes failed: CUDA_ERROR_SOME");
    drop(device.alloc(8).unwrap());
}
