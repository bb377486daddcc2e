//! Putting weights on the device, in the order the kernels read them.

use crate::call::{Counters, shape_for};
use crate::error::EngineError;
use crate::launch::{BoundStep, Modules, Scalars};
use crate::memory::{Addresses, Buffers};
use crate::tensor::{HostTensor, Weights};
use moesaic_plan::{LaunchStep, LayerPlan, Role, TensorId, TensorPlan};
use moesaic_target::{Buffer, Device, Ptr};

/// The wanted weights of a plan on the device, packed ones among them. A weight
/// that kernels read only packed is there for no longer than that takes, one at
/// a time, so that memory holds the weights once.
pub(crate) fn placed(
    plan: &LayerPlan,
    modules: &Modules,
    device: &dyn Device,
    weights: &Weights<'_>,
    wanted: impl Fn(&str) -> bool,
) -> Result<Buffers, EngineError> {
    let _placing = Placing::begin(device);
    let mut held = Buffers::default();
    let of = |role: Role| {
        let tensors = plan.tensors.iter().enumerate();
        let tensors = tensors.map(|(at, tensor)| (TensorId(at), tensor));
        tensors.filter(move |(_, tensor)| tensor.role == role)
    };
    for (id, tensor) in of(Role::Packed).filter(|(_, tensor)| wanted(&tensor.name)) {
        let bytes = usize::try_from(tensor.bytes(0)).unwrap_or(usize::MAX);
        held.push(id, device.alloc(bytes)?);
    }
    let packing = Packing {
        plan,
        modules,
        device,
    };
    for (id, tensor) in of(Role::Weight) {
        let away = plan.packs_away(id);
        let here = match away {
            true => packing
                .steps(id)
                .any(|step| held.get(step.tensors[1]).is_some()),
            false => wanted(&tensor.name),
        };
        if !here {
            continue;
        }
        let host = weights.expect(&tensor.name, tensor.dtype, &shape_for(tensor, 0))?;
        match away {
            true => packing.pack(id, host, &held)?,
            false => held.push(id, uploaded(tensor, host, device)?),
        }
    }
    Ok(held)
}

/// Weights stay where they are written first; ended when dropped, also by an error.
struct Placing<'a>(&'a dyn Device);

impl<'a> Placing<'a> {
    fn begin(device: &'a dyn Device) -> Placing<'a> {
        device.begin_placing();
        Placing(device)
    }
}

impl Drop for Placing<'_> {
    fn drop(&mut self) {
        self.0.end_placing();
    }
}

/// A weight in device memory.
fn uploaded(
    tensor: &TensorPlan,
    host: &HostTensor<'_>,
    device: &dyn Device,
) -> Result<Buffer, EngineError> {
    debug_assert_eq!(host.data.len() as u64, tensor.bytes(0), "{}", tensor.name);
    let buffer = device.alloc(host.data.len().max(64))?;
    device.upload(&host.data, &buffer, 0)?;
    Ok(buffer)
}

/// The gradient of a weight, all zero.
pub(crate) fn zeroed(tensor: &TensorPlan, device: &dyn Device) -> Result<Buffer, EngineError> {
    let bytes = (tensor.bytes(0) as usize).max(64);
    let buffer = device.alloc(bytes)?;
    device.upload(&vec![0; bytes], &buffer, 0)?;
    Ok(buffer)
}

/// What packs weights.
pub(crate) struct Packing<'a> {
    pub plan: &'a LayerPlan,
    pub modules: &'a Modules,
    pub device: &'a dyn Device,
}

impl Packing<'_> {
    /// Puts one weight into the packed tensors that are made of it.
    pub(crate) fn pack(
        &self,
        weight: TensorId,
        host: &HostTensor<'_>,
        held: &Buffers,
    ) -> Result<(), EngineError> {
        let from = self.device.alloc(host.data.len().max(64))?;
        self.device.upload(&host.data, &from, 0)?;
        for step in self.steps(weight) {
            self.launch(step, from.ptr(), held)?;
        }
        // The source is freed here, and the kernels that read it must be done.
        Ok(self.device.synchronize()?)
    }

    /// The launches that read a weight.
    fn steps(&self, weight: TensorId) -> impl Iterator<Item = &LaunchStep> {
        let steps = self.plan.prepare.iter();
        steps.filter(move |step| step.tensors[0] == weight)
    }

    fn launch(&self, step: &LaunchStep, from: Ptr, held: &Buffers) -> Result<(), EngineError> {
        let mut addresses = Addresses::default();
        addresses.clear(self.plan.tensors.len());
        addresses.lay(held);
        addresses.set(step.tensors[0], from);
        let scalars = Scalars::new(0, Counters::default(), 0);
        let bound = BoundStep::new(self.plan, self.modules, step)?;
        Ok(bound.launch(&scalars, &addresses, &mut Vec::new())?)
    }
}
