//! A layer of a checkpoint, read when its weights are asked for.

use crate::recipe::Finder;
use crate::weight::Weight;
use crate::{Checkpoint, LoadOptions, WeightsError};
use moesaic_kernel::DType;
use moesaic_spec::hf::{Import, TensorSource, canonical_sources};
use moesaic_spec::{LayerSpec, TensorSpec, canonical_tensors};
use moesaic_tensor::{SourceError, Tensor, Tensors, WeightSource};
use std::collections::BTreeMap;
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
    /// [`WeightsError::Several`] all of them, where several do not fit.
    pub fn canonical(
        spec: &LayerSpec,
        checkpoint: &'a Checkpoint,
        options: LoadOptions,
    ) -> Result<LayerReader<'a>, WeightsError> {
        LayerReader::of_sources(spec, &canonical_sources(spec), checkpoint, options)
    }

    /// One layer of a Hugging Face checkpoint.
    ///
    /// # Errors
    ///
    /// As [`LayerReader::canonical`].
    pub fn of_import(
        import: &Import,
        checkpoint: &'a Checkpoint,
        options: LoadOptions,
    ) -> Result<LayerReader<'a>, WeightsError> {
        LayerReader::of_sources(&import.spec, &import.sources, checkpoint, options)
    }

    /// The weights of `spec`, each put together by its recipe in `sources`.
    ///
    /// Use this instead of [`LayerReader::of_import`] when the spec's precision was
    /// changed after the import.
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
        let find = |tensor: &TensorSpec| -> Result<Weight<'a>, WeightsError> {
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
        let (mut weights, mut wrong) = (BTreeMap::new(), Vec::new());
        for tensor in tensors {
            match find(tensor) {
                Ok(weight) => drop(weights.insert(tensor.name.clone(), weight)),
                Err(error) => wrong.push(error),
            }
        }
        if wrong.is_empty() {
            Ok(LayerReader { weights })
        } else {
            Err(WeightsError::all(wrong))
        }
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
