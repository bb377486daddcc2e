// grouped_gemm_wgrad_down: grad_down = transposed dout * hidden,
// contracted over the rows of every expert; the gradient of a bias is the sum of the left operand.
//
// A block computes 384 by 1024 elements of a matrix. It takes the rows of its expert in slices:
// it packs the right factor into panels, copies columns of the left factor together and multiplies
// 6 by 16 of them at a time, with the sums in vector registers. Sums are f32, in the order
// of the rows.
// An expert without rows gets zeros.
//
// Scratch memory of a thread: packed panels, the left slice, their sums.
//
// Baked in: experts, widths, types.

// [prelude: cpu.h, cpu_vector.h, cpu_bf16.h, cpu_vector.h]

// Operands of products. A word is what one 32-bit lane multiplies: one f32.
enum { WORD = 1, STEP = WORD * LANES }; // elements per word, per vector

// [prelude: cpu_multiply.h]

INLINE vec load_input(const bf16 *from) { return load_bf16(from); }
INLINE vec load_weights(const bf16 *from) { return load_bf16(from); }
INLINE vec load_part_input(const bf16 *from, i64 count)
{
    return load_part_bf16(from, count);
}
INLINE vec load_part_weights(const bf16 *from, i64 count)
{
    return load_part_bf16(from, count);
}

// [prelude: cpu_multiply.h, cpu_stream.h]

typedef bf16 left_t;
typedef bf16 right_t;
typedef f32 gradient_t;
enum {
    EXPERTS = 32,
    TOP_K = 4,
    HEIGHT = 2880, // rows of a matrix, width of the left factor
    WIDTH = 2880, // columns of a matrix, width of the right factor
    TILE_ROWS = 384,
    TILE_COLUMNS = 1024,
    TILES = (HEIGHT + TILE_ROWS - 1) / TILE_ROWS, // above each other
    TILE_WORDS = 288, // of a slice of rows
    TILE_DEPTH = TILE_WORDS * WORD,
    // The micro-kernel has the sums of MR rows by the NR columns of a packed panel.
    MR = 6,
    NR = 16,
    RESULT_COLUMNS = NR,
    COLUMN_TILES = (WIDTH + TILE_COLUMNS - 1) / TILE_COLUMNS,
    PACKED_PANELS = 256 / NR, // that are packed together
    VECTORS = NR / LANES,
    PACKED_COLUMNS = PACKED_PANELS * NR,
    BIAS_COLUMNS = 256,
};

// [prelude: cpu_pack.h]

// Words of adjacent columns: a word is one row. Of these `rows` exist; it may be none.
INLINE vec column_words_bf16(const bf16 *from, i64 stride, i64 rows, i64 count)
{
    (void)stride;
    return rows > 0 ? load_columns_bf16(from, count) : (vec){0};
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
INLINE vec load_panel(const panel_word_t *from) { return *(const vec *)from; }

// Columns of the right factor of the next panels come from memory, so they
// are packed between multiplications, one word of a panel after the other, and their source is
// prefetched. Many prefetches at once would occupy the line buffers that multiplications need.
enum { FETCH_WORDS = 16, LINE = 64 };
enum {
    PREFETCH_WORDS = 8, // of what is packed, that are fetched
    DEPTH_STEP = WORD, // rows that are multiplied together
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
    gradient_t *grad; // the block's first element
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
    gradient_t *grad = to->grad + row * WIDTH + column;
    if (to->streamed)
        copy_row(grad, sums, columns * 4, 1);
    else
        write_sums(grad, sums, columns, to->add);
}

// A slice of a few columns of the left factor: words.
typedef f32 slice_t[TILE_WORDS + LANES][MR];

// The scratch memory of a thread during a block:
// - columns of the left operand, a depth slice at a time
// - all sums
// - packed panels
enum { ROW_GROUPS = (TILE_ROWS + MR - 1) / MR };
typedef struct {
    i32 turn; // the half of `packed` with which the next block begins
    packing_t packing; // of that half
    slice_t ALIGNED rows[ROW_GROUPS];
    sums_t ALIGNED sums[ROW_GROUPS][PACKED_PANELS];
    panel_t packed[2][PACKED_PANELS]; // one is multiplied while the other is packed
} scratch_t;
_Static_assert(sizeof(scratch_t) <= 1450048, "the launch gives a thread this much");

// Adds `rows` rows of a slice times a panel to the sums. Those that
// go past the caches are stored there, if it is known where.
INLINE void multiply(const int rows, f32 (*sums)[NR], slice_t slice,
                     const panel_word_t (*panel)[NR], i64 words, int start, const prefetch_t *first,
                     f32 *streamed)
{
    prefetch_t prefetch = *first;
    vec sum[MR][VECTORS];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++)
            sum[r][v] = start ? (vec){0} : *(const vec *)&sums[r][v * LANES];
    for (i64 word = 0; word < words; word++) {
        if (__builtin_expect(word % FETCH_WORDS == 0, 0)) // what is spilled is spilled here
            fetch(&prefetch);
        vec w[VECTORS];
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++)
            w[v] = load_panel(&panel[word][v * LANES]);
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            vec x = broadcast_word(&slice[word][r]);
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; v++)
                sum[r][v] = multiply_add(sum[r][v], x, w[v]);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++)
            if (streamed)
                store_streaming((vec *)&streamed[r * WIDTH + v * LANES], sum[r][v]);
            else
                *(vec *)&sums[r][v * LANES] = sum[r][v];
}

