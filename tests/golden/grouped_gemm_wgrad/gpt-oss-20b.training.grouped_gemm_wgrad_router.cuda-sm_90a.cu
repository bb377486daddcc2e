// grouped_gemm_wgrad_up for cuda:sm_90a: SIMT, any types and widths
//
//   grad_up = dupᵀ · rows, contracted over all tokens
//
// Tile: 64 x 128 of the matrix. A block computes one tile, a thread 8 x 8
// of it. block_x counts tiles of matrix rows, block_y column tiles. Rows are summed in
// ascending order. An expert without rows gets zeros.
//
// Shared memory: two buffers of each operand; the block fills one while it multiplies the other.
//   left_tile   f32 [16][64]   columns of dup
//   right_tile  f32 [16][128]   columns of rows
//
// grouped_gemm_wgrad_up_bias sums dup over all tokens; a thread
// owns a column.
//
// Baked in: matrices [32, 2880], experts 1, types.
// Read at run time: the number of tokens.

// [prelude: base.hpp, cuda/base.cuh, base.hpp, slab.hpp, tile_gemm.hpp, multiply.hpp]

// ---- the kernel ----

constexpr int HEIGHT = 32, WIDTH = 2880;
constexpr int THREADS = 128;
constexpr int TILE_ROWS = 64, TILE_COLUMNS = 128, TILE_DEPTH = 16;
constexpr int THREAD_ROWS = 8, THREAD_COLUMNS = 8;
constexpr int ROW_THREADS = TILE_ROWS / THREAD_ROWS, COLUMN_THREADS = TILE_COLUMNS / THREAD_COLUMNS;
constexpr int MATRICES = 1;

typedef f32 Left;
typedef bf16 Right;
typedef f32 Gradient;
typedef Slab<Left, TILE_ROWS, TILE_DEPTH, HEIGHT, THREADS> LeftSlab;
typedef Slab<Right, TILE_COLUMNS, TILE_DEPTH, WIDTH, THREADS> RightSlab;

// Columns stored at a time.
constexpr int STORED = lesser(pack_width<Gradient>(WIDTH), lesser(THREAD_COLUMNS, 4));

static_assert(ROW_THREADS * COLUMN_THREADS == THREADS, "every thread owns a part of the tile");
static_assert(MATRICES == 1 || THREAD_ROWS % 4 == 0, "a thread has the same part of both matrices");

// Overwrites elements of a gradient with rounded sums, or adds to them.
DEVICE void put_sums(Gradient *row, i32 at, const f32 *sums, bool accumulate)
{
    Pack<Gradient, STORED> pack = {};
    if (accumulate)
        pack = load<STORED>(row, at);
    #pragma unroll
    for (i32 n = 0; n < STORED; n++)
        pack.at[n] = round_to<Gradient>(to_f32(pack.at[n]) + sums[n]);
    store(row, at, pack);
}

KERNEL(THREADS) grouped_gemm_wgrad_up(
    const f32 *dup,   // [tokens, 32]
    const bf16 *rows, // [tokens, 2880]
    f32 *grad_up,     // [1, 32, 2880]
    i64 accumulate,
    i64 tokens)
{
    await_launches();
    alignas(16) __shared__ f32 left_tile[2][TILE_DEPTH][MATRICES * TILE_ROWS];
    alignas(16) __shared__ f32 right_tile[2][TILE_DEPTH][TILE_COLUMNS];

    const i32 expert = 0, first_row = (i32)block_x() * TILE_ROWS, count = (i32)tokens;
    const i64 first = 0;
    const i32 first_column = (i32)block_y() * TILE_COLUMNS;

    LeftSlab dup_slab;
    RightSlab right_slab;
    auto fetch = [&](i32 depth) {
        const i64 at = first + depth;
        dup_slab.fetch(count - depth, first_row, [&](i32 line) { return dup + (at + line) * HEIGHT; });
        right_slab.fetch(count - depth, first_column, [&](i32 line) { return rows + (at + line) * WIDTH; });
    };
    auto put = [&](i32 buffer) {
        dup_slab.put(left_tile[buffer], 0);
        right_slab.put(right_tile[buffer], 0);
    };

    f32 sums[MATRICES * THREAD_ROWS][THREAD_COLUMNS] = {};
    fetch(0);
    put(0);
    block_sync();
    i32 buffer = 0;
    #pragma unroll 1
    for (i32 depth = TILE_DEPTH; depth < count; depth += TILE_DEPTH, buffer ^= 1) {
        fetch(depth);
        multiply<ROW_THREADS, COLUMN_THREADS, TILE_DEPTH>(sums, left_tile[buffer], right_tile[buffer], thread_index(), 0);
        put(buffer ^ 1);
        block_sync();
    }
    multiply<ROW_THREADS, COLUMN_THREADS, TILE_DEPTH>(sums, left_tile[buffer], right_tile[buffer], thread_index(), 0);

    #pragma unroll
    for (i32 i = 0; i < THREAD_ROWS; i++) {
        const i32 row = first_row + dealt<THREAD_ROWS, ROW_THREADS>(thread_index() / COLUMN_THREADS, i);
        if (row >= HEIGHT)
            continue;
        const i64 line = ((i64)expert * HEIGHT + row) * WIDTH;
        #pragma unroll
        for (i32 j = 0; j < THREAD_COLUMNS; j += STORED) {
            const i32 column = first_column + dealt<THREAD_COLUMNS, COLUMN_THREADS>(thread_index() % COLUMN_THREADS, j);
            if (column >= WIDTH)
                continue;
            put_sums(grad_up + line, column / STORED, sums[i] + j, accumulate != 0);
        }
    }
}
// ---- the bias ----

// The sum of a column over `count` lines from `first` on.
template <class Weight> DEVICE f32 column_sum(const f32 *matrix, i64 first, i64 count, i32 column, Weight weight)
{
    f32 sum = 0.0f;
    #pragma unroll 8
    for (i64 row = first; row < first + count; row++)
        sum = fused(weight(row), to_f32(matrix[row * 32 + column]), sum);
    return sum;
}

KERNEL(128) grouped_gemm_wgrad_up_bias(
    const f32 *dup,    // [tokens, 32]
    f32 *grad_up_bias, // [1, 32]
    i64 accumulate,
    i64 tokens)
{
    await_launches();
    constexpr int COLUMNS = 32;
    const i32 column = (i32)block_y() * 128 + thread_index();
    if (column >= COLUMNS)
        return;
    const i64 expert = 0, first = 0, count = tokens;
    auto weight = [](i64) { return 1.0f; };
    auto put = [&](f32 *bias, f32 sum) {
        f32 *to = bias + expert * COLUMNS + column;
        *to = accumulate != 0 ? *to + sum : sum;
    };
    put(grad_up_bias, column_sum(dup, first, count, column, weight));
}
