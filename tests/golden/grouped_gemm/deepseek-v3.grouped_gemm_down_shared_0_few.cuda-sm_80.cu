// grouped_gemm_down for cuda:sm_80, of few rows, on the matrix units
//
//   out = hidden · downᵀ
//
// With few rows a product is a reading of weights. A block is one warp, which reads 16
// columns of one expert from end to end, once, and multiplies them by all tokens
// of its tile. So work is cut into equal numbers of bytes, small enough for every
// multiprocessor to have its share. block_x counts row tiles, block_y columns.
//
// Weights are the left factor of the matrix unit, 16 lines of it; rows are the right one,
// 8, 16, 32 or 64 of them, as there are, and more by turns; at most 32 or 16 where lines
// are copied in pieces of 8 or 4 bytes.
//
// Shared memory: a ring of 30720 bytes, of as many stages as fit in, filled by asynchronous
// copies while one is multiplied. A stage has lines of 128 bytes, 64 elements of the inner
// dimension:
//   left   [16]     rows of down
//   right  [8..64]  hidden
// Chunk n of 16 bytes of line r lies at n ^ (r % 8): eight lines of a matrix load are
// on eight different groups of banks. At the end the ring holds the sums.
//
// Sums are f32, in ascending order of the inner dimension, 16 elements at a time: that
// of the kernel for many rows, so that a row has the same sums in any company.
//
// Baked in: inner 2048, outer 7168, experts 1, types, epilogue. Not the tokens.

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

#define DEVICE __device__ __forceinline__
#define COMPILE_TIME __device__ constexpr
// With the least wish for blocks per multiprocessor the assembler never spills
// registers to fit more of them.
#define KERNEL(threads) extern "C" __global__ void __launch_bounds__(threads, 1)

DEVICE i32 thread_index() { return threadIdx.x; }
DEVICE i64 block_x() { return blockIdx.x; }
DEVICE i64 block_y() { return blockIdx.y; }
DEVICE void block_sync() { __syncthreads(); }

DEVICE void await_launches() {}  // launches do not overlap

DEVICE u32 bits_of(f32 value) { return __float_as_uint(value); }
DEVICE f32 float_of(u32 bits) { return __uint_as_float(bits); }
DEVICE f32 fused(f32 a, f32 b, f32 c) { return __fmaf_rn(a, b, c); }
DEVICE f32 square_root(f32 value) { return __fsqrt_rn(value); }

DEVICE f32 to_f32(f16 value)
{
    f32 wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value.bits));
    return wide;
}

DEVICE f16 to_f16(f32 value)
{
    f16 narrow;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(narrow.bits) : "f"(value));
    return narrow;
}

DEVICE bf16 to_bf16(f32 value)
{
    bf16 narrow;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(narrow.bits) : "f"(value));
    return narrow;
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

// ---- warps ----

constexpr i32 WARP = 32;
typedef u32 LaneMask;

// Every lane of a warp takes part in each of these.
DEVICE void warp_sync() { __syncwarp(); }
DEVICE u32 shuffle(u32 value, i32 lane) { return __shfl_sync(0xffffffffu, value, lane); }
DEVICE LaneMask ballot(bool vote) { return __ballot_sync(0xffffffffu, vote); }
DEVICE i32 population(LaneMask lanes) { return __popc(lanes); }

// The lanes with the same value, which has at most BITS bits.
template <int BITS> DEVICE LaneMask match_any(u32 value)
{
    return __match_any_sync(0xffffffffu, value);
}

DEVICE void shared_add(i32 *counter, i32 value) { atomicAdd(counter, value); }

DEVICE u32 warp_max(u32 value) { return __reduce_max_sync(0xffffffffu, value); }

DEVICE i32 lane_index() { return thread_index() % WARP; }
DEVICE i32 warp_index() { return thread_index() / WARP; }

// The lanes before this one, and the first lane of a set.
DEVICE LaneMask lanes_below() { return ((LaneMask)1 << lane_index()) - 1; }
DEVICE i32 first_lane(LaneMask lanes) { return population((lanes & (0 - lanes)) - 1); }

