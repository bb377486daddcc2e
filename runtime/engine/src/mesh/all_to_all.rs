//! All-to-all schedules of rows over the nodes of a mesh.

use super::groups::Mesh;
use super::rows::{Rows, SendCounts};
use crate::error::EngineError;
use bytemuck::{cast_slice, cast_slice_mut};
use moesaic_collectives::schedules::{
    self, AddendRow, DedupCombine, DedupMap, HopCounts, RowBlock, RowBytes, Schedule,
};
use moesaic_collectives::{
    Algorithm, Call, CollectiveError, Collectives, CommElement, InvalidReason, NodeRank, NodeShape,
    Slice, Transfer,
};
use moesaic_dist::{CollectiveOp, Payload};
use moesaic_plan::{AdaptiveMesh, AllToAll, PlanError, StrategyError};
use moesaic_target::{Buffer, Device};
use std::ops::Range;
use std::sync::Arc;

/// The schedule by which ranks exchange rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RowSchedule {
    /// From every rank directly to every rank.
    Direct,
    /// In several hops, over other ranks.
    OverNodes(Algorithm),
    /// Deduplicated: a token's row goes once to each node, to the rank with the same index there,
    /// and comes back as one sum. Rows that differ from expert to expert go between nodes first,
    /// every one of them.
    Dedup(NodeShape),
}

/// The content of an exchange's rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RowContent {
    /// The operation: to experts or back.
    pub op: CollectiveOp,
    pub payload: Payload,
    /// The element type of the rows.
    pub element: CommElement,
}

impl Mesh {
    /// Returns the schedule of an all-to-all algorithm at an adaptive parallelism degree. Where
    /// rows stay, the schedule is direct.
    ///
    /// # Errors
    /// [`StrategyError::Nodes`] where ranks do not lie on nodes as the algorithm needs it.
    pub(super) fn row_schedule(
        &self,
        all_to_all: AllToAll,
        by: AdaptiveMesh,
    ) -> Result<RowSchedule, EngineError> {
        let row = all_to_all.row();
        // At r = 0 rows stay, so nodes do not matter and any nodes are allowed.
        if row.is_direct() || by.adaptive_r() == 0 {
            return Ok(RowSchedule::Direct);
        }
        let hosts = self.hosts_of_group(by);
        let shape = if row.needs_nodes() {
            shape(&hosts).map_err(|reason| {
                let error = StrategyError::Nodes { all_to_all, reason };
                EngineError::from(PlanError::from(error))
            })?
        } else {
            NodeShape {
                nodes: hosts.len(),
                per_node: 1,
            }
        };
        Ok(if row.deduplicates {
            RowSchedule::Dedup(shape)
        } else {
            RowSchedule::OverNodes(row.algorithm(shape))
        })
    }

    /// Returns the algorithm by which rows travel that are all different, as those of
    /// [`UserLayer`](crate::UserLayer) are.
    ///
    /// # Errors
    /// As [`Mesh::row_schedule`].
    pub(crate) fn exchange_algorithm(
        &self,
        all_to_all: AllToAll,
    ) -> Result<Algorithm, EngineError> {
        let parallel = self.parallel();
        let by = AdaptiveMesh::new(parallel, parallel.expert_tp).map_err(PlanError::from)?;
        Ok(match self.row_schedule(all_to_all, by)? {
            RowSchedule::OverNodes(algorithm) => algorithm,
            // Of different rows nothing is left out.
            RowSchedule::Direct | RowSchedule::Dedup(_) => Algorithm::Direct,
        })
    }

    /// Returns whether each of the ranks that exchange rows is on another node, where all ranks
    /// have whole experts.
    pub(crate) fn on_other_nodes(&self) -> Result<Vec<bool>, EngineError> {
        let by = AdaptiveMesh::new(self.parallel(), 1).map_err(PlanError::from)?;
        let own = &self.hosts()[self.rank()];
        let hosts = self.hosts_of_group(by).into_iter();
        Ok(hosts.map(|host| host != *own).collect())
    }

    /// Returns the hosts of the ranks that exchange rows.
    fn hosts_of_group(&self, by: AdaptiveMesh) -> Vec<String> {
        let own = by.place(self.rank()).dp;
        let members = self.hosts().iter().enumerate();
        let members = members.filter(|(rank, _)| by.place(*rank).dp == own);
        members.map(|(_, host)| host.clone()).collect()
    }
}

