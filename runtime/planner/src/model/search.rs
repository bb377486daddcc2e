//! The search for the fastest configurations of a model.

use super::evaluate::{evaluate, layer_key};
use super::layer::{LayerChoices, LayerKey, Strategies, choices};
use super::memory::RankParameters;
use super::ranking::{Candidates, ModelTies, TieRule};
use super::scenario::{ModelMesh, ModelPrediction, ModelScenario, RecomputeLevel, StepOrder};
use super::stages::StageLayers;
use moesaic_plan::CommDtype;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The configurations of a model to search.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelSpace {
    /// Search this mesh only.
    pub mesh: Option<ModelMesh>,
    /// The sequences of a micro-batch.
    pub micro_batches: Vec<usize>,
    /// The parts of the model that a stage may have.
    pub virtual_stages: Vec<usize>,
    /// The activations that may be computed again.
    pub recompute: Vec<RecomputeLevel>,
    /// The types of rows between nodes.
    pub comm_dtypes: Vec<CommDtype>,
    /// Whether exchanges run while another micro-batch computes.
    pub overlap_batches: bool,
    /// The rule for configurations whose predictions are closer than their error; `None` ranks by
    /// time alone. It holds for training: no published job tells the error of forward passes, or
    /// the memory that they need beyond what is counted.
    pub ties: Option<TieRule>,
}

impl Default for ModelSpace {
    fn default() -> Self {
        ModelSpace {
            mesh: None,
            micro_batches: vec![1, 2, 4, 8],
            virtual_stages: vec![1, 2, 3, 4, 6, 8, 12],
            recompute: vec![
                RecomputeLevel::None,
                RecomputeLevel::Projections,
                RecomputeLevel::Attention,
                RecomputeLevel::Layer,
            ],
            comm_dtypes: vec![CommDtype::Unchanged],
            overlap_batches: false,
            ties: Some(TieRule::default()),
        }
    }
}

/// The result of a search.
#[derive(Clone, Debug, Default)]
pub struct ModelRanked {
    /// The best of each mesh that fits in memory, by time and the rule for ties.
    pub best: Vec<ModelPrediction>,
    /// The ties for the first place, where a rule for them is in force.
    pub ties: Option<ModelTies>,
    /// The number of configurations that were predicted.
    pub predicted: usize,
    /// The number of those that do not fit in memory.
    pub too_large: usize,
    /// The number of meshes, with sizes of micro-batches, that the job's ranks can make.
    pub possible: usize,
    /// The configuration that needs least memory, where none fits.
    pub smallest: Option<ModelPrediction>,
}

/// Predicts every configuration of a space, and ranks the best of each mesh.
pub fn search_model(model: &ModelScenario, space: &ModelSpace) -> ModelRanked {
    let limit = model.machine.compute.memory_gib * f64::from(1u32 << 30);
    let mut asked: Vec<(ModelMesh, usize, LayerKey)> = Vec::new();
    for mesh in meshes(model, space) {
        let all = space.micro_batches.iter().copied();
        asked.extend(all.filter_map(|size| Some((mesh, size, layer_key(model, mesh, size)?))));
    }
    let mut ranked = ModelRanked {
        possible: asked.len(),
        ..ModelRanked::default()
    };
    // Weights alone rule most meshes out, and simulating a layer takes longest.
    let small = |mesh: ModelMesh| least_bytes(model, mesh) <= limit;
    let (fitting, large): (Vec<_>, Vec<_>) = asked.into_iter().partition(|one| small(one.0));
    ranked.too_large += large.len();
    ranked.predicted += large.len();
    // Where nothing fits, the smallest is still wanted: it says how much is missing.
    let fitting = if fitting.is_empty() { large } else { fitting };
    let costs = simulate(model, space, fitting.iter().map(|one| one.2));
    let rule = space.ties.filter(|_| model.training.is_some());
    let mut candidates = Candidates::new(rule, limit);
    for (mesh, micro_batch, key) in fitting {
        let Some(choices) = costs.get(&key) else {
            continue;
        };
        for schedule in schedules(model, space, mesh, micro_batch) {
            let Some(found) = evaluate(model, mesh, schedule, choices) else {
                continue;
            };
            ranked.predicted += 1;
            if found.memory.bytes() > limit {
                ranked.too_large += 1;
                keep(&mut ranked.smallest, found, |p| p.memory.bytes());
                continue;
            }
            candidates.add(found);
        }
    }
    (ranked.best, ranked.ties) = candidates.ranked();
    ranked
}

fn keep(
    least: &mut Option<ModelPrediction>,
    found: ModelPrediction,
    of: impl Fn(&ModelPrediction) -> f64,
) {
    if least.as_ref().is_none_or(|own| of(&found) < of(own)) {
        *least = Some(found);
    }
}

