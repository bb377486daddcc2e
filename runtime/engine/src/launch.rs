//! Steps bound once to the kernels that they launch, and their launches.

use crate::call::{RngKey, StepTime};
use crate::error::EngineError;
use crate::memory::{Addresses, outlives_calls, tensors};
use crate::trace::{Activity, Lane, Recorder};
use moesaic_kernel::{Launch, ParamType, Size};
use moesaic_plan::{Chunk, LaunchStep, LayerPlan, Step, TensorId, Tilings};
use moesaic_target::{Arg, Device, FunctionId, LaunchDims, Module, Ptr};
use std::cell::Cell;
use std::sync::Arc;
use std::time::Instant;

/// The loaded kernels of a plan, at its kernels' numbers.
pub(crate) type Modules = Vec<Arc<dyn Module>>;

/// A value that a call gives its kernels.
#[derive(Clone, Copy, Debug)]
enum Scalar {
    Tokens,
    Accumulate,
    RowLimit,
    Seed,
    Step,
    Layer,
    FirstToken,
}

impl Scalar {
    /// Returns the scalar of a parameter name.
    fn named(name: &str) -> Option<Scalar> {
        Some(match name {
            "tokens" => Scalar::Tokens,
            "accumulate" => Scalar::Accumulate,
            "row_limit" => Scalar::RowLimit,
            "seed" => Scalar::Seed,
            "step" => Scalar::Step,
            "layer" => Scalar::Layer,
            "first_token" => Scalar::FirstToken,
            _ => return None,
        })
    }
}

/// The scalars of a call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scalars {
    tokens: i64,
    accumulate: bool,
    rng_key: RngKey,
    /// See [`moesaic_plan::row_limit`].
    row_limit: i64,
}

impl Scalars {
    pub fn new(tokens: usize, rng_key: RngKey, row_limit: i64) -> Scalars {
        Scalars {
            tokens: tokens as i64,
            accumulate: false,
            rng_key,
            row_limit,
        }
    }

    pub fn tokens(&self) -> usize {
        self.tokens as usize
    }

    /// Sets whether weight gradients are added to instead of overwritten.
    pub fn accumulating(self, accumulate: bool) -> Scalars {
        Scalars { accumulate, ..self }
    }

    /// Returns the scalars for some of the rows; `adds` if other rows have already written
    /// gradients of weights.
    pub fn of_chunk(self, tokens: usize, adds: bool) -> Scalars {
        Scalars {
            tokens: tokens as i64,
            accumulate: self.accumulate || adds,
            ..self
        }
    }

    fn get(&self, scalar: Scalar) -> i64 {
        let rng_key = &self.rng_key;
        match scalar {
            Scalar::Tokens => self.tokens,
            Scalar::Accumulate => i64::from(self.accumulate),
            Scalar::RowLimit => self.row_limit,
            Scalar::Seed => rng_key.seed as i64,
            Scalar::Step => rng_key.step as i64,
            Scalar::Layer => rng_key.layer as i64,
            Scalar::FirstToken => rng_key.first_token as i64,
        }
    }
}

/// The value of a parameter.
enum BoundArg {
    Scalar(Scalar),
    /// The rows of the layer's table, the same in each call.
    TableRows(i64),
    Tensor(TensorId),
    /// A tensor's shape, innermost first, and the rank of its map.
    Map(TensorId, Vec<Size>, u8),
}

impl BoundArg {
    fn tensor(&self) -> Option<TensorId> {
        match self {
            BoundArg::Scalar(_) | BoundArg::TableRows(_) => None,
            BoundArg::Tensor(tensor) | BoundArg::Map(tensor, ..) => Some(*tensor),
        }
    }

    fn value(&self, scalars: &Scalars, addresses: &Addresses) -> Arg {
        match self {
            BoundArg::Scalar(scalar) => Arg::I64(scalars.get(*scalar)),
            BoundArg::TableRows(rows) => Arg::I64(*rows),
            BoundArg::Tensor(tensor) => Arg::Ptr(addresses.get(*tensor)),
            BoundArg::Map(tensor, shape, rank) => Arg::TensorMap {
                base: addresses.get(*tensor),
                dims: map_dims(shape, *rank, scalars.tokens as u64),
            },
        }
    }
}

/// Returns the sizes of a tensor as a tensor map names them: innermost first, those beyond its rank
/// folded into the outermost.
fn map_dims(shape: &[Size], rank: u8, tokens: u64) -> [u64; 5] {
    let mut dims = [1; 5];
    let last = usize::from(rank) - 1;
    for (i, size) in shape.iter().enumerate() {
        dims[i.min(last)] *= size.eval(tokens);
    }
    dims
}

