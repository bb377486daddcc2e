//! Auxiliary losses: values by hand, gradients by central differences, and independence of padding
//! and batching.

use moesaic_reference::{Input, LossValue, Random, Routed, rank};
use moesaic_spec::{LayerSpec, Loss, LossKind, Score};

const STEP: f64 = 1e-5;

/// Logits and choices of one call.
#[derive(Clone)]
struct Call {
    spec: LayerSpec,
    clean: Vec<f64>,
    noise: Vec<f64>,
    ids: Vec<i32>,
    input: Input,
}

impl Call {
    fn new(experts: usize, top_k: usize, tokens: usize, seed: u64) -> Call {
        let toml = format!(
            "shape = {{ model_dim = 4, hidden_dim = 4, experts = {experts}, top_k = {top_k} }}\n\
             router = {{ noise = 0.7 }}"
        );
        let spec = LayerSpec::from_toml(&toml).unwrap();
        let mut random = Random::new(seed);
        let clean = random.vec(tokens * experts);
        let noise: Vec<f64> = random.vec(tokens * experts);
        let noise: Vec<f64> = noise.iter().map(|n| 0.2 * n).collect();
        let mut call = Call {
            spec,
            clean,
            noise,
            ids: Vec::new(),
            input: Input {
                tokens,
                ..Input::default()
            },
        };
        let noisy = call.noisy();
        let best = |row: &[f64]| rank(row).into_iter().take(top_k).map(|e| e as i32);
        call.ids = noisy
            .chunks(experts)
            .flat_map(|row| best(row).collect::<Vec<_>>())
            .collect();
        call
    }

    fn noisy(&self) -> Vec<f64> {
        self.clean
            .iter()
            .zip(&self.noise)
            .map(|(z, n)| z + n)
            .collect()
    }

    fn loss(&self, kind: LossKind) -> LossValue {
        self.loss_over(kind, None)
    }

    fn loss_over(&self, kind: LossKind, sequence_length: Option<usize>) -> LossValue {
        let logits = self.noisy();
        let routed = Routed {
            spec: &self.spec,
            logits: &logits,
            clean: &self.clean,
            noise_scale: None,
            ids: &self.ids,
            input: &self.input,
        };
        routed.loss(&Loss {
            kind,
            coefficient: 1.0,
            sequence_length,
        })
    }

    /// Returns the tokens `first..end` as a call of their own.
    fn part(&self, first: usize, end: usize) -> Call {
        let (e, k) = (self.spec.shape.experts, self.spec.shape.top_k);
        Call {
            clean: self.clean[first * e..end * e].to_vec(),
            noise: self.noise[first * e..end * e].to_vec(),
            ids: self.ids[first * k..end * k].to_vec(),
            input: Input {
                tokens: end - first,
                ..self.input.clone()
            },
            ..self.clone()
        }
    }

    /// Returns the call with a masked token after every second one.
    fn padded(&self) -> Call {
        let (e, k) = (self.spec.shape.experts, self.spec.shape.top_k);
        let mut padded = self.part(0, 0);
        for t in 0..self.input.tokens {
            padded.clean.extend(&self.clean[t * e..(t + 1) * e]);
            padded.noise.extend(&self.noise[t * e..(t + 1) * e]);
            padded.ids.extend(&self.ids[t * k..(t + 1) * k]);
            padded.input.tokens += 1;
            if t % 2 == 1 {
                padded.clean.extend((0..e).map(|i| 3.0 * i as f64));
                padded.noise.extend(vec![0.0; e]);
                padded.ids.extend(vec![-1; k]);
                padded.input.tokens += 1;
            }
        }
        padded
    }
}

fn close(what: &str, found: f64, want: f64, tolerance: f64) {
    let error = (found - want).abs() / want.abs().max(1e-3);
    assert!(error < tolerance, "{what} is {found}, expected {want}");
}

#[test]
fn gradients_are_the_slopes_of_the_values() {
    let scores = [
        Score::Softmax,
        Score::Sigmoid,
        Score::SqrtSoftplus,
        Score::SoftmaxSelected,
    ];
    for (seed, kind) in (0..24).flat_map(|s| LossKind::ALL.map(|kind| (s, kind))) {
        let experts = [2, 5, 9][seed as usize % 3];
        let top_k = 1 + seed as usize % experts.min(4);
        let mut call = Call::new(experts, top_k, 6, seed);
        call.spec.router.score = scores[seed as usize % 4];
        call.input.sequence_ids = Some(vec![0, 0, 4, -1, 1, 1]);
        call.input.global = Some((vec![3; experts], 11));
        let found = call.loss(kind).dlogits;
        for (i, found) in found.into_iter().enumerate() {
            let here = call.clean[i];
            let mut side = |value: f64| {
                call.clean[i] = value;
                call.loss(kind).value
            };
            let slope = (side(here + STEP) - side(here - STEP)) / (2.0 * STEP);
            call.clean[i] = here;
            close(
                &format!("{kind:?} of seed {seed} at {i}"),
                found,
                slope,
                1e-4,
            );
        }
    }
}

