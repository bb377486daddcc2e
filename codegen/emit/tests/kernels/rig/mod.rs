//! Runs every kernel of a layer on this CPU and keeps every tensor, so that
//! each stem can be held against the reference with its actual inputs.

#![allow(dead_code, reason = "other test binaries use parts of it")]

pub mod backward;
pub mod check;

use crate::kept::Kept;
use half::{bf16, f16};
use moesaic_cpu::{CpuCompiler, CpuDevice};
use moesaic_emit::emit_layer;
use moesaic_kernel::{CpuIsa, DType, KernelSource, ParamType, Stem, Target, TensorMap};
use moesaic_plan::{
    LaunchStep, LayerPlan, PlanOptions, Role, Step, TensorId, TensorPlan, Training, plan,
};
use moesaic_reference::rng::Draw;
use moesaic_reference::{Input, Random, Weights, round_to};
use moesaic_spec::{LayerSpec, RouterKind};
use moesaic_target::{
    Arg, Artifact, Buffer, CompileOptions, Compiler, Device, KernelCounters, LaunchDims, Module,
};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, LazyLock};

/// The instruction sets this machine runs, narrowest first.
pub fn isas() -> Vec<CpuIsa> {
    let host = moesaic_cpu::host_isa();
    let narrower = match host {
        CpuIsa::Avx2 => &[CpuIsa::Portable][..],
        CpuIsa::Avx512 => &[CpuIsa::Portable, CpuIsa::Avx2],
        CpuIsa::Amx => &[CpuIsa::Portable, CpuIsa::Avx2, CpuIsa::Avx512],
        CpuIsa::Avx512Bf16 => &[CpuIsa::Portable, CpuIsa::Avx2, CpuIsa::Avx512],
        CpuIsa::Portable => &[],
        CpuIsa::Neon => &[CpuIsa::Portable],
        CpuIsa::NeonBf16 => &[CpuIsa::Portable, CpuIsa::Neon],
    };
    let mut list = narrower.to_vec();
    list.push(host);
    #[cfg(target_arch = "x86_64")]
    if matches!(host, CpuIsa::Avx512 | CpuIsa::Amx) && std::is_x86_feature_detected!("avx512bf16") {
        list.push(CpuIsa::Avx512Bf16);
    }
    list
}

/// The instruction set that is chosen on this machine.
pub fn host() -> CpuIsa {
    moesaic_cpu::host_isa()
}

/// A layer, compiled for one instruction set.
pub struct Rig {
    pub plan: LayerPlan,
    pub weights: Weights,
    device: Arc<dyn Device>,
    modules: Vec<Arc<dyn Module>>,
}

/// Every tensor of one call, by name, as f64.
pub struct Tensors {
    pub input: Input,
    values: BTreeMap<String, Vec<f64>>,
}

impl Tensors {
    pub fn get(&self, name: &str) -> &[f64] {
        self.values
            .get(name)
            .unwrap_or_else(|| panic!("no tensor `{name}`"))
    }

    pub fn has(&self, name: &str) -> bool {
        self.values.contains_key(name)
    }

    pub fn ints(&self, name: &str) -> Vec<i64> {
        self.get(name).iter().map(|&v| v as i64).collect()
    }

    pub fn ids(&self) -> Vec<i32> {
        self.get("topk_ids").iter().map(|&v| v as i32).collect()
    }
}

impl Rig {
    /// Plans, emits and compiles; weights are random, in the storage types.
    pub fn new(spec: &LayerSpec, isa: CpuIsa, threads: usize) -> Rig {
        Rig::compile(
            spec,
            threads,
            plan(spec, Target::Cpu(isa), &PlanOptions::default()).unwrap(),
        )
    }

    /// As [`Rig::new`], with the kernels of a backward pass.
    pub fn training(spec: &LayerSpec, isa: CpuIsa, threads: usize, training: Training) -> Rig {
        let plan = plan(spec, Target::Cpu(isa), &PlanOptions::training(training)).unwrap();
        Rig::compile(spec, threads, plan)
    }

