//! The interface as C sees it: results of calls, and mistakes, each with its status and text.

mod common;

use common::*;
use moesaic_c::Status;
use moesaic_c::calls::*;
use moesaic_c::engine::*;
use moesaic_c::gates::*;
use moesaic_c::layer::*;
use moesaic_c::options::LayerOptions;
use moesaic_c::ranks::*;
use moesaic_c::replay::*;
use moesaic_c::spec::*;
use moesaic_c::tensors::{Dtype, Tensor};
use std::ffi::c_int;
use std::ptr::{null, null_mut};

#[test]
fn strided_rows_are_the_packed_ones() {
    let opened = Opened::new(SPEC);
    let layer = opened.layer(0);
    let (mut x, mut y) = (rows("x", 0), rows("y", 1));
    ok(forward(layer, T, &[x.c(), y.c()]));
    let (mut far_x, mut far_y) = (rows("x", 0).strided(11), rows("y", 1).strided(9));
    ok(forward(layer, T, &[far_x.c(), far_y.c()]));
    for (found, wanted) in far_y.values.chunks(9).zip(y.values.chunks(8)) {
        assert_eq!(found[..8], *wanted);
        assert_eq!(found[8], -1.0, "between rows");
    }
    far_y.strides = vec![4, 1];
    refused(
        forward(layer, T, &[x.c(), far_y.c()]),
        "two elements at one place",
    );
    // SAFETY: nobody uses it any more.
    unsafe { moesaic_layer_free(layer) };
}

#[test]
fn wrong_tensors_are_refused_by_name() {
    let opened = Opened::new(SPEC);
    let layer = opened.layer(0);
    let (mut x, mut y) = (rows("x", 0), rows("y", 1));
    let good = x.c();
    let wrong = |change: &dyn Fn(&mut Tensor)| {
        let mut tensor = good;
        change(&mut tensor);
        forward(layer, T, &[tensor])
    };
    refused(
        forward(layer, T, &[y.c()]),
        "tensor `x` is missing: name it in the call, f32 of shape [3, 8]",
    );
    refused(
        forward(layer, 5, &[x.c(), y.c()]),
        "has shape [3, 8], expected [5, 8]",
    );
    refused(forward(layer, usize::MAX, &[x.c()]), "at most 2147483647");
    refused(forward(layer, T, &[x.c(), x.c()]), "named twice");
    refused(
        wrong(&|x| x.dtype = Dtype::Bf16 as c_int),
        "is bf16, expected f32",
    );
    refused(wrong(&|x| x.dtype = 77), "has dtype 77");
    refused(wrong(&|x| x.dims = 1000), "has 1000 dimensions");
    refused(wrong(&|x| x.data = null_mut()), "has data NULL");
    refused(wrong(&|x| x.shape = null()), "argument `shape` is NULL");
    refused(wrong(&|x| x.name = null()), "argument `name` is NULL");
    refused(wrong(&|x| x.name = c"\xff".as_ptr()), "not UTF-8");
    refused(wrong(&|x| x.name = c"z".as_ptr()), "it has: x,");
    let name = c"router.weight".as_ptr();
    let router = wrong(&|x| (x.name, x.shape) = (name, [4i64, 8].as_ptr()));
    refused(router, "replace it by moesaic_layer_set_weight");
    let negative = [-3i64, 8];
    refused(wrong(&|x| x.shape = negative.as_ptr()), "has size -3");
    let huge = [i64::MAX, i64::MAX];
    refused(wrong(&|x| x.shape = huge.as_ptr()), "larger than memory");
    refused(forward(null(), T, &[good]), "argument `layer` is NULL");
    // SAFETY: NULL is refused.
    refused(
        unsafe { moesaic_forward(layer, null()) },
        "argument `call` is NULL",
    );
    // After all that the layer works.
    ok(forward(layer, T, &[x.c(), y.c()]));
    ok(forward(layer, 0, &[Owned::new("x", &[0, 8], 0).c()]));
    // SAFETY: nobody uses it any more.
    unsafe { moesaic_layer_free(layer) };
}

