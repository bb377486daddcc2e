// grouped_gemm_up for cuda:sm_90a, of few rows, on the matrix units
//
//   hidden = act(x[token] · gateᵀ, x[token] · upᵀ)
//
// With few rows a product is a reading of weights. A block is one warp, which reads 8
// columns of gate and of up of one expert from end to end, once, and multiplies them by all
// rows of its tile. So work is cut into equal numbers of bytes, small enough for every
// multiprocessor to have its share. block_x counts row tiles, block_y columns.
// There are at most as many row tiles as blocks; the blocks beyond them return.
//
// Weights are the left factor of the matrix unit, 16 lines of it; rows are the right one,
// 8, 16, 32 or 64 of them, as there are, and more by turns; at most 32 or 16 where lines
// are copied in pieces of 8 or 4 bytes.
//
// Shared memory: a ring of 30720 bytes, of as many stages as fit in, filled by asynchronous
// copies while one is multiplied. A stage has lines of 128 bytes, 64 elements of the inner
// dimension:
//   left   [16]     8 rows of gate, then 8 rows of up
//   right  [8..64]  x[token]
// Chunk n of 16 bytes of line r lies at n ^ (r % 8): eight lines of a matrix load are
// on eight different groups of banks. At the end the ring holds the sums.
//
// Sums are f32, in ascending order of the inner dimension, 16 elements at a time: that
// of the kernel for many rows, so that a row has the same sums in any company.
//
// Baked in: inner 4096, outer 14336, experts 8, types, epilogue. Not the tokens.

// [prelude: base.hpp, cuda/base.cuh, base.hpp, warp.hpp, cuda/warp.cuh, warp.hpp, cuda/shared.cuh, cuda/async_copy.cuh, cuda/matrix.cuh, cuda/mma.cuh, math/exp.hpp, activation.hpp]

// ---- the kernel ----

typedef bf16 Element;

constexpr int INNER = 4096, OUTER = 14336;
constexpr int EXPERTS = 8, TOP_K = 2;
constexpr int TILE_ROWS = 128, TILE_COLUMNS = 8, TILE_DEPTH = 64;
constexpr int RING = 30720;  // bytes

constexpr int LINE = 128, CHUNK = 16, STEPS = LINE / 32;  // bytes; a product takes 32 of each line
constexpr int LEFT = 16;                                  // lines of weights
constexpr int DEPTHS = ceil_div(INNER, TILE_DEPTH);

// Elements copied at a time, lanes that share a line, and lines copied at a time.
constexpr int COPIED = pack_width<Element>(INNER);
constexpr int LINE_LANES = TILE_DEPTH / COPIED, COPIED_LINES = WARP / LINE_LANES;

// Rows at a time. A lane keeps the address of each line that it copies, of which small
// pieces have more: never more than 16.
constexpr int MOST = 16 * COPIED_LINES;

static_assert(TILE_DEPTH * sizeof(Element) == LINE && COPIED * sizeof(Element) >= 4, "what a copy can move");
static_assert(MOST * LINE <= RING, "the ring can hold the sums");

// The rows of a block: `rows` of them from row `first` on, all of one expert.
struct RowTile {
    i64 expert, first;
    i32 rows;
};

// The row tile of a warp. Each lane compares it with the first tiles of some experts, which come all
// at once; a search by halves would wait for one after the other.
DEVICE RowTile row_tile_of_warp(const i64 *offsets, const i32 *row_tiles, i32 tile = (i32)block_x())
{
    constexpr int HELD = lesser(ceil_div(EXPERTS, WARP), 8);
    const i32 tiles = row_tiles[EXPERTS];
    i32 begun = 0;  // experts whose first tile is this one or before it; the end is after all tiles
    #pragma unroll 1
    for (i32 start = 0; start < EXPERTS; start += HELD * WARP) {
        const i32 own = start + thread_index();  // a block is a warp
        i32 firsts[HELD];
        #pragma unroll
        for (i32 n = 0; n < HELD; n++)
            firsts[n] = row_tiles[lesser(own + n * WARP, EXPERTS)];
        #pragma unroll
        for (i32 n = 0; n < HELD; n++)
            begun += population(ballot(firsts[n] <= tile));
    }
    if (tile >= tiles)
        return {0, 0, 0};
    const i32 expert = begun - 1;
    const i64 first = offsets[expert] + (i64)(tile - row_tiles[expert]) * TILE_ROWS;
    return {expert, first, (i32)(offsets[expert + 1] - first)};
}

