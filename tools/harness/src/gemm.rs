//! The GEMMs of a layer alone, on any device, against the reference.

use crate::Harness;
use crate::expert::ExpertRow;
use crate::memory::{Given, Values};
use crate::plans::{only, planned, scan_tile_rows};
use crate::rows::{Rows, Spread};
use moesaic_kernel::Stem;
use moesaic_plan::{LayerPlan, PlanOptions, Step, TensorPlan};
use moesaic_reference::{Random, round_to};
use moesaic_spec::{LayerSpec, WeightSite};

/// Tokens, and where they go.
struct Call {
    x: Vec<f64>,
    topk_weights: Vec<f64>,
    rows: Rows,
}

impl Call {
    fn new(spec: &LayerSpec, tokens: usize, spread: Spread) -> Call {
        let mut random = Random::new(tokens as u64 + 1);
        let rows = Rows::drawn(spec, tokens, spread, &mut random);
        let x = random.vec(tokens * spec.shape.model_dim);
        let weights = random.vec(tokens * spec.shape.top_k);
        Call {
            x: rounded(spec, x),
            topk_weights: weights.iter().map(|v| f64::from(v.abs() as f32)).collect(),
            rows,
        }
    }

    /// The same tokens, last first.
    fn reversed(&self, spec: &LayerSpec) -> Call {
        let tokens = self.x.chunks(spec.shape.model_dim);
        Call {
            x: tokens.rev().flatten().copied().collect(),
            topk_weights: self.topk_weights.clone(),
            rows: self.rows.reversed(spec.shape.top_k),
        }
    }
}

fn rounded(spec: &LayerSpec, values: Vec<f64>) -> Vec<f64> {
    let dtype = spec.precision.activations;
    values.into_iter().map(|v| round_to(dtype, v)).collect()
}

/// The GEMM kernels of a layer.
pub struct Gemms {
    /// With nothing but them.
    pub harness: Harness,
    tile_rows: usize,
}

/// Takes a row's name, its values and the reference's.
type Show<'a> = dyn FnMut(&str, &[f64], &[f64]) + 'a;

impl Gemms {
    /// `load` gets the plan with nothing but the GEMMs in it, one for all calls.
    pub fn new(spec: &LayerSpec, target: &str, load: impl FnOnce(LayerPlan) -> Harness) -> Gemms {
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
        load: impl FnOnce(LayerPlan) -> Harness,
    ) -> Gemms {
        let plan = planned(spec, target.parse().unwrap(), options);
        Gemms {
            tile_rows: scan_tile_rows(&plan),
            harness: load(only(plan, |kernel| kernel.stem() == Stem::GroupedGemm)),
        }
    }

    fn spec(&self) -> &LayerSpec {
        &self.harness.plan.spec
    }

    /// The results for random tokens, which are those of the reference.
    pub fn check_call(&self, tokens: usize, spread: Spread) -> Values {
        let call = Call::new(self.spec(), tokens, spread);
        let values = self.run(&call);
        self.check(&call, &values);
        values
    }

    /// The results of every kernel. What they write was full of NaN before; what they
    /// read has no value beyond the rows of the call.
    fn run(&self, call: &Call) -> Values {
        let (harness, tokens) = (&self.harness, call.rows.tokens);
        let given = |tensor: &TensorPlan| Some(self.given(call, &tensor.name));
        let memory = harness.memory(tokens, given);
        for Step::Launch(step) in &harness.plan.steps {
            let none = |name: &str| -> i64 { panic!("a GEMM has no scalar `{name}`") };
            harness.launch(step, tokens, &memory, &none);
        }
        let results = memory.keys().filter(|name| is_result(name));
        results
            .map(|name| (name.clone(), harness.read(&memory, name)))
            .collect()
    }

    fn given(&self, call: &Call, name: &str) -> Given {
        let experts = self.spec().shape.experts;
        if let Some(values) = call.rows.scanned(name, experts, self.tile_rows) {
            return Given::First(values);
        }
        match (name, self.harness.weights.0.get(name)) {
            ("x", _) => Given::Whole(call.x.clone()),
            ("rows", _) => Given::First(self.dispatched(call)),
            ("topk_weights", _) => Given::Whole(call.topk_weights.clone()),
            (_, Some(weight)) => Given::Whole(weight.data.clone()),
            (name, None) if is_result(name) => Given::Nan,
            _ => Given::Nothing,
        }
    }

    /// The input of each row.
    fn dispatched(&self, call: &Call) -> Vec<f64> {
        let spec = self.spec();
        let (d, k) = (spec.shape.model_dim, spec.shape.top_k);
        let row = |slot: usize| {
            let x = call.x[slot / k * d..][..d].iter().copied();
            match spec.router.weight_on {
                WeightSite::Input => x.map(|v| v * call.topk_weights[slot]).collect(),
                _ => x.collect::<Vec<_>>(),
            }
        };
        let slots = call.rows.list.iter().map(|row| row.1);
        rounded(spec, slots.flat_map(row).collect())
    }

