//! Each backward stem against the f64 formulas, from the tensors it actually
//! got. `reference::backward` is held against whole layers elsewhere.

use crate::expert::{Slopes, Sum};
use crate::pass::Tensors;
use crate::{Harness, sample};
use moesaic_kernel::DType;
use moesaic_spec::{Experts, LayerSpec, RouterKind, SharedGate, WeightSite};

/// All stems of one call that ended with one backward pass, which set
/// gradients and did not add to them.
pub fn all(harness: &Harness, tensors: &Tensors, what: &str) {
    let check = Check {
        harness,
        t: tensors,
        spec: &harness.plan.spec,
        what,
    };
    check.dout();
    let mut sets = vec![check.routed()];
    sets.extend((0..check.spec.shared.len()).map(|i| check.shared(i)));
    for set in &sets {
        check.dgrad_down(set);
        check.dgrad_up(set);
        check.wgrad(set, "down", set.dout, "hidden");
        let parts: &[&str] = if check.spec.gated() {
            &["gate", "up"]
        } else {
            &["up"]
        };
        for part in parts {
            check.wgrad(set, part, &set.name(&format!("d{part}")), set.rows);
        }
    }
    check.weights(&sets);
    check.dx(&sets);
}

struct Check<'a> {
    harness: &'a Harness,
    t: &'a Tensors,
    spec: &'a LayerSpec,
    what: &'a str,
}

/// A set of expert matrices: the routed experts, or a shared one.
struct Set {
    /// `experts` or `shared.0`.
    prefix: String,
    shared: Option<usize>,
    /// Where the rows of each expert lie.
    offsets: Vec<usize>,
    hidden: usize,
    /// The form and activation.
    experts: Experts,
    /// The weight of each row.
    weights: Option<Vec<f64>>,
    rows: &'static str,
    dout: &'static str,
}

impl Set {
    /// The tensor behind an intermediate of this set.
    fn name(&self, part: &str) -> String {
        match self.shared {
            None => part.to_string(),
            Some(_) => format!("{}.{part}", self.prefix),
        }
    }

    fn rows(&self) -> usize {
        self.offsets[self.offsets.len() - 1]
    }

    /// The expert of each row.
    fn expert(&self, row: usize) -> usize {
        let past = self.offsets.iter().position(|&at| at > row);
        past.expect("a row of the set") - 1
    }
}