DEVICE f32 shuffle(f32 value, i32 lane) { return float_of(shuffle(bits_of(value), lane)); }

DEVICE f32 warp_sum(f32 value)
{
    for (i32 step = WARP / 2; step > 0; step /= 2)
        value += shuffle(value, lane_index() ^ step);
    return value;
}

DEVICE i32 warp_sum(i32 value)
{
    for (i32 step = WARP / 2; step > 0; step /= 2)
        value += (i32)shuffle((u32)value, lane_index() ^ step);
    return value;
}

// The sum of `value` over this lane and those before it.
DEVICE i32 warp_prefix(i32 value)
{
    for (i32 step = 1; step < WARP; step *= 2) {
        i32 before = (i32)shuffle((u32)value, (lane_index() - step) & (WARP - 1));
        value += lane_index() >= step ? before : 0;
    }
    return value;
}

// Where an object lies in shared memory, as copies, matrix loads and barriers name it.
DEVICE u32 shared_address(const void *object) { return (u32)__cvta_generic_to_shared(object); }

// ---- copies from global to shared memory that run by themselves ----

// Starts to copy BYTES, 16, 8 or 4, between places aligned to as many. Where the
// source is not `wanted` nothing is read and zeros are written.
template <int BYTES> DEVICE void copy_async(u32 to, const void *from, bool wanted)
{
    const u64 source = __cvta_generic_to_global(from);
    const i32 read = wanted ? BYTES : 0;
    if constexpr (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                     :: "r"(to), "l"(source), "r"(read) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;"
                     :: "r"(to), "l"(source), "n"(BYTES), "r"(read) : "memory");
}

// Ends a group: the copies this thread started since the last one.
DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until all but the last PENDING groups of this thread have arrived. Other
// threads see them after the next barrier.
template <int PENDING> DEVICE void wait_copies()
{
    asm volatile("cp.async.wait_group %0;" :: "n"(PENDING) : "memory");
}

// ---- matrices from shared memory ----

// Loads as many matrices of 8 rows of 16 bytes as `to` has registers. Lane 8 m + r
// gives the address of row r of matrix m, a multiple of 16; lane l gets, of each
// matrix, bytes 4 (l % 4) and on of row l / 4.
DEVICE void load_matrices(u32 (&to)[1], u32 row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 { %0 }, [%1];"
                 : "=r"(to[0]) : "r"(row) : "memory");
}

DEVICE void load_matrices(u32 (&to)[2], u32 row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 { %0, %1 }, [%2];"
                 : "=r"(to[0]), "=r"(to[1]) : "r"(row) : "memory");
}

DEVICE void load_matrices(u32 (&to)[4], u32 row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 { %0, %1, %2, %3 }, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(row) : "memory");
}

// The same of 16-bit elements, transposed: lane l gets rows 2 (l % 4) and the next of
// column l / 4.
DEVICE void load_transposed(u32 (&to)[2], u32 row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 { %0, %1 }, [%2];"
                 : "=r"(to[0]), "=r"(to[1]) : "r"(row) : "memory");
}

DEVICE void load_transposed(u32 (&to)[4], u32 row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 { %0, %1, %2, %3 }, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(row) : "memory");
}

// ---- products on the matrix unit ----

// Each: sums += a · b for 16 rows and 8 columns over 32 bytes of the inner dimension.
// With g = lane / 4 and t = lane % 4, registers hold
//   a     rows g, g + 8, g, g + 8, 4 bytes from byte 4 t on; the last two from 16 + 4 t
//   b     column g, 4 bytes from byte 4 t on; then from 16 + 4 t
//   sums  row g, columns 2 t and 2 t + 1; then row g + 8, the same

DEVICE void mma_16x8x16_bf16(f32 (&sums)[4], const u32 (&a)[4], const u32 (&b)[2])
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
        " { %0, %1, %2, %3 }, { %4, %5, %6, %7 }, { %8, %9 }, { %0, %1, %2, %3 };"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// ---- the kernel ----

