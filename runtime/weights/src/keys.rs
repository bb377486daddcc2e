//! Layers of other libraries.

use crate::recipe::listed;
use crate::{Checkpoint, LayerReader, LoadOptions, WeightsError};
use moesaic_spec::hf::TensorSource;
use moesaic_spec::keys::{CheckpointLibrary, Keys, rank_tensors};
use moesaic_spec::{Chooser, LayerSpec};
use moesaic_tensor::Tensors;
use std::collections::HashSet;

/// The choice of a layer in a state dictionary. A field that is `None` is found automatically if
/// there is only one candidate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyOptions {
    /// The library that wrote it.
    pub library: CheckpointLibrary,
    /// The prefix of the layer's names: `blocks.3.moe`.
    pub prefix: Option<String>,
    /// The index of Tutel's gate.
    pub gate: Option<usize>,
}

/// Loads all tensors of one layer of a state dictionary: [`LayerReader::of_keys`], loaded.
///
/// # Errors
///
/// The same as [`LayerReader::of_keys`].
pub fn load_keys(
    spec: &LayerSpec,
    share: usize,
    chosen: &KeyOptions,
    checkpoint: &Checkpoint,
    options: LoadOptions,
) -> Result<Tensors<'static>, WeightsError> {
    LayerReader::of_keys(spec, share, chosen, checkpoint, options)?.load()
}

impl<'a> LayerReader<'a> {
    /// Opens one layer in another library's state dictionary. It holds `share` of the spec's
    /// experts: all, or those of one rank.
    ///
    /// # Errors
    ///
    /// As [`LayerReader::canonical`]. [`WeightsError::Keys`] if the layer is missing or ambiguous,
    /// if the library has no name for a tensor of the spec, or if the layer has a tensor that the
    /// spec lacks, since that would be another function.
    pub fn of_keys(
        spec: &LayerSpec,
        share: usize,
        chosen: &KeyOptions,
        checkpoint: &'a Checkpoint,
        options: LoadOptions,
    ) -> Result<LayerReader<'a>, WeightsError> {
        let finder = Finder {
            library: chosen.library,
            checkpoint,
        };
        let mut keys = Keys {
            library: chosen.library,
            prefix: finder.prefix(chosen.prefix.as_deref())?,
            gate: 0,
        };
        keys.gate = finder.gate(&keys, chosen.gate, spec)?;
        let tensors = rank_tensors(spec, share);
        let sources = keys.sources(spec, &tensors);
        finder.check_names(&sources)?;
        finder.check_count(&keys, spec.shape.experts)?;
        let layer = LayerReader::of_tensors(spec, &tensors, &sources, checkpoint, options)?;
        if !options.allow_extra {
            let read = sources.iter().flat_map(|source| &source.alternatives);
            finder.check_all_read(&keys, spec, read.flat_map(|a| a.names()).collect())?;
        }
        Ok(layer)
    }
}

/// A search for a library's layer in a checkpoint.
struct Finder<'a> {
    library: CheckpointLibrary,
    checkpoint: &'a Checkpoint,
}

impl Finder<'_> {
    fn error(&self, problem: String) -> WeightsError {
        WeightsError::Keys {
            path: self.checkpoint.path().to_path_buf(),
            library: self.library.name(),
            problem,
        }
    }

    fn prefix(&self, asked: Option<&str>) -> Result<String, WeightsError> {
        let found = self.library.prefixes(self.checkpoint.names());
        let shown: Vec<&str> = found.iter().map(|p| p.trim_end_matches('.')).collect();
        let shown = shown.join("`, `");
        match (asked, found.as_slice()) {
            (_, []) => {
                let marks = self.library.marks().join("` or `");
                Err(self.error(format!("no name ends with `{marks}`")))
            }
            (None, [only]) => Ok(only.clone()),
            (None, _) => Err(self.error(format!("there are several layers, name one: `{shown}`"))),
            (Some(asked), found) => {
                let asked = asked.trim_end_matches('.');
                let mut same = found.iter().filter(|p| p.trim_end_matches('.') == asked);
                let same = same.next().cloned();
                same.ok_or_else(|| self.error(format!("no layer `{asked}`, there are: `{shown}`")))
            }
        }
    }

    fn gate(
        &self,
        keys: &Keys,
        asked: Option<usize>,
        spec: &LayerSpec,
    ) -> Result<usize, WeightsError> {
        if self.library != CheckpointLibrary::Tutel || spec.router.kind.chooser() == Chooser::Caller
        {
            return match asked {
                Some(_) => Err(self.error("there is no gate to choose here".to_string())),
                None => Ok(0),
            };
        }
        let gates = keys.gates(self.checkpoint.names());
        match (asked, gates.as_slice()) {
            (Some(gate), gates) if gates.contains(&gate) => Ok(gate),
            (None, [only]) => Ok(*only),
            (_, []) => Err(self.error("the layer has no gate with weights".to_string())),
            (_, gates) => Err(self.error(format!("the layer has gates {gates:?}, name one"))),
        }
    }

    /// Checks that the library has a name for every tensor of the spec.
    fn check_names(&self, sources: &[TensorSource]) -> Result<(), WeightsError> {
        let mut sources = sources.iter();
        match sources.find(|source| source.alternatives.is_empty()) {
            None => Ok(()),
            Some(source) => {
                let problem = format!(
                    "such layers have no tensor for the spec's `{}`",
                    source.name
                );
                Err(self.error(problem))
            }
        }
    }

    /// Checks that the layer has as many experts as the spec.
    fn check_count(&self, keys: &Keys, whole: usize) -> Result<(), WeightsError> {
        let name = keys.count().filter(|name| self.checkpoint.has(name));
        let Some(name) = name else { return Ok(()) };
        let found = self.checkpoint.read(&name)?.to_f64();
        match found.as_slice() {
            [count] if *count == whole as f64 => Ok(()),
            other => Err(self.error(format!(
                "`{name}` is {other:?}, the spec has {whole} experts"
            ))),
        }
    }

    /// Checks that a recipe reads every tensor of the layer. One that is not read, such as a bias
    /// that the spec lacks, is part of what the layer computes.
    fn check_all_read(
        &self,
        keys: &Keys,
        spec: &LayerSpec,
        read: HashSet<String>,
    ) -> Result<(), WeightsError> {
        let owned = keys.owned(spec);
        let own = |name: &&str| owned.iter().any(|part| name.starts_with(part.as_str()));
        let names = self.checkpoint.names().filter(own);
        let strays = names.filter(|name| !read.contains(*name));
        let strays: Vec<String> = strays.map(str::to_string).collect();
        if strays.is_empty() {
            return Ok(());
        }
        Err(self.error(format!(
            "the layer has {}, the spec has no such tensor: change the spec (`bias = true` under \
             [experts] or [router] for biases), or allow extra tensors",
            listed(&strays)
        )))
    }
}
