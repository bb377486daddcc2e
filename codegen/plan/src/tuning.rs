//! The tile sizes that `moesaic tune` may set.
//!
//! They cut work into blocks and never cut a sum, so a tuned layer gives the same bytes. CPUs have
//! choices, GPUs have none so far. Only GEMMs have any: no size of another kernel's blocks made a
//! layer faster by more than 0.1 % (benches/results).

mod choices;

pub use choices::KnobCandidates;

use crate::{ExpertGemm, GroupedGemmConfig, Op};
use moesaic_kernel::Stem;
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
mod tests;
