//! Values worked out by hand, and invariants of the reference itself.

use moesaic_reference::rng::Draw;
use moesaic_reference::{
    Decision, Input, Random, Tensor, Weights, activate, erf, forward, processing_order, random_key,
    scan, select_row,
};
use moesaic_spec::*;

fn spec(d: usize, h: usize, e: usize, k: usize) -> LayerSpec {
    LayerSpec {
        name: "t".into(),
        shape: Shape {
            model_dim: d,
            hidden_dim: h,
            experts: e,
            top_k: k,
            output_dim: None,
        },
        precision: Precision::default(),
        router: Router::default(),
        capacity: Capacity::default(),
        experts: Experts::default(),
        latent: None,
        shared: Vec::new(),
        losses: Vec::new(),
    }
}

fn tensor(shape: &[usize], data: &[f64]) -> Tensor {
    Tensor {
        shape: shape.to_vec(),
        data: data.to_vec(),
    }
}

fn close(a: f64, b: f64) {
    assert!((a - b).abs() <= 1e-12 * b.abs().max(1.0), "{a} is not {b}");
}

fn no_weights() -> Weights {
    Weights::default()
}

#[test]
fn error_function_has_known_values() {
    for (x, want) in [
        (0.0, 0.0),
        (0.5, 0.520_499_877_813_046_5),
        (1.0, 0.842_700_792_949_714_9),
        (2.4, 0.999_311_486_103_354_9),
        (2.6, 0.999_763_965_583_470_7),
        (4.0, 0.999_999_984_582_742_1),
        (-1.0, -0.842_700_792_949_714_9),
    ] {
        assert!((erf(x) - want).abs() < 2e-15, "erf({x}) = {}", erf(x));
    }
}

#[test]
fn two_experts_by_hand() {
    let mut s = spec(1, 1, 2, 2);
    s.experts.form = ExpertForm::Plain;
    s.experts.activation = Activation::Relu;
    s.experts.bias = true.into();
    let weights = Weights(
        [
            ("router.weight", tensor(&[2, 1], &[0.0, 3f64.ln()])),
            ("experts.up.weight", tensor(&[2, 1, 1], &[2.0, -1.0])),
            ("experts.up.bias", tensor(&[2, 1], &[1.0, 5.0])),
            ("experts.down.weight", tensor(&[2, 1, 1], &[10.0, 100.0])),
            ("experts.down.bias", tensor(&[2, 1], &[0.5, 0.25])),
        ]
        .map(|(n, t)| (n.to_string(), t))
        .into(),
    );
    let out = forward(
        &s,
        &weights,
        &Input {
            tokens: 1,
            x: vec![1.0],
            ..Input::default()
        },
    );
    assert_eq!(out.topk_ids, [1, 0]);
    close(out.topk_weights[0], 0.75);
    close(out.y[0], 0.75 * 400.25 + 0.25 * 30.5);
    // Weighted inputs compute another function: relu(0.75·-1 + 5), relu(0.25·2 + 1).
    s.router.weight_on = WeightSite::Input;
    let out = forward(
        &s,
        &weights,
        &Input {
            tokens: 1,
            x: vec![1.0],
            ..Input::default()
        },
    );
    close(out.y[0], 425.25 + 15.5);
}

#[test]
fn ties_go_to_the_lower_expert_and_nan_comes_last() {
    let mut s = spec(1, 1, 5, 3);
    s.router.score = Score::SoftmaxSelected;
    let (ids, weights) = select_row(&s, &no_weights(), &[1.0, f64::NAN, 2.0, 1.0, -1.0]);
    assert_eq!(ids, [2, 0, 3]);
    close(weights.iter().sum(), 1.0);
    s.shape.top_k = 5;
    assert_eq!(
        select_row(&s, &no_weights(), &[1.0, f64::NAN, 2.0, 1.0, -1.0]).0,
        [2, 0, 3, 4, 1]
    );
}

#[test]
fn weights_come_from_the_unbiased_score() {
    let mut s = spec(1, 1, 3, 1);
    s.router.score = Score::Sigmoid;
    s.router.select_bias = true;
    let weights = Weights(
        [(
            "router.select_bias".to_string(),
            tensor(&[3], &[0.0, 1e6, -1.0]),
        )]
        .into(),
    );
    let (ids, scores) = select_row(&s, &weights, &[3.0, 0.0, 9.0]);
    assert_eq!((ids, scores), (vec![1], vec![0.5]));
}

