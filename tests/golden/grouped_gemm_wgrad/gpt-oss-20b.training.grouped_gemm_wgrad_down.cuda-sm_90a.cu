// grouped_gemm_wgrad_down for cuda:sm_90a: wgmma, operands by TMA
//
//   grad_down = doutᵀ · hidden, contracted over the rows of each expert
//
// Tile: 128 rows by 256 columns of one expert's matrix; a block computes one.
// Tiles run in groups of 16 row tiles of a matrix, inside a group column by column, so that blocks
// which run together share columns of both operands in the L2 cache.
// An expert without rows gets zeros.
//
// Warp specialization. Warpgroup 0 produces: one of its threads loads all operands by TMA.
// Warpgroups 1 and 2 multiply 64 matrix rows each, with both operands in shared memory.
// The barrier `full` hands a stage to the consumers, `empty` hands it back.
//
// Shared memory, aligned to 1024 bytes. Both operands lie in panels of 64 columns with the layout
// that TMA writes: rows of 128 bytes whose 16-byte chunks are swizzled. A row of a panel is one step
// of the contraction, so wgmma reads both transposed.
//   pipeline     [4] of bf16 left [2][64][64], right [4][64][64]
//   full, empty  barriers [4] each
// The box of the last slice reaches into the next expert's rows, or into rows that nobody wrote. The
// consumers overwrite those with zeros before they multiply.
//
// Baked in: height 2880, width 2880, experts 32, types.
// Read at run time: the number of tokens.

// [prelude: base.hpp, cuda/base.cuh, base.hpp, warp.hpp, cuda/warp.cuh, warp.hpp, cuda/shared.cuh, cuda/mbarrier.cuh, cuda/tma.cuh, cuda/wgmma.cuh]

