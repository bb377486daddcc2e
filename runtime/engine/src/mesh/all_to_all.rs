//! Routes of rows over the nodes that ranks are on.

use super::groups::Mesh;
use super::rows::Rows;
use crate::error::EngineError;
use bytemuck::{cast_slice, cast_slice_mut};
use moesaic_collectives::plan::{
    self, Block, DedupCombine, DedupMap, HopCounts, RowBytes, Schedule,
};
use moesaic_collectives::{
    Algorithm, Call, CollectiveError, Collectives, Element, NodeShape, Slice, Transfer,
};
use moesaic_plan::{AdaptiveMesh, AllToAll, PlanError, StrategyError};
use moesaic_target::{Buffer, Device};
use std::ops::Range;
use std::sync::Arc;

/// How rows go among the ranks that exchange them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RowSchedule {
    /// From each rank to each.
    Direct,
    /// By way of other ranks.
    OverNodes(Algorithm),
    /// Once to each node, by way of the rank of the same place there, and back as one sum.
    /// What differs from expert to expert goes group nodes first, each row of it.
    Dedup(NodeShape),
}

/// What rows of an exchange are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Payload {
    /// On their way to experts; all those of a token are equal.
    Tokens,
    /// On their way to experts.
    Rows,
    /// On their way back.
    Answers,
    /// On their way back; those of a token are added up, and nothing else is done with them.
    Addends(Element),
}

impl Mesh {
    /// How rows go by a route at some adaptive parallelism degree; those that stay, straight.
    ///
    /// # Errors
    /// [`StrategyError::Nodes`] where ranks do not lie on nodes as the route needs it.
    pub(super) fn row_schedule(
        &self,
        all_to_all: AllToAll,
        by: AdaptiveMesh,
    ) -> Result<RowSchedule, EngineError> {
        if all_to_all == AllToAll::Linear || by.count() == 0 {
            return Ok(RowSchedule::Direct);
        }
        let shape = self.shape(by).map_err(|reason| {
            let error = StrategyError::Nodes { all_to_all, reason };
            EngineError::from(PlanError::from(error))
        })?;
        Ok(match all_to_all {
            AllToAll::Linear => RowSchedule::Direct,
            AllToAll::TwoDh => RowSchedule::OverNodes(Algorithm::Hierarchical(shape)),
            AllToAll::TwoDhInterFirst => RowSchedule::OverNodes(Algorithm::InterFirst(shape)),
            AllToAll::TwoDhConcurrent => RowSchedule::OverNodes(Algorithm::Concurrent(shape)),
            AllToAll::Dedup => RowSchedule::Dedup(shape),
        })
    }

    /// The nodes of the ranks that exchange rows, or how these lie.
    fn shape(&self, by: AdaptiveMesh) -> Result<NodeShape, String> {
        let own = by.place(self.rank()).dp;
        let members = self.hosts().iter().enumerate();
        let members = members.filter(|(rank, _)| by.place(*rank).dp == own);
        let hosts: Vec<String> = members.map(|(_, host)| host.clone()).collect();
        NodeShape::of_hosts(&hosts).ok_or_else(|| format!("ranks lie on {}", runs(&hosts)))
    }
}

/// `2 of a, 1 of b, 1 of a`, the first few.
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
    /// Ranks tell each other over the ways of an algorithm how many rows they have for the
    /// experts of each, `sizes[q]` numbers of `counts` for rank `q`. Returns what the others
    /// have for this rank, as many numbers of each, and what passes through it.
    pub fn tell(
        group: &mut dyn Collectives,
        algorithm: Algorithm,
        (counts, sizes): (&[i64], &[usize]),
        call: &Call,
    ) -> Result<(Vec<i64>, Arc<HopCounts>), EngineError> {
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
        let told = rows.flat_map(|row| row[..own].iter().map(|units| *units as i64));
        Ok((told.collect(), Arc::new(hop_counts)))
    }

    /// How rows of chunks go by way of other ranks; `None` where they go straight. `crosses`
    /// says whether two ranks are on different nodes.
    pub fn schedule(
        &self,
        load: Payload,
        chunks: &Range<usize>,
        (bytes, crosses): (RowBytes, &dyn Fn(usize, usize) -> bool),
    ) -> Option<Box<dyn Schedule>> {
        let hop_counts = self.hop_counts_of(chunks)?;
        let row = |block: Block| {
            if crosses(block.from, block.to) {
                bytes.far
            } else {
                bytes.near
            }
        };
        let size = |block: Block| block.units as usize * row(block);
        Some(match (load, self.dedup_of(chunks)) {
            (Payload::Tokens, Some(dedup)) => Box::new(dedup.of_rows(bytes)),
            (Payload::Tokens | Payload::Rows, _) => Box::new(hop_counts.there(&size)),
            (Payload::Addends(element), Some(_)) => {
                Box::new(self.sums(chunks, (element, bytes.near))?)
            }
            (Payload::Answers | Payload::Addends(_), _) => Box::new(hop_counts.back(&|block| {
                let answers = self.answers_to(block.from, block.to);
                if answers { size(block) } else { 0 }
            })),
        })
    }

    /// How answers of chunks are summed inside nodes, where each token crosses once.
    pub fn sums(&self, chunks: &Range<usize>, row: (Element, usize)) -> Option<DedupCombine> {
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

    /// What is in a chunk, as collectives ask for it.
    fn blocks_of_chunk(&self) -> impl Fn(usize, Block) -> Range<usize> {
        |number, block| self.part_of(number, block.units as usize, (block.from, block.to))
    }

    /// Ranks of equal places tell each other which rows for each other's nodes are of one
    /// token; `tokens` has that of each row of this rank.
    pub fn exchange_dedup_map(
        &mut self,
        group: &mut dyn Collectives,
        device: &dyn Device,
        (shape, tokens): (NodeShape, &[u32]),
        call: &Call,
    ) -> Result<(), EngineError> {
        let Some(hop_counts) = self.hop_counts.clone() else {
            return Ok(());
        };
        let (node, place) = shape.split(group.rank());
        let sent = self.sent(&self.numbers(None));
        let numbers = |other: usize| {
            let there = sent
                .iter()
                .filter(|chunk| shape.split(chunk.peer).0 == other);
            let rows = there.flat_map(|chunk| chunk.first..chunk.first + chunk.rows);
            plan::dedup_indices(rows.map(|row| tokens[row]))
        };
        let sent: Vec<Vec<u32>> = (0..shape.nodes).map(numbers).collect();
        let told = |other: usize| {
            if other == node {
                0
            } else {
                DedupMap::rows_through(&hop_counts, shape, other)
            }
        };
        let sizes: Vec<usize> = (0..shape.nodes).map(told).collect();
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
                let slice = Slice::new(buffer, Element::I32, edge[0], edge[1] - edge[0])?;
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
            reason: "ranks have told of other tokens than of rows".to_string(),
        })?;
        self.dedup = Some(Arc::new(dedup));
        Ok(())
    }
}

/// Where parts of these sizes begin, and their end.
fn starts(sizes: impl Iterator<Item = usize>) -> Vec<usize> {
    plan::offsets(&sizes.collect::<Vec<_>>())
}
