//! Reads single values of the TOML: types, numbers and words.

use crate::biases::BIASES;
use crate::schema::{Kind, SELECTIONS, join};
use crate::weight_format::CUSTOM;
use crate::{Expression, Problem, WeightFormat, suggest};
use serde::Deserialize;
use toml::Spanned;
use toml::de::{DeInteger, DeValue};

/// The error is boxed because a problem is much larger than a value.
type Read = Result<toml::Value, Box<Problem>>;

/// Reads a value that is neither a table nor a list.
pub(super) fn read(kind: &Kind, value: &DeValue<'_>, path: &str) -> Read {
    match (kind, value) {
        (Kind::Count, DeValue::Integer(number)) => count(number, path),
        (Kind::Number, value) => number(value, path),
        (Kind::Flag | Kind::Biases, DeValue::Boolean(flag)) => Ok((*flag).into()),
        (Kind::Text, DeValue::String(text)) => Ok(text.to_string().into()),
        (Kind::Choice(known), DeValue::String(word)) => choice(word, known, path),
        (Kind::Select, DeValue::Table(table)) if table.len() == 1 => {
            let rule = SELECTIONS
                .iter()
                .find(|(rule, _)| table.contains_key(*rule));
            match rule {
                Some((rule, _)) => numbered(rule, table[*rule].get_ref(), path),
                None => refuse(kind, value, path),
            }
        }
        (Kind::Select, DeValue::String(word)) => select(word, path),
        (Kind::Activation(_), DeValue::Table(table)) if table.len() == 1 => {
            match table.get("expr").map(|text| (text, text.get_ref())) {
                Some((place, DeValue::String(text))) => expression(text, place, path),
                _ => refuse(kind, value, path),
            }
        }
        (Kind::Format(known), DeValue::String(word)) => choice(word, known, path),
        (Kind::Format(_), DeValue::Table(table)) if table.len() == 1 => match table.get(CUSTOM) {
            Some(format) => custom(&plain(format.get_ref()), path),
            None => refuse(kind, value, path),
        },
        (Kind::Biases, DeValue::String(word)) => {
            choice(word, BIASES, path).map_err(|mut problem| {
                problem.help = Some(HOW_TO_BIAS.to_string());
                problem
            })
        }
        (Kind::Activation(known), DeValue::String(word)) => choice(word, known, path),
        _ => refuse(kind, value, path),
    }
}

/// A format without a name, for help.
const CUSTOM_FORMAT: &str =
    "{ custom = { code = \"int4\", block = [1, 64], scale = \"f16\", offset = \"zero\" } }";

/// Reads the table of a format.
fn custom(format: &toml::Value, path: &str) -> Read {
    let table = toml::Table::from_iter([(CUSTOM.to_string(), format.clone())]);
    match WeightFormat::deserialize(toml::Value::Table(table.clone())) {
        Ok(_) => Ok(table.into()),
        Err(error) => {
            let message = format!("`{path}` is no format: {}", error.message().trim_end());
            let mut problem = Problem::new(path, message);
            problem.help = Some(format!("such as {CUSTOM_FORMAT}"));
            Err(problem.into())
        }
    }
}

/// Returns a value without its place in the text. Integers too large become 0, which no format
/// takes.
fn plain(value: &DeValue<'_>) -> toml::Value {
    match value {
        DeValue::String(text) => text.to_string().into(),
        DeValue::Integer(number) => integer(number).unwrap_or(0).into(),
        DeValue::Boolean(flag) => (*flag).into(),
        DeValue::Array(list) => {
            toml::Value::Array(list.iter().map(|item| plain(item.get_ref())).collect())
        }
        DeValue::Table(table) => {
            let pairs = table.iter();
            let pairs = pairs.map(|(key, item)| (key.get_ref().to_string(), plain(item.get_ref())));
            toml::Value::Table(pairs.collect())
        }
        DeValue::Float(float) => float.as_str().into(),
        DeValue::Datetime(date) => date.to_string().into(),
    }
}

/// Returns the problem of a value with the wrong type.
fn refuse(kind: &Kind, value: &DeValue<'_>, path: &str) -> Read {
    let (wanted, help) = match kind {
        Kind::Count => ("a whole number", None),
        Kind::Number => ("a number", None),
        Kind::Flag => ("true or false", None),
        Kind::Text => ("a string", None),
        Kind::Biases => ("true, false or a string", Some(HOW_TO_BIAS.to_string())),
        Kind::Choice(known) => ("a string", Some(possible(known))),
        Kind::Select => ("a string or { sparse-mixer = ... }", Some(how_to_select())),
        Kind::Activation(known) => (
            "a string or { expr = \"...\" }",
            Some(format!("{}, or {EXPRESSION}", possible(known))),
        ),
        Kind::Format(known) => (
            "a string or { custom = { ... } }",
            Some(format!("{}, or {CUSTOM_FORMAT}", possible(known))),
        ),
        Kind::Table(section) => (
            "a table",
            Some(format!("its keys are: {}", section.names())),
        ),
        Kind::List(_) => {
            let help = format!("write one or more [[{path}]] tables");
            ("an array of tables", Some(help))
        }
    };
    let mut problem = mistyped(path, wanted, value);
    problem.help = help;
    Err(problem.into())
}

