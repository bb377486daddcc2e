//! The mesh of ranks as a command-line argument.

use moesaic::Parallel;
use moesaic::mesh::SharedExperts;

/// The form of the argument in help texts.
pub const FORM: &str = "ep=N,expert_tp=N,dp=N,shared=sharded";

/// One `NAME=VALUE` of a mesh.
pub struct Part<'t> {
    pub text: &'t str,
    pub name: &'t str,
    pub value: &'t str,
}

/// Splits a mesh into its parts. A name that is there twice is an error.
pub(crate) fn parts(text: &str) -> impl Iterator<Item = Result<Part<'_>, String>> {
    let mut seen = Vec::new();
    text.split(',').map(move |text| {
        let (name, value) = text.split_once('=').unwrap_or((text, ""));
        let (name, value) = (name.trim(), value.trim());
        if seen.contains(&name) {
            return Err(format!("`{name}` is there twice"));
        }
        seen.push(name);
        Ok(Part { text, name, value })
    })
}

/// Parses a mesh such as `ep=4,expert_tp=2,shared=sharded`.
pub(crate) fn parse(text: &str) -> Result<Parallel, String> {
    let mut mesh = Parallel::default();
    for part in parts(text) {
        let Part { text, name, value } = part?;
        if name == "shared" {
            mesh.shared = parse_shared(value)?;
            continue;
        }
        let number = value.parse();
        let number = number.map_err(|_| format!("`{text}` is not NAME=NUMBER, as in ep=4"))?;
        match name {
            "ep" => mesh.ep = number,
            "expert_tp" => mesh.expert_tp = number,
            "dp" => mesh.dp = number,
            other => return Err(format!("`{other}` is none of ep, expert_tp, dp, shared")),
        }
    }
    Ok(mesh)
}

/// Parses the layout of shared experts: `whole` or `sharded`.
pub(crate) fn parse_shared(text: &str) -> Result<SharedExperts, String> {
    match text {
        "whole" => Ok(SharedExperts::Whole),
        "sharded" => Ok(SharedExperts::Sharded),
        other => Err(format!(
            "shared experts are whole or sharded, not `{other}`"
        )),
    }
}

/// Describes a mesh, such as `ep 2 x expert_tp 2 x dp 1, shared experts sharded`.
pub fn words(mesh: Parallel) -> String {
    let Parallel {
        ep,
        expert_tp: shards,
        dp,
        ..
    } = mesh;
    let sharded = if mesh.shards_shared() {
        ", shared experts sharded"
    } else {
        ""
    };
    format!("ep {ep} x expert_tp {shards} x dp {dp}{sharded}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mesh_is_named_part_by_part() {
        let mesh = parse("ep=4,expert_tp=2").unwrap();
        assert_eq!((mesh.ep, mesh.expert_tp, mesh.dp), (4, 2, 1));
        assert_eq!(mesh.shared, SharedExperts::Whole);
        let mesh = parse("ep=4, expert_tp=2, shared=sharded").unwrap();
        assert!(mesh.shards_shared());
        assert_eq!(
            words(mesh),
            "ep 4 x expert_tp 2 x dp 1, shared experts sharded"
        );
        assert_eq!(parse("shared=whole").unwrap(), Parallel::default());
        for wrong in [
            "",
            "ep",
            "ep=x",
            "pp=2",
            "ep=-1",
            "ep=2,dp=2, ep=4",
            "shared",
            "shared=2",
            "shared=sharded,shared=sharded",
        ] {
            parse(wrong).unwrap_err();
        }
    }
}
