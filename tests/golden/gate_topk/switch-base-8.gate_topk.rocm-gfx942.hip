// gate_topk for rocm:gfx942
//
// gate_logits: a block owns 32 tokens by 8 experts. Groups of
// threads sum parts of the inner dimension in f32; the parts are added in order.
// gate_topk: a block owns 64 tokens, 8 adjacent lanes one at a time.
// Lane l holds the scores of experts l, l + 8, ... in registers.
// The best expert is found 1 time.
// What each expert got is counted on the way, for expert_scan.
//
// Shared memory of gate_logits: two buffers of each, one filled while the other is used.
//   left   f32 [32][32 + pad]   x, transposed
//   right  f32 [32][8 + pad]   rows of the matrix, transposed
// and, once:
//   parts  f32 [slices][32][8]   what each group of threads summed
//
// Shared memory of gate_topk:
//   counts  i32 [8]   how many choices each expert got
//
// Baked in: model dim 768, experts 8, top_k 1, the whole rule. Not the tokens.

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

// ---- products of tiles ----

// Rows are staged DEPTH elements at a time as f32 in shared memory, transposed
// (tile[k][row]), so that a thread reads its operands four at a time. PAD keeps
// that alignment and spreads the transposing stores over the banks.
constexpr int PAD = 4;

// ROWS rows of DEPTH elements on their way from a matrix [*, WIDTH] through the
// registers of THREADS threads to shared memory.
template <class T, int ROWS, int DEPTH, int WIDTH, int THREADS> struct Stage {
    static constexpr int PACK = pack_width<T>(WIDTH) < DEPTH ? pack_width<T>(WIDTH) : DEPTH;
    static constexpr int PACKS_PER_ROW = DEPTH / PACK, PACKS = ROWS * PACKS_PER_ROW;
    static constexpr int HELD = ceil_div(PACKS, THREADS);

    Pack<T, PACK> held[HELD];

    DEVICE static i32 pack_of(i32 i) { return i * THREADS + thread_index(); }
    DEVICE static i32 row_of(i32 i) { return pack_of(i) / PACKS_PER_ROW; }
    DEVICE static i32 depth_of(i32 i) { return pack_of(i) % PACKS_PER_ROW * PACK; }

    // Reads from element `depth` on; beyond `rows` and WIDTH there are zeros.
    DEVICE void fetch(const T *matrix, i32 rows, i32 depth)
    {
        #pragma unroll
        for (i32 i = 0; i < HELD; i++) {
            i32 row = row_of(i), k = depth + depth_of(i);
            held[i] = Pack<T, PACK>{};
            if (row < rows && k < WIDTH && pack_of(i) < PACKS)
                held[i] = load<PACK>(matrix + (i64)row * WIDTH + k);
        }
    }

    // Writes to columns `first` and on of a tile.
    template <int PITCH> DEVICE void put(f32 (&tile)[DEPTH][PITCH], i32 first) const
    {
        #pragma unroll
        for (i32 i = 0; i < HELD; i++)
            #pragma unroll
            for (i32 j = 0; j < PACK; j++)
                if (pack_of(i) < PACKS)
                    tile[depth_of(i) + j][first + row_of(i)] = to_f32(held[i].at[j]);
    }
};

// Where item `i` of COUNT of a thread lies, when THREADS threads share a side of
// a tile: groups of up to four adjacent ones, dealt out in turn.
template <int COUNT, int THREADS> DEVICE i32 dealt(i32 thread, i32 i)
{
    constexpr int GROUP = COUNT < 4 ? COUNT : 4;
    return (i / GROUP * THREADS + thread) * GROUP + i % GROUP;
}

// The COUNT items of a thread, out of one row of a tile.
template <int COUNT, int THREADS> DEVICE void gather(f32 (&items)[COUNT], const f32 *row, i32 thread)
{
    constexpr int GROUP = COUNT < 4 ? COUNT : 4;
    #pragma unroll
    for (i32 i = 0; i < COUNT; i += GROUP) {
        Pack<f32, GROUP> group = load<GROUP>(row + dealt<COUNT, THREADS>(thread, i));
        #pragma unroll
        for (i32 j = 0; j < GROUP; j++)
            items[i + j] = group.at[j];
    }
}

// sums += leftᵀ · right over STEPS of the depth from `first` on, for a thread of a
// grid of ROW_THREADS x COLUMN_THREADS, rows first.
template <int ROW_THREADS, int COLUMN_THREADS, int STEPS, int ROWS, int COLUMNS, int DEPTH, int LEFT, int RIGHT>
DEVICE void multiply(f32 (&sums)[ROWS][COLUMNS], const f32 (&left)[DEPTH][LEFT],
                     const f32 (&right)[DEPTH][RIGHT], i32 thread, i32 first)
{
    #pragma unroll
    for (i32 k = 0; k < STEPS; k++) {
        f32 a[ROWS], b[COLUMNS];
        gather<ROWS, ROW_THREADS>(a, left[first + k], thread / COLUMN_THREADS);
        gather<COLUMNS, COLUMN_THREADS>(b, right[first + k], thread % COLUMN_THREADS);
        #pragma unroll
        for (i32 i = 0; i < ROWS; i++)
            #pragma unroll
            for (i32 j = 0; j < COLUMNS; j++)
                sums[i][j] = fused(a[i], b[j], sums[i][j]);
    }
}

