//! The order of a model's configurations, many of which differ by less than predictions err.

use super::scenario::{ModelMesh, ModelPrediction, StageMemory};
use std::collections::BTreeMap;

/// The rule for configurations whose predicted times cannot tell which is faster: those whose step
/// is at most `error` longer than the fastest tie with it, and of these the ones that leave
/// `headroom` come first. Each part is in order of time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TieRule {
    /// The fraction by which a step may be longer than the fastest and still tie with it.
    pub error: f64,
    /// The fraction of a rank's memory that has to stay free of what a plan counts.
    pub headroom: f64,
}

impl Default for TieRule {
    /// Returns the rule of plans. Neither figure was chosen by the places of published meshes.
    fn default() -> Self {
        TieRule {
            // The mean error of predicted training steps; `validate` fails where it is another.
            error: 0.063,
            // Fujii, Watanabe and Yokota (arXiv 2411.06465): of 454 training jobs on A100 and H100
            // none ran out of memory whose estimated parameters, gradients, optimizer state and
            // activations took less than 80 %: fragments and temporary buffers fit into the rest.
            headroom: 0.2,
        }
    }
}

impl TieRule {
    /// Returns whether a rank with `limit` bytes of memory has the headroom.
    pub fn is_roomy(&self, memory: &StageMemory, limit: f64) -> bool {
        memory.counted() <= (1.0 - self.headroom) * limit
    }
}

/// The configurations that tie for the first place of a ranking.
#[derive(Clone, Debug)]
pub struct ModelTies {
    /// The rule.
    pub rule: TieRule,
    /// The number of meshes that tie: those at the head of the ranking.
    pub tied: usize,
    /// The number of these that leave the headroom: they come before the others.
    pub roomy: usize,
    /// The fastest configuration that fits in memory.
    pub fastest: ModelPrediction,
    /// The meshes in order of time alone.
    pub by_time: Vec<ModelMesh>,
}

/// The configurations that may stand for their mesh, while a search finds them.
#[derive(Debug)]
pub(super) struct Candidates {
    rule: Option<TieRule>,
    limit: f64,
    meshes: BTreeMap<ModelMesh, MeshBest>,
}

#[derive(Debug)]
struct MeshBest {
    fastest: ModelPrediction,
    /// The fastest with the headroom; a micro-batch less or some recomputation may buy it.
    roomy: Option<ModelPrediction>,
}

impl Candidates {
    /// Returns an empty list for ranks with `limit` bytes of memory. Without a rule, time alone
    /// counts.
    pub fn new(rule: Option<TieRule>, limit: f64) -> Candidates {
        Candidates {
            rule,
            limit,
            meshes: BTreeMap::new(),
        }
    }

    /// Adds a configuration that fits.
    pub fn add(&mut self, found: ModelPrediction) {
        let rule = self.rule.as_ref();
        let roomy = rule.is_some_and(|rule| rule.is_roomy(&found.memory, self.limit));
        let Some(own) = self.meshes.get_mut(&found.mesh) else {
            let best = MeshBest {
                roomy: roomy.then(|| found.clone()),
                fastest: found,
            };
            self.meshes.insert(best.fastest.mesh, best);
            return;
        };
        let faster = |own: &ModelPrediction| found.seconds < own.seconds;
        if roomy && own.roomy.as_ref().is_none_or(faster) {
            own.roomy = Some(found.clone());
        }
        if faster(&own.fastest) {
            own.fastest = found;
        }
    }

    /// Returns one configuration of each mesh, because schedules of the best mesh would fill the
    /// table, and the ties at the head of the list.
    pub fn ranked(self) -> (Vec<ModelPrediction>, Option<ModelTies>) {
        let mut fastest: Vec<&ModelPrediction> =
            self.meshes.values().map(|best| &best.fastest).collect();
        fastest.sort_by(|a, b| in_time(a, b));
        let ties = self
            .rule
            .zip(fastest.first())
            .map(|(rule, &first)| ModelTies {
                rule,
                tied: 0,
                roomy: 0,
                fastest: first.clone(),
                by_time: fastest.iter().map(|found| found.mesh).collect(),
            });
        let longest = ties.as_ref().map_or(0.0, ModelTies::longest);
        let (mut list, mut others) = (Vec::new(), Vec::new());
        for best in self.meshes.into_values() {
            match best.roomy.filter(|found| found.seconds <= longest) {
                Some(found) => list.push(found),
                None => others.push(best.fastest),
            }
        }
        let roomy = list.len();
        list.sort_by(in_time);
        others.sort_by(in_time);
        list.append(&mut others);
        // Others that tie are faster than those that do not, so all ties are at the head.
        let tied = list.iter().filter(|found| found.seconds <= longest).count();
        let ties = ties.map(|ties| ModelTies {
            tied,
            roomy,
            ..ties
        });
        (list, ties)
    }
}

