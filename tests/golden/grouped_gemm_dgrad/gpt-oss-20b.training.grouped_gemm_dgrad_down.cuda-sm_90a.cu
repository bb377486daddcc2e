// grouped_gemm_dgrad_down for cuda:sm_90a: wgmma, operands by TMA
//
//   P = dout · down
//   hidden = w · act(gate_pre, up_pre), dgate, dup = act'(gate_pre, up_pre) · w · P
//   dweight_parts = <P, act>, over the columns of a tile
//
// Tile: 128 rows of one expert by 256 columns; a block computes one.
// Tiles run in groups of 16 row tiles, inside a group column by column, so that blocks which run
// together share rows and weights in the L2 cache. Blocks beyond the last tile return.
//
// Warp specialization. Warpgroup 0 produces: one of its threads loads all operands by TMA.
// Warpgroups 1 and 2 multiply 64 rows each, with both operands in shared memory. The barrier `full`
// hands a stage to the consumers, `empty` hands it back.
//
// Shared memory, aligned to 1024 bytes. Operands have the layout that TMA writes: rows of 128 bytes
// whose 16-byte chunks are swizzled. A row of the weights is one step of the contraction, so wgmma
// reads them transposed.
//   pipeline        [4] of bf16 rows [128][64], matrix [4][64][64]
//   epilogue_tiles  f32 [8][16][64]   one for each consumer warp
//   full, empty     barriers [4] each
//
// Baked in: inner 2880, outer 2880, experts 32, types, epilogue.
// Read at run time: the number of tokens.

// [prelude: base.hpp, cuda/base.cuh, base.hpp, warp.hpp, cuda/warp.cuh, warp.hpp, cuda/shared.cuh, cuda/mbarrier.cuh, cuda/tma.cuh, cuda/wgmma.cuh]

// sums = a · b (+ sums when told to accumulate), a [64][16], b [16][256] in panels.
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
                 "}, %128, %129, accumulate, 1, 1, 0, 1;\n"
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

// [prelude: cuda/wgmma_across.cuh, math/exp.hpp, activation.hpp, activation_slope.hpp]

// ---- the kernel ----

constexpr int INNER = 2880, OUTER = 2880;
constexpr int EXPERTS = 32;
constexpr int TILE_ROWS = 128, TILE_COLUMNS = 256, TILE_DEPTH = 64;
constexpr int DEPTHS = ceil_div(INNER, TILE_DEPTH), SLICES = DEPTHS;
constexpr int STAGES = 4;
constexpr int CONSUMERS = TILE_ROWS / 64, CONSUMER_WARPS = 4 * CONSUMERS;
constexpr int THREADS = 128 + 128 * CONSUMERS;
constexpr int SUMS = TILE_COLUMNS / 2;  // per thread

typedef bf16 Element;

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

// A stage holds a slice of the inner dimension.
struct Stage {
    Element rows[TILE_ROWS][TILE_DEPTH];
    Element matrix[TILE_COLUMNS / 64][TILE_DEPTH][64];
};

struct alignas(1024) Shared {
    Stage pipeline[STAGES];
    EpilogueTile epilogue_tiles[CONSUMER_WARPS];
    Barrier full[STAGES], empty[STAGES];
};

static_assert(THREADS == 384 && sizeof(Shared) == 230400, "as launched");

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

