//! Who computes the same as we do; only they are timed.

use crate::Result;
use crate::data::Folder;
use crate::here::Run;
use crate::peer::{Peer, Way};
use crate::timing::Pass;
use moesaic::DType;
use safetensors::SafeTensors;
use std::path::Path;

/// For each way whether it agrees with us; a line for each that does not.
pub fn all(
    run: &Run<'_>,
    peers: &mut [Peer],
    ways: &[Way],
    input: &Path,
    folder: &Folder,
    pass: Pass,
) -> Result<Vec<bool>> {
    run.once()?;
    for peer in peers.iter_mut() {
        // A peer that cannot says so again when it is to run.
        let _ = peer.ask(&format!("input {}", input.display()));
    }
    let mut agree = Vec::new();
    for way in ways {
        let path = folder.answer();
        let order = format!("check {} {pass} {}", way.name, path.display());
        let answer = peers[way.peer].ask(&order);
        let result = answer.and_then(|_| one(run, &path));
        if let Err(problem) = &result {
            println!("# {} is left out: {problem}", way.title);
        }
        agree.push(result.is_ok());
    }
    Ok(agree)
}

/// # Errors
/// What differs, and by how much.
fn one(run: &Run<'_>, path: &Path) -> Result {
    let bytes = std::fs::read(path)?;
    let theirs = SafeTensors::deserialize(&bytes)?;
    let allowed = match run.dtype() {
        DType::F32 => 1e-4,
        _ => 4e-2,
    };
    for name in theirs.names() {
        let tensor = theirs.tensor(name)?;
        let found = crate::data::floats(tensor.data(), DType::F32);
        let (ours, width) = match name.strip_prefix("grad.") {
            // A row of an expert with few tokens can cancel to almost nothing.
            Some(weight) => (run.gradient(weight)?, found.len()),
            None => (run.rows(name)?, run.width()),
        };
        let error = worst(&ours, &found, width);
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
