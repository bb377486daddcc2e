// rms_norm_bwd: gradients of normalised rows to those of the rows, and of the weight.
//
//   rms_norm_bwd         with g = dy · weight and r = 1 / sqrt(mean(x²) + eps):
//                        dx = (g - x · mean(g · x) · r²) · r
//   rms_norm_bwd_weight  Σ over tokens of dy · x · r
//
// A block owns 32 tokens, or 32 columns of all tokens. Sums are f32.
//
// Baked in: the width of a row, eps.

// [prelude: cpu.h, cpu_vector.h, cpu_bf16.h, cpu_vector.h]

enum { TILE_TOKENS = 32, COLUMNS = 32 };

enum { WIDTH = 3584 };

// Returns 1 / sqrt(mean(x²) + eps) of a row.
INLINE f32 inverse_of(const bf16 *row)
{
    vec squares = {0};
    i64 i = 0;
    for (; i + LANES <= WIDTH; i += LANES)
        squares += load_bf16(row + i) * load_bf16(row + i);
    vec rest = load_part_bf16(row + i, WIDTH - i);
    f32 mean = sum_lanes(squares + rest * rest) / WIDTH;
    return 1.0f / __builtin_sqrtf(mean + 1e-5f);
}

INLINE vec load_row(const bf16 *from, i64 count)
{
    return count >= LANES ? load_bf16(from) : load_part_bf16(from, count);
}

INLINE vec load_weight(const f32 *from, i64 count)
{
    return count >= LANES ? load_f32(from) : load_part_f32(from, count);
}

static void rms_norm_bwd_block(
    const bf16 *restrict x,     // [tokens, 3584]
    const f32 *restrict weight, // [3584]
    const bf16 *restrict dy,    // [tokens, 3584]
    f32 *restrict inverse_rms,  // [tokens]
    bf16 *restrict dx,          // [tokens, 3584]
    i64 tokens,
    i64 block_x, i64 block_y)
{
    (void)block_y;
    i64 last = min_i64((block_x + 1) * TILE_TOKENS, tokens);
    for (i64 token = block_x * TILE_TOKENS; token < last; token++) {
        const bf16 *row = x + token * WIDTH, *of_y = dy + token * WIDTH;
        bf16 *to = dx + token * WIDTH;
        f32 inverse = inverse_of(row);
        inverse_rms[token] = inverse;
        vec products = {0};
        for (i64 i = 0; i < WIDTH; i += LANES)
            products += load_row(row + i, WIDTH - i) * (load_row(of_y + i, WIDTH - i) * load_weight(weight + i, WIDTH - i));
        f32 along = sum_lanes(products) / WIDTH * inverse * inverse;
        for (i64 i = 0; i < WIDTH; i += LANES) {
            i64 left = WIDTH - i;
            vec g = load_row(of_y + i, left) * load_weight(weight + i, left);
            vec sum = (g - load_row(row + i, left) * along) * inverse;
            if (left >= LANES)
                store_bf16(to + i, sum);
            else
                store_part_bf16(to + i, sum, left);
        }
    }
}

EXPORT void rms_norm_bwd(void *const *args, i64 first, i64 last, i64 grid_x)
{
    const bf16 *x = *(const bf16 *const *)args[0];
    const f32 *weight = *(const f32 *const *)args[1];
    const bf16 *dy = *(const bf16 *const *)args[2];
    f32 *inverse_rms = *(f32 *const *)args[3];
    bf16 *dx = *(bf16 *const *)args[4];
    i64 tokens = *(const i64 *)args[5];
    for (i64 block = first; block < last; block++)
        rms_norm_bwd_block(x, weight, dy, inverse_rms, dx, tokens, block % grid_x,
            block / grid_x);
}

static void rms_norm_bwd_weight_block(
    const bf16 *restrict x,          // [tokens, 3584]
    const bf16 *restrict dy,         // [tokens, 3584]
    const f32 *restrict inverse_rms, // [tokens]
    f32 *restrict grad_weight,       // [3584]
    i64 accumulate,
    i64 tokens,
    i64 block_x, i64 block_y)
{
    (void)block_y;
    i64 last = min_i64((block_x + 1) * COLUMNS, WIDTH);
    for (i64 i = block_x * COLUMNS; i < last; i += LANES) {
        i64 left = last - i;
        vec sum = {0};
        for (i64 token = 0; token < tokens; token++) {
            i64 at = token * WIDTH + i;
            sum += load_row(x + at, left) * inverse_rms[token] * load_row(dy + at, left);
        }
        if (accumulate)
            sum += load_part_f32(grad_weight + i, left);
        store_part_f32(grad_weight + i, sum, left);
    }
}

EXPORT void rms_norm_bwd_weight(void *const *args, i64 first, i64 last, i64 grid_x)
{
    const bf16 *x = *(const bf16 *const *)args[0];
    const bf16 *dy = *(const bf16 *const *)args[1];
    const f32 *inverse_rms = *(const f32 *const *)args[2];
    f32 *grad_weight = *(f32 *const *)args[3];
    i64 accumulate = *(const i64 *)args[4];
    i64 tokens = *(const i64 *)args[5];
    for (i64 block = first; block < last; block++)
        rms_norm_bwd_weight_block(x, dy, inverse_rms, grad_weight, accumulate, tokens,
            block % grid_x, block / grid_x);
}
