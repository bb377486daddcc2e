// grouped_gemm_dgrad_down: P = dout * down, and from it hidden, dgate and dup,
// for the rows of every expert.
//
// A block computes 320 rows of one expert by 512 columns of the result. It takes the
// contraction in slices: it copies a slice of the rows to scratch and multiplies it by the same slice
// of the weights, a few packed panels at a time. Sums are AMX tiles.
// The contraction runs over the rows of the weights, so packing needs no transposition. The sums of
// a row do not depend on the other rows.
//
// hidden = w * A for the activation A of the kept pre-activations, dgate and
// dup = act' * w * P; a column of dweight_parts is <P, A> over the columns of a block.
//
// Scratch memory of a thread: the rows of a block, its sums, packed panels.
//
// Baked in: experts, widths, types, activation.

// [prelude: cpu.h, cpu_vector.h, cpu_bf16.h, cpu_vector.h]

// Operands of products. A word is what one 32-bit lane multiplies: two bf16,
// whose products are added to an f32 sum together.
enum { WORD = 2, STEP = WORD * LANES }; // elements per word, per vector

// [prelude: cpu_multiply.h, cpu_tiles.h, cpu_stream.h, cpu_exp.h]

// The activation of an expert.
INLINE vec activation(vec x) { return x * sigmoid_f32(1.702f * x); }

// [prelude: cpu_activation_slope.h]

typedef bf16 input_t;
typedef bf16 weight_t;
enum {
    EXPERTS = 32,
    TOP_K = 4,
    INNER = 2880, // summed over, rows of a matrix
    OUTER = 2880, // columns of the result and of a matrix
    PRODUCTS = 1, // that are added
    TILE_ROWS = 320,
    TILE_COLUMNS = 512,
    COLUMN_TILES = (OUTER + TILE_COLUMNS - 1) / TILE_COLUMNS,
    TILE_WORDS = 480, // of a depth slice
    TILE_DEPTH = TILE_WORDS * WORD,
    // The micro-kernel has the sums of MR rows by the NR columns of a packed panel.
    MR = 32,
    NR = 32,
    RESULT_COLUMNS = NR,
    PANELS = TILE_COLUMNS / NR,
    PACKED_PANELS = 2, // that are packed together: as many lines of a row
    PACKED_COLUMNS = PACKED_PANELS * NR,
    PREFETCH_ROWS = 4, // that are fetched before they are copied
};

// [prelude: cpu_pack.h]

// Words of adjacent columns: a word is two rows. Of these `rows` exist; it may be none.
INLINE vec column_words_bf16(const bf16 *from, i64 stride, i64 rows, i64 count)
{
    vec_u32 low = rows > 0 ? (vec_u32)load_columns_bf16(from, count) >> 16 : (vec_u32){0};
    vec_u32 high = rows > 1 ? (vec_u32)load_columns_bf16(from + stride, count) : (vec_u32){0};
    return (vec)(low | high);
}

// [prelude: cpu_pack.h]

// The rows and columns that a block owns, and their expert.
typedef struct {
    i64 expert, first_row, row_count, first_column, column_count;
} block_t;

// Cuts rows into tiles of even size; past the last tile there are none. Tiles of
// columns have `width`.
INLINE block_t find_block(i64 tokens, const i64 *offsets, const i32 *row_tiles, i64 row_tile, i64 column_tile,
                          i64 width)
{
    if (row_tile >= row_tiles[EXPERTS])
        return (block_t){0};
    i64 expert = 0;
    for (i64 past = EXPERTS; past - expert > 1;) {
        i64 middle = (expert + past) / 2;
        if (row_tiles[middle] <= row_tile)
            expert = middle;
        else
            past = middle;
    }
    i64 tile = row_tile - row_tiles[expert], tiles = row_tiles[expert + 1] - row_tiles[expert];
    i64 start = offsets[expert], rows = offsets[expert + 1] - start;
    i64 first = start + rows * tile / tiles, end = start + rows * (tile + 1) / tiles;
    i64 column = column_tile * width;
    return (block_t){expert, first, end - first, column, min_i64(width, OUTER - column)};
}

// Sums of a micro-kernel.
typedef f32 sums_t[MR][NR];

// A panel of the weights, a depth slice at a time: word by word all columns.
typedef f32 panel_word_t;
typedef panel_word_t panel_t[TILE_WORDS][NR];

