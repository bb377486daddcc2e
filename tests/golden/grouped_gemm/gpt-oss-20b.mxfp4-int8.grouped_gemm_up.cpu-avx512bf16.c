// grouped_gemm_up: hidden = silu(rows * gate) * (rows * up), for the rows of every expert.
//
// A block computes 384 rows of one expert by 256 columns. It takes the inner dimension
// in slices: it copies a slice of its rows to scratch and multiplies it by one weight panel
// after the other, 12 rows at a time, with the sums in vector registers.
// Panels lie in memory as the inner loop reads them; the pack entries put them there once.
// The sums of a row do not depend on the other rows or on their number.
// Decode calls, of up to 5 tokens, have blocks of 64 columns.
//
// Scratch memory of a thread: the rows of a block, its sums.
//
// Baked in: experts, widths, types, activation.

// [prelude: cpu.h, cpu_vector.h, cpu_bf16.h, cpu_vector.h, cpu_bytes.h, cpu_multiply.h, cpu_exp.h]

INLINE vec sigmoid_f32(vec x) { return 1.0f / (1.0f + exp_f32(-x)); }
// The activation of an expert.
INLINE vec activation(vec x) { return x * sigmoid_f32(1.702f * x); }

typedef bf16 input_t;
typedef bf16 weight_t;
enum {
    EXPERTS = 32,
    TOP_K = 4,
    INNER = 2880, // summed over
    OUTER = 2880, // columns of the output, rows of a matrix
    MATRICES = 2,
    TILE_ROWS = 384,
    TILE_COLUMNS = 256,
    DECODE_TOKENS = 5, // at most, of a call whose blocks are narrower:
    DECODE_COLUMNS = 64,
    TILE_WORDS = 368, // of a depth slice
    TILE_DEPTH = TILE_WORDS * WORD,
    // The micro-kernel has the sums of MR rows by the NR columns of a packed panel.
    MR = 12,
    RESULT_COLUMNS = 16, // of each matrix
    NR = MATRICES * RESULT_COLUMNS, // gate columns, then up columns
    PANELS = TILE_COLUMNS / RESULT_COLUMNS,
    PREFETCH_ROWS = 4, // that are fetched before they are copied
    VECTORS = NR / LANES,
    ALL_PANELS = (OUTER + RESULT_COLUMNS - 1) / RESULT_COLUMNS,
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

// A panel has the weights of 32 columns as codes: "mxfp4". Codes are multiplied as they
// are, and the sums of a block of 32 elements are then scaled column by column, so that no
// weight is rounded.
enum {
    CODE_COLUMNS = 32,
    BLOCK = 32,
    BLOCK_WORDS = BLOCK / WORD,
    BLOCKS = 2, // of a record
    RECORD = BLOCKS * BLOCK,
    RECORDS = 45,
};
// A word has 8 elements of a column: those of even place in its lower half, in order, those of
// odd place in its upper half, so that a shift brings a pair to the lowest bits of both.
enum { UNIT = 8, UNIT_WORDS = UNIT / WORD };
typedef u32 code_t;
typedef u8 scale_t;
typedef struct {
    code_t codes[BLOCKS][BLOCK / UNIT][CODE_COLUMNS];
    scale_t scales[BLOCKS][CODE_COLUMNS];
} record_t;
_Static_assert(sizeof(record_t) == 1088, "memory was planned for records of this size");
typedef vec_u32 vec_u32_in_memory __attribute__((aligned(4)));
INLINE vec_u32 load_codes(const code_t *from) { return *(const vec_u32_in_memory *)from; }

// What the sixteen codes stand for, twice and 12 more, so that none has a sign.
static const u8 ALIGNED code_values[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

// Word `word` of the words of a unit. An index is the lower half of a byte.
INLINE vec_u32 decode(vec_u32 codes, int word)
{
    const vec_u32 indices = codes >> (4 * word) & 0x0f0f0f0f;
    vec_u32 bytes;
    vec_u32 table;
    __asm__("vbroadcasti32x4 %1, %0" : "=v"(table) : "m"(code_values));
    __asm__("vpshufb %2, %1, %0" : "=v"(bytes) : "v"(table), "v"(indices));
    return bytes;
}

// The scales of a vector of columns.
INLINE vec load_scale(const scale_t *from)
{
    // The exponent of an f32. The smallest is subnormal there, and the largest is NaN.
    const vec_u32 codes = load_u8(from);
    const vec_u32 half = (vec_u32)((codes == 0) | (codes == 255)) & 0x00400000;
    return (vec)(codes << 23 | half);
}

// The numbers that a vector of columns has for a block: the scale of decoded codes.
typedef struct {
    vec scale;
} block_numbers_t;

INLINE block_numbers_t load_block(const record_t *record, i64 block, i64 column)
{
    block_numbers_t of;
    of.scale = load_scale(&record->scales[block][column]);
    of.scale *= 0.5f;
    return of;
}

// The numbers that the elements of each row that meet a block have in common.
typedef struct {
    f32 scales[MR];
    i32 starts[MR]; // of sums, less what the bytes of weights are too large by
} row_block_t;

typedef record_t panel_t[RECORDS];

// The next weights come from memory, so every group of rows prefetches its part of them, a few lines at
// a time, between multiplications. Many prefetches at once would occupy the line buffers that
// multiplications need.
enum { FETCH_WORDS = BLOCK_WORDS, FETCHES = TILE_WORDS / FETCH_WORDS, LINE = 64 };
enum { UNITS = BLOCK / UNIT }; // of a block, each of which fetches as many lines
typedef struct {
    const char *from;
    i64 lines, of_unit, step; // of a block first, then with each unit; to the next block
    const input_t *const *row; // of input, of which every `apart`th is fetched
    i64 rows, apart, depth;
} prefetch_t;

// Fetches lines from an address on, to the first cache: a single group needs them in a moment. Returns the address behind them.
INLINE const char *fetch_lines(const char *from, i64 lines)
{
    for (i64 line = 0; line < lines; line++)
        __builtin_prefetch(from + line * LINE, 0, 3);
    return from + lines * LINE;
}

// Fetches the first lines of a block. Returns the address from which units go on.
INLINE const char *fetch(prefetch_t *prefetch)
{
    const char *from = fetch_lines(prefetch->from, prefetch->lines);
    prefetch->from += prefetch->step;
    for (i64 r = 0; r < prefetch->rows; r += prefetch->apart)
        __builtin_prefetch(prefetch->row[r] + prefetch->depth, 0, 2);
    prefetch->depth += FETCH_WORDS * WORD;
    return from;
}

// How many bytes later a single group fetches: it multiplies as fast as memory gives weights, and
// lines of a whole panel ahead, many at a time, would make it wait.
enum { AHEAD = 8 << 10 };
INLINE const record_t *ahead(const record_t *record) { return (const record_t *)((const char *)record + AHEAD); }

// What group `group` of `groups` fetches of a slice of a panel, as many lines for each block: nothing,
// where those before it fetch all.
INLINE prefetch_t part_of(const record_t *slice, i64 group, i64 groups)
{
    const i64 lines = ((i64)sizeof(*slice) / BLOCKS + LINE - 1) / LINE, each = (lines + groups - 1) / groups;
    const i64 own = group * each < lines ? each : 0;
    const char *from = (const char *)slice + group * each * LINE;
    return (prefetch_t){.from = from, .lines = own % UNITS, .of_unit = own / UNITS, .step = lines * LINE};
}

// A depth slice of a few rows of input as codes, int8, a word at a time.
typedef f32 slice_t[MR][TILE_WORDS];
enum { SLICE_BLOCKS = (TILE_DEPTH + BLOCK - 1) / BLOCK };

// The code of a number from -127 to 127: the nearest integer, ties to even.
INLINE i32 code_of(f32 number)
{
    const u32 bits = *(const u32 *)&number, sign = bits & 0x80000000, magnitude = bits ^ sign;
    // The last bits of 2^23 count ones.
    const f32 counted = *(const f32 *)&magnitude + 0x1p23f;
    const i32 count = *(const u32 *)&counted & 0xff;
    return sign ? -count : count;
}

// Writes the scale of each block of a slice, its largest magnitude over 127, and the factor that
// makes codes of its numbers. A scale is NaN if an element is NaN or infinite, and zero if all are
// below 2^-100. Loops without branches become vectors: the divisions of all blocks are a few.
static void scale_blocks(const f32 *x, i64 blocks, f32 *scales, f32 *factors)
{
    u32 largest[SLICE_BLOCKS] ALIGNED;
    for (i64 b = 0; b < blocks; b++) {
        const u32 *bits = (const u32 *)&x[b * BLOCK];
        u32 most = 0;
        for (int i = 0; i < BLOCK; i++) {
            const u32 magnitude = bits[i] & 0x7fffffff;
            most = magnitude > most ? magnitude : most;
        }
        largest[b] = most;
    }
    for (i64 b = 0; b < blocks; b++) {
        const f32 magnitude = *(const f32 *)&largest[b];
        const f32 scale = magnitude / 127.0f, factor = 127.0f / magnitude;
        const int finite = largest[b] < 0x7f800000, counts = largest[b] >= 0x0d800000; // 2^-100
        scales[b] = !finite ? __builtin_nanf("") : counts ? scale : 0;
        factors[b] = finite & counts ? factor : 0;
    }
}

// Makes codes of a block of row `r`, and words of the codes.
INLINE void code_block(const f32 *x, f32 scale, f32 factor, row_block_t *of_rows, i64 r, f32 *words)
{
    of_rows->scales[r] = scale;
    i32 codes[BLOCK] ALIGNED;
    for (int i = 0; i < BLOCK; i++)
        codes[i] = code_of(x[i] * factor);
    i32 sum = 0;
    for (int i = 0; i < BLOCK; i++)
        sum += codes[i];
    of_rows->starts[r] = -12 * sum;
    i8 bytes[BLOCK] ALIGNED;
    for (int i = 0; i < BLOCK; i++)
        bytes[i] = codes[i];
    // Bytes have the order in which a unit of the weights has its own.
    typedef i8 unit_t __attribute__((vector_size(8), may_alias, aligned(1)));
    for (int i = 0; i < BLOCK; i += 8) {
        const unit_t unit = *(const unit_t *)&bytes[i];
#ifdef __clang__
        *(unit_t *)&words[i / WORD] = __builtin_shufflevector(unit, unit, 0, 4, 1, 5, 2, 6, 3, 7);
#else
        *(unit_t *)&words[i / WORD] = __builtin_shuffle(unit, (unit_t){0, 4, 1, 5, 2, 6, 3, 7});
#endif
    }
}

// Makes codes of a slice of `count` rows, from a depth on.
static void load_slice(slice_t slice, row_block_t *of_rows, const input_t *const *row, i64 depth, i64 count,
                       i64 width)
{
    const i64 blocks = (width + BLOCK - 1) / BLOCK;
    f32 x[TILE_DEPTH + LANES] ALIGNED, scales[SLICE_BLOCKS] ALIGNED, factors[SLICE_BLOCKS] ALIGNED;
    for (i64 r = 0; r < count; r++) {
        const input_t *from = row[r] + depth, *soon = row[r + PREFETCH_ROWS] + depth;
        i64 i = 0;
        for (; i + LANES <= width; i += LANES) {
            *(vec *)&x[i] = load_bf16(from + i);
            __builtin_prefetch(soon + i);
        }
        if (i < width)
            *(vec *)&x[i] = load_part_bf16(from + i, width - i);
        for (i = width; i < blocks * BLOCK; i++)
            x[i] = 0;
        scale_blocks(x, blocks, scales, factors);
        for (i64 b = 0; b < blocks; b++)
            code_block(&x[b * BLOCK], scales[b], factors[b], &of_rows[b], r, &slice[r][b * BLOCK_WORDS]);
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
    i64 holds; // the tile whose rows are here, counted from one; zero at first
    slice_t ALIGNED rows[ROW_GROUPS];
    sums_t ALIGNED sums[PANELS][ROW_GROUPS];
    row_block_t of_rows[ROW_GROUPS][(TILE_WORDS + BLOCK_WORDS - 1) / BLOCK_WORDS];
} scratch_t;
_Static_assert(sizeof(scratch_t) <= 1544576, "the launch gives a thread this much");

// Adds `rows` rows times the first `words` words of a unit of codes to the sums of a block.
INLINE void multiply_unit(const int rows, sum_vec (*sum)[VECTORS], slice_t slice, i64 first,
                          const code_t *codes, const int words)
{
    vec_u32 c[VECTORS];
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++)
        c[v] = load_codes(&codes[v * LANES]);
#pragma GCC unroll 8
    for (int word = 0; word < words; word++) {
        word_vec w[VECTORS];
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++)
            w[v] = decode(c[v], word);
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            word_vec x = broadcast_word(&slice[r][first + word]);
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; v++)
                sum[r][v] = multiply_add(sum[r][v], x, w[v]);
        }
    }
}

