//! Launching steps: addresses and scalars behind the parameters.

use crate::forward::StepTime;
use crate::{EngineError, Layer};
use moesaic_kernel::{Launch, Param, ParamType, TensorMap};
use moesaic_plan::{LaunchStep, LayerPlan, Step, TensorId};
use moesaic_target::{Arg, Device, DeviceError, LaunchDims, Module, Ptr};
use std::cell::Cell;
use std::sync::Arc;
use std::time::Instant;

/// Where a training call stands, for random numbers: they depend on these, the
/// token and the slot, and on nothing else, so that a rank that has tokens
/// from `first_token` on draws what one process would.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// The run.
    pub seed: u64,
    /// The optimizer step, or micro-batch.
    pub step: u64,
    /// The layer in its model.
    pub layer: u64,
    /// The number of this call's first token in the whole batch.
    pub first_token: u64,
}

/// The values of scalar parameters, by name.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scalars {
    tokens: i64,
    accumulate: bool,
    counters: Counters,
    /// See [`moesaic_plan::row_limit`].
    row_limit: i64,
}

impl Scalars {
    pub(crate) fn new(tokens: usize, counters: Counters, row_limit: i64) -> Scalars {
        Scalars {
            tokens: tokens as i64,
            accumulate: false,
            counters,
            row_limit,
        }
    }

    pub(crate) fn tokens(&self) -> usize {
        self.tokens as usize
    }

    /// Weight gradients are added to instead of overwritten.
    pub(crate) fn accumulating(self, accumulate: bool) -> Scalars {
        Scalars { accumulate, ..self }
    }

    fn get(&self, name: &str) -> Option<i64> {
        let counters = &self.counters;
        match name {
            "tokens" => Some(self.tokens),
            "accumulate" => Some(i64::from(self.accumulate)),
            "row_limit" => Some(self.row_limit),
            "seed" => Some(counters.seed as i64),
            "step" => Some(counters.step as i64),
            "layer" => Some(counters.layer as i64),
            "first_token" => Some(counters.first_token as i64),
            _ => None,
        }
    }
}

thread_local! {
    /// Room for the arguments of a launch, kept from call to call.
    static ARGS: Cell<Vec<Arg>> = const { Cell::new(Vec::new()) };
}

/// The geometry of a launch for a token count.
pub(crate) fn dims(launch: &Launch, tokens: u64) -> LaunchDims {
    LaunchDims {
        grid: [launch.grid[0].eval(tokens), launch.grid[1].eval(tokens)],
        threads: launch.threads,
        shared_bytes: launch.shared_bytes,
        cluster: launch.cluster,
    }
}

/// The launches of one pass; ended when dropped, also by an error.
struct Pass<'a>(&'a dyn Device);

impl<'a> Pass<'a> {
    fn begin(device: &'a dyn Device) -> Pass<'a> {
        device.begin_pass();
        Pass(device)
    }
}

impl Drop for Pass<'_> {
    fn drop(&mut self) {
        self.0.end_pass();
    }
}

/// What calls of some number of tokens launch.
struct Tiling<'a> {
    plan: &'a LayerPlan,
    modules: &'a [Arc<dyn Module>],
}

impl Layer {
    /// The tiling of a call, which its forward and backward passes have in
    /// common: one lists row tiles, and the other walks them.
    fn tiling(&self, tokens: usize) -> Tiling<'_> {
        let index = self.tilings.index(tokens);
        Tiling {
            plan: &self.tilings.plans()[index],
            modules: &self.modules[index],
        }
    }

    /// Launches steps in order, which are those of every tiling.
    pub(crate) fn run(
        &self,
        steps: &[Step],
        scalars: &Scalars,
        ptr: impl Fn(&str) -> Option<Ptr>,
        mut times: Option<&mut Vec<StepTime>>,
    ) -> Result<(), EngineError> {
        let tiling = self.tiling(scalars.tokens());
        let _pass = Pass::begin(&*self.device);
        let mut args = ARGS.take();
        for step in steps {
            let start = Instant::now();
            let Step::Launch(launch) = step;
            self.launch(&tiling, launch, scalars, &ptr, &mut args)?;
            if let Some(times) = times.as_deref_mut() {
                self.device.synchronize()?;
                let kernel = tiling.plan.kernels[launch.entry.kernel].name.clone();
                let symbol = tiling.plan.symbol(step).to_string();
                times.push(StepTime {
                    kernel,
                    symbol,
                    time: start.elapsed(),
                });
            }
        }
        ARGS.set(args);
        Ok(())
    }

    fn launch(
        &self,
        tiling: &Tiling<'_>,
        step: &LaunchStep,
        scalars: &Scalars,
        ptr: impl Fn(&str) -> Option<Ptr>,
        args: &mut Vec<Arg>,
    ) -> Result<(), EngineError> {
        let entry = &tiling.plan[step.entry];
        let tokens = scalars.tokens as u64;
        let mut tensors = step.tensors.iter();
        args.clear();
        for param in &entry.params {
            args.push(self.arg(&entry.symbol, param, &mut tensors, scalars, &ptr)?);
        }
        let dims = dims(&entry.launch, tokens);
        // SAFETY: the arguments follow the entry's own parameter list, since
        // the step's tensors were listed from it; each address is a buffer of
        // the tensor's size for at least `tokens` tokens, or the caller of
        // a raw call vouches for it; buffers outlive the launch because a
        // device frees and grows them in stream order.
        unsafe { tiling.modules[step.entry.kernel].launch(&entry.symbol, dims, args)? };
        Ok(())
    }

    /// The argument of one parameter; tensors are taken in order.
    fn arg<'a>(
        &self,
        symbol: &str,
        param: &Param,
        tensors: &mut impl Iterator<Item = &'a TensorId>,
        scalars: &Scalars,
        ptr: impl Fn(&str) -> Option<Ptr>,
    ) -> Result<Arg, EngineError> {
        let failed = |reason: String| DeviceError::Launch {
            kernel: symbol.to_string(),
            reason,
        };
        if param.ty.tensor().is_none() {
            let value = scalars.get(&param.name);
            let unknown = || failed(format!("nothing is known of scalar `{}`", param.name));
            return Ok(Arg::I64(value.ok_or_else(unknown)?));
        }
        let name = tensors
            .next()
            .ok_or_else(|| failed(format!("no tensor for `{}`", param.name)))?;
        let name = &*self.plan()[*name].name;
        let held = || self.held(name);
        let address = ptr(name)
            .or_else(held)
            .ok_or_else(|| failed(format!("tensor `{name}` has no memory; run forward first")))?;
        Ok(match param.ty {
            ParamType::TensorMap(map) => Arg::TensorMap {
                base: address,
                dims: self.map_dims(&map, name, scalars.tokens as u64),
            },
            _ => Arg::Ptr(address),
        })
    }

    /// The sizes of a tensor as a tensor map names them: innermost first, those
    /// beyond its rank folded into the outermost.
    fn map_dims(&self, map: &TensorMap, name: &str, tokens: u64) -> [u64; 5] {
        let mut dims = [1; 5];
        let last = usize::from(map.rank) - 1;
        let tensor = self.plan().tensor(name);
        let shape = tensor.map_or(&[][..], |tensor| &tensor.shape);
        for (i, size) in shape.iter().rev().enumerate() {
            dims[i.min(last)] *= size.eval(tokens);
        }
        dims
    }
}
