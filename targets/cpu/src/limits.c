/* What this machine can do at best: one entry per limit. A block is one
   thread's share; every entry follows the ABI of a CPU kernel. */

typedef __INT64_TYPE__ i64;
typedef __UINT64_TYPE__ u64;

#if defined(__AVX512F__)
#define BYTES 64
#define CHAINS 24 /* enough to hide the latency of two units, and no spills */
#elif defined(__AVX__)
#define BYTES 32
#define CHAINS 12
#elif defined(__aarch64__)
#define BYTES 16
#define CHAINS 24
#else
#define BYTES 16
#define CHAINS 12
#endif

typedef float vec __attribute__((vector_size(BYTES)));
typedef u64 words __attribute__((vector_size(BYTES)));

#define ARG(type, i) (*(type *)args[i])

/* out[block] gets a value that depends on every chain, so that none is
   dropped. */
static void keep(float *out, i64 block, const vec *chain) {
  vec sum = chain[0];
  for (int c = 1; c < CHAINS; ++c) sum += chain[c];
  out[block] = sum[0];
}

/* (out f32 [blocks], rounds i64): CHAINS * BYTES / 4 multiply-adds a round. */
void limit_f32(void *const *args, i64 first, i64 last, i64 grid_x) {
  float *out = ARG(float *, 0);
  i64 rounds = ARG(i64, 1);
  (void)grid_x;
  for (i64 b = first; b < last; ++b) {
    vec chain[CHAINS], scale, shift;
    for (int c = 0; c < CHAINS; ++c) chain[c] = (vec){0} + (float)c;
    scale = (vec){0} + 0.5f;
    shift = (vec){0} + (float)b;
    for (i64 r = 0; r < rounds; ++r) {
#pragma GCC unroll 32
      for (int c = 0; c < CHAINS; ++c) chain[c] = chain[c] * scale + shift;
    }
    keep(out, b, chain);
  }
}

/* Numbers as weights are, of both signs: AMX tiles of zeros need less power and
   run faster than any product of matrices can. */
static float number(unsigned i) {
  unsigned bits = i * 2654435761u;
  return ((float)(bits >> 8) / (1 << 24) - 0.5f) * (bits & 128 ? 1.5f : 0.25f);
}

/* 16 rows of 32 numbers. */
typedef union {
  unsigned pairs[256];
  words vector;
} pairs_t;

/* A bf16 is the upper half of a float. */
static pairs_t bf16_pairs(void) {
  pairs_t all;
  for (int i = 0; i < 256; ++i) {
    union {
      float value;
      unsigned bits;
    } low = {number(2 * i)}, high = {number(2 * i + 1)};
    all.pairs[i] = low.bits >> 16 | (high.bits & 0xffff0000u);
  }
  return all;
}

/* Chains by name: gcc stores every element of an array in every round of a loop
   that holds asm, and some machines multiply faster than they store. */
#define EACH(X) \
  X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) \
  X(12) X(13) X(14) X(15) X(16) X(17) X(18) X(19) X(20) X(21) X(22) X(23)
#define CHAIN(c) vec chain##c = (vec){0} + (float)c;
#define KEEP(c) chain[c] = chain##c;
#if defined(__aarch64__)
#define DOT(c) __asm__("bfmmla %0.4s, %1.8h, %1.8h" : "+w"(chain##c) : "w"(pair));
#else
#define DOT(c) __asm__("vdpbf16ps %1, %1, %0" : "+v"(chain##c) : "v"(pair));
#endif

#if defined(__AMX_BF16__)
typedef struct {
  unsigned char palette, start, reserved[14];
  unsigned short row_bytes[16];
  unsigned char rows[16];
} tiles_t;

#define LOAD(c, from) \
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #c ::"r"(&from), "r"(64l) : "memory")
#define TILE(c) __asm__ volatile("tdpbf16ps %%tmm5, %%tmm4, %%tmm" #c ::)
#endif

/* (out f32 [blocks], rounds i64): CHAINS * BYTES / 2 multiply-adds a round, on
   aarch64 twice as many, with tiles 4 products of 16 x 32 by 32 x 16. */
void limit_bf16(void *const *args, i64 first, i64 last, i64 grid_x) {
  float *out = ARG(float *, 0);
  i64 rounds = ARG(i64, 1);
  (void)grid_x;
  for (i64 b = first; b < last; ++b) {
    vec chain[CHAINS] = {{0}};
#if defined(__AMX_BF16__)
    tiles_t tiles = {1, 0, {0}, {64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16}};
    pairs_t pairs = bf16_pairs();
    __asm__ volatile("ldtilecfg %0" ::"m"(tiles)); /* zeros the sums, too */
    LOAD(4, pairs);
    LOAD(5, pairs);
    for (i64 r = 0; r < rounds; ++r) {
      TILE(0); TILE(1); TILE(2); TILE(3);
    }
    __asm__ volatile("tilerelease" ::);
#elif defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    words pair = bf16_pairs().vector;
    EACH(CHAIN)
    for (i64 r = 0; r < rounds; ++r) {
      EACH(DOT)
    }
    EACH(KEEP)
#else
    (void)rounds;
#endif
    keep(out, b, chain);
  }
}

/* (out f32 [blocks], from, bytes i64 per block) */
void limit_read(void *const *args, i64 first, i64 last, i64 grid_x) {
  u64 *out = ARG(u64 *, 0);
  i64 count = ARG(i64, 2) / BYTES;
  (void)grid_x;
  for (i64 b = first; b < last; ++b) {
    const words *from = ARG(const words *, 1) + b * count;
    words any[4] = {{0}, {0}, {0}, {0}};
    for (i64 i = 0; i + 4 <= count; i += 4)
      for (int c = 0; c < 4; ++c) any[c] |= from[i + c];
    any[0] |= any[1] | any[2] | any[3];
    out[b] = any[0][0];
  }
}

/* (out f32 [blocks], from, bytes i64 per block, rounds): the same bytes each
   round, which a cache holds after the first. */
void limit_reread(void *const *args, i64 first, i64 last, i64 grid_x) {
  u64 *out = ARG(u64 *, 0);
  i64 count = ARG(i64, 2) / BYTES;
  i64 rounds = ARG(i64, 3);
  (void)grid_x;
  for (i64 b = first; b < last; ++b) {
    const words *from = ARG(const words *, 1) + b * count;
    words any[4] = {{0}, {0}, {0}, {0}};
    for (i64 r = 0; r < rounds; ++r) {
      for (i64 i = 0; i + 4 <= count; i += 4)
        for (int c = 0; c < 4; ++c) any[c] |= from[i + c];
      __asm__ volatile("" ::: "memory"); /* else one round would do */
    }
    any[0] |= any[1] | any[2] | any[3];
    out[b] = any[0][0];
  }
}

/* (to, from, bytes i64 per block) */
void limit_copy(void *const *args, i64 first, i64 last, i64 grid_x) {
  i64 count = ARG(i64, 2) / BYTES;
  (void)grid_x;
  for (i64 b = first; b < last; ++b) {
    words *restrict to = ARG(words *, 0) + b * count;
    const words *restrict from = ARG(const words *, 1) + b * count;
    for (i64 i = 0; i < count; ++i) to[i] = from[i];
  }
}
