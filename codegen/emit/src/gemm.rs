//! The record `g` of CPU GEMM templates: everything that follows from a desc, a config and a
//! target, so that templates compute nothing.

use crate::codes::CodesText;
#[cfg(test)]
use crate::literal::names;
use crate::unit::Unit;
use moesaic_kernel::{CpuIsa, DType, SimArch, Target};
use moesaic_plan::{ExpertGemm, GroupedGemmConfig, GroupedGemmDesc, Op};
use moesaic_plan::{GroupedGemmDgradDesc, GroupedGemmWgradDesc};
use moesaic_spec::ActivationFormat;
use serde::Serialize;

/// A GEMM of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Pass {
    Forward,
    Dgrad,
    Wgrad,
}

/// The way results are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Stores {
    /// Through the caches.
    Cached,
    /// Large ones past the caches: a register tile has whole lines of each row.
    Streamed,
    /// Large ones past the caches, two lines at a time; results wait until both lines are whole.
    Runs,
}

/// A CPU GEMM, for its template.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct GemmText {
    pass: Pass,
    /// The symbol of the entry: `grouped_gemm_dgrad_up`.
    symbol: String,
    /// The formula: `hidden = silu(rows * gate) * (rows * up)`.
    formula: String,
    /// AMX tiles multiply; otherwise vectors do.
    tiles: bool,
    /// A 32-bit lane multiplies two bf16; otherwise one f32.
    pairs: bool,
    /// A 32-bit lane multiplies four bytes.
    bytes: bool,
    /// The codes of rows, empty where rows are numbers, and the number of the largest.
    row_format: &'static str,
    row_largest: u32,
    /// An instruction multiplies two rows of four-bf16 words by two columns.
    quads: bool,
    /// The C type of a word of an operand: the elements that one lane multiplies.
    word: &'static str,
    /// C type of the words of as many columns as a vector has lanes.
    word_vector: &'static str,
    /// Words of a depth slice.
    tile_words: usize,
    /// The contraction is cut into depth slices.
    slices: bool,
    /// A thread's scratch memory holds the sums of a block.
    keeps_sums: bool,
    /// The element type of the left operands.
    left: DType,
    /// The element type of the right operands.
    right: DType,
    /// The left operands by name.
    inputs: Vec<&'static str>,
    /// The matrices by name: right operands, in wgrad results.
    matrices: Vec<&'static str>,
    /// Results by name.
    outputs: Vec<&'static str>,
    stores: Stores,
    /// The epilogue turns sums into several results, or applies an activation.
    activates: bool,
    /// Pre-activations that the epilogue reads.
    kept: Vec<&'static str>,
    /// Rows of the left operand are prefetched during multiplications.
    prefetches_input: bool,
    /// Element types of packed operands.
    packs: Vec<DType>,
    /// The codes that matrices are of; `None` where they are numbers.
    codes: Option<CodesText>,
    /// The C type of the packed operand, and the stride of its rows.
    packed_type: &'static str,
    packed_stride: &'static str,
}

impl GemmText {
    /// Returns the record of an operator; `None` if it is not a CPU GEMM.
    pub(crate) fn new(op: &Op, target: Target) -> Option<GemmText> {
        let (Target::Cpu(isa) | Target::Sim(SimArch::Cpu(isa))) = target else {
            return None;
        };
        match op {
            Op::GroupedGemm { desc, config } => Some(forward(desc, config, isa)),
            Op::GroupedGemmDgrad { desc, config } => Some(dgrad(desc, config, isa)),
            Op::GroupedGemmWgrad { desc, config } => Some(wgrad(desc, config, isa)),
            _ => None,
        }
    }
}

