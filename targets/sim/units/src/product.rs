//! Small products of row-major f32 matrices.

/// `c[m, n] += a[m, k] * b[k, n]`, each element summed in k order. `a` has
/// rows of `k`, `b` and `c` rows of `n` elements.
pub(crate) fn add_product(a: &[f32], b: &[f32], c: &mut [f32], n: usize, k: usize) {
    for (row, sums) in a.chunks_exact(k).zip(c.chunks_exact_mut(n)) {
        for (&factor, values) in row.iter().zip(b.chunks_exact(n)) {
            for (sum, value) in sums.iter_mut().zip(values) {
                *sum += factor * value;
            }
        }
    }
}
