// wire for cuda:sm_90a
//
//   wire_pack     wire[i] = rows[places[i]], in bf16
//   wire_unpack   rows[places[i]] = wire[i]
//
// A row of the wire has 1536 bytes:
//   values  bf16 [768]
//
// Values are rounded to the nearest, ties to even. What is finite stays so: too large is the
// largest there is. An infinity stays one, and a NaN is that of the type.
//
// A block owns 12 rows of the wire, of which 32 adjacent threads take 128
// values at a time, 4 each.
//
// Shared memory: none.
//
// Baked in: width 768, types. Not the rows.

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

// Lets the blocks of the next launch start, then waits until all launches before this one
// have ended, and for what they wrote. Nothing happens where launches do not overlap.
DEVICE void await_launches()
{
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

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

// ---- values between nodes ----

typedef unsigned char u8;
typedef f32 Row;

// Sizes are values without their sign, as bits of an f32, which are in the same order.
constexpr u32 INFINITE = 0x7f800000u;
DEVICE u32 size_of(f32 value) { return bits_of(value) & 0x7fffffffu; }
DEVICE u32 sign_of(f32 value) { return bits_of(value) & 0x80000000u; }

// Of a type its NaN, and the size of the largest value.
DEVICE f32 nan_as(f32) { return float_of(0x7fc00000u); }
DEVICE f16 nan_as(f16) { return f16{0x7e00}; }
DEVICE bf16 nan_as(bf16) { return bf16{0x7fc0}; }
DEVICE u32 largest_as(f32) { return 0x7f7fffffu; }
DEVICE u32 largest_as(f16) { return 0x477fe000u; }
DEVICE u32 largest_as(bf16) { return 0x7f7f0000u; }

// A value as another type. What is finite and too large is the largest there is.
template <class T> DEVICE T fitted(f32 value)
{
    const u32 size = size_of(value);
    if (size > INFINITE)
        return nan_as(T{});
    const bool over = size > largest_as(T{}) && size < INFINITE;
    return round_to<T>(over ? float_of(sign_of(value) | largest_as(T{})) : value);
}

// ---- the kernel ----

constexpr int WIDTH = 768, SPAN = 128, SPANS = 6, ROW_BYTES = 1536;
constexpr int THREADS = 128, TILE_ROWS = 12, TEAM = 32, TEAMS = THREADS / TEAM;

// A thread has adjacent values of a span, in packs that divide a row.
constexpr int VALUES = SPAN / TEAM, PACK = pack_width<Row>(WIDTH);

// Turns in which a block goes through the spans of its rows. Every thread takes part in
// each of them.
DEVICE i32 turns(i64 tokens)
{
    const i64 left = tokens - block_x() * TILE_ROWS;
    return ceil_div(left < TILE_ROWS ? (i32)left * SPANS : TILE_ROWS * SPANS, TEAMS);
}

// What a thread has in a turn: some values of a span of a row.
struct Part {
    i64 row;
    i32 span, lane, first;  // of the values, in the row
    bool exists;            // whether there is such a row

    DEVICE Part(i32 turn, i64 tokens)
    {
        const i32 at = turn * TEAMS + thread_index() / TEAM;
        row = block_x() * TILE_ROWS + at / SPANS;
        span = at % SPANS;
        lane = thread_index() % TEAM;
        first = span * SPAN + lane * VALUES;
        exists = at < TILE_ROWS * SPANS && row < tokens;
    }

    // Whether it has a row's value number `i` of its own.
    DEVICE bool has(i32 i) const { return exists && first + i < WIDTH; }
};

KERNEL(THREADS) wire_pack(
    const f32 *__restrict__ rows,   // [rows, 768]
    const i32 *__restrict__ places, // [tokens]
    i32 *__restrict__ wire,         // [tokens, 384]
    i64 tokens)
{
    await_launches();
    for (i32 turn = 0; turn < turns(tokens); turn++) {
        const Part part(turn, tokens);
        const Row *from = rows + (part.exists ? (i64)places[part.row] * WIDTH : 0);
        u8 *to = reinterpret_cast<u8 *>(wire) + part.row * ROW_BYTES;
        f32 values[VALUES] = {};
        #pragma unroll
        for (i32 i = 0; i < VALUES; i += PACK)
            if (part.has(i)) {
                const Pack<Row, PACK> pack = load<PACK>(from, (part.first + i) / PACK);
                #pragma unroll
                for (i32 j = 0; j < PACK; j++)
                    values[i + j] = to_f32(pack.at[j]);
            }

        // Behind the row's last value the pack is zero.
        Pack<bf16, VALUES> pack;
        #pragma unroll
        for (i32 i = 0; i < VALUES; i++)
            pack.at[i] = fitted<bf16>(values[i]);
        if (part.exists && part.first < ROW_BYTES / 2)
            store(reinterpret_cast<bf16 *>(to), part.first / VALUES, pack);
    }
}

KERNEL(THREADS) wire_unpack(
    const i32 *__restrict__ wire,   // [tokens, 384]
    const i32 *__restrict__ places, // [tokens]
    f32 *__restrict__ rows,         // [rows, 768]
    i64 tokens)
{
    await_launches();
    for (i32 turn = 0; turn < turns(tokens); turn++) {
        const Part part(turn, tokens);
        if (!part.has(0))
            continue;
        const u8 *from = reinterpret_cast<const u8 *>(wire) + part.row * ROW_BYTES;
        Row *to = rows + (i64)places[part.row] * WIDTH;
        const Pack<bf16, VALUES> pack =
            load<VALUES>(reinterpret_cast<const bf16 *>(from), part.first / VALUES);
        #pragma unroll
        for (i32 i = 0; i < VALUES; i += PACK) {
            Pack<Row, PACK> values;
            #pragma unroll
            for (i32 j = i; j < i + PACK; j++)
                values.at[j - i] = fitted<Row>(to_f32(pack.at[j]));
            if (part.has(i))
                store(to, (part.first + i) / PACK, values);
        }
    }
}