// Weights of the next panels come from memory, so they
// are packed between multiplications, one word of a panel after the other, and their source is
// prefetched. Many prefetches at once would occupy the line buffers that multiplications need.
enum { FETCH_WORDS = 16, LINE = 64 };
enum {
    PREFETCH_WORDS = 8, // of what is packed, that are fetched
    DEPTH_STEP = STEP, // rows that are multiplied together
};

// The source of panels: `depth` rows of `columns` columns; empty without depth.
typedef struct {
    const weight_t *from;
    i64 depth, columns;
} source_t;

typedef struct {
    const weight_t *source; // of all of it; none, if it is packed at once when it is wanted
    const weight_t *from; // the next word's rows
    f32 *to; // none: they are only fetched
    i32 words, panels; // that are left; of a word
    i32 next; // panel of the word
    i32 cost, due; // of a word of a panel, and what has come up
} packing_t;

INLINE void pack_next(packing_t *packing)
{
    const weight_t *from = packing->from + packing->next * NR;
    if (packing->to) {
        f32 *to = packing->to + packing->next * (TILE_WORDS * NR);
#pragma GCC unroll 8
        for (i64 c = 0; c < NR; c += LANES)
            *(vec *)&to[c] = column_words_bf16(from + c, OUTER, WORD, LANES);
    }
    for (i64 row = PREFETCH_WORDS * WORD; row < (PREFETCH_WORDS + 1) * WORD; row++)
        for (i64 c = 0; c < NR; c += LINE / (i64)sizeof(*from))
            __builtin_prefetch(from + row * OUTER + c, 0, 2);
    if (++packing->next == packing->panels) {
        packing->next = 0;
        packing->from += WORD * OUTER;
        packing->to += packing->to ? NR : 0;
        packing->words--;
    }
}

INLINE void pack_due(packing_t *packing)
{
    __asm__ volatile("" ::: "memory"); // keeps the counts in memory: registers belong to the micro-kernel
    packing->due += FETCH_WORDS;
    for (; packing->words > 0 && packing->due >= packing->cost; packing->due -= packing->cost)
        pack_next(packing);
}

// The next panels, packed while `groups` groups are multiplied by a panel; what is
// not whole panels and words is left for later.
INLINE packing_t packing_of(panel_t *panels, source_t of, i64 groups)
{
    const i64 words = of.depth / WORD, count = of.columns / NR;
    if (of.depth % DEPTH_STEP != 0 || of.columns % NR != 0 || words == 0)
        return (packing_t){0};
    return (packing_t){of.from, of.from, panels[0][0], (i32)words, (i32)count, 0, (i32)groups, 0};
}

// Packs what is left: all of it, if it was not begun. Rows past the last
// that are multiplied together are zero.
static void pack_rest(packing_t *packing, panel_t *panels, source_t of)
{
    const i64 width = (of.columns + NR - 1) / NR * NR;
    const i64 depth = (of.depth + DEPTH_STEP - 1) / DEPTH_STEP * DEPTH_STEP;
    if (!packing->source || packing->source != of.from)
        pack_bf16(panels[0][0], NR, width, of.from, OUTER, depth, of.depth, of.columns);
    else
        while (packing->words > 0)
            pack_next(packing);
}

typedef struct {
    packing_t *packing;
} prefetch_t;

INLINE void fetch(prefetch_t *prefetch)
{
    pack_due(prefetch->packing);
}

// The scratch memory of a thread during a block:
// - its rows in the order of AMX tiles, a depth slice at a time
// - all sums
// - packed panels
enum { ROW_GROUPS = (TILE_ROWS + MR - 1) / MR };
typedef f32 scratch_rows_t[MR][TILE];
typedef struct {
    i32 turn; // the half of `packed` with which the next block begins
    packing_t packing; // of that half
    scratch_rows_t ALIGNED rows[ROW_GROUPS][TILE_WORDS / TILE];
    sums_t sums[PANELS][ROW_GROUPS];
    panel_t packed[2][PACKED_PANELS]; // one is multiplied while the other is packed
} scratch_t;
_Static_assert(sizeof(scratch_t) <= 1515584, "the launch gives a thread this much");

