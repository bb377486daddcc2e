//! Exchanges in the graph: what each rank gets, and that gradients are those of the losses of
//! all ranks together.

use crate::in_candle::{floats, random};
use candle_core::{Result, Tensor, Var};
use moesaic::collectives::{Call, threads};
use moesaic::mesh::ProcessGroup;
use moesaic::{Engine, Mesh, Parallel};
use moesaic_candle::{Exchange, exchange};
use std::error::Error;

const RANKS: usize = 3;
const ROWS: usize = 6;
const WIDTH: usize = 4;

/// Rank, and what it has: the tokens, and the factors of its loss.
fn given(rank: usize, rows: usize) -> Result<[Tensor; 2]> {
    let mut state = 40 + rank as u64;
    Ok([
        random(&[ROWS, WIDTH], 1.0, &mut state)?,
        random(&[rows, WIDTH], 1.0, &mut state)?,
    ])
}

/// Returns the results of ranks, and the gradients of their tensors.
fn exchanged(what: Exchange, rows: usize) -> Vec<[Vec<f32>; 2]> {
    let engine = Engine::cpu().expect("a C compiler");
    let device = |_| Ok(engine.device().clone());
    let ranks = threads::run(RANKS, device, |mut world| {
        let parallel = Parallel {
            dp: RANKS,
            ..Parallel::default()
        };
        let mesh = Mesh::new(&mut world, parallel)?;
        let [x, factor] = given(mesh.rank(), rows)?;
        let x = Var::from_tensor(&x)?;
        let y = exchange(what, &engine.ranks(&mesh), ProcessGroup::World, &x)?;
        let gradients = (&y * factor)?.sum_all()?.backward()?;
        world.finish(&Call::new("end"))?;
        let dx = gradients.get(&x).ok_or("it takes part")?;
        Ok::<_, Box<dyn Error + Send + Sync>>([floats(&y)?, floats(dx)?])
    });
    let ranks = ranks.expect("ranks").into_iter();
    ranks
        .map(|rank| rank.expect("no panic").expect("no error"))
        .collect()
}

/// The same of all ranks in one graph: `make` gives each rank's tensor from those of all.
fn check(what: Exchange, rows: usize, make: impl Fn(&[Tensor], usize) -> Result<Tensor>) {
    let found = exchanged(what, rows);
    let wanted = || -> Result<Vec<[Vec<f32>; 2]>> {
        let all: Result<Vec<[Tensor; 2]>> = (0..RANKS).map(|rank| given(rank, rows)).collect();
        let vars: Result<Vec<Var>> = all
            .iter()
            .flatten()
            .map(|[x, _]| Var::from_tensor(x))
            .collect();
        let (all, vars) = (all?, vars?);
        let given: Vec<Tensor> = vars.iter().map(|x| x.as_tensor().clone()).collect();
        let ys: Result<Vec<Tensor>> = (0..RANKS).map(|rank| make(&given, rank)).collect();
        let ys = ys?;
        let mut loss = Tensor::zeros((), candle_core::DType::F32, &candle_core::Device::Cpu)?;
        for (y, [_, factor]) in ys.iter().zip(&all) {
            loss = (loss + (y * factor)?.sum_all()?)?;
        }
        let gradients = loss.backward()?;
        let each = ys.iter().zip(&vars);
        each.map(|(y, x)| Ok([floats(y)?, floats(gradients.get(x).expect("takes part"))?]))
            .collect()
    };
    for (found, wanted) in found.iter().zip(wanted().expect("candle runs")) {
        for (found, wanted) in found.iter().zip(&wanted) {
            assert_eq!(found.len(), wanted.len(), "{what:?}");
            for (found, wanted) in found.iter().zip(wanted) {
                assert!(
                    (found - wanted).abs() < 1e-6,
                    "{what:?}: {found}, not {wanted}"
                );
            }
        }
    }
}

fn sum(all: &[Tensor]) -> Result<Tensor> {
    let first = all[0].zeros_like()?;
    all.iter().try_fold(first, |sum, x| sum + x)
}

#[test]
fn gradients_go_back_the_way_that_values_came() {
    let part = |x: &Tensor, rank: usize| x.narrow(0, rank * ROWS / RANKS, ROWS / RANKS);
    check(Exchange::Gather, RANKS * ROWS, |all, _| Tensor::cat(all, 0));
    check(Exchange::AllToAll, ROWS, |all, rank| {
        let parts: Result<Vec<Tensor>> = all.iter().map(|x| part(x, rank)).collect();
        Tensor::cat(&parts?, 0)
    });
    check(Exchange::SumParts, ROWS / RANKS, |all, rank| {
        part(&sum(all)?, rank)
    });
}

/// Splits a tensor that all ranks have, and sums gradients that all ranks have;
/// the other half is the caller's.
#[test]
fn values_that_all_have_are_split_and_summed() {
    let all: Vec<[Tensor; 2]> = (0..RANKS).map(|rank| given(rank, ROWS).unwrap()).collect();
    let xs: Vec<Tensor> = all.iter().map(|[x, _]| x.clone()).collect();
    let factors: Vec<Tensor> = all.iter().map(|[_, factor]| factor.clone()).collect();
    let [sum_x, sum_dy] = [&xs, &factors].map(|list| floats(&sum(list).unwrap()).unwrap());
    for (rank, [y, dx]) in exchanged(Exchange::Sum, ROWS).iter().enumerate() {
        assert_eq!(*y, sum_x);
        assert_eq!(*dx, floats(&factors[rank]).unwrap());
    }
    for (rank, [y, dx]) in exchanged(Exchange::SumGradients, ROWS).iter().enumerate() {
        assert_eq!(*y, floats(&xs[rank]).unwrap());
        assert_eq!(*dx, sum_dy);
    }
    let part = ROWS / RANKS * WIDTH;
    let dys = (0..RANKS).flat_map(|rank| floats(&given(rank, ROWS / RANKS).unwrap()[1]).unwrap());
    let dys: Vec<f32> = dys.collect();
    for (rank, [y, dx]) in exchanged(Exchange::Split, ROWS / RANKS).iter().enumerate() {
        assert_eq!(*y, floats(&xs[rank]).unwrap()[rank * part..][..part]);
        assert_eq!(*dx, dys);
    }
}
