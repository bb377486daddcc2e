//! What backward GEMMs should write.

use super::{Rows, Values, config};
use moesaic_kernel::Entry;
use moesaic_plan::{
    GemmFamily, GroupedGemmDesc, GroupedGemmDgradDesc, GroupedGemmWgradDesc, Half, KernelPlan, Op,
};
use moesaic_reference::activate;
use moesaic_spec::LayerSpec;

/// A value, and how large the terms of its sum are together.
#[derive(Clone, Copy, Default)]
struct Sum {
    value: f64,
    terms: f64,
}

impl Sum {
    fn add(&mut self, term: f64) {
        self.value += term;
        self.terms += term.abs();
    }

    fn times(self, factor: f64) -> Sum {
        Sum {
            value: self.value * factor,
            terms: self.terms * factor.abs(),
        }
    }
}

struct Check<'a> {
    spec: &'a LayerSpec,
    given: &'a Values,
    got: &'a Values,
    /// First rows of the groups, and the end.
    offsets: Vec<usize>,
    /// Of the sum of a result's terms: f32 arithmetic, or TF32 factors.
    arithmetic: f64,
    what: &'a str,
}

pub fn check(
    spec: &LayerSpec,
    kernel: &KernelPlan,
    entry: &Entry,
    rows: &Rows,
    given: &Values,
    got: &Values,
    what: &str,
) {
    let dense = match &kernel.op {
        Op::GroupedGemmDgrad { desc: d, .. } => d.dense,
        Op::GroupedGemmWgrad { desc: d, .. } => d.dense,
        Op::GroupedGemm { desc: d, .. } => d.dense,
        other => panic!("{other:?} is no backward GEMM"),
    };
    let tf32 = matches!(config(kernel).family, GemmFamily::Mma { tf32: true, .. });
    let check = Check {
        spec,
        given,
        got,
        offsets: rows.offsets(dense),
        arithmetic: if tf32 { 2e-3 } else { 3e-6 },
        what,
    };
    match &kernel.op {
        Op::GroupedGemmDgrad { desc: d, .. } if d.half == Half::Down => {
            check.down(d, config(kernel).tile_columns);
        }
        Op::GroupedGemmDgrad { desc: d, .. } => check.up(d),
        Op::GroupedGemmWgrad { desc: d, .. } if entry.symbol.ends_with("_bias") => check.bias(d),
        Op::GroupedGemmWgrad { desc: d, .. } => check.wgrad(d),
        Op::GroupedGemm { desc: d, .. } => check.kept(d),
        _ => {}
    }
}

impl Check<'_> {
    fn near(&self, name: &str, at: &[usize], got: f64, want: Sum, rounding: f64) {
        let most = rounding * want.value.abs().max(6.2e-5)
            + self.arithmetic * (want.terms + want.value.abs())
            + 1e-30;
        let error = (got - want.value).abs();
        assert!(
            error <= most,
            "{name}{at:?}: {got} is not {}, within {most:e}: {}",
            want.value,
            self.what
        );
    }

    fn rounding(&self) -> f64 {
        1.01 * self.spec.precision.activations.unit_roundoff()
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
        let mut sum = Sum::default();
        for (i, value) in left.iter().enumerate() {
            sum.add(value * right[i * outer + column]);
        }
        sum
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
                    self.near("drows", &[row, column], got, want, self.rounding());
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
                    self.near("dweight_parts", &[row, part], got, want, 0.0);
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
        let value = |gate: Option<f64>, up: f64| activate(&self.spec.experts, gate, up);
        let step = 1e-5;
        let slope = |f: &dyn Fn(f64) -> f64| (f(step) - f(-step)) / (2.0 * step);
        let of_up = slope(&|h| value(gate, up + h));
        let of_gate = slope(&|h| value(gate.map(|gate| gate + h), up));
        let compare = |name: &str, want: Sum| {
            self.near(
                name,
                &[row, column],
                self.got[name][at],
                want,
                self.rounding(),
            );
        };
        let hidden = Sum {
            value: weight * value(gate, up),
            terms: 1.0,
        };
        compare("hidden", hidden);
        let back = |slope: f64| {
            let mut sum = product.times(weight * slope);
            sum.terms += product.terms * weight.abs();
            sum
        };
        compare("dup", back(of_up));
        if d.gated {
            compare("dgate", back(of_gate));
        }
        value(gate, up)
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
        let mut sum = Sum::default();
        matrix.iter().zip(x).for_each(|(w, v)| sum.add(w * v));
        if d.bias {
            sum.add(self.given[&format!("{name}_bias")][line]);
        }
        sum
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
                self.rounding(),
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
            self.rounding(),
        );
    }

    /// Names of what is summed, and of what it becomes.
    fn matrices(&self, d: &GroupedGemmWgradDesc) -> Vec<[&'static str; 2]> {
        match (d.half, d.gated) {
            (Half::Down, _) => vec![["dout", "down"]],
            (_, false) => vec![["dup", "up"]],
            (_, true) => vec![["dgate", "gate"], ["dup", "up"]],
        }
    }

    /// A row of the right factor.
    fn right(&self, d: &GroupedGemmWgradDesc, row: usize) -> &[f64] {
        let (name, at) = match (self.given.get("x"), d.half) {
            (Some(_), _) => ("x", self.given["row_slots"][row] as usize / d.top_k),
            (None, Half::Down) => ("hidden", row),
            (None, Half::Up) => ("rows", row),
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
                self.gradient(&name, group, sums);
            }
        }
    }

    /// The gradient of a group; what was there before is added.
    fn gradient(&self, name: &str, group: usize, sums: Vec<Sum>) {
        let first = group * sums.len();
        for (at, mut want) in sums.into_iter().enumerate() {
            if let Some(before) = self.given.get(name) {
                want.add(before[first + at]);
            }
            let got = self.got[name][first + at];
            self.near(name, &[group, at], got, want, 0.0);
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
                self.gradient(&format!("grad_{matrix}_bias"), group, sums);
            }
        }
    }
}
