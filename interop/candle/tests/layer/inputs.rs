//! The inputs of a call, and the errors of wrong ones.

use crate::in_candle::{Case, assert_close, floats, random, step, tensors};
use candle_core::{DType, Device, Result, Tensor};
use moesaic::{Engine, LayerSpec};
use moesaic_candle::{Inputs, MoeLayer};

const SPEC: &str = r#"
shape = { model_dim = 16, hidden_dim = 8, experts = 4, top_k = 2 }
[router]
renormalize = "sum"
"#;

#[test]
fn tables_are_looked_up() -> Result<()> {
    let toml = format!("{SPEC}kind = \"table\"\ntable_rows = 3\n");
    let spec = LayerSpec::from_toml(&toml).expect("a valid spec");
    let table = Tensor::new(&[[0i64, 1], [2, 3], [1, 3]], &Device::Cpu)?;
    let mut plain = Case::new(SPEC)?;
    let mut weights = tensors(&plain.vars);
    weights.insert("router.table".to_string(), table.clone());
    let layer = MoeLayer::new(&Engine::cpu().expect("a C compiler"), &spec, &weights)?;
    let x = plain.draw(&[2, 3, 16])?;
    let token_ids = Tensor::new(&[[0u32, 1, 2], [2, 2, 0]], &Device::Cpu)?;
    let inputs = Inputs::new(&x).token_ids(&token_ids);

    let rows = x.reshape((6, 16))?;
    let ids = table.index_select(&token_ids.flatten_all()?, 0)?;
    let scores = crate::in_candle::softmax(&plain.logits(&rows)?)?.gather(&ids, 1)?;
    let shares = scores.broadcast_div(&scores.sum_keepdim(1)?)?;
    let expected = plain.experts(&rows, &ids.to_dtype(DType::U32)?, &shares)?;
    let expected = expected.reshape((2, 3, 16))?;
    let evaluated = layer.forward(&inputs)?;
    assert_close("y", &evaluated.y, &expected, 1e-5)?;
    let found = evaluated
        .routing
        .ids
        .reshape((6, 2))?
        .to_dtype(DType::I64)?;
    assert_eq!(found.to_vec2::<i64>()?, ids.to_vec2::<i64>()?);
    let got = layer
        .forward_train(&inputs, step(0))?
        .y
        .sqr()?
        .sum_all()?
        .backward()?;
    let wanted = expected.sqr()?.sum_all()?.backward()?;
    plain.assert_gradients(&x, &got, &wanted, 1e-5)?;

    let outside = Tensor::new(&[[0u32, 1, 3], [2, 2, 0]], &Device::Cpu)?;
    refused(
        layer.forward(&Inputs::new(&x).token_ids(&outside)),
        "token_ids",
    );
    let wide = Tensor::new(&[[0i64, 1, 1 << 32], [2, 2, 0]], &Device::Cpu)?;
    refused(
        layer.forward(&Inputs::new(&x).token_ids(&wide)),
        "4294967296",
    );
    Ok(())
}

#[test]
fn masked_tokens_and_fewer_choices() -> Result<()> {
    let mut case = Case::new(&format!("{SPEC}token_mask = true\nactive_k = true\n"))?;
    let x = case.draw(&[2, 3, 16])?;
    let mask = Tensor::new(&[[1u8, 0, 1], [1, 1, 0]], &Device::Cpu)?;
    let rows = x.reshape((6, 16))?;
    let (ids, weights) = case.decide(&case.logits(&rows)?, 1)?;
    let kept = mask.to_dtype(DType::F32)?.reshape((6, 1))?;
    let expected = case.experts(&rows, &ids, &weights)?.broadcast_mul(&kept)?;
    let expected = expected.reshape((2, 3, 16))?;
    let inputs = Inputs::new(&x).token_mask(&mask).active_k(1)?;
    let trained = case.layer.forward_train(&inputs, step(0))?;
    assert_close("y", &trained.y, &expected, 1e-5)?;
    assert_close(
        "evaluated",
        &case.layer.forward(&inputs)?.y,
        &expected,
        1e-5,
    )?;
    let ids: Vec<i32> = trained.routing.ids.flatten_all()?.to_vec1()?;
    assert!(
        ids.iter().skip(1).step_by(2).all(|id| *id == -1),
        "one choice: {ids:?}"
    );
    assert_eq!((ids[2], ids[10]), (-1, -1), "masked tokens have none");
    refused(
        case.layer.forward(&Inputs::new(&x).token_mask(&mask)),
        "active_k",
    );
    Ok(())
}

/// Rows without room at the first expert add nothing; a call can set more room.
#[test]
fn a_call_has_its_own_capacity() -> Result<()> {
    let toml = SPEC.replace(
        "[router]",
        "capacity = { mode = \"factor\", factor = 0.5 }\n[router]",
    );
    let mut case = Case::new(&toml)?;
    let x = case.draw(&[24, 16])?;
    let whole = case.in_candle(&x)?;
    let inputs = Inputs::new(&x);
    let dropping = floats(&case.layer.forward(&inputs)?.y)?;
    assert_ne!(dropping, floats(&whole)?);
    assert_eq!(
        dropping,
        floats(&case.layer.forward_train(&inputs, step(0))?.y)?
    );
    let roomy = inputs.capacity_factor(8.0);
    assert_close("evaluated", &case.layer.forward(&roomy)?.y, &whole, 1e-5)?;
    let trained = case.layer.forward_train(&roomy, step(0))?.y;
    assert_close("trained", &trained, &whole, 1e-5)
}

