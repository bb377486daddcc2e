//! The products of a training layer alone, on any device, each held against the
//! reference with the very tensors that it read: routing is made up here, so
//! that rows lie as a test wants.

mod check;

use crate::rig;
use moesaic_kernel::{Access, DType, ParamType, Stem, TensorMap};
use moesaic_plan::{KernelPlan, LayerPlan, Op, PlanOptions, Step, Training};
use moesaic_reference::{Random, Weights, round_to};
use moesaic_spec::LayerSpec;
use moesaic_target::{Arg, Buffer, Device, LaunchDims, Module};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Where the assignments go.
#[derive(Clone, Copy, Debug)]
pub enum Spread {
    /// Anywhere, some to nobody.
    Random,
    /// All to the last expert.
    One,
    /// To every third expert.
    Sparse,
}

/// Tokens and where they go.
pub struct Call {
    pub tokens: usize,
    /// Expert and slot of each row, ascending.
    rows: Vec<(usize, usize)>,
    /// Gradients of weights are added to what is there.
    pub accumulate: bool,
}

impl Call {
    pub fn new(spec: &LayerSpec, tokens: usize, spread: Spread) -> Call {
        let mut random = Random::new(tokens as u64 + 1);
        let (experts, slots) = (spec.shape.experts, tokens * spec.shape.top_k);
        let of = |bits: usize| match spread {
            Spread::Random => Some(bits % (experts + 1)).filter(|&e| e < experts),
            Spread::One => Some(experts - 1),
            Spread::Sparse => Some(bits % experts.div_ceil(3) * 3),
        };
        let all = (0..slots).map(|slot| (of(random.bits() as usize), slot));
        let mut rows: Vec<_> = all.filter_map(|(e, slot)| Some((e?, slot))).collect();
        rows.sort();
        Call {
            tokens,
            rows,
            accumulate: tokens % 2 == 1,
        }
    }

    /// The first row of every expert, then that beyond the last.
    fn offsets(&self, experts: usize) -> Vec<f64> {
        let before = |e| self.rows.iter().filter(|row| row.0 < e).count() as f64;
        (0..=experts).map(before).collect()
    }

    /// The first row tile of every expert, then that beyond the last.
    fn row_tiles(&self, experts: usize, tile_rows: usize) -> Vec<f64> {
        let mut tiles = vec![0.0];
        for pair in self.offsets(experts).windows(2) {
            let own = ((pair[1] - pair[0]) / tile_rows as f64).ceil();
            tiles.push(tiles[tiles.len() - 1] + own);
        }
        tiles
    }
}

/// The product kernels of a training layer, loaded on a device.
pub struct Products {
    pub plan: LayerPlan,
    tile_rows: usize,
    weights: Weights,
    device: Arc<dyn Device>,
    modules: Vec<Arc<dyn Module>>,
}

/// A tensor of a call: its type, its memory, its elements.
type Memory = (DType, Buffer, usize);

/// Every tensor before and after a call, by name.
pub struct Tensors {
    pub before: BTreeMap<String, Vec<f64>>,
    pub after: BTreeMap<String, Vec<f64>>,
}

impl Products {
    /// `load` gets the plan with nothing but those products in it that `wanted`
    /// chooses.
    pub fn new(
        spec: &LayerSpec,
        target: &str,
        wanted: impl Fn(&KernelPlan) -> bool,
        load: impl FnOnce(&LayerPlan) -> (Arc<dyn Device>, Vec<Arc<dyn Module>>),
    ) -> Products {
        if let Err(problems) = spec.validate() {
            panic!("the test's spec is invalid: {problems:?}");
        }
        let training = PlanOptions::training(Training::default());
        let plan = moesaic_plan::plan(spec, target.parse().unwrap(), &training);
        let mut plan = plan.unwrap();
        let tile_rows = scan_tile_rows(&plan);
        only_products(&mut plan, wanted);
        let (device, modules) = load(&plan);
        Products {
            tile_rows,
            weights: Weights::random(spec, 7).rounded(spec),
            device,
            modules,
            plan,
        }
    }

    /// Runs every kernel. What they write was full of NaN before; what they
    /// read has no value beyond the rows of the call.
    pub fn run(&self, call: &Call) -> Tensors {
        let reads = self.reads();
        let mut memory = BTreeMap::new();
        for tensor in &self.plan.tensors {
            let count = tensor.elements(call.tokens as u64) as usize;
            let buffer = self.device.alloc(count * tensor.dtype.size()).unwrap();
            let bytes = match reads.get(&tensor.name) {
                Some(Access::ReadWrite) if !call.accumulate => None,
                Some(Access::Read | Access::ReadWrite) => {
                    let values = self.given(call, &tensor.name, tensor.dtype, count);
                    Some(rig::to_bytes(tensor.dtype, &values))
                }
                _ => None,
            };
            let poison = || vec![0xff; count * tensor.dtype.size()];
            let bytes = bytes.unwrap_or_else(poison);
            self.device.upload(&bytes, &buffer, 0).unwrap();
            memory.insert(tensor.name.clone(), (tensor.dtype, buffer, count));
        }
        let before = self.read(&memory);
        for step in self.plan.steps.iter().chain(&self.plan.backward) {
            self.launch(step, call, &memory);
        }
        self.device.synchronize().unwrap();
        Tensors {
            before,
            after: self.read(&memory),
        }
    }

