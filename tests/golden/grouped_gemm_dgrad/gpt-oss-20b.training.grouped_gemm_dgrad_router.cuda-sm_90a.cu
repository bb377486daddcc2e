// grouped_gemm_dgrad_up for cuda:sm_90a
//
//   drows = dup · up
//
// A block owns 64 rows of all tokens by 128 columns; a thread owns 8 x 8 of
// them. block_x counts row tiles, those of the forward pass, block_y column tiles.
//
// Shared memory: two buffers of each, one filled while the other is used.
//   left   f32 [16][64 + pad]   dup, transposed
//   right  f32 [16][128]   columns of up, as they lie
//
// Baked in: inner 32, outer 2880, experts 1, types, epilogue. Not the tokens.

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

#define DEVICE __device__ __forceinline__
#define COMPILE_TIME __device__ constexpr
// With the least wish for blocks per multiprocessor the assembler never spills
// registers to fit more of them.
#define KERNEL(threads) extern "C" __global__ void __launch_bounds__(threads, 1)

DEVICE i32 thread_index() { return threadIdx.x; }
DEVICE i64 block_x() { return blockIdx.x; }
DEVICE i64 block_y() { return blockIdx.y; }
DEVICE void block_sync() { __syncthreads(); }

DEVICE u32 bits_of(f32 value) { return __float_as_uint(value); }
DEVICE f32 float_of(u32 bits) { return __uint_as_float(bits); }
DEVICE f32 fused(f32 a, f32 b, f32 c) { return __fmaf_rn(a, b, c); }
DEVICE f32 square_root(f32 value) { return __fsqrt_rn(value); }

DEVICE f32 to_f32(f16 value)
{
    f32 wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value.bits));
    return wide;
}

DEVICE f16 to_f16(f32 value)
{
    f16 narrow;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(narrow.bits) : "f"(value));
    return narrow;
}

DEVICE bf16 to_bf16(f32 value)
{
    bf16 narrow;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(narrow.bits) : "f"(value));
    return narrow;
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

// ---- products of tiles ----

// Rows are staged DEPTH elements at a time as f32 in shared memory, transposed
// (tile[k][row]), so that a thread reads its operands four at a time. PAD keeps
// that alignment and spreads the transposing stores over the banks.
constexpr int PAD = 4;

// ROWS rows of DEPTH elements on their way from a matrix [*, WIDTH] through the
// registers of THREADS threads to shared memory.
template <class T, int ROWS, int DEPTH, int WIDTH, int THREADS> struct Stage {
    static constexpr int PACK = pack_width<T>(WIDTH) < DEPTH ? pack_width<T>(WIDTH) : DEPTH;
    static constexpr int PACKS_PER_ROW = DEPTH / PACK, PACKS = ROWS * PACKS_PER_ROW;
    static constexpr int HELD = ceil_div(PACKS, THREADS);

    Pack<T, PACK> held[HELD];

    DEVICE static i32 pack_of(i32 i) { return i * THREADS + thread_index(); }
    DEVICE static i32 row_of(i32 i) { return pack_of(i) / PACKS_PER_ROW; }
    DEVICE static i32 depth_of(i32 i) { return pack_of(i) % PACKS_PER_ROW * PACK; }

    // Reads from element `depth` on; beyond `rows` and WIDTH there are zeros.
    DEVICE void fetch(const T *matrix, i32 rows, i32 depth)
    {
        #pragma unroll
        for (i32 i = 0; i < HELD; i++) {
            i32 row = row_of(i), k = depth + depth_of(i);
            held[i] = Pack<T, PACK>{};
            if (row < rows && k < WIDTH && pack_of(i) < PACKS)
                held[i] = load<PACK>(matrix + (i64)row * WIDTH + k);
        }
    }

    // Writes to columns `first` and on of a tile.
    template <int PITCH> DEVICE void put(f32 (&tile)[DEPTH][PITCH], i32 first) const
    {
        #pragma unroll
        for (i32 i = 0; i < HELD; i++)
            #pragma unroll
            for (i32 j = 0; j < PACK; j++)
                if (pack_of(i) < PACKS)
                    tile[depth_of(i) + j][first + row_of(i)] = to_f32(held[i].at[j]);
    }
};

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

// ---- the kernel ----