// Copies a slice of `count` rows, which come from anywhere.
static void load_rows(scratch_rows_t (*scratch)[TILE_WORDS / TILE], const input_t *const *row, i64 depth, i64 count,
                      i64 width)
{
    for (i64 r = 0; r < count; r++) {
        scratch_rows_t *to = scratch[r / MR];
        for (i64 i = 0; i < width; i += STEP) {
            const input_t *from = row[r] + depth + i;
            vec v = i + STEP <= width ? load_input(from) : load_part_input(from, width - i);
            *(vec *)to[i / STEP][r % MR] = v;
            __builtin_prefetch(row[r + PREFETCH_ROWS] + depth + i);
        }
    }
}

// A vector of which `count` elements exist.
INLINE vec load_row(const input_t *from, i64 count)
{
    return count >= LANES ? load_bf16(from) : load_part_bf16(from, count);
}

// The destination of one kind of results, from a block's first row and column on. Memory
// takes two lines that lie side by side twice as fast as two that do not, so results
// that go past the caches wait in scratch until two lines of a row are whole.
enum { RUN = 2 * LINE / sizeof(input_t), WHOLE_RUNS = OUTER % RUN == 0 && TILE_COLUMNS % RUN == 0 };
typedef input_t run_t[RUN];
typedef struct {
    input_t *to;
    run_t *waiting; // of every row; none, if results are stored as they come
} output_t;

// The results of a block among those of `rows` rows.
INLINE output_t output_of(input_t *results, i64 rows, const block_t *block, run_t *waiting)
{
    const int streamed = WHOLE_RUNS && is_streamed(results, rows, OUTER * sizeof(input_t));
    return (output_t){results + block->first_row * OUTER + block->first_column, streamed ? waiting : 0};
}

// One vector of results: a row's from `column` on, of which `count` exist; all of
// them, if they are to wait.
INLINE void store_result(output_t output, vec v, i64 row, i64 column, i64 count)
{
    input_t *to = output.to + row * OUTER + column;
    if (output.waiting) {
        input_t *run = output.waiting[row], *end = run + column % RUN + LANES;
        store_bf16(end - LANES, v);
        if (end == run + RUN)
            for (i64 c = 0; c < RUN; c += LANES)
                store_streaming_half((vec_u16 *)(to + LANES - RUN + c), *(const vec_u16 *)(run + c));
    } else if (count >= LANES)
        store_bf16(to, v);
    else
        store_part_bf16(to, v, count);
}

// The activation, and its derivatives by its inputs.
typedef struct {
    vec value, by_gate, by_up;
} slope_t;

// A clamp that limits its input has slope zero.
INLINE slope_t slope(vec gate, vec up)
{
    slope_t at;
    const vec limit = broadcast(7.0f);
    vec_i32 up_held = (up > limit) | (up < -limit);
    up = at_least(at_most(up, limit), -limit);
    up += 1.0f;
    vec_i32 gate_held = gate > limit;
    gate = at_most(gate, limit);
    at.by_up = activation(gate);
    at.by_gate = activation_slope(gate) * up;
    at.value = at.by_up * up;
    at.by_gate = select(gate_held, (vec){0}, at.by_gate);
    at.by_up = select(up_held, (vec){0}, at.by_up);
    return at;
}

// The tensors that the epilogue reads and writes, from a block's first row and column on.
typedef struct {
    const input_t *gate_pre, *up_pre;
    output_t hidden, dgate, dup;
    const f32 *topk_weights;
    const i32 *row_slots;
    vec *parts; // of every row
} results_t;

// One vector of each kind of results, not rounded yet.
typedef struct {
    vec hidden, dgate, dup;
} finished_t;

// One vector of results from its sums: a row's from `column` on; adds <P, A> to the
// row's part.
INLINE finished_t finish(const results_t *to, const f32 *sum, i64 row, i64 column, f32 weight, i64 count)
{
    const i64 at = row * OUTER + column;
    vec product = count == LANES ? *(const vec *)sum : load_part_f32(sum, count);
    vec up = load_row(to->up_pre + at, count);
    vec gate = load_row(to->gate_pre + at, count);
    slope_t by = slope(gate, up);
    to->parts[row] += product * by.value;
    product *= weight;
    by.value *= weight;
    return (finished_t){
        .hidden = by.value,
        .dgate = by.by_gate * product,
        .dup = by.by_up * product,
    };
}

