//! Gates that look at ranks, against the published rules in a few plain lines, and as the
//! router of a layer over ranks.

use crate::conformance::mesh::{mesh, on_ranks};
use crate::conformance::simulated::open;
use moesaic::reference::{self, Random};
use moesaic::train::gates::{Chosen, balance, best, experts_near, near, swipe};
use moesaic::{
    Engine, Input, Layer, LayerOptions, LayerSpec, Mesh, Parallel, RngKey, Tensor, Tensors,
    Training,
};

const EXPERTS: usize = 7;
const TOP_K: usize = 2;
/// Of each of up to four ranks.
const TOKENS: [usize; 4] = [9, 0, 5, 12];
const WIDTH: usize = 8;

/// Logits of each rank's tokens; low experts are liked best.
fn logits(ranks: usize) -> Vec<Vec<f32>> {
    let mut random = Random::new(31);
    let mut row = || -> Vec<f32> {
        let one = |e: usize| random.signed() as f32 - 0.3 * e as f32;
        (0..EXPERTS).map(one).collect()
    };
    let of = |tokens: &usize| (0..*tokens).flat_map(|_| row()).collect();
    TOKENS[..ranks].iter().map(of).collect()
}

/// Experts by falling logits.
fn sorted(row: &[f32]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..EXPERTS).collect();
    order.sort_by(|&a, &b| row[b].total_cmp(&row[a]).then(a.cmp(&b)));
    order
}

fn check_weights(logits: &[f32], chosen: &Chosen) {
    for (token, weights) in chosen.weights.chunks(TOP_K).enumerate() {
        let of = |slot: &i32| f64::from(logits[token * EXPERTS + *slot as usize]).exp();
        let ids = &chosen.ids[token * TOP_K..][..TOP_K];
        let sum: f64 = ids.iter().map(of).sum();
        for (id, weight) in ids.iter().zip(weights) {
            assert!((of(id) / sum - f64::from(*weight)).abs() < 1e-6);
        }
    }
}

/// FastMoE's rule for the ranks of one group, a token at a time: slot by slot each rank takes
/// what is sent to it, by source and token, while it has room; the rest goes to the lowest
/// rank that has room left.
fn swiped(parallel: Parallel, logits: &[Vec<f32>]) -> Vec<Vec<i32>> {
    let owner = |e: usize| (0..parallel.ep).find(|&ep| parallel.experts(ep, EXPERTS).contains(&e));
    let owner = |e: usize| owner(e).unwrap();
    let mut room = vec![0; parallel.ep];
    for (source, own) in logits.iter().enumerate() {
        room[source / parallel.expert_tp] += own.len() / EXPERTS * TOP_K;
    }
    let empty = |own: &Vec<f32>| vec![-1; own.len() / EXPERTS * TOP_K];
    let mut ids: Vec<Vec<i32>> = logits.iter().map(empty).collect();
    for slot in 0..TOP_K {
        let mut refused = Vec::new();
        for (source, own) in logits.iter().enumerate() {
            for (token, row) in own.chunks(EXPERTS).enumerate() {
                let expert = sorted(row)[slot];
                match room[owner(expert)] {
                    0 => refused.push((source, token)),
                    _ => {
                        room[owner(expert)] -= 1;
                        ids[source][token * TOP_K + slot] = expert as i32;
                    }
                }
            }
        }
        for (source, token) in refused {
            let to = room.iter().position(|room| *room > 0).unwrap();
            room[to] -= 1;
            let theirs = parallel.experts(to, EXPERTS);
            let expert = theirs.start + slot % theirs.len();
            ids[source][token * TOP_K + slot] = expert as i32;
        }
    }
    ids
}

fn external() -> LayerSpec {
    let toml = "shape = { model_dim = 8, hidden_dim = 6, experts = 7, top_k = 2 }
                router = { kind = 'external' }";
    LayerSpec::from_toml(toml).unwrap_or_else(|e| panic!("{e}"))
}

