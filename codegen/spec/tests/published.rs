//! The configurations of `tests/oracle/published.json`, and the table of them in docs/FAMILIES.md.
//!
//! `BLESS=1 cargo test -p moesaic-spec --test main published` rewrites the table.

use moesaic_spec::hf::{HfError, import, moe_layers};
use moesaic_spec::{LayerSpec, WEIGHT_FORMATS};
use serde_json::{Value, json};
use std::fs;
use std::path::PathBuf;

/// The table stands between these lines of the page.
const BEGIN: &str =
    "<!-- `BLESS=1 cargo test -p moesaic-spec --test main published` writes this. -->\n";
const END: &str = "<!-- end of the table -->\n";

/// A configuration that a package describes.
struct Published {
    model: String,
    checkpoint: Option<String>,
    /// The packages whose registries name the model.
    named_by: Vec<String>,
    config: Value,
}

/// Counts of the rows of the table.
#[derive(Default)]
struct Count {
    all: usize,
    /// Rows whose class lacks a size that the model needs.
    incomplete: usize,
    read: usize,
    codes: usize,
}

fn root(path: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")).join(path)
}

fn published() -> Vec<Published> {
    let text = fs::read_to_string(root("tests/oracle/published.json")).expect("the file is there");
    let rows: Vec<Value> = serde_json::from_str(&text).expect("it is JSON");
    let text = |value: &Value| value.as_str().map(str::to_string);
    let row = |row: &Value| Published {
        model: text(&row["model"]).expect("a model type"),
        checkpoint: text(&row["checkpoint"]),
        named_by: row["named_by"]
            .as_array()
            .expect("a list")
            .iter()
            .filter_map(text)
            .collect(),
        config: row["config"].clone(),
    };
    rows.iter().map(row).collect()
}

/// Imports every layer with experts; returns the first.
fn read(config: &Value) -> Result<LayerSpec, HfError> {
    let text = config.to_string();
    let layers = moe_layers(&text)?;
    let mut specs = layers
        .into_iter()
        .map(|layer| import(&text, layer).map(|got| got.spec));
    let first = specs
        .next()
        .expect("a model without experts is not listed")?;
    specs.try_for_each(|spec| spec.map(|_| ()))?;
    Ok(first)
}

/// Returns true if the model is read from a checkpoint of FP8 codes in blocks, and a layer of it
/// may keep its experts as such codes.
fn takes_codes(config: &Value, spec: &LayerSpec) -> bool {
    let mut coded = config.clone();
    coded["quantization_config"] = json!({"quant_method": "fp8", "weight_block_size": [128, 128]});
    let mut spec = spec.clone();
    spec.precision.experts = WEIGHT_FORMATS.first().copied();
    read(&coded).is_ok() && spec.validate().is_ok()
}

/// Returns the part of an error that says what the spec lacks.
fn reason(error: &HfError) -> String {
    match error {
        HfError::Family { does, .. } => does.clone(),
        HfError::UnknownModel { .. } => "no family of this name".to_string(),
        other => {
            let said = other.to_string();
            let said = said
                .split_once(": ")
                .map_or(said.as_str(), |(_, rest)| rest);
            let (said, keys) = (said.replace('|', "/"), "the configuration has no ");
            match said
                .strip_prefix(keys)
                .and_then(|keys| keys.split(" or ").next())
            {
                Some(key) => format!("no {key}"),
                None => said,
            }
        }
    }
}

fn table() -> (String, Count) {
    let mut count = Count::default();
    let mut text =
        "| model type | checkpoint | named by | d, h, E, K | codes | refused because |\n\
                    |---|---|---|---|---|---|\n"
            .to_string();
    for row in published() {
        count.all += 1;
        let checkpoint = row.checkpoint.unwrap_or_default();
        let named_by: Vec<&str> = row.named_by.iter().map(|name| &name[..1]).collect();
        let (shape, codes, why) = match read(&row.config) {
            Ok(spec) => {
                let codes = takes_codes(&row.config, &spec);
                count.read += 1;
                count.codes += usize::from(codes);
                let s = spec.shape;
                let shape = format!(
                    "{}, {}, {}, {}",
                    s.model_dim, s.hidden_dim, s.experts, s.top_k
                );
                (shape, if codes { "yes" } else { "no" }, String::new())
            }
            Err(error) => {
                let missing = matches!(error, HfError::MissingKey { .. });
                count.incomplete += usize::from(missing);
                let before = if missing { "incomplete: " } else { "" };
                (String::new(), "", before.to_string() + &reason(&error))
            }
        };
        let cells = [
            format!("`{}`", row.model),
            checkpoint,
            named_by.join(" "),
            shape,
            codes.to_string(),
            why,
        ];
        text += &format!("| {} |\n", cells.join(" | "));
    }
    (text, count)
}

#[test]
fn the_page_says_which_published_configurations_are_read() {
    let (table, count) = table();
    let complete = count.all - count.incomplete;
    let which = match count.incomplete {
        0 => "`--hf` reads".to_string(),
        some => format!("{some} of them are incomplete. Of the others `--hf` reads"),
    };
    let counted = format!(
        "The table has {} configurations. {which} {}, {:.0} %; {} with experts as\ncodes.\n\n",
        count.all,
        count.read,
        100.0 * count.read as f64 / complete as f64,
        count.codes
    );
    let path = root("docs/FAMILIES.md");
    let page = fs::read_to_string(&path).expect("the page is there");
    let (before, rest) = page
        .split_once(BEGIN)
        .expect("the page has the table's first line");
    let (now, after) = rest
        .split_once(END)
        .expect("the page has the table's last line");
    let wanted = format!("{counted}{table}\n");
    if std::env::var_os("BLESS").is_some() {
        fs::write(&path, format!("{before}{BEGIN}{wanted}{END}{after}")).expect("it is ours");
        return;
    }
    assert!(
        now == wanted,
        "docs/FAMILIES.md lacks what is read now: BLESS=1\n{wanted}"
    );
}
