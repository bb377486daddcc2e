//! Arithmetic in the machine against that of the host, on random and awkward
//! values.

mod common;

use common::Run;

/// Values at the edges of every type, and random ones.
fn values(count: usize, mut seed: u64) -> Vec<u32> {
    let edges = [
        0,
        1,
        2,
        31,
        32,
        33,
        0x7f,
        0x80,
        0xff,
        0x7fff,
        0x8000,
        0xffff,
        0x7fff_ffff,
        0x8000_0000,
        0xffff_ffff,
        0x3f80_0000,
        0xbf80_0000,
        0x7f80_0000,
        0xff80_0000,
        0x7fc0_0000,
        0xffc0_0001,
        0x0000_0001,
        0x8000_0001,
        0x007f_ffff,
        0x0080_0000,
        0x7f7f_ffff,
        0x4f00_0000,
        0xcf00_0000,
        0x4f80_0000,
        0x3f00_0000,
        0x4020_0000,
        0x3c00_4200,
        0x7c01_fbff,
    ];
    let mut next = || {
        seed = seed
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (seed >> 32) as u32
    };
    (0..count)
        .map(|_| match next() % 3 {
            0 => edges[next() as usize % edges.len()],
            // Floats of ordinary size.
            1 => (next() & 0x807f_ffff) | (120 + next() % 16) << 23,
            _ => next(),
        })
        .collect()
}

const THREADS: usize = 256;

/// Runs `op` on 256 triples in `%r11-13` and, as pairs, `%rd11-13`; the result
/// is `%rd20`.
fn run(op: &str, inputs: &[[u32; 6]]) -> Vec<u64> {
    let mut input: Vec<u32> = inputs.iter().flatten().copied().collect();
    input.resize(8 * THREADS, 0);
    let body = format!(
        "mul.lo.u32 %r2, %r1, 24;\ncvt.u64.u32 %rd2, %r2;\nadd.u64 %rd3, %rd1, %rd2;\n\
         ld.global.u32 %r11, [%rd3];\nld.global.u32 %r14, [%rd3+4];\n\
         ld.global.u32 %r12, [%rd3+8];\nld.global.u32 %r15, [%rd3+12];\n\
         ld.global.u32 %r13, [%rd3+16];\nld.global.u32 %r16, [%rd3+20];\n\
         mov.b64 %rd11, {{%r11, %r14}};\nmov.b64 %rd12, {{%r12, %r15}};\nmov.b64 %rd13, {{%r13, %r16}};\n\
         mov.b32 %f11, %r11;\nmov.b32 %f12, %r12;\nmov.b32 %f13, %r13;\n\
         mov.b64 %fd11, %rd11;\nmov.b64 %fd12, %rd12;\nmov.b64 %fd13, %rd13;\n\
         cvt.u16.u32 %h11, %r11;\ncvt.u16.u32 %h12, %r12;\ncvt.u16.u32 %h13, %r13;\n\
         mov.u64 %rd20, 0;\n{op}\n\
         mul.wide.u32 %rd5, %r1, 8;\nadd.u64 %rd6, %rd1, %rd5;\nst.global.u64 [%rd6+8192], %rd20;"
    );
    let run = Run {
        threads: THREADS as u32,
        input,
        words: 4096,
        ..Run::default()
    };
    let left = run
        .run(&body)
        .unwrap_or_else(|finding| panic!("{finding}\n{op}"));
    let words = &left.words[2048..][..2 * THREADS];
    words
        .chunks(2)
        .map(|pair| u64::from(pair[0]) | u64::from(pair[1]) << 32)
        .collect()
}

fn inputs(seed: u64) -> Vec<[u32; 6]> {
    let list = values(6 * THREADS, seed);
    list.chunks(6)
        .map(|part| part.try_into().unwrap())
        .collect()
}

