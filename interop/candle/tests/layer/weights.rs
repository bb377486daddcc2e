//! Weights are read in candle's memory, as they are at the time of the call.

use crate::in_candle::{Case, floats, random, step, tensors};
use candle_core::{DType, Result, Tensor, Var};
use moesaic::Engine;
use moesaic_candle::{InferenceLayer, Inputs, MoeLayer};
use std::collections::BTreeMap;

const SPEC: &str = "shape = { model_dim = 24, hidden_dim = 20, experts = 5, top_k = 2 }";

fn copied(layer: &MoeLayer) -> Vec<&str> {
    layer.copied_weights().collect()
}

#[test]
fn weights_of_the_layers_type_are_not_copied() -> Result<()> {
    let case = Case::new(SPEC)?;
    assert_eq!(copied(&case.layer), Vec::<&str>::new());
    let bf16 = format!("precision = {{ weights = \"bf16\", activations = \"bf16\" }}\n{SPEC}");
    assert_eq!(copied(&Case::new(&bf16)?.layer), Vec::<&str>::new());
    let masters = Case::with(&bf16, |_| DType::F32)?;
    let mut experts = copied(&masters.layer);
    experts.sort_unstable();
    assert_eq!(
        experts,
        [
            "experts.down.weight",
            "experts.gate.weight",
            "experts.up.weight"
        ]
    );
    let text = format!("{:?}", masters.layer.clone());
    assert!(text.contains("router.weight"), "{text}");
    Ok(())
}

/// An optimizer changes variables where they lie, after the layer was made and between calls.
#[test]
fn each_call_sees_the_values_of_now() -> Result<()> {
    let mut case = Case::new(SPEC)?;
    let engine = Engine::cpu().expect("a C compiler");
    let x = case.draw(&[6, 24])?;
    for round in 0..3 {
        for (number, var) in case.vars.values().enumerate() {
            let mut state = 17 * round + number as u64;
            var.set(&random(var.dims(), 0.4, &mut state)?)?;
        }
        let fresh = InferenceLayer::new(&engine, &case.spec, &tensors(&case.vars))?;
        let expected = floats(&fresh.forward_with(&Inputs::new(&x))?)?;
        let inputs = Inputs::new(&x);
        assert_eq!(floats(&case.layer.forward(&inputs)?.y)?, expected);
        let trained = case.layer.forward_train(&inputs, step(round))?;
        assert_eq!(floats(&trained.y)?, expected);
    }
    Ok(())
}

/// Two weights in one variable have one lock.
#[test]
fn weights_may_be_parts_of_one_variable() -> Result<()> {
    let mut case = Case::new(SPEC)?;
    let engine = Engine::cpu().expect("a C compiler");
    let parts = ["experts.gate.weight", "experts.up.weight"];
    let both: Vec<&Tensor> = parts
        .iter()
        .map(|name| case.vars[*name].as_tensor())
        .collect();
    let fused = Var::from_tensor(&Tensor::stack(&both, 0)?)?;
    let mut weights: BTreeMap<String, Tensor> = tensors(&case.vars);
    for (at, name) in parts.into_iter().enumerate() {
        weights.insert(name.to_string(), fused.get(at)?);
    }
    let layer = MoeLayer::new(&engine, &case.spec, &weights)?;
    assert_eq!(copied(&layer), Vec::<&str>::new());
    let x = case.draw(&[6, 24])?;
    let inputs = Inputs::new(&x);
    let [ours, theirs] = [&layer, &case.layer].map(|layer| {
        let y = layer.forward_train(&inputs, step(0))?.y;
        Ok::<_, candle_core::Error>((floats(&y)?, y.sqr()?.sum_all()?.backward()?))
    });
    let ((y, ours), (expected, theirs)) = (ours?, theirs?);
    assert_eq!(y, expected);
    let gradient = ours.get(&fused).expect("it takes part");
    for (at, name) in parts.into_iter().enumerate() {
        let expected = theirs.get(&case.vars[name]).expect("it takes part");
        assert_eq!(floats(&gradient.get(at)?)?, floats(expected)?, "{name}");
    }
    Ok(())
}
