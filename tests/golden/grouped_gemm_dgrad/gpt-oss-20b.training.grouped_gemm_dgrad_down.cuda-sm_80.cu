// grouped_gemm_dgrad_down for cuda:sm_80: mma.sync on tensor cores, operands by cp.async
//
//   P = dout · down
//   hidden = w · act(gate_pre, up_pre), dgate, dup = act'(gate_pre, up_pre) · w · P
//   dweight_parts = <P, act>, over the columns of a tile
//
// Tile: 128 rows of one expert by 128 columns. A block computes one tile, a warp 64 x 64 of it.
// Tiles run in groups of 16 row tiles, inside a group column by column, so that blocks which run
// together share rows and weights in the L2 cache. Blocks beyond the last tile return.
//
// Shared memory: a pipeline of 2 stages; cp.async fills some while the warps multiply another.
// A stage has 64 elements of the inner dimension:
//   left   [128][128 bytes]          dout
//   right  [128 columns][64]   rows of down, in panels of 128 bytes of each
// Chunk n of 16 bytes of line r of left lies at n ^ (r % 8). After the main loop the pipeline holds
// the epilogue tiles, P of 16 rows for each warp.
//
// Sums are f32, in ascending order of the inner dimension, 16 elements at a time.
//
// Baked in: inner 2880, outer 2880, experts 32, types, epilogue.
// Read at run time: the number of tokens.

// [prelude: base.hpp, cuda/base.cuh, base.hpp, warp.hpp, cuda/warp.cuh, warp.hpp, cuda/shared.cuh, cuda/async_copy.cuh, cuda/matrix.cuh, cuda/mma.cuh, math/exp.hpp, activation.hpp, activation_slope.hpp]

// ---- the kernel ----

typedef bf16 Element;

constexpr int INNER = 2880, OUTER = 2880;
constexpr int EXPERTS = 32;
constexpr int THREADS = 128, STAGES = 2;
constexpr int TILE_ROWS = 128, TILE_COLUMNS = 128, TILE_DEPTH = 64;
constexpr int WARP_ROWS = 64, WARP_COLUMNS = 64;

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
static_assert(STAGES * STAGE == 65536, "the shared memory of the launch");

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

// Returns the position of chunk n of line k of a panel. What a warp loads together, one chunk of eight
// lines, lies in different banks.
DEVICE i32 in_panel(i32 k, i32 chunk) { return k * LINE + (chunk ^ k % 8) * CHUNK; }

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

// Loads lines k to k + 15 of 16 columns as the A fragment of an mma.
DEVICE void load_left(u32 (&to)[4], u32 panels, i32 k, i32 column)
{
    const i32 line = k + lane_index() / 16 * 8 + lane_index() % 8;
    column += lane_index() / 8 % 2 * 8;
    load_transposed(to, panels + column / PANEL * PANEL_BYTES + in_panel(line, column % PANEL / 8));
}