/// Checks a 32-bit operation of up to three operands: `op` writes `%r20`.
fn check(op: &str, want: impl Fn(u32, u32, u32) -> u32) {
    let inputs = inputs(op.len() as u64 + 99);
    let got = run(&format!("{op}\ncvt.u64.u32 %rd20, %r20;"), &inputs);
    for (input, got) in inputs.iter().zip(got) {
        let [a, _, b, _, c, _] = *input;
        let want = want(a, b, c);
        assert_eq!(
            got as u32, want,
            "{op} of {a:#x}, {b:#x}, {c:#x}: {:#x}, not {want:#x}",
            got as u32
        );
    }
}

/// Checks a 64-bit operation: `op` writes `%rd20`.
fn check64(op: &str, want: impl Fn(u64, u64, u64) -> u64) {
    let inputs = inputs(op.len() as u64 + 7);
    let got = run(op, &inputs);
    for (input, got) in inputs.iter().zip(got) {
        let wide = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
        let [a, b, c] = [0, 2, 4].map(|at| wide(input[at], input[at + 1]));
        let want = want(a, b, c);
        assert_eq!(
            got, want,
            "{op} of {a:#x}, {b:#x}, {c:#x}: {got:#x}, not {want:#x}"
        );
    }
}

fn s(v: u32) -> i32 {
    v.cast_signed()
}

#[test]
fn integers() {
    check("add.s32 %r20, %r11, %r12;", |a, b, _| a.wrapping_add(b));
    check("sub.s32 %r20, %r11, %r12;", |a, b, _| a.wrapping_sub(b));
    check("mul.lo.s32 %r20, %r11, %r12;", |a, b, _| a.wrapping_mul(b));
    check("mul.hi.s32 %r20, %r11, %r12;", |a, b, _| {
        ((i64::from(s(a)) * i64::from(s(b))) >> 32) as u32
    });
    check("mul.hi.u32 %r20, %r11, %r12;", |a, b, _| {
        ((u64::from(a) * u64::from(b)) >> 32) as u32
    });
    check("mad.lo.s32 %r20, %r11, %r12, %r13;", |a, b, c| {
        a.wrapping_mul(b).wrapping_add(c)
    });
    check("add.sat.s32 %r20, %r11, %r12;", |a, b, _| {
        s(a).saturating_add(s(b)).cast_unsigned()
    });
    check("min.s32 %r20, %r11, %r12;", |a, b, _| {
        s(a).min(s(b)).cast_unsigned()
    });
    check("max.u32 %r20, %r11, %r12;", |a, b, _| a.max(b));
    check("abs.s32 %r20, %r11;", |a, _, _| {
        s(a).wrapping_abs().cast_unsigned()
    });
    check("neg.s32 %r20, %r11;", |a, _, _| a.wrapping_neg());
    check(
        "or.b32 %r12, %r12, 1;\ndiv.s32 %r20, %r11, %r12;",
        |a, b, _| s(a).wrapping_div(s(b | 1)).cast_unsigned(),
    );
    check(
        "or.b32 %r12, %r12, 1;\nrem.s32 %r20, %r11, %r12;",
        |a, b, _| s(a).wrapping_rem(s(b | 1)).cast_unsigned(),
    );
    check(
        "or.b32 %r12, %r12, 1;\ndiv.u32 %r20, %r11, %r12;",
        |a, b, _| a / (b | 1),
    );
    check("mul24.lo.u32 %r20, %r11, %r12;", |a, b, _| {
        (a & 0xff_ffff).wrapping_mul(b & 0xff_ffff)
    });
    check("sad.s32 %r20, %r11, %r12, %r13;", |a, b, c| {
        c.wrapping_add(s(a).abs_diff(s(b)))
    });
    check("dp4a.s32.s32 %r20, %r11, %r12, %r13;", |a, b, c| {
        let pairs = a.to_le_bytes().into_iter().zip(b.to_le_bytes());
        let sum: i32 = pairs
            .map(|(a, b)| i32::from(a as i8) * i32::from(b as i8))
            .sum();
        c.wrapping_add(sum.cast_unsigned())
    });
    check("mul.wide.u16 %r20, %h11, %h12;", |a, b, _| {
        (a & 0xffff) * (b & 0xffff)
    });
    check(
        "add.s16 %h1, %h11, %h12;\ncvt.u32.u16 %r20, %h1;",
        |a, b, _| a.wrapping_add(b) & 0xffff,
    );
    check(
        "min.s16 %h1, %h11, %h12;\ncvt.s32.s16 %r20, %h1;",
        |a, b, _| i32::from((a as i16).min(b as i16)).cast_unsigned(),
    );
    check(
        "shr.s16 %h1, %h11, 3;\ncvt.u32.u16 %r20, %h1;",
        |a, _, _| u32::from(((a as i16) >> 3) as u16),
    );
}

