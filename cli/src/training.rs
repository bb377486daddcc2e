//! What a layer is made for: inference, or training with what backward
//! computes again.

use clap::{Args, ValueEnum};
use moesaic::{Recompute, Training};

/// `--training [WHAT]`.
#[derive(Args, Clone, Copy, Debug)]
pub struct TrainingArgs {
    /// The kernels of training, forward and backward; WHAT is what backward computes again instead
    /// of keeping it
    #[arg(long, value_name = "WHAT", num_args = 0..=1, default_missing_value = "none")]
    training: Option<RecomputeArg>,
}

impl TrainingArgs {
    /// How the layer is trained, if it is.
    pub fn get(self) -> Option<Training> {
        self.training.map(RecomputeArg::training)
    }
}

/// What backward computes again.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum RecomputeArg {
    /// Nothing
    None,
    /// What enters the activations
    Hidden,
    /// Routing too
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
