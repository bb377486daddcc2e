// grouped_gemm_dgrad_up for cuda:sm_90a: mma.sync on tensor cores, operands by cp.async
//
//   drows = dup · up
//
// Tile: 64 rows of all tokens by 128 columns. A block computes one tile, a warp 32 x 32 of it.
// Tiles run in groups of 16 row tiles, inside a group column by column, so that blocks which run
// together share rows and weights in the L2 cache. Blocks beyond the last tile return.
//
// Shared memory: a pipeline of 4 stages; cp.async fills some while the warps multiply another.
// A stage has 32 elements of the inner dimension:
//   left   [64][128 bytes]          dup
//   right  [128 columns][32]   rows of up, in panels of 128 bytes of each
// Chunk n of 16 bytes of line r of left lies at n ^ (r % 8). After the main loop the pipeline holds
// the epilogue tiles, sums of 16 rows for each warp.
//
// Sums are f32, in ascending order of the inner dimension, 8 elements at a time.
// 3xTF32: each f32 operand is split into two tf32 values of 11 bits, and three of their four
// products are summed. The tensor core adds 8 elements with truncation, so their sum starts from
// zero and joins the running sum in an ordinary f32 addition. The result is about as accurate as an
// f32 GEMM. An infinite operand gives NaN.
//
// Baked in: inner 32, outer 2880, experts 1, types, epilogue.
// Read at run time: the number of tokens.

// [prelude: base.hpp, cuda/base.cuh, base.hpp, warp.hpp, cuda/warp.cuh, warp.hpp, cuda/shared.cuh, cuda/shared_word.cuh, cuda/async_copy.cuh, cuda/matrix.cuh, cuda/mma.cuh]

// ---- the kernel ----

typedef f32 Element;

constexpr int INNER = 32, OUTER = 2880;
constexpr int THREADS = 256, STAGES = 4;
constexpr int TILE_ROWS = 64, TILE_COLUMNS = 128, TILE_DEPTH = 32;
constexpr int WARP_ROWS = 32, WARP_COLUMNS = 32;

constexpr int LINE = 128, CHUNK = 16, STEPS = LINE / 32;  // bytes; an mma reads 32 of each line
constexpr int LEFT = TILE_ROWS * LINE, STAGE = LEFT + TILE_COLUMNS * LINE;
constexpr int COLUMN_WARPS = TILE_COLUMNS / WARP_COLUMNS;
constexpr int ROW_PARTS = WARP_ROWS / 16, COLUMN_PARTS = WARP_COLUMNS / 8;  // mma tiles of a warp
constexpr int DEPTHS = ceil_div(INNER, TILE_DEPTH), SLICES = DEPTHS;

// Elements of left copied at a time, threads that share a line, and lines copied at a time.
constexpr int COPIED = pack_width<Element>(INNER);
constexpr int LINE_THREADS = TILE_DEPTH / COPIED, COPIED_LINES = THREADS / LINE_THREADS;

static_assert(TILE_DEPTH * sizeof(Element) == LINE && COPIED * sizeof(Element) >= 4, "what a copy can move");
static_assert(TILE_ROWS / WARP_ROWS * COLUMN_WARPS * WARP == THREADS, "every warp owns a part of the tile");
static_assert(TILE_ROWS % COPIED_LINES == 0, "all threads copy as much");
static_assert(STAGES * STAGE == 98304, "the shared memory of the launch");

// A row tile: `rows` rows of one expert, from row `first` on.
struct RowTile {
    i64 expert, first;
    i32 rows;
};