#[test]
fn shifts_and_fields() {
    check("and.b32 %r20, %r11, %r12;", |a, b, _| a & b);
    check("lop3.b32 %r20, %r11, %r12, %r13, 0xca;", |a, b, c| {
        (a & b) | (!a & c)
    });
    check("lop3.b32 %r20, %r11, %r12, %r13, 0x96;", |a, b, c| {
        a ^ b ^ c
    });
    check("shl.b32 %r20, %r11, %r12;", |a, b, _| {
        a.checked_shl(b).unwrap_or(0)
    });
    check("shr.u32 %r20, %r11, %r12;", |a, b, _| {
        a.checked_shr(b).unwrap_or(0)
    });
    check("shr.s32 %r20, %r11, %r12;", |a, b, _| {
        (s(a) >> b.min(31)).cast_unsigned()
    });
    let pair = |a: u32, b: u32| u64::from(b) << 32 | u64::from(a);
    check("shf.l.wrap.b32 %r20, %r11, %r12, %r13;", move |a, b, c| {
        ((pair(a, b) << (c & 31)) >> 32) as u32
    });
    check("shf.r.wrap.b32 %r20, %r11, %r12, %r13;", move |a, b, c| {
        (pair(a, b) >> (c & 31)) as u32
    });
    check("shf.r.clamp.b32 %r20, %r11, %r12, %r13;", move |a, b, c| {
        (pair(a, b) >> c.min(32)) as u32
    });
    check("popc.b32 %r20, %r11;", |a, _, _| a.count_ones());
    check("clz.b32 %r20, %r11;", |a, _, _| a.leading_zeros());
    check("brev.b32 %r20, %r11;", |a, _, _| a.reverse_bits());
    check("bfind.u32 %r20, %r11;", |a, _, _| {
        31u32.wrapping_sub(a.leading_zeros())
    });
    check("bfe.u32 %r20, %r11, 4, 9;", |a, _, _| a >> 4 & 0x1ff);
    check("bfe.s32 %r20, %r11, 4, 9;", |a, _, _| {
        ((a << 19).cast_signed() >> 23).cast_unsigned()
    });
    check("bfe.s32 %r20, %r11, 28, 9;", |a, _, _| {
        (s(a) >> 28).cast_unsigned()
    });
    check("bfi.b32 %r20, %r11, %r12, 7, 11;", |a, b, _| {
        (b & !(0x7ff << 7)) | (a & 0x7ff) << 7
    });
    check("prmt.b32 %r20, %r11, %r12, 0x5410;", |a, b, _| {
        (a & 0xffff) | b << 16
    });
    check("prmt.b32 %r20, %r11, %r12, 0xba98;", |a, _, _| {
        let sign = |byte: u8| if byte & 0x80 != 0 { 0xff } else { 0 };
        u32::from_le_bytes(a.to_le_bytes().map(sign))
    });
    check(
        "setp.lt.s32 %p1, %r11, %r12;\nselp.b32 %r20, %r13, 7, %p1;",
        |a, b, c| if s(a) < s(b) { c } else { 7 },
    );
    check("slct.b32.s32 %r20, %r11, %r12, %r13;", |a, b, c| {
        if s(c) >= 0 { a } else { b }
    });
    check(
        "add.cc.u32 %r21, %r11, %r12;\naddc.u32 %r20, %r13, 0;",
        |a, b, c| c.wrapping_add(u32::from(a.checked_add(b).is_none())),
    );
    check(
        "mov.b32 {%h1, %h2}, %r11;\nmov.b32 %r20, {%h2, %h1};",
        |a, _, _| a.rotate_left(16),
    );
}

