//! The passes of `run`: evaluation, training, or routing alone.

use super::input::Tokens;
use crate::failure::Result;
use crate::training::RecomputeArg;
use clap::Args;
use moesaic::reference::rng::Draw;
use moesaic::spec::{Capacity, canonical_tensors};
use moesaic::{EngineError, Input, Layer, RngKey, Tensor, Tensors, Training};

/// The options that choose the pass and its parameters.
#[derive(Args, Debug)]
pub struct PassArgs {
    /// Run forward as in training: draw noise and compute losses
    #[arg(long, group = "trains")]
    training: bool,
    /// As --training, and also compute gradients: the input holds `dy [tokens, output_dim]` too
    #[arg(long, group = "trains")]
    pub grad: bool,
    /// The values that backward recomputes instead of keeping them; gradients are the same
    #[arg(long, value_name = "WHAT", default_value = "none", requires = "grad", conflicts_with_all = ["training", "routing_only"])]
    recompute: RecomputeArg,
    /// Key of the random numbers for noise and jitter
    #[arg(long, value_name = "N", default_value_t = 0, requires = "trains")]
    seed: u64,
    /// The training step, for the random numbers
    #[arg(long, value_name = "N", default_value_t = 0, requires = "trains")]
    step: u64,
    /// Only decide which experts each token goes to: the output holds no `y` and no losses
    #[arg(long, conflicts_with = "grad")]
    routing_only: bool,
    /// The capacity factor of this run instead of the spec's, for modes factor and bounded
    #[arg(long, value_name = "F", allow_negative_numbers = true)]
    pub capacity_factor: Option<f64>,
}

/// Results that are written if the pass gives them.
const RESULTS: [&str; 6] = [
    "y",
    "router.logits",
    "topk_ids",
    "topk_weights",
    "counts",
    "locations",
];

/// Results of a layer with a capacity. Without one, `locations` goes into the routing record only.
const PLACES: [&str; 2] = ["capacity", "overflow"];

impl PassArgs {
    /// Returns the training options, if the layer is trained.
    pub fn training(&self) -> Option<Training> {
        let trains = self.training || self.grad;
        trains.then(|| self.recompute.training())
    }

    /// Returns whether losses are computed, which means that their inputs are read.
    pub fn has_losses(&self) -> bool {
        self.training().is_some() && !self.routing_only
    }

