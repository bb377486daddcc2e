// grouped_gemm_up for cuda:sm_90a: wgmma, operands by TMA
//
//   hidden = act(rows · gateᵀ, rows · upᵀ)
//
// Tile: 128 rows of one expert by 128 columns of gate and of up.
// Tiles run in groups of 16 row tiles, inside a group column by column, so that blocks which run
// together share rows and weights in the L2 cache.
// Blocks are persistent: block b computes tiles b, b + gridDim.x, and so on.
//
// Warp specialization. Warpgroup 0 produces: its threads gather rows of x by cp.async, 16
// bytes each, and one of them loads weights by TMA.
// Warpgroups 1 and 2 multiply 64 rows each, with both operands in shared memory. The barrier
// `full` hands a stage to the consumers, `empty` hands it back.
// The pipeline runs on across tiles: the producer loads the next tile while the consumers store this
// one.
//
// Shared memory, aligned to 1024 bytes. Operands have the layout that TMA writes: rows of 128 bytes
// whose 16-byte chunks are swizzled.
//   pipeline        [4] of bf16 rows [128][64], gate [128][64], up [128][64]
//   epilogue_tiles  bf16 [8][16][64]   one for each consumer warp
//   full, empty     barriers [4] each
//
// Baked in: inner 4096, outer 14336, experts 8, types, epilogue.
// Read at run time: the number of tokens.

// [prelude: base.hpp, cuda/base.cuh, base.hpp, warp.hpp, cuda/warp.cuh, warp.hpp, cuda/grid.cuh, cuda/shared.cuh, cuda/mbarrier.cuh, cuda/tma.cuh, cuda/async_copy.cuh, cuda/wgmma.cuh]

// sums = a · bᵀ (+ sums when told to accumulate), a [64][16], b [128][16].
DEVICE void wgmma_m64n128k16_bf16(f32 (&sums)[64], u64 a, u64 b, bool accumulate)
{
    asm volatile("{\n"
                 "    .reg .pred accumulate;\n"
                 "    setp.ne.b32 accumulate, %66, 0;\n"
                 "    wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, "
                 "%8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, "
                 "%24, %25, %26, %27, %28, %29, %30, %31, "
                 "%32, %33, %34, %35, %36, %37, %38, %39, "
                 "%40, %41, %42, %43, %44, %45, %46, %47, "
                 "%48, %49, %50, %51, %52, %53, %54, %55, "
                 "%56, %57, %58, %59, %60, %61, %62, %63"
                 "}, %64, %65, accumulate, 1, 1, 0, 0;\n"
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
                   "+f"(sums[60]), "+f"(sums[61]), "+f"(sums[62]), "+f"(sums[63])
                 : "l"(a), "l"(b), "r"((u32)accumulate));
}

// [prelude: math/exp.hpp, activation.hpp]

// ---- the kernel ----

constexpr int INNER = 4096, OUTER = 14336;
constexpr int EXPERTS = 8, TOP_K = 2;
constexpr int TILE_ROWS = 128, TILE_COLUMNS = 128, TILE_DEPTH = 64;
constexpr int STAGES = 4;
constexpr int CONSUMERS = TILE_ROWS / 64, CONSUMER_WARPS = 4 * CONSUMERS;
constexpr int THREADS = 128 + 128 * CONSUMERS;
constexpr int SUMS = TILE_COLUMNS / 2;  // per thread
// Threads that gather rows, eight for a line, and stages whose copies stay in flight.
constexpr int COPIERS = 128, COPIED_LINES = COPIERS / 8, LATE = STAGES > 2 ? STAGES - 2 : 0;

typedef bf16 Element;

// A stage holds a slice of the inner dimension.
struct Stage {
    Element rows[TILE_ROWS][TILE_DEPTH];
    Element gate[TILE_COLUMNS][TILE_DEPTH], up[TILE_COLUMNS][TILE_DEPTH];
};

struct alignas(1024) Shared {
    Stage pipeline[STAGES];
    Element epilogue_tiles[CONSUMER_WARPS][16][64];
    Barrier full[STAGES], empty[STAGES];
};

// Bytes of a stage that come by TMA.
constexpr u32 MAPPED = sizeof(Stage) - sizeof(Stage::rows);
static_assert(THREADS == 384 && sizeof(Shared) == 214016, "as launched");

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

DEVICE f32 activated(f32 gate, f32 up)
{
    return activation(gate) * up;
}

// Epilogue of one element: bias, activation, weight.
DEVICE f32 finished(f32 gate, f32 up)
{
    return activated(gate, up);
}

