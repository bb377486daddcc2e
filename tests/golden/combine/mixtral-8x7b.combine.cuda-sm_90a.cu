// combine for cuda:sm_90a
//
//   y[t] = sum over slots k, ascending, of weight[t, k] * out[row of (t, k)]
//
// A block owns 2 tokens, 128 adjacent threads one at a time, each some packs of adjacent
// columns. Sums are f32 and rounded once. A slot without a row adds nothing.
//
// In calls of up to 64 tokens blocks of whole tokens are too few for all multiprocessors. There
// a block owns slices of 4 tokens, 32 packs of each, a thread one: block_x counts tokens,
// block_y slices.
//
// Shared memory:
//   sources  i32 [LISTED][2]   the row of each slot, or that there is none
//   weights  f32 [LISTED][2]
//
// Baked in: output dim 4096, top_k 2, shared experts, types. Not the tokens.

// [prelude: base.hpp, cuda/base.cuh, base.hpp, fetch.hpp]

// ---- the kernel ----

constexpr int OUTPUT_DIM = 4096, TOP_K = 2;
constexpr int THREADS = 128, TILE_TOKENS = 2, TOKEN_THREADS = 128;
constexpr int FEW_TOKENS = 64, FEW_TILE = 4, FEW_THREADS = 32;
// Tokens whose slots a block has room for.
constexpr int LISTED = TILE_TOKENS > FEW_TILE ? TILE_TOKENS : FEW_TILE;
// Rows of this many slots are on their way to a thread before it adds the first.
constexpr int HELD = lesser(TOP_K, 8);
// What a slot adds when it has no row: nothing.
constexpr i32 NOTHING = -1;

typedef bf16 Activation;
constexpr int WIDTH = pack_width<Activation>(OUTPUT_DIM), PACKS = OUTPUT_DIM / WIDTH;

DEVICE void add(f32 (&sums)[WIDTH], f32 weight, const Pack<Activation, WIDTH> &pack, bool exists = true)
{
    if (!exists)
        return;
    #pragma unroll
    for (i32 j = 0; j < WIDTH; j++)
        sums[j] = fused(weight, to_f32(pack.at[j]), sums[j]);
}

KERNEL(THREADS) combine(
    const bf16 *out,         // [rows, 4096]
    const i32 *slot_rows,    // [tokens, 2]
    const f32 *topk_weights, // [tokens, 2]
    bf16 *y,                 // [tokens, 4096]
    i64 tokens)
{
    await_launches();
    __shared__ i32 sources[LISTED * TOP_K];
    __shared__ f32 weights[LISTED * TOP_K];
    const bool few = tokens <= FEW_TOKENS;
    const i32 tile = few ? FEW_TILE : TILE_TOKENS, adjacent = few ? FEW_THREADS : TOKEN_THREADS;
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

    // A slice of few tokens has a pack for each thread; many have one slice each, with all packs.
    const i32 slice = few ? FEW_THREADS : PACKS, begin = (i32)block_y() * slice;
    const i32 end = lesser(begin + slice, PACKS);
    for (i32 turn = thread_index() / adjacent; turn < tile && first + turn < tokens;
         turn += THREADS / adjacent) {
        const i64 token = first + turn;
        for (i32 i = begin + thread_index() % adjacent; i < end; i += adjacent) {
            f32 sums[WIDTH] = {};
            #pragma unroll
            for (i32 start = 0; start < TOP_K; start += HELD) {
                // A slot without a row has what is in the token's own place, for who reads along.
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
