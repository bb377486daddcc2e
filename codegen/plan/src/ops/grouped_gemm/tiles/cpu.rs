//! Tilings of CPU GEMMs.

use crate::ops::Core;
use crate::ops::grouped_gemm::*;
use moesaic_kernel::{CpuIsa, DType};

/// Rows of a block. So many rows seldom repack weights or read them again from memory, and with the
/// packed weights their sums fill a part of a second-level cache.
const TILE_ROWS: usize = 384;

/// [`TILE_ROWS`] for AMX tiles, which also have the rows in scratch, in a second-level cache of
/// [`AMX_L2_BYTES`].
const AMX_TILE_ROWS: usize = 320;
const AMX_L2_BYTES: usize = 2 << 20;

/// Columns of a forward block, of gate and up together, and words of its depth. Wide blocks seldom
/// copy their rows again; deep blocks keep few sums.
const FORWARD_COLUMNS: usize = 512;
const FORWARD_DEPTH: usize = 512;

/// Columns of a block in decode calls, of gate and up together, which have narrower blocks while
/// there would be fewer blocks than this: one for each thread, and some for balance, on the CPUs
/// with most cores. A block reads its weights once, whatever its width.
const DECODE_COLUMNS: usize = 128;
const ENOUGH_BLOCKS: usize = 256;

/// The largest decode call. With more tokens, copying the rows for each narrow block costs time.
const MAX_DECODE_TOKENS: usize = 16;

/// Columns that dgrad and wgrad pack together.
const BLOCK_COLUMNS: usize = 256;

/// A multiple of every NR; columns of a backward block are a multiple of it.
const COLUMN_STEP: usize = 64;

/// Words of depth of a panel: the first that fits. With the sums of a block, twice the panels of
/// all columns are 896 or 576 KiB. A cache that is nearly full depends on where pages lie: 192
/// words, 768 of 1024 KiB, were at best as fast as 96.
const DEPTHS: [usize; 2] = [256, 96];

/// Words of depth that an AMX block has in scratch: with the rows of a tile about half of a
/// second-level cache of 2 MiB.
const AMX_DEPTH: usize = 1024;

impl Core {
    /// Returns [`FORWARD_DEPTH`] or [`FORWARD_COLUMNS`], or less, so that the rows of a block stay
    /// in cache, or as many of its sums: three quarters of a second-level cache.
    fn forward(self, most: usize) -> usize {
        most.min(self.caches.l2_bytes() * 3 / 4 / (4 * TILE_ROWS))
    }

    /// Returns [`BLOCK_COLUMNS`], or fewer, so that twice their panels and their sums are three
    /// quarters of a second-level cache.
    fn block_columns(self, depth: usize) -> usize {
        columns_in(self.caches.l2_bytes() * 3 / 4, TILE_ROWS + 2 * depth)
    }

    /// Returns one of [`DEPTHS`], so that a panel leaves room in a first-level cache, and panels of
    /// all columns in a second-level cache.
    fn depth(self, left: DType, right: DType) -> usize {
        let [deep, shallow] = DEPTHS;
        let room = self.block_columns(deep) == BLOCK_COLUMNS;
        if room && self.panel_fits(deep, left, right) {
            deep
        } else {
            shallow
        }
    }

    /// Returns whether a panel so deep leaves room in a first-level cache.
    fn panel_fits(self, depth: usize, left: DType, right: DType) -> bool {
        let (_, nr) = micro_kernel(self.isa, left, right);
        depth * nr * 4 < self.caches.l1_bytes()
    }

    /// Returns the words of a slice of rows of wgrad: [`WGRAD_DEPTH`], or half of it.
    fn wgrad_depth(self, left: DType, right: DType) -> usize {
        if self.panel_fits(WGRAD_DEPTH, left, right) {
            WGRAD_DEPTH
        } else {
            WGRAD_DEPTH / 2
        }
    }

    /// Returns the columns that wgrad packs together, so that twice their panels are five eighths
    /// of a second-level cache; rows of most experts are one slice, which keeps no sums.
    fn wgrad_columns(self) -> usize {
        columns_in(self.caches.l2_bytes() * 5 / 8, 2 * WGRAD_DEPTH)
    }

