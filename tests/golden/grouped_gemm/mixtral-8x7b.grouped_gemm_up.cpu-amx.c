// grouped_gemm_up: hidden = silu(rows * gate) * (rows * up), for the rows of every expert.
//
// A block computes 320 rows of one expert by 256 columns. It copies its rows to scratch once and
// multiplies them by one weight panel after the other, with its sums in AMX tiles.
// Panels lie in memory as the inner loop reads them; the pack entries put them there once.
// The sums of a row do not depend on the other rows or on their number.
// Decode calls, of up to 2 tokens, have blocks of 64 columns.
//
// Scratch memory of a thread: the rows of a block.
//
// Baked in: experts, widths, types, activation.

// [prelude: cpu.h, cpu_vector.h, cpu_bf16.h, cpu_vector.h]

// Operands of products. A word is what one 32-bit lane multiplies: two bf16,
// whose products are added to an f32 sum together.
enum { WORD = 2, STEP = WORD * LANES }; // elements per word, per vector

// [prelude: cpu_multiply.h, cpu_tiles.h, cpu_stream.h, cpu_exp.h]

INLINE vec sigmoid_f32(vec x) { return 1.0f / (1.0f + exp_f32(-x)); }
// The activation of an expert.
INLINE vec activation(vec x) { return x * sigmoid_f32(x); }

typedef bf16 input_t;
typedef bf16 weight_t;
enum {
    EXPERTS = 8,
    TOP_K = 2,
    INNER = 4096, // summed over
    OUTER = 14336, // columns of the output, rows of a matrix
    MATRICES = 2,
    TILE_ROWS = 320,
    TILE_COLUMNS = 256,
    DECODE_TOKENS = 2, // at most, of a call whose blocks are narrower:
    DECODE_COLUMNS = 64,
    TILE_WORDS = 1024, // of a depth slice
    TILE_DEPTH = TILE_WORDS * WORD,
    // The micro-kernel has the sums of MR rows by the NR columns of a packed panel.
    MR = 32,
    RESULT_COLUMNS = 16, // of each matrix
    NR = MATRICES * RESULT_COLUMNS, // gate columns, then up columns
    PANELS = TILE_COLUMNS / RESULT_COLUMNS,
    PREFETCH_ROWS = 4, // that are fetched before they are copied
    ALL_PANELS = (OUTER + RESULT_COLUMNS - 1) / RESULT_COLUMNS,
    WORDS = (INNER + 31) / 32 * 32 / WORD, // of a packed panel
};

// Returns the columns of a block. Decode calls have narrower blocks, so that many threads have one.
INLINE i64 block_columns(i64 tokens) { return tokens <= DECODE_TOKENS ? DECODE_COLUMNS : TILE_COLUMNS; }

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

// A panel has the weights of NR columns: word by word all columns. They
// lie so in memory, where they were put once.
typedef f32 panel_word_t;
typedef panel_word_t panel_t[WORDS][NR];
INLINE void store_panel(panel_word_t *to, vec v) { *(vec *)to = v; }

// Transposes `width` elements of LANES rows of a matrix into columns of a panel.
static void pack_columns(panel_word_t (*panel)[NR], const weight_t *const row[LANES], i64 width)
{
    for (i64 i = 0; i < width; i += STEP) {
        vec v[LANES];
        if (i + STEP <= width) {
#pragma GCC unroll 16
            for (int c = 0; c < LANES; c++)
                v[c] = load_weights(row[c] + i);
        } else {
            for (int c = 0; c < LANES; c++)
                v[c] = load_part_weights(row[c] + i, width - i);
        }
        transpose(v);
#pragma GCC unroll 16
        for (int lane = 0; lane < LANES; lane++)
            store_panel(panel[i / WORD + lane], v[lane]);
    }
}

// The columns of one matrix in a panel: the first of `count` rows of the matrix
// and the next ones; past the end it is the last one again.
static void pack_panel(panel_word_t (*panel)[NR], const weight_t *matrix, i64 count, i64 width)
{
    for (i64 c = 0; c < RESULT_COLUMNS; c += LANES) {
        const weight_t *row[LANES];
        for (i64 i = 0; i < LANES; i++)
            row[i] = matrix + min_i64(c + i, count - 1) * INNER;
        pack_columns((panel_word_t(*)[NR])&panel[0][c], row, width);
    }
}

// The next weights come from memory, so every group of rows prefetches its part of them, a few lines at
// a time, between multiplications. Many prefetches at once would occupy the line buffers that
// multiplications need.
enum { FETCH_WORDS = 16, FETCHES = TILE_WORDS / FETCH_WORDS, LINE = 64 };
typedef struct {
    const char *from;
    i64 lines, stride, step; // of a fetch; between its lines; to the next fetch
} prefetch_t;

