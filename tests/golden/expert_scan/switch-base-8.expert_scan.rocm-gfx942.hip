// expert_scan for rocm:gfx942
//
// Gives every assignment (token, slot) its place inside its expert, tokens ascending.
// Nothing depends on the order in which threads happen to run.
//
// expert_scan_count: a block counts the experts of 1024 assignments.
//   shared  counts  i32 [8]
// expert_scan_offsets: one block sums the counts over the tiles, then over the experts.
//   shared  segments  i32 [1024]   counts of each run of tiles
//           totals    i32 [8]
// expert_scan_place: a block places 1024 assignments, a warp a run of them in order.
//   shared  next    i32 [warps][8]   the next place of each expert, per warp
//
// Baked in: experts 8, top_k 1, the capacity rule. Not the tokens.

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

#define __shared__ __attribute__((shared))
#define DEVICE __attribute__((device)) inline __attribute__((always_inline))
#define COMPILE_TIME constexpr
#define KERNEL(threads) \
    extern "C" __attribute__((global, amdgpu_flat_work_group_size(threads, threads))) void

DEVICE i32 thread_index() { return __builtin_amdgcn_workitem_id_x(); }
DEVICE i64 block_x() { return __builtin_amdgcn_workgroup_id_x(); }
DEVICE i64 block_y() { return __builtin_amdgcn_workgroup_id_y(); }

DEVICE void block_sync()
{
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}

DEVICE u32 bits_of(f32 value) { return __builtin_bit_cast(u32, value); }
DEVICE f32 float_of(u32 bits) { return __builtin_bit_cast(f32, bits); }
DEVICE f32 fused(f32 a, f32 b, f32 c) { return __builtin_fmaf(a, b, c); }
DEVICE f32 square_root(f32 value) { return __builtin_sqrtf(value); }

DEVICE f32 to_f32(f16 value) { return __builtin_bit_cast(_Float16, value.bits); }
DEVICE f16 to_f16(f32 value) { return f16{__builtin_bit_cast(u16, (_Float16)value)}; }

// No instruction here: adding just under half of the last place kept rounds to
// the nearest, ties to even; a NaN stays one.
DEVICE bf16 to_bf16(f32 value)
{
    u32 bits = bits_of(value);
    u32 quiet = bits | 0x400000u, rounded = bits + 0x7fffu + (bits >> 16 & 1u);
    return bf16{(u16)((value != value ? quiet : rounded) >> 16)};
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

constexpr i32 WARP = 64;
typedef u64 LaneMask;

// Every lane of a warp takes part in each of these.
DEVICE void warp_sync()
{
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront");
    __builtin_amdgcn_wave_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront");
}

DEVICE u32 shuffle(u32 value, i32 lane) { return __builtin_amdgcn_ds_bpermute(lane * 4, value); }
DEVICE LaneMask ballot(bool vote) { return __builtin_amdgcn_ballot_w64(vote); }
DEVICE i32 population(LaneMask lanes) { return __builtin_popcountll(lanes); }

// The lanes with the same value, which has at most BITS bits.
template <int BITS> DEVICE LaneMask match_any(u32 value)
{
    LaneMask same = ~(LaneMask)0;
    for (int bit = 0; bit < BITS; bit++) {
        bool set = value >> bit & 1;
        LaneMask lanes = ballot(set);
        same &= set ? lanes : ~lanes;
    }
    return same;
}

DEVICE void shared_add(i32 *counter, i32 value)
{
    __hip_atomic_fetch_add(counter, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
}

DEVICE u32 warp_max(u32 value)
{
    for (i32 step = WARP / 2; step > 0; step /= 2) {
        u32 other = shuffle(value, (thread_index() % WARP) ^ step);
        value = other > value ? other : value;
    }
    return value;
}

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

constexpr int EXPERTS = 8, ROUTED = 8, TOP_K = 1;
constexpr int THREADS = 256, SCAN_THREADS = 1024, TILE_SLOTS = 1024;
constexpr int WARPS = THREADS / WARP;

// The bits of an expert, or of NONE.
constexpr u32 NONE = ROUTED;
COMPILE_TIME int bits_for(u32 value) { return value == 0 ? 0 : 1 + bits_for(value / 2); }

// Assignment number `i` in processing order, as token * TOP_K + slot.
DEVICE i32 assignment(u32 i, u32 tokens)
{
    (void)tokens;
    return (i32)i;
}

// The expert of an assignment; NONE when it is masked.
DEVICE u32 expert_of(const i32 *topk_ids, i32 slot)
{
    const i32 id = topk_ids[slot];
    return id < 0 || id >= ROUTED ? NONE : (u32)id;
}

KERNEL(THREADS) expert_scan_count(
    const i32 *__restrict__ topk_ids, // [tokens, 1]
    i32 *__restrict__ tile_counts,    // [tiles, 8]
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

// The rows each expert may take.
DEVICE i64 capacity_rows(i32 largest)
{
    (void)largest;
    const i64 rows = 64;
    return rows;
}

KERNEL(SCAN_THREADS) expert_scan_offsets(
    i32 *__restrict__ tile_counts, // [tiles, 8]
    i64 *__restrict__ counts,      // [8]
    i64 *__restrict__ capacity,    // [1]
    i64 *__restrict__ offsets,     // [9]
    i32 *__restrict__ row_tiles,   // [9]
    i64 tokens)
{
    __shared__ i32 totals[ROUTED], segments[SCAN_THREADS];
    scan_tiles(tile_counts, totals, segments, (i32)((tokens * TOP_K + TILE_SLOTS - 1) / TILE_SLOTS));
    for (i32 expert = thread_index(); expert < ROUTED; expert += SCAN_THREADS)
        counts[expert] = totals[expert];
    if (warp_index() > 0)
        return;
    u32 most = 0;
    for (i32 expert = lane_index(); expert < EXPERTS; expert += WARP)
        most = (u32)totals[expert] > most ? (u32)totals[expert] : most;
    const i64 limit = capacity_rows((i32)warp_max(most));
    auto kept = [&](i32 expert) { return totals[expert] < limit ? totals[expert] : (i32)limit; };
    scan_experts(offsets, kept);
    scan_experts(row_tiles, [&](i32 expert) { return ceil_div(kept(expert), 64); });
    if (lane_index() == 0) {
        capacity[0] = limit;
    }
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
    const i32 *__restrict__ topk_ids,    // [tokens, 1]
    const i32 *__restrict__ tile_counts, // [tiles, 8]
    const i64 *__restrict__ offsets,     // [9]
    const i64 *__restrict__ capacity,    // [1]
    i32 *__restrict__ locations,         // [tokens, 1]
    i32 *__restrict__ slot_rows,         // [tokens, 1]
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

    const Placement placement = {offsets, capacity[0], locations, slot_rows, row_slots};
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
