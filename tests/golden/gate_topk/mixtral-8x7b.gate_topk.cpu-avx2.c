// gate_topk: from tokens to their experts and weights.
//
// gate_logits: a block computes 16 tokens by 8 experts. gate_topk: a block selects for 32 tokens.
// Every sum runs over the model dimension in the same order, whatever the batch. On the stack: a
// depth slice of the tokens, or the scores of one token.
//
// Baked in: widths, experts, all router options.

// [prelude: cpu.h, cpu_vector.h, cpu_lanes.h, cpu_bf16.h, cpu_vector.h, cpu_exp.h]

enum {
    MODEL_DIM = 4096,
    EXPERTS = 8, // that are scored, identity experts included
    TOP_K = 2,
    TILE_TOKENS = 16,
    TILE_EXPERTS = 8,
    TILE_DEPTH = 512,
    SELECT_TILE_TOKENS = 32,
};

enum {
    COLUMNS = 8, // of the projection: rows of its matrix
    COLUMN_TILES = (COLUMNS + TILE_EXPERTS - 1) / TILE_EXPERTS,
    REGISTER_TOKENS = 4,
    REGISTER_COLUMNS = 2,
    REGISTER_SUMS = REGISTER_TOKENS * REGISTER_COLUMNS,
};

// The sums of a tile: register tile by register tile, a token's side by side.
typedef f32 tile_sums[TILE_TOKENS / REGISTER_TOKENS][TILE_EXPERTS / REGISTER_COLUMNS][REGISTER_SUMS];

INLINE f32 sum_at(tile_sums sums, i64 token, i64 column)
{
    const i64 at = token % REGISTER_TOKENS * REGISTER_COLUMNS + column % REGISTER_COLUMNS;
    return sums[token / REGISTER_TOKENS][column / REGISTER_COLUMNS][at];
}

// First token and column of a block. Blocks that follow each other share their
// tokens, which are then still cached.
INLINE void place_tile(i64 *token, i64 *column, i64 block_x, i64 block_y, i64 tokens)
{
    const i64 block = block_y * ((tokens + TILE_TOKENS - 1) / TILE_TOKENS) + block_x;
    *token = block / COLUMN_TILES * TILE_TOKENS;
    *column = block % COLUMN_TILES * TILE_EXPERTS;
}

// A depth slice of a tile of tokens as f32, padded with zeros.
typedef f32 token_slice[TILE_TOKENS][TILE_DEPTH];

static void load_slice(token_slice slice, const bf16 *x, i64 first, i64 tokens, i64 depth)
{
    i64 width = min_i64(TILE_DEPTH, MODEL_DIM - depth);
    for (i64 t = 0; t < TILE_TOKENS; t++) {
        // Tokens past the end are copies of the last one.
        const bf16 *from = x + min_i64(first + t, tokens - 1) * MODEL_DIM + depth;
        for (i64 i = 0; i < width; i += LANES) {
            const i64 left = width - i;
            vec v = left >= LANES ? load_bf16(from + i) : load_part_bf16(from + i, left);
            store_f32(&slice[t][i], v);
        }
    }
}

// Adds the products of REGISTER_TOKENS tokens with REGISTER_COLUMNS rows of the
// matrix over one depth slice, while a row of the next ones comes nearer.
static void add_products(f32 *sums, const f32 (*slice)[TILE_DEPTH], const f32 *const *rows, const f32 *next, i64 width)
{
    vec sum[REGISTER_SUMS] = {0};
    for (i64 i = 0; i < width; i += LANES) {
        const int whole = MODEL_DIM % LANES == 0 || width - i >= LANES;
        vec w[REGISTER_COLUMNS];
        __builtin_prefetch(next + i);
#pragma GCC unroll 4
        for (int c = 0; c < REGISTER_COLUMNS; c++)
            w[c] = whole ? load_f32(rows[c] + i) : load_part_f32(rows[c] + i, width - i);
#pragma GCC unroll 4
        for (int t = 0; t < REGISTER_TOKENS; t++) {
            vec x = *(const vec *)&slice[t][i];
#pragma GCC unroll 4
            for (int c = 0; c < REGISTER_COLUMNS; c++)
                sum[t * REGISTER_COLUMNS + c] += x * w[c];
        }
    }
    sum_lanes_each(sum, REGISTER_SUMS);
    for (int i = 0; i < REGISTER_SUMS / LANES; i++)
        *(vec *)&sums[i * LANES] += sum[i];
}

