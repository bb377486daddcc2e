// grouped_gemm_wgrad_down: grad_down = transposed dout * hidden,
// contracted over the rows of every expert; the gradient of a bias is the sum of the left operand.
//
// A block computes 736 by 1024 elements of a matrix. It takes the rows of its expert in slices:
// it transposes the left factor to scratch, packs the right one panel by panel and multiplies both.
// Sums are AMX tiles, to which one slice after the other is added.
// An expert without rows gets zeros.
//
// Scratch memory of a thread: the left slice, packed panels.
//
// Baked in: experts, widths, types.

// [prelude: cpu.h, cpu_vector.h, cpu_bf16.h, cpu_vector.h]

// Operands of products. A word is what one 32-bit lane multiplies: two bf16,
// whose products are added to an f32 sum together.
enum { WORD = 2, STEP = WORD * LANES }; // elements per word, per vector

// [prelude: cpu_multiply.h, cpu_tiles.h, cpu_stream.h]

typedef bf16 left_t;
typedef bf16 right_t;
enum {
    EXPERTS = 32,
    TOP_K = 4,
    HEIGHT = 2880, // rows of a matrix, width of the left factor
    WIDTH = 2880, // columns of a matrix, width of the right factor
    TILE_ROWS = 736,
    TILE_COLUMNS = 1024,
    TILES = (HEIGHT + TILE_ROWS - 1) / TILE_ROWS, // above each other
    TILE_WORDS = 256, // of a slice of rows
    TILE_DEPTH = TILE_WORDS * WORD,
    // The micro-kernel has the sums of MR rows by the NR columns of a packed panel.
    MR = 32,
    NR = 32,
    RESULT_COLUMNS = NR,
    PACKED_PANELS = 4, // that are packed together
    PACKED_COLUMNS = PACKED_PANELS * NR,
    BIAS_COLUMNS = 256,
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

// The rows that a block contracts, and the part of the matrix that it owns.
typedef struct {
    i64 expert, first_row, row_count, first_height, height_count, first_column, column_count;
} block_t;

INLINE block_t find_block(i64 tokens, const i64 *offsets, i64 row_tile, i64 column_tile)
{
    i64 expert = row_tile / TILES, height = row_tile % TILES * TILE_ROWS;
    i64 column = column_tile * TILE_COLUMNS;
    return (block_t){
        .expert = expert,
        .first_row = offsets[expert],
        .row_count = offsets[expert + 1] - offsets[expert],
        .first_height = height,
        .height_count = min_i64(TILE_ROWS, HEIGHT - height),
        .first_column = column,
        .column_count = min_i64(TILE_COLUMNS, WIDTH - column),
    };
}

// Sums of a micro-kernel.
typedef f32 sums_t[MR][NR];

// A panel of the right factor, a depth slice at a time: word by word all columns.
typedef f32 panel_word_t;
typedef panel_word_t panel_t[TILE_WORDS][NR];

// Columns of the right factor of the next panels come from memory, so they
// are packed between multiplications, one word of a panel after the other, and their source is
// prefetched. Many prefetches at once would occupy the line buffers that multiplications need.
enum { FETCH_WORDS = 16, LINE = 64 };
enum {
    PREFETCH_WORDS = 8, // of what is packed, that are fetched
    DEPTH_STEP = STEP, // rows that are multiplied together
};

// The source of panels: `depth` rows of `columns` columns; empty without depth.
typedef struct {
    const right_t *from;
    i64 depth, columns;
} source_t;

typedef struct {
    const right_t *source; // of all of it; none, if it is packed at once when it is wanted
    const right_t *from; // the next word's rows
    f32 *to; // none: they are only fetched
    i32 words, panels; // that are left; of a word
    i32 next; // panel of the word
    i32 cost, due; // of a word of a panel, and what has come up
} packing_t;

INLINE void pack_next(packing_t *packing)
{
    const right_t *from = packing->from + packing->next * NR;
    if (packing->to) {
        f32 *to = packing->to + packing->next * (TILE_WORDS * NR);
#pragma GCC unroll 8
        for (i64 c = 0; c < NR; c += LANES)
            *(vec *)&to[c] = column_words_bf16(from + c, WIDTH, WORD, LANES);
    }
    for (i64 row = PREFETCH_WORDS * WORD; row < (PREFETCH_WORDS + 1) * WORD; row++)
        for (i64 c = 0; c < NR; c += LINE / (i64)sizeof(*from))
            __builtin_prefetch(from + row * WIDTH + c, 0, 2);
    if (++packing->next == packing->panels) {
        packing->next = 0;
        packing->from += WORD * WIDTH;
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
        pack_bf16(panels[0][0], NR, width, of.from, WIDTH, depth, of.depth, of.columns);
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

// Returns the source of panels that are packed together: a slice of the rows, and some columns.
INLINE source_t source_of(const right_t *right, const block_t *block, i64 row, i64 column)
{
    return (source_t){right + row * WIDTH + column,
                      min_i64(TILE_DEPTH, block->row_count - row),
                      min_i64(PACKED_COLUMNS, block->column_count - column)};
}

// The destination of sums. They are stored, past the caches if those cannot hold them, or added to the
// old values.
typedef struct {
    f32 *grad; // the block's first element
    i64 streamed, add;
} results_t;

// Writes a row of sums, or adds it.
static void write_sums(f32 *restrict to, const f32 *sums, i64 count, i64 add)
{
    for (i64 c = 0; c < count; c += LANES) {
        i64 left = count - c;
        vec sum = load_f32(sums + c);
        if (left >= LANES) {
            if (add)
                sum += load_f32(to + c);
            store_f32(to + c, sum);
        } else {
            if (add)
                sum += load_part_f32(to + c, left);
            store_part_f32(to + c, sum, left);
        }
    }
}

// One row of sums: `columns` columns from `column` on.
INLINE void finish_row(const results_t *to, const f32 *sums, i64 row, i64 column, i64 columns)
{
    f32 *grad = to->grad + row * WIDTH + column;
    if (to->streamed)
        copy_row(grad, sums, columns * 4, 1);
    else
        write_sums(grad, sums, columns, to->add);
}

// The scratch memory of a thread during a block:
// - columns of the left operand in the order of AMX tiles, a depth slice at a time
// - packed panels
enum { ROW_GROUPS = (TILE_ROWS + MR - 1) / MR };
typedef f32 scratch_rows_t[MR][TILE];
typedef struct {
    i32 turn; // the half of `packed` with which the next block begins
    packing_t packing; // of that half
    scratch_rows_t ALIGNED rows[ROW_GROUPS][TILE_WORDS / TILE];
    panel_t packed[2][PACKED_PANELS]; // one is multiplied while the other is packed
} scratch_t;
_Static_assert(sizeof(scratch_t) <= 1015872, "the launch gives a thread this much");

// A panel is multiplied in pieces of up to 22 steps of 2 KB, which the first-level cache holds while
// sums and rows stream by from the second level.
enum {
    STEPS = TILE_WORDS / TILE,
    PIECES = (STEPS + 21) / 22,
    PIECE = (STEPS + PIECES - 1) / PIECES, // steps
    // Steps until the results of a micro-kernel are finished.
    FINISHING = PIECE,
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
    for (; rows > 0 && pending->row < pending->end; rows--)
        finish_row(pending->to, *pending->sums++, pending->row++, pending->column, pending->columns);
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

// Copies `height` columns of `depth` rows to scratch, as rows of tiles: words of two rows
// each, zeros past the last.
static void load_columns(scratch_t *scratch, const left_t *left, i64 depth, i64 height)
{
    for (i64 step = 0; step * STEP < depth; step++)
        for (i64 h = 0; h < height; h += TILE) {
            vec v[TILE];
            for (i64 word = 0; word < TILE; word++) {
                const i64 row = step * STEP + word * WORD;
                v[word] = column_words_bf16(left + row * HEIGHT + h, HEIGHT, depth - row, height - h);
            }
            transpose(v);
#pragma GCC unroll 16
            for (int r = 0; r < TILE; r++)
                *(vec *)scratch->rows[h / MR][step][h % MR + r] = v[r];
        }
}

_Static_assert(PIECES == 1, "sums of a slice are multiplied at once");

// Computes a block, a slice of the rows at a time: copies the left operand to scratch and multiplies it
// by the right one, a few panels at a time, while the next ones are packed; after the last, those are
// the next block's first. Results are finished during the next multiplications.
static void multiply_block(scratch_t *scratch, const left_t *left, const right_t *right, const block_t *block,
                           source_t next_block, const results_t *to)
{
    const i64 rows = block->row_count, height = block->height_count;
    const i64 groups = (height + MR - 1) / MR;
    results_t results = *to;
    sums_t sums[2] ALIGNED; // in turn: of the products, and pending
    pending_t pending = {0};
    int turn = 0;
    i64 row = 0;
    do {
        const i64 depth = min_i64(TILE_DEPTH, rows - row), steps = (depth + STEP - 1) / STEP;
        load_columns(scratch, left + row * HEIGHT, depth, height);
        for (i64 origin = 0; origin < block->column_count; origin += PACKED_COLUMNS) {
            const source_t source = source_of(right, block, row, origin);
            const source_t next = origin + PACKED_COLUMNS < block->column_count
                ? source_of(right, block, row, origin + PACKED_COLUMNS)
                : row + TILE_DEPTH < rows ? source_of(right, block, row + TILE_DEPTH, 0) : next_block;
            panel_t *panels = scratch->packed[scratch->turn];
            pack_rest(&scratch->packing, panels, source);
            scratch->turn = !scratch->turn;
            scratch->packing = packing_of(scratch->packed[scratch->turn], next, groups);
            for (i64 column = 0; column < source.columns; column += NR)
                for (i64 group = 0; group < groups; group++) {
                    const i64 first = group * MR, count = min_i64(MR, height - first);
                    prefetch_t prefetch = {.packing = &scratch->packing};
                    multiply_rows(count, sums[turn], scratch->rows[group], panels[column / NR], steps, 1,
                                  prefetch, &pending);
                    put_off(&pending, &results, sums[turn], first, count, origin + column,
                            min_i64(NR, source.columns - column));
                    turn = !turn;
                }
        }
        finish_rest(&pending);
        results.add = 1;
        row += TILE_DEPTH;
    } while (row < rows);
}

static void grouped_gemm_wgrad_down_block(
    const bf16 *restrict dout,   // [rows, 2880]
    const bf16 *restrict hidden, // [rows, 2880]
    const i64 *restrict offsets, // [33]
    f32 *restrict grad_down,     // [32, 2880, 2880]
    i64 accumulate,
    i64 tokens,
    i64 block_x, i64 block_y, void *scratch)
{
    const block_t block = find_block(tokens, offsets, block_x, block_y);
    if (block.row_count == 0 && accumulate)
        return;
    const i64 origin = (block.expert * HEIGHT + block.first_height) * WIDTH + block.first_column;
    const i64 first_left = block.first_row * HEIGHT + block.first_height;
    const right_t *right = hidden + block.first_row * WIDTH + block.first_column;
    // The next block has the next rows of a matrix, or the next columns.
    const int wraps = block_x + 1 == EXPERTS * TILES;
    const block_t then = find_block(tokens, offsets, wraps ? 0 : block_x + 1, block_y + wraps);
    const source_t next = then.column_count > 0
        ? source_of(hidden + then.first_row * WIDTH + then.first_column, &then, 0, 0) : (source_t){0};
    tiles_begin();
    const results_t dout_results = {
        .grad = grad_down + origin,
        .streamed = !accumulate && block.row_count <= TILE_DEPTH
            && is_streamed(grad_down, EXPERTS * (i64)HEIGHT, WIDTH * 4),
        .add = accumulate,
    };
    multiply_block(scratch, dout + first_left, right, &block, next, &dout_results);
    tiles_end();
    end_streaming_stores();
}

EXPORT void grouped_gemm_wgrad_down(void *const *args, i64 first, i64 last, i64 grid_x, void *scratch)
{
    const bf16 *dout = *(const bf16 *const *)args[0];
    const bf16 *hidden = *(const bf16 *const *)args[1];
    const i64 *offsets = *(const i64 *const *)args[2];
    f32 *grad_down = *(f32 *const *)args[3];
    i64 accumulate = *(const i64 *)args[4];
    i64 tokens = *(const i64 *)args[5];
    for (i64 block = first; block < last; block++)
        grouped_gemm_wgrad_down_block(dout, hidden, offsets, grad_down, accumulate, tokens,
            block % grid_x, block / grid_x, scratch);
}

// Adds one row, times its weight, to the sums of `count` columns.
INLINE void add_row(f32 *sums, const left_t *row, f32 weight, i64 count)
{
    for (i64 c = 0; c < count; c += LANES)
        *(vec *)&sums[c] += load_columns_bf16(row + c, count - c) * weight;
}

static void grouped_gemm_wgrad_down_bias_block(
    const bf16 *restrict dout,        // [rows, 2880]
    const i64 *restrict offsets,      // [33]
    const i32 *restrict row_slots,    // [rows]
    const f32 *restrict topk_weights, // [tokens, 4]
    f32 *restrict grad_down_bias,     // [32, 2880]
    i64 accumulate,
    i64 tokens,
    i64 block_x, i64 block_y)
{
    const i64 expert = block_x, column = block_y * BIAS_COLUMNS;
    const i64 count = min_i64(BIAS_COLUMNS, HEIGHT - column);
    (void)tokens;
    const i64 first = offsets[expert], end = offsets[expert + 1];
    if (first == end && accumulate)
        return;
    f32 dout_sums[BIAS_COLUMNS] ALIGNED = {0};
    for (i64 row = first; row < end; row++)
        add_row(dout_sums, dout + row * HEIGHT + column, topk_weights[row_slots[row]], count);
    write_sums(grad_down_bias + expert * HEIGHT + column, dout_sums, count, accumulate);
}

EXPORT void grouped_gemm_wgrad_down_bias(void *const *args, i64 first, i64 last, i64 grid_x)
{
    const bf16 *dout = *(const bf16 *const *)args[0];
    const i64 *offsets = *(const i64 *const *)args[1];
    const i32 *row_slots = *(const i32 *const *)args[2];
    const f32 *topk_weights = *(const f32 *const *)args[3];
    f32 *grad_down_bias = *(f32 *const *)args[4];
    i64 accumulate = *(const i64 *)args[5];
    i64 tokens = *(const i64 *)args[6];
    for (i64 block = first; block < last; block++)
        grouped_gemm_wgrad_down_bias_block(dout, offsets, row_slots, topk_weights,
            grad_down_bias, accumulate, tokens, block % grid_x, block / grid_x);
}
