//! Plans with the texts of their kernels, each written once.

use crate::error::EngineError;
use moesaic_emit::{emit, emit_layer};
use moesaic_kernel::KernelSource;
use moesaic_plan::{LayerPlan, Tilings};
use std::sync::Arc;

/// The plans of a layer, and the texts of the kernels of each.
pub(crate) struct Texts {
    pub tilings: Tilings,
    /// In the order of [`Tilings::plans`]. Plans have most texts in common.
    pub each: Vec<Vec<Arc<KernelSource>>>,
}

impl Texts {
    /// # Errors
    /// When a kernel cannot be emitted.
    pub fn of(tilings: Tilings) -> Result<Texts, EngineError> {
        let (first, others) = tilings.plans().split_first().expect("a plan");
        let own: Vec<_> = emit_layer(first)?.into_iter().map(Arc::new).collect();
        let mut each = vec![own];
        for plan in others {
            each.push(changed(first, &each[0], plan)?);
        }
        Ok(Texts { tilings, each })
    }

    /// Returns only the first plan, which has no tuning.
    pub fn untuned(mut self) -> Texts {
        self.each.truncate(1);
        let tilings = self.tilings.first().clone().into();
        Texts { tilings, ..self }
    }
}

/// Returns the texts of a plan that shares most kernels with another one.
fn changed(
    known: &LayerPlan,
    texts: &[Arc<KernelSource>],
    plan: &LayerPlan,
) -> Result<Vec<Arc<KernelSource>>, EngineError> {
    let pairs = plan.kernels.iter().zip(&known.kernels).zip(texts);
    let text = pairs.map(|((kernel, same), text)| {
        // A text follows from its kernel's plan alone, and a comparison is far cheaper than a run
        // of the templates.
        if kernel == same {
            Ok(text.clone())
        } else {
            Ok(Arc::new(emit(kernel, plan.target)?))
        }
    });
    text.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use moesaic_plan::{PlanOptions, Tuning};
    use moesaic_spec::testing::sample;

    #[test]
    fn kernels_that_a_tuning_leaves_alone_are_written_once() {
        let target = "cpu:avx2".parse().unwrap();
        let plan = |tuning: Tuning| {
            let options = PlanOptions {
                tuning,
                ..PlanOptions::default()
            };
            moesaic_plan::plan(&sample(1), target, &options).unwrap()
        };
        let plain = plan(Tuning::default());
        let choice = Tuning::choices(&plain).remove(0);
        let tuned = plan(Tuning::default().with(choice.knob, choice.others[0]));
        let texts = Texts::of(Tilings::from(plain.clone()).with(8, tuned.clone())).unwrap();
        let mut written = 0;
        for (kernel, index) in tuned.kernels.iter().zip(0..) {
            let same = *kernel == plain.kernels[index];
            let [a, b] = [0, 1].map(|plan| &texts.each[plan][index]);
            assert_eq!(Arc::ptr_eq(a, b), same, "{}", kernel.name);
            written += usize::from(!same);
        }
        assert!(written > 0, "{:?} changes nothing", choice.knob);
        let alone = emit_layer(&tuned).unwrap();
        let of_tuned = texts.each[1].iter().map(|text| text.text.clone());
        assert!(alone.into_iter().map(|source| source.text).eq(of_tuned));
        assert_eq!(texts.untuned().tilings.plans(), [plain]);
    }
}
