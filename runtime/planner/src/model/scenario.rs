//! The inputs and results of predictions of a model.

use crate::Machine;
use moesaic_plan::{Strategy, Training};
use moesaic_spec::hf::ModelShape;
use moesaic_spec::{LayerSpec, canonical_tensors};
use std::fmt;

/// A model on a machine.
#[derive(Clone, Debug)]
pub struct ModelScenario {
    /// A layer with experts; all of them are alike.
    pub layer: LayerSpec,
    /// The number of layers, and the matrices around the experts.
    pub shape: ModelShape,
    /// The machine.
    pub machine: Machine,
    /// The ranks of the job.
    pub world: usize,
    /// The training setup; `None` predicts forward passes alone.
    pub training: Option<Training>,
    /// The tokens of a step.
    pub batch: Batch,
    /// The exponent of Zipf's law for the rows of experts; 0 where all have equally many.
    pub skew: f64,
    /// Whether GEMMs with weights multiply in FP8, at the machine's rate for it: all but the output
    /// head's. Each operand is cast, and backward keeps the inputs of these GEMMs so; other
    /// activations, exchanges, weights and their state stay as they are.
    pub fp8: bool,
    /// The bytes that training keeps for each parameter.
    pub state: StateBytes,
    /// The bytes of each rank that no layer may use.
    pub reserve: f64,
}

/// The fraction of a machine's memory that a plan leaves to what it does not count. Megatron-Bridge's
/// own estimator leaves out the same and names no figure, so this is what vLLM keeps by default.
const RESERVED: f64 = 0.08;

/// Returns the bytes of a rank that a plan leaves by default to the driver's context, communicators,
/// kernels' workspaces, CUDA graphs and what an allocator cannot use: 8 % of the memory, and 4 GiB at
/// least, because the first three do not shrink with it.
pub fn default_reserve(machine: &Machine) -> f64 {
    let gib = (RESERVED * machine.compute.memory_gib).max(4.0);
    gib * f64::from(1u32 << 30)
}

/// The tokens of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Batch {
    /// The tokens of a sequence.
    pub sequence: usize,
    /// The sequences of a step, over all ranks.
    pub sequences: usize,
}

/// The bytes of a parameter and of what belongs to it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StateBytes {
    /// The bytes of the weight, or `None` for those of the layer's type.
    pub weight: Option<f64>,
    /// The bytes of its gradient.
    pub gradient: f64,
    /// The bytes of the optimizer's state, which the ranks with the same parameter share.
    pub optimizer: f64,
}

impl Default for StateBytes {
    /// A gradient, a copy of the weight and two moments, all in f32.
    fn default() -> Self {
        StateBytes {
            weight: None,
            gradient: 4.0,
            optimizer: 12.0,
        }
    }
}

/// The degrees by which ranks share a model. Attention and experts have meshes of their own over
/// the same ranks of a pipeline stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ModelMesh {
    /// The pipeline stages.
    pub pp: usize,
    /// The ranks that share the matrices around experts, and the tokens of a micro-batch.
    pub tp: usize,
    /// The groups that share the experts.
    pub ep: usize,
    /// The shards of each expert.
    pub expert_tp: usize,
}

impl ModelMesh {
    /// Returns the ranks of a stage.
    pub fn stage_ranks(&self, world: usize) -> usize {
        world / self.pp.max(1)
    }

    /// Returns the copies of the matrices around experts.
    pub fn dp(&self, world: usize) -> usize {
        self.stage_ranks(world) / self.tp.max(1)
    }

    /// Returns the copies of each expert.
    pub fn expert_dp(&self, world: usize) -> usize {
        self.stage_ranks(world) / (self.ep * self.expert_tp).max(1)
    }
}

impl fmt::Display for ModelMesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ModelMesh {
            pp,
            tp,
            ep,
            expert_tp,
        } = self;
        write!(f, "pp={pp},tp={tp},ep={ep},expert_tp={expert_tp}")
    }
}

