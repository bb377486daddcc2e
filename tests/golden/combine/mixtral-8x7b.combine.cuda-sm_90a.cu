// combine for cuda:sm_90a
//
//   y[t] = sum over slots k, ascending, of weight[t, k] * out[row of (t, k)]
//
// A block owns 2 tokens, 128 adjacent threads one at a time, each some packs of adjacent
// columns. Sums are f32 and rounded once. A slot without a row adds nothing.
//
// Shared memory:
//   sources  i32 [2][2]   the row of each slot, or that there is none
//   weights  f32 [2][2]
//
// Baked in: output dim 4096, top_k 2, shared experts, types. Not the tokens.

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

// ---- the kernel ----

constexpr int OUTPUT_DIM = 4096, TOP_K = 2;
constexpr int THREADS = 128, TILE_TOKENS = 2, TOKEN_THREADS = 128;
// Rows of this many slots are on their way to a thread before it adds the first.
constexpr int HELD = lesser(TOP_K, 8);
// What a slot adds when it has no row: nothing.
constexpr i32 NOTHING = -1;

typedef bf16 Activation;
constexpr int WIDTH = pack_width<Activation>(OUTPUT_DIM), PACKS = OUTPUT_DIM / WIDTH;

DEVICE void add(f32 (&sums)[WIDTH], f32 weight, const Pack<Activation, WIDTH> &pack)
{
    #pragma unroll
    for (i32 j = 0; j < WIDTH; j++)
        sums[j] = fused(weight, to_f32(pack.at[j]), sums[j]);
}

KERNEL(THREADS) combine(
    const bf16 *__restrict__ out,         // [rows, 4096]
    const i32 *__restrict__ slot_rows,    // [tokens, 2]
    const f32 *__restrict__ topk_weights, // [tokens, 2]
    bf16 *__restrict__ y,                 // [tokens, 4096]
    i64 tokens)
{
    await_launches();
    __shared__ i32 sources[TILE_TOKENS * TOP_K];
    __shared__ f32 weights[TILE_TOKENS * TOP_K];
    const i64 first = block_x() * TILE_TOKENS;
    for (i32 i = thread_index(); i < TILE_TOKENS * TOP_K; i += THREADS) {
        const i64 slot = first * TOP_K + i;
        if (slot >= tokens * TOP_K)
            break;
        const i32 row = slot_rows[slot];
        sources[i] = row >= 0 ? row : NOTHING;
        weights[i] = topk_weights[slot];
    }
    block_sync();

    for (i32 turn = thread_index() / TOKEN_THREADS; turn < TILE_TOKENS && first + turn < tokens;
         turn += THREADS / TOKEN_THREADS) {
        const i64 token = first + turn;
        for (i32 i = thread_index() % TOKEN_THREADS; i < PACKS; i += TOKEN_THREADS) {
            f32 sums[WIDTH] = {};
            #pragma unroll
            for (i32 start = 0; start < TOP_K; start += HELD) {
                Pack<Activation, WIDTH> held[HELD] = {};
                #pragma unroll
                for (i32 n = 0; n < HELD; n++) {
                    const i32 source = start + n < TOP_K ? sources[turn * TOP_K + start + n] : NOTHING;
                    if (source >= 0)
                        held[n] = load<WIDTH>(out + (i64)source * OUTPUT_DIM, i);
                }
                #pragma unroll
                for (i32 n = 0; n < HELD; n++) {
                    const i32 slot = turn * TOP_K + start + n;
                    if (start + n < TOP_K && sources[slot] != NOTHING)
                        add(sums, weights[slot], held[n]);
                }
            }
            Pack<Activation, WIDTH> pack;
            #pragma unroll
            for (i32 j = 0; j < WIDTH; j++)
                pack.at[j] = round_to<Activation>(sums[j]);
            store(y + token * OUTPUT_DIM, i, pack);
        }
    }
}