// Adds `rows` rows of a slice times the records of a panel to the sums.
INLINE void multiply(const int rows, f32 (*sums)[NR], slice_t slice, const record_t *record,
                     i64 words, int start, const prefetch_t *first, const row_block_t *of_rows)
{
    prefetch_t prefetch = *first;
    int in_record = 0;
    for (i64 begin = 0; begin < words; begin += BLOCK_WORDS) {
        const code_t (*codes)[NR] = record->codes[in_record];
        const i64 end = min_i64(BLOCK_WORDS, words - begin);
        const char *ahead = fetch(&prefetch);
        sum_vec sum[MR][VECTORS];
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; v++)
                sum[r][v] = (sum_vec){0} + of_rows->starts[r];
        i64 word = 0;
        for (; word + UNIT_WORDS <= end; word += UNIT_WORDS) {
            ahead = fetch_lines(ahead, prefetch.of_unit);
            multiply_unit(rows, sum, slice, begin + word, codes[word / UNIT_WORDS], UNIT_WORDS);
        }
        if (word < end)
            multiply_unit(rows, sum, slice, begin + word, codes[word / UNIT_WORDS], (int)(end - word));
        const int replaces = start && begin == 0;
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) {
            const block_numbers_t of = load_block(record, in_record, v * LANES);
#pragma GCC unroll 12
            for (int r = 0; r < rows; r++) {
                vec *to = (vec *)&sums[r][v * LANES];
                // Read before the product, so that every copy of this loop adds to it in the same
                // basic block and compilers contract both alike: results do not depend on `rows`.
                const vec before = replaces ? (vec){0} : *to;
                vec scaled = __builtin_convertvector(sum[r][v], vec) * of.scale;
                scaled *= of_rows->scales[r];
                *to = before + scaled;
            }
        }
        of_rows++;
        if (++in_record == BLOCKS) {
            in_record = 0;
            record++;
        }
    }
}

