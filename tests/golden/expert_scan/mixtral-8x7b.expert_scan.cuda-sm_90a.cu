// expert_scan for cuda:sm_90a
//
// Gives every assignment (token, slot) its place inside its expert, slot by slot, tokens
// ascending.
// Nothing depends on the order in which threads happen to run.
//
// A tile is the assignments of 64 tokens in one slot; tiles go slot by slot.
//
// gate_topk counted the experts of each tile.
// expert_scan_sum: a block owns 8 experts, and makes each tile's counts those of all tiles
// before it.
//   shared  sums      i32 [8][128]   of each expert in each run of tiles
// expert_scan_place: a block owns 8 tiles; a warp places one, 32 assignments at a
// time in order. Every block first sums over the experts where each begins; the first one writes
// that down.
//   shared  counters  i32 [8][8]   the next place of each expert, per warp
//           starts    i32 [9]   where each expert's rows begin
//
// Baked in: experts 8, top_k 2, the capacity rule. Not the tokens.

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

// ---- assignments ----

constexpr int EXPERTS = 8, ROUTED = 8, TOP_K = 2;
constexpr int THREADS = 256, SCAN_THREADS = 1024, WARPS = THREADS / WARP;
constexpr int TILE_TOKENS = 64, TILE_SLOTS = TILE_TOKENS;
// A warp takes WARP assignments of its tile at a time.
constexpr int STEPS = ceil_div(TILE_SLOTS, WARP);

// The bits of an expert, or of NONE.
constexpr u32 NONE = ROUTED;
COMPILE_TIME int bits_for(u32 value) { return value == 0 ? 0 : 1 + bits_for(value / 2); }

DEVICE i64 tiles_of(i64 tokens)
{
    return (tokens + TILE_TOKENS - 1) / TILE_TOKENS * TOP_K;
}

// The tile of a warp. Neighbours have the same tokens, in the next slot.
struct Tile {
    i64 first;  // its first token
    i32 slot;

    DEVICE Tile()
    {
        const i64 number = block_x() * WARPS + warp_index();
        first = number / TOP_K * TILE_TOKENS;
        slot = (i32)(number % TOP_K);
    }

    DEVICE bool exists(i64 tokens) const { return first < tokens; }

    // Its row of tile_counts.
    DEVICE i64 row(i64 tokens) const { return slot * (tiles_of(tokens) / TOP_K) + first / TILE_TOKENS; }

    // Its i-th assignment as token * TOP_K + slot; -1 past the last.
    DEVICE i32 assignment(i32 i, i64 tokens) const
    {
        const i64 token = first + i;
        return i < TILE_SLOTS && token < tokens ? (i32)(token * TOP_K + slot) : -1;
    }
};

// The expert of an assignment; NONE when it is masked or there is none.
DEVICE u32 expert_of(const i32 *topk_ids, i32 slot)
{
    const i32 id = slot < 0 ? -1 : topk_ids[slot];
    return id < 0 || id >= ROUTED ? NONE : (u32)id;
}

// ---- sums ----

// A block of expert_scan_sum takes SUMMED experts of all tiles, in rounds. In a round tiles are
// cut into runs; the counts of a run are in the registers of a thread.
constexpr int SUMMED = 8, RUNS = SCAN_THREADS / SUMMED, RUN_TILES = 16;
// Elements between two experts' sums: what a warp writes, a few runs of all, is on all banks once.
constexpr int SUMS_LINE = RUNS + WARP / SUMMED;
static_assert(RUNS % WARP == 0 && SCAN_THREADS / WARP >= SUMMED, "a warp sums the runs of an expert");

// Makes the sum of each run those of all runs before it and of `before`, to which all are added.
DEVICE void scan_runs(i32 *sums, i32 &before)
{
    #pragma unroll
    for (i32 first = 0; first < RUNS; first += WARP) {
        const i32 own = sums[first + lane_index()], upto = warp_prefix(own);
        sums[first + lane_index()] = before + upto - own;
        before += (i32)shuffle((u32)upto, WARP - 1);
    }
}