#[test]
fn long_integers() {
    check64("add.s64 %rd20, %rd11, %rd12;", |a, b, _| a.wrapping_add(b));
    check64("mul.lo.s64 %rd20, %rd11, %rd12;", |a, b, _| {
        a.wrapping_mul(b)
    });
    check64("mad.lo.s64 %rd20, %rd11, %rd12, %rd13;", |a, b, c| {
        a.wrapping_mul(b).wrapping_add(c)
    });
    check64("mul.hi.u64 %rd20, %rd11, %rd12;", |a, b, _| {
        ((u128::from(a) * u128::from(b)) >> 64) as u64
    });
    check64("mul.wide.s32 %rd20, %r11, %r12;", |a, b, _| {
        (i64::from(a as i32) * i64::from(b as i32)).cast_unsigned()
    });
    check64("mad.wide.u32 %rd20, %r11, %r12, %rd13;", |a, b, c| {
        u64::from(a as u32)
            .wrapping_mul(u64::from(b as u32))
            .wrapping_add(c)
    });
    check64("min.s64 %rd20, %rd11, %rd12;", |a, b, _| {
        a.cast_signed().min(b.cast_signed()).cast_unsigned()
    });
    check64("shl.b64 %rd20, %rd11, %r12;", |a, b, _| {
        a.checked_shl(b as u32).unwrap_or(0)
    });
    check64("shr.s64 %rd20, %rd11, %r12;", |a, b, _| {
        (a.cast_signed() >> (b as u32).min(63)).cast_unsigned()
    });
    check64(
        "or.b64 %rd12, %rd12, 1;\nrem.s64 %rd20, %rd11, %rd12;",
        |a, b, _| {
            a.cast_signed()
                .wrapping_rem((b | 1).cast_signed())
                .cast_unsigned()
        },
    );
    check64(
        "or.b64 %rd12, %rd12, 1;\ndiv.u64 %rd20, %rd11, %rd12;",
        |a, b, _| a / (b | 1),
    );
    check64(
        "popc.b64 %r20, %rd11;\ncvt.u64.u32 %rd20, %r20;",
        |a, _, _| u64::from(a.count_ones()),
    );
    check64("bfi.b64 %rd20, %rd11, %rd12, 30, 20;", |a, b, _| {
        (b & !(0xf_ffff << 30)) | (a & 0xf_ffff) << 30
    });
    check64(
        "setp.gt.u64 %p1, %rd11, %rd12;\nselp.b64 %rd20, %rd13, %rd11, %p1;",
        |a, b, c| if a > b { c } else { a },
    );
    check64("not.b64 %rd20, %rd11;", |a, _, _| !a);
}

fn f(v: u32) -> f32 {
    f32::from_bits(v)
}

/// The bits of a result, with the NaN of the hardware.
fn bits(v: f32) -> u32 {
    if v.is_nan() { 0x7fff_ffff } else { v.to_bits() }
}

fn float(op: &str, want: impl Fn(f32, f32, f32) -> f32) {
    check(&format!("{op}\nmov.b32 %r20, %f20;"), |a, b, c| {
        bits(want(f(a), f(b), f(c)))
    });
}