// The results of one row from its sums: `columns` columns from `column` on.
INLINE void finish_row(const results_t *to, const f32 *sums, i64 row, i64 column, i64 columns,
                       finished_t *finished)
{
    const f32 weight = to->topk_weights[to->row_slots[row]];
    for (i64 c = 0; c < columns; c += LANES)
        finished[c / LANES] = finish(to, sums + c, row, column + c, weight, min_i64(LANES, columns - c));
}

// Rounds and stores them.
INLINE void store_row(const results_t *to, const finished_t *finished, i64 row, i64 column, i64 columns)
{
    for (i64 c = 0; c < columns; c += LANES) {
        const finished_t *from = &finished[c / LANES];
        const i64 count = min_i64(LANES, columns - c);
        store_result(to->hidden, from->hidden, row, column + c, count);
        store_result(to->dgate, from->dgate, row, column + c, count);
        store_result(to->dup, from->dup, row, column + c, count);
    }
}

// A panel is multiplied in pieces of up to 22 steps of 2 KB, which the first-level cache holds while
// sums and rows stream by from the second level.
enum {
    STEPS = TILE_WORDS / TILE,
    PIECES = (STEPS + 21) / 22,
    PIECE = (STEPS + PIECES - 1) / PIECES, // steps
    // Steps until the results of a micro-kernel are finished.
    FINISHING = STEPS,
};

// Sums whose results are finished during the next AMX multiplications, which leave the vector units
// idle: the rows from `row` to `end`, evenly over the steps.
typedef struct {
    const results_t *to;
    f32 (*sums)[NR]; // of the next row
    i64 row, end, column, columns;
    i64 due; // FINISHING times the rows that are due
} pending_t;

INLINE void finish_rows(pending_t *pending, i64 rows)
{
    finished_t finished[RESULT_COLUMNS / LANES];
    for (; rows > 0 && pending->row < pending->end; rows--, pending->sums++, pending->row++) {
        finish_row(pending->to, *pending->sums, pending->row, pending->column, pending->columns, finished);
        store_row(pending->to, finished, pending->row, pending->column, pending->columns);
    }
}

INLINE void finish_due(pending_t *pending)
{
    pending->due += MR;
    finish_rows(pending, pending->due / FINISHING);
    pending->due %= FINISHING;
}

INLINE void finish_rest(pending_t *pending) { finish_rows(pending, pending->end); }

// Finishes pending rows, and puts off the sums of `rows` rows from `row` on.
INLINE void put_off(pending_t *pending, const results_t *to, f32 (*sums)[NR], i64 row, i64 rows,
                    i64 column, i64 columns)
{
    finish_rest(pending);
    *pending = (pending_t){to, sums, row, row + rows, column, columns, 0};
}

// Multiplies 16 * `tiles` rows by a panel and adds to sums,
// `steps` tiles deep.
INLINE void multiply(const int tiles, sums_t sums, const scratch_rows_t *rows, const panel_word_t (*panel)[NR],
                     i64 steps, int start, prefetch_t prefetch, pending_t *pending)
{
    const i64 sums_row = sizeof(sums[0]), rows_row = sizeof(rows[0][0]), panel_row = sizeof(panel[0]);
    if (start) {
        TILE_ZERO(0);
        TILE_ZERO(1);
        TILE_ZERO(2);
        TILE_ZERO(3);
    } else {
        TILE_STREAM(0, &sums[0][0], sums_row);
        TILE_STREAM(1, &sums[0][TILE], sums_row);
        if (tiles == 2) {
            TILE_STREAM(2, &sums[TILE][0], sums_row);
            TILE_STREAM(3, &sums[TILE][TILE], sums_row);
        }
    }
    for (i64 step = 0; step < steps; step++, panel += TILE) {
        fetch(&prefetch);
        TILE_STREAM(4, rows[step][0], rows_row);
        TILE_LOAD(6, &panel[0][0], panel_row);
        TILE_LOAD(7, &panel[0][TILE], panel_row);
        if (tiles == 2)
            TILE_STREAM(5, rows[step][TILE], rows_row);
        TILE_MULTIPLY(0, 4, 6);
        TILE_MULTIPLY(1, 4, 7);
        if (tiles == 2) {
            TILE_MULTIPLY(2, 5, 6);
            TILE_MULTIPLY(3, 5, 7);
        }
        finish_due(pending);
    }
    TILE_STORE(0, &sums[0][0], sums_row);
    TILE_STORE(1, &sums[0][TILE], sums_row);
    if (tiles == 2) {
        TILE_STORE(2, &sums[TILE][0], sums_row);
        TILE_STORE(3, &sums[TILE][TILE], sums_row);
    }
}

