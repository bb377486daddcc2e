//! The strategy of a layer over ranks, and what tuners ask about it.

use super::form::{Layer, StrategyTuner};
use crate::call::CallInput;
use crate::error::EngineError;
use crate::mesh::Ranks;
use moesaic_plan::{ShadowModel, Strategy};
use std::sync::Arc;

impl Layer {
    /// Returns the strategy of calls from now on; the default without ranks.
    pub fn strategy(&self) -> Strategy {
        let layer = self.of_rank("a strategy");
        layer.map(|layer| layer.strategy()).unwrap_or_default()
    }

    /// Sets the strategy of calls from now on; a backward pass uses its forward pass's. All ranks
    /// call it with the same strategy. The first use of an adaptive parallelism degree makes its
    /// kernels and its process groups, which all layers of the mesh share; both are kept. The call
    /// waits for the calls of other threads.
    ///
    /// # Errors
    /// [`EngineError::NotOverRanks`]; [`EngineError::Plan`] for a strategy that the mesh, its nodes
    /// or the layer's packed weights do not allow (see [`Mesh::for_any_r`](crate::Mesh::for_any_r));
    /// [`EngineError::Collective`], also when ranks choose differently; otherwise as
    /// [`Engine::layer`](crate::Engine::layer), also for the cast kernels.
    pub fn set_strategy(&self, strategy: Strategy) -> Result<(), EngineError> {
        self.of_rank("a strategy")?.set_strategy(strategy)
    }

    /// Checks a strategy against mesh, nodes and placement. The check exchanges nothing and makes
    /// nothing, so it does not notice packed weights.
    ///
    /// # Errors
    /// [`EngineError::NotOverRanks`], [`EngineError::Plan`], as [`Layer::set_strategy`].
    pub fn check_strategy(&self, strategy: Strategy) -> Result<(), EngineError> {
        self.of_rank("a strategy")?.check_strategy(strategy)
    }

    /// Sets the tuner that chooses the strategy of each training step and each evaluation; `None`
    /// keeps the present strategy. All ranks set one.
    ///
    /// # Errors
    /// [`EngineError::NotOverRanks`].
    pub fn set_tuner(&mut self, tuner: Option<Arc<dyn StrategyTuner>>) -> Result<(), EngineError> {
        self.of_rank("a tuner of strategies")?;
        self.tuner = tuner;
        Ok(())
    }

    /// Sets the model that chooses shadows from the next call on ([`Strategy::shadows`]); the
    /// default is [`ShadowModel::of`] the layer. All ranks call it with the same model.
    ///
    /// # Errors
    /// [`EngineError::NotOverRanks`]; [`EngineError::Collective`], also when models differ.
    pub fn set_shadow_model(&self, model: ShadowModel) -> Result<(), EngineError> {
        self.of_rank("a model of shadows")?.set_shadow_model(model)
    }

    /// Returns the model that chooses shadows.
    pub fn shadow_model(&self) -> ShadowModel {
        match self.of_rank("a model of shadows") {
            Ok(layer) => layer.shadow_model(),
            Err(_) => ShadowModel::of(self.spec()),
        }
    }

    /// Returns a text that identifies layers whose steps may take different times: name, number of
    /// ranks, and a hash of spec, training, mesh, placement and ranks on each node. It is the same
    /// on all ranks, even if their targets differ.
    ///
    /// # Errors
    /// [`EngineError::NotOverRanks`].
    pub fn identity(&self) -> Result<String, EngineError> {
        Ok(self.of_rank("an identity among ranks")?.identity())
    }

    /// Returns a handle to exchange host memory between the ranks of this layer.
    ///
    /// # Errors
    /// [`EngineError::NotOverRanks`].
    pub fn ranks(&self) -> Result<Ranks, EngineError> {
        Ok(self.of_rank("an exchange")?.ranks())
    }

    /// Returns the rows that each rank's tokens have for each expert with weights, the same on all
    /// ranks and before a capacity drops any: as [`Layer::forward`] would route the tokens, or with
    /// [`CallInput::in_training`] as [`Layer::forward_train`] would. Experts without weights are
    /// left out, because their rows stay where they are. Writes nothing to memory of yours.
    ///
    /// # Errors
    /// As [`Layer::route`]; [`EngineError::NotOverRanks`].
    pub fn tokens_per_expert<'i>(
        &self,
        input: impl Into<CallInput<'i>>,
    ) -> Result<Vec<Vec<u64>>, EngineError> {
        let input = input.into();
        let layer = self.of_rank("counts of all ranks")?;
        layer.tokens_per_expert(&input.args(self.plan())?, input.rng_key)
    }
}
