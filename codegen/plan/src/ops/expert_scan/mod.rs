//! `expert_scan`: from ids to counts, capacity, locations and maps.

mod entries;
mod steps;

pub(crate) use steps::scan_tensors;

use super::gate_topk::{histogram, tile_tokens};
use super::{Histogram, Op, Operator, TileMachine};
use moesaic_kernel::Entry;
use moesaic_spec::{Capacity, CapacityMode, CapacityOrder, Chooser, LayerSpec};
use serde::{Deserialize, Serialize};

/// `expert_scan`: ids `[T, K]` to counts, offsets, locations and maps.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ExpertScanDesc {
    /// Experts with rows.
    pub experts: usize,
    /// Experts that are counted, identity experts included.
    pub routed_experts: usize,
    /// K.
    pub top_k: usize,
    /// The capacity rule.
    pub capacity: Capacity,
    /// The router's scale, which renormalisation after dropping restores.
    pub scale: f64,
    /// Ids come from the caller, not from a gate of the layer.
    pub external: bool,
    /// Renormalising keeps the sums that it divided by, for backward.
    pub keep_sums: bool,
    /// The random order is another in each call, as in training.
    pub drawn: bool,
}

/// Tiling of `expert_scan`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExpertScanConfig {
    /// Threads per block of the count and place kernels.
    pub threads: u32,
    /// Threads of a block that sums over all tiles.
    pub scan_threads: u32,
    /// The assignments that are counted and placed together.
    pub tile: ScanTile,
    /// Tiles per block of the count and place kernels.
    pub block_tiles: usize,
    /// The kernel that counts them.
    pub counted_by: CountedBy,
    /// Experts whose counts a block sums over all tiles, before every block that
    /// places sums over the experts for itself; `None` where one block does both.
    pub sum_experts: Option<usize>,
    /// Items of a run that a block sorts before ranks are searched for in the
    /// runs: a power of two. `None` where a block sorts a whole list.
    pub sort_run: Option<usize>,
    /// Rows per tile of the grouped GEMM, whose tile list the scan writes.
    pub tile_rows: usize,
}

/// The assignments that a row of `tile_counts` counts and that are placed
/// together. Tiles follow each other in processing order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ScanTile {
    /// A fixed number of assignments.
    Assignments(usize),
    /// The assignments of so many tokens: all of them in token-major order, otherwise those in one
    /// slot.
    Tokens(usize),
}

/// The kernel that counts the assignments of each tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CountedBy {
    /// The scan, in a pass over the ids.
    Scan,
    /// The selection kernel, as it writes them.
    Gate,
}

/// Returns the scan of the routed experts.
fn expert_scan(spec: &LayerSpec, training: bool) -> ExpertScanDesc {
    ExpertScanDesc {
        experts: spec.shape.experts,
        routed_experts: spec.routed_experts(),
        top_k: spec.shape.top_k,
        capacity: Capacity {
            // An argument of each call: see `row_limit`.
            factor: 1.0,
            eval_factor: None,
            ..spec.capacity.clone()
        },
        scale: spec.router.scale,
        external: spec.router.kind.chooser() == Chooser::Caller,
        keep_sums: training && spec.capacity.renormalize_after_drop,
        drawn: training && spec.capacity.order == CapacityOrder::Random,
    }
}

impl Operator for ExpertScanDesc {
    type Config = ExpertScanConfig;

    fn tiling(&self, machine: TileMachine) -> ExpertScanConfig {
        match machine {
            TileMachine::Cpu(_) => on_cpu(),
            TileMachine::Gpu(gpu) => on_gpu(self, gpu.wave()),
        }
    }

    fn with(self, config: ExpertScanConfig) -> Op {
        Op::ExpertScan { desc: self, config }
    }

    fn entries(&self, config: &ExpertScanConfig) -> Vec<Entry> {
        entries::entries(self, config)
    }
}

/// Rows of a row tile of the GEMMs, until a plan sets its own.
const TILE_ROWS: usize = 64;

/// Counts of choices that a block of the scan keeps: 47 KB.
const SCAN_COUNTERS: usize = 12032;

/// Experts of a block that sums: 32 bytes of a row of counts.
const SUM_EXPERTS: usize = 8;

fn on_cpu() -> ExpertScanConfig {
    // No runs to sort: a thread sorts a list byte by byte, in time that grows with its length
    // alone, while searches in runs grow with its square.
    ExpertScanConfig {
        threads: 1,
        scan_threads: 1,
        tile: ScanTile::Assignments(4096),
        block_tiles: 1,
        counted_by: CountedBy::Scan,
        sum_experts: None,
        sort_run: None,
        tile_rows: TILE_ROWS,
    }
}

