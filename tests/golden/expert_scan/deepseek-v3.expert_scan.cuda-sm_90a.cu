// expert_scan for cuda:sm_90a
//
// Gives every assignment (token, slot) its place inside its expert, slot by slot, tokens
// ascending.
// Nothing depends on the order in which threads happen to run.
//
// expert_scan_count: a block counts the experts of 1024 assignments.
//   shared  counts  i32 [256]
// expert_scan_offsets: one block sums the counts over the tiles, then over the experts.
//   shared  segments  i32 [1024]   counts of each run of tiles
//           totals    i32 [256]
// expert_scan_place: a block places 1024 assignments, a warp a run of them in order.
//   shared  next    i32 [warps][256]   the next place of each expert, per warp
//
// Baked in: experts 256, top_k 8, the capacity rule. Not the tokens.

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

// ---- assignments ----

constexpr int EXPERTS = 256, ROUTED = 256, TOP_K = 8;
constexpr int THREADS = 256, SCAN_THREADS = 1024, TILE_SLOTS = 1024;
constexpr int WARPS = THREADS / WARP;

// The bits of an expert, or of NONE.
constexpr u32 NONE = ROUTED;
COMPILE_TIME int bits_for(u32 value) { return value == 0 ? 0 : 1 + bits_for(value / 2); }

// Assignment number `i` in processing order, as token * TOP_K + slot.
DEVICE i32 assignment(u32 i, u32 tokens)
{
    const u32 slot = i / tokens, token = i % tokens;
    return (i32)(token * TOP_K + slot);
}

// The expert of an assignment; NONE when it is masked.
DEVICE u32 expert_of(const i32 *topk_ids, i32 slot)
{
    const i32 id = topk_ids[slot];
    return id < 0 || id >= ROUTED ? NONE : (u32)id;
}

KERNEL(THREADS) expert_scan_count(
    const i32 *__restrict__ topk_ids, // [tokens, 8]
    i32 *__restrict__ tile_counts,    // [tiles, 256]
    i64 tokens)
{
    __shared__ i32 counts[ROUTED];
    for (i32 expert = thread_index(); expert < ROUTED; expert += THREADS)
        counts[expert] = 0;
    block_sync();
    const i64 first = block_x() * TILE_SLOTS;
    for (i64 i = first + thread_index(); i < first + TILE_SLOTS && i < tokens * TOP_K; i += THREADS) {
        const u32 expert = expert_of(topk_ids, assignment((u32)i, (u32)tokens));
        if (expert != NONE)
            shared_add(&counts[expert], 1);
    }
    block_sync();
    for (i32 expert = thread_index(); expert < ROUTED; expert += THREADS)
        tile_counts[block_x() * ROUTED + expert] = counts[expert];
}

// ---- offsets ----

// A pass takes this many experts; their tiles are cut into runs, one per thread.
constexpr int PASS = lesser(ROUTED, SCAN_THREADS), RUNS = SCAN_THREADS / PASS;

// Makes the counts of each tile those of all tiles before it, and writes the
// sum over all tiles.
DEVICE void scan_tiles(i32 *tile_counts, i32 *totals, i32 *segments, i32 tiles)
{
    const i32 run = thread_index() / PASS, length = (tiles + RUNS - 1) / RUNS;
    const i32 first = run < RUNS ? run * length : tiles;
    const i32 last = first + length < tiles ? first + length : tiles;
    for (i32 pass = 0; pass < ROUTED; pass += PASS) {
        const i32 expert = pass + thread_index() % PASS;
        i32 *column = tile_counts + expert;
        i32 sum = 0;
        #pragma unroll 4
        for (i32 tile = first; tile < last && expert < ROUTED; tile++)
            sum += column[(i64)tile * ROUTED];
        segments[thread_index()] = sum;
        block_sync();
        i32 before = 0;
        for (i32 r = 0; r < run; r++)
            before += segments[r * PASS + thread_index() % PASS];
        if (run == RUNS - 1 && expert < ROUTED)
            totals[expert] = before + sum;
        for (i32 tile = first; tile < last && expert < ROUTED; tile++) {
            const i32 count = column[(i64)tile * ROUTED];
            column[(i64)tile * ROUTED] = before;
            before += count;
        }
        block_sync();
    }
}

// sums[0..=EXPERTS] = exclusive sums of `size`, by one warp.
template <class T, class Size> DEVICE void scan_experts(T *sums, Size size)
{
    i32 before = 0;
    for (i32 first = 0; first <= EXPERTS; first += WARP) {
        const i32 expert = first + lane_index();
        const i32 own = expert < EXPERTS ? size(expert) : 0, upto = warp_prefix(own);
        if (expert <= EXPERTS)
            sums[expert] = before + upto - own;
        before += (i32)shuffle((u32)upto, WARP - 1);
    }
}