fn count(number: &DeInteger<'_>, path: &str) -> Read {
    let (message, label) = match integer(number) {
        Some(value) if value >= 0 => return Ok(value.into()),
        Some(value) => (
            format!("`{path}` = {value} is negative"),
            "must be 0 or more",
        ),
        None => (
            format!("`{path}` = {number} is too large"),
            "does not fit 64 bits",
        ),
    };
    Err(Problem::new(path, message).label(label).into())
}

fn integer(number: &DeInteger<'_>) -> Option<i64> {
    i64::from_str_radix(number.as_str(), number.radix()).ok()
}

/// Reads a number. One too large for the type becomes infinite, which validation refuses.
fn number(value: &DeValue<'_>, path: &str) -> Read {
    let read = match value {
        DeValue::Float(float) => float.as_str().parse().ok(),
        DeValue::Integer(number) => match integer(number) {
            Some(whole) => Some(whole as f64),
            None => number.as_str().parse().ok().or(Some(f64::INFINITY)),
        },
        _ => None,
    };
    match read {
        Some(number) => Ok(toml::Value::Float(number)),
        None => refuse(&Kind::Number, value, path),
    }
}

fn choice(word: &str, known: &[&'static str], path: &str) -> Read {
    if known.contains(&word) {
        return Ok(word.into());
    }
    let label = match suggest::value(word, known) {
        // The field names the form and the activation by one word, and here they are two keys.
        Some(meant) if path == "experts.activation" && suggest::is_gated_form(word) => {
            format!("write \"{meant}\": form = \"gated\", the default, multiplies it by up")
        }
        Some(meant) => format!("did you mean \"{meant}\"?"),
        None => "not a possible value".to_string(),
    };
    let problem = unknown(word, path).label(label).help(possible(known));
    Err(problem.into())
}

fn unknown(word: &str, path: &str) -> Problem {
    let message = format!("unknown value \"{}\" for `{path}`", word.escape_debug());
    Problem::new(path, message)
}

/// Explains how to write `router.select`.
fn how_to_select() -> String {
    let rules = SELECTIONS.iter();
    let rules: Vec<String> = rules
        .map(|(rule, example)| format!("select = {{ {rule} = {example} }}"))
        .collect();
    format!("write select = \"top-k\", or {}", rules.join(", or "))
}

fn select(word: &str, path: &str) -> Read {
    let label = match word {
        "top-k" => return Ok(word.into()),
        "sparse-mixer" => "sparse-mixer needs its threshold".to_string(),
        "expert-choice" => "expert-choice needs its tokens per expert".to_string(),
        "sinkhorn" => "sinkhorn needs its number of rounds".to_string(),
        "per-group" => "per-group needs its number of groups".to_string(),
        _ => match suggest::value(word, &["top-k"]) {
            Some(meant) => format!("did you mean \"{meant}\"?"),
            None => "not a possible value".to_string(),
        },
    };
    let problem = unknown(word, path).label(label).help(how_to_select());
    Err(problem.into())
}

/// Reads `{ rule = number }`.
fn numbered(rule: &str, value: &DeValue<'_>, path: &str) -> Read {
    let path = join(path, rule);
    let value = match (rule, value) {
        ("sinkhorn" | "per-group", DeValue::Integer(number)) => count(number, &path)?,
        ("sinkhorn" | "per-group", _) => refuse(&Kind::Count, value, &path)?,
        _ => number(value, &path)?,
    };
    Ok(toml::Table::from_iter([(rule.to_string(), value)]).into())
}

/// The accepted spellings of the experts' biases, for messages.
const HOW_TO_BIAS: &str = "possible values: true, false, \"up\" (gate and up), \"down\"";

/// An example of a custom activation, for messages.
const EXPRESSION: &str = "{ expr = \"x * sigmoid(1.7 * x)\" }";

fn expression(text: &str, place: &Spanned<DeValue<'_>>, path: &str) -> Read {
    if let Err(error) = Expression::parse(text) {
        let mut problem = Problem::new(path, error.message).label(error.label);
        problem.help = error.help;
        // Spans are exact only inside single quotes: escapes in other strings would shift them.
        let quoted = place.span();
        let inside = (quoted.start + 1 + error.span.start)..(quoted.start + 1 + error.span.end);
        let exact = quoted.len() == text.len() + 2;
        return Err(problem.at(if exact { inside } else { quoted }).into());
    }
    Ok(toml::Table::from_iter([("expr".to_string(), text.into())]).into())
}

pub(super) fn mistyped(path: &str, wanted: &str, found: &DeValue<'_>) -> Problem {
    let found = match found {
        DeValue::String(_) => "a string",
        DeValue::Integer(_) => "a whole number",
        DeValue::Float(_) => "a number with a fraction",
        DeValue::Boolean(_) => "true or false",
        DeValue::Datetime(_) => "a date",
        DeValue::Array(_) => "an array",
        DeValue::Table(_) => "a table",
    };
    let message = format!("`{path}` must be {wanted}, not {found}");
    Problem::new(path, message).label(format!("expected {wanted}"))
}

fn possible(known: &[&str]) -> String {
    let quoted: Vec<String> = known.iter().map(|word| format!("\"{word}\"")).collect();
    format!("possible values: {}", quoted.join(", "))
}
