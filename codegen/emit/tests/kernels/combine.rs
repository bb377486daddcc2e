//! The sum of a token's rows alone, on the PTX interpreter and on fibers: its bytes in calls of
//! few and of many tokens, and what the kernel reads and writes.

use moesaic_harness::Harness;
use moesaic_harness::memory::{Given, Values};
use moesaic_harness::plans::{only, planned};
use moesaic_harness::specs::{layer, with};
use moesaic_kernel::DType::{self, Bf16, F16, F32};
use moesaic_kernel::Stem;
use moesaic_plan::{CombineDesc, Op, PlanOptions, Step};
use moesaic_reference::{Random, round_to};
use moesaic_spec::*;
use std::ops::Range;

/// More than the largest decode call.
const MOST: usize = 70;

/// One kernel of a layer, and what its parameters hold in a call of [`MOST`] tokens.
struct Sum {
    harness: Harness,
    given: Values,
}

impl Sum {
    /// The kernel of this name.
    fn new(spec: &LayerSpec, target: &str, name: &str) -> Sum {
        let plan = planned(spec, target.parse().unwrap(), &PlanOptions::default());
        let plan = only(plan, |kernel| {
            kernel.stem() == Stem::Combine && kernel.name == name
        });
        assert_eq!(plan.kernels.len(), 1, "{name} of {spec:?}");
        let mut sum = Sum {
            harness: Harness::of(plan),
            given: Values::new(),
        };
        sum.given = (sum.names())
            .into_iter()
            .map(|(param, tensor)| (tensor.clone(), sum.values(&param, &tensor)))
            .collect();
        sum
    }

    fn desc(&self) -> &CombineDesc {
        match &self.harness.plan.kernels[0].op {
            Op::Combine { desc, .. } => desc,
            other => panic!("{other:?}"),
        }
    }

    /// Parameters and the tensors behind them.
    fn names(&self) -> Vec<(String, String)> {
        let plan = &self.harness.plan;
        let Step::Launch(step) = &plan.steps[0];
        let params = plan[step.entry].params.iter().map(|p| p.name.clone());
        let tensors = step.tensors.iter().map(|&id| plan[id].name.clone());
        params.zip(tensors).collect()
    }

    fn tensor(&self, param: &str) -> String {
        let names = self.names();
        let found = names.into_iter().find(|(name, _)| name == param);
        found.unwrap_or_else(|| panic!("no parameter `{param}`")).1
    }

    /// Elements of a tensor that belong to a token.
    fn per_token(&self, tensor: &str) -> usize {
        self.harness.plan.tensor(tensor).unwrap().elements(1) as usize
    }

    /// Every fourth slot has no row. Rows lie in the order of tokens, those of one token last
    /// slot first.
    fn values(&self, param: &str, tensor: &str) -> Vec<f64> {
        let d = self.desc();
        let slots = 0..MOST * d.top_k;
        let absent = |slot: usize| slot % 4 == 2;
        let row = |slot: usize| slot / d.top_k * d.top_k + d.top_k - 1 - slot % d.top_k;
        match param {
            "slot_rows" => slots
                .map(|slot| if absent(slot) { -1.0 } else { row(slot) as f64 })
                .collect(),
            // Of slots without a row, some were dropped; others name an expert without any.
            "topk_ids" => slots
                .map(|slot| match slot {
                    _ if absent(slot) => d.experts - 1 + slot / 4 % (1 + d.identity + d.zero),
                    _ => slot % d.experts,
                } as f64)
                .collect(),
            _ => {
                let dtype = self.harness.plan.tensor(tensor).unwrap().dtype;
                let seed = param.bytes().map(u64::from).sum();
                let values = Random::new(seed).vec(MOST * self.per_token(tensor));
                values.into_iter().map(|v| round_to(dtype, v)).collect()
            }
        }
    }

    /// The sums of these tokens, which are a call.
    fn call(&self, tokens: Range<usize>) -> Vec<f64> {
        let (count, rows, y) = (tokens.len(), self.names(), self.tensor("y"));
        let given = |tensor: &moesaic_plan::TensorPlan| {
            let name = &tensor.name;
            let (param, _) = rows.iter().find(|(_, own)| own == name)?;
            let width = self.per_token(name);
            let own = self.given[name][tokens.start * width..tokens.end * width].iter();
            let before = (tokens.start * width) as f64;
            Some(match &**param {
                "y" => Given::Nan,
                "slot_rows" => Given::Whole(own.map(|&r| (r - before).max(-1.0)).collect()),
                _ => Given::Whole(own.copied().collect()),
            })
        };
        let memory = self.harness.memory(count, given);
        let Step::Launch(step) = &self.harness.plan.steps[0];
        let none = |name: &str| panic!("no scalar `{name}`");
        self.harness.launch(step, count, &memory, &none);
        self.harness.read(&memory, &y)
    }

    /// The sum in the order of the slots, then of the shared experts, in f32, rounded once.
    fn expected(&self, token: usize) -> Vec<f64> {
        let d = self.desc();
        let value = |param: &str| &self.given[&self.tensor(param)];
        let mut sums = vec![0.0f32; d.output_dim];
        let mut add = |weight: f64, param: &str, row: usize| {
            let row = &value(param)[row * d.output_dim..][..d.output_dim];
            for (sum, &v) in sums.iter_mut().zip(row) {
                *sum = (weight as f32).mul_add(v as f32, *sum);
            }
        };
        for slot in token * d.top_k..(token + 1) * d.top_k {
            let weight = if d.weighted {
                value("topk_weights")[slot]
            } else {
                1.0
            };
            // Ids beyond the experts are those of identity experts, then of zero experts.
            let identity = d.experts..d.experts + d.identity;
            let is_identity = || identity.contains(&(value("topk_ids")[slot] as usize));
            match value("slot_rows")[slot] {
                row if row >= 0.0 => add(weight, "out", row as usize),
                _ if d.identity > 0 && is_identity() => add(weight, "x", token),
                _ => {}
            }
        }
        for (i, shared) in d.shared.iter().enumerate() {
            assert!(!shared.gated, "its logistic function is not exact");
            add(1.0, &format!("shared_{i}_out"), token);
        }
        sums.iter()
            .map(|&v| round_to(d.activations, f64::from(v)))
            .collect()
    }