    /// Every row against the reference; what no row has stays as it was.
    fn check(&self, call: &Call, t: &Values) {
        self.each_row(call, t, &mut |what, got, want| self.near(what, got, want));
        for (name, width) in self.widths() {
            let written = call.rows.count() * width;
            assert!(
                t[name][written..].iter().all(|v| v.is_nan()),
                "{name} beyond its rows"
            );
        }
    }

    /// One expert gets all rows, or most get none; and a row has the same bits wherever in a
    /// tile it lies.
    pub fn check_anywhere(&self, tokens: usize) {
        for spread in [Spread::One, Spread::Sparse] {
            let call = Call::new(self.spec(), tokens, spread);
            let values = self.check_call(tokens, spread);
            let turned = call.reversed(self.spec());
            self.same_rows([&call, &turned], [&values, &self.run(&turned)]);
        }
    }

    /// The largest difference from the reference for random tokens.
    pub fn error(&self, tokens: usize, spread: Spread) -> f64 {
        let call = Call::new(self.spec(), tokens, spread);
        let mut most = 0.0f64;
        self.each_row(&call, &self.run(&call), &mut |_, got, want| {
            let errors = got.iter().zip(want).map(|(got, want)| (got - want).abs());
            most = errors.fold(most, f64::max);
        });
        most
    }

    /// Shows every row of a result, by name, with the reference's.
    fn each_row(&self, call: &Call, t: &Values, show: &mut Show<'_>) {
        let (spec, weights) = (self.spec(), &self.harness.weights);
        let (rows, d) = (self.dispatched(call), spec.shape.model_dim);
        for (row, &(expert, slot)) in call.rows.list.iter().enumerate() {
            let weighted = spec.router.weight_on == WeightSite::Activation;
            let of = ExpertRow {
                spec,
                weights,
                prefix: "experts",
                index: Some(expert),
                weight: if weighted {
                    call.topk_weights[slot]
                } else {
                    1.0
                },
            };
            show_row(&of, row, &rows[row * d..][..d], ["hidden", "out"], t, show);
        }
        for i in 0..spec.shared.len() {
            let prefix = &*format!("shared.{i}");
            let results = ["hidden", "out"].map(|name| format!("{prefix}.{name}"));
            let results = results.each_ref().map(String::as_str);
            for (row, x) in call.x.chunks(d).enumerate() {
                let of = ExpertRow {
                    spec,
                    weights,
                    prefix,
                    index: None,
                    weight: 1.0,
                };
                show_row(&of, row, x, results, t, show);
            }
        }
    }

    /// The results of routed experts.
    fn widths(&self) -> [(&'static str, usize); 2] {
        let spec = self.spec();
        [
            ("hidden", spec.shape.hidden_dim),
            ("out", spec.output_dim()),
        ]
    }

    fn near(&self, what: &str, got: &[f64], want: &[f64]) {
        let spec = self.spec();
        let tolerance = 4e-6 + 2.0 * spec.precision.activations.unit_roundoff();
        for (i, (got, want)) in got.iter().zip(want).enumerate() {
            let near = (got - want).abs() <= tolerance * want.abs().max(1.0);
            assert!(
                near,
                "{}: {what}, column {i}: {got} is not {want}; {spec:?}",
                self.harness.plan.target
            );
        }
    }

    /// The rows of a call and those of the reversed one, to the bit.
    fn same_rows(&self, calls: [&Call; 2], values: [&Values; 2]) {
        let slots = calls[0].topk_weights.len();
        for (row, &(expert, slot)) in calls[0].rows.list.iter().enumerate() {
            let wanted = (expert, slots - 1 - slot);
            let mut others = calls[1].rows.list.iter();
            let other = others.position(|&row| row == wanted).unwrap();
            for (name, width) in self.widths() {
                let bits = |t: &Values, row: usize| {
                    let values = t[name][row * width..][..width].iter();
                    values.map(|v| v.to_bits()).collect::<Vec<_>>()
                };
                let [a, b] = [bits(values[0], row), bits(values[1], other)];
                assert_eq!(a, b, "{name}: row {row} has other bits as row {other}");
            }
        }
    }
}

/// One row of both halves; the down half from the hidden row it had.
fn show_row(
    of: &ExpertRow<'_>,
    row: usize,
    x: &[f64],
    [hidden, out]: [&str; 2],
    t: &Values,
    show: &mut Show<'_>,
) {
    let want = of.hidden(x);
    let got = &t[hidden][row * want.len()..][..want.len()];
    show(&format!("{}: {hidden}[{row}]", of.prefix), got, &want);
    let want = of.out(got);
    let got = &t[out][row * want.len()..][..want.len()];
    show(&format!("{}: {out}[{row}]", of.prefix), got, &want);
}

fn is_result(name: &str) -> bool {
    name.ends_with("hidden") || name.ends_with("out")
}
