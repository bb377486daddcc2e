use super::*;
use crate::testing::{Random, covers, naive, pack};

fn range(element: MmaElement) -> (i64, i64) {
    match element {
        MmaElement::S8 => (-128, 127),
        MmaElement::U8 => (0, 255),
        _ => (-8, 8),
    }
}

type Index = fn(MmaKind, usize, usize, usize) -> (usize, usize);

/// Registers with the elements of a row-major matrix.
fn scatter(
    registers: usize,
    packed: usize,
    kind: MmaKind,
    index: Index,
    bits: impl Fn(usize, usize) -> u32,
) -> Vec<Lanes> {
    let mut list = vec![[0; 32]; registers];
    for_each(registers, packed, |r, part, lane| {
        let (row, column) = index(kind, r, part, lane);
        list[r][lane] |= bits(row, column) << (32 / packed * part);
    });
    list
}

#[test]
fn products_are_exact() {
    let mut random = Random::new(4);
    for kind in MmaKind::ALL {
        for _ in 0..20 {
            product_is_exact(kind, &mut random);
        }
    }
}

fn product_is_exact(kind: MmaKind, random: &mut Random) {
    let (k, e) = (kind.k(), kind.element());
    let (low, high) = range(e);
    let (a, b) = (
        random.matrix(16 * k, low, high),
        random.matrix(k * 8, low, high),
    );
    let c = random.matrix(16 * 8, -50, 50);
    let bits = |value: f32| match kind.accumulator() {
        Accumulator::F32 => value.to_bits(),
        Accumulator::F16 => pack(MmaElement::F16, value),
        Accumulator::S32 => (value as i32).cast_unsigned(),
    };
    let of_a = |row: usize, at: usize| pack(e, a[row * k + at]);
    let of_b = |at: usize, column: usize| pack(e, b[at * 8 + column]);
    let ra = scatter(
        kind.a_registers(),
        kind.packed(),
        kind,
        MmaKind::a_index,
        of_a,
    );
    let rb = scatter(
        kind.b_registers(),
        kind.packed(),
        kind,
        MmaKind::b_index,
        of_b,
    );
    let registers = |m: &[f32]| {
        let of_c = |row: usize, column: usize| bits(m[row * 8 + column]);
        scatter(
            kind.c_registers(),
            kind.packed_c(),
            kind,
            MmaKind::c_index,
            of_c,
        )
    };
    let mut d = vec![[7; 32]; kind.c_registers()];
    mma_sync(kind, &ra, &rb, &registers(&c), &mut d);
    assert_eq!(d, registers(&naive(&a, &b, &c, [16, 8, k])), "{kind:?}");
}

#[test]
fn fragments_are_bijections() {
    for kind in MmaKind::ALL {
        let cover = |registers, packed, index: Index, extents| {
            let mut places = Vec::new();
            for_each(registers, packed, |r, part, lane| {
                places.push(index(kind, r, part, lane))
            });
            assert!(covers(places.into_iter(), extents, 1), "{kind:?}");
        };
        let k = kind.k();
        cover(kind.a_registers(), kind.packed(), MmaKind::a_index, [16, k]);
        cover(kind.b_registers(), kind.packed(), MmaKind::b_index, [k, 8]);
        cover(
            kind.c_registers(),
            kind.packed_c(),
            MmaKind::c_index,
            [16, 8],
        );
    }
}

/// The formulas as the manual writes them, for element `i` of a fragment.
/// Products cannot replace this: they are blind to an order of k that A and B
/// share.
#[test]
fn fragments_are_those_of_the_manual() {
    let kind = |k, e, a| MmaKind::new(k, e, a).unwrap();
    let (f32, f16) = (Accumulator::F32, Accumulator::F16);
    for lane in 0..32 {
        let (group, id) = (lane >> 2, lane % 4);
        let m16n8k16 = kind(16, MmaElement::Bf16, f32);
        for i in 0..8usize {
            let upper = i < 2 || (4..6).contains(&i);
            let row = if upper { group } else { group + 8 };
            let column = id * 2 + (i & 1) + if i >= 4 { 8 } else { 0 };
            assert_eq!(m16n8k16.a_index(i / 2, i % 2, lane), (row, column));
        }
        for i in 0..4usize {
            let row = id * 2 + (i & 1) + if i >= 2 { 8 } else { 0 };
            assert_eq!(m16n8k16.b_index(i / 2, i % 2, lane), (row, group));
            let c = (if i < 2 { group } else { group + 8 }, id * 2 + (i & 1));
            assert_eq!(m16n8k16.c_index(i, 0, lane), c);
            let halves = kind(16, MmaElement::F16, f16);
            assert_eq!(halves.c_index(i / 2, i % 2, lane), c);
            let m16n8k8 = kind(8, MmaElement::F16, f32);
            let a = (if i < 2 { group } else { group + 8 }, id * 2 + (i & 1));
            assert_eq!(m16n8k8.a_index(i / 2, i % 2, lane), a);
            let tf32 = kind(8, MmaElement::Tf32, f32);
            let row = if i == 0 || i == 2 { group } else { group + 8 };
            let column = if i < 2 { id } else { id + 4 };
            assert_eq!(tf32.a_index(i, 0, lane), (row, column));
        }
        for i in 0..2 {
            let tf32 = kind(8, MmaElement::Tf32, f32);
            assert_eq!(tf32.b_index(i, 0, lane), (id + 4 * i, group));
            let m16n8k4 = kind(4, MmaElement::Tf32, f32);
            assert_eq!(m16n8k4.a_index(i, 0, lane), (group + 8 * i, id));
            assert_eq!(
                kind(8, MmaElement::F16, f32).b_index(0, i, lane),
                (id * 2 + i, group)
            );
        }
        let bytes = kind(32, MmaElement::S8, Accumulator::S32);
        for i in 0..16usize {
            let upper = i < 4 || (8..12).contains(&i);
            let row = if upper { group } else { group + 8 };
            let column = id * 4 + (i & 3) + if i >= 8 { 16 } else { 0 };
            assert_eq!(bytes.a_index(i / 4, i % 4, lane), (row, column));
        }
    }
}

#[test]
fn the_low_bits_of_tf32_do_not_count() {
    let kind = MmaKind::new(4, MmaElement::Tf32, Accumulator::F32).unwrap();
    let one = [[0x3f80_1fff; 32]; 2];
    let mut d = [[0; 32]; 4];
    mma_sync(kind, &one, &one[..1], &[[0; 32]; 4], &mut d);
    assert_eq!(d, [[4f32.to_bits(); 32]; 4]);
}

#[test]
fn a_sum_of_halves_is_rounded_once() {
    let kind = MmaKind::new(16, MmaElement::F16, Accumulator::F16).unwrap();
    let half = |value| pack(MmaElement::F16, value) * 0x1_0001;
    let (a, b) = ([[half(1.0); 32]; 4], [[half(0.25); 32]; 2]);
    let mut d = [[0; 32]; 2];
    // 2048 + 4: steps of 2; adding 0.25 sixteen times one by one would not move it.
    mma_sync(kind, &a, &b, &[[half(2048.0); 32]; 2], &mut d);
    assert_eq!(d, [[half(2052.0); 32]; 2]);
}

#[test]
fn there_are_no_other_kinds() {
    assert_eq!(MmaKind::new(16, MmaElement::Tf32, Accumulator::F32), None);
    assert_eq!(MmaKind::new(16, MmaElement::Bf16, Accumulator::F16), None);
    assert_eq!(MmaKind::new(272, MmaElement::Bf16, Accumulator::F32), None);
}
