//! A layer of a checkpoint that reads its weights on demand.

use crate::codes::CodeWeight;
use crate::finder::Finder;
use crate::matrices::{matrix_of, numbers_of};
use crate::recipe::Fits;
use crate::stray::stray;
use crate::weight::{Rounded, Weight};
use crate::{Checkpoint, LoadOptions, TensorRef, WeightsError};
use moesaic_kernel::DType;
use moesaic_spec::hf::{
    Alternative, Import, ModalityRouter, TensorSource, TensorStep, canonical_sources,
};
use moesaic_spec::{Chooser, FormatTensor, LayerSpec, TensorSpec, canonical_tensors};
use moesaic_tensor::{SourceError, Tensor, Tensors, WeightSource};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::Range;

/// The weights of one layer of a checkpoint, in canonical shape and the spec's element types.
/// Making a reader checks names, shapes and types, and reports all mismatches. The elements are
/// read on demand: by an engine one expert at a time, or by [`LayerReader::load`] all at once.
///
/// Weights that the file holds in the wanted form are borrowed from it without a copy. Others are
/// converted or reordered, and quantized ones decoded, for the requested rows only. Experts come as
/// codes if the spec asks for that.
pub struct LayerReader<'a> {
    weights: BTreeMap<String, Weight<'a>>,
    /// Matrices of experts as codes, by the name without its end: `experts.up`.
    codes: BTreeMap<String, CodeWeight<'a>>,
    /// Weights that come from elsewhere.
    given: Tensors<'static>,
}

impl fmt::Debug for LayerReader<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LayerReader")
            .field("weights", &self.weights.keys())
            .field("codes", &self.codes.keys())
            .finish_non_exhaustive()
    }
}

/// A canonical tensor of codes.
struct CodeTensor<'r, 'a> {
    of: &'r CodeWeight<'a>,
    tensor: FormatTensor,
}

