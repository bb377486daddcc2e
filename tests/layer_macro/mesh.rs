//! A typed layer over two ranks that are threads, against the same layer in one process.

use super::{ENGINE, Looked, Odd, OddRaw, OddRawBackward, OddRawTraining, OddWeights, Stored};
use super::{assert_close, download, f32s, tokens, upload};
use half::f16;
use moesaic::Training;
use moesaic::collectives::{Call, threads};
use moesaic::mesh::SharedExperts;
use moesaic::reference;
use moesaic::spec::{TensorSpec, canonical_tensors};
use moesaic::typed::{In, Out, TypedLayer, tensor};
use moesaic::{DType, EngineError, LayerSpec, Mesh, Parallel, RngKey, Strategy, Tensor, Tensors};
use std::error::Error;

type Token = [f32; 19];
type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

const MESH: Parallel = Parallel {
    ep: 2,
    expert_tp: 1,
    dp: 1,
    shared: SharedExperts::Whole,
};

/// Makes an `Odd`, over the ranks of a mesh if there is one.
fn made(mesh: Option<&Mesh>, stored: &Stored) -> Result<Odd> {
    let flat = ["router", "experts.gate", "experts.up", "experts.down"];
    let [router, gate, up, down] = flat.map(|name| f32s(stored, &format!("{name}.weight")));
    let weights = OddWeights {
        router_weight: tensor(&router)?,
        experts_gate_weight: tensor(&gate)?,
        experts_up_weight: tensor(&up)?,
        experts_down_weight: tensor(&down)?,
    };
    let training = Training::default();
    Ok(match mesh {
        None => Odd::training(&ENGINE, &weights, training)?,
        Some(mesh) => Odd::training_over(&ENGINE, mesh, &weights, training)?,
    })
}

/// Returns the first columns of each token, as the gradient of `y`.
fn dy_of(x: &[Token]) -> Vec<[f32; 9]> {
    x.iter()
        .map(|row| std::array::from_fn(|i| row[i]))
        .collect()
}

/// The results of one rank, or of one process.
struct Found {
    y: Vec<[f32; 9]>,
    evaluated: Vec<[f32; 9]>,
    routed: Vec<[i32; 2]>,
    dx: Vec<Token>,
    /// The router's gradients, before and after their reduction.
    router: [Vec<f32>; 2],
    up: Vec<f32>,
}

fn run(layer: &Odd, x: &[Token]) -> Result<Found> {
    let trained = layer.forward_train(x, RngKey::default())?;
    let back = layer.backward(&trained.saved, &dy_of(x), false)?;
    let own = layer.gradients()?.router_weight;
    layer.reduce_gradients()?;
    let gradients = layer.gradients()?;
    Ok(Found {
        evaluated: layer.forward(x)?,
        routed: layer.route(x)?.topk_ids,
        y: trained.output.y,
        dx: back.dx,
        router: [own, gradients.router_weight],
        up: gradients.experts_up_weight,
    })
}

/// Returns the results of two ranks, of which the first gets `first` tokens.
fn on_ranks(stored: &Stored, x: &[Token], first: usize) -> [Found; 2] {
    let device = |_| Ok(ENGINE.device().clone());
    let ranks = threads::run(2, device, |mut world| {
        let mesh = Mesh::new(&mut world, MESH)?;
        let layer = made(Some(&mesh), stored)?;
        let own = [&x[..first], &x[first..]][mesh.rank()];
        let found = run(&layer, own)?;
        world.finish(&Call::new("end"))?;
        Result::Ok(found)
    });
    let ranks = ranks.unwrap().into_iter();
    let found: Vec<Found> = ranks.map(|rank| rank.unwrap().unwrap()).collect();
    found.try_into().ok().expect("two ranks")
}

fn as_f64(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&v| v.into()).collect()
}

