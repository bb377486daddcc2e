// grouped_gemm_dgrad_down for rocm:gfx942: matrix cores, mfma_32x32x8
//
//   P = dout · down
//   hidden = weight * a,  dgate, dup = act'(gate_pre, up_pre) * weight * P,  dweight_parts = P · a
//   where a = act(gate_pre, up_pre)
//
// Tile: 128 rows of one expert by 128 columns. A block computes one tile, each of its 4 waves
// 64 x 64 of it.
// Tiles run in groups of 16 row tiles, inside a group column by column, so that blocks which run
// together share rows and weights in the L2 cache. Blocks beyond the last tile return.
//
// Shared memory (LDS): two buffers of each operand. While the waves multiply one, the next 32
// elements of the inner dimension move from global memory to registers, and from there to the other.
//   left   bf16 [128][32]   dout
//   right  bf16 [128][32]   columns of down, transposed in registers
//
// Baked in: inner 2880, outer 2880, experts 32, types, epilogue.
// Read at run time: the number of tokens.

// [prelude: base.hpp, hip/base.hpp, bf16_bits.hpp, base.hpp, hip/mfma.hpp, math/exp.hpp, activation.hpp, activation_slope.hpp]

// ---- the kernel ----

typedef bf16 Element;

constexpr int INNER = 2880, OUTER = 2880, MATRICES = 1;
constexpr int EXPERTS = 32;
constexpr int THREADS = 256, WAVE = 64;
constexpr int TILE_ROWS = 128, TILE_COLUMNS = 128, TILE_DEPTH = 32;
constexpr int WAVE_ROWS = 64, WAVE_COLUMNS = 64;

// A matrix instruction has EDGE x EDGE sums; those of a row lie in GROUPS lanes, SUMS in each.
constexpr int EDGE = 32, GROUPS = WAVE / EDGE, SUMS = EDGE / GROUPS;
constexpr int ROW_PARTS = WAVE_ROWS / EDGE, COLUMN_PARTS = WAVE_COLUMNS / EDGE;
constexpr int COLUMN_WAVES = TILE_COLUMNS / WAVE_COLUMNS;

// A chunk is 16 bytes, and a line of shared memory is CHUNKS of them.
constexpr int CHUNK = 16 / sizeof(Element), CHUNKS = TILE_DEPTH / CHUNK;
typedef Pack<Element, CHUNK> Chunk;

// Adjacent columns of a lane.
constexpr int RUN = COLUMN_PARTS * SUMS;

// Elements loaded and stored at a time.
constexpr int LOADED = pack_width<Element>(INNER), STORED = lesser(pack_width<Element>(OUTER), RUN);

static_assert(TILE_ROWS / WAVE_ROWS * COLUMN_WAVES * WAVE == THREADS, "every wave owns a part of the tile");

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

// XCD swizzle. The hardware deals blocks out to the XCDs (accelerator complex dies) in turn, and each
// XCD has its own L2 cache. The swizzle gives each XCD a contiguous run of tiles. On a GPU with fewer
// XCDs each has several such runs.
constexpr int XCDS = 8;

DEVICE i32 xcd_swizzle(i32 block, i32 tiles)
{
    const i32 xcd = block % XCDS, each = tiles / XCDS, longer = lesser(xcd, tiles % XCDS);
    return block < tiles ? xcd * each + longer + block / XCDS : block;
}

// Gives this block its one tile, out of `row_tiles` x COLUMN_TILES.
struct TileScheduler {
    const i32 row_tiles;
    i32 tile_index = xcd_swizzle((i32)block_x(), row_tiles * COLUMN_TILES);

    DEVICE bool is_valid() const { return tile_index < row_tiles * COLUMN_TILES; }
    DEVICE void advance() { tile_index = 0x7fffffff; }
    DEVICE i32 group() const { return tile_index / (GROUP * COLUMN_TILES) * GROUP; }
    DEVICE i32 within() const { return tile_index - group() * COLUMN_TILES; }
    DEVICE i32 rows() const { return lesser(GROUP, row_tiles - group()); }
    DEVICE i32 row() const { return group() + within() % rows(); }
    DEVICE i32 column() const { return within() / rows(); }
};

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

