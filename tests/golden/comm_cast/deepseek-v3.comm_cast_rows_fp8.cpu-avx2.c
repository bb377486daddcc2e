// comm_cast: converts rows to and from the communication dtype, fp8.
//
//   comm_cast_pack     packed[i] = rows[places[i]] as fp8
//   comm_cast_unpack   rows[places[i]] = packed[i]
//
// A packed row has 7392 bytes:
//   codes   u8  [7168]   E4M3, of value / scale
//   scales  f32 [56]   at byte 7168, one for 128 values: the largest of them has the code of 448
//
// Values are rounded to nearest, ties to even. A finite value stays finite: one beyond the range
// saturates at the largest value. E4M3 has no infinity: an infinity arrives as a
// NaN, and neither counts for a scale.
//
// A block owns 64 packed rows. On the stack: the last, partial vector of a row.
//
// Baked in: the width of a row, the types.

// [prelude: cpu.h, cpu_vector.h, cpu_lanes.h, cpu_bf16.h, cpu_vector.h, cpu_comm_cast.h]

INLINE vec load_some_bf16(const bf16 *from, i64 count)
{
    return count >= LANES ? load_bf16(from) : load_part_bf16(from, count);
}

// [prelude: cpu_comm_cast.h]

enum {
    WIDTH = 7168,
    TILE_ROWS = 64,
    ROW_BYTES = 7392,
    SPAN = 128, // values that share a scale
    SCALES = 7168, // byte of the first scale
};

// Returns the largest finite magnitude of a span; at least 2^-117, because 448 divided by less
// overflows f32.
static f32 largest_of(const bf16 *from, i64 count)
{
    vec largest = broadcast(0x1p-117f);
    for (i64 i = 0; i < count; i += LANES) {
        vec_u32 size = size_of(load_some_bf16(from + i, count - i));
        largest = at_least((vec)(size & (vec_u32)(size < INFINITE)), largest);
    }
    return largest_lane(largest);
}

// Packs one span and returns its scale.
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
}

static void unpack_row(bf16 *restrict to, const u8 *restrict from)
{
    const f32 *scales = (const f32 *)(from + SCALES);
    for (i64 i = 0; i < WIDTH; i += LANES) {
        vec v = load_e4m3(from + i, WIDTH - i) * scales[i / SPAN];
        store_some_bf16(to + i, fitted(v, LARGEST_bf16), WIDTH - i);
    }
}

static void comm_cast_pack_block(
    const bf16 *restrict rows,  // [rows, 7168]
    const i32 *restrict places, // [tokens]
    i32 *restrict packed,       // [tokens, 1848]
    i64 tokens,
    i64 block_x, i64 block_y)
{
    (void)block_y;
    i64 first = block_x * TILE_ROWS, last = min_i64(first + TILE_ROWS, tokens);
    for (i64 row = first; row < last; row++)
        pack_row((void *)((u8 *)packed + row * ROW_BYTES), rows + (i64)places[row] * WIDTH);
}

static void comm_cast_unpack_block(
    const i32 *restrict packed, // [tokens, 1848]
    const i32 *restrict places, // [tokens]
    bf16 *restrict rows,        // [rows, 7168]
    i64 tokens,
    i64 block_x, i64 block_y)
{
    (void)block_y;
    i64 first = block_x * TILE_ROWS, last = min_i64(first + TILE_ROWS, tokens);
    for (i64 row = first; row < last; row++)
        unpack_row(rows + (i64)places[row] * WIDTH, (const void *)((const u8 *)packed + row * ROW_BYTES));
}

EXPORT void comm_cast_pack(void *const *args, i64 first, i64 last, i64 grid_x)
{
    const bf16 *rows = *(const bf16 *const *)args[0];
    const i32 *places = *(const i32 *const *)args[1];
    i32 *packed = *(i32 *const *)args[2];
    i64 tokens = *(const i64 *)args[3];
    for (i64 block = first; block < last; block++)
        comm_cast_pack_block(rows, places, packed, tokens, block % grid_x, block / grid_x);
}

EXPORT void comm_cast_unpack(void *const *args, i64 first, i64 last, i64 grid_x)
{
    const i32 *packed = *(const i32 *const *)args[0];
    const i32 *places = *(const i32 *const *)args[1];
    bf16 *rows = *(bf16 *const *)args[2];
    i64 tokens = *(const i64 *)args[3];
    for (i64 block = first; block < last; block++)
        comm_cast_unpack_block(packed, places, rows, tokens, block % grid_x, block / grid_x);
}
