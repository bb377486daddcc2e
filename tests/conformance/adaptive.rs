//! Ranks that tune their strategy together learn the same parameters as with one strategy.

use super::case::{Case, host};
use super::layers::engine as cpu;
use super::mesh::{layer_on, mesh, on_nodes, on_ranks, part, shares, spec};
use super::mesh_raw;
use super::trained::RNG_KEY;
use moesaic::mesh::{Both, ProcessGroup};
use moesaic::plan::{Placement, Strategy};
use moesaic::planner::published;
use moesaic::train::mesh::{MeshOptimizer, Scaling, update_mesh};
use moesaic::train::{Sgd, masters};
use moesaic::tune::{
    CallKind, LayerTuner, Planned, Predict, PredictedTime, RowBucket, StoredChoice, StrategySpace,
    Tuner, TunerDecision, TunerKey, TunerMode, TunerOptions, What, read, shortlist, write,
};
use moesaic::{Layer, LayerOptions, Mesh, Parallel, Tensors, Training};

const TOKENS: usize = 21;
const STEPS: u64 = 32;

/// The costs that a rank has learned, and the strategies that were decided.
struct Learned {
    parameters: Tensors<'static>,
    events: Vec<TunerDecision>,
}

fn space() -> StrategySpace {
    let mesh = Parallel {
        ep: 2,
        expert_tp: 2,
        ..Parallel::default()
    };
    StrategySpace {
        overlap_degrees: vec![1, 3],
        ..StrategySpace::of(mesh, 0)
    }
}

fn tuner(mode: TunerMode) -> Tuner {
    let options = TunerOptions {
        mode,
        samples: 1,
        finals: 1,
        // Steps of less than a millisecond drift by themselves.
        drift: f64::INFINITY,
        ..TunerOptions::default()
    };
    Tuner::new(options, space())
}

/// Steps of descent; the loss is `Σ y·dy`.
fn learn(
    mesh: &Mesh,
    case: &Case,
    mode: TunerMode,
    predict: impl FnOnce(&Layer) -> Predict,
) -> Learned {
    let engine = cpu();
    let layer = layer_on(&engine, mesh, case, Some(Training::default()));
    let mut optimizer = MeshOptimizer::new(&layer.ranks().unwrap(), Sgd::with_momentum(1e-3, 0.5));
    let mut parameters = masters(&layer.weights_of(&case.host_weights()).unwrap());
    for (name, tensor) in &parameters {
        layer.set_weight(name, tensor).unwrap();
    }
    let predict = predict(&layer);
    let tuner = LayerTuner::new(tuner(mode), "this machine", predict);
    let mut layer = layer;
    layer.set_tuner(Some(tuner.clone())).unwrap();
    let tokens = &shares(TOKENS, mesh.parallel().ranks())[mesh.rank()];
    let (own, width) = (part(case, tokens), case.spec.output_dim());
    for step in 0..STEPS {
        let (_, saved) = layer.forward_train(&own.input(), RNG_KEY).unwrap();
        let dy = &case.dy(step)[tokens.start * width..tokens.end * width];
        let dy = host(case.spec.precision.activations, &[tokens.len(), width], dy);
        layer.backward(&saved, &dy, false).unwrap();
        let scaling = Scaling::default();
        update_mesh(&layer, &mut optimizer, &mut parameters, scaling).unwrap();
    }
    Learned {
        parameters,
        events: tuner.events(),
    }
}

fn case() -> Case {
    let text = "shape = { model_dim = 12, hidden_dim = 8, experts = 2, top_k = 1 }
         experts = { bias = true }";
    Case::random(&spec(text), TOKENS, 5)
}

fn learned(predictions: &[PredictedTime]) -> Vec<Learned> {
    let case = case();
    on_ranks(&cpu(), mesh(2, 2, 1), |mesh| {
        let predictions = predictions.to_vec();
        let predict = Box::new(move |_: &_, _: &_| predictions.clone());
        learn(mesh, &case, TunerMode::Measure, |_| predict)
    })
}

fn tried(events: &[TunerDecision]) -> Vec<Strategy> {
    let tried = events.iter().filter_map(|event| match event.what {
        What::Tried(strategy) => Some(strategy),
        _ => None,
    });
    tried.collect()
}

#[test]
fn a_layer_that_tries_strategies_learns_the_same() {
    let default = PredictedTime {
        strategy: Strategy::default(),
        seconds: 1.0,
    };
    let fixed = learned(&[default]);
    let searched = learned(&[]);
    // All degrees, and all numbers of chunks of each, by all ranks at the same steps; then the
    // fastest forward with the fastest backward pass, if these differ.
    let events = &searched[0].events;
    let mut all = tried(events);
    all.retain(|strategy| strategy.overlap_degree.forward == strategy.overlap_degree.backward);
    assert_eq!(all.len(), 3 * 2, "{events:?}");
    let kept = |event: &TunerDecision| matches!(event.what, What::Kept { .. });
    assert!(events.iter().any(kept), "{events:?}");
    let most = shares(TOKENS, 4).iter().map(|tokens| tokens.len()).max();
    assert_eq!(events[0].key.rows, RowBucket::of(most.unwrap(), None));
    learned_alike(&searched, &fixed);
}