impl<'a> LayerReader<'a> {
    /// Reads a layer with canonical names.
    ///
    /// With `experts.layout` `concat` or `interleaved`, the file's fused `gate_up` tensors are
    /// split. A set of experts without one has both tensors by name.
    ///
    /// # Errors
    ///
    /// [`WeightsError`] names the tensor, its actual and its expected form.
    /// [`WeightsError::Several`] lists all tensors that do not fit. [`WeightsError::Extra`] lists
    /// tensors of the file that the spec does not use.
    pub fn canonical(
        spec: &LayerSpec,
        checkpoint: &'a Checkpoint,
        options: LoadOptions,
    ) -> Result<LayerReader<'a>, WeightsError> {
        let sources = canonical_sources(spec);
        let reader = LayerReader::of_sources(spec, &sources, checkpoint, options)?;
        if options.allow_extra {
            return Ok(reader);
        }
        reader.check_extra(spec, &sources, checkpoint, checkpoint.names())
    }

    /// Reads one layer of a Hugging Face checkpoint. You may change the precision of the import's
    /// spec before.
    ///
    /// # Errors
    ///
    /// As [`LayerReader::canonical`]. Extra are tensors in the layer's own MoE block that
    /// config.json does not use.
    pub fn of_import(
        import: &Import,
        checkpoint: &'a Checkpoint,
        options: LoadOptions,
    ) -> Result<LayerReader<'a>, WeightsError> {
        let (spec, sources) = (&import.spec, &import.sources);
        let reader = LayerReader::of_sources(spec, sources, checkpoint, options)?;
        if options.allow_extra {
            return Ok(reader);
        }
        let judged = checkpoint.names().filter(|name| import.owns(name));
        let routers = import.routers.iter().flat_map(|router| &router.sources);
        let all: Vec<TensorSource> = sources.iter().chain(routers).cloned().collect();
        reader.check_extra(spec, &all, checkpoint, judged)
    }

    /// Reads the routers that tokens of some modality have instead of the layer's own, in the order
    /// of [`Import::routers`]: of each the weights whose names begin with `router.`.
    ///
    /// # Errors
    ///
    /// The same as [`LayerReader::canonical`].
    pub fn of_routers(
        import: &Import,
        checkpoint: &'a Checkpoint,
        options: LoadOptions,
    ) -> Result<Vec<LayerReader<'a>>, WeightsError> {
        let mut tensors = canonical_tensors(&import.spec);
        tensors.retain(|tensor| tensor.name.starts_with("router."));
        let read = |router: &ModalityRouter| {
            LayerReader::of_tensors(&import.spec, &tensors, &router.sources, checkpoint, options)
        };
        import.routers.iter().map(read).collect()
    }

    /// Reads the weights of `spec`, each by its recipe in `sources`.
    ///
    /// Other tensors of the checkpoint are ignored: only [`LayerReader::canonical`] and
    /// [`LayerReader::of_import`] know which ones belong to the layer.
    ///
    /// # Errors
    ///
    /// The same as [`LayerReader::canonical`].
    pub fn of_sources(
        spec: &LayerSpec,
        sources: &[TensorSource],
        checkpoint: &'a Checkpoint,
        options: LoadOptions,
    ) -> Result<LayerReader<'a>, WeightsError> {
        LayerReader::of_tensors(spec, &canonical_tensors(spec), sources, checkpoint, options)
    }

    /// Reads these tensors of a layer.
    pub(crate) fn of_tensors(
        spec: &LayerSpec,
        tensors: &[TensorSpec],
        sources: &[TensorSource],
        checkpoint: &'a Checkpoint,
        options: LoadOptions,
    ) -> Result<LayerReader<'a>, WeightsError> {
        let find = |tensor: &TensorSpec| -> Result<Fits<'a>, WeightsError> {
            let source = sources.iter().find(|source| source.name == tensor.name);
            let alternatives = source.map_or(&[][..], |source| &source.alternatives);
            let finder = Finder {
                spec,
                checkpoint,
                options,
                tensor,
            };
            finder.weight(alternatives)
        };
        // Recipes of published checkpoints make numbers. Files with canonical names have the codes.
        let made = sources
            .iter()
            .all(|source| source.name != "experts.up.scale");
        let wanted = if made {
            numbers_of(spec, tensors)
        } else {
            tensors.to_vec()
        };
        let (mut found, mut wrong) = (Vec::new(), Vec::new());
        for tensor in &wanted {
            match find(tensor) {
                Ok(fits) => found.push((tensor.name.clone(), fits)),
                Err(error) => wrong.push(error),
            }
        }
        let transposed = orientation(found.iter().map(|(_, fits)| fits));
        let (mut weights, mut codes) = (BTreeMap::new(), BTreeMap::new());
        for (name, fits) in found {
            let format = spec.precision.format_of(&name).filter(|_| made);
            let read = fits.decide(transposed);
            let read = match (format, matrix_of(&name)) {
                (Some(format), Some(matrix)) => read
                    .and_then(|weight| CodeWeight::new(weight, format))
                    .map(|weight| drop(codes.insert(matrix.to_string(), weight))),
                _ => read.map(|weight| drop(weights.insert(name, weight))),
            };
            if let Err(error) = read {
                wrong.push(error);
            }
        }
        if wrong.is_empty() {
            Ok(LayerReader {
                weights,
                codes,
                given: Tensors::new(),
            })
        } else {
            Err(WeightsError::all(wrong))
        }
    }

    /// Refuses tensors of the file that are `judged` to be the layer's and that no recipe reads.
    fn check_extra<'n>(
        self,
        spec: &LayerSpec,
        sources: &[TensorSource],
        checkpoint: &Checkpoint,
        judged: impl Iterator<Item = &'n str>,
    ) -> Result<LayerReader<'a>, WeightsError> {
        let alternatives = sources.iter().flat_map(|source| &source.alternatives);
        let known: BTreeSet<String> = alternatives.flat_map(names_read).collect();
        // With an external router, ids and weights come with each call, and the file may still hold
        // the router's tensors. Trained layers may also keep optimizer state beside their weights.
        let external = spec.router.kind.chooser() == Chooser::Caller;
        let beside = |name: &str| {
            name.starts_with("optimizer.") || (external && name.starts_with("router."))
        };
        let strays = judged.filter(|name| !known.contains(*name) && !beside(name));
        let tensors: Vec<String> = strays.map(|name| stray(name, spec)).collect();
        if tensors.is_empty() {
            return Ok(self);
        }
        let path = checkpoint.path().to_path_buf();
        Err(WeightsError::Extra { path, tensors })
    }

    /// Returns a reader of weights in memory, such as random ones.
    pub fn in_memory(given: Tensors<'static>) -> LayerReader<'a> {
        LayerReader {
            weights: BTreeMap::new(),
            codes: BTreeMap::new(),
            given,
        }
    }

    /// This reader with a weight that comes from elsewhere, such as the table of a replayed router.
    #[must_use]
    pub fn with(mut self, name: &str, tensor: Tensor<'static>) -> LayerReader<'a> {
        self.given.insert(name.to_string(), tensor);
        self
    }

    /// Returns the file's tensors that the weights are made from; codes without their scales.
    pub fn tensors(&self) -> impl Iterator<Item = TensorRef<'a>> + '_ {
        let codes = self.codes.values().map(CodeWeight::numbers);
        let parts = self.weights.values().chain(codes);
        let parts = parts.flat_map(|weight| &weight.parts);
        parts.map(|part| part.from)
    }

    /// Returns the weights as they are found, by name. A matrix of codes is under the name of its
    /// codes.
    pub(crate) fn found(self) -> BTreeMap<String, Weight<'a>> {
        self.weights
    }

    /// Returns a tensor of codes.
    fn code_tensor(&self, name: &str) -> Option<CodeTensor<'_, 'a>> {
        let of = self.codes.get(matrix_of(name)?)?;
        let tensor = of.tensor(name.rsplit('.').next()?)?;
        Some(CodeTensor { of, tensor })
    }

    /// Returns the weights in which values became zero or infinite because the layer's element type
    /// has a smaller range than the file's. It counts the rows read so far.
    pub fn rounded(&self) -> Vec<Rounded> {
        let each = self.weights.iter();
        each.filter_map(|(name, weight)| weight.rounded(name))
            .collect()
    }

    /// Loads all weights. Those that need no conversion stay in the file; see
    /// [`load_canonical`](crate::load_canonical) for the consequences.
    ///
    /// # Errors
    ///
    /// [`WeightsError::BadValue`] if a table names an expert that does not exist.
    pub fn load(&self) -> Result<Tensors<'static>, WeightsError> {
        let each = self.weights.iter();
        let mut all = each
            .map(|(name, weight)| Ok((name.clone(), weight.whole()?)))
            .collect::<Result<Tensors<'static>, WeightsError>>()?;
        for (matrix, codes) in &self.codes {
            for tensor in codes.tensors() {
                all.insert(format!("{matrix}.{}", tensor.end), codes.whole(&tensor)?);
            }
        }
        all.extend(self.given.clone());
        Ok(all)
    }
}

