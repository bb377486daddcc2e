//! Loading and launching on this machine.

mod common;

use common::{SCALE, compile, compiler, scale_entry};
use moesaic_cpu::{CpuDevice, host_isa, host_runs, limits};
use moesaic_kernel::{CpuIsa, Target};
use moesaic_target::{Arg, Buffer, Device, LaunchDims, Module, RowCopy};
use std::sync::Arc;

fn scale(device: &CpuDevice) -> Arc<dyn Module> {
    let artifact = compile(SCALE, vec![scale_entry()]).unwrap();
    device.load(&artifact, &[scale_entry()]).unwrap()
}

fn dims(grid: [u64; 2]) -> LaunchDims {
    LaunchDims {
        grid,
        threads: 1,
        shared_bytes: 0,
        cluster: 1,
    }
}

fn upload(device: &CpuDevice, values: &[f32]) -> Buffer {
    let bytes: Vec<u8> = values
        .iter()
        .flat_map(|value| value.to_ne_bytes())
        .collect();
    let buffer = device.alloc(bytes.len()).unwrap();
    device.upload(&bytes, &buffer, 0).unwrap();
    buffer
}

fn download<const N: usize, T>(
    device: &CpuDevice,
    buffer: &Buffer,
    read: fn([u8; N]) -> T,
) -> Vec<T> {
    let mut bytes = vec![0; buffer.bytes()];
    device.download(buffer, 0, &mut bytes).unwrap();
    bytes
        .chunks_exact(N)
        .map(|chunk| read(chunk.try_into().unwrap()))
        .collect()
}

#[test]
fn rows_are_copied_and_must_fit() {
    let device = CpuDevice::new();
    let from = device.alloc(16).unwrap();
    let to = device.alloc(20).unwrap();
    device.upload(b"0123456789abcdef", &from, 0).unwrap();
    device.upload(&[b'-'; 20], &to, 0).unwrap();
    let copy = RowCopy {
        from: &from,
        from_offset: 1,
        from_stride: 5,
        to: &to,
        to_offset: 2,
        to_stride: 7,
        rows: 3,
        row_bytes: 4,
    };
    device.copy_rows(&copy).unwrap();
    let mut back = [0; 20];
    device.download(&to, 0, &mut back).unwrap();
    assert_eq!(&back, b"--1234---6789---bcde");
    for wrong in [
        RowCopy { rows: 4, ..copy },
        RowCopy {
            to_stride: 3,
            ..copy
        },
        RowCopy {
            rows: usize::MAX,
            ..copy
        },
    ] {
        device.copy_rows(&wrong).unwrap_err();
    }
    device.copy_rows(&RowCopy { rows: 0, ..copy }).unwrap();
}

/// Runs `scale` over a grid and checks every element.
fn check(device: &CpuDevice, module: &dyn Module, grid: [u64; 2], width: usize) {
    let blocks = (grid[0] * grid[1]) as usize;
    let x: Vec<f32> = (0..blocks * width)
        .map(|i| (i * 37 % 101) as f32 - 50.0)
        .collect();
    let input = upload(device, &x);
    let output = device.alloc(x.len() * 4).unwrap();
    let seen = device.alloc(blocks * 8).unwrap();
    let pointers = [&input, &output, &seen].map(|buffer| Arg::Ptr(buffer.ptr()));
    let args = [&pointers[..], &[Arg::I64(width as i64), Arg::F32(0.5)]].concat();
    // SAFETY: the arguments are those of `scale`, the buffers fit the grid.
    unsafe { module.launch("scale", dims(grid), &args).unwrap() };
    device.synchronize().unwrap();
    let want: Vec<f32> = x
        .iter()
        .enumerate()
        .map(|(i, x)| x * 0.5 + (i / width.max(1)) as f32)
        .collect();
    assert_eq!(
        download(device, &output, f32::from_ne_bytes),
        want,
        "grid {grid:?}"
    );
    let places = (0..grid[1] as i64).flat_map(|y| (0..grid[0] as i64).map(move |x| y * 1000 + x));
    assert!(
        download(device, &seen, i64::from_ne_bytes)
            .into_iter()
            .eq(places),
        "grid {grid:?}"
    );
}

#[test]
fn every_grid_and_thread_count_gives_the_same() {
    for threads in [1, 2, 3, 8] {
        let device = CpuDevice::with_threads(threads).unwrap().poisoned();
        assert_eq!(device.threads(), threads);
        let module = scale(&device);
        for grid in [[0, 4], [4, 0], [1, 1], [7, 1], [1, 7], [13, 11], [999, 3]] {
            check(&device, &*module, grid, 17);
        }
    }
    let device = CpuDevice::new();
    check(&device, &*scale(&device), [64, 5], 1000);
}

#[test]
fn a_module_outlives_its_artifact_and_others_loaded_meanwhile() {
    let device = CpuDevice::new();
    let first = scale(&device);
    for _ in 0..20 {
        let text = SCALE.replace("+ (float)b", "+ 1e9f");
        let other = compile(&text, vec![scale_entry()]).unwrap();
        let other = device.load(&other, &[scale_entry()]).unwrap();
        check(&device, &*first, [5, 2], 3);
        drop(other);
        // A second copy must not be mistaken for the one just dropped.
        check(&device, &*scale(&device), [3, 2], 3);
    }
}

