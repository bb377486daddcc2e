// gate_topk: from tokens to experts and their weights.
//
// A logits block owns 16 tokens and 8 experts; a selection block owns 32 tokens.
// Every sum runs over the model dimension in the same order, whatever the
// batch. Baked in: widths, experts, every option of the router. On the stack:
// a depth slice of the tokens, or the scores of one token.

// Names for the types of tensors. No header is included: this is all there is.
typedef __INT32_TYPE__ i32;
typedef __INT64_TYPE__ i64;
typedef __UINT16_TYPE__ u16;
typedef __UINT32_TYPE__ u32;
typedef __UINT64_TYPE__ u64;
typedef float f32;
typedef double f64;
typedef u16 bf16; // the upper half of an f32
typedef u16 f16;  // IEEE binary16

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline, unused))
#define ALIGNED __attribute__((aligned(64)))

INLINE i64 min_i64(i64 a, i64 b) { return a < b ? a : b; }
INLINE i64 max_i64(i64 a, i64 b) { return a > b ? a : b; }

// Vectors of 16 bytes: portable.
enum { LANES = 4 };
typedef f32 vec __attribute__((vector_size(4 * LANES), may_alias));
typedef i32 vec_i32 __attribute__((vector_size(4 * LANES), may_alias));
typedef u32 vec_u32 __attribute__((vector_size(4 * LANES), may_alias));
typedef u16 vec_u16 __attribute__((vector_size(2 * LANES), may_alias));
typedef vec vec_in_memory __attribute__((aligned(4)));
typedef vec_u16 vec_u16_in_memory __attribute__((aligned(2)));

INLINE vec broadcast(f32 value) { return value - (vec){0}; }

// Per lane: where the mask is all ones `a`, where it is zero `b`.
INLINE vec select(vec_i32 mask, vec a, vec b)
{
    return (vec)((mask & (vec_i32)a) | (~mask & (vec_i32)b));
}

// A comparison with NaN is false, so a NaN in `v` passes both of these.
INLINE vec at_most(vec v, vec limit) { return select(v > limit, limit, v); }
INLINE vec at_least(vec v, vec limit) { return select(v < limit, limit, v); }

#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (vec_i32){__VA_ARGS__})
#endif

// The sum of all lanes, as a binary tree.
INLINE f32 sum_lanes(vec v)
{
    v += SHUFFLE(v, v, 2, 3, 0, 1);
    v += SHUFFLE(v, v, 1, 2, 3, 0);
    return v[0];
}

INLINE vec load_f32(const f32 *from) { return *(const vec_in_memory *)from; }
INLINE void store_f32(f32 *to, vec v) { *(vec_in_memory *)to = v; }

// The first `count` elements; the other lanes are zero, or stay as they are.
INLINE vec load_part_f32(const f32 *from, i64 count)
{
    f32 part[LANES] ALIGNED = {0};
    for (int i = 0; i < LANES; i++)
        if (i < count)
            part[i] = from[i];
    return *(const vec *)part;
}

INLINE void store_part_f32(f32 *to, vec v, i64 count)
{
    f32 part[LANES] ALIGNED;
    *(vec *)part = v;
    for (int i = 0; i < LANES; i++)
        if (i < count)
            to[i] = part[i];
}

// bf16: the upper half of an f32.
INLINE vec f32_of_bf16(vec_u16 v) { return (vec)(__builtin_convertvector(v, vec_u32) << 16); }

// Rounds to nearest, ties to even. A NaN stays one: it is made quiet.
INLINE vec_u16 bf16_of_f32(vec v)
{
    vec_u32 bits = (vec_u32)v;
    vec_u32 nearest = bits + 0x7fff + ((bits >> 16) & 1);
    vec rounded = select(v == v, (vec)nearest, (vec)(bits | 0x400000));
    return __builtin_convertvector((vec_u32)rounded >> 16, vec_u16);
}

INLINE vec load_bf16(const bf16 *from) { return f32_of_bf16(*(const vec_u16_in_memory *)from); }
INLINE void store_bf16(bf16 *to, vec v) { *(vec_u16_in_memory *)to = bf16_of_f32(v); }

INLINE vec load_part_bf16(const bf16 *from, i64 count)
{
    bf16 part[LANES] ALIGNED = {0};
    for (int i = 0; i < LANES; i++)
        if (i < count)
            part[i] = from[i];
    return load_bf16(part);
}

INLINE void store_part_bf16(bf16 *to, vec v, i64 count)
{
    bf16 part[LANES] ALIGNED;
    store_bf16(part, v);
    for (int i = 0; i < LANES; i++)
        if (i < count)
            to[i] = part[i];
}

