//! The quantized matrices of a folder: where their values come from, and their tensors' names.

use super::model::{Layer, Model, computes, expert, with_config};
use super::{QuantizeError, Squares};
use crate::LayerReader;
use moesaic_spec::TensorSpec;
use moesaic_spec::format::{EncodeOptions, Encoded};
use moesaic_spec::hf::{self, Alternative, Scheme, SchemePart, TensorParts, TensorStep};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// Tensors that replace one float matrix, or the experts' stack of them.
pub(super) struct Target {
    /// The name of the float matrix, or of the codes where the scheme stacks them.
    pub name: String,
    /// The index of the layer among those with experts.
    pub layer: usize,
    /// Rows and columns of a matrix.
    pub size: [usize; 2],
    /// One matrix, or one per expert.
    pub matrices: Vec<Vec<Rows>>,
    /// The source's file, whose counterpart in the output holds the target.
    pub file: PathBuf,
}

/// Rows of a matrix that are one expert's rows of a canonical tensor.
#[derive(Clone)]
pub(super) struct Rows {
    tensor: String,
    expert: usize,
    /// The first row in the matrix, and the distance to the next.
    start: usize,
    step: usize,
}

/// The targets of a model, and the source's tensors that they replace.
pub(super) struct Targets {
    pub scheme: Scheme,
    pub list: Vec<Target>,
    pub replaced: Vec<String>,
}

/// Plans the experts of every layer.
pub(super) fn plan(model: &Model, scheme: Scheme) -> Result<Targets, QuantizeError> {
    let scheme = in_the_family(model, scheme);
    let mut targets = Targets {
        scheme,
        list: Vec::new(),
        replaced: Vec::new(),
    };
    for (at, layer) in model.layers.iter().enumerate() {
        for tensor in layer.expert_matrices() {
            targets.add(model, at, layer, &tensor)?;
        }
    }
    targets.replaced.sort();
    targets.replaced.dedup();
    for target in &targets.list {
        let check = scheme.stored.format.check_size(target.size);
        check.map_err(QuantizeError::encode(&target.name))?;
    }
    Ok(targets)
}

/// Returns gpt-oss' own layout in the families that read it.
fn in_the_family(model: &Model, scheme: Scheme) -> Scheme {
    let stacked = hf::MXFP4_IN_BLOCKS;
    let format = stacked.stored.format == scheme.stored.format;
    let layer = model.layers.first().map_or(0, |layer| layer.index);
    let config = with_config(&model.config, &stacked.config(&[]));
    if format && hf::import(&config, layer).is_ok() {
        stacked
    } else {
        scheme
    }
}

impl Targets {
    fn add(
        &mut self,
        model: &Model,
        at: usize,
        layer: &Layer,
        tensor: &TensorSpec,
    ) -> Result<(), QuantizeError> {
        let unsupported = |reason: &str| layer.unsupported(&tensor.name, reason);
        let source = layer.source(&tensor.name);
        let source = source.ok_or_else(|| unsupported("no recipe reads it"))?;
        let held = model.held(source);
        let held = held.ok_or_else(|| unsupported("the checkpoint does not have it"))?;
        if computes(held) || matches!(held.parts, TensorParts::Repeated { .. }) {
            return Err(unsupported("its numbers are computed when it is read"));
        }
        let names = held.names();
        let file = model.checkpoint.find(&names[0])?;
        let file = file.map_or_else(PathBuf::new, |found| found.file.to_path_buf());
        if self.scheme.stacks() {
            self.stack(at, layer, tensor, &names[0], file)?;
        } else {
            let places = singles(held, &source.alternatives);
            let places = places.ok_or_else(|| {
                unsupported("this family has no names for single experts; GGUF files have one tensor for all")
            })?;
            for (expert, name) in places.into_iter().enumerate() {
                self.list.push(Target {
                    file: match model.checkpoint.find(&name)? {
                        Some(found) => found.file.to_path_buf(),
                        None => file.clone(),
                    },
                    name,
                    layer: at,
                    size: [tensor.shape[1], tensor.shape[2]],
                    matrices: vec![vec![Rows::all(&tensor.name, expert)]],
                });
            }
        }
        self.replaced.extend(names);
        Ok(())
    }

    /// Adds rows of gpt-oss' stacks, in which gate and up alternate.
    fn stack(
        &mut self,
        at: usize,
        layer: &Layer,
        tensor: &TensorSpec,
        float: &str,
        file: PathBuf,
    ) -> Result<(), QuantizeError> {
        let source = layer.source(&tensor.name);
        let alternatives = source.map_or(&[][..], |source| &source.alternatives);
        let halves = alternatives.iter().filter(|held| held.names()[0] == float);
        // The float tensor may be transposed, which the rows of codes are not.
        let take = halves
            .flat_map(|held| &held.steps)
            .find_map(|step| match step {
                TensorStep::Take {
                    start, step, of, ..
                } => Some((*start, *step, *of)),
                _ => None,
            });
        let (start, step, rows) = take.unwrap_or((0, 1, tensor.shape[1]));
        let name = format!("{float}_blocks");
        let place = self.list.iter().position(|target| target.name == name);
        let place = place.unwrap_or_else(|| {
            self.list.push(Target {
                name,
                layer: at,
                size: [rows, tensor.shape[2]],
                matrices: vec![Vec::new(); tensor.shape[0]],
                file,
            });
            self.list.len() - 1
        });
        for (expert, matrix) in self.list[place].matrices.iter_mut().enumerate() {
            matrix.push(Rows {
                start,
                step,
                ..Rows::all(&tensor.name, expert)
            });
        }
        Ok(())
    }
}