fn weights() -> Tensors<'static> {
    let spec = external();
    let drawn = reference::Weights::random(&spec, 5).rounded(&spec);
    let each = moesaic::spec::canonical_tensors(&spec).into_iter();
    let tensors = each.map(|tensor| {
        let values = drawn.get(&tensor.name).data.iter().map(|v| *v as f32);
        let values = Tensor::owned(&tensor.shape, values.collect());
        (tensor.name, values)
    });
    tensors.collect()
}

fn tokens(rank: usize) -> Vec<f32> {
    let values = Random::new(50 + rank as u64).vec(TOKENS[rank] * WIDTH);
    values.into_iter().map(|v| v as f32).collect()
}

/// `y` and the gradient of the logits.
struct Passed {
    y: Vec<f32>,
    dlogits: Vec<f32>,
}

/// What a rank does: decides, and runs its part of a layer with that.
fn passed(mesh: &Mesh, engine: &Engine, weights: &Tensors<'_>, chosen: &Chosen) -> (Passed, usize) {
    let training = Some(Training::default());
    let layer: Layer = engine
        .layer_with(
            &external(),
            weights,
            LayerOptions::over(mesh).training(training),
        )
        .unwrap();
    let x = tokens(mesh.rank());
    let mut input = Input::new(x.len() / WIDTH, &x);
    chosen.give(&mut input);
    let (output, saved) = layer
        .forward_train(input.reading(&["y"]), RngKey::default())
        .unwrap();
    let dy = Tensor::new(&[x.len() / WIDTH, WIDTH], &x);
    let back = layer.backward(&saved, &dy, false).unwrap();
    let dweights = back.get("grad.topk_weights").unwrap().to_f32();
    let passed = Passed {
        y: output.y().to_f32(),
        dlogits: chosen.gradient(&dweights).unwrap(),
    };
    (passed, saved.rows().unwrap())
}

/// The same of all tokens in one process.
fn alone(engine: &Engine, weights: &Tensors<'_>, all: &[Chosen]) -> Passed {
    let layer = engine
        .training_layer(&external(), weights, Training::default())
        .unwrap();
    let x: Vec<f32> = (0..all.len()).flat_map(tokens).collect();
    let ids: Vec<i32> = all.iter().flat_map(|chosen| chosen.ids.clone()).collect();
    let shares: Vec<f32> = all
        .iter()
        .flat_map(|chosen| chosen.weights.clone())
        .collect();
    let count = x.len() / WIDTH;
    let input = Input::new(count, &x).with_routing(TOP_K, &ids, &shares);
    let (output, saved) = layer
        .forward_train(input.reading(&["y"]), RngKey::default())
        .unwrap();
    let back = layer
        .backward(&saved, &Tensor::new(&[count, WIDTH], &x), false)
        .unwrap();
    let dweights = back.get("grad.topk_weights").unwrap().to_f32();
    let mut at = 0;
    let of = all.iter().flat_map(|chosen| {
        let own = &dweights[at..at + chosen.ids.len()];
        at += own.len();
        chosen.gradient(own).unwrap()
    });
    Passed {
        y: output.y().to_f32(),
        dlogits: of.collect(),
    }
}

#[test]
fn swipe_is_the_published_rule_on_any_mesh() {
    let engine = Engine::cpu().expect("a C compiler");
    for parallel in [mesh(1, 1, 1), mesh(3, 1, 1), mesh(2, 2, 1), mesh(2, 1, 2)] {
        let all = logits(parallel.ranks());
        let found = on_ranks(&engine, parallel, |mesh| {
            let own = &all[mesh.rank()];
            swipe(&engine.ranks(mesh), own, EXPERTS, TOP_K).unwrap()
        });
        let groups = all.chunks(parallel.group());
        let wanted = groups.flat_map(|group| swiped(parallel, group));
        for (chosen, (wanted, logits)) in found.iter().zip(wanted.zip(&all)) {
            assert_eq!(chosen.ids, wanted, "{parallel:?}");
            check_weights(logits, chosen);
        }
    }
}

