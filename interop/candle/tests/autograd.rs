//! Gradients through a moesaic layer against candle's own autograd of the same
//! layer written in candle's operations.

use candle_core::{D, DType, Device, Result, Tensor, Var};
use moesaic::spec::canonical_tensors;
use moesaic::{Engine, LayerSpec};
use moesaic_candle::MoeLayer;
use std::collections::BTreeMap;

const SPEC: &str = r#"
shape = { model_dim = 24, hidden_dim = 16, experts = 6, top_k = 2 }
router = { renormalize = "sum", bias = true }
experts = { form = "gated", activation = "silu", bias = true }
"#;

fn random(shape: &[usize], scale: f64, state: &mut u64) -> Result<Var> {
    let count: usize = shape.iter().product();
    let mut next = || {
        *state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        ((*state >> 40) as f64 / f64::from(1 << 23) - 1.0) * scale
    };
    let values: Vec<f32> = (0..count).map(|_| next() as f32).collect();
    Var::from_vec(values, shape, &Device::Cpu)
}

fn weights(spec: &LayerSpec, state: &mut u64) -> Result<BTreeMap<String, Var>> {
    let draw = |t: moesaic::spec::TensorSpec| Ok((t.name, random(&t.shape, 0.4, state)?));
    canonical_tensors(spec).into_iter().map(draw).collect()
}

/// The layer in candle's operations: every expert sees every token, and the
/// weight of those that were not selected is zero.
fn in_candle(spec: &LayerSpec, weights: &BTreeMap<String, Var>, x: &Tensor) -> Result<Tensor> {
    let logits = x
        .matmul(&weights["router.weight"].t()?)?
        .broadcast_add(&weights["router.bias"])?;
    let exp = logits
        .broadcast_sub(&logits.max_keepdim(D::Minus1)?)?
        .exp()?;
    let scores = exp.broadcast_div(&exp.sum_keepdim(D::Minus1)?)?;
    let ids = scores.arg_sort_last_dim(false)?;
    let ids = ids.narrow(1, 0, spec.shape.top_k)?.contiguous()?;
    let chosen = scores.gather(&ids, 1)?;
    let chosen = chosen.broadcast_div(&chosen.sum_keepdim(1)?)?;
    let mut y = x.zeros_like()?;
    for expert in 0..spec.shape.experts {
        let mine = ids.eq(expert as u32)?.to_dtype(DType::F32)?;
        let weight = (&chosen * mine)?.sum_keepdim(1)?;
        let linear = |rows: &Tensor, part: &str| -> Result<Tensor> {
            let matrix = weights[&format!("experts.{part}.weight")].get(expert)?;
            let bias = weights[&format!("experts.{part}.bias")].get(expert)?;
            rows.matmul(&matrix.t()?)?.broadcast_add(&bias)
        };
        let hidden = (linear(x, "gate")?.silu()? * linear(x, "up")?)?;
        y = (y + linear(&hidden, "down")?.broadcast_mul(&weight)?)?;
    }
    Ok(y)
}

fn assert_close(name: &str, got: &Tensor, expected: &Tensor) -> Result<()> {
    let largest = expected.abs()?.max_all()?.to_scalar::<f32>()?;
    let error = (got - expected)?.abs()?.max_all()?.to_scalar::<f32>()?;
    assert!(largest > 0.0, "{name} is zero: nothing was compared");
    assert!(
        error <= 1e-5 * largest,
        "{name}: error {error:e} of {largest:e}"
    );
    Ok(())
}

#[test]
fn gradients_are_those_of_candle() -> Result<()> {
    let spec = LayerSpec::from_toml(SPEC).expect("a valid spec");
    let mut state = 3;
    let weights = weights(&spec, &mut state)?;
    let x = random(&[3, 7, 24], 1.0, &mut state)?;
    let factor = random(&[3, 7, 24], 1.0, &mut state)?;
    let engine = Engine::cpu().expect("a C compiler");
    let layer = MoeLayer::new(&engine, &spec, weights.clone())?;

    let y = layer.forward(&x)?;
    let expected = in_candle(&spec, &weights, &x.reshape(((), 24))?)?.reshape((3, 7, 24))?;
    assert_close("y", &y, &expected)?;

    let got = (y * factor.as_tensor())?.sum_all()?.backward()?;
    let wanted = (expected * factor.as_tensor())?.sum_all()?.backward()?;
    let of = |store: &candle_core::backprop::GradStore, var: &Var| {
        store.get(var).cloned().expect("every variable takes part")
    };
    assert_close("x", &of(&got, &x), &of(&wanted, &x))?;
    for (name, var) in &weights {
        assert_close(name, &of(&got, var), &of(&wanted, var))?;
    }
    Ok(())
}

/// Two calls of one layer in one graph: gradients add up, and a changed
/// variable is seen by the next call.
#[test]
fn a_layer_can_be_called_twice() -> Result<()> {
    let spec = LayerSpec::from_toml(SPEC).expect("a valid spec");
    let mut state = 5;
    let weights = weights(&spec, &mut state)?;
    let x = random(&[9, 24], 1.0, &mut state)?;
    let engine = Engine::cpu().expect("a C compiler");
    let layer = MoeLayer::new(&engine, &spec, weights.clone())?;
    for round in 0..2 {
        let got = layer
            .forward(&layer.forward(&x)?)?
            .sqr()?
            .sum_all()?
            .backward()?;
        let twice = in_candle(&spec, &weights, &in_candle(&spec, &weights, &x)?)?;
        let wanted = twice.sqr()?.sum_all()?.backward()?;
        for (name, var) in &weights {
            let (got, wanted) = (got.get(var), wanted.get(var));
            let name = format!("{name}, round {round}");
            assert_close(&name, got.expect("takes part"), wanted.expect("takes part"))?;
            var.set(&(var.as_tensor() * 1.25)?)?;
        }
    }
    Ok(())
}
