//! Target names.

use crate::completed::Completed;
use crate::failure::{Failure, Result};
use crate::suggest::{closest, gpu, plain};
use clap::Args;
use moesaic::kernel::TargetError;
use moesaic::{Engine, EngineOptions, Target, TargetNameError, resolve_target};

/// Names that stand for a device of this machine.
const SHORT: [&str; 4] = ["auto", "cpu", "cuda", "rocm"];

/// Returns GPUs as people say them, with the target of each.
fn gpus() -> impl Iterator<Item = (&'static str, Target)> {
    let real = Target::all()
        .into_iter()
        .filter(|target| target.hardware() == *target);
    real.flat_map(|target| {
        let names = target.caps().map_or(&[][..], |caps| caps.gpus);
        names.iter().map(move |name| (*name, target))
    })
}

/// The name of a target.
pub const NAME: Completed = Completed(|| {
    let full = Target::all().into_iter().map(|target| target.to_string());
    let gpus = gpus().map(|(name, _)| name.to_string());
    let short = SHORT.into_iter().map(str::to_string);
    short.chain(gpus).chain(full).collect()
});

/// The option `--target` of a command that takes one. A command whose targets are others changes
/// its text and default by `mut_arg`.
#[derive(Args, Clone, Debug)]
pub struct TargetArgs {
    /// The target: cpu, or with an architecture, as in cuda:sm_90a, rocm:gfx942, sim:sm_90a
    #[arg(id = "target", long = "target", value_name = "T", value_parser = NAME, hide_possible_values = true, default_value = "cpu")]
    pub name: String,
}

/// The option `--target` of a command that takes several, or none.
#[derive(Args, Clone, Debug)]
pub struct TargetsArgs {
    /// Targets, such as cpu,cuda:sm_90a,rocm:gfx942
    #[arg(id = "target", long = "target", value_name = "T[,T]", value_parser = NAME, hide_possible_values = true, value_delimiter = ',')]
    pub names: Vec<String>,
}

/// Returns the full name of a GPU's target: `h100`, `cuda:h100` and `sim:H100` name the
/// architecture of that GPU. Other names stay as they are.
pub fn full_name(name: &str) -> String {
    let name = name.trim();
    let (backend, gpu) = match name.split_once(':') {
        Some((backend, gpu)) => (Some(backend), gpu),
        None => (None, name),
    };
    let gpu = plain(gpu);
    let Some((_, target)) = gpus().find(|(known, _)| *known == gpu) else {
        return name.to_string();
    };
    match backend {
        Some("sim") => format!("sim:{}", target.arch()),
        Some(backend) if backend != target.backend() => name.to_string(),
        _ => target.to_string(),
    }
}

/// Resolves a comma-separated list to targets, each once, in the given order.
pub fn resolve(names: &[String]) -> Result<Vec<Target>> {
    let mut targets = Vec::new();
    for name in names {
        let target = resolve_one(name)?;
        if !targets.contains(&target) {
            targets.push(target);
        }
    }
    Ok(targets)
}

/// Resolves one name. `auto` means this machine's CPU, because callers of this function run
/// nothing.
pub fn resolve_one(name: &str) -> Result<Target> {
    let name = if name == "auto" { "cpu" } else { name };
    Ok(resolve_target(&full_name(name))?)
}

/// A target, with the name by which it was requested.
#[derive(Clone, Copy, Debug)]
pub struct Asked<'a> {
    name: &'a str,
    /// The target that the name resolves to.
    pub target: Target,
}

impl Asked<'_> {
    /// Returns the failure for an option that has no effect on this target.
    pub fn idle(&self, option: &str, why: &str) -> Failure {
        let here = match self.name {
            "auto" => format!(", which is `{}` here", self.target),
            _ => String::new(),
        };
        let name = self.name;
        Failure::input(format!("{option} does nothing on `{name}`{here}: {why}"))
    }
}

