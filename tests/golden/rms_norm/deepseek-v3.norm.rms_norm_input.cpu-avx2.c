// rms_norm: divides each row by its root mean square, and multiplies it by a weight.
//
// A block owns 32 tokens. The mean of squares is f32, a lane at a time and then over the lanes;
// a result is rounded once.
//
// Baked in: the width of a row, eps.

// [prelude: cpu.h, cpu_vector.h, cpu_bf16.h, cpu_vector.h]

enum { TILE_TOKENS = 32 };

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

static void rms_norm_block(
    const bf16 *restrict x,     // [tokens, 3584]
    const f32 *restrict weight, // [3584]
    bf16 *restrict y,           // [tokens, 3584]
    i64 tokens,
    i64 block_x, i64 block_y)
{
    (void)block_y;
    i64 last = min_i64((block_x + 1) * TILE_TOKENS, tokens);
    for (i64 token = block_x * TILE_TOKENS; token < last; token++) {
        const bf16 *row = x + token * WIDTH;
        bf16 *to = y + token * WIDTH;
        f32 inverse = inverse_of(row);
        i64 i = 0;
        for (; i + LANES <= WIDTH; i += LANES)
            store_bf16(to + i, load_bf16(row + i) * inverse * load_f32(weight + i));
        vec rest = load_part_bf16(row + i, WIDTH - i) * inverse * load_part_f32(weight + i, WIDTH - i);
        store_part_bf16(to + i, rest, WIDTH - i);
    }
}

EXPORT void rms_norm(void *const *args, i64 first, i64 last, i64 grid_x)
{
    const bf16 *x = *(const bf16 *const *)args[0];
    const f32 *weight = *(const f32 *const *)args[1];
    bf16 *y = *(bf16 *const *)args[2];
    i64 tokens = *(const i64 *)args[3];
    for (i64 block = first; block < last; block++)
        rms_norm_block(x, weight, y, tokens, block % grid_x, block / grid_x);
}
