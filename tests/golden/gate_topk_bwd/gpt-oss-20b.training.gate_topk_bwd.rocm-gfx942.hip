// gate_topk_bwd for rocm:gfx942
//
// Auxiliary losses, and gradients of logits. A block owns 32 tokens, a warp one at a
// time; lane l holds the values of experts l, l + 64, ... in registers. Sums over all
// tokens are sums of the blocks' sums, in order. A token without a choice
// counts nowhere.
//
// Baked in: experts 32, top_k 4, the whole rule, the losses. Not the tokens.

// ---- types, and the hardware as named functions ----

typedef unsigned short u16;
typedef int i32;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;
typedef float f32;
typedef double f64;

struct bf16 { u16 bits; };  // the upper half of an f32
struct f16 { u16 bits; };   // IEEE binary16

#define __shared__ __attribute__((shared))
#define DEVICE __attribute__((device)) inline __attribute__((always_inline))
#define COMPILE_TIME constexpr
#define KERNEL(threads) \
    extern "C" __attribute__((global, amdgpu_flat_work_group_size(threads, threads))) void

DEVICE i32 thread_index() { return __builtin_amdgcn_workitem_id_x(); }
DEVICE i64 block_x() { return __builtin_amdgcn_workgroup_id_x(); }
DEVICE i64 block_y() { return __builtin_amdgcn_workgroup_id_y(); }
DEVICE void await_launches() {}  // launches do not overlap

DEVICE void block_sync()
{
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}

DEVICE u32 bits_of(f32 value) { return __builtin_bit_cast(u32, value); }
DEVICE f32 float_of(u32 bits) { return __builtin_bit_cast(f32, bits); }
DEVICE f32 fused(f32 a, f32 b, f32 c) { return __builtin_fmaf(a, b, c); }
DEVICE f32 square_root(f32 value) { return __builtin_sqrtf(value); }

DEVICE f32 to_f32(f16 value) { return __builtin_bit_cast(_Float16, value.bits); }
DEVICE f16 to_f16(f32 value) { return f16{__builtin_bit_cast(u16, (_Float16)value)}; }

// No instruction here: adding just under half of the last place kept rounds to
// the nearest, ties to even; a NaN stays one.
DEVICE bf16 to_bf16(f32 value)
{
    u32 bits = bits_of(value);
    u32 quiet = bits | 0x400000u, rounded = bits + 0x7fffu + (bits >> 16 & 1u);
    return bf16{(u16)((value != value ? quiet : rounded) >> 16)};
}

DEVICE f32 to_f32(bf16 value) { return float_of((u32)value.bits << 16); }
DEVICE f32 to_f32(f32 value) { return value; }

// The nearest value of a storage type; ties to even.
template <class T> DEVICE T round_to(f32 value);
template <> DEVICE f32 round_to<f32>(f32 value) { return value; }
template <> DEVICE f16 round_to<f16>(f32 value) { return to_f16(value); }
template <> DEVICE bf16 round_to<bf16>(f32 value) { return to_bf16(value); }

// N adjacent elements, moved by one access.
template <class T, int N> struct alignas(N * sizeof(T)) Pack { T at[N]; };

template <int N, class T> DEVICE Pack<T, N> load(const T *from)
{
    return *reinterpret_cast<const Pack<T, N> *>(from);
}

template <int N, class T> DEVICE void store(T *to, const Pack<T, N> &pack)
{
    *reinterpret_cast<Pack<T, N> *>(to) = pack;
}

// Pack number `i` of a row. NVVM writes a pack by one access only where it sees
// that the address counts whole packs.
template <int N, class T> DEVICE Pack<T, N> load(const T *row, i64 i)
{
    return reinterpret_cast<const Pack<T, N> *>(row)[i];
}

template <int N, class T> DEVICE void store(T *row, i64 i, const Pack<T, N> &pack)
{
    reinterpret_cast<Pack<T, N> *>(row)[i] = pack;
}

// Elements of the widest pack, at most 16 bytes, that divides rows of `width`:
// every row then starts at a pack and ends with one.
template <class T> COMPILE_TIME int pack_width(i64 width)
{
    int count = 16 / sizeof(T);
    while (width % count != 0)
        count /= 2;
    return count;
}

COMPILE_TIME int ceil_div(int a, int b) { return (a + b - 1) / b; }
COMPILE_TIME int lesser(int a, int b) { return a < b ? a : b; }

// ---- warps ----

constexpr i32 WARP = 64;
typedef u64 LaneMask;

// Every lane of a warp takes part in each of these.
DEVICE void warp_sync()
{
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront");
    __builtin_amdgcn_wave_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront");
}

