// grouped_gemm_up for cuda:sm_90a: mma.sync on tensor cores, operands by cp.async
//
//   hidden = act(x[token] · upᵀ)
//
// Tile: 64 rows of one expert by 128 columns. A block computes one tile,
// a warp 32 x 32 of it.
// Tiles run in groups of 16 row tiles, inside a group column by column, so that blocks which run
// together share rows and weights in the L2 cache. Blocks beyond the last tile return.
// The kernel gathers rows from x by row_slots, so no dispatch precedes it.
//
// Shared memory: a pipeline of 4 stages; cp.async fills some while the warps multiply another.
// A stage has 192 lines of 128 bytes, 32 elements of the inner dimension:
//   left   [64]   x[token]
//   right  [128]   rows of up
// Chunk n of 16 bytes of line r lies at n ^ (r % 8), so the eight lines that ldmatrix reads together
// lie in eight different groups of banks. After the main loop the pipeline holds the tile of hidden.
//
// Sums are f32, in ascending order of the inner dimension, 8 elements at a time.
// 3xTF32: each f32 operand is split into two tf32 values of 11 bits, and three of their four
// products are summed. The tensor core adds 8 elements with truncation, so their sum starts from
// zero and joins the running sum in an ordinary f32 addition. The result is about as accurate as an
// f32 GEMM. An infinite operand gives NaN.
//
// Baked in: inner 768, outer 3072, experts 8, types, epilogue.
// Read at run time: the number of tokens.

// [prelude: base.hpp, cuda/base.cuh, base.hpp, warp.hpp, cuda/warp.cuh, warp.hpp, cuda/shared.cuh, cuda/async_copy.cuh, cuda/matrix.cuh, cuda/mma.cuh, activation.hpp]

// ---- the kernel ----

typedef f32 Element;

constexpr int INNER = 768, OUTER = 3072;
constexpr int EXPERTS = 8, TOP_K = 1;
constexpr int THREADS = 256, STAGES = 4;
constexpr int TILE_ROWS = 64, TILE_COLUMNS = 128, TILE_DEPTH = 32;
constexpr int WARP_ROWS = 32, WARP_COLUMNS = 32;
constexpr int MATRICES = 1;

constexpr int LINE = 128, CHUNK = 16, STEPS = LINE / 32;  // bytes; an mma reads 32 of each line
constexpr int STAGE = (TILE_ROWS + MATRICES * TILE_COLUMNS) * LINE;
constexpr int COLUMN_WARPS = TILE_COLUMNS / WARP_COLUMNS;
constexpr int ROW_PARTS = WARP_ROWS / 16, COLUMN_PARTS = WARP_COLUMNS / 8;  // mma tiles of a warp
constexpr int DEPTHS = ceil_div(INNER, TILE_DEPTH);

// Elements of one cp.async, threads that share a line, and lines copied at a time.
constexpr int COPIED = pack_width<Element>(INNER);
constexpr int LINE_THREADS = TILE_DEPTH / COPIED, COPIED_LINES = THREADS / LINE_THREADS;

// Elements of one store, and the pitch of the tile of hidden in shared memory.
constexpr int STORED = pack_width<Element>(OUTER), PITCH = TILE_COLUMNS + 8;

static_assert(TILE_DEPTH * sizeof(Element) == LINE && COPIED * sizeof(Element) >= 4, "what a copy can move");
static_assert(TILE_ROWS / WARP_ROWS * COLUMN_WARPS * WARP == THREADS, "every warp owns a part of the tile");
static_assert(TILE_ROWS % COPIED_LINES + TILE_COLUMNS % COPIED_LINES == 0, "all threads copy as much");
static_assert(STAGES * STAGE == 98304, "the shared memory of the launch");
static_assert(TILE_ROWS * PITCH * (int)sizeof(Element) <= STAGES * STAGE, "the pipeline can hold the output");

// A row tile: `rows` rows of one expert, from row `first` on.
struct RowTile {
    i64 expert, first;
    i32 rows;
};

DEVICE RowTile row_tile(const i64 *offsets, const i32 *row_tiles, i32 tile = (i32)block_x())
{
    if (tile >= row_tiles[EXPERTS])
        return {0, 0, 0};
    i32 expert = 0, beyond = EXPERTS;  // row_tiles[expert] <= tile < row_tiles[beyond]
    while (beyond - expert > 1) {
        i32 middle = (expert + beyond) / 2;
        bool right = row_tiles[middle] <= tile;
        expert = right ? middle : expert;
        beyond = right ? beyond : middle;
    }
    i64 first = offsets[expert] + (i64)(tile - row_tiles[expert]) * TILE_ROWS;
    return {expert, first, (i32)(offsets[expert + 1] - first)};
}

DEVICE f32 activated(f32 up)
{
    return activation(up);
}

// Epilogue of one element: bias, activation, weight.
DEVICE f32 finished(f32 up)
{
    return activated(up);
}