/// Returns the names of all tensors that an alternative may read, codes and scales included.
fn names_read(alternative: &Alternative) -> Vec<String> {
    let mut names = alternative.names();
    if let Some(TensorStep::Dequantize(codes)) = alternative.steps.first() {
        let of_codes: Vec<String> = names.iter().flat_map(|name| codes.names(name)).collect();
        names.extend(of_codes);
    }
    names
}

/// Returns true if the file's experts are transposed, judged by the tensors whose shapes tell.
/// `None` if none tells or they disagree.
fn orientation<'a: 'f, 'f>(found: impl Iterator<Item = &'f Fits<'a>>) -> Option<bool> {
    let mut said = found.filter_map(Fits::says_transposed);
    let first = said.next()?;
    said.all(|other| other == first).then_some(first)
}

impl WeightSource for LayerReader<'_> {
    fn describe(&self, name: &str) -> Option<(DType, Vec<usize>)> {
        if let Some(given) = self.given.get(name) {
            return Some((given.dtype, given.shape.clone()));
        }
        if let Some(CodeTensor { of, tensor }) = self.code_tensor(name) {
            return Some((tensor.dtype, of.shape(&tensor, of.experts())));
        }
        let weight = self.weights.get(name)?;
        Some((weight.dtype, weight.shape.clone()))
    }

    fn rows(&self, name: &str, rows: Range<usize>) -> Result<Tensor<'_>, SourceError> {
        if let Some(given) = self.given.get(name) {
            return Ok(given.rows(rows)?);
        }
        if let Some(CodeTensor { of, tensor }) = self.code_tensor(name) {
            return Ok(of.rows(&tensor, rows)?);
        }
        let weight = self.weights.get(name);
        let weight = weight.ok_or_else(|| format!("the layer has no weight `{name}`"))?;
        Ok(weight.rows(rows)?)
    }
}
