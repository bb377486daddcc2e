// grouped_gemm_up for cuda:sm_90a: decode (small M), mma.sync on tensor cores
//
//   hidden = act(x[token] · gateᵀ, x[token] · upᵀ)
//
// With few rows the time is that of reading the weights. A block is one warp: it
// reads 8 columns of gate and of up of one expert once, end to end, and multiplies them by all
// rows of its row tile. Work is thus cut into equal numbers of bytes, small enough to give
// every multiprocessor its share. block_x counts row tiles, block_y columns.
// There are at most as many row tiles as blocks; blocks beyond the last tile return.
//
// Weights are the A operand of the tensor core, 16 lines of it. Rows are the B operand: 8, 16, 32 or
// 64 at a time, at most 32 or 16 where a cp.async moves 8 or 4 bytes; more rows take several passes.
//
// Shared memory: a pipeline of 30720 bytes, of as many stages as fit; cp.async fills some while the
// warp multiplies another. A stage has lines of 128 bytes, 64 elements of the inner dimension:
//   left   [16]     8 rows of gate, then 8 rows of up
//   right  [8..64]  x[token]
// Chunk n of 16 bytes of line r lies at n ^ (r % 8), so the eight lines that ldmatrix reads together
// lie in eight different groups of banks. After the main loop the pipeline holds the sums.
//
// Sums are f32, in ascending order of the inner dimension, 16 elements at a time: the order
// of the kernel for larger calls, so a row has the same bits in every batch.
//
// Baked in: inner 4096, outer 14336, experts 8, types, epilogue.
// Read at run time: the number of tokens.

// [prelude: base.hpp, cuda/base.cuh, base.hpp, warp.hpp, cuda/warp.cuh, warp.hpp, cuda/shared.cuh, cuda/async_copy.cuh, cuda/matrix.cuh, cuda/mma.cuh, math/exp.hpp, activation.hpp]

// ---- the kernel ----

typedef bf16 Element;

constexpr int INNER = 4096, OUTER = 14336;
constexpr int EXPERTS = 8, TOP_K = 2;
constexpr int TILE_ROWS = 128, TILE_COLUMNS = 8, TILE_DEPTH = 64;
constexpr int PIPELINE_BYTES = 30720;  // bytes

constexpr int LINE = 128, CHUNK = 16, STEPS = LINE / 32;  // bytes; an mma reads 32 of each line
constexpr int LEFT = 16;                                  // lines of weights
constexpr int DEPTHS = ceil_div(INNER, TILE_DEPTH);

// Elements of one cp.async, lanes that share a line, and lines copied at a time.
constexpr int COPIED = pack_width<Element>(INNER);
constexpr int LINE_LANES = TILE_DEPTH / COPIED, COPIED_LINES = WARP / LINE_LANES;

// Rows at a time. A lane keeps the address of each line that it copies. Smaller copies mean more
// lines for a lane, and 16 addresses are what its registers hold.
constexpr int MOST = 16 * COPIED_LINES;

static_assert(TILE_DEPTH * sizeof(Element) == LINE && COPIED * sizeof(Element) >= 4, "what a copy can move");
static_assert(MOST * LINE <= PIPELINE_BYTES, "the pipeline can hold the sums");

// A row tile: `rows` rows of one expert, from row `first` on.
struct RowTile {
    i64 expert, first;
    i32 rows;
};

// Finds row tile `tile` with a whole warp. Each lane compares it with the first tiles of some
// experts, whose loads are all in flight at once. A binary search would wait for one load after the
// other.
DEVICE RowTile warp_row_tile(const i64 *offsets, const i32 *row_tiles, i32 tile = (i32)block_x())
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

// Epilogue of one element: bias, activation, weight.
DEVICE f32 finished(f32 gate, f32 up)
{
    return activated(gate, up);
}

// The line that a lane copies to in iteration i, and its first element there.
DEVICE i32 copied_line(i32 i) { return i * COPIED_LINES + lane_index() / LINE_LANES; }
DEVICE i32 copied_element() { return lane_index() % LINE_LANES * COPIED; }

// The source of a line. One that does not exist is not read and becomes zeros.
struct Line {
    const Element *begin;
    bool exists;
};

// Copies elements `depth` and on of LINES lines to lines from `to` on; zeros for elements
// from INNER on. `line_at(i)` is the line of iteration i.
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

// Returns the address of chunk `chunk` of line `line` of a stage.
DEVICE u32 in_stage(u32 stage, i32 line, i32 chunk) { return stage + line * LINE + (chunk ^ (line & 7)) * CHUNK; }

// Multiplies a stage by ROWS rows and accumulates.
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

// Returns the position of a sum in the pipeline after the main loop, one line for each row. The sums
// that a warp stores together, of every other row, lie in different banks, and so do those that it
// loads together.
DEVICE i32 sum_at(i32 row, i32 column) { return row * (LINE / 4) + (column ^ (row / 2 + row % 2 * 2) % 4 * 8); }

// Multiplies ROWS rows by the lines of weights and leaves the sums in the pipeline. Row n lies
// at `right + row_at(n) * INNER`; there is none where row_at(n) is negative.
template <int ROWS, class LeftAt, class RowAt>
DEVICE void multiply_rows(f32 *pipeline, LeftAt left_at, const Element *right, RowAt row_at)
{
    constexpr int STAGE = (LEFT + ROWS) * LINE, STAGES = PIPELINE_BYTES / STAGE, TURNS = ROWS / COPIED_LINES;
    const u32 stages = shared_address(pipeline);
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
    warp_sync();  // the pipeline is free
    #pragma unroll
    for (i32 j = 0; j < ROWS / 8; j++)
        #pragma unroll
        for (i32 n = 0; n < 4; n++)
            pipeline[sum_at(j * 8 + lane_index() % 4 * 2 + n % 2, n / 2 * 8 + lane_index() / 4)] = sums[j][n];
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
    alignas(LINE) extern __shared__ f32 pipeline[];

    (void)tokens;
    const RowTile tile = warp_row_tile(offsets, row_tiles);
    const i32 count = lesser(tile.rows, TILE_ROWS), first_column = (i32)block_y() * TILE_COLUMNS;
    const i64 first_weight = (tile.expert * OUTER + first_column) * INNER;

    // The line of weights that this lane copies in iteration i.
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
            multiply_rows<8>(pipeline, left_at, right, row_at);
        else if (left <= 16)
            multiply_rows<16>(pipeline, left_at, right, row_at);
        else if (left <= 32)
            multiply_rows<lesser(32, MOST)>(pipeline, left_at, right, row_at);
        else
            multiply_rows<MOST>(pipeline, left_at, right, row_at);

        // A lane finishes one column, row by row.
        const i32 column = lane_index() % TILE_COLUMNS;
        const bool exists = first_column + column < OUTER;
        #pragma unroll 1
        for (i32 row = lane_index() / TILE_COLUMNS; row < left && exists; row += WARP / TILE_COLUMNS) {
            const i64 at = (first_row + row) * OUTER + first_column + column;
            f32 gate_sum = pipeline[sum_at(row, column)], up_sum = pipeline[sum_at(row, TILE_COLUMNS + column)];
            const f32 value = finished(gate_sum, up_sum);
            hidden[at] = round_to<Element>(value);
        }
        warp_sync();  // the pipeline is free again
    }
}
