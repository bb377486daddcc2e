//! The GEMMs of a layer alone that only training has, each from made-up values
//! of what it reads, against plain sums in f64.

mod expected;

use crate::gemms::simulated::simulated;
use crate::rig;
use moesaic_kernel::{Access, DType, Entry, Param, ParamType};
use moesaic_plan::{
    GroupedGemmConfig, KernelPlan, LayerPlan, Op, PlanOptions, Recompute, Training, plan,
};
use moesaic_reference::{Random, round_to};
use moesaic_spec::LayerSpec;
use moesaic_target::{Arg, Buffer, Device, KernelCounters, LaunchDims, Module};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Tokens, and the rows that experts got of their slots.
#[derive(Clone)]
pub struct Rows {
    pub tokens: usize,
    /// Rows of each expert.
    pub counts: Vec<usize>,
}

impl Rows {
    /// What there is of `tokens`, to experts by turns that some are left out of.
    pub fn spread(spec: &LayerSpec, tokens: usize) -> Rows {
        let (experts, k) = (spec.shape.experts, spec.shape.top_k);
        let mut random = Random::new(tokens as u64 + 3);
        let mut counts = vec![0; experts];
        for _ in 0..tokens * k {
            let expert = random.bits() as usize % (experts + 1);
            if expert < experts && (experts == 1 || expert % 5 != 1) {
                counts[expert] += 1;
            }
        }
        Rows { tokens, counts }
    }

    /// All to the last expert.
    pub fn one(spec: &LayerSpec, tokens: usize) -> Rows {
        let mut counts = vec![0; spec.shape.experts];
        *counts.last_mut().unwrap() = tokens * spec.shape.top_k;
        Rows { tokens, counts }
    }

    fn total(&self) -> usize {
        self.counts.iter().sum()
    }

    /// The first row of every expert and the end, or those of a dense product.
    fn offsets(&self, dense: bool) -> Vec<usize> {
        if dense {
            return vec![0, self.tokens];
        }
        let ends = self.counts.iter().scan(0, |sum, count| {
            *sum += count;
            Some(*sum)
        });
        std::iter::once(0).chain(ends).collect()
    }
}

/// Values by parameter, maps by the name of their tensor.
pub type Values = BTreeMap<String, Vec<f64>>;

/// The backward GEMMs of a layer, loaded on a simulated device.
pub struct Grads {
    pub plan: LayerPlan,
    device: Arc<dyn Device>,
    modules: Vec<Arc<dyn Module>>,
}

impl Grads {
    /// The backward GEMMs that are of these families.
    pub fn new(spec: &LayerSpec, target: &str, families: &[&str], seed: u64) -> Grads {
        if let Err(problems) = spec.validate() {
            panic!("the test's spec is invalid: {problems:?}");
        }
        let training = Training {
            recompute: Recompute::None,
        };
        let mut plan = plan(
            spec,
            target.parse().unwrap(),
            &PlanOptions::training(training),
        )
        .unwrap();
        plan.kernels
            .retain(|kernel| is_backward(&kernel.op) && families.contains(&family(kernel)));
        let (device, modules) = simulated(&plan, seed);
        Grads {
            plan,
            device,
            modules,
        }
    }

    /// Names and families, in the order of the plan.
    pub fn families(&self) -> Vec<(&str, &'static str)> {
        let kernels = self.plan.kernels.iter();
        kernels.map(|k| (k.name.as_str(), family(k))).collect()
    }

    /// Runs every kernel, gradients written and then added to, against f64.
    /// Returns everything that was written.
    pub fn check(&self, rows: &Rows) -> Vec<Values> {
        let kernels = 0..self.plan.kernels.len();
        kernels
            .flat_map(|kernel| [0, 1].map(|accumulate| self.check_kernel(kernel, rows, accumulate)))
            .collect()
    }