/// Returns what all GEMMs share, for left and right operands of these types.
fn base(pass: Pass, config: &GroupedGemmConfig, unit: Unit, [left, right]: [DType; 2]) -> GemmText {
    let quads = unit == Unit::Quads;
    GemmText {
        pass,
        symbol: String::new(),
        formula: String::new(),
        tiles: unit == Unit::Tiles,
        pairs: matches!(unit, Unit::Pairs | Unit::Quads | Unit::Tiles),
        bytes: unit == Unit::Bytes,
        row_format: "",
        row_largest: 1,
        quads,
        word: if quads { "u64" } else { "f32" },
        word_vector: if quads { "words_t" } else { "vec" },
        tile_words: config.tile_depth / if quads { 2 } else { 1 },
        slices: true,
        keeps_sums: true,
        left,
        right,
        inputs: Vec::new(),
        matrices: Vec::new(),
        outputs: Vec::new(),
        stores: stores(unit, config, left),
        activates: false,
        kept: Vec::new(),
        prefetches_input: unit != Unit::Tiles,
        packs: Vec::new(),
        codes: None,
        packed_type: "weight_t",
        packed_stride: "OUTER",
    }
}

/// Returns the way results are stored. They go past the caches if a register tile has whole lines
/// of each row.
fn stores(unit: Unit, config: &GroupedGemmConfig, results: DType) -> Stores {
    const LINE: usize = 64;
    match unit {
        Unit::Tiles => Stores::Runs,
        _ if (config.thread_columns * results.size()).is_multiple_of(LINE) => Stores::Streamed,
        _ => Stores::Cached,
    }
}

/// Returns the elements of a depth slice.
fn tile_depth(text: &GemmText, config: &GroupedGemmConfig) -> usize {
    config.tile_depth
        * match (text.bytes, text.pairs) {
            (true, _) => 4,
            (false, true) => 2,
            (false, false) => 1,
        }
}

fn forward(d: &GroupedGemmDesc, c: &GroupedGemmConfig, isa: CpuIsa) -> GemmText {
    let unit = Unit::forward(d, c, isa);
    // Rows are of the activations' type and biases of the weights', whatever is multiplied.
    let base = base(Pass::Forward, c, unit, [d.activations, d.weights]);
    let slices = tile_depth(&base, c) < d.inner;
    let activates = d.half == ExpertGemm::Up;
    let (input, output) = match d.half {
        ExpertGemm::Up => ("rows", "hidden"),
        ExpertGemm::Down => ("hidden", "out"),
    };
    let kept = if d.keep {
        &["gate_pre", "up_pre"][!d.gated as usize..]
    } else {
        &[]
    };
    GemmText {
        symbol: format!("grouped_gemm_{}", d.half.name()),
        formula: forward_formula(d),
        slices,
        keeps_sums: slices,
        inputs: vec![if c.gather() { "x" } else { input }],
        matrices: match (d.half, d.gated) {
            (ExpertGemm::Down, _) => vec!["down"],
            (ExpertGemm::Up, false) => vec!["up"],
            (ExpertGemm::Up, true) => vec!["gate", "up"],
        },
        outputs: [&[output], kept].concat(),
        activates,
        codes: d.code_panel(c).map(|panel| CodesText::new(d, panel, unit)),
        row_format: match d.row_format {
            None => "",
            Some(ActivationFormat::Int8) => "int8",
            Some(ActivationFormat::Fp8) => "fp8",
        },
        row_largest: d.row_format.map_or(1, |format| format.largest() as u32),
        ..base
    }
}

fn forward_formula(d: &GroupedGemmDesc) -> String {
    let activation = d.nonlinearity.activation.name().unwrap_or("act");
    match (d.half, d.gated) {
        (ExpertGemm::Down, _) => "out = hidden * down".to_string(),
        (ExpertGemm::Up, false) => format!("hidden = {activation}(rows * up)"),
        (ExpertGemm::Up, true) => format!("hidden = {activation}(rows * gate) * (rows * up)"),
    }
}

