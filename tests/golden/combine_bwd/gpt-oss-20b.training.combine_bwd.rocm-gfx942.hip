// combine_bwd for rocm:gfx942: gradients of expert outputs and of combine weights
//
//   dout[r] = dy[token of r]
//
// A block owns 6 rows in expert order; 64 adjacent threads copy one at a time.
// There are at most as many rows as slots; blocks and threads beyond the last row do nothing.
//
// combine_bwd_weights: a warp takes a token and goes over its slots. For a slot with a row,
//   dweight[t, k] = sum of dweight_parts[row] + <dout[row], down bias of its expert>
// and 0 for a slot without a row.
//
// Shared memory: none.
//
// Baked in: output dim 2880, experts 32, top_k 4, types.
// Read at run time: the number of tokens.

// [prelude: base.hpp, hip/base.hpp, bf16_bits.hpp, base.hpp, warp.hpp]

constexpr i32 WARP = 64;
typedef u64 LaneMask;

// [prelude: hip/warp.hpp, warp_max.hpp, warp.hpp]

// ---- rows ----

constexpr int OUTPUT_DIM = 2880, EXPERTS = 32, TOP_K = 4;
constexpr int THREADS = 128, TILE_ROWS = 6, ROW_THREADS = 64;
constexpr int TILE_TOKENS = 2;

typedef bf16 Activation;
constexpr int WIDTH = pack_width<Activation>(OUTPUT_DIM), PACKS = OUTPUT_DIM / WIDTH;
// A thread has up to eight packs in flight before it writes the first.
constexpr int HELD = lesser(ceil_div(PACKS, ROW_THREADS), 8);

KERNEL(THREADS) combine_bwd(
    const bf16 *__restrict__ dy,       // [tokens, 2880]
    const i32 *__restrict__ row_slots, // [rows]
    const i64 *__restrict__ offsets,   // [33]
    bf16 *__restrict__ dout,           // [rows, 2880]
    i64 tokens)
{
    await_launches();
    (void)tokens;
    const i64 first = block_x() * TILE_ROWS, kept = offsets[EXPERTS];
    for (i64 row = first + thread_index() / ROW_THREADS; row < first + TILE_ROWS && row < kept;
         row += THREADS / ROW_THREADS) {
        const Activation *from = dy + (i64)(row_slots[row] / TOP_K) * OUTPUT_DIM;
        Activation *to = dout + row * OUTPUT_DIM;
        for (i32 start = thread_index() % ROW_THREADS; start < PACKS; start += ROW_THREADS * HELD) {
            Pack<Activation, WIDTH> held[HELD] = {};
            #pragma unroll
            for (i32 n = 0; n < HELD; n++)
                if (start + n * ROW_THREADS < PACKS)
                    held[n] = load<WIDTH>(from, start + n * ROW_THREADS);
            #pragma unroll
            for (i32 n = 0; n < HELD; n++)
                if (start + n * ROW_THREADS < PACKS)
                    store(to, start + n * ROW_THREADS, held[n]);
        }
    }
}

// ---- weights ----

// <a, b> over rows of LENGTH elements, by a warp; every lane gets it.
template <int LENGTH, class A, class B> DEVICE f32 warp_product(const A *a, const B *b)
{
    constexpr int PACK = lesser(pack_width<A>(LENGTH), pack_width<B>(LENGTH));
    f32 sum = 0.0f;
    for (i32 i = lane_index(); i < LENGTH / PACK; i += WARP) {
        const Pack<A, PACK> left = load<PACK>(a, i);
        const Pack<B, PACK> right = load<PACK>(b, i);
        #pragma unroll
        for (i32 j = 0; j < PACK; j++)
            sum = fused(to_f32(left.at[j]), to_f32(right.at[j]), sum);
    }
    return warp_sum(sum);
}

// The sum of `count` parts, by a warp; every lane gets it.
DEVICE f32 warp_total(const f32 *parts, i32 count)
{
    f32 sum = 0.0f;
    for (i32 i = lane_index(); i < count; i += WARP)
        sum += parts[i];
    return warp_sum(sum);
}

static_assert(TILE_TOKENS == THREADS / WARP, "every warp has a token");

KERNEL(THREADS) combine_bwd_weights(
    const i32 *__restrict__ topk_ids,      // [tokens, 4]
    const i32 *__restrict__ slot_rows,     // [tokens, 4]
    const f32 *__restrict__ dweight_parts, // [rows, 23]
    const bf16 *__restrict__ dout,         // [rows, 2880]
    const bf16 *__restrict__ down_bias,    // [32, 2880]
    f32 *__restrict__ grad_topk_weights,   // [tokens, 4]
    i64 tokens)
{
    await_launches();
    const i64 token = block_x() * TILE_TOKENS + warp_index();
    if (token >= tokens)
        return;
    for (i32 k = 0; k < TOP_K; k++) {
        const i64 slot = token * TOP_K + k;
        const i32 row = slot_rows[slot];
        f32 dweight = 0.0f;
        if (row >= 0) {
            dweight = warp_total(dweight_parts + (i64)row * 23, 23);
            dweight += warp_product<OUTPUT_DIM>(dout + (i64)row * OUTPUT_DIM, down_bias + (i64)topk_ids[slot] * OUTPUT_DIM);
        }
        if (lane_index() == k % WARP)
            grad_topk_weights[slot] = dweight;
    }
}
