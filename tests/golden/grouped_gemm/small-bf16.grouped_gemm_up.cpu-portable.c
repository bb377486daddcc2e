// grouped_gemm_up: hidden = silu(rows * gate) * (rows * up), for the rows of every expert.
//
// A block owns 192 rows of one expert and 64 columns of the output. It goes over
// the inner dimension in slices: a slice of the weights is transposed into a
// panel on the stack, every 6 rows are multiplied by it in registers, and the
// sums go to a tile on the stack. A block of few rows reads the weights once,
// as dot products. Either way a row's sums do not depend on the other rows,
// except that the two ways add in different orders.
//
// Baked in: experts, widths, types, activation. On the stack: the panel
// (256 words by the columns of a block), 6 rows of input, the tile.

// Names for the types of tensors. No header is included: this is all there is.
typedef __INT32_TYPE__ i32;
typedef __INT64_TYPE__ i64;
typedef __UINT16_TYPE__ u16;
typedef __UINT32_TYPE__ u32;
typedef __UINT64_TYPE__ u64;
typedef float f32;
typedef double f64;
typedef u16 bf16; // the upper half of an f32
typedef u16 f16;  // IEEE binary16

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline, unused))
#define ALIGNED __attribute__((aligned(64)))

INLINE i64 min_i64(i64 a, i64 b) { return a < b ? a : b; }
INLINE i64 max_i64(i64 a, i64 b) { return a > b ? a : b; }

// Vectors of 16 bytes: portable.
enum { LANES = 4 };
typedef f32 vec __attribute__((vector_size(4 * LANES), may_alias));
typedef i32 vec_i32 __attribute__((vector_size(4 * LANES), may_alias));
typedef u32 vec_u32 __attribute__((vector_size(4 * LANES), may_alias));
typedef u16 vec_u16 __attribute__((vector_size(2 * LANES), may_alias));
typedef vec vec_in_memory __attribute__((aligned(4)));
typedef vec_u16 vec_u16_in_memory __attribute__((aligned(2)));

INLINE vec broadcast(f32 value) { return value - (vec){0}; }

// Per lane: where the mask is all ones `a`, where it is zero `b`.
INLINE vec select(vec_i32 mask, vec a, vec b)
{
    return (vec)((mask & (vec_i32)a) | (~mask & (vec_i32)b));
}

// A comparison with NaN is false, so a NaN in `v` passes both of these.
INLINE vec at_most(vec v, vec limit) { return select(v > limit, limit, v); }
INLINE vec at_least(vec v, vec limit) { return select(v < limit, limit, v); }

#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (vec_i32){__VA_ARGS__})
#endif

// The sum of all lanes, as a binary tree.
INLINE f32 sum_lanes(vec v)
{
    v += SHUFFLE(v, v, 2, 3, 0, 1);
    v += SHUFFLE(v, v, 1, 2, 3, 0);
    return v[0];
}

INLINE vec load_f32(const f32 *from) { return *(const vec_in_memory *)from; }
INLINE void store_f32(f32 *to, vec v) { *(vec_in_memory *)to = v; }

// The first `count` elements; the other lanes are zero, or stay as they are.
INLINE vec load_part_f32(const f32 *from, i64 count)
{
    f32 part[LANES] ALIGNED = {0};
    for (int i = 0; i < LANES; i++)
        if (i < count)
            part[i] = from[i];
    return *(const vec *)part;
}

INLINE void store_part_f32(f32 *to, vec v, i64 count)
{
    f32 part[LANES] ALIGNED;
    *(vec *)part = v;
    for (int i = 0; i < LANES; i++)
        if (i < count)
            to[i] = part[i];
}

// bf16: the upper half of an f32.
INLINE vec f32_of_bf16(vec_u16 v) { return (vec)(__builtin_convertvector(v, vec_u32) << 16); }

// Rounds to nearest, ties to even. A NaN stays one: it is made quiet.
INLINE vec_u16 bf16_of_f32(vec v)
{
    vec_u32 bits = (vec_u32)v;
    vec_u32 nearest = bits + 0x7fff + ((bits >> 16) & 1);
    vec rounded = select(v == v, (vec)nearest, (vec)(bits | 0x400000));
    return __builtin_convertvector((vec_u32)rounded >> 16, vec_u16);
}

