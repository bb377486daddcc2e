// grouped_gemm_up for rocm:gfx942: decode (small M), matrix cores, mfma_32x32x8
//
//   hidden = act(x[token] · gateᵀ, x[token] · upᵀ)
//
// With few rows the time is that of reading the weights. A block is one wave: it reads 16
// columns of gate and of up of one expert once, end to end, and multiplies them by 32 or 64 rows at
// a time. Work is thus cut into equal numbers of bytes, small enough to give every compute unit its
// share. block_x counts row tiles, block_y columns.
// There are at most as many row tiles as blocks; blocks beyond the last tile return.
//
// A lane loads its operands from global memory straight into registers: chunks of 16 bytes of one
// line of weights and of its rows, in turns of 128 bytes of each line. While the wave multiplies one
// turn, the other turns are in flight; then it requests the turn that follows the last of them.
// Weights are the left operand and rows the right one, so all sums of a lane belong to one row and to
// adjacent columns, gate and up of the same ones.
//
// Sums are f32, in the order of the kernel for larger calls, so a row has the same bits in every batch.
//
// Shared memory: none.
//
// Baked in: inner 4096, outer 14336, experts 8, types, epilogue.
// Read at run time: the number of tokens.

// [prelude: base.hpp, hip/base.hpp, bf16_bits.hpp, base.hpp, warp.hpp]

constexpr i32 WARP = 64;
typedef u64 LaneMask;

// [prelude: hip/warp.hpp, warp_max.hpp, warp.hpp, hip/mfma.hpp, hip/along.hpp, math/exp.hpp, activation.hpp]

// ---- the kernel ----

typedef bf16 Element;

constexpr int INNER = 4096, OUTER = 14336;
constexpr int EXPERTS = 8, TOP_K = 2;
constexpr int WAVE = 64, MATRICES = 2;
constexpr int TILE_ROWS = 128, TILE_COLUMNS = 16, MOST = 64;  // rows at a time

// A matrix instruction has EDGE x EDGE sums; those of a row lie in GROUPS lanes, SUMS in each, which
// belong to RUN adjacent columns of each matrix.
constexpr int EDGE = 32, GROUPS = WAVE / EDGE, SUMS = EDGE / GROUPS, RUN = TILE_COLUMNS / GROUPS;

// A chunk is 16 bytes. A step of the inner dimension is a chunk of every group, and a turn is the
// steps of 128 bytes, the size of a memory request.
constexpr int CHUNK = 16 / sizeof(Element), STEP = GROUPS * CHUNK, STEPS = 8 / GROUPS, TURN = STEPS * STEP;
typedef Pack<Element, CHUNK> Chunk;

// Elements loaded and stored at a time.
constexpr int LOADED = pack_width<Element>(INNER), STORED = lesser(pack_width<Element>(OUTER), RUN);

static_assert(MATRICES * RUN == SUMS && RUN * GROUPS == TILE_COLUMNS, "a wave has weights for a whole product");

typedef f32x16 Sums;

// Row r of a matrix instruction's result is sum sum_of(r) of the lanes in group group_of(r).
DEVICE i32 group_of(i32 row) { return row / 4 % GROUPS; }
DEVICE i32 sum_of(i32 row) { return row / 4 / GROUPS * 4 + row % 4; }

// A row tile: `rows` rows of one expert, from row `first` on.
struct RowTile {
    i64 expert, first;
    i32 rows;
};