// e to the x, to about 1 ulp, into the subnormals; inf, zero and NaN as usual.
// x = n ln 2 + r, a Taylor polynomial for r, and two steps to 2 to the n,
// since one power of two cannot reach every result.
INLINE vec exp_f32(vec x)
{
    x = at_most(at_least(x, broadcast(-105.0f)), broadcast(90.0f));
    const f32 to_integer = 0x1.8p23f; // adding it leaves no bits for a fraction
    vec n = (x * 0x1.715476p0f + to_integer) - to_integer;
    vec r = x - n * 0x1.62e4p-1f; // ln 2 in two parts; the first product is exact
    r = r - n * 0x1.7f7d1cp-20f;
    vec p = broadcast(1.0f / 5040);
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = (p * r) * r + r + 1.0f;
    vec_i32 power = __builtin_convertvector(n, vec_i32);
    vec_i32 half = power >> 1;
    return p * (vec)((half + 127) << 23) * (vec)((power - half + 127) << 23);
}

INLINE vec sigmoid_f32(vec x) { return 1.0f / (1.0f + exp_f32(-x)); }

enum {
    MODEL_DIM = 256,
    EXPERTS = 8, // that are scored, identity experts included
    TOP_K = 2,
    TILE_TOKENS = 16,
    TILE_EXPERTS = 8,
    TILE_DEPTH = 256,
    SELECT_TILE_TOKENS = 32,
};

enum {
    COLUMNS = 8, // of the projection: rows of its matrix
    REGISTER_TOKENS = 4,
    REGISTER_COLUMNS = 4,
};

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
// matrix over one depth slice.
static void add_products(f32 sums[][TILE_EXPERTS], const f32 (*slice)[TILE_DEPTH],
                         const f32 *const *rows, i64 width)
{
    vec sum[REGISTER_TOKENS][REGISTER_COLUMNS] = {0};
    for (i64 i = 0; i < width; i += LANES) {
        const i64 left = width - i;
        vec w[REGISTER_COLUMNS];
#pragma GCC unroll 4
        for (int c = 0; c < REGISTER_COLUMNS; c++)
            w[c] = left >= LANES ? load_f32(rows[c] + i) : load_part_f32(rows[c] + i, left);
#pragma GCC unroll 4
        for (int t = 0; t < REGISTER_TOKENS; t++) {
            vec x = *(const vec *)&slice[t][i];
#pragma GCC unroll 4
            for (int c = 0; c < REGISTER_COLUMNS; c++)
                sum[t][c] += x * w[c];
        }
    }
    for (int t = 0; t < REGISTER_TOKENS; t++)
        for (int c = 0; c < REGISTER_COLUMNS; c++)
            sums[t][c] += sum_lanes(sum[t][c]);
}

// sums = x times the transposed matrix, for one tile.
static void project(f32 sums[TILE_TOKENS][TILE_EXPERTS], const bf16 *x, const f32 *matrix,
                    i64 token, i64 column, i64 tokens)
{
    token_slice slice ALIGNED;
    i64 token_count = min_i64(TILE_TOKENS, tokens - token);
    i64 column_count = min_i64(TILE_EXPERTS, COLUMNS - column);
    for (i64 depth = 0; depth < MODEL_DIM; depth += TILE_DEPTH) {
        i64 width = min_i64(TILE_DEPTH, MODEL_DIM - depth);
        load_slice(slice, x, token, tokens, depth);
        for (i64 c = 0; c < column_count; c += REGISTER_COLUMNS) {
            const f32 *rows[REGISTER_COLUMNS]; // past the end: the last one again
            for (i64 i = 0; i < REGISTER_COLUMNS; i++)
                rows[i] = matrix + min_i64(column + c + i, COLUMNS - 1) * MODEL_DIM + depth;
            for (i64 t = 0; t < token_count; t += REGISTER_TOKENS)
                add_products((f32(*)[TILE_EXPERTS])&sums[t][c], slice + t, rows, width);
        }
    }
}

static void gate_logits_block(
    const bf16 *restrict x,     // [tokens, 256]
    const f32 *restrict weight, // [8, 256]
    f32 *restrict logits,       // [tokens, 8]
    i64 tokens,
    i64 block_x, i64 block_y)
{
    i64 token = block_x * TILE_TOKENS, expert = block_y * TILE_EXPERTS;
    f32 sums[TILE_TOKENS][TILE_EXPERTS] ALIGNED = {0};
    project(sums, x, weight, token, expert, tokens);
    for (i64 t = 0; t < min_i64(TILE_TOKENS, tokens - token); t++)
        for (i64 e = 0; e < min_i64(TILE_EXPERTS, EXPERTS - expert); e++)
            logits[(token + t) * EXPERTS + expert + e] = sums[t][e];
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

// The largest value that is not NaN; -inf if there is none.
INLINE f32 largest(const f32 *values, int count)
{
    f32 most = -__builtin_inff();
    for (int i = 0; i < count; i++)
        most = values[i] > most ? values[i] : most;
    return most;
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

// From selected scores to weights.
INLINE void finish_weights(f32 *weights, const i32 *ids)
{
    f32 sum = 0;
    for (int k = 0; k < TOP_K; k++)
        sum += weights[k];
    f32 whole = sum + 0.0f;
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
        select_best(ids, TOP_K, c.score, EXPERTS);
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
