// grouped_gemm_wgrad_up: grad_up = transposed dup * rows, summed over
// the rows of every expert; biases are sums of the left factor.
//
// A block owns 36 by 64 elements of a matrix. It goes over the rows of its
// expert in slices: both factors are packed into panels on the stack and
// multiplied there in registers, 6 by 16 at a time. Sums are f32, in the
// order of the rows. An expert without rows gets zeros.
//
// Baked in: experts, widths, types. On the stack: two panels (128 words
// deep) and the tile.

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

// Vectors of 32 bytes: avx2.
enum { LANES = 8 };
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
    v += SHUFFLE(v, v, 4, 5, 6, 7, 0, 1, 2, 3);
    v += SHUFFLE(v, v, 2, 3, 4, 5, 6, 7, 0, 1);
    v += SHUFFLE(v, v, 1, 2, 3, 4, 5, 6, 7, 0);
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
INLINE vec f32_of_bf16(vec_u16 v)
{
    vec_u32 wide;
    __asm__("vpmovzxwd %1, %0" : "=v"(wide) : "vm"(v)); // gcc would widen in halves
    return (vec)(wide << 16);
}

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

INLINE vec load_input(const f32 *from) { return load_f32(from); }
INLINE vec load_weights(const bf16 *from) { return load_bf16(from); }
INLINE vec load_part_input(const f32 *from, i64 count)
{
    return load_part_f32(from, count);
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
            next[2 * i] = SHUFFLE(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
            next[2 * i + 1] =
                SHUFFLE(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
        }
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++)
            v[i] = next[i];
    }
}

typedef f32 left_t;
typedef bf16 right_t;
enum {
    EXPERTS = 1,
    TOP_K = 1,
    HEIGHT = 32, // rows of a matrix, width of the left factor
    WIDTH = 2880, // columns of a matrix, width of the right factor
    TILE_HEIGHT = 36,
    TILE_COLUMNS = 64,
    TILES = (HEIGHT + TILE_HEIGHT - 1) / TILE_HEIGHT, // above each other
    TILE_WORDS = 128, // of a slice of rows
    TILE_DEPTH = TILE_WORDS * WORD,
    REGISTER_ROWS = 6,
    REGISTER_COLUMNS = 16,
    STRIPS = TILE_COLUMNS / REGISTER_COLUMNS,
    STRIP = REGISTER_COLUMNS,
    VECTORS = STRIP / LANES,
    // Whole vectors, also from the first of the last few columns on.
    LEFT_STRIP = (TILE_HEIGHT + 2 * LANES - 1) / LANES * LANES,
    BIAS_COLUMNS = 256,
};

// Packing of matrices whose rows are summed over: columns lie side by side
// already, so nothing is transposed.
INLINE vec load_columns_f32(const f32 *from, i64 count)
{
    if (count >= LANES)
        return load_f32(from);
    return count > 0 ? load_part_f32(from, count) : (vec){0};
}

// Words of adjacent columns: a word is one row.
INLINE vec column_words_f32(const f32 *from, i64 stride, i64 rows, i64 count)
{
    (void)stride;
    (void)rows;
    return load_columns_f32(from, count);
}

// Packs `depth` rows into strips of `strip` columns, `columns` in all; those
// past `count` are zero. Strips lie `strip * TILE_WORDS` apart.
INLINE void pack_f32(f32 *to, const i64 strip, const i64 columns, const f32 *from,
                    i64 stride, i64 depth, i64 count)
{
    for (i64 row = 0; row < depth; row += WORD, to += strip, from += WORD * stride)
        for (i64 c = 0; c < columns; c += LANES) {
            f32 *place = to + c / strip * (strip * TILE_WORDS) + c % strip;
            i64 rows = min_i64(WORD, depth - row);
            *(vec *)place = column_words_f32(from + c, stride, rows, count - c);
        }
}
INLINE vec load_columns_bf16(const bf16 *from, i64 count)
{
    if (count >= LANES)
        return load_bf16(from);
    return count > 0 ? load_part_bf16(from, count) : (vec){0};
}

// Words of adjacent columns: a word is one row.
INLINE vec column_words_bf16(const bf16 *from, i64 stride, i64 rows, i64 count)
{
    (void)stride;
    (void)rows;
    return load_columns_bf16(from, count);
}

