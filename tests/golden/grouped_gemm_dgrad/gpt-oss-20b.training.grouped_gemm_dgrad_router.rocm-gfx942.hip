// grouped_gemm_dgrad_up for rocm:gfx942, on matrix cores: mfma_32x32x2
//
//   drows = dup · up
//
// A block owns 128 rows of all tokens by 128 columns; each of its 4 waves owns
// 64 x 64 of them. block_x counts row tiles, block_y column tiles.
//
// Shared memory: two buffers of each. While one is multiplied, the next 16 elements of what the sum
// runs over are on their way from global memory to registers, and from there they go to the other.
//   left   f32 [128][16]   dup
//   right  f32 [128][16]   columns of up, turned around on the way
//
// Baked in: inner 32, outer 2880, experts 1, types, epilogue. Not the tokens.

// ---- types, and the hardware as named functions ----

typedef unsigned short u16;
typedef int i32;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;
typedef float f32;
typedef double f64;

struct bf16 { u16 bits; };  // the upper half of an f32
struct f16 { u16 bits; };   // IEEE binary16

#define __shared__ __attribute__((shared))
#define DEVICE __attribute__((device)) inline __attribute__((always_inline))
#define COMPILE_TIME constexpr
#define KERNEL(threads) \
    extern "C" __attribute__((global, amdgpu_flat_work_group_size(threads, threads))) void

DEVICE i32 thread_index() { return __builtin_amdgcn_workitem_id_x(); }
DEVICE i64 block_x() { return __builtin_amdgcn_workgroup_id_x(); }
DEVICE i64 block_y() { return __builtin_amdgcn_workgroup_id_y(); }
DEVICE void await_launches() {}  // launches do not overlap

DEVICE void block_sync()
{
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}

DEVICE u32 bits_of(f32 value) { return __builtin_bit_cast(u32, value); }
DEVICE f32 float_of(u32 bits) { return __builtin_bit_cast(f32, bits); }
DEVICE f32 fused(f32 a, f32 b, f32 c) { return __builtin_fmaf(a, b, c); }
DEVICE f32 square_root(f32 value) { return __builtin_sqrtf(value); }

DEVICE f32 to_f32(f16 value) { return __builtin_bit_cast(_Float16, value.bits); }
DEVICE f16 to_f16(f32 value) { return f16{__builtin_bit_cast(u16, (_Float16)value)}; }

// No instruction here: adding just under half of the last place kept rounds to
// the nearest, ties to even; a NaN stays one.
DEVICE bf16 to_bf16(f32 value)
{
    u32 bits = bits_of(value);
    u32 quiet = bits | 0x400000u, rounded = bits + 0x7fffu + (bits >> 16 & 1u);
    return bf16{(u16)((value != value ? quiet : rounded) >> 16)};
}

DEVICE f32 to_f32(bf16 value) { return float_of((u32)value.bits << 16); }
DEVICE f32 to_f32(f32 value) { return value; }

// The nearest value of a storage type; ties to even.
template <class T> DEVICE T round_to(f32 value);
template <> DEVICE f32 round_to<f32>(f32 value) { return value; }
template <> DEVICE f16 round_to<f16>(f32 value) { return to_f16(value); }
template <> DEVICE bf16 round_to<bf16>(f32 value) { return to_bf16(value); }

// N adjacent elements, moved by one access.
template <class T, int N> struct alignas(N * sizeof(T)) Pack { T at[N]; };

template <int N, class T> DEVICE Pack<T, N> load(const T *from)
{
    return *reinterpret_cast<const Pack<T, N> *>(from);
}

template <int N, class T> DEVICE void store(T *to, const Pack<T, N> &pack)
{
    *reinterpret_cast<Pack<T, N> *>(to) = pack;
}

// Pack number `i` of a row. NVVM writes a pack by one access only where it sees
// that the address counts whole packs.
template <int N, class T> DEVICE Pack<T, N> load(const T *row, i64 i)
{
    return reinterpret_cast<const Pack<T, N> *>(row)[i];
}

template <int N, class T> DEVICE void store(T *row, i64 i, const Pack<T, N> &pack)
{
    reinterpret_cast<Pack<T, N> *>(row)[i] = pack;
}

// Elements of the widest pack, at most 16 bytes, that divides rows of `width`:
// every row then starts at a pack and ends with one.
template <class T> COMPILE_TIME int pack_width(i64 width)
{
    int count = 16 / sizeof(T);
    while (width % count != 0)
        count /= 2;
    return count;
}