// One copy of `multiply` for each number of rows. What its caller has in vector
// registers would cost products theirs, hence no inlining.
static __attribute__((noinline)) void
multiply_rows(i64 rows, f32 (*sums)[NR], slice_t slice, const record_t *record, i64 words,
              int start, const prefetch_t *prefetch, const row_block_t *of_rows)
{
    switch (rows) {
    case 1: multiply(1, sums, slice, record, words, start, prefetch, of_rows); break;
    case 2: multiply(2, sums, slice, record, words, start, prefetch, of_rows); break;
    case 3: multiply(3, sums, slice, record, words, start, prefetch, of_rows); break;
    case 4: multiply(4, sums, slice, record, words, start, prefetch, of_rows); break;
    case 5: multiply(5, sums, slice, record, words, start, prefetch, of_rows); break;
    case 6: multiply(6, sums, slice, record, words, start, prefetch, of_rows); break;
    case 7: multiply(7, sums, slice, record, words, start, prefetch, of_rows); break;
    case 8: multiply(8, sums, slice, record, words, start, prefetch, of_rows); break;
    case 9: multiply(9, sums, slice, record, words, start, prefetch, of_rows); break;
    case 10: multiply(10, sums, slice, record, words, start, prefetch, of_rows); break;
    case 11: multiply(11, sums, slice, record, words, start, prefetch, of_rows); break;
    case 12: multiply(12, sums, slice, record, words, start, prefetch, of_rows); break;
    }
}

