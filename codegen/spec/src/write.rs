//! The canonical TOML of a spec: the values that differ from the defaults.

use crate::LayerSpec;
use crate::schema::{Key, Kind, ROOT, Section};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

impl LayerSpec {
    /// Returns the spec as TOML that [`LayerSpec::from_toml`] reads back equal.
    ///
    /// Default values are left out, so equal specs have equal texts. An invalid spec is written
    /// too, although it cannot be read back.
    pub fn to_toml(&self) -> String {
        let whole = value(self);
        let required = required(&ROOT, &whole);
        // Read from TOML, as any spec is: compiling a second reader takes long. A spec that cannot
        // be read has no defaults to compare with, so everything is written.
        let required = toml::Value::try_from(required).ok();
        let plain = required.and_then(|required| LayerSpec::deserialize(required).ok());
        let plain = plain.map_or(Value::Null, |plain| value(&plain));
        let mut text = format!("name = {}\n", written(&whole["name"]));
        for key in &ROOT.keys {
            let (whole, plain) = (&whole[key.name], &plain[key.name]);
            match (&key.kind, whole) {
                (Kind::Table(section), Value::Object(_)) => {
                    let lines = lines(section, whole, plain);
                    add(&format!("[{}]", key.name), &lines, &mut text);
                }
                (Kind::List(section), Value::Array(list)) => {
                    for (i, whole) in list.iter().enumerate() {
                        let lines = lines(section, whole, &plain[i]);
                        add(&format!("[[{}]]", key.name), &lines, &mut text);
                    }
                }
                _ => {}
            }
        }
        text
    }
}

impl LayerSpec {
    /// Returns the spec as TOML with every key of [`LayerSpec`], defaults included.
    ///
    /// A key without a value becomes a comment. [`LayerSpec::from_toml`] reads the text back equal.
    pub fn to_toml_all(&self) -> String {
        let whole = value(self);
        let mut text = String::new();
        for key in ROOT.keys.iter().filter(|key| !key.kind.is_table()) {
            text += &(every_line(key, &whole).join("\n") + "\n");
        }
        for key in ROOT.keys.iter().filter(|key| key.kind.is_table()) {
            match (&key.kind, &whole[key.name]) {
                (Kind::Table(section), table @ Value::Object(_)) => {
                    add(
                        &format!("[{}]", key.name),
                        &every_key(section, table),
                        &mut text,
                    );
                }
                (Kind::List(section), Value::Array(list)) if !list.is_empty() => {
                    for item in list {
                        add(
                            &format!("[[{}]]", key.name),
                            &every_key(section, item),
                            &mut text,
                        );
                    }
                }
                (kind, _) => {
                    let line = absent(key.name, kind);
                    text.push_str(&format!("\n{line}\n"));
                }
            }
        }
        text
    }
}

/// Returns the lines of a table with every key.
fn every_key(section: &Section, table: &Value) -> Vec<String> {
    let keys = section.keys.iter();
    keys.flat_map(|key| every_line(key, table)).collect()
}

/// Returns one key of a table, as its own line.
fn every_line(key: &Key, table: &Value) -> Vec<String> {
    let line = match (&key.kind, table.get(key.name)) {
        (kind, None | Some(Value::Null)) => absent(key.name, kind),
        (Kind::Table(section), Some(inner)) => {
            let inner = every_key(section, inner).join(", ");
            format!("{} = {{ {inner} }}", key.name)
        }
        (_, Some(value)) => format!("{} = {}", key.name, written(value)),
    };
    vec![line]
}

/// Returns the comment for a key without a value; for a table it names the keys inside.
fn absent(name: &str, kind: &Kind) -> String {
    match kind {
        Kind::Table(section) => format!("# {name} is not set; its keys: {}", section.names()),
        Kind::List(section) => format!("# no [[{name}]]; its keys: {}", section.names()),
        _ => format!("# {name} is not set"),
    }
}

/// Returns the spec as JSON, where counts have no sign and all 64 bits, and NaN is null.
fn value(spec: &LayerSpec) -> Value {
    serde_json::to_value(spec).unwrap_or_default()
}

/// Returns a table with its required keys.
fn required(section: &Section, whole: &Value) -> Value {
    let one = |key: &Key| {
        let value = &whole[key.name];
        let kept = match (&key.kind, value) {
            (_, Value::Null) => return None,
            (Kind::Table(section), value) => required(section, value),
            (Kind::List(section), Value::Array(list)) => {
                list.iter().map(|item| required(section, item)).collect()
            }
            (_, value) if key.required.is_some() => value.clone(),
            _ => return None,
        };
        Some((key.name.to_string(), kept))
    };
    Value::Object(section.keys.iter().filter_map(one).collect::<Map<_, _>>())
}

/// Returns the lines of a table: its required keys, and those that differ from the default.
fn lines(section: &Section, whole: &Value, plain: &Value) -> Vec<String> {
    let line = |key: &Key| {
        // NaN is null here, while an absent key has no entry at all.
        let (whole, plain) = (whole.get(key.name)?, plain.get(key.name));
        let text = match &key.kind {
            Kind::Table(_) if whole.is_null() => return None,
            Kind::Table(section) => format!("{{ {} }}", {
                let plain = plain.unwrap_or(&Value::Null);
                lines(section, whole, plain).join(", ")
            }),
            _ if key.required.is_none() && Some(whole) == plain => return None,
            _ => written(whole),
        };
        Some(format!("{} = {text}", key.name))
    };
    section.keys.iter().filter_map(line).collect()
}

/// Appends a table to a text, or nothing if it has no lines.
fn add(header: &str, lines: &[String], text: &mut String) {
    if !lines.is_empty() {
        text.push_str(&format!("\n{header}\n{}\n", lines.join("\n")));
    }
}

/// Returns the text after an equals sign. Every JSON string is a TOML basic string. A real number
/// gets the shortest digits that read back equal, always with a point or an exponent.
pub(crate) fn written(value: &Value) -> String {
    match value {
        Value::Null => "nan".to_string(),
        Value::Number(number) if number.is_f64() => {
            format!("{:?}", number.as_f64().unwrap_or(f64::NAN))
        }
        Value::Object(table) => {
            let pair = |(name, value): (&String, &Value)| format!("{name} = {}", written(value));
            let pairs: Vec<String> = table.iter().map(pair).collect();
            format!("{{ {} }}", pairs.join(", "))
        }
        Value::Array(list) => {
            let list: Vec<String> = list.iter().map(written).collect();
            format!("[{}]", list.join(", "))
        }
        other => other.to_string(),
    }
}

/// Returns the TOML spelling of a plain enum's value.
pub(crate) fn word(value: &impl Serialize) -> String {
    match toml::Value::try_from(value) {
        Ok(toml::Value::String(word)) => word,
        other => unreachable!("not a plain enum: {other:?}"),
    }
}