COMPILE_TIME int ceil_div(int a, int b) { return (a + b - 1) / b; }
COMPILE_TIME int lesser(int a, int b) { return a < b ? a : b; }

// ---- products of a wave ----

// sums + a · b on the matrix cores, EDGE x EDGE x K, by all 64 lanes. The lanes of a group, lane / EDGE,
// bring one share of the K elements; a lane holds
//   a       of row lane % EDGE of the left matrix, the share of its group
//   b       of column lane % EDGE of the right one, the same
//   sums    of that column: in register r, row r / 4 * (256 / EDGE) + lane / EDGE * 4 + r % 4
typedef f32 f32x4 __attribute__((ext_vector_type(4)));
typedef f32 f32x16 __attribute__((ext_vector_type(16)));

DEVICE f32x16 mfma_32x32x2(f32 a, f32 b, f32x16 sums)
{
    return __builtin_amdgcn_mfma_f32_32x32x2f32(a, b, sums, 0, 0, 0);
}

DEVICE f32x4 mfma_16x16x4(f32 a, f32 b, f32x4 sums)
{
    return __builtin_amdgcn_mfma_f32_16x16x4f32(a, b, sums, 0, 0, 0);
}

// ---- the kernel ----

typedef f32 Element;

constexpr int INNER = 32, OUTER = 2880, MATRICES = 1;
constexpr int THREADS = 256, WAVE = 64;
constexpr int TILE_ROWS = 128, TILE_COLUMNS = 128, TILE_DEPTH = 16;
constexpr int WAVE_ROWS = 64, WAVE_COLUMNS = 64;

// A product is EDGE x EDGE sums; a row's are in GROUPS lanes, SUMS in each.
constexpr int EDGE = 32, GROUPS = WAVE / EDGE, SUMS = EDGE / GROUPS;
constexpr int ROW_PARTS = WAVE_ROWS / EDGE, COLUMN_PARTS = WAVE_COLUMNS / EDGE;
constexpr int COLUMN_WAVES = TILE_COLUMNS / WAVE_COLUMNS;

// A chunk is 16 bytes, and a line of shared memory is CHUNKS of them.
constexpr int CHUNK = 16 / sizeof(Element), CHUNKS = TILE_DEPTH / CHUNK;
typedef Pack<Element, CHUNK> Chunk;

// Adjacent columns of a lane.
constexpr int RUN = COLUMN_PARTS * SUMS;

// Elements loaded and stored at a time.
constexpr int LOADED = pack_width<Element>(INNER), STORED = lesser(pack_width<Element>(OUTER), RUN);

static_assert(TILE_ROWS / WAVE_ROWS * COLUMN_WAVES * WAVE == THREADS, "every wave owns a part of the tile");

// The rows of a block: `rows` of them from row `first` on, all of one expert.
struct RowTile {
    i64 expert, first;
    i32 rows;
};

DEVICE RowTile row_tile(i64 tokens, i64 tile = block_x())
{
    const i64 first = tile * TILE_ROWS;
    return {0, first, (i32)(tokens - first)};
}

// Where a chunk of a line lies in a tile of shared memory. The banks are eight chunks wide, and
// eight adjacent lanes meet in none of them: not when each writes to every second line, nor when
// they read the lines of a product, which are runs of four or single ones, RUN lines apart.
DEVICE i32 place(i32 line, i32 chunk)
{
    const i32 at = line * CHUNKS + chunk;
    const i32 twist = line / 8 % 2 ^ (line / 16 ^ line / 32) % 2 * (CHUNKS / 2);
    return at ^ (at / 8 ^ twist) % 8;
}

typedef Pack<Element, 2> Pair;