typedef bf16 Element;

constexpr int INNER = 2048, OUTER = 7168;
constexpr int TILE_ROWS = 128, TILE_COLUMNS = 16, TILE_DEPTH = 64;
constexpr int RING = 30720;  // bytes

constexpr int LINE = 128, CHUNK = 16, STEPS = LINE / 32;  // bytes; a product takes 32 of each line
constexpr int LEFT = 16;                                  // lines of weights
constexpr int DEPTHS = ceil_div(INNER, TILE_DEPTH);

// Elements copied at a time, lanes that share a line, and lines copied at a time.
constexpr int COPIED = pack_width<Element>(INNER);
constexpr int LINE_LANES = TILE_DEPTH / COPIED, COPIED_LINES = WARP / LINE_LANES;

// Rows at a time. A lane keeps the address of each line that it copies, of which small
// pieces have more: never more than 16.
constexpr int MOST = 16 * COPIED_LINES;

static_assert(TILE_DEPTH * sizeof(Element) == LINE && COPIED * sizeof(Element) >= 4, "what a copy can move");
static_assert(MOST * LINE <= RING, "the ring can hold the sums");

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

// What becomes of a sum: bias, activation, weight.
DEVICE f32 finished(f32 down)
{
    return down;
}

// The line that a lane copies to in its turn i, and the piece of it.
DEVICE i32 copied_line(i32 i) { return i * COPIED_LINES + lane_index() / LINE_LANES; }
DEVICE i32 copied_element() { return lane_index() % LINE_LANES * COPIED; }

// Where a line begins, and whether it exists: what does not is zeros, and is not read.
struct Line {
    const Element *begin;
    bool exists;
};

// Copies elements `depth` and on of LINES lines to lines from `to` on; zeros for elements
// from INNER on. `line_at(i)` is the line of turn i.
template <int LINES, class LineAt> DEVICE void copy_lines(u32 to, i32 depth, LineAt line_at)
{
    const i32 k = depth + copied_element(), byte = copied_element() * (i32)sizeof(Element);
    #pragma unroll
    for (i32 i = 0; i < LINES / COPIED_LINES; i++) {
        const Line from = line_at(i);
        const u32 place = to + copied_line(i) * LINE + (byte ^ (copied_line(i) & 7) * CHUNK);
        copy_async<COPIED * sizeof(Element)>(place, from.begin + k, from.exists && k < INNER);
    }
}

// Where chunk `chunk` of line `line` of a stage is.
DEVICE u32 in_stage(u32 stage, i32 line, i32 chunk) { return stage + line * LINE + (chunk ^ (line & 7)) * CHUNK; }

// Adds the products of a stage with ROWS rows.
template <int ROWS> DEVICE void multiply_stage(f32 (&sums)[ROWS / 8][4], u32 stage)
{
    const i32 lane = lane_index();
    #pragma unroll
    for (i32 step = 0; step < STEPS; step++) {
        u32 left[4];
        load_matrices(left, in_stage(stage, lane % 16, 2 * step + lane / 16));
        #pragma unroll
        for (i32 j = 0; j < ROWS / 8; j++) {
            u32 right[2];
            load_matrices(right, in_stage(stage, LEFT + j * 8 + lane % 8, 2 * step + lane / 8 % 2));
            mma_16x8x16_bf16(sums[j], left, right);
        }
    }
}

// Where a sum lies in the ring at the end, one line for each row: those that a warp lays
// down together, of every other row, are on different banks, and those that it picks up, too.
DEVICE i32 sum_at(i32 row, i32 column) { return row * (LINE / 4) + (column ^ (row / 2 + row % 2 * 2) % 4 * 8); }

