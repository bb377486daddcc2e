//! Runs kernels of a layer here, on this CPU or a simulated GPU, and keeps every tensor, so
//! that each kernel can be held against the reference with what it actually read.

pub mod backward;
pub mod check;
pub mod cpu;
pub mod expert;
pub mod fibers;
pub mod gemm;
pub mod gemm_bwd;
pub mod kept;
pub mod memory;
pub mod pass;
pub mod plans;
pub mod ptx;
pub mod quick;
pub mod router_bwd;
pub mod rows;
pub mod specs;
pub mod thorough;

use memory::{Given, Memory, Placed, Values, from_bytes, to_bytes};
use moesaic_kernel::{CpuIsa, Launch, ParamType, SimArch, Target, TensorMap};
use moesaic_plan::{LaunchStep, LayerPlan, PlanOptions, TensorPlan, Training};
use moesaic_reference::Weights;
use moesaic_spec::LayerSpec;
use moesaic_target::{Arg, Device, KernelCounters, LaunchDims, Module};
use plans::planned;
use std::sync::Arc;

/// A device with a plan's kernels on it.
pub type Loaded = (Arc<dyn Device>, Vec<Arc<dyn Module>>);

/// The kernels of a plan, loaded, and weights.
pub struct Harness {
    /// What runs.
    pub plan: LayerPlan,
    /// Random, in the storage types.
    pub weights: Weights,
    device: Arc<dyn Device>,
    modules: Vec<Arc<dyn Module>>,
}

impl Harness {
    /// A layer for inference on this CPU.
    pub fn new(spec: &LayerSpec, isa: CpuIsa, threads: usize) -> Harness {
        let plan = planned(spec, Target::Cpu(isa), &PlanOptions::default());
        Harness::with_threads(plan, threads)
    }

    /// As [`Harness::new`], with the kernels of a backward pass.
    pub fn training(spec: &LayerSpec, isa: CpuIsa, threads: usize, training: Training) -> Harness {
        let plan = planned(spec, Target::Cpu(isa), &PlanOptions::training(training));
        Harness::with_threads(plan, threads)
    }

    /// What runs the plan's target here: this CPU, the PTX interpreter, or else the simulator
    /// of AMD GPUs.
    pub fn of(plan: LayerPlan) -> Harness {
        match plan.target {
            Target::Cpu(_) => Harness::with_threads(plan, 2),
            Target::Sim(SimArch::Cuda(_)) => Harness::late(plan, 1),
            _ => Harness::on(fibers::load(&plan), plan),
        }
    }

    /// On this CPU with so many threads.
    pub fn with_threads(plan: LayerPlan, threads: usize) -> Harness {
        Harness::on(cpu::load(&plan, threads), plan)
    }

    /// On the PTX interpreter, whose engines are late by `seed`.
    pub fn late(plan: LayerPlan, seed: u64) -> Harness {
        Harness::on(ptx::load(&plan, seed), plan)
    }

    /// On a device that has the plan's kernels.
    pub fn on((device, modules): Loaded, plan: LayerPlan) -> Harness {
        Harness {
            weights: Weights::random(&plan.spec, 7).rounded(&plan.spec),
            plan,
            device,
            modules,
        }
    }

    /// What a simulated device counted since the last call.
    pub fn take_counters(&self) -> Vec<KernelCounters> {
        self.device.take_counters()
    }

