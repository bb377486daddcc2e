//! Tilings of the kernels that move rows, on GPUs.

use moesaic_kernel::DType;

/// Threads of a block of a copying kernel.
pub(crate) const COPY_THREADS: u32 = 128;

/// The fewest bytes that a block of a copying kernel moves. With fewer, starting the block costs
/// too much.
const BLOCK_BYTES: usize = 32 << 10;

/// Slots whose sources a block of `combine` lists: 32 KB.
// A row and a weight are eight bytes. CUDA lets a block declare 48 KB.
const BLOCK_SOURCES: usize = 4096;

/// Adjacent threads that sum a slice of a token in decode calls, a pack each. With packs of 16
/// bytes they read 512 bytes of a row, in whole sectors.
const DECODE_THREADS: u32 = 32;

/// The tiling of a block that copies rows.
pub(crate) struct RowTiling {
    /// Rows of a block.
    pub rows: usize,
    /// Adjacent threads that copy one row.
    pub row_threads: u32,
}

/// The tiling of a block that sums rows into tokens.
pub(crate) struct TokenTiling {
    /// Tokens of a block.
    pub tokens: usize,
    /// Adjacent threads that sum one token.
    pub token_threads: u32,
}

/// The tiling of a block that sums slices of tokens.
pub(crate) struct SliceTiling {
    /// Tokens of a block.
    pub tokens: usize,
    /// Adjacent threads that sum one slice.
    pub threads: u32,
    /// Slices of a token.
    pub slices: usize,
}

/// Returns the tiling of a kernel that copies rows.
pub(crate) fn row_tiling(width: usize, dtype: DType, wave: u32) -> RowTiling {
    let row_threads = (packs(width, dtype).next_power_of_two() as u32).min(wave);
    let at_once = (COPY_THREADS / row_threads) as usize;
    let rows = BLOCK_BYTES.div_ceil(width * dtype.size());
    // Whole rounds of the block's threads; in the last round of any other number some would have no
    // row.
    let rows = rows.min(64).next_multiple_of(at_once);
    RowTiling { rows, row_threads }
}

/// Returns the tiling of a kernel that sums `rows` rows into each token.
pub(crate) fn token_tiling(width: usize, dtype: DType, top_k: usize, rows: usize) -> TokenTiling {
    let most = most_tokens(top_k);
    let packs = packs(width, dtype).next_power_of_two() as u32;
    // A block handles as many tokens at once as it has teams of threads, and may not list the
    // sources of more than `most`.
    let token_threads = packs.clamp(COPY_THREADS / most as u32, COPY_THREADS);
    let at_once = (COPY_THREADS / token_threads) as usize;
    let tokens = BLOCK_BYTES.div_ceil(rows * width * dtype.size());
    TokenTiling {
        tokens: tokens.min(most).next_multiple_of(at_once),
        token_threads,
    }
}

/// Returns [`token_tiling`] for decode calls, which cut tokens into slices of a pack for each
/// thread.
pub(crate) fn slice_tiling(
    width: usize,
    dtype: DType,
    top_k: usize,
    token_threads: u32,
) -> SliceTiling {
    // With fewer threads for a slice a block would have more tokens than its list of sources holds.
    let least = COPY_THREADS / most_tokens(top_k) as u32;
    let threads = token_threads.min(DECODE_THREADS.max(least));
    SliceTiling {
        tokens: (COPY_THREADS / threads) as usize,
        threads,
        slices: packs(width, dtype).div_ceil(threads as usize),
    }
}

/// Returns the tokens whose sources fit into a block, a power of two.
fn most_tokens(top_k: usize) -> usize {
    // A power of two, because it divides the block's threads into teams.
    1 << (BLOCK_SOURCES / top_k.max(1)).clamp(1, 64).ilog2()
}

/// Returns the accesses of a row: each of the widest pack, at most 16 bytes, that divides it.
fn packs(width: usize, dtype: DType) -> usize {
    let widest = 16 / dtype.size();
    width / (1 << width.trailing_zeros()).min(widest)
}
