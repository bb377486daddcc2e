// grouped_gemm_wgrad_up for cuda:sm_80, on the matrix units
//
//   grad_gate = dgateᵀ · x[token], over the rows of each expert
//   grad_up = dupᵀ · x[token], over the rows of each expert
//
// A block owns 64 rows of gate and of up by 128 columns of one expert's matrix; a warp owns
// 64 x 64 of them. block_x counts row tiles of all experts, block_y column tiles.
// An expert without rows gets zeros.
// Rows are read where the tokens lie, so nothing has to be dispatched before.
//
// Shared memory: a ring of 4 stages, filled by asynchronous copies while others are
// multiplied. A stage has 32 rows of both factors, zeros beyond the last:
//   left   [2 * 64 columns]   dgate, then dup
//   right  [128 columns]   x[token]
// in panels of 128 bytes of each row. Both factors are read across their rows.
//
// Sums are f32, in ascending order of the rows, 16 at a time.
//
// Baked in: height 2880, width 2880, experts 32, types. Not the tokens.

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

constexpr int HEIGHT = 2880, WIDTH = 2880, TOP_K = 4;
constexpr int THREADS = 128, STAGES = 4;
constexpr int TILE_ROWS = 64, TILE_COLUMNS = 128, TILE_DEPTH = 32;
constexpr int WARP_ROWS = 64, WARP_COLUMNS = 64;
constexpr int MATRICES = 2, ROW_TILES = ceil_div(HEIGHT, TILE_ROWS);

constexpr int LINE = 128, CHUNK = 16, STEPS = TILE_DEPTH * sizeof(Element) / 32;  // bytes; a product takes 32 of a column
constexpr int LEFT = MATRICES * TILE_ROWS * TILE_DEPTH * sizeof(Element);
constexpr int STAGE = LEFT + TILE_COLUMNS * TILE_DEPTH * sizeof(Element);
constexpr int COLUMN_WARPS = TILE_COLUMNS / WARP_COLUMNS;
constexpr int ROW_PARTS = WARP_ROWS / 16, COLUMN_PARTS = WARP_COLUMNS / 8;  // products of a warp

static_assert(MATRICES * TILE_ROWS / WARP_ROWS * COLUMN_WARPS * WARP == THREADS, "every warp owns a part of the tile");
static_assert(TILE_ROWS % WARP_ROWS == 0, "of one matrix");
static_assert(STAGES * STAGE == 65536, "the shared memory of the launch");

// An operand whose lines are steps of the contraction lies in panels: PANEL elements of
// TILE_DEPTH lines, 128 bytes each. A wider operand has several, one behind the other.
constexpr int PANEL = LINE / sizeof(Element), PANEL_BYTES = TILE_DEPTH * LINE;

// Where chunk n of line k of a panel lies: what a warp loads at a time, one chunk of eight
// lines, is on different banks.
DEVICE i32 in_panel(i32 k, i32 chunk) { return k * LINE + (chunk ^ k % 8) * CHUNK; }

// Elements of a row of WIDTH copied at a time, and the line that a thread copies to in turn i.
template <int WIDTH> struct Panels {
    static constexpr int COPIED = pack_width<Element>(WIDTH);
    static constexpr int LINE_THREADS = PANEL / COPIED, LINES = THREADS / LINE_THREADS;
    static constexpr int TURNS = TILE_DEPTH / LINES;

    static_assert(COPIED * sizeof(Element) >= 4, "what a copy can move");
    static_assert(TILE_DEPTH % LINES == 0, "all threads copy as much");

    static DEVICE i32 line(i32 turn) { return turn * LINES + thread_index() / LINE_THREADS; }

    // Copies TILE_DEPTH lines of COLUMNS elements to panels; zeros for lines from `lines` on
    // and elements from `columns` on. `line_at(i)` is where the line of turn i begins.
    template <int COLUMNS, class LineAt> static DEVICE void copy(u32 to, i32 lines, i32 columns, LineAt line_at)
    {
        const i32 column = thread_index() % LINE_THREADS * COPIED, byte = column * (i32)sizeof(Element);
        #pragma unroll
        for (i32 i = 0; i < TURNS; i++) {
            const u32 place = to + in_panel(line(i), byte / CHUNK) + byte % CHUNK;
            #pragma unroll
            for (i32 first = 0; first < COLUMNS; first += PANEL)
                copy_async<COPIED * sizeof(Element)>(place + first / PANEL * PANEL_BYTES, line_at(i) + first + column,
                                                     line(i) < lines && first + column < columns);
        }
    }
};

