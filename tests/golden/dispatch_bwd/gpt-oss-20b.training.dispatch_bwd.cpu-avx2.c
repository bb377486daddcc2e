// dispatch_bwd: the gradient of each token, summed from everything it reached.
//
// A block owns 32 tokens. Sums are f32, in the order of the slots, then of the
// shared experts, then the router's part, and rounded once. Baked in: the width of
// a row, the experts per token, the shared experts. On the stack: the sources
// of one token.

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
    MODEL_DIM = 2880,
    EXPERTS = 32, // ids from here on are identity experts
    TOP_K = 4,
    SHARED = 0,
    MAX_SOURCES = TOP_K + SHARED,
    TERMS = 1, // f32 rows: of gates and the router
    TILE_TOKENS = 32,
};

typedef struct {
    const bf16 *row;
    f32 weight;
} source;

typedef struct {
    const f32 *row;
    f32 weight;
} term;

INLINE vec load_row(const bf16 *from, i64 count)
{
    return count >= LANES ? load_bf16(from) : load_part_bf16(from, count);
}

// One vector of a token's gradient, of which `count` elements exist.
INLINE vec weighted_sum(const source *sources, int source_count, const term *terms, i64 column, i64 count)
{
    vec sum = {0};
    for (int s = 0; s < source_count; s++)
        sum += load_row(sources[s].row + column, count) * sources[s].weight;
    for (int t = 0; t < TERMS; t++) {
        const f32 *from = terms[t].row + column;
        vec v = count >= LANES ? load_f32(from) : load_part_f32(from, count);
        sum += v * terms[t].weight;
    }
    return sum;
}

static void sum_token(bf16 *restrict to, const source *sources, int source_count, const term *terms)
{
    for (i64 column = 0; column < MODEL_DIM; column += LANES) {
        i64 count = MODEL_DIM - column;
        vec sum = weighted_sum(sources, source_count, terms, column, count);
        if (count >= LANES)
            store_bf16(to + column, sum);
        else
            store_part_bf16(to + column, sum, count);
    }
}

static void dispatch_bwd_block(
    const bf16 *restrict drows,    // [rows, 2880]
    const i32 *restrict slot_rows, // [tokens, 4]
    const f32 *restrict router_dx, // [tokens, 2880]
    bf16 *restrict dx,             // [tokens, 2880]
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
            f32 weight = 1.0f;
            if (slot_rows[slot] >= 0)
                sources[count++] = (source){drows + (i64)slot_rows[slot] * MODEL_DIM, weight};
        }
        const term terms[TERMS] = {
            {router_dx + token * MODEL_DIM, 1.0f},
        };
        sum_token(dx + token * MODEL_DIM, sources, count, terms);
    }
}

EXPORT void dispatch_bwd(void *const *args, i64 first, i64 last, i64 grid_x)
{
    const bf16 *drows = *(const bf16 *const *)args[0];
    const i32 *slot_rows = *(const i32 *const *)args[1];
    const f32 *router_dx = *(const f32 *const *)args[2];
    bf16 *dx = *(bf16 *const *)args[3];
    i64 tokens = *(const i64 *)args[4];
    for (i64 block = first; block < last; block++)
        dispatch_bwd_block(drows, slot_rows, router_dx, dx, tokens, block % grid_x,
            block / grid_x);
}
