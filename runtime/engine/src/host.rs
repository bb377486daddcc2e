//! The host side of a call: inputs are checked and copied from, and outputs to, host memory.

use crate::call::{Input, Output, RngKey, shape_for};
use crate::device_layer::DeviceLayer;
use crate::error::EngineError;
use crate::launch::Scalars;
use crate::pass::Pass;
use crate::reason::InputReason;
use crate::router::Place;
use moesaic_plan::{TensorId, TensorPlan, TensorRole, row_limit};
use moesaic_target::Buffer;
use moesaic_tensor::Tensor;

/// The tokens of a rank, and of the rank with the most.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TokenCount {
    pub own: usize,
    pub most: usize,
}

impl DeviceLayer {
    /// Returns the inputs of a pass.
    pub(crate) fn inputs(&self, pass: Pass) -> &[TensorId] {
        &self.ports[pass as usize].inputs
    }

    fn outputs(&self, pass: Pass) -> impl Iterator<Item = &TensorPlan> {
        let outputs = self.ports[pass as usize].outputs.iter();
        outputs.map(|&tensor| &self.plan()[tensor])
    }

    /// Refuses names of tensors that cannot be read after a pass.
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

    /// Returns the values of scalars in a pass.
    ///
    /// # Errors
    /// [`EngineError::Capacity`] for a factor that the layer cannot have.
    pub(crate) fn scalars(
        &self,
        pass: Pass,
        rng_key: RngKey,
        tokens: usize,
        capacity_factor: Option<f64>,
    ) -> Result<Scalars, EngineError> {
        let count = TokenCount {
            own: tokens,
            most: tokens,
        };
        self.scalars_among(pass, rng_key, count, capacity_factor)
    }

    /// Returns the scalars on one of several ranks: all ranks use the capacity of the rank with the
    /// most tokens.
    pub(crate) fn scalars_among(
        &self,
        pass: Pass,
        rng_key: RngKey,
        TokenCount { own, most }: TokenCount,
        capacity_factor: Option<f64>,
    ) -> Result<Scalars, EngineError> {
        let spec = self.spec();
        if let Some(factor) = capacity_factor {
            let checked = spec.capacity.check_factor(factor);
            checked.map_err(|problem| EngineError::Capacity { factor, problem })?;
        }
        let factor = capacity_factor.unwrap_or(spec.capacity.factor_of(pass.trains()));
        // On the host, because a kernel would round `f * ceil(T / E)` as its target does, and ranks
        // with different targets would then drop different slots.
        let limit = row_limit(spec, factor, most as u64);
        Ok(Scalars::new(own, rng_key, limit))
    }

    /// Returns the tensors that a caller gives to a pass, or asks for by name.
    pub(crate) fn inputs_or_named<'l>(
        &'l self,
        pass: Pass,
        names: &'l [&str],
    ) -> impl Iterator<Item = TensorId> {
        let inputs = self.inputs(pass);
        let outputs = self.ports[pass as usize].outputs.iter();
        let asked = outputs.filter(move |id| {
            let tensor = &self.plan()[**id];
            let own = tensor.role == TensorRole::Input && !inputs.contains(id);
            own && names.contains(&&*tensor.name)
        });
        inputs.iter().chain(asked).copied()
    }

    /// Puts inputs where the kernels of a pass read them, or the caller its
    /// outputs by `names`.
    pub(crate) fn stage<'b>(
        &self,
        pass: Pass,
        input: &Input<'_>,
        names: &[&str],
        find: impl Fn(TensorId) -> Option<&'b Buffer>,
    ) -> Result<(), EngineError> {
        for tensor in self.inputs_or_named(pass, names) {
            let host = self.checked_input(input, &self.plan()[tensor])?;
            let staged = find(tensor).expect("inputs have memory");
            self.device.upload(&host.data, staged, 0)?;
        }
        Ok(())
    }

    /// Reads tensors back, which must be the layer's.
    pub(crate) fn read<'b>(
        &self,
        names: &[&str],
        tokens: usize,
        find: impl Fn(TensorId) -> Option<&'b Buffer>,
    ) -> Result<Output, EngineError> {
        let mut output = Output::default();
        for name in names {
            let tensor = self.id(name).expect("checked before");
            let buffer = find(tensor).expect("outputs have memory");
            let host = self.read_at(tensor, tokens, Place { buffer, offset: 0 })?;
            output.tensors.insert(name.to_string(), host);
        }
        Ok(output)
    }

    /// Reads one tensor back from where it lies.
    pub(crate) fn read_at(
        &self,
        tensor: TensorId,
        tokens: usize,
        Place { buffer, offset }: Place<'_>,
    ) -> Result<Tensor<'static>, EngineError> {
        let tensor = &self.plan()[tensor];
        let mut host = Tensor::zeros(tensor.dtype, &shape_for(tensor, tokens));
        self.device.download(buffer, offset, host.data.to_mut())?;
        Ok(host)
    }

    /// Checks an input against the spec. Ids index device memory, so they are copied before the
    /// check: a caller's file may change meanwhile.
    pub(crate) fn checked_input<'i>(
        &self,
        input: &'i Input<'_>,
        tensor: &TensorPlan,
    ) -> Result<Tensor<'i>, EngineError> {
        let shape = shape_for(tensor, input.tokens);
        let host = input.tensors.get(&tensor.name).ok_or_else(|| {
            let reason = InputReason::Missing {
                dtype: tensor.dtype,
                shape: shape.clone(),
            };
            EngineError::input(&tensor.name, reason)
        })?;
        // Zero tokens have no width of their own.
        if input.tokens > 0 || !host.data.is_empty() {
            host.check(tensor.dtype, &shape)
                .map_err(|differs| EngineError::input(&tensor.name, differs))?;
        }
        check_counts(&tensor.name, host, input.tokens)?;
        let spec = &self.plan().spec;
        let Some(range) = spec.indices(&tensor.name) else {
            return Ok(host.lend());
        };
        let ids: Vec<i32> = host.to_vec().unwrap_or_default();
        range.check(&ids).map_err(|error| {
            let reason = InputReason::Range {
                found: error.found,
                at: error.at,
                least: error.least,
                most: error.most,
            };
            EngineError::input(&tensor.name, reason)
        })?;
        Ok(Tensor::owned(&shape, ids))
    }
}

/// Refuses impossible numbers of tokens: a group has at least those of this call, and losses divide
/// by the number.
fn check_counts(name: &str, host: &Tensor<'_>, tokens: usize) -> Result<(), EngineError> {
    let least = match name {
        "global_counts" => 0,
        "global_tokens" => i64::from(tokens > 0),
        _ => return Ok(()),
    };
    let counts: Vec<i64> = host.to_vec().unwrap_or_default();
    match counts.iter().position(|count| *count < least) {
        Some(at) => {
            let reason = InputReason::Count {
                found: counts[at],
                at,
                least,
            };
            Err(EngineError::input(name, reason))
        }
        None => Ok(()),
    }
}

fn join<'t>(tensors: impl Iterator<Item = &'t TensorPlan>) -> String {
    let names: Vec<&str> = tensors.map(|tensor| tensor.name.as_str()).collect();
    names.join(", ")
}