// sums = aᵀ · b (+ sums when told to accumulate), a [16][64], b [16][256], both in panels.
DEVICE void wgmma_m64n256k16_bf16(f32 (&sums)[128], u64 a, u64 b, bool accumulate)
{
    asm volatile("{\n"
                 "    .reg .pred accumulate;\n"
                 "    setp.ne.b32 accumulate, %130, 0;\n"
                 "    wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, "
                 "%8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, "
                 "%24, %25, %26, %27, %28, %29, %30, %31, "
                 "%32, %33, %34, %35, %36, %37, %38, %39, "
                 "%40, %41, %42, %43, %44, %45, %46, %47, "
                 "%48, %49, %50, %51, %52, %53, %54, %55, "
                 "%56, %57, %58, %59, %60, %61, %62, %63, "
                 "%64, %65, %66, %67, %68, %69, %70, %71, "
                 "%72, %73, %74, %75, %76, %77, %78, %79, "
                 "%80, %81, %82, %83, %84, %85, %86, %87, "
                 "%88, %89, %90, %91, %92, %93, %94, %95, "
                 "%96, %97, %98, %99, %100, %101, %102, %103, "
                 "%104, %105, %106, %107, %108, %109, %110, %111, "
                 "%112, %113, %114, %115, %116, %117, %118, %119, "
                 "%120, %121, %122, %123, %124, %125, %126, %127"
                 "}, %128, %129, accumulate, 1, 1, 1, 1;\n"
                 "}"
                 : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]),
                   "+f"(sums[4]), "+f"(sums[5]), "+f"(sums[6]), "+f"(sums[7]),
                   "+f"(sums[8]), "+f"(sums[9]), "+f"(sums[10]), "+f"(sums[11]),
                   "+f"(sums[12]), "+f"(sums[13]), "+f"(sums[14]), "+f"(sums[15]),
                   "+f"(sums[16]), "+f"(sums[17]), "+f"(sums[18]), "+f"(sums[19]),
                   "+f"(sums[20]), "+f"(sums[21]), "+f"(sums[22]), "+f"(sums[23]),
                   "+f"(sums[24]), "+f"(sums[25]), "+f"(sums[26]), "+f"(sums[27]),
                   "+f"(sums[28]), "+f"(sums[29]), "+f"(sums[30]), "+f"(sums[31]),
                   "+f"(sums[32]), "+f"(sums[33]), "+f"(sums[34]), "+f"(sums[35]),
                   "+f"(sums[36]), "+f"(sums[37]), "+f"(sums[38]), "+f"(sums[39]),
                   "+f"(sums[40]), "+f"(sums[41]), "+f"(sums[42]), "+f"(sums[43]),
                   "+f"(sums[44]), "+f"(sums[45]), "+f"(sums[46]), "+f"(sums[47]),
                   "+f"(sums[48]), "+f"(sums[49]), "+f"(sums[50]), "+f"(sums[51]),
                   "+f"(sums[52]), "+f"(sums[53]), "+f"(sums[54]), "+f"(sums[55]),
                   "+f"(sums[56]), "+f"(sums[57]), "+f"(sums[58]), "+f"(sums[59]),
                   "+f"(sums[60]), "+f"(sums[61]), "+f"(sums[62]), "+f"(sums[63]),
                   "+f"(sums[64]), "+f"(sums[65]), "+f"(sums[66]), "+f"(sums[67]),
                   "+f"(sums[68]), "+f"(sums[69]), "+f"(sums[70]), "+f"(sums[71]),
                   "+f"(sums[72]), "+f"(sums[73]), "+f"(sums[74]), "+f"(sums[75]),
                   "+f"(sums[76]), "+f"(sums[77]), "+f"(sums[78]), "+f"(sums[79]),
                   "+f"(sums[80]), "+f"(sums[81]), "+f"(sums[82]), "+f"(sums[83]),
                   "+f"(sums[84]), "+f"(sums[85]), "+f"(sums[86]), "+f"(sums[87]),
                   "+f"(sums[88]), "+f"(sums[89]), "+f"(sums[90]), "+f"(sums[91]),
                   "+f"(sums[92]), "+f"(sums[93]), "+f"(sums[94]), "+f"(sums[95]),
                   "+f"(sums[96]), "+f"(sums[97]), "+f"(sums[98]), "+f"(sums[99]),
                   "+f"(sums[100]), "+f"(sums[101]), "+f"(sums[102]), "+f"(sums[103]),
                   "+f"(sums[104]), "+f"(sums[105]), "+f"(sums[106]), "+f"(sums[107]),
                   "+f"(sums[108]), "+f"(sums[109]), "+f"(sums[110]), "+f"(sums[111]),
                   "+f"(sums[112]), "+f"(sums[113]), "+f"(sums[114]), "+f"(sums[115]),
                   "+f"(sums[116]), "+f"(sums[117]), "+f"(sums[118]), "+f"(sums[119]),
                   "+f"(sums[120]), "+f"(sums[121]), "+f"(sums[122]), "+f"(sums[123]),
                   "+f"(sums[124]), "+f"(sums[125]), "+f"(sums[126]), "+f"(sums[127])
                 : "l"(a), "l"(b), "r"((u32)accumulate));
}

// [prelude: cuda/wgmma_across.cuh]

// ---- the kernel ----

constexpr int HEIGHT = 2880, WIDTH = 2880;
constexpr int TILE_ROWS = 128, TILE_COLUMNS = 256, TILE_DEPTH = 64;
constexpr int STAGES = 4;
constexpr int CONSUMERS = 2, CONSUMER_WARPS = 4 * CONSUMERS;
constexpr int THREADS = 128 + 128 * CONSUMERS;
constexpr int SUMS = TILE_COLUMNS / 2;  // per thread

typedef bf16 Element;
typedef Element Panel[TILE_DEPTH][64];

constexpr int PANELS = CONSUMERS + TILE_COLUMNS / 64;

// A stage holds a slice of rows: a panel of left for each consumer, then the panels of right.
struct Stage { Panel panels[PANELS]; };

struct alignas(1024) Shared {
    Stage pipeline[STAGES];
    Barrier full[STAGES], empty[STAGES];
};

static_assert(THREADS == 384 && sizeof(Shared) == 197632, "as launched");

// A position in the pipeline: the index of a stage, and the phase (parity) of its barriers.
struct PipelineState {
    i32 index = 0;
    u32 phase = 0;

