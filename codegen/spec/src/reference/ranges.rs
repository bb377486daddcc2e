//! The range of a number, as validation reports it.

use crate::LayerSpec;
use crate::testing::sample;
use serde_json::{Value, json};

/// Number of random specs tried until one uses the key.
const SAMPLES: u64 = 400;

/// Returns the range of a key, read off the validator's answers to numbers out of range.
pub fn range(path: &str) -> Option<String> {
    let outside = [json!(1e300), json!(0), json!(u32::MAX as u64 * 4)];
    outside.iter().find_map(|number| refused(path, number))
}

/// Returns the range that the first complaint about a value outside it names.
fn refused(path: &str, number: &Value) -> Option<String> {
    (0..SAMPLES).find_map(|seed| {
        let mut spec = serde_json::to_value(sample(seed)).expect("a spec is JSON");
        put(&mut spec, &path.split('.').collect::<Vec<_>>(), number)?;
        let spec: LayerSpec = serde_json::from_value(spec).ok()?;
        let problems = spec.validate().err()?.into_iter();
        let mut own = problems.filter(|p| plain(&p.key) == path);
        own.find_map(|problem| problem.range)
    })
}

/// Replaces an existing value, in the first table of a list.
fn put(at: &mut Value, path: &[&str], number: &Value) -> Option<()> {
    if let Value::Array(list) = at {
        return put(list.first_mut()?, path, number);
    }
    let inner = at.get_mut(path[0])?;
    match &path[1..] {
        [] => *inner = number.clone(),
        rest => return put(inner, rest, number),
    }
    Some(())
}

/// Returns `shared[0].hidden_dim` without the number.
fn plain(key: &str) -> String {
    key.replace("[0]", "")
}
