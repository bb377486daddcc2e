//! Experts that are the caller's code, and experts behind several routers.

use super::Case;
use super::case::{floats, host};
use super::compare::{close, equal};
use super::layers::engine;
use super::simulated::{SIMULATORS, open};
use moesaic::reference::{self, Random};
use moesaic::spec::{LayerSpec, WeightSite, canonical_tensors};
use moesaic::{
    Counters, DType, Engine, ExpertBackward, HostTensor, Input, Training, UserExpert, UserLayer,
    Weights,
};
use std::sync::{Arc, Mutex};

/// `down · relu(up · x)` of any width, with the gradients of both.
struct Mlp {
    model: usize,
    hidden: usize,
    output: usize,
    up: Vec<f32>,
    down: Vec<f32>,
    /// Of up, then of down; seen from outside.
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
fn heterogeneous(toml: &str, tokens: usize) -> (Case, Vec<Box<dyn UserExpert>>, Seen) {
    let spec = LayerSpec::from_toml(toml).unwrap_or_else(|e| panic!("{e}"));
    let mut case = Case::random(&spec, tokens, 5);
    let (model, most, output) = (
        spec.shape.model_dim,
        spec.shape.hidden_dim,
        spec.output_dim(),
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
                match unused(i) {
                    true => *value = 0.0,
                    false => kept.push(*value as f32),
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
fn others(case: &Case) -> Weights<'static> {
    let mut weights = Weights::new();
    let tensors = canonical_tensors(&case.spec).into_iter();
    for tensor in tensors.filter(|tensor| !tensor.name.starts_with("experts.")) {
        let values = &case.weights.get(&tensor.name).data;
        weights.insert(&tensor.name, host(tensor.dtype, &tensor.shape, values));
    }
    weights
}

fn user_layer(
    engine: &Engine,
    case: &Case,
    experts: Vec<Box<dyn UserExpert>>,
    training: bool,
) -> UserLayer {
    let layer = engine.user_layer(&case.spec, &others(case), experts, training);
    layer.unwrap_or_else(|e| panic!("{e}"))
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
                .forward(&case.input(), &["y"])
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

/// Random gradients of y, as the engine and as the reference take them.
fn random_dy(case: &Case) -> (HostTensor<'static>, Vec<f64>) {
    let shape = [case.input.tokens, case.spec.output_dim()];
    let values = Random::new(8).vec(shape[0] * shape[1]);
    (host(DType::F32, &shape, &values), values)
}

fn external(extra: &str) -> String {
    format!(
        "shape = {{ model_dim = 9, hidden_dim = 6, experts = 5, top_k = 2 }}\n\
         experts = {{ form = \"plain\", activation = \"relu\" }}\n\
         [router]\nkind = \"external\"\n{extra}"
    )
}

#[test]
fn user_experts_run_backward() {
    let linear = external("").replace("external", "linear");
    for spec in [
        external(""),
        external("weight_on = \"input\"\n"),
        external("[capacity]\nmode = \"fixed\"\nrows = 6\n[[shared]]\nhidden_dim = 5\n"),
        linear.clone() + "renormalize = \"sum\"\n",
        linear
            + "score = \"sigmoid\"\nbias = true\n[[shared]]\nhidden_dim = 5\ngate = \"sigmoid\"\n",
    ] {
        check_backward(&engine(), &spec);
    }
}

#[test]
fn user_experts_and_gates_run_on_simulated_gpus() {
    for target in SIMULATORS {
        let engine = open(target);
        check_backward(&engine, &external(""));
        let linear = external("").replace("external", "linear");
        check_backward(&engine, &(linear + "renormalize = \"sum\"\n"));
        check_gates(&engine, &two_gates(&external("")));
    }
}

/// Experts that are code, on an engine: two rounds of gradients.
fn check_backward(engine: &Engine, spec: &str) {
    let (case, experts, seen) = heterogeneous(spec, 23);
    let mut layer = user_layer(engine, &case, experts, true);
    let (dy, values) = random_dy(&case);
    let expected = reference::backward(&case.spec, &case.weights, &case.input, &values);
    for round in 0..2 {
        let forward = layer.forward_train(&case.input(), &["y"], Counters::default());
        let (_, saved) = forward.unwrap_or_else(|e| panic!("{e}"));
        let back = layer
            .backward(&saved, &dy, round > 0)
            .unwrap_or_else(|e| panic!("{e}"));
        close("dx", &floats(&back, "dx"), &expected.x, 1e-5);
        let weights = floats(&back, "grad.topk_weights");
        close("grad.topk_weights", &weights, &expected.topk_weights, 1e-5);
    }
    for name in ["router.weight", "router.bias", "shared.0.router.weight"] {
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
            let (most, model) = (case.spec.shape.hidden_dim, case.spec.shape.model_dim);
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
    let error = engine().user_layer(&case.spec, &others(&case), experts, false);
    assert!(
        error
            .err()
            .is_some_and(|e| e.to_string().contains("4 experts were given"))
    );
    for change in [
        |spec: &mut LayerSpec| spec.router.weight_on = WeightSite::Activation,
        |spec: &mut LayerSpec| spec.experts.bias = true,
    ] {
        let (case, experts, _) = heterogeneous(&external(""), 1);
        let mut spec = case.spec.clone();
        change(&mut spec);
        assert!(
            engine()
                .user_layer(&spec, &others(&case), experts, false)
                .is_err()
        );
    }
}

/// The weights of a case whose names begin with `router.`, or the others.
fn weights_of(case: &Case, router: bool) -> Weights<'static> {
    let mut weights = Weights::new();
    for tensor in canonical_tensors(&case.spec) {
        if tensor.name.starts_with("router.") == router {
            let values = &case.weights.get(&tensor.name).data;
            weights.insert(&tensor.name, host(tensor.dtype, &tensor.shape, values));
        }
    }
    weights
}

#[test]
fn gates_share_experts() {
    let toml = "shape = { model_dim = 12, hidden_dim = 10, experts = 4, top_k = 4 }";
    let spec = LayerSpec::from_toml(toml).unwrap_or_else(|e| panic!("{e}"));
    let case = Case::random(&spec, 9, 1);
    let cases = [3, 4].map(|seed| {
        let mut other = Case::random(&spec, 9, seed);
        other.input = case.input.clone();
        for (name, tensor) in &case.weights.0 {
            if !name.starts_with("router.") {
                other.weights.0.insert(name.clone(), tensor.clone());
            }
        }
        other
    });
    let routers = [weights_of(&cases[0], true), weights_of(&cases[1], true)];
    let gates = engine().multi_gate(&spec, &weights_of(&case, false), &routers, None);
    let gates = gates.unwrap_or_else(|e| panic!("{e}"));
    let outputs = gates
        .forward(&case.input(), &["y"])
        .unwrap_or_else(|e| panic!("{e}"));
    for (case, output) in cases.iter().zip(&outputs) {
        let alone = case.layer(&engine()).forward(&case.input());
        let alone = alone.unwrap_or_else(|e| panic!("{e}"));
        equal("y", &output.y().data, &alone.y().data);
    }
    // A new weight of an expert is every gate's.
    let name = "experts.down.weight";
    let zeros = HostTensor::owned(&[4, 12, 10], vec![0.0f32; 480]);
    gates.layers()[0]
        .set_weight(name, &zeros)
        .unwrap_or_else(|e| panic!("{e}"));
    for output in gates
        .forward(&case.input(), &["y"])
        .unwrap_or_else(|e| panic!("{e}"))
    {
        assert!(output.y().to_f32().iter().all(|y| *y == 0.0));
    }
}

/// Two gates on one set of experts, and the same twice for the reference.
fn two_gates(toml: &str) -> [Case; 2] {
    let spec = LayerSpec::from_toml(toml).unwrap_or_else(|e| panic!("{e}"));
    let experts = reference::Weights::random(&spec, 1).rounded(&spec);
    [1, 2].map(|seed| {
        let mut case = Case::random(&spec, 17, seed);
        for (name, tensor) in &experts.0 {
            if !name.starts_with("router.") {
                case.weights.0.insert(name.clone(), tensor.clone());
            }
        }
        case
    })
}

#[test]
fn gradients_of_shared_experts_are_summed() {
    let mmoe = "shape = { model_dim = 9, hidden_dim = 6, experts = 3, top_k = 3 }\n\
                router.bias = true\n[[shared]]\nhidden_dim = 4\n";
    for toml in [external(""), mmoe.to_string()] {
        check_gates(&engine(), &two_gates(&toml));
    }
}

fn check_gates(engine: &Engine, cases: &[Case; 2]) {
    let spec = &cases[0].spec;
    let routers = cases.each_ref().map(|case| weights_of(case, true));
    let shared = weights_of(&cases[0], false);
    let gates = engine.multi_gate(spec, &shared, &routers, Some(Training::default()));
    let gates = gates.unwrap_or_else(|e| panic!("{e}"));
    let (dy, values) = random_dy(&cases[0]);
    let expected = cases
        .each_ref()
        .map(|case| reference::backward(spec, &case.weights, &case.input, &values));
    let dy = [dy.clone(), dy];
    // Overwritten, overwritten again, added to.
    for times in [1.0, 1.0, 2.0] {
        let saved = gates.layers().iter().zip(cases).map(|(layer, case)| {
            let input: Input = case.input();
            let forward = layer.forward_train(&input, &["y"], Counters::default());
            forward.unwrap_or_else(|e| panic!("{e}")).1
        });
        let saved: Vec<_> = saved.collect();
        let back = gates
            .backward(&saved, &dy, times == 2.0)
            .unwrap_or_else(|e| panic!("{e}"));
        for (back, expected) in back.iter().zip(&expected) {
            close("dx", &floats(back, "dx"), &expected.x, 1e-5);
        }
        for name in expected[0].weights.keys() {
            let parts = expected.each_ref().map(|e| &e.weights[name].data);
            for (layer, own) in gates.layers().iter().zip(parts) {
                let sum: Vec<f64> = match name.starts_with("router.") {
                    true => own.iter().map(|g| times * g).collect(),
                    false => {
                        let pairs = parts[0].iter().zip(parts[1]);
                        pairs.map(|(a, b)| times * (a + b)).collect()
                    }
                };
                let found = layer.gradient(name).unwrap_or_else(|e| panic!("{e}"));
                let found: Vec<f64> = found.to_f32().into_iter().map(f64::from).collect();
                close(name, &found, &sum, 1e-5);
            }
        }
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
        let mut weights = Weights::new();
        for tensor in canonical_tensors(&spec) {
            let values = &case.weights.get(&tensor.name).data;
            weights.insert(&tensor.name, host(tensor.dtype, &tensor.shape, values));
        }
        let layer = engine().training_layer(&spec, &weights, Training::default());
        let layer = layer.unwrap_or_else(|e| panic!("{e}"));
        let forward = layer.forward_train(&case.input(), &["y"], Counters::default());
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