/// The activations that backward computes again, from fewer to more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum RecomputeLevel {
    /// None.
    None,
    /// Queries, keys and values, from the narrow vectors of latent attention.
    Projections,
    /// Those of attention.
    Attention,
    /// Those of whole layers, experts included.
    Layer,
}

impl fmt::Display for RecomputeLevel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            RecomputeLevel::None => "none",
            RecomputeLevel::Projections => "projections",
            RecomputeLevel::Attention => "attention",
            RecomputeLevel::Layer => "layer",
        })
    }
}

/// The order of a step's work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct StepOrder {
    /// The sequences of a micro-batch.
    pub micro_batch: usize,
    /// The parts of the model that each stage has, in turns with the other stages (interleaved
    /// 1F1B); 1 for plain 1F1B.
    pub virtual_stages: usize,
    /// The activations that backward computes again.
    pub recompute: RecomputeLevel,
    /// Whether exchanges of one micro-batch run while another computes.
    pub overlap_batches: bool,
}

/// The prediction of one step.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelPrediction {
    /// The degrees.
    pub mesh: ModelMesh,
    /// The order of work.
    pub schedule: StepOrder,
    /// The strategy of the layers with experts.
    pub strategy: Strategy,
    /// The seconds of a step.
    pub seconds: f64,
    /// The tokens that each rank takes part in per second: those of a step by seconds and ranks.
    pub tokens_per_second: f64,
    /// The FLOP/s of each rank that the model needs; recomputation does not count.
    pub flops: f64,
    /// The fraction of the machine's peak that `flops` is, if its file has the peak.
    pub mfu: Option<f64>,
    /// The micro-batches of a step.
    pub micro_batches: usize,
    /// The memory of a rank, on the stage that needs most.
    pub memory: StageMemory,
    /// What the slowest stage does in a step.
    pub phases: Vec<StepPhase>,
    /// The seconds of a micro-batch on each stage: forward and backward.
    pub stages: Vec<[f64; 2]>,
    /// The seconds of the sums of gradients, of gathering weights, and of the optimizer.
    pub once: [f64; 3],
}

/// The bytes of a rank.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StageMemory {
    /// The stage, from zero.
    pub stage: usize,
    /// Weights.
    pub weights: f64,
    /// Gradients.
    pub gradients: f64,
    /// The optimizer's state.
    pub optimizer: f64,
    /// Activations of the micro-batches in flight.
    pub activations: f64,
    /// Buffers of exchanges, and of the kernels of one layer.
    pub buffers: f64,
    /// Bytes that no layer may use.
    pub reserve: f64,
}

impl StageMemory {
    /// Returns the total.
    pub fn bytes(&self) -> f64 {
        self.counted() + self.reserve
    }

    /// Returns the bytes that a plan counts: all but the reserve, which stands for the others.
    pub fn counted(&self) -> f64 {
        self.weights + self.gradients + self.optimizer + self.activations + self.buffers
    }
}

/// A kind of work of a step. The exposed seconds of all kinds add up to the step.
#[derive(Clone, Debug, PartialEq)]
pub struct StepPhase {
    /// The name.
    pub name: &'static str,
    /// The seconds in which it runs.
    pub seconds: f64,
    /// The seconds in which nothing else does.
    pub exposed: f64,
    /// The work that hides the rest, if any is hidden.
    pub behind: Option<&'static str>,
}

/// The parameters of one layer with experts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct LayerParameters {
    /// Those of all routed experts.
    pub experts: f64,
    /// All others.
    pub other: f64,
    /// Those that a token is multiplied with.
    pub active: f64,
}

impl LayerParameters {
    pub fn of(spec: &LayerSpec) -> LayerParameters {
        let (mut experts, mut other) = (0.0, 0.0);
        for tensor in canonical_tensors(spec) {
            let count: f64 = tensor.shape.iter().map(|size| *size as f64).product();
            let sum = if tensor.name.starts_with("experts.") {
                &mut experts
            } else {
                &mut other
            };
            *sum += count;
        }
        let part = spec.shape.top_k as f64 / spec.shape.experts.max(1) as f64;
        LayerParameters {
            experts,
            other,
            active: experts * part + other,
        }
    }
}

