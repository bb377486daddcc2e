// grouped_gemm_dgrad_up for cuda:sm_90a, on the matrix units
//
//   drows = dup · up
//
// A block owns 64 rows of all tokens by 128 columns; a warp owns 32 x 32 of them.
// Blocks follow each other by row tiles of a group, then by column tiles, then by groups: what is
// multiplied together was read together and stays in the level-2 cache. Those without a tile return.
//
// Shared memory: a ring of 4 stages, filled by asynchronous copies while others are
// multiplied. A stage has 32 elements of the inner dimension:
//   left   [64][128 bytes]          dup
//   right  [128 columns][32]   lines of up, in panels of 128 bytes of each
// Chunk n of 16 bytes of line r of left lies at n ^ (r % 8). At the end the ring holds
// sums, 16 rows of a warp at a time.
//
// Sums are f32, in ascending order of the inner dimension, 8 elements at a time.
// A factor is split into two tf32 of 11 bits, and three of their four products are taken.
// The matrix unit sums them over 8 elements, truncating; that is added by an ordinary f32
// addition. So sums are about as near as those of f32 products. Infinity gives NaN.
//
// Baked in: inner 32, outer 2880, experts 1, types, epilogue. Not the tokens.

// [prelude: base.hpp, cuda/base.cuh, base.hpp, warp.hpp, cuda/warp.cuh, warp.hpp, cuda/shared.cuh, cuda/shared_word.cuh, cuda/async_copy.cuh, cuda/matrix.cuh, cuda/mma.cuh]

// ---- the kernel ----

typedef f32 Element;

constexpr int INNER = 32, OUTER = 2880;
constexpr int THREADS = 256, STAGES = 4;
constexpr int TILE_ROWS = 64, TILE_COLUMNS = 128, TILE_DEPTH = 32;
constexpr int WARP_ROWS = 32, WARP_COLUMNS = 32;

constexpr int LINE = 128, CHUNK = 16, STEPS = LINE / 32;  // bytes; a product takes 32 of each line
constexpr int LEFT = TILE_ROWS * LINE, STAGE = LEFT + TILE_COLUMNS * LINE;
constexpr int COLUMN_WARPS = TILE_COLUMNS / WARP_COLUMNS;
constexpr int ROW_PARTS = WARP_ROWS / 16, COLUMN_PARTS = WARP_COLUMNS / 8;  // products of a warp
constexpr int DEPTHS = ceil_div(INNER, TILE_DEPTH), SLICES = DEPTHS;

// Elements of left copied at a time, threads that share a line, and lines copied at a time.
constexpr int COPIED = pack_width<Element>(INNER);
constexpr int LINE_THREADS = TILE_DEPTH / COPIED, COPIED_LINES = THREADS / LINE_THREADS;

static_assert(TILE_DEPTH * sizeof(Element) == LINE && COPIED * sizeof(Element) >= 4, "what a copy can move");
static_assert(TILE_ROWS / WARP_ROWS * COLUMN_WARPS * WARP == THREADS, "every warp owns a part of the tile");
static_assert(TILE_ROWS % COPIED_LINES == 0, "all threads copy as much");
static_assert(STAGES * STAGE == 98304, "the shared memory of the launch");

// The rows of a block: `rows` of them from row `first` on, all of one expert.
struct RowTile {
    i64 expert, first;
    i32 rows;
};

DEVICE RowTile row_tile(i64 tokens, i64 tile = block_x())
{
    const i64 first = tile * TILE_ROWS;
    return {0, first, (i32)(tokens - first)};
}

// Tiles follow each other by the row tiles of a group, then by column tiles, then by groups.
constexpr int GROUP = 16, COLUMN_TILES = ceil_div(OUTER, TILE_COLUMNS);

// The tile of this block, of `row_tiles` x COLUMN_TILES.
struct Walk {
    const i32 row_tiles;
    i32 number = (i32)block_x();

    DEVICE bool goes_on() const { return number < row_tiles * COLUMN_TILES; }
    DEVICE void next() { number = 0x7fffffff; }
    DEVICE i32 group() const { return number / (GROUP * COLUMN_TILES) * GROUP; }
    DEVICE i32 within() const { return number - group() * COLUMN_TILES; }
    DEVICE i32 rows() const { return lesser(GROUP, row_tiles - group()); }
    DEVICE i32 row() const { return group() + within() % rows(); }
    DEVICE i32 column() const { return within() / rows(); }
};

