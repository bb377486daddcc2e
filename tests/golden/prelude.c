// ==== prelude/cpu.h ====

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

// ==== prelude/cpu_vector.h ====

// Vectors of 32 bytes: avx2.
enum { LANES = 8 };
typedef f32 vec __attribute__((vector_size(4 * LANES), may_alias));
typedef i32 vec_i32 __attribute__((vector_size(4 * LANES), may_alias));
typedef u32 vec_u32 __attribute__((vector_size(4 * LANES), may_alias));
typedef u16 vec_u16 __attribute__((vector_size(2 * LANES), may_alias));
typedef vec vec_in_memory __attribute__((aligned(4)));
typedef vec_u16 vec_u16_in_memory __attribute__((aligned(2)));

// Vectors of 64 bytes: avx512bf16.
enum { LANES = 16 };
typedef f32 vec __attribute__((vector_size(4 * LANES), may_alias));
typedef i32 vec_i32 __attribute__((vector_size(4 * LANES), may_alias));
typedef u32 vec_u32 __attribute__((vector_size(4 * LANES), may_alias));
typedef u16 vec_u16 __attribute__((vector_size(2 * LANES), may_alias));
typedef vec vec_in_memory __attribute__((aligned(4)));
typedef vec_u16 vec_u16_in_memory __attribute__((aligned(2)));

INLINE vec broadcast(f32 value) { return value - (vec){0}; }

// Selects by lane: `a` where the mask is all ones, `b` where it is zero.
INLINE vec select(vec_i32 mask, vec a, vec b)
{
    return (vec)((mask & (vec_i32)a) | (~mask & (vec_i32)b));
}

INLINE vec load_part_bf16(const bf16 *from, i64 count)
{
    bf16 part[LANES] ALIGNED = {0};
    for (int i = 0; i < LANES; i++)
        if (i < count)
            part[i] = from[i];
    return load_bf16(part);
}

INLINE vec load_part_f16(const f16 *from, i64 count)
{
    f16 part[LANES] ALIGNED = {0};
    for (int i = 0; i < LANES; i++)
        if (i < count)
            part[i] = from[i];
    return load_f16(part);
}

INLINE void store_part_bf16(bf16 *to, vec v, i64 count)
{
    bf16 part[LANES] ALIGNED;
    store_bf16(part, v);
    for (int i = 0; i < LANES; i++)
        if (i < count)
            to[i] = part[i];
}

INLINE void store_part_f16(f16 *to, vec v, i64 count)
{
    f16 part[LANES] ALIGNED;
    store_f16(part, v);
    for (int i = 0; i < LANES; i++)
        if (i < count)
            to[i] = part[i];
}

// With a NaN these instructions return their second operand, so both functions keep a NaN in `v`.
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

// Returns the sum of all lanes, as a binary tree.
INLINE f32 sum_lanes(vec v)
{
    v += SHUFFLE(v, v, 4, 5, 6, 7, 0, 1, 2, 3);
    v += SHUFFLE(v, v, 2, 3, 4, 5, 6, 7, 0, 1);
    v += SHUFFLE(v, v, 1, 2, 3, 4, 5, 6, 7, 0);
    return v[0];
}

// Returns the sum of all lanes, as a binary tree.
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

// Load and store the first `count` elements; a load zeroes the other lanes, a store leaves the other
// elements.
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

// ==== prelude/cpu_lanes.h ====

// The lanes of a vector, one by one.
INLINE vec_i32 lane_numbers(void)
{
    return (vec_i32){0, 1, 2, 3, 4, 5, 6, 7};
}

INLINE f32 largest_lane(vec v)
{
    v = at_least(v, SHUFFLE(v, v, 4, 5, 6, 7, 0, 1, 2, 3));
    v = at_least(v, SHUFFLE(v, v, 2, 3, 4, 5, 6, 7, 0, 1));
    v = at_least(v, SHUFFLE(v, v, 1, 2, 3, 4, 5, 6, 7, 0));
    return v[0];
}

