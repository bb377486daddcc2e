//! What ranks that are processes must have been told the same, each by its own command line
//! and files.

use super::ranks::Job;
use crate::failure::Failure;
use crate::mesh;
use blake3::Hasher;
use moesaic::collectives::{Call, CollectiveError, Collectives, agree};
use moesaic::weights::Checkpoint;
use moesaic::{EngineError, Parallel, Strategy, Tensors};

/// Tensors of a checkpoint of which a few bytes are compared; the names, types and shapes of
/// all are.
const SAMPLED: usize = 256;
/// So many bytes of each.
const SAMPLE: usize = 1 << 10;

/// How ranks carry the layer out, besides what the job is.
pub struct Plan {
    pub mesh: Parallel,
    pub strategy: Strategy,
}

/// Compares before anything runs. Only a hash travels where all is the same.
///
/// # Errors
/// [`CollectiveError::Disagreement`] on every rank.
pub fn check(
    world: &mut dyn Collectives,
    job: &Job<'_>,
    plan: &Plan,
) -> std::result::Result<(), CollectiveError> {
    let values = values(job, plan);
    let values: Vec<(&str, &str)> = values.iter().map(|(name, v)| (*name, &**v)).collect();
    agree(world, &values, &Call::new("what ranks were told"))
}

/// With advice, where ranks were told different things.
pub fn failure(error: CollectiveError) -> Failure {
    let differs = matches!(error, CollectiveError::Disagreement { .. });
    let failure = Failure::from(EngineError::from(error));
    if differs {
        failure.hint("start all ranks by the same command, with the same files")
    } else {
        failure
    }
}

fn values(job: &Job<'_>, plan: &Plan) -> Vec<(&'static str, String)> {
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
        ("weights", weights(job.checkpoint, &job.reading)),
        ("input", input(job.tokens.all())),
    ]);
    values
}

/// All that is read of the input, to the last bit: a rank has it all in memory or mapped, and
/// to hash it takes a small part of the time that a layer takes.
fn input(tensors: &Tensors<'_>) -> String {
    let mut hasher = Hasher::new();
    let mut names = Vec::new();
    for (name, tensor) in tensors.iter() {
        names.push(format!("{name} {} {:?}", tensor.dtype, tensor.shape));
        hasher.update(&tensor.data);
    }
    format!("{}, of hash {}", names.join(", "), short(&hasher))
}

/// A checkpoint, by all of its header and some of its bytes: it may be much larger than what
/// this rank reads of it. `reading` is what else decides which weights are read.
fn weights(file: &Checkpoint, reading: &str) -> String {
    let names: Vec<&str> = file.names().collect();
    let mut header = Hasher::new();
    header.update(reading.as_bytes());
    for name in &names {
        let Some(tensor) = file.tensor(name) else {
            continue;
        };
        let about = format!("{name} {:?} {:?};", tensor.dtype, tensor.shape);
        header.update(about.as_bytes());
    }
    let mut sample = Hasher::new();
    for name in names.iter().step_by(names.len().div_ceil(SAMPLED).max(1)) {
        // Of a type that is none of ours no bytes are looked at.
        let Ok(tensor) = file.read(name) else {
            continue;
        };
        let bytes = &tensor.data;
        let middle = bytes.len() / 2;
        sample.update(&bytes[..bytes.len().min(SAMPLE)]);
        sample.update(&bytes[middle..bytes.len().min(middle + SAMPLE)]);
    }
    let (count, header, sample) = (names.len(), short(&header), short(&sample));
    format!("{count} tensors, names and shapes of hash {header}, samples of {sample}")
}

fn short(hasher: &Hasher) -> String {
    hasher.finalize().to_hex()[..12].to_string()
}
