// expert_scan for cuda:sm_90a
//
// Gives every assignment (token, slot) its place inside its expert, slot by slot, tokens
// ascending.
// Nothing depends on the order in which threads happen to run.
//
// A tile is the assignments of 64 tokens in one slot; tiles go slot by slot. A chunk is 64 tiles.
//
// gate_topk counted the experts of each tile.
// expert_scan_chunks: a block owns up to 32 experts of a whole chunk, and makes each
// tile's counts those of the tiles before it in the chunk.
//   shared  sums      i32 [runs][32]   a run of tiles is a thread's
// expert_scan_offsets: one block does the same to the tiles after the last whole chunk, then
// to the chunks, then sums over the experts.
//   shared  segments  i32 [1024]   counts of each run of rows
//           tail      i32 [256]   of each expert after the last whole chunk
//           totals    i32 [256]   of each expert
// expert_scan_place: a block owns 8 tiles; a warp places one, 32 assignments at a
// time in order.
//   shared  counters  i32 [8][256]   the next place of each expert, per warp
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

constexpr int EXPERTS = 256, ROUTED = 256, TOP_K = 8;
constexpr int THREADS = 256, SCAN_THREADS = 1024, WARPS = THREADS / WARP;
constexpr int TILE_TOKENS = 64, TILE_SLOTS = TILE_TOKENS;
constexpr int CHUNK_TILES = 64;
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

// ---- chunks ----

// A block of expert_scan_chunks takes CHUNK_COLUMNS experts; the tiles of its
// chunk are cut into runs, one per thread.
constexpr int CHUNK_RUNS = 8, CHUNK_COLUMNS = lesser(ROUTED, THREADS / CHUNK_RUNS), RUN_TILES = CHUNK_TILES / CHUNK_RUNS;
static_assert(CHUNK_RUNS * CHUNK_COLUMNS <= THREADS, "every run has a thread");
static_assert(CHUNK_RUNS * RUN_TILES == CHUNK_TILES, "every tile is in a run");

KERNEL(THREADS) expert_scan_chunks(
    i32 *__restrict__ tile_counts,  // [tiles, 256]
    i32 *__restrict__ chunk_counts, // [chunks, 256]
    i64 tokens)
{
    await_launches();
    (void)tokens;  // the grid has whole chunks only
    __shared__ i32 sums[CHUNK_RUNS][CHUNK_COLUMNS];
    const i32 run = thread_index() / CHUNK_COLUMNS, column = thread_index() % CHUNK_COLUMNS;
    const i32 expert = (i32)block_y() * CHUNK_COLUMNS + column;
    const bool owns = run < CHUNK_RUNS && expert < ROUTED;
    i32 *counts = tile_counts + (block_x() * CHUNK_TILES + run * RUN_TILES) * ROUTED + expert;
    i32 held[RUN_TILES], sum = 0;
    #pragma unroll
    for (i32 i = 0; i < RUN_TILES; i++) {
        held[i] = owns ? counts[i * ROUTED] : 0;
        sum += held[i];
    }
    if (run < CHUNK_RUNS)
        sums[run][column] = sum;
    block_sync();
    if (!owns)
        return;
    i32 before = 0;
    for (i32 r = 0; r < run; r++)
        before += sums[r][column];
    #pragma unroll
    for (i32 i = 0; i < RUN_TILES; i++) {
        counts[i * ROUTED] = before;
        before += held[i];
    }
    if (run == CHUNK_RUNS - 1)
        chunk_counts[block_x() * ROUTED + expert] = before;
}

// ---- offsets ----

// A pass takes this many experts; rows of counts are cut into runs, one per
// thread.
constexpr int PASS = lesser(ROUTED, SCAN_THREADS), RUNS = SCAN_THREADS / PASS;

// Makes the counts of each row those of all rows before it, and writes the sum
// over all rows.
DEVICE void scan_rows(i32 *counts, i32 *sums, i32 *segments, i64 rows)
{
    const i32 run = thread_index() / PASS;
    const i64 length = (rows + RUNS - 1) / RUNS, first = run < RUNS ? run * length : rows;
    const i64 last = first + length < rows ? first + length : rows;
    for (i32 pass = 0; pass < ROUTED; pass += PASS) {
        const i32 expert = pass + thread_index() % PASS;
        i32 *column = counts + expert;
        i32 sum = 0;
        #pragma unroll 4
        for (i64 row = first; row < last && expert < ROUTED; row++)
            sum += column[row * ROUTED];
        segments[thread_index()] = sum;
        block_sync();
        i32 before = 0;
        for (i32 r = 0; r < run; r++)
            before += segments[r * PASS + thread_index() % PASS];
        if (run == RUNS - 1 && expert < ROUTED)
            sums[expert] = before + sum;
        for (i64 row = first; row < last && expert < ROUTED; row++) {
            const i32 count = column[row * ROUTED];
            column[row * ROUTED] = before;
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
    i32 *__restrict__ tile_counts,  // [tiles, 256]
    i32 *__restrict__ chunk_counts, // [chunks, 256]
    i64 *__restrict__ counts,       // [256]
    i64 *__restrict__ offsets,      // [257]
    i32 *__restrict__ row_tiles,    // [257]
    i64 tokens)
{
    await_launches();
    __shared__ i32 totals[ROUTED], tail[ROUTED], segments[SCAN_THREADS];
    const i64 tiles = tiles_of(tokens), chunks = tiles / CHUNK_TILES, whole = chunks * CHUNK_TILES;
    scan_rows(tile_counts + whole * ROUTED, tail, segments, tiles - whole);
    scan_rows(chunk_counts, totals, segments, chunks);
    for (i32 expert = thread_index(); expert < ROUTED; expert += SCAN_THREADS) {
        chunk_counts[chunks * ROUTED + expert] = totals[expert];
        totals[expert] += tail[expert];
        counts[expert] = totals[expert];
    }
    block_sync();
    if (warp_index() > 0)
        return;
    auto kept = [&](i32 expert) { return totals[expert]; };
    scan_experts(offsets, kept);
    scan_experts(row_tiles, [&](i32 expert) { return ceil_div(kept(expert), 128); });
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

// Assignments of a lane whose loads overlap; those of a long tile do not fit its registers.
constexpr i32 HELD = STEPS < 16 ? STEPS : 16;

KERNEL(THREADS) expert_scan_place(
    const i32 *__restrict__ topk_ids,     // [tokens, 8]
    const i32 *__restrict__ tile_counts,  // [tiles, 256]
    const i32 *__restrict__ chunk_counts, // [chunks, 256]
    const i64 *__restrict__ offsets,      // [257]
    i32 *__restrict__ locations,          // [tokens, 8]
    i32 *__restrict__ slot_rows,          // [tokens, 8]
    i32 *__restrict__ row_slots,          // [rows]
    i64 tokens)
{
    await_launches();
    __shared__ i32 counters[WARPS][ROUTED];
    i32 *next = counters[warp_index()];
    const Tile tile;
    if (!tile.exists(tokens))
        return;
    // Places start after those of the tiles and of the chunks before.
    const i64 row = tile.row(tokens);
    const i32 *in_chunk = tile_counts + row * ROUTED, *before_chunk = chunk_counts + row / CHUNK_TILES * ROUTED;
    for (i32 expert = lane_index(); expert < ROUTED; expert += WARP)
        next[expert] = in_chunk[expert] + before_chunk[expert];
    warp_sync();

    const Placement placement = {offsets, 0x7fffffff, locations, slot_rows, row_slots};
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
