//! The entries of `grouped_gemm`, and what its backward GEMMs share with them.

use super::{ExpertGemm, FusedShared, GemmFamily, GroupedGemmConfig, GroupedGemmDesc};
use crate::ops::params::{entry, one, some, tokens_by, when};
use moesaic_kernel::DType::{self, F32, I32, I64};
use moesaic_kernel::{Access, Entry, Param, Size, Swizzle, TensorMap};

pub(super) fn entries(d: &GroupedGemmDesc, c: &GroupedGemmConfig) -> Vec<Entry> {
    let (symbol, input, output, matrix, summary) = match d.half {
        ExpertGemm::Up => (
            "grouped_gemm_up",
            "rows",
            "hidden",
            "up",
            "multiplies rows by the up half",
        ),
        ExpertGemm::Down => (
            "grouped_gemm_down",
            "hidden",
            "out",
            "down",
            "multiplies by the down half",
        ),
    };
    let e = d.experts;
    let count = if d.dense { "tokens" } else { "rows" };
    let matrix_shape = format!("[{e}, {}, {}]", d.outer, d.inner);
    let bias_shape = format!("[{e}, {}]", d.outer);
    let weight_tile = [c.tile_depth, c.tile_columns, 1];
    let weight = |name: &str| operand(c, name, d.weights, &matrix_shape, &weight_tile);
    let packed = Param::read("packed", packed_type(d), packed_shape(d));
    let bias = |name: &str| Param::read(&format!("{name}_bias"), d.weights, &bias_shape);
    let per_slot = format!("[tokens, {}]", d.top_k);
    let rows_shape = format!("[{count}, {}]", d.inner);
    let rows_tile = [c.tile_depth, c.tile_rows];
    let rows = operand(c, input, d.activations, &rows_shape, &rows_tile);
    let tokens = Param::read("x", d.activations, format!("[tokens, {}]", d.inner));
    let result = |name: &str| {
        let shape = format!("[{count}, {}]", d.outer);
        Param::write(name, d.activations, shape)
    };
    let mut params = some([
        Some(if c.gather() { tokens } else { rows }),
        when(d.gated && !c.packed(), weight("gate")),
        Some(if c.packed() { packed } else { weight(matrix) }),
        when(d.gated && d.bias, bias("gate")),
        when(d.bias, bias(matrix)),
        when(
            !d.dense,
            Param::read("offsets", I64, format!("[{}]", e + 1)),
        ),
        when(
            !d.dense,
            Param::read("row_tiles", I32, format!("[{}]", e + 1)),
        ),
        when(
            d.weighted || c.gather(),
            Param::read("row_slots", I32, "[rows]"),
        ),
        when(d.weighted, Param::read("topk_weights", F32, &per_slot)),
        when(d.keep && d.gated, result("gate_pre")),
        when(d.keep, result("up_pre")),
        Some(result(output)),
    ]);
    if let Some(shared) = d.fused_shared {
        params.extend(fused_shared_params(d, c, shared));
    }
    let mut grid = grid(d, c);
    if d.is_persistent(c) {
        let [tiles, one] = grid;
        grid = [tiles.min(PERSISTENT_BLOCKS), one];
    }
    let mut product = entry(symbol, summary, params, grid, c.threads);
    product.launch.shared_bytes = c.shared_bytes();
    // The GEMM is the last entry, whatever matrices are packed before it: `Builder::gemm` counts on
    // that.
    let mut entries = packs(d, c, symbol, matrix);
    entries.push(product);
    entries
}

/// Returns a grid with a block for each tile.
fn grid(d: &GroupedGemmDesc, c: &GroupedGemmConfig) -> [Size; 2] {
    let routed = tiles_of(d.dense, d.top_k, d.experts, c);
    let follow = Follow::forward(d, c);
    let Some(shared) = d.fused_shared else {
        return follow.grid(routed, column_tiles(d.outer, c));
    };
    let tokens = tokens_by(c.tile_rows);
    match follow {
        // Shared tiles come first, in rows of their own length.
        Follow::Groups => {
            let of_shared = tokens * column_tiles(shared.outer, c);
            [of_shared + routed * column_tiles(d.outer, c), one()]
        }
        _ => follow.grid(routed + tokens, column_tiles(d.outer.max(shared.outer), c)),
    }
}