KERNEL(SCAN_THREADS) expert_scan_sum(
    i32 *__restrict__ tile_counts, // [tiles, 8]
    i64 *__restrict__ counts,      // [8]
    i64 tokens)
{
    await_launches();
    __shared__ i32 sums[SUMMED][SUMS_LINE];
    const i32 run = thread_index() / SUMMED, column = thread_index() % SUMMED;
    const i32 first_expert = (i32)block_x() * SUMMED, summed = first_expert + warp_index();
    const bool owns = first_expert + column < ROUTED;
    const i64 tiles = tiles_of(tokens);
    i32 before = 0;  // of the expert that this warp sums: in all rounds so far
    for (i64 round = 0; round < tiles; round += RUNS * RUN_TILES) {
        const i64 first = round + run * RUN_TILES;
        i32 *own = tile_counts + first * ROUTED + first_expert + column;
        i32 held[RUN_TILES], sum = 0;
        #pragma unroll
        for (i32 i = 0; i < RUN_TILES; i++) {
            held[i] = owns && first + i < tiles ? own[i * ROUTED] : 0;
            sum += held[i];
        }
        sums[column][run] = sum;
        block_sync();  // the sums of all runs are there
        if (warp_index() < SUMMED)
            scan_runs(sums[warp_index()], before);
        block_sync();  // and now what is before each
        sum = sums[column][run];
        #pragma unroll
        for (i32 i = 0; i < RUN_TILES; i++) {
            if (owns && first + i < tiles)
                own[i * ROUTED] = sum;
            sum += held[i];
        }
    }
    if (warp_index() < SUMMED && summed < ROUTED && lane_index() == 0)
        counts[summed] = before;
}

// ---- offsets ----

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

// ---- places ----

// Where an assignment goes, by its location inside its expert.
struct Placement {
    const i32 *starts;  // the first row of each expert
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
        const i32 row = (i32)starts[expert] + location;
        locations[slot] = location;
        slot_rows[slot] = row;
        row_slots[row] = slot;
    }
};

// Assignments of a lane whose loads overlap; those of a long tile do not fit its registers.
constexpr i32 HELD = STEPS < 16 ? STEPS : 16;

KERNEL(THREADS) expert_scan_place(
    const i32 *__restrict__ topk_ids,    // [tokens, 2]
    const i32 *__restrict__ tile_counts, // [tiles, 8]
    const i64 *__restrict__ counts,      // [8]
    i64 *__restrict__ offsets,           // [9]
    i32 *__restrict__ row_tiles,         // [9]
    i32 *__restrict__ locations,         // [tokens, 2]
    i32 *__restrict__ slot_rows,         // [tokens, 2]
    i32 *__restrict__ row_slots,         // [rows]
    i64 tokens)
{
    await_launches();
    __shared__ i32 counters[WARPS][ROUTED], starts[EXPERTS + 1];
    for (i32 expert = thread_index(); expert < EXPERTS; expert += THREADS)
        starts[expert] = (i32)counts[expert];
    block_sync();  // the counts of all experts are there
    if (warp_index() == 0) {
        auto kept = [&](i32 expert) { return starts[expert]; };
        // All blocks find the same; the first one writes it down.
        if (block_x() == 0) {
            scan_experts(offsets, kept);
            scan_experts(row_tiles, [&](i32 expert) { return ceil_div(kept(expert), 128); });
        }
        scan_experts(starts, kept);
    }
    const Tile tile;
    const bool exists = tile.exists(tokens);
    i32 *next = counters[warp_index()];
    // Places begin after those of the tiles before.
    const i32 *before = tile_counts + (exists ? tile.row(tokens) : 0) * ROUTED;
    for (i32 expert = lane_index(); expert < ROUTED && exists; expert += WARP)
        next[expert] = before[expert];
    block_sync();  // the starts are there
    if (!exists)
        return;

    const Placement placement = {starts, 0x7fffffff, locations, slot_rows, row_slots};
    #pragma unroll 1
    for (i32 first = 0; first < STEPS; first += HELD) {
        i32 slots[HELD];
        u32 experts[HELD];
        #pragma unroll
        for (i32 s = 0; s < HELD; s++) {
            slots[s] = tile.assignment((first + s) * WARP + lane_index(), tokens);
            experts[s] = expert_of(topk_ids, slots[s]);
        }
        #pragma unroll
        for (i32 s = 0; s < HELD; s++) {
            // Lanes with one expert follow each other; one of them speaks for all.
            const LaneMask same = match_any<bits_for(NONE)>(experts[s]);
            const bool placed = experts[s] < EXPERTS;
            const i32 start = placed ? next[experts[s]] : 0, place = start + population(same & lanes_below());
            warp_sync();
            if (placed && lane_index() == first_lane(same))
                next[experts[s]] = start + population(same);
            warp_sync();
            if (placed)
                placement.place(slots[s], experts[s], place);
            else if (slots[s] >= 0)
                placement.none(slots[s]);
        }
    }
}
