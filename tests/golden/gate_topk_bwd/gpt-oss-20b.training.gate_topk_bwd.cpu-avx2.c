// gate_topk_bwd: auxiliary losses, and gradients of the logits.
//
// A block owns 64 tokens. Sums over all tokens add the sums of the blocks in a fixed order, so
// they are the same for any number of threads. A token without a choice does not count. On the
// stack: values of one token by expert, and the sums of a block.
//
// Baked in: experts, all router options, the losses.

// [prelude: cpu.h, cpu_vector.h, cpu_lanes.h, cpu_exp.h]

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

// Returns whether an expert of the token computed anything. If none did, its logits must not be read,
// because 0 times NaN is NaN.
INLINE int has_gradient(const f32 *dweights)
{
    int some = 0;
    for (int k = 0; k < TOP_K; k++)
        some |= dweights[k] != 0;
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
    const f32 whole = 1, slope = 0;
    f32 along = 0;
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
        if (has_choice(ids) && has_gradient(dweights)) {
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
