//! Optimizer steps over the ranks of a mesh.
//!
//! Parameters have the names that one process gives them; those of experts, `experts.`
//! and the rest with anything in front, and those of shared experts that the mesh slices,
//! are the rank's own part of them, and [`ProcessGroup::of`] says who has the same. Steps keep what
//! is the same the same, to the bit.
//!
//! | a gradient | is added up over | divided by |
//! |---|---|---|
//! | of what every rank has | all ranks | the divisor |
//! | of a rank's experts | those that have the same, and those with replicas; the exchange has brought the tokens of all others already | the same divisor |
//! | of a rank's slices of shared experts | those that have the same; here the exchange has brought the tokens of the other slices' ranks | the same divisor |
//!
//! A loss that is the mean over each rank's own tokens wants the number of ranks as
//! divisor, one whose parts add up to that of all tokens wants 1.

use crate::elastic::weight_of;
use crate::optimizer::{check, floats, floats_mut};
use crate::{Optimizer, STATE_PREFIX, TrainError};
use moesaic_engine::{Mesh, MeshLayer, ProcessGroup, Ranks};
use moesaic_kernel::DType;
use moesaic_tensor::{Tensor, Tensors, WeightSource};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// Who can have the same parameters on a mesh.
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

/// What becomes of gradients before a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scaling {
    /// What all gradients are divided by, those of experts too.
    pub divisor: f32,
    /// The largest norm that all gradients of all ranks may have together.
    pub most: Option<f32>,
}

impl Default for Scaling {
    /// As they are.
    fn default() -> Scaling {
        Scaling {
            divisor: 1.0,
            most: None,
        }
    }
}

/// An optimizer whose parameters are those of a rank among others.
pub struct MeshOptimizer<O> {
    /// The rule. Its state is of this rank's parameters, or of its part of them.
    pub optimizer: O,
    ranks: Ranks,
    partitioned: bool,
    /// Of the parameters that have state.
    shapes: BTreeMap<String, Vec<usize>>,
}

impl<O: Optimizer> MeshOptimizer<O> {
    /// Every rank keeps the state of all its parameters.
    pub fn new(ranks: &Ranks, optimizer: O) -> MeshOptimizer<O> {
        MeshOptimizer {
            optimizer,
            ranks: ranks.clone(),
            partitioned: false,
            shapes: BTreeMap::new(),
        }
    }

    /// Each of the ranks that have the same parameter keeps the state of its part, moves
    /// that, and gets the rest from the others (ZeRO, stage 1). What comes out is the same
    /// to the bit.
    pub fn partitioned(ranks: &Ranks, optimizer: O) -> MeshOptimizer<O> {
        MeshOptimizer {
            partitioned: true,
            ..MeshOptimizer::new(ranks, optimizer)
        }
    }

    /// The ranks.
    pub fn ranks(&self) -> &Ranks {
        &self.ranks
    }

    /// Takes a step with gradients that were added up over the ranks that have the same,
    /// and returns the norm that all of them have together after the division. Gradients
    /// of what this rank does not hold ([`Mesh::holds`]) are left out.
    ///
    /// # Errors
    /// As [`Optimizer::step`]; those of the exchange.
    pub fn step(
        &mut self,
        parameters: &mut Tensors<'_>,
        mut gradients: Tensors<'_>,
        scaling: Scaling,
    ) -> Result<f64, TrainError> {
        gradients.retain(|name, _| self.ranks.mesh().holds(name));
        check(parameters, &gradients)?;
        divide(&mut gradients, scaling.divisor);
        let norm = norm(&self.ranks, &gradients)?;
        if let Some(most) = scaling.most.filter(|most| norm > f64::from(*most)) {
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

    /// The step of this rank's part of each parameter.
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

    /// Which elements of a parameter are this rank's to move.
    fn part(&self, name: &str, elements: usize) -> Range<usize> {
        let (rank, size) = self
            .ranks
            .rank_and_size(self.ranks.mesh().process_group(name));
        let each = elements.div_ceil(size);
        (rank * each).min(elements)..((rank + 1) * each).min(elements)
    }

    /// Parts of parameters, or of state beside them, put together over the ranks that have
    /// the same. One exchange for each group of ranks.
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
                own.extend(std::iter::repeat_n(0.0, each(shape) - part.len()));
            }
            let all = self.ranks.gather(&own, among, what)?;
            let mut at = 0;
            for (name, shape, _) in &named {
                let count = shape.iter().product();
                let of = |rank| &all[rank * own.len() + at..][..each(shape)];
                let mut values = (0..size).flat_map(of).copied().collect::<Vec<f32>>();
                values.truncate(count);
                whole.insert(name.as_str(), Tensor::owned(shape, values));
                at += each(shape);
            }
        }
        Ok(whole)
    }

    /// The state of this rank's parameters, whole also where ranks keep parts of it: what
    /// [`MeshOptimizer::restore`] takes, and [`Ranks::collect`] saves. Of parameters that
    /// this rank does not hold it has zeros.
    ///
    /// # Errors
    /// Those of the exchange.
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
        for (name, parameter) in parameters.iter().filter(|(name, _)| !held(name)) {
            for kind in &kinds {
                let zeros = Tensor::zeros(DType::F32, &parameter.shape);
                state.insert(format!("{STATE_PREFIX}{kind}.{name}"), zeros);
            }
        }
        Ok(state)
    }

    /// Takes back what [`MeshOptimizer::state`] gave, on this mesh or, cut by [`parts`],
    /// on another.
    ///
    /// # Errors
    /// As [`Optimizer::restore`].
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
        self.optimizer.restore(&own)?;
        self.shapes = shapes;
        Ok(())
    }
}