// Tiles are multiplied whole: rows past the last are computed and not looked at.
static void multiply_rows(i64 rows, sums_t sums, const scratch_rows_t *scratch, const panel_word_t (*panel)[NR],
                          i64 steps, int start, prefetch_t prefetch, pending_t *pending)
{
    if (rows > TILE)
        multiply(2, sums, scratch, panel, steps, start, prefetch, pending);
    else
        multiply(1, sums, scratch, panel, steps, start, prefetch, pending);
}

// The position of weights that are packed together: a depth slice of some columns of a GEMM's matrix.
typedef struct {
    i64 product, depth, column;
} place_t;

// Returns the position that is packed next; after the last it is past the products.
INLINE place_t after(place_t at, const block_t *block)
{
    if ((at.column += PACKED_COLUMNS) < block->column_count)
        return at;
    at.column = 0;
    if ((at.depth += TILE_DEPTH) < INNER)
        return at;
    return (place_t){.product = at.product + 1};
}

INLINE int is_in(place_t at, const block_t *block)
{
    (void)block;
    return at.product < PRODUCTS;
}

// Returns the source at a position.
INLINE source_t source_of(const weight_t *const *matrices, place_t at, const block_t *block)
{
    return (source_t){matrices[at.product] + at.depth * OUTER + at.column,
                      min_i64(TILE_DEPTH, INNER - at.depth), min_i64(PACKED_COLUMNS, block->column_count - at.column)};
}

// Computes a block: one GEMM after the other, each a depth slice at a time, whose rows are copied to
// scratch and multiplied by the weights, a few panels at a time, while the next ones are packed;
// after the last, those are the next block's first. Results are finished while their sums are cached,
// during the next multiplications.
static void multiply_block(scratch_t *scratch, i32 holds, const input_t *(*row)[TILE_ROWS + PREFETCH_ROWS],
                           const weight_t *const *matrices, const block_t *block, source_t next_block,
                           const results_t *to)
{
    const i64 rows = block->row_count, groups = (rows + MR - 1) / MR;
    pending_t pending = {0};
    for (place_t at = {0}, next; is_in(at, block); at = next) {
        next = after(at, block);
        const source_t source = source_of(matrices, at, block);
        const int start = at.product == 0 && at.depth == 0;
        const int last = at.product + 1 == PRODUCTS && at.depth + TILE_DEPTH >= INNER;
        const i64 steps = (source.depth + STEP - 1) / STEP;
        if (at.column == 0) {
            finish_rest(&pending);
            load_rows(scratch->rows, row[at.product], at.depth, rows, source.depth);
        }
        panel_t *panels = scratch->packed[scratch->turn];
        pack_rest(&scratch->packing, panels, source);
        scratch->turn = !scratch->turn;
        const source_t next_source = is_in(next, block) ? source_of(matrices, next, block) : next_block;
        scratch->packing = packing_of(scratch->packed[scratch->turn], next_source, groups);
        for (i64 column = 0; column < source.columns; column += NR) {
            const i64 p = column / NR;
            sums_t *sums = scratch->sums[at.column / NR + p];
            for (i64 step = 0; step < steps; step += PIECE)
                for (i64 group = 0; group < groups; group++) {
                    const i64 count = min_i64(MR, rows - group * MR);
                    prefetch_t prefetch = {.packing = &scratch->packing};
                    multiply_rows(count, sums[group], scratch->rows[group] + step, panels[p] + step * TILE,
                                  min_i64(PIECE, steps - step), start && step == 0, prefetch, &pending);
                }
            if (last)
                put_off(&pending, to, sums[0], 0, rows, at.column + column, min_i64(NR, source.columns - column));
        }
    }
    finish_rest(&pending);
}

