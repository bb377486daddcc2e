//! `wire`: rows as they are between nodes, and back.

use super::copies::{COPY_THREADS, row_tiling};
use super::params::{entry, one, slots_by, some, when};
use super::{Machine, Op, Operator};
use crate::mesh::CommDtype;
use moesaic_kernel::DType::{self, F32, I32, I64};
use moesaic_kernel::{Access, Entry, Param};
use serde::{Deserialize, Serialize};

/// Values that have one scale in FP8: what a team of threads takes at a time.
const SPAN: usize = 128;

/// `wire`: rows `[R, width]` of a tensor, those that a list names, to a row each of bytes,
/// and back. See [`WireDesc::row_bytes`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WireDesc {
    /// What rows are between nodes; not [`CommDtype::Unchanged`].
    pub wire: CommDtype,
    /// Values of a row.
    pub width: usize,
    /// Element type of the rows.
    pub rows: DType,
}

/// Tiling of `wire`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WireConfig {
    /// Threads per block.
    pub threads: u32,
    /// Rows per block.
    pub tile_rows: usize,
    /// Adjacent threads that take 128 values of a row at a time.
    pub team: u32,
}

impl WireDesc {
    /// Bytes of a row between nodes, a multiple of 16.
    ///
    /// ```text
    /// f16, bf16   values [width], zeros
    /// fp8         codes u8 [width], zeros to a multiple of 4,
    ///             scales f32 [ceil(width / 128)], zeros
    /// ```
    pub fn row_bytes(&self) -> usize {
        let used = match self.wire {
            CommDtype::Unchanged => self.width * self.rows.size(),
            CommDtype::F16 | CommDtype::Bf16 => 2 * self.width,
            CommDtype::Fp8 => {
                let scales = self.width.div_ceil(SPAN) * F32.size();
                self.width.next_multiple_of(F32.size()) + scales
            }
        };
        used.next_multiple_of(16)
    }

    /// Whether values that are too large are counted.
    pub fn counts(&self) -> bool {
        self.wire == CommDtype::F16
    }
}

impl Operator for WireDesc {
    type Config = WireConfig;

    fn tiling(&self, machine: Machine) -> WireConfig {
        match machine {
            Machine::Cpu(_) => on_cpu(),
            Machine::Gpu(gpu) => on_gpu(self, gpu.wave()),
        }
    }

    fn with(self, config: WireConfig) -> Op {
        Op::Wire { desc: self, config }
    }

    fn entries(&self, config: &WireConfig) -> Vec<Entry> {
        entries(self, config)
    }
}

fn on_cpu() -> WireConfig {
    WireConfig {
        threads: 1,
        tile_rows: 64,
        team: 1,
    }
}

/// A thread has as many values as one access takes, and at least four: codes of FP8 are
/// written a word at a time, whatever the width.
fn on_gpu(d: &WireDesc, wave: u32) -> WireConfig {
    let (tile_rows, _) = row_tiling(d.width, d.rows, wave);
    let widest = 16 / d.rows.size();
    let pack = (1 << d.width.trailing_zeros()).min(widest);
    WireConfig {
        threads: COPY_THREADS,
        tile_rows,
        team: (SPAN / pack.max(4)) as u32,
    }
}

fn entries(d: &WireDesc, c: &WireConfig) -> Vec<Entry> {
    let (rows, words) = (format!("[rows, {}]", d.width), d.row_bytes() / I32.size());
    let wire = format!("[tokens, {words}]");
    let blocks = format!("[ceil(tokens / {})]", c.tile_rows);
    let grid = || [slots_by(1, c.tile_rows as u64), one()];
    let places = || Param::read("places", I32, "[tokens]");
    let pack = some([
        Some(Param::read("rows", d.rows, &rows)),
        Some(places()),
        Some(Param::write("wire", I32, &wire)),
        when(d.counts(), Param::write("counts", I32, &blocks)),
    ]);
    let count = vec![
        Param::read("counts", I32, &blocks),
        Param::tensor("saturated", I64, Access::ReadWrite, "[1]"),
    ];
    let unpack = vec![
        Param::read("wire", I32, &wire),
        places(),
        Param::write("rows", d.rows, &rows),
    ];
    let summary = "rounds rows for the way between nodes";
    let mut list = vec![entry("wire_pack", summary, pack, grid(), c.threads)];
    if d.counts() {
        let summary = "adds up how many values were too large";
        list.push(entry(
            "wire_count",
            summary,
            count,
            [one(), one()],
            c.threads,
        ));
    }
    let summary = "makes rows of what came from another node";
    list.push(entry("wire_unpack", summary, unpack, grid(), c.threads));
    list
}