/// All ranks decide alike, and what they learn is what others have learnt.
fn learned_alike(ranks: &[Learned], others: &[Learned]) {
    for (rank, (found, want)) in ranks.iter().zip(others).enumerate() {
        assert_eq!(found.events, ranks[0].events, "rank {rank}");
        for (name, tensor) in &want.parameters {
            let found = found.parameters[name].to_f32();
            for (found, want) in found.iter().zip(tensor.to_f32()) {
                let off = (found - want).abs();
                assert!(off < 1e-4, "rank {rank}: `{name}` is {found}, not {want}");
            }
        }
    }
}

/// Evaluations have choices of their own, for each power of two of tokens: prefill and decode. A
/// layer for inference has them, too, and every `y` is that of one process.
#[test]
fn evaluations_are_tuned_apart_from_steps() {
    let case = case();
    let engine = cpu();
    let whole = case.layer(&engine).forward(&case.input()).unwrap();
    let row = case.spec.output_dim() * 4;
    let parallel = mesh(2, 1, 1);
    for training in [None, Some(Training::default())] {
        let ranks = on_ranks(&engine, parallel, |mesh| {
            let mut layer = layer_on(&engine, mesh, &case, training);
            let mut tuner = mesh_raw::two_strategies();
            let before = TunerKey {
                machine: "this machine".to_string(),
                layer: layer.identity().unwrap(),
                calls: CallKind::Training,
                rows: RowBucket::of(16, None),
            };
            tuner.recall([StoredChoice {
                key: before,
                strategy: "overlap_degree=2".parse().unwrap(),
                seconds: Some(1.0),
            }]);
            let predict: Predict = Box::new(|_, _| Vec::new());
            let tuner = LayerTuner::new(tuner, "this machine", predict);
            layer.set_tuner(Some(tuner.clone())).unwrap();
            // All tokens, two of each rank, none of any.
            let all = &shares(TOKENS, 2)[mesh.rank()];
            let few = 2 * mesh.rank()..2 * mesh.rank() + 2;
            for tokens in [all, &few, &(0..0)].repeat(6) {
                let y = layer.forward(&part(&case, tokens).input()).unwrap();
                let want = &whole.y().data[tokens.start * row..tokens.end * row];
                assert!(*y.y().data == *want, "{tokens:?}");
            }
            if training.is_some() {
                let input = part(&case, all).input();
                let (_, saved) = layer.forward_train(input.reading(&["y"]), RNG_KEY).unwrap();
                assert_eq!(saved.strategy(), "overlap_degree=2".parse().unwrap());
            }
            tuner.events()
        });
        let events = &ranks[0];
        assert_eq!(*events, ranks[1]);
        let most = shares(TOKENS, 2).iter().map(ExactSizeIterator::len).max();
        for tokens in [most.unwrap(), 2, 0] {
            let of = |event: &&TunerDecision| {
                let key = &event.key;
                key.calls == CallKind::Evaluation && key.rows == RowBucket::of(tokens, None)
            };
            let own: Vec<TunerDecision> = events.iter().filter(of).cloned().collect();
            let kept = own.iter().filter(|e| matches!(e.what, What::Kept { .. }));
            assert_eq!((tried(&own).len(), kept.count()), (2, 1), "{own:?}");
        }
        assert!(events[0].to_string().starts_with("step 0, evaluation, "));
    }
}

