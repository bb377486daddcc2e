//! Looks recipes up in a checkpoint, to find the tensors of each weight and their conversion.

use crate::WeightsError;
use crate::checkpoint::TensorRef;
use crate::finder::Finder;
use crate::gguf;
use crate::gguf_header::Kind;
use crate::quantized::Quantized;
use crate::view::Layout;
use crate::weight::{Elements, Part, Weight};
use moesaic_kernel::DType;
use moesaic_spec::format::BLOCKS;
use moesaic_spec::hf::{Alternative, TensorParts, TensorPiece, TensorStep};
use moesaic_spec::{Chooser, canonical_tensors, closest};
use moesaic_tensor::read_float;
use safetensors::Dtype;
use std::sync::Mutex;

/// A weight by one alternative.
pub(crate) struct Fit<'a> {
    pub weight: Weight<'a>,
    /// Whether the recipe transposes the file's tensor.
    pub transposed: bool,
}

/// The possible readings of a weight, the usual one first; at least one.
pub(crate) struct Fits<'a> {
    pub fits: Vec<Fit<'a>>,
    /// Whether the recipes accept the tensor both as it is and transposed.
    pub either: bool,
}

impl<'a> Fits<'a> {
    /// Returns this tensor's evidence on the order of the file's experts: none if the recipes
    /// accept only one order, or if both fit.
    pub fn says_transposed(&self) -> Option<bool> {
        let known = self.either && self.fits.len() == 1;
        known.then(|| self.fits[0].transposed)
    }

    /// Picks the reading, given the evidence of the other tensors.
    pub fn decide(mut self, transposed: Option<bool>) -> Result<Weight<'a>, WeightsError> {
        if self.fits.len() > 1 {
            let Some(transposed) = transposed else {
                return Err(self.ambiguous());
            };
            self.fits.retain(|fit| fit.transposed == transposed);
        }
        Ok(self.fits.swap_remove(0).weight)
    }

    fn ambiguous(&self) -> WeightsError {
        let from = &self.fits[0].weight.parts[0].from;
        WeightsError::Ambiguous {
            tensor: from.name.to_string(),
            file: from.file.to_path_buf(),
            found: from.shape.to_vec(),
        }
    }
}

/// Returns the number that a step adds to each element.
fn added(step: &TensorStep) -> f64 {
    match step {
        TensorStep::Plus(number) => *number,
        _ => 0.0,
    }
}