#[test]
fn gradients_of_16_bits_are_bound_as_such() {
    let opened = Opened::new(
        c"shape = { model_dim = 8, hidden_dim = 16, experts = 4, top_k = 2 }
          precision = { weights = 'bf16', expert_gradients = 'bf16' }",
    );
    let mut layer = null_mut();
    // SAFETY: the handles are live.
    ok(unsafe { moesaic_layer_without_weights(opened.engine, opened.spec, &mut layer) });
    let bind = |owned: &mut Owned, dtype: Dtype| {
        let mut tensor = owned.c();
        tensor.dtype = dtype as c_int;
        // SAFETY: the tensor is valid, and no call follows.
        unsafe { moesaic_layer_bind(layer, &tensor, 1) }
    };
    let mut matrix = Owned::new("grad.experts.up.weight", &[4, 16, 8], 0);
    refused(bind(&mut matrix, Dtype::F32), "is f32, expected bf16");
    ok(bind(&mut matrix, Dtype::Bf16));
    let mut router = Owned::new("grad.router.weight", &[4, 8], 0);
    refused(bind(&mut router, Dtype::Bf16), "is bf16, expected f32");
    ok(bind(&mut router, Dtype::F32));
    // SAFETY: nobody uses it any more.
    unsafe { moesaic_layer_free(layer) };
}

#[test]
fn a_layer_without_weights_reads_and_writes_where_they_are_bound() {
    let opened = Opened::new(SPEC);
    let owning = opened.layer(1);
    let mut layer = null_mut();
    // SAFETY: the handles are live.
    ok(unsafe { moesaic_layer_without_weights(opened.engine, opened.spec, &mut layer) });
    let (mut x, mut y) = (rows("x", 0), rows("y", 1));
    refused(forward(layer, T, &[x.c(), y.c()]), "is not bound");

    let mut weights = opened.weights();
    let mut gradients: Vec<Owned> = weights
        .iter()
        .map(|weight| {
            let name = format!("grad.{}", weight.name.to_str().unwrap());
            Owned::new(&name, &weight.shape, 0)
        })
        .collect();
    let bind = |tensors: &[Tensor]| {
        // SAFETY: the tensors are valid and live as long as the layer.
        unsafe { moesaic_layer_bind(layer, tensors.as_ptr(), tensors.len()) }
    };
    let tensors: Vec<Tensor> = weights.iter_mut().map(Owned::c).collect();
    ok(bind(&tensors));
    refused(bind(&[x.c()]), "name it in each call");
    let train = |layer: *const Layer, y: &mut Owned| {
        let (mut x, mut saved) = (rows("x", 0), null_mut());
        let tensors = [x.c(), y.c()];
        let call = call_of(T, &tensors);
        // SAFETY: the tensors are valid; x lives as long as the state.
        ok(unsafe { moesaic_forward_train(layer, &call, null(), &mut saved) });
        (x, saved)
    };
    let backward = |layer: *const Layer, saved: *const Saved, dx: &mut Owned| {
        let mut dy = rows("dy", 5);
        let tensors = [dy.c(), dx.c()];
        // SAFETY: the tensors are valid.
        unsafe { moesaic_backward(layer, saved, tensors.as_ptr(), 2, 0) }
    };
    let (_x, saved) = train(layer, &mut y);
    let mut dx = rows("dx", 2);
    refused(
        backward(layer, saved, &mut dx),
        "tensor `grad.router.weight` is not bound",
    );
    let tensors: Vec<Tensor> = gradients.iter_mut().map(Owned::c).collect();
    ok(bind(&tensors));
    ok(backward(layer, saved, &mut dx));

    let mut own_y = rows("y", 1);
    let (_own_x, own_saved) = train(owning, &mut own_y);
    let mut own_dx = rows("dx", 3).strided(10);
    ok(backward(owning, own_saved, &mut own_dx));
    let close = |a: &[f32], b: &[f32]| {
        let pairs = a.iter().zip(b);
        assert!(
            pairs.clone().all(|(a, b)| (a - b).abs() < 1e-4),
            "{a:?}, {b:?}"
        );
    };
    close(&y.values, &own_y.values);
    for (own, wanted) in own_dx.values.chunks(10).zip(dx.values.chunks(8)) {
        close(&own[..8], wanted);
    }
    for (weight, bound) in weights.iter().zip(&gradients) {
        let mut own = vec![0f32; bound.values.len()];
        let name = weight.name.as_ptr();
        // SAFETY: the room is that of the gradient.
        ok(unsafe { moesaic_layer_gradient(owning, name, own.as_mut_ptr(), own.len()) });
        close(&own, &bound.values);
        // SAFETY: nothing is written.
        let short = unsafe { moesaic_layer_gradient(owning, name, own.as_mut_ptr(), 1) };
        refused(short, "argument `count` is 1");
    }
    let mut room = [0f32];
    // SAFETY: nothing is written.
    let prefixed = unsafe {
        let name = c"grad.router.weight".as_ptr();
        moesaic_layer_gradient(owning, name, room.as_mut_ptr(), 1)
    };
    refused(
        prefixed,
        "`grad.router.weight`, expected a weight that has a gradient: router.weight, ",
    );
    refused(backward(owning, saved, &mut dx), "of another layer");
    // SAFETY: nobody uses them any more.
    unsafe {
        moesaic_saved_free(saved);
        moesaic_saved_free(own_saved);
        moesaic_layer_free(layer);
        moesaic_layer_free(owning);
    }
}