    fn check_kernel(&self, index: usize, rows: &Rows, accumulate: i64) -> Values {
        let kernel = &self.plan.kernels[index];
        let mut all = Values::new();
        for entry in &kernel.entries {
            let given = given(kernel, entry, rows, accumulate != 0);
            let got = self.launch(index, entry, rows, &given, accumulate);
            let what = format!(
                "{} on {}, {} tokens, {:?}",
                kernel.name, self.plan.target, rows.tokens, kernel.op
            );
            expected::check(&self.plan.spec, kernel, entry, rows, &given, &got, &what);
            all.extend(got);
        }
        all
    }

    /// Runs an entry; returns what it writes.
    fn launch(
        &self,
        kernel: usize,
        entry: &Entry,
        rows: &Rows,
        given: &Values,
        accumulate: i64,
    ) -> Values {
        let tensors: Vec<Option<(Buffer, usize)>> = entry
            .params
            .iter()
            .map(|param| self.buffer(param, rows, given))
            .collect();
        let args: Vec<Arg> = entry
            .params
            .iter()
            .zip(&tensors)
            .map(|(param, tensor)| match (param.ty, tensor) {
                (ParamType::TensorMap(map), Some((buffer, _))) => Arg::TensorMap {
                    base: buffer.ptr(),
                    dims: dims(&shape(param, rows), map.rank.into()),
                },
                (_, Some((buffer, _))) => Arg::Ptr(buffer.ptr()),
                _ if param.name == "accumulate" => Arg::I64(accumulate),
                _ => Arg::I64(rows.tokens as i64),
            })
            .collect();
        let tokens = rows.tokens as u64;
        let dims = LaunchDims {
            grid: [&entry.launch.grid[0], &entry.launch.grid[1]].map(|n| n.eval(tokens)),
            threads: entry.launch.threads,
            shared_bytes: entry.launch.shared_bytes,
            cluster: entry.launch.cluster,
        };
        // SAFETY: every buffer has the size of its parameter's shape and lives
        // until the device has synchronised.
        unsafe { self.modules[kernel].launch(&entry.symbol, dims, &args) }
            .unwrap_or_else(|error| panic!("{}: {error}", self.plan.target));
        self.device.synchronize().unwrap();
        let written = entry.params.iter().zip(tensors);
        let written = written.filter_map(|(param, tensor)| Some((param, tensor?)));
        written
            .filter(|(param, _)| param.ty.tensor().is_some_and(|t| t.1 != Access::Read))
            .map(|(param, (buffer, count))| {
                let dtype = param.ty.tensor().unwrap().0;
                let mut bytes = vec![0; count * dtype.size()];
                self.device.download(&buffer, 0, &mut bytes).unwrap();
                (param.name.clone(), rig::from_bytes(dtype, &bytes))
            })
            .collect()
    }

    /// The memory of a parameter; what nobody gave a value has none, but for
    /// results, which are full of NaN.
    fn buffer(&self, param: &Param, rows: &Rows, given: &Values) -> Option<(Buffer, usize)> {
        let (dtype, access) = param.ty.tensor()?;
        let count = shape(param, rows).iter().product::<usize>();
        let buffer = self.device.alloc(count * dtype.size()).unwrap();
        let bytes = match (given.get(tensor_name(param)), access) {
            (Some(values), _) => rig::to_bytes(dtype, values),
            (None, Access::Write) => vec![0xff; count * dtype.size()],
            (None, _) => Vec::new(),
        };
        self.device.upload(&bytes, &buffer, 0).unwrap();
        Some((buffer, count))
    }

    /// What the simulator counted since the last call.
    pub fn take_counters(&self) -> Vec<KernelCounters> {
        self.device.take_counters()
    }
}

/// Backward products, and those whose pre-activations they start from.
fn is_backward(op: &Op) -> bool {
    match op {
        Op::GroupedGemmDgrad { .. } | Op::GroupedGemmWgrad { .. } => true,
        Op::GroupedGemm { desc, .. } => desc.keep,
        _ => false,
    }
}

