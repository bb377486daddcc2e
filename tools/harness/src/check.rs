//! Each stem against the f64 reference, from the tensors it actually got.

use crate::expert::ExpertRow;
use crate::pass::Tensors;
use crate::{Harness, sample};
use moesaic_kernel::Stem;
use moesaic_reference::{Decision, decide, gate, kept, round_to, scan};
use moesaic_spec::{LayerSpec, RouterKind, WeightSite};

/// All stems of one call.
pub fn all(harness: &Harness, tensors: &Tensors, what: &str) {
    let check = routing(harness, tensors, what);
    check.experts();
    check.combine();
}

/// The gate, the scan and the rows of one call.
pub fn routing<'a>(harness: &'a Harness, tensors: &'a Tensors, what: &'a str) -> Check<'a> {
    let check = Check {
        harness,
        t: tensors,
        spec: &harness.plan.spec,
        what,
    };
    check.gate();
    check.scan();
    // Elsewhere the products gather rows themselves, and only training has room for them.
    let mut kernels = harness.plan.kernels.iter();
    if kernels.any(|kernel| kernel.stem() == Stem::Dispatch) {
        check.dispatch();
    }
    check
}

/// A call whose tensors are held against the reference.
pub struct Check<'a> {
    harness: &'a Harness,
    t: &'a Tensors,
    spec: &'a LayerSpec,
    what: &'a str,
}