/// Ranks decide, and a layer over them takes the decision: it gives what one process gives
/// with it. Returns the rows that each rank's experts got.
fn taken(
    engine: &Engine,
    parallel: Parallel,
    decide: impl Fn(&Mesh, &[f32]) -> Chosen + Sync,
) -> Vec<usize> {
    let (weights, all) = (weights(), logits(parallel.ranks()));
    let found = on_ranks(engine, parallel, |mesh| {
        let chosen = decide(mesh, &all[mesh.rank()]);
        let (passed, rows) = passed(mesh, engine, &weights, &chosen);
        (chosen, passed, rows)
    });
    let chosen: Vec<Chosen> = found.iter().map(|found| found.0.clone()).collect();
    let one = alone(engine, &weights, &chosen);
    let y = found.iter().flat_map(|(_, passed, _)| &passed.y);
    near_to(y, &one.y);
    if parallel.expert_tp == 1 {
        assert!(found.iter().flat_map(|found| &found.1.y).eq(&one.y));
    }
    let dlogits = found.iter().flat_map(|found| &found.1.dlogits);
    near_to(dlogits, &one.dlogits);
    found.iter().map(|found| found.2).collect()
}

/// A token may have an expert twice, and no rank gets more rows than it has room for.
fn takes_swipe(engine: &Engine, parallel: Parallel) {
    let rows = taken(engine, parallel, |mesh, own| {
        swipe(&engine.ranks(mesh), own, EXPERTS, TOP_K).unwrap()
    });
    for (rank, rows) in rows.into_iter().enumerate() {
        let slices = rank / parallel.expert_tp * parallel.expert_tp;
        let room: usize = TOKENS[slices..][..parallel.expert_tp].iter().sum();
        assert!(rows <= room * TOP_K, "{parallel:?}, rank {rank}: {rows}");
    }
}

/// Nodes of two ranks: the last of three is alone.
fn takes_near(engine: &Engine, parallel: Parallel) {
    let rows = taken(engine, parallel, |mesh, own| {
        near(own, &experts_near(mesh, 2, EXPERTS), 0.3).unwrap()
    });
    let sent: usize = TOKENS[..parallel.ranks()].iter().sum();
    let rows: usize = rows.iter().step_by(parallel.expert_tp).sum();
    assert_eq!(rows, sent * TOP_K, "{parallel:?}");
}

#[test]
fn a_layer_over_ranks_takes_the_decision() {
    let engine = Engine::cpu().expect("a C compiler");
    for parallel in [mesh(3, 1, 1), mesh(2, 2, 1)] {
        takes_swipe(&engine, parallel);
        takes_near(&engine, parallel);
    }
}

#[test]
fn a_layer_over_simulated_gpus_takes_the_decision() {
    for target in ["sim:sm_90a", "sim:gfx942"] {
        let engine = open(target);
        takes_swipe(&engine, mesh(3, 1, 1));
        takes_near(&engine, mesh(3, 1, 1));
    }
}

fn near_to<'v>(found: impl Iterator<Item = &'v f32>, wanted: &[f32]) {
    let found: Vec<f32> = found.copied().collect();
    assert_eq!(found.len(), wanted.len());
    let most = wanted.iter().fold(0f32, |most, v| most.max(v.abs()));
    for (found, wanted) in found.iter().zip(wanted) {
        assert!(
            (found - wanted).abs() <= 1e-5 * most,
            "{found} is not {wanted}"
        );
    }
}

/// With room for all nothing moves, and the gate is that of evaluation.
#[test]
fn swipe_leaves_what_is_balanced() {
    let all = logits(3);
    let engine = Engine::cpu().expect("a C compiler");
    let found = on_ranks(&engine, mesh(3, 1, 1), |mesh| {
        let own = &all[mesh.rank()];
        let moved = swipe(&engine.ranks(mesh), own, EXPERTS, TOP_K).unwrap();
        (best(own, EXPERTS, TOP_K).unwrap(), moved)
    });
    assert!(
        found.iter().any(|(best, moved)| best != moved),
        "nothing moved"
    );
    let alone = on_ranks(&engine, mesh(1, 1, 1), |mesh| {
        swipe(&engine.ranks(mesh), &all[0], EXPERTS, TOP_K).unwrap()
    });
    assert_eq!(alone[0], found[0].0);
}