INLINE vec load_bf16(const bf16 *from) { return f32_of_bf16(*(const vec_u16_in_memory *)from); }
INLINE void store_bf16(bf16 *to, vec v) { *(vec_u16_in_memory *)to = bf16_of_f32(v); }

INLINE vec load_part_bf16(const bf16 *from, i64 count)
{
    bf16 part[LANES] ALIGNED = {0};
    for (int i = 0; i < LANES; i++)
        if (i < count)
            part[i] = from[i];
    return load_bf16(part);
}

INLINE void store_part_bf16(bf16 *to, vec v, i64 count)
{
    bf16 part[LANES] ALIGNED;
    store_bf16(part, v);
    for (int i = 0; i < LANES; i++)
        if (i < count)
            to[i] = part[i];
}

// Operands of products. A word is what one 32-bit lane multiplies: one f32.
enum { WORD = 1, STEP = WORD * LANES }; // elements per word, per vector

INLINE vec multiply_add(vec sum, vec a, vec b) { return sum + a * b; }

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

// The same word in every lane.
typedef i32 word_t __attribute__((may_alias));
INLINE vec broadcast_word(const f32 *word) { return (vec)((vec_i32){0} + *(const word_t *)word); }

// Turns LANES vectors, as the rows of a matrix, into its columns. A round
// shuffles vector i with vector i + LANES / 2, as a deck of cards is.
INLINE void transpose(vec v[LANES])
{
#pragma GCC unroll 4
    for (int round = 1; round < LANES; round *= 2) {
        vec next[LANES];
#pragma GCC unroll 8
        for (int i = 0; i < LANES / 2; i++) {
            vec a = v[i], b = v[i + LANES / 2];
            next[2 * i] = SHUFFLE(a, b, 0, 4, 1, 5);
            next[2 * i + 1] =
                SHUFFLE(a, b, 2, 6, 3, 7);
        }
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++)
            v[i] = next[i];
    }
}

// e to the x, to about 1 ulp, into the subnormals; inf, zero and NaN as usual.
// x = n ln 2 + r, a Taylor polynomial for r, and two steps to 2 to the n,
// since one power of two cannot reach every result.
INLINE vec exp_f32(vec x)
{
    x = at_most(at_least(x, broadcast(-105.0f)), broadcast(90.0f));
    const f32 to_integer = 0x1.8p23f; // adding it leaves no bits for a fraction
    vec n = (x * 0x1.715476p0f + to_integer) - to_integer;
    vec r = x - n * 0x1.62e4p-1f; // ln 2 in two parts; the first product is exact
    r = r - n * 0x1.7f7d1cp-20f;
    vec p = broadcast(1.0f / 5040);
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = (p * r) * r + r + 1.0f;
    vec_i32 power = __builtin_convertvector(n, vec_i32);
    vec_i32 half = power >> 1;
    return p * (vec)((half + 127) << 23) * (vec)((power - half + 127) << 23);
}

INLINE vec sigmoid_f32(vec x) { return 1.0f / (1.0f + exp_f32(-x)); }
// The activation of an expert.
INLINE vec activation(vec x) { return x * sigmoid_f32(x); }

typedef bf16 input_t;
typedef bf16 weight_t;
enum {
    EXPERTS = 8,
    TOP_K = 2,
    INNER = 256, // summed over
    OUTER = 128, // columns of the output, rows of a matrix
    MATRICES = 2,
    TILE_ROWS = 192,
    TILE_COLUMNS = 64,
    TILE_WORDS = 256, // of a depth slice
    TILE_DEPTH = TILE_WORDS * WORD,
    REGISTER_ROWS = 6,
    REGISTER_COLUMNS = 4, // of each matrix
    STRIPS = TILE_COLUMNS / REGISTER_COLUMNS,
    STRIP = MATRICES * REGISTER_COLUMNS, // gate columns, then up columns
    VECTORS = STRIP / LANES,
    FEW_ROWS = 12, // up to which a block works by dot products
};

// The sums of a block.
typedef f32 tile_t[TILE_ROWS][STRIPS][STRIP];

