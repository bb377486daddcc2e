// expert_scan for rocm:gfx942
//
// Gives every assignment (token, slot) its place inside its expert, tokens ascending.
// Nothing depends on the order in which threads happen to run.
//
// A tile is the assignments of 64 tokens, token by token.
//
// gate_topk counted the experts of each tile.
// expert_scan_sum: a block owns 8 experts, and makes each tile's counts those of all tiles
// before it.
//   shared  sums      i32 [8][128]   of each expert in each run of tiles
// expert_scan_place: a block owns 4 tiles; a warp places one, 64 assignments at a
// time in order. Every block first sums over the experts where each begins; the first one writes
// that down.
//   shared  counters  i32 [4][8]   the next place of each expert, per warp
//           starts    i32 [9]   where each expert's rows begin
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
DEVICE void await_launches() {}  // launches do not overlap

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
constexpr int THREADS = 256, SCAN_THREADS = 1024, WARPS = THREADS / WARP;
constexpr int TILE_TOKENS = 64, TILE_SLOTS = TILE_TOKENS * TOP_K;
// A warp takes WARP assignments of its tile at a time.
constexpr int STEPS = ceil_div(TILE_SLOTS, WARP);

// The bits of an expert, or of NONE.
constexpr u32 NONE = ROUTED;
COMPILE_TIME int bits_for(u32 value) { return value == 0 ? 0 : 1 + bits_for(value / 2); }

DEVICE i64 tiles_of(i64 tokens)
{
    return (tokens + TILE_TOKENS - 1) / TILE_TOKENS;
}

// The tile of a warp.
struct Tile {
    i64 first;  // its first token

    DEVICE Tile() : first((block_x() * WARPS + warp_index()) * TILE_TOKENS) {}

    DEVICE bool exists(i64 tokens) const { return first < tokens; }

    // Its row of tile_counts.
    DEVICE i64 row(i64) const { return first / TILE_TOKENS; }

    // Its i-th assignment as token * TOP_K + slot; -1 past the last.
    DEVICE i32 assignment(i32 i, i64 tokens) const
    {
        const i64 slot = first * TOP_K + i;
        return i < TILE_SLOTS && slot < tokens * TOP_K ? (i32)slot : -1;
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

// The rows each expert may take.
DEVICE i64 capacity_rows(i32 largest)
{
    (void)largest;
    const i64 rows = 64;
    return rows;
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
    const i32 *__restrict__ topk_ids,    // [tokens, 1]
    const i32 *__restrict__ tile_counts, // [tiles, 8]
    const i64 *__restrict__ counts,      // [8]
    i64 *__restrict__ capacity,          // [1]
    i64 *__restrict__ offsets,           // [9]
    i32 *__restrict__ row_tiles,         // [9]
    i32 *__restrict__ locations,         // [tokens, 1]
    i32 *__restrict__ slot_rows,         // [tokens, 1]
    i32 *__restrict__ row_slots,         // [rows]
    i64 tokens)
{
    await_launches();
    __shared__ i32 counters[WARPS][ROUTED], starts[EXPERTS + 1];
    __shared__ i64 limit;
    for (i32 expert = thread_index(); expert < EXPERTS; expert += THREADS)
        starts[expert] = (i32)counts[expert];
    block_sync();  // the counts of all experts are there
    if (warp_index() == 0) {
        u32 most = 0;
        for (i32 expert = lane_index(); expert < EXPERTS; expert += WARP)
            most = (u32)starts[expert] > most ? (u32)starts[expert] : most;
        const i64 rows = capacity_rows((i32)warp_max(most));
        auto kept = [&](i32 expert) { return starts[expert] < rows ? starts[expert] : (i32)rows; };
        // All blocks find the same; the first one writes it down.
        if (block_x() == 0) {
            scan_experts(offsets, kept);
            scan_experts(row_tiles, [&](i32 expert) { return ceil_div(kept(expert), 128); });
            if (lane_index() == 0) {
                capacity[0] = rows;
            }
        }
        if (lane_index() == 0)
            limit = rows;
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

    const Placement placement = {starts, limit, locations, slot_rows, row_slots};
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
