// comm_cast for rocm:gfx942: converts rows to and from the communication dtype
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
// A block owns 4 packed rows; 16 adjacent threads convert 128 values at a time, 8
// each.
//
// Shared memory: none.
//
// Baked in: width 7168, types.
// Read at run time: the number of rows.

// [prelude: base.hpp, hip/base.hpp, bf16_bits.hpp, base.hpp, warp.hpp]

constexpr i32 WARP = 64;
typedef u64 LaneMask;

// [prelude: hip/warp.hpp, warp_max.hpp, warp.hpp, comm_cast.hpp]

typedef unsigned char u8;
typedef bf16 Row;

// [prelude: comm_cast.hpp]

// ---- the kernel ----

constexpr int WIDTH = 7168, SPAN = 128, SPANS = 56, ROW_BYTES = 7392, SCALES = 7168;
constexpr int THREADS = 128, TILE_ROWS = 4, TEAM = 16, TEAMS = THREADS / TEAM;

// A thread converts adjacent values of a span, in packs that divide a row.
constexpr int VALUES = SPAN / TEAM, PACK = pack_width<Row>(WIDTH);

// Iterations of a block over the spans of its rows. Every thread runs all of them, also without
// values of its own, because the teams reduce by shuffles.
DEVICE i32 turns(i64 tokens)
{
    const i64 left = tokens - block_x() * TILE_ROWS;
    return ceil_div(left < TILE_ROWS ? (i32)left * SPANS : TILE_ROWS * SPANS, TEAMS);
}

// The values of a thread in one iteration: some of a span of a row.
struct Part {
    i64 row;
    i32 span, lane, first;  // of the values, in the row
    bool exists;            // the row exists

    DEVICE Part(i32 turn, i64 tokens)
    {
        const i32 at = turn * TEAMS + thread_index() / TEAM;
        row = block_x() * TILE_ROWS + at / SPANS;
        span = at % SPANS;
        lane = thread_index() % TEAM;
        first = span * SPAN + lane * VALUES;
        exists = at < TILE_ROWS * SPANS && row < tokens;
    }

    // Whether value `i` of this thread lies within its row.
    DEVICE bool has(i32 i) const { return exists && first + i < WIDTH; }
};

// [prelude: warp_max.hpp]

KERNEL(THREADS) comm_cast_pack(
    const bf16 *__restrict__ rows,  // [rows, 7168]
    const i32 *__restrict__ places, // [tokens]
    i32 *__restrict__ packed,       // [tokens, 1848]
    i64 tokens)
{
    await_launches();
    for (i32 turn = 0; turn < turns(tokens); turn++) {
        const Part part(turn, tokens);
        const Row *from = rows + (part.exists ? (i64)places[part.row] * WIDTH : 0);
        u8 *to = reinterpret_cast<u8 *>(packed) + part.row * ROW_BYTES;
        f32 values[VALUES] = {};
        #pragma unroll
        for (i32 i = 0; i < VALUES; i += PACK)
            if (part.has(i)) {
                const Pack<Row, PACK> pack = load<PACK>(from, (part.first + i) / PACK);
                #pragma unroll
                for (i32 j = 0; j < PACK; j++)
                    values[i + j] = to_f32(pack.at[j]);
            }

        // At least 2^-117, because 448 divided by less overflows f32.
        u32 size = 0x05000000u;
        #pragma unroll
        for (i32 i = 0; i < VALUES; i++) {
            const u32 own = size_of(values[i]);
            size = own > size && own < INFINITE ? own : size;
        }
        const f32 largest = float_of(team_max(size)), times = 448.0f / largest;

        // Codes beyond the last value of the row are zero.
        Pack<u32, VALUES / 4> codes = {};
        #pragma unroll
        for (i32 i = 0; i < VALUES; i++)
            codes.at[i / 4] |= to_e4m3(values[i] * times) << (i % 4 * 8);
        if (part.exists && part.first < SCALES)
            store(reinterpret_cast<u32 *>(to), part.first / VALUES, codes);

        f32 *scales = reinterpret_cast<f32 *>(to + SCALES) + part.span;
        if (part.exists && part.lane == 0)
            *scales = largest / 448.0f;
    }
}

KERNEL(THREADS) comm_cast_unpack(
    const i32 *__restrict__ packed, // [tokens, 1848]
    const i32 *__restrict__ places, // [tokens]
    bf16 *__restrict__ rows,        // [rows, 7168]
    i64 tokens)
{
    await_launches();
    for (i32 turn = 0; turn < turns(tokens); turn++) {
        const Part part(turn, tokens);
        if (!part.has(0))
            continue;
        const u8 *from = reinterpret_cast<const u8 *>(packed) + part.row * ROW_BYTES;
        Row *to = rows + (i64)places[part.row] * WIDTH;
        const f32 scale = reinterpret_cast<const f32 *>(from + SCALES)[part.span];
        const Pack<u32, VALUES / 4> codes =
            load<VALUES / 4>(reinterpret_cast<const u32 *>(from), part.first / VALUES);
        #pragma unroll
        for (i32 i = 0; i < VALUES; i += PACK) {
            Pack<Row, PACK> values;
            #pragma unroll
            for (i32 j = i; j < i + PACK; j++)
                values.at[j - i] = fitted<Row>(of_e4m3(codes.at[j / 4] >> (j % 4 * 8)) * scale);
            if (part.has(i))
                store(to, (part.first + i) / PACK, values);
        }
    }
}
