// grouped_gemm_up for cuda:sm_80, on the matrix units
//
//   hidden = act(x[token] · gateᵀ, x[token] · upᵀ)
//
// A block owns 128 rows of one expert by 64 columns of gate and of up; a warp owns
// 64 x 32 of them. block_x counts row tiles, block_y column tiles.
// There are at most as many row tiles as blocks; the blocks beyond them return.
// Rows are read where the tokens lie, so nothing has to be dispatched before.
//
// Shared memory: a ring of 2 stages, filled by asynchronous copies while others are
// multiplied. A stage has 256 lines of 128 bytes, 64 elements of the inner dimension:
//   left   [128]   x[token]
//   right  [2 * 64]   rows of gate, then rows of up
// Chunk n of 16 bytes of line r lies at n ^ (r % 8): eight lines of a matrix load are
// on eight different groups of banks. At the end the ring holds the tile of hidden.
//
// Sums are f32, in ascending order of the inner dimension, 16 elements at a time.
//
// Baked in: inner 4096, outer 14336, experts 8, types, epilogue. Not the tokens.

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

// ---- functions ----

DEVICE f32 power_of_two(i32 exponent) { return float_of((u32)(exponent + 127) << 23); }

// e^x to about one unit in the last place: x = n ln 2 + r, a polynomial in r.
// The same on every GPU.
DEVICE f32 exponential(f32 x)
{
    constexpr f32 ROUND = 12582912.0f;  // adding it rounds to an integer
    f32 bounded = x > 89.0f ? 89.0f : x < -104.0f ? -104.0f : x;
    f32 shifted = fused(bounded, 1.44269504f, ROUND), n = shifted - ROUND;
    f32 r = fused(n, -1.42860677e-6f, fused(n, -0.693145752f, bounded));
    f32 p = fused(r, 0.0013950479f, 0.008368882f);
    p = fused(p, r, 0.041666206f);
    p = fused(p, r, 0.1666652f);
    p = fused(p, r, 0.5f);
    p = fused(p, r * r, r) + 1.0f;
    i32 exponent = (i32)(bits_of(shifted) - bits_of(ROUND)), half = exponent >> 1;
    return p * power_of_two(half) * power_of_two(exponent - half);
}

DEVICE f32 sigmoid(f32 x) { return 1.0f / (1.0f + exponential(-x)); }

// The activation of an expert.
DEVICE f32 activation(f32 x)
{
    return x * sigmoid(x);
}

// ---- the kernel ----

typedef bf16 Element;

constexpr int INNER = 4096, OUTER = 14336;
constexpr int EXPERTS = 8, TOP_K = 2;
constexpr int THREADS = 128, STAGES = 2;
constexpr int TILE_ROWS = 128, TILE_COLUMNS = 64, TILE_DEPTH = 64;
constexpr int WARP_ROWS = 64, WARP_COLUMNS = 32;
constexpr int MATRICES = 2;

constexpr int LINE = 128, CHUNK = 16, STEPS = LINE / 32;  // bytes; a product takes 32 of each line
constexpr int STAGE = (TILE_ROWS + MATRICES * TILE_COLUMNS) * LINE;
constexpr int COLUMN_WARPS = TILE_COLUMNS / WARP_COLUMNS;
constexpr int ROW_PARTS = WARP_ROWS / 16, COLUMN_PARTS = WARP_COLUMNS / 8;  // products of a warp
constexpr int DEPTHS = ceil_div(INNER, TILE_DEPTH);

// Elements copied at a time, threads that share a line, and lines copied at a time.
constexpr int COPIED = pack_width<Element>(INNER);
constexpr int LINE_THREADS = TILE_DEPTH / COPIED, COPIED_LINES = THREADS / LINE_THREADS;

// Elements stored at a time, and the pitch of the tile of hidden in shared memory.
constexpr int STORED = pack_width<Element>(OUTER), PITCH = TILE_COLUMNS + 8;

static_assert(TILE_DEPTH * sizeof(Element) == LINE && COPIED * sizeof(Element) >= 4, "what a copy can move");
static_assert(TILE_ROWS / WARP_ROWS * COLUMN_WARPS * WARP == THREADS, "every warp owns a part of the tile");
static_assert(TILE_ROWS % COPIED_LINES + TILE_COLUMNS % COPIED_LINES == 0, "all threads copy as much");
static_assert(STAGES * STAGE == 65536, "the shared memory of the launch");
static_assert(TILE_ROWS * PITCH * (int)sizeof(Element) <= STAGES * STAGE, "the ring can hold the output");

// The rows of a block: `rows` of them from row `first` on, all of one expert.
struct RowTile {
    i64 expert, first;
    i32 rows;
};

