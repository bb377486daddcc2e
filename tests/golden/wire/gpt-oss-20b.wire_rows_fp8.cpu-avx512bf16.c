// wire: rows as fp8 for the way between nodes, and back.
//
//   wire_pack     wire[i] = rows[places[i]]
//   wire_unpack   rows[places[i]] = wire[i]
//
// A row of the wire has 2976 bytes:
//   codes   u8  [2880]   E4M3, of value / scale
//   scales  f32 [23]   at byte 2880, for 128 values each: the largest has the code of 448
//   zeros   from byte 2972 on
//
// Values are rounded to the nearest, ties to even. What is finite stays so: too large is
// the largest there is. E4M3 has no infinity: one arrives as a NaN, and neither counts for a
// scale.
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

// The lanes of a vector, one by one.
INLINE vec_i32 lane_numbers(void)
{
    return (vec_i32){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
}

INLINE f32 largest_lane(vec v)
{
    v = at_least(v, SHUFFLE(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
    v = at_least(v, SHUFFLE(v, v, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3));
    v = at_least(v, SHUFFLE(v, v, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1));
    v = at_least(v, SHUFFLE(v, v, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 0));
    return v[0];
}

// Writes the lanes where the mask is all ones side by side; the rest of a
// vector's room is anything. Returns how many they are.
typedef vec_i32 vec_i32_in_memory __attribute__((aligned(4)));
INLINE int append_lanes(i32 *to, vec_i32 v, vec_i32 mask)
{
    vec_i32 packed;
    u32 bits;
    __asm__("vpmovd2m %2, %%k1\n\t"
            "vpcompressd %3, %0 %{%%k1%}%{z%}\n\t"
            "kmovw %%k1, %1"
            : "=v"(packed), "=r"(bits) : "v"(mask), "v"(v) : "k1");
    *(vec_i32_in_memory *)to = packed;
    return __builtin_popcount(bits);
}

// The sums of the lanes of each of `count` vectors, in their order, LANES to a
// vector: each is the binary tree of sum_lanes. `count` is a multiple of LANES.
INLINE void sum_lanes_each(vec *v, int count)
{
    count /= 2;
#pragma GCC unroll 16
    for (int i = 0; i < count; i++)
        v[i] = SHUFFLE(v[2 * i], v[2 * i + 1], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23)
               + SHUFFLE(v[2 * i], v[2 * i + 1], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    count /= 2;
#pragma GCC unroll 16
    for (int i = 0; i < count; i++)
        v[i] = SHUFFLE(v[2 * i], v[2 * i + 1], 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27)
               + SHUFFLE(v[2 * i], v[2 * i + 1], 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    count /= 2;
#pragma GCC unroll 16
    for (int i = 0; i < count; i++)
        v[i] = SHUFFLE(v[2 * i], v[2 * i + 1], 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29)
               + SHUFFLE(v[2 * i], v[2 * i + 1], 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31);
    count /= 2;
#pragma GCC unroll 16
    for (int i = 0; i < count; i++)
        v[i] = SHUFFLE(v[2 * i], v[2 * i + 1], 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30)
               + SHUFFLE(v[2 * i], v[2 * i + 1], 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
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

// Values between nodes.
typedef __UINT8_TYPE__ u8;
typedef u8 vec_u8 __attribute__((vector_size(LANES), may_alias));
typedef vec_u8 vec_u8_in_memory __attribute__((aligned(1)));

// Sizes are values without their sign, as bits of an f32, which are in the same order.
#define INFINITE 0x7f800000u
INLINE vec_u32 size_of(vec v) { return (vec_u32)v & 0x7fffffff; }
INLINE vec_u32 sign_of(vec v) { return (vec_u32)v & 0x80000000; }
INLINE vec of_bits(u32 bits) { return (vec)((vec_u32){0} + bits); }

// The sizes of the largest values. A NaN is 0x7fc00000, and that as another type.
enum { LARGEST_f32 = 0x7f7fffff, LARGEST_f16 = 0x477fe000, LARGEST_bf16 = 0x7f7f0000 };

// For a type with that largest value. What is too large is the largest there is.
INLINE vec fitted(vec v, u32 largest)
{
    vec_u32 size = size_of(v);
    vec_i32 over = (vec_i32)(size > largest);
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

// E4M3, of values of at most 448. In the binade of 2^14 an f32 has the resolution of its
// subnormals: an addition rounds.
INLINE vec_u8 e4m3_of_f32(vec v)
{
    vec_u32 size = size_of(v);
    vec_u32 normal = ((size + 0x7ffff + (size >> 20 & 1)) >> 20) - (120 << 3);
    vec_u32 small = (vec_u32)((vec)size + 0x1p14f) - 0x46800000;
    vec code = select((vec_i32)(size < 0x3c800000), (vec)small, (vec)normal);
    code = (vec)((vec_u32)code | sign_of(v) >> 24);
    code = select((vec_i32)(size >= INFINITE), of_bits(0x7f), code);
    return __builtin_convertvector((vec_u32)code, vec_u8);
}

INLINE vec f32_of_e4m3(vec_u8 codes)
{
    vec_u32 code = __builtin_convertvector(codes, vec_u32);
    vec_u32 size = code & 0x7f;
    vec small = __builtin_convertvector((vec_i32)size, vec) * 0x1p-9f;
    vec wide = select((vec_i32)(size < 8), small, (vec)((size << 20) + (120 << 23)));
    wide = (vec)((vec_u32)wide | (code & 0x80) << 24);
    return select((vec_i32)(size == 0x7f), of_bits(0x7fc00000), wide);
}

INLINE vec load_e4m3(const u8 *from, i64 count)
{
    u8 part[LANES] ALIGNED = {0};
    if (count >= LANES)
        return f32_of_e4m3(*(const vec_u8_in_memory *)from);
    for (i64 i = 0; i < count; i++)
        part[i] = from[i];
    return f32_of_e4m3(*(const vec_u8 *)part);
}

INLINE void store_e4m3(u8 *to, vec v, i64 count)
{
    u8 part[LANES] ALIGNED;
    vec_u8 codes = e4m3_of_f32(v);
    if (count >= LANES) {
        *(vec_u8_in_memory *)to = codes;
        return;
    }
    *(vec_u8 *)part = codes;
    for (i64 i = 0; i < count; i++)
        to[i] = part[i];
}

enum {
    WIDTH = 2880,
    TILE_ROWS = 64,
    ROW_BYTES = 2976,
    SPAN = 128, // values with one scale
    SCALES = 2880, // where scales lie
};

// The largest finite size of a span, and 2^-117 at least: 448 divided by less would be no
// f32.
static f32 largest_of(const bf16 *from, i64 count)
{
    vec largest = broadcast(0x1p-117f);
    for (i64 i = 0; i < count; i += LANES) {
        vec_u32 size = size_of(load_some_bf16(from + i, count - i));
        largest = at_least((vec)(size & (vec_u32)(size < INFINITE)), largest);
    }
    return largest_lane(largest);
}

// One span; returns its scale.
static f32 pack_span(u8 *restrict to, const bf16 *restrict from, i64 count)
{
    const f32 largest = largest_of(from, count), times = 448.0f / largest;
    for (i64 i = 0; i < count; i += LANES)
        store_e4m3(to + i, load_some_bf16(from + i, count - i) * times, count - i);
    return largest / 448.0f;
}

static void pack_row(u8 *restrict to, const bf16 *restrict from)
{
    f32 *scales = (f32 *)(to + SCALES);
    for (i64 i = 0; i < WIDTH; i += SPAN)
        scales[i / SPAN] = pack_span(to + i, from + i, min_i64(WIDTH - i, SPAN));
    for (i64 i = 2972; i < ROW_BYTES; i++)
        to[i] = 0;
}

static void unpack_row(bf16 *restrict to, const u8 *restrict from)
{
    const f32 *scales = (const f32 *)(from + SCALES);
    for (i64 i = 0; i < WIDTH; i += LANES) {
        vec v = load_e4m3(from + i, WIDTH - i) * scales[i / SPAN];
        store_some_bf16(to + i, fitted(v, LARGEST_bf16), WIDTH - i);
    }
}

static void wire_pack_block(
    const bf16 *restrict rows,  // [rows, 2880]
    const i32 *restrict places, // [tokens]
    i32 *restrict wire,         // [tokens, 744]
    i64 tokens,
    i64 block_x, i64 block_y)
{
    (void)block_y;
    i64 first = block_x * TILE_ROWS, last = min_i64(first + TILE_ROWS, tokens);
    for (i64 row = first; row < last; row++)
        pack_row((void *)((u8 *)wire + row * ROW_BYTES), rows + (i64)places[row] * WIDTH);
}

static void wire_unpack_block(
    const i32 *restrict wire,   // [tokens, 744]
    const i32 *restrict places, // [tokens]
    bf16 *restrict rows,        // [rows, 2880]
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
    i64 tokens = *(const i64 *)args[3];
    for (i64 block = first; block < last; block++)
        wire_pack_block(rows, places, wire, tokens, block % grid_x, block / grid_x);
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