// Finds row tile `tile` with a whole warp. Each lane compares it with the first tiles of some
// experts, whose loads are all in flight at once. A binary search would wait for one load after the
// other.
DEVICE RowTile warp_row_tile(const i64 *offsets, const i32 *row_tiles, i32 tile = (i32)block_x())
{
    constexpr int HELD = lesser(ceil_div(EXPERTS, WARP), 8);
    const i32 tiles = row_tiles[EXPERTS];
    i32 begun = 0;  // experts whose first tile is this one or before it; the end is after all tiles
    #pragma unroll 1
    for (i32 start = 0; start < EXPERTS; start += HELD * WARP) {
        const i32 own = start + thread_index();  // a block is a warp
        i32 firsts[HELD];
        #pragma unroll
        for (i32 n = 0; n < HELD; n++)
            firsts[n] = row_tiles[lesser(own + n * WARP, EXPERTS)];
        #pragma unroll
        for (i32 n = 0; n < HELD; n++)
            begun += population(ballot(firsts[n] <= tile));
    }
    if (tile >= tiles)
        return {0, 0, 0};
    const i32 expert = begun - 1;
    const i64 first = offsets[expert] + (i64)(tile - row_tiles[expert]) * TILE_ROWS;
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

// A lane passes a chunk of weights and one of a row to several instructions. An instruction thus
// multiplies elements that are not adjacent in the inner dimension, the same ones on both sides.
DEVICE void add_product(Sums &sums, const Chunk &weights, const Chunk &row)
{
    #pragma unroll
    for (i32 k = 0; k < CHUNK; k += 4)
        sums = mfma_32x32x8(load<4>(weights.at + k), load<4>(row.at + k), sums);
}

// Whether turns divide a line.
constexpr bool WHOLE = INNER % TURN == 0;

// Loads the chunk of a line from element k on. Lanes without a chunk of their own, or beyond the end,
// load some valid address and ignore it.
DEVICE Words load_words(const Element *line, i32 k, bool own)
{
    const bool within = WHOLE || k < INNER;
    if constexpr (LOADED == CHUNK)
        return load_along(line + (within ? k : 0), own && within);
    else
        return as<Words>(own ? load_chunk(line, k) : Chunk{});
}

// Multiplies PARTS times EDGE rows by the columns of a wave. `line` is this lane's line of weights,
// which exists if `brings`, and `rows` are its rows, of which those below `count` exist.
template <int PARTS>
DEVICE void multiply_rows(Sums (&sums)[MOST / EDGE], const Element *line, bool brings, const Element *const (&rows)[MOST / EDGE], i32 count)
{
    // As many turns as registers hold next to the sums, out of the 256 that two waves leave each other.
    constexpr int ROOM = (208 - PARTS * SUMS) / (4 * STEPS * (1 + PARTS)), TURNS = lesser(ROOM, ceil_div(INNER, TURN));
    const i32 lane = thread_index(), group = lane / EDGE * CHUNK;
    // Where lines end inside a turn, each element is compared with the end. The results are pairs of
    // scalar registers; hoisted out of the loop for all turns they would exceed what a wave has.
    auto own_of = [&](bool asks) { return asks && !WHOLE ? renewed(group) : group; };
    Words weights[TURNS][STEPS], factors[TURNS][STEPS][PARTS];
    auto fetch = [&](i32 turn, i32 depth) {
        const bool more = depth < INNER;
        const i32 own = own_of(true);
        #pragma unroll
        for (i32 n = 0; n < STEPS; n++) {
            const i32 k = (more ? depth : 0) + n * STEP + own;
            weights[turn][n] = load_words(line, k, more && brings);
            #pragma unroll
            for (i32 p = 0; p < PARTS; p++)
                factors[turn][n][p] = load_words(rows[p], k, more && p * EDGE + lane % EDGE < count);
        }
        keep_order();
    };
    // Unpacks a chunk; the last turns have zeros beyond the end.
    auto chunk_of = [&](const Words &words, i32 k, bool last) {
        Chunk chunk = as<Chunk>(words);
        #pragma unroll
        for (i32 n = 0; n < CHUNK; n++)
            if (last && !WHOLE && k + n >= INNER)
                chunk.at[n] = Element{};
        return chunk;
    };
    auto multiply = [&](i32 turn, i32 depth, bool last) {
        const i32 own = own_of(last);
        #pragma unroll
        for (i32 n = 0; n < STEPS; n++) {
            const i32 k = depth + n * STEP + own;
            const Chunk left = chunk_of(weights[turn][n], k, last);
            #pragma unroll
            for (i32 p = 0; p < PARTS; p++)
                add_product(sums[p], left, chunk_of(factors[turn][n][p], k, last));
        }
        keep_order();
    };
    #pragma unroll
    for (i32 turn = 0; turn < TURNS; turn++)
        fetch(turn, turn * TURN);
    i32 depth = 0;
    #pragma unroll 1
    for (; depth + TURNS * TURN < INNER; depth += TURNS * TURN)
        #pragma unroll
        for (i32 turn = 0; turn < TURNS; turn++) {
            multiply(turn, depth + turn * TURN, false);
            fetch(turn, depth + (TURNS + turn) * TURN);
        }
    #pragma unroll
    for (i32 turn = 0; turn < TURNS; turn++)
        if (depth + turn * TURN < INNER)
            multiply(turn, depth + turn * TURN, true);
}

KERNEL(WAVE) grouped_gemm_up(
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
    (void)tokens;
    const RowTile tile = warp_row_tile(offsets, row_tiles);
    const i32 count = lesser(tile.rows, TILE_ROWS), lane = thread_index();
    const i32 first_column = (i32)block_y() * TILE_COLUMNS, columns = OUTER - first_column;
    const i64 first_weight = tile.expert * OUTER + first_column;

    // The line of weights of this lane. A lane beyond the last column loads the first line again.
    const i32 sum = sum_of(lane % EDGE), own = group_of(lane % EDGE) * RUN + sum % RUN;
    const Element *const matrix = sum < RUN ? gate : up;
    const bool brings = own < columns;
    const Element *const line = matrix + (first_weight + (brings ? own : 0)) * INNER;

    #pragma unroll 1
    for (i32 first = 0; first < count; first += MOST) {
        const i64 first_row = tile.first + first;
        const i32 left = lesser(count - first, MOST);
        const Element *lines[MOST / EDGE];
        #pragma unroll
        for (i32 p = 0; p < MOST / EDGE; p++) {
            // A lane beyond the last row loads the first row again.
            const i32 row = p * EDGE + lane % EDGE < left ? p * EDGE + lane % EDGE : 0;
            lines[p] = x + (i64)(row_slots[first_row + row] / TOP_K) * INNER;
        }
        Sums sums[MOST / EDGE] = {};
        if (left <= 32)
            multiply_rows<1>(sums, line, brings, lines, left);
        else
            multiply_rows<2>(sums, line, brings, lines, left);

        #pragma unroll
        for (i32 p = 0; p < MOST / EDGE; p++) {
            const i32 row = p * EDGE + lane % EDGE;
            if (row >= left)
                continue;
            #pragma unroll
            for (i32 j = 0; j < RUN; j += STORED) {
                const i32 column = lane / EDGE * RUN + j;
                if (column >= columns)
                    continue;
                Pack<Element, STORED> pack;
                #pragma unroll
                for (i32 n = 0; n < STORED; n++) {
                    f32 gate_sum = sums[p][j + n], up_sum = sums[p][RUN + j + n];
                    const f32 value = finished(gate_sum, up_sum);
                    pack.at[n] = round_to<Element>(value);
                }
                const i64 at = (first_row + row) * OUTER + first_column + column;
                store(hidden + at, pack);
            }
        }
    }
}
