// grouped_gemm_down: out = hidden * down, for the rows of every expert.
//
// A block owns 320 rows of one expert and 256 columns of the output. It goes over
// its rows once, which are copied near, and over the weights strip by strip. Those lie in
// memory as they are multiplied. Sums are AMX tiles; a row's sums do not
// depend on the other rows or on their number. Blocks of a call of few tokens
// have 128 columns.
//
// Baked in: experts, widths, types, activation. A thread's scratch memory has the
// rows of a block.

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

// Vectors of 64 bytes: amx.
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

// Of a NaN and a number these instructions give their second operand, so a NaN
// in `v` passes both of these.
INLINE vec at_most(vec v, vec limit)
{
    __asm__("vminps %0, %1, %0" : "+v"(v) : "v"(limit));
    return v;
}

INLINE vec at_least(vec v, vec limit)
{
    __asm__("vmaxps %0, %1, %0" : "+v"(v) : "v"(limit));
    return v;
}

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
#ifdef __clang__
    vec_u32 wide = __builtin_convertvector(v, vec_u32);
#else
    vec_u32 wide;
    __asm__("vpmovzxwd %1, %0" : "=v"(wide) : "vm"(v)); // gcc would widen in halves
#endif
    return (vec)(wide << 16);
}

// Rounds to nearest, ties to even. A NaN stays one: it is made quiet. The
// instruction of AVX512-BF16 would make subnormals zero.
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

// AMX: eight tiles of 16 rows by 64 bytes. A product adds 16 x 16 f32 sums of
// 32 bf16 products each: rows of the left tile are rows of input, a row of the
// right tile has one pair of every column.
enum { TILE = 16 }; // rows, and words of a row

typedef struct {
    unsigned char palette, start_row, reserved[14];
    u16 row_bytes[16];
    unsigned char rows[16];
} tile_shapes_t;

// Gives the thread eight whole tiles, until they are released.
INLINE void tiles_begin(void)
{
    static const tile_shapes_t shapes = {
        .palette = 1,
        .row_bytes = {64, 64, 64, 64, 64, 64, 64, 64},
        .rows = {16, 16, 16, 16, 16, 16, 16, 16},
    };
    __asm__ volatile("ldtilecfg %0" ::"m"(shapes));
}
INLINE void tiles_end(void) { __asm__ volatile("tilerelease" ::); }

