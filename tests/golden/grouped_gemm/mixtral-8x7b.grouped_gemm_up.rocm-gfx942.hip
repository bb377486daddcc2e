// grouped_gemm_up for rocm:gfx942: matrix cores, mfma_32x32x8
//
//   hidden = act(x[token] · gateᵀ, x[token] · upᵀ)
//
// Tile: 128 rows of one expert by 64 columns of gate and of up. A block computes one tile,
// each of its 4 waves 64 x 32 of it.
// Tiles run in groups of 16 row tiles, inside a group column by column, so that blocks which run
// together share rows and weights in the L2 cache. Blocks beyond the last tile return.
// The kernel gathers rows from x by row_slots, so no dispatch precedes it.
//
// Shared memory (LDS): two buffers of each operand. While the waves multiply one, the next 32
// elements of the rows move from global memory to registers, and from there to the other.
//   left   bf16 [128][32]   x[token]
//   right  bf16 [2 * 64][32]   rows of gate, then rows of up
// A line is chunks of 16 bytes. The position of a chunk is XORed with bits of the line number, so the
// same chunk of eight lines lies in eight different groups of banks.
//
// Weights are the left operand of a matrix instruction and rows the right one, so all sums of a lane
// belong to one row. The lines of `right` are permuted so that these sums are adjacent columns, gate
// and up of the same ones.
//
// Baked in: inner 4096, outer 14336, experts 8, types, epilogue.
// Read at run time: the number of tokens.

// [prelude: base.hpp, hip/base.hpp, bf16_bits.hpp, base.hpp, hip/mfma.hpp, math/exp.hpp, activation.hpp]

// ---- the kernel ----

typedef bf16 Element;

constexpr int INNER = 4096, OUTER = 14336;
constexpr int EXPERTS = 8, TOP_K = 2;
constexpr int THREADS = 256, WAVE = 64;
constexpr int TILE_ROWS = 128, TILE_COLUMNS = 64, TILE_DEPTH = 32;
constexpr int WAVE_ROWS = 64, WAVE_COLUMNS = 32;
constexpr int MATRICES = 2;

// A matrix instruction has EDGE x EDGE sums; those of a row lie in GROUPS lanes, SUMS in each.
constexpr int EDGE = 32, GROUPS = WAVE / EDGE, SUMS = EDGE / GROUPS;
constexpr int ROW_PARTS = WAVE_ROWS / EDGE, COLUMN_PARTS = WAVE_COLUMNS / EDGE;
constexpr int COLUMN_WAVES = TILE_COLUMNS / WAVE_COLUMNS;

// A chunk is 16 bytes, and a line of shared memory is CHUNKS of them.
constexpr int CHUNK = 16 / sizeof(Element), CHUNKS = TILE_DEPTH / CHUNK;
typedef Pack<Element, CHUNK> Chunk;

// Adjacent columns of a lane, and elements loaded and stored at a time.
constexpr int RUN = COLUMN_PARTS * SUMS;
constexpr int LOADED = pack_width<Element>(INNER), STORED = lesser(pack_width<Element>(OUTER), RUN);

static_assert(TILE_ROWS / WAVE_ROWS * COLUMN_WAVES * WAVE == THREADS, "every wave owns a part of the tile");

typedef f32x16 Sums;

// Row r of a matrix instruction's result is sum sum_of(r) of the lanes in group group_of(r).
DEVICE i32 group_of(i32 row) { return row / 4 % GROUPS; }
DEVICE i32 sum_of(i32 row) { return row / 4 / GROUPS * 4 + row % 4; }

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

DEVICE f32 activated(f32 gate, f32 up)
{
    return activation(gate) * up;
}

// Epilogue of one element: bias, activation, weight.
DEVICE f32 finished(f32 gate, f32 up)
{
    return activated(gate, up);
}

// Returns the position of a chunk of a line in LDS. The banks are eight chunks wide.
DEVICE i32 place(i32 line, i32 chunk) { return line * CHUNKS + (chunk ^ line * CHUNKS / 8 % CHUNKS); }

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

// A lane passes a chunk of weights and one of a row to several instructions. An instruction thus
// multiplies elements that are not adjacent in the inner dimension, the same ones on both sides.
DEVICE void add_product(Sums &sums, const Chunk &weights, const Chunk &row)
{
    #pragma unroll
    for (i32 k = 0; k < CHUNK; k += 4)
        sums = mfma_32x32x8(load<4>(weights.at + k), load<4>(row.at + k), sums);
}

