//! Generated layers, compiled and run on the CPU, against the reference.

#![deny(missing_docs, warnings)]

mod inputs;
mod mesh;

use crate::conformance::quick;
use half::{bf16, f16};
use moesaic::reference::{self, Random};
use moesaic::target::Buffer;
use moesaic::tensor::Element;
use moesaic::typed::{Array, In, KernelArgsError, Launcher, Out, TypedLayer, rows, tensor};
use moesaic::{Engine, EngineError, EngineOptions, LayerSpec, RngKey, Training};
use std::sync::LazyLock;

moesaic::layer! {
    /// Top-2 of five experts, with widths that no vector size divides.
    struct Odd {
        name = "odd" // as in TOML, with Rust's comments
        shape = { model_dim = 19, hidden_dim = 13, experts = 5, top_k = 2, output_dim = 9 }
        [router] renormalize = "sum"
    }

    /// The caller chooses the experts.
    pub(crate) struct Outside {
        [shape] model_dim = 16 hidden_dim = 24 experts = 4 top_k = 3
        [precision] weights = "bf16" activations = "bf16"
        [router] kind = "external"
        [[shared]] hidden_dim = 8
    }

    /// A table looks up the experts of each token.
    pub struct Looked {
        [shape] model_dim = 8 hidden_dim = 12 experts = 6 top_k = 1
        [precision] weights = "f16" activations = "f16"
        [router] kind = "table" table_rows = 10
        [capacity] mode = "bounded" factor = 1.0
    }

    /// A spec in a file.
    pub struct Switch = "../examples/specs/switch-base-8.toml";
}

/// One engine for all tests, so that no kernel is compiled twice.
static ENGINE: LazyLock<Engine> = LazyLock::new(|| {
    let options = EngineOptions {
        store: None,
        poison: true,
        ..EngineOptions::default()
    };
    quick::open("cpu", options).unwrap()
});

/// Reference weights as flat slices of a field's type.
struct Stored(reference::Weights);

impl Stored {
    fn new(spec: &LayerSpec, seed: u64) -> Stored {
        Stored(reference::Weights::random(spec, seed).rounded(spec))
    }

    fn flat<E: Element>(&self, name: &str, convert: fn(f64) -> E) -> Vec<E> {
        self.0
            .get(name)
            .data
            .iter()
            .map(|&value| convert(value))
            .collect()
    }
}

fn f32s(stored: &Stored, name: &str) -> Vec<f32> {
    stored.flat(name, |value| value as f32)
}

/// Returns random tokens, and the same tokens as the reference takes them.
fn tokens<A: Array>(
    count: usize,
    convert: fn(f64) -> A::Element,
    back: fn(A::Element) -> f64,
) -> (Vec<A>, reference::Input) {
    let values = Random::new(5).vec(count * A::ELEMENTS);
    let flat: Vec<A::Element> = values.into_iter().map(convert).collect();
    let x = flat.iter().map(|&value| back(value)).collect();
    let input = reference::Input {
        tokens: count,
        x,
        ..reference::Input::default()
    };
    (rows(&flat).unwrap().to_vec(), input)
}

fn assert_close(found: impl IntoIterator<Item = f64>, expected: &[f64], tolerance: f64) {
    let found: Vec<f64> = found.into_iter().collect();
    assert_eq!(found.len(), expected.len());
    let scale = expected
        .iter()
        .fold(0.0, |most: f64, value| most.max(value.abs()));
    assert!(scale > 0.0, "the test compares zeros");
    for (at, (found, expected)) in found.iter().zip(expected).enumerate() {
        let error = (found - expected).abs();
        assert!(
            error <= tolerance * scale,
            "element {at} is {found}, expected {expected}"
        );
    }
}

/// Returns an `Odd` with random weights.
fn odd() -> (Odd, Stored) {
    odd_by(|weights| Odd::new(&ENGINE, weights).unwrap())
}

/// Returns what `make` makes of the weights of [`odd`], and these.
fn odd_by(make: impl FnOnce(&OddWeights) -> Odd) -> (Odd, Stored) {
    let stored = Stored::new(&Odd::spec(), 3);
    let router = f32s(&stored, "router.weight");
    let gate = f32s(&stored, "experts.gate.weight");
    let up = f32s(&stored, "experts.up.weight");
    let down = f32s(&stored, "experts.down.weight");
    let weights = OddWeights {
        router_weight: tensor(&router).unwrap(),
        experts_gate_weight: tensor(&gate).unwrap(),
        experts_up_weight: tensor(&up).unwrap(),
        experts_down_weight: tensor(&down).unwrap(),
    };
    (make(&weights), stored)
}

