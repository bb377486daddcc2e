//! The model with experts on many ranks: sequences of a batch are shared by all, experts
//! by the mesh; what is no expert's is the same everywhere.

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

/// A rank's part of a model on its way.
pub struct RankLearner {
    model: Model<MeshExperts>,
    /// State of what all ranks have is kept in parts.
    optimizer: MeshOptimizer<AdamW>,
    ranks: Ranks,
    pace: Pace,
    context: usize,
}

impl RankLearner {
    /// Before the first step.
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

    /// Steps taken, those before a checkpoint too.
    pub fn steps(&self) -> usize {
        self.optimizer.optimizer.steps as usize
    }

    /// One optimizer step with this rank's sequences of a batch, the same batch on all.
    /// Returns the loss of all.
    pub fn step(&mut self, batch: &Batch) -> Result<f64, Box<dyn Error>> {
        let own = self.part(batch);
        let loss = self.model.gradients(&own)?;
        let mut values = self.values();
        let mut gradients = self.tensors(|param| &param.grad);
        reduce(&self.ranks, &mut gradients)?;
        self.optimizer.optimizer.learning_rate = self.pace.rate(self.steps() + 1);
        // The loss of a part is divided by the targets of all: the parts add up.
        let scaling = Scaling {
            divisor: 1.0,
            most: Some(1.0),
        };
        self.optimizer.step(&mut values, gradients, scaling)?;
        self.set(&values);
        Ok(self.total(loss)?)
    }

    /// The loss of all ranks on text that is never trained on.
    pub fn held_out(&mut self, batch: &Batch) -> Result<f64, EngineError> {
        let own = self.part(batch);
        let loss = self.model.loss(&own)?;
        self.total(loss)
    }

    /// Writes the model and the state of its optimizer as one process would have them.
    pub fn save(&mut self, file: &Path) -> Result<(), Box<dyn Error>> {
        let mut all = self.values();
        let state = self.optimizer.state(&all)?;
        all.extend(state);
        Ok(self.ranks.collect(&all, &mut Writer::file(file))?)
    }

    /// Goes on from what was saved, on any mesh; reads this rank's part.
    pub fn resume(&mut self, file: &Path) -> Result<(), Box<dyn Error>> {
        let file = Checkpoint::open(file)?;
        let all = parts(self.ranks.mesh(), &file, file.names())?;
        self.optimizer.restore(&all)?;
        self.set(&all);
        Ok(())
    }

    /// All parameters of this rank.
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

    /// This rank's sequences.
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
