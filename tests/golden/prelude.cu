// ==== prelude/base.hpp ====

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

// ==== prelude/fetch.hpp ====

// ---- loads that only some threads need ----

// Loads a pack for threads that want it. The result of other threads must not be used.
template <int N, class T> DEVICE Pack<T, N> fetch(bool wanted, const T *from)
{
    return wanted ? load<N>(from) : Pack<T, N>{};
}

DEVICE void all_fetched() {}

// Keeps the loads of these values before this point. NVVM delays loads of read-only memory until each
// use, one after the other where a division lies in between.
template <int N> DEVICE void all_fetched(f32 (&values)[N])
{
    #pragma unroll
    for (i32 n = 0; n < N; n++)
        asm volatile("" : "+f"(values[n]));
}

// ==== prelude/cuda/base.cuh ====

#define DEVICE __device__ __forceinline__
#define COMPILE_TIME __device__ constexpr
// With a minimum of one block for each multiprocessor ptxas never spills registers for occupancy.
#define KERNEL(threads) extern "C" __global__ void __launch_bounds__(threads, 1)

DEVICE i32 thread_index() { return threadIdx.x; }
DEVICE i64 block_x() { return blockIdx.x; }
DEVICE i64 block_y() { return blockIdx.y; }
DEVICE void block_sync() { __syncthreads(); }

// Programmatic dependent launch: lets the blocks of the next launch start, then waits until all
// earlier launches have ended and their writes are visible. Without overlapping launches this does
// nothing. No pointer is `__restrict__`, because ptxas would hoist loads through it above the wait.
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

// ==== prelude/cuda/async_copy.cuh ====

// ---- cp.async: asynchronous copies from global to shared memory ----

// Starts a copy of BYTES bytes, 16, 8 or 4, aligned to as many. If the source is not `wanted`, it is
// not read and zeros are written.
template <int BYTES> DEVICE void copy_async(u32 to, const void *from, bool wanted)
{
    const u64 source = __cvta_generic_to_global(from);
    const i32 read = wanted ? BYTES : 0;
    if constexpr (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                     :: "r"(to), "l"(source), "r"(read) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;"
                     :: "r"(to), "l"(source), "n"(BYTES), "r"(read) : "memory");
}

// Commits the copies that this thread started since the last commit as a group.
DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until all but the last PENDING groups of this thread have landed. Other threads see them
// after the next barrier.
template <int PENDING> DEVICE void wait_copies()
{
    asm volatile("cp.async.wait_group %0;" :: "n"(PENDING) : "memory");
}

// ==== prelude/cuda/matrix.cuh ====

// ---- matrices from shared memory ----

// Loads as many matrices of 8 rows of 16 bytes as `to` has registers. Lane 8 m + r
// gives the address of row r of matrix m, a multiple of 16; lane l gets, of each
// matrix, bytes 4 (l % 4) and on of row l / 4.
DEVICE void load_matrices(u32 (&to)[1], u32 row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 { %0 }, [%1];"
                 : "=r"(to[0]) : "r"(row) : "memory");
}

DEVICE void load_matrices(u32 (&to)[2], u32 row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 { %0, %1 }, [%2];"
                 : "=r"(to[0]), "=r"(to[1]) : "r"(row) : "memory");
}

DEVICE void load_matrices(u32 (&to)[4], u32 row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 { %0, %1, %2, %3 }, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(row) : "memory");
}

// The same of 16-bit elements, transposed: lane l gets rows 2 (l % 4) and the next of
// column l / 4.
DEVICE void load_transposed(u32 (&to)[2], u32 row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 { %0, %1 }, [%2];"
                 : "=r"(to[0]), "=r"(to[1]) : "r"(row) : "memory");
}

DEVICE void load_transposed(u32 (&to)[4], u32 row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 { %0, %1, %2, %3 }, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(row) : "memory");
}

// ==== prelude/cuda/mma.cuh ====

// ---- mma.sync on tensor cores ----

// Each: sums += a · b for 16 rows and 8 columns over 32 bytes of the inner dimension.
// With g = lane / 4 and t = lane % 4, registers hold
//   a     rows g, g + 8, g, g + 8, 4 bytes from byte 4 t on; the last two from 16 + 4 t
//   b     column g, 4 bytes from byte 4 t on; then from 16 + 4 t
//   sums  row g, columns 2 t and 2 t + 1; then row g + 8, the same

// Rounds to tf32, 10 bits of mantissa: to nearest, ties away from zero.
DEVICE u32 to_tf32(f32 value)
{
    u32 rounded;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(value));
    return rounded;
}