// One vector of a bias, of which `count` elements exist.
INLINE vec load_bias(const weight_t *bias, i64 count)
{
    return count >= LANES ? load_bf16(bias) : load_part_bf16(bias, count);
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
    const weight_t *gate_bias, *up_bias;
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
    up += load_bias(to->up_bias + column, count);
    up = at_least(at_most(up, broadcast(7.0f)), broadcast(-7.0f));
    up += 1.0f;
    vec gate = *(const vec *)sum;
    gate += load_bias(to->gate_bias + column, count);
    gate = at_most(gate, broadcast(7.0f));
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
            load_slice(scratch->rows[place], scratch->of_rows[place], row + first, depth, count, width);
        }
}

// Computes a block, a depth slice at a time: copies its rows to scratch and multiplies every group of
// them by one panel of the weights after the other, so that a panel comes from memory once. Rows are
// grouped evenly; sums do not depend on the grouping. Results are finished while their sums are cached.
//
// A single group has several slices in scratch, in the places of other groups, and multiplies all of them
// by a panel before the next one: few rows wait for weights, which then come in the order of memory.
static void multiply_block(scratch_t *scratch, i64 holds, const input_t *const *row, const block_t *block, const results_t *to,
                           const panel_t *panels, const panel_t *next_panels)
{
    const i64 rows = block->row_count, groups = (rows + MR - 1) / MR;
    const i64 height = (rows + groups - 1) / groups;
    const i64 panel_count = (block->column_count + RESULT_COLUMNS - 1) / RESULT_COLUMNS;
    const i64 step = groups > 1 ? TILE_DEPTH : ROW_GROUPS * TILE_DEPTH;
    for (i64 begin = 0; begin < INNER; begin += step) {
        const i64 end = min_i64(INNER, begin + step);
        // The block before may have made these codes: they are all there if none took another's place.
        if (step < INNER || scratch->holds != holds)
            load_slices(scratch, row, rows, height, begin, end);
        scratch->holds = holds;
        for (i64 p = 0; p < panel_count; p++) {
            const i64 column = p * RESULT_COLUMNS;
            const i64 columns = min_i64(RESULT_COLUMNS, block->column_count - column);
            i64 place = 0;
            for (i64 depth = begin; depth < end; depth += TILE_DEPTH) {
                const i64 width = min_i64(TILE_DEPTH, INNER - depth);
                const i64 words = (width + UNIT - 1) / UNIT * UNIT_WORDS;
                const int last = depth + TILE_DEPTH >= INNER;
                const record_t *weights = panels[p] + depth / RECORD;
                const record_t *later = groups == 1 ? ahead(weights)
                    : p + 1 < panel_count ? panels[p + 1] + depth / RECORD
                    : last ? next_panels[0] : panels[0] + (depth + TILE_DEPTH) / RECORD;
                for (i64 group = 0; group < groups; group++, place++) {
                    const i64 first = group * height, count = min_i64(height, rows - first);
                    f32 (*sums)[NR] = scratch->sums[p][group];
                    prefetch_t prefetch = part_of(later, group, groups);
                    fetch_rows(&prefetch, row + first, depth + TILE_DEPTH, groups > 1 && !last ? count : 0, p, panel_count);
                    multiply_rows(count, sums, scratch->rows[place], weights, words, depth == 0, &prefetch, scratch->of_rows[place]);
                    if (last)
                        finish_sums(to, sums, first, count, column, columns);
                }
            }
        }
    }
}

