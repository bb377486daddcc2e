// dispatch for cuda:sm_90a: copies token rows into expert order
//
//   rows[r] = x[token of r]
//
// A block owns 8 rows in expert order; 32 adjacent threads copy one at a time.
// There are at most as many rows as slots; blocks and threads beyond the last row do nothing.
//
// Shared memory: none.
//
// Baked in: model dim 2880, experts 32, top_k 4, types.
// Read at run time: the number of tokens.

// [prelude: base.hpp, cuda/base.cuh, base.hpp]

// ---- the kernel ----

constexpr int MODEL_DIM = 2880, EXPERTS = 32, TOP_K = 4;
constexpr int THREADS = 128, TILE_ROWS = 8, ROW_THREADS = 32;

typedef bf16 Activation;
constexpr int WIDTH = pack_width<Activation>(MODEL_DIM), PACKS = MODEL_DIM / WIDTH;
// A thread has up to eight packs in flight before it writes the first.
constexpr int HELD = lesser(ceil_div(PACKS, ROW_THREADS), 8);

KERNEL(THREADS) dispatch(
    const bf16 *x,        // [tokens, 2880]
    const i32 *row_slots, // [rows]
    const i64 *offsets,   // [33]
    bf16 *rows,           // [rows, 2880]
    i64 tokens)
{
    await_launches();
    (void)tokens;
    const i64 first = block_x() * TILE_ROWS, kept = offsets[EXPERTS];
    for (i64 row = first + thread_index() / ROW_THREADS; row < first + TILE_ROWS && row < kept;
         row += THREADS / ROW_THREADS) {
        const i32 slot = row_slots[row];
        const Activation *from = x + (i64)(slot / TOP_K) * MODEL_DIM;
        Activation *to = rows + row * MODEL_DIM;
        for (i32 start = thread_index() % ROW_THREADS; start < PACKS; start += ROW_THREADS * HELD) {
            Pack<Activation, WIDTH> held[HELD] = {};
            #pragma unroll
            for (i32 n = 0; n < HELD; n++) {
                const i32 i = start + n * ROW_THREADS;
                if (i < PACKS)
                    held[n] = load<WIDTH>(from, i);
            }
            #pragma unroll
            for (i32 n = 0; n < HELD; n++) {
                const i32 i = start + n * ROW_THREADS;
                if (i < PACKS)
                    store(to, i, held[n]);
            }
        }
    }
}