// sums = x times the transposed matrix, for one tile.
static void project(tile_sums sums, const bf16 *x, const f32 *matrix,
                    i64 token, i64 column, i64 tokens)
{
    token_slice slice ALIGNED;
    i64 token_count = min_i64(TILE_TOKENS, tokens - token);
    i64 column_count = min_i64(TILE_EXPERTS, COLUMNS - column);
    for (i64 depth = 0; depth < MODEL_DIM; depth += TILE_DEPTH) {
        i64 width = min_i64(TILE_DEPTH, MODEL_DIM - depth);
        load_slice(slice, x, token, tokens, depth);
        for (i64 c = 0; c < column_count; c += REGISTER_COLUMNS) {
            const f32 *rows[2 * REGISTER_COLUMNS]; // these, the next; past the end the last one again
            for (i64 i = 0; i < 2 * REGISTER_COLUMNS; i++)
                rows[i] = matrix + min_i64(column + c + i, COLUMNS - 1) * MODEL_DIM + depth;
            for (i64 t = 0; t < token_count; t += REGISTER_TOKENS) {
                const f32 *next = rows[REGISTER_COLUMNS + t / REGISTER_TOKENS % REGISTER_COLUMNS];
                add_products(sums[t / REGISTER_TOKENS][c / REGISTER_COLUMNS], slice + t, rows, next, width);
            }
        }
    }
}

static void gate_logits_block(
    const bf16 *restrict x,     // [tokens, 4096]
    const f32 *restrict weight, // [8, 4096]
    f32 *restrict logits,       // [tokens, 8]
    i64 tokens,
    i64 block_x, i64 block_y)
{
    i64 token, expert;
    place_tile(&token, &expert, block_x, block_y, tokens);
    tile_sums sums ALIGNED = {0};
    project(sums, x, weight, token, expert, tokens);
    for (i64 t = 0; t < min_i64(TILE_TOKENS, tokens - token); t++)
        for (i64 e = 0; e < min_i64(TILE_EXPERTS, EXPERTS - expert); e++)
            logits[(token + t) * EXPERTS + expert + e] = sum_at(sums, t, e);
}

enum { PADDED_EXPERTS = (EXPERTS + LANES - 1) / LANES * LANES };

// The scores of one token.
typedef struct {
    f32 score[PADDED_EXPERTS] ALIGNED; // of every expert; padding is -inf
} candidates;

// A higher value comes first, NaN last. Equal values keep their order.
INLINE int beats(f32 a, f32 b) { return a > b || (b != b && a == a); }

// The best `wanted` of `count` keys, best first.
static void select_best(i32 *best, int wanted, const f32 *key, int count)
{
    int found = 0;
    for (int i = 0; i < count; i++) {
        if (found == wanted && !beats(key[i], key[best[found - 1]]))
            continue;
        int at = found < wanted ? found++ : found - 1;
        for (; at > 0 && beats(key[i], key[best[at - 1]]); at--)
            best[at] = best[at - 1];
        best[at] = i;
    }
}

enum {
    BOUND_LANES = (2 * TOP_K + LANES - 1) / LANES * LANES, // parts of the keys
    SHORT_LIST = 2 * BOUND_LANES, // keys that are ranked by comparing each with each
};

// For each of LANES values from `at` on, how many of all `count` come before
// it: larger ones, and equal ones at an earlier place.
INLINE vec_i32 count_ahead(const f32 *values, int count, int at)
{
    const vec own = *(const vec *)&values[at];
    const vec_i32 place = lane_numbers() + at;
    vec_i32 ahead = {0};
    for (int i = 0; i < count; i++) {
        const vec other = broadcast(values[i]);
        ahead -= (other > own) | ((other == own) & (place > i));
    }
    return ahead;
}

// Returns a bound that at least TOP_K keys reach, and hardly more: the TOP_K-th among the largest keys
// of each part. -inf if there are too few numbers.
INLINE f32 bound_of_best(const f32 *key)
{
    f32 most[BOUND_LANES] ALIGNED;
    for (int i = 0; i < BOUND_LANES; i += LANES) {
        vec part = broadcast(-__builtin_inff());
        for (int e = i; e < PADDED_EXPERTS; e += BOUND_LANES)
            part = select(*(const vec *)&key[e] > part, *(const vec *)&key[e], part);
        *(vec *)&most[i] = part;
    }
    vec least = broadcast(__builtin_inff());
    for (int i = 0; i < BOUND_LANES; i += LANES) {
        const vec own = *(const vec *)&most[i];
        least = at_most(least, select(count_ahead(most, BOUND_LANES, i) < TOP_K, own, least));
    }
    return -largest_lane(-least);
}

