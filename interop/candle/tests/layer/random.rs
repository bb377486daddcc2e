//! The random numbers that training draws, and evaluation does not.

use crate::in_candle::{Case, assert_close, floats};
use candle_core::{Result, Tensor};
use moesaic_candle::{Inputs, RngKey, Routing};

const QUIET: &str = r#"
shape = { model_dim = 24, hidden_dim = 8, experts = 6, top_k = 2 }
[router]
renormalize = "sum"
"#;

const AT: RngKey = RngKey {
    seed: 7,
    step: 20,
    layer: 3,
    first_token: 100,
};

#[test]
fn every_counter_draws_anew() -> Result<()> {
    for option in ["noise = 6.0", "jitter = 0.5", "input_dropout = 0.3"] {
        let mut case = Case::new(&format!("{QUIET}{option}"))?;
        let x = case.draw(&[30, 24])?;
        let run = |rng_key| floats(&case.layer.forward_train(&Inputs::new(&x), rng_key)?.y);
        let first = run(AT)?;
        assert_eq!(first, run(AT)?, "{option}: the same rng_key");
        for (counter, other) in [
            ("seed", RngKey { seed: 8, ..AT }),
            ("step", RngKey { step: 21, ..AT }),
            ("layer", RngKey { layer: 4, ..AT }),
            (
                "token",
                RngKey {
                    first_token: 101,
                    ..AT
                },
            ),
        ] {
            assert_ne!(first, run(other)?, "{option}: another {counter}");
        }
        assert_eq!(first, run(AT)?, "{option}: the same rng_key later");
    }
    Ok(())
}

/// Evaluation before, between and after is that of the layer without noise.
#[test]
fn evaluation_draws_nothing() -> Result<()> {
    for option in [
        "noise = 6.0",
        "jitter = 0.5",
        "input_dropout = 0.3",
        "noise = 2.0\nnoise_kind = \"gumbel\"",
        "random_second = true",
    ] {
        let mut case = Case::new(&format!("{QUIET}{option}"))?;
        let x = case.draw(&[30, 24])?;
        let expected = case.in_candle(&x)?;
        for step in 0..3 {
            let y = case.layer.forward(&Inputs::new(&x))?.y;
            assert_close(option, &y, &expected, 1e-5)?;
            assert!(!y.track_op(), "evaluation is no part of the graph");
            let noisy = case
                .layer
                .forward_train(&Inputs::new(&x), RngKey { step, ..AT })?
                .y;
            assert_ne!(floats(&noisy)?, floats(&expected)?, "{option}");
            assert!(noisy.track_op());
        }
    }
    Ok(())
}

/// Routing alone sends tokens where the whole call with these rng_key sends
/// them.
#[test]
fn routing_alone_draws_the_same() -> Result<()> {
    let mut case = Case::new(&format!("{QUIET}noise = 6.0"))?;
    let x = case.draw(&[3, 10, 24])?;
    let inputs = Inputs::new(&x);
    let ids = |routing: Routing| routing.ids.flatten_all()?.to_vec1::<i32>();
    let trained = ids(case.layer.route_train(&inputs, AT)?)?;
    assert_eq!(
        trained,
        ids(case.layer.forward_train(&inputs, AT)?.routing)?
    );
    let evaluated = ids(case.layer.route(&inputs)?)?;
    assert_eq!(evaluated, ids(case.layer.forward(&inputs)?.routing)?);
    assert_ne!(trained, evaluated);
    Ok(())
}

/// A batch in parts draws what the whole does.
#[test]
fn tokens_are_counted_from_the_first() -> Result<()> {
    let mut case = Case::new(&format!("{QUIET}noise = 6.0\njitter = 0.2"))?;
    let x = case.draw(&[10, 24])?;
    let run = |rows: &Tensor, first_token| {
        let rng_key = RngKey { first_token, ..AT };
        floats(&case.layer.forward_train(&Inputs::new(rows), rng_key)?.y)
    };
    let parts = [run(&x.narrow(0, 0, 4)?, 0)?, run(&x.narrow(0, 4, 6)?, 4)?];
    assert_eq!(run(&x, 0)?, parts.concat());
    Ok(())
}

/// Backward goes through what its own forward drew: against differences.
#[test]
fn gradients_are_of_what_was_drawn() -> Result<()> {
    let mut case = Case::new(&format!("{QUIET}noise = 3.0"))?;
    let x = case.draw(&[12, 24])?;
    let loss = |step| -> Result<Tensor> {
        let rng_key = RngKey { step, ..AT };
        case.layer
            .forward_train(&Inputs::new(&x), rng_key)?
            .y
            .sqr()?
            .sum_all()
    };
    let (early, _late) = (loss(1)?, loss(2)?);
    let gradient = early.backward()?.get(&case.vars["router.weight"]).cloned();
    let gradient = gradient.expect("takes part");
    let router = &case.vars["router.weight"];
    let (before, along) = (
        router.copy()?,
        (&gradient / gradient.sqr()?.sum_all()?.sqrt()?.to_scalar::<f32>()? as f64)?,
    );
    let mut ends = [0f64; 2];
    for (end, sign) in ends.iter_mut().zip([-1.0, 1.0]) {
        router.set(&(&before + (&along * (sign * 1e-3))?)?)?;
        *end = f64::from(loss(1)?.to_scalar::<f32>()?);
    }
    let slope = (ends[1] - ends[0]) / 2e-3;
    let expected = f64::from(gradient.sqr()?.sum_all()?.sqrt()?.to_scalar::<f32>()?);
    assert!(
        (slope - expected).abs() < 2e-2 * expected,
        "{slope} of {expected}"
    );
    Ok(())
}