constexpr int INNER = 32, OUTER = 2880;
constexpr int THREADS = 128;
constexpr int TILE_ROWS = 64, TILE_COLUMNS = 128, TILE_DEPTH = 16;
constexpr int THREAD_ROWS = 8, THREAD_COLUMNS = 8;
constexpr int ROW_THREADS = TILE_ROWS / THREAD_ROWS, COLUMN_THREADS = TILE_COLUMNS / THREAD_COLUMNS;
// Steps of the depth: INNER of them, TILE_DEPTH at a time.
constexpr int DEPTHS = ceil_div(INNER, TILE_DEPTH), STEPS = DEPTHS;

typedef f32 Activation;
typedef f32 Weight;
typedef Stage<Activation, TILE_ROWS, TILE_DEPTH, INNER, THREADS> LeftStage;
typedef Slab<Weight, TILE_COLUMNS, TILE_DEPTH, OUTER, THREADS> RightSlab;

// Columns stored at a time.
constexpr int STORED = lesser(pack_width<Activation>(OUTER), lesser(THREAD_COLUMNS, 4));

static_assert(ROW_THREADS * COLUMN_THREADS == THREADS, "every thread owns a part of the tile");

// The rows of a block: `rows` of them from row `first` on, all of one expert.
struct RowTile {
    i64 expert, first;
    i32 rows;
};

DEVICE RowTile row_tile(i64 tokens)
{
    i64 first = block_x() * TILE_ROWS;
    return {0, first, (i32)(tokens - first)};
}

KERNEL(THREADS) grouped_gemm_dgrad_up(
    const f32 *__restrict__ dup, // [tokens, 32]
    const f32 *__restrict__ up,  // [1, 32, 2880]
    f32 *__restrict__ drows,     // [tokens, 2880]
    i64 tokens)
{
    alignas(16) __shared__ f32 left[2][TILE_DEPTH][TILE_ROWS + PAD];
    alignas(16) __shared__ f32 right[2][TILE_DEPTH][TILE_COLUMNS];

    const RowTile tile = row_tile(tokens);
    if (tile.rows <= 0)
        return;
    const i32 first_column = (i32)block_y() * TILE_COLUMNS, columns = OUTER - first_column;
    const i64 first_row = tile.first * INNER, first_weight = tile.expert * INNER * OUTER;

    LeftStage left_stage;
    RightSlab right_slab;
    auto fetch = [&](i32 step) {
        const i32 depth = step * TILE_DEPTH;
        const Weight *matrix = up + first_weight;
        left_stage.fetch(dup + first_row, tile.rows, depth);
        right_slab.fetch(INNER - depth, first_column, [&](i32 line) { return matrix + (i64)(depth + line) * OUTER; });
    };
    auto put = [&](i32 buffer) {
        left_stage.put(left[buffer], 0);
        right_slab.put(right[buffer], 0);
    };

    f32 sums[THREAD_ROWS][THREAD_COLUMNS] = {};
    fetch(0);
    put(0);
    block_sync();
    i32 buffer = 0;
    #pragma unroll 1
    for (i32 step = 1; step < STEPS; step++, buffer ^= 1) {
        fetch(step);
        multiply<ROW_THREADS, COLUMN_THREADS, TILE_DEPTH>(sums, left[buffer], right[buffer], thread_index(), 0);
        put(buffer ^ 1);
        block_sync();
    }
    multiply<ROW_THREADS, COLUMN_THREADS, TILE_DEPTH>(sums, left[buffer], right[buffer], thread_index(), 0);

    #pragma unroll
    for (i32 i = 0; i < THREAD_ROWS; i++) {
        const i32 row = dealt<THREAD_ROWS, ROW_THREADS>(thread_index() / COLUMN_THREADS, i);
        if (row >= tile.rows)
            continue;
        const i64 first = (tile.first + row) * OUTER;
        #pragma unroll
        for (i32 j = 0; j < THREAD_COLUMNS; j += STORED) {
            const i32 column = dealt<THREAD_COLUMNS, COLUMN_THREADS>(thread_index() % COLUMN_THREADS, j);
            if (column >= columns)
                continue;
            const i32 at = (first_column + column) / STORED;
            Pack<Activation, STORED> pack;
            #pragma unroll
            for (i32 n = 0; n < STORED; n++)
                pack.at[n] = round_to<Activation>(sums[i][j + n]);
            store(drows + first, at, pack);
        }
    }
}
