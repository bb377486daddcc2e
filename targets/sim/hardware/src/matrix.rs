//! `ldmatrix` and `stmatrix`: 8 x 8 matrices of 16-bit elements between
//! shared memory and the registers of a warp.
//!
//! Lane `8 j + r` gives the address of row `r` of matrix `j`, 16 bytes. After a
//! load, register `j` of lane `l` holds these elements of matrix `j`:
//!
//! | form | low half | high half |
//! |---|---|---|
//! | plain | row `l / 4`, column `2 (l % 4)` | row `l / 4`, column `2 (l % 4) + 1` |
//! | `.trans` | row `2 (l % 4)`, column `l / 4` | row `2 (l % 4) + 1`, column `l / 4` |

use crate::Lanes;

/// Returns the row and column, within the 8 x 8 matrix, of the 16-bit element
/// in half 0 (low) or 1 (high) of a lane's register.
pub const fn element(transposed: bool, lane: usize, half: usize) -> (usize, usize) {
    let (major, minor) = (lane / 4, 2 * (lane % 4) + half);
    if transposed {
        (minor, major)
    } else {
        (major, minor)
    }
}

/// Returns the lane whose address names row `row` of matrix `matrix`.
pub const fn address_lane(matrix: usize, row: usize) -> usize {
    8 * matrix + row
}

/// Distributes one matrix, eight rows of 16 bytes, over the lanes of a
/// register.
pub fn load(rows: &[[u8; 16]; 8], transposed: bool) -> Lanes {
    std::array::from_fn(|lane| {
        let half = |half| {
            let (row, column) = element(transposed, lane, half);
            u32::from(rows[row][2 * column]) | u32::from(rows[row][2 * column + 1]) << 8
        };
        half(0) | half(1) << 16
    })
}

/// Gathers the eight rows that a store writes: the inverse of [`load`].
pub fn store(register: &Lanes, transposed: bool) -> [[u8; 16]; 8] {
    let mut rows = [[0; 16]; 8];
    for (lane, word) in register.iter().enumerate() {
        for half in 0..2 {
            let (row, column) = element(transposed, lane, half);
            let value = (word >> (16 * half)) as u16;
            rows[row][2 * column..][..2].copy_from_slice(&value.to_le_bytes());
        }
    }
    rows
}

#[cfg(test)]
#[path = "matrix_tests.rs"]
mod tests;
