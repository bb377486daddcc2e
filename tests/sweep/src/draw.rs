//! Which layers are compiled, and for which targets.

use moesaic_kernel::{DType, Target};
use moesaic_spec::testing::{Counter, sample};
use moesaic_spec::{Activation, LayerSpec, Precision, Select, WeightSite};

/// Widths of published layers, and some that matrix units take in small pieces.
const WIDTHS: [usize; 24] = [
    64, 96, 128, 136, 200, 256, 512, 706, 768, 1024, 1028, 1402, 1408, 1536, 2048, 2880, 3072,
    4096, 5120, 6144, 7168, 10752, 14336, 18432,
];

/// Numbers of experts of published layers.
const EXPERTS: [usize; 14] = [1, 2, 4, 8, 16, 32, 60, 64, 128, 160, 256, 512, 1025, 2048];

/// The layer of a seed: in turn a small odd one, and one of widths that layers
/// have, with options that are as random. Every second of the latter has products
/// with much to do at their ends.
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

/// `wide` with factors of one type, an error function, and rows that have weights: all
/// that asks for registers at once, and rarely meets in layers that are drawn.
fn long(seed: u64, wide: &LayerSpec) -> Option<LayerSpec> {
    let rng = &mut Counter::new(seed ^ 0x10_46);
    let dtype = rng.pick(&[DType::F16, DType::Bf16, DType::F32]);
    let mut spec = wide.clone();
    spec.name = format!("long-{seed}");
    spec.precision = Precision {
        weights: dtype,
        activations: dtype,
        tf32: wide.precision.tf32 && dtype == DType::F32,
        ..wide.precision
    };
    (spec.experts.activation, spec.experts.alpha) = (Activation::Gelu, 1.0);
    spec.router.weight_on = WeightSite::Activation;
    spec.validate().is_ok().then_some(spec)
}

/// `small` at widths of a published layer, if its options allow any.
fn wide(seed: u64, small: &LayerSpec) -> Option<LayerSpec> {
    let rng = &mut Counter::new(seed ^ 0x51de);
    (0..8).find_map(|_| {
        let mut spec = small.clone();
        spec.name = format!("wide-{seed}");
        spec.shape.model_dim = rng.pick(&WIDTHS);
        spec.shape.hidden_dim = rng.pick(&WIDTHS);
        spec.shape.output_dim = small.shape.output_dim.map(|_| rng.pick(&WIDTHS));
        let experts = rng.pick(&EXPERTS);
        let groups = spec.router.groups.as_ref().map_or(1, |groups| groups.count);
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

/// `each` of the targets, others for each seed; all of them where there are no more.
pub fn targets(seed: u64, all: &[Target], each: usize) -> Vec<Target> {
    let mut left = all.to_vec();
    let rng = &mut Counter::new(seed ^ 0x7a26);
    let mut drawn = Vec::new();
    while drawn.len() < each && !left.is_empty() {
        drawn.push(left.swap_remove(rng.between(0, left.len() - 1)));
    }
    drawn
}

#[cfg(test)]
mod tests {
    use super::*;

    /// In every hundred seeds there are some of each type that are wide, have weights
    /// at the activation and an error function.
    #[test]
    fn layers_with_much_at_the_ends_of_products_are_drawn() {
        for first in [0, 5000] {
            for dtype in [DType::F16, DType::Bf16, DType::F32] {
                let drawn = (first..first + 100).map(layer).filter(|spec| {
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
}
