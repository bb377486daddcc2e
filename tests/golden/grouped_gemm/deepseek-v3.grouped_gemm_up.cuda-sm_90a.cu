// grouped_gemm_up for cuda:sm_90a, by wgmma and the copy engine
//
//   hidden = act(rows · gateᵀ, rows · upᵀ)
//
// A block owns 128 rows of one expert by 128 columns of gate and of up. Blocks follow each
// other by row tiles of a group, then by column tiles, then by groups: what the blocks of a group
// read together stays in the level-2 cache. There are at most as many tiles as blocks;
// the blocks beyond them return.
//
// Warps have roles. The first warpgroup fills a ring of 4 stages, rows of x with copies of 16 bytes, weights
// through the copy engine; the other 2 warpgroups multiply 64 rows each, straight from shared memory. A stage passes
// from one to the others through its barrier `full`, and back through `empty`.
//
// Shared memory, from a multiple of 1024 on; every tile lies as the copy engine leaves it, the 16-byte
// chunks of its 128-byte rows swizzled.
//   ring    [4] of bf16 rows [128][64], gate [128][64], up [128][64]
//   corners bf16 [8][16][64]   results of a warp on their way out
//   full, empty   barriers [4] each
//
// Baked in: inner 7168, outer 2048, experts 256, types, epilogue. Not the tokens.

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

// Where an object lies in shared memory, as copies, matrix loads and barriers name it.
DEVICE u32 shared_address(const void *object) { return (u32)__cvta_generic_to_shared(object); }

// ---- barriers in shared memory, and roles of warps ----

// The shared memory that the launch gives a block, from a multiple of 1024 on.
template <class T> DEVICE T &dynamic_shared()
{
    extern __shared__ __align__(1024) unsigned char memory[];
    return *reinterpret_cast<T *>(memory);
}

// Counts arrivals, and bytes that a copy engine still owes. When none are
// missing its phase ends; phases are told apart by their parity, from 0 on.
struct Barrier { u64 state; };

DEVICE void mbarrier_init(Barrier &barrier, u32 arrivals)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;"
                 :: "r"(shared_address(&barrier)), "r"(arrivals) : "memory");
}

// Shows initialised barriers to the copy engine; the block still has to meet.
DEVICE void mbarrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

DEVICE void mbarrier_arrive(Barrier &barrier)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(shared_address(&barrier)) : "memory");
}

// Arrives, and announces `bytes` more to come before the phase can end.
DEVICE void mbarrier_expect(Barrier &barrier, u32 bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 :: "r"(shared_address(&barrier)), "r"(bytes) : "memory");
}

// Whether the phase of this parity has ended; sleeps for a while first.
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

// Waits for the end of the phase of this parity. The phase before a barrier's
// first one counts as ended, and its parity is 1.
DEVICE void mbarrier_wait(Barrier &barrier, u32 parity)
{
    while (!mbarrier_try_wait(barrier, parity)) {}
}

// Ordinary writes to shared memory come before what the asynchronous engines
// (copies, wgmma) do after this.
DEVICE void proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// True for one lane of a warp whose lanes are all here.
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

// THREADS threads, whole warps, meet at one of 16 barriers; 0 is the block's.
template <int THREADS> DEVICE void named_sync(i32 barrier)
{
    asm volatile("bar.sync %0, %1;" :: "r"(barrier), "n"(THREADS) : "memory");
}

// The four warps of a warpgroup change how many registers each thread has.
template <int COUNT> DEVICE void shrink_registers()
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(COUNT));
}

template <int COUNT> DEVICE void grow_registers()
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(COUNT));
}

// ---- the copy engine: boxes of a tensor to shared memory ----

// A tensor, the shape of its boxes and their layout in shared memory, as the
// driver encodes them. What lies outside the tensor is read as zero.
struct alignas(64) TensorMap { unsigned char bytes[128]; };

