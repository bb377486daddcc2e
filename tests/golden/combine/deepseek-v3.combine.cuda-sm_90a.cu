// combine for cuda:sm_90a
//
//   y[t] = sum over slots k, ascending, of weight[t, k] * out[row of (t, k)]
//        + the shared experts, in order
//
// A block owns 1 token, a thread adjacent columns of one at a time. Sums are f32 and
// rounded once. A slot without a row adds nothing.
//
// Shared memory: none.
//
// Baked in: output dim 7168, top_k 8, shared experts, types. Not the tokens.

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

constexpr int OUTPUT_DIM = 7168, TOP_K = 8;
constexpr int THREADS = 128, TILE_TOKENS = 1;

typedef bf16 Activation;
constexpr int WIDTH = pack_width<Activation>(OUTPUT_DIM), PACKS = OUTPUT_DIM / WIDTH;

DEVICE void add(f32 (&sums)[WIDTH], f32 weight, const Activation *row)
{
    Pack<Activation, WIDTH> pack = load<WIDTH>(row);
    #pragma unroll
    for (i32 j = 0; j < WIDTH; j++)
        sums[j] = fused(weight, to_f32(pack.at[j]), sums[j]);
}

KERNEL(THREADS) combine(
    const bf16 *__restrict__ out,          // [rows, 7168]
    const i32 *__restrict__ slot_rows,     // [tokens, 8]
    const f32 *__restrict__ topk_weights,  // [tokens, 8]
    const bf16 *__restrict__ shared_0_out, // [tokens, 7168]
    bf16 *__restrict__ y,                  // [tokens, 7168]
    i64 tokens)
{
    const i64 first = block_x() * TILE_TOKENS;
    for (i64 token = first; token < first + TILE_TOKENS && token < tokens; token++) {
        for (i32 i = thread_index(); i < PACKS; i += THREADS) {
            const i64 column = i * WIDTH;
            f32 sums[WIDTH] = {};
            #pragma unroll
            for (i32 k = 0; k < TOP_K; k++) {
                const i64 slot = token * TOP_K + k, row = slot_rows[slot];
                if (row >= 0)
                    add(sums, topk_weights[slot], out + row * OUTPUT_DIM + column);
            }
            add(sums, 1.0f, shared_0_out + token * OUTPUT_DIM + column);
            Pack<Activation, WIDTH> pack;
            #pragma unroll
            for (i32 j = 0; j < WIDTH; j++)
                pack.at[j] = round_to<Activation>(sums[j]);
            store(y + token * OUTPUT_DIM + column, pack);
        }
    }
}
