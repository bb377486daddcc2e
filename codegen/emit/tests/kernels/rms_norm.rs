//! The norm of rows and its gradient, alone: on this CPU's instruction sets and on simulators,
//! against a plain f64 loop.

use crate::one_kernel::{machine, waiting};
use moesaic_emit::emit;
use moesaic_harness::{dims, memory, thorough};
use moesaic_kernel::CpuIsa::{Avx2, Avx512, Avx512Bf16, Neon, NeonBf16, Portable};
use moesaic_kernel::{DType, Entry, Target};
use moesaic_plan::{CacheClass, KernelPlan, Operator, RmsNormBwdDesc, RmsNormDesc, TileMachine};
use moesaic_reference::{Random, round_to};
use moesaic_target::{Arg, Buffer, Device, Module};
use std::sync::Arc;

pub const EPS: f64 = 0.02;
const TYPES: [DType; 3] = [DType::F32, DType::Bf16, DType::F16];

/// One column, parts of a vector, one more than a block of columns, and a row that a warp reads in
/// several turns.
const WIDTHS: [usize; 6] = [1, 7, 33, 40, 256, 1032];
const TOKENS: [usize; 5] = [0, 1, 5, 33, 70];

/// The rows of a call, in the layer's type, with what they give in f64.
struct Rows {
    width: usize,
    x: Vec<f64>,
    weight: Vec<f64>,
    dy: Vec<f64>,
}

/// The results of both kernels.
#[derive(Default)]
struct Results {
    y: Vec<f64>,
    inverse: Vec<f64>,
    dx: Vec<f64>,
    dweight: Vec<f64>,
}

impl Rows {
    fn random(dtype: DType, width: usize, tokens: usize) -> Rows {
        let mut random = Random::new((width * 100 + tokens) as u64);
        let mut values = |count: usize, dtype: DType| -> Vec<f64> {
            let values = random.vec(count).into_iter();
            values.map(|value| round_to(dtype, value)).collect()
        };
        Rows {
            width,
            x: values(tokens * width, dtype),
            weight: values(width, DType::F32),
            dy: values(tokens * width, dtype),
        }
    }

    fn tokens(&self) -> usize {
        self.x.len() / self.width
    }

    /// The same by a plain loop over rows.
    fn expected(&self) -> Results {
        let mut results = Results {
            dweight: vec![0.0; self.width],
            ..Results::default()
        };
        let width = self.width as f64;
        for (x, dy) in self.x.chunks(self.width).zip(self.dy.chunks(self.width)) {
            let squares: f64 = x.iter().map(|x| x * x).sum();
            let inverse = (squares / width + EPS).sqrt().recip();
            let along: f64 = (0..self.width).map(|i| dy[i] * self.weight[i] * x[i]).sum();
            results.inverse.push(inverse);
            for i in 0..self.width {
                results.y.push(x[i] * inverse * self.weight[i]);
                let straight = dy[i] * self.weight[i];
                let back = straight - x[i] * along * inverse * inverse / width;
                results.dx.push(back * inverse);
                results.dweight[i] += dy[i] * x[i] * inverse;
            }
        }
        results
    }
}

/// A kernel, loaded on a device.
pub struct Loaded {
    module: Arc<dyn Module>,
    entries: Vec<Entry>,
}

/// The two kernels for rows of a width and type.
pub struct Norm {
    device: Arc<dyn Device>,
    pub forward: Loaded,
    pub backward: Loaded,
    pub dtype: DType,
    what: String,
}

/// Returns the two kernels' descs, for rows of tokens.
fn of_tokens(width: usize, dtype: DType, clears: bool) -> (RmsNormDesc, RmsNormBwdDesc) {
    let forward = RmsNormDesc {
        width,
        activations: dtype,
        eps: EPS,
        experts: 0,
        top_k: 0,
    };
    let backward = RmsNormBwdDesc {
        width,
        activations: dtype,
        eps: EPS,
        experts: 0,
        top_k: 0,
        clears,
    };
    (forward, backward)
}

