//! The cost of launches: arithmetic by tiles, memory traffic, and the launch itself.

use crate::Machine;
use moesaic_kernel::Size;
use moesaic_plan::{GemmFamily, LayerPlan, Op, PlanPart, Step, Work};
use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

/// The seconds of a launch by what bounds it; one of `compute` and `memory` is zero.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    /// The seconds bound by arithmetic.
    pub compute: f64,
    /// The seconds bound by memory traffic.
    pub memory: f64,
    /// The fixed time of the launch.
    pub launch: f64,
}

impl Cost {
    /// Returns the total.
    pub fn seconds(&self) -> f64 {
        self.compute + self.memory + self.launch
    }

    /// Scales everything but the launch itself.
    pub(crate) fn times(self, by: f64) -> Cost {
        Cost {
            compute: self.compute * by,
            memory: self.memory * by,
            ..self
        }
    }
}

/// The launches of one pass of one part of the plan, as costs for any number of rows.
#[derive(Clone, Debug)]
pub(crate) struct Launches(Vec<Launch>);

/// One launch: its work at a small and at a large number of rows; costs are interpolated
/// linearly.
#[derive(Clone, Debug)]
struct Launch {
    name: String,
    grid: [Size; 2],
    few: (f64, Work),
    many: (f64, Work),
    gemm: Option<GemmTiling>,
}

/// The tiling of a GEMM.
#[derive(Clone, Debug)]
struct GemmTiling {
    tile_rows: f64,
    /// The granularity of an expert's last rows: a whole tile on a GPU, the rows of one
    /// micro-kernel on a CPU.
    least_rows: f64,
    /// Whether rows are the reduced dimension instead of the result's.
    sums_rows: bool,
    /// Whether rows are grouped by expert.
    by_expert: bool,
    /// The FLOP/s of one multiprocessor.
    rate: f64,
}

/// The rows of a launch, and its multiprocessors.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LaunchRows<'a> {
    pub all: f64,
    /// By expert; empty where rows are not grouped.
    pub by_expert: &'a [f64],
    pub multiprocessors: f64,
}

impl Launches {
    /// Measures the steps at `few` and at `many` rows.
    pub fn new(plan: &LayerPlan, steps: &[Step], machine: &Machine, few: f64, many: f64) -> Self {
        // Whole rows, because sizes are evaluated for whole numbers, and two different ones,
        // because a line needs two points.
        let few = few.floor().max(1.0);
        let many = many.ceil().max(few + 1.0);
        let launches = steps.iter().map(|step| {
            let Step::Launch(launch) = step;
            let work = |rows: f64| (rows, Work::of(plan, step, rows as u64));
            Launch {
                name: plan.symbol(step).to_string(),
                grid: plan[launch.entry].launch.grid.clone(),
                few: work(few),
                many: work(many),
                gemm: gemm(plan, launch.entry.kernel, machine),
            }
        });
        Launches(launches.collect())
    }

    pub fn name(&self, at: usize) -> &str {
        &self.0[at].name
    }

    /// Returns the cost of a step.
    pub fn cost(&self, at: usize, machine: &Machine, rows: LaunchRows) -> Cost {
        let launch = &self.0[at];
        let asked = rows.all.ceil() as u64;
        let [x, y] = &launch.grid;
        let blocks = x.eval(asked).saturating_mul(y.eval(asked)) as f64;
        // A kernel without blocks is never launched, so it has no fixed time either.
        if blocks == 0.0 {
            return Cost::default();
        }
        let work = launch.work(rows.all);
        let memory = work.bytes / machine.memory_rate();
        let compute = match &launch.gemm {
            Some(gemm) => gemm.seconds(work.flops, blocks, asked, rows),
            None => work.flops / machine.gemm_rate(moesaic_kernel::DType::F32),
        };
        // Arithmetic and memory traffic overlap within a kernel, so the longer one is its time.
        let bounded = |own: f64, other: f64| if own >= other { own } else { 0.0 };
        Cost {
            compute: bounded(compute, memory),
            memory: if memory > compute { memory } else { 0.0 },
            launch: machine.launch(),
        }
    }
}