// Tiles are named by number. A stride is the bytes from a row to the next. What is
// streamed is not wanted again soon: it leaves the first-level cache to the rest.
#define TILE_ZERO(tile) __asm__ volatile("tilezero %%tmm" #tile ::)
#define TILE_LOAD(tile, from, stride) \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"(from), "r"((i64)(stride)) : "memory")
#define TILE_STREAM(tile, from, stride) \
    __asm__ volatile("tileloaddt1 (%0,%1,1), %%tmm" #tile ::"r"(from), "r"((i64)(stride)) : "memory")
#define TILE_STORE(tile, to, stride) \
    __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"(to), "r"((i64)(stride)) : "memory")
#define TILE_MULTIPLY(sums, left, right) \
    __asm__ volatile("tdpbf16ps %%tmm" #right ", %%tmm" #left ", %%tmm" #sums ::)
// Rows that are written once and read much later.

// A copy that is larger than this finds nothing of it in a cache afterwards.
enum { FAR_BYTES = 32 << 20 };

// Stores past the caches, which then need not read the line first. `to` is
// aligned to a vector.
INLINE void store_far(vec *to, vec v) { __asm__ volatile("vmovntps %1, %0" : "=m"(*to) : "v"(v)); }
INLINE void store_far_half(vec_u16 *to, vec_u16 v) { __asm__ volatile("vmovntps %1, %0" : "=m"(*to) : "v"(v)); }

// Orders these stores before all later ones.
INLINE void end_far_stores(void) { __asm__ volatile("sfence" ::: "memory"); }

// Whether `rows` rows of `row_bytes` are best written with store_far.
INLINE int is_far(const void *to, i64 rows, i64 row_bytes)
{
    return row_bytes % sizeof(vec) == 0 && rows * row_bytes >= FAR_BYTES && (u64)to % sizeof(vec) == 0;
}

// Copies a row; one that is far has whole vectors and goes past the caches.
INLINE void copy_row(void *restrict to, const void *restrict from, i64 bytes, int far)
{
    typedef vec vec_anywhere __attribute__((aligned(1)));
    if (far)
        for (i64 i = 0; i < bytes / (i64)sizeof(vec); i++)
            store_far((vec *)to + i, ((const vec_anywhere *)from)[i]);
    else
        for (i64 i = 0; i < bytes; i++)
            ((char *)to)[i] = ((const char *)from)[i];
}

typedef bf16 input_t;
typedef bf16 weight_t;
enum {
    EXPERTS = 256,
    TOP_K = 8,
    INNER = 2048, // summed over
    OUTER = 7168, // columns of the output, rows of a matrix
    MATRICES = 1,
    TILE_ROWS = 320,
    TILE_COLUMNS = 256,
    FEW_TOKENS = 1, // at most, of a call whose blocks are narrower:
    FEW_COLUMNS = 128,
    TILE_WORDS = 1024, // of a depth slice
    TILE_DEPTH = TILE_WORDS * WORD,
    REGISTER_ROWS = 32,
    REGISTER_COLUMNS = 32, // of each matrix
    STRIPS = TILE_COLUMNS / REGISTER_COLUMNS,
    STRIP = MATRICES * REGISTER_COLUMNS, // gate columns, then up columns
    ROWS_AHEAD = 4, // that are fetched before they are copied
    ALL_STRIPS = (OUTER + REGISTER_COLUMNS - 1) / REGISTER_COLUMNS,
    WORDS = (INNER + 31) / 32 * 32 / WORD, // of a packed strip
};

// Columns of a block. Few tokens would have few blocks: theirs are narrower.
INLINE i64 block_columns(i64 tokens) { return tokens <= FEW_TOKENS ? FEW_COLUMNS : TILE_COLUMNS; }

// Which rows and columns a block owns, and whose weights.
typedef struct {
    i64 expert, first_row, row_count, first_column, column_count;
} block_t;

// Rows are cut into tiles of even size. Past the last tile there are no rows.
INLINE block_t find_block(const i64 *offsets, const i32 *row_tiles, i64 row_tile, i64 column_tile, i64 columns)
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
    i64 column = column_tile * columns;
    return (block_t){expert, first, end - first, column, min_i64(columns, OUTER - column)};
}

// Sums of a register tile.
typedef f32 sums_t[REGISTER_ROWS][STRIP];

// A panel has the weights of a block, a depth slice at a time, in strips that
// the sums of a register tile are as wide as: word by word all columns. They
// lie so in memory, where they were put once.
typedef f32 panel_word_t;
typedef panel_word_t strip_t[WORDS][STRIP];
INLINE void store_panel(panel_word_t *to, vec v) { *(vec *)to = v; }

// Transposes `width` elements of LANES rows of a matrix into columns of a strip.
static void pack_columns(panel_word_t (*strip)[STRIP], const weight_t *const row[LANES], i64 width)
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
            store_panel(strip[i / WORD + lane], v[lane]);
    }
}

// The columns of one matrix in a strip: the first of `count` rows of the matrix
// and the next ones; past the end it is the last one again.
static void pack_strip(panel_word_t (*strip)[STRIP], const weight_t *matrix, i64 count, i64 width)
{
    for (i64 c = 0; c < REGISTER_COLUMNS; c += LANES) {
        const weight_t *row[LANES];
        for (i64 i = 0; i < LANES; i++)
            row[i] = matrix + min_i64(c + i, count - 1) * INNER;
        pack_columns((panel_word_t(*)[STRIP])&strip[0][c], row, width);
    }
}