/// Returns the geometry of a launch for a token count.
pub(crate) fn dims(launch: &Launch, tokens: u64) -> LaunchDims {
    LaunchDims {
        grid: [launch.grid[0].eval(tokens), launch.grid[1].eval(tokens)],
        threads: launch.threads,
        shared_bytes: launch.shared_bytes,
        cluster: launch.cluster,
    }
}

/// A launch with everything that it needs in every call.
struct BoundStep {
    kernel: String,
    symbol: String,
    module: Arc<dyn Module>,
    function: FunctionId,
    launch: Launch,
    args: Vec<BoundArg>,
    /// The parameters' names, for errors.
    params: Vec<String>,
}

impl BoundStep {
    /// Binds a launch of a plan, whose kernels are loaded in `modules`.
    ///
    /// # Errors
    /// [`EngineError::Unbound`] for a plan that does not fit its kernels.
    fn new(
        plan: &LayerPlan,
        modules: &Modules,
        step: &LaunchStep,
    ) -> Result<BoundStep, EngineError> {
        let entry = &plan[step.entry];
        let unbound = |problem| EngineError::Unbound {
            symbol: entry.symbol.clone(),
            problem,
        };
        let mut tensors = step.tensors.iter().copied();
        let mut next = |name: &str| {
            let tensor = tensors.next().filter(|id| id.0 < plan.tensors.len());
            tensor.ok_or_else(|| unbound(format!("the plan has no tensor for `{name}`")))
        };
        let args = entry.params.iter().map(|param| {
            Ok(match param.ty {
                ParamType::Tensor(..) => BoundArg::Tensor(next(&param.name)?),
                ParamType::TensorMap(map) => {
                    let tensor = next(&param.name)?;
                    let shape = plan[tensor].shape.iter().rev().cloned();
                    BoundArg::Map(tensor, shape.collect(), map.rank)
                }
                ParamType::Scalar(_) if param.name == "table_rows" => {
                    BoundArg::TableRows(plan.spec.router.table_rows.unwrap_or(0) as i64)
                }
                ParamType::Scalar(_) => {
                    let scalar = Scalar::named(&param.name);
                    let unknown = || unbound(format!("nothing is known of `{}`", param.name));
                    BoundArg::Scalar(scalar.ok_or_else(unknown)?)
                }
            })
        });
        let args = args.collect::<Result<_, EngineError>>()?;
        let module = &modules[step.entry.kernel];
        Ok(BoundStep {
            kernel: plan.kernels[step.entry.kernel].name.clone(),
            symbol: entry.symbol.clone(),
            function: module.function(&entry.symbol)?,
            module: module.clone(),
            launch: entry.launch.clone(),
            params: entry.params.iter().map(|p| p.name.clone()).collect(),
            args,
        })
    }

    /// Launches it, if it has blocks for so many tokens; `args` is room for its arguments.
    fn launch(
        &self,
        scalars: &Scalars,
        addresses: &Addresses,
        args: &mut Vec<Arg>,
    ) -> Result<(), EngineError> {
        let dims = dims(&self.launch, scalars.tokens as u64);
        // A call without tokens is legal, but CUDA and HIP refuse a launch with an empty grid.
        if dims.grid.contains(&0) {
            return Ok(());
        }
        args.clear();
        let bound = self.args.iter();
        args.extend(bound.map(|arg| arg.value(scalars, addresses)));
        // Kernels would read address 0 as if it were memory, and on a GPU that error ends the
        // context. Without tokens tensors may be empty, and a caller may then give address 0 for
        // them.
        if let Some(at) = args
            .iter()
            .position(is_nowhere)
            .filter(|_| scalars.tokens > 0)
        {
            return Err(EngineError::Unbound {
                symbol: self.symbol.clone(),
                problem: format!("`{}` has no memory in this call", self.params[at]),
            });
        }
        // SAFETY: the function is the module's, and the arguments were bound to
        // its entry's own parameter list; each address is a buffer of the tensor's
        // size for at least `tokens` tokens, or the caller of a raw call vouches
        // for it; buffers outlive the launch because a device frees and grows
        // them in stream order.
        unsafe { self.module.run(self.function, dims, args) }?;
        Ok(())
    }

