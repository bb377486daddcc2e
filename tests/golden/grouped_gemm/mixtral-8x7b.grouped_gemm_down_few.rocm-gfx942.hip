// grouped_gemm_down for rocm:gfx942, of few rows, on matrix cores: mfma_32x32x8
//
//   out = hidden · downᵀ
//
// With few rows a product is a reading of weights. A block is one wave, which reads 16
// columns of one expert from end to end, once, and multiplies them by 32 or 64 rows at
// a time, as there are. So work is cut into equal numbers of bytes, small enough for every
// compute unit to have its share. block_x counts row tiles, block_y columns.
// There are at most as many row tiles as blocks; the blocks beyond them return.
//
// A lane loads what it brings to a product from where it lies: chunks of 16 bytes of one line
// of weights, and of rows. The next of them are on their way while some are multiplied.
// Weights are the left operand, 16 of its 32 lines; rows are the right one, so that a lane's sums
// are of one row, and of adjacent columns.
//
// Sums are f32, and in the order of the kernel for many rows: a row has the same sums in any company.
//
// Shared memory: none.
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
constexpr int WAVE = 64, MATRICES = 1;
constexpr int TILE_ROWS = 128, TILE_COLUMNS = 16, MOST = 64;  // rows at a time

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

// What becomes of a sum: bias, activation, weight.
DEVICE f32 finished(f32 down)
{
    return down;
}

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

KERNEL(WAVE) grouped_gemm_down(
    const bf16 *__restrict__ hidden,   // [rows, 14336]
    const bf16 *__restrict__ down,     // [8, 4096, 14336]
    const i64 *__restrict__ offsets,   // [9]
    const i32 *__restrict__ row_tiles, // [9]
    bf16 *__restrict__ out,            // [rows, 4096]
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
    const Element *const matrix = down;
    const Element *const line = sum < USED && own < columns ? matrix + (first_weight + own) * INNER : nullptr;

    #pragma unroll 1
    for (i32 first = 0; first < count; first += MOST) {
        const i64 first_row = tile.first + first;
        const i32 left = lesser(count - first, MOST);
        const Element *lines[MOST / EDGE];
        #pragma unroll
        for (i32 p = 0; p < MOST / EDGE; p++) {
            const i32 row = p * EDGE + lane % EDGE;
            lines[p] = row < left ? hidden + (first_row + row) * INNER : nullptr;
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
                    f32 down_sum = sums[p][j + n];
                    const f32 value = finished(down_sum);
                    pack.at[n] = round_to<Element>(value);
                }
                const i64 at = (first_row + row) * OUTER + first_column + column;
                store(out + at, pack);
            }
        }
    }
}
