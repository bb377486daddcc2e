// expert_scan for rocm:gfx942
//
// Gives every assignment (token, slot) its place inside its expert, slot by slot, tokens
// ascending.
// Nothing depends on the order in which threads happen to run.
//
// A tile is the assignments of 64 tokens in one slot; tiles go slot by slot. A chunk is 64 tiles.
//
// gate_topk counted the experts of each tile.
// expert_scan_chunks: a block owns up to 8 experts of a whole chunk, and makes each
// tile's counts those of the tiles before it in the chunk.
//   shared  sums      i32 [runs][8]   a run of tiles is a thread's
// expert_scan_offsets: one block does the same to the tiles after the last whole chunk, then
// to the chunks, then sums over the experts.
//   shared  segments  i32 [1024]   counts of each run of rows
//           tail      i32 [8]   of each expert after the last whole chunk
//           totals    i32 [8]   of each expert
// expert_scan_place: a block owns 4 tiles; a warp places one, 64 assignments at a
// time in order.
//   shared  counters  i32 [4][8]   the next place of each expert, per warp
//
// Baked in: experts 8, top_k 2, the capacity rule. Not the tokens.

// [prelude: base.hpp, hip/base.hpp, bf16_bits.hpp, base.hpp, warp.hpp]

constexpr i32 WARP = 64;
typedef u64 LaneMask;

// [prelude: hip/warp.hpp, warp_max.hpp, warp.hpp]

// ---- assignments ----

constexpr int EXPERTS = 8, ROUTED = 8, TOP_K = 2;
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
    i32 *__restrict__ tile_counts,  // [tiles, 8]
    i32 *__restrict__ chunk_counts, // [chunks, 8]
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
    i32 *__restrict__ tile_counts,  // [tiles, 8]
    i32 *__restrict__ chunk_counts, // [chunks, 8]
    i64 *__restrict__ counts,       // [8]
    i64 *__restrict__ offsets,      // [9]
    i32 *__restrict__ row_tiles,    // [9]
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
    const i32 *__restrict__ topk_ids,     // [tokens, 2]
    const i32 *__restrict__ tile_counts,  // [tiles, 8]
    const i32 *__restrict__ chunk_counts, // [chunks, 8]
    const i64 *__restrict__ offsets,      // [9]
    i32 *__restrict__ locations,          // [tokens, 2]
    i32 *__restrict__ slot_rows,          // [tokens, 2]
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