DEVICE RowTile row_tile(const i64 *offsets, const i32 *row_tiles, i32 tile = (i32)block_x())
{
    if (tile >= row_tiles[EXPERTS])
        return {0, 0, 0};
    i32 expert = 0, beyond = EXPERTS;  // row_tiles[expert] <= tile < row_tiles[beyond]
    while (beyond - expert > 1) {
        i32 middle = (expert + beyond) / 2;
        bool right = row_tiles[middle] <= tile;
        expert = right ? middle : expert;
        beyond = right ? beyond : middle;
    }
    i64 first = offsets[expert] + (i64)(tile - row_tiles[expert]) * TILE_ROWS;
    return {expert, first, (i32)(offsets[expert + 1] - first)};
}

DEVICE f32 activated(f32 gate, f32 up)
{
    return activation(gate) * up;
}

// What becomes of a sum: bias, activation, weight.
DEVICE f32 finished(f32 gate, f32 up)
{
    return activated(gate, up);
}

// The line of a tile that a thread copies to in its turn i, and the piece of it.
DEVICE i32 copied_row(i32 i) { return i * COPIED_LINES + thread_index() / LINE_THREADS; }
DEVICE i32 copied_element() { return thread_index() % LINE_THREADS * COPIED; }

// Copies elements `depth` and on of ROWS rows to lines of the ring; zeros for rows from
// `rows` on and elements from INNER on. `row_at(i)` is where the row of turn i begins.
template <int ROWS, class RowAt> DEVICE void copy_rows(u32 lines, i32 rows, i32 depth, RowAt row_at)
{
    const i32 k = depth + copied_element(), byte = copied_element() * (i32)sizeof(Element);
    const i32 wanted = k < INNER ? rows - copied_row(0) : 0;
    #pragma unroll
    for (i32 i = 0; i < ROWS / COPIED_LINES; i++) {
        const u32 to = lines + copied_row(i) * LINE + (byte ^ (copied_row(i) & 7) * CHUNK);
        copy_async<COPIED * sizeof(Element)>(to, row_at(i) + k, i * COPIED_LINES < wanted);
    }
}

// The first row and column of a warp's part of the tile.
DEVICE i32 warp_row() { return warp_index() / COLUMN_WARPS * WARP_ROWS; }
DEVICE i32 warp_column() { return warp_index() % COLUMN_WARPS * WARP_COLUMNS; }

// The operands of one step of a warp, and its sums.
struct Operands { u32 left[ROW_PARTS][4], right[MATRICES * COLUMN_PARTS][2]; };
typedef f32 Sums[ROW_PARTS][MATRICES * COLUMN_PARTS][4];

// Loads 16 rows by two chunks of left at a time, and twice 8 rows by two chunks of right.
DEVICE void load_step(Operands &to, u32 stage, i32 step)
{
    const i32 lane = lane_index();
    const i32 left_row = warp_row() + lane % 16, left_chunk = 2 * step + lane / 16;
    const i32 right_row = TILE_ROWS + warp_column() + lane / 16 * 8 + lane % 8;
    const i32 right_chunk = 2 * step + lane / 8 % 2;
    const u32 left = stage + left_row * LINE + (left_chunk ^ lane % 8) * CHUNK;
    const u32 right = stage + right_row * LINE + (right_chunk ^ lane % 8) * CHUNK;
    #pragma unroll
    for (i32 i = 0; i < ROW_PARTS; i++)
        load_matrices(to.left[i], left + i * 16 * LINE);
    #pragma unroll
    for (i32 j = 0; j < MATRICES * COLUMN_PARTS; j += 2) {
        u32 pair[4];
        load_matrices(pair, right + (j / COLUMN_PARTS * TILE_COLUMNS + j % COLUMN_PARTS * 8) * LINE);
        #pragma unroll
        for (i32 n = 0; n < 4; n++)
            to.right[j + n / 2][n % 2] = pair[n];
    }
}

// Adds the products of a step, of so many parts of 16 rows: those beyond are padding.
DEVICE void multiply(Sums &sums, const Operands &by, i32 parts)
{
    #pragma unroll
    for (i32 j = 0; j < MATRICES * COLUMN_PARTS; j++)
        #pragma unroll
        for (i32 i = 0; i < ROW_PARTS; i++)
            if (i < parts)
                mma_16x8x16_bf16(sums[i][j], by.left[i], by.right[j]);
}

// Adds the products of a stage; a step is loaded while the one before is multiplied.
DEVICE void multiply_stage(Sums &sums, u32 stage, i32 parts)
{
    Operands operands[2];
    load_step(operands[0], stage, 0);
    #pragma unroll
    for (i32 step = 0; step < STEPS; step++) {
        if (step + 1 < STEPS)
            load_step(operands[(step + 1) % 2], stage, step + 1);
        multiply(sums, operands[step % 2], parts);
    }
}