#[test]
fn a_linear_router_in_f32() {
    let (layer, stored) = odd();
    let (x, input) = tokens::<[f32; 19]>(37, |v| v as f32, f64::from);
    let expected = reference::forward(&Odd::spec(), &stored.0, &input);
    let output = layer.forward_all(&x).unwrap();
    assert_close(
        output.y.as_flattened().iter().map(|&v| v.into()),
        &expected.y,
        1e-5,
    );
    assert_eq!(output.topk_ids.as_flattened(), expected.topk_ids);
    assert_eq!(output.counts[..], expected.counts);
    assert_eq!(output.locations.as_flattened(), expected.locations);
    let logits = output
        .router_logits
        .as_flattened()
        .iter()
        .map(|&v| v.into());
    assert_close(logits, &expected.logits.unwrap(), 1e-5);
    assert_eq!(layer.forward(&x).unwrap(), output.y);
    assert_eq!(output.row_slots.len(), 37 * Odd::TOP_K);
}

#[test]
fn forward_and_backward() {
    let training = Training::default();
    let (layer, stored) = odd_by(|weights| Odd::training(&ENGINE, weights, training).unwrap());
    let (x, input) = tokens::<[f32; 19]>(23, |v| v as f32, f64::from);
    let dy: Vec<[f32; 9]> = x.iter().map(|row| *row.first_chunk().unwrap()).collect();
    let flat_dy: Vec<f64> = dy.as_flattened().iter().map(|&v| v.into()).collect();
    let expected = reference::backward(&Odd::spec(), &stored.0, &input, &flat_dy);
    let forward = layer.forward_train(&x, RngKey::default()).unwrap();
    assert_eq!(forward.output.y, odd().0.forward(&x).unwrap());
    let first = layer.backward(&forward.saved, &dy, false).unwrap();
    let dx = first.dx.as_flattened().iter().map(|&v| v.into());
    assert_close(dx, &expected.x, 1e-5);
    let second = layer.backward(&forward.saved, &dy, true).unwrap();
    assert_eq!(first, second, "gradients of inputs are not added up");
    let found = layer.gradients().unwrap();
    for (name, found) in [
        ("router.weight", found.router_weight),
        ("experts.gate.weight", found.experts_gate_weight),
        ("experts.up.weight", found.experts_up_weight),
        ("experts.down.weight", found.experts_down_weight),
    ] {
        let halves = found.iter().map(|&v| f64::from(v) / 2.0);
        assert_close(halves, &expected.weights[name].data, 1e-5);
    }
}

#[test]
fn no_tokens_and_one_token() {
    let (layer, _) = odd();
    assert_eq!(layer.forward(&[]).unwrap(), Vec::<[f32; 9]>::new());
    let none = layer.forward_all(&[]).unwrap();
    assert_eq!((none.counts, none.topk_ids), ([0; 5], vec![]));
    assert_eq!(layer.forward(&[[0.5; 19]]).unwrap().len(), 1);
}

#[test]
fn routing_from_outside_in_bf16() {
    let stored = Stored::new(&Outside::spec(), 4);
    let named = |name| stored.flat(name, bf16::from_f64);
    let (gate, up) = (named("experts.gate.weight"), named("experts.up.weight"));
    let (down, shared_gate) = (named("experts.down.weight"), named("shared.0.gate.weight"));
    let (shared_up, shared_down) = (named("shared.0.up.weight"), named("shared.0.down.weight"));
    let weights = OutsideWeights {
        experts_gate_weight: tensor(&gate).unwrap(),
        experts_up_weight: tensor(&up).unwrap(),
        experts_down_weight: tensor(&down).unwrap(),
        shared_0_gate_weight: tensor(&shared_gate).unwrap(),
        shared_0_up_weight: tensor(&shared_up).unwrap(),
        shared_0_down_weight: tensor(&shared_down).unwrap(),
    };
    let layer = Outside::new(&ENGINE, &weights).unwrap();
    let (x, mut input) = tokens::<[bf16; 16]>(3, bf16::from_f64, f64::from);
    let (ids, shares) = ([[3, 0, -1], [1, 2, 0], [2, 3, 1]], [[0.5f32, 0.25, 0.0]; 3]);
    let flat = shares.as_flattened().iter().map(|&share| f64::from(share));
    input.routing = Some((ids.as_flattened().to_vec(), flat.collect()));
    let expected = reference::forward(&Outside::spec(), &stored.0, &input);
    let y = layer.forward(&x, &ids, &shares).unwrap();
    assert_close(
        y.as_flattened().iter().map(|&v| v.into()),
        &expected.y,
        0.02,
    );

    let error = layer
        .forward(&x, &ids[..2], &shares)
        .unwrap_err()
        .to_string();
    assert_eq!(error, "input `topk_ids`: has shape [2, 3], expected [3, 3]");
    let error = layer
        .forward(&x, &[[4; 3]; 3], &shares)
        .unwrap_err()
        .to_string();
    assert_eq!(
        error,
        "input `topk_ids`: has 4 at element 0, expected -1..=3"
    );
}