impl Check<'_> {
    fn tokens(&self) -> usize {
        self.t.input.tokens
    }

    fn near(&self, name: &str, got: f64, want: f64, tolerance: f64) {
        assert!(
            got == want || (got - want).abs() <= tolerance,
            "{}: {name}: {got} is not {want}",
            self.what
        );
    }

    /// One rounding to storage and f32 sums of `size`, the sum of the sizes of
    /// the terms.
    fn stored(&self, want: f64, size: f64) -> f64 {
        let rounding = self.spec.precision.activations.unit_roundoff();
        rounding * want.abs() + 4e-6 * size + 1e-7
    }

    fn routed(&self) -> Set {
        let offsets = self.t.ints("offsets");
        let on_input = self.spec.router.weight_on == WeightSite::Input;
        let slots = self.t.ints("row_slots");
        let rows = offsets[self.spec.shape.experts] as usize;
        let weight = |&slot: &i64| self.t.get("topk_weights")[slot as usize];
        Set {
            prefix: "experts".to_string(),
            shared: None,
            offsets: offsets.iter().map(|&at| at as usize).collect(),
            hidden: self.spec.shape.hidden_dim,
            experts: self.spec.experts.clone(),
            weights: (!on_input).then(|| slots[..rows].iter().map(weight).collect()),
            rows: "rows",
            dout: "dout",
        }
    }

    fn shared(&self, index: usize) -> Set {
        let prefix = format!("shared.{index}");
        let gated = self.spec.shared[index].gate == SharedGate::Sigmoid;
        let weights = gated.then(|| {
            let logits = self.t.get(&format!("{prefix}.router.logits"));
            let weights = self.t.get(&format!("{prefix}.weight"));
            for (t, (&got, z)) in weights.iter().zip(logits).enumerate() {
                self.near(
                    &format!("{prefix}.weight[{t}]"),
                    got,
                    1.0 / (1.0 + (-z).exp()),
                    1e-6,
                );
            }
            weights.to_vec()
        });
        Set {
            prefix,
            shared: Some(index),
            offsets: vec![0, self.tokens()],
            hidden: self.spec.shared[index].hidden_dim,
            experts: self.spec.shared_experts(index),
            weights,
            rows: "x",
            dout: "dy",
        }
    }

    fn identity(&self, id: i32) -> bool {
        let first = self.spec.shape.experts as i32;
        (first..first + self.spec.experts.identity as i32).contains(&id)
    }

    fn row(&self, name: &str, row: usize, width: usize) -> &[f64] {
        self.t.row(name, row, width)
    }

    fn dout(&self) {
        let (width, slots) = (self.spec.output_dim(), self.t.ints("row_slots"));
        for (row, slot) in slots.iter().enumerate().take(self.routed().rows()) {
            let token = *slot as usize / self.spec.shape.top_k;
            let same = self.row("dout", row, width) == self.row("dy", token, width);
            assert!(same, "{}: dout[{row}]", self.what);
        }
    }

    /// `hidden`, `dgate`, `dup` and the sums for the weight's gradient.
    fn dgrad_down(&self, set: &Set) {
        let (h, gated) = (set.hidden, self.spec.gated());
        for row in sample(0..set.rows()) {
            let (product, size) = self.back(
                set,
                "down",
                row,
                self.row(set.dout, row, self.spec.output_dim()),
            );
            let weight = set.weights.as_ref().map_or(1.0, |w| w[row]);
            let up = self.row(&set.name("up_pre"), row, h);
            let gate = gated.then(|| self.row(&set.name("gate_pre"), row, h));
            let (mut sum, mut sum_size) = (0.0, 0.0);
            for i in 0..h {
                let at = Slopes::of(&set.experts, gate.map(|g| g[i]), up[i]);
                let holds = |part: &str, slope: f64, other: f64| {
                    let want = slope * weight * other;
                    let size = (slope * weight).abs() * size[i] + want.abs();
                    let name = set.name(part);
                    let got = self.row(&name, row, h)[i];
                    self.near(
                        &format!("{name}[{row}, {i}]"),
                        got,
                        want,
                        self.stored(want, size),
                    );
                };
                holds("hidden", at.value, 1.0);
                if !at.kink {
                    holds("dup", at.up, product[i]);
                }
                if gated && !at.kink {
                    holds("dgate", at.gate, product[i]);
                }
                sum += at.value * product[i];
                sum_size += at.value.abs() * size[i];
            }
            if set.weights.is_some() {
                let name = set.name("dweight_parts");
                let parts = self.t.get(&name).len() / self.capacity_rows(set);
                let got: f64 = self.row(&name, row, parts).iter().sum();
                self.near(&format!("{name}[{row}]"), got, sum, 4e-6 * sum_size + 1e-7);
            }
        }
    }

    /// Rows that tensors of this set have room for.
    fn capacity_rows(&self, set: &Set) -> usize {
        match set.shared {
            None => self.tokens() * self.spec.shape.top_k,
            Some(_) => self.tokens(),
        }
    }

    fn dgrad_up(&self, set: &Set) {
        let (d, h) = (self.spec.shape.model_dim, set.hidden);
        for row in sample(0..set.rows()) {
            let up = self.row(&set.name("dup"), row, h);
            let (mut want, mut size) = self.back(set, "up", row, up);
            if self.spec.gated() {
                let gate = self.row(&set.name("dgate"), row, h);
                let (more, more_size) = self.back(set, "gate", row, gate);
                (0..d).for_each(|i| want[i] += more[i]);
                (0..d).for_each(|i| size[i] += more_size[i]);
            }
            let name = set.name("drows");
            let got = self.row(&name, row, d);
            for i in 0..d {
                let tolerance = self.stored(want[i], size[i]);
                self.near(&format!("{name}[{row}, {i}]"), got[i], want[i], tolerance);
            }
        }
    }

    /// `left · W` of the row's expert, and the same of sizes.
    fn back(&self, set: &Set, part: &str, row: usize, left: &[f64]) -> (Vec<f64>, Vec<f64>) {
        let name = format!("{}.{part}.weight", set.prefix);
        let matrix = self.harness.weights.get(&name);
        let count = matrix.data.len() / (set.offsets.len() - 1);
        let from = match set.shared {
            None => set.expert(row) * count,
            Some(_) => 0,
        };
        let matrix = &matrix.data[from..from + count];
        let width = count / left.len();
        let (mut sum, mut size) = (vec![0.0; width], vec![0.0; width]);
        for (factor, weights) in left.iter().zip(matrix.chunks(width)) {
            for (i, w) in weights.iter().enumerate() {
                sum[i] += factor * w;
                size[i] += (factor * w).abs();
            }
        }
        (sum, size)
    }

    /// The gradients of a matrix and its bias.
    fn wgrad(&self, set: &Set, part: &str, left: &str, right: &str) {
        let name = format!("grad.{}.{part}", set.prefix);
        let right = if part == "down" {
            set.name(right)
        } else {
            right.to_string()
        };
        let got = self.t.get(&format!("{name}.weight"));
        let (height, width) = match part {
            "down" => (self.spec.output_dim(), set.hidden),
            _ => (set.hidden, self.spec.shape.model_dim),
        };
        for expert in 0..set.offsets.len() - 1 {
            let rows = set.offsets[expert]..set.offsets[expert + 1];
            for i in sample(0..height) {
                for j in sample(0..width) {
                    let term =
                        |row| self.row(left, row, height)[i] * self.right(&right, row, width)[j];
                    let at = (expert * height + i) * width + j;
                    let sum: Sum = rows.clone().map(term).collect();
                    let rounding = match self.spec.precision.expert_gradients {
                        DType::F32 => 0.0,
                        other => other.unit_roundoff() * sum.value.abs() + 1e-7,
                    };
                    self.near(
                        &format!("{name}[{expert}, {i}, {j}]"),
                        got[at],
                        sum.value,
                        rounding + 4e-6 * sum.terms,
                    );
                }
                if self
                    .harness
                    .weights
                    .0
                    .contains_key(&format!("{}.{part}.bias", set.prefix))
                {
                    let weight = |row: usize| match (&set.weights, part) {
                        (Some(weights), "down") => weights[row],
                        _ => 1.0,
                    };
                    let term = |row| self.row(left, row, height)[i] * weight(row);
                    let got = self.t.get(&format!("{name}.bias"))[expert * height + i];
                    self.sum(
                        &format!("{name}.bias[{expert}, {i}]"),
                        got,
                        rows.clone().map(term),
                    );
                }
            }
        }
    }

    /// A row of the right operand; a product that gathers has no `rows`.
    fn right(&self, name: &str, row: usize, width: usize) -> &[f64] {
        if name != "rows" || self.t.has(name) {
            return self.row(name, row, width);
        }
        let slot = self.t.ints("row_slots")[row] as usize;
        self.row("x", slot / self.spec.shape.top_k, width)
    }

    /// An f32 sum; without terms it is exactly zero.
    fn sum(&self, name: &str, got: f64, terms: impl Iterator<Item = f64>) {
        let sum: Sum = terms.collect();
        self.near(name, got, sum.value, 4e-6 * sum.terms);
    }

    /// `grad.topk_weights` from parts, and the logits of shared gates.
    fn weights(&self, sets: &[Set]) {
        let k = self.spec.shape.top_k;
        let got = self.t.get("grad.topk_weights");
        for token in sample(0..self.tokens()) {
            let mut want: Vec<Option<(f64, f64)>> = (token * k..(token + 1) * k)
                .map(|slot| self.slot_gradient(slot))
                .collect();
            if self.spec.capacity.renormalize_after_drop {
                self.undo_renormalizing(token, &mut want);
            }
            for (i, want) in want.into_iter().enumerate() {
                let (want, size) = want.unwrap_or((0.0, 0.0));
                let slot = token * k + i;
                self.near(
                    &format!("grad.topk_weights[{slot}]"),
                    got[slot],
                    want,
                    1e-5 * size,
                );
            }
        }
        for set in &sets[1..] {
            self.gate_logit(set);
        }
    }

    /// The gradient of a slot's weight and the size of its terms; `None` where
    /// the slot is masked or dropped.
    fn slot_gradient(&self, slot: usize) -> Option<(f64, f64)> {
        let (d, out) = (self.spec.shape.model_dim, self.spec.output_dim());
        let token = slot / self.spec.shape.top_k;
        let id = self.t.ids()[slot];
        let row = self.t.ints("slot_rows")[slot];
        if row < 0 {
            let identity = self.identity(id);
            return identity.then(|| dot(self.row("dy", token, out), self.row("x", token, d)));
        }
        let row = row as usize;
        if self.spec.router.weight_on == WeightSite::Input {
            return Some(dot(self.row("drows", row, d), self.row("x", token, d)));
        }
        let slots = self.tokens() * self.spec.shape.top_k;
        let parts = self.t.get("dweight_parts").len() / slots;
        let parts = self.row("dweight_parts", row, parts);
        let ones = vec![1.0; parts.len()];
        let bias = self.harness.weights.0.get("experts.down.bias");
        let bias = bias.map_or((0.0, 0.0), |b| {
            dot(self.row("dout", row, out), b.outer(id as usize))
        });
        let sum = dot(parts, &ones);
        Some((sum.0 + bias.0, sum.1 + bias.1))
    }

    fn undo_renormalizing(&self, token: usize, gradients: &mut [Option<(f64, f64)>]) {
        let (k, scale) = (gradients.len(), self.spec.router.scale);
        let sum = self.t.get("kept_sums")[token];
        if sum == 0.0 {
            return;
        }
        let rescaled = self.row("topk_weights", token, k);
        let live = || {
            gradients
                .iter()
                .zip(rescaled)
                .filter_map(|(g, w)| Some(((*g)?, w / scale)))
        };
        let mean: f64 = live().map(|(g, share)| g.0 * share).sum();
        let size: f64 = live().map(|(g, share)| (g.1 * share).abs()).sum();
        for gradient in gradients.iter_mut().flatten() {
            let factor = scale / sum;
            *gradient = (
                factor * (gradient.0 - mean),
                (factor * (gradient.1 + size)).abs(),
            );
        }
    }

    fn gate_logit(&self, set: &Set) {
        let Some(weights) = &set.weights else { return };
        let out = self.spec.output_dim();
        let parts = self.t.get(&set.name("dweight_parts"));
        let got = self.t.get(&set.name("dlogit"));
        let ones = vec![1.0; parts.len() / self.tokens().max(1)];
        for token in sample(0..self.tokens()) {
            let sum = dot(
                self.row(&set.name("dweight_parts"), token, ones.len()),
                &ones,
            );
            let bias = self
                .harness
                .weights
                .0
                .get(&format!("{}.down.bias", set.prefix));
            let bias = bias.map_or((0.0, 0.0), |b| dot(self.row("dy", token, out), &b.data));
            let factor = weights[token] * (1.0 - weights[token]);
            let (want, size) = ((sum.0 + bias.0) * factor, (sum.1 + bias.1) * factor);
            self.near(&set.name("dlogit"), got[token], want, 1e-5 * size);
        }
        let grad = self.t.get(&format!("grad.{}.router.weight", set.prefix));
        for (i, &got) in grad.iter().enumerate() {
            let d = grad.len();
            let term = |t| self.t.get(&set.name("dlogit"))[t] * self.row("x", t, d)[i];
            self.sum(
                &format!("grad.{}.router.weight", set.prefix),
                got,
                (0..self.tokens()).map(term),
            );
        }
    }

    fn dx(&self, sets: &[Set]) {
        let d = self.spec.shape.model_dim;
        for token in sample(0..self.tokens()) {
            let (mut want, mut size) = (vec![0.0; d], vec![0.0; d]);
            let mut add = |row: &[f64], factor: f64| {
                for i in 0..d {
                    want[i] += factor * row[i];
                    size[i] += (factor * row[i]).abs();
                }
            };
            self.add_slots(token, &mut add);
            for set in &sets[1..] {
                add(self.row(&set.name("drows"), token, d), 1.0);
                if set.weights.is_some() {
                    let router = self
                        .harness
                        .weights
                        .get(&format!("{}.router.weight", set.prefix));
                    add(&router.data, self.t.get(&set.name("dlogit"))[token]);
                }
            }
            if self.spec.has_logits() && self.spec.router.kind != RouterKind::External {
                add(self.row("router.dx", token, d), 1.0);
            }
            for i in 0..d {
                let got = self.row("dx", token, d)[i];
                let tolerance = self.stored(want[i], size[i]);
                self.near(&format!("dx[{token}, {i}]"), got, want[i], tolerance);
            }
        }
    }

    fn add_slots(&self, token: usize, add: &mut impl FnMut(&[f64], f64)) {
        let (d, k) = (self.spec.shape.model_dim, self.spec.shape.top_k);
        for slot in token * k..(token + 1) * k {
            let row = self.t.ints("slot_rows")[slot];
            let weight = self.t.get("topk_weights")[slot];
            let on_input = self.spec.router.weight_on == WeightSite::Input;
            if row >= 0 {
                add(
                    self.row("drows", row as usize, d),
                    if on_input { weight } else { 1.0 },
                );
            } else if self.identity(self.t.ids()[slot]) {
                add(self.row("dy", token, d), weight);
            }
        }
    }
}

/// The inner product, and that of sizes.
fn dot(a: &[f64], b: &[f64]) -> (f64, f64) {
    let terms = a.iter().zip(b).map(|(a, b)| a * b);
    let sum: Sum = terms.collect();
    (sum.value, sum.terms)
}
