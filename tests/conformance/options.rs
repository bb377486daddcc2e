//! Options of experts and around them, each forward and backward on a CPU and
//! on a simulator of each vendor, in every recompute mode. Simulators take turns.

use super::Case;
use super::cases::{of_type, small};
use super::layers::engine as cpu;
use super::simulated::{SIMULATORS, open};
use moesaic::spec::{
    Activation, Biases, CapacityMode, CapacityOrder, ClampSite, ExpertForm, Expression, GroupMask,
    GroupStat, Groups, Latent, LayerSpec, Loss, LossKind, Renormalize, RouterKind, Score, Select,
    SharedExpert, SharedGate, WeightSite,
};
use moesaic::{DType, Engine, Recompute};
use moesaic_harness::thorough::one_in;

const MODES: [Recompute; 3] = [Recompute::None, Recompute::Hidden, Recompute::All];

/// Every stage of the forward pass, then every gradient.
fn check(specs: impl Iterator<Item = (usize, LayerSpec)>, engine: &Engine) {
    for (i, spec) in specs {
        if let Err(problems) = spec.validate() {
            panic!("{problems:?}");
        }
        let case = Case::random(&spec, 33, i as u64);
        case.check(engine);
        case.check_training(engine, MODES[i % 3]);
    }
}

fn shared(hidden_dim: usize, gate: SharedGate, bias: Option<Biases>) -> SharedExpert {
    SharedExpert {
        hidden_dim,
        gate,
        bias,
        clamp: None,
        activation: None,
    }
}

/// Biases of some projections, of routed and shared experts alike or not.
fn biases() -> Vec<LayerSpec> {
    let sites = [
        WeightSite::Output,
        WeightSite::Activation,
        WeightSite::Input,
    ];
    let dtypes = [DType::F32, DType::Bf16, DType::F16];
    let kinds = [Biases::Up, Biases::Down, Biases::None];
    let of = |i: usize| {
        let mut spec = of_type(dtypes[i], small(24, 40, 6, 2));
        spec.name = format!("biases-{i}");
        spec.experts.bias = kinds[i];
        spec.router.weight_on = sites[(i + 1) % 3];
        if i == 1 {
            spec.experts.form = ExpertForm::Plain;
        }
        spec.shared = vec![
            shared(16, SharedGate::Sigmoid, Some(kinds[(i + 1) % 3])),
            shared(9, SharedGate::Sigmoid, Some(Biases::All)),
            shared(8, SharedGate::None, None),
        ];
        spec
    };
    (0..3).map(of).collect()
}

/// Projections around the routed experts: alone, and with what reads the token
/// beside them.
fn latents() -> Vec<LayerSpec> {
    let latent = |dim, bias| {
        Some(Latent {
            dim,
            bias,
            norm_eps: None,
            input_norm_eps: None,
        })
    };
    let mut alone = small(24, 40, 6, 2);
    alone.latent = latent(16, false);
    alone.shape.output_dim = Some(17);
    let mut gated = of_type(DType::Bf16, small(40, 24, 6, 2));
    gated.latent = latent(72, true);
    gated.experts.bias = Biases::Down;
    gated.shared = vec![
        shared(16, SharedGate::Sigmoid, Some(Biases::All)),
        shared(8, SharedGate::None, None),
    ];
    let mut input = of_type(DType::F16, small(64, 64, 6, 2));
    input.latent = latent(32, true);
    input.router.weight_on = WeightSite::Input;
    input.shared = vec![shared(16, SharedGate::None, None)];
    let mut identity = small(24, 16, 5, 3);
    identity.latent = latent(9, false);
    identity.shape.output_dim = Some(31);
    identity.experts.identity = 2;
    identity.capacity.mode = CapacityMode::Fixed;
    identity.capacity.rows = Some(9);
    identity.capacity.renormalize_after_drop = true;
    identity.shared = vec![shared(8, SharedGate::Sigmoid, None)];
    vec![alone, gated, input, identity]
}

/// Norms of the routed experts' sum: of one element, of whole and of part packs, of sums that
/// capacity leaves empty.
fn latent_norms() -> Vec<LayerSpec> {
    let latent = |dim, eps| {
        Some(Latent {
            dim,
            bias: dim > 16,
            norm_eps: Some(eps),
            input_norm_eps: None,
        })
    };
    let mut alone = small(24, 40, 6, 2);
    alone.latent = latent(96, 1e-5);
    let mut gated = of_type(DType::Bf16, small(40, 24, 6, 2));
    gated.latent = latent(72, 0.02);
    gated.shared = vec![
        shared(16, SharedGate::Sigmoid, None),
        shared(8, SharedGate::None, None),
    ];
    let mut input = of_type(DType::F16, small(64, 64, 6, 2));
    input.latent = latent(33, 0.02);
    input.router.weight_on = WeightSite::Input;
    input.shared = vec![shared(16, SharedGate::Residual, None)];
    let mut dropping = small(24, 16, 5, 3);
    dropping.latent = latent(1, 0.5);
    dropping.experts.identity = 2;
    dropping.capacity.mode = CapacityMode::Fixed;
    dropping.capacity.rows = Some(5);
    dropping.router.token_mask = true;
    vec![alone, gated, input, dropping]
}