/// Returns the nodes of ranks on these hosts, or a text of how the ranks lie.
fn shape(hosts: &[String]) -> Result<NodeShape, String> {
    NodeShape::of_hosts(hosts).ok_or_else(|| format!("ranks lie on {}", runs(hosts)))
}

/// Returns the first few runs of hosts, as in `a (2), b (1), a (1)`.
fn runs(hosts: &[String]) -> String {
    const SHOWN: usize = 6;
    let runs = hosts.chunk_by(|a, b| a == b);
    let text = |run: &[String]| format!("{} ({})", run[0], run.len());
    let mut list: Vec<String> = runs.map(text).collect();
    let more = list.len() > SHOWN;
    list.truncate(SHOWN);
    if more {
        list.push("...".to_string());
    }
    list.join(", ")
}

impl Rows {
    /// Exchanges row counts over the hops of an algorithm. Returns the counts that the other ranks have for this rank, the same number from
    /// each, and the counts of rows that pass through it.
    pub fn exchange_counts(
        group: &mut dyn Collectives,
        algorithm: Algorithm,
        SendCounts { counts, sizes }: &SendCounts,
        call: &Call,
    ) -> Result<(Vec<i64>, Arc<HopCounts>), EngineError> {
        // Every rank sends the same number of counts to every rank: a rank that passes counts on
        // does not know how many experts their receiver has.
        let chunks = sizes.iter().copied().max().unwrap_or(0).max(1);
        let mut units = vec![0; chunks * sizes.len()];
        let mut counts = counts.iter();
        for (row, &size) in units.chunks_exact_mut(chunks).zip(sizes) {
            for (unit, count) in row.iter_mut().zip(counts.by_ref().take(size)) {
                *unit = *count as u64;
            }
        }
        let hop_counts = group.exchange_counts(algorithm, chunks, &units, call)?;
        let own = sizes[group.rank()];
        let rows = hop_counts.received().chunks_exact(chunks);
        let counted = rows.flat_map(|row| row[..own].iter().map(|units| *units as i64));
        Ok((counted.collect(), Arc::new(hop_counts)))
    }

    /// Returns the schedule of some chunks' rows; `None` where they travel directly. `crosses`
    /// returns whether two ranks are on different nodes.
    pub fn schedule(
        &self,
        content: RowContent,
        chunks: &Range<usize>,
        bytes: RowBytes,
        crosses: &dyn Fn(usize, usize) -> bool,
    ) -> Option<Box<dyn Schedule>> {
        let hop_counts = self.hop_counts_of(chunks)?;
        let row = |block: RowBlock| {
            if crosses(block.from, block.to) {
                bytes.far
            } else {
                bytes.near
            }
        };
        let size = |block: RowBlock| block.units as usize * row(block);
        let RowContent {
            op,
            payload,
            element,
        } = content;
        Some(match (payload, self.dedup_of(chunks)) {
            (Payload::PerToken, Some(dedup)) => Box::new(dedup.of_rows(bytes)),
            (Payload::PartialSums, Some(_)) => Box::new(self.sums(
                chunks,
                AddendRow {
                    element,
                    bytes: bytes.near,
                },
            )?),
            _ if op == CollectiveOp::Dispatch => Box::new(hop_counts.there(&size)),
            _ => Box::new(hop_counts.back(&|block| {
                // Only shards of the same index answer each other, so the blocks of the others are
                // empty on the way back, on every rank that passes them on.
                let answers = self.answers_to(block.from, block.to);
                if answers { size(block) } else { 0 }
            })),
        })
    }

    /// Returns how answers of some chunks are summed inside nodes, with deduplicated dispatch.
    pub fn sums(&self, chunks: &Range<usize>, row: AddendRow) -> Option<DedupCombine> {
        let answers = |from, to| self.answers_to(from, to);
        Some(self.dedup_of(chunks)?.summed(row, &answers))
    }

    fn hop_counts_of(&self, chunks: &Range<usize>) -> Option<Arc<HopCounts>> {
        let whole = self.hop_counts.as_ref()?;
        Some(match self.chunks() {
            1 => Arc::clone(whole),
            _ => Arc::new(whole.in_parts(chunks.clone(), &self.blocks_of_chunk())),
        })
    }

