//! The exchange of rows between tokens and experts in Rust that live on other ranks, through host
//! memory.

use crate::device_layer::DeviceLayer;
use crate::engine::Engine;
use crate::error::EngineError;
use crate::host::TokenCount;
use crate::mesh::{
    Mesh, PartsInFlight, ProcessGroup, Ranks, counted, floats, looks_at_all, sum_gradients,
};
use crate::reason::SpecReason;
use crate::row_bytes::{Direction, RowCaster};
use moesaic_collectives::Algorithm;
use moesaic_dist::{Chunk, OverlapBy};
use moesaic_plan::{Both, LayerPlan, Packed, PlanError, Strategy, TokenScope};
use moesaic_tensor::Tensor;
use std::ops::Range;

/// The ranks that share the experts of a layer, a whole expert on one of them.
pub(crate) struct ExpertRanks {
    ranks: Ranks,
    /// The experts of each rank of the group.
    owned: Vec<Vec<usize>>,
    /// This rank's index in the group.
    own: usize,
    /// The all-to-all algorithm of rows.
    algorithm: Algorithm,
    /// The number of chunks of this rank's experts.
    overlap_degree: Both<usize>,
    /// Whether each rank of the group is on another node.
    on_other_nodes: Vec<bool>,
    /// The casts of rows for other nodes, if they are cast.
    caster: Option<RowCaster>,
}

/// A pass of rows through experts.
#[derive(Clone, Copy)]
pub(crate) struct RowPass {
    pub backward: bool,
    /// Values of a row on the way to the experts, and back.
    pub widths: [usize; 2],
}

/// The numbers of rows of a call: `[rank][expert]`, of each rank's tokens.
pub(crate) type RowCounts = Vec<Vec<usize>>;

