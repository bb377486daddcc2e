//! Copies strided views of a file's elements into row-major order.

use crate::view::Layout;
use std::borrow::Cow;

/// Returns the elements of a view in row-major order: borrowed if they are contiguous, else copied.
pub(crate) fn dense<'b>(layout: &Layout, from: &'b [u8], size: usize) -> Cow<'b, [u8]> {
    if let Some(span) = layout.contiguous() {
        return Cow::Borrowed(&from[span.start * size..span.end * size]);
    }
    let mut dense = vec![0u8; layout.shape.iter().product::<usize>() * size];
    copy(layout, from, size, &mut dense);
    Cow::Owned(dense)
}

/// Copies a view of elements of `size` bytes into row-major order.
pub(crate) fn copy(layout: &Layout, from: &[u8], size: usize, out: &mut [u8]) {
    let ([rows, columns], strides) = layout.inner();
    let matrix = rows * columns * size;
    if matrix == 0 {
        return;
    }
    for (start, out) in layout
        .matrices()
        .into_iter()
        .zip(out.chunks_exact_mut(matrix))
    {
        if strides[1] == 1 {
            for (row, out) in out.chunks_exact_mut(columns * size).enumerate() {
                let at = (start + row * strides[0]) * size;
                out.copy_from_slice(&from[at..at + columns * size]);
            }
        } else {
            let from = &from[start * size..];
            match size {
                2 => copy_strided::<2>(from, strides, columns, out),
                4 => copy_strided::<4>(from, strides, columns, out),
                _ => copy_strided::<8>(from, strides, columns, out),
            }
        }
    }
}

/// Copies a matrix with distant columns in tiles that stay in cache. The element size is the
/// constant `SIZE`, so each copy compiles to one load and one store.
fn copy_strided<const SIZE: usize>(
    from: &[u8],
    strides: [usize; 2],
    columns: usize,
    out: &mut [u8],
) {
    const TILE: usize = 32;
    let rows = out.len() / (columns * SIZE);
    for row in (0..rows).step_by(TILE) {
        for column in (0..columns).step_by(TILE) {
            for r in row..rows.min(row + TILE) {
                for c in column..columns.min(column + TILE) {
                    let at = (r * strides[0] + c * strides[1]) * SIZE;
                    let to = (r * columns + c) * SIZE;
                    out[to..to + SIZE].copy_from_slice(&from[at..at + SIZE]);
                }
            }
        }
    }
}
