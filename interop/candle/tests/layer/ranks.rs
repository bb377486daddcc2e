//! A layer over two ranks that are threads, against the same layer in one process.

use crate::in_candle::{Case, assert_close, floats, step, tensors};
use candle_core::{Result, Tensor, Var};
use moesaic::collectives::{Call, threads};
use moesaic::mesh::SharedExperts;
use moesaic::{Engine, Mesh, Parallel, Strategy};
use moesaic_candle::{Inputs, MoeLayer, part};
use std::collections::BTreeMap;
use std::error::Error;

const SPEC: &str = r#"
shape = { model_dim = 24, hidden_dim = 16, experts = 6, top_k = 2 }
router = { renormalize = "sum", bias = true }
experts = { form = "gated", activation = "silu", bias = true }
shared = [{ hidden_dim = 12, gate = "sigmoid" }]
"#;

/// Tokens of the first rank, of all.
const FIRST: usize = 4;
const TOKENS: usize = 13;

/// The results of a rank, and the matching part of one process's results.
struct Found {
    y: Tensor,
    dx: Tensor,
    /// For each weight: its name, this rank's gradient, the sum, and the part
    /// of one process's gradient.
    gradients: Vec<(String, [Tensor; 3])>,
}

/// The layer twice in one graph, and the gradients of a loss of this rank's tokens.
fn run(
    layer: &MoeLayer,
    x: &Tensor,
    factor: &Tensor,
) -> Result<(Tensor, candle_core::backprop::GradStore)> {
    let first = layer.forward_train(&Inputs::new(x), step(0))?.y;
    let y = layer.forward_train(&Inputs::new(&first), step(1))?.y;
    let gradients = (&y * factor)?.sum_all()?.backward()?;
    Ok((y, gradients))
}

fn on_rank(
    mesh: &Mesh,
    engine: &Engine,
    case: &Case,
    all: &[Tensor; 2],
    wanted: &BTreeMap<String, Tensor>,
) -> Result<Found> {
    let mut vars = BTreeMap::new();
    for (name, whole) in &case.vars {
        vars.insert(name.clone(), Var::from_tensor(&part(mesh, name, whole)?)?);
    }
    let layer = MoeLayer::new_over(engine, mesh, &case.spec, &tensors(&vars))?;
    let (first, count) = [(0, FIRST), (FIRST, TOKENS - FIRST)][mesh.rank()];
    let [x, factor] = all;
    let x = Var::from_tensor(&x.narrow(0, first, count)?)?;
    let (y, mut gradients) = run(&layer, &x, &factor.narrow(0, first, count)?)?;
    let evaluated = layer
        .forward(&Inputs::new(&layer.forward(&Inputs::new(&x))?.y))?
        .y;
    assert_eq!(floats(&evaluated)?, floats(&y)?, "there is no noise");
    let own: BTreeMap<_, _> = vars
        .iter()
        .map(|(name, var)| (name, gradients.get(var).cloned()))
        .collect();
    layer.reduce_gradients(&mut gradients)?;
    let compared = vars.iter().map(|(name, var)| {
        let sum = gradients.get(var).cloned().expect("it was reduced");
        let own = own[name].clone().expect("takes part");
        Ok((name.clone(), [own, sum, part(mesh, name, &wanted[name])?]))
    });
    Ok(Found {
        y,
        dx: gradients.get(&x).cloned().expect("takes part"),
        gradients: compared.collect::<Result<_>>()?,
    })
}

fn check(parallel: Parallel) -> Result<[Found; 2]> {
    let mut case = Case::new(SPEC)?;
    let (x, factor) = (case.draw(&[TOKENS, 24])?, case.draw(&[TOKENS, 24])?);
    let (y, gradients) = run(&case.layer, &x, &factor)?;
    let of = |(name, var): (&String, &Var)| {
        (
            name.clone(),
            gradients.get(var).cloned().expect("takes part"),
        )
    };
    let wanted: BTreeMap<String, Tensor> = case.vars.iter().map(of).collect();
    let engine = Engine::cpu().expect("a C compiler");
    let all = [x.as_detached_tensor(), factor.as_detached_tensor()];
    let ranks = threads::run(
        2,
        |_| Ok(engine.device().clone()),
        |mut world| {
            let mesh = Mesh::new(&mut world, parallel)?;
            let found = on_rank(&mesh, &engine, &case, &all, &wanted)?;
            world.finish(&Call::new("end"))?;
            Ok::<_, Box<dyn Error + Send + Sync>>(found)
        },
    );
    let ranks = ranks.expect("two ranks").into_iter();
    let found: Vec<Found> = ranks
        .map(|rank| rank.expect("no panic").expect("no error"))
        .collect();
    let [a, b]: [Found; 2] = found.try_into().ok().expect("two ranks");
    let found = Tensor::cat(&[&a.y, &b.y], 0)?;
    assert_close("y", &found, &y, 1e-5)?;
    if parallel.expert_tp == 1 {
        assert_eq!(floats(&found)?, floats(&y)?);
    }
    let dx = Tensor::cat(&[&a.dx, &b.dx], 0)?;
    assert_close("dx", &dx, gradients.get(&x).expect("takes part"), 1e-5)?;
    for (name, [_, sum, wanted]) in a.gradients.iter().chain(&b.gradients) {
        if floats(wanted)?.iter().any(|g| *g != 0.0) {
            assert_close(name, sum, wanted, 1e-5)?;
        } else {
            assert!(
                floats(sum)?.iter().all(|g| *g == 0.0),
                "{name} is another slice's"
            );
        }
    }
    Ok([a, b])
}