// Leaves in the ring, for each of ROWS rows, its sums with the lines of weights. Row n lies
// at `right + row_at(n) * INNER`; there is none where row_at(n) is negative.
template <int ROWS, class LeftAt, class RowAt>
DEVICE void multiply_rows(f32 *ring, LeftAt left_at, const Element *right, RowAt row_at)
{
    constexpr int STAGE = (LEFT + ROWS) * LINE, STAGES = RING / STAGE, TURNS = ROWS / COPIED_LINES;
    const u32 stages = shared_address(ring);
    i32 rows[TURNS];
    #pragma unroll
    for (i32 i = 0; i < TURNS; i++)
        rows[i] = row_at(copied_line(i));
    auto right_at = [&](i32 i) { return Line{right + (i64)(rows[i] < 0 ? 0 : rows[i]) * INNER, rows[i] >= 0}; };
    auto fetch = [&](i32 at) {
        const u32 stage = stages + at % STAGES * STAGE;
        if (at < DEPTHS) {
            copy_lines<LEFT>(stage, at * TILE_DEPTH, left_at);
            copy_lines<ROWS>(stage + LEFT * LINE, at * TILE_DEPTH, right_at);
        }
        commit_copies();
    };

    f32 sums[ROWS / 8][4] = {};
    #pragma unroll 1
    for (i32 at = 0; at < STAGES - 1; at++)
        fetch(at);
    #pragma unroll 1
    for (i32 at = 0; at < DEPTHS; at++) {
        wait_copies<STAGES - 2>();
        warp_sync();  // this stage is here, and all have read the one before it
        fetch(at + STAGES - 1);
        multiply_stage<ROWS>(sums, stages + at % STAGES * STAGE);
    }
    wait_copies<0>();
    warp_sync();  // the ring is free
    #pragma unroll
    for (i32 j = 0; j < ROWS / 8; j++)
        #pragma unroll
        for (i32 n = 0; n < 4; n++)
            ring[sum_at(j * 8 + lane_index() % 4 * 2 + n % 2, n / 2 * 8 + lane_index() / 4)] = sums[j][n];
    warp_sync();
}

KERNEL(WARP) grouped_gemm_down(
    const bf16 *__restrict__ hidden, // [tokens, 2048]
    const bf16 *__restrict__ down,   // [1, 7168, 2048]
    bf16 *__restrict__ out,          // [tokens, 7168]
    i64 tokens)
{
    await_launches();
    alignas(LINE) extern __shared__ f32 ring[];

    const RowTile tile = row_tile(tokens);
    const i32 count = lesser(tile.rows, TILE_ROWS), first_column = (i32)block_y() * TILE_COLUMNS;
    const i64 first_weight = (tile.expert * OUTER + first_column) * INNER;

    // The line of weights that this lane copies in its turn i.
    auto left_at = [&](i32 i) {
        const i32 line = copied_line(i), column = line;
        const Element *const weights = down;
        return Line{weights + first_weight + (i64)column * INNER, first_column + column < OUTER};
    };
    #pragma unroll 1
    for (i32 first = 0; first < count; first += MOST) {
        const i64 first_row = tile.first + first;
        const i32 left = lesser(count - first, MOST);
        auto row_at = [&](i32 n) { return n < left ? n : -1; };
        const Element *const right = hidden + first_row * INNER;
        if (left <= 8)
            multiply_rows<8>(ring, left_at, right, row_at);
        else if (left <= 16)
            multiply_rows<16>(ring, left_at, right, row_at);
        else if (left <= 32)
            multiply_rows<lesser(32, MOST)>(ring, left_at, right, row_at);
        else
            multiply_rows<MOST>(ring, left_at, right, row_at);

        // A lane makes results of one column, row by row.
        const i32 column = lane_index() % TILE_COLUMNS;
        const bool exists = first_column + column < OUTER;
        #pragma unroll 1
        for (i32 row = lane_index() / TILE_COLUMNS; row < left && exists; row += WARP / TILE_COLUMNS) {
            const i64 at = (first_row + row) * OUTER + first_column + column;
            f32 sum = ring[sum_at(row, column)];
            const f32 value = finished(sum);
            out[at] = round_to<Element>(value);
        }
        warp_sync();  // the ring is free again
    }
}
