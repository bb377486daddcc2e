//! Routes of rows over the nodes that ranks are on.

use super::groups::Mesh;
use super::rows::Rows;
use crate::error::EngineError;
use moesaic_collectives::plan::{Journey, Passage};
use moesaic_collectives::{Algorithm, Call, Collectives, NodeShape};
use moesaic_plan::{PlanError, Route, StrategyError};
use std::sync::Arc;

impl Mesh {
    /// How rows go by a route among the ranks that exchange them.
    ///
    /// # Errors
    /// [`StrategyError::Nodes`] where ranks do not lie on nodes as the route needs it.
    pub(super) fn algorithm(&self, route: Route) -> Result<Algorithm, EngineError> {
        if route == Route::Linear {
            return Ok(Algorithm::Direct);
        }
        let shape = self.shape().map_err(|reason| {
            let error = StrategyError::Nodes { route, reason };
            EngineError::from(PlanError::from(error))
        })?;
        match route {
            Route::Linear => Ok(Algorithm::Direct),
            Route::IntraFirst => Ok(Algorithm::Hierarchical(shape)),
            Route::InterFirst => Ok(Algorithm::InterFirst(shape)),
            Route::Concurrent => Ok(Algorithm::Concurrent(shape)),
            Route::Once => {
                let error = StrategyError::NotYet("route=once".to_string());
                Err(PlanError::from(error).into())
            }
        }
    }

    /// The nodes of the ranks that exchange rows, or how these lie.
    fn shape(&self) -> Result<NodeShape, String> {
        let ranks = self.parallel().group();
        let first = self.place().dp * ranks;
        let hosts = &self.hosts()[first..first + ranks];
        NodeShape::of_hosts(hosts).ok_or_else(|| format!("ranks lie on {}", runs(hosts)))
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
    ) -> Result<(Vec<i64>, Arc<Passage>), EngineError> {
        let pieces = sizes.iter().copied().max().unwrap_or(0).max(1);
        let mut units = vec![0; pieces * sizes.len()];
        let mut counts = counts.iter();
        for (row, &size) in units.chunks_exact_mut(pieces).zip(sizes) {
            for (unit, count) in row.iter_mut().zip(counts.by_ref().take(size)) {
                *unit = *count as u64;
            }
        }
        let passage = group.tell(algorithm, pieces, &units, call)?;
        let own = sizes[group.rank()];
        let rows = passage.received().chunks_exact(pieces);
        let told = rows.flat_map(|row| row[..own].iter().map(|units| *units as i64));
        Ok((told.collect(), Arc::new(passage)))
    }

    /// How rows of so many bytes go to the experts by way of other ranks, or back from there;
    /// `None` where they go straight.
    pub fn journey(&self, back: bool, row_bytes: usize) -> Option<Journey> {
        let passage = self.passage()?;
        let bytes = |units: u64| units as usize * row_bytes;
        Some(match back {
            false => passage.there(&|leg| bytes(leg.units)),
            true => passage.back(&|leg| match self.answers_to(leg.from, leg.to) {
                true => bytes(leg.units),
                false => 0,
            }),
        })
    }
}