INLINE void fetch(prefetch_t *prefetch)
{
    for (i64 line = 0; line < prefetch->lines; line++)
        __builtin_prefetch(prefetch->from + line * prefetch->stride, 0, 2);
    prefetch->from += prefetch->step;
}

// Returns the rest of a prefetch after some fetches.
INLINE prefetch_t past(i64 fetches, prefetch_t prefetch)
{
    prefetch.from += fetches * prefetch.step;
    return prefetch;
}

// Returns the part of a slice of a panel that group `group` of `groups` prefetches; none where earlier
// groups prefetch all.
INLINE prefetch_t part_of(const panel_word_t (*slice)[NR], i64 group, i64 groups)
{
    const i64 lines = FETCH_WORDS * sizeof(slice[0]) / LINE, each = (lines + groups - 1) / groups;
    const char *from = (const char *)slice + group * each * FETCHES * LINE;
    return (prefetch_t){.from = from, .lines = group * each < lines ? each : 0, .stride = LINE, .step = each * LINE};
}

// The scratch memory of a thread during a block:
// - its rows in the order of AMX tiles, a depth slice at a time
// - all sums
enum { ROW_GROUPS = (TILE_ROWS + MR - 1) / MR };
typedef f32 scratch_rows_t[MR][TILE];
typedef struct {
    i64 holds; // the tile whose rows are here, counted from one; zero at first
    f32 rest_of_line[14];
    scratch_rows_t ALIGNED rows[ROW_GROUPS][TILE_WORDS / TILE];
    sums_t sums[PANELS][ROW_GROUPS];
} scratch_t;
_Static_assert(sizeof(scratch_t) <= 2097216, "the launch gives a thread this much");

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

// The results of a block and what is added on the way, from its first row and
// column on.
typedef struct {
    output_t hidden;
} results_t;

// One vector of each kind of results, not rounded yet.
typedef struct {
    vec hidden;
} finished_t;

// One vector of results from its sums: a row's from `column` on.
INLINE finished_t finish(const results_t *to, const f32 *sum, i64 row, i64 column, f32 weight, i64 count)
{
    finished_t finished;
    vec up = *(const vec *)(sum + (MATRICES - 1) * RESULT_COLUMNS);
    vec gate = *(const vec *)sum;
    finished.hidden = activation(gate) * up;
    return finished;
}

// The results of one row from its sums: `columns` columns from `column` on.
INLINE void finish_row(const results_t *to, const f32 *sums, i64 row, i64 column, i64 columns,
                       finished_t *finished)
{
    const f32 weight = 1.0f;
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
    }
}

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

// Computes a block: copies its rows to scratch, unless the block before left them there, and multiplies
// them by one panel of the weights after the other, a depth slice at a time. Results are finished
// while their sums are cached, during the next multiplications.
static void multiply_block(scratch_t *scratch, i64 holds, const input_t *const *row, const block_t *block,
                           const results_t *to, const panel_t *panels, const panel_t *next_panels)
{
    const i64 rows = block->row_count, groups = (rows + MR - 1) / MR;
    const i64 panel_count = (block->column_count + RESULT_COLUMNS - 1) / RESULT_COLUMNS;
    (void)holds; // a slice after the other is there
    for (i64 depth = 0; depth < INNER; depth += TILE_DEPTH) {
        const i64 width = min_i64(TILE_DEPTH, INNER - depth);
        const int last = depth + TILE_DEPTH >= INNER;
        load_rows(scratch->rows, row, depth, rows, width);
        const i64 steps = (width + STEP - 1) / STEP;
        pending_t pending = {0};
        for (i64 p = 0; p < panel_count; p++) {
            const i64 column = p * RESULT_COLUMNS;
            const i64 columns = min_i64(RESULT_COLUMNS, block->column_count - column);
            const panel_word_t (*weights)[NR] = panels[p] + depth / WORD;
            const panel_word_t (*later)[NR] = p + 1 < panel_count ? panels[p + 1] + depth / WORD
                : last ? next_panels[0] : panels[0] + (depth + TILE_DEPTH) / WORD;
            sums_t *sums = scratch->sums[p];
            for (i64 step = 0; step < steps; step += PIECE)
                for (i64 group = 0; group < groups; group++) {
                    const i64 first = group * MR, count = min_i64(MR, rows - first);
                    prefetch_t prefetch = past(step, part_of(later, group, groups));
                    multiply_rows(count, sums[group], scratch->rows[group] + step, weights + step * TILE,
                                  min_i64(PIECE, steps - step), depth + step == 0, prefetch, &pending);
                    if (last && step + PIECE >= steps)
                        put_off(&pending, to, sums[group], first, count, column, columns);
                }
        }
        finish_rest(&pending);
    }
}

