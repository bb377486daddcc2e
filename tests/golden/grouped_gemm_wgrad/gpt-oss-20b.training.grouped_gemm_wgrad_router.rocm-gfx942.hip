// grouped_gemm_wgrad_up for rocm:gfx942
//
//   grad_up = dupᵀ · rows, over all tokens
//
// A block owns 64 x 128 of the matrix; a thread owns 8 x 8 of
// them. block_x counts tiles of matrix rows, block_y column tiles. Rows are summed in
// ascending order. An expert without rows has zeros.
//
// Shared memory: two buffers of each, one filled while the other is used.
//   left_tile   f32 [16][64]   columns of dup
//   right_tile  f32 [16][128]   columns of rows
//
// grouped_gemm_wgrad_up_bias: the sums of dup over rows. A thread has a
// column of all tokens.
//
// Baked in: matrices [32, 2880], experts 1, types. Not the tokens.

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

// ---- slabs ----

// LINES lines by COLUMNS columns on their way from a matrix [*, WIDTH] through the registers
// of THREADS threads to shared memory. Lines are the depth of the product, so that they lie
// there as they come (tile[line][column]).
template <class T, int COLUMNS, int LINES, int WIDTH, int THREADS> struct Slab {
    static constexpr int PACK = pack_width<T>(WIDTH), GROUP = lesser(PACK, 4);
    static constexpr int PACKS_PER_LINE = COLUMNS / PACK, PACKS = LINES * PACKS_PER_LINE;
    static constexpr int HELD = ceil_div(PACKS, THREADS);
    static_assert(PACKS_PER_LINE * PACK == COLUMNS, "a pack is in one tile");

    Pack<T, PACK> held[HELD];

    DEVICE static i32 pack_of(i32 i) { return i * THREADS + thread_index(); }
    DEVICE static i32 line_of(i32 i) { return pack_of(i) / PACKS_PER_LINE; }
    DEVICE static i32 column_of(i32 i) { return pack_of(i) % PACKS_PER_LINE * PACK; }

    // Reads columns `first` and on. `line_at(i)` is where line i begins; beyond `lines` and
    // WIDTH there are zeros.
    template <class LineAt> DEVICE void fetch(i32 lines, i32 first, LineAt line_at)
    {
        #pragma unroll
        for (i32 i = 0; i < HELD; i++) {
            const i32 line = line_of(i), column = first + column_of(i);
            held[i] = Pack<T, PACK>{};
            if (line < lines && column < WIDTH && pack_of(i) < PACKS)
                held[i] = load<PACK>(line_at(line), column / PACK);
        }
    }

    // Writes to columns `first` and on of a tile.
    template <int PITCH> DEVICE void put(f32 (&tile)[LINES][PITCH], i32 first) const
    {
        #pragma unroll
        for (i32 i = 0; i < HELD; i++)
            #pragma unroll
            for (i32 j = 0; j < PACK; j += GROUP) {
                Pack<f32, GROUP> group;
                #pragma unroll
                for (i32 n = 0; n < GROUP; n++)
                    group.at[n] = to_f32(held[i].at[j + n]);
                if (pack_of(i) < PACKS)
                    store(&tile[line_of(i)][first + column_of(i) + j], group);
            }
    }
};

// ---- products of tiles ----

// Where item `i` of COUNT of a thread lies, when THREADS threads share a side of
// a tile: groups of up to four adjacent ones, dealt out in turn.
template <int COUNT, int THREADS> DEVICE i32 dealt(i32 thread, i32 i)
{
    constexpr int GROUP = COUNT < 4 ? COUNT : 4;
    return (i / GROUP * THREADS + thread) * GROUP + i % GROUP;
}

// The COUNT items of a thread, out of one row of a tile.
template <int COUNT, int THREADS> DEVICE void gather(f32 (&items)[COUNT], const f32 *row, i32 thread)
{
    constexpr int GROUP = COUNT < 4 ? COUNT : 4;
    #pragma unroll
    for (i32 i = 0; i < COUNT; i += GROUP) {
        Pack<f32, GROUP> group = load<GROUP>(row + dealt<COUNT, THREADS>(thread, i));
        #pragma unroll
        for (i32 j = 0; j < GROUP; j++)
            items[i + j] = group.at[j];
    }
}

// sums += leftᵀ · right over STEPS of the depth from `first` on, for a thread of a
// grid of ROW_THREADS x COLUMN_THREADS, rows first.
template <int ROW_THREADS, int COLUMN_THREADS, int STEPS, int ROWS, int COLUMNS, int DEPTH, int LEFT, int RIGHT>
DEVICE void multiply(f32 (&sums)[ROWS][COLUMNS], const f32 (&left)[DEPTH][LEFT],
                     const f32 (&right)[DEPTH][RIGHT], i32 thread, i32 first)
{
    #pragma unroll 4
    for (i32 k = 0; k < STEPS; k++) {
        f32 a[ROWS], b[COLUMNS];
        gather<ROWS, ROW_THREADS>(a, left[first + k], thread / COLUMN_THREADS);
        gather<COLUMNS, COLUMN_THREADS>(b, right[first + k], thread % COLUMN_THREADS);
        #pragma unroll
        for (i32 i = 0; i < ROWS; i++)
            #pragma unroll
            for (i32 j = 0; j < COLUMNS; j++)
                sums[i][j] = fused(a[i], b[j], sums[i][j]);
    }
}

// ---- the kernel ----

constexpr int HEIGHT = 32, WIDTH = 2880;
constexpr int THREADS = 128;
constexpr int TILE_ROWS = 64, TILE_COLUMNS = 128, TILE_DEPTH = 16;
constexpr int THREAD_ROWS = 8, THREAD_COLUMNS = 8;
constexpr int ROW_THREADS = TILE_ROWS / THREAD_ROWS, COLUMN_THREADS = TILE_COLUMNS / THREAD_COLUMNS;
constexpr int MATRICES = 1;

typedef f32 Left;
typedef bf16 Right;
typedef Slab<Left, TILE_ROWS, TILE_DEPTH, HEIGHT, THREADS> LeftSlab;
typedef Slab<Right, TILE_COLUMNS, TILE_DEPTH, WIDTH, THREADS> RightSlab;

// Columns stored at a time.
constexpr int STORED = lesser(pack_width<f32>(WIDTH), lesser(THREAD_COLUMNS, 4));

static_assert(ROW_THREADS * COLUMN_THREADS == THREADS, "every thread owns a part of the tile");
static_assert(MATRICES == 1 || THREAD_ROWS % 4 == 0, "a thread has the same part of both matrices");

// Overwrites elements of a gradient, or adds to them.
DEVICE void put_sums(f32 *row, i32 at, const f32 *sums, bool accumulate)
{
    Pack<f32, STORED> pack = {};
    if (accumulate)
        pack = load<STORED>(row, at);
    #pragma unroll
    for (i32 n = 0; n < STORED; n++)
        pack.at[n] += sums[n];
    store(row, at, pack);
}

KERNEL(THREADS) grouped_gemm_wgrad_up(
    const f32 *__restrict__ dup,   // [tokens, 32]
    const bf16 *__restrict__ rows, // [tokens, 2880]
    f32 *__restrict__ grad_up,     // [1, 32, 2880]
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
    const f32 *__restrict__ dup,    // [tokens, 32]
    f32 *__restrict__ grad_up_bias, // [1, 32]
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
