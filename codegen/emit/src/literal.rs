//! Numbers and words in emitted text.

/// Returns a float literal of C: the shortest decimal that reads back as the same `f32`, such as
/// `2.5f` or `1e-20f`.
pub(crate) fn c_float(value: f64) -> String {
    let text = format!("{:?}", value as f32);
    match text.as_str() {
        "inf" => "INFINITY".to_string(),
        "-inf" => "-INFINITY".to_string(),
        digits => format!("{digits}f"),
    }
}

/// Returns variants of an enum as a template compares them.
#[cfg(test)]
pub(crate) fn names<T: serde::Serialize>(variants: &[T]) -> Vec<String> {
    let values = variants.iter().map(tera::Value::from_serializable);
    values.map(|value| value.to_string()).collect()
}