// Weights that are wanted soon come from far away, so every group of rows
// fetches its part of what is next, a few lines at a time, between products. Many
// lines at once would keep the products from reading what is near.
enum { FETCH_WORDS = 16, FETCHES = TILE_WORDS / FETCH_WORDS, LINE = 64 };
typedef struct {
    const char *from;
    i64 lines, stride, step; // of a fetch; between its lines; to the next fetch
} ahead_t;

INLINE void fetch(ahead_t *ahead)
{
    for (i64 line = 0; line < ahead->lines; line++)
        __builtin_prefetch(ahead->from + line * ahead->stride, 0, 2);
    ahead->from += ahead->step;
}

// What is left of it past some fetches.
INLINE ahead_t past(i64 fetches, ahead_t ahead)
{
    ahead.from += fetches * ahead.step;
    return ahead;
}

// What group `group` of `groups` fetches of a slice of a strip: nothing, where those
// before it fetch all.
INLINE ahead_t part_of(const panel_word_t (*slice)[STRIP], i64 group, i64 groups)
{
    const i64 lines = FETCH_WORDS * sizeof(slice[0]) / LINE, each = (lines + groups - 1) / groups;
    const char *from = (const char *)slice + group * each * FETCHES * LINE;
    return (ahead_t){.from = from, .lines = group * each < lines ? each : 0, .stride = LINE, .step = each * LINE};
}

// What a thread keeps near while it works on a block: its rows, as tiles take
// them.
enum { ROW_GROUPS = (TILE_ROWS + REGISTER_ROWS - 1) / REGISTER_ROWS };
typedef f32 near_rows_t[REGISTER_ROWS][TILE];
typedef struct {
    i64 holds; // the tile whose rows are here, counted from one; zero at first
    f32 rest_of_line[14];
    near_rows_t ALIGNED rows[ROW_GROUPS][TILE_WORDS / TILE];
} near_t;
_Static_assert(sizeof(near_t) <= 1441856, "the launch gives a thread this much");

// Copies a slice of `count` rows, which come from anywhere.
static void load_rows(near_rows_t (*near)[TILE_WORDS / TILE], const input_t *const *row, i64 depth, i64 count,
                      i64 width)
{
    for (i64 r = 0; r < count; r++) {
        near_rows_t *to = near[r / REGISTER_ROWS];
        for (i64 i = 0; i < width; i += STEP) {
            const input_t *from = row[r] + depth + i;
            vec v = i + STEP <= width ? load_input(from) : load_part_input(from, width - i);
            *(vec *)to[i / STEP][r % REGISTER_ROWS] = v;
            __builtin_prefetch(row[r + ROWS_AHEAD] + depth + i);
        }
    }
}

// Where one kind of results goes, from a block's first row and column on. Memory
// takes two lines that lie side by side twice as fast as two that do not, so results
// that go past the caches wait near until two lines of a row are whole.
enum { RUN = 2 * LINE / sizeof(input_t), WHOLE_RUNS = OUTER % RUN == 0 && TILE_COLUMNS % RUN == 0 };
typedef input_t run_t[RUN];
typedef struct {
    input_t *to;
    run_t *waiting; // of every row; none, if results are stored as they come
} output_t;

// The results of a block among those of `rows` rows.
INLINE output_t output_of(input_t *results, i64 rows, const block_t *block, run_t *waiting)
{
    const int far = WHOLE_RUNS && is_far(results, rows, OUTER * sizeof(input_t));
    return (output_t){results + block->first_row * OUTER + block->first_column, far ? waiting : 0};
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
                store_far_half((vec_u16 *)(to + LANES - RUN + c), *(const vec_u16 *)(run + c));
    } else if (count >= LANES)
        store_bf16(to, v);
    else
        store_part_bf16(to, v, count);
}

// The results of a block and what is added on the way, from its first row and
// column on.
typedef struct {
    output_t out;
} results_t;

// One vector of results from its sums: a row's from `column` on.
INLINE void finish(const results_t *to, const f32 *sum, i64 row, i64 column, i64 count)
{
    vec result = *(const vec *)sum;
    store_result(to->out, result, row, column, count);
}