// Loads the same lines of 16 columns as two B fragments.
DEVICE void load_right(u32 (&to)[4], u32 panels, i32 k, i32 column)
{
    const i32 line = k + lane_index() / 8 % 2 * 8 + lane_index() % 8;
    column += lane_index() / 16 * 8;
    load_transposed(to, panels + column / PANEL * PANEL_BYTES + in_panel(line, column % PANEL / 8));
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

// Multiplies one step and accumulates, for `parts` parts of 16 rows. Parts beyond are padding.
DEVICE void multiply(Sums &sums, const Operands &by, i32 parts)
{
    #pragma unroll
    for (i32 j = 0; j < COLUMN_PARTS; j++)
        #pragma unroll
        for (i32 i = 0; i < ROW_PARTS; i++)
            if (i < parts)
                mma_16x8x16_bf16(sums[i][j], by.left[i], by.right[j]);
}

// Multiplies a stage and accumulates. The fragments of a step are loaded while the step before is
// multiplied.
DEVICE void multiply_stage(Sums &sums, u32 stage, i32 parts)
{
    Operands operands[2];
    load_step(operands[0], stage, 0);
    #pragma unroll
    for (i32 step = 0; step < STEPS; step++) {
        if (step + 1 < STEPS)
            load_step(operands[(step + 1) % 2], stage, step + 1);
        multiply(sums, operands[step % 2], parts);
    }
}

constexpr f32 LIMIT = 7.0f;

// Comparisons keep a NaN.
DEVICE f32 below(f32 x) { return x > LIMIT ? LIMIT : x; }
DEVICE f32 within(f32 x) { return x < -LIMIT ? -LIMIT : below(x); }

// Backward epilogue of one element of P = dout · down. `weight` is the weight of the row.
struct ActivationBwd {
    f32 hidden;  // weight * activation, a factor of the down matrix's gradient
    f32 dgate, dup;  // gradients of what entered the activation
    f32 part;  // P * activation, summed over a row: the weight's gradient
};

DEVICE ActivationBwd activation_bwd(f32 gate_pre, f32 up_pre, f32 product, f32 weight)
{
    f32 gate = gate_pre, up = up_pre;
    up = within(up);
    gate = below(gate);
    up += 1.0f;
    const f32 back = weight * product;
    const f32 factor = activation(gate), value = factor * up;
    f32 dgate = back * up * activation_slope(gate), dup = back * factor;
    // A clamp that limits its input has gradient zero.
    dgate = gate_pre > LIMIT ? 0.0f : dgate;
    dup = up_pre > LIMIT || up_pre < -LIMIT ? 0.0f : dup;
    return {weight * value, dgate, dup, product * value};
}

// ---- epilogue ----

// A warp stages 16 rows by SLAB columns of sums in its epilogue tile. A lane then takes eight
// elements of a row, in packs of one memory access each; adjacent lanes take adjacent packs.
constexpr int SLAB = 64, ROW_LANES = SLAB / 8, ROWS_AT_ONCE = WARP / ROW_LANES;
constexpr int MOVED = pack_width<Element>(OUTER), ROW_PACKS = OUTER / MOVED;
constexpr int EPILOGUE_PASSES = 16 / ROWS_AT_ONCE;
typedef f32 EpilogueTile[16][SLAB];

// Returns the position of an element. Chunks of 16 bytes are swizzled so that neither the pairs
// written by lanes nor the chunks read by them conflict in a bank.
DEVICE f32 *in_epilogue_tile(EpilogueTile &epilogue_tile, i32 row, i32 column)
{
    const i32 chunk = column / 4 ^ (row % 4 * 2 + column / 32);
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

// The tensors that the down half reads and writes, from the first row of an epilogue tile on.
struct Kept {
    const Element *gate_pre, *up_pre;
    Element *hidden, *dgate, *dup;
};

// Finishes the part of an epilogue tile within `rows` and OUTER, from column `first` on.
// Adds <P, activation> over this lane's columns of a row to parts[i] of pass i.
DEVICE void finish_epilogue_tile(const Kept &kept, EpilogueTile &epilogue_tile, i32 rows, i32 first, const f32 (&weights)[EPILOGUE_PASSES], f32 (&parts)[EPILOGUE_PASSES])
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
            const i64 at = (i64)row * ROW_PACKS + (first + column) / MOVED;
            const Pack<f32, MOVED> products = load_epilogue_tile(epilogue_tile, row, column);
            const Pack<Element, MOVED> gate_pre = load<MOVED>(kept.gate_pre, at);
            const Pack<Element, MOVED> up_pre = load<MOVED>(kept.up_pre, at);
            Pack<Element, MOVED> hidden, dgate, dup;
            #pragma unroll
            for (i32 m = 0; m < MOVED; m++) {
                const ActivationBwd back = activation_bwd(to_f32(gate_pre.at[m]), to_f32(up_pre.at[m]), products.at[m], weights[i]);
                hidden.at[m] = round_to<Element>(back.hidden);
                dgate.at[m] = round_to<Element>(back.dgate);
                dup.at[m] = round_to<Element>(back.dup);
                parts[i] += back.part;
            }
            store(kept.hidden, at, hidden);
            store(kept.dgate, at, dgate);
            store(kept.dup, at, dup);
        }
    }
}

