// route for rocm:gfx942: the router of decode calls (few tokens)
//
// route_logits: a block computes 1 expert by up to 16 tokens, so that many multiprocessors
// share the reading of the weights. A thread sums one of 16 slices of the inner dimension in f32
// (split-K); the partial sums are added in a fixed order. The bits are those of gate_logits, the
// kernel of larger calls.
// route: one block does what gate_topk and expert_scan do in larger calls. A team of 8 lanes selects
// experts and weights for one token at a time and counts them; the block sums the counts to offsets
// and gives every assignment its row.
//
// Shared memory of route_logits:
//   panel   f32 [1][2048]   rows of the matrix, a panel of their length at a time
//
// Shared memory of route:
//   counts    i32 [2][8]   tokens of each expert, by slot
//   counters  i32 [2][8]   the next place of each expert, per warp
//   starts    i32 [9]   where each expert's rows begin
//
// Baked in: model dim 4096, experts 8, top_k 2, all router options.
// Read at run time: the number of tokens.

// [prelude: base.hpp, hip/base.hpp, bf16_bits.hpp, base.hpp, fetch.hpp, warp.hpp]

constexpr i32 WARP = 64;
typedef u64 LaneMask;

// [prelude: hip/warp.hpp, warp_max.hpp, warp.hpp, order.hpp, math/exp.hpp]

// ---- logits ----

constexpr int MODEL_DIM = 4096, EXPERTS = 8;
constexpr int LOGITS_THREADS = 256, LOGITS_TOKENS = 16, LOGITS_EXPERTS = 1;
// The matrix is in shared memory PANEL elements of its rows at a time.
constexpr int PANEL = 2048, PANEL_END = lesser(PANEL, ceil_div(MODEL_DIM, 32) * 32);
// Each part of a sum has PART adjacent elements of every 32.
constexpr int PARTS = 16, PART = 32 / PARTS;
// Tokens that threads take at a time, and how often.
constexpr int ROUND = LOGITS_THREADS / PARTS, ROUNDS = ceil_div(LOGITS_TOKENS, ROUND);

typedef bf16 Activation;
// Elements of a part of a token, or of a row of the matrix, moved at a time.
constexpr int TOKEN_PACK = lesser(pack_width<Activation>(MODEL_DIM), PART), ROW_PACK = pack_width<f32>(MODEL_DIM);
constexpr int TOKEN_PACKS = PART / TOKEN_PACK;
// Parts of a token in flight before a thread multiplies the first.
constexpr int AHEAD = lesser(PANEL_END / 32, 16);
constexpr bool WHOLE = MODEL_DIM % (32 * AHEAD) == 0;  // a token ends with the last of them
static_assert(PANEL_END < PANEL || PANEL % (32 * AHEAD) == 0, "and so does a panel");
// Packs of a panel, and packs in flight to a thread together.
constexpr int ROW_PACKS = LOGITS_EXPERTS * PANEL_END / ROW_PACK, HELD = lesser(ceil_div(ROW_PACKS, LOGITS_THREADS), 8);

