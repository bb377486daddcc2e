//! Random specs must reach the whole schema: a key that `testing::sample` never sets is a key that
//! no kernel test sees.

use super::*;
use crate::LayerSpec;
use crate::testing::{quantized, sample};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};

const SEEDS: u64 = 6_000;

/// The values of each key by path, with `absent` as one of them.
type Seen = BTreeMap<String, BTreeSet<String>>;

/// Returns the only key of a table such as `{ sinkhorn = 8 }`, or the word itself.
fn word_of(value: &toml::Value) -> String {
    match value {
        toml::Value::Table(table) => table.keys().next().cloned().unwrap_or_default(),
        toml::Value::String(word) => word.clone(),
        number => format!("{number:?}"),
    }
}

/// Records every value of a table.
fn note(section: &Section, table: &toml::Table, path: &str, seen: &mut Seen) {
    for key in &section.keys {
        let path = join(path, key.name);
        let mut add = |text: String| {
            seen.entry(path.clone()).or_default().insert(text);
        };
        match (&key.kind, table.get(key.name)) {
            (_, None) => add("absent".to_string()),
            (Kind::Table(inner), Some(toml::Value::Table(table))) => {
                add("present".to_string());
                note(inner, table, &path, seen);
            }
            (Kind::List(inner), Some(toml::Value::Array(list))) => {
                add(format!("{} of them", list.len()));
                let tables = list.iter().filter_map(|value| value.as_table());
                tables.for_each(|table| note(inner, table, &path, seen));
            }
            (_, Some(toml::Value::Boolean(flag))) => add(flag.to_string()),
            (_, Some(value)) => add(word_of(value)),
        }
    }
}

/// Lists the values of a table that no sample has.
fn missing(section: &Section, path: &str, seen: &Seen) -> Vec<String> {
    let mut list = Vec::new();
    for key in &section.keys {
        let path = join(path, key.name);
        let none = BTreeSet::new();
        let values = seen.get(&path).unwrap_or(&none);
        let mut want = |words: &[&str]| {
            let lacking = words.iter().filter(|word| !values.contains(**word));
            list.extend(lacking.map(|word| format!("{path} = {word}")));
        };
        match &key.kind {
            Kind::Flag => want(&["true", "false"]),
            Kind::Biases => want(&["true", "false", "up", "down"]),
            Kind::Choice(words) => want(words),
            Kind::Select => {
                want(&["top-k"]);
                SELECTIONS.iter().for_each(|(rule, _)| want(&[*rule]));
            }
            Kind::Format(words) => want(&[*words, &["custom"]].concat()),
            Kind::Activation(words) => want(&[*words, &["expr"]].concat()),
            Kind::Count | Kind::Number | Kind::Text if values.len() < 2 => {
                list.push(format!("two of {path}"))
            }
            Kind::Count | Kind::Number | Kind::Text => {}
            Kind::Table(inner) => {
                want(&["present"]);
                list.extend(missing(inner, &path, seen));
            }
            Kind::List(inner) => {
                want(&["absent", "1 of them", "2 of them"]);
                list.extend(missing(inner, &path, seen));
            }
        }
    }
    list
}

/// Returns the spec as a table with its defaults, unlike the canonical text.
fn table_of(spec: &LayerSpec) -> toml::Table {
    toml::Table::try_from(spec).expect("a spec is a table")
}

fn seen_in(specs: impl Iterator<Item = LayerSpec>) -> Seen {
    let mut seen = Seen::new();
    specs.for_each(|spec| note(&ROOT, &table_of(&spec), "", &mut seen));
    seen
}

#[test]
fn samples_reach_every_key_and_every_word() {
    let samples = (0..SEEDS).map(sample).chain(quantized());
    let lacking = missing(&ROOT, "", &seen_in(samples));
    assert!(lacking.is_empty(), "no sample has {lacking:#?}");
}

