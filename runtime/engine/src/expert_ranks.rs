//! The exchange of rows between tokens and experts in Rust that live on other ranks, through host
//! memory.

use crate::device_layer::DeviceLayer;
use crate::error::EngineError;
use crate::host::TokenCount;
use crate::mesh::{Mesh, ProcessGroup, Ranks, looks_at_all, sum_gradients};
use moesaic_collectives::Algorithm;
use moesaic_plan::{Strategy, TokenScope};
use moesaic_spec::LayerSpec;

/// The ranks that share the experts of a layer, a whole expert on one of them.
pub(crate) struct ExpertRanks {
    ranks: Ranks,
    /// The experts of each rank of the group.
    owned: Vec<Vec<usize>>,
    /// This rank's index in the group.
    own: usize,
    /// The all-to-all algorithm of rows.
    algorithm: Algorithm,
}

/// The numbers of rows of a call: `[rank][expert]`, of each rank's tokens.
pub(crate) type RowCounts = Vec<Vec<usize>>;

impl ExpertRanks {
    /// # Errors
    /// [`EngineError::Spec`] for a mesh that splits or replicates experts, or whose token scope is
    /// all ranks where the layer has to look at their tokens, and for a strategy with more than an
    /// all-to-all algorithm; [`EngineError::Plan`] for nodes that the algorithm cannot have.
    pub fn new(
        ranks: Ranks,
        mesh: &Mesh,
        spec: &LayerSpec,
        strategy: Strategy,
    ) -> Result<ExpertRanks, EngineError> {
        let refuse = |problem: &str| Err(EngineError::Spec(format!("  experts in Rust {problem}")));
        let parallel = mesh.parallel();
        if parallel.expert_tp > 1 {
            return refuse("are whole: set `expert_tp = 1`");
        }
        // Each rank routes its own tokens here, which is right for rules that look at one token.
        let looks = looks_at_all(spec, true) || !spec.losses.is_empty();
        if mesh.scope() == TokenScope::World && looks {
            return refuse(
                "behind a capacity, losses or a selection over tokens take a mesh of \
                 `TokenScope::Rank`",
            );
        }
        let Some(placement) = mesh.placement_of(spec.shape.experts) else {
            return refuse("need one for each rank at least, as many as the placement has");
        };
        if !placement.replicated().is_empty() {
            return refuse("have no replicas: a copy would have gradients of its own");
        }
        if let Some(setting) = not_followed(&strategy) {
            return refuse(&format!(
                "take the `all_to_all` of a strategy, linear, 2dh or ring, and no `{setting}`: each \
                 row belongs to one expert and travels as it is"
            ));
        }
        let owned = (0..parallel.ep).map(|ep| placement.of(ep).to_vec());
        Ok(ExpertRanks {
            ranks,
            owned: owned.collect(),
            own: mesh.place().ep,
            algorithm: mesh.exchange_algorithm(strategy.all_to_all)?,
        })
    }

    /// Returns the number of this rank's experts.
    pub fn count(&self) -> usize {
        self.owned[self.own].len()
    }

    /// Returns the tokens of this rank and of the rank with the most, and of the ranks before.
    pub fn tokens(&self, own: usize) -> Result<(TokenCount, u64), EngineError> {
        let world = ProcessGroup::World;
        let bytes = (own as u64).to_le_bytes();
        let all = self.ranks.gather_bytes(&bytes, world, "tokens of a call")?;
        let all: Vec<u64> = all.iter().flat_map(|bytes| numbers(bytes)).collect();
        let most = all.iter().copied().max().unwrap_or(0) as usize;
        let before = all[..self.ranks.mesh().rank()].iter().sum();
        Ok((TokenCount { own, most }, before))
    }

    /// Gathers every rank's rows for every expert; `offsets` are this rank's.
    pub fn counts(&self, offsets: &[usize]) -> Result<RowCounts, EngineError> {
        // Every rank gets the counts of all, not only of rows for itself: what it sends back has the
        // same shape, so the way back needs no counts of its own.
        let own = offsets.windows(2).map(|edges| (edges[1] - edges[0]) as u64);
        let bytes: Vec<u8> = own.flat_map(u64::to_le_bytes).collect();
        let what = "rows for experts";
        let all = self.ranks.gather_bytes(&bytes, ProcessGroup::Ep, what)?;
        let rows = |bytes: &Vec<u8>| numbers(bytes).map(|n| n as usize).collect();
        Ok(all.iter().map(rows).collect())
    }

    /// Returns the first row of each of this rank's experts, and the number of all.
    pub fn offsets(&self, counts: &RowCounts) -> Vec<usize> {
        let mut offsets = vec![0];
        for &expert in &self.owned[self.own] {
            let rows: usize = counts.iter().map(|rows| rows[expert]).sum();
            offsets.push(offsets[offsets.len() - 1] + rows);
        }
        offsets
    }

