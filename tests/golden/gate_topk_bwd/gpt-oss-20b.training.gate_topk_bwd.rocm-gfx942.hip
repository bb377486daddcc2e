// gate_topk_bwd for rocm:gfx942: auxiliary losses, and gradients of the logits
//
// A block owns 32 tokens; a warp takes one at a time. Lane l holds the values of
// experts l, l + 64, ... in registers. Sums over all tokens add the sums of the blocks in a
// fixed order. A token without a choice does not count.
//
// Baked in: experts 32, top_k 4, all router options, the losses.
// Read at run time: the number of tokens.

// [prelude: base.hpp, hip/base.hpp, bf16_bits.hpp, base.hpp, warp.hpp]

constexpr i32 WARP = 64;
typedef u64 LaneMask;

// [prelude: hip/warp.hpp, warp_max.hpp, warp.hpp, order.hpp, math/exp.hpp]

// ---- one token ----

constexpr int EXPERTS = 32, TOP_K = 4;
constexpr int THREADS = 128;
constexpr int LANES = 64, TEAMS = THREADS / LANES;
constexpr int TILE_TOKENS = 32;

// The team of a token is a warp.
DEVICE i32 team_lane() { return lane_index(); }
DEVICE i32 team_index() { return warp_index(); }
DEVICE u32 from_team(u32 value, i32 lane) { return shuffle(value, lane); }
DEVICE f32 team_sum(f32 value) { return warp_sum(value); }
DEVICE u32 team_max(u32 value) { return warp_max(value); }

// Expert s * LANES + l lies in lane l at slot s, choice p * LANES + l at place p.
constexpr int SLOTS = ceil_div(EXPERTS, LANES), PLACES = ceil_div(TOP_K, LANES);
typedef f32 PerExpert[SLOTS];
typedef f32 PerChoice[PLACES];
typedef i32 Ids[PLACES];

DEVICE i32 expert_at(i32 slot) { return slot * LANES + team_lane(); }
DEVICE i32 choice_at(i32 place) { return place * LANES + team_lane(); }

DEVICE void clear(PerExpert &values)
{
    #pragma unroll
    for (i32 s = 0; s < SLOTS; s++)
        values[s] = 0.0f;
}

// The experts of a token; says whether there is one.
DEVICE bool load_ids(Ids &ids, const i32 *topk_ids, i64 token)
{
    bool some = false;
    #pragma unroll
    for (i32 p = 0; p < PLACES; p++) {
        ids[p] = choice_at(p) < TOP_K ? topk_ids[token * TOP_K + choice_at(p)] : -1;
        some = some || ids[p] >= 0;
    }
    return team_max(some) != 0;
}

// The expert of a slot that was drawn out by chance, -2 - id, still has its part in what weights are
// divided by.
DEVICE void load_considered(Ids &among, const Ids &ids)
{
    #pragma unroll
    for (i32 p = 0; p < PLACES; p++)
        among[p] = ids[p] < -1 ? -2 - ids[p] : ids[p];
}

// Returns the value at the place of choice `k`, to every lane.
DEVICE u32 of_choice(const u32 (&values)[PLACES], i32 k)
{
    u32 value = 0;
    #pragma unroll
    for (i32 p = 0; p < PLACES; p++)
        value = choice_at(p) == k ? values[p] : value;
    return from_team(value, k % LANES);
}

DEVICE i32 id_of(const Ids &ids, i32 k)
{
    u32 bits[PLACES];
    #pragma unroll
    for (i32 p = 0; p < PLACES; p++)
        bits[p] = (u32)ids[p];
    return (i32)of_choice(bits, k);
}

DEVICE f32 value_of_choice(const PerChoice &values, i32 k)
{
    u32 bits[PLACES];
    #pragma unroll
    for (i32 p = 0; p < PLACES; p++)
        bits[p] = bits_of(values[p]);
    return float_of(of_choice(bits, k));
}

DEVICE void keep_choice(PerChoice &values, i32 k, f32 value)
{
    #pragma unroll
    for (i32 p = 0; p < PLACES; p++)
        values[p] = choice_at(p) == k ? value : values[p];
}

// The value of expert `id`, in every lane.
DEVICE f32 value_of(const PerExpert &values, i32 id)
{
    u32 bits = 0;
    #pragma unroll
    for (i32 s = 0; s < SLOTS; s++)
        bits = expert_at(s) == id ? bits_of(values[s]) : bits;
    return float_of(from_team(bits, id % LANES));
}

DEVICE void add_to(PerExpert &values, i32 id, f32 value)
{
    #pragma unroll
    for (i32 s = 0; s < SLOTS; s++)
        values[s] += expert_at(s) == id ? value : 0.0f;
}

DEVICE void load_row(PerExpert &values, const f32 *rows, i64 row, f32 padding)
{
    #pragma unroll
    for (i32 s = 0; s < SLOTS; s++)
        values[s] = expert_at(s) < EXPERTS ? rows[row * EXPERTS + expert_at(s)] : padding;
}

DEVICE f32 largest(const PerExpert &values)
{
    u32 key = 0;
    #pragma unroll
    for (i32 s = 0; s < SLOTS; s++) {
        const u32 other = expert_at(s) < EXPERTS ? order_key(values[s]) : 0u;
        key = other > key ? other : key;
    }
    return score_of_key(team_max(key));
}

DEVICE f32 dot(const PerExpert &a, const PerExpert &b)
{
    f32 sum = 0.0f;
    #pragma unroll
    for (i32 s = 0; s < SLOTS; s++)
        sum = fused(a[s], b[s], sum);
    return team_sum(sum);
}

