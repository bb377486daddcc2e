//! Draws the layers to compile and their targets.

use moesaic_kernel::{DType, Target};
use moesaic_spec::testing::{SampleRng, sample};
use moesaic_spec::{
    Activation, Biases, ClampSite, ExpertForm, Experts, Expression, LayerSpec, Precision, Select,
    Shape, SharedExpert, SharedGate, WeightSite,
};

/// Widths of published layers, and some that tensor cores take in small blocks.
const WIDTHS: [usize; 24] = [
    64, 96, 128, 136, 200, 256, 512, 706, 768, 1024, 1028, 1402, 1408, 1536, 2048, 2880, 3072,
    4096, 5120, 6144, 7168, 10752, 14336, 18432,
];

/// Numbers of experts of published layers.
const EXPERTS: [usize; 14] = [1, 2, 4, 8, 16, 32, 60, 64, 128, 160, 256, 512, 1025, 2048];

/// Draws the layer of a seed: in turn a small odd layer, and one with published
/// widths, both with random options. Every second of the latter has GEMMs with
/// long epilogues.
pub fn layer(seed: u64) -> LayerSpec {
    let small = sample(seed);
    if seed.is_multiple_of(2) {
        return small;
    }
    let wide = wide(seed, &small).unwrap_or(small);
    match seed % 4 {
        3 => long(seed, &wide).unwrap_or(wide),
        _ => wide,
    }
}

/// Gives `wide` factors of one type, an error function and row weights: all
/// that asks for registers at once, and is rarely drawn together.
fn long(seed: u64, wide: &LayerSpec) -> Option<LayerSpec> {
    let rng = &mut SampleRng::new(seed ^ 0x10_46);
    let dtype = rng.pick(&[DType::F16, DType::Bf16, DType::F32]);
    let mut spec = wide.clone();
    spec.name = format!("long-{seed}");
    spec.precision = Precision {
        weights: dtype,
        activations: dtype,
        tf32: wide.precision.tf32 && dtype == DType::F32,
        experts: None,
        experts_down: None,
        expert_activations: None,
        expert_gradients: rng.pick(&[DType::F32, dtype]),
    };
    (spec.experts.activation, spec.experts.alpha) = (Activation::Gelu, 1.0);
    spec.router.weight_on = WeightSite::Activation;
    spec.validate().is_ok().then_some(spec)
}

/// Gives `small` the widths of a published layer, if its options allow any.
fn wide(seed: u64, small: &LayerSpec) -> Option<LayerSpec> {
    let rng = &mut SampleRng::new(seed ^ 0x51de);
    (0..8).find_map(|_| {
        let mut spec = small.clone();
        spec.name = format!("wide-{seed}");
        spec.shape.model_dim = rng.pick(&WIDTHS);
        spec.shape.hidden_dim = rng.pick(&WIDTHS);
        spec.shape.output_dim = small.shape.output_dim.map(|_| rng.pick(&WIDTHS));
        let experts = rng.pick(&EXPERTS);
        let groups = match spec.router.select {
            Select::PerGroup(groups) => groups,
            _ => spec.router.groups.as_ref().map_or(1, |groups| groups.count),
        };
        spec.shape.experts = experts.next_multiple_of(groups);
        if matches!(spec.router.select, Select::ExpertChoice(_)) {
            spec.shape.top_k = spec.shape.experts;
        }
        for shared in &mut spec.shared {
            shared.hidden_dim = rng.pick(&WIDTHS);
        }
        spec.validate().is_ok().then_some(spec)
    })
}

/// Pairs of model and hidden width whose rows are copied 16 bytes at a time, 8,
/// 4, and element by element.
const PRODUCTS: [[usize; 2]; 6] = [
    [2048, 768],
    [4096, 14336],
    [2052, 1028],
    [1402, 706],
    [2049, 1403],
    [64, 2880],
];

/// Draws a layer of wide GEMMs with most options in any mix: gates, biases,
/// clamps, error functions and longer expressions, row weights, tall tiles and
/// short ones, every pair of types.
pub fn products(seed: u64) -> LayerSpec {
    let rng = &mut SampleRng::new(seed ^ 0x9420);
    let [model_dim, hidden_dim] = rng.pick(&PRODUCTS);
    let [experts, top_k] = rng.pick(&[[8, 2], [128, 4]]);
    let mut spec = sample(0);
    spec.name = format!("products-{seed}");
    (spec.router, spec.capacity) = Default::default();
    (spec.latent, spec.losses) = Default::default();
    spec.shape = Shape {
        model_dim,
        hidden_dim,
        experts,
        top_k,
        output_dim: None,
    };
    spec.precision = types(rng);
    spec.router.weight_on = rng.pick(&[
        WeightSite::Activation,
        WeightSite::Activation,
        WeightSite::Output,
        WeightSite::Input,
    ]);
    spec.experts = ends(rng);
    limits(seed, &mut spec.experts);
    spec.shared = Vec::new();
    if rng.one_in(3) {
        spec.shared.push(SharedExpert {
            hidden_dim,
            gate: SharedGate::Sigmoid,
            bias: None,
            clamp: None,
            activation: None,
        });
    }
    spec
}

