//! The kernels that fold rows: compiled for GPUs of both vendors, and run in the PTX simulator.

use moesaic_collectives::nccl::{Fold, Folding, Kernels, OnHost};
use moesaic_collectives::{CommElement, Reduction, Slice};
use moesaic_kernel::{SimArch, Target};
use moesaic_ptx::{PtxCompiler, PtxDevice, PtxOptions};
use moesaic_target::{CompileOptions, Compiler, Device};
use moesaic_toolchain::testing;
use std::sync::Arc;

const ELEMENTS: usize = 300;
const RANKS: usize = 3;

/// Returns values of every kind: small, large, subnormal, infinite. NaN is excluded, because its
/// bits differ between processors.
fn rows(element: CommElement, seed: u64) -> Vec<u8> {
    let mut state = seed;
    let mut next = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 29) as u32
    };
    let mut bytes = Vec::new();
    while bytes.len() < ELEMENTS * RANKS * element.size() {
        let bits = next();
        match element {
            CommElement::F32 if !f32::from_bits(bits).is_nan() => bytes.extend(bits.to_le_bytes()),
            CommElement::Bf16 if !f32::from_bits(bits & 0xffff_0000).is_nan() => {
                bytes.extend(((bits >> 16) as u16).to_le_bytes());
            }
            // Infinities are excluded too: those of opposite signs would add up to a NaN.
            CommElement::F16 if bits & 0x7c00 != 0x7c00 => {
                bytes.extend((bits as u16).to_le_bytes())
            }
            CommElement::I32 | CommElement::I64 | CommElement::U8 => {
                bytes.extend(bits.to_le_bytes())
            }
            _ => {}
        }
    }
    bytes
}

#[test]
fn kernels_fold_to_the_bits_of_the_host() {
    let target: Target = "sim:sm_90a".parse().unwrap();
    let Target::Sim(SimArch::Cuda(arch)) = target else {
        panic!("{target}");
    };
    let compiler = PtxCompiler::new(testing::nvrtc());
    let source = Kernels::source(target).unwrap();
    let artifact = compiler
        .compile(&source, &CompileOptions::default())
        .unwrap();
    let device: Arc<dyn Device> = Arc::new(PtxDevice::new(arch, PtxOptions::default()));
    let kernels = Kernels::load(&device, &artifact).unwrap();
    let host = OnHost::new(&device);
    for element in CommElement::ALL {
        assert_eq!(kernels.waits(element), element == CommElement::U8);
        let row_bytes = ELEMENTS * element.size();
        for reduction in Reduction::ALL {
            let bytes = rows(element, reduction as u64 + 1);
            let fold = |how: &dyn Fold| {
                let rows = Arc::new(device.alloc(bytes.len()).unwrap());
                let to = Arc::new(device.alloc(row_bytes).unwrap());
                device.upload(&bytes, &rows, 0).unwrap();
                let folding = Folding {
                    element,
                    reduction,
                    rows: Slice::whole(&rows, CommElement::U8),
                    row_bytes,
                    to: Slice::whole(&to, CommElement::U8),
                };
                how.fold(&folding).unwrap();
                let mut folded = vec![0; row_bytes];
                device.download(&to, 0, &mut folded).unwrap();
                folded
            };
            let (ours, expected) = (fold(&kernels), fold(&host));
            let size = element.size();
            for (i, (a, b)) in ours.chunks(size).zip(expected.chunks(size)).enumerate() {
                let nan = |bytes: &[u8]| is_nan(element, bytes);
                let same = a == b || (nan(a) && nan(b));
                assert!(
                    same,
                    "{reduction} of {element}, element {i}: {a:x?} and {b:x?}"
                );
            }
        }
    }
}

/// Returns whether a value is NaN, as a sum of opposite infinities is.
fn is_nan(element: CommElement, bytes: &[u8]) -> bool {
    let number = |bytes: &[u8]| u16::from_le_bytes([bytes[0], bytes[1]]);
    match element {
        CommElement::F32 => f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]).is_nan(),
        CommElement::Bf16 => number(bytes) & 0x7fff > 0x7f80,
        CommElement::F16 => number(bytes) & 0x7fff > 0x7c00,
        _ => false,
    }
}

#[test]
fn kernels_compile_for_gpus_of_both_vendors() {
    let check = |compiler: &dyn Compiler, target: &str| {
        let source = Kernels::source(target.parse().unwrap()).unwrap();
        let artifact = compiler
            .compile(&source, &CompileOptions::default())
            .unwrap();
        assert_eq!(artifact.report.kernels.len(), 5, "{target}");
        for kernel in &artifact.report.kernels {
            let known = kernel.spill_bytes.is_some();
            assert!(known && !kernel.spills(), "{target}: {kernel:?}");
        }
    };
    let (cuda, rocm) = (testing::nvrtc(), testing::rocm());
    for target in ["cuda:sm_75", "cuda:sm_90a"] {
        check(&cuda, target);
    }
    for target in ["rocm:gfx90a", "rocm:gfx942", "rocm:gfx1100"] {
        check(&rocm, target);
    }
    assert!(Kernels::source("cpu:avx2".parse().unwrap()).is_none());
}