/// Returns the parameters of a fused shared expert, whose rows are all tokens.
fn fused_shared_params(
    d: &GroupedGemmDesc,
    c: &GroupedGemmConfig,
    shared: FusedShared,
) -> Vec<Param> {
    let tokens = |width: usize| format!("[tokens, {width}]");
    let matrix = format!("[1, {}, {}]", shared.outer, shared.inner);
    let weight_tile = [c.tile_depth, c.tile_columns, 1];
    let weight = |name: &str| operand(c, name, d.weights, &matrix, &weight_tile);
    let bias = |name: &str| Param::read(name, d.weights, format!("[{}]", shared.outer));
    let (up, down) = (d.half == ExpertGemm::Up, d.half == ExpertGemm::Down);
    let matrix = d.half.name();
    let hidden_tile = [c.tile_depth, c.tile_rows];
    let hidden = operand(
        c,
        "shared_hidden",
        d.activations,
        &tokens(shared.inner),
        &hidden_tile,
    );
    let output = if up { "shared_hidden" } else { "shared_out" };
    some([
        when(down, hidden),
        when(d.gated, weight("shared_gate")),
        Some(weight(&format!("shared_{matrix}"))),
        when(d.gated && d.bias, bias("shared_gate_bias")),
        when(d.bias, bias(&format!("shared_{matrix}_bias"))),
        Some(Param::write(output, d.activations, tokens(shared.outer))),
    ])
}

/// The order of the blocks of a GEMM.
pub(super) enum Follow {
    /// Blocks with the same rows follow each other.
    Columns,
    /// Blocks with the same columns follow each other.
    Rows,
    /// Blocks of a few row tiles follow each other, those with the same columns first. The kernel's
    /// tile scheduler turns a tile's number into row and column.
    Groups,
}

impl GroupedGemmDesc {
    /// Returns whether blocks are persistent. An epilogue that keeps pre-activations, and stores
    /// single elements because rows are no whole packs, leaves no registers for the scheduler.
    pub fn is_persistent(&self, config: &GroupedGemmConfig) -> bool {
        let has_registers = !self.keep || self.outer.is_multiple_of(8);
        matches!(config.family, GemmFamily::Wgmma { .. }) && has_registers
    }
}

/// Returns whether tiles are ordered in groups: on tensor and matrix cores, where several tiles
/// read the same rows and the same columns.
fn in_groups(c: &GroupedGemmConfig) -> bool {
    use GemmFamily::{Mfma, Mma, Wgmma, Wmma};
    matches!(
        c.family,
        Mma { .. } | Wgmma { .. } | Mfma { .. } | Wmma { .. }
    )
}

/// The most blocks of a persistent GEMM: eight for each multiprocessor of an H100, of which one
/// runs there at a time. A block loads its next tile while it stores the one before, and the
/// hardware still balances blocks where there are fewer multiprocessors, or tiles of unequal
/// length.
const PERSISTENT_BLOCKS: u64 = 8 * 132;

impl Follow {
    /// Returns the order of a forward GEMM. Blocks with the same rows follow each other where they
    /// keep rows in scratch for the next block: those of AMX, and rows that become codes. Codes of
    /// one expert are also read as they lie, which memory delivers a few percent faster.
    fn forward(d: &GroupedGemmDesc, c: &GroupedGemmConfig) -> Follow {
        match c.family {
            GemmFamily::Tiles(_) => Follow::Columns,
            GemmFamily::Vectors(_) if d.format.is_some() => Follow::Columns,
            _ if in_groups(c) => Follow::Groups,
            _ => Follow::Rows,
        }
    }

    /// Returns the order of a dgrad. On a CPU blocks with the same rows follow each other, because
    /// the rows that one block read are in a cache for the next.
    pub(super) fn dgrad(c: &GroupedGemmConfig) -> Follow {
        match c.threads {
            1 => Follow::Columns,
            _ if in_groups(c) => Follow::Groups,
            _ => Follow::Rows,
        }
    }

    /// Returns the order of a wgrad, whose rows are those of a matrix: as for dgrad, unless AMX
    /// tiles keep a slice of the left operand in scratch.
    pub(super) fn wgrad(c: &GroupedGemmConfig) -> Follow {
        match c.family {
            GemmFamily::Tiles(_) => Follow::Rows,
            _ if c.threads == 1 => Follow::Columns,
            _ if in_groups(c) => Follow::Groups,
            _ => Follow::Rows,
        }
    }

    pub(super) fn grid(self, row_tiles: Size, column_tiles: Size) -> [Size; 2] {
        match self {
            Follow::Columns => [column_tiles, row_tiles],
            Follow::Rows => [row_tiles, column_tiles],
            Follow::Groups => [row_tiles * column_tiles, one()],
        }
    }
}