#[test]
fn masked_groups_differ_for_negative_scores() {
    let mut s = spec(1, 1, 4, 2);
    s.router.score = Score::Sigmoid;
    s.router.select_bias = true;
    let mut groups = Groups {
        count: 2,
        keep: 1,
        stat: GroupStat::Top2Sum,
        mask: GroupMask::Exclude,
    };
    s.router.groups = Some(groups.clone());
    let weights = Weights(
        [(
            "router.select_bias".to_string(),
            tensor(&[4], &[-0.7, 1.0, -0.2, -0.2]),
        )]
        .into(),
    );
    let z = [0.0; 4];
    assert_eq!(select_row(&s, &weights, &z).0, [1, 0]);
    groups.mask = GroupMask::Zero;
    s.router.groups = Some(groups);
    assert_eq!(select_row(&s, &weights, &z).0, [1, 2], "zero beats -0.2");
}

#[test]
fn sparse_mixer_masks_far_logits() {
    let mut s = spec(1, 1, 4, 2);
    s.router.select = Select::SparseMixer(0.1);
    // Round 1: top is 2; 1.7 is within 20 % of it, 1.5 is not. Round 2: top is 1.7, and 1.5 is
    // within.
    let (ids, weights) = select_row(&s, &no_weights(), &[1.5, 2.0, -3.0, 1.7]);
    assert_eq!(ids, [1, 3]);
    close(weights[0], 1.0 / (1.0 + (-0.3f64).exp()));
    close(weights[1], 1.0 / (1.0 + (-0.2f64).exp()));
}

/// Returns a call with this many tokens, enough for capacities.
fn tokens(tokens: usize) -> Input {
    Input {
        tokens,
        ..Input::default()
    }
}

#[test]
fn capacity_is_tutels() {
    let mut s = spec(1, 1, 8, 2);
    s.capacity.mode = CapacityMode::Factor;
    let mut capacity = |experts, k, tokens, factor, align| {
        s.shape.experts = experts;
        s.shape.top_k = k;
        s.capacity.factor = factor;
        s.capacity.align = align;
        moesaic_reference::capacity_rows(&s, &self::tokens(tokens), &vec![20; experts]).unwrap()
    };
    assert_eq!(capacity(8, 2, 100, 1.0, 1), 26);
    assert_eq!(capacity(8, 2, 100, 1.25, 1), 32);
    assert_eq!(capacity(4, 1, 7, 1.0, 1), 2);
    assert_eq!(capacity(8, 2, 100, 0.3, 1), 6);
    assert_eq!(capacity(8, 1, 2, 0.5, 1), 0);
    assert_eq!(capacity(8, 2, 100, 0.0, 3), 21);
    assert_eq!(capacity(8, 2, 100, -1.0, 1), 20);
    assert_eq!(capacity(8, 2, 100, -0.3, 1), 6);
    assert_eq!(capacity(8, 2, 0, 1.0, 1), 0);
}

fn decision() -> Decision {
    // Tokens 0..3, with two slots each.
    Decision {
        ids: vec![0, 1, 0, 1, 1, 0],
        weights: vec![0.6, 0.4, 0.9, 0.1, 0.5, 0.5],
        importance: vec![0.6, 0.9, 0.6],
    }
}

const DRAW: Option<Draw> = Some(Draw {
    seed: 7,
    step: 2,
    layer: 3,
    first_token: 5,
});

/// The order depends on every counter, but not on the split of a batch.
#[test]
fn random_keys_go_by_the_counters() {
    let key = |change: fn(&mut Draw), token| {
        let draw = DRAW.map(|mut draw| {
            change(&mut draw);
            draw
        });
        random_key(draw, token, 1)
    };
    let same = key(|_| {}, 4);
    assert_eq!(key(|draw| draw.first_token = 3, 6), same);
    let others: [fn(&mut Draw); 4] = [
        |draw| draw.seed = 8,
        |draw| draw.step = 3,
        |draw| draw.layer = 2,
        |draw| draw.first_token = 6,
    ];
    for change in others {
        assert_ne!(key(change, 4), same);
    }
    assert_eq!(
        random_key(None, 4, 1),
        random_key(Some(Draw::default()), 4, 1)
    );
}