    /// A token alone, and in calls of few and of many.
    fn check_company(&self) {
        let what = format!("{}: {:?}", self.harness.plan.target, self.desc());
        let width = self.desc().output_dim;
        let all = self.call(0..MOST);
        if self.desc().shared.iter().all(|shared| !shared.gated) {
            for token in 0..MOST {
                let own = &all[token * width..][..width];
                assert!(own == self.expected(token), "token {token}, {what}");
            }
        }
        for first in [0, 37, MOST - 1] {
            self.check_part(&all, first..first + 1);
        }
        for part in [0..8, 5..8, 3..67, 0..65] {
            self.check_part(&all, part);
        }
    }

    fn check_part(&self, all: &[f64], tokens: Range<usize>) {
        let (what, width) = (self.harness.plan.target, self.desc().output_dim);
        let own = &all[tokens.start * width..tokens.end * width];
        let found = self.call(tokens.clone());
        assert!(own == found, "{tokens:?}, {what}: {:?}", self.desc());
    }
}

fn shared(gate: SharedGate) -> SharedExpert {
    SharedExpert {
        hidden_dim: 8,
        gate,
        bias: None,
        clamp: None,
        activation: None,
    }
}

/// Output widths with whole slices, with parts of one, narrower than one, odd.
fn of_width(width: usize, top_k: usize, dtype: DType) -> LayerSpec {
    layer([8, 8, width], [top_k + 1, top_k], dtype)
}

/// Layers with whatever adds to a token, or leaves it alone.
fn layers() -> Vec<LayerSpec> {
    let mut nobody = with(layer([1000, 8, 1000], [5, 3], Bf16), |s| {
        (s.experts.identity, s.experts.zero) = (2, 1);
    });
    nobody.shared = vec![shared(SharedGate::None)];
    let mut input = of_width(264, 2, F16);
    input.router.weight_on = WeightSite::Input;
    vec![
        of_width(768, 2, Bf16),
        of_width(37, 4, F16),
        of_width(150, 20, F32),
        of_width(24, 17, Bf16),
        of_width(1, 1, F32),
        nobody,
        input,
        with(of_width(520, 3, F16), |s| {
            s.shared = vec![shared(SharedGate::None), shared(SharedGate::Sigmoid)];
        }),
        with(of_width(75, 2, Bf16), |s| {
            s.shared = vec![shared(SharedGate::Sigmoid)];
        }),
    ]
}

fn on(target: &str) {
    for spec in layers() {
        Sum::new(&spec, target, "combine").check_company();
    }
    let residual = with(layer([520, 8, 520], [5, 2], Bf16), |s| {
        s.shared = vec![shared(SharedGate::Residual)];
    });
    Sum::new(&residual, target, "combine").check_company();
    let latent = with(residual, |s| {
        s.latent = Some(Latent {
            dim: 24,
            bias: false,
            norm_eps: None,
            input_norm_eps: None,
        });
    });
    Sum::new(&latent, target, "combine_later").check_company();
}

#[test]
fn sm_80_sums_a_token_in_any_company() {
    on("sim:sm_80");
}

#[test]
fn sm_90a_sums_a_token_in_any_company() {
    on("sim:sm_90a");
}

#[test]
fn gfx942_sums_a_token_in_any_company() {
    on("rocm:gfx942");
}

/// Each row is read once and each sum written once, however a call is cut. Every block that has
/// a slice of a token reads the token's maps, and every thread the logits of gates for itself.
#[test]
fn bytes_are_read_and_written_once() {
    let spec = with(of_width(776, 3, Bf16), |s| {
        s.shared = vec![shared(SharedGate::None), shared(SharedGate::Sigmoid)];
    });
    let (packs, slices, of_few) = (97, 4, 4);
    for target in ["sim:sm_80", "sim:sm_90a", "rocm:gfx942"] {
        let sum = Sum::new(&spec, target, "combine");
        let of_many = match &sum.harness.plan.kernels[0].op {
            Op::Combine { config, .. } => config.tile_tokens as u64,
            other => panic!("{other:?}"),
        };
        for tokens in [1, 8, 64, 65, 70] {
            sum.call(0..tokens);
            let counters = &sum.harness.take_counters()[0];
            let rows = &sum.given[&sum.tensor("slot_rows")][..3 * tokens];
            let rows = rows.iter().filter(|&&row| row >= 0.0).count() as u64;
            let tokens = tokens as u64;
            let (blocks, slices) = match tokens {
                ..=64 => (tokens.div_ceil(of_few) * slices, slices),
                _ => (tokens.div_ceil(of_many), 1),
            };
            let what = format!("{target}, {tokens} tokens");
            assert_eq!(counters.blocks, blocks, "{what}");
            let row = 2 * 776;
            let maps = slices * 3 * tokens * (4 + 4) + packs * tokens * 4;
            let read = (rows + 2 * tokens) * row + maps;
            assert_eq!(counters.global_loads.bytes, read, "read, {what}");
            assert_eq!(
                counters.global_stores.bytes,
                tokens * row,
                "written, {what}"
            );
        }
    }
}
