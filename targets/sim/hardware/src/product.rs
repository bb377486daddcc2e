//! Small products of row-major f32 matrices.

/// `c[m, n] += a[m, k] * b[k, n]`, each element summed in k order. `a` has
/// rows of `k`, `b` and `c` rows of `n` elements.
pub(crate) fn add_product(a: &[f32], b: &[f32], c: &mut [f32], n: usize, k: usize) {
    // A strip of 32 columns stays in vector registers over all of k.
    let strips = n / 32 * 32;
    for (row, sums) in a.chunks_exact(k).zip(c.chunks_exact_mut(n)) {
        for first in (0..strips).step_by(32) {
            add_strip::<32>(row, &b[first..], &mut sums[first..first + 32], n);
        }
        for first in (strips..n).step_by(8) {
            add_strip::<8>(row, &b[first..], &mut sums[first..first + 8], n);
        }
    }
}

/// `WIDE` neighbouring columns of one row; rows of `b` are `n` apart.
#[inline]
fn add_strip<const WIDE: usize>(row: &[f32], b: &[f32], sums: &mut [f32], n: usize) {
    let mut kept = [0.0; WIDE];
    kept.copy_from_slice(sums);
    for (index, &factor) in row.iter().enumerate() {
        let values = &b[index * n..][..WIDE];
        for (sum, value) in kept.iter_mut().zip(values) {
            *sum += factor * value;
        }
    }
    sums.copy_from_slice(&kept);
}
