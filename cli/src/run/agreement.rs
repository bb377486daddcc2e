//! A check that all processes of a job have the same options and input, since each reads its own
//! command line and files.

use super::ranks::RankJob;
use crate::failure::Failure;
use crate::mesh;
use blake3::Hasher;
use moesaic::collectives::{Call, CollectiveError, Collectives, agree};
use moesaic::weights::{LayerReader, TensorRef};
use moesaic::{EngineError, Parallel, Strategy, Tensors};

/// The most tensors of the layer from which bytes are compared. Names, types and shapes of all
/// tensors are compared.
const SAMPLED: usize = 256;
/// Bytes of each sample.
const SAMPLE: usize = 1 << 10;

/// The mesh and the strategy of the ranks, which the job does not hold.
pub struct AgreedPlan {
    pub mesh: Parallel,
    pub strategy: Strategy,
}

/// Compares the options and inputs of all ranks before anything runs. If they are the same, only a
/// hash is exchanged.
///
/// # Errors
/// Returns [`CollectiveError::Disagreement`] on every rank if they differ.
pub fn check(
    world: &mut dyn Collectives,
    job: &RankJob<'_>,
    plan: &AgreedPlan,
) -> std::result::Result<(), CollectiveError> {
    let values = values(job, plan);
    let values: Vec<(&str, &str)> = values.iter().map(|(name, v)| (*name, &**v)).collect();
    agree(world, &values, &Call::new("what ranks were told"))
}

/// Adds advice to the failure if the ranks have different options or inputs.
pub fn failure(error: CollectiveError) -> Failure {
    let differs = matches!(error, CollectiveError::Disagreement { .. });
    let failure = Failure::from(EngineError::from(error));
    if differs {
        failure.hint("start all ranks by the same command, with the same files")
    } else {
        failure
    }
}

fn values(job: &RankJob<'_>, plan: &AgreedPlan) -> Vec<(&'static str, String)> {
    let mut values = vec![
        ("moesaic", env!("CARGO_PKG_VERSION").to_string()),
        ("--mesh", mesh::words(plan.mesh)),
        ("--strategy", plan.strategy.to_string()),
        ("--target", job.engine.target().to_string()),
        ("--trace", job.traced.to_string()),
        ("tokens", job.tokens.count.to_string()),
    ];
    values.extend(job.pass.words());
    let spec = serde_json::to_string(job.spec).unwrap_or_default();
    values.extend([
        ("spec", spec),
        ("weights", weights(job.weights, &job.reading)),
        ("input", input(job.tokens.all())),
    ]);
    values
}

/// Hashes all tensors of the input to the last bit. A rank has all of them in memory or mapped, and
/// hashing takes a small part of the layer's time.
fn input(tensors: &Tensors<'_>) -> String {
    let mut hasher = Hasher::new();
    let mut names = Vec::new();
    for (name, tensor) in tensors.iter() {
        names.push(format!("{name} {} {:?}", tensor.dtype, tensor.shape));
        hasher.update(&tensor.data);
    }
    format!("{}, of hash {}", names.join(", "), short(&hasher))
}

/// Hashes the names, types and shapes of the layer's tensors, and samples of their bytes, because
/// the tensors may be much larger than the part that this rank reads. `reading` holds the other
/// choices that decide the weights. A model's other tensors may be missing or differ.
fn weights(read: &LayerReader<'_>, reading: &str) -> String {
    let tensors: Vec<TensorRef<'_>> = read.tensors().collect();
    let mut header = Hasher::new();
    header.update(reading.as_bytes());
    for tensor in &tensors {
        let about = format!("{} {:?} {:?};", tensor.name, tensor.dtype, tensor.shape);
        header.update(about.as_bytes());
    }
    let mut sample = Hasher::new();
    for tensor in tensors
        .iter()
        .step_by(tensors.len().div_ceil(SAMPLED).max(1))
    {
        let bytes = tensor.bytes;
        let middle = bytes.len() / 2;
        sample.update(&bytes[..bytes.len().min(SAMPLE)]);
        sample.update(&bytes[middle..bytes.len().min(middle + SAMPLE)]);
    }
    let (count, header, sample) = (tensors.len(), short(&header), short(&sample));
    format!("{count} tensors, names and shapes of hash {header}, samples of {sample}")
}

fn short(hasher: &Hasher) -> String {
    hasher.finalize().to_hex()[..12].to_string()
}