    /// The families of the products.
    pub fn families(&self) -> Vec<&'static str> {
        let kernels = self.plan.kernels.iter();
        kernels.filter_map(|kernel| kernel.family()).collect()
    }

    /// Memory for the tensors that `given` has something for.
    pub fn memory(&self, tokens: usize, given: impl Fn(&TensorPlan) -> Option<Given>) -> Memory {
        let place = |tensor: &TensorPlan| {
            let given = given(tensor)?;
            let (dtype, count) = (tensor.dtype, tensor.elements(tokens as u64) as usize);
            let buffer = self.device.alloc(count * dtype.size()).unwrap();
            let placed = Placed {
                dtype,
                buffer,
                count,
            };
            let bytes = given.bytes(dtype, count);
            self.device.upload(&bytes, &placed.buffer, 0).unwrap();
            Some((tensor.name.clone(), placed))
        };
        self.plan.tensors.iter().filter_map(place).collect()
    }

    /// Other values for a tensor.
    pub fn write(&self, memory: &Memory, name: &str, values: &[f64]) {
        let placed = &memory[name];
        let bytes = to_bytes(placed.dtype, values);
        self.device.upload(&bytes, &placed.buffer, 0).unwrap();
    }

    /// The values of a tensor after all launches.
    pub fn read(&self, memory: &Memory, name: &str) -> Vec<f64> {
        let placed = memory
            .get(name)
            .unwrap_or_else(|| panic!("no tensor `{name}`"));
        self.device.synchronize().unwrap();
        let mut bytes = vec![0; placed.count * placed.dtype.size()];
        self.device.download(&placed.buffer, 0, &mut bytes).unwrap();
        from_bytes(placed.dtype, &bytes)
    }

    /// Every tensor.
    pub fn read_all(&self, memory: &Memory) -> Values {
        let names = memory.keys();
        names
            .map(|name| (name.clone(), self.read(memory, name)))
            .collect()
    }

    /// Launches a step; `scalar` has the values of parameters beside `tokens` that are no
    /// tensors.
    pub fn launch(
        &self,
        step: &LaunchStep,
        tokens: usize,
        memory: &Memory,
        scalar: &dyn Fn(&str) -> i64,
    ) {
        let entry = &self.plan[step.entry];
        let mut tensors = step.tensors.iter().map(|&id| &*self.plan[id].name);
        let args = entry.params.iter().map(|param| match param.ty {
            ParamType::Scalar(_) if param.name == "tokens" => Arg::I64(tokens as i64),
            ParamType::Scalar(_) => Arg::I64(scalar(&param.name)),
            ParamType::TensorMap(map) => {
                let name = tensors.next().unwrap();
                Arg::TensorMap {
                    base: memory[name].buffer.ptr(),
                    dims: self.map_dims(&map, name, tokens as u64),
                }
            }
            ParamType::Tensor(..) => Arg::Ptr(memory[tensors.next().unwrap()].buffer.ptr()),
        });
        let args: Vec<Arg> = args.collect();
        let dims = dims(&entry.launch, tokens);
        // SAFETY: every buffer has the size the plan gives its tensor for
        // this token count; who owns them reads them after the launch.
        unsafe { self.modules[step.entry.kernel].launch(&entry.symbol, dims, &args) }
            .unwrap_or_else(|error| {
                let (target, spec) = (self.plan.target, &self.plan.spec);
                panic!(
                    "{} for {target}, {tokens} tokens: {error}\n{spec:?}",
                    entry.symbol
                )
            });
    }

    /// Sizes, innermost first; those beyond the map's rank are folded.
    fn map_dims(&self, map: &TensorMap, name: &str, tokens: u64) -> [u64; 5] {
        let mut dims = [1; 5];
        let shape = &self.plan.tensor(name).unwrap().shape;
        for (i, size) in shape.iter().rev().enumerate() {
            dims[i.min(usize::from(map.rank) - 1)] *= size.eval(tokens);
        }
        dims
    }
}

/// What a launch takes for so many tokens.
pub fn dims(launch: &Launch, tokens: usize) -> LaunchDims {
    LaunchDims {
        grid: launch.grid.each_ref().map(|n| n.eval(tokens as u64)),
        threads: launch.threads,
        shared_bytes: launch.shared_bytes,
        cluster: launch.cluster,
    }
}

/// Of kernels whose only other parameter says whether to add to a gradient.
pub fn accumulating(accumulate: bool) -> impl Fn(&str) -> i64 {
    move |name| match name {
        "accumulate" => accumulate.into(),
        other => panic!("the harness has no scalar `{other}`"),
    }
}

/// All of a short range; of a long one the ends and some between.
fn sample(range: std::ops::Range<usize>) -> Vec<usize> {
    let step = (range.len() / 24).max(1);
    let last = range.clone().last();
    let mut rows: Vec<usize> = range.step_by(step).collect();
    rows.extend(last);
    rows
}
