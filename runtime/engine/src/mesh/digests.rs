//! Weights that several ranks hold, compared by digests.

use super::groups::Mesh;
use super::sharding::Sharding;
use crate::error::{DifferentWeight, EngineError};
use moesaic_collectives::Call;
use moesaic_kernel::DType;
use moesaic_plan::Parallel;
use moesaic_tensor::{SourceError, Tensor, WeightSource};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

/// A digest of rows that are added one after the other, however many at a time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Digest(u64);

impl Digest {
    /// Adds rows of the same size.
    pub fn add(&mut self, rows: &[u8], row_bytes: usize) {
        for row in rows.chunks(row_bytes.max(1)) {
            self.0 = mixed(self.0, row_digest(row));
        }
    }
}

/// Mixes a word into a digest. It finds accidents, not attackers.
fn mixed(digest: u64, word: u64) -> u64 {
    let product = (digest ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    product ^ (product >> 29)
}

/// Returns the digest of a row: four words at a time, because a product waits for the one before.
fn row_digest(row: &[u8]) -> u64 {
    const LANES: usize = 4;
    let mut lanes = [1, 2, 3, row.len() as u64];
    let (words, rest) = row.as_chunks::<8>();
    for words in words.chunks(LANES) {
        for (lane, word) in lanes.iter_mut().zip(words) {
            *lane = mixed(*lane, u64::from_le_bytes(*word));
        }
    }
    let mut last = [0; 8];
    last[..rest.len()].copy_from_slice(rest);
    lanes[0] = mixed(lanes[0], u64::from_le_bytes(last));
    lanes.into_iter().fold(0, mixed)
}

/// A source of weights that remembers digests of those that every rank holds, as they are read, so
/// that nothing is read twice.
pub(crate) struct Digested<'w> {
    source: &'w dyn WeightSource,
    mesh: Parallel,
    /// By name, each with the number of rows so far.
    seen: Mutex<BTreeMap<String, (usize, Digest)>>,
}

impl<'w> Digested<'w> {
    pub fn new(mesh: &Mesh, source: &'w dyn WeightSource) -> Digested<'w> {
        Digested {
            source,
            mesh: mesh.parallel(),
            seen: Mutex::default(),
        }
    }

    /// Compares the weights that were read with those of the other ranks. All ranks of the mesh
    /// call it.
    ///
    /// # Errors
    /// [`EngineError::DifferentWeights`] on all ranks; [`EngineError::Collective`].
    pub fn compare(self, mesh: &Mesh) -> Result<(), EngineError> {
        let seen = self.seen.into_inner();
        let seen = seen.unwrap_or_else(PoisonError::into_inner).into_iter();
        let held: Vec<Held> = seen
            .map(|(name, (_, digest))| Held::everywhere(name, digest))
            .collect();
        // One number of each rank says that all is well. What differs is asked for only then, since
        // the names of all weights from a thousand ranks are megabytes.
        let all = held.iter().fold(0, |all, held| mixed(all, held.digest.0));
        let call = Call::new("digests of weights");
        let alls = mesh.groups().world.gather_numbers(&[all], &call)?;
        if alls.iter().all(|one| *one == alls[0]) {
            return Ok(());
        }
        compare(mesh, &held)
    }
}

impl WeightSource for Digested<'_> {
    fn describe(&self, name: &str) -> Option<(DType, Vec<usize>)> {
        self.source.describe(name)
    }

    fn rows(&self, name: &str, rows: Range<usize>) -> Result<Tensor<'_>, SourceError> {
        let read = self.source.rows(name, rows.clone())?;
        if Sharding::of(self.mesh, name).is_everywhere() {
            let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
            let (next, digest) = seen.entry(name.to_string()).or_default();
            // Rows that are read a second time are those of the first.
            if *next == rows.start {
                let count = read.shape.first().copied().unwrap_or(1);
                digest.add(&read.data, read.data.len() / count.max(1));
                *next += count;
            }
        }
        Ok(read)
    }
}

/// Values that this rank holds, and perhaps others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Held {
    /// The weight's name.
    pub name: String,
    /// The expert, of a weight of routed experts.
    pub expert: Option<usize>,
    /// Only values of one form are compared: of the same shard, in the same layout in memory.
    pub form: String,
    pub digest: Digest,
}

impl Held {
    /// Returns the values of a whole weight in the layout of its source.
    fn everywhere(name: String, digest: Digest) -> Held {
        Held {
            name,
            expert: None,
            form: String::new(),
            digest,
        }
    }
}

