// grouped_gemm_up for rocm:gfx942, of few rows, on matrix cores: mfma_32x32x8
//
//   hidden = act(x[token] · gateᵀ, x[token] · upᵀ)
//
// With few rows a product is a reading of weights. A block is one wave, which reads 8
// columns of gate and of up of one expert from end to end, once, and multiplies them by 32 or 64 rows at
// a time, as there are. So work is cut into equal numbers of bytes, small enough for every
// compute unit to have its share. block_x counts row tiles, block_y columns.
// There are at most as many row tiles as blocks; the blocks beyond them return.
//
// A lane loads what it brings to a product from where it lies: chunks of 16 bytes of one line
// of weights, and of rows. The next of them are on their way while some are multiplied.
// Weights are the left operand, 16 of its 32 lines; rows are the right one, so that a lane's sums
// are of one row, and of adjacent columns, gate and up of the same ones.
//
// Sums are f32, and in the order of the kernel for many rows: a row has the same sums in any company.
//
// Shared memory: none.
//
// Baked in: inner 4096, outer 14336, experts 8, types, epilogue. Not the tokens.

// [prelude: base.hpp, hip/base.hpp, bf16_bits.hpp, base.hpp, hip/mfma.hpp, math/exp.hpp, activation.hpp]

// ---- the kernel ----

typedef bf16 Element;

constexpr int INNER = 4096, OUTER = 14336;
constexpr int EXPERTS = 8, TOP_K = 2;
constexpr int WAVE = 64, MATRICES = 2;
constexpr int TILE_ROWS = 128, TILE_COLUMNS = 8, MOST = 64;  // rows at a time

// A product is EDGE x EDGE sums; a row's are in GROUPS lanes, SUMS in each. Of these the
// first USED are of columns of this wave: RUN adjacent ones of each matrix.
constexpr int EDGE = 32, GROUPS = WAVE / EDGE, SUMS = EDGE / GROUPS;
constexpr int RUN = TILE_COLUMNS / GROUPS, USED = MATRICES * RUN;

// A chunk is 16 bytes. A step of the inner dimension is a chunk of every group.
constexpr int CHUNK = 16 / sizeof(Element), STEP = GROUPS * CHUNK;
typedef Pack<Element, CHUNK> Chunk;

// Elements loaded and stored at a time.
constexpr int LOADED = pack_width<Element>(INNER), STORED = lesser(pack_width<Element>(OUTER), RUN);

static_assert(RUN * GROUPS == TILE_COLUMNS && USED <= SUMS, "a wave has room for its columns");

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

DEVICE f32 activated(f32 gate, f32 up)
{
    return activation(gate) * up;
}

// What becomes of a sum: bias, activation, weight.
DEVICE f32 finished(f32 gate, f32 up)
{
    return activated(gate, up);
}

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

// A lane brings a chunk of weights and one of a row, for several products. Which elements of
// the inner dimension meet in one does not matter, as long as both sides agree.
DEVICE void add_product(Sums &sums, const Chunk &weights, const Chunk &row)
{
    #pragma unroll
    for (i32 k = 0; k < CHUNK; k += 4)
        sums = mfma_32x32x8(load<4>(weights.at + k), load<4>(row.at + k), sums);
}

// Sums of PARTS times EDGE rows with the columns of a wave. `line` is where this lane's line
// of weights begins, `rows` where its rows do; null for zeros.
template <int PARTS>
DEVICE void multiply_rows(Sums (&sums)[MOST / EDGE], const Element *line, const Element *const (&rows)[MOST / EDGE])
{
    constexpr int AHEAD = 8 / PARTS;  // steps on their way
    const i32 own = thread_index() / EDGE * CHUNK;
    Chunk weights[AHEAD], factors[AHEAD][PARTS];
    auto fetch = [&](i32 depth) {
        #pragma unroll
        for (i32 n = 0; n < AHEAD; n++) {
            const i32 k = depth + n * STEP + own;
            weights[n] = line ? load_chunk(line, k) : Chunk{};
            #pragma unroll
            for (i32 p = 0; p < PARTS; p++)
                factors[n][p] = rows[p] ? load_chunk(rows[p], k) : Chunk{};
        }
    };
    fetch(0);
    #pragma unroll 1
    for (i32 depth = 0; depth < INNER; depth += AHEAD * STEP) {
        Chunk left[AHEAD], right[AHEAD][PARTS];
        #pragma unroll
        for (i32 n = 0; n < AHEAD; n++) {
            left[n] = weights[n];
            #pragma unroll
            for (i32 p = 0; p < PARTS; p++)
                right[n][p] = factors[n][p];
        }
        fetch(depth + AHEAD * STEP);
        #pragma unroll
        for (i32 n = 0; n < AHEAD; n++)
            #pragma unroll
            for (i32 p = 0; p < PARTS; p++)
                add_product(sums[p], left[n], right[n][p]);
    }
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
    const RowTile tile = row_tile(offsets, row_tiles);
    const i32 count = lesser(tile.rows, TILE_ROWS), lane = thread_index();
    const i32 first_column = (i32)block_y() * TILE_COLUMNS, columns = OUTER - first_column;
    const i64 first_weight = tile.expert * OUTER + first_column;

    // The line of weights that this lane brings.
    const i32 sum = sum_of(lane % EDGE), own = group_of(lane % EDGE) * RUN + sum % RUN;
    const Element *const matrix = sum < RUN ? gate : up;
    const Element *const line = sum < USED && own < columns ? matrix + (first_weight + own) * INNER : nullptr;

    #pragma unroll 1
    for (i32 first = 0; first < count; first += MOST) {
        const i64 first_row = tile.first + first;
        const i32 left = lesser(count - first, MOST);
        const Element *lines[MOST / EDGE];
        #pragma unroll
        for (i32 p = 0; p < MOST / EDGE; p++) {
            const i32 row = p * EDGE + lane % EDGE;
            lines[p] = row < left ? x + (i64)(row_slots[first_row + row] / TOP_K) * INNER : nullptr;
        }
        Sums sums[MOST / EDGE] = {};
        if (left <= 32)
            multiply_rows<1>(sums, line, lines);
        else
            multiply_rows<2>(sums, line, lines);

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
