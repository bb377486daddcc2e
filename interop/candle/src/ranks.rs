//! Weights and gradients of a rank among others.

use crate::host::{host_type, lend, tensor};
use crate::{MoeLayer, lock};
use candle_core::backprop::GradStore;
use candle_core::{DType, Error, Result, Tensor};
use moesaic::mesh::Ranks;
use moesaic::train::mesh;
use moesaic::{Mesh, Strategy, Tensor as HostTensor, Tensors};
use std::sync::Arc;

/// Returns this rank's part of a weight of the whole layer, by the weight's
/// name: its own experts of a weight of experts, its shards of shared experts
/// that the mesh shards, and everything else in full. The part is a copy,
/// outside the graph.
///
/// # Errors
/// The ranks cannot share a tensor of this shape, or it is not on the CPU.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use moesaic::collectives::{Call, threads};
/// use moesaic::{Engine, Mesh, Parallel};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let engine = Engine::cpu()?;
/// let whole = Tensor::zeros((4, 16, 8), DType::F32, &Device::Cpu)?; // of four experts
/// let device = |_| Ok(engine.device().clone());
/// let ranks = threads::run(2, device, |mut world| {
///     let mesh = Mesh::new(&mut world, Parallel { ep: 2, ..Parallel::default() })?;
///     let own = moesaic_candle::part(&mesh, "experts.up.weight", &whole)?;
///     world.finish(&Call::new("end"))?;
///     Ok::<_, Box<dyn std::error::Error + Send + Sync>>(own)
/// })?;
/// for own in ranks {
///     assert_eq!(own.unwrap().unwrap().dims(), [2, 16, 8]);
/// }
/// # Ok(())
/// # }
/// ```
pub fn part(mesh: &Mesh, name: &str, whole: &Tensor) -> Result<Tensor> {
    let own = lend(whole, host_type(whole.dtype())?, whole.dims(), |host| {
        let named: Tensors<'_> = [(name.to_string(), host)].into_iter().collect();
        mesh.part(&named, name).map_err(Error::wrap)
    })?;
    Ok(tensor(&own, &own.shape))
}

/// Adds up the gradients of named variables over the ranks that have the same
/// variable: for experts (`experts.` and the rest of the name, with anything in
/// front) over their replicas, for shards of shared experts over the ranks with
/// the same shards, and for everything else over all ranks. The sums are the
/// gradients of one process that is given the tokens of all ranks. Every rank
/// calls the function with variables of the same names; a variable that took no
/// part counts as zeros. Sums are made in f32, and rounded to the variable's
/// type.
///
/// If your loss is a mean over each rank's own tokens, divide all gradients by
/// the number of ranks, those of experts too.
///
/// # Errors
/// Ranks cannot be reached, or have other variables.
pub fn reduce_gradients<'t>(
    ranks: &Ranks,
    weights: impl IntoIterator<Item = (&'t str, &'t Tensor)>,
    gradients: &mut GradStore,
) -> Result<()> {
    let variables = weights
        .into_iter()
        .filter(|(_, tensor)| tensor.is_variable());
    let variables: Vec<(&str, &Tensor)> = variables.collect();
    let mut own = Tensors::new();
    for (name, variable) in &variables {
        let gradient = match gradients.get(variable) {
            Some(gradient) => gradient.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?,
            None => vec![0f32; variable.elem_count()],
        };
        own.insert(*name, HostTensor::owned(variable.dims(), gradient));
    }
    mesh::reduce(ranks, &mut own).map_err(Error::wrap)?;
    for (name, variable) in variables {
        let sum = tensor(&own[name], variable.dims());
        gradients.insert(variable, sum.to_dtype(variable.dtype())?);
    }
    Ok(())
}

impl MoeLayer {
    /// Sets the strategy of the following calls; results are the same up to the
    /// rounding of sums. All ranks call it with the same strategy.
    ///
    /// # Errors
    /// The layer has no mesh, the mesh cannot carry out the strategy, or a
    /// result of [`MoeLayer::forward_train`] is in a graph that still exists.
    pub fn set_strategy(&mut self, strategy: Strategy) -> Result<()> {
        let Some(inner) = Arc::get_mut(&mut self.inner) else {
            candle_core::bail!(
                "a result of `forward_train` still uses the layer: call `backward`, drop the \
                 result and what was made of it, then choose a strategy"
            );
        };
        inner.layer.set_strategy(strategy).map_err(Error::wrap)
    }

    /// Adds up the gradients of this layer's variables over the ranks of its
    /// mesh, as [`reduce_gradients`] does for a whole model. Does nothing
    /// without a mesh.
    ///
    /// # Errors
    /// As [`reduce_gradients`].
    pub fn reduce_gradients(&self, gradients: &mut GradStore) -> Result<()> {
        let _turn = lock(&self.inner.turn);
        let layer = &self.inner.layer;
        if layer.mesh().is_none() {
            return Ok(());
        }
        let ranks = layer.ranks().map_err(Error::wrap)?;
        reduce_gradients(&ranks, self.weights(), gradients)
    }
}
