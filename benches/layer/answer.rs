//! Compares the results of a peer with ours.

use crate::Result;
use crate::data::floats;
use moesaic::DType;
use safetensors::SafeTensors;
use std::path::Path;

/// Compares each tensor of the file `path` with ours of that name. `ours`
/// returns the values and the length of a row (none for the whole tensor), or
/// `None` to skip the tensor.
///
/// # Errors
/// What differs, and by how much.
pub fn agrees(
    path: &Path,
    dtype: DType,
    ours: impl Fn(&str) -> Result<Option<(Vec<f32>, Option<usize>)>>,
) -> Result {
    let bytes = std::fs::read(path)?;
    let theirs = SafeTensors::deserialize(&bytes)?;
    let allowed = match dtype {
        DType::F32 => 1e-4,
        _ => 4e-2,
    };
    for name in theirs.names() {
        let Some((ours, width)) = ours(name)? else {
            continue;
        };
        let found = floats(theirs.tensor(name)?.data(), DType::F32);
        let error = worst(&ours, &found, width.unwrap_or(found.len()));
        if ours.len() != found.len() || error.is_nan() || error > allowed {
            return Err(format!("{name} differs by {error:.1e}, {allowed:.0e} is allowed").into());
        }
    }
    Ok(())
}

/// The largest difference of a row, relative to the row's norm.
fn worst(ours: &[f32], theirs: &[f32], width: usize) -> f64 {
    let square = |v: f64| v * v;
    let rows = ours.chunks(width).zip(theirs.chunks(width));
    let error = rows.map(|(a, b)| {
        let pairs = a.iter().zip(b).map(|(a, b)| (f64::from(*a), f64::from(*b)));
        let (difference, norm) = pairs.fold((0.0, 0.0), |(d, n), (a, b)| {
            (d + square(a - b), n + square(a))
        });
        (difference / norm.max(f64::MIN_POSITIVE)).sqrt()
    });
    error.fold(
        0.0,
        |worst, e| if e > worst || e.is_nan() { e } else { worst },
    )
}