impl<'a> Finder<'a, '_> {
    /// Returns the first alternative that exists and whose shape fits, and also its transposed twin
    /// if that fits too.
    pub fn weight(&self, alternatives: &[Alternative]) -> Result<Fits<'a>, WeightsError> {
        let (mut misfit, mut fits) = (None, Vec::<(&Alternative, Fit<'a>)>::new());
        let mut present = alternatives.iter().filter(|a| self.present(a));
        let first = |fits: &[(&Alternative, _)]| fits.first().map(|(a, _)| a.parts.clone());
        for alternative in &mut present {
            // Only readings of the same tensors compete. Other alternatives come later in the order
            // of preference.
            if first(&fits).is_some_and(|parts| parts != alternative.parts) {
                continue;
            }
            match self.look_up(alternative) {
                Ok(weight) => {
                    let transposed = alternative.transposes();
                    let known = |(_, fit): &(_, Fit<'_>)| fit.transposed == transposed;
                    if !fits.iter().any(known) {
                        fits.push((alternative, Fit { weight, transposed }));
                    }
                }
                // Keep looking: another alternative may fit. If none does, the first misfit is the
                // best explanation.
                Err(error @ WeightsError::WrongShape { .. }) => misfit = misfit.or(Some(error)),
                // Once one reading fits, errors of further readings do not matter.
                Err(error) if fits.is_empty() => return Err(error),
                Err(_) => {}
            }
        }
        let Some(parts) = first(&fits) else {
            return Err(misfit.unwrap_or_else(|| self.missing(alternatives)));
        };
        let same = alternatives.iter().filter(|a| a.parts == parts);
        // A tensor is evidence only if the recipes would have accepted the other order too.
        let either = same.clone().any(|a| a.transposes()) && same.clone().any(|a| !a.transposes());
        let fits = fits.into_iter().map(|(_, fit)| fit).collect();
        Ok(Fits { fits, either })
    }

    /// Returns true if the checkpoint has the alternative's first tensor, as floats or as codes. If
    /// a later one is missing, the file is damaged, and reading it reports that.
    fn present(&self, alternative: &Alternative) -> bool {
        let names = alternative.names();
        let Some(name) = names.first() else {
            return true;
        };
        let there = |name: &str| self.checkpoint.has(name);
        let apart = match alternative.steps.first() {
            Some(TensorStep::Dequantize(codes)) => codes.apart(name),
            _ => Vec::new(),
        };
        there(name) || apart.iter().any(|name| there(name))
    }

    fn look_up(&self, alternative: &Alternative) -> Result<Weight<'a>, WeightsError> {
        let (shape, steps) = (&self.tensor.shape, &alternative.steps);
        let (parts, stacked) = match &alternative.parts {
            TensorParts::One(name) => (vec![self.part(name, steps, shape)?], false),
            TensorParts::Joined(pieces) => (self.joined(pieces, steps)?, true),
            TensorParts::PerExpert { .. } | TensorParts::Repeated { .. } => {
                let names = alternative.parts.names();
                let (rows, row) = shape.split_first().unwrap_or((&1, &[]));
                // The spec and the recipe may come from different places, such as a changed import.
                if names.len() != *rows {
                    return Err(WeightsError::WrongCount {
                        tensor: self.tensor.name.clone(),
                        found: names.len(),
                        expected: *rows,
                    });
                }
                let parts = names.iter().map(|name| self.part(name, steps, row));
                (parts.collect::<Result<_, _>>()?, true)
            }
        };
        let table =
            self.spec.router.kind.chooser() == Chooser::Table && self.tensor.dtype == DType::I32;
        Ok(Weight {
            dtype: self.tensor.dtype,
            shape: shape.clone(),
            parts,
            stacked,
            columns: self.columns(steps, shape)?,
            plus: steps.iter().map(added).sum(),
            experts: table.then(|| self.spec.routed_experts()),
            allow_infinite: self.options.allow_infinite,
            tally: Mutex::default(),
        })
    }

    /// Returns the rows of all pieces, each as a part of its own.
    fn joined(
        &self,
        pieces: &[TensorPiece],
        steps: &[TensorStep],
    ) -> Result<Vec<Part<'a>>, WeightsError> {
        let (rows, row) = self.tensor.shape.split_first().unwrap_or((&1, &[]));
        let found = pieces.iter().map(|piece| piece.rows).sum::<usize>();
        if found != *rows {
            return Err(WeightsError::WrongCount {
                tensor: self.tensor.name.clone(),
                found,
                expected: *rows,
            });
        }
        let mut parts = Vec::with_capacity(*rows);
        for piece in pieces {
            let steps = [steps, &piece.steps].concat();
            let shape = [&[piece.rows], row].concat();
            for index in 0..piece.rows {
                let mut part = self.part(&piece.name, &steps, &shape)?;
                part.layout = part.layout.rows(index..index + 1);
                parts.push(part);
            }
        }
        Ok(parts)
    }

    /// Returns one tensor of the file after the steps, with this shape.
    fn part(
        &self,
        name: &str,
        steps: &[TensorStep],
        shape: &[usize],
    ) -> Result<Part<'a>, WeightsError> {
        let codes = self.codes(name, steps)?;
        let from = match &codes {
            Some(codes) => codes.from,
            None => self.find(name)?,
        };
        let wrong = |expected: String| WeightsError::WrongShape {
            tensor: from.name.to_string(),
            file: from.file.to_path_buf(),
            found: from.shape.to_vec(),
            expected,
        };
        let held = codes.as_ref().map_or(from.shape, |codes| &codes.shape);
        let mut layout = Layout::dense(held);
        for step in steps {
            layout = layout.apply(step).map_err(&wrong)?;
        }
        if layout.shape != shape {
            let moves = |step: &TensorStep| !matches!(step, TensorStep::Dequantize(_));
            let numbers = codes.as_ref().map_or("", |_| "numbers of shape ");
            let after = if steps.iter().any(moves) {
                " after rearranging"
            } else {
                ""
            };
            return Err(wrong(format!("{numbers}{shape:?}{after}")));
        }
        let elements = match codes {
            Some(codes) => Elements::Codes(Box::new(codes)),
            None => Elements::Numbers(self.convertible(&from, steps)?),
        };
        Ok(Part {
            from,
            elements,
            layout,
        })
    }

    /// Returns the tensor as codes, if the recipe allows that and the file has them.
    fn codes(
        &self,
        name: &str,
        steps: &[TensorStep],
    ) -> Result<Option<Quantized<'a>>, WeightsError> {
        // A GGUF file names the type of each tensor itself, so no recipe step is needed.
        if let Some(from) = self.checkpoint.tensor(name).filter(|t| t.ggml.is_some()) {
            return self.blocks(from).map(Some);
        }
        match steps.first() {
            Some(TensorStep::Dequantize(codes)) if self.tensor.dtype.is_float() => {
                Quantized::find(self, codes, name)
            }
            _ => Ok(None),
        }
    }

    /// Returns a GGUF tensor whose type is blocks of codes.
    fn blocks(&self, from: TensorRef<'a>) -> Result<Quantized<'a>, WeightsError> {
        let found = match from.ggml {
            Some(Kind::Blocks(blocks)) if self.tensor.dtype.is_float() => {
                return Ok(Quantized::of_blocks(from, blocks));
            }
            Some(Kind::Blocks(blocks)) => blocks.name.to_string(),
            Some(Kind::Unread(id)) => gguf::unread(id),
            Some(Kind::Numbers(dtype)) => dtype.to_string(),
            None => String::new(),
        };
        let read: Vec<&str> = BLOCKS.iter().map(|blocks| blocks.name).collect();
        let expected = if self.tensor.dtype.is_float() {
            format!("F32, F16, BF16, {}", read.join(", "))
        } else {
            "I32 or I64".to_string()
        };
        Err(WeightsError::WrongDType {
            tensor: from.name.to_string(),
            file: from.file.to_path_buf(),
            found,
            expected,
        })
    }

    fn find(&self, name: &str) -> Result<TensorRef<'a>, WeightsError> {
        self.checkpoint
            .find(name)?
            .ok_or_else(|| WeightsError::MissingTensor {
                tensor: self.tensor.name.clone(),
                path: self.checkpoint.path().to_path_buf(),
                tried: format!("; looked for `{name}`"),
                near: String::new(),
            })
    }

    /// Returns the element type in the file, if it can be converted to the spec's.
    fn convertible(
        &self,
        from: &TensorRef<'_>,
        steps: &[TensorStep],
    ) -> Result<DType, WeightsError> {
        let wanted = self.tensor.dtype;
        let file = from.file.to_path_buf();
        let tensor = from.name.to_string();
        let expected = match (wanted.is_float(), from.dtype) {
            (true, Err(Dtype::F8_E4M3)) => {
                "f32, f16 or bf16, or a quantization_config in config.json, which says how \
                 numbers of 8 bits were made"
            }
            (true, _) => "f32, f16 or bf16",
            (false, _) => "i32 or i64",
        };
        let found = match from.dtype {
            Ok(found) if found.is_float() == wanted.is_float() => found,
            Ok(other) => {
                let found = other.to_string();
                return Err(WeightsError::WrongDType {
                    tensor,
                    file,
                    found,
                    expected: expected.into(),
                });
            }
            Err(other) => {
                let found = format!("{other:?}").to_lowercase();
                return Err(WeightsError::WrongDType {
                    tensor,
                    file,
                    found,
                    expected: expected.into(),
                });
            }
        };
        let exact = found == wanted || wanted == DType::F32 || !wanted.is_float();
        // Floats of a quantized checkpoint may be rounded too, since its codes are.
        let quantized = matches!(steps.first(), Some(TensorStep::Dequantize(_)));
        if exact || quantized || self.options.narrow {
            return Ok(found);
        }
        let (found, wanted) = (found.to_string(), wanted.to_string());
        Err(WeightsError::Narrowing {
            tensor,
            file,
            found,
            wanted,
        })
    }

    /// Returns the product of all factors on each column, if the recipe computes.
    fn columns(
        &self,
        steps: &[TensorStep],
        shape: &[usize],
    ) -> Result<Option<Vec<f64>>, WeightsError> {
        let width = shape.last().copied().unwrap_or(1);
        let mut columns: Option<Vec<f64>> = None;
        for step in steps {
            let factors = match step {
                TensorStep::Factor(factor) => vec![*factor; width],
                TensorStep::Plus(_) => vec![1.0; width],
                TensorStep::MulColumns(name) => self.vector(name, width)?,
                TensorStep::DivColumns(name) => {
                    self.nonzero(name, width)?.iter().map(|v| 1.0 / v).collect()
                }
                TensorStep::Dequantize(_)
                | TensorStep::Reshape(_)
                | TensorStep::Transpose
                | TensorStep::Take { .. } => {
                    continue;
                }
            };
            // Collect all factors in f64 and apply them once, so that each weight is rounded once.
            let product = columns.get_or_insert_with(|| vec![1.0; width]);
            product.iter_mut().zip(factors).for_each(|(p, f)| *p *= f);
        }
        Ok(columns)
    }

    /// Reads a vector that scales columns.
    fn vector(&self, name: &str, width: usize) -> Result<Vec<f64>, WeightsError> {
        let from = self.find(name)?;
        let found = self.convertible(&from, &[])?;
        if from.shape != [width] {
            return Err(WeightsError::WrongShape {
                tensor: name.to_string(),
                file: from.file.to_path_buf(),
                found: from.shape.to_vec(),
                expected: format!("{:?}", [width]),
            });
        }
        from.check_length()?;
        Ok(from
            .bytes
            .chunks_exact(found.size())
            .map(|b| read_float(found, b))
            .collect())
    }

    /// Reads a vector that divides columns.
    fn nonzero(&self, name: &str, width: usize) -> Result<Vec<f64>, WeightsError> {
        let vector = self.vector(name, width)?;
        // Dividing by zero would fill a column with infinities that nobody asked for.
        if vector.iter().all(|v| *v != 0.0) {
            return Ok(vector);
        }
        let file = self.find(name)?.file.to_path_buf();
        let expected = "no zeros: columns are divided by it".to_string();
        Err(WeightsError::BadValue {
            tensor: name.to_string(),
            file,
            value: 0,
            expected,
        })
    }

    /// Returns the error that lists the tried names and similar ones.
    fn missing(&self, alternatives: &[Alternative]) -> WeightsError {
        let mut tried: Vec<String> = alternatives
            .iter()
            .filter_map(|a| a.names().into_iter().next())
            .collect();
        tried.dedup();
        WeightsError::MissingTensor {
            tensor: self.tensor.name.clone(),
            path: self.checkpoint.path().to_path_buf(),
            near: self.near(&tried),
            tried: if tried.iter().all(|name| *name == self.tensor.name) {
                String::new()
            } else {
                format!("; looked for {}", listed(&tried))
            },
        }
    }

    /// Returns names of the checkpoint that end like the tried ones.
    fn near(&self, tried: &[String]) -> String {
        if let Some(fused) = self.fused(tried) {
            return format!(
                "; it has `{fused}`: say layout = \"concat\" or \"interleaved\" under [experts]"
            );
        }
        if let Some(name) = self.misspelt() {
            return format!("; it has `{name}`: is that the one?");
        }
        let end = |name: &str| {
            let parts: Vec<&str> = name.rsplit('.').take(2).collect();
            parts.join(".")
        };
        let ends: Vec<String> = tried.iter().map(|name| end(name)).collect();
        let similar: Vec<String> = self
            .checkpoint
            .names()
            .filter(|name| ends.contains(&end(name)))
            .map(str::to_string)
            .collect();
        if !similar.is_empty() {
            return format!("; it has {}", listed(&similar));
        }
        // Nothing resembles the name. A file of canonical names has few others, so list those; a
        // model's file has the rest of the model, which would say nothing.
        let canonical = tried.iter().all(|name| *name == self.tensor.name);
        let others: Vec<String> = self.strays().iter().map(|name| name.to_string()).collect();
        if others.is_empty() || !canonical {
            return String::new();
        }
        format!("; it has {}, which the spec does not use", listed(&others))
    }

    /// Returns a name in the file close to the canonical one and not in the spec: probably the
    /// missing tensor, misspelled.
    fn misspelt(&self) -> Option<&'a str> {
        closest(&self.tensor.name, self.strays().into_iter())
    }

    /// Returns the names in the file that the spec does not have.
    fn strays(&self) -> Vec<&'a str> {
        let known = canonical_tensors(self.spec);
        let stray = |name: &&str| known.iter().all(|tensor| tensor.name != *name);
        self.checkpoint.names().filter(stray).collect()
    }

    /// Returns the fused tensor that contains the wanted one, if the spec declares gate and up as
    /// separate.
    fn fused(&self, tried: &[String]) -> Option<String> {
        let [name] = tried else { return None };
        [".gate.", ".up."]
            .iter()
            .filter(|part| name.contains(*part))
            .map(|part| name.replacen(part, ".gate_up.", 1))
            .find(|fused| self.checkpoint.has(fused))
    }
}

/// Lists the first few names, and counts the rest.
pub(crate) fn listed(names: &[String]) -> String {
    let shown: Vec<String> = names.iter().take(4).map(|n| format!("`{n}`")).collect();
    let more = names.len().saturating_sub(4);
    let tail = if more > 0 {
        format!(" and {more} more")
    } else {
        String::new()
    };
    format!("{}{tail}", shown.join(", "))
}
