//! Gradients against candle's own.

use crate::in_candle::{Case, assert_close, random, step};
use candle_core::{DType, Result, Tensor, Var};
use moesaic::{Engine, LayerSpec};
use moesaic_candle::{Inputs, MoeLayer};

const SPEC: &str = r#"
shape = { model_dim = 24, hidden_dim = 16, experts = 6, top_k = 2 }
router = { renormalize = "sum", bias = true }
experts = { form = "gated", activation = "silu", bias = true }
"#;

#[test]
fn gradients_are_those_of_candle() -> Result<()> {
    let mut case = Case::new(SPEC)?;
    let x = case.draw(&[3, 7, 24])?;
    let factor = case.draw(&[3, 7, 24])?;
    let inputs = Inputs::new(&x);
    let y = case.layer.forward_train(&inputs, step(0))?.y;
    let expected = case.in_candle(&x.reshape(((), 24))?)?.reshape((3, 7, 24))?;
    assert_close("y", &y, &expected, 1e-5)?;
    assert_close(
        "y, evaluated",
        &case.layer.forward(&inputs)?.y,
        &expected,
        1e-5,
    )?;
    let got = (y * factor.as_tensor())?.sum_all()?.backward()?;
    let wanted = (expected * factor.as_tensor())?.sum_all()?.backward()?;
    case.assert_gradients(&x, &got, &wanted, 1e-5)
}

/// Two calls of one layer in one graph: gradients add up, and a changed
/// variable is seen by the next call.
#[test]
fn a_layer_can_be_called_twice() -> Result<()> {
    let mut case = Case::new(SPEC)?;
    let x = case.draw(&[9, 24])?;
    for round in 0..2 {
        let first = case.layer.forward_train(&Inputs::new(&x), step(round))?.y;
        // Evaluation in between leaves what backward needs.
        case.layer.forward(&Inputs::new(&first.narrow(0, 0, 3)?))?;
        let second = case
            .layer
            .forward_train(&Inputs::new(&first), step(round))?
            .y;
        let got = second.sqr()?.sum_all()?.backward()?;
        let twice = case.in_candle(&case.in_candle(&x)?)?;
        let wanted = twice.sqr()?.sum_all()?.backward()?;
        case.assert_gradients(&x, &got, &wanted, 1e-5)?;
        for var in case.vars.values() {
            var.set(&(var.as_tensor() * 1.25)?)?;
        }
    }
    Ok(())
}

/// A graph can be walked twice, and what was not made a variable has no gradient.
#[test]
fn frozen_weights_have_no_gradient() -> Result<()> {
    let spec = LayerSpec::from_toml(SPEC).expect("a valid spec");
    let mut case = Case::new(SPEC)?;
    let x = case.draw(&[5, 24])?;
    let mut weights = crate::in_candle::tensors(&case.vars);
    for (name, weight) in &mut weights {
        if name != "router.weight" {
            *weight = weight.detach();
        }
    }
    let layer = MoeLayer::new(&Engine::cpu().expect("a C compiler"), &spec, &weights)?;
    let loss = layer
        .forward_train(&Inputs::new(&x.detach()), step(0))?
        .y
        .sqr()?
        .sum_all()?;
    let wanted = case.in_candle(&x)?.sqr()?.sum_all()?.backward()?;
    for _ in 0..2 {
        let got = loss.backward()?;
        for (name, weight) in layer.weights() {
            match name {
                "router.weight" => {
                    let wanted = wanted.get(&case.vars[name]).expect("takes part");
                    assert_close(name, got.get(weight).expect("takes part"), wanted, 1e-5)?;
                }
                _ => assert!(got.get(weight).is_none(), "{name} is frozen"),
            }
        }
    }
    Ok(())
}

/// Types of 16 bits, with variables in them and with f32 masters.
#[test]
fn sixteen_bits() -> Result<()> {
    for (name, dtype, tolerance) in [("bf16", DType::BF16, 3e-2), ("f16", DType::F16, 4e-3)] {
        let precision = ["weights", "activations", "expert_gradients"];
        let precision = precision
            .map(|key| format!("{key} = \"{name}\""))
            .join(", ");
        let toml = format!("{SPEC}\nprecision = {{ {precision} }}");
        for mut case in [Case::new(&toml)?, Case::with(&toml, |_| DType::F32)?] {
            let mut state = 9;
            let x = Var::from_tensor(&random(&[13, 24], 1.0, &mut state)?.to_dtype(dtype)?)?;
            let factor = case.draw(&[13, 24])?.to_dtype(dtype)?;
            let y = case.layer.forward_train(&Inputs::new(&x), step(0))?.y;
            assert_eq!(y.dtype(), dtype);
            let expected = case.in_candle(&x.to_dtype(DType::F32)?)?;
            assert_close("y", &y, &expected, tolerance)?;
            let got = (y * &factor)?.sum_all()?.backward()?;
            let factor = factor.to_dtype(DType::F32)?;
            let wanted = (expected * factor)?.sum_all()?.backward()?;
            case.assert_gradients(&x, &got, &wanted, tolerance)?;
        }
    }
    Ok(())
}

/// A decision made in candle: gradients reach what made it.
#[test]
fn the_weights_of_an_external_router_have_a_gradient() -> Result<()> {
    let external = SPEC.replace("renormalize = \"sum\", bias = true", "kind = \"external\"");
    let mut case = Case::new(&external)?;
    let x = case.draw(&[2, 8, 24])?;
    let rows = x.reshape((16, 24))?;
    let router = case.draw(&[6, 24])?;
    let decide = |case: &Case| case.decide(&rows.matmul(&router.t()?)?, 2);
    let loss = |y: Tensor| y.sqr()?.sum_all()?.backward();

    let (ids, weights) = decide(&case)?;
    let inputs = Inputs::new(&x).routing(&ids, &weights.reshape((2, 8, 2))?);
    let trained = case.layer.forward_train(&inputs, step(0))?;
    assert_eq!(trained.routing.ids.dims(), [2, 8, 2]);
    let expected = case.experts(&rows, &ids, &weights)?.reshape((2, 8, 24))?;
    assert_close("y", &trained.y, &expected, 1e-5)?;
    let (got, wanted) = (loss(trained.y)?, loss(expected)?);
    case.assert_gradients(&x, &got, &wanted, 1e-5)?;
    let [got, wanted] = [got, wanted].map(|store| store.get(&router).cloned().expect("takes part"));
    assert_close("the router", &got, &wanted, 1e-5)?;

    // A negative id masks its slot.
    let none = (ids.to_dtype(DType::I64)? * 0.0)?.affine(1.0, -1.0)?;
    let masked = case
        .layer
        .forward(&Inputs::new(&x).routing(&none, &weights))?;
    assert!(
        crate::in_candle::floats(&masked.y)?
            .iter()
            .all(|y| *y == 0.0)
    );
    Ok(())
}
