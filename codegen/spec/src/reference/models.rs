//! The models of `tests/oracle`, indexed by the values in their specs.

#[path = "../../../../tests/oracle/archive.rs"]
mod archive;

use crate::hf;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;

/// Fixture folders that hold configurations of model families.
const FOLDERS: [&str; 4] = ["hf", "hf_more", "families", "families_limits"];

/// Model types that are named first, because most readers know them.
const KNOWN: [&str; 8] = [
    "mixtral",
    "deepseek_v3",
    "deepseek_v4",
    "qwen3_moe",
    "qwen2_moe",
    "gpt_oss",
    "glm4_moe",
    "olmoe",
];

/// Number of names in a cell before it ends in a count.
const MOST: usize = 5;

/// The values that a key has in each model, by its path.
pub struct Models(BTreeMap<String, BTreeMap<String, BTreeSet<String>>>);

impl Models {
    /// Reads the configurations; `plain` is the plainest spec as JSON.
    pub fn read(plain: &Value) -> Models {
        let mut models = Models(BTreeMap::new());
        for folder in FOLDERS {
            for entry in fs::read_dir(archive::folder(folder)).expect("fixtures") {
                let folder = entry.expect("an entry").path();
                let read = |name: &str| fs::read_to_string(folder.join(name)).ok();
                let (Some(config), Some(case)) = (read("config.json"), read("case.json")) else {
                    continue;
                };
                let case: Value = serde_json::from_str(&case).expect("JSON");
                let layer = case["layer"].as_u64().expect("a layer") as usize;
                let spec = hf::import(&config, layer).expect("a fixture is read").spec;
                let spec = serde_json::to_value(spec).expect("a spec is JSON");
                models.note(&family(&config), "", &spec, plain);
            }
        }
        models
    }

    /// Records the values that differ from the defaults.
    fn note(&mut self, model: &str, path: &str, value: &Value, plain: &Value) {
        match value {
            // A rule with a number, such as `{ sparse-mixer = 0.01 }`.
            Value::Object(rule) if ["router.select", "experts.activation"].contains(&path) => {
                for name in rule.keys() {
                    self.add(path, &format!("{{ {name} = … }}"), model);
                }
            }
            Value::Object(table) => {
                for (name, value) in table {
                    let path = crate::schema::join(path, name);
                    let plain = plain.get(name).unwrap_or(&Value::Null);
                    if value.is_object() {
                        self.add(&path, "", model);
                    }
                    self.note(model, &path, value, plain);
                }
            }
            Value::Array(list) => {
                for value in list {
                    self.add(path, "", model);
                    self.note(model, path, value, &Value::Null);
                }
            }
            value if value != plain => {
                let word = crate::write::written(value);
                self.add(path, &word, model);
            }
            _ => {}
        }
    }

    fn add(&mut self, path: &str, word: &str, model: &str) {
        let words = self.0.entry(path.to_string()).or_default();
        words
            .entry(word.to_string())
            .or_default()
            .insert(model.to_string());
    }

    /// Returns the models whose value differs from the default.
    pub fn of_key(&self, path: &str) -> String {
        // Every model states these, so a list would say nothing.
        let own = path.starts_with("shape.") && path != "shape.output_dim";
        if own
            || [
                "name",
                "shape",
                "precision",
                "router",
                "capacity",
                "experts",
            ]
            .contains(&path)
        {
            return String::new();
        }
        let words = self.0.get(path).into_iter().flatten();
        // The table of values lists these models already.
        let names: BTreeSet<&String> = words.flat_map(|(_, models)| models).collect();
        listed(&names)
    }

    /// Returns the models with this value of a key.
    pub fn of_word(&self, path: &str, word: &str) -> String {
        let words = self.0.get(path);
        let names = words
            .and_then(|words| words.get(word))
            .into_iter()
            .flatten();
        listed(&names.collect())
    }
}

/// Returns a configuration's own model type.
fn family(config: &str) -> String {
    let config: Value = serde_json::from_str(config).expect("JSON");
    let name = config["model_type"].as_str();
    name.expect("a model type").to_string()
}

fn listed(names: &BTreeSet<&String>) -> String {
    let known = |name: &&&String| KNOWN.contains(&name.as_str());
    let mut order: Vec<&&String> = names.iter().filter(known).collect();
    order.extend(names.iter().filter(|name| !known(name)));
    let mut cells: Vec<String> = order
        .iter()
        .take(MOST)
        .map(|name| format!("`{name}`"))
        .collect();
    if names.len() > MOST {
        cells.push(format!("{} more", names.len() - MOST));
    }
    cells.join(", ")
}