    /// Emits and compiles a plan for a CPU.
    pub fn compile(spec: &LayerSpec, threads: usize, plan: LayerPlan) -> Rig {
        if let Err(problems) = spec.validate() {
            panic!("the test's spec is invalid: {problems:?}");
        }
        let device = CpuDevice::with_threads(threads).unwrap().poisoned();
        let modules = emit_layer(&plan)
            .unwrap()
            .iter()
            .map(|source| device.load(&compiled(source), &source.entries).unwrap())
            .collect();
        Rig::on(plan, Box::new(device), modules)
    }

    /// A rig of kernels that are loaded already.
    pub fn on(plan: LayerPlan, device: Box<dyn Device>, modules: Vec<Arc<dyn Module>>) -> Rig {
        Rig::sharing(plan, device.into(), modules)
    }

    /// As [`Rig::on`], on a device that others hold too.
    pub fn sharing(plan: LayerPlan, device: Arc<dyn Device>, modules: Vec<Arc<dyn Module>>) -> Rig {
        let spec = &plan.spec;
        Rig {
            weights: Weights::random(spec, 7).rounded(spec),
            plan,
            device,
            modules,
        }
    }

    /// What a simulated device counted since the last call.
    pub fn take_counters(&self) -> Vec<KernelCounters> {
        self.device.take_counters()
    }

    /// Random input of `tokens` tokens.
    pub fn random_input(&self, tokens: usize, seed: u64) -> Input {
        let (spec, mut random) = (&self.plan.spec, Random::new(seed));
        let slots = tokens * spec.shape.top_k;
        let x = random.vec(tokens * spec.shape.model_dim);
        let x = x
            .iter()
            .map(|&v| round_to(spec.precision.activations, v))
            .collect();
        let below = |random: &mut Random, n: usize| (random.bits() % n as u64) as i32;
        let rows = spec.router.table_rows;
        let token_ids = rows.map(|n| (0..tokens).map(|_| below(&mut random, n)).collect());
        let routing = (spec.router.kind == RouterKind::External).then(|| {
            let ids = (0..slots).map(|_| below(&mut random, spec.routed_experts() + 1) - 1);
            let ids = ids.collect();
            (
                ids,
                random
                    .vec(slots)
                    .iter()
                    .map(|v| f64::from(v.abs() as f32))
                    .collect(),
            )
        });
        let masked = |t: usize| i32::from(t % 5 != 3);
        let (r, k) = (&spec.router, spec.shape.top_k);
        Input {
            tokens,
            x,
            token_ids,
            routing,
            token_mask: r.token_mask.then(|| (0..tokens).map(masked).collect()),
            active_k: r.active_k.then(|| k.div_ceil(2)),
            draw: self.plan.training.map(|_| Draw {
                seed: seed | 1 << 40,
                step: 3,
                layer: 2,
                first_token: 11,
            }),
            ..Input::default()
        }
    }

    /// Runs every step; nothing that a kernel should write is set before.
    pub fn run(&self, input: &Input) -> Tensors {
        let buffers = self.buffers(input, &[]);
        for launch in &self.plan.prepare {
            self.launch(launch, input, 0, &buffers);
        }
        self.launch_all(&self.plan.steps, input, 0, &buffers);
        self.read(input, buffers)
    }

    /// Forward, then backward once for each of `accumulate`.
    pub fn run_training(&self, input: &Input, dy: &[f64], accumulate: &[i64]) -> Tensors {
        let buffers = self.buffers(input, dy);
        self.launch_all(&self.plan.steps, input, 0, &buffers);
        for &accumulate in accumulate {
            self.launch_all(&self.plan.backward, input, accumulate, &buffers);
        }
        self.read(input, buffers)
    }