KERNEL(LOGITS_THREADS) route_logits(
    const bf16 *__restrict__ x,     // [tokens, 4096]
    const f32 *__restrict__ weight, // [8, 4096]
    f32 *__restrict__ logits,       // [tokens, 8]
    i64 tokens)
{
    await_launches();
    const i32 width = EXPERTS;
    const f32 *matrix = weight;
    f32 *out = logits;
    alignas(16) __shared__ f32 panel[LOGITS_EXPERTS][PANEL_END];
    const i64 first_token = block_x() * LOGITS_TOKENS;
    const i32 first_expert = (i32)block_y() * LOGITS_EXPERTS;
    const i32 part = thread_index() % PARTS, own = thread_index() / PARTS;
    f32 sums[ROUNDS][LOGITS_EXPERTS] = {};

    #pragma unroll 1
    for (i32 depth = 0; depth < MODEL_DIM; depth += PANEL) {
        block_sync();  // the panel before has been used
        const auto row_of = [&](i32 i) { return first_expert + i / (PANEL_END / ROW_PACK); };
        const auto element_of = [&](i32 i) { return depth + i % (PANEL_END / ROW_PACK) * ROW_PACK; };
        const auto in_matrix = [&](i32 i) { return i < ROW_PACKS && row_of(i) < width && element_of(i) < MODEL_DIM; };
        // Elements beyond the end are read from a valid address, because a branch around a load would
        // wait for the loads before it.
        #pragma unroll 1
        for (i32 start = thread_index(); start < ROW_PACKS; start += LOGITS_THREADS * HELD) {
            Pack<f32, ROW_PACK> held[HELD];
            #pragma unroll
            for (i32 n = 0; n < HELD; n++) {
                const i32 i = start + n * LOGITS_THREADS;
                held[n] = load<ROW_PACK>(matrix + (in_matrix(i) ? (i64)row_of(i) * MODEL_DIM + element_of(i) : 0));
            }
            all_fetched();
            #pragma unroll
            for (i32 n = 0; n < HELD; n++) {
                const i32 i = start + n * LOGITS_THREADS;
                if (i < ROW_PACKS)
                    store(&panel[0][0], i, in_matrix(i) ? held[n] : Pack<f32, ROW_PACK>{});
            }
        }
        block_sync();
        #pragma unroll
        for (i32 round = 0; round < ROUNDS; round++) {
            const i64 token = first_token + round * ROUND + own;
            if (token >= tokens || round * ROUND + own >= LOGITS_TOKENS)
                break;
            const Activation *const from = x + token * MODEL_DIM;
            #pragma unroll 1
            for (i32 start = 0; start < PANEL_END && depth + start < MODEL_DIM; start += 32 * AHEAD) {
                const i32 first = depth + start + part * PART;
                const auto exists = [&](i32 k) { return WHOLE || (first + k < MODEL_DIM && start + k < PANEL_END); };
                Pack<Activation, TOKEN_PACK> held[AHEAD][TOKEN_PACKS];
                #pragma unroll
                for (i32 n = 0; n < AHEAD; n++)
                    #pragma unroll
                    for (i32 j = 0; j < TOKEN_PACKS; j++) {
                        const i32 k = n * 32 + j * TOKEN_PACK;
                        held[n][j] = load<TOKEN_PACK>(from + (exists(k) ? first + k : 0));
                    }
                all_fetched();
                #pragma unroll
                for (i32 n = 0; n < AHEAD; n++)
                    #pragma unroll
                    for (i32 i = 0; i < PART; i++) {
                        const i32 k = start + n * 32 + part * PART + i;
                        const Activation element = held[n][i / TOKEN_PACK].at[i % TOKEN_PACK];
                        const f32 value = exists(n * 32 + i / TOKEN_PACK * TOKEN_PACK) ? to_f32(element) : 0.0f;
                        #pragma unroll
                        for (i32 e = 0; e < LOGITS_EXPERTS; e++)
                            if (start + n * 32 < PANEL_END)
                                sums[round][e] = fused(value, panel[e][k], sums[round][e]);
                    }
            }
        }
    }

    #pragma unroll
    for (i32 round = 0; round < ROUNDS; round++)
        #pragma unroll
        for (i32 e = 0; e < LOGITS_EXPERTS; e++) {
            f32 sum = 0.0f;
            #pragma unroll
            for (i32 p = 0; p < PARTS; p++)
                sum += shuffle(sums[round][e], lane_index() / PARTS * PARTS + p);
            const i64 token = first_token + round * ROUND + own;
            const bool exists = round * ROUND + own < LOGITS_TOKENS && token < tokens && first_expert + e < width;
            if (part == 0 && exists)
                out[token * width + first_expert + e] = sum;
        }
}

// ---- selection ----

constexpr int TOP_K = 2;
constexpr int SELECT_THREADS = 512, SELECT_TOKENS = 64;

// A team of LANES adjacent lanes selects for a token.
constexpr int LANES = 8;

DEVICE i32 team_lane() { return lane_index() % LANES; }
DEVICE LaneMask team_lanes() { return (((LaneMask)1 << LANES) - 1) << (lane_index() - team_lane()); }
DEVICE u32 from_team(u32 value, i32 lane) { return shuffle(value, lane_index() - team_lane() + lane); }

// [prelude: warp.hpp, warp_max.hpp]

// The choices of a token: choice k lies in lane k % LANES at place k / LANES.
constexpr int PLACES = ceil_div(TOP_K, LANES);
struct Choices {
    i32 ids[PLACES];
    f32 scores[PLACES];
};

