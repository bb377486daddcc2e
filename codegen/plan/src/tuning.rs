//! The tile sizes that `moesaic tune` may set.
//!
//! They cut work into blocks and never cut a sum, so a tuned layer gives the same bytes. CPUs have
//! choices, GPUs have none so far. Only GEMMs have any: no size of another kernel's blocks made a
//! layer faster by more than 0.1 % (benches/results).

use crate::{ExpertGemm, GroupedGemmConfig, LayerPlan, Op};
use moesaic_kernel::{Stem, Target};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// A size that can be chosen, for all kernels of a layer that have it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Knob {
    /// Rows of a row tile. The scan lists these tiles, so that all GEMMs that read the list have
    /// the same.
    TileRows,
    /// Columns of a block of `grouped_gemm_up`, of gate and of up alike.
    UpColumns,
    /// Columns of a block of `grouped_gemm_down`.
    DownColumns,
    /// Columns of a block of `grouped_gemm_dgrad_up` of the routed experts. The
    /// other half has none: its columns cut the sums of the weights' gradient.
    DgradColumns,
    /// Rows of a block of the gradient of a routed expert's weight.
    WgradRows,
    /// Columns of a block of the gradient of a routed expert's weight.
    WgradColumns,
}

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

/// Sizes that replace those that operators choose; the default replaces none.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Tuning(BTreeMap<Knob, usize>);

impl Knob {
    /// Every knob, in the order of tuning: what weighs most comes first.
    pub const ALL: [Knob; 6] = [
        Knob::TileRows,
        Knob::UpColumns,
        Knob::DownColumns,
        Knob::DgradColumns,
        Knob::WgradRows,
        Knob::WgradColumns,
    ];

    /// Returns the name in files and tables.
    pub fn name(self) -> &'static str {
        match self {
            Knob::TileRows => "tile_rows",
            Knob::UpColumns => "up_columns",
            Knob::DownColumns => "down_columns",
            Knob::DgradColumns => "dgrad_columns",
            Knob::WgradRows => "wgrad_rows",
            Knob::WgradColumns => "wgrad_columns",
        }
    }

    /// Returns the operator whose blocks the knob cuts; for the row tiles the first of them.
    pub fn stem(self) -> Stem {
        match self {
            Knob::TileRows | Knob::UpColumns | Knob::DownColumns => Stem::GroupedGemm,
            Knob::DgradColumns => Stem::GroupedGemmDgrad,
            Knob::WgradRows | Knob::WgradColumns => Stem::GroupedGemmWgrad,
        }
    }

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

    /// Returns the field of a kernel's tiling that the knob sets.
    fn field(self, op: &mut Op) -> Option<Field<'_>> {
        match op {
            Op::GroupedGemm { desc, config } => match (self, desc.half) {
                (Knob::TileRows, _) => Some(Field::rows(config, None)),
                (Knob::UpColumns, ExpertGemm::Up) | (Knob::DownColumns, ExpertGemm::Down) => {
                    Some(Field::columns(config, desc.outer))
                }
                _ => None,
            },
            Op::GroupedGemmDgrad { desc, config } => match (self, desc.half) {
                (Knob::TileRows, _) => Some(Field::rows(config, None)),
                (Knob::DgradColumns, ExpertGemm::Up) if !desc.dense => {
                    Some(Field::columns(config, desc.outer))
                }
                _ => None,
            },
            Op::GroupedGemmWgrad { desc, config } if !desc.dense => match self {
                // The rows of its tiles are those of a matrix, so `TileRows` leaves them as they
                // are.
                Knob::WgradRows => Some(Field::rows(config, Some(desc.height))),
                Knob::WgradColumns => Some(Field::columns(config, desc.width)),
                _ => None,
            },
            _ => None,
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

/// A size in a tiling.
struct Field<'a> {
    size: &'a mut usize,
    /// It is a multiple of this.
    step: usize,
    /// The largest size that the kernel uses, before rounding up to a step; `None` where all
    /// kernels must have the same size.
    most: Option<usize>,
    /// Memory of a thread that grows with it.
    shared_bytes: Option<&'a mut u32>,
}