#[test]
fn orders_give_out_places() {
    let mut s = spec(1, 1, 2, 2);
    let mut order = |o| {
        s.capacity.order = o;
        processing_order(&s, &decision(), 3, DRAW)
    };
    assert_eq!(order(CapacityOrder::SlotMajor), [0, 2, 4, 1, 3, 5]);
    assert_eq!(order(CapacityOrder::TokenMajor), [0, 1, 2, 3, 4, 5]);
    assert_eq!(order(CapacityOrder::BatchPrioritized), [2, 0, 4, 3, 1, 5]);
    assert_eq!(order(CapacityOrder::Probability), [2, 0, 4, 5, 1, 3]);
    let random = order(CapacityOrder::Random);
    assert!(random.is_sorted_by_key(|&i| std::cmp::Reverse(random_key(DRAW, i / 2, i % 2))));
}

#[test]
fn drops_count_and_renormalize() {
    let mut s = spec(1, 1, 2, 2);
    s.capacity.mode = CapacityMode::Fixed;
    s.capacity.rows = Some(2);
    s.capacity.renormalize_after_drop = true;
    let placed = scan(&s, &decision(), &tokens(3));
    assert_eq!(placed.counts, [3, 3]);
    assert_eq!(placed.locations, [0, 1, 1, -1, 0, -1]);
    assert_eq!(placed.overflow, 2);
    assert_eq!(placed.weights, [0.6, 0.4, 1.0, 0.0, 1.0, 0.0]);
}

#[test]
fn masked_slots_take_no_place() {
    let s = spec(1, 1, 2, 2);
    let mut d = decision();
    d.ids[2] = -1;
    let placed = scan(&s, &d, &tokens(3));
    assert_eq!(placed.counts, [2, 3]);
    assert_eq!(placed.locations, [0, 1, -1, 2, 0, 1]);
    assert_eq!(placed.overflow, 0);
}

#[test]
fn limits_behind_the_activation_and_soft_caps() {
    let e = Experts {
        clamp: Some(2.0),
        clamp_on: ClampSite::Output,
        up_softcap: Some(3.0),
        up_offset: 0.5,
        ..Experts::default()
    };
    let silu = |x: f64| x / (1.0 + (-x).exp());
    let cap = |x: f64| 3.0 * (x / 3.0).tanh() + 0.5;
    close(activate(&e, Some(1.5), 1.0), silu(1.5) * cap(1.0));
    close(activate(&e, Some(9.0), -20.0), 2.0 * cap(-2.0));
    assert!(activate(&e, Some(1.0), f64::NAN).is_nan());
    let mut s = spec(4, 4, 2, 1);
    s.experts.clamp = Some(2.0);
    let shared = |clamp| SharedExpert {
        hidden_dim: 4,
        gate: SharedGate::None,
        bias: None,
        clamp,
        activation: None,
    };
    s.shared = vec![shared(None), shared(Some(0.0)), shared(Some(1.0))];
    let clamps = [0, 1, 2].map(|index| s.shared_experts(index).clamp);
    assert_eq!(clamps, [Some(2.0), None, Some(1.0)]);
}

#[test]
fn clamp_alpha_and_offset() {
    let e = Experts {
        clamp: Some(7.0),
        alpha: 1.702,
        up_offset: 1.0,
        ..Experts::default()
    };
    let g = 7.0 / (1.0 + (-1.702f64 * 7.0).exp());
    close(activate(&e, Some(9.0), -20.0), g * -6.0);
    assert!(activate(&e, Some(f64::NAN), 1.0).is_nan());
    let relu2 = Experts {
        activation: Activation::Relu2,
        ..Experts::default()
    };
    close(activate(&relu2, Some(-1.0), 3.0), 0.0);
    close(activate(&relu2, Some(2.0), 3.0), 12.0);
}

