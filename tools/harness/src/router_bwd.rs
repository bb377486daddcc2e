//! Runs the kernels of `gate_topk_bwd` alone and holds what they write
//! against the f64 reference. Logits and choices come from the reference, and
//! so do the matrix products between the kernels.

use crate::memory::{Given, Memory};
use crate::plans::{only, planned};
use crate::{Harness, accumulating};
use moesaic_kernel::{Stem, Target};
use moesaic_plan::{KernelPlan, PlanOptions, Step, TensorPlan, Training};
use moesaic_reference::{
    Decision, GateOutput, Gradients, Input, Random, Routed, gate, losses, router_backward,
};
use moesaic_spec::{LayerSpec, Loss, LossKind, NoiseKind, RouterInput, RouterKind, testing};

/// A layer's kernel of the stem.
pub struct Router {
    harness: Harness,
}

/// One call: what goes in, and what should come out.
struct Call<'a> {
    harness: &'a Harness,
    input: &'a Input,
    memory: Memory,
    wanted: Gradients,
    /// Of the scale of learned noise.
    dscale: Vec<f64>,
    what: String,
}

/// A sample whose losses are large, so that each shows in the gradients.
pub fn sample(seed: u64) -> Option<LayerSpec> {
    let mut spec = testing::sample(seed);
    let back = spec.has_logits() || spec.router.expert_scale;
    // One channel divided by its size has next to no gradient.
    let narrow = spec.router.input == RouterInput::RmsScaled && spec.shape.model_dim < 4;
    if spec.router.kind == RouterKind::External || !back || narrow {
        return None;
    }
    if spec.router.noise > 0.0 {
        spec.router.noise = spec.routed_experts() as f64 * 0.5;
    }
    for loss in &mut spec.losses {
        loss.coefficient += 0.5;
    }
    Some(spec)
}

/// Layers with each loss alone and with all at once, for every score.
pub fn every_loss() -> Vec<LayerSpec> {
    let alone = LossKind::ALL.map(|kind| vec![kind]).to_vec();
    let sets = alone.into_iter().chain([LossKind::ALL.to_vec()]);
    let scores = ["softmax", "sigmoid", "sqrt-softplus", "softmax-selected"];
    let mut list = Vec::new();
    for (i, kinds) in sets.enumerate() {
        for (j, score) in scores.into_iter().enumerate() {
            let (experts, top_k) = [(5, 2), (17, 4), (8, 8), (70, 1)][(i + j) % 4];
            let toml = format!(
                "shape = {{ model_dim = 6, hidden_dim = 4, experts = {experts}, top_k = {top_k} }}\n\
                 router = {{ noise = {experts}.0, score = \"{score}\" }}"
            );
            let mut spec = LayerSpec::from_toml(&toml).unwrap();
            let loss = |&kind: &LossKind| Loss {
                kind,
                coefficient: 0.7,
                sequence_length: (kind == LossKind::Sequence && j % 2 == 0).then_some(9),
            };
            spec.losses = kinds.iter().map(loss).collect();
            if kinds == [LossKind::ImportanceLoadLogits] {
                list.push(with_learned_noise(spec.clone()));
            }
            list.push(spec);
        }
    }
    list
}

fn with_learned_noise(mut spec: LayerSpec) -> LayerSpec {
    (spec.router.noise, spec.router.noise_kind) = (0.8, NoiseKind::Learned);
    spec
}

/// A random call of `tokens` tokens.
pub fn random_input(spec: &LayerSpec, tokens: usize, seed: u64) -> Input {
    let mut random = Random::new(seed);
    let rows = spec.router.table_rows.unwrap_or(1) as u64;
    let experts = spec.routed_experts();
    let activations = spec.precision.activations;
    let x = random.vec(tokens * spec.shape.model_dim).into_iter();
    let x = x.map(|v| moesaic_reference::round_to(activations, v));
    Input {
        tokens,
        x: x.collect(),
        token_ids: Some((0..tokens).map(|_| (random.bits() % rows) as i32).collect()),
        token_mask: Some((0..tokens as i32).map(|t| t * 7 % 5).collect()),
        active_k: Some(spec.shape.top_k.div_ceil(2)),
        sequence_ids: Some(
            (0..tokens as i32)
                .map(|t| t / 7 * 3 % 100 - t / 20 % 2 * 200)
                .collect(),
        ),
        global: Some((
            (0..experts).map(|_| (random.bits() % 50) as i64).collect(),
            tokens as u64 + 40,
        )),
        ..Input::default()
    }
}

