//! The decisions that a run takes from a file: a routing record of a run, or the experts that a
//! serving engine chose.

use super::RunArgs;
use crate::failure::{Failure, Result};
use crate::spec_source::SpecSource;
use moesaic::train::replay::{self, RoutedExperts};
use std::path::Path;

/// The decisions of a file that replace the router's.
pub enum ReplaySource<'p> {
    /// Ids and weights of every token, in a file that `--record` wrote.
    Routing(&'p Path),
    /// Ids alone; the weights follow from the router's logits.
    Experts(Box<replay::Replay>),
}

/// Returns whether a file is, or becomes, vLLM's array and not a record of our own.
pub fn is_array(path: &Path) -> bool {
    path.extension().is_some_and(|end| end == "npy")
}

impl RunArgs {
    /// Returns the decisions that replace the router's. Only an array is read here.
    pub(super) fn replay(&self, source: &SpecSource) -> Result<Option<ReplaySource<'_>>> {
        let Some(path) = &self.replay else {
            return Ok(None);
        };
        if !is_array(path) {
            return match self.replay_layer {
                None => Ok(Some(ReplaySource::Routing(path))),
                Some(_) => Err(Failure::input(
                    "--replay-layer names a layer of an .npy record, and --replay is none",
                )),
            };
        }
        let wrong = |error| Failure::input(format!("--replay {}: {error}", path.display()));
        let record = RoutedExperts::read(path).map_err(Failure::input)?;
        let layer = self.recorded_layer(&record, source)?;
        let replayed = record.replay(&source.spec, layer).map_err(wrong)?;
        Ok(Some(ReplaySource::Experts(Box::new(replayed))))
    }

    /// Returns the layer of a record that this layer is.
    fn recorded_layer(&self, record: &RoutedExperts, source: &SpecSource) -> Result<usize> {
        let layers = record.shape().layers;
        match (self.replay_layer, layers) {
            (Some(layer), _) => Ok(layer),
            (None, 1) => Ok(0),
            (None, _) => {
                // vLLM counts the model's dense layers, too, and so does `--layer`.
                let own = source.import.as_ref().and(self.layer.layer);
                own.ok_or_else(|| {
                    Failure::input(format!("the record has {layers} layers"))
                        .hint("name one by --replay-layer")
                })
            }
        }
    }
}

/// Writes the ids of a run as a record of one layer.
pub fn write_array(path: &Path, [tokens, experts, top_k]: [usize; 3], ids: Vec<i32>) -> Result {
    let record = RoutedExperts::of_layers(tokens, top_k, &[ids]);
    let element = replay::IdType::for_experts(experts);
    let written = record.and_then(|record| record.write(path, element));
    written.map_err(Failure::work)
}