fn launch_error(symbol: &str, grid: [u64; 2], args: &[Arg]) -> String {
    let device = CpuDevice::new();
    let module = scale(&device);
    // SAFETY: each of these launches is refused before the kernel runs.
    unsafe {
        module
            .launch(symbol, dims(grid), args)
            .unwrap_err()
            .to_string()
    }
}

#[test]
fn a_launch_that_does_not_fit_is_refused() {
    let error = launch_error("nope", [1, 1], &[]);
    assert!(
        error.contains("kernel `nope`") && error.contains("loaded are: scale"),
        "{error}"
    );
    let error = launch_error("scale", [1, 1], &[Arg::I64(1)]);
    assert!(error.contains("takes 5 arguments and got 1"), "{error}");
    let error = launch_error("scale", [1, 1], &[Arg::I64(1); 5]);
    assert!(
        error.contains("argument 0 is I64(1) and must be Tensor"),
        "{error}"
    );
    let pointer = Arg::Ptr(moesaic_target::Ptr(0));
    let args = [pointer, pointer, pointer, Arg::I64(1), Arg::F32(1.0)];
    let error = launch_error("scale", [u64::MAX, 2], &args);
    assert!(error.contains("too large"), "{error}");
}

#[test]
fn a_load_that_cannot_work_says_why() {
    let device = CpuDevice::new();
    let mut artifact = compile(SCALE, vec![scale_entry()]).unwrap();
    let missing = common::entry("missing", vec![]);
    let error = device
        .load(&artifact, &[missing])
        .err()
        .unwrap()
        .to_string();
    assert!(error.contains("cannot load kernel `missing`"), "{error}");
    artifact.binary.truncate(100);
    let error = device
        .load(&artifact, &[scale_entry()])
        .err()
        .unwrap()
        .to_string();
    assert!(error.contains("cannot load kernel `scale`"), "{error}");
}

#[test]
fn copies_are_bounds_checked() {
    let device = CpuDevice::new();
    let buffer = device.alloc(10).unwrap();
    device.upload(&[1, 2, 3], &buffer, 7).unwrap();
    let mut back = [0; 3];
    device.download(&buffer, 7, &mut back).unwrap();
    assert_eq!(back, [1, 2, 3]);
    let error = device.upload(&[0; 4], &buffer, 7).unwrap_err().to_string();
    assert_eq!(
        error,
        "upload of 4 bytes at byte 7 failed: the buffer holds 10 bytes"
    );
    assert!(device.download(&buffer, usize::MAX, &mut back).is_err());
}

#[test]
fn memory_is_aligned_poisoned_and_finite() {
    let device = CpuDevice::new().poisoned();
    for bytes in [0, 1, 63, 65, 4 << 20, (4 << 20) + 5] {
        let buffer = device.alloc(bytes).unwrap();
        assert_eq!((buffer.ptr().0 % 64, buffer.bytes()), (0, bytes));
        assert_ne!(buffer.ptr().0, 0);
        let mut back = vec![0; bytes];
        device.download(&buffer, 0, &mut back).unwrap();
        assert!(back.iter().all(|&byte| byte == 0xFF));
    }
    for asked in [usize::MAX, isize::MAX as usize, 1 << 60] {
        let error = device.alloc(asked).unwrap_err().to_string();
        assert_eq!(
            error,
            format!("out of device memory: {asked} bytes were requested")
        );
    }
}

#[test]
fn the_device_knows_itself() {
    let error = CpuDevice::with_threads(65_535).err().unwrap().to_string();
    assert!(error.contains("a device has at most 8192"), "{error}");
    let device = CpuDevice::with_threads(3).unwrap();
    let info = device.info();
    assert_eq!((info.target, info.units), (Target::Cpu(host_isa()), 3));
    assert!(!info.name.is_empty());
    assert!(info.memory_bytes.is_none_or(|bytes| bytes > 1 << 20));
}

#[test]
fn the_limits_of_the_machine_are_plausible() {
    let started = std::time::Instant::now();
    use CpuIsa::{Amx, Avx2, Avx512, Avx512Bf16, Neon, NeonBf16, Portable};
    for isa in [Portable, Avx2, Avx512, Avx512Bf16, Amx, Neon, NeonBf16] {
        let limits = limits::measure(&compiler(), &CpuDevice::new(), isa).unwrap();
        println!("{isa:?}: {limits:?} in {:?}", started.elapsed());
        assert!((0.5..1e6).contains(&limits.f32_gflops), "{limits:?}");
        assert!((0.05..1e4).contains(&limits.read_gbps), "{limits:?}");
        assert!((0.05..1e4).contains(&limits.copy_gbps), "{limits:?}");
        let measured = if host_runs(isa) { isa } else { host_isa() };
        let has_bf16 = matches!(measured, Avx512Bf16 | Amx | NeonBf16);
        assert_eq!(limits.bf16_gflops.is_some(), has_bf16, "{isa:?}");
    }
}