/// FasterMoE's rule: few tokens leave the node, those that want it most.
fn limited(logits: &[f32], here: &[bool], share: f64) -> Vec<i32> {
    let rows: Vec<Vec<usize>> = logits.chunks(EXPERTS).map(sorted).collect();
    let most = (rows.len() as f64 * share).floor() as usize;
    let mut far: Vec<usize> = (0..rows.len()).filter(|&t| !here[rows[t][0]]).collect();
    if far.len() < most {
        return rows
            .iter()
            .flat_map(|row| [row[0] as i32, row[1] as i32])
            .collect();
    }
    far.sort_by(|&a, &b| {
        let logit = |t: usize| f64::from(logits[t * EXPERTS + rows[t][0]]);
        logit(b).total_cmp(&logit(a))
    });
    let ids = rows.iter().enumerate().flat_map(|(token, row)| {
        let mut close = row.iter().filter(|e| here[**e]).map(|e| *e as i32);
        let (first, second) = (close.next().unwrap(), close.next().unwrap());
        if far[..most].contains(&token) {
            [first, row[0] as i32]
        } else {
            [first, second]
        }
    });
    ids.collect()
}

#[test]
fn near_is_the_published_rule() {
    let engine = Engine::cpu().expect("a C compiler");
    let all = logits(4);
    let found = on_ranks(&engine, mesh(4, 1, 1), |mesh| {
        let here = experts_near(mesh, 2, EXPERTS);
        let own = &all[mesh.rank()];
        [0.0, 0.14, 0.3, 1.0].map(|share| (share, here.clone(), near(own, &here, share).unwrap()))
    });
    // Seven experts on four ranks: two, two, two and one.
    assert_eq!(found[0][0].1, [true, true, true, true, false, false, false]);
    assert_eq!(
        found[3][0].1,
        [false, false, false, false, true, true, true]
    );
    let mut shares = [0; 2];
    for (rank, found) in found.iter().enumerate() {
        for (share, here, chosen) in found {
            assert_eq!(
                chosen.ids,
                limited(&all[rank], here, *share),
                "{rank}, {share}"
            );
            check_weights(&all[rank], chosen);
            let plain = *chosen == best(&all[rank], EXPERTS, TOP_K).unwrap();
            shares[usize::from(plain)] += 1;
        }
    }
    assert!(
        shares[0] > 2 && shares[1] > 2,
        "one way was not taken: {shares:?}"
    );
}

#[test]
fn the_loss_of_balance_has_the_gradient_of_its_differences() {
    let logits = &logits(1)[0];
    let (loss, gradient) = balance(logits, EXPERTS).unwrap();
    let value = |logits: &[f32]| -> f64 {
        let tokens = logits.len() / EXPERTS;
        let (mut count, mut mean) = ([0.0; EXPERTS], [0.0; EXPERTS]);
        for row in logits.chunks(EXPERTS) {
            count[sorted(row)[0]] += 1.0 / tokens as f64;
            let sum: f64 = row.iter().map(|z| f64::from(*z).exp()).sum();
            for (mean, z) in mean.iter_mut().zip(row) {
                *mean += f64::from(*z).exp() / sum / tokens as f64;
            }
        }
        count.iter().zip(mean).map(|(c, m)| c * m).sum::<f64>() * EXPERTS as f64
    };
    assert!((f64::from(loss) - value(logits)).abs() < 1e-6);
    for (at, gradient) in gradient.iter().enumerate() {
        let moved = |by: f32| {
            let mut logits = logits.clone();
            logits[at] += by;
            value(&logits)
        };
        let slope = (moved(1e-3) - moved(-1e-3)) / 2e-3;
        assert!(
            (slope - f64::from(*gradient)).abs() < 2e-5,
            "{at}: {slope}, {gradient}"
        );
    }
}
