//! Kernels of aarch64, run here under QEMU: whole layers against the
//! reference, forward and backward, and routing to the bit as on this CPU.

use super::Case;
use super::layers::engine as cpu;
use super::simulated::{crowded, of_type, open, random_specs, same_maps, shapes, small};
use super::simulated_training::{options, shapes as trained_shapes};
use moesaic::DType;

const NEON: &str = "sim:neon";
const NEON_BF16: &str = "sim:neonbf16";

#[test]
fn neon_agrees_on_random_specs() {
    random_specs(NEON);
}

#[test]
fn neon_agrees_on_shapes_in_every_dtype() {
    shapes(NEON);
}

#[test]
fn neon_takes_one_crowded_expert() {
    crowded(NEON);
}

#[test]
fn neon_routes_as_the_cpu_to_the_bit() {
    same_maps(NEON);
}

#[test]
fn neon_trains_shapes() {
    trained_shapes(NEON);
}

#[test]
fn neon_trains_options() {
    options(NEON);
}

#[test]
fn neonbf16_agrees_on_shapes_in_every_dtype() {
    shapes(NEON_BF16);
}

#[test]
fn neonbf16_takes_one_crowded_expert() {
    crowded(NEON_BF16);
}

#[test]
fn neonbf16_trains_shapes() {
    trained_shapes(NEON_BF16);
}

/// Without pairs the two sets have one text and one result; with them, sums
/// are of other products.
#[test]
fn only_products_of_bf16_differ_between_the_sets() {
    let y = |target: &str, dtype: DType| {
        let case = Case::random(&of_type(dtype, small(64, 48, 4, 2)), 19, 3);
        let output = case.layer(&open(target)).forward(&case.input());
        output.expect("it runs").y().to_f32()
    };
    assert_eq!(y(NEON, DType::F16), y(NEON_BF16, DType::F16));
    assert_ne!(y(NEON, DType::Bf16), y(NEON_BF16, DType::Bf16));
    let case = Case::random(&small(64, 48, 4, 2), 19, 3);
    let native = case.layer(&cpu()).forward(&case.input()).expect("it runs");
    let emulated = y(NEON, DType::F32);
    let close = native
        .y()
        .to_f32()
        .iter()
        .zip(&emulated)
        .all(|(a, b)| (a - b).abs() < 1e-4);
    assert!(close, "{emulated:?}");
}
