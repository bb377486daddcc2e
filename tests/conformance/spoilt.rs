//! Tokens that are no numbers, and scores that are next to nothing: what they may change, and
//! what not, by every selection and on every family of targets.

use super::Case;
use super::cases::{changed, drawing, of_type, selecting};
use super::layers::engine as cpu;
use super::mesh::{compare, mesh};
use super::sampled::{empty_tokens, gradients_of_case};
use super::simulated::open;
use super::trained::{RNG_KEY, draw};
use moesaic::kernel::{SimArch, Target};
use moesaic::reference;
use moesaic::spec::*;
use moesaic::{DType, Engine, Recompute};
use moesaic_harness::thorough::one_in;

/// All layers on this CPU, and each on one of the two simulators.
fn taken(
    engine: &Engine,
    layers: impl IntoIterator<Item = LayerSpec>,
) -> impl Iterator<Item = LayerSpec> {
    match engine.target() {
        Target::Sim(SimArch::Cuda(_)) => one_in(2, 0, layers),
        Target::Sim(_) => one_in(2, 1, layers),
        _ => one_in(1, 0, layers),
    }
}

const NOT_NUMBERS: [f64; 3] = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY];

fn loss(kind: LossKind) -> Loss {
    let coefficient = 0.5;
    Loss {
        kind,
        coefficient,
        sequence_length: None,
    }
}

/// Layers whose calls have tokens without experts, of every kind of router and loss.
fn with_empty_tokens() -> Vec<LayerSpec> {
    let masked = |change: &dyn Fn(&mut LayerSpec)| {
        changed(|s| {
            s.router.token_mask = true;
            change(s);
        })
    };
    let latent = |s: &mut LayerSpec| {
        s.latent = Some(Latent {
            dim: 7,
            bias: true,
            norm_eps: Some(0.1),
            input_norm_eps: Some(0.1),
        })
    };
    let mut list = vec![
        masked(&|s| {
            s.router.bias = true;
            s.router.renormalize = Renormalize::Sum;
            s.router.expert_scale = true;
            let kinds = [LossKind::Switch, LossKind::Z, LossKind::Sequence];
            s.losses = kinds.map(loss).into();
        }),
        masked(&|s| {
            (s.router.kind, s.router.projection_dim) = (RouterKind::Cosine, Some(6));
            s.losses = vec![loss(LossKind::Gshard)];
        }),
        masked(&|s| {
            (s.router.noise, s.router.noise_kind) = (0.7, NoiseKind::Learned);
            (s.router.input, s.router.jitter) = (RouterInput::RmsScaled, 0.1);
            s.losses = vec![loss(LossKind::ImportanceLoadLogits)];
        }),
        masked(&|s| {
            (s.router.noise, s.router.noise_kind) = (0.7, NoiseKind::Gaussian);
            s.losses = vec![loss(LossKind::ImportanceLoad)];
            (s.router.score, s.router.renormalize) = (Score::Sigmoid, Renormalize::PNorm);
        }),
        changed(|s| {
            (s.router.kind, s.shape.top_k) = (RouterKind::External, 1);
            latent(s);
        }),
        changed(|s| {
            (s.capacity.mode, s.capacity.rows) = (CapacityMode::Fixed, Some(1));
            latent(s);
        }),
        masked(&|s| s.router.select = Select::Sinkhorn(4)),
    ];
    // 16-bit factors, which go through tensor cores and matrix cores.
    let halves = of_type(
        DType::Bf16,
        changed(|s| {
            (s.shape.model_dim, s.shape.hidden_dim) = (64, 64);
            (s.router.kind, s.shape.top_k) = (RouterKind::External, 1);
            let dim = 64;
            s.latent = Some(Latent {
                dim,
                bias: false,
                norm_eps: None,
                input_norm_eps: None,
            });
        }),
    );
    list.push(halves);
    // Expert choice, and a table.
    list.extend(drawing().pop().into_iter().chain(selecting().pop()));
    list
}

/// A call in which tokens without experts are no numbers; `None` where there are none.
fn padded(spec: &LayerSpec) -> Option<Case> {
    let mut case = Case::random(spec, 29, 5);
    let sequences = spec.losses.iter().any(|l| l.kind == LossKind::Sequence);
    case.input.sequence_ids = sequences.then(|| (0..29).map(|t| t / 5 - 1).collect());
    let d = spec.shape.model_dim;
    let masked = spec.capacity.mode == CapacityMode::Dropless;
    for (i, t) in empty_tokens(&case).into_iter().enumerate() {
        // A token that is NaN chooses other experts: only at the end, where all are full.
        if masked || t == 28 {
            case.input.x[t * d + 3 % d] = NOT_NUMBERS[i % 3];
            case.input.x[t * d + d / 2] = NOT_NUMBERS[i % 2];
        }
    }
    case.input.x.iter().any(|v| !v.is_finite()).then_some(case)
}

