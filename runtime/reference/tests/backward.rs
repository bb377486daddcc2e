//! Compares every gradient with central differences of the forward pass.

use moesaic_reference::rng::Draw;
use moesaic_reference::{Gradients, Input, Random, Weights, backward, forward, losses};
use moesaic_spec::*;

const STEP: f64 = 1e-5;

/// A layer at one point, and the direction of the derivatives.
struct Point {
    spec: LayerSpec,
    weights: Weights,
    input: Input,
    dy: Vec<f64>,
}

impl Point {
    fn new(spec: LayerSpec, tokens: usize, seed: u64) -> Point {
        let weights = Weights::random(&spec, seed);
        let mut random = Random::new(seed ^ 0xbac);
        let (experts, k) = (spec.routed_experts(), spec.shape.top_k);
        let external = spec.router.kind == RouterKind::External;
        let ids = |random: &mut Random| -> Vec<i32> {
            let first = random.bits() as usize;
            (0..k).map(|i| ((first + i) % experts) as i32).collect()
        };
        let routing = external.then(|| {
            let ids = (0..tokens).flat_map(|_| ids(&mut random)).collect();
            (ids, random.vec(tokens * k))
        });
        let rows = spec.router.table_rows.unwrap_or(1) as u64;
        let input = Input {
            tokens,
            x: random.vec(tokens * spec.shape.model_dim),
            token_ids: Some((0..tokens).map(|_| (random.bits() % rows) as i32).collect()),
            routing,
            draw: (seed % 2 == 1).then_some(Draw {
                seed,
                step: 2,
                layer: 1,
                first_token: 5,
            }),
            token_mask: Some((0..tokens as i32).map(|t| (t + 1) % 4).collect()),
            active_k: Some(1.max(k - 1)),
            sequence_ids: Some((0..tokens as i32).map(|t| t / 2 - t % 5 / 4 * 9).collect()),
            global: Some((
                (0..experts as i64).map(|e| e % 4).collect(),
                tokens as u64 + 5,
            )),
            ..Input::default()
        };
        let dy = random.vec(tokens * spec.output_dim());
        Point {
            spec,
            weights,
            input,
            dy,
        }
    }

    fn loss(&self) -> f64 {
        let y = forward(&self.spec, &self.weights, &self.input).y;
        let task: f64 = y.iter().zip(&self.dy).map(|(y, d)| y * d).sum();
        let losses = losses(&self.spec, &self.weights, &self.input);
        let weigh = |loss: &Loss| loss.coefficient * losses[&format!("loss.{}", loss.kind.name())];
        task + self.spec.losses.iter().map(weigh).sum::<f64>()
    }

    /// Returns the choices, which must not change within a step.
    fn chosen(&self) -> (Vec<i32>, Vec<i32>) {
        let output = forward(&self.spec, &self.weights, &self.input);
        (output.topk_ids, output.locations)
    }

    /// Returns the derivative along one coordinate, or `None` if a choice changes.
    fn slope(&mut self, at: impl Fn(&mut Point) -> &mut f64) -> Option<f64> {
        let here = *at(self);
        let chosen = self.chosen();
        let mut side = |value: f64| {
            *at(self) = value;
            (self.chosen() == chosen).then(|| self.loss())
        };
        let ends = (side(here + STEP), side(here - STEP));
        *at(self) = here;
        Some((ends.0? - ends.1?) / (2.0 * STEP))
    }

    /// Checks some coordinates of each tensor. Returns the number that could be compared.
    fn check(&mut self, what: &str) -> usize {
        let found = backward(&self.spec, &self.weights, &self.input, &self.dy);
        let mut compared = 0;
        for i in picked(self.input.x.len()) {
            let slope = self.slope(|p| &mut p.input.x[i]);
            compared += close(&format!("{what}: x[{i}]"), found.x[i], slope);
        }
        let names: Vec<String> = found.weights.keys().cloned().collect();
        // A state that trainers update, not a parameter.
        for name in names.into_iter().filter(|name| name != "router.load") {
            let gradient = &found.weights[&name].data;
            for i in picked(gradient.len()) {
                let slope = self.slope(|p| {
                    let tensor = p.weights.0.get_mut(&name);
                    &mut tensor.expect("it has a gradient").data[i]
                });
                compared += close(&format!("{what}: {name}[{i}]"), gradient[i], slope);
            }
        }
        compared + self.check_routing(what, &found)
    }

    fn check_routing(&mut self, what: &str, found: &Gradients) -> usize {
        let count = self.input.routing.as_ref().map_or(0, |r| r.1.len());
        let one = |i: usize| {
            let slope = self.slope(|p| &mut p.input.routing.as_mut().expect("external").1[i]);
            close(
                &format!("{what}: topk_weights[{i}]"),
                found.topk_weights[i],
                slope,
            )
        };
        picked(count).map(one).sum()
    }
}

