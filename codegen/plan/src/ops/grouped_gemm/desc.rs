//! The desc of `grouped_gemm`: what it computes.

use super::GroupedGemmConfig;
use moesaic_kernel::{CpuIsa, DType};
use moesaic_spec::{
    Activation, ActivationFormat, Biases, ClampSite, ExpertForm, Experts, LayerSpec, OffsetType,
    WeightCode, WeightFormat, WeightSite,
};
use serde::{Deserialize, Serialize};

/// A GEMM of an expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ExpertGemm {
    /// `a = φ(rows · gateᵀ) ⊙ (rows · upᵀ)`, or `φ(rows · upᵀ)`.
    Up,
    /// `a · downᵀ`.
    Down,
}

impl ExpertGemm {
    /// Returns `up` or `down`.
    pub fn name(self) -> &'static str {
        match self {
            ExpertGemm::Up => "up",
            ExpertGemm::Down => "down",
        }
    }
}

/// `grouped_gemm`: multiplies rows `[R, inner]` by each expert's `[outer, inner]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GroupedGemmDesc {
    /// The GEMM of the expert.
    pub half: ExpertGemm,
    /// Groups of rows, each with its own matrix.
    pub experts: usize,
    /// Rows are all tokens and there is one matrix: a shared expert.
    pub dense: bool,
    /// K; 1 when dense.
    pub top_k: usize,
    /// The width of a row, which is contracted.
    pub inner: usize,
    /// Width of an output row.
    pub outer: usize,
    /// Two matrices, gate and up.
    pub gated: bool,
    /// The nonlinearity of the up half.
    #[serde(flatten)]
    pub nonlinearity: Nonlinearity,
    /// Whether the epilogue adds biases.
    pub bias: bool,
    /// Up: the activation is multiplied by the row's weight. Down: the bias is.
    pub weighted: bool,
    /// Up: rows are unscaled tokens, so the kernel can read them from x.
    pub plain_rows: bool,
    /// Element type of the matrices and biases.
    pub weights: DType,
    /// The format of the matrices, where they are quantized.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub format: Option<WeightFormat>,
    /// The codes that the kernel makes of rows before they meet those of the matrices.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub row_format: Option<ActivationFormat>,
    /// Element type of rows and output.
    pub activations: DType,
    /// f32 operands may be rounded to TF32.
    pub tf32: bool,
    /// Up: the kernel keeps pre-activations for backward, biases included, before any clamp.
    pub keep: bool,
    /// The shared expert whose GEMM runs in the same launch.
    pub fused_shared: Option<FusedShared>,
}

/// The nonlinearity between the two GEMMs of an expert: φ, clamp, soft cap and offset.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Nonlinearity {
    /// φ.
    pub activation: Activation,
    /// See [`moesaic_spec::Experts`].
    pub alpha: f64,
    /// See [`moesaic_spec::Experts`].
    pub clamp: Option<f64>,
    /// See [`moesaic_spec::Experts`].
    pub clamp_on: ClampSite,
    /// See [`moesaic_spec::Experts`].
    pub up_softcap: Option<f64>,
    /// See [`moesaic_spec::Experts`].
    pub up_offset: f64,
}

impl Nonlinearity {
    fn of(experts: &Experts) -> Nonlinearity {
        Nonlinearity {
            activation: experts.activation.clone(),
            alpha: experts.alpha,
            clamp: experts.clamp,
            clamp_on: experts.clamp_on,
            up_softcap: experts.up_softcap,
            up_offset: experts.up_offset,
        }
    }

    /// Returns the nonlinearity of a GEMM outside experts; nothing reads it.
    pub(super) fn unused() -> Nonlinearity {
        Nonlinearity {
            activation: Activation::Relu,
            alpha: 1.0,
            clamp: None,
            clamp_on: ClampSite::Input,
            up_softcap: None,
            up_offset: 0.0,
        }
    }
}

/// A fused shared expert: its GEMM runs in the launch of the routed experts. It shares types,
/// epilogue and one of the two widths with them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FusedShared {
    /// Width of a row, summed over.
    pub inner: usize,
    /// Width of an output row.
    pub outer: usize,
}

/// Packed weights have a depth that is a multiple of this, because one AMX instruction takes so
/// many elements.
const PACKED_DEPTH: usize = 32;

