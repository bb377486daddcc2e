//! On CPUs a token's output has the same bytes in any batch, and packed weights
//! give what plain ones do.

use super::Case;
use super::case::floats;
use super::layers::engines;
use moesaic::spec::LayerSpec;
use moesaic::{DType, Engine, Target, Training};
use moesaic_harness::thorough::takes;

/// Wide enough for several slices, strips and row groups, and odd.
const SPEC: &str = "shape = { model_dim = 611, hidden_dim = 75, experts = 3, top_k = 2 }\n\
                    experts = { bias = true, clamp = 3.0 }\n\
                    shared = [{ hidden_dim = 300 }]\n";

fn spec(dtype: DType) -> LayerSpec {
    let mut spec = LayerSpec::from_toml(SPEC).unwrap();
    spec.precision.weights = dtype;
    spec.precision.activations = dtype;
    spec
}

fn cpus() -> impl Iterator<Item = Engine> {
    let all = engines().into_iter();
    all.filter(|engine| matches!(engine.target(), Target::Cpu(_)))
}

fn bits(values: &[f64]) -> Vec<u64> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// A token's output is the same bytes alone and among others.
pub fn alone(engine: &Engine, dtype: DType) {
    let case = Case::random(&spec(dtype), 140, 1);
    let layer = case.layer(engine);
    let batch = floats(&layer.forward(&case.input()).unwrap(), "y");
    for token in [0, 77, 139] {
        let row = token * 611..(token + 1) * 611;
        let mut one = Case::random(&case.spec, 1, 1);
        one.input.x = case.input.x[row.clone()].to_vec();
        let alone = floats(&layer.forward(&one.input()).unwrap(), "y");
        let what = case.describe();
        assert_eq!(bits(&alone), bits(&batch[row]), "token {token}: {what}");
    }
}

/// Packed weights give what those do that a block transposes.
pub fn packed_as_plain(engine: &Engine, dtype: DType) {
    let case = Case::random(&spec(dtype), 50, 2);
    let weights = case.host_weights();
    let trained = engine.training_layer(&case.spec, &weights, Training::default());
    let plain = trained.unwrap().forward(&case.input()).unwrap();
    let packed = case.layer(engine).forward(&case.input()).unwrap();
    let [plain, packed] = [&plain, &packed].map(|output| bits(&floats(output, "y")));
    assert_eq!(plain, packed, "{}", case.describe());
}

#[test]
fn a_token_has_the_same_bytes_alone_and_in_a_batch() {
    for engine in cpus() {
        for dtype in [DType::F32, DType::Bf16] {
            alone(&engine, dtype);
        }
    }
}

#[test]
fn packed_and_plain_weights_give_the_same_bytes() {
    for (n, engine) in cpus().enumerate() {
        for (d, dtype) in [DType::F32, DType::Bf16, DType::F16]
            .into_iter()
            .enumerate()
        {
            if takes(n + d, 2) {
                packed_as_plain(&engine, dtype);
            }
        }
    }
}

#[test]
fn packed_weights_can_be_replaced_one_at_a_time() {
    for engine in cpus() {
        let (first, other) = (
            Case::random(&spec(DType::Bf16), 9, 3),
            Case::random(&spec(DType::Bf16), 9, 4),
        );
        let layer = first.layer(&engine);
        assert!(layer.weight_ptr("experts.gate.weight").is_none());
        assert!(layer.weight_ptr("experts.gate.bias").is_some());
        for (name, tensor) in other.host_weights().iter() {
            layer.set_weight(name, tensor).unwrap();
        }
        let replaced = layer.forward(&first.input()).unwrap();
        let made = other.layer(&engine).forward(&first.input()).unwrap();
        assert_eq!(replaced.y(), made.y(), "{}", first.describe());
    }
}

#[test]
fn a_layer_holds_its_weights_once() {
    let engine = cpus().next().unwrap();
    let case = Case::random(&spec(DType::F32), 1, 5);
    let plan = case.layer(&engine).plan().clone();
    for matrix in ["gate", "up", "down"] {
        let weight = plan.id(&format!("experts.{matrix}.weight"));
        assert!(plan.packs_away(weight.expect("a weight")));
    }
    let training = engine.tilings(&case.spec, Some(Training::default()));
    assert!(training.unwrap().first().prepare.is_empty());
}
