//! Checks a directory with config.json, model.safetensors, case.json and block.safetensors against
//! the reference.

use moesaic_kernel::DType;
use moesaic_reference::{Input, Output, Weights, forward};
use moesaic_spec::{LayerSpec, gguf, hf};
use moesaic_tensor::Tensor;
use moesaic_weights::{Checkpoint, LoadOptions, load_import};
use std::error::Error;
use std::fs;
use std::path::Path;

/// The distance of the reference from the oracle.
pub struct Report {
    /// The largest difference of `y`, relative to the largest element.
    pub error: f64,
    /// The number of rows with other chosen experts.
    pub wrong_rows: usize,
}

/// Imports the case, runs it through the reference and compares.
pub fn check(dir: &Path) -> Result<Report, Box<dyn Error>> {
    let case: serde_json::Value = serde_json::from_slice(&fs::read(dir.join("case.json"))?)?;
    let (mut import, checkpoint) = imported(dir, &case)?;
    import.spec.precision.weights = DType::F32;
    let weights = load_import(&import, &checkpoint, LoadOptions::default())?;
    let block = Checkpoint::open(dir.join("block.safetensors"))?;
    let x = block.read("x")?;
    let input = Input {
        tokens: x.shape[0],
        x: x.to_f64(),
        token_ids: block.read("token_ids").ok().map(|t| ints(&t)),
        ..Input::default()
    };
    let output = forward(&import.spec, &Weights::from(&weights), &input);
    let want = block.read("y")?.to_f64();
    let ids = ints(&block.read("topk_ids")?);
    Ok(Report {
        error: relative_error(&output.y, &want),
        wrong_rows: wrong_rows(&output, &ids, &import.spec),
    })
}

/// Imports the layer of a case.
pub fn imported(
    dir: &Path,
    case: &serde_json::Value,
) -> Result<(hf::Import, Checkpoint), Box<dyn Error>> {
    let layer = case["layer"].as_u64().ok_or("case.json has no layer")? as usize;
    Ok(match case["file"].as_str() {
        Some(file) => {
            let checkpoint = Checkpoint::open(dir.join(file))?;
            let metadata = checkpoint.gguf().ok_or("no GGUF file")?;
            (gguf::import(metadata, layer)?, checkpoint)
        }
        None => (hf::import(&config(dir)?, layer)?, Checkpoint::open(dir)?),
    })
}

/// Returns the configuration merged with ModelOpt's.
fn config(dir: &Path) -> Result<String, Box<dyn Error>> {
    let config = fs::read_to_string(dir.join("config.json"))?;
    match fs::read_to_string(dir.join("hf_quant_config.json")) {
        Ok(beside) => Ok(hf::with_quant_config(&config, &beside)?),
        Err(_) => Ok(config),
    }
}

fn ints(tensor: &Tensor<'_>) -> Vec<i32> {
    tensor.to_f64().iter().map(|v| *v as i32).collect()
}

pub fn relative_error(got: &[f64], want: &[f64]) -> f64 {
    assert_eq!(got.len(), want.len());
    let largest = want.iter().fold(0f64, |m, v| m.max(v.abs()));
    let off = got.iter().zip(want).fold(
        0f64,
        |m, (a, b)| if (a - b).abs() <= m { m } else { (a - b).abs() },
    );
    off / largest
}

/// Counts rows with other experts. The oracle's ids ascend within a row, with -1 for a dropped
/// choice. Identity experts take no place and are never dropped.
fn wrong_rows(output: &Output, want: &[i32], spec: &LayerSpec) -> usize {
    let k = spec.shape.top_k;
    let kept = |(&e, &at): (&i32, &i32)| {
        let dropped = at < 0 && (e as usize) < spec.shape.experts;
        if dropped { -1 } else { e }
    };
    let rows = output
        .topk_ids
        .chunks(k)
        .zip(output.locations.chunks(k))
        .zip(want.chunks(k));
    rows.filter(|((ids, places), want)| {
        let mut kept: Vec<i32> = ids.iter().zip(*places).map(kept).collect();
        kept.sort_unstable();
        kept != *want
    })
    .count()
}