/// Compares values with those of the other ranks that hold them. All ranks of the mesh call it.
pub(super) fn compare(mesh: &Mesh, own: &[Held]) -> Result<(), EngineError> {
    let rows: Vec<_> = own
        .iter()
        .map(|held| (&held.name, held.expert, &held.form, held.digest.0))
        .collect();
    let bytes = serde_json::to_vec(&rows).unwrap_or_default();
    let call = Call::new("digests of each weight");
    let all = mesh.groups().world.gather_bytes(&bytes, &call)?;
    let read = |bytes: &Vec<u8>| -> Vec<Row> { serde_json::from_slice(bytes).unwrap_or_default() };
    let all: Vec<Vec<Row>> = all.iter().map(read).collect();
    match different(all) {
        none if none.is_empty() => Ok(()),
        weights => Err(EngineError::DifferentWeights(weights)),
    }
}

/// [`Held`], as ranks send it: name, expert, form, digest.
type Row = (String, Option<usize>, String, u64);

/// Returns the weights of which ranks hold different values, from what each rank holds.
fn different(all: Vec<Vec<Row>>) -> Vec<DifferentWeight> {
    let mut holders: BTreeMap<_, BTreeMap<u64, Vec<usize>>> = BTreeMap::new();
    for (rank, rows) in all.into_iter().enumerate() {
        for (name, expert, form, digest) in rows {
            let digests = holders.entry((name, expert, form)).or_default();
            digests.entry(digest).or_default().push(rank);
        }
    }
    let several = holders.into_iter().filter(|(_, digests)| digests.len() > 1);
    let of = |((name, expert, _), digests): (_, BTreeMap<u64, Vec<usize>>)| {
        let mut ranks: Vec<Vec<usize>> = digests.into_values().collect();
        // Most ranks first, then the first ranks: who reads it looks for the odd ones out.
        ranks.sort_by_key(|ranks| (usize::MAX - ranks.len(), ranks[0]));
        DifferentWeight {
            name,
            expert,
            ranks,
        }
    };
    several.map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn digest(bytes: &[u8], row: usize, at_a_time: usize) -> Digest {
        let mut digest = Digest::default();
        for rows in bytes.chunks(row * at_a_time) {
            digest.add(rows, row);
        }
        digest
    }

    #[test]
    fn a_digest_depends_on_every_byte_and_not_on_how_rows_come() {
        let bytes: Vec<u8> = (0..6 * 43).map(|n| n as u8).collect();
        let whole = digest(&bytes, 43, 6);
        for at_a_time in 1..6 {
            assert_eq!(digest(&bytes, 43, at_a_time), whole);
        }
        for at in 0..bytes.len() {
            let mut other = bytes.clone();
            other[at] ^= 0x80;
            assert_ne!(digest(&other, 43, 6), whole, "byte {at}");
        }
        let mut swapped = bytes.clone();
        swapped.rotate_left(43);
        assert_ne!(digest(&swapped, 43, 6), whole);
    }

    #[test]
    fn the_odd_ranks_out_come_last() {
        let row = |name: &str, digest| (name.to_string(), None, String::new(), digest);
        let rank = |router| vec![row("router.weight", router), row("router.bias", 1)];
        let found = different([7, 5, 7, 7].map(rank).to_vec());
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].name, "router.weight");
        assert_eq!(found[0].ranks, [vec![0, 2, 3], vec![1]]);
        let text = found[0].to_string();
        assert_eq!(
            text,
            "`router.weight`: one on ranks 0, 2, 3, another on rank 1"
        );
    }

    /// Values that one rank alone holds, and other shards or layouts of a weight, are no
    /// differences.
    #[test]
    fn only_what_several_ranks_hold_is_compared() {
        let row = |expert, form: &str, digest| {
            let name = "experts.up.weight".to_string();
            (name, Some(expert), form.to_string(), digest)
        };
        let ranks = vec![
            vec![row(0, "", 1), row(1, "", 2)],
            vec![row(1, "", 2), row(2, "", 3), row(3, "a", 4)],
            vec![row(3, "b", 5)],
        ];
        assert_eq!(different(ranks.clone()), []);
        let mut ranks = ranks;
        ranks[1][0].3 = 9;
        let found = different(ranks);
        assert_eq!(found[0].expert, Some(1));
        assert_eq!(found[0].ranks, [[0], [1]]);
    }
}
