// Rows of several ranks become one, in the order of ranks: a thread per element. The same
// text for CUDA and HIP, behind a few lines for each. Halves are converted with integers,
// so that both round alike.
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef long long i64;

struct bf16 { u16 bits; };
struct f16 { u16 bits; };

DEVICE float wide(float value) { return value; }
DEVICE i32 wide(i32 value) { return value; }
DEVICE i64 wide(i64 value) { return value; }
DEVICE float wide(bf16 value) { return FLOAT_OF((u32)value.bits << 16); }

DEVICE float wide(f16 value)
{
    u32 sign = (u32)(value.bits & 0x8000) << 16, most = value.bits >> 10 & 31, rest = value.bits & 1023;
    if (most == 31) return FLOAT_OF(sign | 0x7f800000 | rest << 13);
    if (most) return FLOAT_OF(sign | (most + 112) << 23 | rest << 13);
    // Multiples of 2^-24.
    return FLOAT_OF(BITS_OF((float)(i32)rest * 5.9604644775390625e-8f) | sign);
}

DEVICE void narrow(float value, float *to) { *to = value; }
DEVICE void narrow(i32 value, i32 *to) { *to = value; }
DEVICE void narrow(i64 value, i64 *to) { *to = value; }

DEVICE void narrow(float value, bf16 *to)
{
    u32 bits = BITS_OF(value), up = bits + 0x7fff + (bits >> 16 & 1);
    to->bits = (u16)((bits & 0x7fffffff) > 0x7f800000 ? bits >> 16 | 0x40 : up >> 16);
}

DEVICE void narrow(float value, f16 *to)
{
    u32 bits = BITS_OF(value), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff, half;
    if (size > 0x7f800000) half = 0x7e00 | (size >> 13 & 0x3ff);
    else if (size >= 0x47800000) half = 0x7c00;
    // Below 2^-14 a step is 2^-24, as it is around a half.
    else if (size < 0x38800000) half = BITS_OF(FLOAT_OF(size) + 0.5f) - 0x3f000000;
    else half = (size + 0xfff + (size >> 13 & 1) >> 13) - (112 << 10);
    to->bits = (u16)(sign | half);
}

DEVICE float sum(float a, float b) { return a + b; }
DEVICE i32 sum(i32 a, i32 b) { return (i32)((u32)a + (u32)b); }
DEVICE i64 sum(i64 a, i64 b) { return (i64)((u64)a + (u64)b); }

template <class T> DEVICE void fold(const T *rows, T *to, i64 count, i64 ranks, i64 how)
{
    i64 i = INDEX;
    if (i >= count) return;
    auto value = wide(rows[i]);
    for (i64 rank = 1; rank < ranks; rank++) {
        auto other = wide(rows[rank * count + i]);
        if (how == 1) value = sum(value, other);
        else if ((how == 2 ? value < other : value > other) || (other != other && value == value)) value = other;
    }
    narrow(value, to + i);
}

KERNEL fold_f32(const float *rows, float *to, i64 count, i64 ranks, i64 how) { fold(rows, to, count, ranks, how); }
KERNEL fold_bf16(const bf16 *rows, bf16 *to, i64 count, i64 ranks, i64 how) { fold(rows, to, count, ranks, how); }
KERNEL fold_f16(const f16 *rows, f16 *to, i64 count, i64 ranks, i64 how) { fold(rows, to, count, ranks, how); }
KERNEL fold_i32(const i32 *rows, i32 *to, i64 count, i64 ranks, i64 how) { fold(rows, to, count, ranks, how); }
KERNEL fold_i64(const i64 *rows, i64 *to, i64 count, i64 ranks, i64 how) { fold(rows, to, count, ranks, how); }