fn config(kernel: &KernelPlan) -> &GroupedGemmConfig {
    kernel.op.gemm().expect("a GEMM")
}

fn family(kernel: &KernelPlan) -> &'static str {
    config(kernel).family.name()
}

fn tensor_name(param: &Param) -> &str {
    param.name.strip_suffix("_map").unwrap_or(&param.name)
}

/// The sizes that a parameter's shape says.
fn shape(param: &Param, rows: &Rows) -> Vec<usize> {
    let inner = param.shape.trim_matches(['[', ']']);
    let size = |word: &str| match word {
        "tokens" => rows.tokens,
        "rows" => rows.tokens * rows_per_token(rows),
        number => number.parse().unwrap(),
    };
    inner.split(", ").map(size).collect()
}

/// Rows have room for as many as there can be.
fn rows_per_token(rows: &Rows) -> usize {
    rows.total().div_ceil(rows.tokens.max(1)).max(1)
}

/// Sizes innermost first; those beyond the map's rank are folded.
fn dims(shape: &[usize], rank: usize) -> [u64; 5] {
    let mut dims = [1; 5];
    for (i, size) in shape.iter().rev().enumerate() {
        dims[i.min(rank - 1)] *= *size as u64;
    }
    dims
}

/// Values of all that an entry reads: rows that exist, all of the rest.
fn given(kernel: &KernelPlan, entry: &Entry, rows: &Rows, accumulate: bool) -> Values {
    let (dense, inner) = match &kernel.op {
        Op::GroupedGemmDgrad { desc: d, .. } => (d.dense, d.inner),
        Op::GroupedGemmWgrad { desc: d, .. } => (d.dense, 1),
        Op::GroupedGemm { desc: d, .. } => (d.dense, d.inner),
        other => panic!("{other:?} is no backward GEMM"),
    };
    let offsets = rows.offsets(dense);
    let mut values = Values::new();
    for param in &entry.params {
        let Some((dtype, access)) = param.ty.tensor() else {
            continue;
        };
        let name = tensor_name(param);
        let list = match name {
            "offsets" => offsets.iter().map(|&n| n as f64).collect(),
            "row_tiles" => row_tiles(&offsets, config(kernel).tile_rows),
            "row_slots" => row_slots(rows),
            _ if access == Access::Write || (access == Access::ReadWrite && !accumulate) => {
                continue;
            }
            _ => random(param, dtype, rows, inner),
        };
        values.insert(name.to_string(), list);
    }
    values
}

/// Up to one in magnitude; matrices less, so that sums are not large.
fn random(param: &Param, dtype: DType, rows: &Rows, inner: usize) -> Vec<f64> {
    let name = tensor_name(param);
    let sizes = shape(param, rows);
    let mut count = sizes.iter().product::<usize>();
    if param.shape.starts_with("[rows") {
        count = rows.total() * sizes[1];
    }
    let seed = name
        .bytes()
        .fold(7, |sum: u64, byte| sum.wrapping_mul(31) + u64::from(byte));
    let scale = if sizes.len() == 3 {
        (inner as f64).powf(-0.5)
    } else {
        1.0
    };
    let values = Random::new(seed).vec(count);
    values.iter().map(|v| round_to(dtype, v * scale)).collect()
}

fn row_tiles(offsets: &[usize], tile_rows: usize) -> Vec<f64> {
    let tiles = offsets
        .windows(2)
        .map(|pair| (pair[1] - pair[0]).div_ceil(tile_rows));
    let ends = tiles.scan(0, |sum, tiles| {
        *sum += tiles;
        Some(*sum as f64)
    });
    std::iter::once(0.0).chain(ends).collect()
}

/// The slot of each row: any order will do, with none twice.
fn row_slots(rows: &Rows) -> Vec<f64> {
    (0..rows.total()).rev().map(|slot| slot as f64).collect()
}