// One copy of `multiply` for each number of rows. It is not inlined, because
// vector values of its caller would take registers from the sums.
static __attribute__((noinline)) void
multiply_rows(i64 rows, f32 (*sums)[NR], slice_t slice,
              const panel_word_t (*panel)[NR], i64 words, int start, const prefetch_t *prefetch,
              f32 *streamed)
{
    switch (rows) {
    case 1: multiply(1, sums, slice, panel, words, start, prefetch, streamed); break;
    case 2: multiply(2, sums, slice, panel, words, start, prefetch, streamed); break;
    case 3: multiply(3, sums, slice, panel, words, start, prefetch, streamed); break;
    case 4: multiply(4, sums, slice, panel, words, start, prefetch, streamed); break;
    case 5: multiply(5, sums, slice, panel, words, start, prefetch, streamed); break;
    case 6: multiply(6, sums, slice, panel, words, start, prefetch, streamed); break;
    }
}

// The results of a micro-kernel: `rows` rows from `row` on, `columns` columns
// from `column` on.
INLINE void finish_tile(const results_t *to, sums_t sums, i64 row, i64 rows, i64 column, i64 columns)
{
    for (i64 r = 0; r < rows; r++)
        finish_row(to, sums[r], row + r, column, columns);
}

// One copy for whole panels. It is not inlined next to multiplications, because the compiler would keep
// the constants of an activation in their registers.
static __attribute__((noinline)) void
finish_sums(const results_t *to, sums_t sums, i64 row, i64 rows, i64 column, i64 columns)
{
    if (columns == RESULT_COLUMNS)
        finish_tile(to, sums, row, rows, column, RESULT_COLUMNS);
    else
        finish_tile(to, sums, row, rows, column, columns);
}

// Copies `groups` groups of columns of `depth` rows of the left factor, of which
// `columns` are left. A word writes whole vectors, whose ends the next ones write
// over. Rows are read whole, one after the other: those that are a power of two
// apart do not stay in a cache.
static void load_slices(slice_t *slices, const left_t *left, i64 depth, i64 columns, i64 groups)
{
    enum { PREFETCH_ROWS = 16, LINE_COLUMNS = LINE / sizeof(left_t) };
    const i64 width = groups * MR;
    for (i64 row = 0; row < depth; row += WORD) {
        for (i64 r = row + PREFETCH_ROWS; r < row + PREFETCH_ROWS + WORD; r++)
            for (i64 c = 0; c < width; c += LINE_COLUMNS)
                __builtin_prefetch(left + r * HEIGHT + c);
        for (i64 group = 0; group < groups; group++)
            for (i64 r = 0; r < MR; r += LANES) {
                const i64 column = group * MR + r;
                const left_t *from = left + row * HEIGHT + column;
                vec words = column_words_bf16(from, HEIGHT, depth - row, columns - column);
                *(vec_in_memory *)&slices[group][row / WORD][r] = words;
            }
    }
}

