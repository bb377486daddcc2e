//! Auxiliary losses: their values, and their gradients against candle's.

use crate::in_candle::{Case, assert_close, floats, softmax, step};
use candle_core::{D, DType, Result, Tensor};
use moesaic_candle::Inputs;

const SPEC: &str = r#"
shape = { model_dim = 20, hidden_dim = 12, experts = 5, top_k = 2 }
router = { renormalize = "sum" }
"#;

fn with_losses(losses: &[&str]) -> Result<Case> {
    let tables = losses.iter().map(|loss| format!("[[losses]]\n{loss}\n"));
    Case::new(&format!("{SPEC}{}", tables.collect::<String>()))
}

/// `E/(K·T²) · Σ n_e Σ p_te` of some tokens.
fn switch(case: &Case, x: &Tensor) -> Result<Tensor> {
    let (experts, top_k) = (case.spec.shape.experts, case.spec.shape.top_k);
    let logits = case.logits(x)?;
    let (ids, _) = case.decide(&logits, top_k)?;
    let probabilities = softmax(&logits)?.sum(0)?;
    let tokens = x.dim(0)? as f64;
    let mut sum = Tensor::zeros((), DType::F32, x.device())?;
    for expert in 0..experts {
        let chosen = ids.eq(expert as u32)?.to_dtype(DType::F32)?.sum_all()?;
        sum = (sum + (chosen * probabilities.get(expert)?)?)?;
    }
    sum * (experts as f64 / (top_k as f64 * tokens * tokens))
}

fn z_loss(case: &Case, x: &Tensor) -> Result<Tensor> {
    case.logits(x)?.log_sum_exp(D::Minus1)?.sqr()?.mean_all()
}

/// Coefficients so large that a gradient counted twice, or not at all, shows.
#[test]
fn gradients_of_losses_are_added_once() -> Result<()> {
    let mut case = with_losses(&[
        "kind = \"switch\"\ncoefficient = 3.0",
        "kind = \"z\"\ncoefficient = 0.5",
    ])?;
    let x = case.draw(&[4, 6, 20])?;
    let rows = x.reshape((24, 20))?;
    let trained = case.layer.forward_train(&Inputs::new(&x), step(0))?;
    let (switch, z) = (switch(&case, &rows)?, z_loss(&case, &rows)?);
    assert_eq!(trained.losses.keys().collect::<Vec<_>>(), ["switch", "z"]);
    assert_close("switch", &trained.losses["switch"], &switch, 1e-5)?;
    assert_close("z", &trained.losses["z"], &z, 1e-5)?;

    let task = |y: &Tensor| y.sqr()?.sum_all();
    let wanted = task(&case.in_candle(&rows)?)?;
    let wanted = ((wanted + (switch * 3.0)?)? + (z * 0.5)?)?.backward()?;
    let alone = task(&trained.y)?;
    case.assert_gradients(&x, &alone.backward()?, &wanted, 1e-5)?;
    // Their values in the total add nothing to any gradient.
    let total = ((alone + (&trained.losses["switch"] * 3.0)?)? + &trained.losses["z"])?;
    case.assert_gradients(&x, &total.backward()?, &wanted, 1e-5)
}

#[test]
fn sequences_and_groups_of_ranks() -> Result<()> {
    let mut case = with_losses(&[
        "kind = \"sequence\"\ncoefficient = 2.0",
        "kind = \"global\"\ncoefficient = 1.5",
    ])?;
    let x = case.draw(&[2, 7, 20])?;
    let ids = Tensor::new(&[[0u32; 7], [1; 7]], x.device())?;
    let mut whole = Vec::new();
    let mut parts = Vec::new();
    for sequence in 0..2 {
        let rows = x.get(sequence)?;
        parts.push(switch(&case, &rows)?);
        whole.push(rows);
    }
    let whole = Tensor::cat(&whole, 0)?;
    let sequence = ((&parts[0] + &parts[1])? * 0.5)?;
    let global = switch(&case, &whole)?;

    // The group of ranks is this call alone.
    let counts = case.layer.route_train(&Inputs::new(&x), step(0))?.counts;
    assert_eq!(counts.to_vec1::<i64>()?.iter().sum::<i64>(), 28);
    let inputs = Inputs::new(&x).sequence_ids(&ids).global(&counts, 14)?;
    let trained = case.layer.forward_train(&inputs, step(0))?;
    assert_close("sequence", &trained.losses["sequence"], &sequence, 1e-5)?;
    assert_close("global", &trained.losses["global"], &global, 1e-5)?;
    let task = case.in_candle(&whole)?.sqr()?.sum_all()?;
    let wanted = ((task + (sequence * 2.0)?)? + (global * 1.5)?)?.backward()?;
    let got = trained.y.sqr()?.sum_all()?.backward()?;
    case.assert_gradients(&x, &got, &wanted, 1e-5)
}

/// The bias that balances without a loss is a variable that nobody trains.
#[test]
fn counts_balance_without_a_loss() -> Result<()> {
    let mut case = Case::new(&SPEC.replace("\"sum\"", "\"sum\", select_bias = true"))?;
    let x = case.draw(&[40, 20])?;
    let bias = case.vars["router.select_bias"].clone();
    let spread = |counts: &[i64]| counts.iter().max().unwrap() - counts.iter().min().unwrap();
    let mut spreads = Vec::new();
    for round in 0..60 {
        let trained = case.layer.forward_train(&Inputs::new(&x), step(round))?;
        let counts = trained.routing.counts.to_vec1::<i64>()?;
        spreads.push(spread(&counts));
        let mut values = floats(&bias)?;
        moesaic::train::balance::update_select_bias(&mut values, &counts, 1e-2);
        bias.set(&Tensor::new(values, x.device())?)?;
        let gradients = trained.y.sqr()?.sum_all()?.backward()?;
        assert!(gradients.get(&bias).is_none(), "selection has no gradient");
    }
    assert!(spreads[0] > 8, "nothing to balance: {spreads:?}");
    assert!(spreads[59] <= 8, "{spreads:?}");
    Ok(())
}