DEVICE void tma_prefetch(const TensorMap &map)
{
    asm volatile("prefetch.tensormap [%0];" :: "l"(&map) : "memory");
}

// What the level-2 cache should do with a box.
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

// ---- copies from global to shared memory that run by themselves ----

// Starts to copy BYTES, 16, 8 or 4, between places aligned to as many. Where the
// source is not `wanted` nothing is read and zeros are written.
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

// Ends a group: the copies this thread started since the last one.
DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until all but the last PENDING groups of this thread have arrived. Other
// threads see them after the next barrier.
template <int PENDING> DEVICE void wait_copies()
{
    asm volatile("cp.async.wait_group %0;" :: "n"(PENDING) : "memory");
}

// ---- products of tiles by a warpgroup ----

// How wgmma finds an operand in shared memory: rows of 64 elements of 16 bits, their
// 16-byte chunks swizzled over 128 bytes as the copy engine leaves them, eight rows
// 1024 bytes apart from the next eight. `tile` starts at a multiple of 1024.
//   bits 0-13 address / 16, 16-29 leading offset (unused here), 32-45 stride / 16, 62-63 swizzle
DEVICE u64 operand_128b(const void *tile)
{
    return (u64)(shared_address(tile) >> 4) | (u64)1 << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}

// From 16 elements of each row to the next 16, which one wgmma multiplies.
constexpr u64 NEXT_STEP = 16 * sizeof(u16) >> 4;

// The four warps issue products together. They come after what was written to the
// registers of the sums before the fence, and run while the warps go on.
DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Until at most LEFT committed groups are unfinished.
template <int LEFT> DEVICE void wgmma_wait()
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(LEFT) : "memory");
}

// Keeps the compiler from reading sums before the wait above it.
template <int COUNT> DEVICE void settle(f32 (&sums)[COUNT])
{
    #pragma unroll
    for (i32 i = 0; i < COUNT; i++)
        asm volatile("" : "+f"(sums[i]) :: "memory");
}

// Where sum i of a thread lies among the 16 rows that a warp has of a product: the
// first warp of a warpgroup has the first 16, and so on.
DEVICE i32 sum_row(i32 i) { return i / 2 % 2 * 8 + lane_index() / 4; }
DEVICE i32 sum_column(i32 i) { return i / 4 * 8 + lane_index() % 4 * 2 + i % 2; }

// sums = a · bᵀ (+ sums when told to accumulate), a [64][16], b [128][16].
DEVICE void wgmma_m64n128k16_bf16(f32 (&sums)[64], u64 a, u64 b, bool accumulate)
{
    asm volatile("{\n"
                 "    .reg .pred accumulate;\n"
                 "    setp.ne.b32 accumulate, %66, 0;\n"
                 "    wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, "
                 "%8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, "
                 "%24, %25, %26, %27, %28, %29, %30, %31, "
                 "%32, %33, %34, %35, %36, %37, %38, %39, "
                 "%40, %41, %42, %43, %44, %45, %46, %47, "
                 "%48, %49, %50, %51, %52, %53, %54, %55, "
                 "%56, %57, %58, %59, %60, %61, %62, %63"
                 "}, %64, %65, accumulate, 1, 1, 0, 0;\n"
                 "}"
                 : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]),
                   "+f"(sums[4]), "+f"(sums[5]), "+f"(sums[6]), "+f"(sums[7]),
                   "+f"(sums[8]), "+f"(sums[9]), "+f"(sums[10]), "+f"(sums[11]),
                   "+f"(sums[12]), "+f"(sums[13]), "+f"(sums[14]), "+f"(sums[15]),
                   "+f"(sums[16]), "+f"(sums[17]), "+f"(sums[18]), "+f"(sums[19]),
                   "+f"(sums[20]), "+f"(sums[21]), "+f"(sums[22]), "+f"(sums[23]),
                   "+f"(sums[24]), "+f"(sums[25]), "+f"(sums[26]), "+f"(sums[27]),
                   "+f"(sums[28]), "+f"(sums[29]), "+f"(sums[30]), "+f"(sums[31]),
                   "+f"(sums[32]), "+f"(sums[33]), "+f"(sums[34]), "+f"(sums[35]),
                   "+f"(sums[36]), "+f"(sums[37]), "+f"(sums[38]), "+f"(sums[39]),
                   "+f"(sums[40]), "+f"(sums[41]), "+f"(sums[42]), "+f"(sums[43]),
                   "+f"(sums[44]), "+f"(sums[45]), "+f"(sums[46]), "+f"(sums[47]),
                   "+f"(sums[48]), "+f"(sums[49]), "+f"(sums[50]), "+f"(sums[51]),
                   "+f"(sums[52]), "+f"(sums[53]), "+f"(sums[54]), "+f"(sums[55]),
                   "+f"(sums[56]), "+f"(sums[57]), "+f"(sums[58]), "+f"(sums[59]),
                   "+f"(sums[60]), "+f"(sums[61]), "+f"(sums[62]), "+f"(sums[63])
                 : "l"(a), "l"(b), "r"((u32)accumulate));
}

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