#[test]
fn floats() {
    float("add.f32 %f20, %f11, %f12;", |a, b, _| a + b);
    float("sub.rn.f32 %f20, %f11, %f12;", |a, b, _| a - b);
    float("mul.f32 %f20, %f11, %f12;", |a, b, _| a * b);
    float("fma.rn.f32 %f20, %f11, %f12, %f13;", f32::mul_add);
    float("div.rn.f32 %f20, %f11, %f12;", |a, b, _| a / b);
    float("rcp.rn.f32 %f20, %f11;", |a, _, _| 1.0 / a);
    float("sqrt.rn.f32 %f20, %f11;", |a, _, _| a.sqrt());
    float("min.f32 %f20, %f11, %f12;", |a, b, _| {
        match (a.is_nan(), b.is_nan()) {
            (false, false) if a == b => f(a.to_bits() | b.to_bits()),
            (false, false) => {
                if a < b {
                    a
                } else {
                    b
                }
            }
            (true, _) => b,
            _ => a,
        }
    });
    float("max.NaN.f32 %f20, %f11, %f12;", |a, b, _| {
        match a.is_nan() || b.is_nan() {
            true => f32::NAN,
            false if a == b => f(a.to_bits() & b.to_bits()),
            false => {
                if a > b {
                    a
                } else {
                    b
                }
            }
        }
    });
    let flush = |v: f32| {
        if v.is_subnormal() {
            0f32.copysign(v)
        } else {
            v
        }
    };
    float("mul.ftz.f32 %f20, %f11, %f12;", move |a, b, _| {
        flush(flush(a) * flush(b))
    });
    check(
        "add.sat.f32 %f20, %f11, %f12;\nmov.b32 %r20, %f20;",
        |a, b, _| {
            let sum = f(a) + f(b);
            if sum.is_nan() || sum <= 0.0 {
                0
            } else {
                sum.min(1.0).to_bits()
            }
        },
    );
    check("neg.f32 %f20, %f11;\nmov.b32 %r20, %f20;", |a, _, _| {
        a ^ 0x8000_0000
    });
    check(
        "copysign.f32 %f20, %f11, %f12;\nmov.b32 %r20, %f20;",
        |a, b, _| (b & 0x7fff_ffff) | (a & 0x8000_0000),
    );
    check(
        "testp.subnormal.f32 %p1, %f11;\nselp.b32 %r20, 1, 0, %p1;",
        |a, _, _| u32::from(f(a).is_subnormal()),
    );
    check(
        "setp.geu.f32 %p1, %f11, %f12;\nselp.b32 %r20, 1, 0, %p1;",
        |a, b, _| u32::from(f(a).partial_cmp(&f(b)).is_none_or(|o| o.is_ge())),
    );
    check(
        "setp.ne.f32 %p1, %f11, %f12;\nselp.b32 %r20, 1, 0, %p1;",
        |a, b, _| u32::from(f(a).partial_cmp(&f(b)).is_some_and(|o| o.is_ne())),
    );
    check(
        "setp.eq.s32 %p2, %r13, 0;\nsetp.lt.and.f32 %p1|%p3, %f11, %f12, !%p2;\nselp.b32 %r20, 1, 0, %p1;\n@%p3 add.u32 %r20, %r20, 2;",
        |a, b, c| {
            let (less, with) = (f(a) < f(b), c != 0);
            u32::from(less && with) + 2 * u32::from(!less && with)
        },
    );
}

#[test]
fn approximations_are_within_their_bounds() {
    let near = |op: &str, want: fn(f64) -> f64, relative: f64, absolute: f64| {
        let inputs = inputs(5);
        let got = run(
            &format!("{op}\nmov.b32 %r20, %f20;\ncvt.u64.u32 %rd20, %r20;"),
            &inputs,
        );
        for (input, got) in inputs.iter().zip(got) {
            let (x, got) = (f(input[0]), f(got as u32));
            let want = want(f64::from(x));
            let fits = (want.is_nan() && got.is_nan())
                || f64::from(got) == want
                || (f64::from(got) - want).abs() <= relative * want.abs() + absolute
                || (want.abs() > f64::from(f32::MAX) && got.is_infinite());
            assert!(fits, "{op} of {x:e}: {got:e}, not {want:e}");
        }
    };
    near("ex2.approx.f32 %f20, %f11;", f64::exp2, 2.4e-7, 1e-44);
    near("lg2.approx.f32 %f20, %f11;", f64::log2, 2.4e-7, 1e-7);
    near("tanh.approx.f32 %f20, %f11;", f64::tanh, 5e-4, 1e-44);
    near(
        "rsqrt.approx.f32 %f20, %f11;",
        |v| 1.0 / v.sqrt(),
        2e-7,
        0.0,
    );
    near("rcp.approx.f32 %f20, %f11;", |v| 1.0 / v, 1.2e-7, 1e-44);
    near("sqrt.approx.f32 %f20, %f11;", f64::sqrt, 1.2e-7, 0.0);
}

