// rms_norm for cuda:sm_90a: rows divided by their root mean square
//
//   y[t] = x[t] / sqrt(mean(x[t]²) + eps) · weight
//
// A block owns 4 tokens, a warp each; a lane has some packs of adjacent columns and reads them twice.
// The mean is f32, a result is rounded once.
//
// Shared memory: none.
//
// Baked in: width 3584, eps, types.
// Read at run time: the number of tokens.

// [prelude: base.hpp, cuda/base.cuh, base.hpp, warp.hpp, cuda/warp.cuh, warp.hpp]

// ---- the kernel ----

constexpr int WIDTH = 3584, THREADS = 128, TILE_TOKENS = 4;

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

KERNEL(THREADS) rms_norm(
    const bf16 *x,     // [tokens, 3584]
    const f32 *weight, // [3584]
    bf16 *y,           // [tokens, 3584]
    i64 tokens)
{
    await_launches();
    const i64 token = block_x() * TILE_TOKENS + warp_index(), at = token * WIDTH;
    if (token >= tokens)
        return;
    const f32 inverse = inverse_of(x + at);
    for (i32 i = lane_index(); i < PACKS; i += WARP) {
        Pack<Activation, PACK> pack = load<PACK>(x + at, i);
        const Pack<f32, PACK> scale = load<PACK>(weight, i);
        #pragma unroll
        for (i32 j = 0; j < PACK; j++)
            pack.at[j] = round_to<Activation>(to_f32(pack.at[j]) * inverse * scale.at[j]);
        store(y + at, i, pack);
    }
}
