//! The keys of the TOML: names, types and accepted values.
//!
//! Reading checks a text against this schema before serde sees it, because serde stops at the first
//! problem and you should see all of them. The schema is derived from the types: a struct's fields
//! are its keys, and an enum's variants are its words.

mod probe;

use crate::LayerSpec;
use std::sync::LazyLock;

/// A table of the TOML.
#[derive(Debug, Default)]
pub(crate) struct Section {
    /// In the order of the struct.
    pub keys: Vec<Key>,
}

/// A key of a table.
#[derive(Debug)]
pub(crate) struct Key {
    pub name: &'static str,
    pub kind: Kind,
    /// A line to suggest when a required key is missing; `None` for optional keys.
    pub required: Option<&'static str>,
}

/// The type of a value.
#[derive(Debug)]
pub(crate) enum Kind {
    /// A whole number from 0.
    Count,
    /// A number; whole ones may be written without a point.
    Number,
    /// `true` or `false`.
    Flag,
    /// Any string.
    Text,
    /// One of these strings.
    Choice(&'static [&'static str]),
    /// `"top-k"`, or a table of one of [`SELECTIONS`].
    Select,
    /// `true`, `false` or one of [`BIASES`](crate::biases::BIASES).
    Biases,
    /// One of these strings or `{ expr = "…" }`.
    Activation(&'static [&'static str]),
    /// One of these names of formats, or `{ custom = { … } }`.
    Format(&'static [&'static str]),
    /// A table.
    Table(Section),
    /// An array of tables.
    List(Section),
}

impl Kind {
    /// Returns true if the TOML has a header for it.
    pub fn is_table(&self) -> bool {
        matches!(self, Kind::Table(_) | Kind::List(_))
    }
}

impl Section {
    /// Returns the key of that name.
    pub fn key(&self, name: &str) -> Option<&Key> {
        self.keys.iter().find(|key| key.name == name)
    }

    /// Returns the names of all keys, for messages.
    pub fn names(&self) -> String {
        let names: Vec<&str> = self.keys.iter().map(|key| key.name).collect();
        names.join(", ")
    }
}

/// Joins the path of a table and the name of a key.
pub(crate) fn join(path: &str, name: &str) -> String {
    match path {
        "" => name.to_string(),
        _ => format!("{path}.{name}"),
    }
}

/// The whole file.
pub(crate) static ROOT: LazyLock<Section> = LazyLock::new(probe::section::<LayerSpec>);

/// Keys that a table must have, and the line to suggest when one is missing.
const REQUIRED: &[(&str, &str)] = &[
    (
        "shape",
        "the table [shape] with model_dim, hidden_dim, experts and top_k",
    ),
    ("shape.model_dim", "the width of a token: model_dim = 2048"),
    (
        "shape.hidden_dim",
        "the width inside an expert: hidden_dim = 768",
    ),
    ("shape.experts", "the number of experts: experts = 8"),
    ("shape.top_k", "the experts per token: top_k = 2"),
    (
        "router.entropy.temperature",
        "how far entropy moves the temperature: temperature = 0.5",
    ),
    ("router.groups.count", "the number of groups: count = 8"),
    ("router.groups.keep", "the groups kept per token: keep = 4"),
    (
        "router.groups.stat",
        "the score of a group: stat = \"max\" or \"top2-sum\"",
    ),
    ("router.blocks.tokens", "the tokens of a block: tokens = 32"),
    (
        "router.blocks.experts",
        "the experts that a block agrees on: experts = 48",
    ),
    ("latent.dim", "the width of routed experts: dim = 1024"),
    ("shared.hidden_dim", "its inner width: hidden_dim = 2048"),
    ("losses.kind", "the formula: kind = \"switch\""),
    ("losses.coefficient", "the factor on it: coefficient = 0.01"),
];

/// Element types that a spec may choose. Tensors also have integer types.
const DTYPES: &[&str] = &["f32", "f16", "bf16"];

/// Keys that a text may state although the spec has no field for them, because the value is always
/// f32. They are never written, so equal specs have equal texts.
pub(crate) const ALWAYS_F32: &[(&str, &str)] = &[
    ("precision.router", "weights, logits and scores of routers"),
    ("precision.accumulate", "sums of products"),
];