    /// Sends rows, sorted by expert, to the ranks of their experts. Returns the rows for this
    /// rank's, by expert and then by rank.
    pub fn to_experts(
        &self,
        counts: &RowCounts,
        rows: &[f32],
        width: usize,
    ) -> Result<Vec<f32>, EngineError> {
        let of_expert = slices(rows, &counts[self.own], width);
        let part = |owned: &Vec<usize>| {
            let each = owned.iter().map(|&expert| of_expert[expert]);
            each.collect::<Vec<_>>().concat()
        };
        let parts: Vec<Vec<f32>> = self.owned.iter().map(part).collect();
        let arrived = self.exchange(&parts, "rows to experts")?;
        let own = &self.owned[self.own];
        let of_rank = arrived.iter().zip(counts);
        let of_rank: Vec<Vec<&[f32]>> = of_rank
            .map(|(rows, counts)| {
                let counts: Vec<usize> = own.iter().map(|&expert| counts[expert]).collect();
                slices(rows, &counts, width)
            })
            .collect();
        // An expert gets its rows of all ranks in one call, as one process would give them: it may
        // look at all of them, and its weights are read once.
        let by_expert = (0..own.len()).flat_map(|at| of_rank.iter().map(move |rows| rows[at]));
        Ok(by_expert.collect::<Vec<_>>().concat())
    }

    /// Sends what experts made of their rows back, the inverse of [`ExpertRanks::to_experts`].
    pub fn to_tokens(
        &self,
        counts: &RowCounts,
        rows: &[f32],
        width: usize,
    ) -> Result<Vec<f32>, EngineError> {
        let own = &self.owned[self.own];
        let each = own
            .iter()
            .flat_map(|&e| counts.iter().map(move |rows| rows[e]));
        let each = slices(rows, &each.collect::<Vec<_>>(), width);
        let ranks = counts.len();
        let part = |rank: usize| {
            let of_rank = each.iter().skip(rank).step_by(ranks).copied();
            of_rank.collect::<Vec<_>>().concat()
        };
        let parts: Vec<Vec<f32>> = (0..ranks).map(part).collect();
        let arrived = self.exchange(&parts, "rows from experts")?;
        let mine = &counts[self.own];
        // A placement may give a rank experts that are no range, so rows do not return in order.
        let mut by_expert: Vec<&[f32]> = vec![&[]; mine.len()];
        for (rows, owned) in arrived.iter().zip(&self.owned) {
            let counts: Vec<usize> = owned.iter().map(|&expert| mine[expert]).collect();
            for (&expert, rows) in owned.iter().zip(slices(rows, &counts, width)) {
                by_expert[expert] = rows;
            }
        }
        Ok(by_expert.concat())
    }

    /// Sums the gradients of a layer that every rank holds.
    pub fn sum_gradients(&self, layer: &DeviceLayer) -> Result<(), EngineError> {
        sum_gradients(layer, self.ranks.mesh())
    }

    /// Sums gradients of this rank's experts over the ranks with copies of them.
    pub fn sum_over_copies(&self, gradients: &mut [&mut [f32]]) -> Result<(), EngineError> {
        if self.ranks.mesh().parallel().dp == 1 {
            return Ok(());
        }
        let mut all = gradients.concat();
        let group = ProcessGroup::ExpertDp;
        self.ranks.sum(&mut all, group, "gradients of experts")?;
        let mut rest = &all[..];
        for own in gradients {
            let (sums, behind) = rest.split_at(own.len());
            own.copy_from_slice(sums);
            rest = behind;
        }
        Ok(())
    }

    fn exchange(&self, parts: &[Vec<f32>], what: &str) -> Result<Vec<Vec<f32>>, EngineError> {
        let group = ProcessGroup::Ep;
        self.ranks.all_to_all_by(self.algorithm, parts, group, what)
    }
}

/// Returns a setting of a strategy that rows in host memory do not follow.
fn not_followed(strategy: &Strategy) -> Option<&'static str> {
    let default = Strategy::default();
    let settings = [
        (strategy.adaptive_r.is_some(), "r"),
        (
            strategy.overlap_degree != default.overlap_degree,
            "overlap_degree",
        ),
        (strategy.comm_dtype != default.comm_dtype, "comm_dtype"),
        (strategy.shadows > 0, "shadows"),
        (strategy.all_to_all.row().deduplicates, "all_to_all=dedup"),
    ];
    let found = settings.into_iter().find(|(given, _)| *given);
    found.map(|(_, setting)| setting)
}

/// Splits consecutive rows by their counts.
fn slices<'r>(rows: &'r [f32], counts: &[usize], width: usize) -> Vec<&'r [f32]> {
    let mut rest = rows;
    let slice = |count: &usize| {
        let (slice, behind) = rest.split_at(count * width);
        rest = behind;
        slice
    };
    counts.iter().map(slice).collect()
}

fn numbers(bytes: &[u8]) -> impl Iterator<Item = u64> {
    let each = bytes.as_chunks().0.iter();
    each.map(|&number| u64::from_le_bytes(number))
}
