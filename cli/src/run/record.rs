//! Routing records: the decisions of a run's router, in a file of their own.

use super::input::{expect_shape, find, integers};
use crate::failure::{Failure, Result};
use moesaic::weights::Checkpoint;
use moesaic::{LayerSpec, Record, Statistics, Tensor, Tensors};
use std::path::Path;

/// The tensors of a record that `--replay` reads.
pub const CHOICES: [&str; 3] = ["topk_ids", "topk_weights", "locations"];

/// The routing of a call, taken from its results.
pub struct CallRouting {
    experts: usize,
    with_rows: usize,
    top_k: usize,
    ids: Vec<i32>,
    weights: Vec<f32>,
    /// The place of each choice in its expert's rows; `None` if nothing can be dropped.
    locations: Option<Vec<i32>>,
}

impl CallRouting {
    /// Takes the routing from results. `limited` tells whether the layer has a capacity.
    pub fn of(spec: &LayerSpec, results: &Tensors<'_>, limited: bool) -> Option<CallRouting> {
        let whole = |name: &str| {
            let values = results.get(name)?.to_f64();
            Some(values.into_iter().map(|v| v as i32).collect())
        };
        let weights = results.get("topk_weights")?.to_f64();
        Some(CallRouting {
            experts: spec.routed_experts(),
            with_rows: spec.shape.experts,
            top_k: spec.shape.top_k,
            ids: whole("topk_ids")?,
            weights: weights.into_iter().map(|v| v as f32).collect(),
            locations: whole("locations").filter(|_| limited),
        })
    }

    pub fn statistics(&self) -> Statistics {
        Statistics::of(&Record {
            experts: self.experts,
            top_k: self.top_k,
            ids: &self.ids,
            weights: &self.weights,
            locations: self.locations.as_deref(),
            with_rows: self.with_rows,
        })
    }
}

/// Returns the tensors for `--record`: ids, weights, locations, counts, and the number of dropped
/// choices per slot.
pub fn tensors<'r>(results: &'r Tensors<'_>, statistics: &Statistics) -> Tensors<'r> {
    let names = CHOICES.iter().chain(&["counts"]);
    let found = names.filter_map(|name| Some((*name, results.get(*name)?.lend())));
    let mut record: Tensors<'_> = found.collect();
    let drops: Vec<i64> = statistics.dropped.iter().map(|&n| n as i64).collect();
    record.insert("drops", Tensor::owned(&[drops.len()], drops));
    record
}

/// Reads ids and weights from a record for a call of `tokens` tokens. Dropped choices become
/// masked.
pub fn choices(path: &Path, spec: &LayerSpec, tokens: usize) -> Result<(Vec<i32>, Vec<f32>)> {
    if path.is_dir() {
        let message = format!("--replay {} is a directory, not a file", path.display());
        return Err(Failure::input(message));
    }
    let file = Checkpoint::open(path)?;
    let shape = [Some(tokens), Some(spec.shape.top_k)];
    for name in CHOICES {
        expect_shape(&find(&file, name)?, &shape, "[tokens, top_k]")?;
    }
    // A record of another layer has another number of experts, and may have none that this one lacks.
    expect_shape(
        &find(&file, "counts")?,
        &[Some(spec.routed_experts())],
        "[experts]",
    )?;
    let whole = |name: &str| -> Result<Vec<i32>> {
        let tensor = integers(&find(&file, name)?)?;
        Ok(tensor.values::<i32>().unwrap_or_default().to_vec())
    };
    let (mut ids, locations) = (whole("topk_ids")?, whole("locations")?);
    let rows = spec.shape.experts as i32;
    for (id, location) in ids.iter_mut().zip(locations) {
        // Identity and zero experts have larger ids. They have no rows, and so no location, but
        // nothing of theirs is dropped.
        if *id < rows && location < 0 {
            *id = -1;
        }
    }
    let weights = file.read("topk_weights")?.to_f64();
    Ok((ids, weights.into_iter().map(|v| v as f32).collect()))
}
