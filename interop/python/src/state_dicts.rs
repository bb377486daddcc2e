//! State dicts of Tutel and FastMoE.

use crate::dlpack::{Array, Imported, imported, lent};
use crate::errors::{Failure, without_gil};
use crate::spec::Spec;
use moesaic::spec::keys::CheckpointLibrary;
use moesaic::weights::{Checkpoint, KeyOptions, LayerReader, LoadOptions, write_safetensors};
use pyo3::prelude::*;
use std::collections::BTreeMap;

/// Reads a layer from a state dict of Tutel ("tutel") or FastMoE ("fastmoe"): the weights of the
/// spec by canonical name. `share` is the number of experts that the dict has, all or those of one
/// rank; `prefix` and `gate` choose where there are several layers or gates.
#[pyfunction]
#[pyo3(signature = (spec, library, tensors, share=None, prefix=None, gate=None))]
pub fn read_state_dict(
    py: Python<'_>,
    spec: &Bound<'_, Spec>,
    library: &str,
    tensors: BTreeMap<String, Bound<'_, PyAny>>,
    share: Option<usize>,
    prefix: Option<String>,
    gate: Option<usize>,
) -> PyResult<BTreeMap<String, Array>> {
    let known = CheckpointLibrary::ALL;
    let found = known.into_iter().find(|known| known.name() == library);
    let library = found.ok_or_else(|| {
        let names = known.map(CheckpointLibrary::name).join(", ");
        Failure::Invalid(format!("no library `{library}`, there are: {names}"))
    })?;
    let options = KeyOptions {
        library,
        prefix,
        gate,
    };
    let (spec, given) = (spec.get(), imported(&tensors)?);
    let read = without_gil(py, || read(spec, &options, share, &given))?;
    Ok(read.into_iter().map(|(n, t)| (n, Array::new(t))).collect())
}

/// Reads by way of a file: recipes take their tensors from checkpoints.
fn read(
    spec: &Spec,
    options: &KeyOptions,
    share: Option<usize>,
    given: &[(String, Imported)],
) -> Result<moesaic::Tensors<'static>, Failure> {
    let folder = tempfile::tempdir().map_err(|error| Failure::Other(error.to_string()))?;
    let file = folder.path().join("state_dict.safetensors");
    let path = file.display().to_string();
    // The caller has a dict and no file.
    let invalid = |error: moesaic::weights::WeightsError| {
        Failure::Invalid(error.to_string().replace(&path, "the state dict"))
    };
    write_safetensors(&file, &lent(given)).map_err(invalid)?;
    let checkpoint = Checkpoint::open(&file).map_err(invalid)?;
    let share = share.unwrap_or(spec.spec.shape.experts);
    let reader = LayerReader::of_keys(
        &spec.spec,
        share,
        options,
        &checkpoint,
        LoadOptions::default(),
    );
    reader.and_then(|reader| reader.load()).map_err(invalid)
}