// Returns the position of a chunk of a line in LDS. The banks are eight chunks wide. The eight lanes
// that LDS serves together conflict in none of them: neither when each writes to every second line,
// nor when they read the lines of a matrix instruction, which are runs of four or single lines, RUN
// lines apart.
DEVICE i32 place(i32 line, i32 chunk)
{
    const i32 at = line * CHUNKS + chunk;
    return at ^ line / 2 % 8 ^ line / 32 % 2 * 2;
}

typedef Pack<Element, 2> Pair;

// Transposes LINES columns of rows in global memory on their way to LDS, where a line runs along the
// contraction. A thread takes pairs of adjacent columns, CHUNK rows of each, and transposes them in
// registers. WIDTH is the stride of the rows; every SPAN lines belong to one matrix.
template <int LINES, int WIDTH, int SPAN = LINES> struct TurnedStage {
    static constexpr int HELD = LINES / 2 * CHUNKS / THREADS;
    static_assert(HELD * THREADS == LINES / 2 * CHUNKS, "every thread moves as many pairs of chunks");

    i32 rows[HELD][CHUNK];  // the next ones
    Pair held[HELD][CHUNK];

    DEVICE static i32 line_of(i32 i) { return (i * THREADS + thread_index()) % (LINES / 2) * 2; }
    DEVICE static i32 chunk_of(i32 i) { return (i * THREADS + thread_index()) / (LINES / 2); }

    // Finds the rows from `depth` on: `row_of(k)`, which is asked for k below `end` only.
    template <class RowOf> DEVICE void aim(i32 depth, i32 end, RowOf row_of)
    {
        if (depth >= end)
            return;
        #pragma unroll
        for (i32 i = 0; i < HELD; i++)
            #pragma unroll
            for (i32 n = 0; n < CHUNK; n++)
                rows[i][n] = row_of(lesser(depth + chunk_of(i) * CHUNK + n, end - 1));
    }

    // Loads the rows of the last aim(); `begin(line, row)` is the first element of a row in the matrix of
    // a line. No load has a condition of its own: a row beyond `end` is the last row until put() clears
    // it, and a column beyond `columns` is one of the last, whose sums are never stored.
    template <class Begin> DEVICE void fetch(i32 depth, i32 end, i32 columns, Begin begin)
    {
        if (depth >= end)
            return;
        #pragma unroll
        for (i32 i = 0; i < HELD; i++) {
            const i32 line = line_of(i), column = line % SPAN;
            #pragma unroll
            for (i32 n = 0; n < CHUNK; n++) {
                const Element *row = begin(line, rows[i][n]);
                if (WIDTH % 2 == 0)
                    held[i][n] = load<2>(row + lesser(column, columns - 2));
                else
                    held[i][n] = Pair{row[lesser(column, columns - 1)], row[lesser(column + 1, columns - 1)]};
            }
        }
    }

    // With zeros for rows beyond `end`.
    DEVICE void put(Chunk *tile, i32 depth, i32 end) const
    {
        #pragma unroll
        for (i32 i = 0; i < HELD; i++) {
            Chunk chunks[2];
            #pragma unroll
            for (i32 n = 0; n < CHUNK; n++) {
                const Pair pair = depth + chunk_of(i) * CHUNK + n < end ? held[i][n] : Pair{};
                chunks[0].at[n] = pair.at[0];
                chunks[1].at[n] = pair.at[1];
            }
            tile[place(line_of(i), chunk_of(i))] = chunks[0];
            tile[place(line_of(i) + 1, chunk_of(i))] = chunks[1];
        }
    }
};

// Loads the chunk of a row from element k on; zeros beyond the end of the row.
DEVICE Chunk load_chunk(const Element *row, i32 k, i32 inner = INNER)
{
    Chunk chunk = {};
    #pragma unroll
    for (i32 n = 0; n < CHUNK; n += LOADED)
        if (k + n < inner)
            store(chunk.at + n, load<LOADED>(row + k + n));
    return chunk;
}

