// gate_topk_bwd: auxiliary losses, and gradients of logits.
//
// A block owns 64 tokens; sums over all tokens are sums of its sums, in order, so
// that they are the same for any number of threads. A token without a choice
// counts nowhere. Baked in: experts, every option of the router, the losses.
// On the stack: values of one token by expert, and a block's sums.

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

// Vectors of 32 bytes: avx2.
enum { LANES = 8 };
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

// Of a NaN and a number these instructions give their second operand, so a NaN
// in `v` passes both of these.
INLINE vec at_most(vec v, vec limit)
{
    __asm__("vminps %0, %1, %0" : "+v"(v) : "v"(limit));
    return v;
}

INLINE vec at_least(vec v, vec limit)
{
    __asm__("vmaxps %0, %1, %0" : "+v"(v) : "v"(limit));
    return v;
}

#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (vec_i32){__VA_ARGS__})
#endif

// The sum of all lanes, as a binary tree.
INLINE f32 sum_lanes(vec v)
{
    v += SHUFFLE(v, v, 4, 5, 6, 7, 0, 1, 2, 3);
    v += SHUFFLE(v, v, 2, 3, 4, 5, 6, 7, 0, 1);
    v += SHUFFLE(v, v, 1, 2, 3, 4, 5, 6, 7, 0);
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

// The lanes of a vector, one by one.
INLINE vec_i32 lane_numbers(void)
{
    return (vec_i32){0, 1, 2, 3, 4, 5, 6, 7};
}

INLINE f32 largest_lane(vec v)
{
    v = at_least(v, SHUFFLE(v, v, 4, 5, 6, 7, 0, 1, 2, 3));
    v = at_least(v, SHUFFLE(v, v, 2, 3, 4, 5, 6, 7, 0, 1));
    v = at_least(v, SHUFFLE(v, v, 1, 2, 3, 4, 5, 6, 7, 0));
    return v[0];
}

// A bit per lane: whether the mask is all ones there.
INLINE u32 lane_bits(vec_i32 mask)
{
    u32 bits;
    __asm__("vmovmskps %1, %0" : "=r"(bits) : "x"(mask));
    return bits;
}

// Writes the lanes where the mask is all ones side by side; returns how many
// they are.
INLINE int append_lanes(i32 *to, vec_i32 v, vec_i32 mask)
{
    int count = 0;
    for (u32 bits = lane_bits(mask); bits != 0; bits &= bits - 1)
        to[count++] = v[__builtin_ctz(bits)];
    return count;
}

// The sums of the lanes of each of `count` vectors, in their order, LANES to a
// vector: each is the binary tree of sum_lanes. `count` is a multiple of LANES.
INLINE void sum_lanes_each(vec *v, int count)
{
    count /= 2;
#pragma GCC unroll 16
    for (int i = 0; i < count; i++)
        v[i] = SHUFFLE(v[2 * i], v[2 * i + 1], 0, 1, 2, 3, 8, 9, 10, 11)
               + SHUFFLE(v[2 * i], v[2 * i + 1], 4, 5, 6, 7, 12, 13, 14, 15);
    count /= 2;
#pragma GCC unroll 16
    for (int i = 0; i < count; i++)
        v[i] = SHUFFLE(v[2 * i], v[2 * i + 1], 0, 1, 4, 5, 8, 9, 12, 13)
               + SHUFFLE(v[2 * i], v[2 * i + 1], 2, 3, 6, 7, 10, 11, 14, 15);
    count /= 2;
#pragma GCC unroll 16
    for (int i = 0; i < count; i++)
        v[i] = SHUFFLE(v[2 * i], v[2 * i + 1], 0, 2, 4, 6, 8, 10, 12, 14)
               + SHUFFLE(v[2 * i], v[2 * i + 1], 1, 3, 5, 7, 9, 11, 13, 15);
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
    EXPERTS = 32, // that are scored, identity experts included
    PADDED_EXPERTS = (EXPERTS + LANES - 1) / LANES * LANES,
    TOP_K = 4,
    TILE_TOKENS = 64,
    TILE_COLUMNS = 128, // of sums over all tokens
};

INLINE int has_choice(const i32 *ids)
{
    int some = 0;
    for (int k = 0; k < TOP_K; k++)
        some |= ids[k] >= 0;
    return some;
}

// The expert of a slot that was drawn out by chance, -2 - id, still has its
// part in what weights are divided by.
INLINE i32 considered(i32 id) { return id < -1 ? -2 - id : id; }

// One token's logits; padding is -inf.
INLINE void load_logits(f32 *z, const f32 *logits, i64 token)
{
    for (int e = 0; e < PADDED_EXPERTS; e++)
        z[e] = e < EXPERTS ? logits[token * EXPERTS + e] : -__builtin_inff();
}

// The largest value that is not NaN. Padding is -inf.
INLINE f32 largest(const f32 *values)
{
    vec most = broadcast(-__builtin_inff());
    for (int i = 0; i < PADDED_EXPERTS; i += LANES)
        most = select(*(const vec *)&values[i] > most, *(const vec *)&values[i], most);
    return largest_lane(most);
}

// to = exp(values - most) / sum; returns the sum.
INLINE f32 softmax(f32 *to, const f32 *values, f32 most)
{
    vec sum = {0};
    for (int i = 0; i < PADDED_EXPERTS; i += LANES) {
        vec e = exp_f32(*(const vec *)&values[i] - most);
        *(vec *)&to[i] = e;
        sum += e;
    }
    f32 whole = sum_lanes(sum);
    for (int i = 0; i < PADDED_EXPERTS; i += LANES)
        *(vec *)&to[i] /= whole;
    return whole;
}

INLINE f32 dot(const f32 *a, const f32 *b)
{
    vec sum = {0};
    for (int i = 0; i < PADDED_EXPERTS; i += LANES)
        sum += *(const vec *)&a[i] * *(const vec *)&b[i];
    return sum_lanes(sum);
}

// d += softmax, backward: p (dp - <p, dp>).
INLINE void add_softmax_back(f32 *d, const f32 *p, const f32 *dp)
{
    f32 mean = dot(p, dp);
    for (int i = 0; i < PADDED_EXPERTS; i += LANES)
        *(vec *)&d[i] += *(const vec *)&p[i] * (*(const vec *)&dp[i] - mean);
}

// ---- from weights to chosen scores ----

// The scores that selection gathered; 0 in masked slots.
static void gather_scores(f32 *chosen, const i32 *ids, const f32 *z)
{
    f32 most = -__builtin_inff(), sum = 0;
    for (int k = 0; k < TOP_K; k++)
        most = ids[k] >= 0 && z[ids[k]] > most ? z[ids[k]] : most;
    for (int k = 0; k < TOP_K; k++)
        sum += chosen[k] = ids[k] >= 0 ? exp_f32(broadcast(z[ids[k]] - most))[0] : 0;
    for (int k = 0; k < TOP_K; k++)
        chosen[k] /= sum;
}

// Renormalisation, scale and learned factors, backward.
static void weigh_back(f32 *dchosen, const f32 *chosen, const i32 *ids, const f32 *dweights)
{
    f32 sum = 0, along = 0;
    for (int k = 0; k < TOP_K; k++)
        sum += chosen[k];
    const f32 whole = 1, slope = 0;
    (void)sum;
    for (int k = 0; k < TOP_K; k++) {
        dchosen[k] = 0;
        if (ids[k] < 0)
            continue;
        f32 ratio = chosen[k] / whole;
        dchosen[k] = dweights[k] * 1.0f;
        along += dchosen[k] * ratio;
    }
    for (int k = 0; k < TOP_K; k++) {
        if (ids[k] == -1)
            continue;
        dchosen[k] = (dchosen[k] - slope * along) / whole;
    }
}

// From gradients of weights to those of logits, which are zero before.
static void weights_back(f32 *d, const f32 *z, const i32 *ids, const f32 *dweights)
{
    f32 chosen[TOP_K], dchosen[TOP_K];
    i32 among[TOP_K];
    for (int k = 0; k < TOP_K; k++)
        among[k] = considered(ids[k]);
    gather_scores(chosen, among, z);
    weigh_back(dchosen, chosen, ids, dweights);
    f32 mean = 0;
    for (int k = 0; k < TOP_K; k++)
        mean += chosen[k] * dchosen[k];
    for (int k = 0; k < TOP_K; k++)
        if (among[k] >= 0)
            d[among[k]] += chosen[k] * (dchosen[k] - mean);
}

static void gate_topk_bwd_block(
    const f32 *restrict logits,            // [tokens, 32]
    const i32 *restrict topk_ids,          // [tokens, 4]
    const f32 *restrict grad_topk_weights, // [tokens, 4]
    f32 *restrict dlogits,                 // [tokens, 32]
    i64 tokens,
    i64 block_x, i64 block_y)
{
    (void)block_y;
    i64 first = block_x * TILE_TOKENS;
    i64 last = min_i64(first + TILE_TOKENS, tokens);
    for (i64 token = first; token < last; token++) {
        const i32 *ids = topk_ids + token * TOP_K;
        const f32 *dweights = grad_topk_weights + token * TOP_K;
        f32 d[PADDED_EXPERTS] ALIGNED = {0}, z[PADDED_EXPERTS] ALIGNED;
        load_logits(z, logits, token);
        if (has_choice(ids)) {
            weights_back(d, z, ids, dweights);
        }
        for (int e = 0; e < EXPERTS; e++)
            dlogits[token * EXPERTS + e] = d[e];
    }
}

EXPORT void gate_topk_bwd(void *const *args, i64 first, i64 last, i64 grid_x)
{
    const f32 *logits = *(const f32 *const *)args[0];
    const i32 *topk_ids = *(const i32 *const *)args[1];
    const f32 *grad_topk_weights = *(const f32 *const *)args[2];
    f32 *dlogits = *(f32 *const *)args[3];
    i64 tokens = *(const i64 *)args[4];
    for (i64 block = first; block < last; block++)
        gate_topk_bwd_block(logits, topk_ids, grad_topk_weights, dlogits, tokens,
            block % grid_x, block / grid_x);
}
