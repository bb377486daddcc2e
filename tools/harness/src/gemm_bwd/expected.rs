//! What backward GEMMs should write, from the tensors they read.

use crate::Harness;
use crate::expert::{Slopes, Sum};
use crate::memory::Values;
use crate::rows::Rows;
use moesaic_kernel::DType;
use moesaic_plan::{
    ExpertGemm, GemmFamily, GroupedGemmDesc, GroupedGemmDgradDesc, GroupedGemmWgradDesc,
    LaunchStep, Op,
};
use moesaic_reference::activate;
use moesaic_spec::LayerSpec;

/// A launch: values by parameter.
struct Check<'a> {
    spec: &'a LayerSpec,
    given: &'a Values,
    got: &'a Values,
    /// First rows of the groups, and the end.
    offsets: Vec<usize>,
    /// Of the sum of a result's terms: f32 arithmetic, or TF32 factors.
    arithmetic: f64,
    /// Forward products take what is subnormal for zero.
    flushes: bool,
    what: String,
}

pub fn check(harness: &Harness, step: &LaunchStep, rows: &Rows, given: &Values, got: &Values) {
    let (kernel, symbol) = (
        &harness.plan.kernels[step.entry.kernel],
        &harness.plan[step.entry].symbol,
    );
    let config = kernel.op.gemm().expect("a GEMM");
    let tf32 = matches!(config.family, GemmFamily::Mma { tf32: true, .. });
    let check = |dense: bool| Check {
        spec: &harness.plan.spec,
        given,
        got,
        offsets: if dense {
            vec![0, rows.tokens]
        } else {
            rows.offsets(harness.plan.spec.shape.experts)
        },
        arithmetic: if tf32 { 2e-3 } else { 3e-6 },
        flushes: config.family.name() == "mfma"
            && harness.plan.target.hardware().arch() == "gfx90a",
        what: format!(
            "{symbol} of {} on {}, {} tokens, {:?}",
            kernel.name, harness.plan.target, rows.tokens, kernel.op
        ),
    };
    match &kernel.op {
        Op::GroupedGemmDgrad { desc: d, .. } if d.half == ExpertGemm::Down => {
            check(d.dense).down(d, config.tile_columns);
        }
        Op::GroupedGemmDgrad { desc: d, .. } => check(d.dense).up(d),
        Op::GroupedGemmWgrad { desc: d, .. } if symbol.ends_with("_bias") => {
            check(d.dense).bias(d);
        }
        Op::GroupedGemmWgrad { desc: d, .. } if symbol.ends_with("_rows") => {
            check(d.dense).cleared(d);
        }
        Op::GroupedGemmWgrad { desc: d, .. } => check(d.dense).wgrad(d),
        Op::GroupedGemm { desc: d, .. } => check(d.dense).kept(d),
        other => panic!("{other:?} is no backward GEMM"),
    }
}

