//! The rules of sizes that some kinds of routers have and other kinds cannot use.

use super::{Range, against_kind};
use crate::{Problem, Router, RouterDef, RouterKind};

pub(super) fn check(router: &Router, problems: &mut Vec<Problem>) {
    let all = RouterKind::ALL.map(RouterKind::def);
    own_size(router, router.kind.def(), problems);
    foreign_sizes(router, router.kind.def(), &all, problems);
}

/// Checks the size that the router's own kind needs.
fn own_size(router: &Router, own: &RouterDef, problems: &mut Vec<Problem>) {
    let Some(size) = &own.size else {
        return;
    };
    if let Some(value) = (size.value)(router) {
        let range = Range {
            key: size.key,
            value,
            least: 1,
            most: size.most,
            because: size.because,
        };
        range.check(problems);
        return;
    }
    let message = format!("`router.kind` = \"{}\" needs `{}`", own.name, size.key);
    let name = size.key.trim_start_matches("router.");
    let problem = Problem::new("router.kind", message)
        .label(format!("needs `{name}`"))
        .with(size.key, "missing");
    problems.push(problem.help(format!("add {}", size.add)));
}

/// Refuses the sizes that only other kinds have, each key once: several kinds may share it.
fn foreign_sizes(
    router: &Router,
    own: &RouterDef,
    all: &[&RouterDef],
    problems: &mut Vec<Problem>,
) {
    let mut seen: Vec<&str> = own.size.iter().map(|size| size.key).collect();
    for size in all.iter().filter_map(|def| def.size.as_ref()) {
        if seen.contains(&size.key) {
            continue;
        }
        seen.push(size.key);
        let Some(value) = (size.value)(router) else {
            continue;
        };
        let has = |def: &&&RouterDef| def.size.as_ref().is_some_and(|s| s.key == size.key);
        let kinds: Vec<&str> = all.iter().filter(has).map(|def| def.name).collect();
        let because = format!("only a {} router has it", kinds.join(" or "));
        problems.push(against_kind(router, size.key, &value.to_string(), &because));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::RouterSize;

    /// Several kinds may need one key: each takes it, and every other kind refuses it once.
    #[test]
    fn kinds_may_share_a_size() {
        let cosine = RouterKind::Cosine.def();
        let twin = RouterDef {
            name: "twin",
            choice_weights: &[],
            size: cosine.size.as_ref().map(|size| RouterSize { ..*size }),
            ..*cosine
        };
        let all = [RouterKind::Linear.def(), cosine, &twin];
        let router = Router {
            projection_dim: Some(16),
            ..Router::default()
        };
        let refused = |own: &RouterDef, router: &Router| {
            let mut problems = Vec::new();
            own_size(router, own, &mut problems);
            foreign_sizes(router, own, &all, &mut problems);
            problems
        };
        for own in [cosine, &twin] {
            assert!(refused(own, &router).is_empty(), "{}", own.name);
            let [problem] = &refused(own, &Router::default())[..] else {
                panic!("one problem")
            };
            assert_eq!(problem.key, "router.kind");
        }
        let [problem] = &refused(RouterKind::Linear.def(), &router)[..] else {
            panic!("one problem")
        };
        assert_eq!(problem.label, "only a cosine or twin router has it");
    }
}
