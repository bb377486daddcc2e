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

enum {
    MODEL_DIM = 256,
    EXPERTS = 8,
    TOP_K = 2,
    TILE_ROWS = 64,
};

static void copy_row(bf16 *restrict to, const bf16 *restrict from)
{
    for (i64 i = 0; i < MODEL_DIM; i++)
        to[i] = from[i];
}

static void dispatch_block(
    const bf16 *restrict x,        // [tokens, 256]
    const i32 *restrict row_slots, // [rows]
    const i64 *restrict offsets,   // [9]
    bf16 *restrict rows,           // [rows, 256]
    i64 tokens,
    i64 block_x, i64 block_y)
{
    (void)block_y;
    (void)tokens;
    i64 first = block_x * TILE_ROWS;
    i64 last = min_i64(first + TILE_ROWS, offsets[EXPERTS]);
    for (i64 row = first; row < last; row++) {
        i64 slot = row_slots[row];
        const bf16 *token = x + slot / TOP_K * MODEL_DIM;
        copy_row(rows + row * MODEL_DIM, token);
    }
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