// The panels of a block's columns.
INLINE const panel_t *panels_of(const i32 *packed, const block_t *block)
{
    const i64 first = block->expert * ALL_PANELS + block->first_column / RESULT_COLUMNS;
    return (const panel_t *)packed + first;
}

enum {
    ROW_BYTES = 1440, // of a matrix, of codes
    SCALE_ROWS = 2880,
    SCALE_COLUMNS = 90,
    SCALE_ROW_BYTES = 92,
};

// The row of a matrix that a column of a panel has: past the end the last one again.
INLINE i64 row_of(i64 panel, i64 column) { return min_i64(panel * RESULT_COLUMNS + column, OUTER - 1); }

// A block packs the columns of one matrix in one panel of an expert. The same panels
// of all experts follow each other, as their products do.
INLINE record_t *records_of(i32 *packed, i64 panel, i64 expert) { return ((panel_t *)packed)[expert * ALL_PANELS + panel]; }

// The codes of a unit of a row, in order; past the row's end they are codes of zero. gcc 12 makes a wrong
// loop of one that looks at each code's place.
INLINE u32 unit_of(const u32 *row, i64 unit)
{
    const i64 left = INNER - unit * UNIT;
    if (left <= 0)
        return 0;
    const u32 given = left < UNIT ? (1u << left * 4) - 1 : 0xffffffff;
    return (row[unit] & given) | (0 & ~given);
}