// Which rows and columns a block owns, and whose weights.
typedef struct {
    i64 expert, first_row, row_count, first_column, column_count;
} block_t;

// Rows are cut into tiles of even size. Past the last tile there are no rows.
INLINE block_t find_block(const i64 *offsets, const i32 *row_tiles, i64 block_x, i64 block_y)
{
    if (block_x >= row_tiles[EXPERTS])
        return (block_t){0};
    i64 expert = 0;
    for (i64 past = EXPERTS; past - expert > 1;) {
        i64 middle = (expert + past) / 2;
        if (row_tiles[middle] <= block_x)
            expert = middle;
        else
            past = middle;
    }
    i64 tile = block_x - row_tiles[expert], tiles = row_tiles[expert + 1] - row_tiles[expert];
    i64 start = offsets[expert], rows = offsets[expert + 1] - start;
    i64 first = start + rows * tile / tiles, end = start + rows * (tile + 1) / tiles;
    i64 column = block_y * TILE_COLUMNS;
    return (block_t){expert, first, end - first, column, min_i64(TILE_COLUMNS, OUTER - column)};
}

// A depth slice of the weights of a block, and of a few rows of input: words.
typedef f32 panel_t[STRIPS][TILE_WORDS][STRIP];
typedef f32 slice_t[REGISTER_ROWS][TILE_WORDS];

// Rows in memory that are wanted soon. They come from far away, so they are
// fetched a line at a time while registers are busy.
typedef struct {
    const char *row[REGISTER_ROWS];
    i64 word_bytes;
} ahead_t;

// Transposes a depth slice of LANES rows of a matrix into columns of the panel.
static void pack_columns(f32 (*panel)[STRIP], const weight_t *const row[LANES], i64 width)
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
            *(vec *)panel[i / WORD + lane] = v[lane];
    }
}

static void pack_panel(panel_t panel, const weight_t *const *matrix, const block_t *block,
                       i64 depth)
{
    i64 width = min_i64(TILE_DEPTH, INNER - depth);
    for (i64 strip = 0; strip < STRIPS; strip++)
        for (i64 c = 0; c < STRIP; c += LANES) {
            const weight_t *row[LANES]; // past the end: the last one again
            i64 first = strip * REGISTER_COLUMNS + c % REGISTER_COLUMNS;
            for (i64 i = 0; i < LANES; i++) {
                i64 column = min_i64(first + i, block->column_count - 1);
                row[i] = matrix[c / REGISTER_COLUMNS] + column * INNER + depth;
            }
            pack_columns((f32(*)[STRIP])&panel[strip][0][c], row, width);
        }
}

// Copies a depth slice of `count` rows of input.
static void load_slice(slice_t slice, const input_t *input, i64 count, i64 width)
{
    for (i64 row = 0; row < count; row++)
        for (i64 i = 0; i < width; i += STEP) {
            const input_t *from = input + row * INNER + i;
            vec v = i + STEP <= width ? load_input(from) : load_part_input(from, width - i);
            *(vec *)&slice[row][i / WORD] = v;
        }
}

// Adds `rows` rows of a slice times one strip of the panel to the sums.
INLINE void multiply(const int rows, f32 (*sums)[STRIPS][STRIP], slice_t slice,
                     f32 (*panel)[STRIP], i64 words, const ahead_t *ahead)
{
    vec sum[REGISTER_ROWS][VECTORS];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++)
            sum[r][v] = *(const vec *)&sums[r][0][v * LANES];
    for (i64 word = 0; word < words; word++) {
        if (word % 16 == 0)
            for (int r = 0; r < REGISTER_ROWS; r++)
                __builtin_prefetch(ahead->row[r] + word * ahead->word_bytes);
        vec w[VECTORS];
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++)
            w[v] = *(const vec *)&panel[word][v * LANES];
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
            *(vec *)&sums[r][0][v * LANES] = sum[r][v];
}

