//! Kernels of aarch64, run here under QEMU: whole layers against the
//! reference, forward and backward, and routing to the bit as on this CPU.

use super::Case;
use super::batch::{alone, packed_as_plain};
use super::case::floats;
use super::cases::{of_type, small};
use super::simulated::{crowded, open, random_specs, same_maps, shapes};
use super::simulated_training::{options, shapes as trained_shapes};
use moesaic::emit::emit_layer;
use moesaic::{DType, Recompute};

const NEON: &str = "sim:neon";
const NEON_BF16: &str = "sim:neonbf16";

#[test]
fn neon_agrees_on_random_specs() {
    random_specs(NEON, 3);
}

#[test]
fn neon_agrees_on_shapes_in_every_dtype() {
    shapes(NEON, 1);
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
    trained_shapes(NEON, 0);
}

#[test]
fn neon_trains_options() {
    options(NEON, 3);
}

#[test]
fn neonbf16_agrees_on_shapes_in_every_dtype() {
    shapes(NEON_BF16, 0);
}

#[test]
fn neonbf16_takes_one_crowded_expert() {
    crowded(NEON_BF16);
}

#[test]
fn neonbf16_trains_shapes() {
    trained_shapes(NEON_BF16, 1);
}

/// Rows and columns are multiplied in pairs and four deep: every rest of these,
/// more rows than a register tile has, and more depth than a slice.
#[test]
fn neonbf16_takes_odd_rows_columns_and_depths() {
    let engine = open(NEON_BF16);
    for (d, h) in [(1, 1), (6, 11), (47, 10), (613, 7)] {
        let spec = of_type(DType::Bf16, small(d, h, 1, 1));
        for tokens in [1, 2, 3, 13, 25, 33] {
            Case::random(&spec, tokens, d as u64).check(&engine);
        }
        // The gradients of weights sum over rows.
        for tokens in [1, 2, 3, 5, 13] {
            Case::random(&spec, tokens, d as u64).check_training(&engine, Recompute::None);
        }
    }
}

#[test]
fn rows_of_neonbf16_do_not_depend_on_their_pair() {
    let engine = open(NEON_BF16);
    alone(&engine, DType::Bf16);
    packed_as_plain(&engine, DType::Bf16);
    let mut case = Case::random(&of_type(DType::Bf16, small(24, 16, 1, 1)), 3, 9);
    let layer = case.layer(&engine);
    let mut rows = || {
        let output = layer.forward(&case.input()).expect("it runs");
        case.input.x[24 + 5] = f64::NAN;
        floats(&output, "y")
    };
    let (plain, spoiled) = (rows(), rows());
    assert!(spoiled[24..48].iter().all(|v| v.is_nan()));
    assert_eq!(plain[..24], spoiled[..24]);
    assert_eq!(plain[48..], spoiled[48..]);
}

/// Without products of bf16 the two sets have one text and one result; with
/// them, pairs are multiplied by an instruction that the other does not have.
#[test]
fn only_products_of_bf16_differ_between_the_sets() {
    let layer = |target: &str, dtype: DType| {
        let case = Case::random(&of_type(dtype, small(64, 48, 4, 2)), 19, 3);
        let layer = case.layer(&open(target));
        let output = layer.forward(&case.input()).expect("it runs");
        let kernels = emit_layer(layer.plan()).expect("it can be emitted");
        let pairs = kernels.iter().filter(|k| k.text.contains("bfmmla")).count();
        (output.y().to_f32(), pairs)
    };
    let (plain, none) = layer(NEON, DType::F16);
    let (same, still_none) = layer(NEON_BF16, DType::F16);
    assert!(plain == same);
    assert_eq!([none, still_none, layer(NEON, DType::Bf16).1], [0; 3]);
    assert_eq!(
        layer(NEON_BF16, DType::Bf16).1,
        2,
        "the up and the down product"
    );
}
