//! Checks that ranks can make a model's mesh, and gives the reason where they cannot.

use super::scenario::{ModelMesh, ModelScenario};
use moesaic_plan::{MeshError, Parallel, SharedExperts};

/// A mesh that the ranks of a job cannot make for a model, or whose micro-batches are not whole.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ModelMeshError {
    /// Stages would have unequally many ranks.
    #[error("{world} ranks cannot make pp={pp} stages: pp is a divisor of the ranks")]
    Stages {
        /// The ranks of the job.
        world: usize,
        /// The stages that were asked for.
        pp: usize,
    },
    /// A stage would have no layer.
    #[error("pp={pp} stages need a layer each, and the model has {layers}")]
    Layers {
        /// The stages that were asked for.
        pp: usize,
        /// The layers of the model.
        layers: usize,
    },
    /// The ranks of a stage cannot be divided.
    #[error("{what} does not divide the {stage} ranks of a stage (ranks / pp)")]
    Stage {
        /// The degrees: `tp=3`.
        what: String,
        /// The ranks of a stage.
        stage: usize,
    },
    /// The experts cannot be shared like that.
    #[error(transparent)]
    Experts(#[from] MeshError),
    /// Ranks would have unequal parts of a micro-batch.
    #[error("tp={tp} does not divide the {tokens} tokens of a micro-batch")]
    Tokens {
        /// The degree that was asked for.
        tp: usize,
        /// The tokens of a micro-batch.
        tokens: usize,
    },
    /// A step would not have whole micro-batches.
    #[error(
        "{sequences} sequences a step are no multiple of {copies} copies of attention (ranks / pp / \
         tp) times {micro_batch} of a micro-batch"
    )]
    Batch {
        /// The sequences of a step.
        sequences: usize,
        /// The copies of attention.
        copies: usize,
        /// The sequences of a micro-batch.
        micro_batch: usize,
    },
}

/// Checks that the ranks of a job can make a mesh, with micro-batches of this many sequences.
///
/// # Errors
/// [`ModelMeshError`] says what is possible. Unequal shares are errors: they would need a simulation
/// of each rank of a stage, and frameworks refuse them, too.
pub fn check_mesh(
    model: &ModelScenario,
    mesh: ModelMesh,
    micro_batch: usize,
) -> Result<(), ModelMeshError> {
    let ModelMesh {
        pp,
        tp,
        ep,
        expert_tp,
    } = mesh;
    let (world, layers) = (model.world, model.shape.layers());
    let divides = |by: usize, all: usize| by > 0 && all.is_multiple_of(by);
    if !divides(pp, world) {
        return Err(ModelMeshError::Stages { world, pp });
    }
    if pp > layers {
        return Err(ModelMeshError::Layers { pp, layers });
    }
    let stage = mesh.stage_ranks(world);
    let experts = Parallel {
        ep,
        expert_tp,
        dp: 1,
        shared: SharedExperts::Whole,
    };
    if !divides(tp, stage) {
        let what = format!("tp={tp}");
        return Err(ModelMeshError::Stage { what, stage });
    }
    if !divides(experts.ranks(), stage) {
        let what = format!("ep={ep} x expert_tp={expert_tp}");
        return Err(ModelMeshError::Stage { what, stage });
    }
    experts.check(&model.layer)?;
    let tokens = micro_batch.saturating_mul(model.batch.sequence);
    if !divides(tp, tokens) {
        return Err(ModelMeshError::Tokens { tp, tokens });
    }
    let (sequences, copies) = (model.batch.sequences, mesh.dp(world));
    if sequences == 0 || !divides(copies.saturating_mul(micro_batch), sequences) {
        return Err(ModelMeshError::Batch {
            sequences,
            copies,
            micro_batch,
        });
    }
    Ok(())
}
