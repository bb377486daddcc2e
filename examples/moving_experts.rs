//! Trains a layer while busy experts move to other ranks, with their optimizer state. A balancer
//! sees the rows of each step and decides when to move which experts. A second run without moves
//! learns the same.
//!
//! `cargo run --release --features train --example moving_experts`

use moesaic::collectives::{Call, threads};
use moesaic::mesh::{Balancer, Balancing, Eplb, Placement};
use moesaic::reference::Random;
use moesaic::spec::canonical_tensors;
use moesaic::train::balance::counts_of_all;
use moesaic::train::mesh::{MeshOptimizer, Scaling, parts, update_mesh};
use moesaic::train::{AdamW, masters, migrate};
use moesaic::{
    Engine, Input, Layer, LayerOptions, LayerSpec, Mesh, Parallel, RngKey, Tensor, Tensors,
    Training,
};
use std::error::Error;

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

const RANKS: usize = 4;
const EXPERTS: usize = 12;
/// Tokens per rank.
const TOKENS: usize = 64;
const WIDTH: usize = 16;
const STEPS: usize = 12;

const SPEC: &str = "
    shape = { model_dim = 16, hidden_dim = 32, experts = 12, top_k = 2 }
    router = { bias = true }
";

/// The numbers of a step, over all ranks.
#[derive(Debug)]
pub struct Step {
    /// The loss, a sum of squares.
    pub loss: f64,
    /// The rows of the busiest rank.
    pub busiest: f64,
    /// The placement of the experts.
    pub placement: Placement,
}

fn main() -> Result<()> {
    let engine = Engine::cpu()?;
    let [stay, move_on] = [run(&engine, false)?, run(&engine, true)?];
    println!("step   loss, experts stay   experts move   rows of the busiest rank: stay   move");
    for (number, (one, two)) in stay.iter().zip(&move_on).enumerate() {
        println!(
            "{number:4} {:20.6} {:14.6} {:31} {:6}   {}",
            one.loss, two.loss, one.busiest, two.busiest, two.placement
        );
    }
    Ok(())
}

/// Runs the steps, on ranks that are threads.
pub fn run(engine: &Engine, moves: bool) -> Result<Vec<Step>> {
    let device = |_| Ok(engine.device().clone());
    let ranks = threads::run(RANKS, device, |mut world| -> Result<Vec<Step>> {
        let parallel = Parallel {
            ep: RANKS,
            ..Parallel::default()
        };
        let mesh = Mesh::new(&mut world, parallel)?;
        let steps = train(engine, &mesh, moves)?;
        world.finish(&Call::new("end"))?;
        Ok(steps)
    })?;
    let mut first = Vec::new();
    for (rank, steps) in ranks.into_iter().enumerate() {
        let steps = steps.map_err(|_| format!("rank {rank} has panicked"))??;
        first = if rank == 0 { steps } else { first };
    }
    Ok(first)
}

fn train(engine: &Engine, mesh: &Mesh, moves: bool) -> Result<Vec<Step>> {
    let spec = LayerSpec::from_toml(SPEC)?;
    let whole = weights(&spec);
    let own = parts(mesh, &whole, whole.keys().map(String::as_str))?;
    let mut model = Model::new(engine, mesh, &spec, masters(&own))?;
    let eplb = Eplb {
        replicas: 4 * RANKS,
        expert_groups: 1,
        nodes: 1,
        ranks: RANKS,
    };
    let options = Balancing {
        patience: 2,
        rest: 3,
        ..Balancing::default()
    };
    let mut balancer = Balancer::new(EXPERTS, eplb, options);
    let mut placement = Placement::contiguous(RANKS, EXPERTS);
    let mut steps = Vec::new();
    for _ in 0..STEPS {
        let (loss, counts) = model.step(mesh.rank())?;
        let rows: Vec<f64> = counts.iter().map(|count| *count as f64).collect();
        steps.push(Step {
            loss,
            busiest: placement.busiest(&rows),
            placement: placement.clone(),
        });
        // All ranks observe the same counts, so all decide alike.
        balancer.observe(&counts)?;
        let proposed = balancer.propose(&placement)?;
        if let Some(to) = proposed.filter(|_| moves) {
            model = model.moved(engine, &spec, &to)?;
            balancer.moved();
            placement = to;
        }
    }
    Ok(steps)
}