impl ModelScenario {
    /// Returns the bytes of a weight.
    pub fn weight_bytes(&self) -> f64 {
        // A server may keep codes that are smaller than the type that its kernels multiply in.
        let own = self.layer.precision.weights.size() as f64;
        self.state.weight.unwrap_or(own)
    }

    pub(super) fn layer_parameters(&self) -> LayerParameters {
        LayerParameters::of(&self.layer)
    }

    /// Returns the parameters of the model.
    pub fn parameters(&self) -> f64 {
        let layer = self.layer_parameters();
        let shape = &self.shape;
        shape.moe_layers as f64 * (layer.experts + layer.other)
            + shape.layers() as f64 * shape.attention.parameters
            + shape.dense_layers as f64 * shape.dense_parameters()
            + shape.head_parameters()
    }

    /// Returns the machine as GEMMs with weights see it.
    pub(super) fn weights_machine(&self) -> Machine {
        let mut machine = self.machine.clone();
        if let (true, Some(rate)) = (self.fp8, machine.fp8_rate()) {
            let dtype = self.layer.precision.activations.name();
            let rates = &mut machine.compute.gemm_tflops;
            rates.insert(dtype.to_string(), rate / 1e12);
        }
        machine
    }

    /// Returns the seconds of casting values to FP8: each is read once and written twice, by rows
    /// and by columns, because backward multiplies along the other axis.
    pub(super) fn cast(&self, values: f64) -> f64 {
        let bytes = self.layer.precision.activations.size() as f64 + 2.0;
        let part = f64::from(u8::from(self.fp8));
        part * values * bytes / self.machine.memory_rate()
    }

    /// Returns the bytes of a value that a GEMM with weights leaves for backward. In FP8 Transformer
    /// Engine keeps the cast input alone, by columns, and Megatron-Core's guide says the same; MXFP8
    /// and blocks of 128 with a scale in f32 have a byte of scales for 32 values.
    pub(super) fn kept_bytes(&self) -> f64 {
        if self.fp8 {
            1.0 + 1.0 / 32.0
        } else {
            self.layer.precision.activations.size() as f64
        }
    }

    /// Returns the peak that a model's FLOP use is a fraction of.
    pub(super) fn peak(&self) -> Option<f64> {
        // The peak of the units that GEMMs run on: half of FP8's would make a use above one possible.
        if self.fp8 {
            self.machine.fp8_peak()
        } else {
            self.machine.peak(self.layer.precision.activations)
        }
    }

    /// Returns the FLOP that the model needs for one token: two for each parameter that it is
    /// multiplied with, and those of attention over half of the tokens before it; three times
    /// that in training.
    pub fn flops_per_token(&self) -> f64 {
        let shape = &self.shape;
        let layers = shape.layers() as f64;
        let parameters = shape.moe_layers as f64 * self.layer_parameters().active
            + layers * shape.attention.parameters
            + shape.dense_layers as f64 * shape.dense_parameters()
            + (shape.vocabulary * shape.width) as f64;
        let forward = 2.0 * parameters + layers * self.attention_flops();
        match self.training {
            Some(_) => 3.0 * forward,
            None => forward,
        }
    }

    /// Returns the FLOP of scores and of their sums for one token in one layer, as a mean over
    /// layers.
    pub(super) fn attention_flops(&self) -> f64 {
        let attention = &self.shape.attention;
        let sequence = self.batch.sequence as f64;
        let window = (attention.window as f64).min(sequence);
        // A token sees those before it: half of the sequence on average, and with a window all of
        // it but at the beginning.
        let (all, windowed) = (sequence / 2.0, window - window * window / (2.0 * sequence));
        let layers = self.shape.layers().max(1) as f64;
        let part = attention.windowed_layers as f64 / layers;
        let seen = all * (1.0 - part) + windowed * part;
        2.0 * (attention.queries + attention.outputs) as f64 * seen
    }
}