    DEVICE void advance()
    {
        index++;
        if (index == STAGES) {
            index = 0;
            phase ^= 1;
        }
    }
};

// Tile order of a matrix: the row tiles of a group, then column tiles, then groups.
constexpr int GROUP = 16, ROW_TILES = ceil_div(HEIGHT, TILE_ROWS), COLUMN_TILES = ceil_div(WIDTH, TILE_COLUMNS);
constexpr int MATRIX_TILES = ROW_TILES * COLUMN_TILES;

// The one tile of this block. The matrices of the experts follow each other.
struct MatrixTile {
    i32 index = (i32)block_x();

    DEVICE i32 expert() const { return index / MATRIX_TILES; }
    DEVICE i32 within_matrix() const { return index % MATRIX_TILES; }
    DEVICE i32 group() const { return within_matrix() / (GROUP * COLUMN_TILES) * GROUP; }
    DEVICE i32 within() const { return within_matrix() - group() * COLUMN_TILES; }
    DEVICE i32 rows() const { return lesser(GROUP, ROW_TILES - group()); }
    DEVICE i32 row() const { return group() + within() % rows(); }
    DEVICE i32 column() const { return within() / rows(); }
};

typedef f32 Gradient;

// Whether tiles divide the matrix, so that stores need no bounds check.
constexpr bool WHOLE_TILES = HEIGHT % TILE_ROWS == 0 && WIDTH % TILE_COLUMNS == 0;

// Adds the old values of the matrix to two adjacent sums.
DEVICE void add_old_pair(const Gradient *grad, i32 row, i32 column, f32 &first, f32 &second)
{
    if (!WHOLE_TILES && (row >= HEIGHT || column >= WIDTH))
        return;
    const Gradient *const line = grad + (i64)row * WIDTH;
    if constexpr (WIDTH % 2 == 0) {
        const Pack<Gradient, 2> old = load<2>(line, column / 2);
        first = to_f32(old.at[0]) + first;
        second = to_f32(old.at[1]) + second;
    } else {
        first = to_f32(line[column]) + first;
        if (column + 1 < WIDTH)
            second = to_f32(line[column + 1]) + second;
    }
}

// Rounds and stores two adjacent sums, if they lie within the matrix.
DEVICE void store_pair(Gradient *grad, i32 row, i32 column, f32 first, f32 second)
{
    if (!WHOLE_TILES && (row >= HEIGHT || column >= WIDTH))
        return;
    Gradient *const line = grad + (i64)row * WIDTH;
    if constexpr (WIDTH % 2 == 0) {
        store(line, column / 2, Pack<Gradient, 2>{round_to<Gradient>(first), round_to<Gradient>(second)});
    } else {
        line[column] = round_to<Gradient>(first);
        if (column + 1 < WIDTH)
            line[column + 1] = round_to<Gradient>(second);
    }
}

// Zeroes lines `rows` and on of every panel of a stage. All consumers take part and then meet at a
// barrier, so that wgmma may read the stage. The fence makes the writes visible to its proxy.
DEVICE void clear_tail(Stage &stage, i32 rows)
{
    const i32 packs = (TILE_DEPTH - rows) * 8;
    for (i32 n = thread_index() - 128; n < packs; n += 128 * CONSUMERS)
        #pragma unroll
        for (i32 panel = 0; panel < PANELS; panel++)
            store(stage.panels[panel][rows], n, Pack<Element, 8>{});
    proxy_fence();
    named_sync<128 * CONSUMERS>(1);
}

