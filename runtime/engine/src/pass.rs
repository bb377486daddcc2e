//! The forward passes of a layer: the launches of each, what it takes and what
//! may be read after it.

use crate::forward::{input_error, shape_for};
use crate::launch::{Counters, Scalars};
use crate::{EngineError, Input, Layer, Output, RawCall};
use moesaic_plan::{LayerPlan, Role, Step, TensorPlan, row_limit};
use moesaic_target::Buffer;
use moesaic_tensor::Tensor;
use std::collections::BTreeSet;

/// What a call does of a forward pass, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pass {
    /// All of it; draws nothing and keeps nothing.
    Evaluate,
    /// All of it; draws random numbers and keeps what backward needs.
    Train,
    /// Decides where tokens go, as in evaluation.
    Route,
    /// Decides where tokens go, as in training.
    RouteTrain,
}

/// What a pass has to do with its caller: indices of tensors.
pub(crate) struct Ports {
    inputs: Vec<usize>,
    outputs: Vec<usize>,
}

/// The ports of every pass, at the pass's number.
pub(crate) type AllPorts = [Ports; 4];

impl Pass {
    const ALL: [Pass; 4] = [Pass::Evaluate, Pass::Train, Pass::Route, Pass::RouteTrain];

    /// Whether random numbers are drawn.
    pub fn trains(self) -> bool {
        matches!(self, Pass::Train | Pass::RouteTrain)
    }

    pub fn steps(self, plan: &LayerPlan) -> &[Step] {
        match self {
            Pass::Evaluate => plan.evaluation_steps(),
            Pass::Train => &plan.steps,
            Pass::Route => plan.routing_of(plan.evaluation_steps()),
            Pass::RouteTrain => plan.routing_of(&plan.steps),
        }
    }

    fn ports(self, plan: &LayerPlan) -> Ports {
        let mut named = names(plan, self.steps(plan));
        if self == Pass::Train {
            named.extend(names(plan, &plan.backward));
        }
        let inputs = of_role(plan, &named, &[Role::Input]);
        // A routing call gives the weights of the caller's own decision, too,
        // if it is asked for them.
        named.insert("topk_weights");
        let outputs = of_role(plan, &named, &[Role::Input, Role::Output]);
        Ports { inputs, outputs }
    }
}

/// The named tensors that have one of these roles.
fn of_role(plan: &LayerPlan, named: &BTreeSet<&str>, roles: &[Role]) -> Vec<usize> {
    let tensors = plan.tensors.iter().enumerate();
    let found = tensors.filter(|(_, t)| roles.contains(&t.role) && named.contains(&*t.name));
    found.map(|(index, _)| index).collect()
}

fn names<'p>(plan: &'p LayerPlan, steps: &'p [Step]) -> BTreeSet<&'p str> {
    steps.iter().flat_map(|step| plan.names(step)).collect()
}

/// The ports of a plan's passes.
pub(crate) fn ports(plan: &LayerPlan) -> AllPorts {
    Pass::ALL.map(|pass| pass.ports(plan))
}

/// The tensors that training keeps and that other passes need for themselves.
pub(crate) fn passing(plan: &LayerPlan) -> Vec<String> {
    let mut named = names(plan, plan.evaluation_steps());
    named.extend(names(plan, Pass::RouteTrain.steps(plan)));
    let kept = plan.saved().into_iter().map(|t| plan[t].name.clone());
    kept.filter(|name| named.contains(&**name)).collect()
}

impl Layer {
    /// What a caller gives to a pass.
    pub(crate) fn inputs(&self, pass: Pass) -> impl Iterator<Item = &TensorPlan> {
        let inputs = self.ports[pass as usize].inputs.iter();
        inputs.map(|&index| &self.plan().tensors[index])
    }

    fn outputs(&self, pass: Pass) -> impl Iterator<Item = &TensorPlan> {
        let outputs = self.ports[pass as usize].outputs.iter();
        outputs.map(|&index| &self.plan().tensors[index])
    }

