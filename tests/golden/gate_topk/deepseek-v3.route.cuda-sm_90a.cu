// route for cuda:sm_90a, of few tokens
//
// route_logits: a block owns 2 experts and up to 64 tokens, so that the weights are read by
// many multiprocessors. A thread sums one of 4 parts of the inner dimension in f32; the parts
// are added in order. Both are as in the kernel for many tokens, to the bit.
// route: one block scores, selects and weighs the experts of each token, a warp one
// at a time, and counts them; sums the counts to offsets; gives every assignment its row.
//
// Shared memory of route_logits:
//   panel   f32 [2][2048]   rows of the matrix, a part of their length at a time
//
// Shared memory of route:
//   counts    i32 [8][256]   how many tokens chose each expert, by slot
//   counters  i32 [8][256]   the next place of each expert, per warp
//   starts    i32 [257]   where each expert's rows begin
//
// Baked in: model dim 7168, experts 256, top_k 8, the whole rule. Not the tokens.

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

#define DEVICE __device__ __forceinline__
#define COMPILE_TIME __device__ constexpr
// With the least wish for blocks per multiprocessor the assembler never spills
// registers to fit more of them.
#define KERNEL(threads) extern "C" __global__ void __launch_bounds__(threads, 1)

DEVICE i32 thread_index() { return threadIdx.x; }
DEVICE i64 block_x() { return blockIdx.x; }
DEVICE i64 block_y() { return blockIdx.y; }
DEVICE void block_sync() { __syncthreads(); }

// Lets the blocks of the next launch start, then waits until all launches before this one
// have ended, and for what they wrote. Nothing happens where launches do not overlap.
DEVICE void await_launches()
{
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

DEVICE u32 bits_of(f32 value) { return __float_as_uint(value); }
DEVICE f32 float_of(u32 bits) { return __uint_as_float(bits); }
DEVICE f32 fused(f32 a, f32 b, f32 c) { return __fmaf_rn(a, b, c); }
DEVICE f32 square_root(f32 value) { return __fsqrt_rn(value); }

DEVICE f32 to_f32(f16 value)
{
    f32 wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value.bits));
    return wide;
}

DEVICE f16 to_f16(f32 value)
{
    f16 narrow;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(narrow.bits) : "f"(value));
    return narrow;
}

DEVICE bf16 to_bf16(f32 value)
{
    bf16 narrow;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(narrow.bits) : "f"(value));
    return narrow;
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

constexpr i32 WARP = 32;
typedef u32 LaneMask;

// Every lane of a warp takes part in each of these.
DEVICE void warp_sync() { __syncwarp(); }
DEVICE u32 shuffle(u32 value, i32 lane) { return __shfl_sync(0xffffffffu, value, lane); }
DEVICE LaneMask ballot(bool vote) { return __ballot_sync(0xffffffffu, vote); }
DEVICE i32 population(LaneMask lanes) { return __popc(lanes); }

// The lanes with the same value, which has at most BITS bits.
template <int BITS> DEVICE LaneMask match_any(u32 value)
{
    return __match_any_sync(0xffffffffu, value);
}

DEVICE void shared_add(i32 *counter, i32 value) { atomicAdd(counter, value); }

DEVICE u32 warp_max(u32 value) { return __reduce_max_sync(0xffffffffu, value); }

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

// ---- logits ----

constexpr int MODEL_DIM = 7168, EXPERTS = 256;
constexpr int LOGITS_THREADS = 256, LOGITS_TOKENS = 64, LOGITS_EXPERTS = 2;
// The matrix is in shared memory PANEL elements of its rows at a time.
constexpr int PANEL = 2048, PANEL_END = lesser(PANEL, ceil_div(MODEL_DIM, 32) * 32);
// Of every 32 elements each part of a sum has PART adjacent ones.
constexpr int PARTS = 4, PART = 32 / PARTS;
// Tokens that threads take at a time, and how often.
constexpr int ROUND = LOGITS_THREADS / PARTS, ROUNDS = ceil_div(LOGITS_TOKENS, ROUND);

typedef bf16 Activation;
// Elements of a part of a token, or of a row of the matrix, moved at a time.
constexpr int TOKEN_PACK = lesser(pack_width<Activation>(MODEL_DIM), PART), ROW_PACK = pack_width<f32>(MODEL_DIM);
constexpr int TOKEN_PACKS = PART / TOKEN_PACK;
// Parts of a token that are on their way to a thread together.
constexpr int AHEAD = 16;