#[test]
fn ids_that_no_expert_has_are_refused() {
    let external = c"shape = { model_dim = 8, hidden_dim = 16, experts = 4, top_k = 2 }\n\
                     router = { kind = \"external\" }";
    let opened = Opened::new(external);
    let layer = opened.layer(0);
    let (mut x, mut y) = (rows("x", 0), rows("y", 1));
    let mut gates = Owned::new("topk_weights", &[T as i64, 2], 3);
    let mut ids = [0i32, 1, 2, 3, 0, 4];
    let mut list = Tensor {
        name: c"topk_ids".as_ptr(),
        dtype: Dtype::I32 as c_int,
        data: ids.as_mut_ptr().cast(),
        ..gates.c()
    };
    let status = forward(layer, T, &[x.c(), y.c(), gates.c(), list]);
    refused(status, "has 4 at element 5, expected -1..=3");
    let mut good = [0i32, 1, 2, 3, 0, -1];
    list.data = good.as_mut_ptr().cast();
    ok(forward(layer, T, &[x.c(), y.c(), gates.c(), list]));
    // SAFETY: nobody uses it any more.
    unsafe { moesaic_layer_free(layer) };
}

#[test]
fn handles_and_texts_that_cannot_be_are_refused() {
    let opened = Opened::new(SPEC);
    let (mut engine, mut spec, mut layer) = (null_mut(), null_mut(), null_mut());
    // SAFETY: what is NULL or wrong is refused.
    unsafe {
        let mut options = EngineOptions {
            target: c"quantum".as_ptr(),
            ..EngineOptions::default()
        };
        refused(
            moesaic_engine_open(&options, &mut engine),
            "an engine also takes `cpu`, `cuda` or `rocm`",
        );
        assert!(engine.is_null());
        (options.target, options.device) = (c"cpu".as_ptr(), 3);
        refused(
            moesaic_engine_open(&options, &mut engine),
            "argument `device` is 3, the number of a GPU, and the target `cpu`",
        );
        (options.device, options.cache) = (0, c"/dev/null/kernels".as_ptr());
        let status = moesaic_engine_open(&options, &mut engine);
        assert_eq!(status, Status::Unavailable, "{}", last());
        assert!(last().contains("/dev/null/kernels"), "{}", last());
        options.strict = 1;
        refused(
            moesaic_engine_open(&options, &mut engine),
            "argument `cache` is `/dev/null/kernels`, where no directory is",
        );
        (options.strict, options.cache) = (0, null());
        (options.target, options.stream) = (c"cpu".as_ptr(), (&raw mut engine).cast());
        refused(
            moesaic_engine_open(&options, &mut engine),
            "argument `stream` is a GPU's, and the target `cpu`",
        );
        options.target = c"cuda".as_ptr();
        let status = moesaic_engine_open(&options, &mut engine);
        assert_eq!(status, Status::Unavailable, "{}", last());
        refused(
            moesaic_engine_open(&options, null_mut()),
            "argument `out` is NULL",
        );
        refused(
            moesaic_spec_from_toml(c"shape = 3".as_ptr(), &mut spec),
            "spec:1",
        );
        let status = moesaic_spec_from_file(c"/nowhere.toml".as_ptr(), &mut spec);
        assert_eq!(status, Status::Unavailable);
        assert!(last().starts_with("/nowhere.toml: "), "{}", last());
        let status = moesaic_layer_open(opened.engine, opened.spec, null(), 0, null(), &mut layer);
        refused(status, "4 weights do not fit");
        let mut bias = Owned::new("experts.up.bias", &[4, 16], 0);
        let (from, spec) = (opened.engine, opened.spec);
        let status = moesaic_layer_open(from, spec, &bias.c(), 1, null(), &mut layer);
        refused(
            status,
            "`experts.up.bias` is no weight of the spec, which has: ",
        );
        let options = LayerOptions {
            keep: 2,
            ..LayerOptions::default()
        };
        let status =
            moesaic_layer_open(opened.engine, opened.spec, null(), 0, &options, &mut layer);
        refused(status, "set `training`");
        let status = moesaic_layer_from_hf(opened.engine, c"/nowhere".as_ptr(), 0, &mut layer);
        assert_eq!(status, Status::Unavailable);
        let whole = opened.layer(0);
        refused(
            moesaic_layer_set_strategy(whole, c"r=2".as_ptr()),
            "is of one process",
        );
        refused(moesaic_layer_set_strategy(whole, c"hop=2".as_ptr()), "hop");
        refused(moesaic_layer_reduce_gradients(whole, 0), "for inference");
        moesaic_layer_free(whole);
        let mut worlds = [null_mut(); 2];
        refused(
            moesaic_world_threads(opened.engine, 0, 0.0, worlds.as_mut_ptr()),
            "argument `size` is 0: a world has at least one rank",
        );
        let status = moesaic_world_threads(opened.engine, 2, -1.0, worlds.as_mut_ptr());
        refused(status, "argument `deadline` is -1");
        ok(moesaic_world_threads(
            opened.engine,
            1,
            0.0,
            worlds.as_mut_ptr(),
        ));
        let two = Parallel {
            ep: 2,
            expert_tp: 0,
            dp: 0,
            shard_shared: 0,
            world_scope: 0,
            placement: null(),
        };
        let mut mesh = null_mut();
        refused(moesaic_mesh_open(worlds[0], &two, &mut mesh), "2 ranks");
        ok(moesaic_world_finish(worlds[0]));
        // The other rank never comes, and nobody waits for it.
        let pair = moesaic_world_threads(opened.engine, 2, 2.0, worlds.as_mut_ptr());
        ok(pair);
        for (placement, words) in [(c"0-1 | 3", "expert 2"), (c"0-1 | 2 | 3", "on 3 groups")] {
            let placement = placement.as_ptr();
            let parallel = Parallel { placement, ..two };
            let status = moesaic_mesh_open(worlds[0], &parallel, &mut mesh);
            refused(status, "argument `placement`");
            refused(status, words);
        }
        worlds.iter().for_each(|world| moesaic_world_free(*world));
        // Freeing nothing is allowed.
        moesaic_engine_free(null_mut());
        moesaic_layer_free(null_mut());
        moesaic_world_free(null_mut());
    }
}

