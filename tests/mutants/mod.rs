//! Real kernels with one mistake each, which the simulators must catch.
//! docs/SIMULATOR.md holds the table that this list makes.

mod decode;
mod list;
mod norm;
mod scan;
mod scheduler;

use crate::conformance::Case;
use moesaic::kernel::KernelSource;
use moesaic::spec::LayerSpec;
use moesaic::target::{Artifact, CompileError, CompileOptions, Compiler};
use moesaic::toolchain::testing::{ExternalTool, needed};
use moesaic::{Compilers, Engine, EngineOptions, Recompute, Target};
use moesaic_harness::kept::Kept;
use moesaic_harness::thorough::one_in;
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// The simulators that run them.
const TARGETS: [&str; 3] = ["sim:sm_80", "sim:sm_90a", "sim:gfx942"];

/// A kernel with a planted mistake.
pub struct Mutant {
    /// The mistake, in the words of the table.
    pub mistake: &'static str,
    /// The simulator that runs it.
    pub target: &'static str,
    /// The kernel: `grouped_gemm_up`.
    pub kernel: &'static str,
    /// Text of the kernel that the mistake replaces. It occurs once.
    pub from: &'static str,
    /// The text of the mistake.
    pub to: &'static str,
    /// The layer, as TOML.
    pub layer: &'static str,
    /// Tokens of the call.
    pub tokens: usize,
    /// Whether the layer runs backward too.
    pub training: bool,
    /// Words of the report: the name of the finding, or of the stage that is
    /// found wrong.
    pub caught: &'static str,
}

/// Compiles one kernel with a mistake, the others as they are.
struct Planting<'m> {
    inner: Kept,
    mutant: &'m Mutant,
}

impl Planting<'_> {
    fn mistaken(&self, source: &KernelSource) -> KernelSource {
        let (mutant, mut source) = (self.mutant, source.clone());
        if source.name == mutant.kernel {
            let found = source.text.matches(mutant.from).count();
            assert_eq!(
                found, 1,
                "{}: `{}` occurs {found} times in\n{}",
                mutant.mistake, mutant.from, source.text
            );
            source.text = source.text.replace(mutant.from, mutant.to);
        }
        source
    }
}

impl Compiler for Planting<'static> {
    fn backend(&self) -> &'static str {
        self.inner.backend()
    }

    fn name(&self) -> String {
        self.inner.name()
    }

    fn fingerprint(&self, target: Target) -> String {
        self.inner.fingerprint(target)
    }

    fn targets(&self) -> Vec<Target> {
        self.inner.targets()
    }

    fn compile(
        &self,
        source: &KernelSource,
        options: &CompileOptions,
    ) -> Result<Artifact, CompileError> {
        self.inner.compile(&self.mistaken(source), options)
    }
}

fn options() -> EngineOptions {
    EngineOptions {
        // A mistaken kernel must not reach the user's store, nor pass for a
        // correct one: its own text is its key.
        store: None,
        ..EngineOptions::default()
    }
}

/// Runs the layer and compares its results.
fn hold(mutant: &Mutant, case: &Case, engine: &Engine) {
    if mutant.training {
        case.check_training(engine, Recompute::None)
    } else {
        case.check(engine)
    }
}

/// Returns the report of the simulator or the comparison, or `None` when all is
/// well.
fn report(mutant: &Mutant, case: &Case, engine: &Engine) -> Option<String> {
    let caught = catch_unwind(AssertUnwindSafe(|| hold(mutant, case, engine))).err()?;
    let text = |payload: &dyn Any| {
        let owned = payload.downcast_ref::<String>().cloned();
        owned.or_else(|| payload.downcast_ref::<&str>().map(ToString::to_string))
    };
    Some(text(&*caught).unwrap_or_default())
}

/// Kernels that are as they should be are compiled once for all mutants.
fn compiler(target: &str) -> Kept {
    let target: Target = target.parse().expect("a target");
    Kept(needed(
        ExternalTool::of(target),
        Compilers::default().get(target),
    ))
}

/// Returns the difference between the expected and the actual report, if any.
fn missed(mutant: &'static Mutant) -> Option<String> {
    let what = format!("{} on {}", mutant.mistake, mutant.target);
    let spec = LayerSpec::from_toml(mutant.layer)
        .unwrap_or_else(|e| panic!("{what}: {}", e.render(mutant.layer, false)));
    let case = Case::random(&spec, mutant.tokens, 11);
    let inner = compiler(mutant.target);
    let planting = Arc::new(Planting { inner, mutant });
    let engine = Engine::open_with(mutant.target, options(), planting).expect("a simulator");
    match report(mutant, &case, &engine) {
        None => Some(format!("{what}: nobody noticed")),
        Some(report) if report.contains(mutant.caught) => None,
        Some(report) => Some(format!("{what}: not `{}`:\n{report}", mutant.caught)),
    }
}

/// Iterates over those of one simulator that this run plants: a third, or all in a thorough run.
fn planted(target: &str) -> impl Iterator<Item = &'static Mutant> {
    one_in(3, 0, mutants().filter(move |m| m.target == target))
}

/// Iterates over all of them, in the order of the table.
fn mutants() -> impl Iterator<Item = &'static Mutant> {
    let parts = [
        list::MUTANTS,
        decode::MUTANTS,
        scan::MUTANTS,
        scheduler::MUTANTS,
        norm::MUTANTS,
    ];
    parts.into_iter().flatten()
}

/// Checks that every layer passes without its mistake.
#[test]
fn the_kernels_as_they_are_pass() {
    let mut seen = Vec::new();
    for mutant in TARGETS.into_iter().flat_map(planted) {
        let key = (mutant.target, mutant.layer, mutant.tokens);
        if seen.contains(&key) {
            continue;
        }
        seen.push(key);
        let spec = LayerSpec::from_toml(mutant.layer).expect("it is valid");
        let compiler = Arc::new(compiler(mutant.target));
        let engine = Engine::open_with(mutant.target, options(), compiler).expect("a simulator");
        hold(mutant, &Case::random(&spec, mutant.tokens, 11), &engine);
    }
}

fn check_planted(target: &str) {
    let planted: Vec<&Mutant> = planted(target).collect();
    assert!(!planted.is_empty());
    let missed: Vec<String> = planted.into_iter().filter_map(missed).collect();
    assert!(missed.is_empty(), "{}", missed.join("\n\n"));
}

#[test]
fn every_mistake_is_caught_on_sm_80() {
    check_planted(TARGETS[0]);
}

#[test]
fn every_mistake_is_caught_on_sm_90a() {
    check_planted(TARGETS[1]);
}

#[test]
fn every_mistake_is_caught_on_gfx942() {
    check_planted(TARGETS[2]);
}

/// Checks that the table of the document is that of the list.
#[test]
fn the_document_lists_them() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/SIMULATOR.md");
    let text = std::fs::read_to_string(path).expect("the document");
    for (i, m) in mutants().enumerate() {
        assert!(
            TARGETS.contains(&m.target),
            "{} is never planted",
            m.mistake
        );
        let row = format!(
            "| {} | {} | `{}` | {} | {} |",
            i + 1,
            m.mistake,
            m.kernel,
            m.target,
            m.caught
        );
        assert!(text.contains(&row), "docs/SIMULATOR.md lacks\n{row}");
    }
    assert!(mutants().count() >= 25);
}