impl GroupedGemmDesc {
    /// Returns the shape of packed weights: experts, panels, depth, and the columns of a panel,
    /// gate before up.
    pub fn packed_shape(&self, config: &GroupedGemmConfig) -> [usize; 4] {
        if let Some(panel) = self.code_panel(config) {
            let panels = self.outer.div_ceil(config.thread_columns);
            let words = panel.record_bytes() / 4;
            return [self.experts, panels, panel.records, words];
        }
        [
            self.experts,
            self.outer.div_ceil(config.thread_columns),
            self.inner.next_multiple_of(PACKED_DEPTH),
            config.thread_columns * self.matrices(),
        ]
    }

    /// Returns the packed panels of codes; `None` where the matrices are not quantized.
    pub fn code_panel(&self, config: &GroupedGemmConfig) -> Option<CodePanel> {
        let format = self.format?;
        let depth = format.depth();
        let blocks = CodePanel::blocks_of(&format, self.inner);
        Some(CodePanel {
            depth,
            blocks,
            records: self.inner.div_ceil(depth * blocks),
            columns: config.thread_columns * self.matrices(),
            format,
        })
    }

    /// Elements of a column in a record of codes; `None` where the matrices are not quantized.
    pub(super) fn record_depth(&self) -> Option<usize> {
        let format = self.format?;
        Some(format.depth() * CodePanel::blocks_of(&format, self.inner))
    }

    /// Returns the types of the factors that a CPU multiplies: codes that are exact in bf16 meet
    /// pairs of bf16; others become f32.
    pub fn factors(&self, isa: CpuIsa) -> [DType; 2] {
        let Some(format) = self.format else {
            return [self.activations, self.weights];
        };
        // Codes of rows are exact in bf16, whatever they were made of.
        let rows = self.row_format.is_some() || self.activations == DType::Bf16;
        let pairs = isa.bf16_pairs() && !isa.bf16_quads() && rows;
        // E5M2 has infinities and many subnormal numbers, which would take a table each.
        if pairs && format.code != WeightCode::E5m2 {
            [DType::Bf16; 2]
        } else {
            [self.activations, DType::F32]
        }
    }

    /// Returns whether a CPU multiplies bytes: integers of 8 bits at most, on both sides.
    pub fn multiplies_bytes(&self, isa: CpuIsa) -> bool {
        let float =
            |format: WeightFormat| matches!(format.code, WeightCode::E4m3 | WeightCode::E5m2);
        let integers = self.format.is_some_and(|format| !float(format));
        isa.byte_dots() && integers && self.row_format == Some(ActivationFormat::Int8)
    }

    /// Elements of a row that a CPU multiplies in each 32-bit lane.
    pub fn word_elements(&self, isa: CpuIsa) -> usize {
        let pairs = isa.bf16_pairs() && self.factors(isa) == [DType::Bf16; 2];
        match pairs {
            _ if self.multiplies_bytes(isa) => 4,
            true => 2,
            false => 1,
        }
    }

    /// Returns the number of matrices of an expert: two with a gate, otherwise one.
    pub fn matrices(&self) -> usize {
        if self.gated { 2 } else { 1 }
    }
}

/// A packed panel of codes: records, each of a few blocks of all columns.
///
/// A record has the codes of its blocks, step by step, then a row of scales for each block, a row
/// of offsets for each where the format has them, and the second factors of both. Blocks whose
/// scales are bytes share a record, so that a row of scales fills whole cache lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CodePanel {
    /// Elements of a column in a block.
    pub depth: usize,
    /// Blocks of a record.
    pub blocks: usize,
    /// Records of a panel.
    pub records: usize,
    /// Columns, those of gate before those of up.
    pub columns: usize,
    /// The format of the codes.
    pub format: WeightFormat,
}

/// Elements of a record at least, where scales are bytes, and at most, where columns share a
/// second scale.
const RECORD: usize = 64;
const LONGEST_RECORD: usize = 512;

impl CodePanel {
    /// Returns the blocks of a record, for rows of so many elements.
    fn blocks_of(format: &WeightFormat, inner: usize) -> usize {
        let depth = format.depth();
        match (format.second, format.scale.size()) {
            (Some(0), _) => {
                // The second scale of a whole row is in each record. Long records have few of
                // them, and a last one that is hardly used.
                let choices = (RECORD..=LONGEST_RECORD).step_by(RECORD);
                let choices = choices.filter(|elements| elements.is_multiple_of(depth));
                let bytes = |elements: &usize| {
                    let blocks = elements / depth;
                    inner.div_ceil(*elements) * column_bytes(format, blocks)
                };
                choices
                    .min_by_key(bytes)
                    .map_or(1, |elements| elements / depth)
            }
            (Some(second), _) => second / depth,
            (None, 1) => RECORD.div_ceil(depth),
            (None, _) => 1,
        }
    }

