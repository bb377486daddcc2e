//! Whole passes of a layer: every step, from what a caller provides.

use crate::Harness;
use crate::memory::{Given, Memory, Values};
use moesaic_plan::{Step, TensorPlan, TensorRole};
use moesaic_reference::rng::Draw;
use moesaic_reference::{Input, Random, round_to};
use moesaic_spec::RouterKind;

/// Every tensor of one call, by name, as f64.
pub struct Tensors {
    /// What the caller provided.
    pub input: Input,
    values: Values,
}

impl Tensors {
    /// The values of a tensor.
    pub fn get(&self, name: &str) -> &[f64] {
        self.values
            .get(name)
            .unwrap_or_else(|| panic!("no tensor `{name}`"))
    }

    /// Returns whether the layer has such a tensor.
    pub fn has(&self, name: &str) -> bool {
        self.values.contains_key(name)
    }

    /// A tensor of whole numbers.
    pub fn ints(&self, name: &str) -> Vec<i64> {
        self.get(name).iter().map(|&v| v as i64).collect()
    }

    /// The experts of each slot.
    pub fn ids(&self) -> Vec<i32> {
        self.get("topk_ids").iter().map(|&v| v as i32).collect()
    }

    /// Row `row` of a tensor whose rows have this width.
    pub fn row(&self, name: &str, row: usize, width: usize) -> &[f64] {
        &self.get(name)[row * width..][..width]
    }

    /// Every gradient, to the bit: what every mode, and any number of threads, must agree on.
    pub fn gradients(&self) -> Vec<(&str, Vec<u64>)> {
        let all = self.values.iter();
        let wanted = all.filter(|(name, _)| name.starts_with("grad.") || *name == "dx");
        wanted
            .map(|(name, values)| (&**name, values.iter().map(|v| v.to_bits()).collect()))
            .collect()
    }
}

impl Harness {
    /// Random input of `tokens` tokens.
    pub fn random_input(&self, tokens: usize, seed: u64) -> Input {
        let (spec, mut random) = (&self.plan.spec, Random::new(seed));
        let slots = tokens * spec.shape.top_k;
        let x = random.vec(tokens * spec.shape.model_dim);
        let x = self.rounded(x);
        let below = |random: &mut Random, n: usize| (random.bits() % n as u64) as i32;
        let rows = spec.router.table_rows;
        // Two of eight are just outside of the table: kernels mask them, because ids that lie on a
        // device have met no check.
        let mut token_id = |t: usize, rows: usize| match t % 8 {
            3 => rows as i32,
            6 => -1,
            _ => below(&mut random, rows),
        };
        let token_ids = rows.map(|rows| (0..tokens).map(|t| token_id(t, rows)).collect());
        let routing = (spec.router.kind == RouterKind::External).then(|| {
            let ids = (0..slots).map(|_| below(&mut random, spec.routed_experts() + 1) - 1);
            let ids = ids.collect();
            let weights = random.vec(slots);
            (
                ids,
                weights.iter().map(|v| f64::from(v.abs() as f32)).collect(),
            )
        });
        let masked = |t: usize| i32::from(t % 5 != 3);
        let (r, k) = (&spec.router, spec.shape.top_k);
        Input {
            tokens,
            x,
            token_ids,
            routing,
            token_mask: r.token_mask.then(|| (0..tokens).map(masked).collect()),
            active_k: r.active_k.then(|| k.div_ceil(2)),
            draw: self.plan.training.map(|_| Draw {
                seed: seed | 1 << 40,
                step: 3,
                layer: 2,
                first_token: 11,
            }),
            ..Input::default()
        }
    }

    /// A random gradient of the output.
    pub fn random_dy(&self, tokens: usize) -> Vec<f64> {
        self.rounded(Random::new(99).vec(tokens * self.plan.spec.output_dim()))
    }

    /// Values as activations are stored.
    fn rounded(&self, values: Vec<f64>) -> Vec<f64> {
        let dtype = self.plan.spec.precision.activations;
        values.into_iter().map(|v| round_to(dtype, v)).collect()
    }