impl ExpertRanks {
    /// # Errors
    /// [`EngineError::Spec`] for a mesh that splits or replicates experts, or whose token scope is
    /// all ranks where the layer has to look at their tokens, and for settings of a strategy that
    /// such experts cannot follow; [`EngineError::Plan`] for a strategy that the mesh cannot have.
    pub fn new(
        engine: &Engine,
        mesh: &Mesh,
        plan: &LayerPlan,
        strategy: Strategy,
    ) -> Result<ExpertRanks, EngineError> {
        let spec = &plan.spec;
        let refuse = |problem| Err(EngineError::Spec(SpecReason::ExpertsMesh { problem }));
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
        if let Some((setting, reason)) = not_followed(&strategy) {
            let reason = SpecReason::ExpertsStrategy { setting, reason };
            return Err(EngineError::Spec(reason));
        }
        strategy.check(&parallel).map_err(PlanError::from)?;
        let ranks = engine.ranks(mesh);
        // Without the thread an exchange over MPI moves in calls alone, and experts make none.
        if strategy.overlap_degree != Both::same(1) {
            ranks.start_progress_thread();
        }
        let owned = (0..parallel.ep).map(|ep| placement.of(ep).to_vec());
        Ok(ExpertRanks {
            ranks,
            owned: owned.collect(),
            own: mesh.place().ep,
            algorithm: mesh.exchange_algorithm(strategy.all_to_all)?,
            overlap_degree: strategy.overlap_degree,
            on_other_nodes: mesh.on_other_nodes()?,
            caster: RowCaster::new(engine, plan, strategy.comm_dtype)?,
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

    /// Sends rows, sorted by expert, to the ranks of their experts, runs `compute` on them there,
    /// and returns its results in the order of the rows. `compute` gets a range of this rank's
    /// experts with their rows, by expert and then by rank; ranges come in order, and each is
    /// computed while the rows of the next are in flight.
    ///
    /// A chunk is a range of experts and no range of rows, because an expert of the caller may look
    /// at all of its rows: it gets those of all ranks in one call, as in one process.
    pub fn through_experts(
        &self,
        pass: RowPass,
        counts: &RowCounts,
        rows: &[f32],
        mut compute: impl FnMut(Range<usize>, Vec<f32>) -> Vec<f32>,
    ) -> Result<Vec<f32>, EngineError> {
        // Once in a pass, and all exchanges of the pass add to it.
        if let Some(caster) = &self.caster {
            caster.reset_saturated()?;
        }
        let chunks = self.chunks(pass.backward);
        let of_expert = slices(rows, &counts[self.own], pass.widths[0]);
        let start = |chunk| self.send_to_experts(pass, counts, &of_expert, chunk);
        let mut arriving = Some(start(chunks[0])?);
        let mut returning = Vec::new();
        for (&chunk, next) in chunks.iter().zip(1..) {
            let arrived = arriving.take().expect("started before the chunk");
            // Sent before this chunk is waited for: it moves while experts run, and all ranks start
            // exchanges in one order, which collectives need.
            if let Some(&next) = chunks.get(next) {
                arriving = Some(start(next)?);
            }
            let arrived = self.arrived(pass, Direction::ToExperts, arrived)?;
            let rows = self.by_expert(pass, counts, chunk, &arrived);
            let out = compute(self.owned(self.own, chunk), rows);
            returning.push(self.send_to_tokens(pass, counts, &out, chunk)?);
        }
        // Awaited behind all experts, since nothing of this pass can use a part of the rows.
        let mine = &counts[self.own];
        // A placement may give a rank experts that are no range, so rows do not return in order.
        let mut by_expert: Vec<Vec<f32>> = vec![Vec::new(); mine.len()];
        for (&chunk, arrived) in chunks.iter().zip(returning) {
            let arrived = self.arrived(pass, Direction::ToTokens, arrived)?;
            for (rank, rows) in arrived.iter().enumerate() {
                let owned = &self.owned[rank][self.owned(rank, chunk)];
                let counts: Vec<usize> = owned.iter().map(|&expert| mine[expert]).collect();
                for (&expert, rows) in owned.iter().zip(slices(rows, &counts, pass.widths[1])) {
                    by_expert[expert] = rows.to_vec();
                }
            }
        }
        Ok(by_expert.concat())
    }

    /// Returns the chunks of a pass.
    fn chunks(&self, backward: bool) -> Vec<Chunk> {
        let Both {
            forward,
            backward: back,
        } = self.overlap_degree;
        let of = if backward { back } else { forward };
        let chunk = |number| Chunk {
            number,
            of,
            by: OverlapBy::Rows,
        };
        (0..of).map(chunk).collect()
    }

    /// Returns the range of a rank's experts that a chunk has.
    fn owned(&self, rank: usize, chunk: Chunk) -> Range<usize> {
        chunk.part(self.owned[rank].len())
    }

    fn send_to_experts(
        &self,
        pass: RowPass,
        counts: &RowCounts,
        of_expert: &[&[f32]],
        chunk: Chunk,
    ) -> Result<PartsInFlight, EngineError> {
        let part = |rank: usize| {
            let owned = &self.owned[rank][self.owned(rank, chunk)];
            let each = owned.iter().map(|&expert| of_expert[expert]);
            each.collect::<Vec<_>>().concat()
        };
        // Sizes follow from the counts of all ranks, so an exchange needs no round before it and can
        // be started without waiting.
        let own = &self.owned[self.own][self.owned(self.own, chunk)];
        let arriving = |rank: usize| own.iter().map(|&expert| counts[rank][expert]).sum();
        self.start(pass, Direction::ToExperts, part, arriving)
    }

    /// Returns a chunk's rows from all ranks, by expert and then by rank.
    fn by_expert(
        &self,
        pass: RowPass,
        counts: &RowCounts,
        chunk: Chunk,
        arrived: &[Vec<f32>],
    ) -> Vec<f32> {
        let own = &self.owned[self.own][self.owned(self.own, chunk)];
        let of_rank = arrived.iter().zip(counts);
        let of_rank: Vec<Vec<&[f32]>> = of_rank
            .map(|(rows, counts)| {
                let counts: Vec<usize> = own.iter().map(|&expert| counts[expert]).collect();
                slices(rows, &counts, pass.widths[0])
            })
            .collect();
        let by_expert = (0..own.len()).flat_map(|at| of_rank.iter().map(move |rows| rows[at]));
        by_expert.collect::<Vec<_>>().concat()
    }

    /// Sends what experts made of their rows back.
    fn send_to_tokens(
        &self,
        pass: RowPass,
        counts: &RowCounts,
        rows: &[f32],
        chunk: Chunk,
    ) -> Result<PartsInFlight, EngineError> {
        let own = &self.owned[self.own][self.owned(self.own, chunk)];
        let each = own
            .iter()
            .flat_map(|&e| counts.iter().map(move |rows| rows[e]));
        let each = slices(rows, &each.collect::<Vec<_>>(), pass.widths[1]);
        let ranks = counts.len();
        let part = |rank: usize| {
            let of_rank = each.iter().skip(rank).step_by(ranks).copied();
            of_rank.collect::<Vec<_>>().concat()
        };
        let mine = &counts[self.own];
        let arriving = |rank: usize| {
            let owned = &self.owned[rank][self.owned(rank, chunk)];
            owned.iter().map(|&expert| mine[expert]).sum()
        };
        self.start(pass, Direction::ToTokens, part, arriving)
    }

    /// Starts an exchange of rows: `part` returns those for a rank, `arriving` the number of those
    /// from a rank.
    fn start(
        &self,
        pass: RowPass,
        direction: Direction,
        part: impl Fn(usize) -> Vec<f32>,
        arriving: impl Fn(usize) -> usize,
    ) -> Result<PartsInFlight, EngineError> {
        let width = pass.widths[direction as usize];
        let ranks = 0..self.owned.len();
        let bytes = ranks.clone().map(|rank| {
            let rows = part(rank);
            match self.cast(rank, pass, direction) {
                Some((caster, packed)) => caster.pack(packed, &rows, width),
                None => Ok(bytemuck::cast_slice(&rows).to_vec()),
            }
        });
        let bytes = bytes.collect::<Result<Vec<Vec<u8>>, EngineError>>()?;
        let bytes: Vec<&[u8]> = bytes.iter().map(|bytes| &**bytes).collect();
        let sizes = ranks.map(|rank| {
            let row = match self.cast(rank, pass, direction) {
                Some((_, packed)) => packed.row_bytes,
                None => width * size_of::<f32>(),
            };
            arriving(rank) * row
        });
        let what = match direction {
            Direction::ToExperts => "rows to experts",
            Direction::ToTokens => "rows from experts",
        };
        let (ranks, sizes) = (&self.ranks, sizes.collect());
        ranks.start_all_to_all(self.algorithm, &bytes, sizes, ProcessGroup::Ep, what)
    }

    /// Waits for rows of all ranks.
    fn arrived(
        &self,
        pass: RowPass,
        direction: Direction,
        request: PartsInFlight,
    ) -> Result<Vec<Vec<f32>>, EngineError> {
        let width = pass.widths[direction as usize];
        let arrived = request.wait()?.into_iter().enumerate();
        let rows = arrived.map(|(rank, bytes)| match self.cast(rank, pass, direction) {
            Some((caster, packed)) => caster.unpack(packed, &bytes, width),
            None => Ok(floats(&bytes)),
        });
        rows.collect()
    }

    /// Returns the cast of rows to or from a rank, if they are cast.
    fn cast(
        &self,
        rank: usize,
        pass: RowPass,
        direction: Direction,
    ) -> Option<(&RowCaster, &Packed)> {
        // Both ends decide alike, because a rank is remote to those that are remote to it.
        let caster = self.caster.as_ref().filter(|_| self.on_other_nodes[rank])?;
        Some((caster, caster.packed(pass.backward, direction)?))
    }

    /// Returns whether a backward pass counts values that are too large.
    pub fn counts_backward(&self) -> bool {
        self.caster.as_ref().is_some_and(RowCaster::counts_backward)
    }

    /// Returns the values of this pass that were too large, as an output.
    pub fn saturated(&self) -> Result<Tensor<'static>, EngineError> {
        self.caster
            .as_ref()
            .map_or_else(|| Ok(counted(0)), RowCaster::saturated)
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
}

/// Returns a setting of a strategy that rows of experts in Rust do not follow, with the reason.
fn not_followed(strategy: &Strategy) -> Option<(&'static str, &'static str)> {
    const OPAQUE: &str = "nobody but the expert itself knows its weights, so they have no shards and \
                          do not travel";
    let deduplicates = strategy.all_to_all.row().deduplicates;
    let settings = [
        (strategy.adaptive_r.is_some(), "r", OPAQUE),
        (strategy.shadows > 0, "shadows", OPAQUE),
        (
            strategy.overlap_by != OverlapBy::Rows,
            "overlap_by=peers",
            "an expert gets its rows of all ranks in one call, so a chunk is some of the experts",
        ),
        (
            deduplicates,
            "all_to_all=dedup",
            "each row belongs to one expert, which returns one row for it",
        ),
    ];
    let found = settings.into_iter().find(|(given, ..)| *given);
    found.map(|(_, setting, reason)| (setting, reason))
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