KERNEL(THREADS) grouped_gemm_dgrad_down(
    const __grid_constant__ TensorMap dout_map, // [rows, 2880]
    const __grid_constant__ TensorMap down_map, // [32, 2880, 2880]
    const bf16 *gate_pre,                       // [rows, 2880]
    const bf16 *up_pre,                         // [rows, 2880]
    const i64 *offsets,                         // [33]
    const i32 *row_tiles,                       // [33]
    const i32 *row_slots,                       // [rows]
    const f32 *topk_weights,                    // [tokens, 4]
    bf16 *hidden,                               // [rows, 2880]
    bf16 *dgate,                                // [rows, 2880]
    bf16 *dup,                                  // [rows, 2880]
    f32 *dweight_parts,                         // [rows, 12]
    i64 tokens)
{
    await_launches();
    Shared &shared = dynamic_shared<Shared>();

    (void)tokens;
    const TileScheduler scheduler = {row_tiles[EXPERTS]};
    if (!scheduler.is_valid())
        return;
    const RowTile tile = row_tile(offsets, row_tiles, scheduler.row());
    const i32 first_column = scheduler.column() * TILE_COLUMNS;

    if (thread_index() == 0) {
        tma_prefetch(dout_map);
        tma_prefetch(down_map);
        for (i32 stage = 0; stage < STAGES; stage++) {
            mbarrier_init(shared.full[stage], 1);
            mbarrier_init(shared.empty[stage], CONSUMER_WARPS);
        }
        mbarrier_init_fence();
    }
    block_sync();

    // The producer. A box may reach into the next expert's rows, or beyond the last row; the
    // consumers multiply those too and never store the result.
    if (warp_index() < 4) {
        shrink_registers<40>();
        if (warp_index() == 0 && elect_one()) {
            const u64 keep = keep_in_cache(), stream = stream_through_cache();
            PipelineState state;
            auto fetch = [&](const TensorMap &rows, const TensorMap &matrix) {
                #pragma unroll 1
                for (i32 k = 0; k < INNER; k += TILE_DEPTH, state.advance()) {
                    Stage &stage = shared.pipeline[state.index];
                    Barrier &full = shared.full[state.index];
                    mbarrier_wait(shared.empty[state.index], state.phase ^ 1);
                    mbarrier_expect(full, sizeof(Stage));
                    tma_load_2d(stage.rows, rows, full, keep, k, (i32)tile.first);
                    #pragma unroll
                    for (i32 panel = 0; panel < TILE_COLUMNS / 64; panel++)
                        tma_load_3d(stage.matrix[panel], matrix, full, stream, first_column + 64 * panel, k, (i32)tile.expert);
                }
            };
            fetch(dout_map, down_map);
        }
        return;
    }

    // The consumers. One wgmma group stays in flight. Once it is the only one, the group of the
    // slice before has finished reading, so that slice's stage is released.
    grow_registers<232>();
    const i32 consumer = warp_index() / 4 - 1, warp = warp_index() - 4;
    // A consumer without rows multiplies nothing but still releases every stage.
    if (64 * consumer >= tile.rows) {
        PipelineState state;
        for (i32 at = 0; at < SLICES; at++, state.advance()) {
            mbarrier_wait(shared.full[state.index], state.phase);
            if (elect_one())
                mbarrier_arrive(shared.empty[state.index]);
        }
        return;
    }
    f32 sums[SUMS];
    PipelineState state;
    i32 before = 0;
    #pragma unroll 1
    for (i32 at = 0; at < SLICES; at++, state.advance()) {
        const Stage &stage = shared.pipeline[state.index];
        mbarrier_wait(shared.full[state.index], state.phase);
        const u64 left = operand_128b(stage.rows[64 * consumer]);
        const u64 right = operand_across_128b<TILE_DEPTH>(stage.matrix);
        wgmma_fence();
        #pragma unroll
        for (i32 step = 0; step < TILE_DEPTH / 16; step++)
            wgmma_m64n256k16_bf16(sums, left + step * NEXT_STEP, right + step * NEXT_LINES, at > 0 || step > 0);
        wgmma_commit();
        wgmma_wait<1>();
        if (at > 0 && elect_one())
            mbarrier_arrive(shared.empty[before]);
        before = state.index;
    }
    wgmma_wait<0>();
    settle(sums);

    // Epilogue: a warp stores its 16 rows, 64 columns at a time.
    EpilogueTile &epilogue_tile = shared.epilogue_tiles[warp];
    const i32 rows = tile.rows - 16 * warp;
    const i64 first_row = tile.first + 16 * warp, first = first_row * OUTER;
    const Kept kept = {gate_pre + first, up_pre + first, hidden + first, dgate + first, dup + first};
    f32 weights[EPILOGUE_PASSES], parts[EPILOGUE_PASSES] = {};
    row_weights(weights, topk_weights, row_slots, first_row, rows);
    #pragma unroll
    for (i32 slab = 0; slab < TILE_COLUMNS; slab += SLAB) {
        #pragma unroll
        for (i32 i = 0; i < 32; i += 2) {
            const Pack<f32, 2> pair = {sums[slab / 2 + i], sums[slab / 2 + i + 1]};
            store(in_epilogue_tile(epilogue_tile, sum_row(i), sum_column(i)), pair);
        }
        warp_sync();
        finish_epilogue_tile(kept, epilogue_tile, rows, first_column + slab, weights, parts);
        warp_sync();
    }
    #pragma unroll
    for (i32 pass = 0; pass < EPILOGUE_PASSES; pass++) {
        const f32 part = row_sum(parts[pass]);
        const i32 row = pass * ROWS_AT_ONCE + lane_index() / ROW_LANES;
        if (lane_index() % ROW_LANES == 0 && row < rows)
            dweight_parts[(first_row + row) * COLUMN_TILES + scheduler.column()] = part;
    }
}