    /// Runs every step; nothing that a kernel should write is set before.
    pub fn run(&self, input: &Input) -> Tensors {
        let memory = self.provided(input, None);
        for launch in &self.plan.prepare {
            let scalar = |name: &str| self.scalar(name, input, 0);
            self.launch(launch, input.tokens, &memory, &scalar);
        }
        self.launch_all(&self.plan.steps, input, 0, &memory);
        self.tensors(input, &memory)
    }

    /// Forward and backward on random input; see [`Harness::run_training`].
    pub fn train(&self, tokens: usize, accumulate: &[i64]) -> Tensors {
        let input = self.random_input(tokens, tokens as u64);
        self.run_training(&input, &self.random_dy(tokens), accumulate)
    }

    /// Forward, then backward once for each of `accumulate`.
    pub fn run_training(&self, input: &Input, dy: &[f64], accumulate: &[i64]) -> Tensors {
        let memory = self.provided(input, Some(dy));
        self.launch_all(&self.plan.steps, input, 0, &memory);
        for &accumulate in accumulate {
            self.launch_all(&self.plan.backward, input, accumulate, &memory);
        }
        self.tensors(input, &memory)
    }

    /// Memory for every tensor; what the caller provides is in it.
    fn provided(&self, input: &Input, dy: Option<&[f64]>) -> Memory {
        let given = |tensor: &TensorPlan| match tensor.role {
            TensorRole::Input => Given::Whole(input_values(input, &tensor.name)),
            TensorRole::Weight => Given::Whole(self.weights.get(&tensor.name).data.clone()),
            TensorRole::OutputGradient => dy.map_or(Given::Nothing, |dy| Given::Whole(dy.to_vec())),
            TensorRole::Packed
            | TensorRole::Output
            | TensorRole::Scratch
            | TensorRole::InputGradient
            | TensorRole::WeightGradient => Given::Nothing,
        };
        self.memory(input.tokens, |tensor| Some(given(tensor)))
    }

    fn launch_all(&self, steps: &[Step], input: &Input, accumulate: i64, memory: &Memory) {
        let scalar = |name: &str| self.scalar(name, input, accumulate);
        for Step::Launch(launch) in steps {
            self.launch(launch, input.tokens, memory, &scalar);
        }
    }

    fn tensors(&self, input: &Input, memory: &Memory) -> Tensors {
        Tensors {
            values: self.read_all(memory),
            input: input.clone(),
        }
    }

    /// The value of a parameter that is no tensor.
    fn scalar(&self, name: &str, input: &Input, accumulate: i64) -> i64 {
        let draw = input.draw.unwrap_or_default();
        match name {
            "accumulate" => accumulate,
            "row_limit" => self.row_limit(input),
            "table_rows" => self.plan.spec.router.table_rows.unwrap_or(0) as i64,
            "seed" => draw.seed as i64,
            "step" => draw.step as i64,
            "layer" => i64::from(draw.layer),
            "first_token" => draw.first_token as i64,
            other => panic!("the harness has no scalar `{other}`"),
        }
    }

    fn row_limit(&self, input: &Input) -> i64 {
        let spec = &self.plan.spec;
        let of_pass = spec.capacity.factor_of(input.draw.is_some());
        let factor = input.capacity_factor.unwrap_or(of_pass);
        moesaic_plan::row_limit(spec, factor, input.tokens as u64)
    }
}

fn input_values(input: &Input, name: &str) -> Vec<f64> {
    let ints = |ids: &[i32]| ids.iter().map(|&id| f64::from(id)).collect();
    match name {
        "x" => input.x.clone(),
        "token_mask" => ints(input.token_mask.as_ref().unwrap()),
        "active_k" => vec![input.active_k.unwrap() as f64],
        "token_ids" => ints(input.token_ids.as_ref().unwrap()),
        "topk_ids" => ints(&input.routing.as_ref().unwrap().0),
        "topk_weights" => input.routing.as_ref().unwrap().1.clone(),
        other => panic!("the harness has no input `{other}`"),
    }
}