impl Norm {
    pub fn new(target: Target, (forward, backward): (RmsNormDesc, RmsNormBwdDesc)) -> Norm {
        let (device, compile) = machine(target);
        let at = TileMachine::of(target, CacheClass::default());
        let (width, dtype) = (forward.width, forward.activations);
        let (tiles, tiles_back) = (forward.tiling(at), backward.tiling(at));
        let load = |name: &str, entries: Vec<Entry>, op| {
            let kernel = KernelPlan {
                name: name.to_string(),
                entries: waiting(entries, target),
                op,
            };
            let source = emit(&kernel, target).unwrap();
            Loaded {
                module: device.load(&compile(&source), &source.entries).unwrap(),
                entries: source.entries,
            }
        };
        let entries = [forward.entries(&tiles), backward.entries(&tiles_back)];
        let [entries, entries_back] = entries;
        Norm {
            forward: load("rms_norm", entries, forward.with(tiles)),
            backward: load("rms_norm_bwd", entries_back, backward.with(tiles_back)),
            device,
            dtype,
            what: format!("rows of {width} {dtype} on {target}"),
        }
    }

    pub fn buffer(&self, dtype: DType, values: &[f64]) -> Buffer {
        self.upload(&memory::to_bytes(dtype, values))
    }

    pub fn upload(&self, bytes: &[u8]) -> Buffer {
        let buffer = self.device.alloc(bytes.len().max(64)).unwrap();
        self.device.upload(bytes, &buffer, 0).unwrap();
        buffer
    }

    /// Memory for results, full of NaN: what a kernel leaves out shows.
    pub fn poisoned(&self, dtype: DType, count: usize) -> Buffer {
        self.buffer(dtype, &vec![f64::NAN; count])
    }

    pub fn read(&self, dtype: DType, buffer: &Buffer, count: usize) -> Vec<f64> {
        let mut bytes = vec![0; count * dtype.size()];
        self.device.synchronize().unwrap();
        self.device.download(buffer, 0, &mut bytes).unwrap();
        memory::from_bytes(dtype, &bytes)
    }

    pub fn launch(&self, kernel: &Loaded, symbol: &str, buffers: &[&Buffer], scalars: &[i64]) {
        let entry = kernel.entries.iter().find(|e| e.symbol == symbol).unwrap();
        let pointers = buffers.iter().map(|buffer| Arg::Ptr(buffer.ptr()));
        let args: Vec<Arg> = pointers
            .chain(scalars.iter().map(|&value| Arg::I64(value)))
            .collect();
        let dims = dims(&entry.launch, *scalars.last().unwrap() as usize);
        if !dims.grid.contains(&0) {
            // SAFETY: buffers are as large as the entry's shapes say for so many rows.
            unsafe { kernel.module.launch(symbol, dims, &args) }.unwrap();
        }
    }

    /// Runs forward, then backward `times` times, the later ones adding to the weight's gradient.
    fn run(&self, rows: &Rows, times: i64) -> Results {
        let (tokens, count) = (rows.tokens(), rows.x.len());
        let [x, dy] = [&rows.x, &rows.dy].map(|values| self.buffer(self.dtype, values));
        let weight = self.buffer(DType::F32, &rows.weight);
        let [y, dx] = [(); 2].map(|()| self.poisoned(self.dtype, count));
        let inverse = self.poisoned(DType::F32, tokens);
        let dweight = self.poisoned(DType::F32, rows.width);
        let t = tokens as i64;
        self.launch(&self.forward, "rms_norm", &[&x, &weight, &y], &[t]);
        for accumulate in 0..times {
            let buffers = [&x, &weight, &dy, &inverse, &dx];
            self.launch(&self.backward, "rms_norm_bwd", &buffers, &[t]);
            let buffers = [&x, &dy, &inverse, &dweight];
            let scalars = [accumulate.min(1), t];
            self.launch(&self.backward, "rms_norm_bwd_weight", &buffers, &scalars);
        }
        Results {
            y: self.read(self.dtype, &y, count),
            inverse: self.read(DType::F32, &inverse, tokens),
            dx: self.read(self.dtype, &dx, count),
            dweight: self.read(DType::F32, &dweight, rows.width),
        }
    }

    fn check(&self, tokens: usize, width: usize) {
        let rows = Rows::random(self.dtype, width, tokens);
        let (found, mut want) = (self.run(&rows, 2), rows.expected());
        want.dweight.iter_mut().for_each(|sum| *sum *= 2.0);
        let stored = match self.dtype {
            DType::F32 => 2e-6,
            DType::F16 => 1e-3,
            _ => 6e-3,
        };
        self.close("y", &found.y, &want.y, stored);
        self.close("inverse_rms", &found.inverse, &want.inverse, 2e-6);
        self.close("dx", &found.dx, &want.dx, stored);
        self.close("grad.weight", &found.dweight, &want.dweight, 4e-6);
    }

