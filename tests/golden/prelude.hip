// ==== prelude/base.hpp ====

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

// ==== prelude/fetch.hpp ====

// ---- loads that only some threads need ----

// Loads a pack for threads that want it. The result of other threads must not be used. All
// load, so every thread needs a valid address: where some threads skip a load, the compiler
// waits for all loads in flight.
template <int N, class T> DEVICE Pack<T, N> fetch(bool wanted, const T *from)
{
    (void)wanted;
    return load<N>(from);
}

// Keeps earlier fetches in flight. Without it the compiler delays a load whose result only some threads
// use until it knows which.
DEVICE void all_fetched() { asm volatile("" ::: "memory"); }

// clang leaves these loads in place, because no branch precedes their use.
template <int N> DEVICE void all_fetched(const f32 (&)[N]) {}

// ==== prelude/bf16_bits.hpp ====

// No instruction here: adding just under half of the last place kept rounds to
// the nearest, ties to even; a NaN stays one.
DEVICE bf16 to_bf16(f32 value)
{
    u32 bits = bits_of(value);
    u32 quiet = bits | 0x400000u, rounded = bits + 0x7fffu + (bits >> 16 & 1u);
    return bf16{(u16)((value != value ? quiet : rounded) >> 16)};
}

// ==== prelude/hip/base.hpp ====

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

// `canonicalize` keeps clang from turning a multiplication into a mixed fma with +0, which makes -0 a +0.
DEVICE f16 to_f16(f32 value)
{
    return f16{__builtin_bit_cast(u16, (_Float16)__builtin_canonicalizef(value))};
}

// ==== prelude/hip/warp.hpp ====

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

// ==== prelude/hip/mfma.hpp ====

// ---- matrix instructions of a wave ----

// sums + a · b on matrix cores, EDGE x EDGE x K, by all 64 lanes. Each group of lanes, lane / EDGE,
// holds one share of the K elements. A lane holds
//   a       of row lane % EDGE of the left matrix, the share of its group
//   b       of column lane % EDGE of the right one, the same
//   sums    of that column: in register r, row r / 4 * (256 / EDGE) + lane / EDGE * 4 + r % 4
typedef f32 f32x4 __attribute__((ext_vector_type(4)));
typedef f32 f32x16 __attribute__((ext_vector_type(16)));

DEVICE f32x16 mfma_32x32x2(f32 a, f32 b, f32x16 sums)
{
    return __builtin_amdgcn_mfma_f32_32x32x2f32(a, b, sums, 0, 0, 0);
}

DEVICE f32x4 mfma_16x16x4(f32 a, f32 b, f32x4 sums)
{
    return __builtin_amdgcn_mfma_f32_16x16x4f32(a, b, sums, 0, 0, 0);
}

typedef short bf16x4 __attribute__((ext_vector_type(4)));

DEVICE bf16x4 vector_of(Pack<bf16, 4> pack) { return __builtin_bit_cast(bf16x4, pack); }

DEVICE f32x16 mfma_32x32x8(Pack<bf16, 4> a, Pack<bf16, 4> b, f32x16 sums)
{
    return __builtin_amdgcn_mfma_f32_32x32x8bf16_1k(vector_of(a), vector_of(b), sums, 0, 0, 0);
}

DEVICE f32x4 mfma_16x16x16(Pack<bf16, 4> a, Pack<bf16, 4> b, f32x4 sums)
{
    return __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(vector_of(a), vector_of(b), sums, 0, 0, 0);
}

// ==== prelude/hip/along.hpp ====

// ---- loads without a wait before their use ----

// 16 bytes of elements, kept as words until their use. The compiler unpacks 16-bit elements right
// after their load, and waits for the load to do so.
typedef u32 Words __attribute__((ext_vector_type(4)));

template <class To, class From> DEVICE To as(const From &from) { return __builtin_bit_cast(To, from); }

// A lane that needs no words, for which they are not `own`, loads anyway: what another lane loads in
// the same request, or what is cached. A divergent branch around a load would make the compiler wait
// for all loads in flight.
DEVICE Words load_along(const void *from, bool own)
{
    (void)own;
    return *reinterpret_cast<const Words *>(from);
}

// Keeps loads before this ahead of loads after it, so that they arrive in the order of use.
DEVICE void keep_order() { __builtin_amdgcn_sched_barrier(0); }

// Returns the same number, opaque to the compiler, so that values derived from it are recomputed
// where they are used instead of being hoisted out of a loop and kept in registers.
DEVICE i32 renewed(i32 value)
{
    asm volatile("" : "+v"(value));
    return value;
}