// One copy of `multiply` for each number of rows.
static void multiply_rows(i64 rows, f32 (*sums)[STRIPS][STRIP], slice_t slice,
                          f32 (*panel)[STRIP], i64 words, const ahead_t *ahead)
{
    switch (rows) {
    case 1:
        multiply(1, sums, slice, panel, words, ahead);
        break;
    case 2:
        multiply(2, sums, slice, panel, words, ahead);
        break;
    case 3:
        multiply(3, sums, slice, panel, words, ahead);
        break;
    case 4:
        multiply(4, sums, slice, panel, words, ahead);
        break;
    case 5:
        multiply(5, sums, slice, panel, words, ahead);
        break;
    case 6:
        multiply(6, sums, slice, panel, words, ahead);
        break;
    }
}

// What to fetch while a strip is multiplied: with the first one the next rows
// of input, with the others some rows of the next slice of the weights.
INLINE ahead_t look_ahead(const input_t *input, const weight_t *const *matrix, i64 row, i64 strip)
{
    ahead_t ahead;
    ahead.word_bytes = WORD * (strip == 0 ? sizeof(input_t) : sizeof(weight_t));
    for (i64 r = 0; r < REGISTER_ROWS; r++) {
        i64 turn = row * (STRIPS - 1) + (strip - 1) * REGISTER_ROWS + r;
        i64 column = turn / MATRICES % TILE_COLUMNS;
        ahead.row[r] = strip == 0
            ? (const char *)(input + (row + REGISTER_ROWS + r) * INNER)
            : (const char *)(matrix[turn % MATRICES] + column * INNER);
    }
    return ahead;
}

// The sums of a block of many rows.
static void multiply_many(tile_t tile, const input_t *input, const weight_t *const *matrix,
                          const block_t *block)
{
    panel_t panel ALIGNED;
    slice_t slice ALIGNED;
    for (i64 row = 0; row < block->row_count; row++)
        for (i64 c = 0; c < STRIPS * STRIP; c += LANES)
            *(vec *)&tile[row][0][c] = (vec){0};
    for (i64 depth = 0; depth < INNER; depth += TILE_DEPTH) {
        i64 width = min_i64(TILE_DEPTH, INNER - depth), words = (width + WORD - 1) / WORD;
        const weight_t *next[MATRICES];
        for (int m = 0; m < MATRICES; m++)
            next[m] = matrix[m] + depth + TILE_DEPTH;
        pack_panel(panel, matrix, block, depth);
        for (i64 row = 0; row < block->row_count; row += REGISTER_ROWS) {
            i64 count = min_i64(REGISTER_ROWS, block->row_count - row);
            load_slice(slice, input + row * INNER + depth, count, width);
            for (i64 strip = 0; strip < STRIPS; strip++) {
                ahead_t ahead = look_ahead(input + depth, next, row, strip);
                f32 (*sums)[STRIPS][STRIP] = (f32(*)[STRIPS][STRIP])tile[row][strip];
                multiply_rows(count, sums, slice, panel[strip], words, &ahead);
            }
        }
    }
}