// Moves LINES lines of a tile from global memory through registers to LDS.
template <int LINES> struct Stage {
    static constexpr int HELD = LINES * CHUNKS / THREADS;
    static_assert(HELD * THREADS == LINES * CHUNKS, "every thread moves as many chunks");

    const Element *rows[HELD];  // the rows of its chunks; null for zeros
    Chunk held[HELD];

    DEVICE static i32 line_of(i32 i) { return (i * THREADS + thread_index()) / CHUNKS; }
    DEVICE static i32 chunk_of() { return thread_index() % CHUNKS; }

    // Sets the sources: `begin(line)` is the first element of the row of a line.
    template <class Begin> DEVICE void aim(Begin begin)
    {
        #pragma unroll
        for (i32 i = 0; i < HELD; i++)
            rows[i] = begin(line_of(i));
    }

    // Loads from element `depth` on; zeros from `inner` on.
    DEVICE void fetch(i32 depth, i32 inner = INNER)
    {
        #pragma unroll
        for (i32 i = 0; i < HELD; i++)
            held[i] = rows[i] ? load_chunk(rows[i], depth + chunk_of() * CHUNK, inner) : Chunk{};
    }

    DEVICE void put(Chunk *tile) const
    {
        #pragma unroll
        for (i32 i = 0; i < HELD; i++)
            tile[place(line_of(i), chunk_of())] = held[i];
    }
};

typedef f32x16 Sums;

// Row r of a matrix instruction's result is sum sum_of(r) of the lanes in group group_of(r).
DEVICE i32 group_of(i32 row) { return row / 4 % GROUPS; }
DEVICE i32 sum_of(i32 row) { return row / 4 / GROUPS * 4 + row % 4; }

// The part of a line that a lane passes to several matrix instructions. An instruction
// multiplies elements that need not be adjacent, the same ones on both sides. Groups pass adjacent
// chunks, STEP of them in all.
typedef Chunk Share;
constexpr int STEP = GROUPS;

DEVICE Share share(const Chunk *tile, i32 line, i32 chunk, i32 lane)
{
    return tile[place(line, chunk + lane / EDGE)];
}

DEVICE void add_product(Sums &sums, const Share &column, const Share &row)
{
    #pragma unroll
    for (i32 k = 0; k < CHUNK; k += 4)
        sums = mfma_32x32x8(load<4>(column.at + k), load<4>(row.at + k), sums);
}

// Returns the column of a wave for a row of a matrix instruction; a lane gets RUN adjacent columns.
DEVICE i32 column_of(i32 part, i32 row) { return group_of(row) * RUN + part * SUMS + sum_of(row); }

