//! The keys of the TOML: names, types and possible values.
//!
//! Reading checks a text against this before serde sees it, because serde
//! stops at the first problem and the user should see all of them. A test
//! holds it against the types, so that neither can drift.

/// A table of the TOML.
pub(crate) struct Section {
    pub keys: &'static [Key],
}

/// A key of a table.
pub(crate) struct Key {
    pub name: &'static str,
    pub kind: Kind,
    /// A line to add when a required key is missing; absent for optional keys.
    pub required: Option<&'static str>,
}

/// The type of a value.
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
    /// One of [`ACTIVATIONS`] or `{ expr = "…" }`.
    Activation,
    /// A table.
    Table(&'static Section),
    /// An array of tables.
    List(&'static Section),
}

impl Section {
    /// The key of that name.
    pub fn key(&self, name: &str) -> Option<&'static Key> {
        self.keys.iter().find(|key| key.name == name)
    }

    /// The names of all keys, for messages.
    pub fn names(&self) -> String {
        let names: Vec<&str> = self.keys.iter().map(|key| key.name).collect();
        names.join(", ")
    }
}

const fn optional(name: &'static str, kind: Kind) -> Key {
    Key {
        name,
        kind,
        required: None,
    }
}

const fn required(name: &'static str, kind: Kind, example: &'static str) -> Key {
    Key {
        name,
        kind,
        required: Some(example),
    }
}

use Kind::{Choice, Count, Flag, List, Number, Table, Text};

/// The whole file.
pub(crate) static ROOT: Section = Section {
    keys: &[
        optional("name", Text),
        required(
            "shape",
            Table(&SHAPE),
            "the table [shape] with model_dim, hidden_dim, experts and top_k",
        ),
        optional("precision", Table(&PRECISION)),
        optional("router", Table(&ROUTER)),
        optional("capacity", Table(&CAPACITY)),
        optional("experts", Table(&EXPERTS)),
        optional("latent", Table(&LATENT)),
        optional("shared", List(&SHARED)),
        optional("losses", List(&LOSS)),
    ],
};

static SHAPE: Section = Section {
    keys: &[
        required("model_dim", Count, "the width of a token: model_dim = 2048"),
        required(
            "hidden_dim",
            Count,
            "the width inside an expert: hidden_dim = 768",
        ),
        required("experts", Count, "the number of experts: experts = 8"),
        required("top_k", Count, "the experts per token: top_k = 2"),
        optional("output_dim", Count),
    ],
};

const DTYPES: Kind = Choice(&["f32", "f16", "bf16"]);

static PRECISION: Section = Section {
    keys: &[
        optional("weights", DTYPES),
        optional("activations", DTYPES),
        optional("tf32", Flag),
    ],
};

static ROUTER: Section = Section {
    keys: &[
        optional("kind", Choice(&["linear", "cosine", "table", "external"])),
        optional("bias", Flag),
        optional("input", Choice(&["token", "rms-scaled"])),
        optional(
            "score",
            Choice(&[
                "softmax",
                "softmax-selected",
                "sigmoid",
                "sqrt-softplus",
                "one",
            ]),
        ),
        optional("select", Kind::Select),
        optional("select_bias", Flag),
        optional("groups", Table(&GROUPS)),
        optional("renormalize", Choice(&["none", "sum", "clamp", "p-norm"])),
        optional("renormalize_eps", Number),
        optional("norm_order", Number),
        optional("scale", Number),
        optional("expert_scale", Flag),
        optional("weight_on", Choice(&["output", "activation", "input"])),
        optional("table_rows", Count),
        optional("projection_dim", Count),
        optional("token_mask", Flag),
        optional("active_k", Flag),
        optional("entropy", Table(&ENTROPY)),
        optional("jitter", Number),
        optional("input_dropout", Number),
        optional("noise", Number),
        optional(
            "noise_kind",
            Choice(&["gaussian", "learned", "gumbel", "gumbel-second"]),
        ),
        optional("random_second", Flag),
    ],
};

/// The rules of `router.select` that have a number, and an example of it.
pub(crate) const SELECTIONS: &[(&str, &str)] = &[
    ("sparse-mixer", "0.01"),
    ("expert-choice", "2.0"),
    ("sinkhorn", "8"),
];

static ENTROPY: Section = Section {
    keys: &[
        required(
            "temperature",
            Number,
            "how far entropy moves the temperature: temperature = 0.5",
        ),
        optional("load", Number),
    ],
};

static GROUPS: Section = Section {
    keys: &[
        required("count", Count, "the number of groups: count = 8"),
        required("keep", Count, "the groups kept per token: keep = 4"),
        required(
            "stat",
            Choice(&["max", "top2-sum"]),
            "the score of a group: stat = \"max\" or \"top2-sum\"",
        ),
        optional("mask", Choice(&["exclude", "zero"])),
    ],
};