DEVICE void mma_16x8x16_bf16(f32 (&sums)[4], const u32 (&a)[4], const u32 (&b)[2])
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
        " { %0, %1, %2, %3 }, { %4, %5, %6, %7 }, { %8, %9 }, { %0, %1, %2, %3 };"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

DEVICE void mma_16x8x8_tf32(f32 (&sums)[4], const u32 (&a)[4], const u32 (&b)[2])
{
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32"
        " { %0, %1, %2, %3 }, { %4, %5, %6, %7 }, { %8, %9 }, { %0, %1, %2, %3 };"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// ==== prelude/cuda/shared.cuh ====

// Returns the shared-space address of an object, as cp.async, ldmatrix and mbarriers take it.
DEVICE u32 shared_address(const void *object) { return (u32)__cvta_generic_to_shared(object); }

// ==== prelude/cuda/shared_word.cuh ====

DEVICE u32 shared_word(u32 address)
{
    u32 word;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
    return word;
}

// ==== prelude/cuda/warp.cuh ====

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

// ==== prelude/cuda/grid.cuh ====

// ---- the grid ----

DEVICE i64 grid_x() { return gridDim.x; }

// ==== prelude/cuda/mbarrier.cuh ====

// ---- barriers in shared memory, and roles of warps ----

// The shared memory that the launch gives a block, from a multiple of 1024 on.
template <class T> DEVICE T &dynamic_shared()
{
    extern __shared__ __align__(1024) unsigned char memory[];
    return *reinterpret_cast<T *>(memory);
}

// An mbarrier. It counts arrivals, and the bytes that TMA has yet to write. A phase ends when both
// counts reach zero; the parity of its number, from 0 on, identifies a phase.
struct Barrier { u64 state; };

DEVICE void mbarrier_init(Barrier &barrier, u32 arrivals)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;"
                 :: "r"(shared_address(&barrier)), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to TMA (the async proxy); the block must still synchronise.
DEVICE void mbarrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

DEVICE void mbarrier_arrive(Barrier &barrier)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(shared_address(&barrier)) : "memory");
}

// Arrives, and announces `bytes` that must be written before the phase can end.
DEVICE void mbarrier_expect(Barrier &barrier, u32 bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 :: "r"(shared_address(&barrier)), "r"(bytes) : "memory");
}

// Returns whether the phase of this parity has ended; may suspend the thread for a while first.
DEVICE bool mbarrier_try_wait(Barrier &barrier, u32 parity)
{
    u32 ended;
    asm volatile("{\n"
                 "    .reg .pred ended;\n"
                 "    mbarrier.try_wait.parity.shared::cta.b64 ended, [%1], %2;\n"
                 "    selp.u32 %0, 1, 0, ended;\n"
                 "}" : "=r"(ended) : "r"(shared_address(&barrier)), "r"(parity) : "memory");
    return ended != 0;
}

// Waits for the end of the phase of this parity. The phase before the first one counts as ended and
// has parity 1, so a producer's first wait returns at once.
DEVICE void mbarrier_wait(Barrier &barrier, u32 parity)
{
    while (!mbarrier_try_wait(barrier, parity)) {}
}

// Orders this thread's earlier writes to shared memory (generic proxy) before later accesses by TMA
// and wgmma (async proxy).
DEVICE void proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Returns true in one lane of a converged warp.
DEVICE bool elect_one()
{
    u32 elected;
    asm volatile("{\n"
                 "    .reg .pred elected;\n"
                 "    elect.sync _|elected, 0xffffffff;\n"
                 "    selp.u32 %0, 1, 0, elected;\n"
                 "}" : "=r"(elected) :: "memory");
    return elected != 0;
}

// Synchronises THREADS threads, whole warps, at named barrier 1 to 15; 0 is the barrier of the block.
template <int THREADS> DEVICE void named_sync(i32 barrier)
{
    asm volatile("bar.sync %0, %1;" :: "r"(barrier), "n"(THREADS) : "memory");
}

// Change the registers of each thread of a warpgroup; all four of its warps must execute them.
template <int COUNT> DEVICE void shrink_registers()
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(COUNT));
}

template <int COUNT> DEVICE void grow_registers()
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(COUNT));
}

// ==== prelude/cuda/tma.cuh ====

// ---- TMA loads: boxes of a tensor to shared memory ----

// A tensor, the shape of its boxes and their layout in shared memory, as the
// driver encodes them. What lies outside the tensor is read as zero.
struct alignas(64) TensorMap { unsigned char bytes[128]; };

