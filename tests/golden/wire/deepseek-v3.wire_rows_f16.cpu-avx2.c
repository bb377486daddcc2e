// wire: rows as f16 for the way between nodes, and back.
//
//   wire_pack     wire[i] = rows[places[i]]; counts what is too large
//   wire_count    saturated += the counts of all blocks
//   wire_unpack   rows[places[i]] = wire[i]
//
// A row of the wire has 14336 bytes:
//   values  f16 [7168]
//
// Values are rounded to the nearest, ties to even. What is finite stays so: too large is
// the largest there is. An infinity stays one, and a NaN is that of the type.
//
// A block owns 64 rows of the wire. Baked in: the width of a row, the types.
// Nothing lies on the stack but the rest of a row.

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
#ifdef __clang__
    vec_u32 wide = __builtin_convertvector(v, vec_u32);
#else
    vec_u32 wide;
    __asm__("vpmovzxwd %1, %0" : "=v"(wide) : "vm"(v)); // gcc would widen in halves
#endif
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

// f16: IEEE binary16. Rounds to nearest, ties to even; a NaN stays one.
INLINE vec f32_of_f16(vec_u16 v)
{
    vec wide;
    __asm__("vcvtph2ps %1, %0" : "=v"(wide) : "v"(v));
    return wide;
}

INLINE vec_u16 f16_of_f32(vec v)
{
    vec_u16 narrow;
    __asm__("vcvtps2ph $0, %1, %0" : "=v"(narrow) : "v"(v));
    return narrow;
}

INLINE vec load_f16(const f16 *from) { return f32_of_f16(*(const vec_u16_in_memory *)from); }
INLINE void store_f16(f16 *to, vec v) { *(vec_u16_in_memory *)to = f16_of_f32(v); }

INLINE vec load_part_f16(const f16 *from, i64 count)
{
    f16 part[LANES] ALIGNED = {0};
    for (int i = 0; i < LANES; i++)
        if (i < count)
            part[i] = from[i];
    return load_f16(part);
}

INLINE void store_part_f16(f16 *to, vec v, i64 count)
{
    f16 part[LANES] ALIGNED;
    store_f16(part, v);
    for (int i = 0; i < LANES; i++)
        if (i < count)
            to[i] = part[i];
}

// Values between nodes.
typedef __UINT8_TYPE__ u8;

// Sizes are values without their sign, as bits of an f32, which are in the same order.
#define INFINITE 0x7f800000u
INLINE vec_u32 size_of(vec v) { return (vec_u32)v & 0x7fffffff; }
INLINE vec_u32 sign_of(vec v) { return (vec_u32)v & 0x80000000; }
INLINE vec of_bits(u32 bits) { return (vec)((vec_u32){0} + bits); }

// The sizes of the largest values. A NaN is 0x7fc00000, and that as another type.
enum { LARGEST_f32 = 0x7f7fffff, LARGEST_f16 = 0x477fe000, LARGEST_bf16 = 0x7f7f0000 };

// For a type with that largest value. What is finite and too large is the largest there is.
INLINE vec fitted(vec v, u32 largest)
{
    vec_u32 size = size_of(v);
    vec_i32 over = (vec_i32)(size > largest) & (vec_i32)(size < INFINITE);
    vec near = select(over, (vec)(sign_of(v) | largest), v);
    return select((vec_i32)(size > INFINITE), of_bits(0x7fc00000), near);
}

INLINE vec load_some_bf16(const bf16 *from, i64 count)
{
    return count >= LANES ? load_bf16(from) : load_part_bf16(from, count);
}

INLINE void store_some_bf16(bf16 *to, vec v, i64 count)
{
    if (count >= LANES)
        store_bf16(to, v);
    else
        store_part_bf16(to, v, count);
}

enum {
    WIDTH = 7168,
    TILE_ROWS = 64,
    ROW_BYTES = 14336,
};

