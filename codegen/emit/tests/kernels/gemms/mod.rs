//! The GEMMs of a layer alone, on any device, against the reference: routing is
//! made up here, so that rows lie as a test wants.

pub mod simulated;

use crate::rig;
use moesaic_kernel::{DType, ParamType, Stem, TensorMap};
use moesaic_plan::{LayerPlan, Op, PlanOptions, Step, plan};
use moesaic_reference::{Random, Weights, activate, round_to};
use moesaic_spec::*;
use moesaic_target::{Arg, Buffer, Device, KernelCounters, LaunchDims, Module};
use std::collections::BTreeMap;
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

/// Tokens and where they go: the rows are the slots of one expert after the
/// other.
#[derive(Clone)]
pub struct Call {
    pub tokens: usize,
    x: Vec<f64>,
    topk_weights: Vec<f64>,
    /// Expert and slot of each row.
    rows: Vec<(usize, usize)>,
}

impl Call {
    pub fn new(spec: &LayerSpec, tokens: usize, spread: Spread) -> Call {
        let mut random = Random::new(tokens as u64 + 1);
        let (experts, slots) = (spec.shape.experts, tokens * spec.shape.top_k);
        let mut rows: Vec<(usize, usize)> = (0..slots)
            .map(|slot| (random.bits() as usize, slot))
            .filter_map(|(bits, slot)| {
                match spread {
                    Spread::Random => Some(bits % (experts + 1)).filter(|&e| e < experts),
                    Spread::One => Some(experts - 1),
                    Spread::Sparse => Some(bits % experts.div_ceil(3) * 3),
                }
                .map(|expert| (expert, slot))
            })
            .collect();
        rows.sort();
        let x = random.vec(tokens * spec.shape.model_dim);
        let weights = random.vec(slots);
        Call {
            tokens,
            x: rounded(spec, x),
            topk_weights: weights.iter().map(|v| f64::from(v.abs() as f32)).collect(),
            rows,
        }
    }

    /// The first row of every expert, then that of each expert but the last.
    fn offsets(&self, experts: usize) -> Vec<f64> {
        let before = |e| self.rows.iter().filter(|row| row.0 < e).count() as f64;
        (0..=experts).map(before).collect()
    }

    /// The first row tile of every expert.
    fn row_tiles(&self, experts: usize, tile_rows: usize) -> Vec<f64> {
        let offsets = self.offsets(experts);
        let tiles = offsets
            .windows(2)
            .map(|pair| ((pair[1] - pair[0]) / tile_rows as f64).ceil());
        let ends = tiles.scan(0.0, |sum, tiles| {
            *sum += tiles;
            Some(*sum)
        });
        std::iter::once(0.0).chain(ends).collect()
    }
}

fn rounded(spec: &LayerSpec, values: Vec<f64>) -> Vec<f64> {
    let dtype = spec.precision.activations;
    values.into_iter().map(|v| round_to(dtype, v)).collect()
}

/// Which row of which expert: routed with its index, or shared.
struct RowOf<'a> {
    prefix: &'a str,
    expert: Option<usize>,
    row: usize,
    weight: f64,
}

/// The GEMM kernels of a layer, loaded on a device.
pub struct Gemms {
    pub plan: LayerPlan,
    tile_rows: usize,
    weights: Weights,
    device: Arc<dyn Device>,
    modules: Vec<Arc<dyn Module>>,
}

/// Results by tensor.
pub type Tensors = BTreeMap<String, Vec<f64>>;

/// Takes a row's name, its values and the reference's.
type Show<'a> = dyn FnMut(&str, &[f64], &[f64]) + 'a;

/// A tensor of a call: its type, its memory, its elements.
type Memory = (DType, Buffer, usize);

impl Gemms {
    /// `load` gets the plan with nothing but the GEMMs in it, one for all calls.
    pub fn new(
        spec: &LayerSpec,
        target: &str,
        load: impl FnOnce(&LayerPlan) -> (Arc<dyn Device>, Vec<Arc<dyn Module>>),
    ) -> Gemms {
        let options = PlanOptions {
            one_for_all: true,
            ..PlanOptions::default()
        };
        Gemms::planned(spec, target, &options, load)
    }

