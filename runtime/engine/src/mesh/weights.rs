//! Weights and gradients of one rank's part of a layer, all parts under one set of names.

use super::digests::{Digest, Held, compare};
use super::layer::RankLayer;
use super::process_group::ProcessGroup;
use super::ranks::Ranks;
use super::sharding::Sharding;
use crate::call::shape_for;
use crate::device_layer::DeviceLayer;
use crate::error::EngineError;
use moesaic_plan::{LayerPlan, TensorId, TensorPlan, TensorRole};
use moesaic_spec::canonical_tensors;
use moesaic_target::Buffer;
use moesaic_tensor::{Tensors, WeightSource};

impl RankLayer {
    /// Returns a handle to exchange host memory between the ranks of this layer.
    pub fn ranks(&self) -> Ranks {
        Ranks::new(self.mesh(), &self.replicated().device)
    }

    /// Returns this rank's part of a whole layer's weights: what every rank holds, its own experts,
    /// and its shards of shared ones. Only these are read.
    ///
    /// # Errors
    /// As [`part_of`](crate::part_of).
    pub fn weights_of(&self, whole: &dyn WeightSource) -> Result<Tensors<'static>, EngineError> {
        let tensors = canonical_tensors(self.replicated().spec());
        let each = tensors.into_iter();
        each.map(|tensor| {
            let part = self.mesh().part(whole, &tensor.name)?;
            Ok((tensor.name, part))
        })
        .collect()
    }

    /// Returns the gradients of the weights that this rank updates, by the weights' names, as the
    /// last backward passes or [`RankLayer::reduce_gradients`] left them.
    ///
    /// # Errors
    /// [`EngineError::NotTraining`].
    pub fn gradients(&self) -> Result<Tensors<'static>, EngineError> {
        let mut all = self.replicated().gradients()?;
        all.retain(|name, _| self.mesh().process_group(name) == ProcessGroup::World);
        all.extend(self.own().gradients()?);
        if let Some(shared) = self.shared() {
            all.extend(shared.gradients()?);
        }
        all.retain(|name, _| self.mesh().holds(name));
        Ok(all)
    }

    /// Compares the weights that several ranks hold, as they are on the device now. All ranks call
    /// it.
    pub fn check_weights(&self) -> Result<(), EngineError> {
        let mut held = Vec::new();
        for part in self.parts() {
            for (tensor, buffer) in part.weights.iter() {
                let names = weight_names(part.plan(), tensor);
                // A part also has room for weights of other ranks, which arrive in a call.
                if std::ptr::eq(self.weight_layer(names[0]), part) {
                    held.extend(self.held_values(part, &names, (tensor, buffer))?);
                }
            }
        }
        compare(self.mesh(), &held)
    }

    /// Returns the ids of this rank's experts.
    fn own_experts(&self) -> Vec<usize> {
        self.mesh().experts(self.replicated().spec().shape.experts)
    }

    /// Returns the digests of a tensor that holds these weights, one of each expert where they are
    /// of routed experts.
    fn held_values(
        &self,
        part: &DeviceLayer,
        names: &[&str],
        (tensor, buffer): (TensorId, &Buffer),
    ) -> Result<Vec<Held>, EngineError> {
        let (mesh, plan) = (self.mesh(), part.plan());
        let share = Sharding::of(mesh.parallel(), names[0]);
        let shape = shape_for(&plan[tensor], 0);
        let rows = shape.first().copied().unwrap_or(1);
        let row_bytes = plan[tensor].bytes(0) as usize / rows.max(1);
        let shard = (!share.is_everywhere()).then_some(mesh.place().tp);
        // Ranks of other targets pack weights in other ways, and ranks of one target in equal ones,
        // but for the number of experts.
        let packed =
            (plan[tensor].role == TensorRole::Packed).then_some((plan.target, shape.get(1..)));
        let form = format!("{shard:?} {packed:?}");
        let experts = share.counts_experts().then(|| self.own_experts());
        let mut digests = match &experts {
            Some(experts) => vec![Digest::default(); experts.len()],
            None => vec![Digest::default()],
        };
        // A layer may have more gigabytes on a device than the host has free.
        let step = (READ_BYTES / row_bytes.max(1)).max(1);
        let mut read = vec![0; row_bytes * step.min(rows)];
        for first in (0..rows).step_by(step) {
            let some = &mut read[..row_bytes * step.min(rows - first)];
            part.device.download(buffer, first * row_bytes, some)?;
            for (row, bytes) in some.chunks(row_bytes.max(1)).enumerate() {
                let at = experts.as_ref().map_or(0, |_| first + row);
                digests[at].add(bytes, row_bytes);
            }
        }
        let each = digests.into_iter().enumerate();
        let held = each.flat_map(|(at, digest)| {
            let (experts, form) = (&experts, &form);
            names.iter().map(move |name| Held {
                name: name.to_string(),
                expert: experts.as_ref().map(|experts| experts[at]),
                form: form.clone(),
                digest,
            })
        });
        Ok(held.collect())
    }

    /// Returns this rank's part of each weight, and its gradient where it has one.
    pub fn held_tensors(&self) -> Vec<&TensorPlan> {
        let weights = canonical_tensors(self.replicated().spec()).into_iter();
        let held = weights.flat_map(|weight| {
            let plan = self.weight_layer(&weight.name).plan();
            let names = [format!("grad.{}", weight.name), weight.name];
            names.map(|name| plan.tensor(&name))
        });
        held.flatten().collect()
    }

    /// Returns the part that holds a weight.
    pub fn weight_layer(&self, name: &str) -> &DeviceLayer {
        match self.mesh().process_group(name) {
            ProcessGroup::ExpertDp => self.own(),
            ProcessGroup::EpDp => self.shared().unwrap_or(self.replicated()),
            _ => self.replicated(),
        }
    }
}

/// The bytes of a weight that are read back at a time.
const READ_BYTES: usize = 8 << 20;

/// Returns the name of a weight; of a packed tensor those of the weights it is made of, because
/// kernels may read gate and up as one.
fn weight_names(plan: &LayerPlan, tensor: TensorId) -> Vec<&str> {
    let packs = plan.prepare.iter().filter(|step| step.tensors[1] == tensor);
    let names: Vec<&str> = packs.map(|step| &*plan[step.tensors[0]].name).collect();
    if names.is_empty() {
        vec![&plan[tensor].name]
    } else {
        names
    }
}