// A bit per lane: whether the mask is all ones there.
INLINE u32 lane_bits(vec_i32 mask)
{
    u32 bits;
    __asm__("vmovmskps %1, %0" : "=r"(bits) : "x"(mask));
    return bits;
}

// Writes the lanes where the mask is all ones side by side; returns how many
// they are.
INLINE int append_lanes(i32 *to, vec_i32 v, vec_i32 mask)
{
    int count = 0;
    for (u32 bits = lane_bits(mask); bits != 0; bits &= bits - 1)
        to[count++] = v[__builtin_ctz(bits)];
    return count;
}

// The sums of the lanes of each of `count` vectors, in their order, LANES to a
// vector: each is the binary tree of sum_lanes. `count` is a multiple of LANES.
INLINE void sum_lanes_each(vec *v, int count)
{
    count /= 2;
#pragma GCC unroll 16
    for (int i = 0; i < count; i++)
        v[i] = SHUFFLE(v[2 * i], v[2 * i + 1], 0, 1, 2, 3, 8, 9, 10, 11)
               + SHUFFLE(v[2 * i], v[2 * i + 1], 4, 5, 6, 7, 12, 13, 14, 15);
    count /= 2;
#pragma GCC unroll 16
    for (int i = 0; i < count; i++)
        v[i] = SHUFFLE(v[2 * i], v[2 * i + 1], 0, 1, 4, 5, 8, 9, 12, 13)
               + SHUFFLE(v[2 * i], v[2 * i + 1], 2, 3, 6, 7, 10, 11, 14, 15);
    count /= 2;
#pragma GCC unroll 16
    for (int i = 0; i < count; i++)
        v[i] = SHUFFLE(v[2 * i], v[2 * i + 1], 0, 2, 4, 6, 8, 10, 12, 14)
               + SHUFFLE(v[2 * i], v[2 * i + 1], 1, 3, 5, 7, 9, 11, 13, 15);
}

// ==== prelude/cpu_stream.h ====

// Stores of rows that are read much later.

// A copy larger than this leaves nothing of itself in a cache.
enum { STREAMING_BYTES = 32 << 20 };

// Stores past the caches (non-temporal), so that the line is not read first. `to` is aligned to a
// vector.
INLINE void store_streaming(vec *to, vec v) { __asm__ volatile("vmovntps %1, %0" : "=m"(*to) : "v"(v)); }
INLINE void store_streaming_half(vec_u16 *to, vec_u16 v) { __asm__ volatile("vmovntps %1, %0" : "=m"(*to) : "v"(v)); }

// Orders these stores before all later ones.
INLINE void end_streaming_stores(void) { __asm__ volatile("sfence" ::: "memory"); }

// Returns whether `rows` rows of `row_bytes` should be written with store_streaming.
INLINE int is_streamed(const void *to, i64 rows, i64 row_bytes)
{
    return row_bytes % sizeof(vec) == 0 && rows * row_bytes >= STREAMING_BYTES && (u64)to % sizeof(vec) == 0;
}

// Copies a row. A streamed row has whole vectors and goes past the caches.
INLINE void copy_row(void *restrict to, const void *restrict from, i64 bytes, int streamed)
{
    typedef vec vec_anywhere __attribute__((aligned(1)));
    if (streamed)
        for (i64 i = 0; i < bytes / (i64)sizeof(vec); i++)
            store_streaming((vec *)to + i, ((const vec_anywhere *)from)[i]);
    else
        for (i64 i = 0; i < bytes; i++)
            ((char *)to)[i] = ((const char *)from)[i];
}

// ==== prelude/cpu_bf16.h ====

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

// ==== prelude/cpu_bytes.h ====

// Bytes as wider integers, in one instruction: gcc would insert them one by one.
typedef __UINT8_TYPE__ u8;
typedef __INT8_TYPE__ i8;
typedef u8 vec_u8_in_memory __attribute__((vector_size(LANES), aligned(1)));
typedef i8 vec_i8_in_memory __attribute__((vector_size(LANES), aligned(1)));
INLINE vec_u32 load_u8(const u8 *from)
{
    vec_u32 wide;
    __asm__("vpmovzxbd %1, %0" : "=v"(wide) : "m"(*(const vec_u8_in_memory *)from));
    return wide;
}