#[test]
fn two_handles_run_at_the_same_time() {
    let opened = Opened::new(SPEC);
    let layer = opened.layer(0);
    let mut other = null_mut();
    // SAFETY: the layer is live.
    ok(unsafe { moesaic_layer_handle(layer, &mut other) });
    let handles = [layer as usize, other as usize];
    let run = |handle: usize| {
        let (mut x, mut y) = (rows("x", 0), rows("y", 1));
        for _ in 0..20 {
            ok(forward(handle as *const Layer, T, &[x.c(), y.c()]));
        }
        y.values
    };
    let found = std::thread::scope(|scope| {
        let threads = handles.map(|handle| scope.spawn(move || run(handle)));
        threads.map(|thread| thread.join().unwrap())
    });
    assert_eq!(found[0], found[1]);
    // SAFETY: nobody uses them any more.
    unsafe {
        moesaic_layer_free(layer);
        moesaic_layer_free(other);
    }
}

#[test]
fn wrong_calls_of_shared_experts_are_refused() {
    let opened = Opened::new(SPEC);
    let other = Opened::new(c"shape = { model_dim = 8, hidden_dim = 24, experts = 4, top_k = 2 }");
    let mut weights = opened.weights();
    let tensors: Vec<Tensor> = weights.iter_mut().map(Owned::c).collect();
    let list = TensorList {
        tensors: tensors.as_ptr(),
        count: 1,
    };
    let (mut gates, mut over, bank) = (null_mut(), null_mut(), opened.layer(0));
    let mut unbound = null_mut();
    let (engine, spec) = (opened.engine, opened.spec);
    let (first, count) = (tensors.as_ptr(), tensors.len());
    // SAFETY: the pointers are valid, or such as are refused.
    unsafe {
        let layer_over = moesaic_layer_over_experts_of;
        let elsewhere = layer_over(engine, bank, other.spec, first, 1, &mut over);
        refused(elsewhere, "experts.gate.weight");
        let experts_too = layer_over(engine, bank, spec, first, count, &mut over);
        refused(experts_too, "is the bank's");
        ok(moesaic_layer_without_weights(engine, spec, &mut unbound));
        refused(
            layer_over(engine, unbound, spec, first, 1, &mut over),
            "bind the same experts",
        );
        refused(
            moesaic_layer_zero_gradients(unbound),
            "where they are bound",
        );
        assert_eq!(moesaic_multi_gate_in_one_pass(null()), 0);

        let open = moesaic_multi_gate_open;
        let none = open(engine, spec, first, count, null(), 0, null(), &mut gates);
        refused(none, "a layer for each router");
        assert!(gates.is_null() && over.is_null());
        let lists = [list, list];
        let twice = open(
            engine,
            spec,
            first,
            count,
            lists.as_ptr(),
            2,
            null(),
            &mut gates,
        );
        refused(twice, "`router.weight` is each router's own");
        let experts = TensorList {
            tensors: first.add(1),
            count: 1,
        };
        let lost = [list, experts];
        let (common, rest) = (first.add(1), count - 1);
        let lists_lost = lost.as_ptr();
        let misplaced = open(
            engine,
            spec,
            common,
            rest,
            lists_lost,
            2,
            null(),
            &mut gates,
        );
        refused(misplaced, "is no router's");
        ok(open(
            engine,
            spec,
            common,
            rest,
            lists.as_ptr(),
            2,
            null(),
            &mut gates,
        ));

        let (mut x, mut y) = (rows("x", 0), rows("y", 1));
        let (mut all, mut dy) = (Owned::new("y", &[2, T as i64, 8], 1), rows("dy", 1));
        let run = |tensors: &[Tensor]| {
            let call = call_of(T, tensors);
            moesaic_multi_gate_forward(gates, &call)
        };
        refused(run(&[x.c(), y.c()]), "has shape [3, 8], expected [2, 3, 8]");
        refused(run(&[x.c(), dy.c()]), "`dy`");
        refused(run(&[all.c()]), "`x`");
        ok(run(&[x.c(), all.c()]));
        ok(forward(bank, T, &[x.c(), y.c()]));
        assert_eq!(all.values, [y.values.clone(), y.values.clone()].concat());
        let (mut wrong, mut right) = ([0i32, 2, 1], [0i32, 0, 1]);
        let list = |numbers: &mut [i32; T]| Tensor {
            name: c"router_ids".as_ptr(),
            data: numbers.as_mut_ptr().cast(),
            dtype: Dtype::I32 as c_int,
            dims: 1,
            shape: &(T as i64),
            strides: null(),
        };
        let (no_ids, ids) = (list(&mut wrong), list(&mut right));
        refused(run(&[x.c(), all.c(), ids]), "expected [3, 8]");
        refused(run(&[x.c(), y.c(), no_ids]), "`router_ids`");
        let floats = Tensor { dtype: 0, ..ids };
        refused(run(&[x.c(), y.c(), floats]), "expected i32");
        ok(run(&[x.c(), y.c(), ids]));
        let mut numbers = [0.0; 32];
        let name = c"router.weight".as_ptr();
        let gradient = moesaic_multi_gate_gradient(gates, 2, name, numbers.as_mut_ptr(), 32);
        refused(gradient, "there are 2 routers");
        moesaic_multi_gate_free(gates);
        moesaic_multi_saved_free(null_mut());
        moesaic_layer_free(unbound);
        moesaic_layer_free(bank);
    }
}