    /// Bytes of a record.
    pub fn record_bytes(&self) -> usize {
        self.columns * column_bytes(&self.format, self.blocks)
    }
}

/// Bytes of a column in a record of so many blocks.
fn column_bytes(format: &WeightFormat, blocks: usize) -> usize {
    let codes = format.depth() * format.code.bits() / 8;
    let second = if format.second.is_some() { 4 } else { 0 };
    let (offset, offset_second) = match format.offset {
        None => (0, 0),
        Some(OffsetType::F16) => (2, 0),
        Some(OffsetType::Zero) => (1, 0),
        Some(OffsetType::Int8) => (1, 4),
    };
    blocks * (codes + format.scale.size() + offset) + second + offset_second
}

/// Returns a GEMM of the routed experts.
pub(crate) fn routed(spec: &LayerSpec, half: ExpertGemm) -> GroupedGemmDesc {
    let weighted = spec.router.weight_on == WeightSite::Activation;
    let shape = &spec.shape;
    GroupedGemmDesc {
        half,
        experts: shape.experts,
        dense: false,
        top_k: shape.top_k,
        format: match half {
            ExpertGemm::Up => spec.precision.experts,
            ExpertGemm::Down => spec.precision.down_format(),
        },
        row_format: spec.precision.expert_activations,
        // Down: the activations carry their weight already, and only the bias still lacks it.
        weighted: weighted && (half == ExpertGemm::Up || spec.experts.bias.down()),
        plain_rows: half == ExpertGemm::Up && spec.router.weight_on != WeightSite::Input,
        ..expert_half(spec, half, &routed_widths(spec), spec.experts.bias)
    }
}

/// The widths of an expert.
struct Widths {
    input: usize,
    hidden: usize,
    output: usize,
}

fn routed_widths(spec: &LayerSpec) -> Widths {
    Widths {
        input: spec.expert_input_dim(),
        hidden: spec.shape.hidden_dim,
        output: spec.expert_output_dim(),
    }
}

/// Returns a GEMM of a shared expert.
pub(crate) fn shared(spec: &LayerSpec, half: ExpertGemm, index: usize) -> GroupedGemmDesc {
    let widths = Widths {
        input: spec.shape.model_dim,
        hidden: spec.shared[index].hidden_dim,
        output: spec.output_dim(),
    };
    GroupedGemmDesc {
        nonlinearity: Nonlinearity::of(&spec.shared_experts(index)),
        ..expert_half(spec, half, &widths, spec.shared_bias(index))
    }
}

fn expert_half(
    spec: &LayerSpec,
    half: ExpertGemm,
    widths: &Widths,
    biases: Biases,
) -> GroupedGemmDesc {
    let experts = &spec.experts;
    let (inner, outer) = match half {
        ExpertGemm::Up => (widths.input, widths.hidden),
        ExpertGemm::Down => (widths.hidden, widths.output),
    };
    GroupedGemmDesc {
        half,
        experts: 1,
        dense: true,
        top_k: 1,
        inner,
        outer,
        gated: half == ExpertGemm::Up && experts.form == ExpertForm::Gated,
        nonlinearity: Nonlinearity::of(experts),
        bias: match half {
            ExpertGemm::Up => biases.up(),
            ExpertGemm::Down => biases.down(),
        },
        weighted: false,
        plain_rows: false,
        weights: spec.precision.weights,
        format: None,
        row_format: None,
        activations: spec.precision.activations,
        tf32: spec.precision.tf32,
        keep: false,
        fused_shared: None,
    }
}

/// Returns a projection around the routed experts. In either direction it is the down half of an
/// expert, which has no activation.
pub(crate) fn latent(spec: &LayerSpec, way: ExpertGemm) -> GroupedGemmDesc {
    let (inner, outer) = match way {
        ExpertGemm::Down => (spec.shape.model_dim, spec.expert_input_dim()),
        ExpertGemm::Up => (spec.expert_output_dim(), spec.output_dim()),
    };
    let widths = Widths {
        input: 0,
        hidden: inner,
        output: outer,
    };
    let biases = spec.latent.as_ref().is_some_and(|latent| latent.bias);
    expert_half(spec, ExpertGemm::Down, &widths, biases.into())
}