/// Returns the bytes of weights and their state, at least, on a stage in the middle.
fn least_bytes(model: &ModelScenario, mesh: ModelMesh) -> f64 {
    let stage = StageLayers {
        moe: model.shape.moe_layers.div_ceil(mesh.pp),
        ..StageLayers::default()
    };
    let own = RankParameters::of(model, mesh, stage);
    // The slowest stage need not have its share of layers, so allow it a layer less.
    let part = 1.0 - 1.0 / stage.moe.max(1) as f64;
    own.memory(model, mesh).bytes() * part
}

/// Returns the costs of each layer; as many are simulated at once as there are processors.
fn simulate(
    model: &ModelScenario,
    space: &ModelSpace,
    keys: impl Iterator<Item = LayerKey>,
) -> BTreeMap<LayerKey, LayerChoices> {
    let keys: std::collections::BTreeSet<LayerKey> = keys.collect();
    let keys: Vec<LayerKey> = keys.into_iter().collect();
    let strategies = Strategies {
        only: None,
        comm_dtypes: &space.comm_dtypes,
    };
    let next = AtomicUsize::new(0);
    let work = || {
        let claimed = std::iter::from_fn(|| Some(next.fetch_add(1, Ordering::Relaxed)));
        let claimed = claimed.take_while(|at| *at < keys.len());
        let found =
            claimed.filter_map(|at| Some((keys[at], choices(model, keys[at], strategies)?)));
        found.collect::<Vec<_>>()
    };
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        let others = processors.min(keys.len()).saturating_sub(1);
        let others: Vec<_> = (0..others).map(|_| scope.spawn(work)).collect();
        let own = work();
        let others = others.into_iter().flat_map(|thread| {
            let found = thread.join();
            found.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        });
        own.into_iter().chain(others).collect()
    })
}

/// Returns every mesh of the job's ranks that the model allows.
fn meshes(model: &ModelScenario, space: &ModelSpace) -> Vec<ModelMesh> {
    if let Some(mesh) = space.mesh {
        return vec![mesh];
    }
    let divisors = |of: usize| (1..=of).filter(move |n| of.is_multiple_of(*n));
    let experts = model.layer.shape.experts;
    let node = model.machine.per_node();
    let mut list = Vec::new();
    for pp in divisors(model.world).filter(|pp| *pp <= model.shape.layers()) {
        let stage = model.world / pp;
        // Collectives of attention in each layer are for the links of a node.
        for tp in divisors(stage).filter(|tp| *tp <= node.min(MOST_TP)) {
            for ep in divisors(stage).filter(|ep| experts.is_multiple_of(*ep)) {
                let shards = divisors(stage / ep).filter(|n| *n <= node.min(MOST_TP));
                list.extend(shards.map(|expert_tp| ModelMesh {
                    pp,
                    tp,
                    ep,
                    expert_tp,
                }));
            }
        }
    }
    list
}

/// The most ranks that share attention, or an expert.
const MOST_TP: usize = 8;

/// Returns whether parts of the stages have equally many layers, where the embedding, the head and
/// one more block may stand for a layer each. Interleaved parts run in step, so the longest would
/// hold up all others; frameworks refuse such a split or ask for a layout by hand.
fn alike(layers: usize, parts: usize) -> bool {
    parts <= layers && layers.next_multiple_of(parts) - layers <= 3
}

fn schedules(
    model: &ModelScenario,
    space: &ModelSpace,
    mesh: ModelMesh,
    micro_batch: usize,
) -> Vec<StepOrder> {
    let micro_batches = super::evaluate::micro_batches(model, mesh, micro_batch).unwrap_or(0);
    let layers = model.shape.layers();
    // Interleaved stages take turns, which needs whole rounds of micro-batches.
    let turns = |parts: &usize| {
        *parts == 1
            || mesh.pp > 1
                && alike(layers, mesh.pp * parts)
                && micro_batches.is_multiple_of(mesh.pp)
                && model.training.is_some()
    };
    let recompute: &[RecomputeLevel] = match model.training {
        Some(_) => &space.recompute,
        None => &[RecomputeLevel::None],
    };
    // Where queries come from the token itself, there is nothing narrower to keep.
    let latent = model.shape.attention.latent > 0;
    let recompute = recompute.iter();
    let recompute = recompute.filter(|again| latent || **again != RecomputeLevel::Projections);
    let mut list = Vec::new();
    for virtual_stages in space.virtual_stages.iter().copied().filter(turns) {
        list.extend(recompute.clone().map(|&recompute| StepOrder {
            micro_batch,
            virtual_stages,
            recompute,
            overlap_batches: space.overlap_batches,
        }));
    }
    list
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_stages_have_equally_many_layers() {
        // Published: DeepSeek-V3 in 8 and 16 parts, Qwen3-235B in 24 and 48, Mixtral in 32.
        for (layers, parts) in [(61, 8), (61, 16), (94, 24), (94, 48), (32, 32)] {
            assert!(alike(layers, parts), "{layers} {parts}");
        }
        for (layers, parts) in [(32, 24), (94, 64), (36, 32), (32, 64)] {
            assert!(!alike(layers, parts), "{layers} {parts}");
        }
    }
}
