//! Finds a clang with the AMDGPU target.

use crate::clang::{Clang, ClangError, ClangTool};
use std::ffi::OsString;
use std::path::PathBuf;

/// The oldest and the newest clang whose versioned name is looked for. The
/// oldest is the first that makes code object version 5 for gfx942.
const VERSIONS: std::ops::RangeInclusive<u32> = 17..=23;

/// A place that was tried, and its answer.
pub struct Refused {
    pub place: String,
    pub reason: String,
}

/// Returns every clang to try. A set `MOESAIC_CLANG` is binding, so nothing
/// else is tried then. Otherwise the order is the toolchain registry, a ROCm
/// installation, and `PATH`.
pub fn tools(
    registered: Option<&ClangTool>,
    var: impl Fn(&str) -> Option<OsString>,
) -> Vec<ClangTool> {
    let set = |name| {
        var(name)
            .filter(|value| !value.is_empty())
            .map(PathBuf::from)
    };
    if let Some(program) = set("MOESAIC_CLANG") {
        return vec![ClangTool::program(program)];
    }
    let roots = set("ROCM_PATH")
        .into_iter()
        .chain([PathBuf::from("/opt/rocm")]);
    let rocm = roots.map(|root| ClangTool::program(root.join("llvm/bin/clang++")));
    let versioned = VERSIONS.rev().map(|version| format!("clang++-{version}"));
    let on_path = versioned
        .chain(["clang++".to_string()])
        .map(ClangTool::program);
    registered
        .cloned()
        .into_iter()
        .chain(rocm)
        .chain(on_path)
        .collect()
}

/// Asks each tool in turn; returns the first that can compile, or the answer of
/// each.
pub fn first(tools: Vec<ClangTool>) -> Result<Clang, Vec<Refused>> {
    let mut refused = Vec::new();
    for tool in tools {
        let place = tool.program.display().to_string();
        match Clang::ask(tool) {
            Ok(clang) => return Ok(clang),
            Err(error) => {
                let reason = match error {
                    // The place names the program already.
                    ClangError::Child(child) => child.failure.to_string(),
                    other => other.to_string(),
                };
                refused.push(Refused { place, reason });
            }
        }
    }
    Err(refused)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(tools: &[ClangTool]) -> Vec<String> {
        tools
            .iter()
            .map(|tool| tool.program.display().to_string())
            .collect()
    }

    #[test]
    fn the_registry_comes_before_rocm_before_the_path() {
        let zig = ClangTool::program("/cache/zig");
        let var = |name: &str| (name == "ROCM_PATH").then(|| OsString::from("/rocm-7"));
        let names = names(&tools(Some(&zig), var));
        assert_eq!(
            names[..4],
            [
                "/cache/zig",
                "/rocm-7/llvm/bin/clang++",
                "/opt/rocm/llvm/bin/clang++",
                "clang++-23"
            ]
        );
        assert_eq!(names.last().unwrap(), "clang++");
    }

    #[test]
    fn the_variable_is_an_order() {
        let zig = ClangTool::program("/cache/zig");
        let var = |name: &str| (name == "MOESAIC_CLANG").then(|| OsString::from("/mine"));
        assert_eq!(names(&tools(Some(&zig), var)), ["/mine"]);
    }

    #[test]
    fn every_refusal_has_a_reason() {
        let tools = vec![
            ClangTool::program("/no/such/clang"),
            ClangTool::program("false"),
        ];
        let Err(refused) = first(tools) else {
            panic!("`false` is no clang")
        };
        assert!(
            refused[0].reason.contains("could not be started"),
            "{}",
            refused[0].reason
        );
        assert_eq!(
            (refused[1].place.as_str(), refused[1].reason.as_str()),
            ("false", "it said nothing")
        );
    }
}