#[test]
fn experts_on_two_ranks() -> Result<()> {
    let [a, b] = check(Parallel {
        ep: 2,
        ..Parallel::default()
    })?;
    for ((name, [own, sum, _]), (_, [other, ..])) in a.gradients.iter().zip(&b.gradients) {
        let whole = if name.starts_with("experts.") {
            own.clone() // of all ranks' tokens already
        } else {
            (own + other)?
        };
        assert_eq!(floats(&whole)?, floats(sum)?, "{name}");
    }
    Ok(())
}

#[test]
fn slices_and_replicas() -> Result<()> {
    check(Parallel {
        expert_tp: 2,
        ..Parallel::default()
    })?;
    check(Parallel {
        expert_tp: 2,
        shared: SharedExperts::Sharded,
        ..Parallel::default()
    })?;
    check(Parallel {
        dp: 2,
        ..Parallel::default()
    })?;
    Ok(())
}

#[test]
fn weights_of_the_whole_layer_are_refused() -> Result<()> {
    let case = Case::new(SPEC)?;
    let engine = Engine::cpu().expect("a C compiler");
    let ranks = threads::run(
        2,
        |_| Ok(engine.device().clone()),
        |mut world| {
            let mesh = Mesh::new(
                &mut world,
                Parallel {
                    ep: 2,
                    ..Parallel::default()
                },
            )?;
            let whole = tensors(&case.vars);
            let refused = MoeLayer::new_over(&engine, &mesh, &case.spec, &whole).err();
            world.finish(&Call::new("end"))?;
            Ok::<_, Box<dyn Error + Send + Sync>>(refused)
        },
    );
    for rank in ranks.expect("two ranks") {
        let refused = rank
            .expect("no panic")
            .expect("no error")
            .expect("an error")
            .to_string();
        assert!(
            refused.contains("[6, 16, 24], expected [3, 16, 24]"),
            "{refused}"
        );
    }
    Ok(())
}

#[test]
fn ranks_choose_how_they_carry_out_calls() -> Result<()> {
    let mut case = Case::new(SPEC)?;
    let x = case.draw(&[TOKENS, 24])?.as_detached_tensor();
    let y = case.layer.forward(&Inputs::new(&x))?.y;
    let engine = Engine::cpu().expect("a C compiler");
    let strategy: Strategy = "overlap_degree=2".parse().expect("a strategy");
    let mesh = Parallel {
        ep: 2,
        ..Parallel::default()
    };
    let ranks = threads::run(
        2,
        |_| Ok(engine.device().clone()),
        |mut world| {
            let mesh = Mesh::new(&mut world, mesh)?;
            let mut own = BTreeMap::new();
            for (name, whole) in &case.vars {
                own.insert(name.clone(), part(&mesh, name, whole)?);
            }
            let mut layer = MoeLayer::new_over(&engine, &mesh, &case.spec, &own)?;
            let (first, count) = [(0, FIRST), (FIRST, TOKENS - FIRST)][mesh.rank()];
            let x = Var::from_tensor(&x.narrow(0, first, count)?)?;
            let trained = layer.forward_train(&Inputs::new(&x), step(0))?;
            let refused = layer.set_strategy(strategy).err().map(|e| e.to_string());
            drop(trained);
            layer.set_strategy(strategy)?;
            let y = layer.forward(&Inputs::new(&x))?.y;
            world.finish(&Call::new("end"))?;
            Ok::<_, Box<dyn Error + Send + Sync>>((y, refused))
        },
    );
    let ranks = ranks.expect("two ranks").into_iter();
    let found: Vec<_> = ranks
        .map(|rank| rank.expect("no panic").expect("no error"))
        .collect();
    let of_both = Tensor::cat(&[&found[0].0, &found[1].0], 0)?;
    assert_eq!(floats(&of_both)?, floats(&y)?);
    for (_, refused) in found {
        let refused = refused.expect("an error");
        assert!(
            refused.starts_with("a result of `forward_train` still"),
            "{refused}"
        );
    }
    let alone = case.layer.set_strategy(strategy);
    let alone = alone.expect_err("one process").to_string();
    assert!(
        alone.contains("a strategy is for a layer over ranks"),
        "{alone}"
    );
    Ok(())
}