    /// What the first step that names a tensor does with it.
    fn reads(&self) -> BTreeMap<String, Access> {
        let mut first = BTreeMap::new();
        for step in self.plan.steps.iter().chain(&self.plan.backward) {
            for (id, access) in self.plan.accesses(step) {
                first.entry(self.plan[id].name.clone()).or_insert(access);
            }
        }
        first
    }

    /// Values of what no kernel here writes first: as many as have a meaning.
    fn given(&self, call: &Call, name: &str, dtype: DType, count: usize) -> Vec<f64> {
        let shape = &self.plan.spec.shape;
        match name {
            "offsets" => call.offsets(shape.experts),
            "row_tiles" => call.row_tiles(shape.experts, self.tile_rows),
            "row_slots" => call.rows.iter().map(|row| row.1 as f64).collect(),
            name if self.weights.0.contains_key(name) => self.weights.get(name).data.clone(),
            name => {
                let rows = ["rows", "dout", "drows"].contains(&name);
                let live = if rows {
                    count / (call.tokens * shape.top_k).max(1) * call.rows.len()
                } else {
                    count
                };
                let seed = name
                    .bytes()
                    .fold(5u64, |sum, byte| sum.rotate_left(7) ^ u64::from(byte));
                let mut values = Random::new(seed).vec(live);
                values.iter_mut().for_each(|v| *v = round_to(dtype, *v));
                values
            }
        }
    }

    fn read(&self, memory: &BTreeMap<String, Memory>) -> BTreeMap<String, Vec<f64>> {
        let each = memory.iter().map(|(name, (dtype, buffer, count))| {
            let mut bytes = vec![0; count * dtype.size()];
            self.device.download(buffer, 0, &mut bytes).unwrap();
            (name.clone(), rig::from_bytes(*dtype, &bytes))
        });
        each.collect()
    }

    fn launch(&self, step: &Step, call: &Call, memory: &BTreeMap<String, Memory>) {
        let Step::Launch(launched) = step;
        let (entry, tokens) = (&self.plan[launched.entry], call.tokens as u64);
        let mut tensors = self.plan.names(step);
        let argument = |param: &moesaic_kernel::Param| match (param.ty, &*param.name) {
            (ParamType::Scalar(_), "accumulate") => Arg::I64(call.accumulate.into()),
            (ParamType::Scalar(_), _) => Arg::I64(tokens as i64),
            (ParamType::TensorMap(map), _) => {
                let name = tensors.next().unwrap();
                Arg::TensorMap {
                    base: memory[name].1.ptr(),
                    dims: self.map_dims(&map, name, tokens),
                }
            }
            _ => Arg::Ptr(memory[tensors.next().unwrap()].1.ptr()),
        };
        let args: Vec<Arg> = entry.params.iter().map(argument).collect();
        let dims = LaunchDims {
            grid: [&entry.launch.grid[0], &entry.launch.grid[1]].map(|n| n.eval(tokens)),
            threads: entry.launch.threads,
            shared_bytes: entry.launch.shared_bytes,
            cluster: entry.launch.cluster,
        };
        // SAFETY: every buffer has the size the plan gives its tensor for
        // this token count, and lives until the launch has ended.
        unsafe { self.modules[launched.entry.kernel].launch(&entry.symbol, dims, &args) }
            .unwrap_or_else(|error| panic!("{}: {error}", self.plan.target));
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

/// Leaves out what is no product, and of the forward pass what keeps nothing.
fn only_products(plan: &mut LayerPlan, wanted: impl Fn(&KernelPlan) -> bool) {
    let is_product = |kernel: &KernelPlan| match &kernel.op {
        Op::GroupedGemm { desc, .. } => desc.keep,
        other => [Stem::GroupedGemmDgrad, Stem::GroupedGemmWgrad].contains(&other.stem()),
    };
    let kept: BTreeSet<usize> = (0..plan.kernels.len())
        .filter(|&kernel| is_product(&plan.kernels[kernel]) && wanted(&plan.kernels[kernel]))
        .collect();
    for steps in [&mut plan.steps, &mut plan.backward] {
        steps.retain(|Step::Launch(launch)| kept.contains(&launch.entry.kernel));
        for Step::Launch(launch) in steps {
            launch.entry.kernel = kept.range(..launch.entry.kernel).count();
        }
    }
    let mut kernel = 0..;
    plan.kernels
        .retain(|_| kept.contains(&kernel.next().unwrap()));
}

/// The rows of the tiles that the scan lists.
fn scan_tile_rows(plan: &LayerPlan) -> usize {
    let mut rows = plan.kernels.iter().filter_map(|kernel| match &kernel.op {
        Op::ExpertScan { config, .. } => Some(config.tile_rows),
        _ => None,
    });
    rows.next().unwrap()
}

/// A layer of these widths (model, hidden, output), experts and top-k, in one type.
pub fn layer([d, h, out]: [usize; 3], [e, k]: [usize; 2], dtype: DType) -> LayerSpec {
    let text =
        format!(r#"{{"shape":{{"model_dim":{d},"hidden_dim":{h},"experts":{e},"top_k":{k}}}}}"#);
    let mut spec: LayerSpec = serde_json::from_str(&text).unwrap();
    spec.shape.output_dim = (out != d).then_some(out);
    spec.precision.weights = dtype;
    spec.precision.activations = dtype;
    spec
}