/// Adds up gradients that lie in host memory over the ranks that have the same
/// parameters, one exchange for each group of ranks. [`MeshLayer::reduce_gradients`] does
/// it to those on a layer's device.
///
/// # Errors
/// [`TrainError::Tensor`] for a gradient that is not f32; those of the exchange.
pub fn reduce(ranks: &Ranks, gradients: &mut Tensors<'_>) -> Result<(), TrainError> {
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

/// The norm of all gradients of all ranks together, each parameter counted once. Summed
/// in f64, in the order of names and ranks: the same on every rank.
///
/// # Errors
/// As [`reduce`].
pub fn norm(ranks: &Ranks, gradients: &Tensors<'_>) -> Result<f64, TrainError> {
    let mesh = ranks.mesh();
    let mut sums = BTreeMap::new();
    for (name, gradient) in gradients.iter().filter(|(name, _)| mesh.holds(name)) {
        let values = floats(name, gradient)?;
        let rows = gradient.shape.first().copied().unwrap_or(1);
        let row = values.len() / rows.max(1);
        let counted = mesh.counted(name, rows).into_iter();
        let counted = counted.flat_map(|rows| &values[rows.start * row..rows.end * row]);
        let squares = counted.map(|g| f64::from(*g) * f64::from(*g));
        *sums.entry(mesh.process_group(name)).or_insert(0.0) += squares.sum::<f64>();
    }
    let mut all = 0.0;
    for among in owners(mesh) {
        let own = sums.get(among).copied().unwrap_or(0.0);
        // What other ranks have parts of: each group that has all of it once.
        let parts = match among {
            ProcessGroup::ExpertDp => ranks.sum_f64(&[own], ProcessGroup::Ep, "norm")?,
            ProcessGroup::EpDp => ranks.sum_f64(&[own], ProcessGroup::ExpertTp, "norm")?,
            _ => vec![own],
        };
        all += parts.iter().sum::<f64>();
    }
    Ok(all.sqrt())
}

/// Makes ranks that have the same parameters start with the same values: those of the
/// first of them.
///
/// # Errors
/// Those of the exchange, also where ranks have other sizes.
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

/// A rank's parts of the named tensors, weights or state of an optimizer, of one process
/// or what [`Ranks::collect`] has saved. Only they are read.
///
/// # Errors
/// As [`Mesh::part`].
pub fn parts<'n>(
    mesh: &Mesh,
    whole: &dyn WeightSource,
    names: impl IntoIterator<Item = &'n str>,
) -> Result<Tensors<'static>, TrainError> {
    let part = |name: &str| Ok((name.to_string(), mesh.part(whole, name)?));
    names.into_iter().map(part).collect()
}

/// Takes an optimizer's step with the gradients that the last backward passes of all ranks
/// have left in a layer, and gives the layer the new weights, rounded to its types.
/// `parameters` are f32 masters of this rank's part, such as [`crate::masters`] makes of
/// [`MeshLayer::weights_of`]. Returns the norm of all gradients.
///
/// # Errors
/// Those of [`MeshOptimizer::step`] and of the layer.
pub fn update_mesh<O: Optimizer>(
    layer: &MeshLayer,
    optimizer: &mut MeshOptimizer<O>,
    parameters: &mut Tensors<'_>,
    scaling: Scaling,
) -> Result<f64, TrainError> {
    layer.reduce_gradients()?;
    let gradients = layer.gradients()?;
    let names: Vec<String> = gradients.keys().cloned().collect();
    let norm = optimizer.step(parameters, gradients, scaling)?;
    for name in names {
        let weight = layer.weight_layer(&name).plan().tensor(&name);
        let dtype = weight.map_or(DType::F32, |tensor| tensor.dtype);
        let values = floats(&name, &parameters[&name])?;
        let rounded = Tensor::rounded(dtype, &parameters[&name].shape, &values);
        layer.set_weight(&name, &rounded)?;
    }
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

/// Some elements of a tensor.
fn cut(
    name: &str,
    tensor: &Tensor<'_>,
    range: &Range<usize>,
) -> Result<Tensor<'static>, TrainError> {
    let values = floats(name, tensor)?;
    Ok(Tensor::copied(&[range.len()], &values[range.clone()]))
}

/// Kind and parameter of the name of a state: `first` and `w` of `optimizer.first.w`.
fn kind_of(name: &str) -> Option<(&str, &str)> {
    name.strip_prefix(STATE_PREFIX)?.split_once('.')
}