// ==== prelude/warp.hpp ====

// ---- warps ----

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

DEVICE f32 team_sum(f32 value)
{
    for (i32 step = LANES / 2; step > 0; step /= 2)
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

// ==== prelude/warp_max.hpp ====

DEVICE u32 warp_max(u32 value)
{
    for (i32 step = WARP / 2; step > 0; step /= 2) {
        u32 other = shuffle(value, (thread_index() % WARP) ^ step);
        value = other > value ? other : value;
    }
    return value;
}

// Returns the maximum over a team.
DEVICE u32 team_max(u32 value)
{
    for (i32 step = TEAM / 2; step > 0; step /= 2) {
        const u32 other = shuffle(value, lane_index() ^ step);
        value = other > value ? other : value;
    }
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

// ==== prelude/order.hpp ====

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

// ==== prelude/math/exp.hpp ====

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

// ==== prelude/activation.hpp ====

// The activation of an expert.
DEVICE f32 activation(f32 x)
{
    return x * sigmoid(1.702f * x);
}

// The activation of an expert.
DEVICE f32 activation(f32 x)
{
    return x * sigmoid(x);
}

// The activation of an expert.
DEVICE f32 activation(f32 x)
{
    return x < 0.0f ? 0.0f : x;
}

// ==== prelude/activation_slope.hpp ====

// The derivative of the activation. Below `activation`, which brings its functions.
DEVICE f32 activation_slope(f32 x)
{
    const f32 z = 1.702f * x, s = sigmoid(z);
    return fused(z * s, 1.0f - s, s);
}

// ==== prelude/tile_gemm.hpp ====

// ---- GEMM of a tile ----

// ==== prelude/stage.hpp ====

// Rows are staged DEPTH elements at a time as f32 in shared memory, transposed
// (tile[k][row]), so that a thread reads its operands four at a time. PAD keeps
// that alignment and spreads the transposing stores over the banks.
constexpr int PAD = 4;

// Moves ROWS rows of DEPTH elements of a matrix [*, WIDTH] through the registers of THREADS threads to
// shared memory.
template <class T, int ROWS, int DEPTH, int WIDTH, int THREADS> struct Stage {
    static constexpr int PACK = pack_width<T>(WIDTH) < DEPTH ? pack_width<T>(WIDTH) : DEPTH;
    static constexpr int PACKS_PER_ROW = DEPTH / PACK, PACKS = ROWS * PACKS_PER_ROW;
    static constexpr int HELD = ceil_div(PACKS, THREADS);

    Pack<T, PACK> held[HELD];

    DEVICE static i32 pack_of(i32 i) { return i * THREADS + thread_index(); }
    DEVICE static i32 row_of(i32 i) { return pack_of(i) / PACKS_PER_ROW; }
    DEVICE static i32 depth_of(i32 i) { return pack_of(i) % PACKS_PER_ROW * PACK; }

    // Loads from element `depth` on; zeros beyond `rows` and WIDTH.
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

// ==== prelude/slab.hpp ====

// ---- slabs ----

// Moves LINES lines by COLUMNS columns of a matrix [*, WIDTH] through the registers of THREADS threads
// to shared memory. Lines are steps of the contraction, so they need no transposition
// (tile[line][column]).
template <class T, int COLUMNS, int LINES, int WIDTH, int THREADS> struct Slab {
    static constexpr int PACK = pack_width<T>(WIDTH), GROUP = lesser(PACK, 4);
    static constexpr int PACKS_PER_LINE = COLUMNS / PACK, PACKS = LINES * PACKS_PER_LINE;
    static constexpr int HELD = ceil_div(PACKS, THREADS);
    static_assert(PACKS_PER_LINE * PACK == COLUMNS, "a pack is in one tile");

    Pack<T, PACK> held[HELD];

    DEVICE static i32 pack_of(i32 i) { return i * THREADS + thread_index(); }
    DEVICE static i32 line_of(i32 i) { return pack_of(i) / PACKS_PER_LINE; }
    DEVICE static i32 column_of(i32 i) { return pack_of(i) % PACKS_PER_LINE * PACK; }

    // Loads columns `first` and on. `line_at(i)` is the start of line i; zeros beyond `lines` and WIDTH.
    template <class LineAt> DEVICE void fetch(i32 lines, i32 first, LineAt line_at)
    {
        #pragma unroll
        for (i32 i = 0; i < HELD; i++) {
            const i32 line = line_of(i), column = first + column_of(i);
            held[i] = Pack<T, PACK>{};
            if (line < lines && column < WIDTH && pack_of(i) < PACKS)
                held[i] = load<PACK>(line_at(line), column / PACK);
        }
    }

    // Writes to columns `first` and on of a tile.
    template <int PITCH> DEVICE void put(f32 (&tile)[LINES][PITCH], i32 first) const
    {
        #pragma unroll
        for (i32 i = 0; i < HELD; i++)
            #pragma unroll
            for (i32 j = 0; j < PACK; j += GROUP) {
                Pack<f32, GROUP> group;
                #pragma unroll
                for (i32 n = 0; n < GROUP; n++)
                    group.at[n] = to_f32(held[i].at[j + n]);
                if (pack_of(i) < PACKS)
                    store(&tile[line_of(i)][first + column_of(i) + j], group);
            }
    }
};

// ==== prelude/comm_cast.hpp ====

// ---- conversion to and from the communication dtype ----

// A size is the magnitude of a value as the bits of an f32: integers of the same order.
constexpr u32 INFINITE = 0x7f800000u;
DEVICE u32 size_of(f32 value) { return bits_of(value) & 0x7fffffffu; }
DEVICE u32 sign_of(f32 value) { return bits_of(value) & 0x80000000u; }

// The NaN of a type, and the size of its largest value.
DEVICE f32 nan_as(f32) { return float_of(0x7fc00000u); }
DEVICE f16 nan_as(f16) { return f16{0x7e00}; }
DEVICE bf16 nan_as(bf16) { return bf16{0x7fc0}; }
DEVICE u32 largest_as(f32) { return 0x7f7fffffu; }
DEVICE u32 largest_as(f16) { return 0x477fe000u; }
DEVICE u32 largest_as(bf16) { return 0x7f7f0000u; }

// Converts a value to another type. A finite value beyond the range saturates.
template <class T> DEVICE T fitted(f32 value)
{
    const u32 size = size_of(value);
    if (size > INFINITE)
        return nan_as(T{});
    const bool over = size > largest_as(T{}) && size < INFINITE;
    return round_to<T>(over ? float_of(sign_of(value) | largest_as(T{})) : value);
}

// Converts a value to another type. A value beyond the range saturates.
template <class T> DEVICE T fitted(f32 value)
{
    const u32 size = size_of(value);
    if (size > INFINITE)
        return nan_as(T{});
    const bool over = size > largest_as(T{});
    return round_to<T>(over ? float_of(sign_of(value) | largest_as(T{})) : value);
}

// Converts a value of at most 448 to E4M3. In the binade of 2^14 an f32 has the resolution of
// E4M3 subnormals, so an addition rounds to them.
DEVICE u32 to_e4m3(f32 value)
{
    const u32 size = size_of(value);
    if (size >= INFINITE)
        return 0x7f;
    const u32 normal = ((size + 0x7ffffu + (size >> 20 & 1u)) >> 20) - (120u << 3);
    const u32 small = bits_of(float_of(size) + 16384.0f) - 0x46800000u;
    return sign_of(value) >> 24 | (size < 0x3c800000u ? small : normal);
}

// Converts the lowest byte from E4M3.
DEVICE f32 of_e4m3(u32 code)
{
    const u32 size = code & 0x7fu, sign = (code & 0x80u) << 24;
    const u32 small = bits_of((f32)size * 0.001953125f), normal = (size << 20) + (120u << 23);
    return float_of(sign | (size == 0x7fu ? 0x7fc00000u : size < 8 ? small : normal));
}

// ==== prelude/multiply.hpp ====

// Returns the position of item `i` of a thread's COUNT, when THREADS threads share a side of a tile:
// groups of up to four adjacent items go to the threads in turn.
template <int COUNT, int THREADS> DEVICE i32 dealt(i32 thread, i32 i)
{
    constexpr int GROUP = COUNT < 4 ? COUNT : 4;
    return (i / GROUP * THREADS + thread) * GROUP + i % GROUP;
}

// Loads the COUNT items of a thread from one row of a tile.
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

// sums += leftᵀ · right over STEPS of the depth from `first` on, for a thread of a
// grid of ROW_THREADS x COLUMN_THREADS, rows first.
template <int ROW_THREADS, int COLUMN_THREADS, int STEPS, int ROWS, int COLUMNS, int DEPTH, int LEFT, int RIGHT>
DEVICE void multiply(f32 (&sums)[ROWS][COLUMNS], const f32 (&left)[DEPTH][LEFT],
                     const f32 (&right)[DEPTH][RIGHT], i32 thread, i32 first)
{
    #pragma unroll 4
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

