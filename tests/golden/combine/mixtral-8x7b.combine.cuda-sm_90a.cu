// combine for cuda:sm_90a
//
//   y[t] = sum over slots k, ascending, of weight[t, k] * out[row of (t, k)]
//
// A block owns 2 tokens, 128 adjacent threads one at a time, each some packs of adjacent
// columns. Sums are f32 and rounded once. A slot without a row adds nothing.
//
// Shared memory:
//   sources  i32 [2][2]   the row of each slot, or that there is none
//   weights  f32 [2][2]
//
// Baked in: output dim 4096, top_k 2, shared experts, types. Not the tokens.

// [prelude: base.hpp, cuda/base.cuh, base.hpp]

// ---- the kernel ----

constexpr int OUTPUT_DIM = 4096, TOP_K = 2;
constexpr int THREADS = 128, TILE_TOKENS = 2, TOKEN_THREADS = 128;
// Rows of this many slots are on their way to a thread before it adds the first.
constexpr int HELD = lesser(TOP_K, 8);
// What a slot adds when it has no row: nothing.
constexpr i32 NOTHING = -1;

typedef bf16 Activation;
constexpr int WIDTH = pack_width<Activation>(OUTPUT_DIM), PACKS = OUTPUT_DIM / WIDTH;

DEVICE void add(f32 (&sums)[WIDTH], f32 weight, const Pack<Activation, WIDTH> &pack)
{
    #pragma unroll
    for (i32 j = 0; j < WIDTH; j++)
        sums[j] = fused(weight, to_f32(pack.at[j]), sums[j]);
}

KERNEL(THREADS) combine(
    const bf16 *__restrict__ out,         // [rows, 4096]
    const i32 *__restrict__ slot_rows,    // [tokens, 2]
    const f32 *__restrict__ topk_weights, // [tokens, 2]
    bf16 *__restrict__ y,                 // [tokens, 4096]
    i64 tokens)
{
    await_launches();
    __shared__ i32 sources[TILE_TOKENS * TOP_K];
    __shared__ f32 weights[TILE_TOKENS * TOP_K];
    const i64 first = block_x() * TILE_TOKENS;
    for (i32 i = thread_index(); i < TILE_TOKENS * TOP_K; i += THREADS) {
        const i64 slot = first * TOP_K + i;
        if (slot >= tokens * TOP_K)
            break;
        const i32 row = slot_rows[slot];
        sources[i] = row >= 0 ? row : NOTHING;
        weights[i] = topk_weights[slot];
    }
    block_sync();

    for (i32 turn = thread_index() / TOKEN_THREADS; turn < TILE_TOKENS && first + turn < tokens;
         turn += THREADS / TOKEN_THREADS) {
        const i64 token = first + turn;
        for (i32 i = thread_index() % TOKEN_THREADS; i < PACKS; i += TOKEN_THREADS) {
            f32 sums[WIDTH] = {};
            #pragma unroll
            for (i32 start = 0; start < TOP_K; start += HELD) {
                Pack<Activation, WIDTH> held[HELD] = {};
                #pragma unroll
                for (i32 n = 0; n < HELD; n++) {
                    const i32 source = start + n < TOP_K ? sources[turn * TOP_K + start + n] : NOTHING;
                    if (source >= 0)
                        held[n] = load<WIDTH>(out + (i64)source * OUTPUT_DIM, i);
                }
                #pragma unroll
                for (i32 n = 0; n < HELD; n++) {
                    const i32 slot = turn * TOP_K + start + n;
                    if (start + n < TOP_K && sources[slot] != NOTHING)
                        add(sums, weights[slot], held[n]);
                }
            }
            Pack<Activation, WIDTH> pack;
            #pragma unroll
            for (i32 j = 0; j < WIDTH; j++)
                pack.at[j] = round_to<Activation>(sums[j]);
            store(y + token * OUTPUT_DIM, i, pack);
        }
    }
}
