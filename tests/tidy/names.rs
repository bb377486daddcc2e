//! One word, one concept: a public type has a name that no other public type has.

use super::{files, read, root};
use std::collections::{BTreeMap, BTreeSet};

/// The folders of the product: what is neither a test nor a tool.
const PRODUCT: [&str; 5] = ["cli", "codegen", "runtime", "src", "targets"];

/// A name that stands in several files on purpose.
struct Twin {
    name: &'static str,
    reason: &'static str,
}

const TWINS: &[Twin] = &[
    Twin {
        name: "CommDtype",
        reason: "the reference has its own, so that no code of the product checks itself",
    },
    Twin {
        name: "Engine",
        reason: "the facade's is the engine's, opened by the name of a target",
    },
    Twin {
        name: "Input",
        reason: "the reference's holds f64",
    },
    Twin {
        name: "Output",
        reason: "the reference's holds f64",
    },
    Twin {
        name: "Random",
        reason: "test generators of three crates, none of which depends on another",
    },
    Twin {
        name: "Result",
        reason: "the usual alias with a crate's own error",
    },
    Twin {
        name: "Swizzle",
        reason: "a model of the hardware shares no code with what it checks",
    },
    Twin {
        name: "Tensor",
        reason: "the reference's holds f64",
    },
    Twin {
        name: "TensorMap",
        reason: "a model of the hardware shares no code with what it checks",
    },
];

#[test]
pub(super) fn public_types_have_names_of_their_own() {
    let named = public_types();
    assert!(named.len() > 500, "only {} types were found", named.len());
    let allowed = |name: &str| TWINS.iter().any(|twin| twin.name == name);
    for (name, places) in &named {
        assert!(
            places.len() == 1 || allowed(name),
            "`{name}` is a type of {places:?}: give each its own name, the field's word where it \
             has one"
        );
    }
    for Twin { name, reason } in TWINS {
        let places = named.get(*name).map_or(0, BTreeSet::len);
        assert!(
            places > 1,
            "`{name}` stands in {places} file: its twin ({reason}) can go"
        );
    }
}

/// Returns the files in which each public type is declared.
pub(super) fn public_types() -> BTreeMap<String, BTreeSet<String>> {
    let mut named: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for folder in PRODUCT {
        for path in files(&root().join(folder), &[".rs"]) {
            let place = path.strip_prefix(root()).unwrap().display().to_string();
            let apart = ["tests", "examples", "benches"];
            if place.split('/').any(|part| apart.contains(&part)) {
                continue;
            }
            for name in read(&path).lines().filter_map(declared) {
                let places = named.entry(name.to_string()).or_default();
                places.insert(place.clone());
            }
        }
    }
    named
}

/// Returns the public type that a line declares.
pub(super) fn declared(line: &str) -> Option<&str> {
    let rest = line.trim_start().strip_prefix("pub ")?;
    let rest = rest.strip_prefix("unsafe ").unwrap_or(rest);
    let (kind, rest) = rest.split_once(' ')?;
    let is_type = ["enum", "struct", "trait", "type", "union"].contains(&kind);
    let name = rest
        .split(|c: char| !c.is_alphanumeric() && c != '_')
        .next();
    name.filter(|name| is_type && !name.is_empty())
}
