// grouped_gemm_dgrad_down: P = dout * down, and from it hidden, dgate and dup, for the rows of every expert.
//
// A block owns 192 rows of one expert and 128 columns of the result. It goes over
// the sum in slices: a slice of the weights is packed into a panel on the
// stack, every 6 rows are multiplied by it in registers, and the sums go to a
// tile on the stack. The weights are summed over by rows, so that they lie as
// the panel wants them. A row's sums do not depend on the other rows.
//
// hidden = w * A for the activation A of the kept pre-activations, dgate and
// dup = act' * w * P; a column of dweight_parts is <P, A> over the columns of a block.
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

// Vectors of 64 bytes: avx512bf16.
enum { LANES = 16 };
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
    v += SHUFFLE(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
    v += SHUFFLE(v, v, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3);
    v += SHUFFLE(v, v, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1);
    v += SHUFFLE(v, v, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 0);
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

// Operands of products. A word is what one 32-bit lane multiplies: two bf16,
// whose products are added to an f32 sum together.
enum { WORD = 2, STEP = WORD * LANES }; // elements per word, per vector

INLINE vec multiply_add(vec sum, vec a, vec b)
{
    __asm__("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
    return sum;
}

typedef vec vec_pairs_in_memory __attribute__((aligned(2)));
INLINE vec load_input(const bf16 *from) { return *(const vec_pairs_in_memory *)from; }
INLINE vec load_weights(const bf16 *from) { return load_input(from); }

INLINE vec load_part_input(const bf16 *from, i64 count)
{
    bf16 part[STEP] ALIGNED = {0};
    for (i64 i = 0; i < count; i++)
        part[i] = from[i];
    return *(const vec *)part;
}
INLINE vec load_part_weights(const bf16 *from, i64 count) { return load_part_input(from, count); }

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
            next[2 * i] = SHUFFLE(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
            next[2 * i + 1] =
                SHUFFLE(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
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
INLINE vec activation(vec x) { return x * sigmoid_f32(1.702f * x); }

// The derivative of the activation. Below `activation`, which brings its functions.
INLINE vec activation_slope(vec x)
{
    vec z = 1.702f * x, s = sigmoid_f32(z);
    return s + z * s * (1.0f - s);
}

typedef bf16 input_t;
typedef bf16 weight_t;
enum {
    EXPERTS = 32,
    TOP_K = 4,
    INNER = 2880, // summed over, rows of a matrix
    OUTER = 2880, // columns of the result and of a matrix
    PRODUCTS = 1, // that are added
    TILE_ROWS = 192,
    TILE_COLUMNS = 128,
    COLUMN_TILES = (OUTER + TILE_COLUMNS - 1) / TILE_COLUMNS,
    TILE_WORDS = 256, // of a depth slice
    TILE_DEPTH = TILE_WORDS * WORD,
    REGISTER_ROWS = 6,
    REGISTER_COLUMNS = 64,
    STRIPS = TILE_COLUMNS / REGISTER_COLUMNS,
    STRIP = REGISTER_COLUMNS,
    VECTORS = STRIP / LANES,
};

// Packing of matrices whose rows are summed over: columns lie side by side
// already, so nothing is transposed.
INLINE vec load_columns_bf16(const bf16 *from, i64 count)
{
    if (count >= LANES)
        return load_bf16(from);
    return count > 0 ? load_part_bf16(from, count) : (vec){0};
}

// Words of adjacent columns: a word is two rows, the second may be missing.
INLINE vec column_words_bf16(const bf16 *from, i64 stride, i64 rows, i64 count)
{
    vec_u32 low = (vec_u32)load_columns_bf16(from, count) >> 16;
    vec_u32 high = rows > 1 ? (vec_u32)load_columns_bf16(from + stride, count) : (vec_u32){0};
    return (vec)(low | high);
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

// The sums of a block.
typedef f32 tile_t[TILE_ROWS][STRIPS][STRIP];

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

// The sums of a block.
static void multiply_block(tile_t tile, const input_t *const *inputs,
                           const weight_t *const *matrices, const block_t *block)
{
    panel_t panel ALIGNED;
    slice_t slice ALIGNED;
    for (i64 row = 0; row < block->row_count; row++)
        for (i64 c = 0; c < STRIPS * STRIP; c += LANES)
            *(vec *)&tile[row][0][c] = (vec){0};
    for (int product = 0; product < PRODUCTS; product++)
        for (i64 depth = 0; depth < INNER; depth += TILE_DEPTH) {
            const input_t *input = inputs[product] + depth;
            const weight_t *matrix = matrices[product] + depth * OUTER;
            i64 width = min_i64(TILE_DEPTH, INNER - depth), words = (width + WORD - 1) / WORD;
            pack_bf16(panel[0][0], STRIP, TILE_COLUMNS, matrix, OUTER, width,
                 block->column_count);
            for (i64 row = 0; row < block->row_count; row += REGISTER_ROWS) {
                i64 count = min_i64(REGISTER_ROWS, block->row_count - row);
                load_slice(slice, input + row * INNER, count, width);
                for (i64 strip = 0; strip < STRIPS; strip++) {
                    f32 (*sums)[STRIPS][STRIP] = (f32(*)[STRIPS][STRIP])tile[row][strip];
                    multiply_rows(count, sums, slice, panel[strip], words);
                }
            }
        }
}

// One vector of which `count` elements exist.
INLINE vec load_row(const input_t *from, i64 count)
{
    return count >= LANES ? load_bf16(from) : load_part_bf16(from, count);
}

INLINE void store_row(input_t *to, vec v, i64 count)
{
    if (count >= LANES)
        store_bf16(to, v);
    else
        store_part_bf16(to, v, count);
}

// What the activation gave, and its derivatives by its inputs.
typedef struct {
    vec value, by_gate, by_up;
} slope_t;

// A clamp that holds has slope zero.
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

// A row of what a block reads beside the product, and writes.
typedef struct {
    const input_t *gate_pre, *up_pre;
    input_t *hidden, *dgate, *dup;
} rows_t;

// One row from its sums; returns <P, A>.
static f32 finish_row(const rows_t *row, f32 (*sums)[STRIP], f32 weight, i64 columns)
{
    vec part = {0};
    for (i64 c = 0; c < columns; c += LANES) {
        i64 count = columns - c;
        vec product = load_part_f32(&sums[c / STRIP][c % STRIP], min_i64(count, LANES));
        slope_t at = slope(load_row(row->gate_pre + c, count), load_row(row->up_pre + c, count));
        part += product * at.value;
        product *= weight;
        at.value *= weight;
        store_row(row->hidden + c, at.value, count);
        store_row(row->dgate + c, at.by_gate * product, count);
        store_row(row->dup + c, at.by_up * product, count);
    }
    return sum_lanes(part);
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
    f32 *restrict dweight_parts,      // [rows, 23]
    i64 tokens,
    i64 block_x, i64 block_y)
{
    (void)tokens;
    const block_t block = find_block(offsets, row_tiles, block_x, block_y);
    if (block.row_count == 0)
        return;
    const i64 first = block.first_row * INNER;
    const i64 corner = block.expert * INNER * OUTER + block.first_column;
    const input_t *const inputs[PRODUCTS] = {dout + first};
    const weight_t *const matrices[PRODUCTS] = {down + corner};
    tile_t tile ALIGNED;
    multiply_block(tile, inputs, matrices, &block);
    for (i64 i = 0; i < block.row_count; i++) {
        i64 row = block.first_row + i, to = row * OUTER + block.first_column;
        rows_t at = {gate_pre + to, up_pre + to, hidden + to, dgate + to, dup + to};
        f32 weight = topk_weights[row_slots[row]];
        f32 part = finish_row(&at, tile[i], weight, block.column_count);
        dweight_parts[row * COLUMN_TILES + block_y] = part;
    }
}

EXPORT void grouped_gemm_dgrad_down(void *const *args, i64 first, i64 last, i64 grid_x)
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
            block / grid_x);
}