// Multiplies one buffer and accumulates, for a wave: lines of left from `row` on, of right from `column`
// on. Columns are the left operand, so that all sums of a lane belong to one row.
DEVICE void multiply(Sums (&sums)[ROW_PARTS][COLUMN_PARTS], const Chunk *left, i32 row, const Chunk *right, i32 column,
                     i32 lane)
{
    #pragma unroll
    for (i32 chunk = 0; chunk < CHUNKS; chunk += STEP) {
        Share rows[ROW_PARTS];
        #pragma unroll
        for (i32 i = 0; i < ROW_PARTS; i++)
            rows[i] = share(left, row + i * EDGE + lane % EDGE, chunk, lane);
        #pragma unroll
        for (i32 j = 0; j < COLUMN_PARTS; j++) {
            const Share columns = share(right, column + column_of(j, lane % EDGE), chunk, lane);
            #pragma unroll
            for (i32 i = 0; i < ROW_PARTS; i++)
                add_product(sums[i][j], columns, rows[i]);
        }
    }
}

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
    __shared__ Chunk left[2][TILE_ROWS * CHUNKS], right[2][TILE_COLUMNS * CHUNKS];

    (void)tokens;
    const TileScheduler scheduler = {row_tiles[EXPERTS]};
    if (!scheduler.is_valid())
        return;
    const RowTile tile = row_tile(offsets, row_tiles, scheduler.row());
    const i32 first_column = scheduler.column() * TILE_COLUMNS, columns = OUTER - first_column;

    const i32 lane = thread_index() % WAVE, wave = thread_index() / WAVE;
    const i32 wave_row = wave / COLUMN_WAVES * WAVE_ROWS, wave_column = wave % COLUMN_WAVES * WAVE_COLUMNS;
    Sums sums[ROW_PARTS][COLUMN_PARTS] = {};
    i32 buffer = 0;

    #pragma unroll 1
    for (i32 matrix = 0; matrix < MATRICES; matrix++) {
        const Element *factor = dout;
        const Element *weights = down;
        weights += tile.expert * INNER * OUTER + first_column;
        const auto itself = [](i32 k) { return k; };
        const auto weight_row = [&](i32, i32 k) { return weights + (i64)k * OUTER; };
        Stage<TILE_ROWS> left_stage;
        left_stage.aim([&](i32 row) { return row < tile.rows ? factor + (tile.first + row) * INNER : nullptr; });
        left_stage.fetch(0);
        TurnedStage<TILE_COLUMNS, OUTER> right_stage;
        right_stage.aim(0, INNER, itself);
        right_stage.fetch(0, INNER, columns, weight_row);
        #pragma unroll 1
        for (i32 depth = 0; depth < INNER; depth += TILE_DEPTH, buffer ^= 1) {
            left_stage.put(left[buffer]);
            right_stage.put(right[buffer], depth, INNER);
            block_sync();
            left_stage.fetch(depth + TILE_DEPTH);
            right_stage.aim(depth + TILE_DEPTH, INNER, itself);
            right_stage.fetch(depth + TILE_DEPTH, INNER, columns, weight_row);
            if (wave_row < tile.rows)  // a wave without rows multiplies nothing
                multiply(sums, left[buffer], wave_row, right[buffer], wave_column, lane);
        }
    }

    // The parts of a row, one for each wave and group of lanes that shares it. They reuse a buffer, which
    // all waves have read once the barrier is passed.
    constexpr int PARTS = COLUMN_WAVES * GROUPS;
    static_assert(PARTS * sizeof(f32) <= CHUNKS * sizeof(Chunk), "parts of a row fit into its line");
    f32 *parts = reinterpret_cast<f32 *>(left[0]);
    block_sync();

    #pragma unroll
    for (i32 i = 0; i < ROW_PARTS; i++) {
        const i32 row = wave_row + i * EDGE + lane % EDGE;
        if (row >= tile.rows)
            continue;
        const i64 at = (tile.first + row) * OUTER + first_column;
        const f32 weight = topk_weights[row_slots[tile.first + row]];
        f32 part = 0.0f;
        #pragma unroll
        for (i32 j = 0; j < RUN; j += STORED) {
            const i32 column = wave_column + lane / EDGE * RUN + j;
            if (column >= columns)
                continue;
            const Pack<Element, STORED> gates = load<STORED>(gate_pre + at + column);
            const Pack<Element, STORED> ups = load<STORED>(up_pre + at + column);
            Pack<Element, STORED> hidden_pack, dgate_pack, dup_pack;
            #pragma unroll
            for (i32 n = 0; n < STORED; n++) {
                const f32 product = sums[i][(j + n) / SUMS][(j + n) % SUMS];
                const ActivationBwd back = activation_bwd(to_f32(gates.at[n]), to_f32(ups.at[n]), product, weight);
                hidden_pack.at[n] = round_to<Element>(back.hidden);
                dgate_pack.at[n] = round_to<Element>(back.dgate);
                dup_pack.at[n] = round_to<Element>(back.dup);
                part += back.part;
            }
            store(hidden + at + column, hidden_pack);
            store(dgate + at + column, dgate_pack);
            store(dup + at + column, dup_pack);
        }
        parts[(wave % COLUMN_WAVES * GROUPS + lane / EDGE) * TILE_ROWS + row] = part;
    }
    block_sync();

    // Add the parts in the order of the columns, so that bits do not depend on waves.
    for (i32 row = thread_index(); row < lesser(TILE_ROWS, tile.rows); row += THREADS) {
        f32 sum = parts[row];
        #pragma unroll
        for (i32 n = 1; n < PARTS; n++)
            sum += parts[n * TILE_ROWS + row];
        dweight_parts[(tile.first + row) * COLUMN_TILES + scheduler.column()] = sum;
    }
}
