// combine_bwd for cuda:sm_90a
//
//   dout[r] = dy[token of r]
//
// A block owns 8 rows in expert order, 32 adjacent threads one at a time. There are
// at most as many rows as slots; blocks and threads beyond them do nothing.
//
// combine_bwd_weights: a warp has a token and goes over its slots. For one with a row,
//   dweight[t, k] = sum of dweight_parts[row] + <dout[row], down bias of its expert>
// and 0 without a row.
//
// Shared memory: none.
//
// Baked in: output dim 2880, experts 32, top_k 4, types. Not the tokens.

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

// ---- warps ----

constexpr i32 WARP = 32;
typedef u32 LaneMask;

// Every lane of a warp takes part in each of these.
DEVICE void warp_sync() { __syncwarp(); }
DEVICE u32 shuffle(u32 value, i32 lane) { return __shfl_sync(0xffffffffu, value, lane); }
DEVICE LaneMask ballot(bool vote) { return __ballot_sync(0xffffffffu, vote); }
DEVICE i32 population(LaneMask lanes) { return __popc(lanes); }

// The lanes with the same value, which has at most BITS bits.
template <int BITS> DEVICE LaneMask match_any(u32 value)
{
    return __match_any_sync(0xffffffffu, value);
}

DEVICE void shared_add(i32 *counter, i32 value) { atomicAdd(counter, value); }

DEVICE u32 warp_max(u32 value) { return __reduce_max_sync(0xffffffffu, value); }

DEVICE i32 lane_index() { return thread_index() % WARP; }
DEVICE i32 warp_index() { return thread_index() / WARP; }

// The lanes before this one, and the first lane of a set.
DEVICE LaneMask lanes_below() { return ((LaneMask)1 << lane_index()) - 1; }
DEVICE i32 first_lane(LaneMask lanes) { return population((lanes & (0 - lanes)) - 1); }

DEVICE f32 shuffle(f32 value, i32 lane) { return float_of(shuffle(bits_of(value), lane)); }

DEVICE f32 warp_sum(f32 value)
{
    for (i32 step = WARP / 2; step > 0; step /= 2)
        value += shuffle(value, lane_index() ^ step);
    return value;
}

DEVICE i32 warp_sum(i32 value)
{
    for (i32 step = WARP / 2; step > 0; step /= 2)
        value += (i32)shuffle((u32)value, lane_index() ^ step);
    return value;
}

// The sum of `value` over this lane and those before it.
DEVICE i32 warp_prefix(i32 value)
{
    for (i32 step = 1; step < WARP; step *= 2) {
        i32 before = (i32)shuffle((u32)value, (lane_index() - step) & (WARP - 1));
        value += lane_index() >= step ? before : 0;
    }
    return value;
}

// ---- rows ----

constexpr int OUTPUT_DIM = 2880, EXPERTS = 32, TOP_K = 4;
constexpr int THREADS = 128, TILE_ROWS = 8, ROW_THREADS = 32;
constexpr int TILE_TOKENS = 4;

typedef bf16 Activation;
constexpr int WIDTH = pack_width<Activation>(OUTPUT_DIM), PACKS = OUTPUT_DIM / WIDTH;
// A thread has up to eight packs on their way before it writes the first.
constexpr int HELD = lesser(ceil_div(PACKS, ROW_THREADS), 8);

KERNEL(THREADS) combine_bwd(
    const bf16 *__restrict__ dy,       // [tokens, 2880]
    const i32 *__restrict__ row_slots, // [rows]
    const i64 *__restrict__ offsets,   // [33]
    bf16 *__restrict__ dout,           // [rows, 2880]
    i64 tokens)
{
    await_launches();
    (void)tokens;
    const i64 first = block_x() * TILE_ROWS, kept = offsets[EXPERTS];
    for (i64 row = first + thread_index() / ROW_THREADS; row < first + TILE_ROWS && row < kept;
         row += THREADS / ROW_THREADS) {
        const Activation *from = dy + (i64)(row_slots[row] / TOP_K) * OUTPUT_DIM;
        Activation *to = dout + row * OUTPUT_DIM;
        for (i32 start = thread_index() % ROW_THREADS; start < PACKS; start += ROW_THREADS * HELD) {
            Pack<Activation, WIDTH> held[HELD] = {};
            #pragma unroll
            for (i32 n = 0; n < HELD; n++)
                if (start + n * ROW_THREADS < PACKS)
                    held[n] = load<WIDTH>(from, start + n * ROW_THREADS);
            #pragma unroll
            for (i32 n = 0; n < HELD; n++)
                if (start + n * ROW_THREADS < PACKS)
                    store(to, start + n * ROW_THREADS, held[n]);
        }
    }
}

// ---- weights ----

// <a, b> over rows of LENGTH elements, by a warp; every lane gets it.
template <int LENGTH, class A, class B> DEVICE f32 warp_product(const A *a, const B *b)
{
    constexpr int PACK = lesser(pack_width<A>(LENGTH), pack_width<B>(LENGTH));
    f32 sum = 0.0f;
    for (i32 i = lane_index(); i < LENGTH / PACK; i += WARP) {
        const Pack<A, PACK> left = load<PACK>(a, i);
        const Pack<B, PACK> right = load<PACK>(b, i);
        #pragma unroll
        for (i32 j = 0; j < PACK; j++)
            sum = fused(to_f32(left.at[j]), to_f32(right.at[j]), sum);
    }
    return warp_sum(sum);
}

// The sum of `count` parts, by a warp; every lane gets it.
DEVICE f32 warp_total(const f32 *parts, i32 count)
{
    f32 sum = 0.0f;
    for (i32 i = lane_index(); i < count; i += WARP)
        sum += parts[i];
    return warp_sum(sum);
}

static_assert(TILE_TOKENS == THREADS / WARP, "every warp has a token");

KERNEL(THREADS) combine_bwd_weights(
    const i32 *__restrict__ topk_ids,      // [tokens, 4]
    const i32 *__restrict__ slot_rows,     // [tokens, 4]
    const f32 *__restrict__ dweight_parts, // [rows, 12]
    const bf16 *__restrict__ dout,         // [rows, 2880]
    const bf16 *__restrict__ down_bias,    // [32, 2880]
    f32 *__restrict__ grad_topk_weights,   // [tokens, 4]
    i64 tokens)
{
    await_launches();
    const i64 token = block_x() * TILE_TOKENS + warp_index();
    if (token >= tokens)
        return;
    for (i32 k = 0; k < TOP_K; k++) {
        const i64 slot = token * TOP_K + k;
        const i32 row = slot_rows[slot];
        f32 dweight = 0.0f;
        if (row >= 0) {
            dweight = warp_total(dweight_parts + (i64)row * 12, 12);
            dweight += warp_product<OUTPUT_DIM>(dout + (i64)row * OUTPUT_DIM, down_bias + (i64)topk_ids[slot] * OUTPUT_DIM);
        }
        if (lane_index() == k % WARP)
            grad_topk_weights[slot] = dweight;
    }
}
