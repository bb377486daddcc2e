//! The model with experts on many ranks: the ranks divide the sequences of a batch, and the mesh
//! divides the experts. All other parameters are replicated.

use super::common::mesh_experts::MeshExperts;
use super::common::ops::Module;
use super::common::optimizer::adamw;
use super::model::Model;
use super::run::Pace;
use super::text::Batch;
use moesaic::mesh::{ProcessGroup, Ranks};
use moesaic::train::AdamW;
use moesaic::train::mesh::{MeshOptimizer, Scaling, parts, reduce};
use moesaic::weights::{Checkpoint, Writer};
use moesaic::{EngineError, Tensor, Tensors};
use std::error::Error;
use std::path::Path;

/// One rank's part of a model in training.
pub struct RankLearner {
    model: Model<MeshExperts>,
    /// The optimizer. State of replicated parameters is partitioned over the ranks.
    optimizer: MeshOptimizer<AdamW>,
    ranks: Ranks,
    pace: Pace,
    context: usize,
}

impl RankLearner {
    /// Returns the state before the first step.
    pub fn new(
        model: Model<MeshExperts>,
        ranks: &Ranks,
        pace: &Pace,
        context: usize,
    ) -> RankLearner {
        RankLearner {
            model,
            optimizer: MeshOptimizer::partitioned(ranks, adamw(0.01)),
            ranks: ranks.clone(),
            pace: pace.clone(),
            context,
        }
    }

    /// Returns the steps taken, including those before a checkpoint.
    pub fn steps(&self) -> usize {
        self.optimizer.optimizer.steps as usize
    }

    /// Takes one optimizer step with this rank's sequences of a batch, which is the same on all
    /// ranks. Returns the loss over all ranks.
    pub fn step(&mut self, batch: &Batch) -> Result<f64, Box<dyn Error>> {
        let own = self.part(batch);
        let loss = self.model.gradients(&own)?;
        let mut values = self.values();
        let mut gradients = self.tensors(|param| &param.grad);
        reduce(&self.ranks, &mut gradients)?;
        self.optimizer.optimizer.learning_rate = self.pace.rate(self.steps() + 1);
        // Each rank divides its loss by the targets of all ranks, so the parts add up and the
        // divisor is 1.
        let scaling = Scaling {
            divisor: 1.0,
            most: Some(1.0),
        };
        self.optimizer.step(&mut values, gradients, scaling)?;
        self.set(&values);
        Ok(self.total(loss)?)
    }

    /// Returns the loss over all ranks on text that is never trained on.
    pub fn held_out(&mut self, batch: &Batch) -> Result<f64, EngineError> {
        let own = self.part(batch);
        let loss = self.model.loss(&own)?;
        self.total(loss)
    }

    /// Writes the model and its optimizer state in the form in which one process would.
    pub fn save(&mut self, file: &Path) -> Result<(), Box<dyn Error>> {
        let mut all = self.values();
        let state = self.optimizer.state(&all)?;
        all.extend(state);
        Ok(self.ranks.collect(&all, &mut Writer::file(file))?)
    }

    /// Continues from a checkpoint, on any mesh, and reads only this rank's part.
    pub fn resume(&mut self, file: &Path) -> Result<(), Box<dyn Error>> {
        let file = Checkpoint::open(file)?;
        let all = parts(self.ranks.mesh(), &file, file.names())?;
        self.optimizer.restore(&all)?;
        self.set(&all);
        Ok(())
    }

    /// Returns all parameters of this rank.
    pub fn values(&mut self) -> Tensors<'static> {
        self.tensors(|param| &param.value)
    }

    fn tensors(&mut self, of: fn(&super::common::ops::Param) -> &[f32]) -> Tensors<'static> {
        let mut tensors = Tensors::new();
        self.model.params("", &mut |name, param| {
            tensors.insert(name, Tensor::copied(&param.shape, of(param)));
        });
        tensors
    }

    fn set(&mut self, values: &Tensors<'_>) {
        self.model.params("", &mut |name, param| {
            param.value.copy_from_slice(&values[&name].to_f32());
        });
    }

    /// Returns this rank's sequences.
    fn part(&self, batch: &Batch) -> Batch {
        let (rank, size) = self.ranks.rank_and_size(ProcessGroup::World);
        let sequences = batch.tokens.len() / self.context;
        let edge = |rank: usize| rank * sequences / size;
        batch.part(edge(rank)..edge(rank + 1), self.context)
    }

    fn total(&self, own: f64) -> Result<f64, EngineError> {
        let sums = self.ranks.sum_f64(&[own], ProcessGroup::World, "loss")?;
        Ok(sums.iter().sum())
    }
}
