//! The matrix-core GEMMs of AMD on this CPU, lane by lane, against the
//! reference: routing is made up here, so that rows lie as a test wants.

use crate::gpu_host::{device, modules, planned_for_all};
use crate::rig;
use moesaic_fibers::FiberDevice;
use moesaic_kernel::{DType, Stem};
use moesaic_plan::{LayerPlan, Op, Step};
use moesaic_reference::{Random, Weights, activate, round_to};
use moesaic_spec::*;
use moesaic_target::{Arg, Buffer, Device, LaunchDims, Module};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Where the assignments go.
#[derive(Clone, Copy, Debug)]
enum Spread {
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
struct Call {
    tokens: usize,
    x: Vec<f64>,
    topk_weights: Vec<f64>,
    /// Expert and slot of each row.
    rows: Vec<(usize, usize)>,
}

impl Call {
    fn new(spec: &LayerSpec, tokens: usize, spread: Spread) -> Call {
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

/// The GEMM kernels of a layer, compiled for the host.
struct Gemms {
    plan: LayerPlan,
    tile_rows: usize,
    weights: Weights,
    device: FiberDevice,
    modules: Vec<Arc<dyn Module>>,
}

type Tensors = BTreeMap<String, Vec<f64>>;

impl Gemms {
    fn new(spec: &LayerSpec, target: &str, family: &str) -> Gemms {
        let mut plan = planned_for_all(spec, target);
        let tile_rows = scan_tile_rows(&plan);
        only_gemms(&mut plan);
        for kernel in &plan.kernels {
            assert_eq!(
                kernel.family(),
                Some(family),
                "{} for {target}",
                kernel.name
            );
        }
        let device = device(&plan);
        Gemms {
            tile_rows,
            weights: Weights::random(spec, 7).rounded(spec),
            modules: modules(&plan, &device),
            device,
            plan,
        }
    }

    fn run(&self, call: &Call) -> Tensors {
        let mut buffers = BTreeMap::new();
        for tensor in &self.plan.tensors {
            let count = tensor.elements(call.tokens as u64) as usize;
            let buffer = self.device.alloc(count * tensor.dtype.size()).unwrap();
            if let Some(mut values) = self.given(call, &tensor.name) {
                values.resize(count, 0.0);
                let bytes = rig::to_bytes(tensor.dtype, &values);
                self.device.upload(&bytes, &buffer, 0).unwrap();
            }
            buffers.insert(tensor.name.clone(), (tensor.dtype, buffer, count));
        }
        for step in &self.plan.steps {
            self.launch(step, call.tokens as u64, &buffers);
        }
        let results = buffers
            .into_iter()
            .filter(|(name, _)| name.ends_with("hidden") || name.ends_with("out"));
        results
            .map(|(name, (dtype, buffer, count))| {
                let mut bytes = vec![0; count * dtype.size()];
                self.device.download(&buffer, 0, &mut bytes).unwrap();
                (name, rig::from_bytes(dtype, &bytes))
            })
            .collect()
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

    fn launch(&self, step: &Step, tokens: u64, buffers: &BTreeMap<String, (DType, Buffer, usize)>) {
        let Step::Launch(launched) = step;
        let entry = &self.plan[launched.entry];
        let pointers = self.plan.names(step);
        let pointers = pointers.map(|name| Arg::Ptr(buffers[name].1.ptr()));
        let args: Vec<Arg> = pointers.chain([Arg::I64(tokens as i64)]).collect();
        let dims = LaunchDims {
            grid: [&entry.launch.grid[0], &entry.launch.grid[1]].map(|n| n.eval(tokens)),
            threads: entry.launch.threads,
            shared_bytes: entry.launch.shared_bytes,
            cluster: entry.launch.cluster,
        };
        // SAFETY: every buffer has the size the plan gives its tensor for
        // this token count, and lives until the launch has ended.
        unsafe { self.modules[launched.entry.kernel].launch(&entry.symbol, dims, &args) }.unwrap();
    }

    /// Every row against the reference; what no row has stays as it was.
    fn check(&self, call: &Call, t: &Tensors) {
        let spec = &self.plan.spec;
        let rows = self.dispatched(call);
        for (row, &(expert, slot)) in call.rows.iter().enumerate() {
            let x = &rows[row * spec.shape.model_dim..][..spec.shape.model_dim];
            let on_activation = spec.router.weight_on == WeightSite::Activation;
            let weight = if on_activation {
                call.topk_weights[slot]
            } else {
                1.0
            };
            self.check_row(
                "experts",
                Some(expert),
                row,
                x,
                weight,
                [&t["hidden"], &t["out"]],
            );
        }
        for name in ["hidden", "out"] {
            let written = call.rows.len() * self.width(name);
            assert!(
                t[name][written..].iter().all(|v| v.is_nan()),
                "{name} beyond its rows"
            );
        }
        for i in 0..spec.shared.len() {
            let prefix = format!("shared.{i}");
            let results = ["hidden", "out"].map(|name| &t[&format!("{prefix}.{name}")]);
            for (token, x) in call.x.chunks(spec.shape.model_dim).enumerate() {
                self.check_row(&prefix, None, token, x, 1.0, results);
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
    fn check_row(
        &self,
        prefix: &str,
        expert: Option<usize>,
        row: usize,
        x: &[f64],
        weight: f64,
        [hidden, out]: [&Vec<f64>; 2],
    ) {
        let spec = &self.plan.spec;
        let part = |name: &str, x: &[f64]| self.product(&format!("{prefix}.{name}"), expert, x);
        let gate = spec.gated().then(|| part("gate", x));
        let want: Vec<f64> = part("up", x)
            .iter()
            .enumerate()
            .map(|(i, up)| {
                let gate = gate.as_ref().map(|g| g[i].0 + g[i].1);
                weight * activate(&spec.experts, gate, up.0 + up.1)
            })
            .collect();
        let hidden = &hidden[row * want.len()..][..want.len()];
        self.near(&format!("{prefix}.hidden[{row}]"), hidden, &want);
        let want: Vec<f64> = part("down", hidden)
            .iter()
            .map(|d| d.0 + weight * d.1)
            .collect();
        self.near(
            &format!("{prefix}.out[{row}]"),
            &out[row * want.len()..][..want.len()],
            &want,
        );
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

const MFMA: [&str; 3] = ["rocm:gfx90a", "rocm:gfx942", "rocm:gfx950"];
const WMMA: [&str; 2] = ["rocm:gfx1100", "rocm:gfx1101"];

fn layer([d, h, out]: [usize; 3], [e, k]: [usize; 2], dtype: DType) -> LayerSpec {
    let text =
        format!(r#"{{"shape":{{"model_dim":{d},"hidden_dim":{h},"experts":{e},"top_k":{k}}}}}"#);
    let mut spec: LayerSpec = serde_json::from_str(&text).unwrap();
    spec.shape.output_dim = (out != d).then_some(out);
    spec.precision.weights = dtype;
    spec.precision.activations = dtype;
    spec
}

fn family(target: &str) -> &'static str {
    if MFMA.contains(&target) {
        "mfma"
    } else {
        "wmma"
    }
}

fn run(spec: &LayerSpec, target: &str, calls: &[(usize, Spread)]) {
    let gemms = Gemms::new(spec, target, family(target));
    for &(tokens, spread) in calls {
        let call = Call::new(spec, tokens, spread);
        gemms.check(&call, &gemms.run(&call));
    }
}

/// Widths that no tile divides, odd ones among them, over all numbers of
/// experts: with both heights of a tile.
fn widths(targets: &[&str], types: &[DType], cases: &[([usize; 3], [usize; 2])]) {
    let calls = [0, 1, 33, 200].map(|tokens| (tokens, Spread::Random));
    for (i, &(shape, experts)) in cases.iter().enumerate() {
        let spec = layer(shape, experts, types[i % types.len()]);
        run(&spec, targets[i / types.len() % targets.len()], &calls);
    }
}

#[test]
fn mfma_of_any_width() {
    use DType::{Bf16, F16, F32};
    let cases = [
        ([8, 63, 264], [1, 1]),
        ([264, 65, 8], [3, 2]),
        ([65, 40, 63], [60, 1]),
        ([16, 264, 24], [7, 7]),
        ([200, 72, 65], [60, 1]),
        ([40, 200, 72], [8, 1]),
        ([24, 16, 40], [60, 3]),
        ([72, 8, 64], [7, 1]),
        ([64, 24, 200], [60, 1]),
    ];
    widths(&MFMA, &[Bf16, F16, F32], &cases);
}

#[test]
fn wmma_of_any_width() {
    let cases = [
        ([8, 63, 264], [1, 1]),
        ([264, 65, 8], [60, 1]),
        ([65, 200, 40], [7, 3]),
        ([72, 24, 16], [8, 8]),
    ];
    widths(&WMMA, &[DType::Bf16, DType::F16], &cases);
}

/// Between them these reach every line of the epilogue.
fn epilogues() -> Vec<LayerSpec> {
    use Activation::{Gelu, GeluTanh, Relu, Relu2, Silu};
    let cases = [
        (Silu, ExpertForm::Gated, WeightSite::Output, DType::Bf16),
        (Gelu, ExpertForm::Plain, WeightSite::Input, DType::F16),
        (
            GeluTanh,
            ExpertForm::Gated,
            WeightSite::Activation,
            DType::F16,
        ),
        (Relu, ExpertForm::Plain, WeightSite::Activation, DType::Bf16),
        (Relu2, ExpertForm::Gated, WeightSite::Input, DType::Bf16),
    ];
    let specs = cases.into_iter().enumerate();
    let specs = specs.map(|(i, (activation, form, site, dtype))| {
        let experts = if i % 2 == 0 { [3, 2] } else { [40, 1] };
        let mut spec = layer([24, 36, 20], experts, dtype);
        spec.experts.activation = activation.clone();
        spec.experts.form = form;
        spec.experts.bias = (i != 4).into();
        spec.router.weight_on = site;
        if i % 2 == 0 {
            spec.experts.clamp = Some(0.4);
            spec.experts.up_offset = 1.0;
        }
        if activation == Silu {
            spec.experts.alpha = 1.702;
        }
        spec
    });
    specs.collect()
}

#[test]
fn epilogues_of_mfma() {
    for (spec, target) in epilogues().iter().zip(MFMA.iter().cycle()) {
        run(spec, target, &[(33, Spread::Random)]);
    }
}

#[test]
fn epilogues_of_wmma() {
    for (spec, target) in epilogues().iter().zip(WMMA.iter().cycle()) {
        run(spec, target, &[(33, Spread::Random)]);
    }
}

#[test]
fn shared_experts_are_dense() {
    for (target, dtype) in [("rocm:gfx942", DType::F16), ("rocm:gfx1100", DType::Bf16)] {
        let mut spec = layer([40, 16, 40], [3, 2], dtype);
        spec.experts.bias = true.into();
        spec.shared = vec![SharedExpert {
            hidden_dim: 65,
            gate: SharedGate::None,
            bias: None,
        }];
        run(
            &spec,
            target,
            &[0, 1, 200].map(|tokens| (tokens, Spread::Random)),
        );
    }
}

/// One expert gets all rows, or most get none; and a row has the same bits
/// wherever in a tile it lies.
#[test]
fn rows_lie_anywhere() {
    for target in ["rocm:gfx942", "rocm:gfx950", "rocm:gfx1100"] {
        for experts in [[8, 2], [60, 1]] {
            let spec = layer([72, 40, 72], experts, DType::Bf16);
            let gemms = Gemms::new(&spec, target, family(target));
            for spread in [Spread::One, Spread::Sparse] {
                let call = Call::new(&spec, 150, spread);
                let tensors = gemms.run(&call);
                gemms.check(&call, &tensors);
                let turned = reversed(&spec, &call);
                same_rows(&spec, [&call, &turned], [&tensors, &gemms.run(&turned)]);
            }
        }
    }
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
