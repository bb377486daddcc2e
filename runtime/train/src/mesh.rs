//! Optimizer steps over the ranks of a mesh.
//!
//! Parameters have the names that one process gives them. Names of experts (`experts.`, with any
//! prefix) and of shared experts that the mesh shards stand for the rank's own part. [`ProcessGroup::of`]
//! returns the process group that holds the same part. Steps keep equal parameters equal to the
//! bit.
//!
//! | gradient | summed over | divided by |
//! |---|---|---|
//! | replicated on every rank | all ranks | the divisor |
//! | a rank's experts | the ranks that hold the same or a replica; the exchange has already brought
//! the tokens of all others | the same divisor |
//! | a rank's shards of shared experts | the ranks that hold the same; the exchange has brought the
//! tokens of the ranks with other shards | the same divisor |
//!
//! Use the number of ranks as divisor for a loss that is the mean over each rank's own tokens, and
//! 1 for one whose parts add up to the loss of all tokens.

use crate::elastic::weight_of;
use crate::optimizer::{check, floats, floats_mut, rounded, set_named, widened};
use crate::{Optimizer, STATE_PREFIX, TrainError};
use moesaic_engine::{Layer, Mesh, ProcessGroup, Ranks};
use moesaic_kernel::DType;
use moesaic_tensor::{Tensor, Tensors, WeightSource};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::Range;

/// Returns the process groups whose ranks can hold the same parameters on a mesh.
fn owners(mesh: &Mesh) -> &'static [ProcessGroup] {
    if mesh.parallel().shards_shared() {
        &[
            ProcessGroup::World,
            ProcessGroup::ExpertDp,
            ProcessGroup::EpDp,
        ]
    } else {
        &[ProcessGroup::World, ProcessGroup::ExpertDp]
    }
}

/// The scaling of gradients before a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scaling {
    /// The divisor of all gradients, those of experts too.
    pub divisor: f32,
    /// The largest joint norm of all gradients of all ranks.
    pub most: Option<f32>,
}

impl Default for Scaling {
    /// Leaves gradients unchanged.
    fn default() -> Scaling {
        Scaling {
            divisor: 1.0,
            most: None,
        }
    }
}

/// An optimizer over one rank's parameters in a mesh.
pub struct MeshOptimizer<O> {
    /// The update rule. Its state belongs to this rank's parameters, or to its part of them.
    pub optimizer: O,
    ranks: Ranks,
    partitioned: bool,
    /// Shapes of the parameters that have state.
    shapes: BTreeMap<String, Vec<usize>>,
}

impl<O: fmt::Debug> fmt::Debug for MeshOptimizer<O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MeshOptimizer")
            .field("optimizer", &self.optimizer)
            .field("partitioned", &self.partitioned)
            .finish_non_exhaustive()
    }
}

impl<O: Optimizer> MeshOptimizer<O> {
    /// Makes an optimizer in which every rank keeps the state of all its parameters.
    pub fn new(ranks: &Ranks, optimizer: O) -> MeshOptimizer<O> {
        MeshOptimizer {
            optimizer,
            ranks: ranks.clone(),
            partitioned: false,
            shapes: BTreeMap::new(),
        }
    }

    /// Makes an optimizer whose state is partitioned (ZeRO, stage 1): of the ranks that hold the
    /// same parameter, each keeps the state of one part, updates that, and gets the rest from the
    /// others. Results are the same to the bit.
    pub fn partitioned(ranks: &Ranks, optimizer: O) -> MeshOptimizer<O> {
        MeshOptimizer {
            partitioned: true,
            ..MeshOptimizer::new(ranks, optimizer)
        }
    }

    /// Returns the ranks.
    pub fn ranks(&self) -> &Ranks {
        &self.ranks
    }

    /// Takes a step with gradients already summed over the ranks that hold the same parameters.
    /// Returns their joint norm after the division. It skips gradients of parameters that this rank
    /// does not hold ([`Mesh::holds`]).
    ///
    /// # Errors
    /// The errors of [`Optimizer::step`] and of the exchange.
    pub fn step(
        &mut self,
        parameters: &mut Tensors<'_>,
        mut gradients: Tensors<'_>,
        scaling: Scaling,
    ) -> Result<f64, TrainError> {
        // The first shard alone holds an expert's output bias. Other shards have zeros there, which
        // must neither count in the norm nor be updated.
        gradients.retain(|name, _| self.ranks.mesh().holds(name));
        check(parameters, &gradients)?;
        // Divided, scaled and taken apart below, and rounded by none of that.
        widen(&mut gradients)?;
        divide(&mut gradients, scaling.divisor);
        let norm = norm(&self.ranks, &gradients)?;
        if let Some(most) = scaling.most.filter(|most| norm > f64::from(*most)) {
            // All ranks know the same norm, so all scale by the same factor and replicas stay
            // equal.
            let factor = (f64::from(most) / norm) as f32;
            for gradient in gradients.values_mut() {
                floats_mut(gradient).iter_mut().for_each(|g| *g *= factor);
            }
        }
        for (name, gradient) in &gradients {
            self.shapes.insert(name.clone(), gradient.shape.clone());
        }
        if self.partitioned {
            self.step_part(parameters, &gradients)?
        } else {
            self.optimizer.step(parameters, &gradients)?
        }
        Ok(norm)
    }

