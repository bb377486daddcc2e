//! Experts that are the caller's code, as a whole or in part.

use super::Case;
use super::case::{floats, host, longs};
use super::compare::close;
use super::layers::engine;
use super::simulated::{SIMULATORS, open};
use super::trained::{RNG_KEY, draw};
use moesaic::experts::{ExpertBackward, UserExpert, UserLayer};
use moesaic::reference::{self, Random};
use moesaic::spec::{LayerSpec, WeightSite, canonical_tensors};
use moesaic::{DType, Engine, LayerOptions, RngKey, Tensor, Tensors, Training};
use std::sync::{Arc, Mutex};

/// `down · relu(up · x)` of any width, with the gradients of both.
struct Mlp {
    model: usize,
    hidden: usize,
    output: usize,
    up: Vec<f32>,
    down: Vec<f32>,
    /// Gradients of up, then of down; visible from outside.
    gradients: Arc<Mutex<[Vec<f32>; 2]>>,
}

impl UserExpert for Mlp {
    fn forward(&self, rows: &[f32], out: &mut [f32], mut saved: Option<&mut Vec<f32>>) {
        for (x, y) in rows.chunks(self.model).zip(out.chunks_mut(self.output)) {
            let pre: Vec<f32> = self.up.chunks(self.model).map(|w| dot(w, x)).collect();
            let hidden: Vec<f32> = pre.iter().map(|v| v.max(0.0)).collect();
            for (y, w) in y.iter_mut().zip(self.down.chunks(self.hidden)) {
                *y = dot(w, &hidden);
            }
            if let Some(saved) = saved.as_deref_mut() {
                saved.extend(pre);
            }
        }
    }

    fn backward(&mut self, call: &ExpertBackward<'_>, drows: &mut [f32]) {
        let [up, down] = &mut *self.gradients.lock().expect("one thread");
        if !call.accumulate {
            *up = vec![0.0; self.up.len()];
            *down = vec![0.0; self.down.len()];
        }
        let rows = call
            .rows
            .chunks(self.model)
            .zip(drows.chunks_mut(self.model));
        let gradients = call
            .saved
            .chunks(self.hidden)
            .zip(call.dout.chunks(self.output));
        for ((x, dx), (pre, dy)) in rows.zip(gradients) {
            for j in 0..self.hidden {
                let column = (0..self.output).map(|o| self.down[o * self.hidden + j] * dy[o]);
                let slope = f32::from(u8::from(pre[j] > 0.0)) * column.sum::<f32>();
                for i in 0..self.model {
                    up[j * self.model + i] += slope * x[i];
                    dx[i] += slope * self.up[j * self.model + i];
                }
                for o in 0..self.output {
                    down[o * self.hidden + j] += dy[o] * pre[j].max(0.0);
                }
            }
        }
    }
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

type Seen = Vec<Arc<Mutex<[Vec<f32>; 2]>>>;

/// A case whose expert `e` has `e % 3` hidden units fewer than the spec says,
/// which for the reference are zeros; the same experts as code.
pub fn heterogeneous(toml: &str, tokens: usize) -> (Case, Vec<Box<dyn UserExpert>>, Seen) {
    let spec = LayerSpec::from_toml(toml).unwrap_or_else(|e| panic!("{e}"));
    let mut case = Case::random(&spec, tokens, 5);
    let (model, most, output) = (
        spec.expert_input_dim(),
        spec.shape.hidden_dim,
        spec.expert_output_dim(),
    );
    let mut experts: Vec<Box<dyn UserExpert>> = Vec::new();
    let mut seen = Vec::new();
    for e in 0..spec.shape.experts {
        let hidden = most - e % 3;
        let tensor = |case: &mut Case, name: &str, unused: &dyn Fn(usize) -> bool| {
            let tensor = case.weights.0.get_mut(name).expect("a weight");
            let size = tensor.data.len() / tensor.shape[0];
            let own = &mut tensor.data[e * size..(e + 1) * size];
            let mut kept = Vec::new();
            for (i, value) in own.iter_mut().enumerate() {
                if unused(i) {
                    *value = 0.0
                } else {
                    kept.push(*value as f32)
                }
            }
            kept
        };
        let gradients = Arc::new(Mutex::new([Vec::new(), Vec::new()]));
        seen.push(Arc::clone(&gradients));
        experts.push(Box::new(Mlp {
            model,
            hidden,
            output,
            up: tensor(&mut case, "experts.up.weight", &|i| i / model >= hidden),
            down: tensor(&mut case, "experts.down.weight", &|i| i % most >= hidden),
            gradients,
        }));
    }
    (case, experts, seen)
}

/// Weights of everything but the experts.
pub fn others(case: &Case) -> Tensors<'static> {
    let mut weights = Tensors::new();
    let tensors = canonical_tensors(&case.spec).into_iter();
    for tensor in tensors.filter(|tensor| !tensor.name.starts_with("experts.")) {
        let values = &case.weights.get(&tensor.name).data;
        weights.insert(&tensor.name, host(tensor.dtype, &tensor.shape, values));
    }
    weights
}