// to = exp(values - most) / sum; returns the sum.
DEVICE f32 softmax(PerExpert &to, const PerExpert &values, f32 most)
{
    f32 sum = 0.0f;
    #pragma unroll
    for (i32 s = 0; s < SLOTS; s++) {
        const bool counts = expert_at(s) < EXPERTS && values[s] != -infinity();
        to[s] = counts ? exponential(values[s] - most) : 0.0f;
        sum += to[s];
    }
    sum = team_sum(sum);
    #pragma unroll
    for (i32 s = 0; s < SLOTS; s++)
        to[s] = to[s] / sum;
    return sum;
}

// d += softmax, backward: p (dp - <p, dp>).
DEVICE void add_softmax_back(PerExpert &d, const PerExpert &p, const PerExpert &dp)
{
    const f32 mean = dot(p, dp);
    #pragma unroll
    for (i32 s = 0; s < SLOTS; s++)
        d[s] = fused(p[s], dp[s] - mean, d[s]);
}

// ---- from weights to chosen scores ----

// The scores that selection gathered; 0 in masked slots.
DEVICE void gather_scores(PerChoice &chosen, const Ids &ids, const PerExpert &values)
{
    #pragma unroll
    for (i32 p = 0; p < PLACES; p++)
        chosen[p] = 0.0f;
    #pragma unroll 1
    for (i32 k = 0; k < TOP_K; k++) {
        const i32 id = id_of(ids, k);
        const f32 value = value_of(values, id < 0 ? 0 : id);
        keep_choice(chosen, k, id < 0 ? 0.0f : value);
    }
    u32 key = 0;
    #pragma unroll
    for (i32 p = 0; p < PLACES; p++) {
        const u32 other = ids[p] < 0 ? 0u : order_key(chosen[p]);
        key = other > key ? other : key;
    }
    const f32 most = score_of_key(team_max(key));
    f32 sum = 0.0f;
    #pragma unroll
    for (i32 p = 0; p < PLACES; p++) {
        chosen[p] = ids[p] < 0 ? 0.0f : exponential(chosen[p] - most);
        sum += chosen[p];
    }
    sum = team_sum(sum);
    #pragma unroll
    for (i32 p = 0; p < PLACES; p++)
        chosen[p] = chosen[p] / sum;
}

// Renormalisation, scale and learned factors, backward.
DEVICE void weigh_back(PerChoice &dchosen, const PerChoice &chosen, const Ids &ids, const f32 *dweights)
{
    f32 along = 0.0f;
    const f32 whole = 1.0f, slope = 0.0f;
    #pragma unroll
    for (i32 p = 0; p < PLACES; p++) {
        const f32 ratio = chosen[p] / whole;
        dchosen[p] = ids[p] < 0 ? 0.0f : dweights[choice_at(p)] * 1.0f;
        along += ids[p] < 0 ? 0.0f : dchosen[p] * ratio;
    }
    along = team_sum(along);
    #pragma unroll
    for (i32 p = 0; p < PLACES; p++) {
        dchosen[p] = ids[p] == -1 ? 0.0f : (dchosen[p] - slope * along) / whole;
    }
}

// From gradients of weights to those of logits, which are zero before.
DEVICE void weights_back(PerExpert &d, const PerExpert &z, const Ids &ids, const f32 *dweights)
{
    Ids among;
    PerChoice chosen, dchosen;
    load_considered(among, ids);
    gather_scores(chosen, among, z);
    weigh_back(dchosen, chosen, ids, dweights);
    f32 mean = 0.0f;
    #pragma unroll
    for (i32 place = 0; place < PLACES; place++)
        mean = fused(chosen[place], dchosen[place], mean);
    mean = team_sum(mean);
    #pragma unroll
    for (i32 place = 0; place < PLACES; place++)
        dchosen[place] = chosen[place] * (dchosen[place] - mean);
    #pragma unroll 1
    for (i32 k = 0; k < TOP_K; k++) {
        const i32 id = id_of(among, k);
        const f32 slope = value_of_choice(dchosen, k);
        add_to(d, id, slope);
    }
}

// Returns whether an expert of the token computed anything. If none did, its logits must not be read,
// because 0 times NaN is NaN.
DEVICE bool has_gradient(const f32 *dweights)
{
    bool some = false;
    for (i32 k = team_lane(); k < TOP_K; k += LANES)
        some = some || dweights[k] != 0.0f;
    return team_max(some) != 0;
}

KERNEL(THREADS) gate_topk_bwd(
    const f32 *__restrict__ logits,            // [tokens, 32]
    const i32 *__restrict__ topk_ids,          // [tokens, 4]
    const f32 *__restrict__ grad_topk_weights, // [tokens, 4]
    f32 *__restrict__ dlogits,                 // [tokens, 32]
    i64 tokens)
{
    await_launches();
    const i64 first = block_x() * TILE_TOKENS;
    #pragma unroll 1
    for (i64 token = first + team_index(); token < first + TILE_TOKENS && token < tokens; token += TEAMS) {
        Ids ids;
        const bool live = load_ids(ids, topk_ids, token);
        const f32 *dweights = grad_topk_weights + token * TOP_K;
        PerExpert z, d;
        clear(d);
        load_row(z, logits, token, -infinity());
        if (live && has_gradient(dweights)) {
            weights_back(d, z, ids, dweights);
        }
        #pragma unroll
        for (i32 s = 0; s < SLOTS; s++)
            if (expert_at(s) < EXPERTS)
                dlogits[token * EXPERTS + expert_at(s)] = d[s];
    }
}
