//! Which layers are compiled, and for which targets.

use moesaic_kernel::Target;
use moesaic_spec::testing::{Counter, sample};
use moesaic_spec::{LayerSpec, Select};

/// Widths of published layers, and some that matrix units take in small pieces.
const WIDTHS: [usize; 24] = [
    64, 96, 128, 136, 200, 256, 512, 706, 768, 1024, 1028, 1402, 1408, 1536, 2048, 2880, 3072,
    4096, 5120, 6144, 7168, 10752, 14336, 18432,
];

/// Numbers of experts of published layers.
const EXPERTS: [usize; 14] = [1, 2, 4, 8, 16, 32, 60, 64, 128, 160, 256, 512, 1025, 2048];

/// The layer of a seed: in turn a small odd one, and one of widths that layers
/// have, with options that are as random.
pub fn layer(seed: u64) -> LayerSpec {
    let small = sample(seed);
    if seed.is_multiple_of(2) {
        return small;
    }
    wide(seed, &small).unwrap_or(small)
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
