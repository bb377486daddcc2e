//! Comparisons that say what differs.

use std::fmt::Debug;

/// Every value within `tolerance` of the expected one, relative to the
/// largest expected; NaN only where NaN is due.
pub fn close(what: &str, found: &[f64], expected: &[f64], tolerance: f64) {
    assert_eq!(found.len(), expected.len(), "{what}: length");
    let finite = expected.iter().filter(|v| v.is_finite());
    let scale = finite.fold(f64::MIN_POSITIVE, |most, v| most.max(v.abs()));
    for (i, (&f, &e)) in found.iter().zip(expected).enumerate() {
        let fine = if e.is_nan() {
            f.is_nan()
        } else {
            f == e || (f - e).abs() <= tolerance * scale
        };
        let error = (f - e).abs() / scale;
        assert!(
            fine,
            "{what}\nelement {i} is {f}, expected {e}: error {error:e} > {tolerance:e}"
        );
    }
}

/// Every value equal.
pub fn equal<T: PartialEq + Debug>(what: &str, found: &[T], expected: &[T]) {
    assert_eq!(found.len(), expected.len(), "{what}: length");
    let wrong = found.iter().zip(expected).position(|(f, e)| f != e);
    if let Some(i) = wrong {
        panic!(
            "{what}\nelement {i} is {:?}, expected {:?}",
            found[i], expected[i]
        );
    }
}