DEVICE i32 choice_at(i32 place) { return place * LANES + team_lane(); }

DEVICE void keep_choice(Choices &choices, i32 k, i32 id, f32 score)
{
    #pragma unroll
    for (i32 p = 0; p < PLACES; p++) {
        choices.ids[p] = choice_at(p) == k ? id : choices.ids[p];
        choices.scores[p] = choice_at(p) == k ? score : choices.scores[p];
    }
}

// Expert s * LANES + lane lies in lane `lane` of a team at slot s.
constexpr int SLOTS = ceil_div(EXPERTS, LANES);

DEVICE i32 expert_at(i32 slot) { return slot * LANES + team_lane(); }

// The value of expert `id`, in every lane of the team.
DEVICE f32 value_of(const f32 (&values)[SLOTS], i32 id)
{
    u32 bits = 0;
    #pragma unroll
    for (i32 s = 0; s < SLOTS; s++)
        bits = expert_at(s) == id ? bits_of(values[s]) : bits;
    return float_of(from_team(bits, id % LANES));
}

DEVICE f32 team_max_score(const f32 (&values)[SLOTS])
{
    u32 key = 0;
    #pragma unroll
    for (i32 s = 0; s < SLOTS; s++) {
        u32 other = expert_at(s) < EXPERTS ? order_key(values[s]) : 0;
        key = other > key ? other : key;
    }
    return score_of_key(team_max(key));
}

// The item with the largest key; of several, the first. Item i lies in lane i % LANES at slot i / LANES.
template <int N> DEVICE i32 best_item(const u32 (&keys)[N])
{
    u32 key = 0;
    i32 item = 0;
    #pragma unroll
    for (i32 s = 0; s < N; s++) {
        item = keys[s] > key ? s * LANES + team_lane() : item;
        key = keys[s] > key ? keys[s] : key;
    }
    u32 best = team_max(key);
    return (i32)~team_max(key == best ? ~(u32)item : 0u);
}

template <int N> DEVICE void remove_item(u32 (&keys)[N], i32 item)
{
    #pragma unroll
    for (i32 s = 0; s < N; s++)
        keys[s] = s * LANES + team_lane() == item ? 0u : keys[s];
}

DEVICE void score_experts(f32 (&values)[SLOTS])
{
    const f32 top = team_max_score(values);
    f32 sum = 0.0f;
    #pragma unroll
    for (i32 s = 0; s < SLOTS; s++) {
        values[s] = expert_at(s) < EXPERTS ? exponential(values[s] - top) : 0.0f;
        sum += values[s];
    }
    sum = team_sum(sum);
    #pragma unroll
    for (i32 s = 0; s < SLOTS; s++)
        values[s] = values[s] / sum;
}

// From chosen scores to weights.
DEVICE void weigh(Choices &choices)
{
    f32 sum = 0.0f;
    #pragma unroll
    for (i32 p = 0; p < PLACES; p++)
        sum += choices.scores[p];
    const f32 denominator = team_sum(sum) + 0.0f;
    #pragma unroll
    for (i32 p = 0; p < PLACES; p++) {
        f32 weight = choices.scores[p] / denominator;
        choices.scores[p] = choices.ids[p] < 0 ? 0.0f : weight;
    }
}

// Counts of a block: a row of tile_counts per slot.
constexpr int COUNT_ROWS = TOP_K, COUNTERS = COUNT_ROWS * EXPERTS;