DEVICE f32 activated(f32 gate, f32 up)
{
    return activation(gate) * up;
}

// What becomes of a sum: bias, activation, weight.
DEVICE f32 finished(f32 gate, f32 up)
{
    return activated(gate, up);
}

// The line that a lane copies to in its turn i, and the piece of it.
DEVICE i32 copied_line(i32 i) { return i * COPIED_LINES + lane_index() / LINE_LANES; }
DEVICE i32 copied_element() { return lane_index() % LINE_LANES * COPIED; }

// Where a line begins, and whether it exists: what does not is zeros, and is not read.
struct Line {
    const Element *begin;
    bool exists;
};

// Copies elements `depth` and on of LINES lines to lines from `to` on; zeros for elements
// from INNER on. `line_at(i)` is the line of turn i.
template <int LINES, class LineAt> DEVICE void copy_lines(u32 to, i32 depth, LineAt line_at)
{
    const i32 k = depth + copied_element(), byte = copied_element() * (i32)sizeof(Element);
    #pragma unroll
    for (i32 i = 0; i < LINES / COPIED_LINES; i++) {
        const Line from = line_at(i);
        const u32 place = to + copied_line(i) * LINE + (byte ^ (copied_line(i) & 7) * CHUNK);
        copy_async<COPIED * sizeof(Element)>(place, from.begin + k, from.exists && k < INNER);
    }
}

// Where chunk `chunk` of line `line` of a stage is.
DEVICE u32 in_stage(u32 stage, i32 line, i32 chunk) { return stage + line * LINE + (chunk ^ (line & 7)) * CHUNK; }

// Adds the products of a stage with ROWS rows.
template <int ROWS> DEVICE void multiply_stage(f32 (&sums)[ROWS / 8][4], u32 stage)
{
    const i32 lane = lane_index();
    #pragma unroll
    for (i32 step = 0; step < STEPS; step++) {
        u32 left[4];
        load_matrices(left, in_stage(stage, lane % 16, 2 * step + lane / 16));
        #pragma unroll
        for (i32 j = 0; j < ROWS / 8; j++) {
            u32 right[2];
            load_matrices(right, in_stage(stage, LEFT + j * 8 + lane % 8, 2 * step + lane / 8 % 2));
            mma_16x8x16_bf16(sums[j], left, right);
        }
    }
}

// Where a sum lies in the ring at the end, one line for each row: those that a warp lays
// down together, of every other row, are on different banks, and those that it picks up, too.
DEVICE i32 sum_at(i32 row, i32 column) { return row * (LINE / 4) + (column ^ (row / 2 + row % 2 * 2) % 4 * 8); }