    /// Takes the step for this rank's part of each parameter.
    fn step_part(
        &mut self,
        parameters: &mut Tensors<'_>,
        gradients: &Tensors<'_>,
    ) -> Result<(), TrainError> {
        let (mut values, mut steps) = (Tensors::new(), Tensors::new());
        for (name, gradient) in gradients {
            let range = self.part(name, gradient.elements());
            values.insert(name, cut(name, &parameters[name], &range)?);
            steps.insert(name, cut(name, gradient, &range)?);
        }
        self.optimizer.step(&mut values, &steps)?;
        for (name, whole) in self.joined(&values, "parameters")? {
            if let Some(parameter) = parameters.get_mut(&name) {
                parameter.data = whole.data;
            }
        }
        Ok(())
    }

    /// Returns the elements of a parameter that this rank updates.
    fn part(&self, name: &str, elements: usize) -> Range<usize> {
        let (rank, size) = self
            .ranks
            .rank_and_size(self.ranks.mesh().process_group(name));
        let each = elements.div_ceil(size);
        (rank * each).min(elements)..((rank + 1) * each).min(elements)
    }

    /// Assembles parameters, or state beside them, from the ranks that hold parts of the same. It
    /// takes one exchange per process group.
    fn joined(&self, parts: &Tensors<'_>, what: &str) -> Result<Tensors<'static>, TrainError> {
        let mut whole = Tensors::new();
        let mesh = self.ranks.mesh();
        for &among in owners(mesh) {
            let mut named = Vec::new();
            for (name, part) in parts
                .iter()
                .filter(|(name, _)| mesh.process_group(name) == among)
            {
                if let Some(shape) = weight_of(name).and_then(|weight| self.shapes.get(weight)) {
                    named.push((name, shape, floats(name, part)?));
                }
            }
            let (_, size) = self.ranks.rank_and_size(among);
            let each = |shape: &[usize]| shape.iter().product::<usize>().div_ceil(size);
            let mut own = Vec::new();
            for (_, shape, part) in &named {
                own.extend_from_slice(part);
                // An all-gather needs equal lengths, so pad the short parts.
                own.extend(std::iter::repeat_n(0.0, each(shape) - part.len()));
            }
            let all = self.ranks.gather(&own, among, what)?;
            let mut at = 0;
            for (name, shape, _) in &named {
                let count = shape.iter().product();
                let of = |rank| &all[rank * own.len() + at..][..each(shape)];
                let mut values = (0..size).flat_map(of).copied().collect::<Vec<f32>>();
                // Drop the padding of the last parts.
                values.truncate(count);
                whole.insert(name.as_str(), Tensor::owned(shape, values));
                at += each(shape);
            }
        }
        Ok(whole)
    }

    /// Returns the state of this rank's parameters, whole even if ranks keep parts of it: the input
    /// of [`MeshOptimizer::restore`], which [`Ranks::collect`] saves. For parameters that this rank
    /// does not hold it has zeros.
    ///
    /// # Errors
    /// The errors of the exchange.
    pub fn state(&self, parameters: &Tensors<'_>) -> Result<Tensors<'static>, TrainError> {
        let own = self.optimizer.state();
        let mut state: Tensors<'static> = if self.partitioned {
            self.joined(&own, "state")?
        } else {
            Tensors::new()
        };
        let mut kinds = BTreeSet::new();
        for (name, tensor) in own {
            if let Some((kind, _)) = kind_of(&name) {
                kinds.insert(kind.to_string());
            }
            if !state.contains_key(&name) {
                state.insert(name, tensor.into_static());
            }
        }
        let held = |name: &str| self.ranks.mesh().holds(name);
        // A checkpoint has the state of all parameters. Zeros stand for those that this rank does
        // not hold, so that every rank writes the same names.
        for (name, parameter) in parameters.iter().filter(|(name, _)| !held(name)) {
            for kind in &kinds {
                let zeros = Tensor::zeros(DType::F32, &parameter.shape);
                state.insert(format!("{STATE_PREFIX}{kind}.{name}"), zeros);
            }
        }
        Ok(state)
    }

    /// Restores the state that [`MeshOptimizer::state`] returned, on this mesh or, cut by
    /// [`parts`], on another.
    ///
    /// # Errors
    /// The same as [`Optimizer::restore`].
    pub fn restore(&mut self, state: &Tensors<'_>) -> Result<(), TrainError> {
        let mut own = Tensors::new();
        let mut shapes = BTreeMap::new();
        for (name, tensor) in state {
            let Some((_, weight)) = kind_of(name) else {
                own.insert(name, tensor.lend());
                continue;
            };
            if !self.ranks.mesh().holds(weight) {
                continue;
            }
            shapes.insert(weight.to_string(), tensor.shape.clone());
            let part = if self.partitioned {
                cut(name, tensor, &self.part(weight, tensor.elements()))?
            } else {
                tensor.lend()
            };
            own.insert(name, part);
        }
        // Restore before taking the shapes over, so that an error leaves everything as it was.
        self.optimizer.restore(&own)?;
        self.shapes = shapes;
        Ok(())
    }
}

/// Sums gradients in host memory over the ranks that hold the same parameters, with one exchange
/// per process group. [`Layer::reduce_gradients`] does this for gradients on a layer's device. Sums
/// of gradients in 16 bits are f32, and rounded once.
///
/// # Errors
/// [`TrainError::Tensor`] for a gradient of integers, or the errors of the exchange.
pub fn reduce(ranks: &Ranks, gradients: &mut Tensors<'_>) -> Result<(), TrainError> {
    let dtypes: Vec<DType> = gradients.values().map(|gradient| gradient.dtype).collect();
    widen(gradients)?;
    reduce_floats(ranks, gradients)?;
    for (gradient, dtype) in gradients.values_mut().zip(dtypes) {
        if dtype != DType::F32 {
            *gradient = rounded(dtype, &gradient.shape, gradient.to_f32());
        }
    }
    Ok(())
}

/// Makes gradients f32.
fn widen(gradients: &mut Tensors<'_>) -> Result<(), TrainError> {
    for (name, gradient) in gradients.iter_mut() {
        if gradient.dtype != DType::F32 {
            let values = widened(name, gradient)?.into_owned();
            *gradient = Tensor::owned(&gradient.shape, values);
        }
    }
    Ok(())
}

fn reduce_floats(ranks: &Ranks, gradients: &mut Tensors<'_>) -> Result<(), TrainError> {
    let mesh = ranks.mesh();
    for &among in owners(mesh) {
        let mut all = Vec::new();
        for (name, gradient) in gradients
            .iter()
            .filter(|(name, _)| mesh.process_group(name) == among)
        {
            all.extend_from_slice(&floats(name, gradient)?);
        }
        ranks.sum(&mut all, among, "gradients")?;
        let mut rest = &all[..];
        for (_, gradient) in gradients
            .iter_mut()
            .filter(|(name, _)| mesh.process_group(name) == among)
        {
            let values = floats_mut(gradient);
            let (own, behind) = rest.split_at(values.len());
            values.copy_from_slice(own);
            rest = behind;
        }
    }
    let of_experts = gradients
        .iter_mut()
        .filter(|(name, _)| mesh.process_group(name) == ProcessGroup::ExpertDp);
    let mut parts: Vec<&mut [f32]> = of_experts.map(|(_, tensor)| floats_mut(tensor)).collect();
    Ok(ranks.sum_replicas(&mut parts, "gradients of replicas")?)
}

/// Returns the joint norm of all gradients of all ranks, with each parameter counted once. It is
/// summed in f64 in the order of names and ranks, so it is the same on every rank.
///
/// # Errors
/// The same as [`reduce`].
pub fn norm(ranks: &Ranks, gradients: &Tensors<'_>) -> Result<f64, TrainError> {
    let mesh = ranks.mesh();
    let mut sums = BTreeMap::new();
    for (name, gradient) in gradients.iter().filter(|(name, _)| mesh.holds(name)) {
        let values = widened(name, gradient)?;
        let rows = gradient.shape.first().copied().unwrap_or(1);
        // A rank counts only the rows that it owns: replicas of an expert are counted by its owner.
        let row = values.len() / rows.max(1);
        let counted = mesh.counted(name, rows).into_iter();
        let counted = counted.flat_map(|rows| &values[rows.start * row..rows.end * row]);
        let squares = counted.map(|g| f64::from(*g) * f64::from(*g));
        *sums.entry(mesh.process_group(name)).or_insert(0.0) += squares.sum::<f64>();
    }
    let mut all = 0.0;
    for among in owners(mesh) {
        let own = sums.get(among).copied().unwrap_or(0.0);
        // Count parameters that are spread over ranks once: over each group that holds all of them
        // once.
        let parts = match among {
            ProcessGroup::ExpertDp => ranks.sum_f64(&[own], ProcessGroup::Ep, "norm")?,
            ProcessGroup::EpDp => ranks.sum_f64(&[own], ProcessGroup::ExpertTp, "norm")?,
            _ => vec![own],
        };
        all += parts.iter().sum::<f64>();
    }
    Ok(all.sqrt())
}

/// Gives all ranks that hold the same parameters the values of the first of them.
///
/// # Errors
/// The errors of the exchange, also if ranks have other sizes.
pub fn broadcast(ranks: &Ranks, parameters: &mut Tensors<'_>) -> Result<(), TrainError> {
    let mesh = ranks.mesh();
    for &among in owners(mesh) {
        let mut all = Vec::new();
        for (_, tensor) in parameters
            .iter()
            .filter(|(name, _)| mesh.process_group(name) == among)
        {
            all.extend_from_slice(&tensor.data);
        }
        ranks.broadcast(&mut all, among, "parameters")?;
        let mut rest = &all[..];
        for (_, tensor) in parameters
            .iter_mut()
            .filter(|(name, _)| mesh.process_group(name) == among)
        {
            let (own, behind) = rest.split_at(tensor.data.len());
            tensor.data.to_mut().copy_from_slice(own);
            rest = behind;
        }
    }
    let of_experts = parameters
        .iter_mut()
        .filter(|(name, _)| mesh.process_group(name) == ProcessGroup::ExpertDp);
    let mut parts: Vec<&mut [u8]> = of_experts.map(|(_, tensor)| tensor.data.to_mut()).collect();
    Ok(ranks.broadcast_replicas(&mut parts, "parameters of replicas")?)
}

/// Returns a rank's parts of the named tensors, which may be weights or optimizer state, of one
/// process or saved by [`Ranks::collect`]. It reads nothing else.
///
/// # Errors
/// The same as [`Mesh::part`].
pub fn parts<'n>(
    mesh: &Mesh,
    whole: &dyn WeightSource,
    names: impl IntoIterator<Item = &'n str>,
) -> Result<Tensors<'static>, TrainError> {
    let part = |name: &str| Ok((name.to_string(), mesh.part(whole, name)?));
    names.into_iter().map(part).collect()
}