// Computes a block: some columns at a time, and a slice of the rows, for which the right operand is
// packed. The next panels are packed during the multiplications of these, after the last the next
// block's first. Columns of the left operand are copied next to each other and multiplied by every
// panel; if there is one slice, they stay cached for all columns. Results are finished while their sums
// are cached.
static void multiply_block(scratch_t *scratch, const left_t *left, const right_t *right, const block_t *block,
                           source_t next_block, const results_t *to)
{
    sums_t only_sums ALIGNED;
    const i64 rows = block->row_count, height = block->height_count;
    const i64 groups = (height + MR - 1) / MR;
    for (i64 origin = 0; origin < block->column_count; origin += PACKED_COLUMNS) {
        i64 row = 0;
        do {
            const int start = row == 0, last = row + TILE_DEPTH >= rows;
            const source_t source = source_of(right, block, row, origin);
            const i64 words = (source.depth + WORD - 1) / WORD, panel_count = (source.columns + NR - 1) / NR;
            const source_t next = !last ? source_of(right, block, row + TILE_DEPTH, origin)
                : origin + PACKED_COLUMNS < block->column_count
                ? source_of(right, block, 0, origin + PACKED_COLUMNS) : next_block;
            panel_t *panels = scratch->packed[scratch->turn];
            pack_rest(&scratch->packing, panels, source);
            scratch->turn = !scratch->turn;
            scratch->packing = packing_of(scratch->packed[scratch->turn], next, groups);
            if (origin == 0 || !start || !last)
                load_slices(scratch->rows, left + row * HEIGHT, source.depth, HEIGHT - block->first_height, groups);
            for (i64 group = 0; group < groups; group++) {
                const i64 first = group * MR, count = min_i64(MR, height - first);
                for (i64 p = 0; p < panel_count; p++) {
                    const i64 column = origin + p * NR, columns = min_i64(NR, block->column_count - column);
                    f32 (*sums)[NR] = start && last ? only_sums : scratch->sums[group][p];
                    prefetch_t prefetch = {.packing = &scratch->packing};
                    f32 *streamed = start && last && to->streamed && columns == NR
                        ? to->grad + first * WIDTH + column : 0;
                    multiply_rows(count, sums, scratch->rows[group], panels[p], words, start, &prefetch, streamed);
                    if (last && !streamed)
                        finish_sums(to, sums, first, count, column, columns);
                }
            }
            row += TILE_DEPTH;
        } while (row < rows);
    }
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
    const block_t block = find_block(tokens, offsets, block_y, block_x);
    if (block.row_count == 0 && accumulate)
        return;
    const i64 origin = (block.expert * HEIGHT + block.first_height) * WIDTH + block.first_column;
    const i64 first_left = block.first_row * HEIGHT + block.first_height;
    const right_t *right = hidden + block.first_row * WIDTH + block.first_column;
    // The next block has the next columns of a matrix, or the next rows.
    const int wraps = block_x + 1 == COLUMN_TILES, ends = wraps && block_y + 1 == EXPERTS * TILES;
    const block_t then = ends ? (block_t){0} : find_block(tokens, offsets, block_y + wraps, wraps ? 0 : block_x + 1);
    const source_t next = then.column_count > 0
        ? source_of(hidden + then.first_row * WIDTH + then.first_column, &then, 0, 0) : (source_t){0};
    const results_t dout_results = {
        .grad = grad_down + origin,
        .streamed = !accumulate
            && is_streamed(grad_down, EXPERTS * (i64)HEIGHT, WIDTH * sizeof(gradient_t)),
        .add = accumulate,
    };
    multiply_block(scratch, dout + first_left, right, &block, next, &dout_results);
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