impl Check<'_> {
    /// `got` is `want` stored in a type, up to the order of the sum.
    fn near(&self, name: &str, at: &[usize], got: f64, want: Sum, dtype: DType) {
        let (rounding, least) = match dtype {
            DType::F32 => (0.0, 0.0),
            // Half the distance of f16's smallest values.
            DType::F16 => (1.01 * dtype.unit_roundoff(), 0.5f64.powi(25)),
            other => (1.01 * other.unit_roundoff(), 0.0),
        };
        let size = want.value.abs();
        let most = rounding * size + least + self.arithmetic * (want.terms + size / 3.0) + 1e-30;
        let error = (got - want.value).abs();
        assert!(
            error <= most,
            "{name}{at:?}: {got} is not {}, within {most:e}: {}, {:?}",
            want.value,
            self.what,
            self.spec
        );
    }

    /// The type of rows.
    fn dtype(&self) -> DType {
        self.spec.precision.activations
    }

    /// Rows of each group.
    fn groups(&self) -> impl Iterator<Item = (usize, std::ops::Range<usize>)> + '_ {
        let pairs = self.offsets.windows(2).enumerate();
        pairs.map(|(group, pair)| (group, pair[0]..pair[1]))
    }

    fn weight(&self, row: usize) -> f64 {
        let slot = self
            .given
            .get("row_slots")
            .map_or(row, |slots| slots[row] as usize);
        self.given
            .get("topk_weights")
            .map_or(1.0, |weights| weights[slot])
    }

    /// Column `column` of `row · matrix`.
    fn product(
        &self,
        [rows, matrix]: [&str; 2],
        [row, group, column]: [usize; 3],
        [inner, outer]: [usize; 2],
    ) -> Sum {
        let left = &self.given[rows][row * inner..][..inner];
        let right = &self.given[matrix][group * inner * outer..][..inner * outer];
        let terms = left.iter().enumerate();
        terms
            .map(|(i, value)| value * right[i * outer + column])
            .collect()
    }

    fn rows_only(&self, name: &str, width: usize) {
        let written = self.offsets.last().unwrap() * width;
        let beyond = &self.got[name][written..];
        assert!(
            beyond.iter().all(|v| v.is_nan()),
            "{name} beyond its rows: {}",
            self.what
        );
    }

    fn up(&self, d: &GroupedGemmDgradDesc) {
        for (group, rows) in self.groups() {
            for row in rows {
                for column in 0..d.outer {
                    let at = [row, group, column];
                    let mut want = self.product(["dup", "up"], at, [d.inner, d.outer]);
                    if d.gated {
                        let gate = self.product(["dgate", "gate"], at, [d.inner, d.outer]);
                        want.value += gate.value;
                        want.terms += gate.terms;
                    }
                    let got = self.got["drows"][row * d.outer + column];
                    self.near("drows", &[row, column], got, want, self.dtype());
                }
            }
        }
        self.rows_only("drows", d.outer);
    }

    fn down(&self, d: &GroupedGemmDgradDesc, tile_columns: usize) {
        let parts = d.outer.div_ceil(tile_columns);
        for (group, rows) in self.groups() {
            for row in rows {
                let mut sums = vec![Sum::default(); parts];
                for column in 0..d.outer {
                    let product =
                        self.product(["dout", "down"], [row, group, column], [d.inner, d.outer]);
                    let value = self.element(d, row, column, product);
                    sums[column / tile_columns].value += product.value * value;
                    sums[column / tile_columns].terms += product.terms * (value.abs() + 0.1);
                }
                for (part, want) in sums.into_iter().enumerate().filter(|_| d.weighted) {
                    let got = self.got["dweight_parts"][row * parts + part];
                    self.near("dweight_parts", &[row, part], got, want, DType::F32);
                }
            }
        }
        let names = ["hidden", "dgate", "dup", "dweight_parts"];
        for name in names
            .into_iter()
            .filter(|name| self.got.contains_key(*name))
        {
            self.rows_only(
                name,
                if name == "dweight_parts" {
                    parts
                } else {
                    d.outer
                },
            );
        }
    }

    /// What the down half writes of one element; returns the activation.
    fn element(&self, d: &GroupedGemmDgradDesc, row: usize, column: usize, product: Sum) -> f64 {
        let at = row * d.outer + column;
        let gate = d.gated.then(|| self.given["gate_pre"][at]);
        let (up, weight) = (self.given["up_pre"][at], self.weight(row));
        let slopes = Slopes::of(&self.spec.experts, gate, up);
        let compare = |name: &str, want: Sum| {
            self.near(name, &[row, column], self.got[name][at], want, self.dtype());
        };
        let hidden = Sum {
            value: weight * slopes.value,
            terms: 1.0,
        };
        compare("hidden", hidden);
        let back = |slope: f64| {
            let mut sum = product.times(weight * slope);
            sum.terms += product.terms * weight.abs();
            sum
        };
        compare("dup", back(slopes.up));
        if d.gated {
            compare("dgate", back(slopes.gate));
        }
        slopes.value
    }

    /// The up half of the forward pass: pre-activations and what they become.
    fn kept(&self, d: &GroupedGemmDesc) {
        let names = if d.gated {
            &["gate", "up"][..]
        } else {
            &["up"]
        };
        for (group, rows) in self.groups() {
            for row in rows {
                let x = self.input(d, row);
                for column in 0..d.outer {
                    let at = [row, group, column];
                    let sums: Vec<Sum> = names
                        .iter()
                        .map(|name| self.before(d, name, x, at))
                        .collect();
                    self.kept_element(d, names, &sums, row, column);
                }
            }
        }
        let names = names.iter().map(|name| format!("{name}_pre"));
        names
            .chain(["hidden".to_string()])
            .for_each(|name| self.rows_only(&name, d.outer));
    }

    fn input(&self, d: &GroupedGemmDesc, row: usize) -> &[f64] {
        let (name, at) = match (self.given.get("rows"), d.dense) {
            (Some(_), _) => ("rows", row),
            (None, true) => ("x", row),
            (None, false) => ("x", self.given["row_slots"][row] as usize / d.top_k),
        };
        &self.given[name][at * d.inner..][..d.inner]
    }

    /// A pre-activation.
    fn before(
        &self,
        d: &GroupedGemmDesc,
        name: &str,
        x: &[f64],
        [_, group, column]: [usize; 3],
    ) -> Sum {
        let line = group * d.outer + column;
        let matrix = &self.given[name][line * d.inner..][..d.inner];
        let terms = matrix.iter().zip(x);
        let mut sum: Sum = terms
            .map(|(w, v)| self.factor(*w) * self.factor(*v))
            .collect();
        if d.bias {
            sum.add(self.given[&format!("{name}_bias")][line]);
        }
        sum
    }

    fn factor(&self, value: f64) -> f64 {
        let smallest = match self.dtype() {
            DType::F16 if self.flushes => 0.5f64.powi(14),
            _ => 0.0,
        };
        if value.abs() < smallest { 0.0 } else { value }
    }

    fn kept_element(
        &self,
        d: &GroupedGemmDesc,
        names: &[&str],
        sums: &[Sum],
        row: usize,
        column: usize,
    ) {
        let at = row * d.outer + column;
        for (name, want) in names.iter().zip(sums) {
            let name = format!("{name}_pre");
            self.near(
                &name,
                &[row, column],
                self.got[&name][at],
                *want,
                self.dtype(),
            );
        }
        let (gate, up) = match sums {
            [gate, up] => (Some(gate.value), up),
            sums => (None, &sums[0]),
        };
        let weight = if d.weighted { self.weight(row) } else { 1.0 };
        let hidden = Sum {
            value: weight * activate(&self.spec.experts, gate, up.value),
            terms: 4.0 * sums.iter().map(|sum| sum.terms + 1.0).product::<f64>(),
        };
        self.near(
            "hidden",
            &[row, column],
            self.got["hidden"][at],
            hidden,
            self.dtype(),
        );
    }

    /// Names of what is summed, and of what it becomes.
    fn matrices(&self, d: &GroupedGemmWgradDesc) -> Vec<[&'static str; 2]> {
        match (d.half, d.gated) {
            (ExpertGemm::Down, _) => vec![["dout", "down"]],
            (_, false) => vec![["dup", "up"]],
            (_, true) => vec![["dgate", "gate"], ["dup", "up"]],
        }
    }

    /// A row of the right factor.
    fn right(&self, d: &GroupedGemmWgradDesc, row: usize) -> &[f64] {
        let (name, at) = match (self.given.get("x"), d.half) {
            (Some(_), _) => ("x", self.given["row_slots"][row] as usize / d.top_k),
            (None, ExpertGemm::Down) => ("hidden", row),
            (None, ExpertGemm::Up) => ("rows", row),
        };
        &self.given[name][at * d.width..][..d.width]
    }

    fn wgrad(&self, d: &GroupedGemmWgradDesc) {
        for [left, matrix] in self.matrices(d) {
            let name = format!("grad_{matrix}");
            for (group, rows) in self.groups() {
                let size = d.height * d.width;
                let mut sums = vec![Sum::default(); size];
                for row in rows {
                    let left = &self.given[left][row * d.height..][..d.height];
                    for (i, value) in left.iter().enumerate() {
                        for (j, other) in self.right(d, row).iter().enumerate() {
                            sums[i * d.width + j].add(value * other);
                        }
                    }
                }
                self.gradient(&name, group, sums, d.gradient);
            }
        }
    }

    /// The gradient of a group; what was there before is added.
    fn gradient(&self, name: &str, group: usize, sums: Vec<Sum>, dtype: DType) {
        let first = group * sums.len();
        for (at, mut want) in sums.into_iter().enumerate() {
            if let Some(before) = self.given.get(name) {
                want.add(before[first + at]);
            }
            let got = self.got[name][first + at];
            self.near(name, &[group, at], got, want, dtype);
        }
    }

    /// Rows whose gradients are all zeros are zeros, the others as they were given.
    fn cleared(&self, d: &GroupedGemmWgradDesc) {
        let pairs = self.given["dup"]
            .chunks(d.height)
            .zip(self.given["given"].chunks(d.width));
        for (row, (gradient, given)) in pairs.enumerate() {
            let adds = gradient.iter().any(|v| *v != 0.0);
            for (i, &given) in given.iter().enumerate() {
                let want = if adds { given } else { 0.0 };
                let got = self.got["rows"][row * d.width + i];
                assert_eq!(got, want, "rows[{row}, {i}], {}", self.what);
            }
        }
    }

    fn bias(&self, d: &GroupedGemmWgradDesc) {
        for [left, matrix] in self.matrices(d) {
            for (group, rows) in self.groups() {
                let mut sums = vec![Sum::default(); d.height];
                for row in rows {
                    let weight = if d.weighted_bias {
                        self.weight(row)
                    } else {
                        1.0
                    };
                    for (i, sum) in sums.iter_mut().enumerate() {
                        sum.add(weight * self.given[left][row * d.height + i]);
                    }
                }
                self.gradient(&format!("grad_{matrix}_bias"), group, sums, DType::F32);
            }
        }
    }
}