/// Padding and dropped tokens add zeros to every sum over tokens, whatever they hold.
fn padding_adds_nothing(engine: &Engine) {
    let layers: Vec<LayerSpec> = taken(engine, with_empty_tokens()).collect();
    let mut held = 0;
    for spec in &layers {
        let Some(case) = padded(spec) else {
            continue;
        };
        let dy = case.dy(9);
        let expected = reference::backward(spec, &case.weights, &case.drawing(), &dy);
        for (name, tensor) in &expected.weights {
            let finite = tensor.data.iter().all(|v| v.is_finite());
            assert!(finite, "{name} of the reference, {}", case.describe());
        }
        if spec.precision.activations == DType::F32 {
            gradients_of_case(case, engine);
        } else {
            case.check_training(engine, Recompute::None);
        }
        held += 1;
    }
    let all = layers.len();
    assert!(
        held + 1 >= all,
        "{held} of {all} have tokens without experts"
    );
}

/// Layers of every selection and score that a token has a say in.
fn choosing() -> Vec<LayerSpec> {
    let groups = |stat, mask| {
        changed(|s| {
            (s.router.score, s.shape.top_k) = (Score::Sigmoid, 4);
            let (count, keep) = (3, 2);
            s.router.groups = Some(Groups {
                count,
                keep,
                stat,
                mask,
            });
        })
    };
    let noisy = |kind| changed(|s| (s.router.noise, s.router.noise_kind) = (0.8, kind));
    let ordered = |order| {
        changed(|s| {
            (s.capacity.mode, s.capacity.factor) = (CapacityMode::Factor, 1.0);
            s.capacity.order = order;
        })
    };
    vec![
        changed(|_| ()),
        changed(|s| s.router.score = Score::SoftmaxSelected),
        changed(|s| {
            (s.router.score, s.router.select_bias) = (Score::SqrtSoftplus, true);
            s.router.renormalize = Renormalize::Sum;
        }),
        groups(GroupStat::Max, GroupMask::Exclude),
        groups(GroupStat::Max, GroupMask::Zero),
        groups(GroupStat::Top2Sum, GroupMask::Exclude),
        groups(GroupStat::Top2Sum, GroupMask::Zero),
        changed(|s| s.router.select = Select::SparseMixer(0.01)),
        changed(|s| s.router.select = Select::Sinkhorn(4)),
        changed(|s| {
            (s.router.select, s.shape.top_k) = (Select::ExpertChoice(1.5), 9);
        }),
        changed(|s| {
            s.router.entropy = Some(Entropy {
                temperature: 0.75,
                load: 0.5,
            })
        }),
        noisy(NoiseKind::Gumbel),
        noisy(NoiseKind::GumbelSecond),
        ordered(CapacityOrder::BatchPrioritized),
        ordered(CapacityOrder::Probability),
    ]
}

/// A NaN token chooses the lowest ids, and the others what they choose without it.
fn a_nan_token_spoils_only_itself(engine: &Engine) {
    for spec in taken(engine, choosing()) {
        let (t, d, k) = (4, spec.shape.model_dim, spec.shape.top_k);
        let mut case = Case::random(&spec, 23, 6);
        case.input.x[t * d + 5] = f64::NAN;
        case.input.draw = Some(draw(RNG_KEY));
        let gate = reference::gate(&spec, &case.weights, &case.input);
        let ids = &gate.decision.ids[t * k..(t + 1) * k];
        let lowest: Vec<i32> = (0..k as i32).collect();
        if !matches!(spec.router.select, Select::ExpertChoice(_)) {
            assert_eq!(ids, lowest, "{}", case.what("the reference"));
        }
        let numbers = |t: usize| gate.decision.weights[t * k..(t + 1) * k].iter();
        let clean = (0..23).filter(|&other| other != t);
        assert!(clean.flat_map(numbers).all(|w| w.is_finite()));
        // Of a training call: choices, and every gradient with its NaNs.
        gradients_of_case(case.clone(), engine);
        case.input.draw = None;
        case.check(engine);
    }
}

