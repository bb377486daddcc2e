// combine: sums each token's expert outputs, times their weights.
//
// A block owns 32 tokens. Sums are f32, in the order of the slots and then of the shared
// experts, and rounded once. On the stack: the sources of one token.
//
// Baked in: the width of a row, the experts per token, the shared experts.

// [prelude: cpu.h, cpu_vector.h, cpu_bf16.h, cpu_vector.h]

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

INLINE vec weighted_sum(vec sum, const source *sources, int count, i64 column)
{
    for (int s = 0; s < count; s++)
        sum += load_bf16(sources[s].row + column) * sources[s].weight;
    return sum;
}

INLINE vec weighted_sum_part(vec sum, const source *sources, int count, i64 column)
{
    for (int s = 0; s < count; s++)
        sum += load_part_bf16(sources[s].row + column, OUTPUT_DIM - column) * sources[s].weight;
    return sum;
}

static void combine_row(bf16 *restrict to, const source *sources, int count)
{
    i64 column = 0;
    for (; column + LANES <= OUTPUT_DIM; column += LANES)
        store_bf16(to + column, weighted_sum((vec){0}, sources, count, column));
    if (column < OUTPUT_DIM) {
        vec rest = weighted_sum_part((vec){0}, sources, count, column);
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