static DEVICE void gate_topk(
    const f32 *__restrict__ logits, // [tokens, 8]
    i32 *__restrict__ topk_ids,     // [tokens, 2]
    f32 *__restrict__ topk_weights, // [tokens, 2]
    i32 *__restrict__ tile_counts,  // [tiles, 8]
    i64 tokens)
{
    const i64 first = block_x() * SELECT_TOKENS;
    __shared__ i32 counts[COUNTERS];
    for (i32 i = thread_index(); i < COUNTERS; i += SELECT_THREADS)
        counts[i] = 0;
    block_sync();
    // All teams of a warp go round together: those past the last token do as the first, and write
    // nothing.
    #pragma unroll 1
    for (i32 round = warp_index() * (WARP / LANES); round < SELECT_TOKENS && first + round < tokens;
         round += SELECT_THREADS / LANES) {
        const i32 turn = round + lane_index() / LANES;
        const bool exists = turn < SELECT_TOKENS && first + turn < tokens;
        const i64 token = exists ? first + turn : first;
        Choices choices;
        #pragma unroll
        for (i32 p = 0; p < PLACES; p++) {
            choices.ids[p] = -1;
            choices.scores[p] = 0.0f;
        }

        f32 values[SLOTS];
        #pragma unroll
        for (i32 s = 0; s < SLOTS; s++)
            values[s] = logits[token * EXPERTS + lesser(expert_at(s), EXPERTS - 1)];
        all_fetched(values);
        #pragma unroll
        for (i32 s = 0; s < SLOTS; s++)
            values[s] = expert_at(s) < EXPERTS ? values[s] : -infinity();
        // The order of logits is the order of scores, and finer.
        u32 keys[SLOTS];
        #pragma unroll
        for (i32 s = 0; s < SLOTS; s++)
            keys[s] = expert_at(s) < EXPERTS ? order_key(values[s]) : 0u;
        score_experts(values);

        #pragma unroll 1
        for (i32 k = 0; k < TOP_K; k++) {
            const i32 id = best_item(keys);
            remove_item(keys, id);
            keep_choice(choices, k, id, value_of(values, id));
        }
        weigh(choices);
        #pragma unroll
        for (i32 p = 0; p < PLACES; p++) {
            if (choice_at(p) < TOP_K && exists) {
                topk_ids[token * TOP_K + choice_at(p)] = choices.ids[p];
                topk_weights[token * TOP_K + choice_at(p)] = choices.scores[p];
                if (choices.ids[p] >= 0)
                    shared_add(&counts[choice_at(p) * EXPERTS + choices.ids[p]], 1);
            }
        }
    }

    // Sums of integers: the order in which threads added them does not show.
    block_sync();
    const i64 tiles = (tokens + SELECT_TOKENS - 1) / SELECT_TOKENS;
    for (i32 i = thread_index(); i < COUNTERS; i += SELECT_THREADS)
        tile_counts[(i / EXPERTS * tiles + block_x()) * EXPERTS + i % EXPERTS] = counts[i];
}

// A namespace, because the gate shares some names with expert_scan.
namespace scan {

// ---- assignments ----

constexpr int EXPERTS = 8, ROUTED = 8, TOP_K = 2;
constexpr int THREADS = 512, WARPS = 2;  // that place
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

// Replaces the counts of each tile by the sums over all tiles before it, and writes the sums
// over all tiles. There are few.
static DEVICE void expert_scan_sum(
    i32 *__restrict__ tile_counts, // [tiles, 8]
    i64 *__restrict__ counts,      // [8]
    i64 tokens)
{
    const i64 tiles = tiles_of(tokens);
    for (i32 expert = thread_index(); expert < ROUTED; expert += THREADS) {
        i32 before = 0;
        for (i64 row = 0; row < tiles; row++) {
            const i32 count = tile_counts[row * ROUTED + expert];
            tile_counts[row * ROUTED + expert] = before;
            before += count;
        }
        counts[expert] = before;
    }
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

static DEVICE void expert_scan_place(
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
    i32 *next = counters[exists ? warp_index() : 0];
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

}  // namespace scan

// ---- all of it ----

KERNEL(SELECT_THREADS) route(
    const f32 *__restrict__ logits, // [tokens, 8]
    i32 *__restrict__ topk_ids,     // [tokens, 2]
    f32 *__restrict__ topk_weights, // [tokens, 2]
    i32 *__restrict__ tile_counts,  // [tiles, 8]
    i64 *__restrict__ counts,       // [8]
    i64 *__restrict__ offsets,      // [9]
    i32 *__restrict__ row_tiles,    // [9]
    i32 *__restrict__ locations,    // [tokens, 2]
    i32 *__restrict__ slot_rows,    // [tokens, 2]
    i32 *__restrict__ row_slots,    // [rows]
    i64 tokens)
{
    await_launches();
    if (tokens > 0)
        gate_topk(logits, topk_ids, topk_weights, tile_counts, tokens);
    block_sync();  // choices and their counts are there
    scan::expert_scan_sum(tile_counts, counts, tokens);
    // A thread reads the counts that it has summed, and all wait before what is of tiles.
    scan::expert_scan_place(topk_ids, tile_counts, counts, offsets, row_tiles, locations,
            slot_rows, row_slots, tokens);
}
