//! Reads a spec from TOML.
//!
//! Three passes report all problems at once: syntax; then keys and types against the
//! [schema](crate::schema), which also records where each key is; then the rules of
//! [`LayerSpec::validate`] over everything that could be read. A placeholder replaces each
//! unreadable value, and problems that involve it are dropped, because they would blame the
//! placeholder.

mod scalar;

use crate::schema::{ALWAYS_F32, Key, Kind, ROOT, Section, join};
use crate::{LayerSpec, Problem, SpecError, suggest};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

impl LayerSpec {
    /// Reads and validates a spec.
    ///
    /// ```
    /// # mod moesaic { pub use moesaic_spec as spec; }
    /// use moesaic::spec::{LayerSpec, Renormalize};
    ///
    /// let spec = LayerSpec::from_toml(
    ///     r#"
    ///     name = "qwen3-30b-a3b"
    ///     shape = { model_dim = 2048, hidden_dim = 768, experts = 128, top_k = 8 }
    ///     router.renormalize = "sum"
    ///     "#,
    /// )?;
    /// assert_eq!(spec.router.renormalize, Renormalize::Sum);
    ///
    /// let error = LayerSpec::from_toml("shape = { num_experts = 8 }").unwrap_err();
    /// eprintln!("{}", error.render("layer.toml", true));
    /// # Ok::<(), moesaic::spec::SpecError>(())
    /// ```
    ///
    /// # Errors
    /// [`SpecError`] with all problems of the text: only those of syntax if the syntax is broken;
    /// otherwise unknown keys, wrong types, missing keys, and every rule that the values break.
    pub fn from_toml(text: &str) -> Result<LayerSpec, SpecError> {
        let (document, errors) = DeTable::parse_recoverable(text);
        if !errors.is_empty() {
            let problems = errors.iter().map(syntax).collect();
            return Err(SpecError::new(text, problems));
        }
        let mut reader = Reader::default();
        let table = reader.table(document.get_ref(), &ROOT, "", 0..0);
        let spec = LayerSpec::deserialize(toml::Value::Table(table));
        let mut problems = reader.problems;
        match &spec {
            Ok(spec) => problems.extend(reader.notes.judge(spec)),
            // The schema accepts nothing that the types refuse, except numbers beyond the machine's
            // word size.
            Err(error) => problems.push(Problem::new("", error.message())),
        }
        match spec {
            Ok(spec) if problems.is_empty() => Ok(spec),
            _ => Err(SpecError::new(text, problems)),
        }
    }
}

fn syntax(error: &toml::de::Error) -> Problem {
    let problem = Problem::new("", format!("invalid TOML: {}", error.message()));
    match error.span() {
        Some(span) => problem.at(span),
        None => problem,
    }
}

/// Positions and state of the keys of a text.
#[derive(Default)]
struct Notes {
    /// Byte ranges of the values, or of the headers for tables.
    spans: BTreeMap<String, Range<usize>>,
    /// Keys whose value could not be read.
    tainted: BTreeSet<String>,
}

impl Notes {
    /// Returns the rules broken by the readable values, with spans.
    fn judge(&self, spec: &LayerSpec) -> Vec<Problem> {
        let mut problems = spec.validate().err().unwrap_or_default();
        // A problem that involves a placeholder would blame a value that nobody wrote.
        problems.retain(|p| !self.tainted.iter().any(|key| p.touches(key)));
        for problem in &mut problems {
            problem.span = self.nearest(&problem.key);
            for other in &mut problem.related {
                other.span = self.spans.get(&other.key).cloned();
            }
        }
        problems
    }

    /// Returns the range of a key, or of the innermost table around it.
    fn nearest(&self, key: &str) -> Option<Range<usize>> {
        let found = self.spans.get(key).cloned();
        // A key that the text leaves to its default has no span; its table has.
        found.or_else(|| self.nearest(&key[..key.rfind(['.', '['])?]))
    }
}

#[derive(Default)]
struct Reader {
    problems: Vec<Problem>,
    notes: Notes,
}

impl Reader {
    /// Reads a table that begins at `at`.
    fn table(
        &mut self,
        table: &DeTable<'_>,
        section: &'static Section,
        path: &str,
        at: Range<usize>,
    ) -> toml::Table {
        let mut result = toml::Table::new();
        for (name, value) in table {
            match section.key(name.get_ref()) {
                Some(key) => {
                    let path = join(path, key.name);
                    let value = self.value(value, key, &path, name.span());
                    result.insert(key.name.to_string(), value);
                }
                None if self.is_f32(name.get_ref(), value, path) => {}
                None => self.unknown(name, section, path),
            }
        }
        for key in &section.keys {
            if let (Some(example), false) = (key.required, result.contains_key(key.name)) {
                self.missing(key, example, path, &at);
                result.insert(key.name.to_string(), placeholder(&key.kind));
            }
        }
        result
    }

    /// Reads the value of a key, or returns a placeholder.
    fn value(
        &mut self,
        value: &Spanned<DeValue<'_>>,
        key: &'static Key,
        path: &str,
        name: Range<usize>,
    ) -> toml::Value {
        let span = match value.get_ref() {
            // The span of a table runs over all of its lines, so point at its name.
            DeValue::Table(_) => name.clone(),
            _ => value.span(),
        };
        self.notes.spans.insert(path.to_string(), span.clone());
        let read = match (&key.kind, value.get_ref()) {
            (Kind::Table(section), DeValue::Table(table)) => {
                Ok(self.table(table, section, path, name).into())
            }
            (Kind::List(section), DeValue::Array(items)) => {
                Ok(self.list(items, section, path).into())
            }
            (kind, value) => scalar::read(kind, value, path),
        };
        read.unwrap_or_else(|problem| {
            let span = problem.span.clone().unwrap_or(span);
            self.problems.push(problem.at(span));
            self.notes.tainted.insert(path.to_string());
            placeholder(&key.kind)
        })
    }