// Loads the weights of the rows that this lane finishes.
DEVICE void row_weights(f32 (&weights)[EPILOGUE_PASSES], const f32 *topk_weights, const i32 *row_slots, i64 first_row, i32 rows)
{
    #pragma unroll
    for (i32 i = 0; i < EPILOGUE_PASSES; i++) {
        const i32 row = i * ROWS_AT_ONCE + lane_index() / ROW_LANES;
        weights[i] = row < rows ? topk_weights[row_slots[first_row + row]] : 0.0f;
    }
}

// Returns the sum over the lanes that share a row, to each of them.
DEVICE f32 row_sum(f32 part)
{
    #pragma unroll
    for (i32 step = 1; step < ROW_LANES; step *= 2)
        part += shuffle(part, lane_index() ^ step);
    return part;
}

static_assert(THREADS / WARP * sizeof(EpilogueTile) + COLUMN_WARPS * TILE_ROWS * sizeof(f32) <= STAGES * STAGE, "the pipeline can hold the epilogue tiles");

KERNEL(THREADS) grouped_gemm_dgrad_down(
    const bf16 *__restrict__ dout,        // [rows, 2880]
    const bf16 *__restrict__ down,        // [32, 2880, 2880]
    const bf16 *__restrict__ gate_pre,    // [rows, 2880]
    const bf16 *__restrict__ up_pre,      // [rows, 2880]
    const i64 *__restrict__ offsets,      // [33]
    const i32 *__restrict__ row_tiles,    // [33]
    const i32 *__restrict__ row_slots,    // [rows]
    const f32 *__restrict__ topk_weights, // [tokens, 4]
    bf16 *__restrict__ hidden,            // [rows, 2880]
    bf16 *__restrict__ dgate,             // [rows, 2880]
    bf16 *__restrict__ dup,               // [rows, 2880]
    f32 *__restrict__ dweight_parts,      // [rows, 23]
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

    // Sources of this thread's copies.
    typedef Panels<OUTER> Right;
    const i64 first_left = (tile.first + copied_row(0)) * INNER;
    const i64 first_right = tile.expert * INNER * OUTER + first_column;
    const u32 stages = shared_address(pipeline);
    auto fetch = [&](i32 at) {
        if (at < SLICES) {
            const u32 stage = stages + at % STAGES * STAGE;
            const i32 depth = at * TILE_DEPTH;
            const Element *const left = dout + first_left, *const right = down + first_right;
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
    f32 *const row_parts = reinterpret_cast<f32 *>(reinterpret_cast<EpilogueTile *>(pipeline) + THREADS / WARP);  // [COLUMN_WARPS][TILE_ROWS]
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
        const Kept kept = {gate_pre + first, up_pre + first, hidden + first, dgate + first, dup + first};
        f32 weights[EPILOGUE_PASSES], parts[EPILOGUE_PASSES] = {};
        row_weights(weights, topk_weights, row_slots, tile.first + row, rows);
        finish_epilogue_tile(kept, epilogue_tile, rows, first_column + warp_column(), weights, parts);
        #pragma unroll
        for (i32 pass = 0; pass < EPILOGUE_PASSES; pass++) {
            const f32 part = row_sum(parts[pass]);
            if (lane_index() % ROW_LANES == 0)
                row_parts[warp_column() / WARP_COLUMNS * TILE_ROWS + row + pass * ROWS_AT_ONCE + lane_index() / ROW_LANES] = part;
        }
        warp_sync();
    }
    block_sync();
    for (i32 row = thread_index(); row < TILE_ROWS && row < tile.rows; row += THREADS) {
        f32 sum = 0.0f;
        #pragma unroll
        for (i32 warp = 0; warp < COLUMN_WARPS; warp++)
            sum += row_parts[warp * TILE_ROWS + row];
        dweight_parts[(tile.first + row) * COLUMN_TILES + scheduler.column()] = sum;
    }
}
