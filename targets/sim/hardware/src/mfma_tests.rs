use super::*;
use crate::mma;
use crate::testing::{Random, covers, naive, pack};

fn bits(element: MfmaElement, value: f32) -> u32 {
    match element {
        MfmaElement::F16 => pack(mma::MmaElement::F16, value),
        MfmaElement::Bf16 => pack(mma::MmaElement::Bf16, value),
        MfmaElement::F32 => value.to_bits(),
    }
}

/// A wave's registers of A, or of B, from a function of row (or column) and k.
fn operand<const L: usize>(kind: MfmaKind, at: impl Fn(usize, usize) -> f32) -> Vec<[u32; L]> {
    let mut list = vec![[0; L]; kind.a_registers()];
    for (register, part, lane) in places(kind) {
        let (mn, k) = kind.a_index(register, part, lane);
        list[register][lane] |= bits(kind.element(), at(mn, k)) << (16 * part);
    }
    list
}

fn results<const L: usize>(kind: MfmaKind, matrix: &[f32]) -> Vec<[u32; L]> {
    let lane = |r, lane| {
        let (row, column) = kind.d_index(r, lane);
        matrix[row * kind.edge() + column].to_bits()
    };
    let registers = 0..kind.d_registers();
    registers
        .map(|r| std::array::from_fn(|l| lane(r, l)))
        .collect()
}

fn product_is_exact<const L: usize>(kind: MfmaKind, random: &mut Random) {
    let (edge, k) = (kind.edge(), kind.k());
    let (a, b) = (
        random.matrix(edge * k, -8, 8),
        random.matrix(k * edge, -8, 8),
    );
    let c = random.matrix(edge * edge, -50, 50);
    let ra = operand::<L>(kind, |row, at| a[row * k + at]);
    let rb = operand::<L>(kind, |column, at| b[at * edge + column]);
    let mut d = vec![[7; L]; kind.d_registers()];
    execute(kind, &ra, &rb, &results(kind, &c), &mut d);
    assert_eq!(
        d,
        results(kind, &naive(&a, &b, &c, [edge, edge, k])),
        "{kind:?}"
    );
}

#[test]
fn products_are_exact() {
    let mut random = Random::new(5);
    for kind in MfmaKind::ALL {
        for _ in 0..10 {
            match kind.lanes() {
                64 => product_is_exact::<64>(kind, &mut random),
                _ => product_is_exact::<32>(kind, &mut random),
            }
        }
    }
}

#[test]
fn layouts_are_bijections() {
    for kind in MfmaKind::ALL {
        let (edge, k) = (kind.edge(), kind.k());
        // Both half-waves of WMMA hold all of A.
        let times = if kind.lanes() == 32 { 2 } else { 1 };
        let of_a = places(kind).map(|(r, part, lane)| kind.a_index(r, part, lane));
        assert!(covers(of_a, [edge, k], times), "{kind:?}");
        let of_d = (0..kind.d_registers())
            .flat_map(|r| (0..kind.lanes()).map(move |lane| kind.d_index(r, lane)));
        assert!(covers(of_d, [edge, edge], 1), "{kind:?}");
    }
}

#[test]
fn single_places() {
    let kind = |edge, k, e| MfmaKind::mfma(edge, k, e).unwrap();
    let wide = kind(32, 8, MfmaElement::Bf16);
    assert_eq!((wide.a_registers(), wide.d_registers()), (2, 16));
    assert_eq!(wide.a_index(1, 0, 33), (1, 6));
    assert_eq!(wide.d_index(5, 40), (13, 8));
    let small = kind(16, 16, MfmaElement::F16);
    assert_eq!(small.a_index(0, 1, 49), (1, 13));
    assert_eq!(small.d_index(3, 18), (7, 2));
    let deep = kind(16, 32, MfmaElement::F16);
    assert_eq!((deep.a_registers(), deep.d_registers()), (4, 4));
    assert_eq!(deep.a_index(3, 1, 17), (1, 15));
    let single = kind(16, 4, MfmaElement::F32);
    assert_eq!(single.a_index(0, 0, 37), (5, 2));
    let wmma = MfmaKind::wmma(MfmaElement::F16).unwrap();
    assert_eq!((wmma.a_registers(), wmma.d_registers()), (8, 8));
    assert_eq!(wmma.a_index(7, 1, 20), (4, 15));
    assert_eq!(wmma.d_index(3, 20), (7, 4));
}

#[test]
fn there_are_no_other_kinds() {
    assert_eq!(MfmaKind::mfma(32, 32, MfmaElement::F16), None);
    assert_eq!(MfmaKind::wmma(MfmaElement::F32), None);
}
