// dispatch_bwd for rocm:gfx942: the gradient of each token
//
//   dx[t] = sum over slots k, ascending, of drows[row of (t, k)]
//         + router_dx[t]
//
// A block owns 2 tokens; 128 adjacent threads take one at a time, each some packs of adjacent
// columns. Sums are f32 and rounded once. A slot without a row adds nothing.
//
// Shared memory:
//   sources  i32 [2][4]   the row of each slot, or a mark for none
//
// Baked in: model dim 2880, top_k 4, shared experts, types.
// Read at run time: the number of tokens.

// [prelude: base.hpp, hip/base.hpp, bf16_bits.hpp, base.hpp, fetch.hpp]

// ---- the kernel ----

constexpr int MODEL_DIM = 2880, TOP_K = 4;
constexpr int THREADS = 128, TILE_TOKENS = 2, TOKEN_THREADS = 128;
// Rows of this many slots are in flight before a thread adds the first.
constexpr int HELD = lesser(TOP_K, 8);
// Sources of a slot without a row: nothing.
constexpr i32 NOTHING = -1;

typedef bf16 Activation;
constexpr int WIDTH = pack_width<Activation>(MODEL_DIM), PACKS = MODEL_DIM / WIDTH;

template <class T> DEVICE void add(f32 (&sums)[WIDTH], f32 weight, const Pack<T, WIDTH> &pack, bool exists = true)
{
    // Keeps the compiler from moving loads into branches.
    #pragma unroll
    for (i32 j = 0; j < WIDTH; j++)
        sums[j] = exists ? fused(weight, to_f32(pack.at[j]), sums[j]) : sums[j];
}

KERNEL(THREADS) dispatch_bwd(
    const bf16 *__restrict__ drows,    // [rows, 2880]
    const i32 *__restrict__ slot_rows, // [tokens, 4]
    const f32 *__restrict__ router_dx, // [tokens, 2880]
    bf16 *__restrict__ dx,             // [tokens, 2880]
    i64 tokens)
{
    await_launches();
    __shared__ i32 sources[TILE_TOKENS * TOP_K];
    const i64 first = block_x() * TILE_TOKENS;
    for (i32 i = thread_index(); i < TILE_TOKENS * TOP_K; i += THREADS) {
        const i64 slot = first * TOP_K + i;
        if (slot >= tokens * TOP_K)
            break;
        const i32 row = slot_rows[slot];
        sources[i] = row >= 0 ? row : NOTHING;
    }
    block_sync();

    for (i32 turn = thread_index() / TOKEN_THREADS; turn < TILE_TOKENS && first + turn < tokens;
         turn += THREADS / TOKEN_THREADS) {
        const i64 token = first + turn, at = token * MODEL_DIM;
        for (i32 i = thread_index() % TOKEN_THREADS; i < PACKS; i += TOKEN_THREADS) {
            const auto of_router = load<WIDTH>(router_dx + at, i);
            f32 sums[WIDTH] = {};
            #pragma unroll
            for (i32 start = 0; start < TOP_K; start += HELD) {
                // Empty slots point at the token's own output row, so unconditional loads stay in bounds.
                Pack<Activation, WIDTH> held[HELD];
                #pragma unroll
                for (i32 n = 0; n < HELD; n++) {
                    const i32 source = start + n < TOP_K ? sources[turn * TOP_K + start + n] : NOTHING;
                    const Activation *row = source >= 0 ? drows + (i64)source * MODEL_DIM : dx + at;
                    held[n] = fetch<WIDTH>(source != NOTHING, row + i * WIDTH);
                }
                all_fetched();
                #pragma unroll
                for (i32 n = 0; n < HELD; n++) {
                    if (start + n >= TOP_K)
                        break;
                    const i32 slot = turn * TOP_K + start + n;
                    add(sums, 1.0f, held[n], sources[slot] != NOTHING);
                }
            }
            add(sums, 1.0f, of_router);
            Pack<Activation, WIDTH> pack;
            #pragma unroll
            for (i32 j = 0; j < WIDTH; j++)
                pack.at[j] = round_to<Activation>(sums[j]);
            store(dx + at, i, pack);
        }
    }
}