// Tile order: the row tiles of a group, then column tiles, then groups.
constexpr int GROUP = 16, COLUMN_TILES = ceil_div(OUTER, TILE_COLUMNS);

// Gives this block its one tile, out of `row_tiles` x COLUMN_TILES.
struct TileScheduler {
    const i32 row_tiles;
    i32 tile_index = (i32)block_x();

    DEVICE bool is_valid() const { return tile_index < row_tiles * COLUMN_TILES; }
    DEVICE void advance() { tile_index = 0x7fffffff; }
    DEVICE i32 group() const { return tile_index / (GROUP * COLUMN_TILES) * GROUP; }
    DEVICE i32 within() const { return tile_index - group() * COLUMN_TILES; }
    DEVICE i32 rows() const { return lesser(GROUP, row_tiles - group()); }
    DEVICE i32 row() const { return group() + within() % rows(); }
    DEVICE i32 column() const { return within() / rows(); }
};

// The line that a thread copies to in iteration i, and its first element there.
DEVICE i32 copied_row(i32 i) { return i * COPIED_LINES + thread_index() / LINE_THREADS; }
DEVICE i32 copied_element() { return thread_index() % LINE_THREADS * COPIED; }

// Copies elements `depth` and on of ROWS rows to lines of a stage; zeros for rows from `rows` on and
// elements from `inner` on. `row_at(i)` is the source of iteration i.
template <int ROWS, class RowAt>
DEVICE void copy_rows(u32 lines, i32 rows, i32 depth, RowAt row_at, i32 inner = INNER)
{
    const i32 k = depth + copied_element(), byte = copied_element() * (i32)sizeof(Element);
    const i32 wanted = k < inner ? rows - copied_row(0) : 0;
    #pragma unroll
    for (i32 i = 0; i < ROWS / COPIED_LINES; i++) {
        const u32 to = lines + copied_row(i) * LINE + (byte ^ (copied_row(i) & 7) * CHUNK);
        copy_async<COPIED * sizeof(Element)>(to, row_at(i) + k, i * COPIED_LINES < wanted);
    }
}

// The first row and column of a warp's part of the tile.
DEVICE i32 warp_row() { return warp_index() / COLUMN_WARPS * WARP_ROWS; }
DEVICE i32 warp_column() { return warp_index() % COLUMN_WARPS * WARP_COLUMNS; }

// The fragments of one step of a warp, and its accumulators.
struct Operands { u32 left[ROW_PARTS][4], right[MATRICES * COLUMN_PARTS][2]; };
typedef f32 Sums[ROW_PARTS][MATRICES * COLUMN_PARTS][4];

// Loads the fragments of one step: 16 rows by two chunks of left at a time, and twice 8 rows by two
// chunks of right.
DEVICE void load_step(Operands &to, u32 stage, i32 step)
{
    const i32 lane = lane_index();
    const i32 left_row = warp_row() + lane % 16, left_chunk = 2 * step + lane / 16;
    const i32 right_row = TILE_ROWS + warp_column() + lane / 16 * 8 + lane % 8;
    const i32 right_chunk = 2 * step + lane / 8 % 2;
    const u32 left = stage + left_row * LINE + (left_chunk ^ lane % 8) * CHUNK;
    const u32 right = stage + right_row * LINE + (right_chunk ^ lane % 8) * CHUNK;
    #pragma unroll
    for (i32 i = 0; i < ROW_PARTS; i++)
        load_matrices(to.left[i], left + i * 16 * LINE);
    #pragma unroll
    for (i32 j = 0; j < MATRICES * COLUMN_PARTS; j += 2) {
        u32 pair[4];
        load_matrices(pair, right + (j / COLUMN_PARTS * TILE_COLUMNS + j % COLUMN_PARTS * 8) * LINE);
        #pragma unroll
        for (i32 n = 0; n < 4; n++)
            to.right[j + n / 2][n % 2] = pair[n];
    }
}

// Splits value into high + low, both tf32; the last bits of the mantissa are lost.
template <int COUNT> DEVICE void split(u32 (&high)[COUNT], u32 (&low)[COUNT], const u32 (&values)[COUNT])
{
    #pragma unroll
    for (i32 n = 0; n < COUNT; n++) {
        high[n] = to_tf32(float_of(values[n]));
        low[n] = to_tf32(float_of(values[n]) - float_of(high[n]));
    }
}

// Multiplies one step and accumulates, for `parts` parts of 16 rows. Parts beyond are padding.
DEVICE void multiply(Sums &sums, const Operands &by, i32 parts)
{
    u32 left[ROW_PARTS][4], left_low[ROW_PARTS][4];
    #pragma unroll
    for (i32 i = 0; i < ROW_PARTS; i++)
        split(left[i], left_low[i], by.left[i]);
    #pragma unroll
    for (i32 j = 0; j < MATRICES * COLUMN_PARTS; j++) {
        u32 right[2], right_low[2];
        split(right, right_low, by.right[j]);
        #pragma unroll
        for (i32 i = 0; i < ROW_PARTS; i++) {
            if (i >= parts)
                continue;
            f32 part[4] = {};
            mma_16x8x8_tf32(part, left_low[i], right);
            mma_16x8x8_tf32(part, left[i], right_low);
            mma_16x8x8_tf32(part, left[i], right);
            #pragma unroll
            for (i32 n = 0; n < 4; n++)
                sums[i][j][n] += part[n];
        }
    }
}

