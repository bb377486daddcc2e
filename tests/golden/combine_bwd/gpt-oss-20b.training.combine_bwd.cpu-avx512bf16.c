// combine_bwd: the output's gradient, copied into the order of the experts; later
// the gradients of the weights of each token's choices.
//
// combine_bwd: a block owns 64 rows. The other entries: a block owns 32 tokens. The
// gradient of a weight is the product of the output's gradient and what was
// weighted, whose sums over columns grouped_gemm_dgrad made; sums are f32, in a
// fixed order. Baked in: widths, the experts per token, the shared experts.

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

// Vectors of 64 bytes: avx512bf16.
enum { LANES = 16 };
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
    v += SHUFFLE(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
    v += SHUFFLE(v, v, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3);
    v += SHUFFLE(v, v, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1);
    v += SHUFFLE(v, v, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 0);
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

// Rows that are written once and read much later.

// A copy that is larger than this finds nothing of it in a cache afterwards.
enum { FAR_BYTES = 32 << 20 };

// Stores past the caches, which then need not read the line first. `to` is
// aligned to a vector.
INLINE void store_far(vec *to, vec v) { __asm__ volatile("vmovntps %1, %0" : "=m"(*to) : "v"(v)); }
INLINE void store_far_half(vec_u16 *to, vec_u16 v) { __asm__ volatile("vmovntps %1, %0" : "=m"(*to) : "v"(v)); }

// Orders these stores before all later ones.
INLINE void end_far_stores(void) { __asm__ volatile("sfence" ::: "memory"); }

// Whether `rows` rows of `row_bytes` are best written with store_far.
INLINE int is_far(const void *to, i64 rows, i64 row_bytes)
{
    return row_bytes % sizeof(vec) == 0 && rows * row_bytes >= FAR_BYTES && (u64)to % sizeof(vec) == 0;
}

// Copies a row; one that is far has whole vectors and goes past the caches.
INLINE void copy_row(void *restrict to, const void *restrict from, i64 bytes, int far)
{
    typedef vec vec_anywhere __attribute__((aligned(1)));
    if (far)
        for (i64 i = 0; i < bytes / (i64)sizeof(vec); i++)
            store_far((vec *)to + i, ((const vec_anywhere *)from)[i]);
    else
        for (i64 i = 0; i < bytes; i++)
            ((char *)to)[i] = ((const char *)from)[i];
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

// Rounds to nearest, ties to even. A NaN stays one: it is made quiet. The
// instruction of AVX512-BF16 would make subnormals zero.
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
    OUTPUT_DIM = 2880,
    EXPERTS = 32, // ids from here on are identity experts
    TOP_K = 4,
    PARTS = 12, // columns of dweight_parts
    TILE_ROWS = 64,
    TILE_TOKENS = 32,
};

static void combine_bwd_block(
    const bf16 *restrict dy,       // [tokens, 2880]
    const i32 *restrict row_slots, // [rows]
    const i64 *restrict offsets,   // [33]
    bf16 *restrict dout,           // [rows, 2880]
    i64 tokens,
    i64 block_x, i64 block_y)
{
    (void)block_y;
    (void)tokens;
    i64 first = block_x * TILE_ROWS;
    i64 last = min_i64(first + TILE_ROWS, offsets[EXPERTS]);
    const int far = is_far(dout, offsets[EXPERTS], sizeof(*dout) * OUTPUT_DIM);
    for (i64 row = first; row < last; row++) {
        const bf16 *from = dy + row_slots[row] / TOP_K * (i64)OUTPUT_DIM;
        copy_row(dout + row * OUTPUT_DIM, from, sizeof(*dout) * OUTPUT_DIM, far);
    }
    if (far)
        end_far_stores();
}

EXPORT void combine_bwd(void *const *args, i64 first, i64 last, i64 grid_x)
{
    const bf16 *dy = *(const bf16 *const *)args[0];
    const i32 *row_slots = *(const i32 *const *)args[1];
    const i64 *offsets = *(const i64 *const *)args[2];
    bf16 *dout = *(bf16 *const *)args[3];
    i64 tokens = *(const i64 *)args[4];
    for (i64 block = first; block < last; block++)
        combine_bwd_block(dy, row_slots, offsets, dout, tokens, block % grid_x, block / grid_x);
}

// The sum of what blocks of columns summed.
INLINE f32 sum_parts(const f32 *parts, int count)
{
    f32 sum = 0;
    for (int i = 0; i < count; i++)
        sum += parts[i];
    return sum;
}

// The inner product of a row and a bias.
static f32 dot_bias(const bf16 *row, const bf16 *bias)
{
    vec sum = {0};
    i64 i = 0;
    for (; i + LANES <= OUTPUT_DIM; i += LANES)
        sum += load_bf16(row + i) * load_bf16(bias + i);
    if (i < OUTPUT_DIM)
        sum += load_part_bf16(row + i, OUTPUT_DIM - i) * load_part_bf16(bias + i, OUTPUT_DIM - i);
    return sum_lanes(sum);
}

static void combine_bwd_weights_block(
    const i32 *restrict topk_ids,      // [tokens, 4]
    const i32 *restrict slot_rows,     // [tokens, 4]
    const f32 *restrict dweight_parts, // [rows, 12]
    const bf16 *restrict dout,         // [rows, 2880]
    const bf16 *restrict down_bias,    // [32, 2880]
    f32 *restrict grad_topk_weights,   // [tokens, 4]
    i64 tokens,
    i64 block_x, i64 block_y)
{
    (void)block_y;
    i64 first = block_x * TILE_TOKENS;
    i64 last = min_i64(first + TILE_TOKENS, tokens);
    for (i64 token = first; token < last; token++) {
        f32 *gradients = grad_topk_weights + token * TOP_K;
        for (i64 k = 0; k < TOP_K; k++) {
            i64 slot = token * TOP_K + k, row = slot_rows[slot], id = topk_ids[slot];
            f32 gradient = 0; // of what has no row: masked or dropped
            if (row >= 0) {
                gradient = sum_parts(dweight_parts + row * PARTS, PARTS);
                gradient += dot_bias(dout + row * OUTPUT_DIM, down_bias + id * OUTPUT_DIM);
            }
            gradients[k] = gradient;
        }
    }
}

EXPORT void combine_bwd_weights(void *const *args, i64 first, i64 last, i64 grid_x)
{
    const i32 *topk_ids = *(const i32 *const *)args[0];
    const i32 *slot_rows = *(const i32 *const *)args[1];
    const f32 *dweight_parts = *(const f32 *const *)args[2];
    const bf16 *dout = *(const bf16 *const *)args[3];
    const bf16 *down_bias = *(const bf16 *const *)args[4];
    f32 *grad_topk_weights = *(f32 *const *)args[5];
    i64 tokens = *(const i64 *)args[6];
    for (i64 block = first; block < last; block++)
        combine_bwd_weights_block(topk_ids, slot_rows, dweight_parts, dout, down_bias,
            grad_topk_weights, tokens, block % grid_x, block / grid_x);
}