/// Returns the number of column tiles of a width; decode calls on CPUs have narrower ones.
fn column_tiles(outer: usize, c: &GroupedGemmConfig) -> Size {
    let of = |columns: usize| Size::Const(outer.div_ceil(columns) as u64);
    match c.family.cpu() {
        Some(cpu) if cpu.decode_tokens > 0 => {
            let decode = of(cpu.decode_columns);
            Size::up_to(cpu.decode_tokens as u64, decode, of(c.tile_columns))
        }
        _ => of(c.tile_columns),
    }
}

/// Returns the entries that pack each matrix. Their blocks have the order of the GEMM, so that a
/// thread packs what it will read.
fn packs(d: &GroupedGemmDesc, c: &GroupedGemmConfig, symbol: &str, matrix: &str) -> Vec<Entry> {
    let shape = d.packed_shape(c);
    let one_of = |(matrix, dtype, [rows, columns]): (String, DType, [usize; 2])| {
        let from = format!("[{}, {rows}, {columns}]", d.experts);
        let params = vec![
            Param::read(&matrix, dtype, from),
            Param::write("packed", packed_type(d), packed_shape(d)),
        ];
        let [experts, panels] = [shape[0], shape[1]].map(|n| Size::Const(n as u64));
        let grid = Follow::forward(d, c).grid(experts, panels);
        let symbol = format!("{symbol}_pack_{matrix}");
        let summary = "lays a matrix out as the GEMM reads it";
        entry(&symbol, summary, params, grid, c.threads)
    };
    let gate = d.gated.then_some("gate");
    let matrices = gate.into_iter().chain([matrix]);
    let parts = matrices
        .filter(|_| c.packed())
        .flat_map(|matrix| parts(d, matrix));
    parts.map(one_of).collect()
}

/// Returns the tensors that hold a matrix: its name, type and size.
fn parts(d: &GroupedGemmDesc, matrix: &str) -> Vec<(String, DType, [usize; 2])> {
    let size = [d.outer, d.inner];
    let Some(format) = d.format else {
        return vec![(matrix.to_string(), d.weights, size)];
    };
    let parts = format.tensors(size).into_iter();
    let parts = parts.map(|part| {
        let name = match part.end {
            "weight" => matrix.to_string(),
            end => format!("{matrix}_{end}"),
        };
        (name, part.dtype, part.shape)
    });
    parts.collect()
}

/// Returns the type of packed weights: records of codes and scales are words.
fn packed_type(d: &GroupedGemmDesc) -> DType {
    d.format.map_or(d.weights, |_| I32)
}

/// Returns the dimension of the grids of [`packs`] that counts experts.
pub(crate) fn expert_axis(d: &GroupedGemmDesc, c: &GroupedGemmConfig) -> usize {
    match Follow::forward(d, c) {
        Follow::Columns => 1,
        Follow::Rows | Follow::Groups => 0,
    }
}

/// Returns the shape of packed weights as people read it, one text for every CPU although panels
/// differ.
fn packed_shape(d: &GroupedGemmDesc) -> String {
    format!("[{}, panels, depth, columns]", d.experts)
}

/// Returns an operand: a pointer, or a tensor map, by which TMA cuts the tensor into boxes of these
/// sizes, innermost first. Each row of a box is one line of the 128-byte swizzle.
pub(super) fn operand(
    c: &GroupedGemmConfig,
    name: &str,
    dtype: DType,
    shape: &str,
    tile: &[usize],
) -> Param {
    if !matches!(c.family, GemmFamily::Wgmma { .. }) {
        return Param::read(name, dtype, shape);
    }
    let mut sizes = [1; 5];
    for (to, &size) in sizes.iter_mut().zip(tile) {
        *to = size as u32;
    }
    let map = TensorMap {
        dtype,
        access: Access::Read,
        rank: tile.len() as u8,
        tile: sizes,
        swizzle: Swizzle::B128,
    };
    Param::map(&format!("{name}_map"), map, shape)
}

/// Returns an upper bound on the row tiles of all experts. Counts stay on the device, so blocks
/// beyond the real number find no work and return.
pub(super) fn tiles_of(dense: bool, top_k: usize, experts: usize, c: &GroupedGemmConfig) -> Size {
    if dense {
        return tokens_by(c.tile_rows);
    }
    // Every expert with rows may leave its last tile partly filled, which makes one tile more for
    // each of them.
    let rows = Size::Tokens * top_k as u64;
    rows.clone().ceil_div(c.tile_rows as u64) + rows.min(experts as u64)
}

/// 16-bit elements of a line of the 128-byte swizzle: the width of a box whose lines are steps of
/// the contraction.
pub(super) const PANEL: usize = 64;
