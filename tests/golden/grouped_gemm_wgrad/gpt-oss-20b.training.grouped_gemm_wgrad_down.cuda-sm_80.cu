// grouped_gemm_wgrad_down for cuda:sm_80: mma.sync on tensor cores, operands by cp.async
//
//   grad_down = doutᵀ · hidden, contracted over the rows of each expert
//
// Tile: 128 rows by 128 columns of one expert's matrix; a block computes one. block_x counts
// the row tiles of all experts, block_y column tiles. A warp computes 64 x 64 of a tile.
// An expert without rows gets zeros.
//
// Shared memory: a pipeline of 4 stages; cp.async fills some while the warps multiply another.
// A stage has 32 rows of both operands, zeros beyond the last row:
//   left   [128 columns]   dout
//   right  [128 columns]   hidden
// in panels of 128 bytes of each row. A row is one step of the contraction, so both operands are
// loaded transposed.
//
// Sums are f32, in ascending order of the rows, 16 at a time.
//
// Baked in: height 2880, width 2880, experts 32, types.
// Read at run time: the number of tokens.

// [prelude: base.hpp, cuda/base.cuh, base.hpp, warp.hpp, cuda/warp.cuh, warp.hpp, cuda/shared.cuh, cuda/async_copy.cuh, cuda/matrix.cuh, cuda/mma.cuh]

// ---- the kernel ----

typedef bf16 Element;

constexpr int HEIGHT = 2880, WIDTH = 2880;
constexpr int THREADS = 128, STAGES = 4;
constexpr int TILE_ROWS = 128, TILE_COLUMNS = 128, TILE_DEPTH = 32;
constexpr int WARP_ROWS = 64, WARP_COLUMNS = 64;
constexpr int MATRICES = 1, ROW_TILES = ceil_div(HEIGHT, TILE_ROWS);

constexpr int LINE = 128, CHUNK = 16, STEPS = TILE_DEPTH * sizeof(Element) / 32;  // bytes; an mma reads 32 of a column
constexpr int LEFT = MATRICES * TILE_ROWS * TILE_DEPTH * sizeof(Element);
constexpr int STAGE = LEFT + TILE_COLUMNS * TILE_DEPTH * sizeof(Element);
constexpr int COLUMN_WARPS = TILE_COLUMNS / WARP_COLUMNS;
constexpr int ROW_PARTS = WARP_ROWS / 16, COLUMN_PARTS = WARP_COLUMNS / 8;  // mma tiles of a warp

static_assert(MATRICES * TILE_ROWS / WARP_ROWS * COLUMN_WARPS * WARP == THREADS, "every warp owns a part of the tile");
static_assert(TILE_ROWS % WARP_ROWS == 0, "of one matrix");
static_assert(STAGES * STAGE == 65536, "the shared memory of the launch");

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

