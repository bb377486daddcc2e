// grouped_gemm_wgrad_down for rocm:gfx942: matrix cores, mfma_32x32x8
//
//   grad_down[e] = doutᵀ · hidden, contracted over the rows of expert e
//
// Tile: 128 rows of a matrix by 128 columns. A block computes one tile, each of its 4
// waves 64 x 64 of it.
// Tiles run in groups of 16 row tiles of a matrix, inside a group column by column, so that blocks
// which run together share columns of both operands in the L2 cache.
//
// Shared memory (LDS): two buffers of each operand. While the waves multiply one, the next 32 rows
// move from global memory to registers, and from there, transposed, to the other.
//   left   bf16 [128][32]   columns of dout
//   right  bf16 [128][32]   columns of hidden
//
// The order of a sum depends on the rows of the expert alone. An expert without rows gets exact zeros.
//
// Baked in: height 2880, width 2880, experts 32, types.
// Read at run time: the number of tokens.

// [prelude: base.hpp, hip/base.hpp, bf16_bits.hpp, base.hpp, hip/mfma.hpp]

// ---- the kernel ----

typedef bf16 Element;
typedef f32 Gradient;

constexpr int HEIGHT = 2880, WIDTH = 2880;
constexpr int MATRICES = 1;
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

// Elements stored at a time.
constexpr int STORED = lesser(pack_width<Gradient>(WIDTH), RUN);

static_assert(MATRICES * TILE_ROWS / WAVE_ROWS * COLUMN_WAVES * WAVE == THREADS, "every wave owns a part of the tile");

// Tile order of a matrix: the row tiles of a group, then column tiles, then groups.
constexpr int GROUP = 16, ROW_TILES = ceil_div(HEIGHT, TILE_ROWS), COLUMN_TILES = ceil_div(WIDTH, TILE_COLUMNS);
constexpr int MATRIX_TILES = ROW_TILES * COLUMN_TILES;

// XCD swizzle. The hardware deals blocks out to the XCDs (accelerator complex dies) in turn, and each
// XCD has its own L2 cache. The swizzle gives each XCD a contiguous run of tiles. On a GPU with fewer
// XCDs each has several such runs.
constexpr int XCDS = 8;

DEVICE i32 xcd_swizzle(i32 block, i32 tiles)
{
    const i32 xcd = block % XCDS, each = tiles / XCDS, longer = lesser(xcd, tiles % XCDS);
    return block < tiles ? xcd * each + longer + block / XCDS : block;
}

// The one tile of this block. The matrices of the experts follow each other.
struct MatrixTile {
    i32 index = xcd_swizzle((i32)block_x(), 32 * MATRIX_TILES);

    DEVICE i32 expert() const { return index / MATRIX_TILES; }
    DEVICE i32 within_matrix() const { return index % MATRIX_TILES; }
    DEVICE i32 group() const { return within_matrix() / (GROUP * COLUMN_TILES) * GROUP; }
    DEVICE i32 within() const { return within_matrix() - group() * COLUMN_TILES; }
    DEVICE i32 rows() const { return lesser(GROUP, ROW_TILES - group()); }
    DEVICE i32 row() const { return group() + within() % rows(); }
    DEVICE i32 column() const { return within() / rows(); }
};

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