/// A state that is no weight: selection follows it, gradients do not reach it.
#[test]
fn the_load_is_read_anew() -> Result<()> {
    let toml = format!("{SPEC}entropy = {{ temperature = 0.0, load = 40.0 }}\n");
    let mut case = Case::new(&toml)?;
    let x = case.draw(&[9, 16])?;
    let load = case.vars["router.load"].clone();
    let counts = |case: &Case| {
        case.layer
            .forward(&Inputs::new(&x))?
            .routing
            .counts
            .to_vec1::<i64>()
    };
    load.set(&Tensor::new(&[0.5f32, 0.5, 0.0, 0.0], &Device::Cpu)?)?;
    assert_eq!(counts(&case)?, [0, 0, 9, 9]);
    load.set(&Tensor::new(&[0.0f32, 0.0, 0.5, 0.5], &Device::Cpu)?)?;
    assert_eq!(counts(&case)?, [9, 9, 0, 0]);
    let y = case.layer.forward_train(&Inputs::new(&x), step(0))?.y;
    assert!(y.sum_all()?.backward()?.get(&load).is_none());
    Ok(())
}

#[test]
fn no_tokens() -> Result<()> {
    let case = Case::new(SPEC)?;
    let x = Tensor::zeros((0, 5, 16), DType::F32, &Device::Cpu)?;
    let evaluated = case.layer.forward(&Inputs::new(&x))?;
    assert_eq!(evaluated.y.dims(), [0, 5, 16]);
    assert_eq!(evaluated.routing.counts.to_vec1::<i64>()?, [0; 4]);
    assert_eq!(
        case.layer
            .forward_train(&Inputs::new(&x), step(0))?
            .y
            .dims(),
        [0, 5, 16]
    );
    Ok(())
}

/// A transposed view is read as what it shows.
#[test]
fn views_are_read_as_what_they_show() -> Result<()> {
    let mut case = Case::new(SPEC)?;
    let x = case.draw(&[16, 7])?;
    let expected = case.in_candle(&x.t()?.contiguous()?)?;
    let y = case.layer.forward_train(&Inputs::new(&x.t()?), step(0))?.y;
    assert_close("y", &y, &expected, 1e-5)?;
    let got = y.sqr()?.sum_all()?.backward()?;
    let wanted = expected.sqr()?.sum_all()?.backward()?;
    case.assert_gradients(&x, &got, &wanted, 1e-5)
}

#[test]
fn what_does_not_fit_is_refused() -> Result<()> {
    let case = Case::new(SPEC)?;
    let x = random(&[6, 16], 1.0, &mut 5)?;
    let inputs = Inputs::new(&x);
    let mask = Tensor::new(&[1u32; 6], &Device::Cpu)?;
    refused(
        case.layer.forward(&inputs.clone().token_mask(&mask)),
        "reads no `token_mask`, only x",
    );
    refused(
        case.layer.forward(&Inputs::new(&x.to_dtype(DType::BF16)?)),
        "`x` is BF16",
    );
    refused(
        case.layer.forward(&Inputs::new(&x.narrow(1, 0, 15)?)),
        "shape [6, 15]",
    );
    refused(case.layer.forward(&Inputs::new(&x.get(0)?.get(0)?)), "`x`");

    let masked = Case::new(&format!("{SPEC}token_mask = true\n"))?;
    refused(masked.layer.forward_train(&inputs, step(0)), "token_mask");
    let short = mask.narrow(0, 0, 5)?;
    refused(
        masked.layer.forward(&inputs.clone().token_mask(&short)),
        "shape [5], expected [6]",
    );
    refused(
        masked
            .layer
            .forward(&inputs.token_mask(&x.narrow(1, 0, 1)?.flatten_all()?)),
        "is F32",
    );

    let engine = Engine::cpu().expect("a C compiler");
    let mut weights = tensors(&case.vars);
    let router = weights.remove("router.weight").expect("the router has one");
    let down = weights.remove("experts.down.weight").expect("it has one");
    refused(
        MoeLayer::new(&engine, &case.spec, &weights),
        "weights are missing:\n  `router.weight` [4, 16]\n  `experts.down.weight` [4, 16, ",
    );
    weights.insert("experts.down.weight".to_string(), down);
    weights.insert("router.weight".to_string(), router.reshape((16, 4))?);
    refused(
        MoeLayer::new(&engine, &case.spec, &weights),
        "expected [4, 16]",
    );
    assert!(floats(&x)?.len() == 96);
    Ok(())
}

fn refused<T>(result: Result<T>, words: &str) {
    let message = result.err().map(|error| error.to_string());
    let message = message.unwrap_or_else(|| panic!("`{words}`: was taken"));
    assert!(message.contains(words), "`{words}`: {message}");
}
