// dispatch for cuda:sm_90a
//
//   rows[r] = x[token of r]
//
// A block owns 8 rows in expert order, 32 adjacent threads one at a time. There are
// at most as many rows as slots; blocks and threads beyond them do nothing.
//
// Shared memory: none.
//
// Baked in: model dim 2880, experts 32, top_k 4, types. Not the tokens.

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

constexpr int MODEL_DIM = 2880, EXPERTS = 32, TOP_K = 4;
constexpr int THREADS = 128, TILE_ROWS = 8, ROW_THREADS = 32;

typedef bf16 Activation;
constexpr int WIDTH = pack_width<Activation>(MODEL_DIM), PACKS = MODEL_DIM / WIDTH;
// A thread has up to eight packs on their way before it writes the first.
constexpr int HELD = lesser(ceil_div(PACKS, ROW_THREADS), 8);

KERNEL(THREADS) dispatch(
    const bf16 *__restrict__ x,        // [tokens, 2880]
    const i32 *__restrict__ row_slots, // [rows]
    const i64 *__restrict__ offsets,   // [33]
    bf16 *__restrict__ rows,           // [rows, 2880]
    i64 tokens)
{
    await_launches();
    (void)tokens;
    const i64 first = block_x() * TILE_ROWS, kept = offsets[EXPERTS];
    for (i64 row = first + thread_index() / ROW_THREADS; row < first + TILE_ROWS && row < kept;
         row += THREADS / ROW_THREADS) {
        const i32 slot = row_slots[row];
        const Activation *from = x + (i64)(slot / TOP_K) * MODEL_DIM;
        Activation *to = rows + row * MODEL_DIM;
        for (i32 start = thread_index() % ROW_THREADS; start < PACKS; start += ROW_THREADS * HELD) {
            Pack<Activation, WIDTH> held[HELD] = {};
            #pragma unroll
            for (i32 n = 0; n < HELD; n++) {
                const i32 i = start + n * ROW_THREADS;
                if (i < PACKS)
                    held[n] = load<WIDTH>(from, i);
            }
            #pragma unroll
            for (i32 n = 0; n < HELD; n++) {
                const i32 i = start + n * ROW_THREADS;
                if (i < PACKS)
                    store(to, i, held[n]);
            }
        }
    }
}
