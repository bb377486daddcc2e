//! Texts of errors speak to a C caller: none has a name of Rust's.

mod common;

use common::*;
use moesaic_c::calls::*;
use moesaic_c::engine::*;
use moesaic_c::info::Role;
use moesaic_c::layer::*;
use moesaic_c::options::LayerOptions;
use moesaic_c::ranks::*;
use moesaic_c::spec::*;
use moesaic_c::tensors::Tensor;
use std::ffi::{CStr, c_int};
use std::ptr::{null, null_mut};

/// Names that a text has if it speaks to a caller of the Rust face.
const RUST: [&str; 9] = [
    "Cargo.toml",
    "its feature `",
    "::",
    "`Input`",
    "Raw",
    "Options",
    "TokenScope",
    "gradient_ptr",
    "()",
];
/// Methods of the Rust face, whose functions here have a prefix.
const METHODS: [&str; 4] = ["forward", "forward_train", "set_weight", "finish"];

/// Checks that a text names what to change, in C's words.
#[track_caller]
fn says(wanted: &str) {
    let text = last();
    assert!(text.contains(wanted), "`{text}` lacks `{wanted}`");
    let own = METHODS.iter().map(|name| format!("`{name}`"));
    for name in own.chain(RUST.map(str::to_string)) {
        assert!(!text.contains(&name), "`{text}` has {name}");
    }
}

fn train(layer: *const Layer, tensors: &[Tensor], out: &mut *mut Saved) {
    let call = call_of(T, tensors);
    // SAFETY: the tensors are valid and outlive the state.
    ok(unsafe { moesaic_forward_train(layer, &call, null(), out) });
}

/// Returns the names of a layer's tensors of a role.
fn names_of(layer: *const Layer, role: Role) -> Vec<String> {
    // SAFETY: the layer is live, and names end in NUL.
    let tensor = |number| unsafe {
        let mut info = std::mem::MaybeUninit::uninit();
        ok(moesaic_layer_tensor(layer, number, T, info.as_mut_ptr()));
        let info = info.assume_init();
        let name = CStr::from_ptr(info.name).to_str().unwrap();
        (info.role == role).then(|| name.to_string())
    };
    // SAFETY: the layer is live.
    let count = unsafe { moesaic_layer_tensor_count(layer) };
    (0..count).filter_map(tensor).collect()
}

fn layer_of(
    opened: &Opened,
    spec: *const Spec,
    options: &LayerOptions,
    out: &mut *mut Layer,
) -> moesaic_c::Status {
    let mut weights = opened.weights();
    let tensors: Vec<Tensor> = weights.iter_mut().map(Owned::c).collect();
    let (engine, count) = (opened.engine, tensors.len());
    // SAFETY: the pointers are valid.
    unsafe { moesaic_layer_open(engine, spec, tensors.as_ptr(), count, options, out) }
}

#[test]
fn a_target_that_the_library_lacks_says_how_to_have_it() {
    let lacks = |target: &CStr, wanted: &str| {
        let options = EngineOptions {
            target: target.as_ptr(),
            ..EngineOptions::default()
        };
        let mut engine = null_mut();
        // SAFETY: the pointers are valid.
        let status = unsafe { moesaic_engine_open(&options, &mut engine) };
        assert_eq!(status, moesaic_c::Status::Unavailable, "{}", last());
        says(wanted);
    };
    if !cfg!(feature = "cuda") {
        lacks(c"cuda", "install.sh PREFIX --features cuda");
    }
    if !cfg!(feature = "rocm") {
        lacks(c"rocm:gfx942", "install.sh PREFIX --features rocm");
    }
    lacks(c"sim:sm_90a", "this library has no simulators");
}

#[test]
fn a_call_of_another_layer_says_which_function_to_call() {
    let with_loss = c"shape = { model_dim = 8, hidden_dim = 16, experts = 4, top_k = 2 }
        losses = [{ kind = \"switch\", coefficient = 0.1 }]";
    let opened = Opened::new(with_loss);
    let (one, other) = (opened.layer(1), opened.layer(1));
    let (mut x, mut y, mut dy) = (rows("x", 0), rows("y", 1), rows("dy", 2));
    let mut loss = Owned::new("loss.switch", &[1], 0);
    refused(forward(one, T, &[x.c(), y.c(), loss.c()]), "`loss.switch`");
    says("name it in moesaic_forward_train");
    let mut over = rows("y", 1).strided(9);
    over.strides = vec![4, 1];
    refused(forward(one, T, &[x.c(), over.c()]), "`y`");
    says("two elements at one place");
    refused(forward(one, T, &[x.c(), y.c(), dy.c()]), "`dy`");
    says("name it in moesaic_backward");
    let named = [x.c(), y.c()];
    // SAFETY: the tensors are valid.
    let status = unsafe { moesaic_route(one, &call_of(T, &named)) };
    refused(status, "`y`");
    says("name it in moesaic_forward");
    let mut saved = null_mut();
    train(one, &[x.c(), y.c()], &mut saved);
    let tensors = [dy.c()];
    // SAFETY: the handles and tensors are valid.
    unsafe {
        let status = moesaic_backward(other, saved, tensors.as_ptr(), 1, 0);
        refused(status, "argument `saved` is of another layer");
        says("moesaic_forward_train");
        refused(
            moesaic_layer_set_strategy(one, c"r=1".as_ptr()),
            "a strategy",
        );
        says("moesaic_layer_options");
        moesaic_saved_free(saved);
        moesaic_layer_free(one);
        moesaic_layer_free(other);
    }
}

#[test]
fn a_layer_over_ranks_says_where_its_gradients_are() {
    let opened = Opened::new(SPEC);
    let (mut world, mut mesh, mut layer) = (null_mut(), null_mut(), null_mut());
    let one = Parallel {
        ep: 1,
        expert_tp: 1,
        dp: 1,
        shard_shared: 0,
        world_scope: 0,
        placement: null(),
    };
    // SAFETY: the pointers are valid.
    unsafe {
        ok(moesaic_world_threads(opened.engine, 1, 0.0, &mut world));
        ok(moesaic_mesh_open(world, &one, &mut mesh));
    }
    let options = LayerOptions {
        training: 1 as c_int,
        mesh,
        ..LayerOptions::default()
    };
    ok(layer_of(&opened, opened.spec, &options, &mut layer));
    assert_eq!(names_of(layer, Role::OutputGradient), ["dy"]);
    assert!(names_of(layer, Role::Output).contains(&"comm_cast.saturated".to_string()));
    let (mut x, mut y, mut dy) = (rows("x", 0), rows("y", 1), rows("dy", 2));
    refused(forward(layer, T, &[y.c()]), "`x` is missing");
    let mut saved = null_mut();
    train(layer, &[x.c(), y.c()], &mut saved);
    let mut gradient = Owned::new("grad.router.weight", &[4, 8], 0);
    let tensors = [dy.c(), gradient.c()];
    // SAFETY: the handles and tensors are valid.
    unsafe {
        let status = moesaic_backward(layer, saved, tensors.as_ptr(), 2, 0);
        refused(status, "`grad.router.weight`");
        says("moesaic_layer_gradient");
        moesaic_saved_free(saved);
        moesaic_layer_free(layer);
        moesaic_mesh_free(mesh);
        ok(moesaic_world_finish(world));
    }
}
