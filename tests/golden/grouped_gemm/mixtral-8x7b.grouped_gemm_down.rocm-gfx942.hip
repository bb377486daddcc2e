// grouped_gemm_down for rocm:gfx942, on matrix cores: mfma_32x32x8
//
//   out = hidden · downᵀ
//
// A block owns 128 rows of one expert by 128 columns; each of its 4 waves owns
// 64 x 64 of them. block_x counts row tiles, block_y column tiles.
// There are at most as many row tiles as blocks; the blocks beyond them return.
//
// Shared memory: two buffers of each. While one is multiplied, the next 32 elements of all rows
// are on their way from global memory to registers, and from there they go to the other.
//   left   bf16 [128][32]   hidden
//   right  bf16 [128][32]   rows of down
// A line is chunks of 16 bytes. Which lies where is XORed with the number of the line: the
// same chunk of eight lines is on eight different groups of banks.
//
// Weights are the left operand of a product and rows the right one, so that a lane's sums are
// of one row; and the lines of right are in such an order that they are of adjacent columns.
//
// Baked in: inner 14336, outer 4096, experts 8, types, epilogue. Not the tokens.

// ---- types, and the hardware as named functions ----

typedef unsigned short u16;
typedef int i32;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;
typedef float f32;
typedef double f64;

struct bf16 { u16 bits; };  // the upper half of an f32
struct f16 { u16 bits; };   // IEEE binary16

#define __shared__ __attribute__((shared))
#define DEVICE __attribute__((device)) inline __attribute__((always_inline))
#define COMPILE_TIME constexpr
#define KERNEL(threads) \
    extern "C" __attribute__((global, amdgpu_flat_work_group_size(threads, threads))) void

DEVICE i32 thread_index() { return __builtin_amdgcn_workitem_id_x(); }
DEVICE i64 block_x() { return __builtin_amdgcn_workgroup_id_x(); }
DEVICE i64 block_y() { return __builtin_amdgcn_workgroup_id_y(); }
DEVICE void await_launches() {}  // launches do not overlap

DEVICE void block_sync()
{
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}

DEVICE u32 bits_of(f32 value) { return __builtin_bit_cast(u32, value); }
DEVICE f32 float_of(u32 bits) { return __builtin_bit_cast(f32, bits); }
DEVICE f32 fused(f32 a, f32 b, f32 c) { return __builtin_fmaf(a, b, c); }
DEVICE f32 square_root(f32 value) { return __builtin_sqrtf(value); }

DEVICE f32 to_f32(f16 value) { return __builtin_bit_cast(_Float16, value.bits); }
DEVICE f16 to_f16(f32 value) { return f16{__builtin_bit_cast(u16, (_Float16)value)}; }

// No instruction here: adding just under half of the last place kept rounds to
// the nearest, ties to even; a NaN stays one.
DEVICE bf16 to_bf16(f32 value)
{
    u32 bits = bits_of(value);
    u32 quiet = bits | 0x400000u, rounded = bits + 0x7fffu + (bits >> 16 & 1u);
    return bf16{(u16)((value != value ? quiet : rounded) >> 16)};
}

DEVICE f32 to_f32(bf16 value) { return float_of((u32)value.bits << 16); }
DEVICE f32 to_f32(f32 value) { return value; }

// The nearest value of a storage type; ties to even.
template <class T> DEVICE T round_to(f32 value);
template <> DEVICE f32 round_to<f32>(f32 value) { return value; }
template <> DEVICE f16 round_to<f16>(f32 value) { return to_f16(value); }
template <> DEVICE bf16 round_to<bf16>(f32 value) { return to_bf16(value); }

// N adjacent elements, moved by one access.
template <class T, int N> struct alignas(N * sizeof(T)) Pack { T at[N]; };

template <int N, class T> DEVICE Pack<T, N> load(const T *from)
{
    return *reinterpret_cast<const Pack<T, N> *>(from);
}

template <int N, class T> DEVICE void store(T *to, const Pack<T, N> &pack)
{
    *reinterpret_cast<Pack<T, N> *>(to) = pack;
}

// Pack number `i` of a row. NVVM writes a pack by one access only where it sees
// that the address counts whole packs.
template <int N, class T> DEVICE Pack<T, N> load(const T *row, i64 i)
{
    return reinterpret_cast<const Pack<T, N> *>(row)[i];
}

template <int N, class T> DEVICE void store(T *row, i64 i, const Pack<T, N> &pack)
{
    reinterpret_cast<Pack<T, N> *>(row)[i] = pack;
}