KERNEL(THREADS) grouped_gemm_wgrad_down(
    const bf16 *__restrict__ dout,   // [rows, 2880]
    const bf16 *__restrict__ hidden, // [rows, 2880]
    const i64 *__restrict__ offsets, // [33]
    f32 *__restrict__ grad_down,     // [32, 2880, 2880]
    i64 accumulate,
    i64 tokens)
{
    await_launches();
    __shared__ Chunk left[2][MATRICES * TILE_ROWS * CHUNKS], right[2][TILE_COLUMNS * CHUNKS];

    const MatrixTile tile;
    (void)tokens;
    const i64 expert = tile.expert(), first = offsets[expert];
    const i32 count = (i32)(offsets[expert + 1] - first);
    const i32 first_row = tile.row() * TILE_ROWS, rows_left = HEIGHT - first_row;
    const i32 first_column = tile.column() * TILE_COLUMNS, columns = WIDTH - first_column;

    const auto itself = [](i32 k) { return k; };
    const auto left_row = [&](i32 , i32 k) {
        return dout + (first + k) * HEIGHT + first_row;
    };
    const auto right_row = [&](i32, i32 k) { return hidden + (first + k) * WIDTH + first_column; };

    const i32 lane = thread_index() % WAVE, wave = thread_index() / WAVE;
    const i32 wave_row = wave / COLUMN_WAVES * WAVE_ROWS, wave_column = wave % COLUMN_WAVES * WAVE_COLUMNS;
    Sums sums[ROW_PARTS][COLUMN_PARTS] = {};

    TurnedStage<MATRICES * TILE_ROWS, HEIGHT, TILE_ROWS> left_stage;
    TurnedStage<TILE_COLUMNS, WIDTH> right_stage;
    const auto aim = [&](i32 depth) {
        left_stage.aim(depth, count, itself);
        right_stage.aim(depth, count, itself);
    };
    const auto fetch = [&](i32 depth) {
        left_stage.fetch(depth, count, rows_left, left_row);
        right_stage.fetch(depth, count, columns, right_row);
    };
    aim(0);
    fetch(0);
    aim(TILE_DEPTH);
    #pragma unroll 1
    for (i32 depth = 0, buffer = 0; depth < count; depth += TILE_DEPTH, buffer ^= 1) {
        left_stage.put(left[buffer], depth, count);
        right_stage.put(right[buffer], depth, count);
        block_sync();
        fetch(depth + TILE_DEPTH);
        aim(depth + 2 * TILE_DEPTH);
        multiply(sums, left[buffer], wave_row, right[buffer], wave_column, lane);
    }

    #pragma unroll
    for (i32 i = 0; i < ROW_PARTS; i++) {
        const i32 line = wave_row + i * EDGE + lane % EDGE, row = line % TILE_ROWS;
        if (row >= rows_left)
            continue;
        Gradient *matrix = grad_down;
        Gradient *result = matrix + (expert * HEIGHT + first_row + row) * WIDTH + first_column;
        const i32 column = wave_column + lane / EDGE * RUN;
        Pack<Gradient, STORED> packs[RUN / STORED] = {};
        if (accumulate)
            #pragma unroll
            for (i32 j = 0; j < RUN / STORED; j++)
                if (column + j * STORED < columns)
                    packs[j] = load<STORED>(result + column, j);
        #pragma unroll
        for (i32 j = 0; j < RUN / STORED; j++) {
            if (column + j * STORED >= columns)
                continue;
            #pragma unroll
            for (i32 n = 0; n < STORED; n++) {
                const f32 sum = sums[i][(j * STORED + n) / SUMS][(j * STORED + n) % SUMS];
                packs[j].at[n] = round_to<Gradient>(to_f32(packs[j].at[n]) + sum);
            }
            store(result + column, j, packs[j]);
        }
    }
}

// ---- the bias ----

// The sum of a column over `count` lines from `first` on, each times its row's weight.
template <class Weight> DEVICE f32 column_sum(const bf16 *matrix, i64 first, i64 count, i32 column, Weight weight)
{
    f32 sum = 0.0f;
    #pragma unroll 8
    for (i64 row = first; row < first + count; row++)
        sum = fused(weight(row), to_f32(matrix[row * 2880 + column]), sum);
    return sum;
}

KERNEL(256) grouped_gemm_wgrad_down_bias(
    const bf16 *__restrict__ dout,        // [rows, 2880]
    const i64 *__restrict__ offsets,      // [33]
    const i32 *__restrict__ row_slots,    // [rows]
    const f32 *__restrict__ topk_weights, // [tokens, 4]
    f32 *__restrict__ grad_down_bias,     // [32, 2880]
    i64 accumulate,
    i64 tokens)
{
    await_launches();
    constexpr int COLUMNS = 2880;
    const i32 column = (i32)block_y() * 256 + thread_index();
    if (column >= COLUMNS)
        return;
    (void)tokens;
    const i64 expert = block_x(), first = offsets[expert], count = offsets[expert + 1] - first;
    auto weight = [&](i64 row) { return topk_weights[row_slots[row]]; };
    auto put = [&](f32 *bias, f32 sum) {
        f32 *to = bias + expert * COLUMNS + column;
        *to = accumulate != 0 ? *to + sum : sum;
    };
    put(grad_down_bias, column_sum(dout, first, count, column, weight));
}