KERNEL(LOGITS_THREADS) route_logits(
    const bf16 *__restrict__ x,     // [tokens, 7168]
    const f32 *__restrict__ weight, // [256, 7168]
    f32 *__restrict__ logits,       // [tokens, 256]
    i64 tokens)
{
    await_launches();
    alignas(16) __shared__ f32 panel[LOGITS_EXPERTS][PANEL_END];
    const i64 first_token = block_x() * LOGITS_TOKENS;
    const i32 first_expert = (i32)block_y() * LOGITS_EXPERTS;
    const i32 part = thread_index() % PARTS, own = thread_index() / PARTS;
    f32 sums[ROUNDS][LOGITS_EXPERTS] = {};

    #pragma unroll 1
    for (i32 depth = 0; depth < MODEL_DIM; depth += PANEL) {
        block_sync();  // the panel before has been used
        #pragma unroll 8
        for (i32 i = thread_index(); i < LOGITS_EXPERTS * PANEL_END / ROW_PACK; i += LOGITS_THREADS) {
            const i32 row = i / (PANEL_END / ROW_PACK), k = i % (PANEL_END / ROW_PACK) * ROW_PACK;
            Pack<f32, ROW_PACK> pack = {};
            if (first_expert + row < EXPERTS && depth + k < MODEL_DIM)
                pack = load<ROW_PACK>(weight + (i64)(first_expert + row) * MODEL_DIM + depth + k);
            store(&panel[row][k], pack);
        }
        block_sync();
        #pragma unroll
        for (i32 round = 0; round < ROUNDS; round++) {
            const i64 token = first_token + round * ROUND + own;
            if (token >= tokens || round * ROUND + own >= LOGITS_TOKENS)
                break;
            const Activation *const from = x + token * MODEL_DIM + depth + part * PART;
            #pragma unroll 1
            for (i32 start = 0; start < PANEL_END && depth + start < MODEL_DIM; start += 32 * AHEAD) {
                Pack<Activation, TOKEN_PACK> held[AHEAD][TOKEN_PACKS];
                #pragma unroll
                for (i32 n = 0; n < AHEAD; n++)
                    #pragma unroll
                    for (i32 j = 0; j < TOKEN_PACKS; j++) {
                        const i32 k = start + n * 32 + j * TOKEN_PACK;
                        held[n][j] = Pack<Activation, TOKEN_PACK>{};
                        if (depth + part * PART + k < MODEL_DIM && k < PANEL_END)
                            held[n][j] = load<TOKEN_PACK>(from + k);
                    }
                #pragma unroll
                for (i32 n = 0; n < AHEAD; n++)
                    #pragma unroll
                    for (i32 i = 0; i < PART; i++) {
                        const i32 k = start + n * 32 + part * PART + i;
                        const f32 value = to_f32(held[n][i / TOKEN_PACK].at[i % TOKEN_PACK]);
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
            const bool exists = round * ROUND + own < LOGITS_TOKENS && token < tokens && first_expert + e < EXPERTS;
            if (part == 0 && exists)
                logits[token * EXPERTS + first_expert + e] = sum;
        }
}

// ---- selection ----

constexpr int TOP_K = 8;
constexpr int SELECT_THREADS = 512, SELECT_TOKENS = 64;

// A warp selects for a token.
constexpr int LANES = 32;

DEVICE i32 team_lane() { return lane_index(); }
DEVICE u32 from_team(u32 value, i32 lane) { return shuffle(value, lane); }
DEVICE f32 team_sum(f32 value) { return warp_sum(value); }
DEVICE u32 team_max(u32 value) { return warp_max(value); }

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

// The item with the largest key; of several, the first. Item i lies in lane
// i % LANES at slot i / LANES.
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
    #pragma unroll
    for (i32 s = 0; s < SLOTS; s++)
        values[s] = sigmoid(values[s]);
}

constexpr int GROUPS = 8, GROUPS_KEPT = 4, GROUP_SIZE = EXPERTS / GROUPS;
constexpr int GROUP_SLOTS = ceil_div(GROUPS, LANES);

// The key of a group by the sum of its two best scores.
DEVICE u32 group_key(const u32 (&keys)[SLOTS], i32 group)
{
    u32 first = 0, second = 0;
    #pragma unroll
    for (i32 s = 0; s < SLOTS; s++) {
        u32 key = expert_at(s) / GROUP_SIZE == group ? keys[s] : 0u;
        second = key > first ? first : key > second ? key : second;
        first = key > first ? key : first;
    }
    const u32 best = team_max(first);
    const bool mine = lane_index() == first_lane(ballot(first == best));
    const u32 next = team_max(mine ? second : first);
    return order_key(score_of_key(best) + score_of_key(next));
}

// Masks the experts of all groups but the best.
DEVICE void keep_groups(u32 (&keys)[SLOTS])
{
    u32 group_keys[GROUP_SLOTS] = {};
    for (i32 group = 0; group < GROUPS; group++) {
        u32 key = group_key(keys, group);
        #pragma unroll
        for (i32 s = 0; s < GROUP_SLOTS; s++)
            group_keys[s] = expert_at(s) == group ? key : group_keys[s];
    }
    u32 kept = 0;  // one bit per slot
    for (i32 n = 0; n < GROUPS_KEPT; n++) {
        i32 group = best_item(group_keys);
        remove_item(group_keys, group);
        #pragma unroll
        for (i32 s = 0; s < SLOTS; s++)
            kept |= (u32)(expert_at(s) / GROUP_SIZE == group) << s;
    }
    #pragma unroll
    for (i32 s = 0; s < SLOTS; s++)
        if (!(kept >> s & 1) && expert_at(s) < EXPERTS)
            keys[s] = order_key(-infinity());
}

// From chosen scores to weights.
DEVICE void weigh(Choices &choices)
{
    f32 sum = 0.0f;
    #pragma unroll
    for (i32 p = 0; p < PLACES; p++)
        sum += choices.scores[p];
    const f32 denominator = team_sum(sum) + 1e-20f;
    #pragma unroll
    for (i32 p = 0; p < PLACES; p++) {
        f32 weight = choices.scores[p] / denominator * 2.5f;
        choices.scores[p] = choices.ids[p] < 0 ? 0.0f : weight;
    }
}

// Counts of a block: a row of tile_counts per slot.
constexpr int COUNT_ROWS = TOP_K, COUNTERS = COUNT_ROWS * EXPERTS;

static DEVICE void gate_topk(
    const f32 *__restrict__ logits,      // [tokens, 256]
    const f32 *__restrict__ select_bias, // [256]
    i32 *__restrict__ topk_ids,          // [tokens, 8]
    f32 *__restrict__ topk_weights,      // [tokens, 8]
    i32 *__restrict__ tile_counts,       // [tiles, 256]
    i64 tokens)
{
    const i64 first = block_x() * SELECT_TOKENS;
    __shared__ i32 counts[COUNTERS];
    for (i32 i = thread_index(); i < COUNTERS; i += SELECT_THREADS)
        counts[i] = 0;
    block_sync();
    #pragma unroll 1
    for (i64 token = first + warp_index(); token < first + SELECT_TOKENS && token < tokens;
         token += SELECT_THREADS / WARP) {
        Choices choices;
        #pragma unroll
        for (i32 p = 0; p < PLACES; p++) {
            choices.ids[p] = -1;
            choices.scores[p] = 0.0f;
        }

        f32 values[SLOTS];
        #pragma unroll
        for (i32 s = 0; s < SLOTS; s++)
            values[s] = expert_at(s) < EXPERTS ? logits[token * EXPERTS + expert_at(s)] : -infinity();
        score_experts(values);
        u32 keys[SLOTS];
        #pragma unroll
        for (i32 s = 0; s < SLOTS; s++)
            keys[s] = expert_at(s) < EXPERTS ? order_key(values[s] + select_bias[expert_at(s)]) : 0u;
        keep_groups(keys);

        #pragma unroll 1
        for (i32 k = 0; k < TOP_K; k++) {
            const i32 id = best_item(keys);
            remove_item(keys, id);
            keep_choice(choices, k, id, value_of(values, id));
        }
        weigh(choices);
        #pragma unroll
        for (i32 p = 0; p < PLACES; p++) {
            if (choice_at(p) < TOP_K) {
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

// The names of expert_scan, some of which the gate has, too.
namespace scan {

// ---- assignments ----

constexpr int EXPERTS = 256, ROUTED = 256, TOP_K = 8;
constexpr int THREADS = 512, WARPS = 8;  // that place
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

// Makes the counts of each tile those of all tiles before it, and writes the sum over all
// tiles. There are few.
static DEVICE void expert_scan_sum(
    i32 *__restrict__ tile_counts, // [tiles, 256]
    i64 *__restrict__ counts,      // [256]
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

// Where an assignment goes, by its location inside its expert.
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

// Assignments of a lane whose loads overlap; those of a long tile do not fit its registers.
constexpr i32 HELD = STEPS < 16 ? STEPS : 16;

static DEVICE void expert_scan_place(
    const i32 *__restrict__ topk_ids,    // [tokens, 8]
    const i32 *__restrict__ tile_counts, // [tiles, 256]
    const i64 *__restrict__ counts,      // [256]
    i64 *__restrict__ offsets,           // [257]
    i32 *__restrict__ row_tiles,         // [257]
    i32 *__restrict__ locations,         // [tokens, 8]
    i32 *__restrict__ slot_rows,         // [tokens, 8]
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
    const f32 *__restrict__ logits,      // [tokens, 256]
    const f32 *__restrict__ select_bias, // [256]
    i32 *__restrict__ topk_ids,          // [tokens, 8]
    f32 *__restrict__ topk_weights,      // [tokens, 8]
    i32 *__restrict__ tile_counts,       // [tiles, 256]
    i64 *__restrict__ counts,            // [256]
    i64 *__restrict__ offsets,           // [257]
    i32 *__restrict__ row_tiles,         // [257]
    i32 *__restrict__ locations,         // [tokens, 8]
    i32 *__restrict__ slot_rows,         // [tokens, 8]
    i32 *__restrict__ row_slots,         // [rows]
    i64 tokens)
{
    await_launches();
    if (tokens > 0)
        gate_topk(logits, select_bias, topk_ids, topk_weights, tile_counts, tokens);
    block_sync();  // choices and their counts are there
    scan::expert_scan_sum(tile_counts, counts, tokens);
    block_sync();  // the sums of tiles are there
    scan::expert_scan_place(topk_ids, tile_counts, counts, offsets, row_tiles, locations,
            slot_rows, row_slots, tokens);
}