pub fn user_layer(
    engine: &Engine,
    case: &Case,
    experts: Vec<Box<dyn UserExpert>>,
    training: bool,
) -> UserLayer {
    let options = LayerOptions::default().training(training.then(Training::default));
    let layer = engine.user_layer(&case.spec, &others(case), experts, options);
    layer.unwrap_or_else(|e| panic!("{e}"))
}

/// A layer around experts of yours passes over the weights of its spec's experts, and refuses those
/// that its spec lacks.
#[test]
fn weights_that_the_spec_lacks_are_refused() {
    let spec = "shape = { model_dim = 8, hidden_dim = 4, experts = 3, top_k = 1 }\n\
                experts = { form = \"plain\", activation = \"relu\" }\n";
    let made = |weights: &Tensors<'_>| {
        let (case, experts, _) = heterogeneous(spec, 1);
        engine().user_layer(&case.spec, weights, experts, LayerOptions::default())
    };
    let mut weights = heterogeneous(spec, 1).0.host_weights();
    assert!(made(&weights).is_ok());
    weights.insert("experts.up.bias", Tensor::zeros(DType::F32, &[3, 4]));
    let error = made(&weights).expect_err("a bias").to_string();
    assert!(
        error.starts_with("weight `experts.up.bias`: is no weight of the spec"),
        "{error}"
    );
}

#[test]
fn user_experts_run_in_every_routing() {
    let head = "shape = { model_dim = 19, hidden_dim = 11, experts = 6, top_k = 2, output_dim = 13 }\n\
                experts = { form = \"plain\", activation = \"relu\" }\n";
    for rest in [
        "",
        "router.renormalize = \"sum\"\ncapacity = { mode = \"factor\", factor = 0.5, renormalize_after_drop = true }",
        "router = { score = \"sigmoid\", weight_on = \"input\" }\n[[shared]]\nhidden_dim = 7\ngate = \"sigmoid\"",
        "precision = { weights = \"bf16\", activations = \"bf16\" }",
    ] {
        for tokens in [0, 1, 70] {
            let (case, experts, _) = heterogeneous(&format!("{head}{rest}"), tokens);
            let layer = user_layer(&engine(), &case, experts, false);
            let output = layer
                .forward(&case.input())
                .unwrap_or_else(|e| panic!("{e}"));
            let expected = reference::forward(&case.spec, &case.weights, &case.input).y;
            let bf16 = case.spec.precision.activations == DType::Bf16;
            close(
                rest,
                &floats(&output, "y"),
                &expected,
                if bf16 { 2e-2 } else { 1e-5 },
            );
        }
    }
}

/// Around experts that are code, too, training draws and evaluation does not.
#[test]
fn user_experts_evaluate_and_train() {
    let toml = "shape = { model_dim = 9, hidden_dim = 6, experts = 5, top_k = 2 }\n\
                experts = { form = \"plain\", activation = \"relu\" }\n\
                router = { noise = 4.0, jitter = 0.5 }\n\
                capacity = { mode = \"factor\", factor = 0.7, eval_factor = 1.1 }\n";
    let layer = |training| {
        let (case, experts, _) = heterogeneous(toml, 31);
        let layer = user_layer(&engine(), &case, experts, training);
        (case, layer)
    };
    let (mut case, trains) = layer(true);
    let names = ["y", "topk_ids", "counts", "locations", "capacity"];
    let found = trains.forward(case.input().reading(&names)).unwrap();
    let only_evaluates = layer(false)
        .1
        .forward(case.input().reading(&names))
        .unwrap();
    let expected = reference::forward(&case.spec, &case.weights, &case.input);
    close("y", &floats(&found, "y"), &expected.y, 1e-5);
    assert_eq!(found.into_tensors(), only_evaluates.into_tensors());
    case.input.draw = Some(draw(RNG_KEY));
    let trained = trains.forward_train(&case.input(), RNG_KEY);
    let expected = reference::forward(&case.spec, &case.weights, &case.input);
    close("y", &floats(&trained.unwrap().0, "y"), &expected.y, 1e-5);
    case.input.capacity_factor = Some(2.0);
    let roomy = trains.forward_train(case.input().reading(&["capacity"]), RNG_KEY);
    let expected = reference::forward(&case.spec, &case.weights, &case.input);
    assert_eq!(
        longs(&roomy.unwrap().0, "capacity"),
        [expected.capacity.unwrap()]
    );
}