// The activation of an expert.
DEVICE f32 activation(f32 x)
{
    return x * sigmoid(x);
}

// ---- the kernel ----

constexpr int INNER = 7168, OUTER = 2048;
constexpr int EXPERTS = 256, TOP_K = 8;
constexpr int TILE_ROWS = 128, TILE_COLUMNS = 128, TILE_DEPTH = 64;
constexpr int STAGES = 4;
constexpr int CONSUMERS = TILE_ROWS / 64, CONSUMER_WARPS = 4 * CONSUMERS;
constexpr int THREADS = 128 + 128 * CONSUMERS;
constexpr int SUMS = TILE_COLUMNS / 2;  // per thread
constexpr int COLUMN_TILES = ceil_div(OUTER, TILE_COLUMNS);
// Row tiles whose blocks follow each other.
constexpr int GROUP = 16;
// Threads that copy rows, eight to a line, and stages on which their copies are under way.
constexpr int COPIERS = 128, COPIED_LINES = COPIERS / 8, LATE = STAGES > 2 ? STAGES - 2 : 0;

typedef bf16 Element;

// A slice of the inner dimension.
struct Stage {
    Element rows[TILE_ROWS][TILE_DEPTH];
    Element gate[TILE_COLUMNS][TILE_DEPTH], up[TILE_COLUMNS][TILE_DEPTH];
};

struct alignas(1024) Shared {
    Stage ring[STAGES];
    Element corners[CONSUMER_WARPS][16][64];
    Barrier full[STAGES], empty[STAGES];
};

// What of a stage comes through the copy engine.
constexpr u32 MAPPED = sizeof(Stage) - sizeof(Stage::rows);
static_assert(THREADS == 384 && sizeof(Shared) == 214016, "as launched");

// A stage, and the parity of the round the ring is in.
struct Turn {
    i32 stage = 0;
    u32 parity = 0;