// The best TOP_K of the keys of all experts, best first. Few keys reach a bound
// that the best do; those are ranked.
static void select_top(i32 *best, f32 *key)
{
    for (int e = EXPERTS; e < PADDED_EXPERTS; e++)
        key[e] = -__builtin_inff();
    const f32 bound = bound_of_best(key);
    i32 id[PADDED_EXPERTS + LANES] ALIGNED;
    int found = 0;
    for (int e = 0; e < PADDED_EXPERTS; e += LANES)
        found += append_lanes(id + found, lane_numbers() + e, *(const vec *)&key[e] >= bound);
    // Too few numbers, or too many that are equal.
    if (bound == -__builtin_inff() || found > SHORT_LIST) {
        select_best(best, TOP_K, key, EXPERTS);
        return;
    }
    f32 value[SHORT_LIST] ALIGNED = {0};
    i32 ahead[SHORT_LIST] ALIGNED, ranked[SHORT_LIST];
    for (int i = 0; i < found; i++)
        value[i] = key[id[i]];
    for (int i = 0; i < found; i += LANES)
        *(vec_i32 *)&ahead[i] = count_ahead(value, found, i);
    for (int i = 0; i < found; i++)
        ranked[ahead[i]] = id[i];
    for (int k = 0; k < TOP_K; k++)
        best[k] = ranked[k];
}

// The largest value that is not NaN; -inf if there is none. Padding is -inf.
INLINE f32 largest(const f32 *values, int padded)
{
    vec most = broadcast(-__builtin_inff());
    for (int i = 0; i < padded; i += LANES)
        most = select(*(const vec *)&values[i] > most, *(const vec *)&values[i], most);
    return largest_lane(most);
}

// values = exp(values - max) / sum, over whole vectors; padding is -inf.
INLINE void softmax(f32 *values, int padded)
{
    vec most = broadcast(largest(values, padded)), sum = {0};
    for (int i = 0; i < padded; i += LANES) {
        vec e = exp_f32(*(vec *)&values[i] - most);
        *(vec *)&values[i] = e;
        sum += e;
    }
    vec whole = broadcast(sum_lanes(sum));
    for (int i = 0; i < padded; i += LANES)
        *(vec *)&values[i] /= whole;
}

// Turns logits into scores.
INLINE void score_experts(candidates *c)
{
    softmax(c->score, PADDED_EXPERTS);
}

// The scores of the selected experts. A negative id is a masked slot.
INLINE void gather_scores(f32 *weights, const i32 *ids, const candidates *c)
{
    for (int k = 0; k < TOP_K; k++)
        weights[k] = ids[k] >= 0 ? c->score[ids[k]] : 0;
}

static const f32 RENORMALIZE_EPS = 0.0f;

// The sum of chosen scores.
INLINE f32 sum_chosen(const f32 *chosen)
{
    f32 sum = 0;
    for (int k = 0; k < TOP_K; k++)
        sum += chosen[k];
    return sum;
}

// Returns the divisor of chosen scores.
INLINE f32 denominator(f32 sum)
{
    return sum + RENORMALIZE_EPS;
}

// From selected scores to weights.
INLINE void finish_weights(f32 *weights, const i32 *ids)
{
    const f32 whole = denominator(sum_chosen(weights));
    for (int k = 0; k < TOP_K; k++) {
        if (ids[k] < 0)
            continue;
        weights[k] = weights[k] / whole * 1.0f;
    }
}

static void gate_topk_block(
    const f32 *restrict logits, // [tokens, 8]
    i32 *restrict topk_ids,     // [tokens, 2]
    f32 *restrict topk_weights, // [tokens, 2]
    i64 tokens,
    i64 block_x, i64 block_y)
{
    (void)block_y;
    i64 first = block_x * SELECT_TILE_TOKENS;
    i64 last = min_i64(first + SELECT_TILE_TOKENS, tokens);
    for (i64 token = first; token < last; token++) {
        i32 *ids = topk_ids + token * TOP_K;
        f32 *weights = topk_weights + token * TOP_K;
        candidates c;
        for (int e = 0; e < PADDED_EXPERTS; e++)
            c.score[e] = e < EXPERTS ? logits[token * EXPERTS + e] : -__builtin_inff();
        // The order of logits is the order of scores, and finer.
        select_top(ids, c.score);
        score_experts(&c);
        gather_scores(weights, ids, &c);
        finish_weights(weights, ids);
    }
}

EXPORT void gate_logits(void *const *args, i64 first, i64 last, i64 grid_x)
{
    const bf16 *x = *(const bf16 *const *)args[0];
    const f32 *weight = *(const f32 *const *)args[1];
    f32 *logits = *(f32 *const *)args[2];
    i64 tokens = *(const i64 *)args[3];
    for (i64 block = first; block < last; block++)
        gate_logits_block(x, weight, logits, tokens, block % grid_x, block / grid_x);
}

EXPORT void gate_topk(void *const *args, i64 first, i64 last, i64 grid_x)
{
    const f32 *logits = *(const f32 *const *)args[0];
    i32 *topk_ids = *(i32 *const *)args[1];
    f32 *topk_weights = *(f32 *const *)args[2];
    i64 tokens = *(const i64 *)args[3];
    for (i64 block = first; block < last; block++)
        gate_topk_block(logits, topk_ids, topk_weights, tokens, block % grid_x, block / grid_x);
}