impl Router {
    /// The kernels of a layer for a target.
    pub fn new(spec: &LayerSpec, target: Target) -> Router {
        let plan = planned(spec, target, &PlanOptions::training(Training::default()));
        let own = |kernel: &&KernelPlan| kernel.stem() == Stem::GateTopkBwd;
        let name = plan
            .kernels
            .iter()
            .find(own)
            .expect("a router")
            .name
            .clone();
        let plan = only(plan, |kernel| kernel.name == name);
        let harness = match target {
            Target::Cpu(_) => Harness::with_threads(plan, 3),
            _ => Harness::of(plan),
        };
        Router { harness }
    }

    /// Runs every entry on random gradients, weight gradients added to what
    /// lies there, and checks everything that is written.
    pub fn check(&self, tokens: usize, masked: bool) {
        let (harness, spec) = (&self.harness, &self.harness.plan.spec);
        let input = random_input(spec, tokens, tokens as u64 ^ 0x9a7e);
        let mut gate = gate(spec, &harness.weights, &input);
        if masked {
            mask_some(&mut gate.decision, spec.shape.top_k);
        }
        let dweights = Random::new(5).vec(gate.decision.ids.len());
        let mut call = Call {
            harness,
            input: &input,
            memory: Memory::new(),
            wanted: router_backward(spec, &harness.weights, &input, &gate, &dweights),
            dscale: scale_gradient(spec, &input, &gate),
            what: format!(
                "{}, {tokens} tokens\n{}",
                harness.plan.target,
                spec.to_toml()
            ),
        };
        call.memory = harness.memory(tokens, |tensor| {
            Some(call.given(tensor, &gate.decision, &dweights))
        });
        call.run();
        call.check(masked);
    }
}

/// What the losses give the scale of learned noise.
fn scale_gradient(spec: &LayerSpec, input: &Input, gate: &GateOutput) -> Vec<f64> {
    let routed = Routed {
        spec,
        logits: gate.logits.as_deref().unwrap_or_default(),
        clean: gate.clean.as_deref().unwrap_or_default(),
        noise_scale: gate.noise_scale.as_deref(),
        ids: &gate.decision.ids,
        input,
    };
    routed.total().dscale
}

/// Every fifth token has no choice, every seventh loses its last one, and some
/// lose their second by chance, which still counts in denominators.
fn mask_some(decision: &mut Decision, top_k: usize) {
    for (t, ids) in decision.ids.chunks_mut(top_k).enumerate() {
        if t % 5 == 2 {
            ids.fill(-1);
        } else if t % 7 == 3 && top_k > 1 {
            ids[top_k - 1] = -1;
        } else if t % 7 == 5 && top_k > 1 {
            ids[1] = -2 - ids[1];
        }
    }
}