// Elements of the widest pack, at most 16 bytes, that divides rows of `width`:
// every row then starts at a pack and ends with one.
template <class T> COMPILE_TIME int pack_width(i64 width)
{
    int count = 16 / sizeof(T);
    while (width % count != 0)
        count /= 2;
    return count;
}

COMPILE_TIME int ceil_div(int a, int b) { return (a + b - 1) / b; }
COMPILE_TIME int lesser(int a, int b) { return a < b ? a : b; }

// ---- products of a wave ----

// sums + a · b on the matrix cores, EDGE x EDGE x K, by all 64 lanes. The lanes of a group, lane / EDGE,
// bring one share of the K elements; a lane holds
//   a       of row lane % EDGE of the left matrix, the share of its group
//   b       of column lane % EDGE of the right one, the same
//   sums    of that column: in register r, row r / 4 * (256 / EDGE) + lane / EDGE * 4 + r % 4
typedef f32 f32x4 __attribute__((ext_vector_type(4)));
typedef f32 f32x16 __attribute__((ext_vector_type(16)));

typedef short bf16x4 __attribute__((ext_vector_type(4)));

DEVICE bf16x4 vector_of(Pack<bf16, 4> pack) { return __builtin_bit_cast(bf16x4, pack); }

DEVICE f32x16 mfma_32x32x8(Pack<bf16, 4> a, Pack<bf16, 4> b, f32x16 sums)
{
    return __builtin_amdgcn_mfma_f32_32x32x8bf16_1k(vector_of(a), vector_of(b), sums, 0, 0, 0);
}

DEVICE f32x4 mfma_16x16x16(Pack<bf16, 4> a, Pack<bf16, 4> b, f32x4 sums)
{
    return __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(vector_of(a), vector_of(b), sums, 0, 0, 0);
}

// ---- the kernel ----

typedef bf16 Element;

constexpr int INNER = 14336, OUTER = 4096;
constexpr int EXPERTS = 8;
constexpr int THREADS = 256, WAVE = 64;
constexpr int TILE_ROWS = 128, TILE_COLUMNS = 128, TILE_DEPTH = 32;
constexpr int WAVE_ROWS = 64, WAVE_COLUMNS = 64;
constexpr int MATRICES = 1;

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

// What becomes of a sum: bias, activation, weight.
DEVICE f32 finished(f32 down)
{
    return down;
}

// Where a chunk of a line lies in a tile of shared memory. The banks are eight chunks wide.
DEVICE i32 place(i32 line, i32 chunk) { return line * CHUNKS + (chunk ^ line * CHUNKS / 8 % CHUNKS); }

// The chunk of a row from element k on; zeros beyond INNER.
DEVICE Chunk load_chunk(const Element *row, i32 k)
{
    Chunk chunk = {};
    #pragma unroll
    for (i32 n = 0; n < CHUNK; n += LOADED)
        if (k + n < INNER)
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

    // Reads from element `depth` on.
    DEVICE void fetch(i32 depth)
    {
        #pragma unroll
        for (i32 i = 0; i < HELD; i++)
            held[i] = rows[i] ? load_chunk(rows[i], depth + chunk_of() * CHUNK) : Chunk{};
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

KERNEL(THREADS) grouped_gemm_down(
    const bf16 *__restrict__ hidden,   // [rows, 14336]
    const bf16 *__restrict__ down,     // [8, 4096, 14336]
    const i64 *__restrict__ offsets,   // [9]
    const i32 *__restrict__ row_tiles, // [9]
    bf16 *__restrict__ out,            // [rows, 4096]
    i64 tokens)
{
    await_launches();
    __shared__ Chunk left[2][TILE_ROWS * CHUNKS], right[2][MATRICES * TILE_COLUMNS * CHUNKS];

    (void)tokens;
    const RowTile tile = row_tile(offsets, row_tiles);
    if (tile.rows <= 0)
        return;
    const i32 first_column = (i32)block_y() * TILE_COLUMNS, columns = OUTER - first_column;
    const i64 first_weight = tile.expert * OUTER + first_column;

    Stage<TILE_ROWS> left_stage;
    left_stage.aim([&](i32 row) {
        return row < tile.rows ? hidden + (tile.first + row) * INNER : nullptr;
    });
    Stage<MATRICES * TILE_COLUMNS> right_stage;
    right_stage.aim([&](i32 line) {
        const i32 column = column_of(line);
        return column < columns ? down + (first_weight + column) * INNER : nullptr;
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
                const f32 value = finished(sums[i][0][part][sum]);
                pack.at[n] = round_to<Element>(value);
            }
            store(out + (tile.first + row) * OUTER + first_column + column, pack);
        }
    }
}