DEVICE void tma_prefetch(const TensorMap &map)
{
    asm volatile("prefetch.tensormap [%0];" :: "l"(&map) : "memory");
}

// Eviction hints for the L2 cache.
DEVICE u64 keep_in_cache()
{
    u64 hint;
    asm("createpolicy.fractional.L2::evict_last.b64 %0;" : "=l"(hint));
    return hint;
}

DEVICE u64 stream_through_cache()
{
    u64 hint;
    asm("createpolicy.fractional.L2::evict_first.b64 %0;" : "=l"(hint));
    return hint;
}

// The box from element (x, y) on, innermost index first. Returns at once; the
// bytes of the whole box are counted off `arrived` as they come.
DEVICE void tma_load_2d(void *to, const TensorMap &from, Barrier &arrived, u64 hint, i32 x, i32 y)
{
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
                 " [%0], [%1, { %3, %4 }], [%2], %5;"
                 :: "r"(shared_address(to)), "l"(&from), "r"(shared_address(&arrived)),
                    "r"(x), "r"(y), "l"(hint) : "memory");
}

DEVICE void tma_load_3d(void *to, const TensorMap &from, Barrier &arrived, u64 hint, i32 x, i32 y, i32 z)
{
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
                 " [%0], [%1, { %3, %4, %5 }], [%2], %6;"
                 :: "r"(shared_address(to)), "l"(&from), "r"(shared_address(&arrived)),
                    "r"(x), "r"(y), "r"(z), "l"(hint) : "memory");
}

// ==== prelude/cuda/wgmma.cuh ====

// ---- wgmma: matrix instructions of a warpgroup ----

// Returns the wgmma descriptor of an operand in shared memory: rows of 64 elements of 16 bits, their
// 16-byte chunks swizzled over 128 bytes as TMA writes them, eight rows 1024 bytes apart from the next
// eight. `tile` starts at a multiple of 1024.
//   bits 0-13 address / 16, 16-29 leading offset (unused here), 32-45 stride / 16, 62-63 swizzle
DEVICE u64 operand_128b(const void *tile)
{
    return (u64)(shared_address(tile) >> 4) | (u64)1 << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}

// Advances a descriptor by the 16 elements of each row that one wgmma multiplies.
constexpr u64 NEXT_STEP = 16 * sizeof(u16) >> 4;

// Orders register writes to the sums before the wgmma that follow. All four warps of the warpgroup
// issue wgmma together; they run asynchronously.
DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most LEFT committed groups are unfinished.
template <int LEFT> DEVICE void wgmma_wait()
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(LEFT) : "memory");
}

// Keeps the compiler from moving reads of the sums above the wait.
template <int COUNT> DEVICE void settle(f32 (&sums)[COUNT])
{
    #pragma unroll
    for (i32 i = 0; i < COUNT; i++)
        asm volatile("" : "+f"(sums[i]) :: "memory");
}

// The row and column of sum i of a thread, within the 16 rows of its warp. Warp n of a warpgroup has
// rows 16 n to 16 n + 15.
DEVICE i32 sum_row(i32 i) { return i / 2 % 2 * 8 + lane_index() / 4; }
DEVICE i32 sum_column(i32 i) { return i / 4 * 8 + lane_index() % 4 * 2 + i % 2; }

// ==== prelude/cuda/wgmma_across.cuh ====

// Returns the wgmma descriptor of a transposed operand, whose lines are steps of the contraction:
// panels of LINES lines of 64 elements of 16 bits, one behind the other, their 16-byte chunks swizzled
// over 128 bytes as TMA writes them. `panels` starts at a multiple of 1024.
//   bits 0-13 address / 16, 16-29 leading offset / 16: from panel to panel, 32-45 stride / 16:
//   from eight lines to the next eight, 62-63 swizzle
template <int LINES> DEVICE u64 operand_across_128b(const void *panels)
{
    return (u64)(shared_address(panels) >> 4) | (u64)(LINES * 128 >> 4) << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}

// Advances a descriptor by the 16 lines that one wgmma multiplies.
constexpr u64 NEXT_LINES = 16 * 128 >> 4;

// ==== prelude/warp.hpp ====

// ---- warps ----

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