    pub fn close(&self, name: &str, found: &[f64], want: &[f64], tolerance: f64) {
        assert_eq!(found.len(), want.len());
        let largest = want
            .iter()
            .fold(1.0f64, |most, value| most.max(value.abs()));
        for (at, (found, want)) in found.iter().zip(want).enumerate() {
            let near = (found - want).abs() <= tolerance * largest;
            assert!(near, "{name} of {}: {found} at {at}, not {want}", self.what);
        }
    }

    /// A row with a NaN spoils itself and the weight's gradient, and no other row.
    fn check_nan(&self, width: usize) {
        let rows = Rows::random(self.dtype, width, 9);
        let mut spoilt = Rows::random(self.dtype, width, 9);
        spoilt.x[4 * width + width / 2] = f64::NAN;
        let [clean, found] = [&rows, &spoilt].map(|rows| self.run(rows, 1));
        for (name, clean, found) in [("y", clean.y, found.y), ("dx", clean.dx, found.dx)] {
            for (row, (clean, found)) in clean.chunks(width).zip(found.chunks(width)).enumerate() {
                if row == 4 {
                    let all = found.iter().all(|value| value.is_nan());
                    assert!(all, "{name} of {}: {found:?}", self.what);
                } else {
                    assert_eq!(clean, found, "{name} of {}: row {row}", self.what);
                }
            }
        }
        let all = found.dweight.iter().all(|value| value.is_nan());
        assert!(all, "grad.weight of {}: {:?}", self.what, found.dweight);
    }

    /// A row that holds NaN, and whose gradient is zeros, adds nothing.
    fn check_padding(&self, width: usize) {
        let mut rows = Rows::random(self.dtype, width, 9);
        let padding = 4 * width..5 * width;
        rows.dy[padding.clone()].fill(0.0);
        let clean = self.run(&rows, 1);
        rows.x[padding.clone()].fill(f64::NAN);
        let found = self.run(&rows, 1);
        assert_eq!(clean.dx, found.dx, "dx of {}", self.what);
        assert_eq!(clean.dweight, found.dweight, "grad.weight of {}", self.what);
        let zeros = found.dx[padding].iter().all(|value| *value == 0.0);
        assert!(zeros, "dx of {}", self.what);
    }
}

/// A width and a type of a kernel for rows.
pub struct RowKind {
    pub target: Target,
    pub width: usize,
    pub dtype: DType,
    /// Of two neighbours in width or in type, one is odd.
    odd: bool,
}

/// Calls `check` with every width and every type with some other, `turn` deciding which; with all
/// of both with `--thorough`.
fn each_kind(target: Target, turn: usize, check: impl Fn(RowKind)) {
    for (n, &width) in WIDTHS.iter().enumerate() {
        for (m, dtype) in TYPES.into_iter().enumerate() {
            if thorough::takes(n + m + turn, TYPES.len()) {
                let odd = (n + m) % 2 == 1;
                check(RowKind {
                    target,
                    width,
                    dtype,
                    odd,
                });
            }
        }
    }
}

/// Calls `check` with widths and types on each instruction set of this CPU.
pub fn on_cpus(check: fn(RowKind)) {
    let isas = [Portable, Avx2, Avx512, Avx512Bf16, Neon, NeonBf16];
    let isas = isas.into_iter().filter(|isa| moesaic_cpu::host_runs(*isa));
    for (turn, isa) in isas.enumerate() {
        each_kind(Target::Cpu(isa), turn, check);
    }
}

/// Calls `check` with widths and types on a simulator of each kind of GPU.
pub fn on_simulators(check: fn(RowKind)) {
    let targets = ["sim:gfx942", "sim:gfx1100", "sim:sm_80", "sim:sm_90a"];
    for (turn, target) in targets.into_iter().enumerate() {
        each_kind(target.parse().unwrap(), turn, check);
    }
}

/// Half of the kernels pass over padding.
fn check(kind: RowKind) {
    let RowKind { width, dtype, .. } = kind;
    let norm = Norm::new(kind.target, of_tokens(width, dtype, kind.odd));
    for tokens in TOKENS {
        norm.check(tokens, width);
    }
    norm.check_nan(width);
    if kind.odd {
        norm.check_padding(width);
    }
}

#[test]
fn norms_on_cpus_are_those_of_a_plain_loop() {
    on_cpus(check);
}

#[test]
fn norms_on_simulated_gpus_are_those_of_a_plain_loop() {
    on_simulators(check);
}
