//! The purpose of a layer: inference, or training with an amount of recomputation in backward.

use clap::{Args, ValueEnum};
use moesaic::{Recompute, Training};

/// The option `--training [WHAT]`.
#[derive(Args, Clone, Copy, Debug)]
pub struct TrainingArgs {
    /// Use the kernels of training, forward and backward; WHAT is recomputed in backward instead of
    /// kept
    #[arg(long, value_name = "WHAT", num_args = 0..=1, default_missing_value = "none")]
    training: Option<RecomputeArg>,
}

impl TrainingArgs {
    /// Returns the training options, if the layer is trained.
    pub fn get(self) -> Option<Training> {
        self.training.map(RecomputeArg::training)
    }
}

/// The values that backward recomputes.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum RecomputeArg {
    /// Nothing
    None,
    /// The inputs of the activations
    Hidden,
    /// The inputs of the activations, and routing
    All,
}

impl RecomputeArg {
    pub fn training(self) -> Training {
        let recompute = match self {
            RecomputeArg::None => Recompute::None,
            RecomputeArg::Hidden => Recompute::Hidden,
            RecomputeArg::All => Recompute::All,
        };
        Training { recompute }
    }
}