// Packs `depth` rows into strips of `strip` columns, `columns` in all; those
// past `count` are zero. Strips lie `strip * TILE_WORDS` apart.
INLINE void pack_bf16(f32 *to, const i64 strip, const i64 columns, const bf16 *from,
                    i64 stride, i64 depth, i64 count)
{
    for (i64 row = 0; row < depth; row += WORD, to += strip, from += WORD * stride)
        for (i64 c = 0; c < columns; c += LANES) {
            f32 *place = to + c / strip * (strip * TILE_WORDS) + c % strip;
            i64 rows = min_i64(WORD, depth - row);
            *(vec *)place = column_words_bf16(from + c, stride, rows, count - c);
        }
}

// The sums of a block.
typedef f32 tile_t[TILE_HEIGHT][STRIPS][STRIP];

// A slice of both factors, and of a few columns of the left one: words.
typedef f32 right_panel_t[STRIPS][TILE_WORDS][STRIP];
typedef f32 left_panel_t[TILE_WORDS][LEFT_STRIP];
typedef f32 slice_t[TILE_WORDS + LANES][REGISTER_ROWS];

// Which rows a block sums over, and which piece of the matrix it owns.
typedef struct {
    i64 expert, first_row, row_count, first_height, height_count, first_column, column_count;
} block_t;

INLINE block_t find_block(i64 tokens, i64 block_x, i64 block_y)
{
    i64 expert = block_x / TILES, height = block_x % TILES * TILE_HEIGHT;
    i64 column = block_y * TILE_COLUMNS;
    return (block_t){
        .expert = expert,
        .row_count = tokens,
        .first_height = height,
        .height_count = min_i64(TILE_HEIGHT, HEIGHT - height),
        .first_column = column,
        .column_count = min_i64(TILE_COLUMNS, WIDTH - column),
    };
}

// Adds `rows` rows of a slice times one strip of the panel to the sums.
INLINE void multiply(const int rows, f32 (*sums)[STRIPS][STRIP], slice_t slice,
                     f32 (*panel)[STRIP], i64 words)
{
    vec sum[REGISTER_ROWS][VECTORS];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++)
            sum[r][v] = *(const vec *)&sums[r][0][v * LANES];
    for (i64 word = 0; word < words; word++) {
        vec w[VECTORS];
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++)
            w[v] = *(const vec *)&panel[word][v * LANES];
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
            *(vec *)&sums[r][0][v * LANES] = sum[r][v];
}

// One copy of `multiply` for each number of rows.
static void multiply_rows(i64 rows, f32 (*sums)[STRIPS][STRIP], slice_t slice,
                          f32 (*panel)[STRIP], i64 words)
{
    switch (rows) {
    case 1:
        multiply(1, sums, slice, panel, words);
        break;
    case 2:
        multiply(2, sums, slice, panel, words);
        break;
    case 3:
        multiply(3, sums, slice, panel, words);
        break;
    case 4:
        multiply(4, sums, slice, panel, words);
        break;
    case 5:
        multiply(5, sums, slice, panel, words);
        break;
    case 6:
        multiply(6, sums, slice, panel, words);
        break;
    }
}

// Copies a few columns of the left panel together. A word writes whole vectors,
// whose ends the next ones write over.
static void load_slice(slice_t slice, left_panel_t left, i64 column, i64 words)
{
    for (i64 word = 0; word < words; word++)
        for (i64 r = 0; r < REGISTER_ROWS; r += LANES)
            *(vec_in_memory *)&slice[word][r] = load_f32(&left[word][column + r]);
}

// The sums of a block.
static void multiply_block(tile_t tile, const left_t *left, const right_t *right,
                           const block_t *block)
{
    right_panel_t right_panel ALIGNED;
    left_panel_t left_panel ALIGNED;
    slice_t slice ALIGNED;
    for (i64 h = 0; h < block->height_count; h++)
        for (i64 c = 0; c < STRIPS * STRIP; c += LANES)
            *(vec *)&tile[h][0][c] = (vec){0};
    for (i64 row = 0; row < block->row_count; row += TILE_DEPTH) {
        i64 depth = min_i64(TILE_DEPTH, block->row_count - row), words = (depth + WORD - 1) / WORD;
        pack_f32(left_panel[0], LEFT_STRIP, LEFT_STRIP, left + row * HEIGHT, HEIGHT, depth,
             block->height_count);
        pack_bf16(right_panel[0][0], STRIP, TILE_COLUMNS, right + row * WIDTH, WIDTH, depth,
             block->column_count);
        for (i64 h = 0; h < block->height_count; h += REGISTER_ROWS) {
            i64 count = min_i64(REGISTER_ROWS, block->height_count - h);
            load_slice(slice, left_panel, h, words);
            for (i64 strip = 0; strip < STRIPS; strip++) {
                f32 (*sums)[STRIPS][STRIP] = (f32(*)[STRIPS][STRIP])tile[h][strip];
                multiply_rows(count, sums, slice, right_panel[strip], words);
            }
        }
    }
}