    /// Returns the rows of a matrix in a block of wgrad: as many columns of the left operand stay
    /// in cache for all panels. [`TILE_ROWS`], or their share of a smaller second-level cache than
    /// [`WGRAD_L2_BYTES`].
    fn wgrad_rows(self) -> usize {
        let l2 = self.caches.l2_bytes().min(WGRAD_L2_BYTES);
        TILE_ROWS * l2 / WGRAD_L2_BYTES
    }

    /// Returns the rows that AMX tiles have in scratch, of `rows` in a cache of [`AMX_L2_BYTES`].
    fn scratch_rows(self, rows: usize) -> usize {
        let share = rows * self.caches.l2_bytes() / AMX_L2_BYTES;
        (share / AMX_NR * AMX_NR).clamp(AMX_NR, rows)
    }
}

/// Columns of the right operand of a weight gradient. A block reads a slice of the left operand
/// from memory once for all of them.
const WGRAD_COLUMNS: usize = 1024;

/// Words of a slice of an expert's rows. Sums of several slices go through memory in between; about
/// 256 rows of f32 are one slice.
const WGRAD_DEPTH: usize = 288;

/// A second-level cache that holds [`TILE_ROWS`] columns of the left operand and two panels, for as
/// many rows as an expert mostly has.
const WGRAD_L2_BYTES: usize = 1 << 20;

/// Bytes at the start of a thread's scratch memory: the state of packing for its next block, or the
/// tile whose rows are there.
const SCRATCH_HEAD: usize = 64;

/// Columns of the right operand for a single matrix, such as a router: smaller blocks let more
/// threads share the pass over all tokens.
const DENSE_COLUMNS: usize = 128;

/// [`DENSE_COLUMNS`] for a matrix of few rows. With more rows the narrow panel costs more than the
/// extra threads gain.
const NARROW_COLUMNS: usize = 64;
const FEW_ROWS: usize = 32;

/// Returns the tiling of a forward GEMM. Depth counts 32-bit words.
pub fn forward(d: &GroupedGemmDesc, core: Core) -> GroupedGemmConfig {
    let matrices = d.matrices();
    let [left, right] = d.factors(core.isa);
    if d.format.is_none() && has_tiles(core.isa, right, left) {
        return tiles(d, matrices, core);
    }
    let (thread_rows, nr) = micro_kernel(core.isa, right, left);
    // A gated GEMM has gate and up side by side in a panel.
    let thread_columns = nr / matrices;
    let block_columns = core.forward(FORWARD_COLUMNS) / matrices;
    let tile_columns = block_columns.min(d.outer.next_multiple_of(thread_columns));
    let elements = d.word_elements(core.isa);
    let words = d.inner.div_ceil(elements);
    let (slices, tile_depth) = even_slices(words, core.forward(FORWARD_DEPTH));
    // A slice has whole records and whole vectors.
    let record = d.record_depth().map_or(1, |depth| depth / elements);
    let step = (record..).step_by(record);
    let step = step.clone().find(|words| words.is_multiple_of(DEPTH_STEP));
    let tile_depth = tile_depth.next_multiple_of(step.unwrap_or(record));
    let (rows, panel) = (TILE_ROWS * tile_depth, tile_depth * nr);
    // A single slice leaves its sums in registers until they are stored.
    let sums = match slices {
        1 => 0,
        _ => TILE_ROWS * tile_columns * matrices,
    };
    let of_blocks = d.format.map_or(0, |format| {
        let blocks = (tile_depth * elements).div_ceil(format.depth());
        (TILE_ROWS + thread_rows) * blocks * row_block_words(d)
    });
    // A thread keeps the codes of rows for its next block, and the head says whose they are. Rows
    // that are only copied are copied again.
    let head = if d.row_format.is_some() {
        SCRATCH_HEAD
    } else {
        0
    };
    let (decode_tokens, decode_columns) = decode(d, tile_columns, thread_columns);
    GroupedGemmConfig {
        threads: 1,
        tile_rows: TILE_ROWS,
        tile_columns,
        tile_depth,
        thread_rows,
        thread_columns,
        family: GemmFamily::Vectors(CpuGemm {
            gather: d.plain_rows && !d.dense,
            // `Builder::tiled` takes this back where weights change at every step.
            packed: true,
            decode_tokens,
            decode_columns,
            shared_bytes: (head + 4 * (rows + sums + panel + of_blocks)) as u32,
        }),
    }
}

