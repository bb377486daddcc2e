// grouped_gemm_up: hidden = silu(rows * gate) * (rows * up), for the rows of every expert.
//
// A block computes 384 rows of one expert by 256 columns. It takes the inner dimension
// in slices: it copies a slice of its rows to scratch and multiplies it by one weight panel
// after the other, 6 rows at a time, with the sums in vector registers.
// Panels lie in memory as the inner loop reads them; the pack entries put them there once.
// The sums of a row do not depend on the other rows or on their number.
// Decode calls, of up to 2 tokens, have blocks of 64 columns.
//
// Scratch memory of a thread: the rows of a block, its sums.
//
// Baked in: experts, widths, types, activation.

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

// [prelude: cpu_multiply.h, cpu_exp.h]

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
    TILE_ROWS = 384,
    TILE_COLUMNS = 256,
    DECODE_TOKENS = 2, // at most, of a call whose blocks are narrower:
    DECODE_COLUMNS = 64,
    TILE_WORDS = 512, // of a depth slice
    TILE_DEPTH = TILE_WORDS * WORD,
    // The micro-kernel has the sums of MR rows by the NR columns of a packed panel.
    MR = 6,
    RESULT_COLUMNS = 8, // of each matrix
    NR = MATRICES * RESULT_COLUMNS, // gate columns, then up columns
    PANELS = TILE_COLUMNS / RESULT_COLUMNS,
    PREFETCH_ROWS = 4, // that are fetched before they are copied
    VECTORS = NR / LANES,
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
typedef weight_t panel_word_t;
typedef panel_word_t panel_t[WORDS][NR];
INLINE vec load_panel(const panel_word_t *from) { return load_bf16(from); }
INLINE void store_panel(panel_word_t *to, vec v) { store_bf16(to, v); }

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
enum { FETCH_WORDS = 8, FETCHES = TILE_WORDS / FETCH_WORDS, LINE = 64 };
typedef struct {
    const char *from;
    i64 lines, stride, step; // of a fetch; between its lines; to the next fetch
    const input_t *const *row; // of input, of which every `apart`th is fetched
    i64 rows, apart, depth;
} prefetch_t;

INLINE void fetch(prefetch_t *prefetch)
{
    for (i64 line = 0; line < prefetch->lines; line++)
        __builtin_prefetch(prefetch->from + line * prefetch->stride, 0, 2);
    prefetch->from += prefetch->step;
    for (i64 r = 0; r < prefetch->rows; r += prefetch->apart)
        __builtin_prefetch(prefetch->row[r] + prefetch->depth, 0, 2);
    prefetch->depth += FETCH_WORDS * WORD;
}

// How many bytes later a single group fetches: it multiplies as fast as memory gives weights, and
// lines of a whole panel ahead, many at a time, would make it wait.
enum { AHEAD = 8 << 10 };

// Fetches the word of a panel that comes that much later, which is all that a single group fetches.
INLINE void fetch_ahead(const panel_word_t *word)
{
    for (i64 at = AHEAD; at < AHEAD + (i64)(NR * sizeof(*word)); at += LINE)
        __builtin_prefetch((const char *)word + at, 0, 2);
}

// Returns the part of a slice of a panel that group `group` of `groups` prefetches; none where earlier
// groups prefetch all, or where there is one.
INLINE prefetch_t part_of(const panel_word_t (*slice)[NR], i64 group, i64 groups)
{
    const i64 lines = FETCH_WORDS * sizeof(slice[0]) / LINE, each = (lines + groups - 1) / groups;
    const char *from = (const char *)slice + group * each * FETCHES * LINE;
    return (prefetch_t){.from = from, .lines = groups > 1 && group * each < lines ? each : 0, .stride = LINE, .step = each * LINE};
}

// A depth slice of a few rows of input, as words.
typedef f32 slice_t[MR][TILE_WORDS];

// Copies a slice of `count` rows, from a depth on.
static void load_slice(slice_t slice, const input_t *const *row, i64 depth, i64 count, i64 width)
{
    const i64 whole = width / STEP * STEP;
    for (i64 r = 0; r < count; r++) {
        const input_t *from = row[r] + depth, *soon = row[r + PREFETCH_ROWS] + depth;
        for (i64 i = 0; i < whole; i += STEP) {
            *(vec *)&slice[r][i / WORD] = load_input(from + i);
            __builtin_prefetch(soon + i);
        }
        if (whole < width)
            *(vec *)&slice[r][whole / WORD] = load_part_input(from + whole, width - whole);
    }
}

// Fetches the next slice's rows beside panel `p` of `count`: each panel
// fetches some of them.
INLINE void fetch_rows(prefetch_t *prefetch, const input_t *const *row, i64 depth, i64 rows, i64 p, i64 count)
{
    prefetch->row = row + p;
    prefetch->rows = rows - p;
    prefetch->apart = count;
    prefetch->depth = depth;
}

// The scratch memory of a thread during a block:
// - its rows, a depth slice at a time
// - all sums
enum { ROW_GROUPS = (TILE_ROWS + MR - 1) / MR };
typedef struct {
    slice_t ALIGNED rows[ROW_GROUPS];
    sums_t ALIGNED sums[PANELS][ROW_GROUPS];
} scratch_t;
_Static_assert(sizeof(scratch_t) <= 1605632, "the launch gives a thread this much");

// Adds `rows` rows of a slice times a panel to the sums.
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
        fetch_ahead(panel[word]);
        vec w[VECTORS];
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++)
            w[v] = load_panel(&panel[word][v * LANES]);
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            vec x = broadcast_word(&slice[r][word]);
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; v++)
                sum[r][v] = multiply_add(sum[r][v], x, w[v]);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++)
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