// LINES columns of rows in memory on their way to shared memory, where a line is what the sum runs
// over: the rows. A thread takes pairs of adjacent columns, CHUNK rows of each, and turns them around.
// WIDTH is the distance of two rows; every SPAN lines are of one matrix.
template <int LINES, int WIDTH, int SPAN = LINES> struct TurnedStage {
    static constexpr int HELD = LINES / 2 * CHUNKS / THREADS;
    static_assert(HELD * THREADS == LINES / 2 * CHUNKS, "every thread moves as many pairs of chunks");

    i32 rows[HELD][CHUNK];  // the next ones
    Pair held[HELD][CHUNK];

    DEVICE static i32 line_of(i32 i) { return (i * THREADS + thread_index()) % (LINES / 2) * 2; }
    DEVICE static i32 chunk_of(i32 i) { return (i * THREADS + thread_index()) / (LINES / 2); }

    // Finds the rows from `depth` on: `row_of(k)`, which is asked for k below `end` only.
    template <class RowOf> DEVICE void aim(i32 depth, i32 end, RowOf row_of)
    {
        if (depth >= end)
            return;
        #pragma unroll
        for (i32 i = 0; i < HELD; i++)
            #pragma unroll
            for (i32 n = 0; n < CHUNK; n++)
                rows[i][n] = row_of(lesser(depth + chunk_of(i) * CHUNK + n, end - 1));
    }

    // Reads the rows it aimed at: `begin(line, row)` is where one begins in the matrix of a line. No load
    // depends on a condition of its own: rows beyond `end` are the last one, until `put`, and columns
    // beyond `columns` the last ones, since nobody stores their sums.
    template <class Begin> DEVICE void fetch(i32 depth, i32 end, i32 columns, Begin begin)
    {
        if (depth >= end)
            return;
        #pragma unroll
        for (i32 i = 0; i < HELD; i++) {
            const i32 line = line_of(i), column = line % SPAN;
            #pragma unroll
            for (i32 n = 0; n < CHUNK; n++) {
                const Element *row = begin(line, rows[i][n]);
                if (WIDTH % 2 == 0)
                    held[i][n] = load<2>(row + lesser(column, columns - 2));
                else
                    held[i][n] = Pair{row[lesser(column, columns - 1)], row[lesser(column + 1, columns - 1)]};
            }
        }
    }

    // With zeros for rows beyond `end`.
    DEVICE void put(Chunk *tile, i32 depth, i32 end) const
    {
        #pragma unroll
        for (i32 i = 0; i < HELD; i++) {
            Chunk chunks[2];
            #pragma unroll
            for (i32 n = 0; n < CHUNK; n++) {
                const Pair pair = depth + chunk_of(i) * CHUNK + n < end ? held[i][n] : Pair{};
                chunks[0].at[n] = pair.at[0];
                chunks[1].at[n] = pair.at[1];
            }
            tile[place(line_of(i), chunk_of(i))] = chunks[0];
            tile[place(line_of(i) + 1, chunk_of(i))] = chunks[1];
        }
    }
};

// The chunk of a row from element k on; zeros beyond INNER.
DEVICE Chunk load_chunk(const Element *row, i32 k)
{
    Chunk chunk = {};
    #pragma unroll
    for (i32 n = 0; n < CHUNK; n += LOADED)
        if (k + n < INNER)
            store(chunk.at + n, load<LOADED>(row + k + n));
    return chunk;
}

// LINES lines of a tile on their way from global memory, through registers.
template <int LINES> struct Stage {
    static constexpr int HELD = LINES * CHUNKS / THREADS;
    static_assert(HELD * THREADS == LINES * CHUNKS, "every thread moves as many chunks");

    const Element *rows[HELD];  // where the rows of its chunks begin; null for zeros
    Chunk held[HELD];

    DEVICE static i32 line_of(i32 i) { return (i * THREADS + thread_index()) / CHUNKS; }
    DEVICE static i32 chunk_of() { return thread_index() % CHUNKS; }

    // `begin(line)` is where the row of a line begins.
    template <class Begin> DEVICE void aim(Begin begin)
    {
        #pragma unroll
        for (i32 i = 0; i < HELD; i++)
            rows[i] = begin(line_of(i));
    }

    // Reads from element `depth` on.
    DEVICE void fetch(i32 depth)
    {
        #pragma unroll
        for (i32 i = 0; i < HELD; i++)
            held[i] = rows[i] ? load_chunk(rows[i], depth + chunk_of() * CHUNK) : Chunk{};
    }

    DEVICE void put(Chunk *tile) const
    {
        #pragma unroll
        for (i32 i = 0; i < HELD; i++)
            tile[place(line_of(i), chunk_of())] = held[i];
    }
};

typedef f32x16 Sums;

// A row of a product is sum sum_of(row) of the lanes of group group_of(row).
DEVICE i32 group_of(i32 row) { return row / 4 % GROUPS; }
DEVICE i32 sum_of(i32 row) { return row / 4 / GROUPS * 4 + row % 4; }

// What a lane brings of a line to several products. Which elements meet in one does not matter, as long
// as both sides agree. Groups bring adjacent chunks: STEP of them in all.
typedef Chunk Share;
constexpr int STEP = GROUPS;

DEVICE Share share(const Chunk *tile, i32 line, i32 chunk, i32 lane)
{
    return tile[place(line, chunk + lane / EDGE)];
}

