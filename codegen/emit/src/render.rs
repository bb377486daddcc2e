//! The template engine, behind two functions.

use crate::expression::{self, Notation};
use crate::gate::GateText;
use crate::gemm::GemmText;
use crate::literal::c_float;
use crate::signature::EntryText;
use crate::{EmitError, Prelude, language};
use moesaic_kernel::{ArchCaps, Entry, Language, Target};
use moesaic_plan::{KernelPlan, Op};
use moesaic_spec::Expression;
use serde::Serialize;
use std::collections::BTreeMap;
use std::sync::OnceLock;
use tera::{Context, Kwargs, State, Tera, TeraResult, Value};

/// The facts of a target that a template may use.
#[derive(Serialize)]
struct TargetText {
    /// `cpu`, `cuda` or `rocm`.
    backend: &'static str,
    /// The prelude of a GPU kernel, `cuda`, `hip` or `sim`; `c` on CPUs.
    dialect: &'static str,
    /// `avx512`, `sm_90a`, `gfx942`.
    arch: String,
    /// Bytes of a CPU vector register; 0 on GPUs.
    vector_bytes: usize,
    /// Vector registers of a CPU; 0 on GPUs.
    vector_registers: usize,
    /// Whether an instruction multiplies pairs of bf16 and adds them to an f32.
    bf16_pairs: bool,
    /// Whether an instruction multiplies two rows by two columns of four bf16 each.
    bf16_quads: bool,
    /// Whether a CPU has AVX2 at least.
    avx2: bool,
    /// Whether a CPU has AVX-512 at least.
    avx512: bool,
    /// Lanes of a warp or wave; 1 on CPUs.
    wave: u32,
    /// Banks of a GPU's shared memory.
    shared_banks: u32,
    /// Whether one instruction rounds f32 to bf16.
    bf16_rounding: bool,
    /// Whether one instruction finds the largest value of a warp.
    warp_max: bool,
    /// Whether launches of a GPU may overlap.
    dependent_launches: bool,
    /// Dies of a GPU that have an L2 cache each; 1 for one cache.
    dies: u32,
    /// Whether MFMA of 16-bit types takes eight elements of each lane, not four.
    mfma_wide: bool,
    /// Whether MFMA of 16-bit types reads subnormal numbers as zero.
    mfma_flushes: bool,
}

impl TargetText {
    fn new(target: Target, prelude: Prelude) -> TargetText {
        let target = target.hardware();
        let (backend, arch) = (target.backend(), target.arch());
        let base = TargetText {
            backend,
            dialect: dialect(target, prelude),
            arch,
            vector_bytes: 0,
            vector_registers: 0,
            bf16_pairs: false,
            bf16_quads: false,
            avx2: false,
            avx512: false,
            wave: 1,
            shared_banks: 0,
            bf16_rounding: false,
            warp_max: false,
            dependent_launches: false,
            dies: 1,
            mfma_wide: false,
            mfma_flushes: false,
        };
        if let Some(caps) = target.caps() {
            return base.of_gpu(caps);
        }
        match target {
            Target::Cpu(isa) => TargetText {
                vector_bytes: isa.vector_bytes(),
                vector_registers: isa.vector_registers(),
                bf16_pairs: isa.bf16_pairs(),
                bf16_quads: isa.bf16_quads(),
                avx2: isa.has_avx2(),
                avx512: isa.has_avx512(),
                ..base
            },
            _ => base,
        }
    }

    fn of_gpu(self, caps: &ArchCaps) -> TargetText {
        TargetText {
            wave: caps.wave,
            shared_banks: caps.shared_banks,
            bf16_rounding: caps.bf16_rounding,
            warp_max: caps.warp_max,
            dependent_launches: caps.dependent_launches,
            dies: caps.dies,
            mfma_wide: caps.mfma().is_some_and(|mfma| mfma.wide),
            mfma_flushes: caps.mfma().is_some_and(|mfma| mfma.flushes),
            ..self
        }
    }
}

fn dialect(target: Target, prelude: Prelude) -> &'static str {
    match (language(target), prelude) {
        (Language::C, _) => "c",
        (_, Prelude::Sim) => "sim",
        (Language::Cuda, _) => "cuda",
        (Language::Hip, _) => "hip",
    }
}

/// Renders the template of a kernel.
pub(crate) fn render(
    kernel: &KernelPlan,
    target: Target,
    prelude: Prelude,
) -> Result<String, String> {
    let context = offered(kernel, target, prelude);
    let text = engine(target)?
        .render(&template(&kernel.op, target), &context)
        .map_err(|error| error.to_string())?;
    Ok(tidy(&(text + &launchers(kernel, target, prelude))))
}