// Tile order: the row tiles of a group, then column tiles, then groups.
constexpr int GROUP = 16, COLUMN_TILES = ceil_div(OUTER, TILE_COLUMNS);

// Persistent scheduler: goes over the tiles of this block, out of `row_tiles` x COLUMN_TILES.
struct TileScheduler {
    const i32 row_tiles;
    i32 tile_index = (i32)block_x();

    DEVICE bool is_valid() const { return tile_index < row_tiles * COLUMN_TILES; }
    DEVICE void advance() { tile_index += (i32)grid_x(); }
    DEVICE i32 group() const { return tile_index / (GROUP * COLUMN_TILES) * GROUP; }
    DEVICE i32 within() const { return tile_index - group() * COLUMN_TILES; }
    DEVICE i32 rows() const { return lesser(GROUP, row_tiles - group()); }
    DEVICE i32 row() const { return group() + within() % rows(); }
    DEVICE i32 column() const { return within() / rows(); }
};

// Elements stored at a time.
constexpr int STORED = pack_width<Element>(OUTER);

// Returns the position of an element in an epilogue tile. Chunks are swizzled as in the operands, so
// that neither the writes nor the reads below conflict in a bank.
DEVICE Element *in_epilogue_tile(Element (&epilogue_tile)[16][64], i32 row, i32 column)
{
    return &epilogue_tile[row][(column / 8 ^ row % 8) * 8 + column % 8];
}

// Stores the part of an epilogue tile within `rows` and `outer` to rows of the output, from column
// `first` on; eight lanes take a row.
DEVICE void store_epilogue_tile(Element *to, Element (&epilogue_tile)[16][64], i32 rows, i32 first, i32 outer = OUTER)
{
    #pragma unroll
    for (i32 i = 0; i < 16; i += WARP / 8) {
        const i32 row = i + lane_index() / 8, chunk = lane_index() % 8 * 8;
        #pragma unroll
        for (i32 column = chunk; column < chunk + 8; column += STORED)
            if (row < rows && first + column < outer) {
                const Pack<Element, STORED> pack = load<STORED>(in_epilogue_tile(epilogue_tile, row, column));
                store(to + (i64)row * outer, (first + column) / STORED, pack);
            }
    }
}

