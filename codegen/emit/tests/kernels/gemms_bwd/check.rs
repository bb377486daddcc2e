//! One kernel's results in f64, from the tensors it read.

use super::{Call, Products, Tensors};
use moesaic_kernel::DType;
use moesaic_plan::{
    EntryId, GroupedGemmDesc, GroupedGemmDgradDesc, GroupedGemmWgradDesc, Half, Op, Step,
};
use moesaic_reference::activate;
use moesaic_spec::Experts;
use std::collections::BTreeMap;

/// A sum and the sum of its terms' sizes, to which rounding is relative.
#[derive(Clone, Copy, Default)]
struct Sum {
    value: f64,
    size: f64,
}

impl Sum {
    fn add(&mut self, term: f64) {
        self.value += term;
        self.size += term.abs();
    }

    /// Times a factor that is off by a rounding of one.
    fn times(self, factor: f64) -> Sum {
        Sum {
            value: self.value * factor,
            size: self.size * (factor.abs() + 1.0),
        }
    }
}

/// A step with what it read and wrote, by parameter.
struct Launched<'a> {
    products: &'a Products,
    call: &'a Call,
    entry: EntryId,
    tensors: BTreeMap<String, &'a str>,
    values: &'a Tensors,
    dense: bool,
}

impl Products {
    /// Every result of every kernel; what no row has stays as it was.
    pub fn check(&self, call: &Call, values: &Tensors) {
        for step in self.plan.steps.iter().chain(&self.plan.backward) {
            let Step::Launch(launch) = step;
            let entry = &self.plan[launch.entry];
            let params = entry.params.iter();
            let params = params.filter(|param| param.ty.tensor().is_some());
            let tensors = params
                .map(|param| param.name.trim_end_matches("_map").to_string())
                .zip(self.plan.names(step));
            let mut launched = Launched {
                products: self,
                call,
                entry: launch.entry,
                tensors: tensors.collect(),
                values,
                dense: false,
            };
            match &self.plan.kernels[launch.entry.kernel].op {
                Op::GroupedGemm { desc: d, .. } => launched.of(d.dense).kept(d),
                Op::GroupedGemmDgrad { desc: d, .. } => launched.of(d.dense).dgrad(d),
                Op::GroupedGemmWgrad { desc: d, .. } if entry.symbol.ends_with("_bias") => {
                    launched.of(d.dense).wgrad_bias(d)
                }
                Op::GroupedGemmWgrad { desc: d, .. } => launched.of(d.dense).wgrad(d),
                _ => unreachable!("only products are left"),
            }
        }
    }
}