#[test]
fn looked_up_experts_with_a_capacity_in_f16() {
    let spec = Looked::spec();
    let mut stored = Stored::new(&spec, 6);
    let table: [[i32; 1]; 10] = [[0], [0], [0], [5], [4], [3], [0], [2], [1], [0]];
    let flat = table
        .as_flattened()
        .iter()
        .map(|&id| f64::from(id))
        .collect();
    stored.0.0.insert(
        "router.table".into(),
        reference::Tensor {
            shape: vec![10, 1],
            data: flat,
        },
    );
    let router = f32s(&stored, "router.weight");
    let named = |name| stored.flat(name, f16::from_f64);
    let (gate, up) = (named("experts.gate.weight"), named("experts.up.weight"));
    let down = named("experts.down.weight");
    let weights = LookedWeights {
        router_weight: tensor(&router).unwrap(),
        router_table: &table,
        experts_gate_weight: tensor(&gate).unwrap(),
        experts_up_weight: tensor(&up).unwrap(),
        experts_down_weight: tensor(&down).unwrap(),
    };
    let layer = Looked::new(&ENGINE, &weights).unwrap();
    let (x, mut input) = tokens::<[f16; 8]>(9, f16::from_f64, f64::from);
    let ids = [0, 1, 2, 3, 9, 6, 0, 8, 7];
    input.token_ids = Some(ids.to_vec());
    let expected = reference::forward(&spec, &stored.0, &input);
    let output = layer.forward_all(&x, &ids).unwrap();
    assert_close(
        output.y.as_flattened().iter().map(|&v| v.into()),
        &expected.y,
        0.005,
    );
    assert_eq!(Some(output.capacity), expected.capacity);
    assert_eq!(output.overflow, expected.overflow);
    assert!(output.overflow > 0, "the test drops nothing");
    let routed = layer.route(&x, &ids).unwrap();
    assert_eq!(routed.locations, output.locations);
    input.capacity_factor = Some(2.0);
    let expected = reference::forward(&spec, &stored.0, &input);
    let roomy = layer.forward_at(2.0, &x, &ids).unwrap();
    assert_eq!(Some(roomy.capacity), expected.capacity);
    assert_ne!(roomy.capacity, output.capacity);
    assert_eq!(roomy.locations.as_flattened(), expected.locations);
}

#[test]
fn weights_by_name_are_checked() {
    let (_, stored) = odd();
    let (up, down) = (
        f32s(&stored, "experts.up.weight"),
        f32s(&stored, "experts.down.weight"),
    );
    let router = f32s(&stored, "router.weight");
    let weights = OddWeights {
        router_weight: tensor(&router).unwrap(),
        experts_gate_weight: tensor(&up).unwrap(),
        experts_up_weight: tensor(&up).unwrap(),
        experts_down_weight: tensor(&down).unwrap(),
    };
    assert!(Odd::from_named(&ENGINE, &weights.named()).is_ok());
    let wrong = weights.named().with("experts.up.weight", &[5, 19, 13], &up);
    let error = Odd::from_named(&ENGINE, &wrong).err().unwrap().to_string();
    assert_eq!(
        error,
        "weight `experts.up.weight`: has shape [5, 19, 13], expected [5, 13, 19]"
    );
    let empty = moesaic::Tensors::new();
    let Err(EngineError::Weights(missing)) = Odd::from_named(&ENGINE, &empty) else {
        panic!("all four weights are missing");
    };
    let of_one = |error: &EngineError| matches!(error, EngineError::Weight { .. });
    assert!(
        missing.len() == 4 && missing.iter().all(of_one),
        "{missing:?}"
    );
}