DEVICE void add_product(Sums &sums, const Share &column, const Share &row)
{
    #pragma unroll
    for (i32 k = 0; k < CHUNK; k++)
        sums = mfma_32x32x2(column.at[k], row.at[k], sums);
}

// The columns of a wave that the rows of its products are: a lane has RUN adjacent ones.
DEVICE i32 column_of(i32 part, i32 row) { return group_of(row) * RUN + part * SUMS + sum_of(row); }

// Adds the products of a wave over one buffer: lines of left from `row` on, of right from `column` on.
// Columns are the left operand, so that a lane's sums are of one row.
DEVICE void multiply(Sums (&sums)[ROW_PARTS][COLUMN_PARTS], const Chunk *left, i32 row, const Chunk *right, i32 column,
                     i32 lane)
{
    #pragma unroll
    for (i32 chunk = 0; chunk < CHUNKS; chunk += STEP) {
        Share rows[ROW_PARTS];
        #pragma unroll
        for (i32 i = 0; i < ROW_PARTS; i++)
            rows[i] = share(left, row + i * EDGE + lane % EDGE, chunk, lane);
        #pragma unroll
        for (i32 j = 0; j < COLUMN_PARTS; j++) {
            const Share columns = share(right, column + column_of(j, lane % EDGE), chunk, lane);
            #pragma unroll
            for (i32 i = 0; i < ROW_PARTS; i++)
                add_product(sums[i][j], columns, rows[i]);
        }
    }
}

KERNEL(THREADS) grouped_gemm_dgrad_up(
    const f32 *__restrict__ dup, // [tokens, 32]
    const f32 *__restrict__ up,  // [1, 32, 2880]
    f32 *__restrict__ drows,     // [tokens, 2880]
    i64 tokens)
{
    await_launches();
    __shared__ Chunk left[2][TILE_ROWS * CHUNKS], right[2][TILE_COLUMNS * CHUNKS];

    const RowTile tile = row_tile(tokens);
    if (tile.rows <= 0)
        return;
    const i32 first_column = (i32)block_y() * TILE_COLUMNS, columns = OUTER - first_column;

    const i32 lane = thread_index() % WAVE, wave = thread_index() / WAVE;
    const i32 wave_row = wave / COLUMN_WAVES * WAVE_ROWS, wave_column = wave % COLUMN_WAVES * WAVE_COLUMNS;
    Sums sums[ROW_PARTS][COLUMN_PARTS] = {};
    i32 buffer = 0;

    #pragma unroll 1
    for (i32 matrix = 0; matrix < MATRICES; matrix++) {
        const Element *factor = dup;
        const Element *weights = up;
        weights += tile.expert * INNER * OUTER + first_column;
        const auto itself = [](i32 k) { return k; };
        const auto weight_row = [&](i32, i32 k) { return weights + (i64)k * OUTER; };
        Stage<TILE_ROWS> left_stage;
        left_stage.aim([&](i32 row) { return row < tile.rows ? factor + (tile.first + row) * INNER : nullptr; });
        left_stage.fetch(0);
        TurnedStage<TILE_COLUMNS, OUTER> right_stage;
        right_stage.aim(0, INNER, itself);
        right_stage.fetch(0, INNER, columns, weight_row);
        #pragma unroll 1
        for (i32 depth = 0; depth < INNER; depth += TILE_DEPTH, buffer ^= 1) {
            left_stage.put(left[buffer]);
            right_stage.put(right[buffer], depth, INNER);
            block_sync();
            left_stage.fetch(depth + TILE_DEPTH);
            right_stage.aim(depth + TILE_DEPTH, INNER, itself);
            right_stage.fetch(depth + TILE_DEPTH, INNER, columns, weight_row);
            multiply(sums, left[buffer], wave_row, right[buffer], wave_column, lane);
        }
    }

    #pragma unroll
    for (i32 i = 0; i < ROW_PARTS; i++) {
        const i32 row = wave_row + i * EDGE + lane % EDGE;
        if (row >= tile.rows)
            continue;
        const i64 at = (tile.first + row) * OUTER + first_column;
        #pragma unroll
        for (i32 j = 0; j < RUN; j += STORED) {
            const i32 column = wave_column + lane / EDGE * RUN + j;
            if (column >= columns)
                continue;
            Pack<Element, STORED> pack;
            #pragma unroll
            for (i32 n = 0; n < STORED; n++)
                pack.at[n] = round_to<Element>(sums[i][(j + n) / SUMS][(j + n) % SUMS]);
            store(drows + at + column, pack);
        }
    }
}