// The destination of one kind of results, from a block's first row and column on.
typedef input_t *output_t;

// One vector of results: a row's from `column` on, of which `count` exist.
INLINE void store_result(output_t output, vec v, i64 row, i64 column, i64 count)
{
    input_t *to = output + row * OUTER + column;
    if (count >= LANES)
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

// The results of a micro-kernel: `rows` rows from `row` on, `columns` columns
// from `column` on. An activation is a long chain of operations; those of several
// vectors go side by side if nothing else waits for them, so all are finished
// before the first is stored.
INLINE void finish_tile(const results_t *to, sums_t sums, i64 row, i64 rows, i64 column, i64 columns)
{
    finished_t finished[MR][RESULT_COLUMNS / LANES];
    for (i64 r = 0; r < rows; r++)
        finish_row(to, sums[r], row + r, column, columns, finished[r]);
    for (i64 r = 0; r < rows; r++)
        store_row(to, finished[r], row + r, column, columns);
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

// Copies the depth slices from `begin` to `end` of a block's rows to scratch, `height` rows in each place.
static void load_slices(scratch_t *scratch, const input_t *const *row, i64 rows, i64 height, i64 begin, i64 end)
{
    i64 place = 0;
    for (i64 depth = begin; depth < end; depth += TILE_DEPTH)
        for (i64 first = 0; first < rows; first += height, place++) {
            const i64 count = min_i64(height, rows - first), width = min_i64(TILE_DEPTH, INNER - depth);
            load_slice(scratch->rows[place], row + first, depth, count, width);
        }
}

// Computes a block, a depth slice at a time: copies its rows to scratch and multiplies every group of
// them by one panel of the weights after the other, so that a panel comes from memory once. Rows are
// grouped evenly; sums do not depend on the grouping. Results are finished while their sums are cached.
//
// A single group has several slices in scratch, in the places of other groups, and multiplies all of them
// by a panel before the next one: few rows wait for weights, which then come in the order of memory.
static void multiply_block(scratch_t *scratch, const input_t *const *row, const block_t *block, const results_t *to,
                           const panel_t *panels, const panel_t *next_panels)
{
    const i64 rows = block->row_count, groups = (rows + MR - 1) / MR;
    const i64 height = (rows + groups - 1) / groups;
    const i64 panel_count = (block->column_count + RESULT_COLUMNS - 1) / RESULT_COLUMNS;
    const i64 step = groups > 1 ? TILE_DEPTH : ROW_GROUPS * TILE_DEPTH;
    for (i64 begin = 0; begin < INNER; begin += step) {
        const i64 end = min_i64(INNER, begin + step);
        load_slices(scratch, row, rows, height, begin, end);
        for (i64 p = 0; p < panel_count; p++) {
            const i64 column = p * RESULT_COLUMNS;
            const i64 columns = min_i64(RESULT_COLUMNS, block->column_count - column);
            i64 place = 0;
            for (i64 depth = begin; depth < end; depth += TILE_DEPTH) {
                const i64 width = min_i64(TILE_DEPTH, INNER - depth);
                const i64 words = (width + WORD - 1) / WORD;
                const int last = depth + TILE_DEPTH >= INNER;
                const panel_word_t (*weights)[NR] = panels[p] + depth / WORD;
                const panel_word_t (*later)[NR] = p + 1 < panel_count ? panels[p + 1] + depth / WORD
                    : last ? next_panels[0] : panels[0] + (depth + TILE_DEPTH) / WORD;
                for (i64 group = 0; group < groups; group++, place++) {
                    const i64 first = group * height, count = min_i64(height, rows - first);
                    f32 (*sums)[NR] = scratch->sums[p][group];
                    prefetch_t prefetch = part_of(later, group, groups);
                    fetch_rows(&prefetch, row + first, depth + TILE_DEPTH, groups > 1 && !last ? count : 0, p, panel_count);
                    multiply_rows(count, sums, scratch->rows[place], weights, words, depth == 0, &prefetch, 0);
                    if (last)
                        finish_sums(to, sums, first, count, column, columns);
                }
            }
        }
    }
}

// The panels of a block's columns.
INLINE const panel_t *panels_of(const weight_t *packed, const block_t *block)
{
    const i64 first = block->expert * ALL_PANELS + block->first_column / RESULT_COLUMNS;
    return (const panel_t *)packed + first;
}

// A block packs the columns of one matrix in one panel of an expert. The same panels
// of all experts follow each other, as their products do.
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
    pack(gate, packed, block_y, block_x, 0);
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
    pack(up, packed, block_y, block_x, NR - RESULT_COLUMNS);
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
    const block_t block = find_block(tokens, offsets, row_tiles, block_x, block_y, columns);
    if (block.row_count == 0)
        return;
    const input_t *row[TILE_ROWS + PREFETCH_ROWS];
    for (i64 r = 0; r < block.row_count; r++)
        row[r] = x + row_slots[block.first_row + r] / TOP_K * (i64)INNER;
    for (i64 r = block.row_count; r < block.row_count + PREFETCH_ROWS; r++)
        row[r] = row[r - 1];
    const i64 origin = block.first_row * OUTER + block.first_column;
    const results_t results = {
        .hidden = hidden + origin,
    };
    const panel_t *panels = panels_of(packed, &block), *next_panels = panels;
    const block_t next = find_block(tokens, offsets, row_tiles, block_x + 1, block_y, columns);
    if (next.row_count > 0)
        next_panels = panels_of(packed, &next);
    multiply_block(scratch, row, &block, &results, panels, next_panels);
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