DEVICE RowTile row_tile(i64 tokens, i64 tile = block_x())
{
    const i64 first = tile * TILE_ROWS;
    return {0, first, (i32)(tokens - first)};
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

// An operand whose lines are steps of the contraction lies in panels of PANEL elements of
// TILE_DEPTH lines, 128 bytes each. A wider operand has several panels, one behind the other.
constexpr int PANEL = LINE / sizeof(Element), PANEL_BYTES = TILE_DEPTH * LINE;

// Returns the position of chunk n of line k of a panel. What a warp loads together, two chunks of four
// lines, lies in different banks.
DEVICE i32 in_panel(i32 k, i32 chunk) { return k * LINE + (chunk ^ k % 4 * 2) * CHUNK; }

// Copies of an operand with rows of WIDTH elements: elements of one cp.async, and the line that a
// thread copies to in iteration `turn`.
template <int WIDTH> struct Panels {
    static constexpr int COPIED = pack_width<Element>(WIDTH);
    static constexpr int LINE_THREADS = PANEL / COPIED, LINES = THREADS / LINE_THREADS;
    static constexpr int TURNS = TILE_DEPTH / LINES;

    static_assert(COPIED * sizeof(Element) >= 4, "what a copy can move");
    static_assert(TILE_DEPTH % LINES == 0, "all threads copy as much");

    static DEVICE i32 line(i32 turn) { return turn * LINES + thread_index() / LINE_THREADS; }

    // Copies TILE_DEPTH lines of COLUMNS elements to panels; zeros for lines from `lines` on
    // and elements from `columns` on. `line_at(i)` is the source of iteration i.
    template <int COLUMNS, class LineAt> static DEVICE void copy(u32 to, i32 lines, i32 columns, LineAt line_at)
    {
        const i32 column = thread_index() % LINE_THREADS * COPIED, byte = column * (i32)sizeof(Element);
        #pragma unroll
        for (i32 i = 0; i < TURNS; i++) {
            const u32 place = to + in_panel(line(i), byte / CHUNK) + byte % CHUNK;
            #pragma unroll
            for (i32 first = 0; first < COLUMNS; first += PANEL)
                copy_async<COPIED * sizeof(Element)>(place + first / PANEL * PANEL_BYTES, line_at(i) + first + column,
                                                     line(i) < lines && first + column < columns);
        }
    }
};

// Loads the word of an element.
DEVICE u32 panel_word(u32 panels, i32 k, i32 column)
{
    return shared_word(panels + column / PANEL * PANEL_BYTES + in_panel(k, column % PANEL / 4) + column % 4 * 4);
}

// Loads lines k to k + 7 of 16 columns as the A fragment of an mma.
DEVICE void load_left(u32 (&to)[4], u32 panels, i32 k, i32 column)
{
    #pragma unroll
    for (i32 n = 0; n < 4; n++)
        to[n] = panel_word(panels, k + n / 2 * 4 + lane_index() % 4, column + n % 2 * 8 + lane_index() / 4);
}

// Loads the same lines of 16 columns as two B fragments.
DEVICE void load_right(u32 (&to)[4], u32 panels, i32 k, i32 column)
{
    #pragma unroll
    for (i32 n = 0; n < 4; n++)
        to[n] = panel_word(panels, k + n % 2 * 4 + lane_index() % 4, column + n / 2 * 8 + lane_index() / 4);
}

// The first row and column of a warp's part of the tile.
DEVICE i32 warp_row() { return warp_index() / COLUMN_WARPS * WARP_ROWS; }
DEVICE i32 warp_column() { return warp_index() % COLUMN_WARPS * WARP_COLUMNS; }

// The fragments of one step of a warp, and its accumulators.
struct Operands { u32 left[ROW_PARTS][4], right[COLUMN_PARTS][2]; };
typedef f32 Sums[ROW_PARTS][COLUMN_PARTS][4];

// Loads the fragments of one step: 16 rows by two chunks of left at a time, and the same elements of
// 16 columns of right.
DEVICE void load_step(Operands &to, u32 stage, i32 step)
{
    const i32 lane = lane_index();
    const i32 row = warp_row() + lane % 16, chunk = 2 * step + lane / 16;
    const u32 left = stage + row * LINE + (chunk ^ lane % 8) * CHUNK;
    #pragma unroll
    for (i32 i = 0; i < ROW_PARTS; i++)
        load_matrices(to.left[i], left + i * 16 * LINE);
    #pragma unroll
    for (i32 j = 0; j < COLUMN_PARTS; j += 2) {
        u32 pair[4];
        load_right(pair, stage + LEFT, step * (32 / sizeof(Element)), warp_column() + j * 8);
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
    for (i32 j = 0; j < COLUMN_PARTS; j++) {
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

// ---- epilogue ----

// A warp stages 16 rows by SLAB columns of sums in its epilogue tile. A lane then takes eight
// elements of a row, in packs of one memory access each; adjacent lanes take adjacent packs.
constexpr int SLAB = 32, ROW_LANES = SLAB / 8, ROWS_AT_ONCE = WARP / ROW_LANES;
constexpr int MOVED = pack_width<Element>(OUTER), ROW_PACKS = OUTER / MOVED;
constexpr int EPILOGUE_PASSES = 16 / ROWS_AT_ONCE;
typedef f32 EpilogueTile[16][SLAB];

// Returns the position of an element. Chunks of 16 bytes are swizzled so that neither the pairs
// written by lanes nor the chunks read by them conflict in a bank.
DEVICE f32 *in_epilogue_tile(EpilogueTile &epilogue_tile, i32 row, i32 column)
{
    const i32 chunk = column / 4 ^ (row % 2 * 5 + row / 2 % 2 * 2);
    return &epilogue_tile[row][chunk * 4 + column % 4];
}

// Loads the sums of a pack.
DEVICE Pack<f32, MOVED> load_epilogue_tile(EpilogueTile &epilogue_tile, i32 row, i32 column)
{
    constexpr int LOADED = lesser(MOVED, 4);
    Pack<f32, MOVED> pack;
    #pragma unroll
    for (i32 i = 0; i < MOVED; i += LOADED) {
        const Pack<f32, LOADED> part = load<LOADED>(in_epilogue_tile(epilogue_tile, row, column + i));
        #pragma unroll
        for (i32 n = 0; n < LOADED; n++)
            pack.at[i + n] = part.at[n];
    }
    return pack;
}

// Stores the part of an epilogue tile within `rows` and OUTER, from column `first` on.
DEVICE void store_epilogue_tile(Element *drows, EpilogueTile &epilogue_tile, i32 rows, i32 first)
{
    #pragma unroll
    for (i32 i = 0; i < EPILOGUE_PASSES; i++) {
        const i32 row = i * ROWS_AT_ONCE + lane_index() / ROW_LANES;
        if (row >= rows)
            continue;
        #pragma unroll
        for (i32 n = 0; n < 8 / MOVED; n++) {
            const i32 column = (n * ROW_LANES + lane_index() % ROW_LANES) * MOVED;
            if (first + column >= OUTER)
                continue;
            const Pack<f32, MOVED> sums = load_epilogue_tile(epilogue_tile, row, column);
            Pack<Element, MOVED> pack;
            #pragma unroll
            for (i32 m = 0; m < MOVED; m++)
                pack.at[m] = round_to<Element>(sums.at[m]);
            store(drows, (i64)row * ROW_PACKS + (first + column) / MOVED, pack);
        }
    }
}

static_assert(THREADS / WARP * sizeof(EpilogueTile) + COLUMN_WARPS * TILE_ROWS * sizeof(f32) <= STAGES * STAGE, "the pipeline can hold the epilogue tiles");

KERNEL(THREADS) grouped_gemm_dgrad_up(
    const f32 *dup, // [tokens, 32]
    const f32 *up,  // [1, 32, 2880]
    f32 *drows,     // [tokens, 2880]
    i64 tokens)
{
    await_launches();
    alignas(LINE) extern __shared__ Element pipeline[];

    const TileScheduler scheduler = {(i32)((tokens + TILE_ROWS - 1) / TILE_ROWS)};
    if (!scheduler.is_valid())
        return;
    const RowTile tile = row_tile(tokens, scheduler.row());
    const i32 first_column = scheduler.column() * TILE_COLUMNS, columns = OUTER - first_column;

    // Sources of this thread's copies.
    typedef Panels<OUTER> Right;
    const i64 first_left = (tile.first + copied_row(0)) * INNER;
    const i64 first_right = tile.expert * INNER * OUTER + first_column;
    const u32 stages = shared_address(pipeline);
    auto fetch = [&](i32 at) {
        if (at < SLICES) {
            const u32 stage = stages + at % STAGES * STAGE;
            const i32 depth = at * TILE_DEPTH;
            const Element *const left = dup + first_left, *const right = up + first_right;
            copy_rows<TILE_ROWS>(stage, tile.rows, depth, [&](i32 i) { return left + (i64)i * COPIED_LINES * INNER; });
            Right::copy<TILE_COLUMNS>(stage + LEFT, INNER - depth, columns, [&](i32 i) { return right + (i64)(depth + Right::line(i)) * OUTER; });
        }
        commit_copies();
    };

    const i32 parts = ceil_div(tile.rows - warp_row(), 16);  // of this warp, with rows
    Sums sums = {};
    #pragma unroll
    for (i32 at = 0; at < STAGES - 1; at++)
        fetch(at);
    #pragma unroll 1
    for (i32 at = 0; at < SLICES; at++) {
        wait_copies<STAGES - 2>();
        block_sync();  // this stage is here, and all have read the one before it
        fetch(at + STAGES - 1);
        if (parts > 0 && warp_column() < columns)
            multiply_stage(sums, stages + at % STAGES * STAGE, parts);
    }
    wait_copies<0>();
    block_sync();  // the pipeline is free

    EpilogueTile &epilogue_tile = reinterpret_cast<EpilogueTile *>(pipeline)[warp_index()];
    #pragma unroll
    for (i32 i = 0; i < ROW_PARTS; i++) {
        const i32 row = warp_row() + 16 * i, rows = tile.rows - row;
        #pragma unroll
        for (i32 j = 0; j < COLUMN_PARTS; j++)
            #pragma unroll
            for (i32 n = 0; n < 2; n++) {
                const Pack<f32, 2> pair = {sums[i][j][2 * n], sums[i][j][2 * n + 1]};
                store(in_epilogue_tile(epilogue_tile, 8 * n + lane_index() / 4, 8 * j + lane_index() % 4 * 2), pair);
            }
        warp_sync();
        const i64 first = (tile.first + row) * OUTER;
        store_epilogue_tile(drows + first, epilogue_tile, rows, first_column + warp_column());
        warp_sync();
    }
}
