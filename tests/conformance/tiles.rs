//! Kernels with AMX tiles on a CPU without: whole layers against the reference,
//! forward and backward. Only bf16 has tiles, and routing has none: the rest is
//! tested on AVX-512 itself. AVX-512 there must be; elsewhere, and where a CPU has
//! tiles of its own, which the other tests run on, they are passed over with a word.

use super::Case;
use super::batch::{alone, packed_as_plain};
use super::cases::{changes, of_type, small};
use super::simulated::{crowded, open};
use moesaic::{DType, Engine, EngineOptions, OpenError, Recompute};
use moesaic_harness::thorough::one_in;

const AMX: &str = "sim:amx";

/// Runs a test, if the device opens: compilers are not what may be missing.
fn check(test: impl Fn(&str)) {
    match Engine::open(AMX, EngineOptions::default()) {
        Err(OpenError::Device(error)) => eprintln!("not tested: {error}"),
        _ => test(AMX),
    }
}

#[test]
fn amx_takes_one_crowded_expert() {
    check(crowded);
}

/// Biases, clamps, other activations and forms, drops, shared experts. Rounded
/// values may lie on either side of a clamp, where slopes differ.
#[test]
fn amx_takes_every_option() {
    check(|amx| {
        let engine = open(amx);
        let modes = [Recompute::None, Recompute::Hidden, Recompute::All];
        for (i, spec) in one_in(2, 0, changes().into_iter().enumerate()) {
            let case = Case::random(&of_type(DType::Bf16, spec), 33, i as u64);
            case.check(&engine);
            if case.spec.experts.clamp.is_none() {
                case.check_training(&engine, modes[i % 3]);
            }
        }
    });
}

fn bf16(d: usize, h: usize, tokens: usize) -> Case {
    Case::random(&of_type(DType::Bf16, small(d, h, 1, 1)), tokens, d as u64)
}

/// Rows, columns and depths in pairs and in tiles of sixteen, with every rest.
#[test]
fn amx_takes_odd_rows_columns_and_depths() {
    check(|amx| {
        let engine = open(amx);
        for (d, h) in [(1, 1), (33, 64), (613, 17)] {
            for tokens in [1, 2, 15, 16, 17, 33] {
                let case = bf16(d, h, tokens);
                case.check(&engine);
                case.check_training(&engine, Recompute::None);
            }
        }
    });
}

/// More depth than a slice, more rows and more columns than a block has, in each
/// of the products.
#[test]
fn amx_takes_several_slices_and_blocks() {
    check(|amx| {
        let engine = open(amx);
        for (d, h, tokens) in [(2113, 40, 600), (70, 1100, 330)] {
            let case = bf16(d, h, tokens);
            case.check(&engine);
            case.check_training(&engine, Recompute::None);
        }
    });
}

#[test]
fn rows_of_amx_do_not_depend_on_their_batch_nor_on_packing() {
    check(|amx| {
        let engine = open(amx);
        alone(&engine, DType::Bf16);
        packed_as_plain(&engine, DType::Bf16);
    });
}
