// combine for rocm:gfx942: sums each token's expert outputs
//
//   y[t] = sum over slots k, ascending, of weight[t, k] * out[row of (t, k)]
//
// A block owns 2 tokens; 128 adjacent threads take one at a time, each some packs of adjacent
// columns. Sums are f32 and rounded once. A slot without a row adds nothing.
//
// Decode calls, of up to 64 tokens, would have too few such blocks for all multiprocessors. There
// a block owns a slice of 4 tokens, 32 packs of each, and a thread one pack. block_x counts
// tokens, block_y slices.
//
// Shared memory:
//   sources  i32 [LISTED][2]   the row of each slot, or a mark for none
//   weights  f32 [LISTED][2]
//
// Baked in: output dim 4096, top_k 2, shared experts, types.
// Read at run time: the number of tokens.

// [prelude: base.hpp, hip/base.hpp, bf16_bits.hpp, base.hpp, fetch.hpp]

// ---- the kernel ----

constexpr int OUTPUT_DIM = 4096, TOP_K = 2;
constexpr int THREADS = 128, TILE_TOKENS = 2, TOKEN_THREADS = 128;
constexpr int DECODE_TOKENS = 64, DECODE_TILE = 4, DECODE_THREADS = 32;
// Tokens whose slots fit into the lists of a block.
constexpr int LISTED = TILE_TOKENS > DECODE_TILE ? TILE_TOKENS : DECODE_TILE;
// Rows of this many slots are in flight before a thread adds the first.
constexpr int HELD = lesser(TOP_K, 8);
// Sources of a slot without a row: nothing.
constexpr i32 NOTHING = -1;

typedef bf16 Activation;
constexpr int WIDTH = pack_width<Activation>(OUTPUT_DIM), PACKS = OUTPUT_DIM / WIDTH;

DEVICE void add(f32 (&sums)[WIDTH], f32 weight, const Pack<Activation, WIDTH> &pack, bool exists = true)
{
    // Keeps the compiler from moving loads into branches.
    #pragma unroll
    for (i32 j = 0; j < WIDTH; j++)
        sums[j] = exists ? fused(weight, to_f32(pack.at[j]), sums[j]) : sums[j];
}

KERNEL(THREADS) combine(
    const bf16 *__restrict__ out,         // [rows, 4096]
    const i32 *__restrict__ slot_rows,    // [tokens, 2]
    const f32 *__restrict__ topk_weights, // [tokens, 2]
    bf16 *__restrict__ y,                 // [tokens, 4096]
    i64 tokens)
{
    await_launches();
    __shared__ i32 sources[LISTED * TOP_K];
    __shared__ f32 weights[LISTED * TOP_K];
    const bool decode = tokens <= DECODE_TOKENS;
    const i32 tile = decode ? DECODE_TILE : TILE_TOKENS, adjacent = decode ? DECODE_THREADS : TOKEN_THREADS;
    const i64 first = block_x() * tile;
    for (i32 i = thread_index(); i < tile * TOP_K; i += THREADS) {
        const i64 slot = first * TOP_K + i;
        if (slot >= tokens * TOP_K)
            break;
        const i32 row = slot_rows[slot];
        sources[i] = row >= 0 ? row : NOTHING;
        weights[i] = topk_weights[slot];
    }
    block_sync();

    // Decode calls cut a token into slices of a pack for each thread; other calls have one slice.
    const i32 slice = decode ? DECODE_THREADS : PACKS, begin = (i32)block_y() * slice;
    const i32 end = lesser(begin + slice, PACKS);
    for (i32 turn = thread_index() / adjacent; turn < tile && first + turn < tokens;
         turn += THREADS / adjacent) {
        const i64 token = first + turn;
        for (i32 i = begin + thread_index() % adjacent; i < end; i += adjacent) {
            f32 sums[WIDTH] = {};
            #pragma unroll
            for (i32 start = 0; start < TOP_K; start += HELD) {
                // Empty slots point at the token's own output row, so unconditional loads stay in bounds.
                Pack<Activation, WIDTH> held[HELD];
                #pragma unroll
                for (i32 n = 0; n < HELD; n++) {
                    const i32 source = start + n < TOP_K ? sources[turn * TOP_K + start + n] : NOTHING;
                    const Activation *row = source >= 0 ? out + (i64)source * OUTPUT_DIM : y + token * OUTPUT_DIM;
                    held[n] = fetch<WIDTH>(source != NOTHING, row + i * WIDTH);
                }
                all_fetched();
                #pragma unroll
                for (i32 n = 0; n < HELD; n++) {
                    if (start + n >= TOP_K)
                        break;
                    const i32 slot = turn * TOP_K + start + n;
                    add(sums, weights[slot], held[n], sources[slot] != NOTHING);
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