// The same in the order in which kernels take them.
INLINE u32 spread(u32 unit)
{
    u32 code = 0;
    for (int i = 0; i < UNIT; i++)
        code |= (unit >> 4 * i & 15) << (i % 2 * 16 + i / 2 * 4);
    return code;
}

static void pack_weight(const i32 *matrix, i32 *packed, i64 panel, i64 expert, i64 first)
{
    record_t *to = records_of(packed, panel, expert);
    for (i64 c = 0; c < RESULT_COLUMNS; c++) {
        const u8 *from = (const u8 *)matrix + (expert * OUTER + row_of(panel, c)) * ROW_BYTES;
        for (i64 unit = 0; unit < RECORDS * (RECORD / UNIT); unit++) {
            const i64 block = unit / (BLOCK / UNIT);
            code_t *code = &to[block / BLOCKS].codes[block % BLOCKS][unit % (BLOCK / UNIT)][first + c];
            *code = spread(unit_of((const u32 *)from, unit));
        }
    }
}

// The scale of each column of each block. Codes are there already.
static void pack_scale(const void *scales, i32 *packed, i64 panel, i64 expert, i64 first)
{
    record_t *to = records_of(packed, panel, expert);
    for (i64 c = 0; c < RESULT_COLUMNS; c++) {
        const i64 line = expert * SCALE_ROWS + row_of(panel, c) / 1;
        const scale_t *row = (const scale_t *)((const u8 *)scales + line * SCALE_ROW_BYTES);
        for (i64 b = 0; b < RECORDS * BLOCKS; b++) {
            // Past the end there are codes of zero.
            const i64 at = min_i64(b * BLOCK / 32, SCALE_COLUMNS - 1);
            scale_t scale = row[at];
            to[b / BLOCKS].scales[b % BLOCKS][first + c] = scale;
        }
    }
}

static void grouped_gemm_up_pack_gate_block(
    const i32 *restrict gate, // [32, 2880, 360]
    i32 *restrict packed,     // [32, panels, depth, columns]
    i64 tokens,
    i64 block_x, i64 block_y)
{
    (void)tokens;
    pack_weight(gate, packed, block_x, block_y, 0);
}

EXPORT void grouped_gemm_up_pack_gate(void *const *args, i64 first, i64 last, i64 grid_x)
{
    const i32 *gate = *(const i32 *const *)args[0];
    i32 *packed = *(i32 *const *)args[1];
    i64 tokens = *(const i64 *)args[2];
    for (i64 block = first; block < last; block++)
        grouped_gemm_up_pack_gate_block(gate, packed, tokens, block % grid_x, block / grid_x);
}

static void grouped_gemm_up_pack_gate_scale_block(
    const i32 *restrict gate_scale, // [32, 2880, 23]
    i32 *restrict packed,           // [32, panels, depth, columns]
    i64 tokens,
    i64 block_x, i64 block_y)
{
    (void)tokens;
    pack_scale(gate_scale, packed, block_x, block_y, 0);
}

EXPORT void grouped_gemm_up_pack_gate_scale(void *const *args, i64 first, i64 last, i64 grid_x)
{
    const i32 *gate_scale = *(const i32 *const *)args[0];
    i32 *packed = *(i32 *const *)args[1];
    i64 tokens = *(const i64 *)args[2];
    for (i64 block = first; block < last; block++)
        grouped_gemm_up_pack_gate_scale_block(gate_scale, packed, tokens, block % grid_x,
            block / grid_x);
}