impl Call<'_> {
    fn spec(&self) -> &LayerSpec {
        &self.harness.plan.spec
    }

    fn given(&self, tensor: &TensorPlan, decision: &Decision, dweights: &[f64]) -> Given {
        let values = self.values(&tensor.name, decision, dweights);
        values.map_or(Given::Nothing, Given::Whole)
    }

    /// Values of tensors that kernels read and no kernel of the stem writes.
    fn values(&self, name: &str, decision: &Decision, dweights: &[f64]) -> Option<Vec<f64>> {
        let (spec, weights) = (self.spec(), &self.harness.weights);
        let whole = |values: &[i32]| values.iter().map(|&v| f64::from(v)).collect();
        Some(match name {
            // Nothing is drawn: no jitter, no noise.
            "x" | "router.x" => self.input.x.clone(),
            "topk_ids" => whole(&decision.ids),
            "grad.topk_weights" => dweights.to_vec(),
            "router.logits" | "router.clean_logits" => {
                moesaic_reference::logits(spec, weights, &self.input.x, self.input.tokens)
            }
            "router.projected" => self.projected(),
            "router.noise_logits" => self.noise_logits()?,
            "sequence_ids" => whole(self.input.sequence_ids.as_ref()?),
            "token_mask" => whole(self.input.token_mask.as_ref()?),
            "active_k" => vec![self.input.active_k? as f64],
            "global_counts" => {
                let counts = &self.input.global.as_ref()?.0;
                counts.iter().map(|&n| n as f64).collect()
            }
            "global_tokens" => vec![self.input.global.as_ref()?.1 as f64],
            _ if name.starts_with("grad.router.") => return self.before(name),
            _ => return weights.0.get(name).map(|tensor| tensor.data.clone()),
        })
    }

    /// What a weight's gradient is added to.
    fn before(&self, name: &str) -> Option<Vec<f64>> {
        let weight = self.wanted.weights.get(name.strip_prefix("grad.")?)?;
        Some((0..weight.data.len()).map(|i| i as f64).collect())
    }

    /// The name, before `.weight`, of the matrix that tokens are multiplied by.
    fn matrix(&self) -> &'static str {
        self.spec()
            .logits()
            .map_or("router", |logits| logits.matrix)
    }

    /// Returns whether logits are computed of projected tokens.
    fn projects(&self) -> bool {
        let logits = self.spec().logits();
        logits.is_some_and(|logits| logits.projected.is_some())
    }

    fn routed(&self) -> Vec<f64> {
        let d = self.spec().shape.model_dim;
        let rms = self.spec().router.input == RouterInput::RmsScaled;
        let row = |x: &[f64]| {
            if rms {
                let scale = &self.harness.weights.get("router.input_scale").data;
                let mean = x.iter().map(|v| v * v).sum::<f64>() / d as f64 + 1e-6;
                let scaled = x.iter().zip(scale);
                scaled
                    .map(|(v, s)| v * s / (mean * d as f64).sqrt())
                    .collect()
            } else {
                x.to_vec()
            }
        };
        self.input.x.chunks(d).flat_map(row).collect()
    }

    fn projected(&self) -> Vec<f64> {
        let weights = &self.harness.weights;
        let of = |part: &str| &weights.get(&format!("{}.{part}", self.matrix())).data;
        let (matrix, bias) = (of("weight"), of("bias"));
        let d = self.spec().shape.model_dim;
        let routed = self.routed();
        let row = |x: &[f64]| -> Vec<f64> {
            let rows = matrix.chunks(d).zip(bias);
            rows.map(|(w, b)| w.iter().zip(x).map(|(w, x)| w * x).sum::<f64>() + b)
                .collect()
        };
        routed.chunks(d).flat_map(row).collect()
    }

    /// What the scale of learned noise is a function of.
    fn noise_logits(&self) -> Option<Vec<f64>> {
        let matrix = &self.harness.weights.0.get("router.noise.weight")?.data;
        let d = self.spec().shape.model_dim;
        let dot = |w: &[f64], x: &[f64]| w.iter().zip(x).map(|(w, x)| w * x).sum::<f64>();
        let routed = self.routed();
        let row = |x: &[f64]| matrix.chunks(d).map(|w| dot(w, x)).collect::<Vec<f64>>();
        Some(routed.chunks(d).flat_map(row).collect())
    }

    fn run(&self) {
        for step in self.harness.plan.all_steps() {
            if self.harness.plan.symbol(step) == "gate_input_scale_bwd" {
                self.give_router_dx();
            }
            let Step::Launch(step) = step;
            let tokens = self.input.tokens;
            self.harness
                .launch(step, tokens, &self.memory, &accumulating(true));
        }
    }

    fn read(&self, name: &str) -> Vec<f64> {
        self.harness.read(&self.memory, name)
    }

    /// `router.dx` as the product with the router's matrix leaves it.
    fn give_router_dx(&self) {
        let rows = if self.projects() {
            "grad.router.projected"
        } else {
            "grad.router.logits"
        };
        let (rows, d) = (self.read(rows), self.spec().shape.model_dim);
        let matrix = &self
            .harness
            .weights
            .get(&format!("{}.weight", self.matrix()))
            .data;
        let width = matrix.len() / d;
        let row = |dout: &[f64]| -> Vec<f64> {
            let column = |i| {
                dout.iter()
                    .enumerate()
                    .map(|(o, g)| g * matrix[o * d + i])
                    .sum()
            };
            (0..d).map(column).collect()
        };
        let dx: Vec<f64> = rows.chunks(width).flat_map(row).collect();
        self.harness.write(&self.memory, "router.dx", &dx);
    }

    fn check(&self, masked: bool) {
        let spec = self.spec();
        if spec.has_logits() {
            self.near("grad.router.logits", &self.wanted.logits);
        }
        if self
            .harness
            .plan
            .tensor("grad.router.noise_scale")
            .is_some()
        {
            self.near("grad.router.noise_scale", &self.dscale);
        }
        if !masked {
            for (name, value) in losses(spec, &self.harness.weights, self.input) {
                self.near(&name, &[value]);
            }
        }
        for (name, gradient) in &self.wanted.weights {
            let name = format!("grad.{name}");
            let written = self.harness.plan.tensor(&name).is_some() && self.own(&name);
            if written {
                let before = self.before(&name).unwrap_or_default().into_iter();
                let sum: Vec<f64> = before.zip(&gradient.data).map(|(b, g)| b + g).collect();
                self.near(&name, &sum);
            }
        }
        if spec.has_logits() && spec.router.input == RouterInput::RmsScaled {
            self.near("router.input", &self.routed());
            self.near("router.dx", &self.wanted.x);
        }
        if self.projects() {
            self.check_projected();
        }
    }

    /// The gradient of the projection's matrix is a product with what the kernel wrote.
    fn check_projected(&self) {
        let (rows, routed) = (self.read("grad.router.projected"), self.routed());
        let d = self.spec().shape.model_dim;
        let width = self
            .spec()
            .logits()
            .map_or(1, |logits| logits.width.size(self.spec()));
        let mut sums = vec![0.0; width * d];
        for (dout, x) in rows.chunks(width).zip(routed.chunks(d)) {
            for (i, sum) in sums.iter_mut().enumerate() {
                *sum += dout[i / d] * x[i % d];
            }
        }
        let name = format!("{}.weight", self.matrix());
        let wanted = &self.wanted.weights[&name].data;
        self.compare(&format!("grad.{name}"), &sums, wanted);
    }

    /// Returns whether a kernel of the stem writes this tensor.
    fn own(&self, name: &str) -> bool {
        let plan = &self.harness.plan;
        let mut steps = plan.backward.iter();
        steps.any(|step| plan.names(step).any(|tensor| tensor == name))
    }

    fn near(&self, name: &str, wanted: &[f64]) {
        self.compare(name, &self.read(name), wanted);
    }

    fn compare(&self, name: &str, found: &[f64], wanted: &[f64]) {
        assert_eq!(found.len(), wanted.len(), "{name}");
        // Coefficients of variation are differences of nearly equal sums.
        let noisy = self.spec().losses.iter().any(|l| l.kind.needs_noise());
        let (tolerance, least) = if noisy { (2e-4, 1e-3) } else { (4e-5, 1e-9) };
        // What renormalising takes away is as large as a weight's gradient.
        let least = if name.starts_with("loss.") {
            least
        } else {
            0.03 * self.spec().router.scale
        };
        let scale = wanted.iter().fold(least, |most: f64, v| most.max(v.abs()));
        for (i, (found, wanted)) in found.iter().zip(wanted).enumerate() {
            let error = (found - wanted).abs() / scale;
            assert!(
                error < tolerance,
                "{name}[{i}] is {found}, expected {wanted}, the largest is {scale}\n{}",
                self.what
            );
        }
    }
}