    DEVICE void next()
    {
        stage++;
        if (stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};

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

DEVICE f32 activated(f32 gate, f32 up)
{
    return activation(gate) * up;
}

// What becomes of a sum: bias, activation, weight.
DEVICE f32 finished(f32 gate, f32 up)
{
    return activated(gate, up);
}

// The tile of this block among `row_tiles` x COLUMN_TILES.
struct Tile {
    i32 row, column;
    bool exists;

    DEVICE explicit Tile(i32 row_tiles)
    {
        const i32 block = (i32)block_x(), group = block / (GROUP * COLUMN_TILES) * GROUP;
        const i32 rows = lesser(GROUP, row_tiles - group), within = block - group * COLUMN_TILES;
        exists = rows > 0 && within < rows * COLUMN_TILES;
        row = exists ? group + within % rows : 0;
        column = exists ? within / rows : 0;
    }
};

// Elements stored at a time.
constexpr int STORED = pack_width<Element>(OUTER);

// Where an element of a warp's corner lies: chunks are swizzled like the tiles', so that
// neither the writes nor the reads below meet in a bank.
DEVICE Element *in_corner(Element (&corner)[16][64], i32 row, i32 column)
{
    return &corner[row][(column / 8 ^ row % 8) * 8 + column % 8];
}

// Copies what of a corner lies within `rows` and OUTER to rows of the output, from column
// `first` on; eight lanes take a row.
DEVICE void store_corner(Element *to, Element (&corner)[16][64], i32 rows, i32 first)
{
    #pragma unroll
    for (i32 i = 0; i < 16; i += WARP / 8) {
        const i32 row = i + lane_index() / 8, chunk = lane_index() % 8 * 8;
        #pragma unroll
        for (i32 column = chunk; column < chunk + 8; column += STORED)
            if (row < rows && first + column < OUTER) {
                const Pack<Element, STORED> pack = load<STORED>(in_corner(corner, row, column));
                store(to + (i64)row * OUTER, (first + column) / STORED, pack);
            }
    }
}

KERNEL(THREADS) grouped_gemm_up(
    const bf16 *__restrict__ x,                 // [tokens, 7168]
    const __grid_constant__ TensorMap gate_map, // [256, 2048, 7168]
    const __grid_constant__ TensorMap up_map,   // [256, 2048, 7168]
    const i64 *__restrict__ offsets,            // [257]
    const i32 *__restrict__ row_tiles,          // [257]
    const i32 *__restrict__ row_slots,          // [rows]
    bf16 *__restrict__ hidden,                  // [rows, 2048]
    i64 tokens)
{
    Shared &shared = dynamic_shared<Shared>();
    if (thread_index() == 0) {
        tma_prefetch(gate_map);
        tma_prefetch(up_map);
        for (i32 stage = 0; stage < STAGES; stage++) {
            mbarrier_init(shared.full[stage], 1 + COPIERS);
            mbarrier_init(shared.empty[stage], CONSUMER_WARPS);
        }
        mbarrier_init_fence();
    }
    await_launches();

    (void)tokens;
    const Tile at(row_tiles[EXPERTS]);
    if (!at.exists)
        return;
    const RowTile tile = row_tile(offsets, row_tiles, at.row);
    const i32 first_column = at.column * TILE_COLUMNS;
    block_sync();

    // The producer. Rows beyond the tile and elements beyond the inner dimension are zeros.
    if (warp_index() < 4) {
        shrink_registers<40>();
        const i32 line = thread_index() / 8, chunk = thread_index() % 8;
        i32 token[TILE_ROWS / COPIED_LINES];
        #pragma unroll
        for (i32 i = 0; i < TILE_ROWS / COPIED_LINES; i++) {
            const i32 row = i * COPIED_LINES + line;
            token[i] = row < tile.rows ? row_slots[tile.first + row] / TOP_K : 0;
        }
        const u64 stream = stream_through_cache();
        Turn turn, landed;
        #pragma unroll 1
        for (i32 k = 0; k < INNER; k += TILE_DEPTH, turn.next()) {
            Stage &stage = shared.ring[turn.stage];
            Barrier &full = shared.full[turn.stage];
            mbarrier_wait(shared.empty[turn.stage], turn.parity ^ 1);
            if (thread_index() == 0) {
                mbarrier_expect(full, MAPPED);
                tma_load_3d(stage.gate, gate_map, full, stream, k, first_column, (i32)tile.expert);
                tma_load_3d(stage.up, up_map, full, stream, k, first_column, (i32)tile.expert);
            }
            const i32 element = k + chunk * 8, wanted = element < INNER ? tile.rows - line : 0;
            const u32 to = shared_address(&stage.rows[line][(chunk ^ line % 8) * 8]);
            #pragma unroll
            for (i32 i = 0; i < TILE_ROWS / COPIED_LINES; i++) {
                const bool exists = i * COPIED_LINES < wanted;
                const Element *const from = x + (i64)token[i] * INNER + (exists ? element : 0);
                copy_async<16>(to + i * COPIED_LINES * (u32)sizeof(stage.rows[0]), from, exists);
            }
            commit_copies();
            // Rows of a stage before have landed, and are shown to wgmma.
            if (k >= LATE * TILE_DEPTH) {
                wait_copies<LATE>();
                proxy_fence();
                mbarrier_arrive(shared.full[landed.stage]);
                landed.next();
            }
        }
        wait_copies<0>();
        proxy_fence();
        for (; landed.stage != turn.stage || landed.parity != turn.parity; landed.next())
            mbarrier_arrive(shared.full[landed.stage]);
        return;
    }

    // The consumers. One group of products stays in flight: when it is the only
    // one, those of the slice before are done, and its stage is free.
    grow_registers<232>();
    const i32 consumer = warp_index() / 4 - 1, warp = warp_index() - 4;
    // One without rows multiplies nothing, and lets go of every stage.
    if (64 * consumer >= tile.rows) {
        Turn turn;
        for (i32 k = 0; k < INNER; k += TILE_DEPTH, turn.next()) {
            mbarrier_wait(shared.full[turn.stage], turn.parity);
            if (elect_one())
                mbarrier_arrive(shared.empty[turn.stage]);
        }
        return;
    }
    f32 gate_sums[SUMS], up_sums[SUMS];
    Turn turn;
    i32 before = 0;
    #pragma unroll 1
    for (i32 k = 0; k < INNER; k += TILE_DEPTH, turn.next()) {
        const Stage &stage = shared.ring[turn.stage];
        mbarrier_wait(shared.full[turn.stage], turn.parity);
        const u64 left = operand_128b(stage.rows[64 * consumer]);
        const u64 gate = operand_128b(stage.gate), up = operand_128b(stage.up);
        wgmma_fence();
        #pragma unroll
        for (i32 step = 0; step < TILE_DEPTH / 16; step++) {
            const bool accumulate = k > 0 || step > 0;
            wgmma_m64n128k16_bf16(gate_sums, left + step * NEXT_STEP, gate + step * NEXT_STEP, accumulate);
            wgmma_m64n128k16_bf16(up_sums, left + step * NEXT_STEP, up + step * NEXT_STEP, accumulate);
        }
        wgmma_commit();
        wgmma_wait<1>();
        if (k > 0 && elect_one())
            mbarrier_arrive(shared.empty[before]);
        before = turn.stage;
    }
    wgmma_wait<0>();
    settle(gate_sums);
    settle(up_sums);

    // What a warp has, 16 rows, leaves by 64 columns.
    Element (&corner)[16][64] = shared.corners[warp];
    const i32 first_row = 16 * warp, rows = tile.rows - first_row;
    #pragma unroll
    for (i32 slab = 0; slab < TILE_COLUMNS; slab += 64) {
        // Four sums are two columns of two rows.
        #pragma unroll
        for (i32 i = slab / 2; i < slab / 2 + 32; i += 4) {
            #pragma unroll
            for (i32 half = 0; half < 2; half++) {
                Pack<Element, 2> pair;
                #pragma unroll
                for (i32 n = 0; n < 2; n++) {
                    const i32 sum = i + 2 * half + n;
                    const f32 value = finished(gate_sums[sum], up_sums[sum]);
                    pair.at[n] = round_to<Element>(value);
                }
                store(in_corner(corner, sum_row(i + 2 * half), sum_column(i) - slab), pair);
            }
        }
        warp_sync();
        store_corner(hidden + (tile.first + first_row) * OUTER, corner, rows, first_column + slab);
        warp_sync();
    }
}
