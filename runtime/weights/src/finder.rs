//! The search for a weight in a checkpoint, as data.

use crate::{Checkpoint, LoadOptions};
use moesaic_spec::{LayerSpec, TensorSpec};

/// The context of the search for one weight.
pub(crate) struct Finder<'a, 's> {
    pub spec: &'s LayerSpec,
    pub checkpoint: &'a Checkpoint,
    pub options: LoadOptions,
    pub tensor: &'s TensorSpec,
}
