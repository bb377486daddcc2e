//! The parts of a model around its experts: attention, layers without experts, the output head.

use super::collective::{Peers, gather};
use super::scenario::{ModelMesh, ModelScenario};

/// Launches of attention with its norms in a forward pass.
const ATTENTION_LAUNCHES: f64 = 12.0;
/// Launches of the projections of latent attention, with norms and rotations.
const PROJECTION_LAUNCHES: f64 = 6.0;
/// Launches of the feed-forward block of a layer without experts.
const DENSE_LAUNCHES: f64 = 5.0;

/// The seconds of a part in one layer and one micro-batch.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct PartTime {
    pub forward: f64,
    pub backward: f64,
}

/// The times of the parts around experts.
#[derive(Clone, Copy, Debug)]
pub(super) struct Around {
    /// Attention of one layer.
    pub attention: PartTime,
    /// The projections of one layer from the narrow vectors of latent attention.
    pub projections: PartTime,
    /// The feed-forward block of one layer without experts.
    pub dense: PartTime,
    /// The output head with its loss.
    pub head: PartTime,
    /// The collectives of the ranks that share attention, in each layer.
    pub attention_tp: PartTime,
    /// Those of a feed-forward block without experts.
    pub dense_tp: PartTime,
}

/// The work of a part for one token of a rank.
#[derive(Clone, Copy, Debug, Default)]
struct TokenWork {
    /// FLOP of GEMMs.
    gemm: f64,
    /// FLOP of scores and of their sums, without those that backward repeats.
    scores: f64,
    /// The values that GEMMs in FP8 cast, forward and backward; `None` where GEMMs keep their type.
    casts: Option<[f64; 2]>,
    /// Values that other kernels read and write.
    values: f64,
    /// Launches of the pass, however many tokens there are.
    launches: f64,
}

impl Around {
    /// Returns the times where a rank has `tokens` tokens of a micro-batch.
    pub fn of(model: &ModelScenario, mesh: ModelMesh, tokens: f64) -> Around {
        let shape = &model.shape;
        let attention = &shape.attention;
        let width = shape.width as f64;
        let time = |work: TokenWork| work.time(model, tokens);
        // Norms read and write a token's values twice, residual sums three times, and so on; the
        // rotation of queries and keys reads and writes them.
        let turned = (attention.queries + attention.keys) as f64;
        let collectives = |count: f64| {
            let seconds = tensor_parallel(model, mesh, tokens) * count;
            PartTime {
                forward: seconds,
                backward: seconds,
            }
        };
        Around {
            attention: time(TokenWork {
                gemm: 2.0 * attention.parameters,
                scores: model.attention_flops(),
                values: 12.0 * width + 2.0 * turned,
                casts: Some([
                    width + attention.outputs as f64,
                    width + (attention.queries + attention.keys + attention.values) as f64,
                ]),
                launches: ATTENTION_LAUNCHES,
            }),
            projections: time(TokenWork {
                gemm: 2.0 * attention.latent_parameters,
                casts: Some([attention.latent as f64, 0.0]),
                values: 2.0 * turned,
                launches: PROJECTION_LAUNCHES,
                ..TokenWork::default()
            }),
            dense: time(TokenWork {
                gemm: 2.0 * shape.dense_parameters(),
                casts: Some([1.0, 2.0].map(|by| width + by * shape.dense_width as f64)),
                values: 3.0 * shape.dense_width as f64,
                launches: DENSE_LAUNCHES,
                ..TokenWork::default()
            }),
            // The loss reads scores twice and writes probabilities and gradients.
            head: time(TokenWork {
                gemm: 2.0 * (shape.vocabulary * shape.width) as f64,
                values: 4.0 * shape.vocabulary as f64,
                launches: DENSE_LAUNCHES,
                ..TokenWork::default()
            }),
            attention_tp: collectives(2.0),
            dense_tp: collectives(2.0),
        }
    }
}

impl TokenWork {
    fn time(&self, model: &ModelScenario, tokens: f64) -> PartTime {
        let machine = &model.machine;
        let dtype = model.layer.precision.activations;
        let rate = machine.gemm_rate(dtype);
        // The output head keeps its type, as recipes do: its errors reach every token's loss.
        let gemm_rate = match (self.casts, machine.fp8_rate()) {
            (Some(_), Some(fp8)) if model.fp8 => fp8,
            _ => rate,
        };
        let casts = self.casts.unwrap_or_default();
        let casts = casts.map(|values| model.cast(tokens * values));
        let bytes = self.values * dtype.size() as f64;
        let memory = tokens * bytes / machine.memory_rate() + self.launches * machine.launch();
        let gemm = tokens * self.gemm / gemm_rate;
        let scores = tokens * self.scores / rate;
        PartTime {
            forward: gemm + scores + memory + casts[0],
            // Two GEMMs for each of forward; of scores, five for two, because backward computes
            // the scores again.
            backward: 2.0 * gemm + 2.5 * scores + 2.0 * memory + casts[1],
        }
    }
}

/// Returns the seconds in which the ranks that share attention gather a micro-batch, or scatter
/// its sum.
fn tensor_parallel(model: &ModelScenario, mesh: ModelMesh, tokens: f64) -> f64 {
    let peers = Peers {
        ranks: mesh.tp,
        stride: 1,
    };
    let element = model.layer.precision.activations.size() as f64;
    // Ranks have equal parts of the tokens between collectives (sequence parallelism).
    let bytes = tokens * mesh.tp as f64 * model.shape.width as f64 * element;
    gather(&model.machine, peers, bytes)
}