impl ModelTies {
    /// Returns the seconds of the longest step that ties.
    fn longest(&self) -> f64 {
        self.fastest.seconds * (1.0 + self.rule.error)
    }
}

/// Compares by time. Meshes break ties, so that a ranking does not depend on the order of threads.
fn in_time(a: &ModelPrediction, b: &ModelPrediction) -> std::cmp::Ordering {
    a.seconds.total_cmp(&b.seconds).then(a.mesh.cmp(&b.mesh))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{RecomputeLevel, StepOrder};
    use moesaic_plan::Strategy;

    fn found(pp: usize, seconds: f64, bytes: f64) -> ModelPrediction {
        ModelPrediction {
            mesh: ModelMesh {
                pp,
                tp: 1,
                ep: 1,
                expert_tp: 1,
            },
            schedule: StepOrder {
                micro_batch: 1,
                virtual_stages: 1,
                recompute: RecomputeLevel::None,
                overlap_batches: false,
            },
            strategy: Strategy::default(),
            seconds,
            tokens_per_second: 0.0,
            flops: 0.0,
            mfu: None,
            micro_batches: 1,
            memory: StageMemory {
                weights: bytes,
                reserve: 10.0,
                ..StageMemory::default()
            },
            phases: Vec::new(),
            stages: Vec::new(),
            once: [0.0; 3],
        }
    }

    const RULE: TieRule = TieRule {
        error: 0.1,
        headroom: 0.2,
    };

    /// Ranks configurations of ranks with 100 bytes, and returns the stages of each mesh.
    fn order(rule: Option<TieRule>, all: &[ModelPrediction]) -> (Vec<usize>, Option<ModelTies>) {
        let mut candidates = Candidates::new(rule, 100.0);
        all.iter().cloned().for_each(|found| candidates.add(found));
        let (list, ties) = candidates.ranked();
        (list.iter().map(|found| found.mesh.pp).collect(), ties)
    }

    #[test]
    fn headroom_leads_ties_and_nothing_else() {
        let all = [
            found(1, 1.00, 90.0),
            found(2, 1.02, 85.0),
            found(3, 1.05, 80.0),
            found(4, 1.09, 10.0),
            found(5, 1.11, 10.0),
            found(6, 1.12, 90.0),
        ];
        let (list, ties) = order(Some(RULE), &all);
        assert_eq!(list, [3, 4, 1, 2, 5, 6]);
        let ties = ties.unwrap();
        assert_eq!((ties.tied, ties.roomy, ties.fastest.mesh.pp), (4, 2, 1));
        let by_time: Vec<usize> = ties.by_time.iter().map(|mesh| mesh.pp).collect();
        assert_eq!(by_time, [1, 2, 3, 4, 5, 6]);
        let (list, ties) = order(None, &all);
        assert_eq!(list, [1, 2, 3, 4, 5, 6]);
        assert!(ties.is_none());
    }

    /// A mesh is proposed with the schedule that leaves headroom, where that ties.
    #[test]
    fn a_mesh_may_have_a_slower_schedule_with_headroom() {
        let (list, ties) = order(
            Some(RULE),
            &[
                found(1, 1.00, 90.0),
                found(1, 1.04, 70.0),
                found(1, 1.03, 75.0),
                found(2, 1.02, 95.0),
                found(2, 1.20, 10.0),
            ],
        );
        assert_eq!(list, [1, 2]);
        let ties = ties.unwrap();
        assert_eq!((ties.tied, ties.roomy, ties.fastest.seconds), (2, 1, 1.0));
    }

    /// Without any headroom in a tie, the fastest leads; without any configuration nothing ties.
    #[test]
    fn time_decides_where_nothing_has_headroom() {
        let full = [found(1, 1.02, 90.0), found(2, 1.0, 90.0)];
        let (list, ties) = order(Some(RULE), &full);
        assert_eq!((list, ties.unwrap().roomy), (vec![2, 1], 0));
        assert!(order(Some(RULE), &[]).1.is_none());
    }
}
