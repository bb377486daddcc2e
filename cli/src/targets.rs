//! Target names.

use crate::failure::{Failure, Result};
use crate::suggest::closest;
use moesaic::kernel::TargetError;
use moesaic::{Engine, EngineOptions, Target, resolve_target};

/// Names that stand for a device of this machine.
const SHORT: [&str; 4] = ["auto", "cpu", "cuda", "rocm"];

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
    Ok(resolve_target(name.trim())?)
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
    let engine = Engine::open(name, options)?;
    let target = engine.target();
    check(&Asked { name, target })?;
    Ok(engine)
}

/// Returns the failure for an unknown name.
pub fn unknown(error: &TargetError) -> Failure {
    let all: Vec<String> = Target::all().iter().map(Target::to_string).collect();
    let names = all.iter().map(String::as_str).chain(SHORT);
    let same_arch = Target::all()
        .into_iter()
        .find(|target| target.arch() == error.asked);
    let near = same_arch
        .map(|target| target.to_string())
        .or_else(|| closest(&error.asked, names).map(str::to_string));
    let failure = Failure::input(format!("unknown target `{}`\n{}", error.asked, known()));
    match near {
        Some(near) => failure.hint(format!("did you mean `{near}`?")),
        None => failure.hint("write it as backend:arch, such as cuda:sm_90a"),
    }
}

/// Lists every target name, one line for each backend.
pub fn known() -> String {
    let line = |backend: &str| {
        let own = Target::all().into_iter().filter(|t| t.backend() == backend);
        let names: Vec<String> = own.map(|t| t.to_string()).collect();
        format!("{backend:<5} {}", names.join(" "))
    };
    let lines = ["cpu", "cuda", "rocm", "sim"].map(line);
    format!(
        "known targets (a bare `cpu` is this machine's):\n{}",
        lines.join("\n")
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
        assert!(hint("quantum").contains("backend:arch"));
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
