//! Weights and gradients of a rank among others.

use crate::host::{host_type, lend, tensor};
use crate::{MoeLayer, lock};
use candle_core::backprop::GradStore;
use candle_core::{DType, Error, Result, Tensor};
use moesaic::mesh::Ranks;
use moesaic::train::mesh;
use moesaic::{AnyLayer, Mesh, Strategy, Tensor as HostTensor, Tensors};
use std::sync::Arc;

/// This rank's part of a weight of the whole layer, by the weight's name: of experts its own,
/// of shared experts that the mesh slices its slices, of all else everything. A copy, outside the graph.
///
/// # Errors
/// When the ranks cannot share a tensor of this shape, or it is not on the CPU.
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

/// Adds up the gradients of named variables over the ranks that have the same: of experts
/// (`experts.` and the rest of the name, with anything in front) those that hold them, of
/// slices of shared experts those with the same slices, of all else all ranks. They are then those of one process that had the tokens of all.
/// Every rank calls it with variables of the same names; one that took no part counts as
/// zeros. Sums are in f32, and rounded to the variable's type.
///
/// A loss that is a mean over each rank's own tokens wants all gradients divided by the
/// number of ranks, those of experts too.
///
/// # Errors
/// When ranks cannot be reached, or have other variables.
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
    /// Chooses how the ranks of its mesh carry out calls from now on; results are the same up to
    /// the rounding of sums. All ranks call it, and choose the same.
    ///
    /// # Errors
    /// Without a mesh, or for what the mesh cannot do; also while a result of
    /// [`MoeLayer::forward_train`] is in a graph that is still there.
    pub fn set_strategy(&mut self, strategy: Strategy) -> Result<()> {
        let Some(inner) = Arc::get_mut(&mut self.inner) else {
            candle_core::bail!(
                "a result of `forward_train` still uses the layer: call `backward`, drop the \
                 result and what was made of it, then choose a strategy"
            );
        };
        inner.layer.set_strategy(strategy).map_err(Error::wrap)
    }

    /// Adds up the gradients of this layer's variables over the ranks of its mesh, as
    /// [`reduce_gradients`] does for a whole model; nothing without a mesh.
    ///
    /// # Errors
    /// As [`reduce_gradients`].
    pub fn reduce_gradients(&self, gradients: &mut GradStore) -> Result<()> {
        let _turn = lock(&self.inner.turn);
        match &self.inner.layer {
            AnyLayer::One(_) => Ok(()),
            AnyLayer::Mesh(layer) => reduce_gradients(&layer.ranks(), self.weights(), gradients),
        }
    }
}