#[test]
fn a_key_that_no_sample_sets_is_named() {
    #[derive(Deserialize)]
    enum Word {
        A,
        B,
    }
    #[expect(dead_code, reason = "a schema is read off it")]
    #[derive(Deserialize)]
    struct Inner {
        count: usize,
    }
    #[expect(dead_code, reason = "a schema is read off it")]
    #[derive(Deserialize)]
    struct New {
        name: String,
        flag: bool,
        word: Word,
        table: Option<Inner>,
        list: Vec<Inner>,
    }
    let new = probe::section::<New>();
    let mut seen = Seen::new();
    let text = "name = \"a\"\nflag = true\nword = \"B\"\nlist = [{ count = 1 }]";
    note(&new, &text.parse().expect("it is TOML"), "", &mut seen);
    let lacking = missing(&new, "", &seen);
    let expected = [
        "two of name",
        "flag = false",
        "word = A",
        "table = present",
        "two of table.count",
        "list = absent",
        "list = 2 of them",
        "two of list.count",
    ];
    assert_eq!(lacking, expected);
}

/// Lists the values of a sample that are not defaults, such as `router.bias = true`; numbers count
/// by their key alone.
fn features(spec: &LayerSpec) -> BTreeSet<String> {
    let canonical: toml::Table = spec.to_toml().parse().expect("it is TOML");
    let mut seen = Seen::new();
    note(&ROOT, &canonical, "", &mut seen);
    let mut list = BTreeSet::new();
    for (path, values) in seen {
        let varied =
            path.contains('.') && !path.starts_with("shape.") || path.ends_with("output_dim");
        for value in values.iter().filter(|value| varied && *value != "absent") {
            let word = value.starts_with(|c: char| c.is_ascii_lowercase());
            list.insert(if word {
                format!("{path} = {value}")
            } else {
                path.clone()
            });
        }
    }
    list
}

/// Copies a key from another spec: all of `router.groups` for `router.groups.keep`.
fn with_key_of(spec: &LayerSpec, other: &LayerSpec, feature: &str) -> Option<LayerSpec> {
    let mut table: toml::Table = spec.to_toml().parse().ok()?;
    let other: toml::Table = other.to_toml().parse().ok()?;
    let mut path = feature.split([' ', '.']);
    let (section, key) = (path.next()?, path.next()?);
    match &other[section] {
        toml::Value::Table(from) => {
            let to = table.entry(section).or_insert(toml::Table::new().into());
            to.as_table_mut()?
                .insert(key.to_string(), from.get(key)?.clone());
        }
        list => drop(table.insert(section.to_string(), list.clone())),
    }
    let spec = LayerSpec::deserialize(table).ok()?;
    spec.validate().is_ok().then_some(spec)
}

/// If no sample has two features together, then setting one key of a sample cannot combine them
/// either.
#[test]
fn samples_reach_every_pair_that_goes_together() {
    let specs: Vec<LayerSpec> = (0..SEEDS).map(sample).collect();
    let mut having: BTreeMap<String, Vec<usize>> = BTreeMap::new();
    let mut pairs = BTreeSet::new();
    for (i, spec) in specs.iter().enumerate() {
        let list: Vec<String> = features(spec).into_iter().collect();
        for (at, a) in list.iter().enumerate() {
            having.entry(a.clone()).or_default().push(i);
            pairs.extend(list[at + 1..].iter().map(|b| (a.clone(), b.clone())));
        }
    }
    let names: Vec<&String> = having.keys().collect();
    let mut unreached = Vec::new();
    for (at, &a) in names.iter().enumerate() {
        for &b in &names[at + 1..] {
            if pairs.contains(&(a.clone(), b.clone())) {
                continue;
            }
            let mut tries = having[a].iter().zip(&having[b]).take(40);
            let both = tries.find_map(|(&i, &j)| {
                let joined = with_key_of(&specs[i], &specs[j], b)?;
                let has = features(&joined);
                (has.contains(a) && has.contains(b)).then_some(joined)
            });
            unreached.extend(both.map(|spec| format!("{a}, {b}:\n{}", spec.to_toml())));
        }
    }
    let count = unreached.len();
    let list = unreached.join("\n");
    assert!(count == 0, "{count} pairs that no sample has:\n{list}");
}
