//! `dispatch`: token rows to expert rows.

mod bwd;

pub use bwd::{DispatchBwdConfig, DispatchBwdDesc};

use super::Calls;
use super::copies::{COPY_THREADS, row_tiling};
use super::params::{entry, one, slots_by, some, when};
use super::{Op, Operator, TileMachine};
use crate::KernelPlan;
use crate::layer::{Builder, Part};
use moesaic_kernel::DType::{self, F32, I32, I64};
use moesaic_kernel::{Entry, Param};
use moesaic_spec::{LayerSpec, WeightSite};
use serde::{Deserialize, Serialize};

/// `dispatch`: x `[T, d]` to rows `[R, d]`, ordered by expert.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DispatchDesc {
    /// d.
    pub model_dim: usize,
    /// Experts with rows.
    pub experts: usize,
    /// K.
    pub top_k: usize,
    /// Element type of x and of the rows.
    pub activations: DType,
    /// Whether rows are multiplied by their weight.
    pub weighted: bool,
    /// Whether the weight of each row is written too, for an expert on another
    /// rank.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub row_weights: bool,
}

/// Tiling of `dispatch`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DispatchConfig {
    /// Threads per block.
    pub threads: u32,
    /// Rows per block.
    pub tile_rows: usize,
    /// Adjacent threads that copy one row.
    pub row_threads: u32,
}

fn desc(spec: &LayerSpec) -> DispatchDesc {
    DispatchDesc {
        model_dim: spec.expert_input_dim(),
        experts: spec.shape.experts,
        top_k: spec.shape.top_k,
        activations: spec.precision.activations,
        weighted: spec.router.weight_on == WeightSite::Input,
        row_weights: false,
    }
}

/// Returns whether the GEMMs of experts read the weights of their rows: where the weights act
/// inside, and where training sums their gradients.
pub(crate) fn rows_have_weights(spec: &LayerSpec, trains: bool) -> bool {
    match spec.router.weight_on {
        WeightSite::Activation => true,
        WeightSite::Output => trains && spec.weighs_gemms(),
        WeightSite::Input => false,
    }
}

impl Operator for DispatchDesc {
    type Config = DispatchConfig;

    fn tiling(&self, machine: TileMachine) -> DispatchConfig {
        match machine {
            TileMachine::Cpu(_) => on_cpu(),
            TileMachine::Gpu(gpu) => on_gpu(self, gpu.wave()),
        }
    }

    fn with(self, config: DispatchConfig) -> Op {
        Op::Dispatch { desc: self, config }
    }

    fn entries(&self, config: &DispatchConfig) -> Vec<Entry> {
        entries(self, config)
    }
}

fn on_cpu() -> DispatchConfig {
    DispatchConfig {
        threads: 1,
        tile_rows: 64,
        row_threads: 1,
    }
}

fn on_gpu(d: &DispatchDesc, wave: u32) -> DispatchConfig {
    let tiling = row_tiling(d.model_dim, d.activations, wave);
    DispatchConfig {
        threads: COPY_THREADS,
        tile_rows: tiling.rows,
        row_threads: tiling.row_threads,
    }
}

fn entries(d: &DispatchDesc, c: &DispatchConfig) -> Vec<Entry> {
    let (k, model) = (d.top_k, d.model_dim);
    let params = some([
        Some(Param::read(
            "x",
            d.activations,
            format!("[tokens, {model}]"),
        )),
        Some(Param::read("row_slots", I32, "[rows]")),
        Some(Param::read("offsets", I64, format!("[{}]", d.experts + 1))),
        when(
            d.weighted || d.row_weights,
            Param::read("topk_weights", F32, format!("[tokens, {k}]")),
        ),
        when(d.row_weights, Param::write("row_weights", F32, "[rows]")),
        Some(Param::write(
            "rows",
            d.activations,
            format!("[rows, {model}]"),
        )),
    ]);
    let grid = [slots_by(k, c.tile_rows as u64), one()];
    vec![entry(
        "dispatch",
        "copies token rows into expert order",
        params,
        grid,
        c.threads,
    )]
}

impl Builder {
    /// Copies the rows that the routed experts read in these calls.
    pub(crate) fn dispatch(&mut self, calls: Calls) {
        let elsewhere = matches!(self.part, Part::Tokens { .. });
        let desc = DispatchDesc {
            // On one rank the GEMMs look weights up by slot; another rank does not have the slots.
            row_weights: elsewhere && rows_have_weights(&self.plan.spec, self.trains()),
            ..desc(&self.plan.spec)
        };
        let op = self.tiled(desc);
        let kernel = self.kernel_for("dispatch", op, calls);
        self.launch_all(kernel, &self.around());
    }

    /// Adds a second dispatch, for a backward pass whose forward pass gathered rows and kept none.
    pub(crate) fn dispatch_again(&mut self) {
        let is_dispatch = |kernel: &KernelPlan| matches!(kernel.op, Op::Dispatch { .. });
        // A kernel of the forward pass serves again: its text is the same, so it is compiled once.
        match self.plan.kernels.iter().position(is_dispatch) {
            Some(kernel) => self.step(kernel, 0, &self.around()),
            None => self.dispatch(Calls::All),
        }
    }
}