// Multiplies a stage and accumulates. The loop must not be unrolled: ptxas would hoist the loads of
// every step, until registers spill.
DEVICE void multiply_stage(Sums &sums, u32 stage, i32 parts)
{
    #pragma unroll 1
    for (i32 step = 0; step < STEPS; step++) {
        Operands operands;
        load_step(operands, stage, step);
        multiply(sums, operands, parts);
    }
}

// Stores the tile of hidden from shared memory, as far as its rows and columns exist.
DEVICE void store_tile(Element *hidden, const Element *tile, i64 first_row, i32 first_column, i32 rows, i32 outer = OUTER)
{
    constexpr int PACKS = TILE_COLUMNS / STORED;
    const i32 first_pack = first_column / STORED, row_packs = outer / STORED;
    for (i32 n = thread_index(); n < TILE_ROWS * PACKS; n += THREADS) {
        const i32 row = n / PACKS, pack = n % PACKS;
        if (row < rows && first_pack + pack < row_packs)
            store(hidden, (first_row + row) * row_packs + first_pack + pack, load<STORED>(tile + row * PITCH, pack));
    }
}

KERNEL(THREADS) grouped_gemm_up(
    const f32 *x,         // [tokens, 768]
    const f32 *up,        // [8, 3072, 768]
    const i64 *offsets,   // [9]
    const i32 *row_tiles, // [9]
    const i32 *row_slots, // [rows]
    f32 *hidden,          // [rows, 3072]
    i64 tokens)
{
    await_launches();
    alignas(LINE) extern __shared__ Element pipeline[];

    (void)tokens;
    const TileScheduler scheduler = {row_tiles[EXPERTS]};
    if (!scheduler.is_valid())
        return;
    const RowTile tile = row_tile(offsets, row_tiles, scheduler.row());
    const i32 first_column = scheduler.column() * TILE_COLUMNS, columns = OUTER - first_column;
    const i64 first_weight = (tile.expert * OUTER + first_column) * INNER;

    // The rows that this thread copies in iteration i.
    const Element *const up_rows = up + first_weight + copied_row(0) * INNER;
    i32 token[TILE_ROWS / COPIED_LINES];
    #pragma unroll
    for (i32 i = 0; i < TILE_ROWS / COPIED_LINES; i++)
        token[i] = copied_row(i) < tile.rows ? row_slots[tile.first + copied_row(i)] / TOP_K : 0;
    auto left_row = [&](i32 i) { return x + (i64)token[i] * INNER; };
    auto up_row = [&](i32 i) { return up_rows + (i64)i * COPIED_LINES * INNER; };

    const u32 stages = shared_address(pipeline);
    auto fetch = [&](i32 at) {
        const u32 left = stages + at % STAGES * STAGE, right = left + TILE_ROWS * LINE;
        if (at < DEPTHS) {
            copy_rows<TILE_ROWS>(left, tile.rows, at * TILE_DEPTH, left_row);
            copy_rows<TILE_COLUMNS>(right, columns, at * TILE_DEPTH, up_row);
        }
        commit_copies();
    };

    const i32 parts = ceil_div(tile.rows - warp_row(), 16);  // of this warp, with rows
    Sums sums = {};
    #pragma unroll
    for (i32 at = 0; at < STAGES - 1; at++)
        fetch(at);
    #pragma unroll 1
    for (i32 at = 0; at < DEPTHS; at++) {
        wait_copies<STAGES - 2>();
        block_sync();  // this stage is here, and all have read the one before it
        fetch(at + STAGES - 1);
        if (parts > 0 && warp_column() < columns)
            multiply_stage(sums, stages + at % STAGES * STAGE, parts);
    }
    wait_copies<0>();
    block_sync();  // the pipeline is free

    #pragma unroll
    for (i32 j = 0; j < COLUMN_PARTS; j++) {
        const i32 column = warp_column() + j * 8 + lane_index() % 4 * 2;
        #pragma unroll
        for (i32 i = 0; i < 2 * ROW_PARTS; i++) {
            const i32 row = warp_row() + i * 8 + lane_index() / 4;
            Pack<Element, 2> pair;
            #pragma unroll
            for (i32 n = 0; n < 2; n++) {
                const f32 value = finished(sums[i / 2][j][i % 2 * 2 + n]);
                pair.at[n] = round_to<Element>(value);
            }
            store(pipeline, (row * PITCH + column) / 2, pair);
        }
    }
    block_sync();

    store_tile(hidden, pipeline, tile.first, first_column, tile.rows);
}