// The results of one row, from its sums: `columns` columns from `column` on.
INLINE void finish_row(const results_t *to, const f32 *sums, i64 row, i64 column, i64 columns)
{
    for (i64 c = 0; c < columns; c += LANES)
        finish(to, sums + c, row, column + c, min_i64(LANES, columns - c));
}

// A strip is multiplied piece by piece: the first-level cache holds 22 steps of two
// KB, and the sums and the rows stream by from the second.
enum {
    STEPS = TILE_WORDS / TILE,
    PIECES = (STEPS + 21) / 22,
    PIECE = (STEPS + PIECES - 1) / PIECES, // steps
    FINISHING = PIECE, // steps until the results of a register tile are finished
};

// Sums whose results are finished beside the next products, which leave the vector
// units idle: the rows from `row` to `end`, evenly over the steps.
typedef struct {
    const results_t *to;
    f32 (*sums)[STRIP]; // of the next row
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
    pending->due += REGISTER_ROWS;
    finish_rows(pending, pending->due / FINISHING);
    pending->due %= FINISHING;
}

INLINE void finish_rest(pending_t *pending) { finish_rows(pending, pending->end); }

// Finishes what is left, and puts off the sums of `rows` rows from `row` on.
INLINE void put_off(pending_t *pending, const results_t *to, f32 (*sums)[STRIP], i64 row, i64 rows,
                    i64 column, i64 columns)
{
    finish_rest(pending);
    *pending = (pending_t){to, sums, row, row + rows, column, columns, 0};
}

// Adds the products of 16 * `tiles` rows with one strip of a panel to sums,
// `steps` tiles deep.
INLINE void multiply(const int tiles, sums_t sums, const near_rows_t *rows, const panel_word_t (*panel)[STRIP],
                     i64 steps, int start, ahead_t ahead, pending_t *pending)
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
        fetch(&ahead);
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
static void multiply_rows(i64 rows, sums_t sums, const near_rows_t *near, const panel_word_t (*panel)[STRIP],
                          i64 steps, int start, ahead_t ahead, pending_t *pending)
{
    if (rows > TILE)
        multiply(2, sums, near, panel, steps, start, ahead, pending);
    else
        multiply(1, sums, near, panel, steps, start, ahead, pending);
}

// A block: its rows are copied near, unless the block before left them there,
// and multiplied by one strip of the weights after the other. Results are finished while their sums are near, beside what is
// multiplied next.
static void multiply_block(near_t *near, i64 holds, const input_t *const *row, const block_t *block,
                           const results_t *to, const strip_t *panel, const strip_t *next_panel)
{
    const i64 rows = block->row_count, groups = (rows + REGISTER_ROWS - 1) / REGISTER_ROWS;
    const i64 strips = (block->column_count + REGISTER_COLUMNS - 1) / REGISTER_COLUMNS;
    enum { depth = 0, width = INNER, last = 1 };
    {
        if (near->holds != holds)
            load_rows(near->rows, row, depth, rows, width);
        near->holds = holds;
        sums_t sums[ROW_GROUPS] ALIGNED;
        const i64 steps = (width + STEP - 1) / STEP;
        pending_t pending = {0};
        for (i64 strip = 0; strip < strips; strip++) {
            const i64 column = strip * REGISTER_COLUMNS, columns = min_i64(REGISTER_COLUMNS, block->column_count - column);
            const panel_word_t (*weights)[STRIP] = panel[strip] + depth / WORD;
            const panel_word_t (*later)[STRIP] = strip + 1 < strips ? panel[strip + 1] + depth / WORD
                : last ? next_panel[0] : panel[0] + (depth + TILE_DEPTH) / WORD;
            for (i64 step = 0; step < steps; step += PIECE)
                for (i64 group = 0; group < groups; group++) {
                    const i64 first = group * REGISTER_ROWS, count = min_i64(REGISTER_ROWS, rows - first);
                    ahead_t ahead = past(step, part_of(later, group, groups));
                    multiply_rows(count, sums[group], near->rows[group] + step, weights + step * TILE,
                                  min_i64(PIECE, steps - step), depth + step == 0, ahead, &pending);
                    if (last && step + PIECE >= steps)
                        put_off(&pending, to, sums[group], first, count, column, columns);
                }
        }
        finish_rest(&pending);
    }
}

