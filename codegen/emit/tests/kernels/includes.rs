//! Every kernel's text defines what it calls, above the call: no template
//! leaves out a part that it uses, whatever the layer.

use moesaic_emit::emit_layer;
use moesaic_harness::thorough::in_turns;
use moesaic_kernel::Target;
use moesaic_plan::{Both, CommDtype, LayerPlan, Parallel, PlanOptions, Training, plan, plan_rank};
use moesaic_spec::LayerSpec;
use moesaic_spec::testing::sample;
use std::collections::{BTreeMap, BTreeSet};

/// The words of a text that a bracket follows, and where; also those with
/// template arguments in between. Comments, directives and methods are left out.
fn calls(text: &str) -> Vec<(usize, &str)> {
    let mut found = Vec::new();
    let mut at = 0;
    for line in text.split_inclusive('\n') {
        let code = line.split("//").next().unwrap_or_default();
        if !code.trim_start().starts_with('#') {
            found.extend(calls_of(code).map(|(column, name)| (at + column, name)));
        }
        at += line.len();
    }
    found
}

fn calls_of(code: &str) -> impl Iterator<Item = (usize, &str)> {
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let starts = code.char_indices().filter(move |&(at, c)| {
        let before = code[..at].chars().next_back();
        is_word(c) && !before.is_some_and(|c| is_word(c) || ".>:".contains(c))
    });
    starts.filter_map(move |(at, _)| {
        let rest = &code[at..];
        let name = rest.split(|c| !is_word(c)).next().unwrap_or_default();
        let after = &rest[name.len()..];
        let arguments = after.split_once('>').map(|(_, after)| after);
        let called = after.starts_with('(')
            || after.starts_with('<') && arguments.is_some_and(|after| after.starts_with('('));
        called.then_some((at, name))
    })
}

/// The functions that a text defines or declares, its lambdas and macros, and where first.
fn definitions(text: &str) -> BTreeMap<&str, usize> {
    let mut found = BTreeMap::new();
    let mut at = 0;
    for line in text.split_inclusive('\n') {
        if let Some((column, name)) = defined_by(line) {
            found.entry(name).or_insert(at + column);
        }
        at += line.len();
    }
    found
}

fn defined_by(line: &str) -> Option<(usize, &str)> {
    let lambda = line
        .split_once("auto ")
        .and_then(|(_, rest)| rest.split_once(" = ["));
    if let Some((name, _)) = lambda {
        return Some((0, name));
    }
    let defines = ["DEVICE ", "INLINE ", "#define "]
        .iter()
        .any(|word| line.contains(word));
    if !defines && !line.starts_with("static ") {
        return None;
    }
    calls_of(line).find(|(_, name)| *name != "__attribute__")
}

/// The functions of a family's prelude, methods aside.
fn known(templates: &[moesaic_templates::Template]) -> BTreeSet<&'static str> {
    let parts = templates
        .iter()
        .filter(|(name, _)| name.starts_with("prelude/"));
    let lines = parts.flat_map(|(_, text)| text.lines());
    let functions = lines.filter(|line| !line.starts_with(' '));
    functions
        .filter_map(|line| defined_by(line).map(|(_, name)| name))
        .collect()
}

/// Returns the functions that a text calls and does not define above the call.
fn missing<'a>(text: &'a str, known: &BTreeSet<&str>) -> BTreeSet<&'a str> {
    let defined = definitions(text);
    let late = |at: usize, name: &str| defined.get(name).is_none_or(|first| *first > at);
    let calls = calls(text).into_iter();
    let calls = calls.filter(|(at, name)| known.contains(name) && late(*at, name));
    calls.map(|(_, name)| name).collect()
}

/// The norm wants the order of scores, where nothing else does.
fn p_norm_alone() -> LayerSpec {
    let text = r#"
        shape = { model_dim = 33, hidden_dim = 21, experts = 6, top_k = 2 }
        router = { kind = "table", table_rows = 3, score = "one", expert_scale = true,
                   renormalize = "p-norm" }
    "#;
    LayerSpec::from_toml(text).unwrap_or_else(|error| panic!("{error:?}"))
}

/// The kernels of rows between nodes, in every format.
fn between_nodes(spec: &LayerSpec, target: Target) -> LayerPlan {
    let ranks = plan_rank(
        spec,
        target,
        &PlanOptions::default(),
        Parallel::default(),
        0,
    );
    let ranks = ranks.unwrap();
    let mut all = LayerPlan {
        kernels: Vec::new(),
        ..ranks.tokens.clone()
    };
    for comm_dtype in [CommDtype::F16, CommDtype::Bf16, CommDtype::Fp8] {
        let casts = ranks.in_comm_dtype(Both::same(comm_dtype)).comm_cast;
        all.kernels
            .extend(casts.into_iter().flat_map(|plan| plan.kernels));
    }
    all
}

fn check(target: &str, known: &BTreeSet<&str>, seeds: std::ops::Range<u64>) {
    let target: Target = target.parse().unwrap();
    let mut seen = BTreeSet::new();
    for spec in in_turns(0, seeds).map(sample).chain([p_norm_alone()]) {
        let plans = [
            plan(&spec, target, &PlanOptions::default()),
            plan(&spec, target, &PlanOptions::training(Training::default())),
            Ok(between_nodes(&spec, target)),
        ];
        for plan in plans {
            for source in emit_layer(&plan.unwrap()).unwrap() {
                if seen.contains(&source.text) {
                    continue;
                }
                let missing = missing(&source.text, known);
                let what = format!("{} for {target} of {}", source.name, spec.to_toml());
                assert!(missing.is_empty(), "{missing:?} is missing in {what}");
                seen.insert(source.text);
            }
        }
    }
    assert!(seen.len() > 100, "{target}: {} kernels", seen.len());
}

#[test]
fn gpu_templates_include_what_they_use() {
    let known = known(moesaic_templates::GPU);
    assert!(known.contains("order_key") && known.contains("warp_max"));
    for (i, target) in ["cuda:sm_80", "cuda:sm_90a", "rocm:gfx942", "rocm:gfx1100"]
        .iter()
        .enumerate()
    {
        check(target, &known, 60 * i as u64..60 * (i as u64 + 1));
    }
}

#[test]
fn cpu_templates_include_what_they_use() {
    let known = known(moesaic_templates::CPU);
    for (i, target) in ["cpu:portable", "cpu:avx512bf16", "cpu:neonbf16"]
        .iter()
        .enumerate()
    {
        check(target, &known, 60 * i as u64..60 * (i as u64 + 1));
    }
}

#[test]
fn a_missing_part_is_noticed() {
    let known = BTreeSet::from(["order_key", "load"]);
    let text = "// order_key(x)\nu32 a = order_key(score);\nDEVICE u32 load(u32 x) { return x; }\n";
    assert_eq!(missing(text, &known), BTreeSet::from(["order_key"]));
    let late = "u32 a = load<2>(score);\ntemplate <int N> DEVICE u32 load(u32 x) { return x; }\n";
    assert_eq!(missing(late, &known), BTreeSet::from(["load"]));
}