#[test]
fn doubles() {
    let d = f64::from_bits;
    let own = |v: f64| {
        if v.is_nan() {
            0xfff8_0000_0000_0000
        } else {
            v.to_bits()
        }
    };
    let op = |text: &str| format!("{text}\nmov.b64 %rd20, %fd10;");
    check64(&op("add.f64 %fd10, %fd11, %fd12;"), move |a, b, _| {
        own(d(a) + d(b))
    });
    check64(&op("mul.rn.f64 %fd10, %fd11, %fd12;"), move |a, b, _| {
        own(d(a) * d(b))
    });
    check64(
        &op("fma.rn.f64 %fd10, %fd11, %fd12, %fd13;"),
        move |a, b, c| own(d(a).mul_add(d(b), d(c))),
    );
    check64(&op("div.rn.f64 %fd10, %fd11, %fd12;"), move |a, b, _| {
        own(d(a) / d(b))
    });
    check64("cvt.rzi.s64.f64 %rd20, %fd11;", move |a, _, _| {
        if d(a).is_nan() {
            1 << 63
        } else {
            (d(a) as i64).cast_unsigned()
        }
    });
    check64(&op("cvt.rn.f64.s64 %fd10, %rd11;"), |a, _, _| {
        (a.cast_signed() as f64).to_bits()
    });
    check64(&op("cvt.f64.f32 %fd10, %f11;"), |a, _, _| {
        f64::from(f(a as u32)).to_bits()
    });
}

