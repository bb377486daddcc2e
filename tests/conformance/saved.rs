//! Training through the engine: what is kept, for how long, and what a caller
//! is told who mixes things up.

use super::Case;
use super::layers::engine;
use moesaic::reference::Random;
use moesaic::spec::LayerSpec;
use moesaic::target::Buffer;
use moesaic::{
    DType, EngineError, Layer, RawBackward, RawCall, Recompute, RngKey, Saved, Tensor, Training,
};
use std::collections::BTreeMap;

const SPEC: &str = "shape = { model_dim = 24, hidden_dim = 20, experts = 5, top_k = 2 }\n\
    [router]\nrenormalize = \"sum\"\n[experts]\nbias = true\n[[shared]]\nhidden_dim = 12\n";

fn spec() -> LayerSpec {
    LayerSpec::from_toml(SPEC).unwrap()
}

/// A layer that can run backward, and tokens for it.
fn layer(seed: u64) -> (Layer, Case) {
    let case = Case::random(&spec(), 40, seed);
    let engine = engine();
    let layer = engine
        .training_layer(&case.spec, &case.host_weights(), Training::default())
        .unwrap();
    (layer, case)
}

fn dy(tokens: usize, seed: u64) -> Tensor<'static> {
    let values = Random::new(seed).vec(tokens * 24);
    Tensor::owned(&[tokens, 24], values.iter().map(|&v| v as f32).collect())
}

fn forward(layer: &Layer, case: &Case) -> Saved {
    let passed = layer.forward_train(&case.input(), RngKey::default());
    passed.unwrap().1
}

fn gradients(layer: &Layer) -> BTreeMap<String, Vec<f32>> {
    let all = layer.gradients().unwrap().into_iter();
    all.map(|(name, tensor)| (name, tensor.to_f32())).collect()
}

#[test]
fn calls_can_overlap_and_gradients_add_up() {
    let (layer, first) = layer(1);
    let second = Case::random(&spec(), 7, 2);
    let alone = |case: &Case, seed| {
        let saved = forward(&layer, case);
        let dy = dy(case.input.tokens, seed);
        let dx = layer.backward(&saved, &dy, false).unwrap();
        (dx.into_tensors(), gradients(&layer))
    };
    let (dx_first, of_first) = alone(&first, 3);
    let (dx_second, of_second) = alone(&second, 4);
    // Both forward passes come first, and the last call goes backward first.
    let (a, b) = (forward(&layer, &first), forward(&layer, &second));
    let dx = layer.backward(&b, &dy(7, 4), false).unwrap();
    assert_eq!(dx.into_tensors(), dx_second);
    let dx = layer.backward(&a, &dy(40, 3), true).unwrap();
    assert_eq!(dx.into_tensors(), dx_first);
    for (name, sum) in gradients(&layer) {
        let parts = of_second[&name].iter().zip(&of_first[&name]);
        let expected: Vec<f32> = parts.map(|(b, a)| b + a).collect();
        assert_eq!(sum, expected, "{name}");
    }
    layer.zero_gradients().unwrap();
    let all = gradients(&layer);
    assert!(all.values().flatten().all(|v| v.to_bits() == 0));
}

#[test]
fn bytes_kept_are_the_formula() {
    let mut spec = LayerSpec::from_toml(
        "shape = { model_dim = 64, hidden_dim = 48, experts = 8, top_k = 2 }\n\
         precision = { weights = \"bf16\", activations = \"bf16\" }",
    )
    .unwrap();
    spec.name = "kept".to_string();
    let case = Case::random(&spec, 4, 9);
    let (t, d, h, k, e) = (100, 64, 48, 2, 8);
    let record = 4 * 4 * t * k + 4 * t * e + 12 * (e + 1);
    for (recompute, expected) in [
        (Recompute::None, 2 * t * d + 4 * t * k * h + record),
        (Recompute::Hidden, 2 * t * d + record),
        (Recompute::All, 2 * t * d),
    ] {
        let training = Training { recompute };
        let layer = engine().training_layer(&spec, &case.host_weights(), training);
        assert_eq!(
            layer.unwrap().saved_bytes(t as usize),
            expected,
            "{recompute:?}"
        );
    }
}

