//! Floating point arithmetic and conversions in the machine against those of
//! the host, on random and awkward values.

use crate::common::lanes::{check, check64, inputs, run};

fn s(v: u32) -> i32 {
    v.cast_signed()
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
        if a.is_nan() || b.is_nan() {
            f32::NAN
        } else if a == b {
            f(a.to_bits() & b.to_bits())
        } else if a > b {
            a
        } else {
            b
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
        v if v.is_finite() => (a + 0x1000) & !0x1fff,
        _ => a & !0x1fff,
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
