// combine: the weighted sum of what the experts made of each token.
//
// A block owns 32 tokens. Sums are f32, in the order of the slots, then of the
// shared experts, and rounded once. Baked in: the width of a row, the experts
// per token, the shared experts. On the stack: the sources of one token.

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

// bf16: the upper half of an f32.
INLINE vec f32_of_bf16(vec_u16 v)
{
#ifdef __clang__
    vec_u32 wide = __builtin_convertvector(v, vec_u32);
#else
    vec_u32 wide;
    __asm__("vpmovzxwd %1, %0" : "=v"(wide) : "vm"(v)); // gcc would widen in halves
#endif
    return (vec)(wide << 16);
}

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

enum {
    OUTPUT_DIM = 4096,
    EXPERTS = 8, // ids from here on are identity experts
    TOP_K = 2,
    SHARED = 0,
    MAX_SOURCES = TOP_K + SHARED,
    TILE_TOKENS = 32,
};

typedef struct {
    const bf16 *row;
    f32 weight;
} source;

INLINE vec weighted_sum(const source *sources, int count, i64 column)
{
    vec sum = {0};
    for (int s = 0; s < count; s++)
        sum += load_bf16(sources[s].row + column) * sources[s].weight;
    return sum;
}

INLINE vec weighted_sum_part(const source *sources, int count, i64 column)
{
    vec sum = {0};
    for (int s = 0; s < count; s++)
        sum += load_part_bf16(sources[s].row + column, OUTPUT_DIM - column) * sources[s].weight;
    return sum;
}

static void combine_row(bf16 *restrict to, const source *sources, int count)
{
    i64 column = 0;
    for (; column + LANES <= OUTPUT_DIM; column += LANES)
        store_bf16(to + column, weighted_sum(sources, count, column));
    if (column < OUTPUT_DIM) {
        vec rest = weighted_sum_part(sources, count, column);
        store_part_bf16(to + column, rest, OUTPUT_DIM - column);
    }
}

static void combine_block(
    const bf16 *restrict out,         // [rows, 4096]
    const i32 *restrict slot_rows,    // [tokens, 2]
    const f32 *restrict topk_weights, // [tokens, 2]
    bf16 *restrict y,                 // [tokens, 4096]
    i64 tokens,
    i64 block_x, i64 block_y)
{
    (void)block_y;
    i64 first = block_x * TILE_TOKENS;
    i64 last = min_i64(first + TILE_TOKENS, tokens);
    for (i64 token = first; token < last; token++) {
        source sources[MAX_SOURCES];
        int count = 0;
        for (i64 slot = token * TOP_K; slot < (token + 1) * TOP_K; slot++) {
            f32 weight = topk_weights[slot];
            if (slot_rows[slot] >= 0)
                sources[count++] = (source){out + (i64)slot_rows[slot] * OUTPUT_DIM, weight};
        }
        combine_row(y + token * OUTPUT_DIM, sources, count);
    }
}

EXPORT void combine(void *const *args, i64 first, i64 last, i64 grid_x)
{
    const bf16 *out = *(const bf16 *const *)args[0];
    const i32 *slot_rows = *(const i32 *const *)args[1];
    const f32 *topk_weights = *(const f32 *const *)args[2];
    bf16 *y = *(bf16 *const *)args[3];
    i64 tokens = *(const i64 *)args[4];
    for (i64 block = first; block < last; block++)
        combine_block(out, slot_rows, topk_weights, y, tokens, block % grid_x, block / grid_x);
}