#[test]
fn weights_can_be_replaced() {
    let (layer, case) = layer(5);
    let other = Case::random(&spec(), 40, 6);
    for (name, tensor) in other.host_weights().iter() {
        layer.set_weight(name, tensor).unwrap();
    }
    let replaced = layer.forward(&case.input()).unwrap();
    let made = engine().layer(&case.spec, &other.host_weights()).unwrap();
    assert_eq!(replaced.y(), made.forward(&case.input()).unwrap().y());
    let router = Tensor::owned(&[24, 5], vec![0f32; 120]);
    let error = layer.set_weight("router.weight", &router).unwrap_err();
    assert_eq!(
        error.to_string(),
        "weight `router.weight`: has shape [24, 5], expected [5, 24]"
    );
    let error = layer.set_weight("router.wait", &router).unwrap_err();
    assert!(error.to_string().contains("router.weight"), "{error}");
}

#[test]
fn gradients_are_where_their_addresses_say() {
    let (layer, case) = layer(13);
    let saved = forward(&layer, &case);
    layer.backward(&saved, &dy(40, 14), false).unwrap();
    for (name, gradient) in gradients(&layer) {
        let address = layer.gradient_ptr(&name).unwrap().expect("it has one");
        // SAFETY: on a CPU this is the layer's memory, and no pass writes it meanwhile.
        let there = unsafe { std::slice::from_raw_parts(address.0 as *const f32, gradient.len()) };
        assert_eq!(there, gradient, "{name}");
    }
    assert_eq!(layer.gradient_ptr("router.bias").unwrap(), None);
}

#[test]
fn mistakes_are_named() {
    let (layer, case) = layer(7);
    let inference = engine().layer(&case.spec, &case.host_weights()).unwrap();
    let refused = inference.forward_train(&case.input(), RngKey::default());
    assert!(matches!(refused, Err(EngineError::NotTraining)));
    assert!(matches!(
        inference.gradients(),
        Err(EngineError::NotTraining)
    ));
    let refused = inference.gradient_ptr("router.weight");
    assert!(matches!(refused, Err(EngineError::NotTraining)));
    let saved = forward(&layer, &case);
    let (other, _) = self::layer(8);
    let error = other.backward(&saved, &dy(40, 1), false).err().unwrap();
    assert!(matches!(error, EngineError::ForeignSaved), "{error}");
    let error = layer.backward(&saved, &dy(39, 1), false).err().unwrap();
    assert_eq!(
        error.to_string(),
        "input `dy`: has shape [39, 24], expected [40, 24]"
    );
    let wide = Tensor {
        dtype: DType::F16,
        ..dy(40, 1)
    };
    let error = layer.backward(&saved, &wide, false).err().unwrap();
    assert_eq!(error.to_string(), "input `dy`: is f16, expected f32");
    let error = layer.gradient("router.bias").err().unwrap();
    assert!(error.to_string().contains("grad.router.weight"), "{error}");
}

/// Device memory with these bytes in it.
fn upload(layer: &moesaic::Engine, bytes: &[u8]) -> Buffer {
    let buffer = layer.device().alloc(bytes.len()).unwrap();
    layer.device().upload(bytes, &buffer, 0).unwrap();
    buffer
}

#[test]
fn raw_calls_are_host_calls() {
    let case = Case::random(&spec(), 19, 11);
    let engine = engine();
    let layer = engine
        .training_layer(&case.spec, &case.host_weights(), Training::default())
        .unwrap();
    let host_saved = forward(&layer, &case);
    let dy = dy(19, 12);
    let expected = layer.backward(&host_saved, &dy, false).unwrap();
    let expected_gradients = gradients(&layer);
    let x = upload(&engine, &case.input().tensors["x"].data);
    let (dy, dx) = (
        upload(&engine, &dy.data),
        upload(&engine, &vec![0; 19 * 24 * 4]),
    );
    let y = upload(&engine, &vec![0; 19 * 24 * 4]);
    let tensors = [("x", x.ptr()), ("y", y.ptr())];
    // SAFETY: the buffers hold 19 rows of 24 floats and outlive the download,
    // which waits.
    let call = unsafe { RawCall::new(19, &tensors) };
    let tensors = [("dy", dy.ptr()), ("dx", dx.ptr())];
    // SAFETY: nothing is launched.
    let back = unsafe { RawBackward::new(&tensors) };
    let (_, saved) = layer.forward_train(call, RngKey::default()).unwrap();
    layer.backward(&saved, back, false).unwrap();
    let mut found = vec![0; 19 * 24 * 4];
    engine.device().download(&dx, 0, &mut found).unwrap();
    assert_eq!(found, expected.get("dx").unwrap().data.to_vec());
    assert_eq!(gradients(&layer), expected_gradients);
    // SAFETY: as above.
    let nothing = unsafe { RawBackward::new(&[]) };
    let error = layer.backward(&host_saved, nothing, false).unwrap_err();
    assert_eq!(
        error.to_string(),
        "input `dy`: has no address: add it to the call's tensors"
    );
}
