// combine_bwd: copies the gradient of the output into expert order; its other entries compute the
// gradients of the combine weights, later in the pass.
//
// combine_bwd: a block owns 64 rows. The other entries: a block owns 32 tokens. The gradient
// of a weight is the inner product of the output's gradient with the value that it weighted;
// grouped_gemm_dgrad has already summed it by column tiles. Sums are f32, in a fixed order.
//
// Baked in: widths, the experts per token, the shared experts.

// [prelude: cpu.h, cpu_vector.h, cpu_stream.h, cpu_bf16.h, cpu_vector.h]

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
    const int streamed = is_streamed(dout, offsets[EXPERTS], sizeof(*dout) * OUTPUT_DIM);
    for (i64 row = first; row < last; row++) {
        const bf16 *from = dy + row_slots[row] / TOP_K * (i64)OUTPUT_DIM;
        copy_row(dout + row * OUTPUT_DIM, from, sizeof(*dout) * OUTPUT_DIM, streamed);
    }
    if (streamed)
        end_streaming_stores();
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
