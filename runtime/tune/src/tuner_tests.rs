use super::*;
use crate::{CallKind, RowBucket};
use moesaic_plan::Parallel;
use std::collections::BTreeSet;

fn key(rows: RowBucket) -> TunerKey {
    TunerKey {
        machine: "here".to_string(),
        layer: "a layer".to_string(),
        calls: CallKind::Training,
        rows,
    }
}

fn strategy(text: &str) -> Strategy {
    text.parse().expect("a strategy")
}

fn space() -> StrategySpace {
    let mesh = Parallel {
        expert_tp: 4,
        ..Parallel::default()
    };
    StrategySpace::of(mesh, 1)
}

fn predictions() -> Vec<PredictedTime> {
    let of = |text, seconds| PredictedTime {
        strategy: strategy(text),
        seconds,
    };
    vec![
        of("default", 1.2),
        of("overlap_degree=2", 1.0),
        of("overlap_degree=4", 1.05),
    ]
}

/// Runs steps of one key, with times from a function.
fn steps(
    tuner: &mut Tuner,
    key: &TunerKey,
    count: usize,
    seconds: impl Fn(Strategy) -> f64,
) -> Vec<Strategy> {
    steps_of((tuner, key), predictions, count, seconds)
}

/// The same with other predictions.
fn steps_of(
    (tuner, key): (&mut Tuner, &TunerKey),
    predict: impl Fn() -> Vec<PredictedTime>,
    count: usize,
    seconds: impl Fn(Strategy) -> f64,
) -> Vec<Strategy> {
    let step = |_| {
        let chosen = tuner.choose(key, &predict);
        let times = Times {
            forward: seconds(chosen) / 3.0,
            backward: seconds(chosen) * 2.0 / 3.0,
        };
        tuner.observe(key, chosen, times);
        chosen
    };
    (0..count).map(step).collect()
}

fn kept(tuner: &Tuner) -> Vec<Strategy> {
    let kept = tuner.events().iter().filter_map(|event| match event.what {
        What::Kept { strategy, .. } => Some(strategy),
        _ => None,
    });
    kept.collect()
}

#[test]
fn what_is_measured_beats_what_is_predicted() {
    let mut tuner = Tuner::new(TunerOptions::default(), space());
    let key = key(RowBucket::Tokens(10));
    let seconds = |s: Strategy| {
        if s == strategy("overlap_degree=4") {
            0.8
        } else {
            1.0
        }
    };
    // Three candidates, each four times, all of them real training steps.
    let all = steps(&mut tuner, &key, 14, seconds);
    assert_eq!(all[0], strategy("default"));
    assert_eq!(all[12..], [strategy("overlap_degree=4"); 2]);
    assert_eq!(kept(&tuner), [strategy("overlap_degree=4")]);
    let tried = tuner.events().len() - 1;
    assert_eq!(tried, 3);
    assert!(
        tuner.events()[3]
            .to_string()
            .contains("keeps overlap_degree=4, 800")
    );
}

#[test]
fn a_little_faster_is_enough_at_first_and_not_for_what_is_kept() {
    let mut tuner = Tuner::new(TunerOptions::default(), space());
    let key = key(RowBucket::Tokens(10));
    let seconds = |best: &'static str, scale: f64| {
        move |s: Strategy| scale * if s == strategy(best) { 0.96 } else { 1.0 }
    };
    // Three that are close: each once, and nine times.
    let all = steps(&mut tuner, &key, 31, seconds("overlap_degree=2", 1.0));
    assert_eq!(kept(&tuner), [strategy("overlap_degree=2")]);
    let finals: BTreeSet<&Strategy> = all[12..15].iter().collect();
    assert_eq!(finals.len(), 3);
    // Everything is slower, and another strategy is best by as little.
    steps(&mut tuner, &key, 50, seconds("overlap_degree=4", 2.0));
    assert_eq!(kept(&tuner), [strategy("overlap_degree=2"); 2]);
}

/// A strategy with a poor prediction is tried if it is one step from the fastest.
#[test]
fn the_degree_next_to_the_fastest_is_tried() {
    let mut tuner = Tuner::new(TunerOptions::default(), space());
    let key = key(RowBucket::Tokens(10));
    let predicted = || {
        let mut all = predictions();
        all[2].seconds = 9.0;
        all
    };
    let seconds = |s: Strategy| 1.0 / s.overlap_degree.forward as f64;
    steps_of((&mut tuner, &key), predicted, 20, seconds);
    assert_eq!(kept(&tuner), [strategy("overlap_degree=4")]);
}

#[test]
fn drift_is_noticed_and_a_spike_is_not() {
    let mut tuner = Tuner::new(TunerOptions::default(), space());
    let key = key(RowBucket::Tokens(10));
    let fast = |best: &'static str| move |s: Strategy| if s == strategy(best) { 0.5 } else { 1.0 };
    steps(&mut tuner, &key, 20, fast("overlap_degree=2"));
    // One late rank changes nothing.
    steps(&mut tuner, &key, 1, |_| 9.0);
    let after = steps(&mut tuner, &key, 8, fast("overlap_degree=2"));
    assert_eq!(after, [strategy("overlap_degree=2"); 8]);
    // The fast strategy has become slow: the others are tried again.
    let all = steps(&mut tuner, &key, 30, fast("overlap_degree=4"));
    assert_eq!(all.last(), Some(&strategy("overlap_degree=4")));
    let drifted = |event: &TunerDecision| matches!(event.what, What::Drifted { .. });
    assert_eq!(tuner.events().iter().filter(|e| drifted(e)).count(), 1);
    assert_eq!(
        kept(&tuner),
        [strategy("overlap_degree=2"), strategy("overlap_degree=4")]
    );
}