DEVICE f32 team_sum(f32 value)
{
    for (i32 step = LANES / 2; step > 0; step /= 2)
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

// ==== prelude/warp_max.hpp ====

// Returns the maximum over a team.
DEVICE u32 team_max(u32 value)
{
    for (i32 step = TEAM / 2; step > 0; step /= 2) {
        const u32 other = shuffle(value, lane_index() ^ step);
        value = other > value ? other : value;
    }
    return value;
}

DEVICE u32 team_max(u32 value)
{
    for (i32 step = LANES / 2; step > 0; step /= 2) {
        const u32 other = shuffle(value, lane_index() ^ step);
        value = other > value ? other : value;
    }
    return value;
}

// ==== prelude/order.hpp ====

// ---- the order of scores ----

DEVICE f32 infinity() { return float_of(0x7f800000u); }

// Larger is better: ascending values, NaN below all of them; both zeros are
// equal. No score has the key 0, which stands for "none".
DEVICE u32 order_key(f32 score)
{
    u32 bits = bits_of(score + 0.0f);
    u32 key = bits >> 31 ? ~bits : bits | 0x80000000u;
    return score != score ? 1u : key;
}

DEVICE f32 score_of_key(u32 key)
{
    return float_of(key == 1 ? 0x7fc00000u : key >> 31 ? key & 0x7fffffffu : ~key);
}

// ==== prelude/math/exp.hpp ====

// ---- functions ----

DEVICE f32 power_of_two(i32 exponent) { return float_of((u32)(exponent + 127) << 23); }

// e^x to about one unit in the last place: x = n ln 2 + r, a polynomial in r.
// The same on every GPU.
DEVICE f32 exponential(f32 x)
{
    constexpr f32 ROUND = 12582912.0f;  // adding it rounds to an integer
    f32 bounded = x > 89.0f ? 89.0f : x < -104.0f ? -104.0f : x;
    f32 shifted = fused(bounded, 1.44269504f, ROUND), n = shifted - ROUND;
    f32 r = fused(n, -1.42860677e-6f, fused(n, -0.693145752f, bounded));
    f32 p = fused(r, 0.0013950479f, 0.008368882f);
    p = fused(p, r, 0.041666206f);
    p = fused(p, r, 0.1666652f);
    p = fused(p, r, 0.5f);
    p = fused(p, r * r, r) + 1.0f;
    i32 exponent = (i32)(bits_of(shifted) - bits_of(ROUND)), half = exponent >> 1;
    return p * power_of_two(half) * power_of_two(exponent - half);
}

DEVICE f32 sigmoid(f32 x) { return 1.0f / (1.0f + exponential(-x)); }

// ==== prelude/activation.hpp ====

// The activation of an expert.
DEVICE f32 activation(f32 x)
{
    return x * sigmoid(1.702f * x);
}

// The activation of an expert.
DEVICE f32 activation(f32 x)
{
    return x * sigmoid(x);
}

// The activation of an expert.
DEVICE f32 activation(f32 x)
{
    return x < 0.0f ? 0.0f : x;
}

// ==== prelude/activation_slope.hpp ====

// The derivative of the activation. Below `activation`, which brings its functions.
DEVICE f32 activation_slope(f32 x)
{
    const f32 z = 1.702f * x, s = sigmoid(z);
    return fused(z * s, 1.0f - s, s);
}

// ==== prelude/tile_gemm.hpp ====

// ---- GEMM of a tile ----

// ==== prelude/stage.hpp ====

// Rows are staged DEPTH elements at a time as f32 in shared memory, transposed
// (tile[k][row]), so that a thread reads its operands four at a time. PAD keeps
// that alignment and spreads the transposing stores over the banks.
constexpr int PAD = 4;

// Moves ROWS rows of DEPTH elements of a matrix [*, WIDTH] through the registers of THREADS threads to
// shared memory.
template <class T, int ROWS, int DEPTH, int WIDTH, int THREADS> struct Stage {
    static constexpr int PACK = pack_width<T>(WIDTH) < DEPTH ? pack_width<T>(WIDTH) : DEPTH;
    static constexpr int PACKS_PER_ROW = DEPTH / PACK, PACKS = ROWS * PACKS_PER_ROW;
    static constexpr int HELD = ceil_div(PACKS, THREADS);

    Pack<T, PACK> held[HELD];

    DEVICE static i32 pack_of(i32 i) { return i * THREADS + thread_index(); }
    DEVICE static i32 row_of(i32 i) { return pack_of(i) / PACKS_PER_ROW; }
    DEVICE static i32 depth_of(i32 i) { return pack_of(i) % PACKS_PER_ROW * PACK; }

    // Loads from element `depth` on; zeros beyond `rows` and WIDTH.
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

// ==== prelude/slab.hpp ====

// ---- slabs ----

// Moves LINES lines by COLUMNS columns of a matrix [*, WIDTH] through the registers of THREADS threads
// to shared memory. Lines are steps of the contraction, so they need no transposition
// (tile[line][column]).
template <class T, int COLUMNS, int LINES, int WIDTH, int THREADS> struct Slab {
    static constexpr int PACK = pack_width<T>(WIDTH), GROUP = lesser(PACK, 4);
    static constexpr int PACKS_PER_LINE = COLUMNS / PACK, PACKS = LINES * PACKS_PER_LINE;
    static constexpr int HELD = ceil_div(PACKS, THREADS);
    static_assert(PACKS_PER_LINE * PACK == COLUMNS, "a pack is in one tile");

    Pack<T, PACK> held[HELD];

    DEVICE static i32 pack_of(i32 i) { return i * THREADS + thread_index(); }
    DEVICE static i32 line_of(i32 i) { return pack_of(i) / PACKS_PER_LINE; }
    DEVICE static i32 column_of(i32 i) { return pack_of(i) % PACKS_PER_LINE * PACK; }

    // Loads columns `first` and on. `line_at(i)` is the start of line i; zeros beyond `lines` and WIDTH.
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

// ==== prelude/comm_cast.hpp ====

// ---- conversion to and from the communication dtype ----

// A size is the magnitude of a value as the bits of an f32: integers of the same order.
constexpr u32 INFINITE = 0x7f800000u;
DEVICE u32 size_of(f32 value) { return bits_of(value) & 0x7fffffffu; }
DEVICE u32 sign_of(f32 value) { return bits_of(value) & 0x80000000u; }

// The NaN of a type, and the size of its largest value.
DEVICE f32 nan_as(f32) { return float_of(0x7fc00000u); }
DEVICE f16 nan_as(f16) { return f16{0x7e00}; }
DEVICE bf16 nan_as(bf16) { return bf16{0x7fc0}; }
DEVICE u32 largest_as(f32) { return 0x7f7fffffu; }
DEVICE u32 largest_as(f16) { return 0x477fe000u; }
DEVICE u32 largest_as(bf16) { return 0x7f7f0000u; }

// Converts a value to another type. A finite value beyond the range saturates.
template <class T> DEVICE T fitted(f32 value)
{
    const u32 size = size_of(value);
    if (size > INFINITE)
        return nan_as(T{});
    const bool over = size > largest_as(T{}) && size < INFINITE;
    return round_to<T>(over ? float_of(sign_of(value) | largest_as(T{})) : value);
}

// Converts a value to another type. A value beyond the range saturates.
template <class T> DEVICE T fitted(f32 value)
{
    const u32 size = size_of(value);
    if (size > INFINITE)
        return nan_as(T{});
    const bool over = size > largest_as(T{});
    return round_to<T>(over ? float_of(sign_of(value) | largest_as(T{})) : value);
}

// Converts a value of at most 448 to E4M3. In the binade of 2^14 an f32 has the resolution of
// E4M3 subnormals, so an addition rounds to them.
DEVICE u32 to_e4m3(f32 value)
{
    const u32 size = size_of(value);
    if (size >= INFINITE)
        return 0x7f;
    const u32 normal = ((size + 0x7ffffu + (size >> 20 & 1u)) >> 20) - (120u << 3);
    const u32 small = bits_of(float_of(size) + 16384.0f) - 0x46800000u;
    return sign_of(value) >> 24 | (size < 0x3c800000u ? small : normal);
}

// Converts the lowest byte from E4M3.
DEVICE f32 of_e4m3(u32 code)
{
    const u32 size = code & 0x7fu, sign = (code & 0x80u) << 24;
    const u32 small = bits_of((f32)size * 0.001953125f), normal = (size << 20) + (120u << 23);
    return float_of(sign | (size == 0x7fu ? 0x7fc00000u : size < 8 ? small : normal));
}

// ==== prelude/multiply.hpp ====

// Returns the position of item `i` of a thread's COUNT, when THREADS threads share a side of a tile:
// groups of up to four adjacent items go to the threads in turn.
template <int COUNT, int THREADS> DEVICE i32 dealt(i32 thread, i32 i)
{
    constexpr int GROUP = COUNT < 4 ? COUNT : 4;
    return (i / GROUP * THREADS + thread) * GROUP + i % GROUP;
}

// Loads the COUNT items of a thread from one row of a tile.
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
    #pragma unroll
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