// Multiplies one buffer and accumulates, for a wave. `left` and `right` point to the first lines of
// the wave, in `right` those of the first matrix. Both line numbers are multiples of eight, so their
// swizzle equals that of line 0.
DEVICE void multiply(Sums (&sums)[ROW_PARTS][MATRICES][COLUMN_PARTS], const Chunk *left, const Chunk *right, i32 lane)
{
    #pragma unroll
    for (i32 step = 0; step < CHUNKS; step += GROUPS) {
        const i32 own = place(lane % EDGE, step + lane / EDGE);
        Chunk rows[ROW_PARTS], weights[MATRICES][COLUMN_PARTS];
        #pragma unroll
        for (i32 i = 0; i < ROW_PARTS; i++)
            rows[i] = left[i * EDGE * CHUNKS + own];
        #pragma unroll
        for (i32 m = 0; m < MATRICES; m++)
            #pragma unroll
            for (i32 j = 0; j < COLUMN_PARTS; j++)
                weights[m][j] = right[(m * TILE_COLUMNS + j * EDGE) * CHUNKS + own];
        #pragma unroll
        for (i32 m = 0; m < MATRICES; m++)
            #pragma unroll
            for (i32 j = 0; j < COLUMN_PARTS; j++)
                #pragma unroll
                for (i32 i = 0; i < ROW_PARTS; i++)
                    add_product(sums[i][m][j], weights[m][j], rows[i]);
    }
}

// Returns the column of a tile whose weights lie in line `line` of its matrix in LDS. A wave has
// WAVE_COLUMNS lines; the permutation gives each lane the sums of RUN adjacent columns.
DEVICE i32 column_of(i32 line)
{
    const i32 wave = line / WAVE_COLUMNS, part = line % WAVE_COLUMNS / EDGE, row = line % EDGE;
    return wave * WAVE_COLUMNS + group_of(row) * RUN + part * SUMS + sum_of(row);
}

KERNEL(THREADS) grouped_gemm_up(
    const bf16 *__restrict__ x,        // [tokens, 4096]
    const bf16 *__restrict__ gate,     // [8, 14336, 4096]
    const bf16 *__restrict__ up,       // [8, 14336, 4096]
    const i64 *__restrict__ offsets,   // [9]
    const i32 *__restrict__ row_tiles, // [9]
    const i32 *__restrict__ row_slots, // [rows]
    bf16 *__restrict__ hidden,         // [rows, 14336]
    i64 tokens)
{
    await_launches();
    __shared__ Chunk left[2][TILE_ROWS * CHUNKS], right[2][MATRICES * TILE_COLUMNS * CHUNKS];

    (void)tokens;
    const TileScheduler scheduler = {row_tiles[EXPERTS]};
    if (!scheduler.is_valid())
        return;
    const RowTile tile = row_tile(offsets, row_tiles, scheduler.row());
    const i32 first_column = scheduler.column() * TILE_COLUMNS, columns = OUTER - first_column;
    const i64 first_weight = tile.expert * OUTER + first_column;

    Stage<TILE_ROWS> left_stage;
    left_stage.aim([&](i32 row) {
        return row < tile.rows ? x + (i64)(row_slots[tile.first + row] / TOP_K) * INNER : nullptr;
    });
    Stage<MATRICES * TILE_COLUMNS> right_stage;
    right_stage.aim([&](i32 line) {
        const Element *matrix = line < TILE_COLUMNS ? gate : up;
        const i32 column = column_of(line % TILE_COLUMNS);
        return column < columns ? matrix + (first_weight + column) * INNER : nullptr;
    });

    const i32 lane = thread_index() % WAVE, wave = thread_index() / WAVE;
    const i32 wave_row = wave / COLUMN_WAVES * WAVE_ROWS, wave_column = wave % COLUMN_WAVES * WAVE_COLUMNS;
    Sums sums[ROW_PARTS][MATRICES][COLUMN_PARTS] = {};

    left_stage.fetch(0);
    right_stage.fetch(0);
    #pragma unroll 1
    for (i32 depth = 0, buffer = 0; depth < INNER; depth += TILE_DEPTH, buffer ^= 1) {
        left_stage.put(left[buffer]);
        right_stage.put(right[buffer]);
        block_sync();
        left_stage.fetch(depth + TILE_DEPTH);
        right_stage.fetch(depth + TILE_DEPTH);
        if (wave_row < tile.rows)  // a wave without rows multiplies nothing
            multiply(sums, left[buffer] + wave_row * CHUNKS, right[buffer] + wave_column * CHUNKS, lane);
    }

    #pragma unroll
    for (i32 i = 0; i < ROW_PARTS; i++) {
        const i32 row = wave_row + i * EDGE + lane % EDGE;
        if (row >= tile.rows)
            continue;
        #pragma unroll
        for (i32 j = 0; j < RUN; j += STORED) {
            const i32 column = wave_column + lane / EDGE * RUN + j;
            if (column >= columns)
                continue;
            Pack<Element, STORED> pack;
            #pragma unroll
            for (i32 n = 0; n < STORED; n++) {
                const i32 part = (j + n) / SUMS, sum = (j + n) % SUMS;
                const f32 value = finished(sums[i][0][part][sum], sums[i][1][part][sum]);
                pack.at[n] = round_to<Element>(value);
            }
            store(hidden + (tile.first + row) * OUTER + first_column + column, pack);
        }
    }
}