static void grouped_gemm_dgrad_down_block(
    const bf16 *restrict dout,        // [rows, 2880]
    const bf16 *restrict down,        // [32, 2880, 2880]
    const bf16 *restrict gate_pre,    // [rows, 2880]
    const bf16 *restrict up_pre,      // [rows, 2880]
    const i64 *restrict offsets,      // [33]
    const i32 *restrict row_tiles,    // [33]
    const i32 *restrict row_slots,    // [rows]
    const f32 *restrict topk_weights, // [tokens, 4]
    bf16 *restrict hidden,            // [rows, 2880]
    bf16 *restrict dgate,             // [rows, 2880]
    bf16 *restrict dup,               // [rows, 2880]
    f32 *restrict dweight_parts,      // [rows, 6]
    i64 tokens,
    i64 block_x, i64 block_y, void *scratch)
{
    const block_t block = find_block(tokens, offsets, row_tiles, block_y, block_x, TILE_COLUMNS);
    if (block.row_count == 0)
        return;
    const input_t *const inputs[PRODUCTS] = {dout};
    const input_t *row[PRODUCTS][TILE_ROWS + PREFETCH_ROWS];
    for (int product = 0; product < PRODUCTS; product++)
        for (i64 r = 0; r < block.row_count + PREFETCH_ROWS; r++)
            row[product][r] = inputs[product] + (block.first_row + min_i64(r, block.row_count - 1)) * INNER;
    const i64 origin = block.expert * INNER * OUTER + block.first_column;
    const weight_t *const matrices[PRODUCTS] = {down + origin};
    const i64 first = block.first_row * OUTER + block.first_column;
    vec parts[TILE_ROWS];
    for (i64 r = 0; r < block.row_count; r++)
        parts[r] = (vec){0};
    const i64 all_rows = offsets[EXPERTS];
    run_t waiting[3][TILE_ROWS] ALIGNED;
    const results_t results = {
        .hidden = output_of(hidden, all_rows, &block, waiting[0]),
        .dgate = output_of(dgate, all_rows, &block, waiting[1]),
        .dup = output_of(dup, all_rows, &block, waiting[2]),
        .gate_pre = gate_pre + first,
        .up_pre = up_pre + first,
        .topk_weights = topk_weights,
        .row_slots = row_slots + block.first_row,
        .parts = parts,
    };
    // The next block has the next columns, or those of the next rows.
    const int wraps = block_x + 1 == COLUMN_TILES;
    const block_t then = find_block(tokens, offsets, row_tiles, block_y + wraps, wraps ? 0 : block_x + 1, TILE_COLUMNS);
    const weight_t *const first_matrix = down + then.expert * INNER * OUTER + then.first_column;
    const source_t next = then.row_count > 0 ? source_of(&first_matrix, (place_t){0}, &then) : (source_t){0};
    tiles_begin();
    multiply_block(scratch, (i32)block_y + 1, row, matrices, &block, next, &results);
    tiles_end();
    for (i64 r = 0; r < block.row_count; r++)
        dweight_parts[(block.first_row + r) * COLUMN_TILES + block_x] = sum_lanes(parts[r]);
    end_streaming_stores();
}

EXPORT void grouped_gemm_dgrad_down(void *const *args, i64 first, i64 last, i64 grid_x, void *scratch)
{
    const bf16 *dout = *(const bf16 *const *)args[0];
    const bf16 *down = *(const bf16 *const *)args[1];
    const bf16 *gate_pre = *(const bf16 *const *)args[2];
    const bf16 *up_pre = *(const bf16 *const *)args[3];
    const i64 *offsets = *(const i64 *const *)args[4];
    const i32 *row_tiles = *(const i32 *const *)args[5];
    const i32 *row_slots = *(const i32 *const *)args[6];
    const f32 *topk_weights = *(const f32 *const *)args[7];
    bf16 *hidden = *(bf16 *const *)args[8];
    bf16 *dgate = *(bf16 *const *)args[9];
    bf16 *dup = *(bf16 *const *)args[10];
    f32 *dweight_parts = *(f32 *const *)args[11];
    i64 tokens = *(const i64 *)args[12];
    for (i64 block = first; block < last; block++)
        grouped_gemm_dgrad_down_block(dout, down, gate_pre, up_pre, offsets, row_tiles,
            row_slots, topk_weights, hidden, dgate, dup, dweight_parts, tokens, block % grid_x,
            block / grid_x, scratch);
}
