// dispatch_bwd: sums the gradient of each token over everything that read it.
//
// A block owns 32 tokens. Sums are f32, in the order of the slots, then of the shared
// experts, then of the router, and rounded once. On the stack: the sources of one token.
//
// Baked in: the width of a row, the experts per token, the shared experts.

// [prelude: cpu.h, cpu_vector.h, cpu_bf16.h, cpu_vector.h]

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