// The strips of a block's columns.
INLINE const strip_t *panel_of(const weight_t *packed, const block_t *block)
{
    const i64 strip = block->expert * ALL_STRIPS + block->first_column / REGISTER_COLUMNS;
    return (const strip_t *)packed + strip;
}

// A block packs the columns of one matrix in one strip of an expert.
INLINE void pack(const weight_t *matrix, weight_t *packed, i64 strip, i64 expert, i64 first)
{
    const i64 column = strip * REGISTER_COLUMNS;
    strip_t *to = (strip_t *)packed + expert * ALL_STRIPS + strip;
    const weight_t *from = matrix + (expert * OUTER + column) * INNER;
    pack_strip((panel_word_t(*)[STRIP])&to[0][0][first], from, OUTER - column, INNER);
}

static void grouped_gemm_down_pack_down_block(
    const bf16 *restrict down, // [256, 7168, 2048]
    bf16 *restrict packed,     // [256, strips, depth, columns]
    i64 tokens,
    i64 block_x, i64 block_y)
{
    (void)tokens;
    pack(down, packed, block_x, block_y, STRIP - REGISTER_COLUMNS);
}

EXPORT void grouped_gemm_down_pack_down(void *const *args, i64 first, i64 last, i64 grid_x)
{
    const bf16 *down = *(const bf16 *const *)args[0];
    bf16 *packed = *(bf16 *const *)args[1];
    i64 tokens = *(const i64 *)args[2];
    for (i64 block = first; block < last; block++)
        grouped_gemm_down_pack_down_block(down, packed, tokens, block % grid_x, block / grid_x);
}

static void grouped_gemm_down_block(
    const bf16 *restrict hidden,   // [rows, 2048]
    const bf16 *restrict packed,   // [256, strips, depth, columns]
    const i64 *restrict offsets,   // [257]
    const i32 *restrict row_tiles, // [257]
    bf16 *restrict out,            // [rows, 7168]
    i64 tokens,
    i64 block_x, i64 block_y, void *scratch)
{
    const i64 columns = block_columns(tokens);
    const block_t block = find_block(offsets, row_tiles, block_y, block_x, columns);
    if (block.row_count == 0)
        return;
    const input_t *row[TILE_ROWS + ROWS_AHEAD];
    for (i64 r = 0; r < block.row_count; r++)
        row[r] = hidden + (block.first_row + r) * INNER;
    for (i64 r = block.row_count; r < block.row_count + ROWS_AHEAD; r++)
        row[r] = row[r - 1];
    const i64 all_rows = offsets[EXPERTS];
    run_t waiting[1][TILE_ROWS] ALIGNED;
    const results_t results = {
        .out = output_of(out, all_rows, &block, waiting[0]),
    };
    const strip_t *panel = panel_of(packed, &block), *next_panel = panel;
    // The next block has the next columns; past the last, what follows in memory.
    next_panel += (block.column_count + REGISTER_COLUMNS - 1) / REGISTER_COLUMNS;
    tiles_begin();
    multiply_block(scratch, block_y + 1, row, &block, &results, panel, next_panel);
    tiles_end();
    end_far_stores();
}

EXPORT void grouped_gemm_down(void *const *args, i64 first, i64 last, i64 grid_x, void *scratch)
{
    const bf16 *hidden = *(const bf16 *const *)args[0];
    const bf16 *packed = *(const bf16 *const *)args[1];
    const i64 *offsets = *(const i64 *const *)args[2];
    const i32 *row_tiles = *(const i32 *const *)args[3];
    bf16 *out = *(bf16 *const *)args[4];
    i64 tokens = *(const i64 *)args[5];
    for (i64 block = first; block < last; block++)
        grouped_gemm_down_block(hidden, packed, offsets, row_tiles, out, tokens,
            block % grid_x, block / grid_x, scratch);
}
