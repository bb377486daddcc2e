// dispatch: copies token rows into expert order.
//
// A block owns 64 rows in expert order. On the stack: nothing.
//
// Baked in: the width of a row, the experts per token.

// [prelude: cpu.h, cpu_vector.h, cpu_stream.h]

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
    const int streamed = is_streamed(rows, offsets[EXPERTS], sizeof(*rows) * MODEL_DIM);
    for (i64 row = first; row < last; row++) {
        i64 slot = row_slots[row];
        const bf16 *token = x + slot / TOP_K * MODEL_DIM;
        copy_row(rows + row * MODEL_DIM, token, sizeof(*rows) * MODEL_DIM, streamed);
    }
    if (streamed)
        end_streaming_stores();
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