fn on_gpu(d: &ExpertScanDesc, wave: u32) -> ExpertScanConfig {
    // In shared memory a warp has a counter for every expert, and a block where each begins.
    let lists = SCAN_COUNTERS / d.routed_experts;
    let warps = (1 << (lists - 1).ilog2()).min(256 / wave as usize);
    let threads = warps as u32 * wave;
    let order = d.capacity.order;
    // The selection kernel has every choice in registers, so its counts save a pass over the ids.
    let gate = !d.external && histogram(order, d.routed_experts, d.top_k) != Histogram::None;
    // A thread that sums holds 16 tiles of an expert, so 128 threads for each of eight experts take
    // 2048 tiles a round. An item of a sorted run has up to 16 bytes, so a run fills 16 KB of
    // shared memory.
    ExpertScanConfig {
        threads,
        scan_threads: 1024,
        tile: ScanTile::Tokens(tile_tokens(order, d.top_k)),
        block_tiles: warps,
        counted_by: if gate {
            CountedBy::Gate
        } else {
            CountedBy::Scan
        },
        sum_experts: Some(SUM_EXPERTS),
        sort_run: Some(1024),
        tile_rows: TILE_ROWS,
    }
}

/// Returns the scalar `row_limit` of `expert_scan`, for a factor by Tutel's formula. A value of
/// zero or more is the rows of an expert, `K·int(f·ceil(T/E))`. Below zero `!limit` is the most,
/// and an expert has the largest count if that is less. The device applies `align` to both.
pub fn row_limit(spec: &LayerSpec, factor: f64, tokens: u64) -> i64 {
    let share = tokens.div_ceil(spec.shape.experts as u64) as f64;
    // The cast cuts off the fraction, as `int` does in Tutel's formula.
    let rows = (spec.shape.top_k as i64).saturating_mul((factor.abs() * share) as i64);
    match factor {
        // `!i64::MIN` is the largest number: no limit but the largest count, as a factor of 0 has
        // it in Tutel.
        0.0 => i64::MIN,
        f if f < 0.0 => !rows,
        _ => rows,
    }
}

/// Returns the most rows that an expert takes from one rank with so many tokens, for a factor;
/// `None` if it takes all.
pub fn most_rows(spec: &LayerSpec, factor: f64, tokens: u64) -> Option<u64> {
    let capacity = &spec.capacity;
    let rows = match capacity.mode {
        CapacityMode::Dropless | CapacityMode::MaxCount => return None,
        CapacityMode::Fixed => capacity.rows.unwrap_or(0) as u64,
        CapacityMode::Factor | CapacityMode::Bounded => match row_limit(spec, factor, tokens) {
            i64::MIN => return None,
            limit if limit < 0 => !limit as u64,
            limit => limit as u64,
        },
    };
    // The device rounds up likewise, and the host must not expect fewer rows than that keeps.
    Some(rows.next_multiple_of(capacity.align.max(1) as u64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_an_expert_end_where_its_capacity_does() {
        let of = |capacity: &str| {
            let text = format!(
                "shape = {{ model_dim = 8, hidden_dim = 8, experts = 8, top_k = 2 }}
                 capacity = {capacity}"
            );
            let spec = LayerSpec::from_toml(&text).unwrap();
            most_rows(&spec, spec.capacity.factor, 100)
        };
        assert_eq!(of("{ mode = 'dropless' }"), None);
        assert_eq!(of("{ mode = 'factor', factor = 0.0 }"), None);
        assert_eq!(of("{ mode = 'factor', factor = 1.25 }"), Some(32));
        assert_eq!(
            of("{ mode = 'factor', factor = -1.25, align = 5 }"),
            Some(35)
        );
        assert_eq!(of("{ mode = 'fixed', rows = 7 }"), Some(7));
    }

    #[test]
    fn limits_are_tutels() {
        let text = r#"{"shape":{"model_dim":8,"hidden_dim":8,"experts":8,"top_k":2}}"#;
        let spec: LayerSpec = serde_json::from_str(text).unwrap();
        let limit = |factor| row_limit(&spec, factor, 100);
        assert_eq!([1.0, 1.25, 0.3].map(limit), [26, 32, 6]);
        assert_eq!([-1.0, -1.25].map(limit), [!26, !32]);
        assert_eq!([0.0, -0.0].map(limit), [i64::MIN; 2]);
        assert_eq!(!limit(0.0), i64::MAX);
        assert_eq!(row_limit(&spec, 1.0, 0), 0);
        // A call with as many tokens is refused later, by its input.
        assert_eq!(row_limit(&spec, 8.0, u64::MAX), i64::MAX);
    }
}
