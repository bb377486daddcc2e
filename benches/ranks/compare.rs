//! Compares the results of two parties.

use crate::Result;
use crate::data::floats;
use crate::shapes::Shape;
use moesaic::DType;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

/// The results that the ranks of a party have written, joined.
pub struct Results(BTreeMap<String, Vec<u8>>);

impl Results {
    /// Reads `STEM.RANK.NAME` of every rank and removes it. Tokens and experts of ranks
    /// follow each other; of the rest all have the same.
    pub fn read(stem: &Path, ranks: usize) -> Result<Results> {
        let folder = stem.parent().ok_or("no folder")?;
        let prefix = format!("{}.", stem.file_name().unwrap_or_default().display());
        let mut results = BTreeMap::<String, Vec<u8>>::new();
        for rank in 0..ranks {
            let prefix = format!("{prefix}{rank}.");
            for entry in fs::read_dir(folder)? {
                let entry = entry?;
                let name = entry.file_name().display().to_string();
                let Some(name) = name.strip_prefix(&prefix) else {
                    continue;
                };
                let bytes = fs::read(entry.path())?;
                fs::remove_file(entry.path())?;
                let shared = name.starts_with("grad.") && !name.starts_with("grad.experts.");
                if rank == 0 || !shared {
                    results.entry(name.to_string()).or_default().extend(bytes);
                }
            }
        }
        Ok(Results(results))
    }

    /// The largest difference of a row, relative to its norm.
    ///
    /// # Errors
    /// What is missing or differs by more than rounding; with `exact` the output must be
    /// the same bytes.
    pub fn differs(&self, other: &Results, dtype: DType, width: usize, exact: bool) -> Result<f64> {
        let names = |results: &Results| results.0.keys().cloned().collect::<Vec<_>>();
        if names(self) != names(other) {
            return Err(format!("{:?} beside {:?}", names(self), names(other)).into());
        }
        let mut largest = 0.0f64;
        for (name, ours) in &self.0 {
            let theirs = &other.0[name];
            if exact && name == "y" && ours != theirs {
                return Err("y is not the same bytes".into());
            }
            let rows = name == "y" || name == "dx";
            let (stored, allowed) = match (rows, dtype) {
                (true, DType::Bf16) => (DType::Bf16, 4e-2),
                (false, DType::Bf16) => (DType::F32, 4e-2),
                _ => (DType::F32, 1e-4),
            };
            let (a, b) = (floats(ours, stored), floats(theirs, stored));
            // An expert with few tokens can cancel to almost nothing.
            let width = if rows { width } else { a.len().max(1) };
            let error = worst(&a, &b, width);
            if a.len() != b.len() || error.is_nan() || error > allowed {
                let words = format!("{name} differs by {error:.1e}, {allowed:.0e} is allowed");
                return Err(words.into());
            }
            largest = largest.max(error);
        }
        Ok(largest)
    }
}

/// NaN where there is any.
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
    error.fold(0.0, |most, e| if e > most || e.is_nan() { e } else { most })
}

/// Rows that leave a rank when a token goes to each other rank once, however many of its
/// experts are there.
pub fn rows_once(ids: &[i32], shape: &Shape, tokens: usize, ranks: usize) -> u64 {
    let owner = |id: &i32| {
        let (each, more) = (shape.experts / ranks, shape.experts % ranks);
        let id = *id as usize;
        if id < more * (each + 1) {
            id / (each + 1)
        } else {
            more + (id - more * (each + 1)) / each.max(1)
        }
    };
    let home = |token: usize| {
        (0..ranks)
            .rfind(|r| r * tokens / ranks <= token)
            .unwrap_or(0)
    };
    let away = ids.chunks(shape.top_k).enumerate().map(|(token, ids)| {
        let owners: BTreeSet<usize> = ids.iter().map(owner).collect();
        owners.iter().filter(|owner| **owner != home(token)).count() as u64
    });
    away.sum()
}