// The panels of a block's columns.
INLINE const panel_t *panels_of(const weight_t *packed, const block_t *block)
{
    const i64 first = block->expert * ALL_PANELS + block->first_column / RESULT_COLUMNS;
    return (const panel_t *)packed + first;
}

// A block packs the columns of one matrix in one panel of an expert.
INLINE void pack(const weight_t *matrix, weight_t *packed, i64 panel, i64 expert, i64 first)
{
    const i64 column = panel * RESULT_COLUMNS;
    panel_t *to = (panel_t *)packed + expert * ALL_PANELS + panel;
    const weight_t *from = matrix + (expert * OUTER + column) * INNER;
    pack_panel((panel_word_t(*)[NR])&to[0][0][first], from, OUTER - column, INNER);
}

static void grouped_gemm_up_pack_gate_block(
    const bf16 *restrict gate, // [8, 14336, 4096]
    bf16 *restrict packed,     // [8, panels, depth, columns]
    i64 tokens,
    i64 block_x, i64 block_y)
{
    (void)tokens;
    pack(gate, packed, block_x, block_y, 0);
}

EXPORT void grouped_gemm_up_pack_gate(void *const *args, i64 first, i64 last, i64 grid_x)
{
    const bf16 *gate = *(const bf16 *const *)args[0];
    bf16 *packed = *(bf16 *const *)args[1];
    i64 tokens = *(const i64 *)args[2];
    for (i64 block = first; block < last; block++)
        grouped_gemm_up_pack_gate_block(gate, packed, tokens, block % grid_x, block / grid_x);
}

static void grouped_gemm_up_pack_up_block(
    const bf16 *restrict up, // [8, 14336, 4096]
    bf16 *restrict packed,   // [8, panels, depth, columns]
    i64 tokens,
    i64 block_x, i64 block_y)
{
    (void)tokens;
    pack(up, packed, block_x, block_y, NR - RESULT_COLUMNS);
}

EXPORT void grouped_gemm_up_pack_up(void *const *args, i64 first, i64 last, i64 grid_x)
{
    const bf16 *up = *(const bf16 *const *)args[0];
    bf16 *packed = *(bf16 *const *)args[1];
    i64 tokens = *(const i64 *)args[2];
    for (i64 block = first; block < last; block++)
        grouped_gemm_up_pack_up_block(up, packed, tokens, block % grid_x, block / grid_x);
}

static void grouped_gemm_up_block(
    const bf16 *restrict x,        // [tokens, 4096]
    const bf16 *restrict packed,   // [8, panels, depth, columns]
    const i64 *restrict offsets,   // [9]
    const i32 *restrict row_tiles, // [9]
    const i32 *restrict row_slots, // [rows]
    bf16 *restrict hidden,         // [rows, 14336]
    i64 tokens,
    i64 block_x, i64 block_y, void *scratch)
{
    const i64 columns = block_columns(tokens);
    const block_t block = find_block(tokens, offsets, row_tiles, block_y, block_x, columns);
    if (block.row_count == 0)
        return;
    const input_t *row[TILE_ROWS + PREFETCH_ROWS];
    for (i64 r = 0; r < block.row_count; r++)
        row[r] = x + row_slots[block.first_row + r] / TOP_K * (i64)INNER;
    for (i64 r = block.row_count; r < block.row_count + PREFETCH_ROWS; r++)
        row[r] = row[r - 1];
    const i64 all_rows = offsets[EXPERTS];
    run_t waiting[1][TILE_ROWS] ALIGNED;
    const results_t results = {
        .hidden = output_of(hidden, all_rows, &block, waiting[0]),
    };
    const panel_t *panels = panels_of(packed, &block), *next_panels = panels;
    // The next block has the next columns; past the last, what follows in memory.
    next_panels += (block.column_count + RESULT_COLUMNS - 1) / RESULT_COLUMNS;
    tiles_begin();
    multiply_block(scratch, block_y + 1, row, &block, &results, panels, next_panels);
    tiles_end();
    end_streaming_stores();
}

EXPORT void grouped_gemm_up(void *const *args, i64 first, i64 last, i64 grid_x, void *scratch)
{
    const bf16 *x = *(const bf16 *const *)args[0];
    const bf16 *packed = *(const bf16 *const *)args[1];
    const i64 *offsets = *(const i64 *const *)args[2];
    const i32 *row_tiles = *(const i32 *const *)args[3];
    const i32 *row_slots = *(const i32 *const *)args[4];
    bf16 *hidden = *(bf16 *const *)args[5];
    i64 tokens = *(const i64 *)args[6];
    for (i64 block = first; block < last; block++)
        grouped_gemm_up_block(x, packed, offsets, row_tiles, row_slots, hidden, tokens,
            block % grid_x, block / grid_x, scratch);
}