/// Every optional part at once, against the same layer with each part worked into its weights by
/// hand.
#[test]
fn identity_shared_and_scales_add_up() {
    let (d, h) = (3, 5);
    let mut s = spec(d, h, 3, 2);
    s.experts.identity = 2;
    s.router.expert_scale = true;
    s.router.scale = 2.5;
    s.router.bias = true;
    s.router.input = RouterInput::RmsScaled;
    s.shared = vec![SharedExpert {
        hidden_dim: 4,
        gate: SharedGate::Sigmoid,
        bias: None,
        clamp: None,
        activation: None,
    }];
    let weights = Weights::random(&s, 3);
    let input = Input {
        tokens: 9,
        x: Random::new(4).vec(9 * d),
        ..Input::default()
    };
    let out = forward(&s, &weights, &input);
    for t in 0..9 {
        let x = &input.x[t * d..(t + 1) * d];
        let mut want = moesaic_reference::shared_row(&s, &weights, 0, x);
        for slot in t * 2..t * 2 + 2 {
            let row = moesaic_reference::expert_row(&s, &weights, out.topk_ids[slot] as usize, x);
            want.iter_mut()
                .zip(row)
                .for_each(|(w, v)| *w += out.topk_weights[slot] * v);
        }
        (0..d).for_each(|i| close(out.y[t * d + i], want[i]));
    }
    assert!(
        out.topk_ids.iter().any(|&e| e >= 3),
        "no token chose an identity expert"
    );
    assert_eq!(out.counts.len(), 5);
    assert_eq!(out.counts.iter().sum::<i64>(), 18);
}

#[test]
fn zero_tokens_are_legal_for_every_router() {
    for kind in [
        RouterKind::Linear,
        RouterKind::Cosine,
        RouterKind::Table,
        RouterKind::External,
    ] {
        let mut s = spec(3, 5, 3, 2);
        s.router.kind = kind;
        s.router.table_rows = Some(4);
        s.router.projection_dim = Some(2);
        s.capacity.mode = CapacityMode::MaxCount;
        let input = Input {
            token_ids: Some(Vec::new()),
            routing: Some((Vec::new(), Vec::new())),
            ..Input::default()
        };
        let out = forward(&s, &Weights::random(&s, 1), &input);
        assert!(out.y.is_empty());
        assert_eq!((out.counts, out.capacity), (vec![0; 3], Some(0)));
    }
}

#[test]
fn table_and_cosine_routers() {
    let mut s = spec(3, 5, 6, 2);
    s.router.kind = RouterKind::Table;
    s.router.table_rows = Some(4);
    s.router.score = Score::SqrtSoftplus;
    s.router.renormalize = Renormalize::Sum;
    let weights = Weights::random(&s, 5);
    let input = Input {
        tokens: 3,
        x: Random::new(1).vec(9),
        token_ids: Some(vec![2, 0, 2]),
        ..Input::default()
    };
    let out = forward(&s, &weights, &input);
    let table = &weights.get("router.table").data;
    let want: Vec<i32> = [4, 5, 0, 1, 4, 5]
        .iter()
        .map(|&i: &usize| table[i] as i32)
        .collect();
    assert_eq!(out.topk_ids, want);
    let score = |z: f64| (1.0 + z.exp()).ln().sqrt();
    let z = out.logits.unwrap();
    let (a, b) = (score(z[want[0] as usize]), score(z[want[1] as usize]));
    close(out.topk_weights[0], a / (a + b));

    s.router.kind = RouterKind::Cosine;
    s.router.projection_dim = Some(4);
    s.router.score = Score::Softmax;
    let mut weights = Weights::random(&s, 5);
    weights.0.get_mut("router.temperature").unwrap().data[0] = 9.0;
    let out = forward(&s, &weights, &input);
    let largest = out
        .logits
        .unwrap()
        .iter()
        .fold(0.0f64, |m, z| m.max(z.abs()));
    assert!(
        largest <= 100.0 && largest > 1.0,
        "temperature is clamped at ln 100: {largest}"
    );
}

#[test]
fn renormalisations() {
    let mut s = spec(2, 3, 6, 3);
    let weights = Weights::random(&s, 8);
    let input = Input {
        tokens: 4,
        x: Random::new(2).vec(8),
        ..Input::default()
    };
    let raw = forward(&s, &weights, &input).topk_weights;
    let mut with = |renormalize, eps, p| {
        s.router.renormalize = renormalize;
        s.router.renormalize_eps = eps;
        s.router.norm_order = p;
        forward(&s, &weights, &input).topk_weights
    };
    let sum: f64 = raw[..3].iter().sum();
    close(with(Renormalize::Sum, 0.5, 1.0)[0], raw[0] / (sum + 0.5));
    close(with(Renormalize::Clamp, 2.0, 1.0)[0], raw[0] / 2.0);
    close(with(Renormalize::Clamp, 1e-9, 1.0)[0], raw[0] / sum);
    let norm = raw[..3].iter().map(|w| w * w).sum::<f64>().sqrt();
    close(with(Renormalize::PNorm, 0.0, 2.0)[0], raw[0] / norm);
}
