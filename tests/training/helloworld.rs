//! Tutel's own example, from the same weights and tokens, to the same losses.
//!
//! `helloworld` trains one layer on random tokens `x [B, N, d]`: the loss is
//! `mean_b -log softmax_n(Σ_d y[b])[0]`, the optimizer is SGD at 1e-5. Weights
//! and tokens come from PyTorch's generator with fixed seeds, which
//! [`TorchRandom`] repeats.

use super::torch_random::TorchRandom;
use moesaic::spec::canonical_tensors;
use moesaic::{Engine, Input, Layer, LayerSpec, RngKey, Saved, Tensor, Tensors, Training};
use std::collections::BTreeMap;

const RATE: f32 = 1e-5;

/// The sizes of a group of runs.
#[derive(Clone, Copy)]
pub struct Sizes {
    /// `B`.
    samples: usize,
    /// Tokens of each sample, `N`.
    tokens: usize,
    model_dim: usize,
    hidden_dim: usize,
}

/// Those of `tutel_losses.txt`.
const RECORDED: Sizes = Sizes {
    samples: 2,
    tokens: 128,
    model_dim: 256,
    hidden_dim: 512,
};

/// Those of `tutel_published.txt`.
pub const PUBLISHED: Sizes = Sizes {
    samples: 16,
    tokens: 1024,
    model_dim: 2048,
    hidden_dim: 2048,
};

/// One run of Tutel's example.
pub struct Run {
    pub spec: LayerSpec,
    /// f32 weights by canonical name, as `helloworld` initialises them.
    pub weights: BTreeMap<String, Vec<f32>>,
    /// `[B · N, d]`.
    pub x: Vec<f32>,
    sizes: Sizes,
    /// What Tutel printed, step 0 first.
    pub losses: Vec<f64>,
}

/// Every run of a file, one line each.
pub fn runs(text: &str, sizes: Sizes) -> impl Iterator<Item = (&str, Run)> {
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    lines.map(move |line| {
        let (options, losses) = line.split_once(": ").expect("options: losses");
        let losses = losses.split(' ').map(|v| v.parse().expect("a number"));
        (options, Run::new(options, sizes, losses.collect()))
    })
}

pub fn recorded() -> impl Iterator<Item = (&'static str, Run)> {
    runs(include_str!("tutel_losses.txt"), RECORDED)
}

/// The value of an option of `helloworld`.
fn option(options: &str, name: &str) -> Option<f64> {
    let mut words = options.split(' ').skip_while(|word| *word != name);
    words.nth(1).map(|value| value.parse().expect("a number"))
}

impl Run {
    fn new(options: &str, sizes: Sizes, losses: Vec<f64>) -> Run {
        let spec = spec(options, sizes);
        let x = TorchRandom::new(0).normal(sizes.samples * sizes.tokens * sizes.model_dim);
        Run {
            weights: initial_weights(&spec),
            spec,
            x,
            sizes,
            losses,
        }
    }

    /// The loss `y [B · N, d]` has, and its gradient.
    pub fn loss(&self, y: &[f32]) -> (f64, Vec<f32>) {
        loss(y, self.sizes.samples, self.spec.output_dim())
    }

    pub fn tokens(&self) -> usize {
        self.sizes.samples * self.sizes.tokens
    }

    /// One step of SGD.
    pub fn descend(&mut self, gradient: impl Fn(&str) -> Vec<f32>) {
        for (name, weight) in &mut self.weights {
            let gradient = gradient(name);
            assert_eq!(gradient.len(), weight.len(), "{name}");
            for (w, g) in weight.iter_mut().zip(gradient) {
                *w -= RATE * g;
            }
        }
    }
}

fn spec(options: &str, sizes: Sizes) -> LayerSpec {
    let (d, h) = (sizes.model_dim, sizes.hidden_dim);
    let experts = option(options, "--num_local_experts").expect("always given");
    let top_k = option(options, "--top").expect("always given");
    let factor = option(options, "--capacity_factor").unwrap_or(1.0);
    // f32's machine epsilon is the least denominator; one choice is not normalised.
    let renormalize = if top_k > 1.0 {
        "renormalize = \"clamp\"\nrenormalize_eps = 1.1920928955078125e-7"
    } else {
        ""
    };
    let losses = option(options, "--l_aux_wt").map_or(String::new(), |weight| {
        format!("[[losses]]\nkind = \"gshard\"\ncoefficient = {weight:?}")
    });
    let text = format!(
        "name = \"helloworld\"\n\
         shape = {{ model_dim = {d}, hidden_dim = {h}, experts = {experts}, top_k = {top_k} }}\n\
         experts = {{ form = \"plain\", activation = \"relu\", bias = true }}\n\
         [capacity]\nmode = \"factor\"\nfactor = {factor:?}\norder = \"slot-major\"\n\
         [router]\n{renormalize}\n{losses}"
    );
    LayerSpec::from_toml(&text).unwrap_or_else(|e| panic!("{text}\n{e}"))
}