    fn dedup_of(&self, chunks: &Range<usize>) -> Option<Arc<DedupMap>> {
        let whole = self.dedup.as_ref()?;
        Some(match self.chunks() {
            1 => Arc::clone(whole),
            _ => Arc::new(whole.in_parts(chunks.clone(), &self.blocks_of_chunk())),
        })
    }

    /// Returns the units of a block that belong to a chunk.
    fn blocks_of_chunk(&self) -> impl Fn(usize, RowBlock) -> Range<usize> {
        |number, block| self.part_of(number, block.units as usize, (block.from, block.to))
    }

    /// Exchanges, between ranks of the same index in their nodes, which rows for the other's node
    /// belong to one token; `tokens` has the token of each row of this rank.
    pub fn exchange_dedup_map(
        &mut self,
        group: &mut dyn Collectives,
        device: &dyn Device,
        shape: NodeShape,
        tokens: &[u32],
        call: &Call,
    ) -> Result<(), EngineError> {
        let Some(hop_counts) = self.hop_counts.clone() else {
            return Ok(());
        };
        let NodeRank { node, place } = shape.split(group.rank());
        let sent = self.sent(&self.numbers(None));
        // A node gets a number for each of its rows: equal numbers are one token, whose row crosses
        // once. The token's own index would tell it nothing more.
        let numbers = |other: usize| {
            let there = sent
                .iter()
                .filter(|chunk| shape.split(chunk.peer).node == other);
            let rows = there.flat_map(|chunk| chunk.first..chunk.first + chunk.rows);
            schedules::dedup_indices(rows.map(|row| tokens[row]))
        };
        let sent: Vec<Vec<u32>> = (0..shape.nodes).map(numbers).collect();
        let counted = |other: usize| {
            if other == node {
                0
            } else {
                DedupMap::rows_through(&hop_counts, shape, other)
            }
        };
        let sizes: Vec<usize> = (0..shape.nodes).map(counted).collect();
        let own: Vec<&[u32]> = (0..shape.nodes)
            .map(|other| if other == node { &[][..] } else { &sent[other] })
            .collect();
        let (starts, ends) = (
            starts(own.iter().map(|list| list.len())),
            starts(sizes.iter().copied()),
        );
        let buffer = |list: &[usize]| {
            let count = list.last().copied().unwrap_or(0);
            Ok::<_, EngineError>(Arc::new(device.alloc(4 * count.max(16))?))
        };
        let (input, output) = (buffer(&starts)?, buffer(&ends)?);
        device.upload(cast_slice(&own.concat()), &input, 0)?;
        let transfers = |buffer: &Arc<Buffer>, starts: &[usize]| {
            let edges = starts
                .windows(2)
                .enumerate()
                .filter(|(_, edge)| edge[1] > edge[0]);
            let transfer = |(other, edge): (usize, &[usize])| {
                let slice = Slice::new(buffer, CommElement::I32, edge[0], edge[1] - edge[0])?;
                let peer = shape.rank(other, place);
                Ok::<_, EngineError>(Transfer { peer, slice })
            };
            edges.map(transfer).collect::<Result<Vec<_>, _>>()
        };
        let (sends, receives) = (transfers(&input, &starts)?, transfers(&output, &ends)?);
        group.exchange(&sends, &receives, call)?.wait()?;
        let mut all = vec![0u32; ends.last().copied().unwrap_or(0)];
        device.download(&output, 0, cast_slice_mut(&mut all))?;
        let passed = ends.windows(2).map(|edge| all[edge[0]..edge[1]].to_vec());
        let dedup = DedupMap::new(shape, group.rank(), hop_counts, sent, passed.collect());
        let dedup = dedup.ok_or_else(|| CollectiveError::Invalid {
            operation: call.label.clone(),
            reason: InvalidReason::Rows,
        })?;
        self.dedup = Some(Arc::new(dedup));
        Ok(())
    }
}

/// Returns the start of each part, and the end of all.
fn starts(sizes: impl Iterator<Item = usize>) -> Vec<usize> {
    schedules::offsets(&sizes.collect::<Vec<_>>())
}