/// Returns the codes of a dgrad, in the panels of the forward pass.
fn dgrad_codes(d: &GroupedGemmDgradDesc, isa: CpuIsa) -> Option<CodesText> {
    let forward = d.forward();
    let unit = match forward.factors(isa) {
        [DType::Bf16, DType::Bf16] => Unit::Pairs,
        _ => Unit::F32,
    };
    let panel = d.code_panel(isa)?;
    Some(CodesText::new(&forward, panel, unit))
}

fn dgrad(d: &GroupedGemmDgradDesc, c: &GroupedGemmConfig, isa: CpuIsa) -> GemmText {
    let [left, right] = d.factors(isa);
    let base = base(Pass::Dgrad, c, Unit::of(c, isa, left, right), [left, right]);
    let slices = !base.tiles || tile_depth(&base, c) < d.inner;
    let down = d.half == ExpertGemm::Down;
    let first = !d.gated as usize; // of lists whose first is of a gate
    let (inputs, matrices, outputs, kept) = if down {
        let outputs = if d.gated {
            vec!["hidden", "dgate", "dup"]
        } else {
            vec!["hidden", "dup"]
        };
        (
            vec!["dout"],
            vec!["down"],
            outputs,
            ["gate_pre", "up_pre"][first..].to_vec(),
        )
    } else {
        let inputs = ["dgate", "dup"][first..].to_vec();
        (
            inputs,
            ["gate", "up"][first..].to_vec(),
            vec!["drows"],
            Vec::new(),
        )
    };
    GemmText {
        symbol: format!("grouped_gemm_dgrad_{}", d.half.name()),
        formula: dgrad_formula(d).to_string(),
        slices,
        keeps_sums: slices,
        inputs,
        matrices,
        outputs,
        activates: down,
        kept,
        packs: vec![right],
        codes: dgrad_codes(d, isa),
        ..base
    }
}

fn dgrad_formula(d: &GroupedGemmDgradDesc) -> &'static str {
    match (d.half, d.gated) {
        (ExpertGemm::Up, true) => "drows = dgate * gate + dup * up",
        (ExpertGemm::Up, false) => "drows = dup * up",
        (ExpertGemm::Down, true) => "P = dout * down, and from it hidden, dgate and dup",
        (ExpertGemm::Down, false) => "P = dout * down, and from it hidden, dup",
    }
}

fn wgrad(d: &GroupedGemmWgradDesc, c: &GroupedGemmConfig, isa: CpuIsa) -> GemmText {
    let unit = Unit::of(c, isa, d.left, d.right);
    let base = base(Pass::Wgrad, c, unit, [d.left, d.right]);
    let down = d.half == ExpertGemm::Down;
    let first = !d.gated as usize;
    let mut packs = vec![d.left, d.right];
    packs.dedup();
    GemmText {
        symbol: format!("grouped_gemm_wgrad_{}", d.half.name()),
        formula: wgrad_formula(d).to_string(),
        keeps_sums: !base.tiles,
        inputs: if down {
            vec!["dout"]
        } else {
            ["dgate", "dup"][first..].to_vec()
        },
        matrices: if down {
            vec!["down"]
        } else {
            ["gate", "up"][first..].to_vec()
        },
        outputs: Vec::new(),
        stores: match stores(unit, c, d.gradient) {
            // A row of two AMX tiles is whole lines of every type.
            Stores::Runs => Stores::Streamed,
            others => others,
        },
        prefetches_input: false,
        packs,
        packed_type: "right_t",
        packed_stride: "WIDTH",
        ..base
    }
}

fn wgrad_formula(d: &GroupedGemmWgradDesc) -> &'static str {
    match (d.half, d.gated) {
        (ExpertGemm::Down, _) => "grad_down = transposed dout * hidden",
        (ExpertGemm::Up, true) => {
            "grad_gate = transposed dgate * rows, grad_up = transposed dup * rows"
        }
        (ExpertGemm::Up, false) => "grad_up = transposed dup * rows",
    }
}