DEVICE u32 shuffle(u32 value, i32 lane) { return __builtin_amdgcn_ds_bpermute(lane * 4, value); }
DEVICE LaneMask ballot(bool vote) { return __builtin_amdgcn_ballot_w64(vote); }
DEVICE i32 population(LaneMask lanes) { return __builtin_popcountll(lanes); }

// The lanes with the same value, which has at most BITS bits.
template <int BITS> DEVICE LaneMask match_any(u32 value)
{
    LaneMask same = ~(LaneMask)0;
    for (int bit = 0; bit < BITS; bit++) {
        bool set = value >> bit & 1;
        LaneMask lanes = ballot(set);
        same &= set ? lanes : ~lanes;
    }
    return same;
}

DEVICE void shared_add(i32 *counter, i32 value)
{
    __hip_atomic_fetch_add(counter, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
}

DEVICE u32 warp_max(u32 value)
{
    for (i32 step = WARP / 2; step > 0; step /= 2) {
        u32 other = shuffle(value, (thread_index() % WARP) ^ step);
        value = other > value ? other : value;
    }
    return value;
}

DEVICE i32 lane_index() { return thread_index() % WARP; }
DEVICE i32 warp_index() { return thread_index() / WARP; }

// The lanes before this one, and the first lane of a set.
DEVICE LaneMask lanes_below() { return ((LaneMask)1 << lane_index()) - 1; }
DEVICE i32 first_lane(LaneMask lanes) { return population((lanes & (0 - lanes)) - 1); }

DEVICE f32 shuffle(f32 value, i32 lane) { return float_of(shuffle(bits_of(value), lane)); }

DEVICE f32 warp_sum(f32 value)
{
    for (i32 step = WARP / 2; step > 0; step /= 2)
        value += shuffle(value, lane_index() ^ step);
    return value;
}

DEVICE i32 warp_sum(i32 value)
{
    for (i32 step = WARP / 2; step > 0; step /= 2)
        value += (i32)shuffle((u32)value, lane_index() ^ step);
    return value;
}

// The sum of `value` over this lane and those before it.
DEVICE i32 warp_prefix(i32 value)
{
    for (i32 step = 1; step < WARP; step *= 2) {
        i32 before = (i32)shuffle((u32)value, (lane_index() - step) & (WARP - 1));
        value += lane_index() >= step ? before : 0;
    }
    return value;
}

// ---- the order of scores ----

DEVICE f32 infinity() { return float_of(0x7f800000u); }

// Larger is better: ascending values, NaN below all of them; both zeros are
// equal. No score has the key 0, which stands for "none".
DEVICE u32 order_key(f32 score)
{
    u32 bits = bits_of(score + 0.0f);
    u32 key = bits >> 31 ? ~bits : bits | 0x80000000u;
    return score != score ? 1u : key;
}

DEVICE f32 score_of_key(u32 key)
{
    return float_of(key == 1 ? 0x7fc00000u : key >> 31 ? key & 0x7fffffffu : ~key);
}

// ---- functions ----

DEVICE f32 power_of_two(i32 exponent) { return float_of((u32)(exponent + 127) << 23); }

// e^x to about one unit in the last place: x = n ln 2 + r, a polynomial in r.
// The same on every GPU.
DEVICE f32 exponential(f32 x)
{
    constexpr f32 ROUND = 12582912.0f;  // adding it rounds to an integer
    f32 bounded = x > 89.0f ? 89.0f : x < -104.0f ? -104.0f : x;
    f32 shifted = fused(bounded, 1.44269504f, ROUND), n = shifted - ROUND;
    f32 r = fused(n, -1.42860677e-6f, fused(n, -0.693145752f, bounded));
    f32 p = fused(r, 0.0013950479f, 0.008368882f);
    p = fused(p, r, 0.041666206f);
    p = fused(p, r, 0.1666652f);
    p = fused(p, r, 0.5f);
    p = fused(p, r * r, r) + 1.0f;
    i32 exponent = (i32)(bits_of(shifted) - bits_of(ROUND)), half = exponent >> 1;
    return p * power_of_two(half) * power_of_two(exponent - half);
}

DEVICE f32 sigmoid(f32 x) { return 1.0f / (1.0f + exponential(-x)); }

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

// The expert of a slot that was drawn out by chance, -2 - id, still has its
// part in what weights are divided by.
DEVICE void load_considered(Ids &among, const Ids &ids)
{
    #pragma unroll
    for (i32 p = 0; p < PLACES; p++)
        among[p] = ids[p] < -1 ? -2 - ids[p] : ids[p];
}

// What lies in the place of choice `k`, in every lane.
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
        if (live) {
            weights_back(d, z, ids, dweights);
        }
        #pragma unroll
        for (i32 s = 0; s < SLOTS; s++)
            if (expert_at(s) < EXPERTS)
                dlogits[token * EXPERTS + expert_at(s)] = d[s];
    }
}