fn check(first: usize) {
    let stored = Stored::new(&Odd::spec(), 3);
    let (x, input) = tokens::<Token>(23, |v| v as f32, f64::from);
    let one = run(&made(None, &stored).unwrap(), &x).unwrap();
    let [a, b] = on_ranks(&stored, &x, first);
    assert_eq!([&*a.y, &b.y].concat(), one.y);
    assert_eq!([&*a.evaluated, &b.evaluated].concat(), one.y);
    assert_eq!([&*a.routed, &b.routed].concat(), one.routed);

    let dy = as_f64(dy_of(&x).as_flattened());
    let expected = reference::backward(&Odd::spec(), &stored.0, &input, &dy);
    let close = |found: &[f32], expected: &[f64]| assert_close(as_f64(found), expected, 1e-5);
    close([&*a.dx, &b.dx].concat().as_flattened(), &expected.x);
    let [router, up] = ["router.weight", "experts.up.weight"].map(|n| &expected.weights[n].data);
    close(&a.router[1], router);
    assert_eq!(a.router[1], b.router[1]);
    let sum = a.router[0].iter().zip(&b.router[0]).map(|(a, b)| a + b);
    assert_eq!(sum.collect::<Vec<f32>>(), a.router[1]);
    assert_eq!(
        a.up.len(),
        3 * 13 * 19,
        "the first rank has three of five experts"
    );
    close(&[a.up, b.up].concat(), up);
}

#[test]
fn two_ranks_are_one_process() {
    check(9);
}

#[test]
fn a_rank_may_have_no_tokens() {
    check(23);
}

/// Returns weights by name, as a checkpoint has them.
fn named(stored: &Stored, spec: &LayerSpec) -> Tensors<'static> {
    let each = canonical_tensors(spec).into_iter();
    let rounded = each.map(
        |TensorSpec {
             name, dtype, shape, ..
         }| {
            let tensor = match dtype {
                DType::I32 => Tensor::owned(&shape, stored.flat(&name, |id| id as i32)),
                _ => Tensor::rounded(dtype, &shape, &f32s(stored, &name)).into_static(),
            };
            (name, tensor)
        },
    );
    rounded.collect()
}

#[test]
fn capacities_are_those_of_the_rank_with_the_most() {
    let stored = Stored::new(&Looked::spec(), 6);
    let weights = named(&stored, &Looked::spec());
    let (x, _) = tokens::<[f16; 8]>(16, f16::from_f64, f64::from);
    let ids = [0; 16]; // all go to one expert
    let device = |_| Ok(ENGINE.device().clone());
    let ranks = threads::run(2, device, |mut world| {
        let mesh = Mesh::new(&mut world, MESH)?;
        let layer = Looked::from_named_over(&ENGINE, &mesh, &weights)?;
        let own = 4 + 8 * mesh.rank();
        let (all, routed) = (
            layer.forward_all(&x[..own], &ids[..own])?,
            layer.route(&x[..own], &ids[..own])?,
        );
        world.finish(&Call::new("end"))?;
        Result::Ok((all, routed))
    });
    let one = Looked::from_named(&ENGINE, &weights).unwrap();
    let most = one.route(&x[..12], &ids[..12]).unwrap().capacity;
    for (rank, found) in ranks.unwrap().into_iter().enumerate() {
        let (all, routed) = found.unwrap().unwrap();
        assert_eq!((all.capacity, routed.capacity), (most, most));
        assert_eq!(all.locations, routed.locations);
        assert_eq!(
            routed.overflow,
            4 + 8 * rank as i64 - most.min(4 + 8 * rank as i64)
        );
    }
    assert!((1..12).contains(&most), "the test drops nothing");
}