impl Launched<'_> {
    fn of(&mut self, dense: bool) -> &Self {
        self.dense = dense;
        self
    }

    fn get(&self, param: &str) -> &[f64] {
        &self.values.after[self.tensors[param]]
    }

    fn has(&self, param: &str) -> bool {
        self.tensors.contains_key(param)
    }

    /// Expert of each row.
    fn rows(&self) -> Vec<usize> {
        if self.dense {
            vec![0; self.call.tokens]
        } else {
            self.call.rows.iter().map(|row| row.0).collect()
        }
    }

    fn weight(&self, row: usize) -> f64 {
        match (self.has("topk_weights"), self.dense) {
            (false, _) => 1.0,
            (true, true) => self.get("topk_weights")[row],
            (true, false) => self.get("topk_weights")[self.call.rows[row].1],
        }
    }

    /// A row of a tensor of rows, or of x where those are gathered.
    fn row<'b>(&'b self, param: &str, row: usize, width: usize) -> &'b [f64] {
        if param == "rows" && !self.has("rows") {
            let token = self.call.rows[row].1 / self.products.plan.spec.shape.top_k;
            return &self.get("x")[token * width..][..width];
        }
        &self.get(param)[row * width..][..width]
    }

    /// `got` is `want`, rounded once, up to the order of the sum.
    fn near(&self, param: &str, dtype: DType, at: usize, want: Sum) {
        let got = self.get(param)[at];
        let roundoff = match dtype {
            DType::F32 => 0.0,
            other => 1.01 * other.unit_roundoff(),
        };
        // Half the distance of f16's smallest values.
        let least = if dtype == DType::F16 {
            0.5f64.powi(25)
        } else {
            0.0
        };
        let off = roundoff * want.value.abs() + 4e-6 * want.size + least;
        assert!(
            (got - want.value).abs() <= off,
            "{}: {} of {} [{at}] is {got}, not {}; {:?}",
            self.products.plan.target,
            self.tensors[param],
            self.products.plan[self.entry].symbol,
            want.value,
            self.products.plan.spec,
        );
    }

    fn untouched(&self, param: &str, width: usize) {
        if !self.dense {
            let beyond = &self.get(param)[self.call.rows.len() * width..];
            assert!(beyond.iter().all(|v| v.is_nan()), "{param} beyond its rows");
        }
    }

    /// What the up half keeps: `rows · matrixᵀ + bias`.
    fn kept(&self, d: &GroupedGemmDesc) {
        let names = [("gate", "gate_pre"), ("up", "up_pre")];
        for (matrix, pre) in names.into_iter().filter(|(_, pre)| self.has(pre)) {
            for (row, expert) in self.rows().into_iter().enumerate() {
                let x = self.row("rows", row, d.inner);
                for column in 0..d.outer {
                    let line = expert * d.outer + column;
                    let mut sum = Sum::default();
                    let factors = self.get(matrix)[line * d.inner..].iter().zip(x);
                    factors.for_each(|(w, v)| sum.add(w * v));
                    if d.bias {
                        sum.add(self.get(&format!("{matrix}_bias"))[line]);
                    }
                    self.near(pre, d.activations, row * d.outer + column, sum);
                }
            }
            self.untouched(pre, d.outer);
        }
    }

    fn dgrad(&self, d: &GroupedGemmDgradDesc) {
        let rows = self.rows();
        for (row, &expert) in rows.iter().enumerate() {
            let products = self.back(d, row, expert);
            match d.half {
                Half::Down => self.down(d, row, &products),
                Half::Up => {
                    for (column, &sum) in products.iter().enumerate() {
                        self.near("drows", d.activations, row * d.outer + column, sum);
                    }
                }
            }
        }
        let results = match d.half {
            Half::Down => ["hidden", "dgate", "dup"].as_slice(),
            Half::Up => &["drows"],
        };
        for name in results.iter().filter(|name| self.has(name)) {
            self.untouched(name, d.outer);
        }
    }

    /// A gradient row times the matrices.
    fn back(&self, d: &GroupedGemmDgradDesc, row: usize, expert: usize) -> Vec<Sum> {
        let pairs = match (d.half, d.gated) {
            (Half::Down, _) => [("dout", "down")].as_slice(),
            (Half::Up, true) => &[("dgate", "gate"), ("dup", "up")],
            (Half::Up, false) => &[("dup", "up")],
        };
        let mut sums = vec![Sum::default(); d.outer];
        for (incoming, matrix) in pairs {
            let matrix = &self.get(matrix)[expert * d.inner * d.outer..];
            let lines = matrix.chunks(d.outer);
            for (factor, line) in self.row(incoming, row, d.inner).iter().zip(lines) {
                let columns = sums.iter_mut().zip(line);
                columns.for_each(|(sum, w)| sum.add(factor * w));
            }
        }
        sums
    }

    fn down(&self, d: &GroupedGemmDgradDesc, row: usize, products: &[Sum]) {
        let weight = self.weight(row);
        let op = &self.products.plan.kernels[self.entry.kernel].op;
        let config = op.gemm().expect("a product");
        let mut parts = vec![Sum::default(); d.outer.div_ceil(config.tile_columns)];
        for (column, &product) in products.iter().enumerate() {
            let at = row * d.outer + column;
            let gate = d.gated.then(|| self.get("gate_pre")[at]);
            let a = Activated::new(
                &self.products.plan.spec.experts,
                gate,
                self.get("up_pre")[at],
            );
            let exact = |value: f64| Sum {
                value,
                size: value.abs() + 1.0,
            };
            self.near("hidden", d.activations, at, exact(weight * a.value));
            if d.gated {
                self.near(
                    "dgate",
                    d.activations,
                    at,
                    product.times(weight * a.by_gate),
                );
            }
            self.near("dup", d.activations, at, product.times(weight * a.by_up));
            let part = product.times(a.value);
            parts[column / config.tile_columns].value += part.value;
            parts[column / config.tile_columns].size += part.size;
        }
        if d.weighted {
            for (i, &part) in parts.iter().enumerate() {
                self.near("dweight_parts", DType::F32, row * parts.len() + i, part);
            }
        }
    }

    fn wgrad(&self, d: &GroupedGemmWgradDesc) {
        let right = if d.half == Half::Down {
            "hidden"
        } else {
            "rows"
        };
        for (left, matrix) in lefts(d) {
            let mut sums = vec![Sum::default(); d.experts * d.height * d.width];
            for (row, expert) in self.rows().into_iter().enumerate() {
                let lines = sums[expert * d.height * d.width..].chunks_mut(d.width);
                let factors = self.row(left, row, d.height).iter().zip(lines);
                for (factor, line) in factors {
                    let line = line.iter_mut().zip(self.row(right, row, d.width));
                    line.for_each(|(sum, v)| sum.add(factor * v));
                }
            }
            self.gradient(&format!("grad_{matrix}"), &sums);
        }
    }

    fn wgrad_bias(&self, d: &GroupedGemmWgradDesc) {
        for (left, matrix) in lefts(d) {
            let mut sums = vec![Sum::default(); d.experts * d.height];
            for (row, expert) in self.rows().into_iter().enumerate() {
                let sums = sums[expert * d.height..].iter_mut();
                let terms = self.row(left, row, d.height).iter().zip(sums);
                terms.for_each(|(v, sum)| sum.add(self.weight(row) * v));
            }
            self.gradient(&format!("grad_{matrix}_bias"), &sums);
        }
    }

    /// Sums, and what was there before where they are added to it.
    fn gradient(&self, param: &str, sums: &[Sum]) {
        let before = &self.values.before[self.tensors[param]];
        for (at, &sum) in sums.iter().enumerate() {
            let mut sum = sum;
            if self.call.accumulate {
                sum.add(before[at]);
            }
            self.near(param, DType::F32, at, sum);
        }
    }
}

/// Left operands and the matrices they give.
fn lefts(d: &GroupedGemmWgradDesc) -> &'static [(&'static str, &'static str)] {
    match (d.half, d.gated) {
        (Half::Down, _) => &[("dout", "down")],
        (Half::Up, true) => &[("dgate", "gate"), ("dup", "up")],
        (Half::Up, false) => &[("dup", "up")],
    }
}

/// An activation and its derivatives, by central differences of the reference:
/// off by about 1e-9, and wrong only within 1e-6 of a kink.
struct Activated {
    value: f64,
    by_gate: f64,
    by_up: f64,
}

impl Activated {
    fn new(experts: &Experts, gate: Option<f64>, up: f64) -> Activated {
        const STEP: f64 = 1e-6;
        let at = |dgate: f64, dup: f64| activate(experts, gate.map(|g| g + dgate), up + dup);
        Activated {
            value: at(0.0, 0.0),
            by_gate: (at(STEP, 0.0) - at(-STEP, 0.0)) / (2.0 * STEP),
            by_up: (at(0.0, STEP) - at(0.0, -STEP)) / (2.0 * STEP),
        }
    }
}
