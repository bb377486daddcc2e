//! The sizes that a layer's plan has for each knob.

use super::{Knob, Tuning};
use crate::LayerPlan;
use moesaic_kernel::Target;

/// The candidates for a knob of a layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KnobCandidates {
    /// The size.
    pub knob: Knob,
    /// The size without a tuning.
    pub default: usize,
    /// The candidates besides the default, ascending.
    pub others: Vec<usize>,
}

impl Knob {
    /// Returns the candidates as fractions of the default size. Larger tiles would overflow the
    /// stack of a thread.
    fn ratios(self) -> &'static [(usize, usize)] {
        match self {
            Knob::TileRows => &[(1, 2), (3, 4), (3, 2)],
            Knob::UpColumns | Knob::DownColumns => &[(1, 2), (2, 1)],
            Knob::DgradColumns => &[(1, 2), (2, 1)],
            Knob::WgradRows | Knob::WgradColumns => &[(1, 2)],
        }
    }

    fn choice(self, plan: &LayerPlan) -> Option<KnobCandidates> {
        let mut kernels = plan.kernels.clone();
        // A copy of the kernels: `field` borrows the size for a change, and the plan must stay as
        // it is.
        let mut ops = kernels.iter_mut().map(|kernel| &mut kernel.op);
        let field = ops.find_map(|op| self.field(op))?;
        let default = *field.size;
        let ratios = self.ratios().iter();
        let mut others: Vec<usize> = ratios
            .map(|(times, over)| field.fitted(default * times / over))
            .filter(|size| *size != default)
            .collect();
        others.sort_unstable();
        others.dedup();
        (!others.is_empty()).then_some(KnobCandidates {
            knob: self,
            default,
            others,
        })
    }
}

impl Tuning {
    /// Returns the choices of a layer; `plan` is its plan without a tuning.
    pub fn choices(plan: &LayerPlan) -> Vec<KnobCandidates> {
        match plan.target.hardware() {
            Target::Cpu(_) => Knob::ALL.iter().filter_map(|k| k.choice(plan)).collect(),
            _ => Vec::new(),
        }
    }

    /// Returns whether every size is one of [`Tuning::choices`]. Others are not known to give
    /// kernels that work.
    pub fn fits(&self, plan: &LayerPlan) -> bool {
        let choices = Tuning::choices(plan);
        self.sizes().all(|(knob, size)| {
            let mut same = choices.iter().filter(|choice| choice.knob == knob);
            same.any(|choice| choice.others.contains(&size))
        })
    }
}