/// The rules of `router.select` that take a number, with an example of each.
pub(crate) const SELECTIONS: &[(&str, &str)] = &[
    ("sparse-mixer", "0.01"),
    ("expert-choice", "2.0"),
    ("sinkhorn", "8"),
    ("per-group", "4"),
];

#[cfg(test)]
mod reached;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Select;
    use crate::testing::{quantized, sample};
    use serde::Deserialize;
    use serde::de::IntoDeserializer;
    use serde::de::value::{Error, StrDeserializer};

    /// Visits every key with its path.
    fn walk(section: &'static Section, path: &str, each: &mut dyn FnMut(&str, &'static Key)) {
        for key in &section.keys {
            let path = join(path, key.name);
            each(&path, key);
            if let Kind::Table(inner) | Kind::List(inner) = &key.kind {
                walk(inner, &path, each);
            }
        }
    }

    fn all() -> Vec<(String, &'static Key)> {
        let mut all = Vec::new();
        walk(&ROOT, "", &mut |path, key| {
            all.push((path.to_string(), key))
        });
        all
    }

    /// Removes a key of a table, or of the first table in a list.
    fn remove(table: &mut toml::Table, path: &[&str]) -> bool {
        match (path, table.get_mut(path[0])) {
            ([name], _) => table.remove(*name).is_some(),
            (_, Some(toml::Value::Table(inner))) => remove(inner, &path[1..]),
            (_, Some(toml::Value::Array(list))) => {
                let first = list.first_mut().and_then(toml::Value::as_table_mut);
                first.is_some_and(|inner| remove(inner, &path[1..]))
            }
            _ => false,
        }
    }

    /// Checks that a key is marked as required exactly if no spec can be read without it.
    #[test]
    fn required_keys_have_an_example() {
        let specs: Vec<toml::Table> = (0..400)
            .map(sample)
            .chain(quantized())
            .map(|spec| toml::Table::try_from(spec).expect("a spec is a table"))
            .collect();
        for (path, key) in all() {
            let names: Vec<&str> = path.split('.').collect();
            let mut there = specs.iter().filter_map(|spec| {
                let mut without = spec.clone();
                remove(&mut without, &names).then_some(without)
            });
            let without = there
                .next()
                .unwrap_or_else(|| panic!("no sample has {path}"));
            let read = LayerSpec::deserialize(toml::Value::Table(without));
            assert_eq!(read.is_err(), key.required.is_some(), "{path}: {read:?}");
        }
        let all: Vec<String> = all().into_iter().map(|(path, _)| path).collect();
        for (path, _) in REQUIRED {
            assert!(all.iter().any(|known| known == path), "no key is {path}");
        }
    }

    /// The error for an unknown rule names the known ones.
    #[test]
    fn rules_of_selection_have_an_example() {
        let word: StrDeserializer<'_, Error> = "no rule".into_deserializer();
        let refused = Select::deserialize(word).unwrap_err().to_string();
        let rules = SELECTIONS.iter().map(|(rule, _)| *rule);
        let known: Vec<String> = std::iter::once("top-k")
            .chain(rules)
            .map(|rule| format!("`{rule}`"))
            .collect();
        let end = format!("expected one of {}", known.join(", "));
        assert!(refused.ends_with(&end), "{refused}");
    }

    #[test]
    fn types_say_what_they_are() {
        let of = |path: &str| {
            let all = all().into_iter();
            let mut found = all.filter(|(known, _)| known == path);
            format!("{:?}", found.next().expect("a key").1.kind)
        };
        assert_eq!(of("name"), "Text");
        assert_eq!(of("shape.output_dim"), "Count");
        assert_eq!(of("router.scale"), "Number");
        assert_eq!(of("router.select"), "Select");
        assert_eq!(of("router.groups.stat"), r#"Choice(["max", "top2-sum"])"#);
        assert_eq!(of("precision.weights"), format!("Choice({DTYPES:?})"));
        let activations = ["silu", "gelu", "gelu-tanh", "relu", "relu2"];
        assert_eq!(
            of("experts.activation"),
            format!("Activation({activations:?})")
        );
        let biases = all().into_iter();
        let biases = biases.filter(|(_, key)| matches!(key.kind, Kind::Biases));
        let biases: Vec<String> = biases.map(|(path, _)| path).collect();
        assert_eq!(biases, ["experts.bias", "shared.bias"]);
    }
}