DEVICE void load_step(Operands &to, u32 stage, i32 step)
{
    const i32 k = step * (32 / sizeof(Element));
    #pragma unroll
    for (i32 i = 0; i < ROW_PARTS; i++)
        load_left(to.left[i], stage, k, warp_row() + i * 16);
    #pragma unroll
    for (i32 j = 0; j < COLUMN_PARTS; j += 2) {
        u32 pair[4];
        load_right(pair, stage + LEFT, k, warp_column() + j * 8);
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

// Whether tiles divide the matrix, so that stores need no bounds check.
constexpr bool WHOLE_TILES = HEIGHT % TILE_ROWS == 0 && WIDTH % TILE_COLUMNS == 0;

// Adds the old values of the matrix to two adjacent sums.
DEVICE void add_old_pair(const f32 *grad, i32 row, i32 column, f32 &first, f32 &second)
{
    if (!WHOLE_TILES && (row >= HEIGHT || column >= WIDTH))
        return;
    const f32 *const line = grad + (i64)row * WIDTH;
    if constexpr (WIDTH % 2 == 0) {
        const Pack<f32, 2> old = load<2>(line, column / 2);
        first = old.at[0] + first;
        second = old.at[1] + second;
    } else {
        first = line[column] + first;
        if (column + 1 < WIDTH)
            second = line[column + 1] + second;
    }
}

// Stores two adjacent sums, if they lie within the matrix.
DEVICE void store_pair(f32 *grad, i32 row, i32 column, f32 first, f32 second)
{
    if (!WHOLE_TILES && (row >= HEIGHT || column >= WIDTH))
        return;
    f32 *const line = grad + (i64)row * WIDTH;
    if constexpr (WIDTH % 2 == 0) {
        store(line, column / 2, Pack<f32, 2>{first, second});
    } else {
        line[column] = first;
        if (column + 1 < WIDTH)
            line[column + 1] = second;
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
    alignas(LINE) extern __shared__ Element pipeline[];

    const i64 expert = block_x() / ROW_TILES;
    (void)tokens;
    const i64 first = offsets[expert];
    const i32 count = (i32)(offsets[expert + 1] - first);
    const i32 slices = ceil_div(count, TILE_DEPTH);
    const i32 first_row = (i32)(block_x() % ROW_TILES) * TILE_ROWS, first_column = (i32)block_y() * TILE_COLUMNS;

    // Sources of this thread's copies: the rows of slice `at`.
    typedef Panels<HEIGHT> Left;
    typedef Panels<WIDTH> Right;
    auto dout_row = [&](i32 at, i32 i) { return dout + (first + at * TILE_DEPTH + Left::line(i)) * HEIGHT + first_row; };
    auto hidden_row = [&](i32 at, i32 i) { return hidden + (first + at * TILE_DEPTH + Right::line(i)) * WIDTH + first_column; };

    const u32 stages = shared_address(pipeline);
    auto fetch = [&](i32 at) {
        if (at < slices) {
            const u32 stage = stages + at % STAGES * STAGE;
            const i32 left = count - at * TILE_DEPTH;
            Left::copy<TILE_ROWS>(stage, left, HEIGHT - first_row, [&](i32 i) { return dout_row(at, i); });
            Right::copy<TILE_COLUMNS>(stage + LEFT, left, WIDTH - first_column, [&](i32 i) { return hidden_row(at, i); });
        }
        commit_copies();
    };

    Sums sums = {};
    #pragma unroll
    for (i32 at = 0; at < STAGES - 1; at++)
        fetch(at);
    #pragma unroll 1
    for (i32 at = 0; at < slices; at++) {
        wait_copies<STAGES - 2>();
        block_sync();  // this stage is here, and all have read the one before it
        fetch(at + STAGES - 1);
        if (warp_row() % TILE_ROWS < HEIGHT - first_row && warp_column() < WIDTH - first_column)
            multiply_stage(sums, stages + at % STAGES * STAGE, ROW_PARTS);
    }
    wait_copies<0>();

    const i32 row = first_row + warp_row() % TILE_ROWS + lane_index() / 4;
    const i32 column = first_column + warp_column() + lane_index() % 4 * 2;
    f32 *const grad = grad_down + expert * HEIGHT * WIDTH;
    #pragma unroll
    for (i32 i = 0; i < ROW_PARTS; i++)
        // Request all old values of these rows before the first store, so that their latencies overlap.
        #pragma unroll
        for (i32 stores = 0; stores < 2; stores++)
            #pragma unroll
            for (i32 j = 0; j < COLUMN_PARTS; j++)
                #pragma unroll
                for (i32 half = 0; half < 2; half++) {
                    f32 &first = sums[i][j][2 * half], &second = sums[i][j][2 * half + 1];
                    if (stores)
                        store_pair(grad, row + 16 * i + 8 * half, column + 8 * j, first, second);
                    else if (accumulate != 0)
                        add_old_pair(grad, row + 16 * i + 8 * half, column + 8 * j, first, second);
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

KERNEL(128) grouped_gemm_wgrad_down_bias(
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
    const i32 column = (i32)block_y() * 128 + thread_index();
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