#[test]
fn records_that_cannot_be_are_refused() {
    let opened = Opened::new(SPEC);
    let (mut record, mut spec) = (null_mut(), null_mut());
    let mut ids = [0i32, 1, 2, 3, 1, 1];
    let shape = [1i64, 3, 2];
    let list = Tensor {
        name: c"routed_experts".as_ptr(),
        data: ids.as_mut_ptr().cast(),
        dtype: Dtype::I32 as c_int,
        dims: 3,
        shape: shape.as_ptr(),
        strides: null(),
    };
    let mut table = [0i32; 2];
    // SAFETY: the pointers are valid, or such as are refused.
    unsafe {
        let flat = Tensor { dims: 2, ..list };
        refused(moesaic_record_open(&flat, &mut record), "expected [tokens");
        let floats = Tensor { dtype: 0, ..list };
        refused(moesaic_record_open(&floats, &mut record), "expected i32");
        let status = moesaic_record_read(c"/nowhere.npy".as_ptr(), &mut record);
        assert_eq!(status, Status::Unavailable, "{}", last());
        ok(moesaic_record_open(&list, &mut record));
        let mut replay = |layer, count| {
            moesaic_record_replay(
                record,
                opened.spec,
                layer,
                table.as_mut_ptr(),
                count,
                &mut spec,
            )
        };
        refused(replay(3, 2), "3");
        refused(replay(2, 2), "twice");
        refused(replay(1, 1), "argument `count` is 1");
        ok(replay(1, 2));
        assert_eq!(table, [2, 3]);
        refused(moesaic_record_sizes(record, null_mut()), "`sizes` is NULL");
        moesaic_spec_free(spec);
        moesaic_record_free(record);
        moesaic_record_free(null_mut());
    }
}