/// Returns device memory that holds `values`.
fn upload<A: Array>(values: &[A]) -> Buffer {
    let bytes: Vec<u8> = A::flatten(values)
        .iter()
        .flat_map(|v| bytes_of(v).to_vec())
        .collect();
    let buffer = ENGINE.device().alloc(bytes.len()).unwrap();
    ENGINE.device().upload(&bytes, &buffer, 0).unwrap();
    buffer
}

fn bytes_of<E: Element>(value: &E) -> Vec<u8> {
    moesaic::Tensor::new(&[1], std::slice::from_ref(value))
        .data
        .to_vec()
}

fn download(buffer: &Buffer, count: usize) -> Vec<f32> {
    let mut bytes = vec![0; count * 4];
    ENGINE.device().download(buffer, 0, &mut bytes).unwrap();
    bytes
        .as_chunks()
        .0
        .iter()
        .map(|&value| f32::from_le_bytes(value))
        .collect()
}

#[test]
fn calls_on_device_memory() {
    let (layer, _) = odd();
    let (x, _) = tokens::<[f32; 19]>(11, |v| v as f32, f64::from);
    let (input, output) = (upload(&x), ENGINE.device().alloc(11 * 9 * 4).unwrap());
    let call = OddRaw {
        tokens: 11,
        x: In::of(&input),
        y: Out::of(&output),
    };
    // SAFETY: both buffers hold 11 rows and outlive the download, which waits.
    unsafe { layer.forward_raw(&call).unwrap() };
    let y = layer.forward(&x).unwrap();
    assert_eq!(download(&output, 11 * 9), y.as_flattened());
}

#[test]
fn one_kernel_by_itself() {
    use odd_kernels::gate_topk::GateLogits;
    let (layer, stored) = odd();
    let kernels = ENGINE.kernels(&Odd::spec()).unwrap();
    let launcher: Launcher<GateLogits> = Launcher::new(&kernels).unwrap();
    let (x, _) = tokens::<[f32; 19]>(11, |v| v as f32, f64::from);
    let weight = upload(&f32s(&stored, "router.weight"));
    let (input, logits) = (upload(&x), ENGINE.device().alloc(11 * 5 * 4).unwrap());
    let mut args = GateLogits {
        x: In::of(&input),
        weight: In::of(&weight),
        logits: Out::of(&logits),
        tokens: 11,
    };
    // SAFETY: the buffers have the shapes in the docs of the fields and
    // outlive the download, which waits.
    unsafe { launcher.launch(&args).unwrap() };
    let expected = layer.forward_all(&x).unwrap().router_logits;
    assert_eq!(download(&logits, 11 * 5), expected.as_flattened());
    args.tokens = -1;
    // SAFETY: nothing is launched.
    let error = unsafe { launcher.launch(&args).unwrap_err().to_string() };
    assert!(error.contains("-1 tokens"), "{error}");
}

#[test]
fn arguments_of_another_layer_are_refused() {
    let kernels = ENGINE.kernels(&Odd::spec()).unwrap();
    let error = Launcher::<looked_kernels::combine::Combine>::new(&kernels)
        .err()
        .unwrap();
    assert!(matches!(error, KernelArgsError::Differs { .. }), "{error}");
    let text = error.to_string();
    assert!(
        text.contains("out: In<f16>") && text.contains("now (out: In<f32>"),
        "{text}"
    );
    let shared =
        Launcher::<outside_kernels::grouped_gemm_up_shared_0::GroupedGemmUp>::new(&kernels);
    let text = shared.err().unwrap().to_string();
    assert!(
        text.contains("no kernel entry `grouped_gemm_up_shared_0::grouped_gemm_up`"),
        "{text}"
    );
    assert!(text.contains("gate_topk::gate_logits"), "{text}");
}

#[test]
fn a_file_and_a_name() {
    assert_eq!(Switch::spec().name, "switch-base-8");
    assert_eq!(Odd::spec().name, "odd");
    assert_eq!(
        Looked::spec().name,
        "Looked",
        "without a name it has that of the type"
    );
    assert_eq!(
        (Switch::MODEL_DIM, Switch::TOP_K, Odd::OUTPUT_DIM),
        (768, 1, 9)
    );
}
