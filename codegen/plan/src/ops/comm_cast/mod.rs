//! `comm_cast`: the kernels that convert rows to and from the communication dtype.

use super::copies::{COPY_THREADS, row_tiling};
use super::params::{entry, one, slots_by, some, when};
use super::{Op, Operator, TileMachine};
use moesaic_dist::CommDtype;
use moesaic_kernel::DType::{self, F32, I32, I64};
use moesaic_kernel::{Access, Entry, Param};
use serde::{Deserialize, Serialize};

/// Values that a team of threads converts together where no scale says otherwise.
const SPAN: usize = 128;

/// `comm_cast`: converts the rows of a tensor `[R, width]` that a list names to packed rows in
/// the communication dtype, and back. [`CommCastDesc::row_bytes`] has the layout of a packed row.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CommCastDesc {
    /// What rows are between nodes; not [`CommDtype::Unchanged`].
    pub comm_dtype: CommDtype,
    /// Values of a row.
    pub width: usize,
    /// Element type of the rows.
    pub rows: DType,
}

/// The tiling of `comm_cast`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CommCastConfig {
    /// Threads per block.
    pub threads: u32,
    /// Rows per block.
    pub tile_rows: usize,
    /// Adjacent threads that convert a span of a row together.
    pub team: u32,
}

impl CommCastDesc {
    /// Returns the bytes of a packed row, a multiple of 16. The values come first, with zeros to a
    /// multiple of 4 bytes, then the scales, and zeros at the end.
    pub fn row_bytes(&self) -> usize {
        let row = self.comm_dtype.row();
        let values = row.values(self.width, self.rows.size());
        let used = values.next_multiple_of(F32.size()) + row.scale_bytes(self.width);
        // Rows lie one behind another, and each must begin where the widest access of a GPU may.
        used.next_multiple_of(16)
    }

    /// Returns the values that share a scale; a team of threads converts them together.
    fn span(&self) -> usize {
        self.comm_dtype
            .row()
            .scales
            .map_or(SPAN, |scales| scales.span)
    }

    /// Returns whether the kernels count values beyond the range of the dtype.
    pub fn counts(&self) -> bool {
        self.comm_dtype.row().saturates
    }
}

impl Operator for CommCastDesc {
    type Config = CommCastConfig;

    fn tiling(&self, machine: TileMachine) -> CommCastConfig {
        match machine {
            TileMachine::Cpu(_) => on_cpu(),
            TileMachine::Gpu(gpu) => on_gpu(self, gpu.wave()),
        }
    }

    fn with(self, config: CommCastConfig) -> Op {
        Op::CommCast { desc: self, config }
    }

    fn entries(&self, config: &CommCastConfig) -> Vec<Entry> {
        entries(self, config)
    }
}

fn on_cpu() -> CommCastConfig {
    CommCastConfig {
        threads: 1,
        tile_rows: 64,
        team: 1,
    }
}

/// Returns the tiling for a GPU. A thread converts as many values as one memory access moves, and
/// at least four, because FP8 codes are stored a 4-byte word at a time whatever the width.
fn on_gpu(d: &CommCastDesc, wave: u32) -> CommCastConfig {
    let widest = 16 / d.rows.size();
    let pack = (1 << d.width.trailing_zeros()).min(widest);
    CommCastConfig {
        threads: COPY_THREADS,
        tile_rows: row_tiling(d.width, d.rows, wave).rows,
        team: (d.span() / pack.max(4)) as u32,
    }
}

fn entries(d: &CommCastDesc, c: &CommCastConfig) -> Vec<Entry> {
    let (rows, words) = (format!("[rows, {}]", d.width), d.row_bytes() / I32.size());
    let packed = format!("[tokens, {words}]");
    let blocks = format!("[ceil(tokens / {})]", c.tile_rows);
    let grid = || [slots_by(1, c.tile_rows as u64), one()];
    let places = || Param::read("places", I32, "[tokens]");
    let pack = some([
        Some(Param::read("rows", d.rows, &rows)),
        Some(places()),
        Some(Param::write("packed", I32, &packed)),
        when(d.counts(), Param::write("counts", I32, &blocks)),
    ]);
    let count = vec![
        Param::read("counts", I32, &blocks),
        Param::tensor("saturated", I64, Access::ReadWrite, "[1]"),
    ];
    let unpack = vec![
        Param::read("packed", I32, &packed),
        places(),
        Param::write("rows", d.rows, &rows),
    ];
    let summary = "converts rows to the communication dtype";
    let mut list = vec![entry("comm_cast_pack", summary, pack, grid(), c.threads)];
    if d.counts() {
        // One block adds the counts of all blocks in a launch behind them, so no kernel needs
        // atomics.
        let summary = "adds up the counts of saturated values";
        list.push(entry(
            "comm_cast_count",
            summary,
            count,
            [one(), one()],
            c.threads,
        ));
    }
    let summary = "converts packed rows back to the dtype of the layer";
    list.push(entry(
        "comm_cast_unpack",
        summary,
        unpack,
        grid(),
        c.threads,
    ));
    list
}