/// Draws one type for all more often than two.
fn types(rng: &mut SampleRng) -> Precision {
    let all = [DType::F32, DType::F16, DType::Bf16];
    let weights = rng.pick(&all);
    let activations = if rng.one_in(6) {
        rng.pick(&all)
    } else {
        weights
    };
    let pair = [weights, activations];
    let mixed = weights != activations && weights != DType::F32 && activations != DType::F32;
    Precision {
        weights,
        activations: if mixed { weights } else { activations },
        tf32: pair == [DType::F32; 2] && rng.one_in(3),
        experts: None,
        experts_down: None,
        expert_activations: None,
        expert_gradients: rng.pick(&[DType::F32, weights]),
    }
}

/// Draws the epilogues of the GEMMs.
fn ends(rng: &mut SampleRng) -> Experts {
    let gated = rng.one_in(2);
    let own = Expression::parse("x / (1 + abs(x)) + 0.5 * erf(x) + log(1 + x^2) * tanh(x)");
    let own = own.map_or(Activation::Gelu, Activation::Custom);
    Experts {
        form: if gated {
            ExpertForm::Gated
        } else {
            ExpertForm::Plain
        },
        activation: rng.pick(&[Activation::Gelu, Activation::Gelu, own, Activation::Silu]),
        bias: rng.pick(&[Biases::All, Biases::All, Biases::None]),
        clamp: (gated && rng.one_in(2)).then_some(7.0),
        up_offset: if gated && rng.one_in(2) { 1.0 } else { 0.0 },
        ..Experts::default()
    }
}

/// Draws the soft cap of up and the side of the clamp from a stream of their own, so that older
/// seeds keep all else.
fn limits(seed: u64, experts: &mut Experts) {
    let rng = &mut SampleRng::new(seed ^ 0x11b1);
    let gated = experts.form == ExpertForm::Gated;
    experts.up_softcap = (gated && rng.one_in(3)).then_some(25.0);
    if experts.clamp.is_some() && rng.one_in(3) {
        experts.clamp_on = ClampSite::Output;
    }
}

/// Draws `each` of the targets, others for each seed; returns all of them where
/// there are no more.
pub fn targets(seed: u64, all: &[Target], each: usize) -> Vec<Target> {
    drawn(&mut SampleRng::new(seed ^ 0x7a26), all.to_vec(), each)
}

/// Draws some of a layer's kernels, others for each seed; returns all of them
/// without a number.
pub fn some<T>(seed: u64, all: Vec<T>, kernels: Option<usize>) -> Vec<T> {
    match kernels {
        Some(kernels) => drawn(&mut SampleRng::new(seed ^ 0x51c3), all, kernels),
        None => all,
    }
}

fn drawn<T>(rng: &mut SampleRng, mut left: Vec<T>, many: usize) -> Vec<T> {
    let mut drawn = Vec::new();
    while drawn.len() < many && !left.is_empty() {
        drawn.push(left.swap_remove(rng.between(0, left.len() - 1)));
    }
    drawn
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Among two hundred seeds, some of each type are wide and have row weights
    /// at the activation and an error function.
    #[test]
    fn layers_with_much_at_the_ends_of_products_are_drawn() {
        for first in [0, 5000] {
            for dtype in [DType::F16, DType::Bf16, DType::F32] {
                let drawn = (first..first + 200).map(layer).filter(|spec| {
                    let types = [spec.precision.weights, spec.precision.activations];
                    spec.shape.hidden_dim.min(spec.shape.model_dim) >= 512
                        && types == [dtype; 2]
                        && spec.experts.activation == Activation::Gelu
                        && spec.router.weight_on == WeightSite::Activation
                });
                assert!(drawn.count() >= 2, "{dtype:?} from seed {first}");
            }
        }
    }

    #[test]
    fn products_are_those_of_valid_layers() {
        for seed in 0..500 {
            let spec = products(seed);
            assert!(spec.validate().is_ok(), "{seed}: {:?}", spec.validate());
        }
    }
}