    /// The same, of a plan with these options.
    pub fn planned(
        spec: &LayerSpec,
        target: &str,
        options: &PlanOptions,
        load: impl FnOnce(&LayerPlan) -> (Arc<dyn Device>, Vec<Arc<dyn Module>>),
    ) -> Gemms {
        if let Err(problems) = spec.validate() {
            panic!("the test's spec is invalid: {problems:?}");
        }
        let mut plan = plan(spec, target.parse().unwrap(), options).unwrap();
        let tile_rows = scan_tile_rows(&plan);
        only_gemms(&mut plan);
        let (device, modules) = load(&plan);
        Gemms {
            tile_rows,
            weights: Weights::random(spec, 7).rounded(spec),
            device,
            modules,
            plan,
        }
    }

    /// The family of every GEMM.
    pub fn families(&self) -> Vec<&'static str> {
        let kernels = self.plan.kernels.iter();
        kernels.filter_map(|kernel| kernel.family()).collect()
    }

    /// Runs every kernel. What they write was full of NaN before; what they
    /// read has no value beyond the rows of the call.
    pub fn run(&self, call: &Call) -> Tensors {
        let mut memory = BTreeMap::new();
        for tensor in &self.plan.tensors {
            let count = tensor.elements(call.tokens as u64) as usize;
            let buffer = self.device.alloc(count * tensor.dtype.size()).unwrap();
            let bytes = match self.given(call, &tensor.name) {
                Some(values) => rig::to_bytes(tensor.dtype, &values),
                None if is_result(&tensor.name) => vec![0xff; count * tensor.dtype.size()],
                None => Vec::new(),
            };
            self.device.upload(&bytes, &buffer, 0).unwrap();
            memory.insert(tensor.name.clone(), (tensor.dtype, buffer, count));
        }
        for step in &self.plan.steps {
            self.launch(step, call.tokens as u64, &memory);
        }
        self.device.synchronize().unwrap();
        let results = memory.into_iter().filter(|(name, _)| is_result(name));
        results
            .map(|(name, memory)| (name, self.read(&memory)))
            .collect()
    }

    /// What a simulated device counted since the last call.
    pub fn take_counters(&self) -> Vec<KernelCounters> {
        self.device.take_counters()
    }

    fn read(&self, (dtype, buffer, count): &Memory) -> Vec<f64> {
        let mut bytes = vec![0; count * dtype.size()];
        self.device.download(buffer, 0, &mut bytes).unwrap();
        rig::from_bytes(*dtype, &bytes)
    }

    /// What the kernels read; `None` for what they write or never see.
    fn given(&self, call: &Call, name: &str) -> Option<Vec<f64>> {
        let experts = self.plan.spec.shape.experts;
        match name {
            "x" => Some(call.x.clone()),
            "rows" => Some(self.dispatched(call)),
            "offsets" => Some(call.offsets(experts)),
            "row_tiles" => Some(call.row_tiles(experts, self.tile_rows)),
            "row_slots" => Some(call.rows.iter().map(|row| row.1 as f64).collect()),
            "topk_weights" => Some(call.topk_weights.clone()),
            name if self.weights.0.contains_key(name) => Some(self.weights.get(name).data.clone()),
            _ => None,
        }
    }

    fn launch(&self, step: &Step, tokens: u64, memory: &BTreeMap<String, Memory>) {
        let Step::Launch(launched) = step;
        let entry = &self.plan[launched.entry];
        let mut tensors = self.plan.names(step);
        let args: Vec<Arg> = entry
            .params
            .iter()
            .map(|param| match param.ty {
                ParamType::Scalar(_) => Arg::I64(tokens as i64),
                ty => self.argument(ty, tensors.next().unwrap(), tokens, memory),
            })
            .collect();
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

    fn argument(
        &self,
        ty: ParamType,
        name: &str,
        tokens: u64,
        memory: &BTreeMap<String, Memory>,
    ) -> Arg {
        let base = memory[name].1.ptr();
        match ty {
            ParamType::TensorMap(map) => Arg::TensorMap {
                base,
                dims: self.map_dims(&map, name, tokens),
            },
            _ => Arg::Ptr(base),
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

    /// The input of each row.
    fn dispatched(&self, call: &Call) -> Vec<f64> {
        let spec = &self.plan.spec;
        let (d, k) = (spec.shape.model_dim, spec.shape.top_k);
        let row = |slot: usize| {
            let x = call.x[slot / k * d..][..d].iter().copied();
            match spec.router.weight_on {
                WeightSite::Input => x.map(|v| v * call.topk_weights[slot]).collect(),
                _ => x.collect::<Vec<_>>(),
            }
        };
        rounded(
            spec,
            call.rows.iter().flat_map(|&(_, slot)| row(slot)).collect(),
        )
    }

    /// Every row against the reference; what no row has stays as it was.
    pub fn check(&self, call: &Call, t: &Tensors) {
        self.each_row(call, t, &mut |what, got, want| self.near(what, got, want));
        for name in ["hidden", "out"] {
            let written = call.rows.len() * self.width(name);
            assert!(
                t[name][written..].iter().all(|v| v.is_nan()),
                "{name} beyond its rows"
            );
        }
    }

    /// One expert gets all rows, or most get none; and a row has the same bits wherever in a
    /// tile it lies.
    pub fn check_anywhere(&self, tokens: usize) {
        let spec = &self.plan.spec;
        for spread in [Spread::One, Spread::Sparse] {
            let call = Call::new(spec, tokens, spread);
            let tensors = self.run(&call);
            self.check(&call, &tensors);
            let turned = reversed(spec, &call);
            same_rows(spec, [&call, &turned], [&tensors, &self.run(&turned)]);
        }
    }

    /// The largest difference from the reference.
    pub fn error(&self, call: &Call, t: &Tensors) -> f64 {
        let mut most = 0.0f64;
        self.each_row(call, t, &mut |_, got, want| {
            let errors = got.iter().zip(want).map(|(got, want)| (got - want).abs());
            most = errors.fold(most, f64::max);
        });
        most
    }

    /// Shows every row of a result, by name, with the reference's.
    fn each_row(&self, call: &Call, t: &Tensors, show: &mut Show<'_>) {
        let spec = &self.plan.spec;
        let (rows, d) = (self.dispatched(call), spec.shape.model_dim);
        let routed = ["hidden", "out"].map(|name| &t[name]);
        for (row, &(expert, slot)) in call.rows.iter().enumerate() {
            let weight = match spec.router.weight_on {
                WeightSite::Activation => call.topk_weights[slot],
                _ => 1.0,
            };
            let of = RowOf {
                prefix: "experts",
                expert: Some(expert),
                row,
                weight,
            };
            self.show_row(&of, &rows[row * d..][..d], routed, show);
        }
        for i in 0..spec.shared.len() {
            let prefix = &*format!("shared.{i}");
            let results = ["hidden", "out"].map(|name| &t[&format!("{prefix}.{name}")]);
            for (row, x) in call.x.chunks(d).enumerate() {
                let of = RowOf {
                    prefix,
                    expert: None,
                    row,
                    weight: 1.0,
                };
                self.show_row(&of, x, results, show);
            }
        }
    }

    fn width(&self, name: &str) -> usize {
        let spec = &self.plan.spec;
        if name == "hidden" {
            spec.shape.hidden_dim
        } else {
            spec.output_dim()
        }
    }

    /// One row of both halves; the down half from the hidden row it had.
    fn show_row(&self, of: &RowOf, x: &[f64], [hidden, out]: [&Vec<f64>; 2], show: &mut Show<'_>) {
        let (spec, prefix, row) = (&self.plan.spec, of.prefix, of.row);
        let part = |name: &str, x: &[f64]| self.product(&format!("{prefix}.{name}"), of.expert, x);
        let gate = spec.gated().then(|| part("gate", x));
        let want: Vec<f64> = part("up", x)
            .iter()
            .enumerate()
            .map(|(i, up)| {
                let gate = gate.as_ref().map(|g| g[i].0 + g[i].1);
                of.weight * activate(&spec.experts, gate, up.0 + up.1)
            })
            .collect();
        let hidden = &hidden[row * want.len()..][..want.len()];
        show(&format!("{prefix}.hidden[{row}]"), hidden, &want);
        let down = part("down", hidden);
        let want: Vec<f64> = down.iter().map(|d| d.0 + of.weight * d.1).collect();
        let out = &out[row * want.len()..][..want.len()];
        show(&format!("{prefix}.out[{row}]"), out, &want);
    }

    /// Products and biases of one projection.
    fn product(&self, name: &str, expert: Option<usize>, x: &[f64]) -> Vec<(f64, f64)> {
        let slice = |what: &str| {
            let tensor = self.weights.get(&format!("{name}.{what}"));
            expert.map_or(&*tensor.data, |e| tensor.outer(e))
        };
        let biased = self.weights.0.contains_key(&format!("{name}.bias"));
        let bias = biased.then(|| slice("bias"));
        let dot = |row: &[f64]| row.iter().zip(x).map(|(w, v)| w * v).sum();
        let lines = slice("weight").chunks(x.len()).enumerate();
        lines
            .map(|(i, line)| (dot(line), bias.map_or(0.0, |b| b[i])))
            .collect()
    }

    fn near(&self, what: &str, got: &[f64], want: &[f64]) {
        let spec = &self.plan.spec;
        let tolerance = 4e-6 + 2.0 * spec.precision.activations.unit_roundoff();
        for (i, (got, want)) in got.iter().zip(want).enumerate() {
            let near = (got - want).abs() <= tolerance * want.abs().max(1.0);
            assert!(
                near,
                "{}: {what}, column {i}: {got} is not {want}; {spec:?}",
                self.plan.target
            );
        }
    }
}

fn is_result(name: &str) -> bool {
    name.ends_with("hidden") || name.ends_with("out")
}

/// Leaves out every other stem.
fn only_gemms(plan: &mut LayerPlan) {
    let gemm = |kernel: usize| plan.kernels[kernel].stem() == Stem::GroupedGemm;
    let mut steps = plan.steps.clone();
    steps.retain(|Step::Launch(launch)| gemm(launch.entry.kernel));
    for (i, Step::Launch(launch)) in steps.iter_mut().enumerate() {
        launch.entry.kernel = i; // a GEMM has one entry
    }
    plan.steps = steps;
    plan.kernels.retain(|k| k.stem() == Stem::GroupedGemm);
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

/// A layer with what may become of a sum: an activation, biases and limits, which differ with
/// the number of the case.
pub fn ending(
    mut spec: LayerSpec,
    case: usize,
    (activation, form, site): (Activation, ExpertForm, WeightSite),
) -> LayerSpec {
    if activation == Activation::Silu {
        spec.experts.alpha = 1.702;
    }
    spec.experts.activation = activation;
    spec.experts.form = form;
    spec.experts.bias = (case != 4).into();
    spec.router.weight_on = site;
    if case.is_multiple_of(2) {
        spec.experts.clamp = Some(0.4);
        spec.experts.up_offset = 1.0;
    }
    spec
}

/// The same tokens, last first.
fn reversed(spec: &LayerSpec, call: &Call) -> Call {
    let slots = call.topk_weights.len();
    let mut turned = call.clone();
    let tokens = call.x.chunks(spec.shape.model_dim);
    turned.x = tokens.rev().flatten().copied().collect();
    turned.rows = call
        .rows
        .iter()
        .map(|&(e, slot)| (e, slots - 1 - slot))
        .collect();
    turned.rows.sort();
    turned
}

fn same_rows(spec: &LayerSpec, calls: [&Call; 2], tensors: [&Tensors; 2]) {
    let slots = calls[0].topk_weights.len();
    for (row, &(expert, slot)) in calls[0].rows.iter().enumerate() {
        let wanted = (expert, slots - 1 - slot);
        let other = calls[1].rows.iter().position(|&row| row == wanted).unwrap();
        for (name, width) in [
            ("hidden", spec.shape.hidden_dim),
            ("out", spec.output_dim()),
        ] {
            let bits = |t: &Tensors, row: usize| {
                let values = t[name][row * width..][..width].iter();
                values.map(|v| v.to_bits()).collect::<Vec<_>>()
            };
            let [a, b] = [bits(tensors[0], row), bits(tensors[1], other)];
            assert_eq!(a, b, "{name}: row {row} has other bits as row {other}");
        }
    }
}
