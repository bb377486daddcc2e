//! Random valid specs, for the tests of this and other crates.
//!
//! Not part of the public promise.

mod around;

use crate::*;
use around::{biases, expression, latent, limits, norms, own_activations, residual};
use moesaic_kernel::DType;

/// A random generator that depends on a seed and a counter only, so a failing test needs to print
/// just its seed.
#[derive(Clone, Debug)]
pub struct SampleRng {
    seed: u64,
    drawn: u64,
}

impl SampleRng {
    /// Starts an independent stream for each seed.
    pub fn new(seed: u64) -> SampleRng {
        SampleRng {
            seed: mix(seed),
            drawn: 0,
        }
    }

    /// Returns 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.drawn += 1;
        mix(self
            .seed
            .wrapping_add(self.drawn.wrapping_mul(0x9e37_79b9_7f4a_7c15)))
    }

    /// Returns a number from `least` to `most`, both included.
    pub fn between(&mut self, least: usize, most: usize) -> usize {
        least + (self.bits() % (most - least + 1) as u64) as usize
    }

    /// Returns true once in `n` draws on average.
    pub fn one_in(&mut self, n: u64) -> bool {
        self.bits().is_multiple_of(n)
    }

    /// Returns a number from `low` to below `high`.
    pub fn real(&mut self, low: f64, high: f64) -> f64 {
        low + (high - low) * (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Returns one of the choices.
    pub fn pick<T: Clone>(&mut self, choices: &[T]) -> T {
        choices[self.between(0, choices.len() - 1)].clone()
    }
}

/// Applies the finishing steps of splitmix64.
fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Returns a layer of each weight format. [`sample`] has none, because only CPUs multiply codes,
/// and no matrix of codes has a gradient.
pub fn quantized() -> impl Iterator<Item = LayerSpec> {
    let custom = WeightFormat {
        block: [1, 64],
        ..WEIGHT_FORMATS[WEIGHT_FORMATS.len() - 1]
    };
    let formats = WEIGHT_FORMATS.iter().chain([&custom]).copied();
    let formats: Vec<WeightFormat> = formats.map(WeightFormat::recognised).collect();
    let count = formats.len();
    (0..3 * count).map(move |seed| {
        let mut spec = sample(seed as u64);
        spec.precision.experts = Some(formats[seed % count]);
        spec.precision.expert_gradients = DType::F32;
        // The second part has a format of its own for the down projection, and the third quantizes
        // activations.
        let other = formats[(seed + 1) % count];
        spec.precision.experts_down = (seed / count == 1).then_some(other);
        let rows = [ActivationFormat::Int8, ActivationFormat::Fp8][seed % 2];
        spec.precision.expert_activations = (seed / count == 2).then_some(rows);
        spec
    })
}

/// Returns a random valid spec, always the same for one seed.
///
/// Widths are 1 to 97, experts 1 to 64, and `top_k` is anything from 1 to all of them. Together,
/// seeds reach every key and every word of the schema, and all pairs that go together
/// (`schema/reached.rs`). One spec in eight has different types for weights and activations.
pub fn sample(seed: u64) -> LayerSpec {
    let mut rng = SampleRng::new(seed);
    let rng = &mut rng;
    let mut spec = LayerSpec {
        name: format!("sample-{seed}"),
        shape: shape(rng),
        precision: precision(rng),
        router: Router::default(),
        capacity: capacity(rng),
        experts: experts(rng),
        latent: None,
        shared: Vec::new(),
        losses: Vec::new(),
    };
    // The order of draws is fixed. A new option draws from a stream of its own, so that older seeds
    // keep their layers.
    spec.experts.identity = identity(rng, &spec);
    spec.experts.zero = zero(&spec);
    spec.shape.top_k = top_k(rng, spec.routed_experts());
    router(rng, &mut spec);
    shared(rng, &mut spec);
    losses(rng, &mut spec);
    expression(seed, &mut spec.experts);
    eval_factor(seed, &mut spec.capacity);
    selections(rng, &mut spec);
    guidance(seed, &mut spec);
    draws(rng, &mut spec);
    biases(seed, &mut spec);
    latent(seed, &mut spec);
    residual(seed, &mut spec);
    softcap(seed, &mut spec);
    other_keys(seed, &mut spec);
    always_chosen(seed, &mut spec);
    blocks(seed, &mut spec);
    limits(seed, &mut spec);
    own_activations(seed, &mut spec);
    expert_gradients(seed, &mut spec.precision);
    norms(seed, &mut spec);
    spec
}

/// Stores the gradients of experts' matrices in 16 bits in one of three layers of such weights.
fn expert_gradients(seed: u64, precision: &mut Precision) {
    let rng = &mut SampleRng::new(seed ^ 0x67ad_1e47);
    if rng.one_in(3) {
        precision.expert_gradients = precision.weights;
    }
}

/// Draws the inputs of a call beside its tokens, and selections that look at more than one token's
/// order of logits. The layer's other draws do not depend on these, except where expert choice
/// excludes something.
fn guidance(seed: u64, spec: &mut LayerSpec) {
    let rng = &mut SampleRng::new(seed ^ 0x9d1d_a9ce);
    let scored = spec.router.kind.chooser() == Chooser::Scores;
    if scored && rng.one_in(8) {
        expert_choice(rng, spec);
    }
    let (experts, r) = (spec.routed_experts(), &mut spec.router);
    if r.kind != RouterKind::External {
        r.token_mask = rng.one_in(4);
        r.active_k = !matches!(r.select, Select::ExpertChoice(_)) && rng.one_in(4);
    }
    // These selections define their own use of the logits, so entropy guidance excludes them.
    let own = matches!(r.select, Select::SparseMixer(_) | Select::Sinkhorn(_));
    if spec.has_logits() && !own && experts > 1 && rng.one_in(6) {
        spec.router.entropy = Some(Entropy {
            temperature: rng.real(-1.5, 1.5),
            load: rng.pick(&[0.0, 0.25, 1.0]),
        });
    }
    let single = [spec.precision.weights, spec.precision.activations] == [DType::F32; 2];
    spec.precision.tf32 = single && rng.one_in(3);
}

/// Switches to expert choice, where every expert with weights takes equally many tokens.
fn expert_choice(rng: &mut SampleRng, spec: &mut LayerSpec) {
    let order = spec.capacity.order;
    spec.capacity = Capacity::default();
    if order == CapacityOrder::TokenMajor {
        spec.capacity.order = order;
    }
    (spec.experts.identity, spec.experts.zero) = (0, 0);
    spec.shape.top_k = spec.shape.experts;
    (spec.router.groups, spec.router.select_bias) = (None, false);
    spec.router.select = Select::ExpertChoice(rng.pick(&[1.0, 2.0, 0.3, 1.5]));
}

/// Puts every third selection bias on the logits, and takes experts from each of several groups in
/// one of six layers that have the plain selection.
fn other_keys(seed: u64, spec: &mut LayerSpec) {
    let rng = &mut SampleRng::new(seed ^ 0xb1a5_ed10);
    let by_noise = matches!(
        spec.router.noise_kind,
        NoiseKind::Gumbel | NoiseKind::GumbelSecond
    );
    let (experts, k) = (spec.routed_experts(), spec.shape.top_k);
    let r = &mut spec.router;
    if r.select_bias && rng.one_in(3) {
        r.select_bias_on = BiasedValues::Logits;
    }
    let scored = r.kind.chooser() == Chooser::Scores;
    let plain = scored && r.select == Select::TopK && r.groups.is_none() && !r.random_second;
    if plain && !by_noise && rng.one_in(6) {
        let both = |n: &usize| experts.is_multiple_of(*n) && k.is_multiple_of(*n);
        let counts: Vec<usize> = (1..=k).filter(both).collect();
        r.select = Select::PerGroup(rng.pick(&counts));
    }
}

/// Gives one in four layers that may have some experts that every token chooses.
fn always_chosen(seed: u64, spec: &mut LayerSpec) {
    let rng = &mut SampleRng::new(seed ^ 0xa1_3a75);
    let r = &spec.router;
    let plain = r.kind.chooser() == Chooser::Scores && r.select == Select::TopK;
    let compared = !matches!(r.noise_kind, NoiseKind::Gumbel | NoiseKind::GumbelSecond);
    let weightless = spec.experts.identity + spec.experts.zero > 0;
    let refused = r.groups.is_some() || r.random_second || weightless || !spec.losses.is_empty();
    if plain && compared && !refused && rng.one_in(4) {
        spec.router.always_chosen = rng.between(1, spec.shape.top_k.min(3));
    }
}

/// Lets blocks of tokens agree on experts in one of four layers that may have it.
fn blocks(seed: u64, spec: &mut LayerSpec) {
    let rng = &mut SampleRng::new(seed ^ 0xb10c_0415);
    let r = &spec.router;
    let plain = r.kind.chooser() == Chooser::Scores && r.select == Select::TopK;
    let compared = !matches!(r.noise_kind, NoiseKind::Gumbel | NoiseKind::GumbelSecond);
    let refused = r.groups.is_some() || r.always_chosen > 0;
    let dropless = spec.capacity.mode == CapacityMode::Dropless;
    if plain && compared && !refused && dropless && rng.one_in(4) {
        spec.router.blocks = Some(TokenBlocks {
            tokens: rng.pick(&[1, 4, 7, 32]),
            experts: rng.between(spec.shape.top_k, spec.routed_experts()),
        });
    }
}

/// Caps the logits of one layer in six that may have a cap.
fn softcap(seed: u64, spec: &mut LayerSpec) {
    let rng = &mut SampleRng::new(seed ^ 0x50f7_ca90);
    if spec.has_logits() && !spec.learned_noise() && rng.one_in(6) {
        spec.router.logit_softcap = Some(rng.pick(&[0.75, 2.0, 30.0]));
    }
}

/// Chooses other selections for layers that have the plain one.
fn selections(rng: &mut SampleRng, spec: &mut LayerSpec) {
    let scored = spec.router.kind.chooser() == Chooser::Scores;
    let plain = scored && spec.router.select == Select::TopK && spec.router.groups.is_none();
    if !plain || spec.router.select_bias {
        return;
    }
    if rng.one_in(6) {
        spec.router.select = Select::Sinkhorn(rng.between(1, 12));
    }
}

/// Draws the options that act only in training.
fn draws(rng: &mut SampleRng, spec: &mut LayerSpec) {
    let r = &spec.router;
    let top_k = r.select == Select::TopK;
    let scored = r.kind.chooser() == Chooser::Scores;
    let second = top_k && scored && spec.shape.top_k == 2;
    let compared = top_k && scored && !r.select_bias && r.groups.is_none();
    if spec.has_logits() && rng.one_in(5) {
        spec.router.input_dropout = rng.real(0.001, 0.5);
    }
    spec.router.random_second = second && rng.one_in(2);
    let has = |kind: LossKind| spec.losses.iter().any(|loss| loss.kind == kind);
    if spec.router.noise == 0.0 || has(LossKind::ImportanceLoad) {
        return;
    }
    let compared = compared && !has(LossKind::ImportanceLoadLogits);
    let kinds = match (compared, spec.shape.top_k) {
        (false, _) => &[NoiseKind::Gaussian, NoiseKind::Learned][..],
        (true, 1) => &[NoiseKind::Gaussian, NoiseKind::Learned, NoiseKind::Gumbel],
        (true, _) => &[
            NoiseKind::Gaussian,
            NoiseKind::Learned,
            NoiseKind::Gumbel,
            NoiseKind::GumbelSecond,
        ],
    };
    spec.router.noise_kind = rng.pick(kinds);
}

/// Returns small and odd widths more often than large ones, because a test runs many of these.
fn width(rng: &mut SampleRng) -> usize {
    let most = rng.pick(&[8, 33, 97]);
    rng.between(1, most)
}

fn shape(rng: &mut SampleRng) -> Shape {
    let model_dim = width(rng);
    let most = rng.pick(&[4, 16, 64]);
    Shape {
        model_dim,
        hidden_dim: width(rng),
        experts: rng.between(1, most),
        top_k: 1,
        output_dim: rng.one_in(6).then(|| width(rng)),
    }
}

fn top_k(rng: &mut SampleRng, routed: usize) -> usize {
    let most = if rng.one_in(5) { routed } else { routed.min(4) };
    rng.between(1, most)
}

fn precision(rng: &mut SampleRng) -> Precision {
    let all = [DType::F32, DType::F16, DType::Bf16];
    let weights = rng.pick(&all);
    let other = if weights == DType::F32 {
        rng.pick(&all)
    } else {
        DType::F32
    };
    let activations = if rng.one_in(8) { other } else { weights };
    Precision {
        weights,
        activations,
        ..Precision::default()
    }
}

fn capacity(rng: &mut SampleRng) -> Capacity {
    use CapacityMode::*;
    use CapacityOrder::*;
    let mode = rng.pick(&[Dropless, Dropless, Factor, Fixed, MaxCount, Bounded]);
    let drops = matches!(mode, Factor | Fixed | Bounded);
    let order = match mode {
        Dropless => rng.pick(&[SlotMajor, TokenMajor]),
        _ => rng.pick(&[SlotMajor, TokenMajor, BatchPrioritized, Probability, Random]),
    };
    Capacity {
        mode,
        factor: match mode {
            Factor | Bounded => rng.pick(&[1.0, 1.25, 0.3, 0.0, -1.5, 2.0]),
            _ => 1.0,
        },
        eval_factor: None,
        rows: (mode == Fixed).then(|| rng.between(1, 12)),
        order,
        align: if mode == Dropless {
            1
        } else {
            rng.pick(&[1, 1, 4, 7])
        },
        renormalize_after_drop: drops && rng.one_in(3),
    }
}

/// Gives half of the layers with a factor another one in evaluation, without disturbing their other
/// draws.
fn eval_factor(seed: u64, capacity: &mut Capacity) {
    let rng = &mut SampleRng::new(!seed ^ 1 << 32);
    if capacity.has_factor() && rng.one_in(2) {
        capacity.eval_factor = Some(rng.pick(&[2.4, 0.5, 0.0, -0.8]));
    }
}

fn experts(rng: &mut SampleRng) -> Experts {
    use Activation::*;
    let activation = rng.pick(&[Silu, Silu, Gelu, GeluTanh, Relu, Relu2]);
    let bias = rng.one_in(3).into();
    let alpha = if activation == Silu && rng.one_in(3) {
        1.702
    } else {
        1.0
    };
    let plain = Experts {
        form: ExpertForm::Plain,
        activation,
        bias,
        alpha,
        ..Experts::default()
    };
    if rng.one_in(3) {
        return plain;
    }
    Experts {
        form: ExpertForm::Gated,
        clamp: rng.one_in(4).then(|| rng.pick(&[7.0, 0.5])),
        up_offset: if rng.one_in(4) { 1.0 } else { 0.0 },
        layout: rng.pick(&[
            GateLayout::Split,
            GateLayout::Concat,
            GateLayout::Interleaved,
        ]),
        ..plain
    }
}

fn identity(rng: &mut SampleRng, spec: &LayerSpec) -> usize {
    // An identity expert returns its input, so both widths must agree.
    let fits = spec.output_dim() == spec.shape.model_dim;
    if fits && rng.one_in(8) {
        rng.between(1, 5)
    } else {
        0
    }
}

/// Derives the number of zero experts from values drawn before, so that older seeds keep their
/// layers.
fn zero(spec: &LayerSpec) -> usize {
    match spec.shape.hidden_dim % 7 {
        3 => 1 + spec.shape.model_dim % 3,
        _ => 0,
    }
}

fn router(rng: &mut SampleRng, spec: &mut LayerSpec) {
    use WeightSite::*;
    let often = [RouterKind::Linear; 3];
    let kind = rng.pick(&[&often[..], &RouterKind::ALL].concat());
    spec.router.kind = kind;
    if spec.experts.identity == 0 {
        spec.router.weight_on = rng.pick(&[Output, Output, Activation, Input]);
    }
    match kind.chooser() {
        Chooser::Caller => return unranked(&mut spec.capacity),
        Chooser::Table => {
            spec.router.table_rows = Some(rng.between(1, 40));
            spec.router.score = any_score(rng);
        }
        Chooser::Scores => {
            if let Some(size) = &kind.def().size {
                (size.set)(&mut spec.router, width(rng));
            }
            selection(rng, spec);
        }
    }
    if spec.has_logits() {
        logits(rng, &mut spec.router);
    }
    weights(rng, &mut spec.router);
}

/// Avoids orders by score, since an external router passes no scores.
fn unranked(capacity: &mut Capacity) {
    if capacity.order == CapacityOrder::BatchPrioritized {
        capacity.order = CapacityOrder::Probability;
    }
}

fn any_score(rng: &mut SampleRng) -> Score {
    use Score::*;
    rng.pick(&[
        Softmax,
        Softmax,
        SoftmaxSelected,
        Sigmoid,
        SqrtSoftplus,
        One,
    ])
}

fn selection(rng: &mut SampleRng, spec: &mut LayerSpec) {
    if spec.shape.top_k <= 2 && rng.one_in(6) {
        spec.router.select = Select::SparseMixer(rng.pick(&[0.01, 0.1, 0.0]));
        return;
    }
    spec.router.score = any_score(rng);
    let late = matches!(spec.router.score, Score::SoftmaxSelected | Score::One);
    spec.router.select_bias = !late && rng.one_in(3);
    if rng.one_in(3) {
        spec.router.groups = Some(groups(rng, spec));
    }
}

fn groups(rng: &mut SampleRng, spec: &LayerSpec) -> Groups {
    let experts = spec.routed_experts();
    let counts: Vec<usize> = (1..=experts)
        .filter(|n| experts.is_multiple_of(*n))
        .collect();
    let count = rng.pick(&counts);
    let size = experts / count;
    // Enough groups to choose top_k experts from.
    let keep = rng.between(spec.shape.top_k.div_ceil(size), count);
    let stat = match size {
        1 => GroupStat::Max,
        _ => rng.pick(&[GroupStat::Max, GroupStat::Top2Sum]),
    };
    let mask = rng.pick(&[GroupMask::Exclude, GroupMask::Zero]);
    Groups {
        count,
        keep,
        stat,
        mask,
    }
}

fn logits(rng: &mut SampleRng, router: &mut Router) {
    router.bias = !router
        .kind
        .def()
        .logits
        .is_some_and(|logits| logits.own_bias)
        && rng.one_in(3);
    if rng.one_in(5) {
        router.input = RouterInput::RmsScaled;
    }
    if rng.one_in(5) {
        router.jitter = rng.real(0.001, 0.1);
    }
    if rng.one_in(4) {
        router.noise = rng.real(0.1, 1.5);
    }
}

fn weights(rng: &mut SampleRng, router: &mut Router) {
    use Renormalize::*;
    router.renormalize = rng.pick(&[None, Sum, Sum, Clamp, PNorm]);
    match router.renormalize {
        Sum => router.renormalize_eps = rng.pick(&[0.0, 1e-20]),
        Clamp => router.renormalize_eps = rng.pick(&[1e-9, 0.3]),
        PNorm => router.norm_order = rng.pick(&[1.0, 2.0, 0.5]),
        None => {}
    }
    if rng.one_in(3) {
        router.scale = rng.real(0.1, 16.0);
    }
    router.expert_scale = rng.one_in(5);
}

fn shared(rng: &mut SampleRng, spec: &mut LayerSpec) {
    let count = rng.pick(&[0, 0, 0, 1, 1, 2]);
    for _ in 0..count {
        spec.shared.push(SharedExpert {
            hidden_dim: width(rng),
            gate: rng.pick(&[SharedGate::None, SharedGate::Sigmoid]),
            bias: None,
            clamp: None,
            activation: None,
        });
    }
}

fn losses(rng: &mut SampleRng, spec: &mut LayerSpec) {
    if !spec.has_logits() {
        return;
    }
    for kind in LossKind::ALL {
        let defined = !kind.needs_noise() || spec.router.noise > 0.0;
        if defined && rng.one_in(6) {
            let known = kind == LossKind::Sequence && rng.one_in(2);
            spec.losses.push(Loss {
                kind,
                coefficient: rng.real(0.0, 0.1),
                sequence_length: known.then(|| rng.between(1, 5)),
            });
        }
    }
}