// The line of a tile that a thread copies to in its turn i, and the piece of it.
DEVICE i32 copied_row(i32 i) { return i * COPIED_LINES + thread_index() / LINE_THREADS; }
DEVICE i32 copied_element() { return thread_index() % LINE_THREADS * COPIED; }

// Copies elements `depth` and on of ROWS rows to lines of the ring; zeros for rows from
// `rows` on and elements from `inner` on. `row_at(i)` is where the row of turn i begins.
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

// An operand whose lines are steps of the contraction lies in panels: PANEL elements of
// TILE_DEPTH lines, 128 bytes each. A wider operand has several, one behind the other.
constexpr int PANEL = LINE / sizeof(Element), PANEL_BYTES = TILE_DEPTH * LINE;

// Where chunk n of line k of a panel lies: what a warp loads at a time, two chunks of four
// lines, is on different banks.
DEVICE i32 in_panel(i32 k, i32 chunk) { return k * LINE + (chunk ^ k % 4 * 2) * CHUNK; }

// Elements of a row of WIDTH copied at a time, and the line that a thread copies to in turn i.
template <int WIDTH> struct Panels {
    static constexpr int COPIED = pack_width<Element>(WIDTH);
    static constexpr int LINE_THREADS = PANEL / COPIED, LINES = THREADS / LINE_THREADS;
    static constexpr int TURNS = TILE_DEPTH / LINES;

    static_assert(COPIED * sizeof(Element) >= 4, "what a copy can move");
    static_assert(TILE_DEPTH % LINES == 0, "all threads copy as much");

    static DEVICE i32 line(i32 turn) { return turn * LINES + thread_index() / LINE_THREADS; }

    // Copies TILE_DEPTH lines of COLUMNS elements to panels; zeros for lines from `lines` on
    // and elements from `columns` on. `line_at(i)` is where the line of turn i begins.
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

// The word of an element of panels.
DEVICE u32 panel_word(u32 panels, i32 k, i32 column)
{
    return shared_word(panels + column / PANEL * PANEL_BYTES + in_panel(k, column % PANEL / 4) + column % 4 * 4);
}

// Lines k to k + 7 of 16 columns as the left factor of a product.
DEVICE void load_left(u32 (&to)[4], u32 panels, i32 k, i32 column)
{
    #pragma unroll
    for (i32 n = 0; n < 4; n++)
        to[n] = panel_word(panels, k + n / 2 * 4 + lane_index() % 4, column + n % 2 * 8 + lane_index() / 4);
}

// The same lines of 16 columns as two right factors.
DEVICE void load_right(u32 (&to)[4], u32 panels, i32 k, i32 column)
{
    #pragma unroll
    for (i32 n = 0; n < 4; n++)
        to[n] = panel_word(panels, k + n % 2 * 4 + lane_index() % 4, column + n / 2 * 8 + lane_index() / 4);
}

// The first row and column of a warp's part of the tile.
DEVICE i32 warp_row() { return warp_index() / COLUMN_WARPS * WARP_ROWS; }
DEVICE i32 warp_column() { return warp_index() % COLUMN_WARPS * WARP_COLUMNS; }

// The operands of one step of a warp, and its sums.
struct Operands { u32 left[ROW_PARTS][4], right[COLUMN_PARTS][2]; };
typedef f32 Sums[ROW_PARTS][COLUMN_PARTS][4];

// Loads 16 rows by two chunks of left at a time, and the same elements of 16 columns of right.
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

// value = high + low, both tf32, but for the last bits of the mantissa.
template <int COUNT> DEVICE void split(u32 (&high)[COUNT], u32 (&low)[COUNT], const u32 (&values)[COUNT])
{
    #pragma unroll
    for (i32 n = 0; n < COUNT; n++) {
        high[n] = to_tf32(float_of(values[n]));
        low[n] = to_tf32(float_of(values[n]) - float_of(high[n]));
    }
}

// Adds the products of a step, of so many parts of 16 rows: those beyond are padding.
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

// Adds the products of a stage. The loop stays one: left to itself the assembler loads
// the operands of every step at once, until registers spill.
DEVICE void multiply_stage(Sums &sums, u32 stage, i32 parts)
{
    #pragma unroll 1
    for (i32 step = 0; step < STEPS; step++) {
        Operands operands;
        load_step(operands, stage, step);
        multiply(sums, operands, parts);
    }
}

// ---- from sums to rows ----

// A warp has a corner of shared memory for 16 rows by SLAB columns of sums. A lane takes
// eight elements of a row from it, in packs of as many as are moved at a time; adjacent
// lanes take adjacent packs.
constexpr int SLAB = 32, ROW_LANES = SLAB / 8, ROWS_AT_ONCE = WARP / ROW_LANES;
constexpr int MOVED = pack_width<Element>(OUTER), ROW_PACKS = OUTER / MOVED;
constexpr int CORNER_TURNS = 16 / ROWS_AT_ONCE;
typedef f32 Corner[16][SLAB];

// Where an element lies: chunks of 16 bytes change places so that neither the pairs that
// are written nor the chunks that are read meet in a bank.
DEVICE f32 *in_corner(Corner &corner, i32 row, i32 column)
{
    const i32 chunk = column / 4 ^ (row % 2 * 5 + row / 2 % 2 * 2);
    return &corner[row][chunk * 4 + column % 4];
}

// The sums of a pack.
DEVICE Pack<f32, MOVED> from_corner(Corner &corner, i32 row, i32 column)
{
    constexpr int LOADED = lesser(MOVED, 4);
    Pack<f32, MOVED> pack;
    #pragma unroll
    for (i32 i = 0; i < MOVED; i += LOADED) {
        const Pack<f32, LOADED> part = load<LOADED>(in_corner(corner, row, column + i));
        #pragma unroll
        for (i32 n = 0; n < LOADED; n++)
            pack.at[i + n] = part.at[n];
    }
    return pack;
}

// Stores what of a corner lies within `rows` and OUTER, from column `first` on.
DEVICE void store_corner(Element *drows, Corner &corner, i32 rows, i32 first)
{
    #pragma unroll
    for (i32 i = 0; i < CORNER_TURNS; i++) {
        const i32 row = i * ROWS_AT_ONCE + lane_index() / ROW_LANES;
        if (row >= rows)
            continue;
        #pragma unroll
        for (i32 n = 0; n < 8 / MOVED; n++) {
            const i32 column = (n * ROW_LANES + lane_index() % ROW_LANES) * MOVED;
            if (first + column >= OUTER)
                continue;
            const Pack<f32, MOVED> sums = from_corner(corner, row, column);
            Pack<Element, MOVED> pack;
            #pragma unroll
            for (i32 m = 0; m < MOVED; m++)
                pack.at[m] = round_to<Element>(sums.at[m]);
            store(drows, (i64)row * ROW_PACKS + (first + column) / MOVED, pack);
        }
    }
}

static_assert(THREADS / WARP * sizeof(Corner) + COLUMN_WARPS * TILE_ROWS * sizeof(f32) <= STAGES * STAGE, "the ring can hold the corners");

KERNEL(THREADS) grouped_gemm_dgrad_up(
    const f32 *dup, // [tokens, 32]
    const f32 *up,  // [1, 32, 2880]
    f32 *drows,     // [tokens, 2880]
    i64 tokens)
{
    await_launches();
    alignas(LINE) extern __shared__ Element ring[];

    const Walk at = {(i32)((tokens + TILE_ROWS - 1) / TILE_ROWS)};
    if (!at.goes_on())
        return;
    const RowTile tile = row_tile(tokens, at.row());
    const i32 first_column = at.column() * TILE_COLUMNS, columns = OUTER - first_column;

    // What this thread copies of a slice in its turns.
    typedef Panels<OUTER> Right;
    const i64 first_left = (tile.first + copied_row(0)) * INNER;
    const i64 first_right = tile.expert * INNER * OUTER + first_column;
    const u32 stages = shared_address(ring);
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
    block_sync();  // the ring is free

    Corner &corner = reinterpret_cast<Corner *>(ring)[warp_index()];
    #pragma unroll
    for (i32 i = 0; i < ROW_PARTS; i++) {
        const i32 row = warp_row() + 16 * i, rows = tile.rows - row;
        #pragma unroll
        for (i32 j = 0; j < COLUMN_PARTS; j++)
            #pragma unroll
            for (i32 n = 0; n < 2; n++) {
                const Pack<f32, 2> pair = {sums[i][j][2 * n], sums[i][j][2 * n + 1]};
                store(in_corner(corner, 8 * n + lane_index() / 4, 8 * j + lane_index() % 4 * 2), pair);
            }
        warp_sync();
        const i64 first = (tile.first + row) * OUTER;
        store_corner(drows + first, corner, rows, first_column + warp_column());
        warp_sync();
    }
}
