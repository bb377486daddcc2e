//! A run that is saved and resumed has the bytes of one that is not.

use moesaic::half::bf16;
use moesaic::train::{self, AdamW, Optimizer, Sgd};
use moesaic::weights::{Checkpoint, write_safetensors};
use moesaic::{Engine, Init, Input, Layer, LayerSpec, RngKey, Tensor, Tensors, Training};

const TOKENS: usize = 33;
const WIDTH: usize = 24;
const SPEC: &str = "
    shape = { model_dim = 24, hidden_dim = 20, experts = 5, top_k = 2 }
    precision = { weights = 'bf16', activations = 'bf16' }
    router = { noise = 1.0 }
";

/// A layer, its masters and its optimizer.
struct Run<O> {
    layer: Layer,
    masters: Tensors<'static>,
    optimizer: O,
}

impl<O: Optimizer> Run<O> {
    fn new(engine: &Engine, seed: u64, optimizer: O) -> Run<O> {
        let spec = LayerSpec::from_toml(SPEC).unwrap();
        let weights = Init::Linear.weights(&spec, seed);
        let layer = engine.training_layer(&spec, &weights, Training::default());
        Run {
            layer: layer.unwrap(),
            masters: train::masters(&weights),
            optimizer,
        }
    }

    fn step(&mut self, step: u64) {
        let values = moesaic::reference::Random::new(step).vec(TOKENS * WIDTH);
        let x: Vec<bf16> = values.into_iter().map(bf16::from_f64).collect();
        let input = Input::new(TOKENS, &x);
        let rng_key = RngKey {
            seed: 7,
            step,
            ..RngKey::default()
        };
        let dy = Tensor::new(&[TOKENS, WIDTH], &x);
        let (_, saved) = self.layer.forward_train(&input, rng_key).unwrap();
        self.layer.backward(&saved, &dy, false).unwrap();
        train::update(&self.layer, &mut self.optimizer, &mut self.masters).unwrap();
    }

    fn state(&self) -> Tensors<'static> {
        let mut all = self.masters.clone();
        let state = self.optimizer.state();
        all.extend(
            state
                .into_iter()
                .map(|(name, tensor)| (name, tensor.into_static())),
        );
        all
    }
}

fn resumes<O: Optimizer>(optimizer: impl Fn() -> O) {
    let engine = Engine::cpu().expect("a C compiler");
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("step.safetensors");
    let mut whole = Run::new(&engine, 1, optimizer());
    (0..3).for_each(|step| whole.step(step));
    write_safetensors(&path, &whole.state()).unwrap();

    let mut resumed = Run::new(&engine, 2, optimizer());
    let file = Checkpoint::open(&path).unwrap();
    for (name, master) in &mut resumed.masters {
        *master = file.read(name).unwrap();
    }
    train::set_weights(&resumed.layer, &resumed.masters).unwrap();
    resumed.optimizer.restore(&file.tensors().unwrap()).unwrap();
    for step in 3..6 {
        whole.step(step);
        resumed.step(step);
    }
    assert_eq!(resumed.state(), whole.state());
}

#[test]
fn a_resumed_run_has_the_bytes_of_one_that_was_not_stopped() {
    resumes(|| AdamW::new(1e-2));
    resumes(|| Sgd::with_momentum(1e-2, 0.9));
}

#[test]
fn what_is_no_weight_of_the_layer_is_refused() {
    let engine = Engine::cpu().expect("a C compiler");
    let run = Run::new(&engine, 1, AdamW::new(1e-2));
    let stray = Tensors::new().with("experts.up", &[1], &[0.0f32]);
    let error = train::set_weights(&run.layer, &stray).unwrap_err();
    assert!(error.to_string().contains("experts.up"), "{error}");
}