// ---- logits ----

constexpr int MODEL_DIM = 768, EXPERTS = 8;
constexpr int LOGITS_THREADS = 256;
constexpr int TILE_TOKENS = 32, TILE_EXPERTS = 8, TILE_DEPTH = 32;
// Threads form SLICES grids, each of which multiplies its part of every depth;
// a thread of a grid owns 4 x 4 sums.
constexpr int THREAD_ROWS = 4, THREAD_COLUMNS = 4;
constexpr int ROW_THREADS = TILE_TOKENS / THREAD_ROWS, COLUMN_THREADS = TILE_EXPERTS / THREAD_COLUMNS;
constexpr int GRID = ROW_THREADS * COLUMN_THREADS, SLICES = LOGITS_THREADS / GRID, SLICE = TILE_DEPTH / SLICES;
static_assert(SLICES * GRID == LOGITS_THREADS, "every thread is in a grid");
static_assert(SLICE * SLICES == TILE_DEPTH, "every grid has its part of the depth");

typedef f32 Activation;
typedef Stage<Activation, TILE_TOKENS, TILE_DEPTH, MODEL_DIM, LOGITS_THREADS> TokenStage;
typedef Stage<f32, TILE_EXPERTS, TILE_DEPTH, MODEL_DIM, LOGITS_THREADS> MatrixStage;

KERNEL(LOGITS_THREADS) gate_logits(
    const f32 *__restrict__ x,      // [tokens, 768]
    const f32 *__restrict__ weight, // [8, 768]
    f32 *__restrict__ logits,       // [tokens, 8]
    i64 tokens)
{
    await_launches();
    constexpr int COLUMNS = EXPERTS;
    const f32 *matrix = weight;
    f32 *out = logits;
    alignas(16) __shared__ f32 left[2][TILE_DEPTH][TILE_TOKENS + PAD];
    alignas(16) __shared__ f32 right[2][TILE_DEPTH][TILE_EXPERTS + PAD];
    __shared__ f32 parts[SLICES][TILE_TOKENS][TILE_EXPERTS];
    const i64 first_token = block_x() * TILE_TOKENS;
    const i32 rows = (i32)(tokens - first_token);
    const i32 first_column = (i32)block_y() * TILE_EXPERTS, columns = COLUMNS - first_column;
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
            out[(first_token + row) * COLUMNS + first_column + column] =
                sum;
    }
}

// ---- selection ----

constexpr int TOP_K = 1;
constexpr int SELECT_THREADS = 512, SELECT_TOKENS = 64;

// A team of LANES adjacent lanes selects for a token.
constexpr int LANES = 8;

DEVICE i32 team_lane() { return lane_index() % LANES; }
DEVICE LaneMask team_lanes() { return (((LaneMask)1 << LANES) - 1) << (lane_index() - team_lane()); }
DEVICE u32 from_team(u32 value, i32 lane) { return shuffle(value, lane_index() - team_lane() + lane); }

DEVICE f32 team_sum(f32 value)
{
    for (i32 step = LANES / 2; step > 0; step /= 2)
        value += shuffle(value, lane_index() ^ step);
    return value;
}

DEVICE u32 team_max(u32 value)
{
    for (i32 step = LANES / 2; step > 0; step /= 2) {
        const u32 other = shuffle(value, lane_index() ^ step);
        value = other > value ? other : value;
    }
    return value;
}

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
    #pragma unroll
    for (i32 p = 0; p < PLACES; p++) {
        f32 weight = choices.scores[p];
        choices.scores[p] = choices.ids[p] < 0 ? 0.0f : weight;
    }
}

// Counts of a block: a row of tile_counts.
constexpr int COUNT_ROWS = 1, COUNTERS = COUNT_ROWS * EXPERTS;

KERNEL(SELECT_THREADS) gate_topk(
    const f32 *__restrict__ logits, // [tokens, 8]
    i32 *__restrict__ topk_ids,     // [tokens, 1]
    f32 *__restrict__ topk_weights, // [tokens, 1]
    i32 *__restrict__ tile_counts,  // [tiles, 8]
    i64 tokens)
{
    await_launches();
    const i64 first = block_x() * SELECT_TOKENS;
    __shared__ i32 counts[COUNTERS];
    for (i32 i = thread_index(); i < COUNTERS; i += SELECT_THREADS)
        counts[i] = 0;
    block_sync();
    // All teams of a warp go round together: those past the last token do as
    // the first, and write nothing.
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
            values[s] = expert_at(s) < EXPERTS ? logits[token * EXPERTS + expert_at(s)] : -infinity();
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
                    shared_add(&counts[choices.ids[p]], 1);
            }
        }
    }

    // Sums of integers: the order in which threads added them does not show.
    block_sync();
    for (i32 i = thread_index(); i < COUNTERS; i += SELECT_THREADS)
        tile_counts[block_x() * EXPERTS + i] = counts[i];
}