impl<'a> Field<'a> {
    fn rows(config: &'a mut GroupedGemmConfig, most: Option<usize>) -> Field<'a> {
        Field {
            size: &mut config.tile_rows,
            step: config.thread_rows,
            most,
            shared_bytes: config.family.cpu_mut().map(|cpu| &mut cpu.shared_bytes),
        }
    }

    fn columns(config: &'a mut GroupedGemmConfig, most: usize) -> Field<'a> {
        Field {
            size: &mut config.tile_columns,
            step: config.thread_columns,
            most: Some(most),
            shared_bytes: config.family.cpu_mut().map(|cpu| &mut cpu.shared_bytes),
        }
    }

    /// Returns `size`, or the largest size that the kernel uses if that is less, rounded up to
    /// whole steps.
    fn fitted(&self, size: usize) -> usize {
        let most = self.most.unwrap_or(usize::MAX);
        size.clamp(1, most).next_multiple_of(self.step.max(1))
    }

    /// Sets the size. Buffers grow at most in proportion to it, so memory that grows in proportion
    /// is enough.
    fn set(self, size: usize) {
        // Row tiles must be the very same in all kernels, because they share one list, so they are
        // not fitted to any.
        let size = match self.most {
            Some(_) => self.fitted(size),
            None => size,
        };
        if let Some(bytes) = self.shared_bytes
            && size > *self.size
        {
            let more = *bytes as usize * size / *self.size;
            *bytes = u32::try_from(more.next_multiple_of(64)).unwrap_or(u32::MAX);
        }
        *self.size = size;
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

    /// Returns one size by the name of its knob.
    pub fn named(name: &str, size: usize) -> Option<Tuning> {
        let knob = Knob::ALL.into_iter().find(|knob| knob.name() == name)?;
        Some(Tuning::default().with(knob, size))
    }

    /// Returns the sizes of both; `other` wins where both set the same knob.
    #[must_use]
    pub fn and(mut self, other: Tuning) -> Tuning {
        self.0.extend(other.0);
        self
    }

    /// Returns the same with a size set.
    #[must_use]
    pub fn with(mut self, knob: Knob, size: usize) -> Tuning {
        self.0.insert(knob, size);
        self
    }

    /// Returns whether nothing is set.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the sizes that are set.
    pub fn sizes(&self) -> impl Iterator<Item = (Knob, usize)> {
        self.0.iter().map(|(&knob, &size)| (knob, size))
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

    /// Returns the size that is set for a knob.
    pub(crate) fn size(&self, knob: Knob) -> Option<usize> {
        self.0.get(&knob).copied()
    }

    /// Puts the sizes into the tiling of a kernel.
    pub(crate) fn apply(&self, op: &mut Op) {
        for (knob, size) in self.sizes() {
            if let Some(field) = knob.field(op) {
                field.set(size);
            }
        }
        if let Some(config) = op.gemm_mut()
            && let Some(cpu) = config.family.cpu_mut()
        {
            // A block of a decode call has fewer columns than a tile, and a tuned tile may be
            // narrower than even that.
            cpu.decode_columns = cpu.decode_columns.min(config.tile_columns);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{PlanError, PlanOptions, TensorRole, Training, plan};
    use moesaic_kernel::DType;
    use moesaic_spec::LayerSpec;

    const TARGETS: [&str; 5] = [
        "cpu:portable",
        "cpu:avx2",
        "cpu:avx512bf16",
        "cpu:amx",
        "sim:neon",
    ];

    fn spec(dtype: DType) -> LayerSpec {
        let text = r#"{"shape":{"model_dim":700,"hidden_dim":900,"experts":4,"top_k":2}}"#;
        let mut spec: LayerSpec = serde_json::from_str(text).unwrap();
        spec.precision.weights = dtype;
        spec.precision.activations = dtype;
        spec
    }

    fn plan_tuned(
        spec: &LayerSpec,
        target: Target,
        training: Option<Training>,
        tuning: &Tuning,
    ) -> Result<LayerPlan, PlanError> {
        let options = PlanOptions {
            training,
            tuning: tuning.clone(),
            ..PlanOptions::default()
        };
        plan(spec, target, &options)
    }

    fn gemm(plan: &LayerPlan, name: &str) -> GroupedGemmConfig {
        let kernel = plan.kernels.iter().find(|kernel| kernel.name == name);
        kernel.and_then(|kernel| kernel.op.gemm()).unwrap().clone()
    }

    /// Every plan of a CPU with every candidate by itself.
    fn each(check: impl Fn(&LayerPlan, &LayerPlan, &KnobCandidates, usize)) {
        for target in TARGETS {
            let target: Target = target.parse().unwrap();
            for training in [None, Some(Training::default())] {
                for dtype in [DType::F32, DType::Bf16] {
                    let spec = spec(dtype);
                    let plain = plan(&spec, target, &PlanOptions::training(training)).unwrap();
                    for choice in Tuning::choices(&plain) {
                        for &size in &choice.others {
                            let tuning = Tuning::default().with(choice.knob, size);
                            assert!(tuning.fits(&plain));
                            let tuned = plan_tuned(&spec, target, training, &tuning).unwrap();
                            check(&plain, &tuned, &choice, size);
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn a_size_changes_tiles_and_nothing_else() {
        each(|plain, tuned, choice, size| {
            let what = format!("{:?} {size} on {}", choice.knob, plain.target);
            let mut changed = 0;
            for (a, b) in plain.kernels.iter().zip(&tuned.kernels) {
                assert_eq!(a.stem(), b.stem(), "{what}");
                changed += usize::from(a.op != b.op);
                let params = |kernel: &crate::KernelPlan| {
                    let entries = kernel.entries.iter();
                    entries
                        .map(|e| (e.symbol.clone(), e.params.clone()))
                        .collect::<Vec<_>>()
                };
                assert_eq!(params(a), params(b), "{what}");
            }
            assert!(changed > 0, "{what}");
            assert_eq!(plain.steps, tuned.steps, "{what}");
            assert_eq!(plain.backward, tuned.backward, "{what}");
            let kept = |plan: &LayerPlan| {
                let mut tensors = plan.tensors.clone();
                tensors.retain(|t| t.role != TensorRole::Scratch);
                tensors
            };
            assert_eq!(kept(plain), kept(tuned), "{what}");
        });
    }

    #[test]
    fn all_that_walk_the_row_tiles_agree() {
        each(|_, tuned, choice, size| {
            if choice.knob != Knob::TileRows {
                return;
            }
            for kernel in &tuned.kernels {
                let rows = match &kernel.op {
                    Op::GroupedGemm { config, .. } | Op::GroupedGemmDgrad { config, .. } => {
                        config.tile_rows
                    }
                    Op::ExpertScan { config, .. } => config.tile_rows,
                    _ => size,
                };
                assert_eq!(rows, size, "{}", kernel.name);
            }
        });
    }

    #[test]
    fn no_size_cuts_a_sum() {
        each(|plain, tuned, choice, _| {
            for (a, b) in plain.kernels.iter().zip(&tuned.kernels) {
                if let (Some(a), Some(b)) = (a.op.gemm(), b.op.gemm()) {
                    let sums =
                        |c: &GroupedGemmConfig| (c.tile_depth, c.thread_columns, c.family.name());
                    assert_eq!(sums(a), sums(b), "{:?}", choice.knob);
                }
            }
            if plain.training.is_some() {
                let down = "grouped_gemm_dgrad_down";
                let columns = |plan| gemm(plan, down).tile_columns;
                assert_eq!(columns(plain), columns(tuned), "{:?}", choice.knob);
            }
        });
    }

    #[test]
    fn memory_of_a_thread_grows_with_its_tiles() {
        let amx = "cpu:amx".parse().unwrap();
        let plain = plan(&spec(DType::Bf16), amx, &PlanOptions::default()).unwrap();
        let choices = Tuning::choices(&plain);
        let rows = choices[0].others.iter().max().unwrap();
        let tuning = Tuning::default().with(Knob::TileRows, *rows);
        let tuned = plan_tuned(&plain.spec, amx, None, &tuning).unwrap();
        let [a, b] = [&plain, &tuned].map(|plan| gemm(plan, "grouped_gemm_up"));
        let more = (b.tile_rows - a.tile_rows) * a.tile_depth * 4;
        assert!(b.shared_bytes() as usize >= a.shared_bytes() as usize + more);
    }

    #[test]
    fn other_sizes_do_not_fit_and_gpus_have_none() {
        let spec = spec(DType::F32);
        let plain = plan(&spec, "cpu:avx2".parse().unwrap(), &PlanOptions::default()).unwrap();
        let tile_rows = |size| Tuning::default().with(Knob::TileRows, size);
        for size in [0, 1, 191, 384, usize::MAX] {
            assert!(!tile_rows(size).fits(&plain), "{size}");
        }
        assert!(!Tuning::default().with(Knob::WgradRows, 96).fits(&plain));
        let gpu: Target = "cuda:sm_80".parse().unwrap();
        let plan = plan(&spec, gpu, &PlanOptions::default()).unwrap();
        assert_eq!(Tuning::choices(&plan), []);
        assert_eq!(plan_tuned(&spec, gpu, None, &tile_rows(96)).unwrap(), plan);
    }

    #[test]
    fn names_read_back() {
        for knob in Knob::ALL {
            let tuning = Tuning::default().with(knob, 3);
            assert_eq!(Tuning::named(knob.name(), 3), Some(tuning.clone()));
            let text = serde_json::to_string(&tuning).unwrap();
            assert_eq!(text, format!("{{\"{}\":3}}", knob.name()));
        }
        assert_eq!(Tuning::named("elephants", 3), None);
    }
}
