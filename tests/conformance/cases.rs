//! The layers and calls that tests run on one device after another, as data.
//! `tools/gpu-smoke` runs them on hardware.

use super::Case;
use moesaic::spec::{
    Activation, CapacityMode, CapacityOrder, Entropy, ExpertForm, LayerSpec, NoiseKind,
    Renormalize, Router, RouterInput, RouterKind, Select, SharedExpert, SharedGate, WeightSite,
    testing,
};
use moesaic::{DType, Recompute};

pub fn small(model_dim: usize, hidden_dim: usize, experts: usize, top_k: usize) -> LayerSpec {
    let shape = format!(
        "shape = {{ model_dim = {model_dim}, hidden_dim = {hidden_dim}, experts = {experts}, top_k = {top_k} }}"
    );
    LayerSpec::from_toml(&shape).unwrap_or_else(|e| panic!("{}", e.render("spec", false)))
}

pub fn of_type(dtype: DType, mut spec: LayerSpec) -> LayerSpec {
    spec.precision.weights = dtype;
    spec.precision.activations = dtype;
    spec
}

/// Random layers of every kind.
pub fn random() -> Vec<Case> {
    let case = |seed: u64| {
        let tokens = [1, 7, 33, 65][seed as usize % 4];
        Case::random(&testing::sample(seed), tokens, seed)
    };
    (200..212).map(case).collect()
}

/// Sizes that fit no tile, and sizes that tensor cores and matrix cores take.
pub fn shapes() -> Vec<Case> {
    let shapes = [
        (1, 1, 1, 1),
        (37, 21, 5, 5),
        (64, 64, 8, 2),
        (72, 136, 7, 3),
        (128, 40, 60, 8),
    ];
    let dtypes = [DType::F32, DType::Bf16, DType::F16];
    let mut cases = Vec::new();
    for (i, (d, h, e, k)) in shapes.into_iter().enumerate() {
        let first = if i < 2 { i } else { 0 };
        let last = if i < 2 { i + 1 } else { 3 };
        for dtype in &dtypes[first..last] {
            let spec = of_type(*dtype, small(d, h, e, k));
            let case = |tokens| Case::random(&spec, tokens, (d * h + e) as u64);
            cases.extend([0, 1, 33].map(case));
        }
    }
    cases
}

/// One expert gets everything, and more than one tile of it.
pub fn crowded() -> Vec<Case> {
    let case = |dtype| {
        let mut spec = of_type(dtype, small(64, 72, 5, 1));
        spec.router.bias = true;
        let mut case = Case::random(&spec, 200, 5);
        let bias = case.weights.0.get_mut("router.bias");
        bias.expect("it has one").data = vec![0.0, 0.0, 99.0, 0.0, 0.0];
        case
    };
    [DType::Bf16, DType::F32].map(case).into()
}

/// Every order of capacity, with logits that are exact.
pub fn routed() -> Vec<Case> {
    let orders = [
        CapacityOrder::SlotMajor,
        CapacityOrder::TokenMajor,
        CapacityOrder::BatchPrioritized,
        CapacityOrder::Probability,
        CapacityOrder::Random,
    ];
    let shapes = [(5, 2), (64, 8), (160, 6), (3, 3), (1024, 4)];
    let mut cases = Vec::new();
    for (i, ((experts, top_k), order)) in shapes.into_iter().zip(orders).enumerate() {
        let mut spec = small(16, 8, experts, top_k);
        spec.capacity.order = order;
        if i > 0 {
            spec.capacity.mode = CapacityMode::Factor;
        }
        cases.extend([1, 300].map(|tokens| exact(&spec, tokens, i as u64)));
    }
    cases
}

/// Integer tokens and weights make logits exact, so that every backend has
/// the same to decide on.
pub fn exact(spec: &LayerSpec, tokens: usize, seed: u64) -> Case {
    let mut case = Case::random(spec, tokens, seed);
    let integer = |v: &mut f64| *v = (*v * 4.0).round().clamp(-8.0, 8.0);
    case.input.x.iter_mut().for_each(integer);
    let router = case.weights.0.get_mut("router.weight");
    router
        .expect("it has one")
        .data
        .iter_mut()
        .for_each(integer);
    case
}

fn with(mut spec: LayerSpec, change: impl FnOnce(&mut LayerSpec)) -> LayerSpec {
    change(&mut spec);
    spec
}

fn external(d: usize, h: usize, e: usize, k: usize) -> LayerSpec {
    with(small(d, h, e, k), |s| s.router.kind = RouterKind::External)
}

/// Sizes that fit no tile, and sizes that tensor cores and matrix cores take,
/// in every type, to train.
pub fn trained_shapes() -> Vec<Case> {
    let mut cases = Vec::new();
    for (d, h, e, k) in [(1, 1, 1, 1), (37, 21, 5, 5), (64, 72, 7, 2)] {
        for dtype in [DType::F32, DType::Bf16, DType::F16] {
            let spec = of_type(dtype, external(d, h, e, k));
            cases.extend([0, 33].map(|tokens| Case::random(&spec, tokens, 3)));
        }
    }
    // Several groups of tiles in every matrix, the last of them lower.
    let large = of_type(DType::Bf16, external(264, 2088, 2, 1));
    cases.push(Case::random(&large, 9, 3));
    cases
}

