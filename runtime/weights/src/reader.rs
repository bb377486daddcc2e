//! A layer of a checkpoint, read when its weights are asked for.

use crate::recipe::{Finder, Fits};
use crate::stray::stray;
use crate::weight::{Rounded, Weight};
use crate::{Checkpoint, LoadOptions, TensorRef, WeightsError};
use moesaic_kernel::DType;
use moesaic_spec::hf::{Alternative, Import, Step, TensorSource, canonical_sources};
use moesaic_spec::{LayerSpec, RouterKind, TensorSpec, canonical_tensors};
use moesaic_tensor::{SourceError, Tensor, Tensors, WeightSource};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// The weights of one layer of a checkpoint, in canonical shape and the spec's
/// element types. Making one reads names, shapes and types, and says what does not
/// fit; elements are read when they are asked for, by an engine that makes a layer
/// a piece at a time, by [`LayerReader::load`] all at once.
///
/// What lies in the file as the layer wants it is lent from there and not copied;
/// what has another type or another order is converted, and codes with scales become
/// numbers, so far as they are asked for.
pub struct LayerReader<'a> {
    weights: BTreeMap<String, Weight<'a>>,
}

impl<'a> LayerReader<'a> {
    /// A layer with canonical names.
    ///
    /// With `experts.layout` `concat` or `interleaved` the file's `gate_up`
    /// tensors are taken apart; a set of experts without one has both by name.
    ///
    /// # Errors
    ///
    /// [`WeightsError`] names the tensor, what it is and what was expected;
    /// [`WeightsError::Several`] all of them, where several do not fit;
    /// [`WeightsError::Extra`] tensors of the file that the spec has no use for.
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

    /// One layer of a Hugging Face checkpoint. You may change the precision of the import's spec
    /// before.
    ///
    /// # Errors
    ///
    /// As [`LayerReader::canonical`]; extra are tensors in the layer's own MoE block that
    /// config.json has no use for.
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
        reader.check_extra(spec, sources, checkpoint, judged)
    }

    /// The weights of `spec`, each put together by its recipe in `sources`.
    ///
    /// Other tensors of the checkpoint are ignored: only [`LayerReader::canonical`] and
    /// [`LayerReader::of_import`] know which of them are the layer's.
    ///
    /// # Errors
    ///
    /// As [`LayerReader::canonical`].
    pub fn of_sources(
        spec: &LayerSpec,
        sources: &[TensorSource],
        checkpoint: &'a Checkpoint,
        options: LoadOptions,
    ) -> Result<LayerReader<'a>, WeightsError> {
        LayerReader::of_tensors(spec, &canonical_tensors(spec), sources, checkpoint, options)
    }

    /// These tensors of a layer.
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
        let (mut found, mut wrong) = (Vec::new(), Vec::new());
        for tensor in tensors {
            match find(tensor) {
                Ok(fits) => found.push((tensor.name.clone(), fits)),
                Err(error) => wrong.push(error),
            }
        }
        let transposed = orientation(found.iter().map(|(_, fits)| fits));
        let mut weights = BTreeMap::new();
        for (name, fits) in found {
            match fits.decide(transposed) {
                Ok(weight) => drop(weights.insert(name, weight)),
                Err(error) => wrong.push(error),
            }
        }
        if wrong.is_empty() {
            Ok(LayerReader { weights })
        } else {
            Err(WeightsError::all(wrong))
        }
    }

    /// Refuses tensors of the file that are `judged` and that no recipe knows.
    fn check_extra<'n>(
        self,
        spec: &LayerSpec,
        sources: &[TensorSource],
        checkpoint: &Checkpoint,
        judged: impl Iterator<Item = &'n str>,
    ) -> Result<LayerReader<'a>, WeightsError> {
        let alternatives = sources.iter().flat_map(|source| &source.alternatives);
        let known: BTreeSet<String> = alternatives.flat_map(names_read).collect();
        // Ids and weights that come with each call take the place of a router: it may be there.
        // So may an optimizer's state, which trained layers have beside their weights.
        let external = spec.router.kind == RouterKind::External;
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

    /// The tensors of the file that the weights are made of; codes without their scales.
    pub fn tensors(&self) -> impl Iterator<Item = TensorRef<'a>> + '_ {
        let parts = self.weights.values().flat_map(|weight| &weight.parts);
        parts.map(|part| part.from)
    }

    /// The weights whose values became zero or infinite because the layer's element type has a
    /// smaller range than the file's, as far as they were read.
    pub fn rounded(&self) -> Vec<Rounded> {
        let each = self.weights.iter();
        each.filter_map(|(name, weight)| weight.rounded(name))
            .collect()
    }

    /// All weights. Those that the file has as they should be stay there; see
    /// [`load_canonical`](crate::load_canonical) for what that asks of the file.
    ///
    /// # Errors
    ///
    /// [`WeightsError::BadValue`] for a table that names an expert that does not
    /// exist.
    pub fn load(&self) -> Result<Tensors<'static>, WeightsError> {
        let each = self.weights.iter();
        each.map(|(name, weight)| Ok((name.clone(), weight.whole()?)))
            .collect()
    }
}

/// The names of all tensors that an alternative may read, those of codes and scales included.
fn names_read(alternative: &Alternative) -> Vec<String> {
    let mut names = alternative.names();
    if let Some(Step::Dequantize(codes)) = alternative.steps.first() {
        let of_codes: Vec<String> = names.iter().flat_map(|name| codes.names(name)).collect();
        names.extend(of_codes);
    }
    names
}

/// Whether the file's experts are transposed, as the tensors say whose shapes tell: nothing if
/// none tells or they disagree.
fn orientation<'a: 'f, 'f>(found: impl Iterator<Item = &'f Fits<'a>>) -> Option<bool> {
    let mut said = found.filter_map(Fits::says_transposed);
    let first = said.next()?;
    said.all(|other| other == first).then_some(first)
}

impl WeightSource for LayerReader<'_> {
    fn describe(&self, name: &str) -> Option<(DType, Vec<usize>)> {
        let weight = self.weights.get(name)?;
        Some((weight.dtype, weight.shape.clone()))
    }

    fn rows(&self, name: &str, rows: Range<usize>) -> Result<Tensor<'_>, SourceError> {
        let weight = self.weights.get(name);
        let weight = weight.ok_or_else(|| format!("the layer has no weight `{name}`"))?;
        Ok(weight.rows(rows)?)
    }
}