    /// Returns true if the key is one of those that are always f32; reports any other value as a
    /// problem.
    fn is_f32(&mut self, name: &str, value: &Spanned<DeValue<'_>>, path: &str) -> bool {
        let own = join(path, name);
        let Some((key, what)) = ALWAYS_F32.iter().find(|(key, _)| *key == own) else {
            return false;
        };
        let problem = match value.get_ref() {
            DeValue::String(word) if word == "f32" => return true,
            DeValue::String(word) => {
                let message = format!("`{key}` = \"{}\" is not possible", word.escape_debug());
                Problem::new(*key, message).label(format!("{what} are f32 always"))
            }
            other => scalar::mistyped(key, "\"f32\"", other),
        };
        let help = "write \"f32\" or leave it out; weights and activations have types to choose";
        self.problems.push(problem.help(help).at(value.span()));
        true
    }

    fn list(
        &mut self,
        items: &[Spanned<DeValue<'_>>],
        section: &'static Section,
        path: &str,
    ) -> Vec<toml::Value> {
        let mut result = Vec::new();
        for (index, item) in items.iter().enumerate() {
            let path = format!("{path}[{index}]");
            self.notes.spans.insert(path.clone(), item.span());
            let table = match item.get_ref() {
                DeValue::Table(table) => self.table(table, section, &path, item.span()),
                other => {
                    let problem = scalar::mistyped(&path, "a table", other).at(item.span());
                    self.problems.push(problem);
                    self.notes.tainted.insert(path);
                    blank(section)
                }
            };
            result.push(table.into());
        }
        result
    }

    fn missing(&mut self, key: &Key, example: &str, path: &str, at: &Range<usize>) {
        let own = join(path, key.name);
        // A misspelled key was reported already, so its correct spelling must not be reported as a
        // duplicate.
        if !self.notes.tainted.insert(own.clone()) {
            return;
        }
        let shown = match key.kind {
            Kind::Table(_) => format!("[{}]", key.name),
            _ => format!("`{}`", key.name),
        };
        let problem = Problem::new(own, format!("{} has no {shown}", place(path)))
            .label(format!("{shown} is missing here"))
            .help(format!("add {example}"));
        self.problems.push(match path {
            "" => problem,
            _ => problem.at(at.clone()),
        });
    }

    fn unknown(&mut self, name: &Spanned<toml::de::DeString<'_>>, section: &Section, path: &str) {
        let written = name.get_ref().escape_debug().to_string();
        let message = format!("unknown key `{written}` in {}", place(path));
        let problem = Problem::new(join(path, &written), message).at(name.span());
        self.problems
            .push(match meant(name.get_ref(), section, path) {
                Some((key, label)) => {
                    // The meant key was given, though misspelled, so it must not also count as
                    // missing.
                    self.notes.tainted.insert(key);
                    problem.label(label)
                }
                None => problem.label("no such key").help(format!(
                    "the keys of {} are: {}",
                    place(path),
                    section.names()
                )),
            });
    }
}

/// Returns the key that an unknown one probably stands for, and a sentence about it.
fn meant(name: &str, section: &Section, path: &str) -> Option<(String, String)> {
    if let Some((key, written)) = suggest::key_alias(name) {
        let parent = key.rsplit_once('.').map_or("", |(parent, _)| parent);
        let place = match parent {
            "" => String::new(),
            _ if parent == path => String::new(),
            _ => format!(" of {}", place(parent)),
        };
        let label = format!("here it is called `{written}`{place}");
        return Some((key.to_string(), label));
    }
    let names = section.keys.iter().map(|key| key.name);
    if let Some(close) = suggest::closest(name, names) {
        return Some((join(path, close), format!("did you mean `{close}`?")));
    }
    let table = owner(name)?;
    let label = format!("`{name}` belongs to {}", place(table));
    Some((join(table, name), label))
}

/// Returns the top-level table that has a key of that name.
fn owner(name: &str) -> Option<&'static str> {
    let has = |key: &&Key| match &key.kind {
        Kind::Table(section) => section.key(name).is_some(),
        _ => false,
    };
    ROOT.keys.iter().find(has).map(|key| key.name)
}

/// Returns an arbitrary value of the right type, so that the rest of the spec can be checked.
fn placeholder(kind: &Kind) -> toml::Value {
    match kind {
        Kind::Count => 1.into(),
        Kind::Number => 1.0.into(),
        Kind::Flag | Kind::Biases => false.into(),
        Kind::Text => "x".into(),
        Kind::Choice(known) => known[0].into(),
        Kind::Select => "top-k".into(),
        Kind::Activation(known) | Kind::Format(known) => known[0].into(),
        Kind::Table(section) => blank(section).into(),
        Kind::List(_) => toml::Value::Array(Vec::new()),
    }
}

/// Returns a table with its required keys only.
fn blank(section: &Section) -> toml::Table {
    let required = section.keys.iter().filter(|key| key.required.is_some());
    required
        .map(|key| (key.name.to_string(), placeholder(&key.kind)))
        .collect()
}

/// Returns the name of a table as people write it.
fn place(path: &str) -> String {
    match path {
        "" => "the spec".to_string(),
        _ if path.ends_with(']') => format!("[[{}]]", path.split('[').next().unwrap_or(path)),
        _ => format!("[{path}]"),
    }
}