/// A rank's part of a layer in training.
struct Model {
    layer: Layer,
    optimizer: MeshOptimizer<AdamW>,
    parameters: Tensors<'static>,
}

impl Model {
    /// Makes the layer from parameters, and from their optimizer state if there have been steps.
    fn new(engine: &Engine, mesh: &Mesh, spec: &LayerSpec, all: Tensors<'static>) -> Result<Model> {
        let (mut state, mut parameters) = (Tensors::new(), Tensors::new());
        for (name, tensor) in all {
            let optimizers = name.starts_with("optimizer.");
            let part = if optimizers {
                &mut state
            } else {
                &mut parameters
            };
            part.insert(name, tensor);
        }
        let training = Some(Training::default());
        let layer = engine.layer_with(
            spec,
            &parameters,
            LayerOptions {
                part: true,
                ..LayerOptions::over(mesh).training(training)
            },
        )?;
        let mut optimizer = MeshOptimizer::new(&layer.ranks()?, AdamW::new(2e-2));
        if !state.is_empty() {
            optimizer.restore(&state)?;
        }
        Ok(Model {
            layer,
            optimizer,
            parameters,
        })
    }

    /// Returns the loss and the rows of each expert, over all ranks.
    fn step(&mut self, rank: usize) -> Result<(f64, Vec<i64>)> {
        let x = floats(rank as u64, TOKENS * WIDTH);
        let wanted = ["y", "counts"];
        let input = Input::new(TOKENS, &x);
        let (output, saved) = self
            .layer
            .forward_train(input.reading(&wanted), RngKey::default())?;
        let [y, counts] = wanted.map(|name| output.get(name));
        let (y, counts) = (y.ok_or("no y")?, counts.ok_or("no counts")?);
        // The target is the opposite of each token.
        let errors = y.to_f32().into_iter().zip(&x).map(|(y, x)| y + x);
        let dy: Vec<f32> = errors.collect();
        let loss = dy.iter().map(|d| f64::from(*d).powi(2)).sum::<f64>() / 2.0;
        let dy = Tensor::owned(&[TOKENS, WIDTH], dy);
        self.layer.backward(&saved, &dy, false)?;
        let (optimizer, parameters) = (&mut self.optimizer, &mut self.parameters);
        update_mesh(&self.layer, optimizer, parameters, Scaling::default())?;
        let ranks = self.layer.ranks()?;
        let losses = ranks.sum_f64(&[loss], moesaic::mesh::ProcessGroup::World, "loss")?;
        let counts = counts.data.as_chunks().0.iter();
        let counts: Vec<i64> = counts.map(|count| i64::from_le_bytes(*count)).collect();
        Ok((losses[0], counts_of_all(&ranks, &counts)?))
    }

    /// Moves experts and their optimizer state to a placement, and makes the layer there.
    fn moved(self, engine: &Engine, spec: &LayerSpec, to: &Placement) -> Result<Model> {
        let state = self.optimizer.state(&self.parameters)?;
        let mut all = self.parameters;
        all.extend(state);
        let prepared = migrate::prepare(&self.layer.ranks()?, to, &all)?;
        let mesh = prepared.mesh().clone();
        Model::new(engine, &mesh, spec, prepared.commit()?)
    }
}

/// Returns weights whose router prefers the first experts.
fn weights(spec: &LayerSpec) -> Tensors<'static> {
    let mut weights = Tensors::new();
    for (seed, tensor) in canonical_tensors(spec).into_iter().enumerate() {
        let mut values = floats(1 << 30 | seed as u64, tensor.shape.iter().product());
        values.iter_mut().for_each(|value| *value *= 0.3);
        if tensor.name == "router.bias" {
            values = (0..EXPERTS).map(|e| 2.0 / (1.0 + e as f32)).collect();
        }
        weights.insert(&tensor.name, Tensor::owned(&tensor.shape, values));
    }
    weights
}

fn floats(seed: u64, count: usize) -> Vec<f32> {
    let values = Random::new(seed).vec(count).into_iter();
    values.map(|v| v as f32).collect()
}
