use super::*;
use crate::testing::{Random, covers};

fn rows(random: &mut Random) -> [[u8; 16]; 8] {
    std::array::from_fn(|_| std::array::from_fn(|_| random.next() as u8))
}

#[test]
fn lanes_hold_what_the_manual_says() {
    let rows: [[u8; 16]; 8] = std::array::from_fn(|r| std::array::from_fn(|c| (16 * r + c) as u8));
    let plain = load(&rows, false);
    // Four lanes share a row, each with four of its bytes.
    assert_eq!(plain[0], 0x0302_0100);
    assert_eq!(plain[7], 0x1f1e_1d1c);
    assert_eq!(plain[31], 0x7f7e_7d7c);
    // Transposed, four lanes share a column.
    let transposed = load(&rows, true);
    assert_eq!(transposed[0], 0x1110_0100);
    assert_eq!(transposed[5], 0x3332_2322);
    assert_eq!(transposed[31], 0x7f7e_6f6e);
}

#[test]
fn elements_are_a_bijection() {
    for transposed in [false, true] {
        let places = (0..32).flat_map(|l| (0..2).map(move |h| element(transposed, l, h)));
        assert!(covers(places, [8, 8], 1));
    }
    let lanes: Vec<usize> = (0..32).map(|i| address_lane(i / 8, i % 8)).collect();
    assert_eq!(lanes, (0..32).collect::<Vec<_>>());
}

#[test]
fn store_undoes_load() {
    let mut random = Random::new(2);
    for transposed in [false, true] {
        let rows = rows(&mut random);
        assert_eq!(store(&load(&rows, transposed), transposed), rows);
    }
}

#[test]
fn transposing_is_loading_the_transpose() {
    let rows = rows(&mut Random::new(3));
    let turned: [[u8; 16]; 8] =
        std::array::from_fn(|r| std::array::from_fn(|c| rows[c / 2][2 * r + c % 2]));
    assert_eq!(load(&rows, true), load(&turned, false));
}
