//! The CPU kernels, stem by stem, against the reference.

mod rig;

use moesaic_kernel::{CpuIsa, DType};
use moesaic_spec::*;
use rig::{Rig, check, isas};

fn spec(d: usize, h: usize, e: usize, k: usize) -> LayerSpec {
    let text = format!(
        r#"{{"shape":{{"model_dim":{d},"hidden_dim":{h},"experts":{e},"top_k":{k}}}}}"#
    );
    serde_json::from_str(&text).unwrap()
}

fn with(mut spec: LayerSpec, change: impl FnOnce(&mut LayerSpec)) -> LayerSpec {
    change(&mut spec);
    spec
}

fn run(spec: &LayerSpec, isa: CpuIsa, tokens: &[usize]) {
    let rig = Rig::new(spec, isa, 2);
    for (i, &tokens) in tokens.iter().enumerate() {
        let tensors = rig.run(&rig.random_input(tokens, i as u64));
        check::all(&rig, &tensors, &format!("{isa:?}, {tokens} tokens, {spec:?}"));
    }
}

fn host() -> CpuIsa {
    *isas().last().unwrap()
}

#[test]
fn every_isa_and_type_computes_a_layer() {
    let types = [
        (DType::F32, DType::F32),
        (DType::Bf16, DType::Bf16),
        (DType::F16, DType::F16),
        (DType::Bf16, DType::F32),
        (DType::F32, DType::F16),
    ];
    for isa in isas() {
        for (weights, activations) in types {
            let spec = with(spec(70, 45, 3, 2), |s| {
                s.precision.weights = weights;
                s.precision.activations = activations;
            });
            run(&spec, isa, &[0, 1, 33, 300]);
        }
    }
}
