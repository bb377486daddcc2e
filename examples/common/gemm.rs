//! Matrix products over strided views, spread over threads by rows.

use super::threads;

/// The number of rows of the product per task.
const ROWS: usize = 128;

/// A matrix inside a slice: element `(i, j)` is `data[i * row + j * col]`.
#[derive(Clone, Copy)]
pub struct View<'a> {
    data: &'a [f32],
    rows: usize,
    cols: usize,
    row: usize,
    col: usize,
}

impl<'a> View<'a> {
    /// Returns a row-major matrix.
    pub fn new(data: &'a [f32], rows: usize, cols: usize) -> View<'a> {
        View::strided(data, rows, cols, cols)
    }

    /// Returns a row-major matrix whose rows lie `row` elements apart.
    pub fn strided(data: &'a [f32], rows: usize, cols: usize, row: usize) -> View<'a> {
        let reach = if rows * cols == 0 {
            0
        } else {
            (rows - 1) * row + cols
        };
        assert!(
            reach <= data.len(),
            "{rows} x {cols} of {} elements",
            data.len()
        );
        View {
            data,
            rows,
            cols,
            row,
            col: 1,
        }
    }

    /// Returns the transpose without moving anything.
    pub fn t(self) -> View<'a> {
        View {
            data: self.data,
            rows: self.cols,
            cols: self.rows,
            row: self.col,
            col: self.row,
        }
    }
}

/// Computes `c = alpha · a · b + beta · c` on the calling thread; rows of `c` lie `row` elements
/// apart.
pub fn product(alpha: f32, a: View, b: View, beta: f32, c: &mut [f32], row: usize) {
    let (m, k, n) = (a.rows, a.cols, b.cols);
    assert_eq!(k, b.rows, "inner sizes");
    if m * n == 0 {
        return;
    }
    assert!((m - 1) * row + n <= c.len(), "the product does not fit");
    // SAFETY: a view was checked to lie inside its slice when it was made, a
    // transpose reaches the same elements, and c was checked above.
    unsafe {
        matrixmultiply::sgemm(
            m,
            k,
            n,
            alpha,
            a.data.as_ptr(),
            a.row as isize,
            a.col as isize,
            b.data.as_ptr(),
            b.row as isize,
            b.col as isize,
            beta,
            c.as_mut_ptr(),
            row as isize,
            1,
        );
    }
}

/// Returns `a · b` as a new row-major matrix.
pub fn matmul(a: View, b: View) -> Vec<f32> {
    let mut c = vec![0.0; a.rows * b.cols];
    matmul_into(a, b, 0.0, &mut c);
    c
}

/// Computes `c = a · b + beta · c`, row major.
pub fn matmul_into(a: View, b: View, beta: f32, c: &mut [f32]) {
    let n = b.cols;
    if n == 0 {
        return;
    }
    threads::for_each(c.chunks_mut(ROWS * n).enumerate(), |(i, c)| {
        let part = View {
            data: a.data.get(i * ROWS * a.row..).unwrap_or_default(),
            rows: c.len() / n,
            ..a
        };
        product(1.0, part, b, beta, c, n);
    });
}