#[test]
fn conversions() {
    check("cvt.rzi.s32.f32 %r20, %f11;", |a, _, _| {
        (f(a) as i32).cast_unsigned()
    });
    check("cvt.rni.s32.f32 %r20, %f11;", |a, _, _| {
        (f64::from(f(a)).round_ties_even() as i32).cast_unsigned()
    });
    check("cvt.rmi.u32.f32 %r20, %f11;", |a, _, _| f(a).floor() as u32);
    check(
        "cvt.rn.f32.s32 %f20, %r11;\nmov.b32 %r20, %f20;",
        |a, _, _| (s(a) as f32).to_bits(),
    );
    check(
        "cvt.rn.f32.u32 %f20, %r11;\nmov.b32 %r20, %f20;",
        |a, _, _| (a as f32).to_bits(),
    );
    check(
        "cvt.rz.f32.u32 %f20, %r11;\nmov.b32 %r20, %f20;",
        |a, _, _| {
            let near = a as f32;
            if near as u64 > u64::from(a) {
                near.next_down().to_bits()
            } else {
                near.to_bits()
            }
        },
    );
    check(
        "cvt.rpi.f32.f32 %f20, %f11;\nmov.b32 %r20, %f20;",
        |a, _, _| bits(f(a).ceil()),
    );
    check(
        "cvt.sat.f32.f32 %f20, %f11;\nmov.b32 %r20, %f20;",
        |a, _, _| {
            if f(a).is_nan() {
                0
            } else {
                bits(f(a).clamp(0.0, 1.0))
            }
        },
    );
    check("cvt.s32.s8 %r20, %r11;", |a, _, _| {
        i32::from(a as i8).cast_unsigned()
    });
    check("cvt.sat.s8.s32 %r20, %r11;", |a, _, _| {
        s(a).clamp(-128, 127).cast_unsigned()
    });
    check("cvt.u32.u16 %r20, %h11;", |a, _, _| a & 0xffff);
    check64("cvt.s64.s32 %rd20, %r11;", |a, _, _| {
        i64::from(a as i32).cast_unsigned()
    });
    check64(
        "cvt.u32.u64 %r20, %rd11;\ncvt.u64.u32 %rd20, %r20;",
        |a, _, _| a & 0xffff_ffff,
    );
    let bf16 = |v: u32| {
        if f(v).is_nan() {
            0x7fff
        } else {
            half::bf16::from_f32(f(v)).to_bits()
        }
    };
    let f16 = |v: u32| {
        if f(v).is_nan() {
            0x7fff
        } else {
            half::f16::from_f32(f(v)).to_bits()
        }
    };
    check(
        "cvt.rn.bf16.f32 %h1, %f11;\ncvt.u32.u16 %r20, %h1;",
        move |a, _, _| u32::from(bf16(a)),
    );
    check(
        "cvt.rn.f16.f32 %h1, %f11;\ncvt.u32.u16 %r20, %h1;",
        move |a, _, _| u32::from(f16(a)),
    );
    check("cvt.rn.bf16x2.f32 %r20, %f11, %f12;", move |a, b, _| {
        u32::from(bf16(a)) << 16 | u32::from(bf16(b))
    });
    check("cvt.rn.f16x2.f32 %r20, %f11, %f12;", move |a, b, _| {
        u32::from(f16(a)) << 16 | u32::from(f16(b))
    });
    check("cvt.f32.f16 %f20, %h11;\nmov.b32 %r20, %f20;", |a, _, _| {
        bits(half::f16::from_bits(a as u16).to_f32())
    });
    check(
        "cvt.f32.bf16 %f20, %h11;\nmov.b32 %r20, %f20;",
        |a, _, _| bits(half::bf16::from_bits(a as u16).to_f32()),
    );
    check("cvt.rna.tf32.f32 %r20, %f11;", |a, _, _| match f(a) {
        v if v.is_nan() => 0x7fff_ffff,
        v if v.is_infinite() => a,
        _ => (a + 0x1000) & !0x1fff,
    });
}

#[test]
fn halves() {
    let wide = |v: u32| half::f16::from_bits(v as u16).to_f64();
    let near = |v: f64| {
        if v.is_nan() {
            0x7fff
        } else {
            u32::from(half::f16::from_f64(v).to_bits())
        }
    };
    let both = move |a: u32, b: u32, f: fn(f64, f64) -> f64| {
        near(f(wide(a), wide(b))) | near(f(wide(a >> 16), wide(b >> 16))) << 16
    };
    check("add.f16x2 %r20, %r11, %r12;", move |a, b, _| {
        both(a, b, |a, b| a + b)
    });
    check("mul.f16x2 %r20, %r11, %r12;", move |a, b, _| {
        both(a, b, |a, b| a * b)
    });
    let bf = |v: u32| f(v << 16);
    let round = |v: f32| {
        if v.is_nan() {
            0x7fff
        } else {
            u32::from(half::bf16::from_f32(v).to_bits())
        }
    };
    check(
        "mul.bf16 %h1, %h11, %h12;\ncvt.u32.u16 %r20, %h1;",
        move |a, b, _| round(bf(a & 0xffff) * bf(b & 0xffff)),
    );
    check("neg.bf16x2 %r20, %r11;", |a, _, _| a ^ 0x8000_8000);
    check(
        "setp.gt.f16 %p1, %h11, %h12;\nselp.b32 %r20, 1, 0, %p1;",
        move |a, b, _| u32::from(wide(a) > wide(b)),
    );
}