/// Returns the words that a block of a row has besides its elements: their sum, by which offsets are
/// multiplied, and of codes a scale and the number at which sums of bytes begin.
fn row_block_words(d: &GroupedGemmDesc) -> usize {
    let offset = d.format.is_some_and(|format| format.offset.is_some());
    usize::from(offset) + if d.row_format.is_some() { 2 } else { 0 }
}

/// Returns the largest decode call and the columns of its blocks; zeros where there are enough
/// blocks already, or none would be narrower.
fn decode(d: &GroupedGemmDesc, tile_columns: usize, thread_columns: usize) -> (usize, usize) {
    let decode_columns = (DECODE_COLUMNS / d.matrices()).next_multiple_of(thread_columns);
    let column_tiles = d.outer.div_ceil(tile_columns);
    let row_tiles = |tokens: usize| {
        if d.dense {
            1
        } else {
            d.experts.min(tokens * d.top_k)
        }
    };
    let lacks = |tokens: &usize| row_tiles(*tokens) * column_tiles < ENOUGH_BLOCKS;
    let decode_tokens = (1..=MAX_DECODE_TOKENS).take_while(lacks).count();
    if decode_columns < tile_columns && decode_tokens > 0 {
        (decode_tokens, decode_columns)
    } else {
        (0, 0)
    }
}

/// Returns the tiling for AMX: four tiles of sums, 16 by 16 each. Adjacent blocks have the same
/// rows, which stay in scratch. If they do not fit whole, sums are in scratch too, and a block has
/// more columns.
fn tiles(d: &GroupedGemmDesc, matrices: usize, core: Core) -> GroupedGemmConfig {
    let tile_rows = core.scratch_rows(AMX_TILE_ROWS);
    let thread_columns = AMX_NR / matrices;
    let words = d.inner.div_ceil(2);
    let (slices, tile_depth) = even_slices(words, AMX_DEPTH);
    let block_columns = if slices == 1 { 256 } else { 512 } / matrices;
    let tile_columns = block_columns.min(d.outer.next_multiple_of(thread_columns));
    let (rows, panel) = (tile_rows * tile_depth, tile_depth * AMX_NR);
    let sums = match slices {
        1 => 0,
        _ => tile_rows * tile_columns * matrices,
    };
    let (decode_tokens, decode_columns) = decode(d, tile_columns, thread_columns);
    GroupedGemmConfig {
        threads: 1,
        tile_rows,
        tile_columns,
        tile_depth,
        thread_rows: AMX_NR,
        thread_columns,
        family: GemmFamily::Tiles(CpuGemm {
            gather: d.plain_rows && !d.dense,
            packed: true,
            decode_tokens,
            decode_columns,
            shared_bytes: (SCRATCH_HEAD + 4 * (rows + sums + panel)) as u32,
        }),
    }
}

/// Words of depth are a multiple of this: whole vectors of every width.
const DEPTH_STEP: usize = 16;

/// Returns the 32-bit words of a contraction over `inner` elements.
fn words(isa: CpuIsa, inner: usize, left: DType, right: DType) -> usize {
    let pairs = isa.bf16_pairs() && (left, right) == (DType::Bf16, DType::Bf16);
    if pairs { inner.div_ceil(2) } else { inner }
}

/// Returns the columns of so many words each that fit into so many bytes, up to [`BLOCK_COLUMNS`].
fn columns_in(bytes: usize, words: usize) -> usize {
    let columns = bytes / (4 * words);
    (columns / COLUMN_STEP * COLUMN_STEP).min(BLOCK_COLUMNS)
}

