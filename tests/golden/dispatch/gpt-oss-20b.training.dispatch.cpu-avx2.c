// dispatch: token rows, copied into the order of the experts.
//
// A block owns 64 expert rows, which it writes whole. Baked in: the width of a
// row and the experts per token. Nothing lies on the stack.

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

enum {
    MODEL_DIM = 2880,
    EXPERTS = 32,
    TOP_K = 4,
    TILE_ROWS = 64,
};

static void dispatch_block(
    const bf16 *restrict x,        // [tokens, 2880]
    const i32 *restrict row_slots, // [rows]
    const i64 *restrict offsets,   // [33]
    bf16 *restrict rows,           // [rows, 2880]
    i64 tokens,
    i64 block_x, i64 block_y)
{
    (void)block_y;
    (void)tokens;
    i64 first = block_x * TILE_ROWS;
    i64 last = min_i64(first + TILE_ROWS, offsets[EXPERTS]);
    const int far = is_far(rows, offsets[EXPERTS], sizeof(*rows) * MODEL_DIM);
    for (i64 row = first; row < last; row++) {
        i64 slot = row_slots[row];
        const bf16 *token = x + slot / TOP_K * MODEL_DIM;
        copy_row(rows + row * MODEL_DIM, token, sizeof(*rows) * MODEL_DIM, far);
    }
    if (far)
        end_far_stores();
}

EXPORT void dispatch(void *const *args, i64 first, i64 last, i64 grid_x)
{
    const bf16 *x = *(const bf16 *const *)args[0];
    const i32 *row_slots = *(const i32 *const *)args[1];
    const i64 *offsets = *(const i64 *const *)args[2];
    bf16 *rows = *(bf16 *const *)args[3];
    i64 tokens = *(const i64 *)args[4];
    for (i64 block = first; block < last; block++)
        dispatch_block(x, row_slots, offsets, rows, tokens, block % grid_x, block / grid_x);
}
