//! `run --grad`: forward as in training, then backward.

use super::input::Tokens;
use super::{host, outputs};
use crate::failure::Result;
use crate::training::RecomputeArg;
use clap::Args;
use moesaic::weights::HostWeights;
use moesaic::{Counters, Layer, Training};

/// What belongs to `--grad`.
#[derive(Args, Debug)]
pub struct GradArgs {
    /// Run as in training and also compute gradients: the input holds `dy [tokens, output_dim]` too
    #[arg(long)]
    pub grad: bool,
    /// What backward computes again instead of keeping it; gradients are the same
    #[arg(long, value_name = "WHAT", default_value = "none", requires = "grad")]
    recompute: RecomputeArg,
    /// Key of the random numbers of noise and jitter
    #[arg(long, value_name = "N", default_value_t = 0, requires = "grad")]
    seed: u64,
    /// The training step, for the random numbers
    #[arg(long, value_name = "N", default_value_t = 0, requires = "grad")]
    step: u64,
}

impl GradArgs {
    pub fn training(&self) -> Training {
        self.recompute.training()
    }

    fn counters(&self) -> Counters {
        Counters {
            seed: self.seed,
            step: self.step,
            ..Counters::default()
        }
    }
}

/// Results of both passes: those of forward, `dx`, and `grad.<name>` of every
/// weight, in f32.
pub fn train(layer: &Layer, tokens: &Tokens<'_>, args: &GradArgs) -> Result<HostWeights> {
    let names = outputs(layer);
    let (output, saved) = layer.forward_train(&tokens.input(), &names, args.counters())?;
    let dy = tokens.get("dy").expect("read with --grad");
    let gradients = layer.backward(&saved, dy, false)?;
    let both = output.into_tensors().into_iter();
    let both = both.chain(gradients.into_tensors());
    let mut results: HostWeights = both.map(|(name, t)| (name, host(t))).collect();
    for (name, gradient) in layer.gradients()? {
        results.insert(format!("grad.{name}"), host(gradient));
    }
    Ok(results)
}