/// Other rows recommend other strategies; the kept one is among those tried.
#[test]
fn what_has_drifted_is_predicted_again() {
    let mut tuner = Tuner::new(TunerOptions::default(), space());
    let key = key(RowBucket::Tokens(10));
    let seconds = |s: Strategy| {
        if s == strategy("overlap_degree=2") {
            0.5
        } else {
            1.0
        }
    };
    steps(&mut tuner, &key, 20, seconds);
    assert!(!tuner.asks(&key));
    while !tuner.asks(&key) {
        steps(&mut tuner, &key, 1, |_| 4.0);
    }
    // More steps whose times ranks have not exchanged yet.
    let (events, kept) = (tuner.events().len(), strategy("overlap_degree=2"));
    for (forward, backward) in [(2.0, 2.0); 8] {
        tuner.observe(&key, kept, Times { forward, backward });
    }
    assert_eq!((tuner.events().len(), tuner.records()), (events, vec![]));
    let other = || {
        vec![PredictedTime {
            strategy: strategy("overlap_degree=8"),
            seconds: 1.0,
        }]
    };
    let seconds = |s: Strategy| {
        if s == strategy("overlap_degree=8") {
            1.0
        } else {
            4.0
        }
    };
    let all = steps_of((&mut tuner, &key), other, 20, seconds);
    assert_eq!(all[0], strategy("overlap_degree=2"));
    assert_eq!(all.last(), Some(&strategy("overlap_degree=8")));
    assert!(!tuner.asks(&key));
}

#[test]
fn without_predictions_the_paper_s_search_decides() {
    let mut tuner = Tuner::new(TunerOptions::default(), space());
    let key = key(RowBucket::of(4096, Some(1024)));
    let seconds = |s: Strategy| match (s.adaptive_r, s.overlap_degree.forward) {
        (Some(2), 8) => 0.1,
        (Some(adaptive_r), overlap_degree) => {
            1.0 + adaptive_r.abs_diff(2) as f64 + 1.0 / overlap_degree as f64
        }
        (None, _) => 9.0,
    };
    steps_of((&mut tuner, &key), Vec::new, 4 * 4 * 4 + 10, seconds);
    assert_eq!(kept(&tuner), [strategy("r=2,overlap_degree=8")]);
}

/// No clock decides, so two runs of a job are alike.
#[test]
fn prediction_alone_measures_nothing() {
    let options = TunerOptions {
        mode: TunerMode::Predict,
        ..TunerOptions::default()
    };
    let mut tuner = Tuner::new(options, space());
    let key = key(RowBucket::Tokens(3));
    let all = steps(&mut tuner, &key, 40, |s| s.overlap_degree.forward as f64);
    assert_eq!(all, [strategy("overlap_degree=2"); 40]);
    assert_eq!(tuner.events().len(), 1);
}

#[test]
fn keys_are_apart_and_begin_with_what_the_nearest_key_has() {
    let mut tuner = Tuner::new(TunerOptions::default(), space());
    let seconds = |s: Strategy| {
        if s == strategy("overlap_degree=4") {
            0.5
        } else {
            1.0
        }
    };
    steps(&mut tuner, &key(RowBucket::Tokens(10)), 14, seconds);
    let other = steps(&mut tuner, &key(RowBucket::Tokens(11)), 1, seconds);
    assert_eq!(other, [strategy("overlap_degree=4")]);
    let stranger = TunerKey {
        machine: "elsewhere".to_string(),
        ..key(RowBucket::Tokens(10))
    };
    assert_eq!(
        steps(&mut tuner, &stranger, 1, seconds),
        [strategy("default")]
    );
}

#[test]
fn what_was_kept_is_kept_by_the_next_run() {
    let mut tuner = Tuner::new(TunerOptions::default(), space());
    let key = key(RowBucket::Tokens(10));
    let seconds = |s: Strategy| {
        if s == strategy("overlap_degree=4") {
            0.5
        } else {
            1.0
        }
    };
    steps(&mut tuner, &key, 14, seconds);
    let mut next = Tuner::new(TunerOptions::default(), space());
    next.recall(tuner.records());
    assert_eq!(
        steps(&mut next, &key, 20, seconds),
        [strategy("overlap_degree=4"); 20]
    );
    // A recalled choice is reconsidered on a machine that is slower now.
    steps(&mut next, &key, 9, |_| 2.0);
    let drifted = |event: &TunerDecision| matches!(event.what, What::Drifted { .. });
    assert!(next.events().iter().any(drifted));
}

#[test]
fn tuners_that_observe_the_same_decide_the_same() {
    let run = || {
        let mut tuner = Tuner::new(TunerOptions::default(), space());
        let mut state = 1u64;
        let mut all = Vec::new();
        for step in 0..200 {
            let key = key(RowBucket::Tokens(8 + step % 3));
            let chosen = tuner.choose(&key, predictions);
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1);
            let forward = 1.0 + (state >> 40) as f64 / 1e8;
            let times = Times {
                forward,
                backward: 2.0 * forward,
            };
            tuner.observe(&key, chosen, times);
            all.push(chosen);
        }
        all
    };
    assert_eq!(run(), run());
}