    /// Returns the options that must be the same on all ranks, by name.
    pub fn words(&self) -> [(&'static str, String); 5] {
        let pass = match (self.grad, self.training) {
            (true, _) => "--grad",
            (false, true) => "--training",
            (false, false) => "evaluation",
        };
        let factor = self.capacity_factor.map(|factor| factor.to_string());
        [
            ("the pass", pass.to_string()),
            (
                "--recompute",
                format!("{:?}", self.recompute).to_lowercase(),
            ),
            ("--seed", self.seed.to_string()),
            ("--step", self.step.to_string()),
            (
                "--capacity-factor",
                factor.unwrap_or("the spec's".to_string()),
            ),
        ]
    }

    /// Refuses a capacity factor that the layer cannot have.
    pub fn check_factor(&self, capacity: &Capacity) -> Result {
        let Some(factor) = self.capacity_factor else {
            return Ok(());
        };
        let checked = capacity.check_factor(factor);
        Ok(checked.map_err(|problem| moesaic::EngineError::Capacity { factor, problem })?)
    }

    fn rng_key(&self) -> RngKey {
        RngKey {
            seed: self.seed,
            step: self.step,
            ..RngKey::default()
        }
    }

    /// Returns the random numbers for the reference, if any are drawn.
    pub fn draw(&self) -> Option<Draw> {
        let RngKey { seed, step, .. } = self.rng_key();
        self.training().map(|_| Draw {
            seed,
            step,
            ..Draw::default()
        })
    }

    /// Runs the pass and returns its results by name.
    pub fn run(&self, layer: &Layer, tokens: &Tokens<'_>) -> Result<Tensors<'static>> {
        let (input, names) = (tokens.input(), self.outputs(layer));
        if let (true, Some(dy)) = (self.grad, tokens.get("dy")) {
            return gradients(layer, &input, &names, self.rng_key(), dy);
        }
        let output = match (self.training().is_some(), self.routing_only) {
            (false, false) => layer.forward(input.reading(&names))?,
            (false, true) => layer.route(input.reading(&names))?,
            (true, false) => {
                layer
                    .forward_train(input.reading(&names), self.rng_key())?
                    .0
            }
            (true, true) => layer.route(input.reading(&names).in_training(self.rng_key()))?,
        };
        Ok(output.into_tensors())
    }

    /// Runs the pass for a rank's tokens. Gradients of weights are those of all ranks. In a layer
    /// that drops nothing, locations take a pass over the tokens of all ranks, so they are computed
    /// only if they are `recorded`.
    pub fn run_on_rank(
        &self,
        layer: &Layer,
        tokens: &Tokens<'_>,
        recorded: bool,
    ) -> Result<Tensors<'static>> {
        let (input, mut names) = (tokens.input(), self.outputs(layer));
        if !recorded && layer.tensor("capacity").is_none() {
            names.retain(|name| *name != "locations");
        }
        let output = match (self.training().is_some(), self.routing_only) {
            (false, false) => layer.forward(input.reading(&names))?,
            (false, true) => layer.route(input.reading(&names))?,
            (true, false) => return self.train_on_rank(layer, tokens, &names),
            (true, true) => layer.route(input.reading(&names).in_training(self.rng_key()))?,
        };
        Ok(output.into_tensors())
    }

    fn train_on_rank(
        &self,
        layer: &Layer,
        tokens: &Tokens<'_>,
        names: &[&str],
    ) -> Result<Tensors<'static>> {
        let input = tokens.input();
        let (output, saved) = layer.forward_train(input.reading(names), self.rng_key())?;
        let mut results = output.into_tensors();
        if let (true, Some(dy)) = (self.grad, tokens.get("dy")) {
            results.extend(layer.backward(&saved, dy, false)?.into_tensors());
            layer.reduce_gradients()?;
            // Ranks gather each name together, so every rank lists every gradient, also one that
            // another rank updates.
            for weight in canonical_tensors(layer.spec()) {
                match layer.gradient(&weight.name) {
                    Ok(gradient) => {
                        results.insert(format!("grad.{}", weight.name), gradient);
                    }
                    Err(EngineError::NoOutput { .. } | EngineError::Frozen { .. }) => {}
                    Err(error) => return Err(error.into()),
                }
            }
        }
        Ok(results)
    }

    /// Returns the names of the results that the pass gives.
    fn outputs<'l>(&self, layer: &'l Layer) -> Vec<&'l str> {
        let plan = layer.plan();
        let limited = plan.tensor("capacity").is_some();
        let places = PLACES.into_iter().filter(|_| limited);
        let named = RESULTS
            .into_iter()
            .filter(|name| *name != "y" || !self.routing_only);
        let named = named
            .chain(places)
            .filter(|name| plan.tensor(name).is_some());
        let losses = plan.tensors.iter().map(|tensor| tensor.name.as_str());
        let losses = losses.filter(|name| name.starts_with("loss.") && !self.routing_only);
        named.chain(losses).collect()
    }
}

/// Returns the results of both passes: those of forward, `dx`, and `grad.<name>` of every weight,
/// in f32.
fn gradients(
    layer: &Layer,
    input: &Input<'_>,
    names: &[&str],
    rng_key: RngKey,
    dy: &Tensor<'_>,
) -> Result<Tensors<'static>> {
    let (output, saved) = layer.forward_train(input.reading(names), rng_key)?;
    let gradients = layer.backward(&saved, dy, false)?;
    let mut results = output.into_tensors();
    results.extend(gradients.into_tensors());
    for (name, gradient) in layer.gradients()? {
        results.insert(format!("grad.{name}"), gradient);
    }
    Ok(results)
}