impl Check<'_> {
    fn tokens(&self) -> usize {
        self.t.input.tokens
    }

    fn slots(&self) -> usize {
        self.tokens() * self.spec.shape.top_k
    }

    /// `got` within `relative` of `want`, where small values count as `floor`.
    fn near(&self, name: &str, got: f64, want: f64, relative: f64, floor: f64) {
        let same = got == want || (got.is_nan() && want.is_nan());
        let error = (got - want).abs();
        assert!(
            same || error <= relative * want.abs().max(floor),
            "{}: {name}: {got} is not {want}",
            self.what
        );
    }

    /// Storage rounding of the activations, twice, and f32 arithmetic.
    fn tolerance(&self) -> f64 {
        4e-6 + 2.0 * self.spec.precision.activations.unit_roundoff()
    }

    fn gate(&self) {
        let (spec, weights) = (self.spec, &self.harness.weights);
        let whole = gate(spec, weights, &self.t.input);
        // Jittered tokens are stored once more.
        let drawn = if self.t.has("router.x") {
            2.0 * spec.precision.activations.unit_roundoff()
        } else {
            0.0
        };
        for (name, want) in [
            ("router.logits", whole.logits),
            ("router.clean_logits", whole.clean),
        ] {
            let got = if self.t.has(name) {
                self.t.get(name)
            } else {
                &[]
            };
            for (i, (&got, want)) in got.iter().zip(want.unwrap_or_default()).enumerate() {
                self.near(&format!("{name}[{i}]"), got, want, 4e-6 + drawn, 1.0);
            }
        }
        let got = spec.has_logits().then(|| self.t.get("router.logits"));
        if spec.router.kind == RouterKind::External {
            return;
        }
        let want = decide(spec, weights, &self.t.input, got);
        assert_eq!(self.t.ids(), want.ids, "{}: topk_ids", self.what);
        if !spec.capacity.renormalize_after_drop {
            for (i, (&got, want)) in self
                .t
                .get("topk_weights")
                .iter()
                .zip(want.weights)
                .enumerate()
            {
                self.near(&format!("topk_weights[{i}]"), got, want, 3e-6, 1e-6);
            }
        }
    }

    /// The decision as the scan saw it. Renormalising overwrites the weights,
    /// so those come from the reference then.
    fn decision(&self) -> Decision {
        let logits = self.spec.has_logits().then(|| self.t.get("router.logits"));
        let want = decide(self.spec, &self.harness.weights, &self.t.input, logits);
        let renormalized = self.spec.capacity.renormalize_after_drop;
        Decision {
            ids: self.t.ids(),
            weights: if renormalized && self.spec.router.kind != RouterKind::External {
                want.weights
            } else {
                self.t.get("topk_weights").to_vec()
            },
            importance: want.importance,
        }
    }

    fn scan(&self) {
        let want = scan(self.spec, &self.decision(), &self.t.input);
        let (t, what) = (self.t, self.what);
        assert_eq!(t.ints("counts"), want.counts, "{what}: counts");
        let locations: Vec<i32> = t.ints("locations").iter().map(|&at| at as i32).collect();
        assert_eq!(locations, want.locations, "{what}: locations");
        if let Some(capacity) = want.capacity {
            assert_eq!(t.ints("capacity"), [capacity], "{what}: capacity");
        }
        if t.has("overflow") {
            assert_eq!(t.ints("overflow"), [want.overflow], "{what}: overflow");
        }
        self.maps(&want.locations);
        if self.spec.capacity.renormalize_after_drop {
            for (i, (&got, want)) in t.get("topk_weights").iter().zip(want.weights).enumerate() {
                self.near(
                    &format!("renormalised topk_weights[{i}]"),
                    got,
                    want,
                    3e-6,
                    1e-6,
                );
            }
        }
    }

    /// Offsets, slot_rows and row_slots follow from the locations.
    fn maps(&self, locations: &[i32]) {
        let ids = self.t.ids();
        let mut rows = vec![0i64; self.spec.shape.experts + 1];
        for (&id, &at) in ids.iter().zip(locations) {
            if at >= 0 {
                rows[id as usize + 1] += 1;
            }
        }
        (0..self.spec.shape.experts).for_each(|e| rows[e + 1] += rows[e]);
        assert_eq!(self.t.ints("offsets"), rows, "{}: offsets", self.what);
        let (slot_rows, row_slots) = (self.t.ints("slot_rows"), self.t.ints("row_slots"));
        for slot in 0..self.slots() {
            let at = i64::from(locations[slot]);
            let row = if at < 0 {
                -1
            } else {
                rows[ids[slot] as usize] + at
            };
            assert_eq!(slot_rows[slot], row, "{}: slot_rows[{slot}]", self.what);
            if row >= 0 {
                assert_eq!(
                    row_slots[row as usize], slot as i64,
                    "{}: row_slots",
                    self.what
                );
            }
        }
    }

    fn rows(&self) -> usize {
        self.t.ints("offsets")[self.spec.shape.experts] as usize
    }

    fn row_weight(&self, row: usize) -> f64 {
        self.t.get("topk_weights")[self.t.ints("row_slots")[row] as usize]
    }

    fn dispatch(&self) {
        let (d, dtype) = (self.spec.shape.model_dim, self.spec.precision.activations);
        let row_slots = self.t.ints("row_slots");
        for (row, &slot) in row_slots.iter().enumerate().take(self.rows()) {
            let token = slot as usize / self.spec.shape.top_k;
            let weight = match self.spec.router.weight_on {
                WeightSite::Input => self.row_weight(row),
                _ => 1.0,
            };
            let x = &self.t.input.x[token * d..(token + 1) * d];
            for (i, &v) in x.iter().enumerate() {
                let want = round_to(dtype, f64::from((v * weight) as f32));
                let got = self.t.get("rows")[row * d + i];
                self.near(&format!("rows[{row}, {i}]"), got, want, 1e-12, 0.0);
            }
        }
    }

    fn experts(&self) {
        let offsets = self.t.ints("offsets");
        for e in 0..self.spec.shape.experts {
            let rows = offsets[e] as usize..offsets[e + 1] as usize;
            for row in sample(rows) {
                self.expert("experts", Some(e), ["rows", "hidden", "out"], row);
            }
        }
        for i in 0..self.spec.shared.len() {
            let prefix = format!("shared.{i}");
            let names = ["x", &format!("{prefix}.hidden"), &format!("{prefix}.out")];
            for row in sample(0..self.tokens()) {
                self.expert(&prefix, None, names, row);
            }
        }
    }

    /// What an expert reads: a dispatched row, or a token where it lies.
    fn input(&self, name: &str, row: usize) -> &[f64] {
        let d = self.spec.shape.model_dim;
        if self.t.has(name) {
            return self.row(name, row, d);
        }
        let slot = self.t.ints("row_slots")[row] as usize;
        self.row("x", slot / self.spec.shape.top_k, d)
    }

    /// One row of both halves of an expert.
    fn expert(&self, prefix: &str, index: Option<usize>, names: [&str; 3], row: usize) {
        let weighted = index.is_some() && self.spec.router.weight_on == WeightSite::Activation;
        let of = ExpertRow {
            spec: self.spec,
            weights: &self.harness.weights,
            prefix,
            index,
            weight: if weighted { self.row_weight(row) } else { 1.0 },
        };
        let want = of.hidden(self.input(names[0], row));
        let hidden = self.row(names[1], row, want.len());
        self.near_row(names[1], row, hidden, &want);
        let want = of.out(hidden);
        self.near_row(names[2], row, self.row(names[2], row, want.len()), &want);
    }

    fn near_row(&self, name: &str, row: usize, got: &[f64], want: &[f64]) {
        for (i, (&got, &want)) in got.iter().zip(want).enumerate() {
            let name = format!("{name}[{row}, {i}]");
            self.near(&name, got, want, self.tolerance(), 1.0);
        }
    }

    fn row(&self, name: &str, row: usize, width: usize) -> &[f64] {
        self.t.row(name, row, width)
    }

    fn combine(&self) {
        let (width, k) = (self.spec.output_dim(), self.spec.shape.top_k);
        let (ids, slot_rows) = (self.t.ids(), self.t.ints("slot_rows"));
        let on_output = self.spec.router.weight_on == WeightSite::Output;
        for token in sample(0..self.tokens()) {
            let mut want = vec![0.0; width];
            for slot in token * k..(token + 1) * k {
                if !kept(self.spec, ids[slot], slot_rows[slot] as i32) {
                    continue;
                }
                let weight = if on_output {
                    self.t.get("topk_weights")[slot]
                } else {
                    1.0
                };
                let row = match slot_rows[slot] {
                    -1 => self.row("x", token, width),
                    row => self.row("out", row as usize, width),
                };
                want.iter_mut()
                    .zip(row)
                    .for_each(|(sum, v)| *sum += weight * v);
            }
            self.add_shared(&mut want, token);
            self.near_row("y", token, self.row("y", token, width), &want);
        }
    }

    fn add_shared(&self, sum: &mut [f64], token: usize) {
        for (i, shared) in self.spec.shared.iter().enumerate() {
            let factor = match shared.gate {
                moesaic_spec::SharedGate::Residual => panic!("no layer of this harness has one"),
                moesaic_spec::SharedGate::None => 1.0,
                moesaic_spec::SharedGate::Sigmoid => {
                    let z = self.t.get(&format!("shared.{i}.router.logits"))[token];
                    1.0 / (1.0 + (-z).exp())
                }
            };
            let row = self.row(&format!("shared.{i}.out"), token, sum.len());
            sum.iter_mut().zip(row).for_each(|(s, v)| *s += factor * v);
        }
    }
}