// Returns how many values were too large: those that would be rounded to an infinity.
static i32 pack_row(f16 *restrict to, const bf16 *restrict from)
{
    vec_i32 counts = {0};
    i32 count = 0;
    i64 i = 0;
    for (; i + LANES <= WIDTH; i += LANES) {
        vec v = load_bf16(from + i);
        counts -= (vec_i32)(size_of(v) >= 0x477ff000) & (vec_i32)(size_of(v) < INFINITE);
        store_f16(to + i, fitted(v, LARGEST_f16));
    }
    if (i < WIDTH) {
        vec v = load_part_bf16(from + i, WIDTH - i);
        counts -= (vec_i32)(size_of(v) >= 0x477ff000) & (vec_i32)(size_of(v) < INFINITE);
        store_part_f16(to + i, fitted(v, LARGEST_f16), WIDTH - i);
    }
    for (int lane = 0; lane < LANES; lane++)
        count += counts[lane];
    return count;
}

static void unpack_row(bf16 *restrict to, const f16 *restrict from)
{
    i64 i = 0;
    for (; i + LANES <= WIDTH; i += LANES)
        store_bf16(to + i, fitted(load_f16(from + i), LARGEST_bf16));
    if (i < WIDTH) {
        vec rest = fitted(load_part_f16(from + i, WIDTH - i), LARGEST_bf16);
        store_part_bf16(to + i, rest, WIDTH - i);
    }
}

static void wire_pack_block(
    const bf16 *restrict rows,  // [rows, 7168]
    const i32 *restrict places, // [tokens]
    i32 *restrict wire,         // [tokens, 3584]
    i32 *restrict counts,       // [ceil(tokens / 64)]
    i64 tokens,
    i64 block_x, i64 block_y)
{
    (void)block_y;
    i64 first = block_x * TILE_ROWS, last = min_i64(first + TILE_ROWS, tokens);
    i32 count = 0;
    for (i64 row = first; row < last; row++)
        count += pack_row((void *)((u8 *)wire + row * ROW_BYTES), rows + (i64)places[row] * WIDTH);
    counts[block_x] = count;
}

static void wire_count_block(
    const i32 *restrict counts, // [ceil(tokens / 64)]
    i64 *restrict saturated,    // [1]
    i64 tokens,
    i64 block_x, i64 block_y)
{
    (void)block_x;
    (void)block_y;
    for (i64 block = 0; block * TILE_ROWS < tokens; block++)
        *saturated += counts[block];
}

static void wire_unpack_block(
    const i32 *restrict wire,   // [tokens, 3584]
    const i32 *restrict places, // [tokens]
    bf16 *restrict rows,        // [rows, 7168]
    i64 tokens,
    i64 block_x, i64 block_y)
{
    (void)block_y;
    i64 first = block_x * TILE_ROWS, last = min_i64(first + TILE_ROWS, tokens);
    for (i64 row = first; row < last; row++)
        unpack_row(rows + (i64)places[row] * WIDTH, (const void *)((const u8 *)wire + row * ROW_BYTES));
}

EXPORT void wire_pack(void *const *args, i64 first, i64 last, i64 grid_x)
{
    const bf16 *rows = *(const bf16 *const *)args[0];
    const i32 *places = *(const i32 *const *)args[1];
    i32 *wire = *(i32 *const *)args[2];
    i32 *counts = *(i32 *const *)args[3];
    i64 tokens = *(const i64 *)args[4];
    for (i64 block = first; block < last; block++)
        wire_pack_block(rows, places, wire, counts, tokens, block % grid_x, block / grid_x);
}

EXPORT void wire_count(void *const *args, i64 first, i64 last, i64 grid_x)
{
    const i32 *counts = *(const i32 *const *)args[0];
    i64 *saturated = *(i64 *const *)args[1];
    i64 tokens = *(const i64 *)args[2];
    for (i64 block = first; block < last; block++)
        wire_count_block(counts, saturated, tokens, block % grid_x, block / grid_x);
}

EXPORT void wire_unpack(void *const *args, i64 first, i64 last, i64 grid_x)
{
    const i32 *wire = *(const i32 *const *)args[0];
    const i32 *places = *(const i32 *const *)args[1];
    bf16 *rows = *(bf16 *const *)args[2];
    i64 tokens = *(const i64 *)args[3];
    for (i64 block = first; block < last; block++)
        wire_unpack_block(wire, places, rows, tokens, block % grid_x, block / grid_x);
}