/// Clamps on either side of the activation, shared experts with clamps of their own, soft caps of
/// up, and SiTU-GLU.
fn limits() -> Vec<LayerSpec> {
    let clamped = |clamp| SharedExpert {
        clamp,
        ..shared(16, SharedGate::Sigmoid, None)
    };
    let mut behind = small(24, 40, 6, 2);
    behind.experts.clamp = Some(0.4);
    behind.experts.clamp_on = ClampSite::Output;
    behind.experts.bias = Biases::All;
    behind.shared = vec![clamped(Some(0.0)), clamped(Some(0.2))];
    // Of f32, because a pre-activation that is kept in bf16 may cross a clamp that is this near.
    let mut apart = small(40, 24, 6, 2);
    apart.router.weight_on = WeightSite::Activation;
    apart.experts.clamp = Some(0.7);
    apart.shared = vec![clamped(Some(0.0)), clamped(None)];
    let mut own = small(24, 40, 6, 2);
    own.experts.activation = Activation::Silu;
    own.experts.alpha = 1.702;
    let acts = |activation| SharedExpert {
        activation: Some(activation),
        ..shared(16, SharedGate::Sigmoid, None)
    };
    own.shared = vec![acts(Activation::GeluTanh), acts(Activation::Silu)];
    let mut situ = of_type(DType::F16, small(64, 64, 6, 2));
    let gate = Expression::parse("4 * tanh(x / 4) * sigmoid(x)").expect("a formula of x");
    situ.experts.activation = Activation::Custom(gate);
    situ.experts.up_softcap = Some(0.8);
    situ.shared = vec![clamped(Some(6.0))];
    let mut alone = small(24, 16, 5, 3);
    alone.experts.up_softcap = Some(2.5);
    alone.experts.up_offset = 1.0;
    alone.experts.clamp = Some(1.0);
    vec![behind, apart, own, situ, alone]
}

/// PR-MoE: a shared expert whose weight the routed ones do not have.
fn residuals() -> Vec<LayerSpec> {
    let mut plain = small(24, 40, 6, 1);
    plain.shared = vec![shared(16, SharedGate::Residual, Some(Biases::All))];
    plain.shape.output_dim = Some(17);
    let mut several = of_type(DType::Bf16, small(40, 24, 6, 2));
    several.router.weight_on = WeightSite::Input;
    several.experts.bias = Biases::All;
    several.shared = vec![
        shared(8, SharedGate::None, None),
        shared(16, SharedGate::Residual, None),
        shared(9, SharedGate::Sigmoid, Some(Biases::None)),
    ];
    let mut latent = of_type(DType::F16, small(40, 24, 5, 3));
    latent.latent = Some(Latent {
        dim: 16,
        bias: true,
        norm_eps: Some(0.05),
        input_norm_eps: None,
    });
    latent.experts.identity = 2;
    latent.shared = vec![shared(16, SharedGate::Residual, None)];
    let mut dropping = small(24, 16, 5, 2);
    dropping.experts.identity = 2;
    dropping.capacity.mode = CapacityMode::Fixed;
    dropping.capacity.rows = Some(5);
    dropping.capacity.renormalize_after_drop = true;
    dropping.shared = vec![shared(16, SharedGate::Residual, None)];
    vec![plain, several, latent, dropping]
}

