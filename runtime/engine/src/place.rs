//! Putting weights on the device, in the order the kernels read them.

use crate::forward::shape_for;
use crate::launch::dims;
use crate::{EngineError, HostTensor, Weights};
use moesaic_plan::{LaunchStep, LayerPlan, Role, TensorId, TensorPlan};
use moesaic_target::{Arg, Buffer, Device, Module, Ptr};
use std::collections::HashMap;
use std::sync::Arc;

/// The wanted weights of a plan on the device, packed ones among them. A weight
/// that kernels read only packed is there for no longer than that takes, one at
/// a time, so that memory holds the weights once.
pub(crate) fn placed(
    plan: &LayerPlan,
    modules: &[Arc<dyn Module>],
    device: &dyn Device,
    weights: &Weights<'_>,
    wanted: impl Fn(&str) -> bool,
) -> Result<HashMap<String, Buffer>, EngineError> {
    let _placing = Placing::begin(device);
    let mut held = HashMap::new();
    let of = |role: Role| {
        let tensors = plan.tensors.iter().enumerate();
        tensors.filter(move |(_, tensor)| tensor.role == role)
    };
    for (_, tensor) in of(Role::Packed).filter(|(_, tensor)| wanted(&tensor.name)) {
        let bytes = usize::try_from(tensor.bytes(0)).unwrap_or(usize::MAX);
        held.insert(tensor.name.clone(), device.alloc(bytes)?);
    }
    let packing = Packing {
        plan,
        modules,
        device,
    };
    for (at, tensor) in of(Role::Weight) {
        let away = plan.packs_away(TensorId(at));
        let here = match away {
            true => packing
                .steps(&tensor.name)
                .any(|s| held.contains_key(&plan[s.tensors[1]].name)),
            false => wanted(&tensor.name),
        };
        if !here {
            continue;
        }
        let host = weights.expect(&tensor.name, tensor.dtype, &shape_for(tensor, 0))?;
        match away {
            true => packing.pack(&tensor.name, host, &held)?,
            false => drop(held.insert(tensor.name.clone(), uploaded(tensor, host, device)?)),
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

/// What packs weights.
pub(crate) struct Packing<'a> {
    pub plan: &'a LayerPlan,
    pub modules: &'a [Arc<dyn Module>],
    pub device: &'a dyn Device,
}

impl Packing<'_> {
    /// Puts one weight into the packed tensors that are made of it.
    pub(crate) fn pack(
        &self,
        name: &str,
        host: &HostTensor<'_>,
        held: &HashMap<String, Buffer>,
    ) -> Result<(), EngineError> {
        let from = self.device.alloc(host.data.len().max(64))?;
        self.device.upload(&host.data, &from, 0)?;
        for step in self.steps(name) {
            self.launch(
                step,
                from.ptr(),
                held[&self.plan[step.tensors[1]].name].ptr(),
            )?;
        }
        // The source is freed here, and the kernels that read it must be done.
        Ok(self.device.synchronize()?)
    }

    /// The launches that read a weight.
    fn steps(&self, name: &str) -> impl Iterator<Item = &LaunchStep> {
        let steps = self.plan.prepare.iter();
        steps.filter(move |step| self.plan[step.tensors[0]].name == name)
    }

    fn launch(&self, step: &LaunchStep, from: Ptr, to: Ptr) -> Result<(), EngineError> {
        let entry = &self.plan[step.entry];
        let dims = dims(&entry.launch, 0);
        let args = [Arg::Ptr(from), Arg::Ptr(to), Arg::I64(0)];
        // SAFETY: an entry that packs takes the weight, the packed tensor and a
        // number of tokens; both buffers have the sizes the plan gives, and live
        // until the device is done.
        unsafe { self.modules[step.entry.kernel].launch(&entry.symbol, dims, &args)? };
        Ok(())
    }
}