// Moves the tile of hidden from shared memory to its rows, as far as there are any.
DEVICE void store_tile(Element *hidden, const Element *tile, i64 first_row, i32 first_column, i32 rows)
{
    constexpr int PACKS = TILE_COLUMNS / STORED, ROW_PACKS = OUTER / STORED;
    const i32 first_pack = first_column / STORED;
    for (i32 n = thread_index(); n < TILE_ROWS * PACKS; n += THREADS) {
        const i32 row = n / PACKS, pack = n % PACKS;
        if (row < rows && first_pack + pack < ROW_PACKS)
            store(hidden, (first_row + row) * ROW_PACKS + first_pack + pack, load<STORED>(tile + row * PITCH, pack));
    }
}

KERNEL(THREADS) grouped_gemm_up(
    const bf16 *__restrict__ x,        // [tokens, 4096]
    const bf16 *__restrict__ gate,     // [8, 14336, 4096]
    const bf16 *__restrict__ up,       // [8, 14336, 4096]
    const i64 *__restrict__ offsets,   // [9]
    const i32 *__restrict__ row_tiles, // [9]
    const i32 *__restrict__ row_slots, // [rows]
    bf16 *__restrict__ hidden,         // [rows, 14336]
    i64 tokens)
{
    await_launches();
    alignas(LINE) extern __shared__ Element ring[];

    (void)tokens;
    const RowTile tile = row_tile(offsets, row_tiles);
    if (tile.rows <= 0)
        return;
    const i32 first_column = (i32)block_y() * TILE_COLUMNS, columns = OUTER - first_column;
    const i64 first_weight = (tile.expert * OUTER + first_column) * INNER;

    // The rows that this thread copies in its turn i.
    const Element *const gate_rows = gate + first_weight + copied_row(0) * INNER;
    const Element *const up_rows = up + first_weight + copied_row(0) * INNER;
    i32 token[TILE_ROWS / COPIED_LINES];
    #pragma unroll
    for (i32 i = 0; i < TILE_ROWS / COPIED_LINES; i++)
        token[i] = copied_row(i) < tile.rows ? row_slots[tile.first + copied_row(i)] / TOP_K : 0;
    auto left_row = [&](i32 i) { return x + (i64)token[i] * INNER; };
    auto gate_row = [&](i32 i) { return gate_rows + (i64)i * COPIED_LINES * INNER; };
    auto up_row = [&](i32 i) { return up_rows + (i64)i * COPIED_LINES * INNER; };

    const u32 stages = shared_address(ring);
    auto fetch = [&](i32 at) {
        const u32 left = stages + at % STAGES * STAGE, right = left + TILE_ROWS * LINE;
        if (at < DEPTHS) {
            copy_rows<TILE_ROWS>(left, tile.rows, at * TILE_DEPTH, left_row);
            copy_rows<TILE_COLUMNS>(right, columns, at * TILE_DEPTH, gate_row);
            copy_rows<TILE_COLUMNS>(right + TILE_COLUMNS * LINE, columns, at * TILE_DEPTH, up_row);
        }
        commit_copies();
    };

    const i32 parts = ceil_div(tile.rows - warp_row(), 16);  // of this warp, with rows
    Sums sums = {};
    #pragma unroll
    for (i32 at = 0; at < STAGES - 1; at++)
        fetch(at);
    #pragma unroll 1
    for (i32 at = 0; at < DEPTHS; at++) {
        wait_copies<STAGES - 2>();
        block_sync();  // this stage is here, and all have read the one before it
        fetch(at + STAGES - 1);
        if (parts > 0 && warp_column() < columns)
            multiply_stage(sums, stages + at % STAGES * STAGE, parts);
    }
    wait_copies<0>();
    block_sync();  // the ring is free

    #pragma unroll
    for (i32 j = 0; j < COLUMN_PARTS; j++) {
        const i32 column = warp_column() + j * 8 + lane_index() % 4 * 2;
        #pragma unroll
        for (i32 i = 0; i < 2 * ROW_PARTS; i++) {
            const i32 row = warp_row() + i * 8 + lane_index() / 4;
            Pack<Element, 2> pair;
            #pragma unroll
            for (i32 n = 0; n < 2; n++) {
                const f32 gate_sum = sums[i / 2][j][i % 2 * 2 + n];
                const f32 up_sum = sums[i / 2][COLUMN_PARTS + j][i % 2 * 2 + n];
                const f32 value = finished(gate_sum, up_sum);
                pair.at[n] = round_to<Element>(value);
            }
            store(ring, (row * PITCH + column) / 2, pair);
        }
    }
    block_sync();

    store_tile(hidden, ring, tile.first, first_column, tile.rows);
}