/// Returns the names of single experts' matrices: those that are held, or the family's names for
/// the matrices of a fused tensor.
fn singles(held: &Alternative, alternatives: &[Alternative]) -> Option<Vec<String>> {
    if matches!(held.parts, TensorParts::PerExpert { .. }) {
        return held.steps.is_empty().then(|| held.parts.names());
    }
    let fused = held.names().swap_remove(0);
    let named = alternatives
        .iter()
        .find(|alternative| match &alternative.parts {
            TensorParts::PerExpert { before, .. } => {
                // Granite's `input_linear` and Aria's `fc1` have no single experts in any reader.
                let projection = fused.strip_prefix(before.as_str());
                let projection = projection.is_some_and(|name| name.ends_with("_proj"));
                alternative.steps.is_empty() && projection
            }
            _ => false,
        });
    named.map(|alternative| alternative.parts.names())
}

impl Rows {
    fn all(tensor: &str, expert: usize) -> Rows {
        Rows {
            tensor: tensor.to_string(),
            expert,
            start: 0,
            step: 1,
        }
    }

    /// Returns the same rows of the matrix that kernels multiply together with this one.
    fn partner(&self) -> Option<Rows> {
        let partner = match self.tensor.as_str() {
            "experts.gate.weight" => "experts.up.weight",
            "experts.up.weight" => "experts.gate.weight",
            _ => return None,
        };
        Some(Rows {
            tensor: partner.to_string(),
            ..self.clone()
        })
    }
}

impl Target {
    /// Encodes the matrices. Returns the bytes of each part, and the error.
    pub fn encode(
        &self,
        scheme: &Scheme,
        reader: &LayerReader<'_>,
    ) -> Result<(BTreeMap<SchemePart, Vec<u8>>, Squares), QuantizeError> {
        let format = &scheme.stored.format;
        let parts = scheme.tensors(&self.name, self.matrices.len(), self.size);
        let (mut bytes, mut squares) = (BTreeMap::<_, Vec<u8>>::new(), Squares::default());
        for matrix in &self.matrices {
            let values = self.values(reader, matrix)?;
            let options = EncodeOptions {
                zero_points: scheme.zero_points,
                second: self.shared_scale(scheme, reader, matrix, &values)?,
            };
            let encoded = format.encode(&values, self.size, options);
            let encoded = encoded.map_err(QuantizeError::encode(&self.name))?;
            self.compare(scheme, &encoded, &values, &mut squares);
            for tensor in parts.iter().flatten() {
                let own = scheme.bytes(tensor.part, &encoded, self.size);
                bytes.entry(tensor.part).or_default().extend(own);
            }
        }
        Ok((bytes, squares))
    }

    fn values(&self, reader: &LayerReader<'_>, matrix: &[Rows]) -> Result<Vec<f32>, QuantizeError> {
        if let [
            Rows {
                tensor,
                expert: e,
                start: 0,
                step: 1,
            },
        ] = matrix
        {
            return expert(reader, tensor, *e);
        }
        let columns = self.size[1];
        let mut values = vec![0f32; self.size[0] * columns];
        for rows in matrix {
            let from = expert(reader, &rows.tensor, rows.expert)?;
            for (at, row) in from.chunks_exact(columns).enumerate() {
                let to = (rows.start + at * rows.step) * columns;
                values[to..to + columns].copy_from_slice(row);
            }
        }
        Ok(values)
    }

    /// Returns the second scale of a matrix and its partner. Fused kernels multiply gate and up as
    /// one, and have one second scale for both.
    fn shared_scale(
        &self,
        scheme: &Scheme,
        reader: &LayerReader<'_>,
        matrix: &[Rows],
        values: &[f32],
    ) -> Result<Option<f32>, QuantizeError> {
        let format = &scheme.stored.format;
        if format.second.is_none() {
            return Ok(None);
        }
        let largest = |values: &[f32]| values.iter().fold(0f32, |most, v| most.max(v.abs()));
        let mut most = largest(values);
        for rows in matrix.iter().filter_map(Rows::partner) {
            if has(reader, &rows.tensor) {
                most = most.max(largest(&expert(reader, &rows.tensor, rows.expert)?));
            }
        }
        Ok(format.second_scale(most))
    }

    fn compare(&self, scheme: &Scheme, encoded: &Encoded, values: &[f32], squares: &mut Squares) {
        let decoder = scheme.stored.format.decoder(encoded, self.size);
        let (mut found, mut first) = ([0f32; 256], 0);
        while first < values.len() {
            let count = decoder.run(first, &mut found);
            squares.add(&values[first..first + count], &found[..count]);
            first += count;
        }
    }
}

fn has(reader: &LayerReader<'_>, tensor: &str) -> bool {
    moesaic_tensor::WeightSource::describe(reader, tensor).is_some()
}
