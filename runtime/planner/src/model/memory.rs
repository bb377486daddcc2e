//! The memory of a rank of a pipeline stage.

use super::layer::LayerCosts;
use super::scenario::{ModelMesh, ModelScenario, RecomputeLevel, StageMemory, StepOrder};
use super::stages::StageLayers;

/// The parameters that a rank of a stage has.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct RankParameters {
    /// Those around experts: as many ranks have them as there are copies of attention.
    pub around: f64,
    /// Those of its experts.
    pub experts: f64,
}

impl RankParameters {
    pub fn of(model: &ModelScenario, mesh: ModelMesh, stage: StageLayers) -> RankParameters {
        let (shape, layer) = (&model.shape, model.layer_parameters());
        let (dense, moe) = (stage.dense as f64, stage.moe as f64);
        let mut shared = (dense + moe) * shape.attention.parameters;
        shared += dense * shape.dense_parameters();
        let embedding = (shape.vocabulary * shape.width) as f64;
        let ends = match (stage.first, stage.last) {
            (true, true) if shape.tied => 1.0,
            (true, true) => 2.0,
            (true, false) | (false, true) => 1.0,
            (false, false) => 0.0,
        };
        // A tied embedding on two stages is there twice, with a sum of its gradients that is small.
        shared += ends * embedding;
        RankParameters {
            // Routers and shared experts are whole on every rank.
            around: shared / mesh.tp as f64 + moe * layer.other,
            experts: moe * layer.experts / (mesh.ep * mesh.expert_tp) as f64,
        }
    }

    /// Returns the bytes of weights, gradients and optimizer state.
    pub fn memory(&self, model: &ModelScenario, mesh: ModelMesh) -> StageMemory {
        let element = model.weight_bytes();
        let all = self.around + self.experts;
        let trained = f64::from(u8::from(model.training.is_some()));
        StageMemory {
            weights: all * element,
            gradients: trained * all * model.state.gradient,
            optimizer: trained * model.state.optimizer * self.owned(model, mesh),
            reserve: model.reserve,
            ..StageMemory::default()
        }
    }

    /// Returns the parameters whose optimizer state the rank has: the ranks with the same
    /// parameter share it.
    pub fn owned(&self, model: &ModelScenario, mesh: ModelMesh) -> f64 {
        let copies = (mesh.dp(model.world), mesh.expert_dp(model.world));
        self.around / copies.0.max(1) as f64 + self.experts / copies.1.max(1) as f64
    }
}

/// The memory of each layer on a rank, for one micro-batch.
#[derive(Clone, Copy, Debug)]
pub(super) struct LayerMemory {
    /// Activations that a layer with experts leaves for backward.
    moe: f64,
    /// Those of a layer without.
    dense: f64,
    /// Buffers of exchanges and of kernels while a layer runs.
    buffers: f64,
    /// Scores of words, and their gradients.
    head: f64,
}

impl LayerMemory {
    pub fn of(
        model: &ModelScenario,
        recompute: RecomputeLevel,
        costs: &LayerCosts,
        tokens: f64,
    ) -> LayerMemory {
        let shape = &model.shape;
        let attention = &shape.attention;
        let element = model.layer.precision.activations.size() as f64;
        let token = |values: usize| tokens * element * values as f64;
        let memory = &costs.memory;
        let trained = model.training.is_some();
        let heads = attention.queries + attention.keys + attention.values + attention.outputs;
        // GEMMs keep their inputs in the type that they multiply in.
        let multiplied = |values: usize| tokens * model.kept_bytes() * values as f64;
        // The inputs of two norms and of the first GEMM, and what heads read and write: attention
        // itself keeps its type, and its output is kept once, for the GEMM behind it, too.
        let kept = match recompute {
            _ if !trained => 0.0,
            RecomputeLevel::None => {
                token(2 * shape.width + heads) + multiplied(shape.width + attention.latent)
            }
            // Megatron's `mla_up_proj`: the output stays, for the GEMM behind it.
            RecomputeLevel::Projections => {
                token(2 * shape.width + attention.outputs)
                    + multiplied(shape.width + attention.latent)
            }
            RecomputeLevel::Attention | RecomputeLevel::Layer => token(shape.width),
        };
        let (moe, dense) = match recompute {
            RecomputeLevel::Layer => (0.0, 0.0),
            _ if !trained => (0.0, 0.0),
            _ => (
                memory.saved - memory.inputs * (1.0 - model.kept_bytes() / element),
                token(2 * shape.dense_width) + multiplied(shape.dense_width),
            ),
        };
        LayerMemory {
            moe: kept + moe,
            dense: kept + dense,
            // What a recomputed layer saves lives while that layer runs backward.
            buffers: memory.rows - moe + memory.passed + memory.gathered,
            head: tokens * shape.vocabulary as f64 * (element + 4.0),
        }
    }

    /// Returns the activations and buffers of a stage.
    pub fn of_stage(
        &self,
        (stage, at): (StageLayers, usize),
        mesh: ModelMesh,
        schedule: StepOrder,
        micro_batches: usize,
    ) -> [f64; 2] {
        // Buffers are one layer's, because layers run one after another.
        let layers = stage.moe as f64 * self.moe + stage.dense as f64 * self.dense;
        let flying = in_flight(at, mesh.pp, schedule, micro_batches);
        let head = if stage.last { self.head } else { 0.0 };
        // Two micro-batches are then in a layer at once: one exchanges while the other computes.
        let buffers = if schedule.overlap_batches {
            2.0 * self.buffers
        } else {
            self.buffers
        };
        [layers * flying, buffers + head]
    }
}

/// Returns the micro-batches whose activations a stage has at most, as 1F1B orders them.
fn in_flight(stage: usize, stages: usize, schedule: StepOrder, micro_batches: usize) -> f64 {
    let parts = schedule.virtual_stages as f64;
    let behind = (stages - 1 - stage) as f64;
    let warm = match schedule.virtual_stages {
        1 => behind + 1.0,
        // Megatron's interleaved order runs this many parts forward before the first backward.
        _ => (2.0 * behind + (parts - 1.0) * stages as f64 + 1.0) / parts,
    };
    let more = f64::from(u8::from(schedule.overlap_batches));
    (warm + more).min(micro_batches as f64)
}