/// Takes an optimizer's step with the gradients that the last backward passes of all ranks left in
/// a layer, and gives the layer the new weights, rounded to its types. `parameters` are f32 masters
/// of this rank's part, as [`crate::masters`] makes them from [`Layer::weights_of`]. Returns
/// the norm of all gradients.
///
/// # Errors
/// The errors of [`MeshOptimizer::step`] and of the layer.
pub fn update_mesh<O: Optimizer>(
    layer: &Layer,
    optimizer: &mut MeshOptimizer<O>,
    parameters: &mut Tensors<'_>,
    scaling: Scaling,
) -> Result<f64, TrainError> {
    layer.reduce_gradients()?;
    let gradients = layer.gradients()?;
    let names: Vec<String> = gradients.keys().cloned().collect();
    let norm = optimizer.step(parameters, gradients, scaling)?;
    set_named(layer, parameters, &names)?;
    Ok(norm)
}

fn divide(gradients: &mut Tensors<'_>, divisor: f32) {
    if divisor == 1.0 {
        return;
    }
    for gradient in gradients.values_mut() {
        floats_mut(gradient).iter_mut().for_each(|g| *g /= divisor);
    }
}

/// Returns some elements of a tensor.
fn cut(
    name: &str,
    tensor: &Tensor<'_>,
    range: &Range<usize>,
) -> Result<Tensor<'static>, TrainError> {
    let values = floats(name, tensor)?;
    Ok(Tensor::copied(&[range.len()], &values[range.clone()]))
}

/// Returns the kind and the parameter in the name of a state: `first` and `w` for
/// `optimizer.first.w`.
fn kind_of(name: &str) -> Option<(&str, &str)> {
    name.strip_prefix(STATE_PREFIX)?.split_once('.')
}