/// Random gradients of y, as the engine and as the reference take them.
pub fn random_dy(case: &Case) -> (Tensor<'static>, Vec<f64>) {
    let shape = [case.input.tokens, case.spec.output_dim()];
    let values = Random::new(8).vec(shape[0] * shape[1]);
    (host(DType::F32, &shape, &values), values)
}

pub fn external(extra: &str) -> String {
    format!(
        "shape = {{ model_dim = 9, hidden_dim = 6, experts = 5, top_k = 2 }}\n\
         experts = {{ form = \"plain\", activation = \"relu\" }}\n\
         [router]\nkind = \"external\"\n{extra}"
    )
}

/// Each by itself, by its id, gives what the layer adds up.
#[test]
fn user_experts_are_there_by_id() {
    let (case, experts, _) = heterogeneous(&external(""), 12);
    let layer = user_layer(&engine(), &case, experts, false);
    let output = layer.forward(&case.input()).unwrap();
    let (ids, weights) = case.input.routing.as_ref().expect("routing is external");
    let (model, width) = (case.spec.shape.model_dim, case.spec.output_dim());
    let mut expected = vec![0.0; case.input.tokens * width];
    for (slot, (&id, weight)) in ids.iter().zip(weights).enumerate() {
        let token = slot / case.spec.shape.top_k;
        let Ok(id) = usize::try_from(id) else {
            continue; // nobody's
        };
        let row = &case.input.x[token * model..][..model];
        let row: Vec<f32> = row.iter().map(|v| *v as f32).collect();
        let mut out = vec![0.0; width];
        layer.experts()[id].forward(&row, &mut out, None);
        let sums = &mut expected[token * width..][..width];
        let terms = out.iter().map(|v| weight * f64::from(*v));
        sums.iter_mut()
            .zip(terms)
            .for_each(|(sum, term)| *sum += term);
    }
    close("y", &floats(&output, "y"), &expected, 1e-5);
}

#[test]
fn user_experts_run_backward() {
    let linear = external("").replace("external", "linear");
    for spec in [
        external(""),
        external("weight_on = \"input\"\n"),
        external("[capacity]\nmode = \"fixed\"\nrows = 6\n[[shared]]\nhidden_dim = 5\n"),
        linear.clone() + "renormalize = \"sum\"\n",
        linear.clone()
            + "[latent]\ndim = 7\nbias = true\n[[shared]]\nhidden_dim = 5\ngate = \"sigmoid\"\n",
        linear.replace("\"relu\" }", "\"relu\", output_norm_eps = 0.05 }")
            + "[latent]\ndim = 7\ninput_norm_eps = 0.1\n",
        linear
            + "score = \"sigmoid\"\nbias = true\n[[shared]]\nhidden_dim = 5\ngate = \"sigmoid\"\n",
    ] {
        check_backward(&engine(), &spec);
    }
}

#[test]
fn user_experts_run_on_simulated_gpus() {
    for target in SIMULATORS {
        let engine = open(target);
        check_backward(&engine, &external(""));
        let linear = external("").replace("external", "linear");
        check_backward(&engine, &(linear + "renormalize = \"sum\"\n"));
    }
}