// Lines k to k + 15 of 16 columns as the left factor of a product.
DEVICE void load_left(u32 (&to)[4], u32 panels, i32 k, i32 column)
{
    const i32 line = k + lane_index() / 16 * 8 + lane_index() % 8;
    column += lane_index() / 8 % 2 * 8;
    load_transposed(to, panels + column / PANEL * PANEL_BYTES + in_panel(line, column % PANEL / 8));
}

// The same lines of 16 columns as two right factors.
DEVICE void load_right(u32 (&to)[4], u32 panels, i32 k, i32 column)
{
    const i32 line = k + lane_index() / 8 % 2 * 8 + lane_index() % 8;
    column += lane_index() / 16 * 8;
    load_transposed(to, panels + column / PANEL * PANEL_BYTES + in_panel(line, column % PANEL / 8));
}

// The first row and column of a warp's part of the tile.
DEVICE i32 warp_row() { return warp_index() / COLUMN_WARPS * WARP_ROWS; }
DEVICE i32 warp_column() { return warp_index() % COLUMN_WARPS * WARP_COLUMNS; }

// The operands of one step of a warp, and its sums.
struct Operands { u32 left[ROW_PARTS][4], right[COLUMN_PARTS][2]; };
typedef f32 Sums[ROW_PARTS][COLUMN_PARTS][4];

DEVICE void load_step(Operands &to, u32 stage, i32 step)
{
    const i32 k = step * (32 / sizeof(Element));
    #pragma unroll
    for (i32 i = 0; i < ROW_PARTS; i++)
        load_left(to.left[i], stage, k, warp_row() + i * 16);
    #pragma unroll
    for (i32 j = 0; j < COLUMN_PARTS; j += 2) {
        u32 pair[4];
        load_right(pair, stage + LEFT, k, warp_column() + j * 8);
        #pragma unroll
        for (i32 n = 0; n < 4; n++)
            to.right[j + n / 2][n % 2] = pair[n];
    }
}