// ==== prelude/cpu_f16.h ====

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

// ==== prelude/cpu_exp.h ====

// e to the x, to about 1 ulp, into the subnormals; inf, zero and NaN as usual.
// x = n ln 2 + r, a Taylor polynomial for r, and a scaling by 2 to the n.
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
    __asm__("vscalefps %1, %0, %0" : "+v"(p) : "v"(n));
    return p;
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

// ==== prelude/cpu_multiply.h ====

// Operands of products. A word is what one 32-bit lane multiplies: four bytes, whose
// products are added to an integer together.
enum { WORD = 4 }; // elements per word
typedef vec_i32 sum_vec;
typedef vec_u32 word_vec;

// Signed bytes of rows by bytes of weights that have no sign.
INLINE sum_vec multiply_add(sum_vec sum, word_vec rows, word_vec weights)
{
    __asm__("vpdpbusd %1, %2, %0" : "+v"(sum) : "v"(rows), "v"(weights));
    return sum;
}

INLINE vec multiply_add(vec sum, vec a, vec b) { return sum + a * b; }

// The same word in every lane.
typedef i32 word_t __attribute__((may_alias));
INLINE vec broadcast_word(const f32 *word) { return (vec)((vec_i32){0} + *(const word_t *)word); }

// The same word in every lane.
typedef i32 word_t __attribute__((may_alias));
INLINE word_vec broadcast_word(const f32 *word) { return (word_vec)((vec_i32){0} + *(const word_t *)word); }

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

// ==== prelude/cpu_pack.h ====

// Packing of matrices whose rows are summed over: columns lie side by side
// already, so nothing is transposed.
INLINE vec load_columns_bf16(const bf16 *from, i64 count)
{
    if (count >= LANES)
        return load_bf16(from);
    return count > 0 ? load_part_bf16(from, count) : (vec){0};
}

// Packing of matrices whose rows are summed over: columns lie side by side
// already, so nothing is transposed.
INLINE vec load_columns_f32(const f32 *from, i64 count)
{
    if (count >= LANES)
        return load_f32(from);
    return count > 0 ? load_part_f32(from, count) : (vec){0};
}

// Packs `depth` rows into panels of `nr` columns, `columns` in all. Rows past
// `height` and columns past `count` are zero. Panels lie `nr * TILE_WORDS` apart.
INLINE void pack_bf16(f32 *to, const i64 nr, const i64 columns, const bf16 *from,
                    i64 stride, i64 depth, i64 height, i64 count)
{
    for (i64 row = 0; row < depth; row += WORD, to += nr, from += WORD * stride) {
        const int whole = row + WORD <= height && columns <= count;
        const i64 rows = whole ? WORD : height - row;
        for (i64 c = 0; c < columns; c += LANES) {
            f32 *place = to + c / nr * (nr * TILE_WORDS) + c % nr;
            *(vec *)place = column_words_bf16(from + c, stride, rows, whole ? LANES : count - c);
        }
    }
}

// Packs `depth` rows into panels of `nr` columns, `columns` in all. Rows past
// `height` and columns past `count` are zero. Panels lie `nr * TILE_WORDS` apart.
INLINE void pack_f32(f32 *to, const i64 nr, const i64 columns, const f32 *from,
                    i64 stride, i64 depth, i64 height, i64 count)
{
    for (i64 row = 0; row < depth; row += WORD, to += nr, from += WORD * stride) {
        const int whole = row + WORD <= height && columns <= count;
        const i64 rows = whole ? WORD : height - row;
        for (i64 c = 0; c < columns; c += LANES) {
            f32 *place = to + c / nr * (nr * TILE_WORDS) + c % nr;
            *(vec *)place = column_words_f32(from + c, stride, rows, whole ? LANES : count - c);
        }
    }
}