/// Everything that changes what flows back, in every recompute mode.
pub fn trained_options() -> Vec<(Case, Recompute)> {
    let modes = [Recompute::None, Recompute::Hidden, Recompute::All];
    let case = |(i, spec): (usize, LayerSpec)| {
        if let Err(problems) = spec.validate() {
            panic!("{problems:?}");
        }
        (Case::random(&spec, 33, i as u64), modes[i % 3])
    };
    changes().into_iter().enumerate().map(case).collect()
}

/// Layers that differ in what flows back through them.
pub fn changes() -> Vec<LayerSpec> {
    vec![
        with(of_type(DType::Bf16, small(40, 24, 6, 2)), |s| {
            s.precision.expert_gradients = DType::Bf16;
            s.router.renormalize = Renormalize::Sum;
            s.shared = vec![SharedExpert {
                hidden_dim: 16,
                gate: SharedGate::None,
                bias: None,
                clamp: None,
                activation: None,
            }];
        }),
        // In f32 no rounding crosses the clamp.
        with(external(40, 24, 6, 2), |s| {
            s.precision.weights = DType::Bf16;
            s.experts.bias = true.into();
            s.experts.clamp = Some(0.4);
            s.experts.up_offset = 1.0;
        }),
        with(external(33, 21, 6, 2), |s| {
            s.experts.form = ExpertForm::Plain;
            s.experts.activation = Activation::Gelu;
            s.experts.bias = true.into();
            s.router.weight_on = WeightSite::Input;
            s.shape.output_dim = Some(17);
        }),
        with(of_type(DType::F16, external(24, 16, 5, 3)), |s| {
            s.experts.identity = 2;
            s.capacity.mode = CapacityMode::Factor;
            s.capacity.factor = 0.8;
            s.capacity.order = CapacityOrder::Probability;
            s.shared = vec![SharedExpert {
                hidden_dim: 9,
                gate: SharedGate::Sigmoid,
                bias: None,
                clamp: None,
                activation: None,
            }];
        }),
        with(external(16, 24, 6, 2), |s| {
            s.capacity.mode = CapacityMode::Fixed;
            s.capacity.rows = Some(1);
            s.capacity.renormalize_after_drop = true;
            s.experts.activation = Activation::GeluTanh;
        }),
    ]
}

/// Without losses and without what draws random numbers, which have tests of
/// their own.
pub fn quiet(mut spec: LayerSpec) -> LayerSpec {
    let router = Router {
        jitter: 0.0,
        input_dropout: 0.0,
        noise: 0.0,
        noise_kind: NoiseKind::default(),
        random_second: false,
        ..spec.router
    };
    spec.router = router;
    spec.losses.clear();
    spec
}

/// A sample of few channels, for a simulator runs a kernel thread by thread.
pub fn tiny(seed: u64) -> LayerSpec {
    let mut spec = testing::sample(seed);
    let small = |size: &mut usize| *size = 1 + *size % 19;
    small(&mut spec.shape.model_dim);
    small(&mut spec.shape.hidden_dim);
    spec.shape.output_dim.iter_mut().for_each(small);
    spec.router.projection_dim.iter_mut().for_each(small);
    spec.shared
        .iter_mut()
        .for_each(|s| small(&mut s.hidden_dim));
    if spec.experts.identity > 0 {
        spec.shape.output_dim = None;
    }
    let valid = spec.validate();
    valid.unwrap_or_else(|problems| panic!("seed {seed}: {problems:?}"));
    spec
}

pub fn changed(change: impl FnOnce(&mut LayerSpec)) -> LayerSpec {
    let mut spec = small(25, 13, 9, 2);
    change(&mut spec);
    spec
}

/// Layers that draw, or select in their own way.
pub fn drawing() -> Vec<LayerSpec> {
    vec![
        changed(|s| {
            (s.router.jitter, s.router.input_dropout) = (0.2, 0.25);
            (s.router.input, s.router.bias) = (RouterInput::RmsScaled, true);
        }),
        changed(|s| (s.router.noise, s.router.noise_kind) = (0.7, NoiseKind::Learned)),
        changed(|s| {
            (s.router.jitter, s.router.random_second) = (0.1, true);
            s.router.renormalize = Renormalize::Sum;
            (s.router.noise, s.router.noise_kind) = (0.7, NoiseKind::Learned);
        }),
        changed(|s| (s.router.noise, s.router.select) = (3.0, Select::Sinkhorn(5))),
        changed(|s| {
            s.router.select = Select::ExpertChoice(1.5);
            (s.router.token_mask, s.shape.top_k) = (true, 9);
        }),
    ]
}

/// Layers of every selection beyond top-k.
pub fn selecting() -> Vec<LayerSpec> {
    let (temperature, load) = (0.75, 0.5);
    vec![
        changed(|s| s.router.token_mask = true),
        changed(|s| (s.router.active_k, s.shape.top_k) = (true, 5)),
        changed(|s| s.router.entropy = Some(Entropy { temperature, load })),
        changed(|s| {
            s.router.select = Select::ExpertChoice(1.5);
            (s.router.token_mask, s.shape.top_k) = (true, 9);
        }),
        changed(|s| {
            (s.router.kind, s.router.table_rows) = (RouterKind::Table, Some(11));
            (s.router.token_mask, s.router.active_k) = (true, true);
        }),
    ]
}