/// Returns at most nine coordinates, spread out.
fn picked(count: usize) -> impl Iterator<Item = usize> {
    (0..count).step_by(count.div_ceil(9).max(1))
}

fn close(what: &str, found: f64, slope: Option<f64>) -> usize {
    let Some(slope) = slope else { return 0 };
    let error = (found - slope).abs() / (1.0 + slope.abs());
    assert!(error < 2e-6, "{what} is {found}, differences give {slope}");
    1
}

#[test]
fn gradients_are_the_slopes_of_the_forward() {
    let mut compared = 0;
    for seed in 0..120 {
        let spec = testing::sample(seed);
        let tokens = [1, 3, 6][seed as usize % 3];
        let what = format!("sample {seed}\n{}", spec.to_toml());
        compared += Point::new(spec, tokens, seed).check(&what);
    }
    assert!(compared > 4000, "only {compared} coordinates were compared");
}

/// Every selection rule and every kind of noise, in training.
#[test]
fn gradients_of_every_selection() {
    type Change = fn(&mut Router);
    let changes: [Change; 12] = [
        |r| r.select = Select::ExpertChoice(1.5),
        |r| {
            r.select = Select::ExpertChoice(2.0);
            r.renormalize = Renormalize::Sum;
            r.score = Score::Sigmoid;
        },
        |r| r.select = Select::Sinkhorn(6),
        |r| {
            r.entropy = Some(Entropy {
                temperature: 0.5,
                load: 0.25,
            })
        },
        |r| {
            r.entropy = Some(Entropy {
                temperature: -1.5,
                load: 0.0,
            });
            r.select = Select::ExpertChoice(1.0);
        },
        |r| r.token_mask = true,
        |r| {
            r.active_k = true;
            r.score = Score::SoftmaxSelected;
        },
        |r| r.noise = 4.0,
        |r| (r.noise, r.noise_kind) = (0.7, NoiseKind::Learned),
        |r| (r.noise, r.noise_kind) = (1.0, NoiseKind::Gumbel),
        |r| {
            (r.noise, r.noise_kind) = (1.0, NoiseKind::GumbelSecond);
            (r.random_second, r.renormalize) = (true, Renormalize::Sum);
        },
        |r| {
            (r.jitter, r.input_dropout) = (0.3, 0.25);
            (r.input, r.random_second) = (RouterInput::RmsScaled, true);
            (r.noise, r.noise_kind) = (0.7, NoiseKind::Learned);
        },
    ];
    for (i, change) in changes.into_iter().enumerate() {
        for seed in [1, 3, 5] {
            let text = "shape = { model_dim = 6, hidden_dim = 5, experts = 4, top_k = 2 }";
            let mut spec = LayerSpec::from_toml(text).expect("it is valid");
            change(&mut spec.router);
            if matches!(spec.router.select, Select::ExpertChoice(_)) {
                spec.shape.top_k = 4;
            }
            spec.validate().expect("it is valid");
            let compared = Point::new(spec, 7, seed).check(&format!("change {i}, seed {seed}"));
            assert!(compared > 20, "change {i}: only {compared} were compared");
        }
    }
}

/// The load depends on the scale of the noise itself, whatever was drawn.
#[test]
fn gradients_through_learned_scales_of_the_load() {
    for (experts, top_k) in [(4, 2), (5, 1), (3, 3), (6, 5)] {
        let text = format!(
            "shape = {{ model_dim = 6, hidden_dim = 5, experts = {experts}, top_k = {top_k} }}\n\
             router = {{ noise = 0.7, noise_kind = \"learned\", token_mask = true }}\n\
             losses = [{{ kind = \"importance-load-logits\", coefficient = 3.0 }},\n\
                       {{ kind = \"z\", coefficient = 0.5 }}]"
        );
        let spec = LayerSpec::from_toml(&text).expect("it is valid");
        for seed in 0..6 {
            let what = format!("{top_k} of {experts}, seed {seed}");
            let compared = Point::new(spec.clone(), 9, seed).check(&what);
            assert!(compared > 20, "{what}: only {compared} were compared");
        }
    }
}

#[test]
fn no_tokens_give_zero_gradients() {
    let spec = testing::sample(1);
    let point = Point::new(spec, 0, 1);
    let found = backward(&point.spec, &point.weights, &point.input, &point.dy);
    assert!(found.x.is_empty());
    assert!(
        found
            .weights
            .values()
            .all(|t| t.data.iter().all(|v| *v == 0.0))
    );
}