// Packs `depth` rows into panels of `nr` columns, `columns` in all. Rows past
// `height` and columns past `count` are zero. Panels lie `nr * TILE_WORDS` apart.
INLINE void pack_f32(f32 *to, const i64 nr, const i64 columns, const f32 *from,
                    i64 stride, i64 depth, i64 height, i64 count)
{
    for (i64 row = 0; row < depth; row += WORD, to += nr, from += WORD * stride) {
        const int whole = row + WORD <= height && columns <= count;
        const i64 rows = whole ? WORD : height - row;
        for (i64 c = 0; c < columns; c += LANES) {
            f32 *place = to + c / nr * (nr * TILE_WORDS) + c % nr;
            *(vec *)place = column_words_f32(from + c, stride, rows, whole ? LANES : count - c);
        }
    }
}
INLINE vec load_columns_bf16(const bf16 *from, i64 count)
{
    if (count >= LANES)
        return load_bf16(from);
    return count > 0 ? load_part_bf16(from, count) : (vec){0};
}

// ==== prelude/cpu_activation.h ====

INLINE vec sigmoid_f32(vec x) { return 1.0f / (1.0f + exp_f32(-x)); }
// The activation of an expert.
INLINE vec activation(vec x) { return at_least(x, (vec){0}); }

// ==== prelude/cpu_activation_slope.h ====

// The derivative of the activation. Below `activation`, which brings its functions.
INLINE vec activation_slope(vec x)
{
    vec z = 1.702f * x, s = sigmoid_f32(z);
    return s + z * s * (1.0f - s);
}

// ==== prelude/cpu_comm_cast.h ====

// Conversion to and from the communication dtype.
typedef __UINT8_TYPE__ u8;

// Conversion to and from the communication dtype.
typedef __UINT8_TYPE__ u8;
typedef u8 vec_u8 __attribute__((vector_size(LANES), may_alias));
typedef vec_u8 vec_u8_in_memory __attribute__((aligned(1)));

// A size is the magnitude of a value as the bits of an f32: integers of the same order.
#define INFINITE 0x7f800000u
INLINE vec_u32 size_of(vec v) { return (vec_u32)v & 0x7fffffff; }
INLINE vec_u32 sign_of(vec v) { return (vec_u32)v & 0x80000000; }
INLINE vec of_bits(u32 bits) { return (vec)((vec_u32){0} + bits); }

// The sizes of the largest values. Every NaN becomes 0x7fc00000 before it is converted.
enum { LARGEST_f32 = 0x7f7fffff, LARGEST_f16 = 0x477fe000, LARGEST_bf16 = 0x7f7f0000 };

// Prepares a value for a type with that largest value. A finite value beyond the range saturates.
INLINE vec fitted(vec v, u32 largest)
{
    vec_u32 size = size_of(v);
    vec_i32 over = (vec_i32)(size > largest) & (vec_i32)(size < INFINITE);
    vec near = select(over, (vec)(sign_of(v) | largest), v);
    return select((vec_i32)(size > INFINITE), of_bits(0x7fc00000), near);
}

// Prepares a value for a type with that largest value. A value beyond the range saturates.
INLINE vec fitted(vec v, u32 largest)
{
    vec_u32 size = size_of(v);
    vec_i32 over = (vec_i32)(size > largest);
    vec near = select(over, (vec)(sign_of(v) | largest), v);
    return select((vec_i32)(size > INFINITE), of_bits(0x7fc00000), near);
}

INLINE void store_some_bf16(bf16 *to, vec v, i64 count)
{
    if (count >= LANES)
        store_bf16(to, v);
    else
        store_part_bf16(to, v, count);
}

INLINE void store_some_f32(f32 *to, vec v, i64 count)
{
    if (count >= LANES)
        store_f32(to, v);
    else
        store_part_f32(to, v, count);
}

// Converts values of at most 448 to E4M3. In the binade of 2^14 an f32 has the resolution of
// E4M3 subnormals, so an addition rounds to them.
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