/// Compares calls of every kind on device memory with calls on host memory.
fn run_raw(layer: &Odd, x: &[Token]) -> Result<()> {
    let dy = dy_of(x);
    let trained = layer.forward_train(x, RngKey::default())?;
    let back = layer.backward(&trained.saved, &dy, false)?;
    let gradients = layer.gradients()?;

    let room = |columns: usize| ENGINE.device().alloc(4 * columns * x.len());
    let (x_there, dy_there, y, dx) = (upload(x), upload(&dy), room(9)?, room(19)?);
    let call = OddRaw {
        tokens: x.len(),
        x: In::of(&x_there),
        y: Out::of(&y),
    };
    // SAFETY: all hold a row for each token, and outlive the downloads, which wait.
    unsafe { layer.forward_raw(&call)? };
    assert_eq!(download(&y, 9 * x.len()), layer.forward(x)?.as_flattened());

    let call = OddRawTraining {
        tokens: call.tokens,
        x: call.x,
        y: call.y,
    };
    let call_back = OddRawBackward {
        dy: In::of(&dy_there),
        dx: Out::of(&dx),
        grad_topk_weights: None,
        grad_router_logits: None,
    };
    // SAFETY: as above.
    unsafe {
        let saved = layer.forward_train_raw(&call, RngKey::default())?;
        layer.backward_raw(&saved, &call_back, false)?;
    }
    assert_eq!(download(&y, 9 * x.len()), trained.output.y.as_flattened());
    assert_eq!(download(&dx, 19 * x.len()), back.dx.as_flattened());
    assert_eq!(layer.gradients()?, gradients);
    Ok(())
}

#[test]
fn calls_on_device_memory_are_those_of_ranks() {
    let stored = Stored::new(&Odd::spec(), 3);
    let (x, _) = tokens::<Token>(23, |v| v as f32, f64::from);
    run_raw(&made(None, &stored).unwrap(), &x).unwrap();
    let device = |_| Ok(ENGINE.device().clone());
    let ranks = threads::run(2, device, |mut world| {
        let mesh = Mesh::new(&mut world, MESH)?;
        let layer = made(Some(&mesh), &stored)?;
        run_raw(&layer, [&x[..9], &x[9..]][mesh.rank()])?;
        world.finish(&Call::new("end"))?;
        Result::Ok(())
    });
    for rank in ranks.unwrap() {
        rank.unwrap().unwrap();
    }
}

#[test]
fn ranks_choose_how_they_carry_out_calls() {
    let stored = Stored::new(&Odd::spec(), 3);
    let (x, _) = tokens::<Token>(23, |v| v as f32, f64::from);
    let strategy: Strategy = "overlap_degree=2,shadows=1".parse().unwrap();
    let mut one = made(None, &stored).unwrap();
    let want = one.forward(&x).unwrap();
    let device = |_| Ok(ENGINE.device().clone());
    let ranks = threads::run(2, device, |mut world| {
        let mesh = Mesh::new(&mut world, MESH)?;
        let mut layer = made(Some(&mesh), &stored)?;
        layer.set_strategy(strategy)?;
        assert_eq!(layer.layer().strategy(), strategy);
        let y = layer.forward([&x[..9], &x[9..]][mesh.rank()])?;
        let refused = layer.set_strategy("r=2".parse()?).unwrap_err();
        assert!(matches!(refused, EngineError::Plan(_)), "{refused}");
        world.finish(&Call::new("end"))?;
        Result::Ok(y)
    });
    let ranks = ranks.unwrap().into_iter();
    let found: Vec<_> = ranks.map(|rank| rank.unwrap().unwrap()).collect();
    assert_eq!(found.concat(), want);
    let refused = one.set_strategy(strategy).unwrap_err().to_string();
    let says = "the layer is of one process, a strategy is for a layer over ranks\nmake it with";
    assert!(refused.starts_with(says), "{refused}");
}

#[test]
fn what_needs_one_process_says_so() {
    let stored = Stored::new(&Odd::spec(), 3);
    let device = |_| Ok(ENGINE.device().clone());
    let ranks = threads::run(2, device, |mut world| {
        let mesh = Mesh::new(&mut world, MESH)?;
        let layer = made(Some(&mesh), &stored)?;
        let refused = layer.layer().time_steps(1).map(drop);
        world.finish(&Call::new("end"))?;
        Result::Ok(refused)
    });
    for rank in ranks.unwrap() {
        let refused = rank.unwrap().unwrap();
        assert!(
            matches!(refused, Err(EngineError::OverRanks { .. })),
            "{refused:?}"
        );
    }
    let one = made(None, &stored).unwrap();
    let refused = one.layer().ranks().err();
    assert!(
        matches!(refused, Some(EngineError::NotOverRanks { .. })),
        "{refused:?}"
    );
}
