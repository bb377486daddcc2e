//! The work of a run over ranks.

use super::input::Tokens;
use super::pass::PassArgs;
use moesaic::weights::LayerReader;
use moesaic::{Engine, LayerSpec};

/// The work that the ranks do together.
pub struct RankJob<'j> {
    pub engine: &'j Engine,
    pub spec: &'j LayerSpec,
    pub weights: &'j LayerReader<'j>,
    /// The choices that decide which weights are read, besides their file and the spec.
    pub reading: String,
    pub pass: &'j PassArgs,
    pub tokens: &'j Tokens<'j>,
    /// Whether a trace was requested.
    pub traced: bool,
    /// Whether a routing record was requested.
    pub recorded: bool,
    /// The options that `precompile` needs and an engine does not know.
    pub ahead: &'j str,
}