// Writes sums, or adds them to what is there.
static void finish_row(f32 *restrict to, const f32 *sums, i64 count, i64 accumulate)
{
    for (i64 c = 0; c < count; c += LANES) {
        i64 left = count - c;
        vec sum = load_f32(sums + c);
        if (left >= LANES) {
            if (accumulate)
                sum += load_f32(to + c);
            store_f32(to + c, sum);
        } else {
            if (accumulate)
                sum += load_part_f32(to + c, left);
            store_part_f32(to + c, sum, left);
        }
    }
}

static void grouped_gemm_wgrad_up_block(
    const f32 *restrict dup,   // [tokens, 32]
    const bf16 *restrict rows, // [tokens, 2880]
    f32 *restrict grad_up,     // [1, 32, 2880]
    i64 accumulate,
    i64 tokens,
    i64 block_x, i64 block_y)
{
    const block_t block = find_block(tokens, block_x, block_y);
    if (block.row_count == 0 && accumulate)
        return;
    const i64 corner = (block.expert * HEIGHT + block.first_height) * WIDTH + block.first_column;
    const i64 first_left = block.first_row * HEIGHT + block.first_height;
    const i64 first_right = block.first_row * WIDTH + block.first_column;
    tile_t tile ALIGNED;
    multiply_block(tile, dup + first_left, rows + first_right, &block);
    for (i64 h = 0; h < block.height_count; h++)
        finish_row(grad_up + corner + h * WIDTH, tile[h][0], block.column_count, accumulate);
}

EXPORT void grouped_gemm_wgrad_up(void *const *args, i64 first, i64 last, i64 grid_x)
{
    const f32 *dup = *(const f32 *const *)args[0];
    const bf16 *rows = *(const bf16 *const *)args[1];
    f32 *grad_up = *(f32 *const *)args[2];
    i64 accumulate = *(const i64 *)args[3];
    i64 tokens = *(const i64 *)args[4];
    for (i64 block = first; block < last; block++)
        grouped_gemm_wgrad_up_block(dup, rows, grad_up, accumulate, tokens, block % grid_x,
            block / grid_x);
}

// Adds one row to the sums of `count` columns.
INLINE void add_row(f32 *sums, const left_t *row, i64 count)
{
    for (i64 c = 0; c < count; c += LANES)
        *(vec *)&sums[c] += load_columns_f32(row + c, count - c);
}

static void grouped_gemm_wgrad_up_bias_block(
    const f32 *restrict dup,    // [tokens, 32]
    f32 *restrict grad_up_bias, // [1, 32]
    i64 accumulate,
    i64 tokens,
    i64 block_x, i64 block_y)
{
    const i64 expert = block_x, column = block_y * BIAS_COLUMNS;
    const i64 count = min_i64(BIAS_COLUMNS, HEIGHT - column);
    const i64 first = 0, end = tokens;
    if (first == end && accumulate)
        return;
    f32 dup_sums[BIAS_COLUMNS] ALIGNED = {0};
    for (i64 row = first; row < end; row++)
        add_row(dup_sums, dup + row * HEIGHT + column, count);
    finish_row(grad_up_bias + expert * HEIGHT + column, dup_sums, count, accumulate);
}

EXPORT void grouped_gemm_wgrad_up_bias(void *const *args, i64 first, i64 last, i64 grid_x)
{
    const f32 *dup = *(const f32 *const *)args[0];
    f32 *grad_up_bias = *(f32 *const *)args[1];
    i64 accumulate = *(const i64 *)args[2];
    i64 tokens = *(const i64 *)args[3];
    for (i64 block = first; block < last; block++)
        grouped_gemm_wgrad_up_bias_block(dup, grad_up_bias, accumulate, tokens, block % grid_x,
            block / grid_x);
}