    /// Whether these can be read after a pass.
    pub(crate) fn check_outputs(&self, pass: Pass, names: &[&str]) -> Result<(), EngineError> {
        for name in names {
            if self.outputs(pass).any(|tensor| tensor.name == *name) {
                continue;
            }
            let name = name.to_string();
            let of = |pass| {
                self.outputs(pass)
                    .any(|tensor: &TensorPlan| tensor.name == name)
            };
            return Err(match pass {
                Pass::Evaluate if of(Pass::Train) => EngineError::TrainingOutput { name },
                _ => EngineError::NoOutput {
                    name,
                    known: join(self.outputs(pass)),
                },
            });
        }
        Ok(())
    }

    /// The values of scalars in a pass.
    ///
    /// # Errors
    /// [`EngineError::Capacity`] for a factor that the layer cannot have.
    pub(crate) fn scalars(
        &self,
        pass: Pass,
        counters: Counters,
        tokens: usize,
        capacity_factor: Option<f64>,
    ) -> Result<Scalars, EngineError> {
        let spec = self.spec();
        if let Some(factor) = capacity_factor {
            let checked = spec.capacity.check_factor(factor);
            checked.map_err(|problem| EngineError::Capacity { factor, problem })?;
        }
        let factor = capacity_factor.unwrap_or(spec.capacity.factor_of(pass.trains()));
        let limit = row_limit(spec, factor, tokens as u64);
        Ok(Scalars::new(tokens, counters, limit))
    }

    /// What a caller gives to a pass, and those of its own tensors that it asks for.
    pub(crate) fn inputs_or_named<'l>(
        &'l self,
        pass: Pass,
        names: &'l [&str],
    ) -> impl Iterator<Item = &'l TensorPlan> {
        let asked = self.outputs(pass).filter(move |tensor| {
            let read = self.inputs(pass).any(|read| read.name == tensor.name);
            tensor.role == Role::Input && !read && names.contains(&&*tensor.name)
        });
        self.inputs(pass).chain(asked)
    }

    /// Puts inputs where the kernels of a pass read them, or the caller its
    /// outputs by `names`.
    pub(crate) fn stage<'b>(
        &self,
        pass: Pass,
        input: &Input<'_>,
        names: &[&str],
        find: impl Fn(&str) -> Option<&'b Buffer>,
    ) -> Result<(), EngineError> {
        for tensor in self.inputs_or_named(pass, names) {
            let host = self.checked_input(input, tensor)?;
            let staged = find(&tensor.name).expect("inputs have memory");
            self.device.upload(&host.data, staged, 0)?;
        }
        Ok(())
    }

    /// Whether every input of a pass has an address.
    pub(crate) fn check_given(&self, pass: Pass, call: &RawCall<'_>) -> Result<(), EngineError> {
        for tensor in self.inputs(pass) {
            if !call.tensors.iter().any(|(name, _)| *name == tensor.name) {
                return Err(input_error(&tensor.name, "has no address".to_string()));
            }
        }
        self.check_addresses(call.tensors)
    }

    /// Reads tensors back, which must be the layer's.
    pub(crate) fn read<'b>(
        &self,
        names: &[&str],
        tokens: usize,
        find: impl Fn(&str) -> Option<&'b Buffer>,
    ) -> Result<Output, EngineError> {
        let mut output = Output::default();
        for name in names {
            let buffer = find(name).expect("outputs have memory");
            let host = self.read_at(name, tokens, (buffer, 0))?;
            output.tensors.insert(name.to_string(), host);
        }
        Ok(output)
    }

    /// Reads one tensor back from where it lies: memory, and the first byte there.
    pub(crate) fn read_at(
        &self,
        name: &str,
        tokens: usize,
        (buffer, first): (&Buffer, usize),
    ) -> Result<Tensor<'static>, EngineError> {
        let tensor = self.plan().tensor(name).expect("checked before");
        let mut host = Tensor::zeros(tensor.dtype, &shape_for(tensor, tokens));
        self.device.download(buffer, first, host.data.to_mut())?;
        Ok(host)
    }
}

fn join<'t>(tensors: impl Iterator<Item = &'t TensorPlan>) -> String {
    let names: Vec<&str> = tensors.map(|tensor| tensor.name.as_str()).collect();
    names.join(", ")
}