/// Rows of experts are summed in slices, whose last one has rows of the next expert behind it:
/// those add nothing, even where they are NaN.
fn a_nan_row_spoils_no_other_expert(engine: &Engine) {
    let spec = of_type(
        DType::Bf16,
        changed(|s| {
            (s.shape.model_dim, s.shape.hidden_dim) = (64, 64);
            (s.router.kind, s.shape.experts) = (RouterKind::External, 5);
        }),
    );
    let mut case = Case::random(&spec, 23, 6);
    case.input.x[4 * 64..5 * 64].fill(f64::NAN);
    let (ids, weights) = case.input.routing.as_mut().expect("it is given");
    (ids[8], ids[9], weights[8], weights[9]) = (3, -1, 0.5, 0.0);
    case.check_training(engine, Recompute::None);
}

/// Logits so low that f32 has no scores for them.
fn scores_of_next_to_nothing(engine: &Engine) {
    let spec = |score, renormalize, change: &dyn Fn(&mut LayerSpec)| {
        changed(|s| {
            (s.router.score, s.router.renormalize) = (score, renormalize);
            s.router.renormalize_eps = 0.0;
            s.router.bias = true;
            change(s);
        })
    };
    let chosen_by_bias = |s: &mut LayerSpec| s.router.select_bias = true;
    let second = |s: &mut LayerSpec| s.router.random_second = true;
    let guided = |s: &mut LayerSpec| {
        s.router.entropy = Some(Entropy {
            temperature: 0.1,
            load: 0.5,
        })
    };
    let layers = [
        spec(Score::Sigmoid, Renormalize::Sum, &|_| ()),
        spec(Score::Sigmoid, Renormalize::PNorm, &chosen_by_bias),
        spec(Score::Sigmoid, Renormalize::Sum, &second),
        spec(Score::SqrtSoftplus, Renormalize::Sum, &|_| ()),
        spec(Score::SqrtSoftplus, Renormalize::Sum, &guided),
        spec(Score::Softmax, Renormalize::Sum, &chosen_by_bias),
    ];
    for spec in taken(engine, layers) {
        // A temperature divides f32 logits: what it rounds grows with them.
        let depths: &[f64] = match spec.router.entropy {
            Some(_) => &[60.0, 95.0],
            None => &[60.0, 95.0, 900.0],
        };
        for &depth in depths {
            let mut case = Case::random(&spec, 13, 6);
            let softmax = spec.router.score == Score::Softmax;
            let mut set = |name: &str, at: &dyn Fn(usize) -> f64| {
                if let Some(tensor) = case.weights.0.get_mut(name) {
                    (0..9).for_each(|e| tensor.data[e] = at(e));
                }
            };
            // Of softmax scores one is always large: the bias chooses others.
            set("router.bias", &|e| {
                if softmax && e == 4 { 0.0 } else { -depth }
            });
            set("router.select_bias", &|e| {
                if e == 4 { -2.0 } else { e as f64 / 4.0 }
            });
            let gate = reference::gate(&spec, &case.weights, &case.input);
            let finite = gate.decision.weights.iter().all(|w| w.is_finite());
            assert!(finite, "{}", case.what("the reference"));
            case.check(engine);
            gradients_of_case(case, engine);
        }
    }
}

#[test]
fn ranks_pass_over_padding() {
    let spec = changed(|s| {
        (s.router.token_mask, s.shape.hidden_dim) = (true, 12);
        s.latent = Some(Latent {
            dim: 7,
            bias: true,
            norm_eps: Some(0.1),
            input_norm_eps: Some(0.1),
        });
    });
    let case = padded(&spec).expect("it has masked tokens");
    compare(&cpu(), mesh(2, 2, 1), &case, Recompute::None);
}

macro_rules! on_each {
    ($($module:ident: $target:literal),* $(,)?) => {$(
        mod $module {
            #[test]
            fn padding_adds_nothing() {
                super::padding_adds_nothing(&super::open($target));
            }

            #[test]
            fn a_nan_token_spoils_only_itself() {
                super::a_nan_token_spoils_only_itself(&super::open($target));
            }

            #[test]
            fn a_nan_row_spoils_no_other_expert() {
                super::a_nan_row_spoils_no_other_expert(&super::open($target));
            }

            #[test]
            fn scores_of_next_to_nothing_keep_their_ratio() {
                super::scores_of_next_to_nothing(&super::open($target));
            }
        }
    )*};
}

on_each! {
    cpu: "cpu",
    sm_80: "sim:sm_80",
    gfx942: "sim:gfx942",
}