KERNEL(THREADS) grouped_gemm_up(
    const bf16 *x,                              // [tokens, 4096]
    const __grid_constant__ TensorMap gate_map, // [8, 14336, 4096]
    const __grid_constant__ TensorMap up_map,   // [8, 14336, 4096]
    const i64 *offsets,                         // [9]
    const i32 *row_tiles,                       // [9]
    const i32 *row_slots,                       // [rows]
    bf16 *hidden,                               // [rows, 14336]
    i64 tokens)
{
    Shared &shared = dynamic_shared<Shared>();
    if (thread_index() == 0) {
        tma_prefetch(gate_map);
        tma_prefetch(up_map);
        for (i32 stage = 0; stage < STAGES; stage++) {
            mbarrier_init(shared.full[stage], 1 + COPIERS);
            mbarrier_init(shared.empty[stage], CONSUMER_WARPS);
        }
        mbarrier_init_fence();
    }
    await_launches();
    (void)tokens;
    const TileScheduler schedule = {row_tiles[EXPERTS]};
    block_sync();

    // The producer. Rows beyond the tile and elements beyond the inner dimension are zeros.
    if (warp_index() < 4) {
        shrink_registers<40>();
        const i32 line = thread_index() / 8, chunk = thread_index() % 8;
        const u64 stream = stream_through_cache();
        PipelineState state, landed;
        i32 late = 0;  // stages that `state` is ahead of `landed`
        #pragma unroll 1
        for (TileScheduler scheduler = schedule; scheduler.is_valid(); scheduler.advance()) {
            const RowTile tile = row_tile(offsets, row_tiles, scheduler.row());
            const i32 first_column = scheduler.column() * TILE_COLUMNS;
            i32 token[TILE_ROWS / COPIED_LINES];
            #pragma unroll
            for (i32 i = 0; i < TILE_ROWS / COPIED_LINES; i++) {
                const i32 row = i * COPIED_LINES + line;
                token[i] = row < tile.rows ? row_slots[tile.first + row] / TOP_K : 0;
            }
            #pragma unroll 1
            for (i32 k = 0; k < INNER; k += TILE_DEPTH, state.advance()) {
                Stage &stage = shared.pipeline[state.index];
                Barrier &full = shared.full[state.index];
                mbarrier_wait(shared.empty[state.index], state.phase ^ 1);
                if (thread_index() == 0) {
                    mbarrier_expect(full, MAPPED);
                    tma_load_3d(stage.gate, gate_map, full, stream, k, first_column, (i32)tile.expert);
                    tma_load_3d(stage.up, up_map, full, stream, k, first_column, (i32)tile.expert);
                }
                const i32 element = k + chunk * 8, wanted = element < INNER ? tile.rows - line : 0;
                const u32 to = shared_address(&stage.rows[line][(chunk ^ line % 8) * 8]);
                #pragma unroll
                for (i32 i = 0; i < TILE_ROWS / COPIED_LINES; i++) {
                    const bool exists = i * COPIED_LINES < wanted;
                    const Element *const from = x + (i64)token[i] * INNER + (exists ? element : 0);
                    copy_async<16>(to + i * COPIED_LINES * (u32)sizeof(stage.rows[0]), from, exists);
                }
                commit_copies();
                if (late < LATE) {
                    late++;
                    continue;
                }
                // The gathered rows of stage `landed` have arrived. cp.async writes through the generic
                // proxy, so a proxy fence must precede the arrival that lets wgmma read them.
                wait_copies<LATE>();
                proxy_fence();
                mbarrier_arrive(shared.full[landed.index]);
                landed.advance();
            }
        }
        wait_copies<0>();
        proxy_fence();
        for (; late > 0; late--, landed.advance())
            mbarrier_arrive(shared.full[landed.index]);
        return;
    }

    // The consumers. One wgmma group stays in flight. Once it is the only one, the group of the
    // slice before has finished reading, so that slice's stage is released.
    grow_registers<232>();
    const i32 consumer = warp_index() / 4 - 1, warp = warp_index() - 4;
    Element (&epilogue_tile)[16][64] = shared.epilogue_tiles[warp];
    const i32 first_row = 16 * warp;
    PipelineState state;
    #pragma unroll 1
    for (TileScheduler scheduler = schedule; scheduler.is_valid(); scheduler.advance()) {
        const RowTile tile = row_tile(offsets, row_tiles, scheduler.row());
        const i32 first_column = scheduler.column() * TILE_COLUMNS;
        // A consumer without rows multiplies nothing but still releases every stage.
        const bool multiplies = 64 * consumer < tile.rows;
        f32 gate_sums[SUMS], up_sums[SUMS];
        i32 before = 0;
        #pragma unroll 1
        for (i32 k = 0; k < INNER; k += TILE_DEPTH, state.advance()) {
            const Stage &stage = shared.pipeline[state.index];
            mbarrier_wait(shared.full[state.index], state.phase);
            if (multiplies) {
                const u64 left = operand_128b(stage.rows[64 * consumer]);
                const u64 gate = operand_128b(stage.gate), up = operand_128b(stage.up);
                wgmma_fence();
                #pragma unroll
                for (i32 step = 0; step < TILE_DEPTH / 16; step++) {
                    const bool accumulate = k > 0 || step > 0;
                    wgmma_m64n128k16_bf16(gate_sums, left + step * NEXT_STEP, gate + step * NEXT_STEP, accumulate);
                    wgmma_m64n128k16_bf16(up_sums, left + step * NEXT_STEP, up + step * NEXT_STEP, accumulate);
                }
                wgmma_commit();
                wgmma_wait<1>();
            }
            if (k > 0 && elect_one())
                mbarrier_arrive(shared.empty[before]);
            before = state.index;
        }
        wgmma_wait<0>();
        if (elect_one())
            mbarrier_arrive(shared.empty[before]);
        if (!multiplies)
            continue;
        settle(gate_sums);
        settle(up_sums);

        // Epilogue: a warp stores its 16 rows, 64 columns at a time.
        const i32 rows = tile.rows - first_row;
        #pragma unroll
        for (i32 slab = 0; slab < TILE_COLUMNS; slab += 64) {
            // Four sums are two columns of two rows.
            #pragma unroll
            for (i32 i = slab / 2; i < slab / 2 + 32; i += 4) {
                #pragma unroll
                for (i32 half = 0; half < 2; half++) {
                    Pack<Element, 2> pair;
                    #pragma unroll
                    for (i32 n = 0; n < 2; n++) {
                        const i32 sum = i + 2 * half + n;
                        const f32 value = finished(gate_sums[sum], up_sums[sum]);
                        pair.at[n] = round_to<Element>(value);
                    }
                    store(in_epilogue_tile(epilogue_tile, sum_row(i + 2 * half), sum_column(i) - slab), pair);
                }
                if (i % 32 == 12)
                    warp_sync();  // more of them at once would not fit the registers
            }
            warp_sync();
            store_epilogue_tile(hidden + (tile.first + first_row) * OUTER, epilogue_tile, rows, first_column + slab);
            warp_sync();
        }
    }
}