// Leaves in the ring, for each of ROWS rows, its sums with the lines of weights. Row n lies
// at `right + row_at(n) * INNER`; there is none where row_at(n) is negative.
template <int ROWS, class LeftAt, class RowAt>
DEVICE void multiply_rows(f32 *ring, LeftAt left_at, const Element *right, RowAt row_at)
{
    constexpr int STAGE = (LEFT + ROWS) * LINE, STAGES = RING / STAGE, TURNS = ROWS / COPIED_LINES;
    const u32 stages = shared_address(ring);
    i32 rows[TURNS];
    #pragma unroll
    for (i32 i = 0; i < TURNS; i++)
        rows[i] = row_at(copied_line(i));
    auto right_at = [&](i32 i) { return Line{right + (i64)(rows[i] < 0 ? 0 : rows[i]) * INNER, rows[i] >= 0}; };
    auto fetch = [&](i32 at) {
        const u32 stage = stages + at % STAGES * STAGE;
        if (at < DEPTHS) {
            copy_lines<LEFT>(stage, at * TILE_DEPTH, left_at);
            copy_lines<ROWS>(stage + LEFT * LINE, at * TILE_DEPTH, right_at);
        }
        commit_copies();
    };

    f32 sums[ROWS / 8][4] = {};
    #pragma unroll 1
    for (i32 at = 0; at < STAGES - 1; at++)
        fetch(at);
    #pragma unroll 1
    for (i32 at = 0; at < DEPTHS; at++) {
        wait_copies<STAGES - 2>();
        warp_sync();  // this stage is here, and all have read the one before it
        fetch(at + STAGES - 1);
        multiply_stage<ROWS>(sums, stages + at % STAGES * STAGE);
    }
    wait_copies<0>();
    warp_sync();  // the ring is free
    #pragma unroll
    for (i32 j = 0; j < ROWS / 8; j++)
        #pragma unroll
        for (i32 n = 0; n < 4; n++)
            ring[sum_at(j * 8 + lane_index() % 4 * 2 + n % 2, n / 2 * 8 + lane_index() / 4)] = sums[j][n];
    warp_sync();
}

KERNEL(WARP) grouped_gemm_up(
    const bf16 *x,        // [tokens, 4096]
    const bf16 *gate,     // [8, 14336, 4096]
    const bf16 *up,       // [8, 14336, 4096]
    const i64 *offsets,   // [9]
    const i32 *row_tiles, // [9]
    const i32 *row_slots, // [rows]
    bf16 *hidden,         // [rows, 14336]
    i64 tokens)
{
    await_launches();
    alignas(LINE) extern __shared__ f32 ring[];

    (void)tokens;
    const RowTile tile = row_tile_of_warp(offsets, row_tiles);
    const i32 count = lesser(tile.rows, TILE_ROWS), first_column = (i32)block_y() * TILE_COLUMNS;
    const i64 first_weight = (tile.expert * OUTER + first_column) * INNER;

    // The line of weights that this lane copies in its turn i.
    auto left_at = [&](i32 i) {
        const i32 line = copied_line(i), column = line % TILE_COLUMNS;
        const Element *const weights = line < TILE_COLUMNS ? gate : up;
        return Line{weights + first_weight + (i64)column * INNER, first_column + column < OUTER};
    };
    #pragma unroll 1
    for (i32 first = 0; first < count; first += MOST) {
        const i64 first_row = tile.first + first;
        const i32 left = lesser(count - first, MOST);
        auto row_at = [&](i32 n) { return n < left ? row_slots[first_row + n] / TOP_K : -1; };
        const Element *const right = x;
        if (left <= 8)
            multiply_rows<8>(ring, left_at, right, row_at);
        else if (left <= 16)
            multiply_rows<16>(ring, left_at, right, row_at);
        else if (left <= 32)
            multiply_rows<lesser(32, MOST)>(ring, left_at, right, row_at);
        else
            multiply_rows<MOST>(ring, left_at, right, row_at);

        // A lane makes results of one column, row by row.
        const i32 column = lane_index() % TILE_COLUMNS;
        const bool exists = first_column + column < OUTER;
        #pragma unroll 1
        for (i32 row = lane_index() / TILE_COLUMNS; row < left && exists; row += WARP / TILE_COLUMNS) {
            const i64 at = (first_row + row) * OUTER + first_column + column;
            f32 gate_sum = ring[sum_at(row, column)], up_sum = ring[sum_at(row, TILE_COLUMNS + column)];
            const f32 value = finished(gate_sum, up_sum);
            hidden[at] = round_to<Element>(value);
        }
        warp_sync();  // the ring is free again
    }
}