/// Returns whether a field of [`GemmText`], or the formula of a gate, can be this text.
#[cfg(test)]
pub(crate) fn can_be(field: &str, text: &str) -> bool {
    if let Some(of_codes) = field.strip_prefix("codes.") {
        return crate::codes::texts(of_codes)
            .iter()
            .any(|name| name == text);
    }
    let names = match field {
        "pass" => names(&[Pass::Forward, Pass::Dgrad, Pass::Wgrad]),
        "stores" => names(&[Stores::Cached, Stores::Streamed, Stores::Runs]),
        "formula" => moesaic_plan::Logits::NAMES.map(str::to_string).to_vec(),
        "row_format" => ["", "int8", "fp8"].map(str::to_string).to_vec(),
        "left" | "right" => names(&[DType::F32, DType::F16, DType::Bf16]),
        _ => Vec::new(),
    };
    names.iter().any(|name| name == text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use moesaic_plan::{KernelPlan, PlanOptions, Training, plan};
    use moesaic_spec::LayerSpec;

    /// Returns the GEMM of this name in a layer of bf16 that trains.
    fn product(name: &str, target: &str, options: &str) -> GemmText {
        let spec = format!(
            r#"{{{options}"shape":{{"model_dim":256,"hidden_dim":512,"experts":4,"top_k":2}},
                "precision":{{"weights":"bf16","activations":"bf16"}}}}"#
        );
        let spec: LayerSpec = serde_json::from_str(&spec).expect("a spec");
        let target = target.parse().expect("a target");
        let training = PlanOptions::training(Training::default());
        let plan = plan(&spec, target, &training).expect("a plan");
        let is_it = |kernel: &&KernelPlan| kernel.name == name;
        let kernel = plan.kernels.iter().find(is_it).expect("it is a kernel");
        GemmText::new(&kernel.op, target).expect("a product on a CPU")
    }

    #[test]
    fn words_are_what_the_instruction_set_multiplies() {
        let of = |target: &str| product("grouped_gemm_up", target, "");
        let units = ["cpu:avx2", "cpu:avx512bf16", "cpu:neonbf16", "cpu:amx"].map(of);
        let flags = units.each_ref().map(|g| (g.pairs, g.quads, g.tiles));
        let (f32s, pairs) = ((false, false, false), (true, false, false));
        assert_eq!(
            flags,
            [f32s, pairs, (true, true, false), (true, false, true)]
        );
        assert_eq!(
            units.each_ref().map(|g| g.word),
            ["f32", "f32", "u64", "f32"]
        );
        assert_eq!(units[3].stores, Stores::Runs);
        assert!(units[1].prefetches_input && !units[3].prefetches_input);
    }

    #[test]
    fn factors_and_results_have_the_names_of_the_pass() {
        let up = product("grouped_gemm_up", "cpu:avx2", "");
        assert_eq!(up.symbol, "grouped_gemm_up");
        assert_eq!(up.formula, "hidden = silu(rows * gate) * (rows * up)");
        assert_eq!(up.matrices, ["gate", "up"]);
        assert_eq!(up.outputs, ["hidden", "gate_pre", "up_pre"]);
        let dgrad = product("grouped_gemm_dgrad_down", "cpu:avx2", "");
        assert_eq!(dgrad.outputs, ["hidden", "dgate", "dup"]);
        assert_eq!(
            (dgrad.inputs, dgrad.kept),
            (vec!["dout"], vec!["gate_pre", "up_pre"])
        );
        let wgrad = product("grouped_gemm_wgrad_up", "cpu:avx2", "");
        assert_eq!(
            (wgrad.inputs, wgrad.matrices),
            (vec!["dgate", "dup"], vec!["gate", "up"])
        );
        assert_eq!(
            (wgrad.packs, wgrad.packed_stride),
            (vec![DType::Bf16], "WIDTH")
        );
    }
}
