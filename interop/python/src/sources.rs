//! The text of a spec: TOML, a dict of the same keys, or a file.

use crate::errors::Failure;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyFloat, PyInt, PyList, PyMapping, PyString, PyTuple};
use std::path::PathBuf;

/// Returns the TOML text of what Python gives for a spec.
///
/// # Errors
/// A value that TOML has no form of, or a file that cannot be read.
pub fn text(source: &Bound<'_, PyAny>) -> PyResult<String> {
    if let Ok(text) = source.cast::<PyString>() {
        let text = text.to_string();
        if text.trim_end().ends_with(".toml") && !text.contains('=') {
            let problem = format!("`{text}` is a path, not TOML: pass pathlib.Path({text:?})");
            return Err(Failure::Invalid(problem).into());
        }
        return Ok(text);
    }
    if let Ok(table) = source.cast::<PyMapping>() {
        let mut lines = String::new();
        for item in table.items()?.iter() {
            let (key, value): (String, Bound<'_, PyAny>) = item.extract()?;
            lines += &format!("{key} = {}\n", toml(&value)?);
        }
        return Ok(lines);
    }
    let path: PathBuf = source.extract().map_err(|_| {
        let kind = source.get_type();
        Failure::Invalid(format!(
            "a spec is TOML text, a dict or a pathlib.Path, not {kind}"
        ))
    })?;
    let text = std::fs::read_to_string(&path);
    Ok(text.map_err(|error| Failure::Invalid(format!("{}: {error}", path.display())))?)
}

fn toml(value: &Bound<'_, PyAny>) -> PyResult<String> {
    if let Ok(table) = value.cast::<PyDict>() {
        let items = table.iter().map(|(key, value)| {
            let key: String = key.extract()?;
            Ok(format!("{key} = {}", toml(&value)?))
        });
        let items = items.collect::<PyResult<Vec<_>>>()?;
        return Ok(format!("{{ {} }}", items.join(", ")));
    }
    if value.is_instance_of::<PyList>() || value.is_instance_of::<PyTuple>() {
        let items = value.try_iter()?.map(|item| toml(&item?));
        let items = items.collect::<PyResult<Vec<_>>>()?;
        return Ok(format!("[{}]", items.join(", ")));
    }
    if let Ok(flag) = value.cast::<PyBool>() {
        return Ok(flag.is_true().to_string());
    }
    if value.is_instance_of::<PyString>() {
        // JSON's strings are TOML's.
        let json = value.py().import("json")?;
        return json.call_method1("dumps", (value,))?.extract();
    }
    if value.is_instance_of::<PyInt>() || value.is_instance_of::<PyFloat>() {
        return Ok(value.repr()?.to_string());
    }
    let found = value.repr()?;
    let problem = format!("a spec has texts, numbers, flags, tables and arrays, not {found}");
    Err(Failure::Invalid(problem).into())
}