    /// Launches with a recorder.
    fn launch_recorded(
        &self,
        scalars: &Scalars,
        addresses: &Addresses,
        args: &mut Vec<Arg>,
        device: &dyn Device,
        watch: &Watch<'_>,
    ) -> Result<(), EngineError> {
        let tensors = self.args.iter().filter_map(BoundArg::tensor);
        let tokens = scalars.tokens as u64;
        let activity = Activity {
            lane: Lane::Compute,
            name: self.symbol.clone(),
            chunk: watch.chunk,
            bytes: tensors
                .map(|tensor| watch.tilings.bytes(tensor, tokens))
                .sum(),
        };
        watch.recorder.begins(&activity);
        let begin = Instant::now();
        self.launch(scalars, addresses, args)?;
        // A launch on a GPU returns before the kernel runs, so without this wait the trace would
        // show the time of the enqueue.
        device.synchronize()?;
        watch.recorder.ended(&activity, begin, Instant::now());
        Ok(())
    }

    fn timed(&self, start: Instant) -> StepTime {
        StepTime {
            kernel: self.kernel.clone(),
            symbol: self.symbol.clone(),
            time: start.elapsed(),
        }
    }
}

/// Returns true for an address at which there is no memory.
fn is_nowhere(arg: &Arg) -> bool {
    matches!(arg, Arg::Ptr(Ptr(0)) | Arg::TensorMap { base: Ptr(0), .. })
}

/// The recorder of launches and the chunk that they belong to.
#[derive(Clone, Copy)]
pub(crate) struct Watch<'w> {
    pub recorder: &'w dyn Recorder,
    pub tilings: &'w Tilings,
    pub chunk: Option<Chunk>,
}

/// Steps of a layer in order, bound for each of its plans.
pub(crate) struct Bound {
    /// The steps of each plan.
    plans: Vec<Vec<BoundStep>>,
    /// The weights and gradients of weights among the tensors of the steps. The layer may hold
    /// them, or the call may bring them.
    weights: Vec<TensorId>,
}

impl Bound {
    /// Binds the same steps of every plan, whose kernels have its index.
    ///
    /// # Errors
    /// As [`BoundStep::new`].
    pub fn new<'s>(
        tilings: &Tilings,
        modules: &[Modules],
        steps: impl IntoIterator<Item = &'s Step> + Clone,
    ) -> Result<Bound, EngineError> {
        let plans = tilings.plans().iter().zip(modules);
        let bound = plans.map(|(plan, modules)| {
            let launches = steps.clone().into_iter().map(|Step::Launch(launch)| launch);
            launches
                .map(|launch| BoundStep::new(plan, modules, launch))
                .collect()
        });
        let plan = tilings.first();
        let used = tensors(steps.clone()).into_iter();
        // A rank without experts has weights of no bytes, which lie nowhere.
        let lasting = |id: &TensorId| outlives_calls(plan[*id].role) && plan[*id].bytes(0) > 0;
        Ok(Bound {
            plans: bound.collect::<Result<_, EngineError>>()?,
            weights: used.filter(lasting).collect(),
        })
    }

    /// Returns a weight, or a gradient of one, that has no memory.
    pub fn missing_weight(&self, addresses: &Addresses) -> Option<TensorId> {
        let mut weights = self.weights.iter().copied();
        weights.find(|&weight| addresses.get(weight) == Ptr(0))
    }

    /// Launches the steps of the plan at `index`; `times` and `watch` wait for each.
    pub fn run(
        &self,
        index: usize,
        device: &dyn Device,
        scalars: &Scalars,
        addresses: &Addresses,
        mut times: Option<&mut Vec<StepTime>>,
        watch: Option<Watch<'_>>,
    ) -> Result<(), EngineError> {
        let _pass = Pass::begin(device);
        // Taken out of the cell, because an error on the way may leave it empty: the next call then
        // allocates once.
        let mut args = ARGS.take();
        for step in &self.plans[index] {
            let start = times.is_some().then(Instant::now);
            match &watch {
                None => step.launch(scalars, addresses, &mut args)?,
                Some(watch) => {
                    step.launch_recorded(scalars, addresses, &mut args, device, watch)?;
                }
            }
            if let (Some(times), Some(start)) = (times.as_deref_mut(), start) {
                device.synchronize()?;
                times.push(step.timed(start));
            }
        }
        ARGS.set(args);
        Ok(())
    }
}

thread_local! {
    /// Scratch for the arguments of a launch, kept from call to call.
    static ARGS: Cell<Vec<Arg>> = const { Cell::new(Vec::new()) };
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