#[test]
fn a_balanced_batch_costs_one() {
    let mut call = Call::new(4, 2, 2, 1);
    call.clean.fill(0.5);
    call.noise.fill(0.0);
    call.ids = vec![0, 1, 2, 3];
    for (kind, want) in [
        (LossKind::Switch, 1.0),
        (LossKind::Gshard, 1.0),
        (LossKind::GshardAll, 2.0),
        (LossKind::Global, 1.0),
        (LossKind::Sequence, 1.0),
        (LossKind::Z, (0.5 + 4f64.ln()).powi(2)),
        (LossKind::ImportanceLoad, 0.0),
    ] {
        close(&format!("{kind:?}"), call.loss(kind).value, want, 1e-12);
    }
}

/// All tokens go to one expert, so its Σ p and Σ n are E times the mean.
#[test]
fn a_collapsed_router_costs_as_many_as_there_are_experts() {
    let mut call = Call::new(4, 1, 3, 1);
    call.noise.fill(0.0);
    call.clean = [50.0, 0.0, 0.0, 0.0].repeat(3);
    call.ids = vec![0; 3];
    close("switch", call.loss(LossKind::Switch).value, 4.0, 1e-12);
    // Importance (3, 0, 0, 0): variance 9/4, mean 3/4.
    close(
        "importance",
        call.loss(LossKind::ImportanceLoadLogits).value,
        8.0,
        1e-9,
    );
}

/// The chosen expert is one standard deviation above the next, and the others half of one below it:
/// the load is Φ(1), Φ(-½), Φ(-½), the importance 1, 0, 0.
#[test]
fn the_load_of_learned_noise_goes_by_each_scale() {
    let mut call = Call::new(3, 1, 1, 1);
    (call.clean, call.noise) = (vec![1.0, 0.0, -1.0], vec![0.0; 3]);
    let routed = Routed {
        spec: &call.spec,
        logits: &call.clean,
        clean: &call.clean,
        noise_scale: Some(&[1.0, 2.0, 4.0]),
        ids: &[0],
        input: &call.input,
    };
    let loss = Loss {
        kind: LossKind::ImportanceLoadLogits,
        coefficient: 1.0,
        sequence_length: None,
    };
    let (high, low) = (0.8413447460685429, 0.3085375387259869);
    let mean = (high + 2.0 * low) / 3.0;
    let spread = (high - mean) * (high - mean) + 2.0 * (low - mean) * (low - mean);
    let load = spread / 2.0 / (mean * mean + 1e-10);
    close("loss", routed.loss(&loss).value, 3.0 + load, 1e-8);
}

#[test]
fn parts_of_a_group_add_up_to_its_loss() {
    let whole = Call::new(6, 2, 20, 3);
    let mut counts = vec![0i64; 6];
    whole.ids.iter().for_each(|&e| counts[e as usize] += 1);
    let mut group = whole.clone();
    group.input.global = Some((counts, 20));
    let parts: Vec<LossValue> = [(0, 7), (7, 8), (8, 20)]
        .map(|(first, end)| group.part(first, end).loss(LossKind::Global))
        .to_vec();
    let want = whole.loss(LossKind::Switch);
    close(
        "value",
        parts.iter().map(|p| p.value).sum(),
        want.value,
        1e-12,
    );
    let dlogits: Vec<f64> = parts.into_iter().flat_map(|p| p.dlogits).collect();
    for (found, want) in dlogits.into_iter().zip(want.dlogits) {
        close("gradient", found, want, 1e-12);
    }
}

#[test]
fn padding_changes_nothing() {
    let call = Call::new(6, 2, 8, 5);
    for kind in LossKind::ALL {
        let longer = call.padded();
        let (plain, padded) = (call.loss(kind), longer.loss(kind));
        close(&format!("{kind:?}"), padded.value, plain.value, 1e-12);
        let rows = padded.dlogits.chunks(6).zip(longer.ids.chunks(2));
        let kept = rows.filter(|(row, ids)| {
            let masked = ids[0] < 0;
            assert!(!masked || row.iter().all(|d| *d == 0.0), "{kind:?}");
            !masked
        });
        let kept: Vec<f64> = kept.flat_map(|(row, _)| row.to_vec()).collect();
        for (found, want) in kept.into_iter().zip(plain.dlogits) {
            close(&format!("{kind:?}"), found, want, 1e-10);
        }
    }
}

/// The loss of a batch is the mean over its sequences, whatever else is in the batch.
#[test]
fn sequences_do_not_see_each_other() {
    let call = Call::new(5, 2, 12, 7);
    let parts = [(0, 4), (4, 8), (8, 12)];
    let alone = parts.map(|(first, end)| call.part(first, end).loss(LossKind::Switch).value);
    let want = alone.iter().sum::<f64>() / 3.0;
    close(
        "by length",
        call.loss_over(LossKind::Sequence, Some(4)).value,
        want,
        1e-12,
    );
    let mut named = call;
    named.input.sequence_ids = Some((0..12).map(|t| 7 * (t / 4)).collect());
    close("by id", named.loss(LossKind::Sequence).value, want, 1e-12);
}

#[test]
fn no_tokens_cost_nothing() {
    let call = Call::new(5, 2, 0, 7);
    for kind in LossKind::ALL {
        let found = call.loss(kind);
        assert_eq!((found.value, found.dlogits.len()), (0.0, 0), "{kind:?}");
    }
    let masked = Call {
        ids: vec![-1; 6],
        ..Call::new(5, 2, 3, 7)
    };
    for kind in LossKind::ALL {
        let found = masked.loss(kind);
        assert_eq!(found.value, 0.0, "{kind:?}");
        assert!(found.dlogits.iter().all(|d| *d == 0.0), "{kind:?}");
    }
}