static void grouped_gemm_up_pack_up_block(
    const i32 *restrict up, // [32, 2880, 360]
    i32 *restrict packed,   // [32, panels, depth, columns]
    i64 tokens,
    i64 block_x, i64 block_y)
{
    (void)tokens;
    pack_weight(up, packed, block_x, block_y, NR - RESULT_COLUMNS);
}

EXPORT void grouped_gemm_up_pack_up(void *const *args, i64 first, i64 last, i64 grid_x)
{
    const i32 *up = *(const i32 *const *)args[0];
    i32 *packed = *(i32 *const *)args[1];
    i64 tokens = *(const i64 *)args[2];
    for (i64 block = first; block < last; block++)
        grouped_gemm_up_pack_up_block(up, packed, tokens, block % grid_x, block / grid_x);
}

static void grouped_gemm_up_pack_up_scale_block(
    const i32 *restrict up_scale, // [32, 2880, 23]
    i32 *restrict packed,         // [32, panels, depth, columns]
    i64 tokens,
    i64 block_x, i64 block_y)
{
    (void)tokens;
    pack_scale(up_scale, packed, block_x, block_y, NR - RESULT_COLUMNS);
}

EXPORT void grouped_gemm_up_pack_up_scale(void *const *args, i64 first, i64 last, i64 grid_x)
{
    const i32 *up_scale = *(const i32 *const *)args[0];
    i32 *packed = *(i32 *const *)args[1];
    i64 tokens = *(const i64 *)args[2];
    for (i64 block = first; block < last; block++)
        grouped_gemm_up_pack_up_scale_block(up_scale, packed, tokens, block % grid_x,
            block / grid_x);
}

static void grouped_gemm_up_block(
    const bf16 *restrict x,         // [tokens, 2880]
    const i32 *restrict packed,     // [32, panels, depth, columns]
    const bf16 *restrict gate_bias, // [32, 2880]
    const bf16 *restrict up_bias,   // [32, 2880]
    const i64 *restrict offsets,    // [33]
    const i32 *restrict row_tiles,  // [33]
    const i32 *restrict row_slots,  // [rows]
    bf16 *restrict hidden,          // [rows, 2880]
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
    const i64 column = block.expert * OUTER + block.first_column;
    const i64 origin = block.first_row * OUTER + block.first_column;
    const results_t results = {
        .hidden = hidden + origin,
        .gate_bias = gate_bias + column,
        .up_bias = up_bias + column,
    };
    const panel_t *panels = panels_of(packed, &block), *next_panels = panels;
    // The next block has the next columns, or the first ones of the next rows.
    const i64 next_column = block.first_column + block.column_count;
    block_t next = {.expert = block.expert, .first_column = next_column < OUTER ? next_column : 0};
    if (next_column >= OUTER)
        next = find_block(tokens, offsets, row_tiles, block_y + 1, 0, columns);
    next_panels = panels_of(packed, &next);
    multiply_block(scratch, block_y + 1, row, &block, &results, panels, next_panels);
}

EXPORT void grouped_gemm_up(void *const *args, i64 first, i64 last, i64 grid_x, void *scratch)
{
    const bf16 *x = *(const bf16 *const *)args[0];
    const i32 *packed = *(const i32 *const *)args[1];
    const bf16 *gate_bias = *(const bf16 *const *)args[2];
    const bf16 *up_bias = *(const bf16 *const *)args[3];
    const i64 *offsets = *(const i64 *const *)args[4];
    const i32 *row_tiles = *(const i32 *const *)args[5];
    const i32 *row_slots = *(const i32 *const *)args[6];
    bf16 *hidden = *(bf16 *const *)args[7];
    i64 tokens = *(const i64 *)args[8];
    for (i64 block = first; block < last; block++)
        grouped_gemm_up_block(x, packed, gate_bias, up_bias, offsets, row_tiles, row_slots,
            hidden, tokens, block % grid_x, block / grid_x, scratch);
}