KERNEL(SCAN_THREADS) expert_scan_offsets(
    i32 *__restrict__ tile_counts, // [tiles, 256]
    i64 *__restrict__ counts,      // [256]
    i64 *__restrict__ offsets,     // [257]
    i32 *__restrict__ row_tiles,   // [257]
    i64 tokens)
{
    __shared__ i32 totals[ROUTED], segments[SCAN_THREADS];
    scan_tiles(tile_counts, totals, segments, (i32)((tokens * TOP_K + TILE_SLOTS - 1) / TILE_SLOTS));
    for (i32 expert = thread_index(); expert < ROUTED; expert += SCAN_THREADS)
        counts[expert] = totals[expert];
    if (warp_index() > 0)
        return;
    auto kept = [&](i32 expert) { return totals[expert]; };
    scan_experts(offsets, kept);
    scan_experts(row_tiles, [&](i32 expert) { return ceil_div(kept(expert), 64); });
}

// ---- places ----

// Where an assignment goes, by its location inside its expert.
struct Placement {
    const i64 *offsets;
    i64 limit;
    i32 *locations, *slot_rows, *row_slots;

    DEVICE void none(i32 slot) const
    {
        locations[slot] = -1;
        slot_rows[slot] = -1;
    }

    DEVICE void place(i32 slot, u32 expert, i32 location) const
    {
        if (location >= limit)
            return none(slot);
        const i32 row = (i32)offsets[expert] + location;
        locations[slot] = location;
        slot_rows[slot] = row;
        row_slots[row] = slot;
    }
};

KERNEL(THREADS) expert_scan_place(
    const i32 *__restrict__ topk_ids,    // [tokens, 8]
    const i32 *__restrict__ tile_counts, // [tiles, 256]
    const i64 *__restrict__ offsets,     // [257]
    i32 *__restrict__ locations,         // [tokens, 8]
    i32 *__restrict__ slot_rows,         // [tokens, 8]
    i32 *__restrict__ row_slots,         // [rows]
    i64 tokens)
{
    // A warp has STEPS * WARP assignments, taken WARP at a time.
    constexpr int STEPS = TILE_SLOTS / THREADS;
    __shared__ i32 next[WARPS][ROUTED];
    i32 *own = next[warp_index()];
    for (i32 expert = lane_index(); expert < ROUTED; expert += WARP)
        own[expert] = 0;
    warp_sync();

    const i64 first = block_x() * TILE_SLOTS + warp_index() * (STEPS * WARP);
    i32 slots[STEPS];
    u32 experts[STEPS];
    #pragma unroll
    for (i32 s = 0; s < STEPS; s++) {
        const i64 i = first + s * WARP + lane_index();
        const bool exists = i < tokens * TOP_K;
        slots[s] = exists ? assignment((u32)i, (u32)tokens) : -1;
        experts[s] = exists ? expert_of(topk_ids, slots[s]) : NONE;
    }

    // How many of each expert a warp has. One lane speaks for all of an expert.
    #pragma unroll
    for (i32 s = 0; s < STEPS; s++) {
        const LaneMask same = match_any<bits_for(NONE)>(experts[s]);
        if (experts[s] != NONE && lane_index() == first_lane(same))
            own[experts[s]] += population(same);
        warp_sync();
    }
    block_sync();
    for (i32 expert = thread_index(); expert < ROUTED; expert += THREADS) {
        i32 place = tile_counts[block_x() * ROUTED + expert];
        #pragma unroll
        for (i32 warp = 0; warp < WARPS; warp++) {
            const i32 count = next[warp][expert];
            next[warp][expert] = place;
            place += count;
        }
    }
    block_sync();

    const Placement placement = {offsets, 0x7fffffff, locations, slot_rows, row_slots};
    #pragma unroll
    for (i32 s = 0; s < STEPS; s++) {
        const LaneMask same = match_any<bits_for(NONE)>(experts[s]);
        const bool placed = experts[s] < EXPERTS;
        const i32 place = placed ? own[experts[s]] + population(same & lanes_below()) : 0;
        warp_sync();
        if (placed && lane_index() == first_lane(same))
            own[experts[s]] += population(same);
        warp_sync();
        if (placed)
            placement.place(slots[s], experts[s], place);
        else if (slots[s] >= 0)
            placement.none(slots[s]);
    }
}