KERNEL(THREADS) grouped_gemm_wgrad_down(
    const __grid_constant__ TensorMap dout_map,   // [rows, 2880]
    const __grid_constant__ TensorMap hidden_map, // [rows, 2880]
    const i64 *offsets,                           // [33]
    f32 *grad_down,                               // [32, 2880, 2880]
    i64 accumulate,
    i64 tokens)
{
    await_launches();
    Shared &shared = dynamic_shared<Shared>();

    const MatrixTile tile;
    const i64 expert = tile.expert();
    (void)tokens;
    const i64 first = offsets[expert];
    const i32 count = (i32)(offsets[expert + 1] - first);
    const i32 first_row = tile.row() * TILE_ROWS, first_column = tile.column() * TILE_COLUMNS;

    if (thread_index() == 0) {
        if (count > 0) {
            tma_prefetch(dout_map);
            tma_prefetch(hidden_map);
        }
        for (i32 stage = 0; stage < STAGES; stage++) {
            mbarrier_init(shared.full[stage], 1);
            mbarrier_init(shared.empty[stage], CONSUMER_WARPS);
        }
        mbarrier_init_fence();
    }
    block_sync();

    // The producer. Blocks of one expert read the same rows, hence the hint to keep them in the L2 cache.
    if (warp_index() < 4) {
        shrink_registers<40>();
        if (warp_index() == 0 && elect_one()) {
            const u64 keep = keep_in_cache();
            PipelineState state;
            #pragma unroll 1
            for (i32 k = 0; k < count; k += TILE_DEPTH, state.advance()) {
                Stage &stage = shared.pipeline[state.index];
                Barrier &full = shared.full[state.index];
                mbarrier_wait(shared.empty[state.index], state.phase ^ 1);
                mbarrier_expect(full, sizeof(Stage));
                #pragma unroll
                for (i32 panel = 0; panel < CONSUMERS; panel++)
                    tma_load_2d(stage.panels[panel], dout_map, full, keep, first_row + 64 * panel, (i32)first + k);
                #pragma unroll
                for (i32 panel = 0; panel < TILE_COLUMNS / 64; panel++)
                    tma_load_2d(stage.panels[CONSUMERS + panel], hidden_map, full, keep, first_column + 64 * panel, (i32)first + k);
            }
        }
        return;
    }

    // The consumers. One wgmma group stays in flight. Once it is the only one, the group of the
    // slice before has finished reading, so that slice's stage is released.
    grow_registers<232>();
    const i32 consumer = warp_index() / 4 - 1;
    f32 sums[SUMS] = {};
    PipelineState state;
    i32 before = 0;
    #pragma unroll 1
    for (i32 k = 0; k < count; k += TILE_DEPTH, state.advance()) {
        Stage &stage = shared.pipeline[state.index];
        mbarrier_wait(shared.full[state.index], state.phase);
        if (count - k < TILE_DEPTH)
            clear_tail(stage, count - k);
        const u64 left = operand_across_128b<TILE_DEPTH>(stage.panels[consumer]);
        const u64 right = operand_across_128b<TILE_DEPTH>(stage.panels[CONSUMERS]);
        wgmma_fence();
        #pragma unroll
        for (i32 step = 0; step < TILE_DEPTH / 16; step++)
            wgmma_m64n256k16_bf16(sums, left + step * NEXT_LINES, right + step * NEXT_LINES, true);
        wgmma_commit();
        wgmma_wait<1>();
        if (k > 0 && elect_one())
            mbarrier_arrive(shared.empty[before]);
        before = state.index;
    }
    wgmma_wait<0>();
    settle(sums);
    Gradient *const grad = grad_down + expert * HEIGHT * WIDTH;
    const i32 row = first_row + 64 * consumer + warp_index() % 4 * 16;
    // Request all old values before the first store, so that their latencies overlap.
    if (accumulate != 0)
        #pragma unroll
        for (i32 i = 0; i < SUMS; i += 2)
            add_old_pair(grad, row + sum_row(i), first_column + sum_column(i), sums[i], sums[i + 1]);
    #pragma unroll
    for (i32 i = 0; i < SUMS; i += 2)
        store_pair(grad, row + sum_row(i), first_column + sum_column(i), sums[i], sums[i + 1]);
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

KERNEL(384) grouped_gemm_wgrad_down_bias(
    const bf16 *dout,        // [rows, 2880]
    const i64 *offsets,      // [33]
    const i32 *row_slots,    // [rows]
    const f32 *topk_weights, // [tokens, 4]
    f32 *grad_down_bias,     // [32, 2880]
    i64 accumulate,
    i64 tokens)
{
    await_launches();
    constexpr int COLUMNS = 2880;
    const i32 column = (i32)block_y() * 384 + thread_index();
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
