// grouped_gemm_dgrad_down: P = dout * down, and from it hidden, dgate and dup,
// for the rows of every expert.
//
// A block computes 384 rows of one expert by 256 columns of the result. It takes the
// contraction in slices: it packs a slice of the weights into panels and multiplies 6 rows at a
// time by it, with the sums in vector registers.
// The contraction runs over the rows of the weights, so packing needs no transposition. The sums of
// a row do not depend on the other rows.
//
// hidden = w * A for the activation A of the kept pre-activations, dgate and
// dup = act' * w * P; a column of dweight_parts is <P, A> over the columns of a block.
//
// Scratch memory of a thread: packed panels, 6 rows, the sums of a block.
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
    TILE_ROWS = 384,
    TILE_COLUMNS = 256,
    COLUMN_TILES = (OUTER + TILE_COLUMNS - 1) / TILE_COLUMNS,
    TILE_WORDS = 240, // of a depth slice
    TILE_DEPTH = TILE_WORDS * WORD,
    // The micro-kernel has the sums of MR rows by the NR columns of a packed panel.
    MR = 6,
    NR = 16,
    RESULT_COLUMNS = NR,
    PANELS = TILE_COLUMNS / NR,
    VECTORS = NR / LANES,
    PREFETCH_ROWS = 4, // that are fetched before they are copied
};

// [prelude: cpu_pack.h]

// Words of adjacent columns: a word is one row. Of these `rows` exist; it may be none.
INLINE vec column_words_bf16(const bf16 *from, i64 stride, i64 rows, i64 count)
{
    (void)stride;
    return rows > 0 ? load_columns_bf16(from, count) : (vec){0};
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
INLINE vec load_panel(const panel_word_t *from) { return *(const vec *)from; }

// Weights of the next panels come from memory, so they
// are packed between multiplications, one word of a panel after the other, and their source is
// prefetched. Many prefetches at once would occupy the line buffers that multiplications need.
enum { FETCH_WORDS = 16, LINE = 64 };
enum {
    PREFETCH_WORDS = 8, // of what is packed, that are fetched
    DEPTH_STEP = WORD, // rows that are multiplied together
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
    const input_t *const *row; // of input, of which every `apart`th is fetched
    i64 rows, apart, depth;
} prefetch_t;

INLINE void fetch(prefetch_t *prefetch)
{
    pack_due(prefetch->packing);
    for (i64 r = 0; r < prefetch->rows; r += prefetch->apart)
        __builtin_prefetch(prefetch->row[r] + prefetch->depth, 0, 2);
    prefetch->depth += FETCH_WORDS * WORD;
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
// - a group of its rows, a depth slice at a time
// - all sums
// - packed panels
enum { ROW_GROUPS = (TILE_ROWS + MR - 1) / MR };
typedef struct {
    i32 turn; // the half of `packed` with which the next block begins
    packing_t packing; // of that half
    slice_t ALIGNED rows;
    sums_t ALIGNED sums[ROW_GROUPS][PANELS];
    panel_t packed[2][PANELS]; // one is multiplied while the other is packed
} scratch_t;
_Static_assert(sizeof(scratch_t) <= 890560, "the launch gives a thread this much");

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

// A vector of which `count` elements exist.
INLINE vec load_row(const input_t *from, i64 count)
{
    return count >= LANES ? load_bf16(from) : load_part_bf16(from, count);
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

// The results of a micro-kernel: `rows` rows from `row` on, `columns` columns
// from `column` on. An activation is a long chain of operations; those of several
// vectors go side by side if nothing else waits for them, so all are finished
// before the first is stored. What the next panel's results will read beside its sums
// comes meanwhile.
INLINE void finish_tile(const results_t *to, sums_t sums, i64 row, i64 rows, i64 column, i64 columns)
{
    for (i64 r = 0; r < rows; r++) {
        const i64 next = (row + r) * OUTER + column + NR;
        __builtin_prefetch(to->gate_pre + next);
        __builtin_prefetch(to->up_pre + next);
    }
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

// Returns the source of panels that are packed together: a depth slice of a matrix, from a block's
// first column on.
INLINE source_t source_of(const weight_t *matrix, const block_t *block, i64 depth)
{
    return (source_t){matrix + depth * OUTER, min_i64(TILE_DEPTH, INNER - depth), block->column_count};
}

// Computes a block: one GEMM after the other, each a depth slice at a time, and of that a group of rows
// at a time, which are copied next to each other and multiplied by every panel. Meanwhile the next slice
// of the weights is packed, after the last one the next block's first. Results are finished while their
// sums are cached.
static void multiply_block(scratch_t *scratch, const input_t *(*row)[TILE_ROWS + PREFETCH_ROWS],
                           const weight_t *const *matrices, const block_t *block, source_t next_block,
                           const results_t *to)
{
    const i64 rows = block->row_count, groups = (rows + MR - 1) / MR;
    const i64 height = (rows + groups - 1) / groups;
    const i64 panel_count = (block->column_count + NR - 1) / NR;
    for (int product = 0; product < PRODUCTS; product++)
        for (i64 depth = 0; depth < INNER; depth += TILE_DEPTH) {
            const i64 width = min_i64(TILE_DEPTH, INNER - depth), words = (width + WORD - 1) / WORD;
            const int start = product == 0 && depth == 0;
            const int last = product + 1 == PRODUCTS && depth + TILE_DEPTH >= INNER;
            const source_t next_slice = depth + TILE_DEPTH < INNER
                ? source_of(matrices[product], block, depth + TILE_DEPTH)
                : product + 1 < PRODUCTS ? source_of(matrices[product + 1], block, 0) : next_block;
            panel_t *panels = scratch->packed[scratch->turn];
            pack_rest(&scratch->packing, panels, source_of(matrices[product], block, depth));
            scratch->turn = !scratch->turn;
            scratch->packing = packing_of(scratch->packed[scratch->turn], next_slice, groups);
            for (i64 group = 0; group < groups; group++) {
                const i64 first = group * height, count = min_i64(height, rows - first);
                const i64 next = group + 1 < groups ? first + height : 0, next_count = min_i64(height, rows - next);
                load_slice(scratch->rows, row[product] + first, depth, count, width);
                for (i64 p = 0; p < panel_count; p++) {
                    const i64 column = p * NR, columns = min_i64(NR, block->column_count - column);
                    f32 (*sums)[NR] = scratch->sums[group][p];
                    prefetch_t prefetch = {.packing = &scratch->packing};
                    fetch_rows(&prefetch, row[product] + next, depth + (next == 0 ? TILE_DEPTH : 0), next_count,
                               p, panel_count);
                    multiply_rows(count, sums, scratch->rows, panels[p], words, start, &prefetch, 0);
                    if (last)
                        finish_sums(to, sums, first, count, column, columns);
                }
            }
        }
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
    f32 *restrict dweight_parts,      // [rows, 12]
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
    const results_t results = {
        .hidden = hidden + first,
        .dgate = dgate + first,
        .dup = dup + first,
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
    const source_t next = then.row_count > 0 ? source_of(first_matrix, &then, 0) : (source_t){0};
    multiply_block(scratch, row, matrices, &block, next, &results);
    for (i64 r = 0; r < block.row_count; r++)
        dweight_parts[(block.first_row + r) * COLUMN_TILES + block_x] = sum_lanes(parts[r]);
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