/// Returns all names that the template of a kernel may use.
pub(crate) fn offered(kernel: &KernelPlan, target: Target, prelude: Prelude) -> Context {
    let parts = parts(&kernel.op);
    let overlaps = kernel.entries.iter().any(|entry| entry.launch.dependent);
    let entries: BTreeMap<&str, EntryText> = kernel
        .entries
        .iter()
        .chain(&parts)
        .map(|entry| {
            (
                entry.symbol.as_str(),
                EntryText::new(entry, language(target), overlaps),
            )
        })
        .collect();
    let mut context = context(&kernel.op);
    if let Some(product) = GemmText::new(&kernel.op, target) {
        context.insert("g", &product);
    }
    if let Some(gate) = GateText::new(&kernel.op) {
        context.insert("g", &gate);
    }
    if let Op::GroupedGemm { desc, config } = &kernel.op {
        context.insert("persistent", &desc.is_persistent(config));
    }
    context.insert("target", &TargetText::new(target, prelude));
    context.insert("entry", &entries);
    // A list keeps the order of the kernel; the engine goes over a map in random order.
    let exports = kernel.entries.iter();
    let exports = exports.map(|entry| &entries[entry.symbol.as_str()].export);
    context.insert("exports", &exports.collect::<Vec<_>>());
    context
}

/// Returns the entries of other kernels that are functions of this one.
fn parts(op: &Op) -> Vec<Entry> {
    match op {
        Op::Route { desc, config } => desc.parts(config),
        _ => Vec::new(),
    }
}

/// Returns one template of a target's family over an operator alone, so that a test can call the
/// functions of the prelude.
///
/// # Errors
///
/// When the template needs more than `d` and `c`.
pub fn part(name: &str, op: &Op, target: Target) -> Result<String, EmitError> {
    let text = engine(target).and_then(|engine| {
        let text = engine.render(name, &context(op));
        text.map_err(|error| error.to_string())
    });
    text.map_err(|reason| EmitError {
        kernel: name.to_string(),
        target: target.to_string(),
        reason,
    })
}

/// Returns a function for each entry that runs a grid of it on the host.
fn launchers(kernel: &KernelPlan, target: Target, prelude: Prelude) -> String {
    match dialect(target, prelude) {
        "sim" => {
            let entries = kernel.entries.iter();
            entries
                .map(|entry| format!("\nSIM_ENTRY({})\n", entry.symbol))
                .collect()
        }
        _ => String::new(),
    }
}

/// Returns `d`, the desc, and `c`, the config.
fn context(op: &Op) -> Context {
    let op = Value::from_serializable(op);
    let mut context = Context::new();
    for (name, field) in [("d", "desc"), ("c", "config")] {
        let value = op.get_from_path(field).cloned();
        context.insert_value(name, value.unwrap_or_else(Value::none));
    }
    context
}

/// Returns the template of an operator: the operator's folder, in it that of the targets, and the
/// file of the kernel. GEMM families on one vendor's tensor or matrix cores have a file each.
pub(crate) fn template(op: &Op, target: Target) -> String {
    let (operator, name) = (op.operator(), op.name());
    let family = op.gemm().map(|config| &config.family);
    let vendor = family.and_then(|family| Some((family.vendor()?, family.name())));
    match (language(target), vendor) {
        (Language::C, _) => format!("{operator}/cpu/{name}.c"),
        (_, None) => format!("{operator}/gpu/{name}.cu"),
        (_, Some((vendor, family))) => format!("{operator}/{vendor}/{name}_{family}.cu"),
    }
}

/// Returns the templates of a target's family, parsed once.
fn engine(target: Target) -> Result<&'static Tera, String> {
    static CPU: OnceLock<Result<Tera, String>> = OnceLock::new();
    static GPU: OnceLock<Result<Tera, String>> = OnceLock::new();
    let (cell, templates) = match language(target) {
        Language::C => (&CPU, moesaic_templates::CPU),
        Language::Cuda | Language::Hip => (&GPU, moesaic_templates::GPU),
    };
    cell.get_or_init(|| parse(templates))
        .as_ref()
        .map_err(String::clone)
}

fn parse(templates: &[moesaic_templates::Template]) -> Result<Tera, String> {
    let mut tera = Tera::new();
    tera.autoescape_on(Vec::<&'static str>::new());
    tera.register_filter("f32", |value: f64, _: Kwargs, _: &State| c_float(value));
    // Filters for the expression of a custom activation: its functions, and the bodies of value and
    // derivative in C vectors (`vec_`) or scalars.
    tera.register_filter("calls", |text: String, _: Kwargs, _: &State| {
        parsed(&text).map(|expression| expression::calls(&expression))
    });
    for (name, slope, notation) in [
        ("vec_value", false, Notation::Vector),
        ("vec_slope", true, Notation::Vector),
        ("value", false, Notation::Scalar),
        ("slope", true, Notation::Scalar),
    ] {
        tera.register_filter(name, move |text: String, _: Kwargs, _: &State| {
            parsed(&text).map(|expression| {
                let (value, derivative) = (expression.value(), expression.slope());
                let root = if slope { derivative } else { value };
                expression::body(&expression, root, notation)
            })
        });
    }
    tera.add_raw_templates(templates.iter().copied())
        .map_err(|error| error.to_string())?;
    Ok(tera)
}

/// Returns an expression that validation has accepted.
fn parsed(text: &str) -> TeraResult<Expression> {
    Expression::parse(text).map_err(|error| tera::Error::message(error.to_string()))
}

/// Drops trailing blanks and runs of empty lines that conditions leave.
fn tidy(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut empty = true;
    for line in text.lines().map(str::trim_end) {
        if !(line.is_empty() && empty) {
            out.push_str(line);
            out.push('\n');
        }
        empty = line.is_empty();
    }
    while out.ends_with("\n\n") {
        out.pop();
    }
    out
}