/// Returns the number of slices of a depth, each of at most `most` words, and the words of one. All
/// but the last are equal, and the last is nearly as deep.
fn even_slices(words: usize, most: usize) -> (usize, usize) {
    let slices = words.div_ceil(most);
    let each = words.div_ceil(slices).next_multiple_of(DEPTH_STEP);
    (slices, each)
}

/// Returns whether AMX tiles multiply operands of these types.
fn has_tiles(isa: CpuIsa, left: DType, right: DType) -> bool {
    (isa, left, right) == (CpuIsa::Amx, DType::Bf16, DType::Bf16)
}

/// Returns the rows and columns of the sums that vector registers hold; the rest of the registers
/// is for operands. AVX-512 broadcasts a word from memory within the multiplication, so many rows
/// cost no registers, and a load of the panel serves twice as many of them.
///
/// BFMMLA has a square of two rows by two columns in a register. 12 rows by 8 columns are 24 of 32
/// registers, and 4 have the columns; the rest takes one pair of rows after the other. Four of
/// depth load 10 vectors for 24 instructions, 8 by 8 load 8 for 16, and neither gcc 12 nor clang 20
/// spills. The size was chosen by that count and never timed.
fn micro_kernel(isa: CpuIsa, left: DType, right: DType) -> (usize, usize) {
    let quads = isa.bf16_quads() && (left, right) == (DType::Bf16, DType::Bf16);
    let (rows, vectors) = match isa {
        CpuIsa::Avx512 | CpuIsa::Avx512Bf16 | CpuIsa::Amx => (12, 2),
        CpuIsa::NeonBf16 if quads => (12, 2),
        CpuIsa::Neon | CpuIsa::NeonBf16 => (6, 4),
        CpuIsa::Portable | CpuIsa::Avx2 => (6, 2),
    };
    (rows, vectors * isa.vector_bytes() / 4)
}

pub fn dgrad(d: &GroupedGemmDgradDesc, core: Core) -> GroupedGemmConfig {
    let [left, right] = d.factors(core.isa);
    if has_tiles(core.isa, right, left) {
        return dgrad_tiles(d, core);
    }
    let (thread_rows, thread_columns) = micro_kernel(core.isa, right, left);
    let depth = core.depth(right, left);
    // Columns of the other half cut the sums of the weights' gradient.
    let block_columns = match d.half {
        ExpertGemm::Up => core.block_columns(depth),
        ExpertGemm::Down => BLOCK_COLUMNS,
    };
    let tile_columns = block_columns.min(d.outer.next_multiple_of(thread_columns));
    let words = words(core.isa, d.inner, right, left);
    let (_, tile_depth) = even_slices(words, depth);
    let sums_and_panels = tile_columns * (TILE_ROWS + 2 * tile_depth);
    let words = sums_and_panels + thread_rows * tile_depth;
    GroupedGemmConfig {
        threads: 1,
        tile_rows: TILE_ROWS,
        tile_columns,
        tile_depth,
        thread_rows,
        thread_columns,
        family: GemmFamily::Vectors(scratch(words)),
    }
}

/// Panels of the weights, and of activations, that are packed together, because adjacent lines are
/// read together. Scratch has room for twice as many.
const AMX_DGRAD_PANELS: usize = 2;
const AMX_WGRAD_PANELS: usize = 4;

/// Rows and columns of the sums of four AMX tiles.
const AMX_NR: usize = 32;

/// Returns the AMX tiling of a dgrad. If the rows of a block fit, they stay in scratch whole for
/// all columns; otherwise a slice of them does, and all sums.
fn dgrad_tiles(d: &GroupedGemmDgradDesc, core: Core) -> GroupedGemmConfig {
    let tile_rows = match d.format {
        None => core.scratch_rows(AMX_TILE_ROWS),
        // Codes are multiplied by vectors in the forward pass, whose list of row tiles this is.
        Some(_) => forward(&d.forward(), core).tile_rows,
    };
    let products = if d.half == ExpertGemm::Up && d.gated {
        2
    } else {
        1
    };
    let words = d.inner.div_ceil(2).next_multiple_of(16);
    let whole = products * words <= AMX_DEPTH;
    let (kept, tile_depth, columns) = if whole {
        (products, words, 256)
    } else {
        let (_, tile_depth) = even_slices(words, AMX_DEPTH / 2);
        (1, tile_depth, 512)
    };
    let tile_columns = columns.min(d.outer.next_multiple_of(AMX_NR));
    let rows_and_panels = tile_depth * (kept * tile_rows + 2 * AMX_NR * AMX_DGRAD_PANELS);
    let sums = if whole { 0 } else { tile_rows * tile_columns };
    GroupedGemmConfig {
        threads: 1,
        tile_rows,
        tile_columns,
        tile_depth,
        thread_rows: AMX_NR,
        thread_columns: AMX_NR,
        family: GemmFamily::Tiles(scratch(rows_and_panels + sums)),
    }
}

