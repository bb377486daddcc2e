// expert_scan: from the choices of each token to the rows of each expert.
//
// An assignment is a slot (token * TOP_K + k) with an expert. Assignments get their locations in a
// fixed order, so that results do not depend on threads: each block counts its tile, one block sums
// the counts over tiles, and each block then numbers its tile from there. Identity experts are
// counted and take no rows; an assignment with a negative id takes nothing. On the stack: one
// counter for each expert.
//
// Baked in: experts, slots per token, order, capacity rule.

// [prelude: cpu.h]

enum {
    EXPERTS = 8, // with rows
    ROUTED = 8, // identity experts included
    TOP_K = 2,
    TILE_SLOTS = 4096, // assignments per block
    TILE_ROWS = 384, // rows per tile of the grouped GEMM
};

// The slot whose turn comes `index`-th.
INLINE i64 slot_at(i64 index, i64 tokens) { return index % tokens * TOP_K + index / tokens; }

static void expert_scan_count_block(
    const i32 *restrict topk_ids, // [tokens, 2]
    i32 *restrict tile_counts,    // [tiles, 8]
    i64 tokens,
    i64 block_x, i64 block_y)
{
    (void)block_y;
    i32 *counts = tile_counts + block_x * ROUTED;
    i64 first = block_x * TILE_SLOTS;
    i64 last = min_i64(first + TILE_SLOTS, tokens * TOP_K);
    for (int e = 0; e < ROUTED; e++)
        counts[e] = 0;
    for (i64 index = first; index < last; index++) {
        i32 expert = topk_ids[slot_at(index, tokens)];
        if (expert >= 0 && expert < ROUTED)
            counts[expert]++;
    }
}

// Turns the counts of each tile into the counts of all tiles before it.
INLINE void sum_tiles(i32 *tile_counts, i64 *counts, i64 tokens)
{
    i64 tiles = (tokens * TOP_K + TILE_SLOTS - 1) / TILE_SLOTS;
    i32 before[ROUTED] = {0};
    for (i64 tile = 0; tile < tiles; tile++)
        for (int e = 0; e < ROUTED; e++) {
            i32 count = tile_counts[tile * ROUTED + e];
            tile_counts[tile * ROUTED + e] = before[e];
            before[e] += count;
        }
    for (int e = 0; e < ROUTED; e++)
        counts[e] = before[e];
}

static void expert_scan_offsets_block(
    i32 *restrict tile_counts, // [tiles, 8]
    i64 *restrict counts,      // [8]
    i64 *restrict offsets,     // [9]
    i32 *restrict row_tiles,   // [9]
    i64 tokens,
    i64 block_x, i64 block_y)
{
    (void)block_x;
    (void)block_y;
    sum_tiles(tile_counts, counts, tokens);
    i64 rows = 0;
    i32 tiles = 0;
    for (int e = 0; e < EXPERTS; e++) {
        i64 kept = counts[e];
        offsets[e] = rows;
        row_tiles[e] = tiles;
        rows += kept;
        tiles += (i32)((kept + TILE_ROWS - 1) / TILE_ROWS);
    }
    offsets[EXPERTS] = rows;
    row_tiles[EXPERTS] = tiles;
}

static void expert_scan_place_block(
    const i32 *restrict topk_ids,    // [tokens, 2]
    const i32 *restrict tile_counts, // [tiles, 8]
    const i64 *restrict offsets,     // [9]
    i32 *restrict locations,         // [tokens, 2]
    i32 *restrict slot_rows,         // [tokens, 2]
    i32 *restrict row_slots,         // [rows]
    i64 tokens,
    i64 block_x, i64 block_y)
{
    (void)block_y;
    i64 first = block_x * TILE_SLOTS;
    i64 last = min_i64(first + TILE_SLOTS, tokens * TOP_K);
    i32 next[ROUTED];
    for (int e = 0; e < ROUTED; e++)
        next[e] = tile_counts[block_x * ROUTED + e];
    for (i64 index = first; index < last; index++) {
        i64 slot = slot_at(index, tokens);
        i32 expert = topk_ids[slot];
        locations[slot] = slot_rows[slot] = -1;
        if (expert < 0 || expert >= EXPERTS)
            continue;
        i32 location = next[expert]++;
        i64 row = offsets[expert] + location;
        locations[slot] = location;
        slot_rows[slot] = (i32)row;
        row_slots[row] = (i32)slot;
    }
}

EXPORT void expert_scan_count(void *const *args, i64 first, i64 last, i64 grid_x)
{
    const i32 *topk_ids = *(const i32 *const *)args[0];
    i32 *tile_counts = *(i32 *const *)args[1];
    i64 tokens = *(const i64 *)args[2];
    for (i64 block = first; block < last; block++)
        expert_scan_count_block(topk_ids, tile_counts, tokens, block % grid_x, block / grid_x);
}

EXPORT void expert_scan_offsets(void *const *args, i64 first, i64 last, i64 grid_x)
{
    i32 *tile_counts = *(i32 *const *)args[0];
    i64 *counts = *(i64 *const *)args[1];
    i64 *offsets = *(i64 *const *)args[2];
    i32 *row_tiles = *(i32 *const *)args[3];
    i64 tokens = *(const i64 *)args[4];
    for (i64 block = first; block < last; block++)
        expert_scan_offsets_block(tile_counts, counts, offsets, row_tiles, tokens,
            block % grid_x, block / grid_x);
}

EXPORT void expert_scan_place(void *const *args, i64 first, i64 last, i64 grid_x)
{
    const i32 *topk_ids = *(const i32 *const *)args[0];
    const i32 *tile_counts = *(const i32 *const *)args[1];
    const i64 *offsets = *(const i64 *const *)args[2];
    i32 *locations = *(i32 *const *)args[3];
    i32 *slot_rows = *(i32 *const *)args[4];
    i32 *row_slots = *(i32 *const *)args[5];
    i64 tokens = *(const i64 *)args[6];
    for (i64 block = first; block < last; block++)
        expert_scan_place_block(topk_ids, tile_counts, offsets, locations, slot_rows,
            row_slots, tokens, block % grid_x, block / grid_x);
}
