// gate_topk for rocm:gfx942: scores, choices and weights of each token
//
// gate_logits: a block computes 32 tokens by 8 experts. Groups of threads sum
// slices of the inner dimension in f32 (split-K); the partial sums are added in a fixed order.
// gate_topk: a block selects for 64 tokens; 8 adjacent lanes are the team of one token at a time.
// Lane l holds the scores of experts l, l + 8, ... in registers.
// The team finds the maximum 2 times.
// It also counts the tokens of each expert in each slot, for expert_scan.
//
// Shared memory of gate_logits: two buffers of each operand; the block fills one
// while it multiplies the other.
//   left   f32 [32][32 + pad]   x, transposed
//   right  f32 [32][8 + pad]   rows of the matrix, transposed
// and a single
//   parts  f32 [slices][32][8]   partial sums of each group of threads
//
// Shared memory of gate_topk:
//   counts  i32 [2][8]   tokens of each expert, by slot
//
// Baked in: model dim 4096, experts 8, top_k 2, all router options.
// Read at run time: the number of tokens.

// [prelude: base.hpp, hip/base.hpp, bf16_bits.hpp, base.hpp, fetch.hpp, warp.hpp]

constexpr i32 WARP = 64;
typedef u64 LaneMask;

// [prelude: hip/warp.hpp, warp_max.hpp, warp.hpp, order.hpp, math/exp.hpp, tile_gemm.hpp, stage.hpp, multiply.hpp]

// ---- logits ----

constexpr int MODEL_DIM = 4096, EXPERTS = 8;
constexpr int LOGITS_THREADS = 256;
constexpr int TILE_TOKENS = 32, TILE_EXPERTS = 8, TILE_DEPTH = 32;
// Threads form SLICES grids, each of which multiplies its part of every depth; a thread of a grid owns
// 4 x 4 sums.
constexpr int THREAD_ROWS = 4, THREAD_COLUMNS = 4;
constexpr int ROW_THREADS = TILE_TOKENS / THREAD_ROWS, COLUMN_THREADS = TILE_EXPERTS / THREAD_COLUMNS;
constexpr int GRID = ROW_THREADS * COLUMN_THREADS, SLICES = LOGITS_THREADS / GRID, SLICE = TILE_DEPTH / SLICES;
static_assert(SLICES * GRID == LOGITS_THREADS, "every thread is in a grid");
static_assert(SLICE * SLICES == TILE_DEPTH, "every grid has its part of the depth");

typedef bf16 Activation;
typedef Stage<Activation, TILE_TOKENS, TILE_DEPTH, MODEL_DIM, LOGITS_THREADS> TokenStage;
typedef Stage<f32, TILE_EXPERTS, TILE_DEPTH, MODEL_DIM, LOGITS_THREADS> MatrixStage;

KERNEL(LOGITS_THREADS) gate_logits(
    const bf16 *__restrict__ x,     // [tokens, 4096]
    const f32 *__restrict__ weight, // [8, 4096]
    f32 *__restrict__ logits,       // [tokens, 8]
    i64 tokens)
{
    await_launches();
    const i32 width = EXPERTS;
    const f32 *matrix = weight;
    f32 *out = logits;
    alignas(16) __shared__ f32 left[2][TILE_DEPTH][TILE_TOKENS + PAD];
    alignas(16) __shared__ f32 right[2][TILE_DEPTH][TILE_EXPERTS + PAD];
    __shared__ f32 parts[SLICES][TILE_TOKENS][TILE_EXPERTS];
    const i64 first_token = block_x() * TILE_TOKENS;
    const i32 rows = (i32)(tokens - first_token);
    const i32 first_column = (i32)block_y() * TILE_EXPERTS, columns = width - first_column;
    x += first_token * MODEL_DIM;
    matrix += (i64)first_column * MODEL_DIM;

    TokenStage token_stage;
    MatrixStage matrix_stage;
    auto fetch = [&](i32 depth) {
        token_stage.fetch(x, rows, depth);
        matrix_stage.fetch(matrix, columns, depth);
    };
    auto put = [&](i32 buffer) {
        token_stage.put(left[buffer], 0);
        matrix_stage.put(right[buffer], 0);
    };

    const i32 slice = thread_index() / GRID, thread = thread_index() % GRID;
    f32 sums[THREAD_ROWS][THREAD_COLUMNS] = {};
    auto add = [&](i32 buffer) {
        multiply<ROW_THREADS, COLUMN_THREADS, SLICE>(sums, left[buffer], right[buffer], thread, slice * SLICE);
    };
    fetch(0);
    put(0);
    block_sync();
    i32 buffer = 0;
    #pragma unroll 1
    for (i32 depth = TILE_DEPTH; depth < MODEL_DIM; depth += TILE_DEPTH, buffer ^= 1) {
        fetch(depth);
        add(buffer);
        put(buffer ^ 1);
        block_sync();
    }
    add(buffer);

    #pragma unroll
    for (i32 i = 0; i < THREAD_ROWS; i++) {
        const i32 row = dealt<THREAD_ROWS, ROW_THREADS>(thread / COLUMN_THREADS, i);
        #pragma unroll
        for (i32 j = 0; j < THREAD_COLUMNS; j++)
            parts[slice][row][dealt<THREAD_COLUMNS, COLUMN_THREADS>(thread % COLUMN_THREADS, j)] = sums[i][j];
    }
    block_sync();
    for (i32 i = thread_index(); i < TILE_TOKENS * TILE_EXPERTS; i += LOGITS_THREADS) {
        const i32 row = i / TILE_EXPERTS, column = i % TILE_EXPERTS;
        f32 sum = 0.0f;
        #pragma unroll
        for (i32 s = 0; s < SLICES; s++)
            sum += parts[s][row][column];
        if (row < rows && column < columns)
            out[(first_token + row) * width + first_column + column] =
                sum;
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

KERNEL(SELECT_THREADS) gate_topk(
    const f32 *__restrict__ logits, // [tokens, 8]
    i32 *__restrict__ topk_ids,     // [tokens, 2]
    f32 *__restrict__ topk_weights, // [tokens, 2]
    i32 *__restrict__ tile_counts,  // [tiles, 8]
    i64 tokens)
{
    await_launches();
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
