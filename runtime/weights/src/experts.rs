//! The choice between codes and numbers for the experts of a quantized checkpoint.

use crate::codes::Published;
use crate::matrices::matrix_of;
use crate::weight::Weight;
use crate::{Checkpoint, CodesError, LayerReader, LoadOptions};
use moesaic_kernel::DType;
use moesaic_spec::hf::{Import, QUANTIZED_NOTE};
use moesaic_spec::{LayerSpec, TensorSpec, WeightFormat, canonical_tensors};
use std::collections::BTreeMap;

/// The form in which a layer takes the experts of an imported checkpoint.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExpertFormats {
    /// The format of gate and up, as they are multiplied; `None` for numbers.
    pub up: Option<WeightFormat>,
    /// The format of down.
    pub down: Option<WeightFormat>,
    /// The reason that experts are numbers although the checkpoint has codes, in one sentence; not
    /// set if you asked for numbers.
    pub dequantized: Option<String>,
}

/// Sets `precision.experts` of an import to the formats that hold the routed experts of the
/// checkpoint exactly, so that layers multiply their codes. If some matrix has no such format, or
/// [`LoadOptions::dequantize`] is set, the experts become numbers. The import's note on quantized
/// weights then says so.
///
/// Reads the headers of the checkpoint, and zero points if it has any. Problems with its tensors
/// are left to the reading of weights.
pub fn set_expert_formats(
    import: &mut Import,
    checkpoint: &Checkpoint,
    options: LoadOptions,
) -> ExpertFormats {
    import.spec = import.spec.dequantized();
    if let Some(dtype) = options.dequantize {
        dequantize_to(&mut import.spec, dtype);
        return ExpertFormats::default();
    }
    let found = Found::of(import, checkpoint, options);
    let Some(found) = found.filter(|found| found.is_quantized()) else {
        return ExpertFormats::default();
    };
    let reason = match found.formats() {
        Ok(formats) => match formats.set(&mut import.spec) {
            Ok(()) => {
                formats.note(&mut import.notes);
                return formats;
            }
            Err(reason) => reason,
        },
        Err(reason) => reason,
    };
    ExpertFormats {
        dequantized: Some(dequantized(&import.spec, &reason)),
        ..ExpertFormats::default()
    }
}

/// Returns the sentence that says why the experts of a layer are numbers.
pub fn dequantized(spec: &LayerSpec, reason: &str) -> String {
    let weights = spec.precision.weights;
    format!("the experts are dequantized to {weights}, because {reason}")
}

/// Gives the weights a type, and the activations too, if they would be of another 16-bit type.
fn dequantize_to(spec: &mut LayerSpec, dtype: DType) {
    let precision = &mut spec.precision;
    precision.weights = dtype;
    if precision.activations != dtype && precision.activations.size() == dtype.size() {
        precision.activations = dtype;
    }
}

impl ExpertFormats {
    /// Replaces the note on quantized weights.
    fn note(&self, notes: &mut Vec<String>) {
        let names = [self.up, self.down].into_iter().flatten();
        let mut names: Vec<String> = names.map(|format| format.to_string()).collect();
        names.dedup();
        let stored = format!(
            "the experts are multiplied as they are stored ({}); activations are not quantized",
            names.join(", and down ")
        );
        notes.retain(|note| note != QUANTIZED_NOTE);
        notes.push(stored);
    }

    /// Sets the formats in a spec, unless it would be invalid with them.
    fn set(&self, spec: &mut LayerSpec) -> Result<(), String> {
        let mut stored = spec.clone();
        stored.precision.experts = self.up;
        stored.precision.experts_down = self.down.filter(|down| Some(*down) != self.up);
        match stored.validate() {
            Ok(()) => {
                *spec = stored;
                Ok(())
            }
            Err(problems) => {
                let problems: Vec<String> = problems.iter().map(|p| p.to_string()).collect();
                Err(problems.join("; "))
            }
        }
    }
}

/// The matrices of routed experts in a checkpoint, as numbers.
struct Found<'a>(BTreeMap<String, Weight<'a>>);

impl<'a> Found<'a> {
    /// Finds the matrices. `None` if the checkpoint does not have them all.
    fn of(import: &Import, checkpoint: &'a Checkpoint, options: LoadOptions) -> Option<Self> {
        let spec = &import.spec;
        let tensors = canonical_tensors(spec).into_iter();
        let matrices = tensors.filter(|tensor| matrix_of(&tensor.name).is_some());
        let matrices: Vec<TensorSpec> = matrices.collect();
        let reader = LayerReader::of_tensors(spec, &matrices, &import.sources, checkpoint, options);
        Some(Found(reader.ok()?.found()))
    }

    /// Returns true if some matrix is quantized.
    fn is_quantized(&self) -> bool {
        self.0.values().any(Weight::is_quantized)
    }

    fn formats(&self) -> Result<ExpertFormats, String> {
        let up = self.format(&["experts.gate.weight", "experts.up.weight"])?;
        let down = self.format(&["experts.down.weight"])?;
        Ok(ExpertFormats {
            up: Some(up),
            down: Some(down),
            dequantized: None,
        })
    }

    /// Returns the format that holds all of these, as far as they are there.
    fn format(&self, names: &[&str]) -> Result<WeightFormat, String> {
        let mut all: Option<Published> = None;
        for name in names {
            let Some(weight) = self.0.get(*name) else {
                continue;
            };
            let of = |reason: CodesError| format!("of `{name}` {reason}");
            let own = weight.published().map_err(of)?;
            let own = own.ok_or_else(|| format!("`{name}` is not all codes"))?;
            let merged = match all {
                None => Some(own),
                Some(all) => all.merged(own),
            };
            let differ = || "gate and up are quantized in different ways".to_string();
            all = Some(merged.ok_or_else(differ)?);
        }
        let all = all.ok_or_else(|| "there are no experts".to_string())?;
        all.stored().map_err(|reason| reason.to_string())
    }
}