/// Experts that are code, on an engine: two rounds of gradients.
fn check_backward(engine: &Engine, spec: &str) {
    let (case, experts, seen) = heterogeneous(spec, 23);
    let mut layer = user_layer(engine, &case, experts, true);
    let (dy, values) = random_dy(&case);
    let expected = reference::backward(&case.spec, &case.weights, &case.input, &values);
    for round in 0..2 {
        let forward = layer.forward_train(&case.input(), RngKey::default());
        let (_, saved) = forward.unwrap_or_else(|e| panic!("{e}"));
        let back = layer
            .backward(&saved, &dy, round > 0)
            .unwrap_or_else(|e| panic!("{e}"));
        close("dx", &floats(&back, "dx"), &expected.x, 1e-5);
        let weights = floats(&back, "grad.topk_weights");
        close("grad.topk_weights", &weights, &expected.topk_weights, 1e-5);
    }
    for name in [
        "router.weight",
        "router.bias",
        "shared.0.router.weight",
        "latent.down.weight",
        "latent.up.bias",
        "latent.input_norm.weight",
        "expert_norm.weight",
    ] {
        let Some(expected) = expected.weights.get(name) else {
            continue;
        };
        let twice: Vec<f64> = expected.data.iter().map(|g| 2.0 * g).collect();
        let found = layer.layer().gradient(name);
        let found = found.unwrap_or_else(|e| panic!("{e}")).to_f32();
        let found: Vec<f64> = found.into_iter().map(f64::from).collect();
        close(name, &found, &twice, 1e-5);
    }
    // Two rounds, the second added to the first.
    for (name, part) in [("experts.up.weight", 0), ("experts.down.weight", 1)] {
        let all = &expected.weights[name];
        for (e, gradients) in seen.iter().enumerate() {
            let found: Vec<f64> = gradients.lock().expect("one thread")[part]
                .iter()
                .map(|g| f64::from(*g))
                .collect();
            let hidden = case.spec.shape.hidden_dim - e % 3;
            let (most, model) = (case.spec.shape.hidden_dim, case.spec.expert_input_dim());
            let own = all.outer(e).iter().enumerate();
            let kept = own.filter(|(i, _)| match part {
                0 => i / model < hidden,
                _ => i % most < hidden,
            });
            let twice: Vec<f64> = kept.map(|(_, g)| 2.0 * g).collect();
            close(&format!("{name} of {e}"), &found, &twice, 1e-5);
        }
    }
}

#[test]
fn user_experts_that_do_not_fit_are_refused() {
    let (case, mut experts, _) = heterogeneous(&external(""), 1);
    experts.pop();
    let error = engine().user_layer(&case.spec, &others(&case), experts, LayerOptions::default());
    assert!(
        error
            .err()
            .is_some_and(|e| e.to_string().contains("4 experts were given"))
    );
    for change in [
        |spec: &mut LayerSpec| spec.router.weight_on = WeightSite::Activation,
        |spec: &mut LayerSpec| spec.experts.bias = true.into(),
    ] {
        let (case, experts, _) = heterogeneous(&external(""), 1);
        let mut spec = case.spec.clone();
        change(&mut spec);
        assert!(
            engine()
                .user_layer(&spec, &others(&case), experts, LayerOptions::default())
                .is_err()
        );
    }
}

#[test]
fn custom_activations_are_trained() {
    for (form, expr) in [
        ("gated", "x * sigmoid(1.7 * x)"),
        ("plain", "x * tanh(log(1 + exp(x)))"),
        (
            "gated",
            "where(x < 0, 0.1 * (exp(x) - 1), x) + 0.3 * erf(x)",
        ),
    ] {
        let toml = format!(
            "shape = {{ model_dim = 21, hidden_dim = 18, experts = 4, top_k = 2 }}\n\
             experts = {{ form = \"{form}\", bias = true, activation = {{ expr = \"{expr}\" }} }}\n\
             [[shared]]\nhidden_dim = 7\n"
        );
        let spec = LayerSpec::from_toml(&toml).unwrap_or_else(|e| panic!("{e}"));
        let case = Case::random(&spec, 31, 2);
        case.check(&engine());
        let mut weights = Tensors::new();
        for tensor in canonical_tensors(&spec) {
            let values = &case.weights.get(&tensor.name).data;
            weights.insert(&tensor.name, host(tensor.dtype, &tensor.shape, values));
        }
        let layer = engine().training_layer(&spec, &weights, Training::default());
        let layer = layer.unwrap_or_else(|e| panic!("{e}"));
        let forward = layer.forward_train(&case.input(), RngKey::default());
        let (_, saved) = forward.unwrap_or_else(|e| panic!("{e}"));
        let (dy, values) = random_dy(&case);
        let back = layer
            .backward(&saved, &dy, false)
            .unwrap_or_else(|e| panic!("{e}"));
        let expected = reference::backward(&spec, &case.weights, &case.input, &values);
        close(expr, &floats(&back, "dx"), &expected.x, 1e-5);
        for (name, expected) in &expected.weights {
            let found = layer.gradient(name).unwrap_or_else(|e| panic!("{e}"));
            let found: Vec<f64> = found.to_f32().into_iter().map(f64::from).collect();
            close(
                &format!("{name} under {expr}"),
                &found,
                &expected.data,
                1e-5,
            );
        }
    }
}