impl Launch {
    fn work(&self, rows: f64) -> Work {
        let ((few, low), (many, high)) = (self.few, self.many);
        // The kernel does nothing at `few` rows, so there is no line to draw: scale from zero.
        if low == Work::default() {
            let part = rows / many;
            return Work {
                flops: high.flops * part,
                bytes: high.bytes * part,
            };
        }
        let at = (rows - few) / (many - few);
        let between = |low: f64, high: f64| (low + (high - low) * at).max(0.0);
        if high == Work::default() {
            low
        } else {
            Work {
                flops: between(low.flops, high.flops),
                bytes: between(low.bytes, high.bytes),
            }
        }
    }
}

impl GemmTiling {
    /// Returns the seconds of the tiles in waves; the last rows of each expert are rounded up.
    fn seconds(&self, flops: f64, blocks: f64, asked: u64, rows: LaunchRows) -> f64 {
        // Rows are the depth of a weight gradient: they make its tiles deeper and never more of
        // them.
        let (flops, tiles) = if self.sums_rows {
            (flops, blocks)
        } else {
            let tile = |n: f64| (n / self.tile_rows).ceil();
            let least = |n: f64| (n / self.least_rows).ceil() * self.least_rows;
            let of = |rows_of: &dyn Fn(f64) -> f64| -> f64 {
                if self.by_expert && !rows.by_expert.is_empty() {
                    rows.by_expert.iter().map(|n| rows_of(*n)).sum()
                } else {
                    rows_of(rows.all)
                }
            };
            // Experts do not share tiles, so each expert's last tile is rounded up by itself.
            let (row_tiles, multiplied) = (of(&tile), of(&least));
            // The grid is the bound that the plan set, a partly filled tile for each expert
            // included, so dividing the blocks by that bound leaves the column tiles.
            let most = if self.by_expert {
                let experts = rows.by_expert.len().max(1) as u64;
                tile(asked as f64) + asked.min(experts) as f64
            } else {
                tile(asked as f64)
            };
            let columns = (blocks / most.max(1.0)).max(1.0);
            (flops * multiplied / rows.all.max(1e-9), row_tiles * columns)
        };
        // The last wave takes as long as a full one, however few tiles it has.
        let waves = (tiles / rows.multiprocessors).ceil();
        waves * flops / tiles.max(1.0) / self.rate
    }
}

fn gemm(plan: &LayerPlan, kernel: usize, machine: &Machine) -> Option<GemmTiling> {
    let op = &plan.kernels[kernel].op;
    let config = op.gemm()?;
    let (sums_rows, by_expert) = match op {
        Op::GroupedGemm { desc, .. } => (false, !desc.dense),
        Op::GroupedGemmWgrad { .. } => (true, true),
        _ => (
            false,
            plan.spec.shape.experts > 0 && plan.tensor("offsets").is_some(),
        ),
    };
    // Vector kernels stop at the last rows of an expert; tile-based ones multiply padding.
    let least_rows = match config.family {
        GemmFamily::Vectors(_) | GemmFamily::Tiles(_) => config.thread_rows,
        _ => config.tile_rows,
    };
    Some(GemmTiling {
        tile_rows: config.tile_rows as f64,
        least_rows: least_rows as f64,
        sums_rows,
        by_expert,
        // Of one multiprocessor, because an exchange in flight may occupy some of them.
        rate: machine.gemm_rate(plan.spec.precision.activations)
            / machine.compute.multiprocessors as f64,
    })
}

/// The launch costs of a plan's passes, each for a range of rows.
pub(crate) type Costs = RefCell<HashMap<(PlanPart, &'static str, [u64; 2]), Rc<Launches>>>;