// Adds the products of a step, of so many parts of 16 rows: those beyond are padding.
DEVICE void multiply(Sums &sums, const Operands &by, i32 parts)
{
    #pragma unroll
    for (i32 j = 0; j < COLUMN_PARTS; j++)
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

// Stores two adjacent sums where the matrix has them, or adds them to what is there.
DEVICE void store_pair(f32 *grad, i32 row, i32 column, f32 first, f32 second, bool accumulate)
{
    if (row >= HEIGHT || column >= WIDTH)
        return;
    f32 *const to = grad + (i64)row * WIDTH + column;
    if constexpr (WIDTH % 2 == 0) {
        Pack<f32, 2> pair = {first, second};
        if (accumulate) {
            const Pack<f32, 2> old = load<2>(to);
            pair = {old.at[0] + first, old.at[1] + second};
        }
        store(to, pair);
    } else {
        to[0] = accumulate ? to[0] + first : first;
        if (column + 1 < WIDTH)
            to[1] = accumulate ? to[1] + second : second;
    }
}

KERNEL(THREADS) grouped_gemm_wgrad_up(
    const bf16 *__restrict__ dgate,    // [rows, 2880]
    const bf16 *__restrict__ dup,      // [rows, 2880]
    const bf16 *__restrict__ x,        // [tokens, 2880]
    const i64 *__restrict__ offsets,   // [33]
    const i32 *__restrict__ row_slots, // [rows]
    f32 *__restrict__ grad_gate,       // [32, 2880, 2880]
    f32 *__restrict__ grad_up,         // [32, 2880, 2880]
    i64 accumulate,
    i64 tokens)
{
    await_launches();
    alignas(LINE) extern __shared__ Element ring[];

    const i64 expert = block_x() / ROW_TILES;
    (void)tokens;
    const i64 first = offsets[expert];
    const i32 count = (i32)(offsets[expert + 1] - first);
    const i32 slices = ceil_div(count, TILE_DEPTH);
    const i32 first_row = (i32)(block_x() % ROW_TILES) * TILE_ROWS, first_column = (i32)block_y() * TILE_COLUMNS;

    // Where the rows of a slice begin that this thread copies in its turns.
    typedef Panels<HEIGHT> Left;
    typedef Panels<WIDTH> Right;
    auto dgate_row = [&](i32 at, i32 i) { return dgate + (first + at * TILE_DEPTH + Left::line(i)) * HEIGHT + first_row; };
    auto dup_row = [&](i32 at, i32 i) { return dup + (first + at * TILE_DEPTH + Left::line(i)) * HEIGHT + first_row; };
    i32 token[Right::TURNS];
    auto look_up = [&](i32 at) {
        #pragma unroll
        for (i32 i = 0; i < Right::TURNS; i++) {
            const i32 row = at * TILE_DEPTH + Right::line(i);
            token[i] = row < count ? row_slots[first + row] / TOP_K : 0;
        }
    };
    auto x_row = [&](i32, i32 i) { return x + (i64)token[i] * WIDTH + first_column; };

    const u32 stages = shared_address(ring);
    auto fetch = [&](i32 at) {
        if (at < slices) {
            const u32 stage = stages + at % STAGES * STAGE;
            const i32 left = count - at * TILE_DEPTH;
            Left::copy<TILE_ROWS>(stage, left, HEIGHT - first_row, [&](i32 i) { return dgate_row(at, i); });
            Left::copy<TILE_ROWS>(stage + LEFT / 2, left, HEIGHT - first_row, [&](i32 i) { return dup_row(at, i); });
            Right::copy<TILE_COLUMNS>(stage + LEFT, left, WIDTH - first_column, [&](i32 i) { return x_row(at, i); });
        }
        commit_copies();
        look_up(at + 1);
    };

    Sums sums = {};
    look_up(0);
    #pragma unroll
    for (i32 at = 0; at < STAGES - 1; at++)
        fetch(at);
    #pragma unroll 1
    for (i32 at = 0; at < slices; at++) {
        wait_copies<STAGES - 2>();
        block_sync();  // this stage is here, and all have read the one before it
        fetch(at + STAGES - 1);
        if (warp_row() % TILE_ROWS < HEIGHT - first_row && warp_column() < WIDTH - first_column)
            multiply_stage(sums, stages + at % STAGES * STAGE, ROW_PARTS);
    }
    wait_copies<0>();

    const i32 row = first_row + warp_row() % TILE_ROWS + lane_index() / 4;
    const i32 column = first_column + warp_column() + lane_index() % 4 * 2;
    f32 *const grad = (warp_row() < TILE_ROWS ? grad_gate : grad_up) + expert * HEIGHT * WIDTH;
    #pragma unroll
    for (i32 i = 0; i < ROW_PARTS; i++)
        #pragma unroll
        for (i32 j = 0; j < COLUMN_PARTS; j++)
            #pragma unroll
            for (i32 half = 0; half < 2; half++)
                store_pair(grad, row + 16 * i + 8 * half, column + 8 * j, sums[i][j][2 * half], sums[i][j][2 * half + 1], accumulate != 0);
}

// ---- the bias ----

// The sum of a column over `count` lines from `first` on.
template <class Weight> DEVICE f32 column_sum(const bf16 *matrix, i64 first, i64 count, i32 column, Weight weight)
{
    f32 sum = 0.0f;
    #pragma unroll 8
    for (i64 row = first; row < first + count; row++)
        sum = fused(weight(row), to_f32(matrix[row * 2880 + column]), sum);
    return sum;
}

KERNEL(128) grouped_gemm_wgrad_up_bias(
    const bf16 *__restrict__ dgate,   // [rows, 2880]
    const bf16 *__restrict__ dup,     // [rows, 2880]
    const i64 *__restrict__ offsets,  // [33]
    f32 *__restrict__ grad_gate_bias, // [32, 2880]
    f32 *__restrict__ grad_up_bias,   // [32, 2880]
    i64 accumulate,
    i64 tokens)
{
    await_launches();
    constexpr int COLUMNS = 2880;
    const i32 column = (i32)block_y() * 128 + thread_index();
    if (column >= COLUMNS)
        return;
    (void)tokens;
    const i64 expert = block_x(), first = offsets[expert], count = offsets[expert + 1] - first;
    auto weight = [](i64) { return 1.0f; };
    auto put = [&](f32 *bias, f32 sum) {
        f32 *to = bias + expert * COLUMNS + column;
        *to = accumulate != 0 ? *to + sum : sum;
    };
    put(grad_gate_bias, column_sum(dgate, first, count, column, weight));
    put(grad_up_bias, column_sum(dup, first, count, column, weight));
}
