//! Errors of router replay.

use std::path::PathBuf;

/// The reason a record cannot be read, written or replayed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReplayError {
    /// The file cannot be read or written.
    #[error("{}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: std::io::Error,
    },
    /// The bytes are not an array of ids.
    #[error("not a record of routed experts: {0}")]
    Format(String),
    /// The number of ids is another than the sizes say.
    #[error("{found} expert ids are not [tokens, layers, top_k] = {wanted:?}")]
    Count {
        /// The sizes.
        wanted: [usize; 3],
        /// The number of ids.
        found: usize,
    },
    /// The layer is not in the record.
    #[error("the record has layers 0 to {} and not {layer}", .layers.saturating_sub(1))]
    Layer {
        /// The layer asked for.
        layer: usize,
        /// The layers of the record.
        layers: usize,
    },
    /// The record has another number of experts for each token.
    #[error("the record has {found} experts for each token, and the layer has top_k = {wanted}")]
    TopK {
        /// The layer's.
        wanted: usize,
        /// The record's.
        found: usize,
    },
    /// An id is not one of an expert, or too large for the type.
    #[error("token {token}, layer {layer}: expert {id} is not from 0 to {}", .experts - 1)]
    Expert {
        /// The token.
        token: usize,
        /// The layer in the record.
        layer: usize,
        /// The id.
        id: i64,
        /// The number of experts that there are.
        experts: usize,
    },
    /// A token has the same expert twice.
    #[error("token {token}, layer {layer}: expert {id} is there twice")]
    Twice {
        /// The token.
        token: usize,
        /// The layer in the record.
        layer: usize,
        /// The id.
        id: i32,
    },
    /// The layer is not valid with a table of this many tokens.
    #[error("the layer cannot be replayed: {0}")]
    Spec(String),
    /// The weights of this router do not follow from the experts alone.
    #[error(
        "router.{key} = {value} cannot be replayed: {because}; a linear router that takes the \
         best scores without noise can"
    )]
    Router {
        /// The key of the spec.
        key: &'static str,
        /// Its value.
        value: String,
        /// The reason.
        because: &'static str,
    },
}