/// Opens the engine of a target name. `check` refuses options that do not fit the target. It runs
/// before a device is opened, unless only the device decides the target.
pub fn open(
    name: &str,
    options: EngineOptions,
    check: impl Fn(&Asked<'_>) -> Result,
) -> Result<Engine> {
    if !["auto", "cuda", "rocm"].contains(&name) {
        let target = resolve_one(name)?;
        check(&Asked { name, target })?;
    }
    let engine = Engine::open(&full_name(name), options)?;
    let target = engine.target();
    check(&Asked { name, target })?;
    Ok(engine)
}

/// Returns the failure for an unknown name.
pub fn unknown(error: &TargetError) -> Failure {
    let failure = Failure::input(format!("unknown target `{}`\n{}", error.asked, known()));
    match meant(&error.asked) {
        Some(near) => failure.hint(format!("did you mean `{near}`?")),
        None => failure.hint("write it as backend:arch, such as cuda:sm_90a, or as h100 or mi300x"),
    }
}

/// Generations by the names that people say, with a GPU of each.
const GENERATIONS: [(&str, &str); 9] = [
    ("volta", "v100"),
    ("turing", "t4"),
    ("ampere", "a100"),
    ("ada", "l40s"),
    ("hopper", "h100"),
    ("blackwell", "b200"),
    ("cdna2", "mi250x"),
    ("cdna3", "mi300x"),
    ("cdna4", "mi355x"),
];

/// Returns the target that an unknown name means: by its architecture, whole or begun, else by its
/// GPU or generation, else by its letters.
fn meant(asked: &str) -> Option<String> {
    let last = plain(asked.rsplit(':').next().unwrap_or_default());
    let all = || Target::all().into_iter();
    let whole = all().find(|target| plain(&target.arch()) == last);
    let begun = || all().find(|target| last.len() > 2 && plain(&target.arch()).starts_with(&last));
    if let Some(target) = whole.or_else(begun) {
        return Some(target.to_string());
    }
    let generation = GENERATIONS.iter().find(|(name, _)| *name == last);
    let gpus: Vec<&str> = gpus().map(|(name, _)| name).collect();
    let names: Vec<String> = all().map(|target| target.to_string()).collect();
    let near = || closest(asked, names.iter().map(String::as_str).chain(SHORT));
    let name = generation.map(|(_, gpu)| *gpu);
    name.or_else(|| gpu(&last, &gpus))
        .or_else(near)
        .map(str::to_string)
}

impl From<TargetNameError> for Failure {
    fn from(error: TargetNameError) -> Failure {
        match error {
            TargetNameError::Unknown(error) => unknown(&error),
            other => Failure::input(other),
        }
    }
}

/// Lists every target name, one line for each backend. A simulator has the architectures of the
/// backends above it, so its line has only the others.
pub fn known() -> String {
    let of = |backend: &'static str| {
        Target::all()
            .into_iter()
            .filter(move |t| t.backend() == backend)
    };
    let line = |backend: &'static str| {
        let names: Vec<String> = of(backend).map(|t| t.to_string()).collect();
        format!("{backend:<5} {}", names.join(" "))
    };
    let simulated = |t: &Target| matches!(t.hardware(), Target::Cpu(_));
    let sims: Vec<String> = of("sim").filter(simulated).map(|t| t.to_string()).collect();
    let gpus: Vec<&str> = gpus().map(|(name, _)| name).collect();
    format!(
        "known targets (a bare `cpu` is this machine's):\n{}\nsim   {}, and sim: before any \
         architecture of cuda and rocm, as in sim:sm_90a\nGPUs  {}",
        ["cpu", "cuda", "rocm"].map(line).join("\n"),
        sims.join(" "),
        gpus.join(" ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hint(name: &str) -> String {
        resolve_one(name).unwrap_err().hint.unwrap_or_default()
    }

    #[test]
    fn unknown_names_get_the_nearest_known_one() {
        assert_eq!(hint("sm_90a"), "did you mean `cuda:sm_90a`?");
        assert_eq!(hint("cuda:sm90a"), "did you mean `cuda:sm_90a`?");
        assert_eq!(hint("cpuu"), "did you mean `cpu`?");
        assert_eq!(hint("sm90"), "did you mean `cuda:sm_90`?");
        assert_eq!(hint("cuda:sm_9"), "did you mean `cuda:sm_90`?");
        assert_eq!(hint("rocm:gfx94"), "did you mean `rocm:gfx942`?");
        assert!(hint("quantum").contains("backend:arch"));
    }

    #[test]
    fn every_name_is_listed_once() {
        let list = known();
        for name in [
            "cpu:avx2",
            "cuda:sm_90a",
            "rocm:gfx942",
            "sim:neon",
            "mi300x",
        ] {
            assert_eq!(
                list.split_whitespace()
                    .filter(|word| word.trim_end_matches(',') == name)
                    .count(),
                1
            );
        }
        assert!(!list.contains("sim:sm_80"), "{list}");
    }

    #[test]
    fn gpus_have_the_names_that_people_say() {
        for (name, target) in gpus() {
            assert_eq!(resolve_one(name).unwrap(), target, "{name}");
        }
        for (name, target) in [
            ("H100", "cuda:sm_90a"),
            ("cuda:a100", "cuda:sm_80"),
            ("sim:h100", "sim:sm_90a"),
            ("NVIDIA GeForce RTX 4090", "cuda:sm_89"),
            ("AMD Instinct MI300X", "rocm:gfx942"),
        ] {
            assert_eq!(resolve_one(name).unwrap().to_string(), target);
        }
        // Another number is another GPU, however close the words are.
        assert_eq!(hint("mi300"), "did you mean `mi300x`?");
        assert_eq!(hint("h10"), "did you mean `h100`?");
        assert_eq!(hint("H100 SXM"), "did you mean `h100`?");
        assert_eq!(hint("hopper"), "did you mean `h100`?");
        assert_eq!(hint("rtx-4090ti"), "did you mean `rtx4090`?");
        assert_eq!(hint("rocm:h100"), "did you mean `h100`?");
        for name in ["h900", "a500"] {
            assert!(
                hint(name).contains("backend:arch"),
                "{name}: {}",
                hint(name)
            );
        }
    }

    #[test]
    fn a_list_keeps_its_order_and_each_target_once() {
        let names = ["cuda:sm_90a", "rocm:gfx942", "cuda:sm_90a"].map(String::from);
        let found: Vec<String> = resolve(&names)
            .unwrap()
            .iter()
            .map(Target::to_string)
            .collect();
        assert_eq!(found, ["cuda:sm_90a", "rocm:gfx942"]);
    }
}
