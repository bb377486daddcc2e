//! The layer that handles and graphs share.

use crate::weights::Weights;
use moesaic::Layer;
use std::sync::Mutex;

/// The compiled layer with its weights. Gradients lie in it, so one pass uses it at a time.
pub struct Inner {
    pub layer: Layer,
    pub weights: Weights,
    pub turn: Mutex<()>,
}