// The products of `rows` rows of input with DOT_COLUMNS rows of a matrix.
enum { DOT_ROWS = 4, DOT_COLUMNS = 4, AHEAD = 16 * STEP };
INLINE void dot(const int rows, f32 (*products)[DOT_COLUMNS], const input_t *input,
                const weight_t *const *columns)
{
    vec sum[DOT_ROWS][DOT_COLUMNS] = {0};
    for (i64 i = 0; i < INNER; i += STEP) {
        const i64 left = INNER - i;
        vec w[DOT_COLUMNS];
#pragma GCC unroll 4
        for (int c = 0; c < DOT_COLUMNS; c++) {
            const weight_t *from = columns[c] + i;
            w[c] = left >= STEP ? load_weights(from) : load_part_weights(from, left);
            __builtin_prefetch(from + AHEAD);
        }
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            const input_t *from = input + r * (i64)INNER + i;
            vec x = left >= STEP ? load_input(from) : load_part_input(from, left);
#pragma GCC unroll 4
            for (int c = 0; c < DOT_COLUMNS; c++)
                sum[r][c] = multiply_add(sum[r][c], x, w[c]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < DOT_COLUMNS; c++)
            products[r][c] = sum_lanes(sum[r][c]);
}

// One copy of `dot` for each number of rows.
static void dot_rows(i64 rows, f32 (*products)[DOT_COLUMNS], const input_t *input,
                     const weight_t *const *columns)
{
    switch (rows) {
    case 1: dot(1, products, input, columns); break;
    case 2: dot(2, products, input, columns); break;
    case 3: dot(3, products, input, columns); break;
    default: dot(4, products, input, columns);
    }
}

// The sums of a block of few rows.
static void multiply_few(tile_t tile, const input_t *input, const weight_t *const *matrix,
                         const block_t *block)
{
    for (i64 column = 0; column < block->column_count; column += DOT_COLUMNS)
        for (int m = 0; m < MATRICES; m++) {
            const weight_t *columns[DOT_COLUMNS]; // past the end: the last one again
            for (i64 c = 0; c < DOT_COLUMNS; c++)
                columns[c] = matrix[m] + min_i64(column + c, block->column_count - 1) * INNER;
            for (i64 row = 0; row < block->row_count; row += DOT_ROWS) {
                f32 products[DOT_ROWS][DOT_COLUMNS];
                i64 count = min_i64(DOT_ROWS, block->row_count - row);
                dot_rows(count, products, input + row * INNER, columns);
                i64 strip = column / REGISTER_COLUMNS;
                i64 first = m * REGISTER_COLUMNS + column % REGISTER_COLUMNS;
                for (i64 r = 0; r < count; r++)
                    for (i64 c = 0; c < DOT_COLUMNS; c++)
                        tile[row + r][strip][first + c] = products[r][c];
            }
        }
}

// One row of the output from its sums.
INLINE void finish_row(input_t *restrict to, f32 (*sums)[STRIP],
                       const block_t *block)
{
    for (i64 column = 0; column < block->column_count; column += LANES) {
        i64 count = min_i64(LANES, block->column_count - column);
        const f32 *sum = &sums[column / REGISTER_COLUMNS][column % REGISTER_COLUMNS];
        vec up = *(const vec *)(sum + (MATRICES - 1) * REGISTER_COLUMNS);
        vec gate = *(const vec *)sum;
        vec result = activation(gate) * up;
        if (count == LANES)
            store_bf16(to + column, result);
        else
            store_part_bf16(to + column, result, count);
    }
}

static void grouped_gemm_up_block(
    const bf16 *restrict rows,     // [rows, 256]
    const bf16 *restrict gate,     // [8, 128, 256]
    const bf16 *restrict up,       // [8, 128, 256]
    const i64 *restrict offsets,   // [9]
    const i32 *restrict row_tiles, // [9]
    bf16 *restrict hidden,         // [rows, 128]
    i64 tokens,
    i64 block_x, i64 block_y)
{
    (void)tokens;
    const block_t block = find_block(offsets, row_tiles, block_x, block_y);
    if (block.row_count == 0)
        return;
    const i64 column = block.expert * OUTER + block.first_column;
    const input_t *first_row = rows + block.first_row * INNER;
    const weight_t *const matrix[MATRICES] = {
        gate + column * INNER,
        up + column * INNER,
    };
    tile_t tile ALIGNED;
    if (block.row_count <= FEW_ROWS)
        multiply_few(tile, first_row, matrix, &block);
    else
        multiply_many(tile, first_row, matrix, &block);
    for (i64 row = 0; row < block.row_count; row++) {
        i64 to = (block.first_row + row) * OUTER + block.first_column;
        finish_row(hidden + to, tile[row],
                   &block);
    }
}

EXPORT void grouped_gemm_up(void *const *args, i64 first, i64 last, i64 grid_x)
{
    const bf16 *rows = *(const bf16 *const *)args[0];
    const bf16 *gate = *(const bf16 *const *)args[1];
    const bf16 *up = *(const bf16 *const *)args[2];
    const i64 *offsets = *(const i64 *const *)args[3];
    const i32 *row_tiles = *(const i32 *const *)args[4];
    bf16 *hidden = *(bf16 *const *)args[5];
    i64 tokens = *(const i64 *)args[6];
    for (i64 block = first; block < last; block++)
        grouped_gemm_up_block(rows, gate, up, offsets, row_tiles, hidden, tokens,
            block % grid_x, block / grid_x);
}