/// Norms of what experts read and of their outputs: alone and together, behind biases, of one
/// element, of whole and of part packs, of layers that drop and mask.
fn expert_norms() -> Vec<LayerSpec> {
    let latent = |dim, input, sum| {
        Some(Latent {
            dim,
            bias: dim > 16,
            norm_eps: sum,
            input_norm_eps: Some(input),
        })
    };
    let mut spark = of_type(DType::Bf16, small(40, 24, 6, 2));
    spark.latent = latent(72, 0.02, None);
    spark.experts.output_norm_eps = Some(0.01);
    let mut outputs = small(24, 40, 6, 3);
    outputs.experts.output_norm_eps = Some(1e-3);
    outputs.experts.bias = Biases::Down;
    outputs.shape.output_dim = Some(33);
    outputs.shared = vec![shared(16, SharedGate::Sigmoid, None)];
    let mut inputs = of_type(DType::F16, small(64, 64, 6, 2));
    inputs.latent = latent(33, 0.02, Some(0.05));
    inputs.router.weight_on = WeightSite::Input;
    inputs.router.token_mask = true;
    let mut dropping = small(24, 16, 5, 3);
    dropping.latent = latent(9, 0.5, Some(0.05));
    dropping.experts.output_norm_eps = Some(0.2);
    dropping.experts.identity = 2;
    dropping.capacity.mode = CapacityMode::Fixed;
    dropping.capacity.rows = Some(5);
    dropping.capacity.renormalize_after_drop = true;
    dropping.shared = vec![shared(16, SharedGate::Residual, None)];
    let mut one = small(24, 16, 5, 2);
    one.shape.output_dim = Some(1);
    one.experts.output_norm_eps = Some(0.5);
    one.experts.form = ExpertForm::Plain;
    vec![spark, outputs, inputs, dropping, one]
}

/// No token, one, and one expert for all.
#[test]
fn norms_of_few_rows() {
    for (i, mut spec) in expert_norms().into_iter().enumerate() {
        let engines = [cpu(), open(SIMULATORS[i % 3])];
        for engine in &engines {
            for tokens in [0, 1] {
                let case = Case::random(&spec, tokens, i as u64);
                case.check(engine);
                case.check_training(engine, MODES[(i + tokens) % 3]);
            }
        }
        (spec.shape.experts, spec.shape.top_k) = (1, 1);
        spec.experts.identity = 0;
        let case = Case::random(&spec, 33, i as u64);
        engines
            .iter()
            .for_each(|engine| case.check_training(engine, MODES[i % 3]));
    }
}

/// More experts than the lanes of a warp hold scores of, with everything that
/// goes over all experts of a token.
fn many_experts() -> Vec<LayerSpec> {
    let of = |experts, top_k| small(8, 4, experts, top_k);
    let loss = |kind| Loss {
        kind,
        coefficient: 0.05,
        sequence_length: (kind == LossKind::Sequence).then_some(7),
    };
    let mut switch = of(2048, 1);
    switch.capacity.mode = CapacityMode::Factor;
    switch.losses = vec![loss(LossKind::Switch), loss(LossKind::Z)];
    let mut grouped = of(1025, 6);
    grouped.router.score = Score::Sigmoid;
    grouped.router.select_bias = true;
    grouped.router.expert_scale = true;
    grouped.router.renormalize = Renormalize::Sum;
    grouped.router.groups = Some(Groups {
        count: 5,
        keep: 2,
        stat: GroupStat::Top2Sum,
        mask: GroupMask::Exclude,
    });
    grouped.capacity.mode = CapacityMode::Fixed;
    grouped.capacity.rows = Some(2);
    grouped.capacity.order = CapacityOrder::Probability;
    let mut most = of(4000, 10);
    most.experts.zero = 96;
    most.router.score = Score::SoftmaxSelected;
    most.capacity.order = CapacityOrder::TokenMajor;
    most.losses = vec![loss(LossKind::GshardAll), loss(LossKind::Sequence)];
    let mut mixer = of(1500, 2);
    mixer.router.select = Select::SparseMixer(0.1);
    mixer.capacity.mode = CapacityMode::MaxCount;
    mixer.capacity.order = CapacityOrder::BatchPrioritized;
    let mut cosine = of(2000, 3);
    cosine.router.kind = RouterKind::Cosine;
    cosine.router.projection_dim = Some(6);
    vec![switch, grouped, most, mixer, cosine]
}

macro_rules! on_each {
    ($($specs:ident),* $(,)?) => {$(
        mod $specs {
            use super::*;

            fn numbered() -> impl Iterator<Item = (usize, LayerSpec)> {
                super::$specs().into_iter().enumerate()
            }

            #[test]
            fn cpu_agrees() {
                check(numbered(), &cpu());
            }

            #[test]
            fn sm_80_agrees() {
                check(one_in(6, 0, numbered()), &open(SIMULATORS[0]));
            }

            #[test]
            fn sm_90a_agrees() {
                check(one_in(6, 2, numbered()), &open(SIMULATORS[1]));
            }

            #[test]
            fn gfx942_agrees() {
                check(one_in(6, 1, numbered()), &open(SIMULATORS[2]));
            }
        }
    )*};
}

on_each!(
    biases,
    latents,
    latent_norms,
    expert_norms,
    limits,
    residuals,
    many_experts
);
