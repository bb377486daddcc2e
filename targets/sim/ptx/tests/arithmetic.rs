//! Integers, shuffles and loops in the machine against the host, on random
//! and awkward values.

use crate::common::lanes::{THREADS, check, check64, run};

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

#[test]
fn shuffles_votes_and_matches() {
    let input: Vec<[u32; 6]> = (0..THREADS as u32)
        .map(|i| [i * 3 % 7, 0, i, 0, i % 3, 0])
        .collect();
    let lanes = |op: &str| run(&format!("{op}\ncvt.u64.u32 %rd20, %r20;"), &input);
    let at = |lane: usize| input[lane][0];
    let got = lanes("shfl.sync.down.b32 %r20|%p1, %r11, 3, 0x1807, -1;\n@!%p1 mov.u32 %r20, 77;");
    for (lane, got) in got.iter().enumerate().take(32) {
        let inside = lane % 8 + 3 < 8;
        assert_eq!(
            *got as u32,
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

/// Compilers write constants where a predicate is read, -1 for true.
#[test]
fn predicates_and_constants() {
    let less = |a: u32, b: u32| s(a) < s(b);
    let asked =
        |logic: &str| format!("setp.lt.s32 %p1, %r11, %r12;\n{logic}\nselp.b32 %r20, 1, 0, %p2;");
    check(&asked("xor.pred %p2, %p1, -1;"), move |a, b, _| {
        (!less(a, b)).into()
    });
    check(&asked("xor.pred %p2, %p1, 0;"), move |a, b, _| {
        less(a, b).into()
    });
    check(&asked("and.pred %p2, %p1, 0;"), |_, _, _| 0);
    check(&asked("and.pred %p2, -1, %p1;"), move |a, b, _| {
        less(a, b).into()
    });
    check(&asked("or.pred %p2, %p1, -1;"), |_, _, _| 1);
    check(&asked("or.pred %p2, %p1, 0;"), move |a, b, _| {
        less(a, b).into()
    });
    check(&asked("not.pred %p2, %p1;"), move |a, b, _| {
        (!less(a, b)).into()
    });
    check(&asked("not.pred %p2, 0;"), |_, _, _| 1);
    check(&asked("mov.pred %p2, -1;"), |_, _, _| 1);
    check(&asked("mov.pred %p2, 0;"), |_, _, _| 0);
    check(&asked("setp.eq.and.s32 %p2, %r11, %r11, -1;"), |_, _, _| 1);
    check(
        &asked("setp.eq.and.s32 %p2, %r11, %r11, !%p1;"),
        move |a, b, _| (!less(a, b)).into(),
    );
    check(
        &asked("setp.ne.or.s32 %p2|%p3, %r11, %r11, %p1;"),
        move |a, b, _| less(a, b).into(),
    );
    check("selp.b32 %r20, %r11, %r12, -1;", |a, _, _| a);
    check("selp.b32 %r20, %r11, %r12, 0;", |_, b, _| b);
}