/// Returns the tiling of a wgrad. A tile is a part of a matrix; depth counts words of rows, few
/// enough that a panel of the right operand stays in cache.
pub fn wgrad(d: &GroupedGemmWgradDesc, core: Core) -> GroupedGemmConfig {
    if has_tiles(core.isa, d.left, d.right) {
        return wgrad_tiles(d, core);
    }
    let (thread_rows, thread_columns) = micro_kernel(core.isa, d.left, d.right);
    let columns = if !d.dense {
        WGRAD_COLUMNS
    } else if d.height <= FEW_ROWS {
        NARROW_COLUMNS
    } else {
        DENSE_COLUMNS
    };
    // A block packs some of its columns at a time; a narrower one all of them.
    let columns = match core.wgrad_columns() {
        BLOCK_COLUMNS => columns,
        packed => columns.min(packed),
    };
    let tile_depth = core.wgrad_depth(d.left, d.right);
    let height = d.height.next_multiple_of(thread_rows);
    let tile_rows = core.wgrad_rows().min(height);
    let tile_columns = columns.min(d.width.next_multiple_of(thread_columns));
    let sums_and_panels = BLOCK_COLUMNS.min(tile_columns) * (tile_rows + 2 * tile_depth);
    // Columns of the left factor are copied a vector at a time, or two of pairs.
    let left = tile_rows * (tile_depth + core.isa.vector_bytes() / 2);
    GroupedGemmConfig {
        threads: 1,
        tile_rows,
        tile_columns,
        tile_depth,
        thread_rows,
        thread_columns,
        family: GemmFamily::Vectors(scratch(sums_and_panels + left)),
    }
}

/// Returns the AMX tiling of a wgrad. A slice of the left operand stays in scratch while the block
/// goes over all columns.
fn wgrad_tiles(d: &GroupedGemmWgradDesc, core: Core) -> GroupedGemmConfig {
    const DEPTH: usize = 256;
    const HEIGHT: usize = 768;
    // Tiles of equal height, because each of them packs the right operand again, and a low one
    // would pack it for few rows.
    let tiles = d.height.div_ceil(core.scratch_rows(HEIGHT));
    let tile_rows = d.height.div_ceil(tiles).next_multiple_of(AMX_NR);
    let panels = 2 * DEPTH * AMX_NR * AMX_WGRAD_PANELS;
    // Sums of slices of rows are added up in the gradient's own memory, unless that would round them
    // several times: then scratch has all sums of a block.
    let (columns, waits) = match d.gradient {
        DType::F32 => (1024, false),
        _ => (512, true),
    };
    let tile_columns = columns.min(d.width.next_multiple_of(AMX_NR));
    let waiting = if waits { tile_rows * tile_columns } else { 0 };
    GroupedGemmConfig {
        threads: 1,
        tile_rows,
        tile_columns,
        tile_depth: DEPTH,
        thread_rows: AMX_NR,
        thread_columns: AMX_NR,
        family: GemmFamily::Tiles(scratch(tile_rows * DEPTH + panels + waiting)),
    }
}

/// Returns the CPU fields of a backward GEMM with so many words of scratch.
fn scratch(words: usize) -> CpuGemm {
    CpuGemm {
        shared_bytes: (SCRATCH_HEAD + 4 * words) as u32,
        ..CpuGemm::default()
    }
}

#[cfg(test)]
mod tests;