    /// Memory for every tensor; what the caller provides is in it.
    fn buffers(&self, input: &Input, dy: &[f64]) -> Buffers {
        let tokens = input.tokens as u64;
        let mut buffers = Buffers::new();
        for tensor in &self.plan.tensors {
            let count = tensor.elements(tokens) as usize;
            let buffer = self.device.alloc(count * tensor.dtype.size()).unwrap();
            let given = match tensor.role {
                Role::Input => Some(input_values(input, &tensor.name)),
                Role::Weight => Some(self.weights.get(&tensor.name).data.clone()),
                Role::OutputGradient => Some(dy.to_vec()),
                Role::Packed
                | Role::Output
                | Role::Scratch
                | Role::InputGradient
                | Role::WeightGradient => None,
            };
            if let Some(values) = given {
                assert_eq!(values.len(), count, "{}", tensor.name);
                self.device
                    .upload(&to_bytes(tensor.dtype, &values), &buffer, 0)
                    .unwrap();
            }
            buffers.insert(tensor.name.clone(), (tensor.dtype, buffer, count));
        }
        buffers
    }

    fn read(&self, input: &Input, buffers: Buffers) -> Tensors {
        let values = buffers.into_iter().map(|(name, (dtype, buffer, count))| {
            let mut bytes = vec![0; count * dtype.size()];
            self.device.download(&buffer, 0, &mut bytes).unwrap();
            (name, from_bytes(dtype, &bytes))
        });
        Tensors {
            values: values.collect(),
            input: input.clone(),
        }
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

    fn row_limit(&self, input: &Input) -> i64 {
        let spec = &self.plan.spec;
        let of_pass = spec.capacity.factor_of(input.draw.is_some());
        let factor = input.capacity_factor.unwrap_or(of_pass);
        moesaic_plan::row_limit(spec, factor, input.tokens as u64)
    }

    fn launch_all(&self, steps: &[Step], input: &Input, accumulate: i64, buffers: &Buffers) {
        for Step::Launch(launch) in steps {
            self.launch(launch, input, accumulate, buffers);
        }
    }

    fn launch(&self, step: &LaunchStep, input: &Input, accumulate: i64, buffers: &Buffers) {
        let tokens = input.tokens;
        let entry = &self.plan[step.entry];
        let mut tensors = step.tensors.iter().map(|&id| &*self.plan[id].name);
        let args = entry.params.iter().map(|param| match param.ty {
            ParamType::Scalar(_) => Arg::I64(match param.name.as_str() {
                "tokens" => tokens as i64,
                "accumulate" => accumulate,
                "row_limit" => self.row_limit(input),
                name => counter(name, input),
            }),
            ParamType::TensorMap(map) => {
                let name = tensors.next().unwrap();
                Arg::TensorMap {
                    base: buffers[name].1.ptr(),
                    dims: self.map_dims(&map, name, tokens as u64),
                }
            }
            ParamType::Tensor(..) => Arg::Ptr(buffers[tensors.next().unwrap()].1.ptr()),
        });
        let args: Vec<Arg> = args.collect();
        let (launch, tokens) = (&entry.launch, tokens as u64);
        let dims = LaunchDims {
            grid: [launch.grid[0].eval(tokens), launch.grid[1].eval(tokens)],
            threads: launch.threads,
            shared_bytes: launch.shared_bytes,
            cluster: launch.cluster,
        };
        // SAFETY: every buffer has the size the plan gives its tensor for
        // this token count, and lives until all steps have run.
        unsafe { self.modules[step.entry.kernel].launch(&entry.symbol, dims, &args) }.unwrap();
    }
}

/// Element type, memory and length of tensors by name.
type Buffers = BTreeMap<String, (DType, Buffer, usize)>;

/// The steps of a forward pass up to the rows of experts, and what they name.
pub fn routing_of(mut plan: LayerPlan) -> LayerPlan {
    let routing = [Stem::GateTopk, Stem::ExpertScan, Stem::Dispatch];
    let stems: Vec<Stem> = plan.kernels.iter().map(|kernel| kernel.stem()).collect();
    plan.backward.clear();
    plan.steps
        .retain(|Step::Launch(launch)| routing.contains(&stems[launch.entry.kernel]));
    let kernels = plan
        .steps
        .iter()
        .map(|Step::Launch(launch)| launch.entry.kernel);
    let last = kernels.max().unwrap();
    plan.kernels.truncate(last + 1);
    plan.prepare.retain(|step| step.entry.kernel <= last);
    let called = plan.steps.iter_mut().map(|Step::Launch(launch)| launch);
    let launches = plan.prepare.iter_mut().chain(called);
    let named = launches.flat_map(|launch| &mut launch.tensors);
    keep_named(&mut plan.tensors, named.collect());
    plan
}

/// Leaves only the tensors of these numbers, which become those they then have.
fn keep_named(tensors: &mut Vec<TensorPlan>, named: Vec<&mut TensorId>) {
    let used: BTreeSet<TensorId> = named.iter().map(|id| **id).collect();
    let mut at = (0..).map(TensorId);
    tensors.retain(|_| used.contains(&at.next().unwrap()));
    for id in named {
        *id = TensorId(used.range(..*id).count());
    }
}

/// The value of a scalar that random numbers depend on.
fn counter(name: &str, input: &Input) -> i64 {
    let draw = input.draw.unwrap_or_default();
    match name {
        "seed" => draw.seed as i64,
        "step" => draw.step as i64,
        "layer" => i64::from(draw.layer),
        "first_token" => draw.first_token as i64,
        other => panic!("the rig has no scalar `{other}`"),
    }
}

/// As users get it; for what is chosen on this machine without a word of warning.
fn compiled(source: &KernelSource) -> Artifact {
    static COMPILER: LazyLock<Kept> = LazyLock::new(|| Kept::new(CpuCompiler::find(None).unwrap()));
    let artifact = COMPILER
        .compile(source, &CompileOptions::default())
        .unwrap();
    if source.target == Target::Cpu(host()) {
        assert_eq!(artifact.report.log, "", "{}", source.name);
    }
    artifact
}

fn input_values(input: &Input, name: &str) -> Vec<f64> {
    let ints = |ids: &[i32]| ids.iter().map(|&id| f64::from(id)).collect();
    match name {
        "x" => input.x.clone(),
        "token_mask" => ints(input.token_mask.as_ref().unwrap()),
        "active_k" => vec![input.active_k.unwrap() as f64],
        "token_ids" => ints(input.token_ids.as_ref().unwrap()),
        "topk_ids" => ints(&input.routing.as_ref().unwrap().0),
        "topk_weights" => input.routing.as_ref().unwrap().1.clone(),
        other => panic!("the rig has no input `{other}`"),
    }
}

pub fn to_bytes(dtype: DType, values: &[f64]) -> Vec<u8> {
    let each = |f: &dyn Fn(f64) -> Vec<u8>| values.iter().flat_map(|&v| f(v)).collect();
    match dtype {
        DType::F32 => each(&|v| (v as f32).to_le_bytes().to_vec()),
        DType::F16 => each(&|v| f16::from_f64(v).to_le_bytes().to_vec()),
        DType::Bf16 => each(&|v| bf16::from_f64(v).to_le_bytes().to_vec()),
        DType::I32 => each(&|v| (v as i32).to_le_bytes().to_vec()),
        DType::I64 => each(&|v| (v as i64).to_le_bytes().to_vec()),
    }
}

pub fn from_bytes(dtype: DType, bytes: &[u8]) -> Vec<f64> {
    let chunks = bytes.chunks_exact(dtype.size());
    match dtype {
        DType::F32 => chunks
            .map(|c| f32::from_le_bytes(c.try_into().unwrap()).into())
            .collect(),
        DType::F16 => chunks
            .map(|c| f16::from_le_bytes(c.try_into().unwrap()).into())
            .collect(),
        DType::Bf16 => chunks
            .map(|c| bf16::from_le_bytes(c.try_into().unwrap()).into())
            .collect(),
        DType::I32 => chunks
            .map(|c| i32::from_le_bytes(c.try_into().unwrap()).into())
            .collect(),
        DType::I64 => chunks
            .map(|c| i64::from_le_bytes(c.try_into().unwrap()) as f64)
            .collect(),
    }
}