static CAPACITY: Section = Section {
    keys: &[
        optional(
            "mode",
            Choice(&["dropless", "factor", "fixed", "max-count", "bounded"]),
        ),
        optional("factor", Number),
        optional("eval_factor", Number),
        optional("rows", Count),
        optional(
            "order",
            Choice(&[
                "slot-major",
                "token-major",
                "batch-prioritized",
                "probability",
                "random",
            ]),
        ),
        optional("align", Count),
        optional("renormalize_after_drop", Flag),
    ],
};

/// Activations that have a name.
pub(crate) const ACTIVATIONS: &[&str] = &["silu", "gelu", "gelu-tanh", "relu", "relu2"];

static EXPERTS: Section = Section {
    keys: &[
        optional("form", Choice(&["gated", "plain"])),
        optional("activation", Kind::Activation),
        optional("bias", Kind::Biases),
        optional("clamp", Number),
        optional("alpha", Number),
        optional("up_offset", Number),
        optional("layout", Choice(&["split", "concat", "interleaved"])),
        optional("identity", Count),
        optional("zero", Count),
    ],
};

static LATENT: Section = Section {
    keys: &[
        required("dim", Count, "the width of routed experts: dim = 1024"),
        optional("bias", Flag),
    ],
};

static SHARED: Section = Section {
    keys: &[
        required("hidden_dim", Count, "its inner width: hidden_dim = 2048"),
        optional("gate", Choice(&["none", "sigmoid", "residual"])),
        optional("bias", Kind::Biases),
    ],
};

static LOSS: Section = Section {
    keys: &[
        required(
            "kind",
            Choice(&[
                "switch",
                "gshard",
                "gshard-all",
                "importance-load",
                "importance-load-logits",
                "z",
                "sequence",
                "global",
            ]),
            "the formula: kind = \"switch\"",
        ),
        required(
            "coefficient",
            Number,
            "the factor on it: coefficient = 0.01",
        ),
        optional("sequence_length", Count),
    ],
};

#[cfg(test)]
mod reached;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::LayerSpec;
    use serde::Deserialize;

    /// What serde says about a spec that is valid but for one table.
    fn refusal(path: &[&str], mut value: toml::Value) -> String {
        for name in path.iter().rev() {
            let list = matches!(*name, "shared" | "losses");
            value = if list { vec![value].into() } else { value };
            value = toml::Table::from_iter([(name.to_string(), value)]).into();
        }
        if path.first() != Some(&"shape")
            && let toml::Value::Table(root) = &mut value
        {
            let shape = "model_dim = 1\nhidden_dim = 1\nexperts = 1\ntop_k = 1";
            let shape: toml::Table = shape.parse().expect("a table");
            root.insert("shape".to_string(), shape.into());
        }
        let error = LayerSpec::deserialize(value).expect_err("something nobody knows");
        error.message().to_string()
    }

    /// The names in backticks of serde's "expected one of", sorted.
    fn expected(message: &str) -> Vec<String> {
        let (_, list) = message.split_once("expected").expect("a list of names");
        let mut names: Vec<String> = list
            .split('`')
            .skip(1)
            .step_by(2)
            .map(String::from)
            .collect();
        names.sort();
        names
    }

    fn check(section: &'static Section, path: &[&'static str]) {
        let bogus = toml::Table::from_iter([("bogus".to_string(), true.into())]);
        let mut names: Vec<&str> = section.keys.iter().map(|key| key.name).collect();
        names.sort_unstable();
        assert_eq!(
            expected(&refusal(path, bogus.into())),
            names,
            "keys of {path:?}"
        );
        for key in section.keys {
            let path = [path, &[key.name]].concat();
            match &key.kind {
                Kind::Table(inner) | Kind::List(inner) => check(inner, &path),
                Kind::Choice(words) => check_words(words, &path),
                Kind::Select => check_words(
                    &["top-k", "sparse-mixer", "expert-choice", "sinkhorn"],
                    &path,
                ),
                Kind::Biases => check_words(crate::biases::BIASES, &path),
                Kind::Activation => check_words(&[ACTIVATIONS, &["expr"]].concat(), &path),
                Kind::Count | Kind::Number | Kind::Flag | Kind::Text => {}
            }
        }
    }

    fn check_words(words: &[&str], path: &[&'static str]) {
        let mut words = words.to_vec();
        if path[0] == "precision" {
            // Tensors have integer types too; a spec cannot choose them.
            words.extend(["i32", "i64"]);
        }
        words.sort_unstable();
        let message = refusal(path, "bogus".into());
        assert_eq!(expected(&message), words, "values of {path:?}");
    }

    #[test]
    fn schema_and_types_agree() {
        check(&ROOT, &[]);
    }
}