/// An evaluation is predicted to take its forward pass alone.
#[test]
fn evaluations_are_predicted_without_a_pass_back() {
    let case = case();
    let ranks = on_nodes(&cpu(), mesh(2, 2, 1), 2, |mesh| {
        let of = |training, calls| {
            let layer = layer_on(&cpu(), mesh, &case, training);
            let planned = Planned::of(published("mpi-emulated").unwrap());
            let key = TunerKey {
                machine: String::new(),
                layer: layer.identity().unwrap(),
                calls,
                rows: RowBucket::of(TOKENS, None),
            };
            let loads = vec![vec![6, 5]; 4];
            planned.predict(&layer).unwrap()(&key, &loads)
        };
        let training = Some(Training::default());
        let [alone, evaluation, step] = [
            of(None, CallKind::Evaluation),
            of(training, CallKind::Evaluation),
            of(training, CallKind::Training),
        ];
        assert_eq!(alone, evaluation);
        for prediction in &evaluation {
            let Both { forward, backward } = prediction.strategy.overlap_degree;
            assert_eq!(forward, backward, "one pass has chunks of one kind");
            let same = |p: &&PredictedTime| p.strategy == prediction.strategy;
            let step = step.iter().find(same).unwrap();
            assert!(prediction.seconds < 0.7 * step.seconds, "{prediction:?}");
        }
        let predict = Box::new(move |key: &TunerKey, loads: &Vec<Vec<u64>>| {
            let rows: u64 = loads.iter().flatten().sum();
            assert_eq!((key.calls, rows), (CallKind::Evaluation, TOKENS as u64));
            evaluation.clone()
        });
        let options = LayerOptions {
            tuner: Some(LayerTuner::new(
                tuner(TunerMode::Predict),
                "this machine",
                predict,
            )),
            ..LayerOptions::over(mesh)
        };
        let layer = cpu().layer_with(&case.spec, &case.host_weights(), options);
        let own = part(&case, &shares(TOKENS, 4)[mesh.rank()]);
        layer.unwrap().forward(&own.input()).map(drop).unwrap();
    });
    assert_eq!(ranks.len(), 4);
}

/// The planner on two nodes of two ranks; what it predicts, and what ranks do with it.
fn planned(mode: TunerMode) -> (Vec<PredictedTime>, Vec<Learned>) {
    let case = case();
    let ranks = on_nodes(&cpu(), mesh(2, 2, 1), 2, |mesh| {
        let (sender, told) = std::sync::mpsc::channel();
        let learned = learn(mesh, &case, mode, |layer| {
            let machine = published("mpi-emulated").unwrap();
            let mut predict = Planned::of(machine).predict(layer).unwrap();
            Box::new(move |key, loads| {
                let rows = loads.iter().map(|rows| rows.iter().sum::<u64>() as usize);
                let tokens = shares(TOKENS, 4);
                assert!(rows.eq(tokens.iter().map(|own| own.len())), "{loads:?}");
                let predictions = predict(key, loads);
                sender.send(predictions.clone()).unwrap();
                predictions
            })
        });
        (told.recv().unwrap(), learned)
    });
    let (mut predictions, learned): (Vec<_>, Vec<_>) = ranks.into_iter().unzip();
    (predictions.swap_remove(0), learned)
}

fn fastest(predictions: &[PredictedTime]) -> Strategy {
    let best = predictions
        .iter()
        .min_by(|a, b| a.seconds.total_cmp(&b.seconds));
    best.unwrap().strategy
}

#[test]
fn the_planner_says_what_is_worth_a_measurement() {
    let (predictions, ranks) = planned(TunerMode::Measure);
    let names: Vec<String> = predictions.iter().map(|p| p.strategy.to_string()).collect();
    for name in [
        "default",
        "overlap_degree=4",
        "all_to_all=dedup",
        "all_to_all=2dh-inter-first",
        "r=1",
        "r=0",
    ] {
        assert!(names.iter().any(|found| found == name), "{name}: {names:?}");
    }
    let events = &ranks[0].events;
    let tried = tried(events);
    // Then what is next to the fastest of these, and passes that look best together.
    let list = shortlist(&predictions, Strategy::default());
    assert!(tried.starts_with(&list) && list.len() <= 5, "{events:?}");
    assert!(list.contains(&fastest(&predictions)), "{events:?}");
    let all = events.iter().filter_map(|event| match event.what {
        What::Kept { strategy, seconds } => Some((strategy, seconds.is_some())),
        _ => None,
    });
    let kept: Vec<(Strategy, bool)> = all.collect();
    let [(kept, true)] = kept[..] else {
        panic!("one is kept, by measurement: {events:?}");
    };
    assert!(tried.contains(&kept), "{kept} of {tried:?}");
    let default = PredictedTime {
        strategy: Strategy::default(),
        seconds: 1.0,
    };
    learned_alike(&ranks, &learned(&[default]));
}