/// As Tutel 0.3 draws them: per expert a `nn.Linear(d, h)` and a
/// `nn.Linear(h, d)` from seed 1, then the router from seed 1 again.
fn initial_weights(spec: &LayerSpec) -> BTreeMap<String, Vec<f32>> {
    let (d, h, e) = (
        spec.shape.model_dim,
        spec.shape.hidden_dim,
        spec.shape.experts,
    );
    let bound = |inputs: usize| 1.0 / (inputs as f64).sqrt();
    let mut weights: BTreeMap<String, Vec<f32>> = BTreeMap::new();
    let mut random = TorchRandom::new(1);
    for _ in 0..e {
        for (name, inputs, outputs) in [("up", d, h), ("down", h, d)] {
            for (part, count) in [("weight", inputs * outputs), ("bias", outputs)] {
                let values = random.uniform(count, bound(inputs));
                let name = format!("experts.{name}.{part}");
                weights.entry(name).or_default().extend(values);
            }
        }
    }
    let router = TorchRandom::new(1).uniform(e * d, bound(d));
    weights.insert("router.weight".to_string(), router);
    weights
}

fn loss(y: &[f32], samples: usize, width: usize) -> (f64, Vec<f32>) {
    let sums: Vec<f64> = y
        .chunks_exact(width)
        .map(|row| row.iter().map(|v| f64::from(*v)).sum())
        .collect();
    let (mut total, mut dy) = (0.0, Vec::with_capacity(y.len()));
    for logits in sums.chunks_exact(sums.len() / samples) {
        let top = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = logits.iter().map(|z| (z - top).exp()).sum();
        total += sum.ln() + top - logits[0];
        for (i, z) in logits.iter().enumerate() {
            let hit = if i == 0 { 1.0 } else { 0.0 };
            let gradient = ((z - top).exp() / sum - hit) / samples as f64;
            dy.extend(std::iter::repeat_n(gradient as f32, width));
        }
    }
    (total / samples as f64, dy)
}

impl Run {
    /// Some steps, each loss held against the printed digits.
    pub fn train(mut self, engine: &Engine, steps: usize, digits: i32, options: &str) {
        let layer = self.layer(engine);
        let mut tally = Tally::new(digits);
        for step in 0..steps {
            let (loss, saved, dy) = self.forward(&layer);
            tally.compare(step, loss, self.losses[step]);
            let dy = Tensor::new(&[self.tokens(), self.spec.output_dim()], &dy);
            layer.backward(&saved, &dy, false).expect("the layer runs");
            self.descend(|name| layer.gradient(name).expect("a weight's name").to_f32());
        }
        tally.finish(options);
    }

    fn layer(&self, engine: &Engine) -> Layer {
        let list = canonical_tensors(&self.spec);
        let weights = list.iter().fold(Tensors::new(), |weights, t| {
            weights.with(&t.name, &t.shape, &self.weights[&t.name])
        });
        let layer = engine.training_layer(&self.spec, &weights, Training::default());
        layer.expect("the kernels compile")
    }

    /// The loss that Tutel prints, auxiliary one included, what backward needs,
    /// and the gradient of `y`.
    fn forward(&self, layer: &Layer) -> (f64, Saved, Vec<f32>) {
        for tensor in canonical_tensors(&self.spec) {
            let value = Tensor::new(&tensor.shape, &self.weights[&tensor.name]);
            layer
                .set_weight(&tensor.name, &value)
                .expect("its own shape");
        }
        let auxiliary = !self.spec.losses.is_empty();
        let names: &[&str] = if auxiliary {
            &["y", "loss.gshard"]
        } else {
            &["y"]
        };
        let input = Input::new(self.tokens(), &self.x);
        let (output, saved) = layer
            .forward_train(input.reading(names), RngKey::default())
            .expect("the layer runs");
        let (mut loss, dy) = self.loss(&output.y().to_f32());
        if let Some(value) = output.get("loss.gshard") {
            loss += self.spec.losses[0].coefficient * f64::from(value.to_f32()[0]);
        }
        (loss, saved, dy)
    }
}

/// How the losses of a run compare with the printed ones.
struct Tally {
    digits: i32,
    steps: usize,
    /// Losses that round to what was printed.
    equal: usize,
    /// The largest distance in units of the last digit, and its step.
    furthest: (f64, usize),
    /// Every loss, found and printed.
    told: String,
}

impl Tally {
    fn new(digits: i32) -> Tally {
        Tally {
            digits,
            steps: 0,
            equal: 0,
            furthest: (0.0, 0),
            told: String::new(),
        }
    }

    fn compare(&mut self, step: usize, loss: f64, printed: f64) {
        let units = (loss - printed).abs() * 10f64.powi(self.digits);
        self.steps += 1;
        self.told += &format!("\nstep {step}: {loss:.6}, {printed}");
        self.equal += usize::from(units <= 0.5 + 1e-6);
        // A NaN is the furthest of all, and stays.
        if self.furthest.0 < units || units.is_nan() {
            self.furthest = (units, step);
        }
    }

    /// The whole run is told before it is judged, by the rule of
    /// [`assert_printed`].
    fn finish(self, options: &str) {
        let (units, step) = self.furthest;
        let told = format!(
            "{options}: {} of {} losses in every digit; the furthest is {units:.2} units of the last, \
             at step {step}",
            self.equal, self.steps
        );
        eprintln!("{told}");
        assert!(units <= 1.5, "{told}{}", self.told);
    }
}

/// As many digits after the point as were printed; one unit of the last is let
/// through, since f32 sums of different order may round to either side.
pub fn assert_printed(loss: f64, printed: f64, digits: i32, options: &str, step: usize) {
    assert!(
        (loss - printed).abs() <= 1.5 * 10f64.powi(-digits),
        "{options}, step {step}: {loss}, Tutel printed {printed}"
    );
}
