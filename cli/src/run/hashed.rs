//! Hashes of all weights that a rank reads, compared among the ranks that read the same weights.

use crate::failure::Failure;
use blake3::Hasher;
use moesaic::collectives::{Call, Collectives};
use moesaic::kernel::DType;
use moesaic::mesh::ProcessGroup;
use moesaic::tensor::{SourceError, WeightSource};
use moesaic::{EngineError, Layer, Tensor};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

/// A source of weights that hashes them while they are read, because their bytes pass through
/// memory anyway. It reads no other bytes.
pub struct Hashed<'w> {
    weights: &'w dyn WeightSource,
    /// The hashes by tensor name and row. Tensors of experts have a hash for each expert's row;
    /// other tensors have one, at row 0.
    hashes: Mutex<BTreeMap<(String, usize), Hasher>>,
}

impl<'w> Hashed<'w> {
    /// Wraps `weights`, this rank's part of the layer's weights.
    pub fn new(weights: &'w dyn WeightSource) -> Hashed<'w> {
        Hashed {
            weights,
            hashes: Mutex::default(),
        }
    }

    /// Adds rows to the hashes. Rows of a tensor must come in order, from the first on.
    fn add(&self, name: &str, first: usize, tensor: &Tensor<'_>) {
        let mut hashes = self.hashes.lock().unwrap_or_else(PoisonError::into_inner);
        let rows = tensor.shape.first().copied().unwrap_or(1).max(1);
        if is_of_experts(name) {
            // One hash per expert, because two ranks may have some experts in common and not all.
            let row = tensor.data.len() / rows;
            for (at, bytes) in tensor.data.chunks(row.max(1)).enumerate() {
                let mut hasher = Hasher::new();
                hasher.update(bytes);
                hashes.insert((name.to_string(), first + at), hasher);
            }
            return;
        }
        let key = (name.to_string(), 0);
        // The first row starts the hash anew, so that a tensor that is read twice hashes as one.
        if first == 0 {
            hashes.insert(key.clone(), Hasher::new());
        }
        hashes.entry(key).or_default().update(&tensor.data);
    }

    /// Returns (name, hash) for each tensor or expert's row. Ranks that hold the same weight use
    /// the same name for it.
    fn lines(&self, layer: &Layer) -> Vec<(String, String)> {
        let (Some(mesh), Some(plan)) = (layer.mesh(), layer.rank_plan()) else {
            return Vec::new(); // one process has nobody to compare with
        };
        let experts = plan.own_experts();
        let slice = mesh.place().tp;
        let hashes = self.hashes.lock().unwrap_or_else(PoisonError::into_inner);
        let line = |((name, row), hasher): (&(String, usize), &Hasher)| {
            let what = match mesh.process_group(name) {
                ProcessGroup::World => format!("`{name}`"),
                ProcessGroup::ExpertDp => match experts.get(*row) {
                    Some(expert) => format!("`{name}` of expert {expert}, shard {slice}"),
                    None => format!("`{name}`, shard {slice}"),
                },
                ProcessGroup::Ep | ProcessGroup::ExpertTp | ProcessGroup::EpDp => {
                    format!("`{name}`, shard {slice}")
                }
            };
            (what, hasher.finalize().to_hex().to_string())
        };
        hashes.iter().map(line).collect()
    }

    /// Compares the weights that this rank has read with those of the other ranks. Where any
    /// differ, returns on every rank the same failure, which names the weights and the ranks.
    ///
    /// # Errors
    /// Fails if an exchange between the ranks fails.
    pub fn differs(
        &self,
        world: &mut dyn Collectives,
        layer: &Layer,
    ) -> std::result::Result<Option<Failure>, EngineError> {
        let own = self.lines(layer).into_iter();
        let own: Vec<String> = own.map(|(what, hash)| format!("{hash} {what}")).collect();
        let call = Call::new("hashes of weights");
        let all = world.gather_bytes(own.join("\n").as_bytes(), &call)?;
        let all = all.iter().map(|text| String::from_utf8_lossy(text));
        let all: Vec<String> = all.map(|text| text.into_owned()).collect();
        Ok(differences(&all).map(|text| {
            Failure::input(format!("the ranks do not agree: {text}"))
                .hint("start all ranks with the same files of weights")
        }))
    }
}

/// Describes the first few weights that differ from those of an earlier rank.
fn differences(all: &[String]) -> Option<String> {
    const SHOWN: usize = 4;
    let mut known: BTreeMap<&str, (usize, &str)> = BTreeMap::new();
    let mut found = Vec::new();
    for (rank, text) in all.iter().enumerate() {
        for (hash, what) in text.lines().filter_map(|line| line.split_once(' ')) {
            let (first, expected) = *known.entry(what).or_insert((rank, hash));
            if expected != hash {
                found.push(format!("{what} on rank {rank} is not that of rank {first}"));
            }
        }
    }
    let more = found.len().saturating_sub(SHOWN);
    found.truncate(SHOWN);
    if more > 0 {
        found.push(format!("and {more} more"));
    }
    let first = found.first().cloned()?;
    let rest: String = found
        .iter()
        .skip(1)
        .map(|line| format!("\n{line}"))
        .collect();
    Some(first + &rest)
}

/// Returns whether the rows of a tensor's first dimension are experts.
fn is_of_experts(name: &str) -> bool {
    name.starts_with("experts.")
}

impl WeightSource for Hashed<'_> {
    fn describe(&self, name: &str) -> Option<(DType, Vec<usize>)> {
        self.weights.describe(name)
    }

    fn rows(&self, name: &str, rows: Range<usize>) -> std::result::Result<Tensor<'_>, SourceError> {
        let first = rows.start;
        let tensor = self.weights.rows(name, rows)?;
        self.add(name, first, &tensor);
        Ok(tensor)
    }
}

#[cfg(test)]
mod tests {
    use super::differences;

    #[test]
    fn weights_that_differ_are_named_with_both_ranks() {
        let all = ["1 `a`\n2 `b`", "1 `a`\n3 `b`\n4 `c`", "4 `c`\n9 `b`"].map(str::to_string);
        let text = differences(&all).unwrap();
        assert_eq!(
            text,
            "`b` on rank 1 is not that of rank 0\n`b` on rank 2 is not that of rank 0"
        );
        assert_eq!(differences(&all[..1]), None);
    }
}
