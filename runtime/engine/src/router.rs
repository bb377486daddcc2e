//! One of several routers over the same experts: its launches and its weights.

use crate::call::{Input, Output, RngKey};
use crate::device_layer::DeviceLayer;
use crate::error::EngineError;
use crate::launch::{Bound, Scalars};
use crate::memory::{Addresses, Workspace, outlives_calls, tensors};
use crate::pass::Pass;
use moesaic_plan::{Step, TensorId};
use moesaic_target::{Buffer, Ptr};

/// A tensor's memory, and its first byte there.
#[derive(Clone, Copy)]
pub(crate) struct Place<'a> {
    pub buffer: &'a Buffer,
    pub offset: usize,
}

/// The launches of a router, and the memory of the tensors that they name. All routers have one
/// plan, so these serve each of them.
pub(crate) struct RouterSteps {
    pub bound: Bound,
    /// Tensors in memory of the router's own.
    pub own: Vec<TensorId>,
    /// Tensors in the stack's memory, with their ids there.
    stacked: Vec<(TensorId, TensorId)>,
}

impl RouterSteps {
    /// Binds `steps`. They need memory for the tensors that they and `others` name, unless the
    /// stack has it, as `there` returns.
    pub fn new(
        [router, experts]: [&DeviceLayer; 2],
        steps: &[Step],
        others: &[Step],
        there: impl Fn(&str) -> bool,
    ) -> Result<RouterSteps, EngineError> {
        let plan = router.plan();
        let all = plan.tensors.iter().enumerate();
        let stacked = all.filter_map(|(at, tensor)| {
            let id = experts.id(&tensor.name).filter(|_| there(&tensor.name));
            Some((TensorId(at), id?))
        });
        let stacked: Vec<(TensorId, TensorId)> = stacked.collect();
        let mut own = tensors(steps.iter().chain(others));
        // The router's layer holds its weights and gradients itself.
        own.retain(|id| !outlives_calls(plan[*id].role));
        own.retain(|id| !stacked.iter().any(|(own, _)| own == id));
        Ok(RouterSteps {
            bound: router.bind(steps)?,
            own: own.into_iter().collect(),
            stacked,
        })
    }

    /// Returns the id of a tensor in the stack.
    pub fn stacked(&self, tensor: TensorId) -> Option<TensorId> {
        let found = self.stacked.iter().find(|(own, _)| *own == tensor);
        found.map(|(_, there)| *there)
    }

    /// Reserves memory for the router's own tensors.
    pub fn reserve(
        &self,
        own: &mut Workspace,
        router: &DeviceLayer,
        tokens: usize,
    ) -> Result<(), EngineError> {
        let tensors = self.own.iter().copied();
        Ok(own.reserve(tensors, &router.tilings, &*router.device, tokens as u64)?)
    }
}

/// Runs one router's launches and reads back their results.
pub(crate) fn decide<'b>(
    router: &DeviceLayer,
    steps: &RouterSteps,
    pass: Pass,
    rng_key: RngKey,
    input: &Input<'_>,
    names: &[&str],
    place: impl Fn(TensorId) -> Option<Place<'b>>,
) -> Result<(Output, Scalars), EngineError> {
    let tokens = input.tokens;
    let scalars = router.scalars(pass, rng_key, tokens, input.capacity_factor)?;
    for id in router.inputs_or_named(pass, names) {
        let tensor = &router.plan()[id];
        // The stack has uploaded `x` once for all routers.
        if tensor.name != "x" {
            let host = router.checked_input(input, tensor)?;
            let Place { buffer, offset } = place(id).expect("inputs have memory");
            router.device.upload(&host.data, buffer, offset)?;
        }
    }
    router.run(&steps.bound, &scalars, &addresses(router, &place), None)?;
    let mut output = Output::default();
    for name in names.iter().filter(|name| **name != "y") {
        let tensor = router.id(name).expect("checked before");
        let lies = place(tensor).expect("outputs have memory");
        let host = router.read_at(tensor, tokens, lies)?;
        output.tensors.insert(name.to_string(), host);
    }
    Ok((output, scalars))
}

/// Returns whether a weight, or a gradient by `grad.` and the weight's name, is a router's, so that
/// routers over the same experts have one each.
pub(crate) fn is_of_router(name: &str) -> bool {
    name.trim_start_matches("grad.").starts_with("router.")
}

/// Returns the addresses of a router's tensors in a call.
pub(crate) fn addresses<'b>(
    router: &DeviceLayer,
    place: impl Fn(TensorId) -> Option<Place<'b>>,
) -> Addresses {
    let mut addresses = Addresses::default();
    router.lay(&mut addresses, []);
    for tensor in (0..router.plan().tensors.len()).map(TensorId) {
        if let Some(Place { buffer, offset }) = place(tensor) {
            addresses.set(tensor, Ptr(buffer.ptr().0 + offset as u64));
        }
    }
    addresses
}
