//! Sizes, strides and addresses that no call can take are refused: nothing overflows, and nothing
//! ends the process.

mod common;

use common::*;
use moesaic_c::Status;
use moesaic_c::calls::*;
use moesaic_c::layer::*;
use moesaic_c::ranks::*;
use moesaic_c::replay::*;
use moesaic_c::tensors::{Dtype, Tensor};
use std::ffi::c_int;
use std::ptr::{null, null_mut};

const ZEROS: [i64; 3] = [0; 3];

/// A tensor with the sizes given, all of whose elements lie in one place.
fn spread(name: &'static std::ffi::CStr, place: &mut f32, shape: &'static [i64]) -> Tensor {
    Tensor {
        name: name.as_ptr(),
        data: (&raw mut *place).cast(),
        dtype: Dtype::F32 as c_int,
        dims: shape.len(),
        shape: shape.as_ptr(),
        strides: ZEROS.as_ptr(),
    }
}

#[test]
fn sizes_that_no_memory_holds_are_refused() {
    let (opened, mut place) = (Opened::new(SPEC), 0.0);
    let layer = opened.layer(0);
    let squares: [&[i64]; 2] = [&[i64::MAX, i64::MAX], &[1 << 32, 1 << 32]];
    for square in squares {
        let tensor = spread(c"x", &mut place, square);
        refused(forward(layer, T, &[tensor]), "is larger than memory");
    }
    let packed = [i64::MAX, 1];
    let tensor = Tensor {
        strides: packed.as_ptr(),
        ..spread(c"x", &mut place, &[i64::MAX, i64::MAX])
    };
    refused(forward(layer, T, &[tensor]), "is larger than memory");
    // 16 TiB, more than any machine of these tests has: the copy of a strided tensor fails.
    let large = spread(c"router.weight", &mut place, &[1 << 42]);
    // SAFETY: the pointers are valid, or such as are refused.
    unsafe {
        refused(moesaic_layer_set_weight(layer, &large), "no memory for");
        let mut other = null_mut();
        let (engine, spec) = (opened.engine, opened.spec);
        let opened = moesaic_layer_open(engine, spec, &large, 1, null(), &mut other);
        refused(opened, "no memory for");
        let ids = Tensor {
            dtype: Dtype::I32 as c_int,
            ..spread(c"ids", &mut place, &[1 << 40, 2, 2])
        };
        let mut record = null_mut();
        refused(moesaic_record_open(&ids, &mut record), "no memory for");
        moesaic_layer_free(layer);
    }
}

#[test]
fn a_call_of_more_tokens_than_memory_holds_is_an_error() {
    let (opened, mut place) = (Opened::new(SPEC), 0.0);
    let layer = opened.layer(0);
    let mut info = std::mem::MaybeUninit::uninit();
    // SAFETY: the pointers are valid, or such as are refused.
    unsafe {
        let out = info.as_mut_ptr();
        let words = "at most 2147483647";
        refused(moesaic_layer_tensor(layer, 0, usize::MAX, out), words);
        refused(
            moesaic_layer_find(layer, c"x".as_ptr(), 1 << 62, out),
            words,
        );
        moesaic_layer_free(layer);
    }
    // 512 TiB of x.
    let wide = c"shape = { model_dim = 65536, hidden_dim = 16, experts = 2, top_k = 1 }";
    let opened = Opened::new(wide);
    let layer = opened.layer(0);
    let x = spread(c"x", &mut place, &[i32::MAX as i64, 65536]);
    let status = forward(layer, i32::MAX as usize, &[x]);
    assert_eq!(status, Status::Failed, "{}", last());
    assert!(last().contains("memory"), "{}", last());
    // SAFETY: nobody uses it any more.
    unsafe { moesaic_layer_free(layer) };
}

#[test]
fn a_mesh_of_more_ranks_than_can_be_counted_is_refused() {
    let opened = Opened::new(SPEC);
    let (mut world, mut mesh) = (null_mut(), null_mut());
    // SAFETY: the pointers are valid.
    unsafe {
        ok(moesaic_world_threads(opened.engine, 1, 0.0, &mut world));
        let parallel = Parallel {
            ep: usize::MAX / 2 + 2,
            expert_tp: 2,
            dp: 0,
            shard_shared: 0,
            world_scope: 0,
            placement: null(),
        };
        refused(moesaic_mesh_open(world, &parallel, &mut mesh), "ranks");
        ok(moesaic_world_finish(world));
    }
}

#[test]
fn a_result_over_another_tensor_is_refused() {
    let opened = Opened::new(SPEC);
    let layer = opened.layer(1);
    let (mut x, mut y, mut saved) = (rows("x", 0), rows("y", 1), null_mut());
    let mut over = y.c();
    over.data = x.values.as_mut_ptr().cast();
    refused(forward(layer, T, &[x.c(), over]), "`y` lies over `x`");
    refused(forward(layer, T, &[over, x.c()]), "`x` lies over `y`");
    // The last element of x is the first of y.
    over.data = (&raw mut x.values[T * 8 - 1]).cast();
    refused(forward(layer, T, &[x.c(), over]), "memory of its own");
    // Strided tensors may lie between one another's rows.
    let (mut between, mut rest) = (rows("x", 0).strided(16), rows("y", 1).strided(16));
    let mut rest = rest.c();
    rest.data = (&raw mut between.values[8]).cast();
    ok(forward(layer, T, &[between.c(), rest]));
    let tensors = [x.c(), y.c()];
    let call = call_of(T, &tensors);
    // SAFETY: the pointers are valid.
    ok(unsafe { moesaic_forward_train(layer, &call, null(), &mut saved) });
    let (mut dy, mut dx) = (rows("dy", 2), rows("dx", 3));
    let (dy, mut dx) = (dy.c(), dx.c());
    dx.data = dy.data;
    // SAFETY: as above.
    unsafe {
        let status = moesaic_backward(layer, saved, [dy, dx].as_ptr(), 2, 0);
        refused(status, "`dx` lies over `dy`");
        ok(moesaic_backward(layer, saved, &dy, 1, 0));
        moesaic_saved_free(saved);
        moesaic_layer_free(layer);
    }
}

#[test]
fn training_of_a_layer_for_inference_is_refused_in_words_of_c() {
    let opened = Opened::new(SPEC);
    let layer = opened.layer(0);
    // SAFETY: the layer is live.
    unsafe {
        let words = "set `training` in moesaic_layer_options";
        refused(moesaic_layer_zero_gradients(layer), words);
        moesaic_layer_free(layer);
    }
}
