// rms_norm_bwd for rocm:gfx942: gradients of normalised rows to those of the rows, and of the weight
//
//   rms_norm_bwd         with g = dy · weight and r = 1 / sqrt(mean(x²) + eps):
//                        dx[t] = (g - x[t] · mean(g · x[t]) · r²) · r
//   rms_norm_bwd_weight  grad_weight = sum over tokens of dy[t] · x[t] · r
//
// A block owns 2 tokens, a warp each, or 32 columns of all tokens. Sums are f32.
//
// Shared memory of rms_norm_bwd_weight:
//   sums  f32 [4][32]   each over every 4th token
//
// Baked in: width 3584, eps, types.
// Read at run time: the number of tokens.

// [prelude: base.hpp, hip/base.hpp, bf16_bits.hpp, base.hpp, warp.hpp]

constexpr i32 WARP = 64;
typedef u64 LaneMask;

// [prelude: hip/warp.hpp, warp_max.hpp, warp.hpp]

// ---- the kernels ----

constexpr int WIDTH = 3584, THREADS = 128, TILE_TOKENS = 2;

typedef bf16 Activation;
constexpr int PACK = pack_width<Activation>(WIDTH), PACKS = WIDTH / PACK;

// A warp returns 1 / sqrt(mean(x²) + eps) of a row.
DEVICE f32 inverse_of(const Activation *row)
{
    f32 squares = 0.0f;
    for (i32 i = lane_index(); i < PACKS; i += WARP) {
        const Pack<Activation, PACK> pack = load<PACK>(row, i);
        #pragma unroll
        for (i32 j = 0; j < PACK; j++)
            squares = fused(to_f32(pack.at[j]), to_f32(pack.at[j]), squares);
    }
    return 1.0f / square_root(warp_sum(squares) / (f32)WIDTH + 1e-5f);
}

KERNEL(THREADS) rms_norm_bwd(
    const bf16 *__restrict__ x,     // [tokens, 3584]
    const f32 *__restrict__ weight, // [3584]
    const bf16 *__restrict__ dy,    // [tokens, 3584]
    f32 *__restrict__ inverse_rms,  // [tokens]
    bf16 *__restrict__ dx,          // [tokens, 3584]
    i64 tokens)
{
    await_launches();
    const i64 token = block_x() * TILE_TOKENS + warp_index(), at = token * WIDTH;
    if (token >= tokens)
        return;
    const f32 inverse = inverse_of(x + at);
    if (lane_index() == 0)
        inverse_rms[token] = inverse;
    f32 products = 0.0f;
    for (i32 i = lane_index(); i < PACKS; i += WARP) {
        const Pack<Activation, PACK> row = load<PACK>(x + at, i), of_y = load<PACK>(dy + at, i);
        const Pack<f32, PACK> scale = load<PACK>(weight, i);
        #pragma unroll
        for (i32 j = 0; j < PACK; j++)
            products = fused(to_f32(row.at[j]), to_f32(of_y.at[j]) * scale.at[j], products);
    }
    const f32 along = warp_sum(products) / (f32)WIDTH * inverse * inverse;
    for (i32 i = lane_index(); i < PACKS; i += WARP) {
        const Pack<Activation, PACK> row = load<PACK>(x + at, i), of_y = load<PACK>(dy + at, i);
        const Pack<f32, PACK> scale = load<PACK>(weight, i);
        Pack<Activation, PACK> pack;
        #pragma unroll
        for (i32 j = 0; j < PACK; j++)
            pack.at[j] = round_to<Activation>((to_f32(of_y.at[j]) * scale.at[j] - to_f32(row.at[j]) * along) * inverse);
        store(dx + at, i, pack);
    }
}

constexpr int COLUMNS = 32, GROUPS = THREADS / COLUMNS;

KERNEL(THREADS) rms_norm_bwd_weight(
    const bf16 *__restrict__ x,          // [tokens, 3584]
    const bf16 *__restrict__ dy,         // [tokens, 3584]
    const f32 *__restrict__ inverse_rms, // [tokens]
    f32 *__restrict__ grad_weight,       // [3584]
    i64 accumulate,
    i64 tokens)
{
    await_launches();
    __shared__ f32 sums[GROUPS * COLUMNS];
    const i32 column = thread_index() % COLUMNS, group = thread_index() / COLUMNS;
    const i64 i = block_x() * COLUMNS + column;
    f32 sum = 0.0f;
    if (i < WIDTH)
        for (i64 token = group; token < tokens; token += GROUPS) {
            const i64 at = token * WIDTH + i;
            sum = fused(to_f32(x[at]) * inverse_rms[token], to_f32(dy[at]), sum);
        }
    sums[group * COLUMNS + column] = sum;
    block_sync();
    if (group > 0 || i >= WIDTH)
        return;
    for (i32 other = 1; other < GROUPS; other++)
        sum += sums[other * COLUMNS + column];
    grad_weight[i] = accumulate ? grad_weight[i] + sum : sum;
}