/// The next run of the same layer does from its first step what one run has
/// found.
#[test]
fn choices_in_a_file_are_those_of_a_layer() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("choices.json");
    let run = |width: usize, steps: usize, tuner: &Tuner| {
        let text =
            format!("shape = {{ model_dim = {width}, hidden_dim = 8, experts = 2, top_k = 1 }}");
        let case = Case::random(&spec(&text), TOKENS, 5);
        let ranks = on_ranks(&cpu(), mesh(2, 2, 1), |mesh| {
            let layer = layer_on(&cpu(), mesh, &case, Some(Training::default()));
            let predict: Predict = Box::new(|_, _| Vec::new());
            let tuner = LayerTuner::new(tuner.clone(), "this machine", predict);
            let mut layer = layer;
            layer.set_tuner(Some(tuner.clone())).unwrap();
            let tokens = &shares(TOKENS, 4)[mesh.rank()];
            let own = part(&case, tokens);
            let dy = &case.dy(0)[tokens.start * width..tokens.end * width];
            let dy = host(case.spec.precision.activations, &[tokens.len(), width], dy);
            for _ in 0..steps {
                let (_, saved) = layer.forward_train(&own.input(), RNG_KEY).unwrap();
                layer.backward(&saved, &dy, false).unwrap();
            }
            (tuner.records(), tried(&tuner.events()))
        });
        ranks.into_iter().next().unwrap()
    };
    let (records, first) = run(12, STEPS as usize, &tuner(TunerMode::Measure));
    assert!(
        records.len() == 1 && first.len() >= 6,
        "{records:?} {first:?}"
    );
    write(&path, records.clone()).unwrap();
    let mut tuner = tuner(TunerMode::Measure);
    tuner.recall(read(&path).unwrap());
    let (kept, again) = run(12, 2, &tuner);
    assert_eq!((kept, again), (records, Vec::new()));
    // One of the same name that is wider is another.
    let (_, other) = run(13, 2, &tuner);
    assert!(!other.is_empty());
}

/// Replicas that keep the rows of a hot expert where they are take less time, and what is
/// chosen for one placement is not chosen for another.
#[test]
fn experts_are_predicted_where_they_are_placed() {
    let text = "shape = { model_dim = 12, hidden_dim = 8, experts = 4, top_k = 1 }";
    let case = Case::random(&spec(text), TOKENS, 5);
    let replicas: Placement = "near: 0 | 1,+0 | 2,+0 | 3,+0".parse().unwrap();
    let hot = vec![vec![1_000_000, 10, 10, 10]; 4];
    let ranks = on_ranks(&cpu(), mesh(4, 1, 1), |mesh| {
        let of = |mesh: &Mesh| {
            let layer = layer_on(&cpu(), mesh, &case, Some(Training::default()));
            let planned = Planned::of(published("h100-ib").unwrap());
            let key = TunerKey {
                machine: String::new(),
                layer: layer.identity().unwrap(),
                calls: CallKind::Training,
                rows: RowBucket::of(1_000_030, None),
            };
            let predicted = planned.predict(&layer).unwrap()(&key, &hot);
            let default = |p: &&PredictedTime| p.strategy == Strategy::default();
            (key, predicted.iter().find(default).unwrap().seconds)
        };
        (of(mesh), of(&mesh.placed(&replicas).unwrap()))
    });
    for (order, placed) in &ranks {
        assert!(placed.1 < 0.5 * order.1, "{placed:?} {order:?}");
        assert_ne!(order.0, placed.0);
        assert_eq!((order, placed), (&ranks[0].0, &ranks[0].1));
    }
}

/// The reproducible mode: nothing is measured, and each run does the same from its first step.
#[test]
fn by_prediction_alone_every_run_is_alike() {
    let runs = [planned(TunerMode::Predict), planned(TunerMode::Predict)];
    let [(predictions, ranks), (_, again)] = &runs;
    let events = &ranks[0].events;
    // Of equally good ones; the fastest goes in two hops here, and is not 3 % faster.
    let simplest = Strategy::simplest(predictions.iter().map(|p| (p.strategy, p.seconds)));
    let expected = What::Kept {
        strategy: simplest.unwrap(),
        seconds: None,
    };
    assert_eq!(events.len(), 1, "{events:?}");
    assert_eq!(events[0].what, expected);
    for (first, second) in ranks.iter().zip(again) {
        assert_eq!(first.events, second.events);
        for (name, tensor) in &first.parameters {
            assert_eq!(tensor, &second.parameters[name], "`{name}`");
        }
    }
}

#[test]
fn numbers_of_all_ranks_are_folded_and_as_many_of_each() {
    let engine = cpu();
    let ranks = on_ranks(&engine, mesh(3, 1, 1), |mesh| {
        let (ranks, own) = (engine.ranks(mesh), mesh.rank() as f64);
        let fold = [own, -own];
        let sums = ranks.sum_f64(&fold, ProcessGroup::World, "sums").unwrap();
        let most = ranks.max_f64(&fold, ProcessGroup::World, "most").unwrap();
        let unequal = vec![1.0; 1 + mesh.rank()];
        let error = ranks.sum_f64(&unequal, ProcessGroup::World, "unequal");
        (sums, most, error.unwrap_err().to_string())
    });
    for (sums, most, error) in ranks {
        assert_eq!((sums, most), (vec![3.0, -3.0], vec![2.0, 0.0]));
        assert!(error.contains("unequal: "), "{error}");
    }
}
