//! The range of a number, as validation reports it.

use crate::testing::sample;
use crate::{LayerSpec, Problem};
use serde_json::{Value, json};

/// Number of random specs tried until one uses the key.
const SAMPLES: u64 = 400;

/// Returns the range of a key, read off the validator's answers to numbers out of range.
pub fn range(path: &str) -> Option<String> {
    let counts = [json!(0), json!(u32::MAX as u64 * 4)].map(|number| refused(path, &number));
    let numbers = refused(path, &json!(1e300));
    match (counts, numbers) {
        ([Some(low), _], None) => low.help.map(|help| possible(&help)),
        ([_, Some(high)], None) => Some(high.label.replace("must be ", "")),
        (_, Some(number)) => number.help.map(|help| possible(&help)),
        ([None, None], None) => None,
    }
}

/// Turns `use a number from 1 to 64` into `from 1 to 64`.
fn possible(help: &str) -> String {
    help.trim_start_matches("use ")
        .trim_start_matches("a number ")
        .to_string()
}

/// Returns the first complaint about a value out of range.
fn refused(path: &str, number: &Value) -> Option<Problem> {
    (0..SAMPLES).find_map(|seed| {
        let mut spec = serde_json::to_value(sample(seed)).expect("a spec is JSON");
        put(&mut spec, &path.split('.').collect::<Vec<_>>(), number)?;
        let spec: LayerSpec = serde_json::from_value(spec).ok()?;
        let problems = spec.validate().err()?.into_iter();
        let mut own = problems.filter(|p| plain(&p.key) == path);
        own.find(|problem| problem.message.contains("out of range"))
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