#[test]
fn shuffles_votes_and_matches() {
    let input: Vec<[u32; 6]> = (0..THREADS as u32)
        .map(|i| [i * 3 % 7, 0, i, 0, i % 3, 0])
        .collect();
    let lanes = |op: &str| run(&format!("{op}\ncvt.u64.u32 %rd20, %r20;"), &input);
    let at = |lane: usize| input[lane][0];
    let got = lanes("shfl.sync.down.b32 %r20|%p1, %r11, 3, 0x1807, -1;\n@!%p1 mov.u32 %r20, 77;");
    for lane in 0..32 {
        let inside = lane % 8 + 3 < 8;
        assert_eq!(
            got[lane] as u32,
            if inside { at(lane + 3) } else { 77 },
            "down, lane {lane}"
        );
    }
    let got = lanes("shfl.sync.up.b32 %r20, %r11, 5, 0, -1;");
    assert!((0..32).all(|lane| got[lane] as u32 == at(if lane < 5 { lane } else { lane - 5 })));
    let got = lanes("shfl.sync.bfly.b32 %r20, %r11, 16, 31, -1;");
    assert!((0..32).all(|lane| got[lane] as u32 == at(lane ^ 16)));
    let got = lanes("shfl.sync.idx.b32 %r20, %r11, %r12, 0x101f, -1;");
    assert!((0..32).all(|lane| got[lane] as u32 == at(lane)));
    let got = lanes("setp.gt.u32 %p1, %r11, 3;\nvote.sync.ballot.b32 %r20, %p1, -1;");
    let ballot = (0..32).fold(0, |mask, lane| mask | u32::from(at(lane) > 3) << lane);
    assert_eq!(got[9] as u32, ballot);
    let got = lanes("match.any.sync.b32 %r20, %r11, -1;");
    let same = (0..32).fold(0, |mask, lane| mask | u32::from(at(lane) == at(4)) << lane);
    assert_eq!(got[4] as u32, same);
    let got = lanes("redux.sync.max.u32 %r20, %r11, -1;");
    assert_eq!(got[0], 6);
    let got = lanes(
        "setp.lt.u32 %p1, %r11, 9;\nvote.sync.all.pred %p2, %p1, -1;\nselp.b32 %r20, 1, 0, %p2;",
    );
    assert_eq!(got[31], 1);
    let got = lanes("elect.sync %r20|%p1, -1;\n@%p1 add.u32 %r20, %r20, 5;");
    assert_eq!((got[0], got[1]), (5, 0));
    let got = lanes(
        "setp.eq.u32 %p1, %r13, 0;\n@%p1 bra L;\nactivemask.b32 %r20;\nbra M;\nL: activemask.b32 %r20;\nM:",
    );
    let third = (0..32)
        .filter(|lane| lane % 3 == 0)
        .fold(0, |mask, lane| mask | 1u32 << lane);
    assert_eq!((got[0] as u32, got[1] as u32), (third, !third));
}

#[test]
fn local_memory_and_loops() {
    let op = "{ .local .align 8 .b8 depot[64]; .reg .b32 i;\n.reg .b64 base;\n\
              mov.u64 base, depot;\nmov.u32 i, 0;\n\
              L: mul.lo.u32 %r30, i, 4;\ncvt.u64.u32 %rd30, %r30;\nadd.u64 %rd31, base, %rd30;\n\
              mul.lo.u32 %r31, i, %r11;\nst.local.u32 [%rd31], %r31;\nadd.u32 i, i, 1;\n\
              setp.lt.u32 %p1, i, 16;\n@%p1 bra L;\n\
              and.b32 %r30, %r12, 15;\nmul.wide.u32 %rd30, %r30, 4;\nadd.u64 %rd31, base, %rd30;\n\
              cvta.local.u64 %rd32, %rd31;\nld.u32 %r20, [%rd32];\n}";
    check(op, |a, b, _| a.wrapping_mul(b & 15));
    check(
        "mov.u32 %r20, 0;\nand.b32 %r30, %r11, 31;\nL: setp.eq.u32 %p1, %r30, 0;\n@%p1 bra D;\n\
         add.u32 %r20, %r20, %r12;\nsub.u32 %r30, %r30, 1;\nbra L;\nD:",
        |a, b, _| b.wrapping_mul(a & 31),
    );
}
