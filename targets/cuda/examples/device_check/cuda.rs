//! The checks of an NVIDIA GPU, with CUDA kernels.

use super::device_check::{self, Backend, Bench, Check, Outcome, entry, refusal};
use moesaic_cuda::CudaDevice;
use moesaic_kernel::{
    Access, DType, Entry, KernelSource, Language, Param, Swizzle, Target, TensorMap,
};
use moesaic_target::{Arg, Device, LaunchDims, Ptr};
use std::sync::Arc;

const TEXT: &str = r#"
extern "C" __global__ void __launch_bounds__(256) scale(
    float factor, const float* in, float* out, long long count, float bias) {
  long long i = blockIdx.x * 256ll + threadIdx.x;
  if (i < count) out[i] = in[i] * factor + bias;
}
extern "C" __global__ void __launch_bounds__(256) crash(float* out) { out[threadIdx.x] = 1.0f; }

struct alignas(64) Map { unsigned long long words[16]; };
extern "C" __global__ void __launch_bounds__(256) mapped(
    const __grid_constant__ Map map, long long* out) {
  if (threadIdx.x < 16) out[threadIdx.x] = map.words[threadIdx.x];
}
"#;

/// Opens the first GPU, or the one with that number, for the checks.
pub fn backend(ordinal: usize, compile: device_check::Compile) -> Backend {
    let device = CudaDevice::open(ordinal);
    Backend {
        device: device.map(|device| Arc::new(device) as Arc<dyn Device>),
        language: Language::Cuda,
        text: TEXT,
        compile,
        extra,
    }
}

/// Returns the kernels of the checks, to compile them where no GPU is.
pub fn source(target: Target) -> KernelSource {
    device_check::source(Language::Cuda, TEXT, extra, target)
}

fn extra() -> (Vec<Entry>, Vec<Check>) {
    let map = TensorMap {
        dtype: DType::Bf16,
        access: Access::Read,
        rank: 2,
        tile: [64, 8, 1, 1, 1],
        swizzle: Swizzle::B128,
    };
    let params = vec![
        Param::map("map", map, "[rows, 128]"),
        Param::write("out", DType::I64, "[16]"),
    ];
    let checks: Vec<Check> = vec![("tensor map", tensor_map), ("large shared memory", shared)];
    (vec![entry("mapped", params)], checks)
}

/// Checks that the driver encodes a map and that the kernel receives it whole.
fn tensor_map(bench: &Bench) -> Outcome {
    let (tensor, out) = (bench.device.alloc(128 * 100 * 2)?, bench.device.alloc(128)?);
    bench.device.upload(&[0; 128], &out, 0)?;
    let args = |base: u64| {
        let dims = [128, 100, 1, 1, 1];
        [
            Arg::TensorMap {
                base: Ptr(base),
                dims,
            },
            Arg::Ptr(out.ptr()),
        ]
    };
    let base = tensor.ptr().0;
    let launch = |base| bench.launch(&*bench.module, "mapped", &args(base));
    let rule = refusal(launch(base + 8), "not a multiple of 16");
    if let Err(error) = launch(base) {
        let text = error.to_string();
        return if text.contains("needs sm_90 or later") {
            Ok(text)
        } else {
            Err(text.into())
        };
    }
    let mut bytes = [0; 128];
    bench.device.download(&out, 0, &mut bytes)?;
    if bytes[..8] == [0; 8] {
        return Err("the kernel got an empty map".into());
    }
    rule.map(|_| format!("{:02x?}", &bytes[..64]))
}

/// Uses all the shared memory that a block can have.
fn shared(bench: &Bench) -> Outcome {
    let most = bench.gpu()?.gpu_info().shared_bytes;
    let mut entry = bench.entries[0].clone();
    entry.launch.shared_bytes = most;
    let module = bench.device.load(&bench.artifact, &[entry])?;
    let buffer = bench.device.alloc(4)?;
    let dims = LaunchDims {
        grid: [1, 1],
        threads: 256,
        shared_bytes: most,
        cluster: 1,
    };
    let args = [
        Arg::F32(1.0),
        Arg::Ptr(buffer.ptr()),
        Arg::Ptr(buffer.ptr()),
        Arg::I64(1),
        Arg::F32(0.0),
    ];
    // SAFETY: the buffer holds one float.
    unsafe { module.launch("scale", dims, &args) }?;
    bench.device.synchronize()?;
    Ok(format!("{most} bytes"))
}
