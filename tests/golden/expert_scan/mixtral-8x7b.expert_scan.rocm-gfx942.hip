// expert_scan for rocm:gfx942: from choices to the rows of each expert
//
// Gives every assignment (token, slot) its location in its expert, slot by slot, tokens
// ascending.
// The result does not depend on the order in which threads run.
//
// A tile is the assignments of 64 tokens in one slot; tiles go slot by slot.
//
// gate_topk has counted the assignments of each expert in each tile.
// expert_scan_sum: a block owns 8 experts and replaces each tile's count by the exclusive prefix
// sum over tiles.
//   shared  sums      i32 [8][128]   of each expert in each run of tiles
// expert_scan_place: a block owns 4 tiles; a warp places one, 64 assignments at a
// time in order. Every block first computes the offsets of all experts; block 0 writes them.
//   shared  counters  i32 [4][8]   the next place of each expert, per warp
//           starts    i32 [9]   where each expert's rows begin
//
// Baked in: experts 8, top_k 2, the capacity rule.
// Read at run time: the number of tokens.

// [prelude: base.hpp, hip/base.hpp, bf16_bits.hpp, base.hpp, warp.hpp]

constexpr i32 WARP = 64;
typedef u64 LaneMask;

// [prelude: hip/warp.hpp, warp_max.hpp, warp.hpp]

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

// Replaces the sum of each run by that of all runs before it and `before`, then adds all to `before`.
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

// Places an assignment by its location in its expert.
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

// Assignments of a lane whose loads overlap. All of a long tile would not fit into its registers.
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
