// grouped_gemm_up for rocm:gfx942, on matrix cores: mfma_32x32x8
//
//   hidden = act(x[token] · gateᵀ, x[token] · upᵀ)
//
// A block owns 128 rows of one expert by 64 columns of gate and of up; each of its 4 waves owns
// 64 x 32 of them.
// Blocks follow each other by row tiles of a group, then by column tiles, then by groups: what is
// multiplied together was read together and stays in the level-2 cache. Those without a tile return.
// Rows are read where the tokens lie, so nothing has to be dispatched before.
//
// Shared memory: two buffers of each. While one is multiplied, the next 32 elements of all rows
// are on their way from global memory to registers, and from there they go to the other.
//   left   bf16 [128][32]   x[token]
//   right  bf16 [2 * 64][32]   rows of gate, then rows of up
// A line is chunks of 16 bytes. Which lies where is XORed with the number of the line: the
// same chunk of eight lines is on eight different groups of banks.
//
// Weights are the left operand of a product and rows the right one, so that a lane's sums are
// of one row; and the lines of right are in such an order that they are of adjacent columns,
// gate and up of the same ones.
//
// Baked in: inner 4096, outer 14336, experts 8, types, epilogue. Not the tokens.

// [prelude: base.hpp, hip/base.hpp, bf16_bits.hpp, base.hpp, hip/mfma.hpp, math/exp.hpp, activation.hpp]

// ---- the kernel ----

typedef bf16 Element;

constexpr int INNER = 4096, OUTER = 14336;
constexpr int EXPERTS = 8, TOP_K = 2;
constexpr int THREADS = 256, WAVE = 64;
constexpr int TILE_ROWS = 128, TILE_COLUMNS = 64, TILE_DEPTH = 32;
constexpr int WAVE_ROWS = 64, WAVE_COLUMNS = 32;
constexpr int MATRICES = 2;

// A product is EDGE x EDGE sums; a row's are in GROUPS lanes, SUMS in each.
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

// A row of a product is sum sum_of(row) of the lanes of group group_of(row).
DEVICE i32 group_of(i32 row) { return row / 4 % GROUPS; }
DEVICE i32 sum_of(i32 row) { return row / 4 / GROUPS * 4 + row % 4; }

// The rows of a block: `rows` of them from row `first` on, all of one expert.
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

// Tiles follow each other by the row tiles of a group, then by column tiles, then by groups.
constexpr int GROUP = 16, COLUMN_TILES = ceil_div(OUTER, TILE_COLUMNS);

// Blocks go to the dies of the GPU in turn, and each die has a level-2 cache of its own. So the
// tiles of a die follow each other. With fewer dies than these, each has several such runs.
constexpr int DIES = 8;

DEVICE i32 of_die(i32 block, i32 tiles)
{
    const i32 die = block % DIES, each = tiles / DIES, longer = lesser(die, tiles % DIES);
    return block < tiles ? die * each + longer + block / DIES : block;
}

// The tile of this block, of `row_tiles` x COLUMN_TILES.
struct Walk {
    const i32 row_tiles;
    i32 number = of_die((i32)block_x(), row_tiles * COLUMN_TILES);

    DEVICE bool goes_on() const { return number < row_tiles * COLUMN_TILES; }
    DEVICE void next() { number = 0x7fffffff; }
    DEVICE i32 group() const { return number / (GROUP * COLUMN_TILES) * GROUP; }
    DEVICE i32 within() const { return number - group() * COLUMN_TILES; }
    DEVICE i32 rows() const { return lesser(GROUP, row_tiles - group()); }
    DEVICE i32 row() const { return group() + within() % rows(); }
    DEVICE i32 column() const { return within() / rows(); }
};

DEVICE f32 activated(f32 gate, f32 up)
{
    return activation(gate) * up;
}

// What becomes of a sum: bias, activation, weight.
DEVICE f32 finished(f32 gate, f32 up)
{
    return activated(gate, up);
}

// Where a chunk of a line lies in a tile of shared memory. The banks are eight chunks wide.
DEVICE i32 place(i32 line, i32 chunk) { return line * CHUNKS + (chunk ^ line * CHUNKS / 8 % CHUNKS); }

// The chunk of a row from element k on; zeros beyond its end.
DEVICE Chunk load_chunk(const Element *row, i32 k, i32 inner = INNER)
{
    Chunk chunk = {};
    #pragma unroll
    for (i32 n = 0; n < CHUNK; n += LOADED)
        if (k + n < inner)
            store(chunk.at + n, load<LOADED>(row + k + n));
    return chunk;
}

// LINES lines of a tile on their way from global memory, through registers.
template <int LINES> struct Stage {
    static constexpr int HELD = LINES * CHUNKS / THREADS;
    static_assert(HELD * THREADS == LINES * CHUNKS, "every thread moves as many chunks");

    const Element *rows[HELD];  // where the rows of its chunks begin; null for zeros
    Chunk held[HELD];

    DEVICE static i32 line_of(i32 i) { return (i * THREADS + thread_index()) / CHUNKS; }
    DEVICE static i32 chunk_of() { return thread_index() % CHUNKS; }

    // `begin(line)` is where the row of a line begins.
    template <class Begin> DEVICE void aim(Begin begin)
    {
        #pragma unroll
        for (i32 i = 0; i < HELD; i++)
            rows[i] = begin(line_of(i));
    }

    // Reads from element `depth` on; zeros from `inner` on.
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

// A lane brings a chunk of weights and one of a row, for several products. Which elements of
// the inner dimension meet in one does not matter, as long as both sides agree.
DEVICE void add_product(Sums &sums, const Chunk &weights, const Chunk &row)
{
    #pragma unroll
    for (i32 k = 0; k < CHUNK; k += 4)
        sums = mfma_32x32x8(load<4>(weights.at + k), load<4>(row.at + k), sums);
}

// Adds the products of a wave over one buffer. `left` and `right` are where its lines begin,
// those of the first matrix in `right`: multiples of eight, so that their swizzle is that of line 0.
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

// The column of a tile that line `line` of its matrix in shared memory has the weights of:
// a wave has WAVE_COLUMNS lines, and of its columns a lane has RUN adjacent ones.
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
    const Walk at = {row_tiles[EXPERTS]};
    if (!at.goes_on())
        return;
    const RowTile tile = row_tile(offsets, row_tiles, at.row());
    const i32 first_column = at.column() * TILE_COLUMNS, columns = OUTER - first_column;
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
